"""Findings that other checkpoints of a run show: tensors of an earlier save, or no mark of a
complete one.
"""

from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.diagnosis.findings.interrupted import InterruptedSave
from ckptfix.wording import series

_MOST_SHOWN = 2
"""Files named in a sentence after the first one."""

_EXCUSE = "the script left these values unchanged or restored them"


class StaleSave(Finding, frozen=True, kw_only=True):
    """A save with the bytes of the one before it, or of its files, though the run went on.

    ``save``: the earlier checkpoint. ``state``: what is equal, in words. ``counter``: what moved,
    "" for nothing, from ``begin`` to ``end``. ``rate``: the learning rate, None where it is not
    known. ``sampled``: the first bytes of each tensor were compared. ``more``: files of which the
    same is true as of the one at ``path``.
    """

    code = "stale-save"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "a checkpoint has the weights or the optimizer of another checkpoint, although the step "
        "count differs: the save wrote old bytes. The finding is a note if the step count does not "
        "differ either, as in a copy"
    )

    save: str
    state: str
    counter: str = ""
    begin: float = 0
    end: float = 0
    rate: float | None = None
    sampled: bool
    more: tuple[str, ...] = ()

    @property
    def doubted(self) -> str:
        """The earlier checkpoint: nothing shows which of the two has the bytes of the other."""
        return self.save

    def __str__(self) -> str:
        shown = self.more[:_MOST_SHOWN]
        hidden = len(self.more) - len(shown)
        files = series((str(self.path), *shown, *((f"{hidden} more",) if hidden else ())))
        rate = f" at a learning rate of {self.rate:.3g}" if self.rate is not None else ""
        why = f"{self.counter} went from {self.begin:.15g} to {self.end:.15g}{rate}"
        if not self.counter:
            why = "the weights differ"
        return (
            f"{files}: {self.state} as in {self.save} (expected different values: {why})"
            f"{self._compared}"
        )

    @property
    def advice(self) -> str:
        """Advice to find out what the script saves."""
        return f"{self._remedy}. If {_EXCUSE}, ignore this"

    @property
    def _remedy(self) -> str:
        files = "these files" if self.more else self.path
        return (
            f"either this save wrote old bytes, or files were copied between it and {self.save}; the "
            f"files do not show which. Resume from a checkpoint before {self.save}, or copy {files} "
            "of both again from their source. Check what the script saves (an asynchronous copy that "
            "was not awaited, another model object)"
        )

    @property
    def _compared(self) -> str:
        equal = "the first bytes of each tensor are" if self.sampled else "every byte is"
        return f"; {equal} equal"


class DoubtfulSave(StaleSave, frozen=True):
    """The same where no value need change, or where the learning rate is not known.

    A rate may be too low. Weights of 16 bits may stay at any usual one.
    """

    severity = Severity.NOTE
    differs = True

    @property
    def advice(self) -> str:
        """Advice to ignore what the script did itself."""
        return f"if {_EXCUSE}, ignore this. Otherwise {self._remedy}"


class CopiedSave(StaleSave, frozen=True):
    """Two checkpoints with equal counters and tensors: one is a copy, or nothing was trained
    between the two saves.
    """

    severity = Severity.NOTE
    doubted = ""
    advice = "nothing was trained between the two: one of them is enough"

    def __str__(self) -> str:
        return (
            f"{self.path}: copy of {self.save} (equal {self.state}, and no counter "
            f"moved){self._compared}"
        )


class UnmarkedSave(InterruptedSave, frozen=True, kw_only=True):
    """A save without the file that its library writes last. ``known_by``: a checkpoint of the run
    that has it.
    """

    known_by: str

    @property
    def resume(self) -> Resume:
        """It fails for a warning: the library passes over the checkpoint."""
        return Resume.FAILS if self.severity is Severity.WARNING else Resume.SUCCEEDS

    def __str__(self) -> str:
        return (
            f"{self.path} is missing (found in {self.known_by}): it is written last, so the save "
            "was interrupted"
        )

    @property
    def advice(self) -> str:
        """Advice to resume from another checkpoint."""
        return (
            "the library skips this checkpoint, or loads only part of it: resume from "
            f"{self.known_by}. If a copy left the file out, copy it again"
        )


class PerhapsUnmarked(UnmarkedSave, frozen=True):
    """The same where the library may write the file since a later checkpoint alone, or the run has
    fewer ranks.
    """

    severity = Severity.NOTE
    advice = (
        "ignore this if only a later version of the library writes this file, or if the run "
        "had fewer ranks"
    )

    def __str__(self) -> str:
        return f"{self.path} is missing (found in {self.known_by}): it is written last"
