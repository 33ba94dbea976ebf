"""A folder as a whole: what of a save, a copy or a salvage is not in it."""

from dataclasses import dataclass
from pathlib import Path

from ckptfix.checkpoint.salvaged import Losses
from ckptfix.operations.findings.base import Action, Finding, Severity
from ckptfix.storage.paths import shell_path
from ckptfix.wording import count_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingFile(Finding):
    """A file that is not as the save left it, by the manifest of that save. Sizes in bytes; ``have``: None is gone."""

    code = "missing-file"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = "a file that the save wrote, by the manifest next to it, is missing or has another size"

    saved: int
    have: int | None

    def __str__(self) -> str:
        there = "is missing" if self.have is None else f"has {count_of(self.have, 'byte')}"
        return f"{self.path} {there}; the save wrote it with {count_of(self.saved, 'byte')}"

    @property
    def advice(self) -> str:
        """The manifest has its size and perhaps its digest, but no byte of it."""
        return "copy the file again from where the checkpoint came, or use an older checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class IncompleteCheckpoint(Finding):
    """States that a save leaves, and that are not there, by other files or by the checkpoints of the same run.

    ``known_by``: what shows that they belong here. ``by_rank``: they may lie on the disk of another node.
    """

    code = "incomplete-checkpoint"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "a file of a rank, optimizer, scheduler or model is missing, by other files or checkpoints of the run"
    )

    missing: tuple[str, ...]
    known_by: str
    by_rank: bool = False

    def __str__(self) -> str:
        are = "is" if len(self.missing) == 1 else "are"
        return f"{', '.join(self.missing[:3])}{self._more} {are} missing: {self.known_by}"

    @property
    def _more(self) -> str:
        return f" and {len(self.missing) - 3} more" if len(self.missing) > 3 else ""

    @property
    def advice(self) -> str:
        """Only the user knows how the run was set up."""
        if self.by_rank:
            return (
                "those processes cannot restore their random states and their step; copy the files again, or resume "
                "from a complete checkpoint; where each node saves to a disk of its own, all is well"
            )
        return (
            "load_state fails without them; copy them again, or resume from a complete checkpoint; where the script "
            "has no such object any more, all is well"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingModel(Finding):
    """States of an optimizer without weights of any model; or the config of a ``model`` without its weights."""

    code = "missing-model"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "an optimizer without weights of any model, in the folder or below it, or a model's config in a sub-folder "
        "without its weights: the copy or save was cut"
    )

    model: str = ""

    def __str__(self) -> str:
        if self.model:
            return f"{self.path.parent}/ has no weights: {self.path.name} is of {self.model}, which cannot be loaded"
        return f"{self.path} is there, and no weights of a model, in this folder or below it"

    @property
    def advice(self) -> str:
        """``save_state`` writes the model first; a copy may come to it last."""
        return "copy the complete checkpoint again; if the model is kept elsewhere on purpose, all is well"


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvaged(Finding):
    """A folder that ``ckptfix salvage`` wrote, with losses. ``damaged``: what was kept all the same."""

    code = "salvaged"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "`ckptfix salvage` wrote this folder, and `salvage.json` lists what is lost: "
        "it is not a complete checkpoint"
    )

    tensors: int
    files: int
    damaged: int

    def __str__(self) -> str:
        losses = Losses(self.tensors, self.files, self.damaged)
        return f"{self.path} says that this was salvaged: {losses}"

    @property
    def advice(self) -> str:
        """Only the user knows whether the rest is enough."""
        return (
            "do not resume from it as if it were complete: load its weights by themselves, or put back what is lost "
            "and delete salvage.json"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingFolder(Finding):
    """The staging folder of a guarded save. ``is_rest``: files of it are already in place in a mixed checkpoint.

    ``same_machine``: whether the process runs was asked; of another machine only the age of the last change is known.
    """

    code = "staging-folder"
    severity = Severity.NOTE
    action = Action.TELL
    meaning = (
        "the staging folder of a guarded save that is running, or was killed and left it: not a checkpoint"
    )

    is_running: bool
    pid: int
    host: str
    same_machine: bool
    is_rest: bool = False

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path.parts else ""
        if self.is_running and not self.same_machine:
            return (
                f"{where}staging folder of a save on another machine (pid {self.pid} on {self.host}) that changed less "
                f"than a day ago, so that save may be running"
            )
        if self.is_running:
            return f"{where}a save is running (pid {self.pid} on {self.host}); this is its staging folder"
        rest = "; files of that save are already in place, so the checkpoint holds files of two saves"
        return (
            f"{where}abandoned staging folder of a save that was killed (pid {self.pid} on {self.host})"
            f"{rest if self.is_rest else '; safe to delete'}"
        )

    @property
    def advice(self) -> str:
        """The next guarded save deletes what dead saves left; until then it only takes space."""
        if self.is_running:
            return "check the checkpoint when the save has ended"
        if self.is_rest:
            return "save again, or load a complete checkpoint: ckptfix.latest_checkpoint(PROJECT) finds the newest"
        return "the next save deletes it, or you do"

    def advice_at(self, path: str) -> str:
        """Return the advice with the command that deletes the folder."""
        if self.is_running or self.is_rest:
            return self.advice
        return f"{self.advice}: rm -r {shell_path(Path(path) / self.path)}"
