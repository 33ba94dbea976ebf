"""Advice of the doctor: a stable code, a severity, a sentence, the evidence, and what to do.

A check is a function of the facts that says what it found. ``topic`` gives it its line of the
catalogue: severities are those of ``check``. ERROR is proven to fail or to be silently wrong,
WARNING is likely to, NOTE is worth knowing and changes no exit status.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, NamedTuple

from msgspec import Struct

from ckptfix.diagnosis.findings.base import Severity, labelled
from ckptfix.environment.facts import Facts
from ckptfix.reports import Serialized
from ckptfix.wording import Line, line

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

MAX_EVIDENCE = 8
"""Lines of evidence that one advice carries; how many there are is said in the last."""


class Advice(Serialized, Struct, frozen=True, kw_only=True):
    """One problem, or something worth knowing. ``evidence``: what was read, and where. ``fix``:
    what to do.
    """

    json_keys: ClassVar = "code severity message=sentence evidence fix"

    code: str
    severity: Severity
    sentence: str
    evidence: tuple[str, ...]
    fix: str

    def __str__(self) -> str:
        return self.sentence

    def lines(self) -> Iterator[Line]:
        """Yield the sentence, its evidence and what to do."""
        yield labelled(self.severity, self.code, self.sentence)
        yield from (line(f"        {words}") for words in self.evidence)
        yield line(f"        to do: {self.fix}")


class Said(NamedTuple):
    """Words of a check about an environment. ``severity``: None for the gravest of its topic."""

    sentence: str
    evidence: tuple[str, ...]
    fix: str
    severity: Severity | None


def say(
    sentence: str, *, evidence: tuple[str, ...], fix: str, severity: Severity | None = None
) -> Said:
    """Return what a check found."""
    return Said(sentence, evidence, fix, severity)


class Topic(Struct, frozen=True, kw_only=True):
    """One line of the catalogue, and the check that finds it. ``severities``: those that its advice
    can have, the gravest first.
    """

    code: str
    meaning: str
    severities: tuple[Severity, ...]
    check: Callable[[Facts], Iterable[Said]]

    def advice(self, facts: Facts) -> Iterator[Advice]:
        """Yield the advice on an environment.

        Raises ValueError for a severity that the catalogue does not announce.
        """
        for sentence, evidence, fix, severity in self.check(facts):
            given = severity or self.severities[0]
            if given not in self.severities:
                raise ValueError(f"{self.code} cannot have severity {given.value}")
            more = len(evidence) - MAX_EVIDENCE
            if more > 0:
                evidence = (*evidence[: MAX_EVIDENCE - 1], f"and {more + 1} more like these")
            yield Advice(
                code=self.code, severity=given, sentence=sentence, evidence=evidence, fix=fix
            )

    @property
    def row(self) -> str:
        """The topic as a row of the documentation's table."""
        return (
            f"| `{self.code}` | {' or '.join(level.value for level in self.severities)} | "
            f"{self.meaning} |"
        )


def topic(
    code: str, meaning: str, *severities: Severity
) -> Callable[[Callable[[Facts], Iterable[Said]]], Topic]:
    """Return the decorator that makes a check the topic ``code`` of the catalogue."""
    return lambda check: Topic(code=code, meaning=meaning, severities=severities, check=check)
