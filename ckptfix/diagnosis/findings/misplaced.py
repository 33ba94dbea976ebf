"""Findings about files that hold another state than their names promise, or that are of another
save than the rest.
"""

from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import TRAINER_STATE
from ckptfix.checkpoint.state_contents import Content
from ckptfix.diagnosis.findings.base import Action, Finding, Resume, Severity
from ckptfix.wording import count_of

EFFECTS_ON_LIBRARIES = {
    Content.OPTIMIZER: "the load fails",
    Content.SCHEDULER: "the load fails, or the scheduler starts over without an error",
    Content.GRAD_SCALER: "the load fails in an fp16 run",
    Content.RANDOM_STATES: "load_state does not restore the random states, and reports no error",
    Content.TRAINER_RANDOM_STATES: "the Trainer's resume fails",
    Content.SAMPLER: "the data loader cannot use it",
    Content.DATALOADER: "the data loader cannot use it",
    Content.MODEL: (
        "from_pretrained and the Trainer fail, or leave the weights random without an error"
    ),
}
"""Consequences of a wrong content for a load, by the content that the name of the file promises."""

EFFECTS_ON_TORCH = EFFECTS_ON_LIBRARIES | {
    Content.OPTIMIZER: "torch's optimizers cannot load it",
    Content.SCHEDULER: "torch's schedulers cannot continue from it",
}
"""Consequences of an unknown content, which a class of the script may read."""


class WrongState(Finding, frozen=True, kw_only=True):
    """A state file with another kind of state than its name promises.

    ``holds``, ``expected``: both kinds, in words. ``effect``: what a load does with it.
    ``exchanged_with``: the file that holds what belongs here, "" where none does. ``remedy``: how
    to save the right content, "" where only another file helps.
    """

    code = "wrong-state"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "the contents of a file do not match its name, such as a scheduler's state in "
        "`optimizer.bin`, two swapped models, or weights without values"
    )

    holds: str
    expected: str
    effect: str
    exchanged_with: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return _of_state(str(self.path), self.holds, self.expected, self.exchanged_with)

    @property
    def advice(self) -> str:
        """Advice to give both files their names back, or to bring the right file."""
        return f"{self.effect}: {self.remedy or _right_file(self.path, self.exchanged_with)}"


class MisplacedEntry(WrongState, frozen=True):
    """A model or another object that checkpoints next to this one have under another number, or not
    at all.
    """

    severity = Severity.WARNING

    @property
    def resume(self) -> Resume:
        """It fails for a warning, in the script that saved the checkpoints next to it."""
        return Resume.FAILS if self.severity is Severity.WARNING else Resume.SUCCEEDS

    @property
    def advice(self) -> str:
        """Advice as for ``WrongState``, and what a change of the script makes of it."""
        change = (
            "now prepares its objects in a different order"
            if self.exchanged_with
            else "now prepares different objects"
        )
        remedy = self.remedy or _right_file(self.path, self.exchanged_with)
        return f"{self.effect}: {remedy}. If the script {change}, ignore this"


class ChangedEntry(MisplacedEntry, frozen=True):
    """An entry that differs from those in checkpoints next to this one: the script may have changed
    it.
    """

    severity = Severity.NOTE
    differs = True

    @property
    def advice(self) -> str:
        """Advice as for ``MisplacedEntry``: only the script before the change surely fails."""
        return f"with the script that saved its neighbours, {super().advice}"


class UndecidedEntry(ChangedEntry, frozen=True, kw_only=True):
    """An entry of the later one of two checkpoints that differ: no third one shows which of them is
    wrong. ``script``: the earlier one.
    """

    script: str

    @classmethod
    def of(cls, path: PurePosixPath, holds: str, expected: str, script: str) -> "UndecidedEntry":
        """Return the finding about the file at ``path``, in words."""
        return cls(
            path=path,
            holds=holds,
            expected=f"{expected}, as in {script}",
            effect="nothing shows which of the two files is right",
            script=script,
        )

    @property
    def advice(self) -> str:
        """Advice to take the checkpoint that the run is known to have continued from."""
        return (
            f"{self.effect}. If the script did not change after {self.script}, resume from "
            f"{self.script}, or copy both files again from their source. Otherwise ignore this"
        )


class CopiedRandomStates(MisplacedEntry, frozen=True):
    """The random states of another rank, which a script that goes on with more ranks may have
    copied.
    """

    severity = Severity.NOTE

    @property
    def advice(self) -> str:
        """Advice to bring the states of this rank."""
        return (
            f"{self.effect}: copy the file again from its source. If the run has more processes "
            "now than before, ignore this"
        )


class RenamedState(MisplacedEntry, frozen=True):
    """A state that was saved under the name of another file of its kind, which is still there."""

    @property
    def advice(self) -> str:
        """Advice as for ``WrongState``, unless somebody renamed the file on purpose."""
        remedy = _right_file(self.path, self.exchanged_with)
        return (
            f"{self.effect}: {remedy}. If the file was renamed on purpose, to fit a changed "
            "script, ignore this"
        )


class RoundedEntry(MisplacedEntry, frozen=True):
    """A model in a lower precision than in the checkpoints before and after: somebody converted the
    file.
    """

    # The load succeeds, with rounded values.
    resume = Resume.SUCCEEDS

    @property
    def advice(self) -> str:
        """Advice to bring the file back: the digits are lost."""
        return (
            f"{self.effect}: the file seems to have been converted. Copy it again from its "
            "source, or resume from another checkpoint. If the run used this precision for a "
            "single save, ignore this"
        )


class LowerPrecision(RoundedEntry, frozen=True):
    """A model in a lower precision at an end of the run: the script may have changed it."""

    severity = Severity.NOTE
    differs = True

    @property
    def advice(self) -> str:
        """Advice to compare with the script."""
        return (
            f"{self.effect}: copy the file again from its source. If the run uses this "
            "precision now, ignore this"
        )


class UnknownState(Finding, frozen=True, kw_only=True):
    """A state file that no class of torch or accelerate loads, and a class of a script's own might.

    ``key``: the keys that lead to the state in a file that holds more. The other fields are those
    of ``WrongState``.
    """

    code = "unknown-state"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = (
        "no class of torch, accelerate or the Trainer can load the contents of a file, such as "
        "an `optimizer.bin` without `param_groups`, or a state dict inside another dict"
    )

    holds: str
    expected: str
    effect: str
    exchanged_with: str = ""
    remedy: str = ""
    key: str = ""

    def __str__(self) -> str:
        place = f"{self.path}: {self.key}" if self.key else str(self.path)
        return _of_state(place, self.holds, self.expected, self.exchanged_with)

    @property
    def advice(self) -> str:
        """Advice as for ``WrongState``, and what a custom class makes of it."""
        ignore = "" if self.exchanged_with else ". If a class of your own reads it, ignore this"
        return (
            f"{self.effect}: {self.remedy or _right_file(self.path, self.exchanged_with)}{ignore}"
        )


class StatesWithoutStep(UnknownState, frozen=True):
    """Random states without the step of the Accelerator, as accelerate 0.20 saved them."""

    severity = Severity.NOTE

    @property
    def advice(self) -> str:
        """Advice for the runs in which the step decides something."""
        return f"{self.effect}; runs without gradient accumulation do not need the step"


class EmptyExport(UnknownState, frozen=True):
    """Weights without a tensor next to the folder of DeepSpeed that holds them."""

    severity = Severity.NOTE

    @property
    def advice(self) -> str:
        """Advice to export the weights, if anything but DeepSpeed is to load them."""
        return f"{self.effect}: {self.remedy}"


def _of_state(place: str, holds: str, expected: str, exchanged_with: str) -> str:
    partner = f"; swapped with {exchanged_with}" if exchanged_with else ""
    return f"{place}: it holds {holds} (expected {expected}){partner}"


def _right_file(path: PurePosixPath, exchanged_with: str) -> str:
    if exchanged_with:
        return f"swap the names of {path} and {exchanged_with}, using a temporary third name"
    return "copy the file again from its source, or use an older checkpoint"


class MixedSaves(Finding, frozen=True, kw_only=True):
    """Two files with different progress: they may be of two saves.

    ``partner``: the other file. ``save``: the checkpoint next to this one that has the progress of
    the file, "" where none does.
    """

    code = "mixed-saves"
    severity = Severity.NOTE
    action = Action.TELL
    meaning = (
        "an optimizer and its scheduler have different learning rates, or the Trainer's scheduler "
        "has the step count of another checkpoint: the folder may mix two saves"
    )

    save: str = ""
    partner: str


class MixedRates(MixedSaves, frozen=True, kw_only=True):
    """An optimizer and its scheduler with different learning rates, which a script can set.

    ``group``: None where there is one param group.
    """

    differs = True
    advice = (
        "if the script set the learning rate itself before this save, or restored an older "
        "optimizer state, ignore this. Otherwise the folder may mix two saves: copy all files "
        "again from one save, or resume from another checkpoint"
    )

    group: int | None = None
    rate: float
    expected: float

    def __str__(self) -> str:
        group = f" in param group {self.group}" if self.group is not None else ""
        # 1e-4 after a warm-up is 0.00010000000000000002.
        rate, expected = f"{self.rate:.6g}", f"{self.expected:.6g}"
        if rate == expected:
            rate, expected = repr(self.rate), repr(self.expected)
        same = f"; {self.save} has the same rate" if self.save else ""
        return (
            f"{self.path}: learning rate {rate}{group} (expected {expected}, as in "
            f"{self.partner}){same}"
        )


class MixedCounts(MixedRates, frozen=True):
    """The same, where the step counts of the two files do not fit each other, either, unlike those
    of the checkpoints before and after.
    """

    severity = Severity.WARNING
    advice = (
        "the load succeeds, but training would continue from a mix of two saves: copy all "
        "files again from one save, or resume from another checkpoint"
    )

    def __str__(self) -> str:
        return f"{super().__str__()}; nor do the step counts of the two files match"


class MixedSteps(MixedSaves, frozen=True, kw_only=True):
    """A scheduler of the Trainer with as many ``moves`` as in a checkpoint next to it, of another
    ``step``.
    """

    severity = Severity.WARNING
    partner: str = TRAINER_STATE
    moves: int
    step: int

    def __str__(self) -> str:
        at_most = "at most " if self.moves > self.step else ""
        return (
            f"{self.path}: {count_of(self.moves, 'step')} (expected {at_most}{self.step}, as in "
            f"{self.partner}); it comes from {self.save}"
        )

    @property
    def advice(self) -> str:
        """Advice to bring files of one save together, unless the run explains the steps."""
        explained = (
            "the script passes the Trainer a scheduler that has already taken steps"
            if self.moves > self.step
            else "fp16 skipped every step since then"
        )
        return (
            "the Trainer resumes without an error, but with the learning rates of another step: "
            "copy all files again from one save, or resume from another checkpoint. If "
            f"{explained}, ignore this"
        )
