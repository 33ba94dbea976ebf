"""What a comparison of two checkpoints found: values, and the words for them."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from ckptfix.weights.elements.differing import Tally, Tolerance


class Outcome(Enum):
    """What is so about a tensor, the worst first."""

    ONLY_A = "only in A"
    ONLY_B = "only in B"
    SHAPE = "shape differs"
    DTYPE = "dtype differs"
    VALUES = "values differ"
    WITHIN = "within tolerance"
    EQUAL = "bytes equal"


Many = Callable[[Iterator[Any]], Iterable[Any]]
"""What becomes of many values: ``list`` keeps them all, ``iter`` makes one at a time."""

_COUNTED = {
    Outcome.SHAPE: "of another shape",
    Outcome.DTYPE: "of another dtype",
    Outcome.VALUES: "with other values",
    Outcome.EQUAL: "equal in bytes",
}
"""What stands behind a number of tensors: 1 with other values; the others as they are."""

_COUNT_AS_EQUAL = (Outcome.WITHIN, Outcome.EQUAL)


class TensorDiff(NamedTuple):
    """One tensor: the name that both sides share once unwrapped, and what each side calls and holds.

    ``tally``: how far apart the numbers are, None where they were not compared: equal bytes, other shapes, dtypes
    smaller than a byte.
    """

    name: str
    outcome: Outcome
    a: str | None = None
    b: str | None = None
    dtype_a: str | None = None
    dtype_b: str | None = None
    shape_a: tuple[int, ...] | None = None
    shape_b: tuple[int, ...] | None = None
    tally: Tally | None = None

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints; infinite figures are the string "inf"."""
        document: dict[str, Any] = {
            "name": self.name,
            "outcome": self.outcome.value,
            "a": _side(self.a, self.dtype_a, self.shape_a),
            "b": _side(self.b, self.dtype_b, self.shape_b),
        }
        if self.tally is not None:
            document |= {
                "elements": self.tally.elements,
                "differing": self.tally.differing,
                "beyond_tolerance": self.tally.beyond,
                "nan_or_inf": self.tally.apart,
                "max_abs": _number(self.tally.largest),
                "relative_norm": _number(self.tally.relative),
                "nan": [self.tally.nan_a, self.tally.nan_b],
                "inf": [self.tally.inf_a, self.tally.inf_b],
            }
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDiff:
    """One model: what it is called on each side (None: not there), what was done to names, and its tensors."""

    index: int
    a: str | None
    b: str | None
    names: str
    tensors: tuple[TensorDiff, ...]

    def count(self, outcome: Outcome) -> int:
        """How many tensors have this outcome."""
        return sum(one.outcome is outcome for one in self.tensors)

    def as_json(self, many: Many = list) -> dict[str, Any]:
        """Return what ``--json`` prints. ``many``: what becomes of the tensors, each made when it is asked for."""
        return {
            "index": self.index,
            "a": self.a,
            "b": self.b,
            "names": self.names,
            "tensors": many(one.as_json() for one in self.tensors),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """The whole answer. ``tolerance``: relative and absolute, None without one.

    ``crossed``: which models stand in each other's place, in words, "" when none do. ``not_compared``: in words.
    ``is_partial``: whether values of the models themselves are among that.
    """

    a: str
    b: str
    models: tuple[ModelDiff, ...]
    tolerance: Tolerance | None
    not_compared: tuple[str, ...]
    crossed: str = ""
    is_partial: bool = False

    def tensors(self) -> Iterator[TensorDiff]:
        """Iterate over the tensors of all models."""
        for model in self.models:
            yield from model.tensors

    def count(self, outcome: Outcome) -> int:
        """How many tensors have this outcome."""
        return sum(model.count(outcome) for model in self.models)

    @property
    def status(self) -> int:
        """The exit status: 0 when all of the models was compared and is equal, or within the tolerance; else 1."""
        return int(self.is_different or self.is_partial)

    @property
    def is_different(self) -> bool:
        """Whether a tensor differs, or is on one side only, or models stand in each other's place."""
        return bool(self.crossed) or any(one.outcome not in _COUNT_AS_EQUAL for one in self.tensors())

    @property
    def verdict(self) -> str:
        """The answer in a word or two."""
        if self.is_different:
            return "different"
        return "not proven equal" if self.is_partial else "equal"

    @property
    def positions(self) -> str:
        """One line about models in each other's place, "" when there are none."""
        return f"positions of models differ: {self.crossed}" if self.crossed else ""

    @property
    def summary(self) -> str:
        """One line: how many tensors of each outcome there are."""
        counts = [(outcome, self.count(outcome)) for outcome in reversed(Outcome)]
        said = (f"{count} {_COUNTED.get(outcome, outcome.value)}" for outcome, count in counts if count)
        return ", ".join(said) or "no tensors"

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be known to read the figures, in words."""
        if any(one.tally is not None and one.dtype_a != one.dtype_b for one in self.tensors()):
            return (
                "where dtypes differ, values were compared as float64 or complex128, integers exactly (not U64)",
            )
        return ()

    def as_json(self, many: Many = list) -> dict[str, Any]:
        """Return what ``--json`` prints. ``many``: what becomes of models and tensors, each made when it is asked for.

        With ``iter`` they are iterators: all dicts of 100,000 tensors together take 90 MB.
        """
        return {
            "a": self.a,
            "b": self.b,
            "tolerance": {"relative": self.tolerance[0], "absolute": self.tolerance[1]}
            if self.tolerance
            else None,
            "verdict": self.verdict,
            "summary": {outcome.value: self.count(outcome) for outcome in Outcome},
            "models": many(model.as_json(many) for model in self.models),
            "crossed": self.crossed,
            "notes": list(self.notes),
            "not_compared": list(self.not_compared),
        }


def _side(name: str | None, dtype: str | None, shape: tuple[int, ...] | None) -> dict[str, Any] | None:
    return {"name": name, "dtype": dtype, "shape": list(shape or ())} if name is not None else None


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"
