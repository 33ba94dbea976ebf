"""Advice of the doctor: a stable code, a severity, a sentence, the evidence, and what to do.

Severities are those of ``check``: ERROR is proven to fail or to be silently wrong, WARNING is
likely to, NOTE is worth knowing and changes no exit status.
"""

from collections.abc import Iterator
from typing import ClassVar

from msgspec import Struct

from ckptfix.diagnosis.findings.base import Severity, labelled
from ckptfix.reports import Serialized
from ckptfix.wording import Line, line

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


class Topic(Struct, frozen=True, kw_only=True):
    """One line of the catalogue. ``severities``: those that its advice can have, the gravest
    first.
    """

    code: str
    severities: tuple[Severity, ...]
    meaning: str

    def advice(
        self,
        sentence: str,
        *,
        evidence: tuple[str, ...],
        fix: str,
        severity: Severity | None = None,
    ) -> Advice:
        """Return an advice on this topic; with the gravest severity unless ``severity`` names
        another.

        Raises ValueError for a severity that the catalogue does not announce.
        """
        given = self.severities[0] if severity is None else severity
        if given not in self.severities:
            raise ValueError(f"{self.code} is never of severity {given.value}")
        shown = evidence
        if len(evidence) > MAX_EVIDENCE:
            shown = (
                *evidence[: MAX_EVIDENCE - 1],
                f"and {len(evidence) - MAX_EVIDENCE + 1} more like these",
            )
        return Advice(code=self.code, severity=given, sentence=sentence, evidence=shown, fix=fix)

    @property
    def row(self) -> str:
        """The topic as a row of the documentation's table."""
        return (
            f"| `{self.code}` | {' or '.join(level.value for level in self.severities)} | "
            f"{self.meaning} |"
        )
