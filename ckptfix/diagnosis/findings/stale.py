"""Findings that other checkpoints of a run show: tensors of an earlier save, or no mark of a
complete one.
"""

from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.diagnosis.findings.interrupted import InterruptedSave
from ckptfix.wording import series

_MOST_SHOWN = 2
"""Files named in a sentence after the first one."""


class StaleSave(Finding, frozen=True, kw_only=True):
    """A save with the bytes of an earlier one, though the run went on.

    ``save``: the earlier checkpoint. ``state``: what is equal, in words. ``counter``: what moved,
    "" for nothing, from ``begin`` to ``end``. ``rate``: the learning rate, None where it is not
    known. ``sampled``: the first bytes of each tensor were compared. ``is_undecided``: nothing shows
    which of the two checkpoints has the bytes of the other. ``between``: the checkpoint before this
    one, where ``save`` is further back; it has other values. ``more``: files of which the same is
    true as of the one at ``path``.
    """

    code = "stale-save"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "a checkpoint has the weights or the optimizer of another checkpoint, although the step "
        "count differs: the save wrote old bytes. The finding is a note if nothing else differs, "
        "as in a copy"
    )

    save: str
    state: str
    counter: str = ""
    begin: float = 0
    end: float = 0
    rate: float | None = None
    sampled: bool
    is_undecided: bool = False
    between: str = ""
    more: tuple[str, ...] = ()

    @property
    def doubted(self) -> str:
        """The earlier checkpoint, where nothing shows which of the two has the bytes of the other."""
        return self.save if self.is_undecided else ""

    def __str__(self) -> str:
        rate = f" at a learning rate of {self.rate:.3g}" if self.rate is not None else ""
        are, wanted = ("as in", "different") if self.is_undecided else ("of", "new")
        why = f"{self.counter} went from {self.begin:.15g} to {self.end:.15g}{rate}"
        if not self.counter:
            why = "the weights differ"
        return (
            f"{self._files}: {self.state} {are} {self.save} (expected {wanted} values: {why})"
            f"{self._compared}"
        )

    @property
    def _files(self) -> str:
        shown = self.more[:_MOST_SHOWN]
        hidden = len(self.more) - len(shown)
        return series((str(self.path), *shown, *((f"{hidden} more",) if hidden else ())))

    @property
    def advice(self) -> str:
        """Advice to find out what the script saves."""
        return f"{self._remedy}. If {self._excuse}, ignore this"

    @property
    def _excuse(self) -> str:
        if self.between:
            return f"the script itself restored the values of {self.save}"
        return "nothing was trained between the two saves"

    @property
    def _remedy(self) -> str:
        problem = "a resume would continue from the older values: resume"
        if self.is_undecided:
            problem = (
                "either this save wrote old bytes, or its bytes were copied into "
                f"{self.save}; the files do not show which. Resume"
            )
        if self.between:
            return f"{problem} from {self.between}"
        itself = "" if self.is_undecided else f", or from {self.save} itself"
        return (
            f"{problem} from a checkpoint before {self.save}{itself}, and check what the script "
            "saves (an asynchronous copy that was not awaited, another model object)"
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
        return f"if {self._excuse}, ignore this. Otherwise {self._remedy}"


class PerhapsRestored(DoubtfulSave, frozen=True):
    """The same where a script may have gone back to a model's best weights, or skipped all steps."""


class LaterState(StaleSave, frozen=True, kw_only=True):
    """A checkpoint with the optimizer of the one after it, ``save``, by the ``step`` in it: somebody
    copied the newer file over the older one.
    """

    step: float

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.state} of {self.save}, a later save: its step {self.step:.15g} "
            f"matches {self.counter} = {self.end:.15g} (expected {self.begin:.15g}){self._compared}"
        )

    @property
    def advice(self) -> str:
        """Advice to resume from the later one."""
        return (
            "a resume would combine older weights with a newer optimizer: resume from "
            f"{self.save}, or copy {self.path} again from the checkpoint's source"
        )


class OldShard(StaleSave, frozen=True):
    """Shards, or the model of a sub-folder, with the weights of an earlier checkpoint, next to new
    ones.
    """

    @property
    def advice(self) -> str:
        """Advice to get the files of this save."""
        instead = self.between or f"a checkpoint before {self.save}"
        return (
            f"this checkpoint or {self.save} mixes two saves: copy "
            f"{'these files' if self.more else self.path} of both again from their source, or resume "
            f"from {instead}. If the script restored or did not train these weights, ignore this"
        )


class DoubtfulShard(OldShard, frozen=True):
    """The same where the learning rate is not known, the weights have 16 bits, or no save shows
    that the model of a sub-folder changes.
    """

    severity = Severity.NOTE
    differs = True


class CopiedSave(StaleSave, frozen=True):
    """Two checkpoints with equal counters and tensors: one is a copy, or nothing was trained
    between the two saves.
    """

    severity = Severity.NOTE
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
