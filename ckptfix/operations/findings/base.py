"""What every finding has: a stable code, a severity, an action, its numbers and its sentence."""

from dataclasses import dataclass, fields
from enum import Enum
from pathlib import PurePosixPath
from typing import ClassVar


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
    def advice(self) -> str:
        """What to do next, "" where a plain repair does it."""
        return f"to repair it: ckptfix repair DIR {self.option}" if self.action is Action.ASK else ""

    def as_json(self) -> dict[str, object]:
        """Return the finding as JSON values: code, severity, action, message, advice and its own fields."""
        own = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {
            "code": self.code,
            "severity": self.severity.value,
            "action": self.action.value,
            "message": str(self),
            "advice": self.advice,
            **own,
        }


def dotted(chain: tuple[str, ...]) -> str:
    """Return a wrapper chain as it stands before a name."""
    return "".join(f"{segment}." for segment in chain)


def _plain(value: object) -> object:
    if isinstance(value, PurePosixPath):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
