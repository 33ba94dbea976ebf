"""What ``verify`` found: an item for every file and tensor, what the values are, and what was not looked at."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ckptfix.operations.check import status_of
from ckptfix.operations.findings import Finding, Severity
from ckptfix.operations.sealing.judging import Change, Outcome
from ckptfix.operations.sealing.values import ValueFinding


class Kind(Enum):
    """What an item is about."""

    FILE = "file"
    TENSOR = "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The verdict on one file or tensor.

    ``name``: the relative path, or the tensor's name. ``where``: of a tensor, the file that holds it, or held it.
    ``change``: what happened to it, None where it matches and where nothing is known. ``text``: the sentence, "" for
    a match. ``other``: the file that it was swapped with, or is now; of a tensor, the file that holds what it was
    swapped with, or holds it now; "" when there is none.
    """

    kind: Kind
    name: str
    where: str
    outcome: Outcome
    change: Change | None = None
    text: str = ""
    other: str = ""

    def as_json(self) -> dict[str, object]:
        """Return the item as JSON values."""
        return {
            "kind": self.kind.value,
            "name": self.name,
            "file": self.where,
            "outcome": self.outcome.value,
            "change": None if self.change is None else self.change.value,
            "message": self.text,
            "other": self.other,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What ``verify`` found.

    ``findings``: of the structure, as ``check`` has them. ``items``: one for every file and tensor, files first.
    ``values``: what ``--data`` found. ``sealed``: whether there is a manifest. ``against``: the other checkpoint.
    ``crossed``: which models stand there in each other's place, in words, "" when none do. ``not_checked``: in words.
    ``unfinished``: what could not be read, in words.
    """

    path: Path
    nbytes: int
    findings: tuple[Finding, ...]
    items: tuple[Item, ...] = field(repr=False)
    values: tuple[ValueFinding, ...] = ()
    sealed: bool = False
    against: Path | None = None
    crossed: str = ""
    not_checked: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()

    @property
    def status(self) -> int:
        """Exit status: 1 for damage, 3 when something could not be read, else 0. Unchecked things change nothing.

        Damage is what ``check`` has its own status 1 for, too: errors and warnings.
        """
        if (
            any(item.outcome is Outcome.DIFFER for item in self.items)
            or self.crossed
            or status_of(self.findings)
            or any(one.severity is not Severity.NOTE for one in self.values)
        ):
            return 1
        return 3 if self.unfinished else 0

    def count(self, kind: Kind) -> dict[Outcome, int]:
        """Return how many files or tensors have each outcome."""
        counter = Counter(item.outcome for item in self.items if item.kind is kind)
        return {outcome: counter[outcome] for outcome in Outcome}

    def as_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        return {
            "path": str(self.path),
            "status": self.status,
            "sealed": self.sealed,
            "against": None if self.against is None else str(self.against),
            "findings": [finding.as_json(str(self.path)) for finding in self.findings],
            "items": [item.as_json() for item in self.items],
            "crossed": self.crossed,
            "values": [value.as_json() for value in self.values],
            "not_checked": list(self.not_checked),
            "unfinished": list(self.unfinished),
        }
