"""DCP folders: what a save left out, and names that do not belong together."""

from dataclasses import dataclass

from ckptfix.checkpoint.keys import dotted
from ckptfix.operations.findings.base import Action, Finding, Severity
from ckptfix.wording import count_of, list_names


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchedNames(Finding):
    """An optimizer whose names are neither its model's nor all alike: repaired by hand, or in part."""

    code = "mismatched-names"
    severity = Severity.ERROR
    action = Action.FIX
    meaning = (
        "an optimizer has other wrappers in its names than its model, or in one place only: renamed in part"
    )

    scope: str
    chain: tuple[str, ...]
    target: tuple[str, ...]
    reference: str
    expected: tuple[str, ...]
    names: int

    def __str__(self) -> str:
        have = f"begin with '{dotted(self.chain)}'" if self.chain else "have no wrapper"
        want = f"with '{dotted(self.expected)}'" if self.expected else "with none"
        return f"{self.path}: the names in {self.scope} {have}, those of {self.reference} {want}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedSave(Finding):
    """Data without the metadata that is written last, or a file that was never put in its place."""

    code = "interrupted-save"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "a save or a copy was cut short: a file still has its temporary name, or DCP's `.metadata`, written last, is "
        "missing"
    )

    files: int = 0
    unfinished: bool = False
    over_another: bool = False
    ranks: tuple[int, ...] = ()
    leftover: bool = False
    """A file with a temporary name, in a folder of any kind. The other fields are of DCP folders."""
    mixed: bool = False
    """Files of a guarded save have taken the place of old ones, and not all of them."""

    def __str__(self) -> str:
        if self.mixed:
            return f"{self.path}: the last save was interrupted while its files were put in place; others are older"
        if self.leftover:
            return f"{self.path} was left by a save or a copy that was cut short"
        data = count_of(self.files, ".distcp file")
        if self.over_another:
            return f"{self.path} is left over next to .metadata and {data}: a save over an older one was cut short"
        state = "was not put in its place (.metadata.tmp)" if self.unfinished else "is missing"
        ranks = f" of {count_of(len(self.ranks), 'rank')}" if self.ranks else ""
        gap = max(self.ranks, default=-1) + 1 - len(self.ranks)
        lost = f"; {count_of(gap, 'rank')} below the highest left none" if gap > 0 else ""
        return f"{self.path} {state}, next to {data}{ranks}{lost}: the save was interrupted"

    @property
    def advice(self) -> str:
        """Which chunk is where stands in the metadata alone."""
        if self.mixed:
            return "save here again, or load a complete checkpoint: ckptfix.latest_checkpoint(PROJECT) finds the newest"
        if self.leftover:
            return (
                "copy the complete checkpoint again, or use an older one; delete the file when all is there"
            )
        if self.over_another:
            return (
                "the files may be of two saves: use another checkpoint, or delete the .metadata.tmp when you know that "
                "this one is complete"
            )
        return "use an older checkpoint: without .metadata nothing says which chunk is where"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRank(Finding):
    """A rank of which no file is there."""

    code = "missing-rank"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "all files of a rank that `.metadata` names are missing: they lie on another node, or were not copied"
    )

    rank: int
    files: int
    items: int
    holds: tuple[str, ...]
    detail: str = ""
    """What says so where it is not ``.metadata``: in a DeepSpeed folder, the other ranks."""
    elsewhere: int = 0
    """How many tensors the rank holds nothing of."""

    @property
    def is_salvageable(self) -> bool:
        """With FSDP a rank holds a part of every tensor, and so it is with DeepSpeed."""
        return self.elsewhere > 0

    def __str__(self) -> str:
        if self.detail:
            return f"{self.path} is missing: {self.detail}"
        what = f"{count_of(self.files, 'file')} of rank {self.rank}"
        lost = f"{count_of(self.items, 'item')}: {list_names(self.holds)}"
        return f"{self.path}: nothing of rank {self.rank} is there; .metadata names {what}, with {lost}"

    @property
    def advice(self) -> str:
        """Each rank writes to its own node where the folder is not shared."""
        return "copy the files of that rank from the node that it ran on into this folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class IncompleteTensor(Finding):
    """A tensor that its chunks do not make up."""

    code = "incomplete-tensor"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = "the chunks that `.metadata` lists do not make up a tensor: a gap, an overlap, or one stored in no file"

    tensor: str
    detail: str

    @property
    def is_salvageable(self) -> bool:
        """The other tensors are whole."""
        return True

    def __str__(self) -> str:
        return f"{self.path}: {self.tensor!r}: {self.detail}"

    @property
    def advice(self) -> str:
        """What no chunk holds is nowhere."""
        return "loading leaves what was in memory there; use an older checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrayShard(Finding):
    """A file of data that the metadata does not name."""

    code = "stray-shard"
    severity = Severity.NOTE
    action = Action.TELL
    meaning = "a `.distcp` file that `.metadata` does not name: left by another save; loaders ignore it"

    def __str__(self) -> str:
        return f"{self.path} is named by no item of .metadata"

    @property
    def advice(self) -> str:
        """Which save is wanted only the user knows."""
        return "loaders ignore it; delete it if the save that .metadata is of is the one you want"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatParameters(Finding):
    """Names of FSDP's own flattened parameters."""

    code = "flat-parameters"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = "names hold `_flat_param`: FSDP's own flattened parameters, which only the same run's wrapping can load"

    tensors: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}: {count_of(len(self.tensors), 'name')} of FSDP's own: {list_names(self.tensors)}"

    @property
    def advice(self) -> str:
        """Which parameters a flat one holds is in no file."""
        return (
            "no name is changed: what a flat parameter holds is known to the run alone; load it with the same wrapping "
            "and number of processes, and save again with SHARDED_STATE_DICT"
        )
