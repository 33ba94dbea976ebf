"""Known causes of a resumed run that diverges, each with its evidence and the line of a script that
ends it.

The table is read from the top: the first cause whose evidence is there explains a difference.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class Relation(Enum):
    """Relation of a batch of the resumed run to those of the uninterrupted run."""

    NONE = ""
    EARLIER = "used earlier"
    LATER = "used later"
    OTHER_RANK = "used by another rank"
    SAME_SAMPLES = "the same samples with other content"
    REORDERED = "samples of other batches"
    NEW = "never used"
    FEWER = "ended early"
    MORE = "went on"


@dataclass(frozen=True)
class Evidence:
    """Everything that is known about one difference.

    ``is_first``: it is in the first step after the resume. ``at_entry``: before its first batch.
    ``in_later_pass``: in a later pass through the data than the first of the resumed run.
    ``before``, ``after``: facts of the dataloader in the uninterrupted and the resumed run.
    ``saved``: facts of the save. ``files``: names in the checkpoint, None where it cannot be read.
    ``loaded_other``: another checkpoint was loaded than the one that was saved last.
    ``lost_buffers``: buffers that differ in the step, and that no checkpoint contains.
    ``is_swapped``: the values belong to other names. ``is_rank_0s``: the values of rank 0.
    """

    state: str
    rank: int = 0
    world: int = 1
    is_first: bool = True
    at_entry: bool = False
    in_later_pass: bool = False
    relation: Relation = Relation.NONE
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    saved: Mapping[str, Any] = field(default_factory=dict)
    files: frozenset[str] | None = None
    was_loaded: bool = True
    loaded_other: bool = False
    lost_buffers: tuple[str, ...] = ()
    is_swapped: bool = False
    is_rank_0s: bool = False

    @property
    def generator_file(self) -> str:
        """Return the name of the file with this rank's generators."""
        if self.saved.get("trainer"):
            return "rng_state.pth" if self.world == 1 else f"rng_state_{self.rank}.pth"
        return f"random_states_{self.rank}.pkl"

    def lacks(self, *names: str) -> bool:
        """Return whether the checkpoint has none of these files."""
        return self.files is not None and not self.files.intersection(names)


@dataclass(frozen=True)
class Cause:
    """A cause. ``words``: the reason; ``change``: the line to change, or what else to do.

    ``is_restored``: a run that ckptfix guards saves and restores this, so that the script can stay
    as it is. ``trainer_words``, ``trainer_change``: what a script with a Trainer is told instead,
    "" for the same; the Trainer makes the calls itself that the others name.
    ``is_left_to_trainer``: the guard of a Trainer does not restore it.
    """

    code: str
    applies: Callable[[Evidence], bool]
    words: str
    change: str
    is_restored: bool = False
    trainer_words: str = ""
    trainer_change: str = ""
    is_left_to_trainer: bool = False

    def of_trainer(self) -> "Cause":
        """Return the cause as a script with a Trainer is told of it."""
        return replace(
            self,
            words=self.trainer_words or self.words,
            change=self.trainer_change or self.change,
            is_restored=self.is_restored and not self.is_left_to_trainer,
        )


def _of_data(one: Evidence) -> bool:
    return one.state == "batch" and one.relation not in (Relation.FEWER, Relation.MORE)


def _has_other_content(one: Evidence) -> bool:
    follows_epoch = (
        one.before.get("seedable") and one.before.get("set_epoch") and one.after.get("set_epoch")
    )
    has_order = one.before.get("sampler") == "SequentialSampler" or follows_epoch
    fresh = one.relation is Relation.NEW and one.is_first and has_order
    return _of_data(one) and bool(one.relation is Relation.SAME_SAMPLES or fresh)


def _is_shuffled(one: Evidence) -> bool:
    return one.before.get("sampler") == "RandomSampler" and not one.before.get("seedable")


def _of_length(one: Evidence) -> bool:
    return one.state == "batch" and one.relation in (Relation.FEWER, Relation.MORE)


_RESTORED = ("weights", "moments", "learning rate", "scheduler", "scaler", "custom objects")

CAUSES: tuple[Cause, ...] = (
    Cause(
        "other-checkpoint",
        lambda one: one.loaded_other and one.is_first,
        "the resumed run loaded a different checkpoint than the one saved before the kill",
        "load the newest complete checkpoint: ckptfix.latest_checkpoint(folder)",
    ),
    Cause(
        "nothing-loaded",
        lambda one: not one.was_loaded and one.state in _RESTORED,
        "the resumed run did not call load_state, and the script's own loading does not "
        "restore this state",
        "call accelerator.load_state(folder) after prepare() and before the training loop",
        trainer_words=(
            "the resumed run loaded no checkpoint, and the script's own loading does not "
            "restore this state"
        ),
        trainer_change="trainer.train(resume_from_checkpoint=True)",
    ),
    Cause(
        "optimizer-not-prepared",
        lambda one: one.state == "moments" and bool(one.saved.get("unsaved_optimizers")),
        "the optimizer was not passed to prepare(), so save_state does not save it",
        "optimizer = accelerator.prepare(optimizer)",
        trainer_words=(
            "the script steps an optimizer other than the Trainer's, so no checkpoint contains it"
        ),
        trainer_change="Trainer(..., optimizers=(optimizer, scheduler))",
    ),
    Cause(
        "optimizer-file-missing",
        lambda one: (
            one.state in ("moments", "learning rate", "scheduler")
            and bool(one.saved.get("trainer"))
            and one.lacks("optimizer.pt", "optimizer.bin")
        ),
        "the checkpoint has no optimizer.pt; without it, Trainer silently loads neither "
        "optimizer nor scheduler",
        "set save_only_model=False in TrainingArguments, and resume from a complete checkpoint",
    ),
    Cause(
        "scheduler-file-missing",
        lambda one: (
            one.state in ("scheduler", "learning rate", "moments")
            and bool(one.saved.get("trainer"))
            and one.lacks("scheduler.pt")
        ),
        "the checkpoint has no scheduler.pt; without it, Trainer silently loads neither "
        "optimizer nor scheduler",
        "resume from a complete checkpoint",
    ),
    Cause(
        "scheduler-not-prepared",
        lambda one: (
            one.state in ("scheduler", "learning rate")
            and bool(one.saved.get("unsaved_schedulers"))
        ),
        "the scheduler was not passed to prepare(), so save_state does not save it",
        "scheduler = accelerator.prepare(scheduler), or "
        "accelerator.register_for_checkpointing(scheduler)",
        is_restored=True,
        trainer_words=(
            "the script uses a scheduler other than the Trainer's, so no checkpoint contains it"
        ),
        trainer_change="Trainer(..., optimizers=(optimizer, scheduler))",
        is_left_to_trainer=True,
    ),
    Cause(
        "scheduler-of-rank-0",
        lambda one: one.state in ("scheduler", "learning rate") and one.is_rank_0s,
        "the schedulers differ between ranks, but save_state saves only the main process's",
        "step the scheduler with a value that is the same on all ranks: "
        "accelerator.reduce(loss, 'mean')",
        is_restored=True,
        trainer_words=(
            "the schedulers differ between ranks, but the Trainer saves only the main process's"
        ),
        trainer_change=(
            "step the scheduler with a value that is the same on all ranks, such as "
            "metric_for_best_model"
        ),
        is_left_to_trainer=True,
    ),
    Cause(
        "model-not-prepared",
        lambda one: one.state == "unprepared models",
        "the script uses a model that was not passed to prepare(), so save_state does not save it",
        "accelerator.register_for_checkpointing(model)",
        trainer_words="the script uses a model other than the Trainer's, and no checkpoint has it",
        trainer_change="save and load the model in a callback of the Trainer",
    ),
    Cause(
        "transient-buffer",
        lambda one: one.state in ("loss", "buffers") and one.is_first and bool(one.lost_buffers),
        "training changes a buffer that was registered with persistent=False, so no checkpoint "
        "contains it",
        "register_buffer(name, tensor) without persistent=False",
    ),
    Cause(
        "parameter-order",
        lambda one: one.state == "moments" and one.is_swapped,
        "the optimizer received its parameters in a different order, and its moments are "
        "restored by position",
        "pass the parameters in a fixed order: list(model.parameters()), never a set",
        is_restored=True,
    ),
    Cause(
        "generator-file-missing",
        lambda one: (
            one.state in ("generators", "counters", "loss", "batch")
            and one.is_first
            and one.lacks(one.generator_file)
        ),
        "the checkpoint has no random states for this rank; accelerate and transformers "
        "continue without them",
        "call save_state on every process, not only on the main process",
        trainer_change="resume from a complete checkpoint",
    ),
    Cause(
        "cut-accumulation",
        lambda one: one.state == "gradients" and bool(one.saved.get("is_cut")),
        "the checkpoint was saved in the middle of gradient accumulation, and accumulated "
        "gradients are not saved",
        "save only when accelerator.sync_gradients is true",
        is_restored=True,
        trainer_change="let the Trainer save: save_strategy and save_steps in TrainingArguments",
        is_left_to_trainer=True,
    ),
    Cause(
        "gradients-left-over",
        lambda one: one.state == "gradients" and one.at_entry,
        "gradients were not zeroed before the save; the next step adds to them, but no "
        "checkpoint contains them",
        "call zero_grad() on every optimizer before the save, or before each backward",
    ),
    Cause(
        "scaler-stepped",
        lambda one: one.state == "scaler" and one.saved.get("distributed") == "FSDP",
        "torch steps the optimizer once while it sets FSDP's optimizer state, and that step "
        "updates the scaler",
        "load the scaler again after load_state: accelerator.scaler.load_state_dict(...)",
        trainer_change="set bf16=True in TrainingArguments, which needs no scaler",
    ),
    Cause(
        "custom-objects-of-rank-0",
        lambda one: one.state == "custom objects" and one.is_rank_0s,
        "save_state saves only the main process's custom objects, and every rank loads them",
        "gather the state of all ranks into one object before the save",
        is_restored=True,
        trainer_words="the Trainer does not save the custom objects of its accelerator",
        trainer_change=(
            "keep the state in a callback that has state(): ExportableState of transformers"
        ),
        is_left_to_trainer=True,
    ),
    Cause(
        "data-not-skipped-by-trainer",
        lambda one: _of_data(one) and bool(one.saved.get("skips_data")),
        "TrainingArguments(ignore_data_skip=True) restarts the epoch from its first batch",
        "ignore_data_skip=False",
    ),
    Cause(
        "loader-not-prepared",
        lambda one: _of_data(one) and not one.before.get("prepared", True),
        "the dataloader was not passed to prepare(), so neither its order nor its position "
        "is restored",
        "loader = accelerator.prepare(loader), and accelerator.skip_first_batches(loader, n) after "
        "a resume",
        trainer_words="the script's own dataloader is not prepared, so its order is not restored",
        trainer_change="return self.accelerator.prepare(loader) from get_train_dataloader()",
    ),
    Cause(
        "stateful-one-file",
        lambda one: (
            _of_data(one)
            and bool(one.before.get("stateful"))
            and bool(one.before.get("dispatched"))
            and one.world > 1
        ),
        "all ranks write their positions to the same file, dl_state_dict.bin, and the last "
        "writer wins",
        "DataLoaderConfiguration(dispatch_batches=False), or use_stateful_dataloader=False with "
        "skip_first_batches",
        is_restored=True,
    ),
    Cause(
        "stateful-repeats-epoch",
        lambda one: (
            _of_data(one)
            and bool(one.before.get("stateful"))
            and bool(one.saved.get("last_of_pass"))
        ),
        "the checkpoint was saved in the last iteration of an epoch, and the stateful "
        "dataloader then repeats that epoch",
        "save after the loop over the epoch",
        is_restored=True,
    ),
    Cause(
        "stateful-workers",
        lambda one: (
            _of_data(one)
            and bool(one.before.get("stateful"))
            and bool(one.before.get("workers"))
            and _is_shuffled(one)
        ),
        "the workers of a stateful dataloader draw the data order in prepare(), before "
        "load_state runs",
        "num_workers=0",
        is_restored=True,
    ),
    Cause(
        "stateful-order",
        lambda one: _of_data(one) and bool(one.before.get("stateful")) and _is_shuffled(one),
        "the stateful dataloader saved its position but not the order of the epoch",
        "DataLoaderConfiguration(use_seedable_sampler=True) and loader.set_epoch(epoch)",
        is_restored=True,
    ),
    Cause(
        "augmentation-in-workers",
        lambda one: _has_other_content(one) and bool(one.before.get("workers")),
        "random transforms in dataloader workers use seeds that no checkpoint contains",
        "seed the transform from the sample's index and the epoch",
        is_restored=True,
    ),
    Cause(
        "augmentation",
        lambda one: _has_other_content(one) and not one.before.get("iterable"),
        "accelerate fetches one batch ahead, so the random numbers for this batch's "
        "transform were drawn before the save",
        "seed the transform from the sample's index and the epoch",
        is_restored=True,
    ),
    Cause(
        "iterable-order",
        lambda one: (
            _of_data(one)
            and bool(one.before.get("iterable"))
            and not (
                one.is_first and one.relation is Relation.EARLIER and not one.after.get("skips")
            )
        ),
        "the order of an IterableDataset comes from generators that no checkpoint holds",
        "give the dataset a set_epoch(epoch) that seeds its own generator",
        is_restored=True,
    ),
    Cause(
        "not-skipped",
        lambda one: (
            _of_data(one)
            and one.is_first
            and one.relation is Relation.EARLIER
            and bool(one.saved.get("inside_pass"))
            and not one.after.get("skips")
            and not one.before.get("stateful")
        ),
        "the script does not skip the batches used before the save",
        "loader = accelerator.skip_first_batches(loader, n) for the first epoch after a resume",
        trainer_words="the resumed run does not skip the batches used before the save",
        trainer_change="trainer.train(resume_from_checkpoint=True) with ignore_data_skip=False",
    ),
    Cause(
        "dispatcher-skips-too-few",
        lambda one: (
            (_of_data(one) or _of_length(one))
            and bool(one.before.get("dispatched"))
            and bool(one.after.get("skips") or _of_length(one))
            and not one.before.get("iterable")
            and one.world > 1
            and not (_is_shuffled(one) and one.relation in (Relation.NEW, Relation.REORDERED))
        ),
        "skip_first_batches counts single batches, but a DataLoaderDispatcher uses one batch "
        "per process",
        "accelerator.skip_first_batches(loader, n * accelerator.num_processes), or "
        "dispatch_batches=False",
        is_restored=True,
        trainer_words=(
            "the Trainer counts single batches when it skips, but a DataLoaderDispatcher "
            "uses one batch per process"
        ),
        trainer_change="accelerator_config={'dispatch_batches': False} in TrainingArguments",
    ),
    Cause(
        "epoch-forgotten-by-skip",
        lambda one: (
            _of_data(one)
            and bool(one.before.get("seedable"))
            and not one.after.get("set_epoch")
            and one.in_later_pass
        ),
        "skip_first_batches returned a new loader, which counted the epoch; the script's own "
        "loader did not",
        "loader.set_epoch(epoch) before the loop over each epoch",
        is_restored=True,
        trainer_words=(
            "the loader that skips batches counted the epoch, but the Trainer's own loader did not"
        ),
        trainer_change=(
            "give the loader from get_train_dataloader() a set_epoch(epoch) method; the "
            "Trainer calls it"
        ),
    ),
    Cause(
        "epoch-not-set",
        lambda one: (
            _of_data(one) and bool(one.before.get("seedable")) and not one.after.get("set_epoch")
        ),
        "a SeedableRandomSampler derives the order from the epoch number, which is not saved",
        "loader.set_epoch(epoch) before the loop over each epoch",
        is_restored=True,
        trainer_change=(
            "give the loader from get_train_dataloader() a set_epoch(epoch) method; the "
            "Trainer calls it"
        ),
    ),
    Cause(
        "order-not-saved",
        lambda one: _of_data(one) and _is_shuffled(one),
        "the order of the epoch comes from a random generator that is not saved",
        "DataLoaderConfiguration(use_seedable_sampler=True) and loader.set_epoch(epoch)",
        is_restored=True,
        trainer_change="accelerator_config={'use_seedable_sampler': True} in TrainingArguments",
    ),
    Cause(
        "other-number-skipped",
        lambda one: _of_data(one) and one.relation in (Relation.EARLIER, Relation.LATER),
        "the resumed run continues at a different position in the data",
        "skip exactly the batches of the epoch that were used before the save (count "
        "batches, not optimizer steps)",
        trainer_change=(
            "resume with the same batch size, gradient_accumulation_steps and number of processes"
        ),
    ),
    Cause(
        "other-length",
        _of_length,
        "the resumed run counts its epochs or steps differently from the uninterrupted run",
        "restore the epoch and step numbers, and skip batches only in the first epoch",
        trainer_change="resume with the same max_steps or num_train_epochs",
    ),
    Cause(
        "generators-restored-too-early",
        lambda one: (
            one.state == "generators" and one.was_loaded and bool(one.saved.get("inside_pass"))
        ),
        "load_state restores the random states, and then the new dataloader iterator draws "
        "from them",
        # A loss without dropout does not depend on these states.
        "save between epochs; if losses still differ then, the script has a random generator of "
        "its own, or leaves the model in eval mode",
        is_restored=True,
        trainer_words=(
            "the Trainer restores the random states only after it has fetched batches, for "
            "which the dataset drew random numbers"
        ),
        trainer_change=(
            "let the dataset draw from a generator seeded with the sample's index and the epoch"
        ),
    ),
    Cause(
        "generators-not-loaded",
        lambda one: one.state == "generators" and not one.was_loaded,
        "the resumed run did not call load_state, and nothing else restores the random states",
        "accelerator.load_state(folder)",
        trainer_words=(
            "the resumed run loaded no checkpoint, and the Trainer restores random states "
            "only from a checkpoint"
        ),
        trainer_change="trainer.train(resume_from_checkpoint=True)",
    ),
    Cause(
        "generators-drawn-from",
        lambda one: one.state == "generators",
        "only one of the runs draws random numbers or sets a seed between the save (or "
        "load_state) and the next batch",
        "evaluate before the save, not after it; seed before load_state, and draw no random "
        "numbers after it",
        trainer_words=(
            "only one of the runs draws random numbers or sets a seed between the save and "
            "the next batch"
        ),
        trainer_change=(
            "do not draw random numbers or set a seed in a callback between the save and the next "
            "step"
        ),
    ),
    Cause(
        "state-in-no-checkpoint",
        lambda one: one.state == "loss" and one.is_first and one.was_loaded,
        "the loss depends on a state that no checkpoint contains, such as the script's own random "
        "generator, or the training mode of the model",
        "accelerator.register_for_checkpointing(generator) with a state_dict, and model.train() "
        "after a resume",
        trainer_change="save and load that state in a callback of the Trainer",
    ),
)
"""Every known cause, the most specific ones first."""


def cause_of(evidence: Evidence) -> Cause | None:
    """Return the first cause whose evidence is there, in the words for this kind of script; None if
    none is known.
    """
    found = next((one for one in CAUSES if one.applies(evidence)), None)
    return found.of_trainer() if found is not None and evidence.saved.get("trainer") else found
