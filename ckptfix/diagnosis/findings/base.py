"""Base of every finding: a stable code, a severity, an action, its numbers and its sentence."""

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import asdict

from ckptfix.reports import Serialized, plain
from ckptfix.storage.paths import command, shell_path
from ckptfix.wording import Line, Span, line

_SHOWN = 3
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
_COMMAND = re.compile(r"(?:ckptfix (?:check|repair|undo|diff|verify)|rm -r) DIR\b.*")
# A pattern stays outside of the quotes.
_PLACE = re.compile(r"\bDIR((?:/[^ *]+(?![^ ]*\*))?)")


class Severity(Enum):
    """Severity of a finding. ERROR: proven damage. WARNING: likely, or the user decides. NOTE:
    changes no status.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Action(Enum):
    """Action of a repair. FIX: by default. ASK: with a named option. TELL: never repaired, only
    reported.
    """

    FIX = "fix"
    ASK = "ask"
    TELL = "tell"


class Resume(Enum):
    """Outcome of a resume: the load and the next step. ``latest_checkpoint`` passes over the
    checkpoint where it fails.

    FAILS_IF_NEW: unless the script saves so each time, so that the checkpoint before has the
    finding, too. FAILS_IF_NEEDED: unless the script no longer prepares the missing object.
    """

    SUCCEEDS = "succeeds"
    FAILS = "fails"
    FAILS_IF_NEW = "fails if new"
    FAILS_IF_NEEDED = "fails if needed"


class Finding(Serialized, Struct, frozen=True, kw_only=True):
    """Base of every kind of damage. ``path``: the damaged file, relative to the folder."""

    json_keys: ClassVar = "code severity action message=__str__ advice"

    code: ClassVar[str]
    severity: ClassVar[Severity]
    action: ClassVar[Action]
    option: ClassVar[str] = ""
    meaning: ClassVar[str]
    differs: ClassVar[bool] = False
    """True for a note that a checkpoint differs from those next to it, or mixes saves, which a
    change of the script can explain. Its advice is to resume from elsewhere otherwise, so that the
    checkpoint is not called clean, and ``check -r`` also names one that is.
    """

    path: PurePosixPath

    @property
    def about(self) -> tuple[PurePosixPath, ...]:
        """The files that it is about, ``path`` first."""
        return (self.path,)

    @property
    def is_fixable(self) -> bool:
        """True when a plain repair fixes it."""
        return self.action is Action.FIX and self.severity is not Severity.NOTE

    @property
    def is_salvageable(self) -> bool:
        """True when no repair helps, and ``salvage`` recovers the tensors that are intact."""
        return False

    @property
    def doubted(self) -> str:
        """The name of a checkpoint next to this one that may be the wrong one of the two, "" for
        none.
        """
        return ""

    @property
    def resume(self) -> Resume:
        """The outcome of a resume: an error makes it fail, but for one that the script of the run
        loads.
        """
        return Resume.FAILS if self.severity is Severity.ERROR else Resume.SUCCEEDS

    @property
    def advice(self) -> str:
        """The next step, a sentence a line, "" where a plain repair does it; with ``DIR`` for the
        checkpoint.
        """
        return (
            f"to repair it: ckptfix repair DIR {self.option}" if self.action is Action.ASK else ""
        )

    def advice_at(self, path: str) -> str:
        """Return the advice with the checkpoint's path in its commands, as a shell takes it."""

        def placed(match: re.Match[str]) -> str:
            return _PLACE.sub(lambda place: shell_path(f"{path}{place[1]}"), match[0])

        return _COMMAND.sub(placed, self.advice)

    def as_json(self, at: str = "") -> dict[str, Any]:
        """Return the finding as JSON values: the common fields of findings, and its own.

        ``at``: the checkpoint for the commands of its advice.
        """
        own = {name: plain(value) for name, value in asdict(self).items()}
        advice = "; ".join(self.advice_at(at).splitlines())
        return {**Serialized.as_json(self), "advice": advice, **own}


class Unreadable(NamedTuple):
    """A file that may not be read, which may be healthy or damaged, in words with its path."""

    words: str


class Explained(NamedTuple):
    """The findings of a class about a file, of any rule, that are a part of one of this rule."""

    kind: type[Finding]
    path: PurePosixPath


class Instead(NamedTuple):
    """A finding of an earlier rule, and the one that this rule makes of it."""

    former: Finding
    finding: Finding


class Compared(NamedTuple):
    """A config whose sizes were compared with the tensors, or of which a text says why not."""

    name: str


Told: TypeAlias = Finding | str | Unreadable | Explained | Instead | Compared
"""Value that a rule tells. A text is a check that was left out, in words."""


_Kind = TypeVar("_Kind", bound=Finding)


def as_kind(kind: type[_Kind], finding: Finding, **facts: Any) -> _Kind:
    """Return a finding as one of a subclass of its own class. ``facts``: what only the subclass
    has.
    """
    return kind(**asdict(finding), **facts)


def labelled(severity: Severity, code: str, message: str) -> Line:
    """Return the line of one finding: severity, code and sentence."""
    label = Span(f"{severity.value:>7}", _COLOURS[severity.value], bold=True)
    return Line((label, Span(" "), Span(code, bold=True), Span(f": {message}")))


def finding_lines(findings: Sequence[Finding], at: str) -> Iterator[Line]:
    """Yield findings about the checkpoint ``at``; only the first few of one code in many files,
    such as shards.
    """
    for advice, same in _alike(findings, at):
        shown = same if len(same) <= _SHOWN + 1 else same[:_SHOWN]
        yield from (labelled(finding.severity, finding.code, str(finding)) for finding in shown)
        yield from (line(f"        {sentence}") for sentence in advice.splitlines())
        if len(shown) < len(same):
            yield line(
                f"        and {len(same) - len(shown)} more files with {same[0].code}; --json "
                "lists all"
            )


def _alike(findings: Sequence[Finding], at: str) -> Iterator[tuple[str, list[Finding]]]:
    """Yield each advice with the findings of one code that have it, also where two kinds of advice
    alternate.
    """
    for _, group in groupby(findings, key=lambda finding: finding.code):
        by_advice: dict[str, list[Finding]] = {}
        for finding in group:
            by_advice.setdefault(finding.advice_at(at), []).append(finding)
        yield from by_advice.items()


def salvage_lines(findings: Sequence[Finding], at: str) -> Iterator[Line]:
    """Yield the command that recovers the intact tensors of ``at``, when no repair helps and there
    are any.
    """
    if any(finding.is_salvageable for finding in findings):
        yield line(f"next, to recover what is intact: {command('salvage', at)} NEW_FOLDER")
