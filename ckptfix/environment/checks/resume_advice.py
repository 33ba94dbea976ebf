"""Reasons in a script's text for which a resumed run does not continue the run that was saved.

The causes and their first visible difference are those of ``ckptfix help exact-resume``; ``ckptfix
prove-resume`` runs the script and finds also what its text does not show.
"""

from collections.abc import Iterator

from ckptfix.diagnosis.findings.base import Severity
from ckptfix.environment.advice import Advice, Topic
from ckptfix.environment.facts import Facts
from ckptfix.environment.facts.script_resumes import Resuming

SCHEDULER = Topic(
    code="scheduler-not-prepared",
    severities=(Severity.WARNING,),
    meaning=(
        "a scheduler is never given to `prepare()`: no checkpoint has it, and a resumed run starts "
        "it again"
    ),
)
LOADER = Topic(
    code="loader-not-prepared",
    severities=(Severity.WARNING,),
    meaning=(
        "a loader that the script trains on is never given to `prepare()`: each process trains on "
        "all of its data"
    ),
)
REPEATED = Topic(
    code="batches-not-skipped",
    severities=(Severity.WARNING,),
    meaning=(
        "the script saves inside an epoch, and after a resume begins the epoch again: batches are "
        "used twice"
    ),
)
ORDER = Topic(
    code="epoch-not-set",
    severities=(Severity.WARNING,),
    meaning=(
        "the order of the data depends on the epoch, and the script never calls `set_epoch`: epoch "
        "0 comes again"
    ),
)
IN_CYCLE = Topic(
    code="save-inside-accumulation",
    severities=(Severity.WARNING,),
    meaning=(
        "`save_state` may run inside an accumulation cycle: the gradients gathered so far are not "
        "saved"
    ),
)
BY_MAIN = Topic(
    code="save-by-main-process",
    severities=(Severity.WARNING,),
    meaning=(
        "the Accelerator of ckptfix saves with all processes, and the script calls `save_state` in "
        "the main process alone: the save times out"
    ),
)
NEVER_LOADED = Topic(
    code="resume-never-loads",
    severities=(Severity.WARNING,),
    meaning=(
        "the script has an option to resume and calls `save_state`, but never `load_state`: it "
        "starts anew"
    ),
)
TOPICS = (SCHEDULER, LOADER, REPEATED, ORDER, IN_CYCLE, BY_MAIN, NEVER_LOADED)


def scheduler_not_prepared(facts: Facts) -> Iterator[Advice]:
    """``save_state`` writes the schedulers that were prepared or registered, and no other."""
    found = _resuming(facts)
    if found.saves and found.schedulers:
        yield SCHEDULER.advice(
            "a scheduler is stepped, but never prepared: save_state does not save it, so after a "
            "resume the learning rate starts again",
            evidence=_shown(found.schedulers, found.saves),
            fix=(
                "scheduler = accelerator.prepare(scheduler), or "
                "accelerator.register_for_checkpointing(scheduler)"
            ),
        )


def loader_not_prepared(facts: Facts) -> Iterator[Advice]:
    """``prepare`` divides the data of a loader among the processes, and only such a loader can skip
    batches.
    """
    found = _resuming(facts)
    if found.saves and found.loaders:
        yield LOADER.advice(
            "a loader that is trained on is never prepared: each process sees all of its data, and "
            "no checkpoint holds its position",
            evidence=_shown(found.loaders),
            fix="loader = accelerator.prepare(loader)",
        )


def batches_not_skipped(facts: Facts) -> Iterator[Advice]:
    """``load_state`` restores no position in an epoch: the script skips what was used, or uses it
    again.
    """
    found = _resuming(facts)
    if found.in_epoch and found.loads and not found.skips:
        yield REPEATED.advice(
            "save_state is called inside an epoch, and no line skips the batches that were used: "
            "after load_state the epoch begins with its first batch again",
            evidence=_shown(found.in_epoch, found.loads),
            fix=(
                "accelerator.skip_first_batches(loader, batches_done) for the first epoch after "
                "load_state"
            ),
        )


def epoch_not_set(facts: Facts) -> Iterator[Advice]:
    """accelerate counts epochs from 0 in every process: a resumed run gets the order of epoch 0
    again.
    """
    found = _resuming(facts)
    if (
        found.order
        and found.saves
        and found.loads
        and not found.sets_epoch
        and not facts.is_guarded
    ):
        yield ORDER.advice(
            "the order of the data depends on the epoch, and accelerate counts epochs from 0 after "
            "load_state: the run gets the order of epoch 0 again",
            evidence=_shown(found.order, found.loads),
            fix=(
                "loader.set_epoch(epoch) at the start of each epoch; or start it with: ckptfix run "
                "SCRIPT"
            ),
        )


def save_inside_accumulation(facts: Facts) -> Iterator[Advice]:
    """No checkpoint of accelerate holds gradients."""
    found = _resuming(facts)
    if found.in_cycle and not facts.is_guarded:
        yield IN_CYCLE.advice(
            "save_state may run inside an accumulation cycle: the gradients gathered so far are "
            "not saved, so the next optimizer step after a resume is another one",
            evidence=_shown(found.in_cycle),
            fix=(
                "save only when accelerator.sync_gradients is true; or start it with: ckptfix run "
                "SCRIPT"
            ),
        )


def save_by_main_process(facts: Facts) -> Iterator[Advice]:
    """The guard waits for all processes, so that a save is complete or absent. accelerate waits for
    none, without sharded weights.
    """
    found = _resuming(facts)
    if found.by_main and found.together:
        yield BY_MAIN.advice(
            "save_state is called in the main process alone, and the Accelerator of ckptfix waits "
            "for all processes: with several of them the save times out",
            evidence=_shown(found.together, found.by_main),
            fix=(
                "call save_state in every process; or Accelerator(save_together=False), which saves "
                "the random states of the main process alone"
            ),
        )


def resume_never_loads(facts: Facts) -> Iterator[Advice]:
    """A script that loads in any other way is not judged."""
    found = _resuming(facts)
    if found.options and found.saves and not (found.loads or found.loads_otherwise):
        yield NEVER_LOADED.advice(
            "the script has an option to resume, and no line loads a state: a resumed run starts "
            "anew",
            evidence=_shown(found.options, found.saves),
            fix="accelerator.load_state(folder) after prepare()",
        )


def _resuming(facts: Facts) -> Resuming:
    return facts.script.resuming if facts.script is not None else Resuming()


def _shown(*places: "tuple[object, ...]") -> tuple[str, ...]:
    return tuple(str(place) for found in places for place in found)


CHECKS = (
    scheduler_not_prepared,
    loader_not_prepared,
    batches_not_skipped,
    epoch_not_set,
    save_inside_accumulation,
    save_by_main_process,
    resume_never_loads,
)
