"""Pickles that name what can run code, or what plain ``torch.load`` refuses."""

from dataclasses import dataclass

from ckptfix.operations.findings.base import Action, Finding, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsafePickle(Finding):
    """A pickle that names something which can run code."""

    code = "unsafe-pickle"
    severity = Severity.ERROR
    action = Action.TELL
    meaning = (
        "the pickle calls something that can run code (os.system, eval, ...); it is never executed nor edited"
    )

    globals: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path} calls {', '.join(self.globals[:3])}: loading it can run any code"

    @property
    def advice(self) -> str:
        """Nothing legitimate needs these."""
        return "do not load it with weights_only=False; find out where it came from"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadablePickle(Finding):
    """A pickle that torch.load refuses since torch 2.6 unless told otherwise."""

    code = "unloadable-pickle"
    severity = Severity.WARNING
    action = Action.TELL
    meaning = "the pickle needs a class or an opcode outside torch's weights_only list; torch.load refuses it since 2.6"

    globals: tuple[str, ...]
    remedy: str
    opcodes: tuple[str, ...] = ()
    plain: bool = False

    def __str__(self) -> str:
        needs = ["is a plain pickle, not written by torch.save"] if self.plain else []
        needs += [f"needs {', '.join(self.globals[:3])}"] if self.globals else []
        needs += [f"uses the pickle opcode {self.opcodes[0]}"] if self.opcodes else []
        return f"{self.path} {' and '.join(needs)}: torch.load(weights_only=True) refuses it"

    @property
    def advice(self) -> str:
        """The exact line, as the names stand in the file."""
        if self.remedy:
            return f"if you trust the file: {self.remedy}"
        how = "pickle.load" if self.plain else "torch.load(weights_only=False)"  # no list of classes helps
        return f"if you trust the file: read it with {how} and save it again with torch.save, without what it needs"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPickle(Finding):
    """A pickle with classes that what wrote it loads all the same."""

    code = "trainer-pickle"
    severity = Severity.NOTE
    action = Action.TELL
    meaning = (
        "what transformers' Trainer pickles with classes, and reads so itself; plain `torch.load` refuses it"
    )

    globals: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path} needs {', '.join(self.globals[:3])}: plain torch.load refuses it, the Trainer does not"

    @property
    def advice(self) -> str:
        """Nothing is wrong with it."""
        return "nothing to do; load such files only from where you trust them"
