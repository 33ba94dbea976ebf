"""What every finding has: a stable code, a severity, an action, its numbers and its sentence."""

import re
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import PurePosixPath
from typing import ClassVar

from ckptfix.storage.paths import shell_path

_COMMAND = re.compile(r"(ckptfix (?:check|repair|undo) )DIR\b")


class Severity(Enum):
    """ERROR: damage is proven. WARNING: likely, or the user must say. NOTE: worth knowing, changes no status."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Action(Enum):
    """FIX: repaired by default. ASK: repaired with a named option. TELL: never repaired, only reported."""

    FIX = "fix"
    ASK = "ask"
    TELL = "tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Base of every kind of damage. ``path`` is the file it is about, relative to the folder."""

    code: ClassVar[str]
    severity: ClassVar[Severity]
    action: ClassVar[Action]
    option: ClassVar[str] = ""
    meaning: ClassVar[str]

    path: PurePosixPath

    @property
    def is_fixable(self) -> bool:
        """Whether a plain repair takes it away."""
        return self.action is Action.FIX and self.severity is not Severity.NOTE

    @property
    def is_salvageable(self) -> bool:
        """Whether no repair helps, and ``salvage`` gets out the tensors that are whole."""
        return False

    @property
    def advice(self) -> str:
        """What to do next, "" where a plain repair does it. ``DIR`` stands for the checkpoint."""
        return f"to repair it: ckptfix repair DIR {self.option}" if self.action is Action.ASK else ""

    def advice_at(self, path: str) -> str:
        """Return the advice with the checkpoint's path in its commands, as a shell takes it."""
        return _COMMAND.sub(lambda match: f"{match[1]}{shell_path(path)}", self.advice)

    def as_json(self, path: str) -> dict[str, object]:
        """Return the finding as JSON values: code, severity, action, message, advice and its own fields."""
        own = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {
            "code": self.code,
            "severity": self.severity.value,
            "action": self.action.value,
            "message": str(self),
            "advice": self.advice_at(path),
            **own,
        }


def _plain(value: object) -> object:
    if isinstance(value, PurePosixPath):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
