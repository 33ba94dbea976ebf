"""Findings about files and names that a save, a copy or a salvage left out, also in DCP folders."""

from ckptfix.checkpoint.filenames import TRAINER_STATE, parse_file_name
from ckptfix.checkpoint.folder_names import parse_folder_name
from ckptfix.checkpoint.keys import dotted
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG
from ckptfix.checkpoint.roles import NOT_STATES, Role
from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.wording import count_of, first_few, list_names


class MissingFile(Finding, frozen=True, kw_only=True):
    """A file that its manifest lists, and that is missing or has another size. ``have``: its bytes,
    None if missing.
    """

    code = "missing-file"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "a file listed in the manifest is missing or has a different size, or an uploaded file is "
        "missing"
    )
    # The manifest holds none of its bytes.
    advice = "copy the file again from the checkpoint's source, or use an older checkpoint"

    saved: int
    have: int | None

    def __str__(self) -> str:
        there = "is missing" if self.have is None else f"has {count_of(self.have, 'byte')}"
        return f"{self.path} {there}; the save wrote {count_of(self.saved, 'byte')}"


_OF_A_RUN = {"optimizer", "scheduler", "rng"}
"""Beginnings of the Trainer's files that a checkpoint lacks whose states were deleted, or not
saved.
"""


def _is_weights(file_name: str) -> bool:
    parsed = parse_file_name(file_name)
    return parsed is not None and parsed.role in NOT_STATES


def is_required(name: str) -> bool:
    """Return whether a load fails without a file or folder of this name. Random states are left out."""
    parsed = parse_file_name(name) or parse_folder_name(name)
    return parsed is not None and parsed.role is not Role.RNG_STATE


class IncompleteCheckpoint(Finding, frozen=True, kw_only=True):
    """Missing states of a save, by its other files or by the checkpoints of the same run.

    ``known_by``: the evidence that they belong here. ``by_rank``: they may be on the disk of
    another node. ``of_trainer``: transformers' Trainer wrote the others. ``problem``: why a file
    that exists cannot be read. ``is_wrong``: the problem is what the file holds, and says what a
    load does. ``misnamed``: a file under another name that may be the missing one.
    ``may_be_dropped``: the script may no longer prepare these objects, as only earlier or only
    later checkpoints have them, and no other file here shows that it does.
    """

    code = "incomplete-checkpoint"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "other files of the run show that a file of a rank, optimizer, scheduler or model is "
        "missing or slightly misnamed; or `trainer_state.json` or a config cannot be read"
    )

    missing: tuple[str, ...]
    known_by: str
    by_rank: bool = False
    of_trainer: bool = False
    problem: str = ""
    is_wrong: bool = False
    misnamed: str = ""
    may_be_dropped: bool = False

    @property
    def resume(self) -> Resume:
        """It fails where ``load_state`` needs the files. It takes new random states, and the
        Trainer new states.
        """
        if self.may_be_dropped:
            return Resume.FAILS_IF_NEEDED
        if self.of_trainer or self.problem or self.severity is Severity.NOTE:
            return Resume.SUCCEEDS
        return Resume.FAILS if any(map(is_required, self.missing)) else Resume.SUCCEEDS

    def __str__(self) -> str:
        if self.problem:
            return f"{self.path}: {self.problem}"
        are = "is" if len(self.missing) == 1 else "are"
        return f"{first_few(self.missing)} {are} missing: {self.known_by}"

    @property
    def advice(self) -> str:
        """Advice to copy the files again, unless the setup of the run explains it."""
        if self.misnamed:
            wanted = self.missing[0]
            return (
                f"if {self.misnamed!r} is that file, rename it to {wanted}; otherwise copy "
                f"{wanted} again, or ignore this if the script does not load it"
            )
        if self.is_wrong:
            # The problem says what a load does with the value: it need not fail.
            return "copy it again, or resume from a complete checkpoint"
        if self.missing == (ADAPTER,) and not self.of_trainer:
            return (
                "PeftModel.from_pretrained fails without it; copy it again from the adapter's "
                "source"
            )
        if self.missing == (ADAPTER,):
            return (
                "the Trainer resumes without it, but PeftModel.from_pretrained fails; copy it "
                "again, or take it from another checkpoint of the run"
            )
        if self.missing == (CONFIG,):
            return (
                "from_pretrained fails without it; copy it again, or take it from another "
                "checkpoint of the run"
            )
        if self.by_rank:
            cost = (
                "continue with new random states"
                if self.of_trainer
                else "cannot restore their random states and accelerator.step"
            )
            return (
                f"those processes {cost}; copy the files again, or resume from a complete "
                "checkpoint; ignore this if each node saves to its own disk"
            )
        if self.of_trainer:
            kinds = {name.partition(".")[0].partition("_")[0] for name in self.missing}
            ignore = (
                "; ignore this if you keep the checkpoint only for its weights"
                if kinds == _OF_A_RUN
                else ""
            )
            return (
                f"{self._cost_for_trainer}; copy {self._them} again, or resume from a complete "
                f"checkpoint{ignore}"
            )
        states = [name for name in self.missing if name.startswith("random_states_")]
        if len(states) == len(self.missing):
            # accelerate catches the error and logs it (checkpointing.py:load_accelerator_state).
            fewer = ", or ignore this if the run now has fewer processes"
            again = f"again{'' if 'random_states_0.pkl' in self.missing else fewer}"
            return (
                "load_state restores neither random states nor accelerator.step, and only logs "
                f"that; copy {self._them} {again}"
            )
        needed = self._what
        if states:
            others = [name for name in self.missing if name not in states]
            needed = (
                f"{first_few(others)}, and without {first_few(states)} only logs that it restores neither "
                "random states nor accelerator.step"
            )
        return (
            f"load_state fails without {needed}; copy {self._them} again, or resume from a "
            "complete checkpoint; if the script has no such object, ignore this: load_state does "
            "not look for its file"
        )

    @property
    def _what(self) -> str:
        return "this file" if len(self.missing) == 1 else "these files"

    @property
    def _them(self) -> str:
        return "it" if len(self.missing) == 1 else "them"

    @property
    def _cost_for_trainer(self) -> str:
        """The cost of the missing files. The Trainer loads optimizer and scheduler together, or
        neither.
        """
        if any(map(_is_weights, self.missing)):
            return (
                f"the Trainer cannot resume without {self._them}, and no library can load the model"
            )
        others = [name for name in self.missing if name != TRAINER_STATE]
        states = [name for name in others if name.startswith("rng_state")]
        new = ["a new optimizer and learning rate"] if len(states) < len(others) else []
        replaced = " and ".join([*new, *["new random states"][: len(states)]])
        if not others:
            return "the Trainer cannot resume without it"
        if len(others) == len(self.missing):
            return f"the Trainer silently continues with {replaced}"
        rest = "the other file" if len(others) == 1 else "the other files"
        return (
            f"the Trainer cannot resume without {TRAINER_STATE}; without {rest}, it silently "
            f"continues with {replaced}"
        )


class NestedCheckpoint(IncompleteCheckpoint, frozen=True, kw_only=True):
    """A checkpoint that is one level too deep: in a folder of its own name, ``outer``, which holds
    nothing else.
    """

    advice = (
        "load_state, the Trainer and from_pretrained find nothing in the outer folder; load "
        "this one, or move its files up one level"
    )

    outer: str

    def __str__(self) -> str:
        return f"{self.outer} has no checkpoint files of its own, only this folder of the same name"


class UnreadFolder(IncompleteCheckpoint, frozen=True, kw_only=True):
    """A folder of a sharded state without the files of a save. ``inner``: the folder in it that has
    them, "" where it is empty.
    """

    # Torch and DeepSpeed look into the folder itself.
    resume = Resume.FAILS

    inner: str = ""

    def __str__(self) -> str:
        return f"{self.path} holds no save: {self.known_by}"

    @property
    def advice(self) -> str:
        """Advice to move the files, or to copy the folder."""
        again = "copy the folder again, or resume from a complete checkpoint"
        if self.inner:
            return f"the load fails; move the files of {self.inner} to {self.path}, or {again}"
        return f"the load fails; {again}"


class FewerRanks(IncompleteCheckpoint, frozen=True):
    """Random states that one neighbour has: a run that resumed with fewer processes has none, so no
    status changes.
    """

    severity = Severity.NOTE


class RandomStatesLeftOut(IncompleteCheckpoint, frozen=True):
    """Random states that ``migrate`` left out on purpose, as its receipt in the folder says."""

    severity = Severity.NOTE
    # No copy has random states for these processes.
    advice = (
        "nothing to do: the Trainer resumes with new random states, so dropout and other draws "
        "differ from a run that was not interrupted"
    )


class LostPosition(IncompleteCheckpoint, frozen=True):
    """States of dataloaders that the checkpoints next to it have. A run that no longer saves them
    is healthy.
    """

    severity = Severity.NOTE

    @property
    def advice(self) -> str:
        """Advice on the epoch: accelerate loads a state of a dataloader only if its file exists."""
        return (
            f"load_state succeeds without {self._what}, but the epoch starts over, so samples are "
            f"used twice; copy {self._them} again, or ignore this if the script no longer uses "
            "use_stateful_dataloader"
        )


class UnreadShards(IncompleteCheckpoint, frozen=True):
    """The one file of a model that is there in shards alone. A save hook of the script may have
    written them.
    """

    @property
    def advice(self) -> str:
        """Advice to copy the file, unless a hook reads the shards."""
        (wanted,) = self.missing
        return (
            "load_state fails unless a load hook of the script reads the shards; ignore this if "
            f"one does, otherwise copy {wanted} again, or resume from a complete checkpoint"
        )


class LostModelFiles(IncompleteCheckpoint, frozen=True):
    """Weights or configs of a model in a sub-folder, which the checkpoints next to it have: a hook
    saves them.
    """

    @property
    def resume(self) -> Resume:
        """It fails where the script surely saved them. ``from_pretrained`` in its load hook needs a
        config, too.
        """
        if self.may_be_dropped:
            return Resume.FAILS_IF_NEEDED
        return (
            Resume.SUCCEEDS if self.of_trainer or self.severity is Severity.NOTE else Resume.FAILS
        )

    @property
    def advice(self) -> str:
        """Advice to copy the files again."""
        ignore = (
            "; ignore this if the script no longer saves this model" if self.may_be_dropped else ""
        )
        return (
            f"a load hook that calls from_pretrained fails without {self._what}; copy {self._them} "
            f"again, or resume from a complete checkpoint{ignore}"
        )


class LostConfig(LostModelFiles, frozen=True):
    """A config next to weights under the name of diffusers, where no checkpoint shows whether the
    script writes it.
    """

    # Succeeds for a hook that writes the weights itself, and reads them without a config.
    resume = Resume.FAILS_IF_NEW

    @property
    def advice(self) -> str:
        """Advice to copy the config again, unless the hook reads none."""
        return (
            f"from_pretrained in a load hook fails without {self._what}; copy {self._them} again, "
            "or ignore this if the hooks of the script write and read the weights themselves"
        )


class ConfiglessModel(LostConfig, frozen=True):
    """The same where no checkpoint next to this one has a config: the script writes none."""

    severity = Severity.NOTE
    # As from every checkpoint of the run.
    resume = Resume.SUCCEEDS


class LaterModel(LostModelFiles, frozen=True):
    """A model that all later checkpoints have, and the oldest one lacks: an average may begin later
    in a run.
    """

    severity = Severity.NOTE

    @property
    def advice(self) -> str:
        """Advice to compare with the script."""
        return (
            "nothing to do if the script started to save this model later; otherwise copy "
            f"{self._what} again"
        )


class LostTag(IncompleteCheckpoint, frozen=True, kw_only=True):
    """DeepSpeed's file ``latest`` without the name of a checkpoint. ``tag``: the newest checkpoint
    in the folder.
    """

    tag: str

    @property
    def advice(self) -> str:
        """Advice to write the tag, as the states themselves are intact."""
        return (
            "unless a script names a tag, DeepSpeed, the Trainer and zero_to_fp32 find no "
            f"checkpoint; write the name of a checkpoint folder, such as {self.tag}, into the file"
        )


class UnreadTag(LostTag, frozen=True):
    """The same in a folder of ``save_state``: ``load_state`` gives DeepSpeed the tag, and never
    reads the file.
    """

    severity = Severity.NOTE

    @property
    def advice(self) -> str:
        """Advice to write the tag for exports, as a resume does without."""
        return (
            "load_state does not read this file, but zero_to_fp32 without a tag fails; write the "
            f"name of a checkpoint folder, such as {self.tag}, into the file"
        )


class MismatchedNames(Finding, frozen=True, kw_only=True):
    """An optimizer whose keys do not match its model's or one another: repaired by hand, or in
    part.
    """

    code = "mismatched-names"
    severity = Severity.ERROR
    action = Action.FIX
    meaning = (
        "the wrappers of an optimizer's keys differ from those of its model's keys, or among "
        "themselves: only some keys were renamed"
    )

    scope: str
    chain: tuple[str, ...]
    target: tuple[str, ...]
    reference: str
    expected: tuple[str, ...]
    names: int

    @property
    def resume(self) -> Resume:
        """It fails where the moments have other keys. Those in param groups are not looked up: torch
        2.13 matches the parameters of a group by position.
        """
        return Resume.SUCCEEDS if "param_groups" in self.scope else Resume.FAILS

    def __str__(self) -> str:
        have = f"begin with '{dotted(self.chain)}'" if self.chain else "have no wrapper"
        want = f"begin with '{dotted(self.expected)}'" if self.expected else "have no wrapper"
        return f"{self.path}: the keys in {self.scope} {have}, but those in {self.reference} {want}"


class UndecidedNames(MismatchedNames, frozen=True):
    """An optimizer whose keys agree with one another and not with its model's: the script may save
    and read both so.
    """

    code = "mismatched-names"
    severity = Severity.WARNING
    action = Action.ASK
    option = "--allow mismatched-names"

    @property
    def resume(self) -> Resume:
        """It fails, unless the script reads both as it writes them."""
        fails = super().resume is Resume.FAILS
        return Resume.FAILS_IF_NEW if fails else Resume.SUCCEEDS

    @property
    def advice(self) -> str:
        """Advice to keep the keys for the script that wrote them, and to rename after a rename by
        hand.
        """
        return (
            "nothing to do for a script that saves both this way, such as with ddp.state_dict() "
            "and get_optimizer_state_dict(): it would not find renamed keys\nif the model or the "
            f"optimizer was renamed by hand: ckptfix repair DIR {self.option}"
        )


class MissingRank(Finding, frozen=True, kw_only=True):
    """A rank without any file."""

    code = "missing-rank"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "files of a rank are missing, according to `.metadata` or to the parts that the other "
        "ranks saved; they are on another node, or were not copied"
    )

    rank: int
    files: int
    items: int
    holds: tuple[str, ...]
    detail: str = ""
    """The evidence where it is not ``.metadata``: the files of other ranks, as with DeepSpeed or
    FSDP without DCP.
    """
    elsewhere: int = 0
    """The number of tensors without a part in this rank."""
    ranks: int = 1
    """The number of ranks without a file, where one reason shows all of them; ``rank`` is the
    first.
    """

    @property
    def is_salvageable(self) -> bool:
        """False where the rank held a part of every tensor, as with FSDP and DeepSpeed."""
        return self.elsewhere > 0

    def __str__(self) -> str:
        if self.ranks > 1:
            more = count_of(self.files - 1, "more file")
            return (
                f"{self.path} and {more} of {count_of(self.ranks, 'rank')} are missing: "
                f"{self.detail}"
            )
        if self.detail:
            return f"{self.path} is missing: {self.detail}"
        lost = f"{count_of(self.items, 'item')}: {list_names(self.holds)}"
        return (
            f"{self.path}: every file of rank {self.rank} is missing; .metadata lists "
            f"{count_of(self.files, 'file')} with {lost}"
        )

    @property
    def advice(self) -> str:
        """Advice to copy the files from the rank's node: each rank writes to its own where the
        folder is not shared.
        """
        if self.ranks > 1:
            return "copy the files of these ranks from their nodes into this folder"
        return "copy the files of this rank from its node into this folder"


class IncompleteTensor(Finding, frozen=True, kw_only=True):
    """A tensor whose chunks do not add up to it."""

    code = "incomplete-tensor"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "the chunks in `.metadata`, or the parts that ranks saved, do not cover a tensor exactly: "
        "there is a gap, an overlap, or a chunk that no file stores"
    )
    # The other tensors are intact.
    is_salvageable = True

    tensor: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.tensor!r}: {self.detail}"

    @property
    def advice(self) -> str:
        """Advice to use an older checkpoint: the missing part is in no chunk."""
        if "overlap" in self.detail:
            return "a load may use either of the overlapping values; use an older checkpoint"
        return "a load leaves the old memory contents in the missing part; use an older checkpoint"


class FlatParameters(Finding, frozen=True, kw_only=True):
    """Keys of FSDP's own flattened parameters."""

    code = "flat-parameters"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "keys contain `_flat_param`: FSDP's flattened parameters, which load only with the same "
        "wrapping"
    )
    # No file lists the parameters in a flat one.
    advice = (
        "ckptfix cannot rename these keys: no file records which parameters a flat one "
        "contains. Load the checkpoint with the same wrapping and number of processes, and "
        "save it again with SHARDED_STATE_DICT"
    )

    tensors: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.path}: {count_of(len(self.tensors), 'key')} of flattened FSDP parameters: "
            f"{list_names(self.tensors)}"
        )
