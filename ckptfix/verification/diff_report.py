"""Report of a comparison of two checkpoints: values, rows for people (layers of one kind in one),
and words.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import ClassVar

from msgspec import Struct

from ckptfix.reports import Serialized, items
from ckptfix.tensors.numbers import Tally, Tolerance
from ckptfix.verification.matching import TiedKey, ties_in_words
from ckptfix.wording import (
    Line,
    Printable,
    collapse_layers,
    count_of,
    few,
    layer_of,
    line,
    list_names,
)


class Outcome(Enum):
    """Results of comparing one tensor, the worst first."""

    ONLY_A = "only in A"
    ONLY_B = "only in B"
    SHAPE = "shape differs"
    DTYPE = "dtype differs"
    VALUES = "values differ"
    WITHIN = "within tolerance"
    EQUAL = "bytes equal"


_RANK = {outcome: rank for rank, outcome in enumerate(Outcome)}

_FIGURES = (
    "elements differing beyond_tolerance=beyond nan_or_inf=apart max_abs=largest "
    "relative_norm=relative"
)

_COUNTED = {
    Outcome.SHAPE: "with a different shape",
    Outcome.DTYPE: "with a different dtype",
    Outcome.VALUES: "with different values",
    Outcome.EQUAL: "with equal bytes",
}
"""Words after a number of tensors (1 with equal bytes), where they are not the value itself."""

_COUNT_AS_EQUAL = (Outcome.WITHIN, Outcome.EQUAL)
_HEADS = ("outcome", "tensors", "dtype and shape", "max abs", "rel. norm", "differing")
_MOST_ROWS = 100
_WIDEST = 60
"""Columns wider than this are not padded for: one long name must not push all figures off the
screen.
"""


class TensorDiff(Serialized, Struct, frozen=True):
    """One tensor: the name that both sides share once unwrapped, and what each side calls and
    holds.

    ``tally``: how far apart the numbers are, None where they were not compared: equal bytes, other
    shapes, dtypes smaller than a byte.
    """

    json_keys: ClassVar = "name outcome a=_side_a b=_side_b"

    name: str
    outcome: Outcome
    a: str | None = None
    b: str | None = None
    dtype_a: str | None = None
    dtype_b: str | None = None
    shape_a: tuple[int, ...] | None = None
    shape_b: tuple[int, ...] | None = None
    tally: Tally | None = None

    def json_items(self, at: str = "") -> Iterator[tuple[str, object]]:
        """Yield the names and outcome, and the figures where numbers were compared."""
        yield from items(self, self.json_keys)
        if self.tally is not None:
            yield from items(self.tally, _FIGURES)
            yield "nan", [self.tally.nan_a, self.tally.nan_b]
            yield "inf", [self.tally.inf_a, self.tally.inf_b]

    @property
    def _side_a(self) -> dict[str, object] | None:
        return _side(self.a, self.dtype_a, self.shape_a)

    @property
    def _side_b(self) -> dict[str, object] | None:
        return _side(self.b, self.dtype_b, self.shape_b)


class ModelDiff(Serialized, Struct, frozen=True, kw_only=True):
    """Comparison of one model.

    ``a``, ``b``: its label on each side, None where only the other side has it. ``names``: how keys
    were matched. ``ties``: keys of one side that are other keys of tensors that both sides have.
    """

    json_keys: ClassVar = "index a b names tensors ties?"

    index: int
    a: str | None
    b: str | None
    names: str
    tensors: tuple[TensorDiff, ...]
    ties: tuple[TiedKey, ...] = ()

    def count(self, outcome: Outcome) -> int:
        """Return how many tensors have this outcome."""
        return sum(one.outcome is outcome for one in self.tensors)

    def lines(self, *, show_all: bool) -> Iterator[Line]:
        """Yield a table of the tensors that differ, of equal ones, too, with ``show_all``."""
        names = f"; keys matched {self.names}" if self.names else ""
        yield line(f"{self.a or '(none)'} against {self.b or '(none)'}{names}:", bold=True)
        yield from _tensor_lines(self.tensors, show_all=show_all)


def _tensor_lines(tensors: Sequence[TensorDiff], *, show_all: bool) -> Iterator[Line]:
    found = rows(one for one in tensors if show_all or one.outcome is not Outcome.EQUAL)
    shown = found if show_all else found[:_MOST_ROWS]
    if not tensors:
        yield line("  no tensors to compare")
    elif shown:
        yield from _table([_HEADS, *map(_cells, shown)])
    else:
        yield line(f"  {count_of(len(tensors), 'tensor')}, bytes equal")
    if len(shown) < len(found):
        yield line(f"  and {len(found) - len(shown)} more rows; --all or --json lists them")


class ValueDiff(Serialized, Struct, frozen=True, kw_only=True):
    """A hyperparameter, or a state of one element such as ``step``, that differs. ``parameters``:
    of these.
    """

    json_keys: ClassVar = "name a b parameters"

    name: str
    a: object
    b: object
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        count = count_of(len(self.parameters), "parameter")
        a, b = ("not set" if one is None else one for one in (self.a, self.b))
        return f"{self.name} of {count}: {a} in A, {b} in B ({list_names(self.parameters)})"


class OptimizerDiff(Serialized, Struct, frozen=True, kw_only=True):
    """Comparison of one optimizer.

    ``a``, ``b``: its label on each side, and the strategies that saved it. ``names``: how
    parameters were matched. ``tensors``: moments and fp32 copies, by parameter and state.
    ``values``: how many states of one element and hyperparameters were compared, and
    ``differences`` of those.
    """

    json_keys: ClassVar = "index a b strategy_a strategy_b names tensors values differences"

    index: int
    a: str
    b: str
    strategy_a: str
    strategy_b: str
    names: str
    tensors: tuple[TensorDiff, ...]
    values: int
    differences: tuple[ValueDiff, ...]

    @property
    def is_different(self) -> bool:
        """Return whether a tensor or a value differs, or is on one side only."""
        return bool(self.differences) or any(
            one.outcome not in _COUNT_AS_EQUAL for one in self.tensors
        )

    @property
    def title(self) -> str:
        """Both sides, and how parameters were matched."""
        names = f"; {self.names}" if self.names else ""
        return f"optimizer {self.a} ({self.strategy_a}) against {self.b} ({self.strategy_b}){names}"

    @property
    def values_in_words(self) -> str:
        """The number of equal steps and hyperparameters, in words."""
        equal = self.values - sum(len(one.parameters) for one in self.differences)
        return f"steps and hyperparameters: {equal} of {count_of(self.values, 'value')} equal"

    def lines(self, *, show_all: bool) -> Iterator[Line]:
        """Yield a table of the tensors that differ, then the values that do."""
        yield line(f"{self.title}:", bold=True)
        yield from _tensor_lines(self.tensors, show_all=show_all)
        texts = [f"  {one}" for one in self.differences]
        yield from map(line, texts) if show_all else few(texts, "values")
        if not self.differences:
            yield line(f"  {self.values_in_words}")


class DiffReport(Printable, Serialized, Struct, frozen=True, kw_only=True):
    """Report of ``diff``. ``tolerance``: relative and absolute, None without one.

    ``optimizers``: those that both sides have. ``crossed``: models in each other's place, in words,
    "" when none do. ``one_sided``: states of a run that one of two folders of ``save_state`` lacks,
    in words. ``not_compared``: in words. ``are_pretrained``: two folders of ``save_pretrained``.
    ``is_partial``: whether values of the models are among that, or an optimizer that both sides
    have.
    """

    json_keys: ClassVar = (
        "a b tolerance=_tolerance verdict summary=_counts models optimizers crossed one_sided "
        "notes not_compared"
    )

    a: str
    b: str
    models: tuple[ModelDiff, ...]
    tolerance: Tolerance | None
    not_compared: tuple[str, ...]
    optimizers: tuple[OptimizerDiff, ...] = ()
    crossed: str = ""
    one_sided: tuple[str, ...] = ()
    are_pretrained: bool = False
    is_partial: bool = False

    def tensors(self) -> Iterator[TensorDiff]:
        """Iterate over the tensors of all models."""
        for model in self.models:
            yield from model.tensors

    def count(self, outcome: Outcome) -> int:
        """Return how many tensors have this outcome."""
        return sum(model.count(outcome) for model in self.models)

    @property
    def status(self) -> int:
        """The exit status: 0 when the models, and the optimizers that both sides have, are equal in
        all; else 1.
        """
        return int(self.is_different or self.is_partial)

    @property
    def is_different(self) -> bool:
        """Return whether a tensor, a value or a state differs, or is on one side only, or models
        are exchanged.
        """
        return (
            bool(self.crossed)
            or bool(self.one_sided)
            or any(one.outcome not in _COUNT_AS_EQUAL for one in self.tensors())
            or any(one.is_different for one in self.optimizers)
        )

    @property
    def verdict(self) -> str:
        """The answer in a few words."""
        if self.is_different:
            return "different"
        if self.is_partial:
            return "not proven equal"
        return "equal in what was compared" if self.not_compared else "equal"

    @property
    def positions(self) -> str:
        """One line about models in each other's place, "" when there are none."""
        return f"positions of models differ: {self.crossed}" if self.crossed else ""

    @property
    def summary(self) -> str:
        """One line: how many tensors of each outcome there are."""
        models = f"model tensors: {_counted(self.tensors()) or 'none'}"
        if not self.optimizers:
            return models
        values = sum(one.values for one in self.optimizers)
        differing = sum(
            len(other.parameters) for one in self.optimizers for other in one.differences
        )
        said = [_counted(tensor for one in self.optimizers for tensor in one.tensors)]
        said += [f"{values - differing} of {count_of(values, 'value')} equal"] if values else []
        optimizers = f"optimizers: {', '.join(filter(None, said)) or 'nothing'}"
        return f"{models}; {optimizers}" if self.models else optimizers

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what must be known to read the figures, in words."""
        tensors = list(self.tensors())
        ties = tuple(
            words
            for model in self.models
            for words in ties_in_words(model.ties, (model.a, model.b))
        )
        # merge_and_unload() and save_pretrained() record no base and no adapter.
        if (
            self.are_pretrained
            and tensors
            and not self.optimizers
            and all(tensor.outcome is Outcome.EQUAL for tensor in tensors)
        ):
            return (
                *ties,
                (
                    "both models have the same weights: if one was merged with an adapter or "
                    "trained further, the merge or the training changed nothing"
                ),
            )
        if any(one.tally is not None and one.dtype_a != one.dtype_b for one in tensors):
            return (
                *ties,
                (
                    "tensors of different dtypes were compared as float64 or complex128, integers "
                    "exactly (except U64)"
                ),
            )
        return ties

    def lines(self, *, show_all: bool = False) -> Iterator[Line]:
        """Yield what differs in each model, the verdict, and what was not compared."""
        yield line(f"A: {self.a}", bold=True)
        yield line(f"B: {self.b}", bold=True)
        for model in self.models:
            yield from model.lines(show_all=show_all)
        for optimizer in self.optimizers:
            yield from optimizer.lines(show_all=show_all)
        if self.tolerance is not None:
            yield line(f"tolerance: |a - b| <= {self.tolerance[1]:g} + {self.tolerance[0]:g} * |a|")
        yield line(f"{self.verdict}: {self.summary}", colour="red" if self.status else "green")
        if self.positions:
            yield line(self.positions, colour="red")
        yield from (line(words, colour="red") for words in self.one_sided)
        yield from (line(f"note: {words}") for words in self.notes)
        yield from (line(f"not compared: {words}") for words in self.not_compared)

    def __repr__(self) -> str:
        return f"<DiffReport {self.a} and {self.b}: {self.verdict}, {self.summary}>"

    @property
    def _tolerance(self) -> dict[str, float] | None:
        return (
            {"relative": self.tolerance[0], "absolute": self.tolerance[1]}
            if self.tolerance
            else None
        )

    @property
    def _counts(self) -> dict[str, int]:
        return {outcome.value: self.count(outcome) for outcome in Outcome}


def _counted(tensors: Iterable[TensorDiff]) -> str:
    """Return in words how many tensors have each outcome, "" for none."""
    counts = Counter(one.outcome for one in tensors)
    return ", ".join(
        f"{counts[outcome]} {_COUNTED.get(outcome, outcome.value)}"
        for outcome in reversed(Outcome)
        if counts[outcome]
    )


def _side(
    name: str | None, dtype: str | None, shape: tuple[int, ...] | None
) -> dict[str, object] | None:
    return {"name": name, "dtype": dtype, "shape": list(shape or ())} if name is not None else None


class Row(Struct, frozen=True, kw_only=True):
    """Tensors that differ in the number of their layer only, with one outcome, dtype and shape."""

    outcome: Outcome
    names: str
    tensors: tuple[TensorDiff, ...]

    @property
    def kind(self) -> str:
        """Dtype and shape, of both sides where they are not the same."""
        one = self.tensors[0]
        dtypes = [dtype for dtype in (one.dtype_a, one.dtype_b) if dtype]
        shapes = [list(shape) for shape in (one.shape_a, one.shape_b) if shape is not None]
        dtype = dtypes[0] if len(set(dtypes)) == 1 else " / ".join(dtypes)
        return f"{dtype} {' / '.join(map(str, shapes if shapes[0] != shapes[-1] else shapes[:1]))}"

    @property
    def largest(self) -> float:
        """The largest distance of all elements."""
        return max((one.tally.largest for one in self.tensors if one.tally), default=0.0)

    @property
    def relative(self) -> float:
        """The relative norm of the tensor that has the largest."""
        return max((one.tally.relative for one in self.tensors if one.tally), default=0.0)

    @property
    def differing(self) -> int:
        """Return how many elements differ."""
        return sum(one.tally.differing for one in self.tensors if one.tally)

    @property
    def apart(self) -> int:
        """Return how many of those are NaN or infinite on a side."""
        return sum(one.tally.apart for one in self.tensors if one.tally)

    @property
    def elements(self) -> int:
        """Return how many elements were compared as numbers."""
        return sum(one.tally.elements for one in self.tensors if one.tally)


def rows(tensors: Iterable[TensorDiff]) -> list[Row]:
    """Return the rows of these tensors: by outcome, the worst first, then by relative norm, then in
    their order.
    """
    groups: dict[object, list[TensorDiff]] = {}
    for one in tensors:
        before, number, after = layer_of(one.name)
        place = (before, number is None, after)
        key = (one.outcome, place, one.dtype_a, one.dtype_b, one.shape_a, one.shape_b)
        groups.setdefault(key, []).append(one)
    found = [
        Row(
            outcome=group[0].outcome,
            names=collapse_layers(one.name for one in group)[0],
            tensors=tuple(group),
        )
        for group in groups.values()
    ]
    return sorted(
        found, key=lambda row: (_RANK[row.outcome], -row.relative, not row.apart, -row.largest)
    )


def _table(table: Sequence[Sequence[str]]) -> Iterator[Line]:
    widths = [min(_WIDEST, max(map(len, column))) for column in zip(*table, strict=True)]
    for cells in table:
        padded = (text.ljust(width) for text, width in zip(cells, widths, strict=True))
        yield line(f"  {'  '.join(padded)}".rstrip())


def _cells(row: Row) -> tuple[str, ...]:
    if not row.elements:
        return row.outcome.value, row.names, row.kind, "", "", ""
    apart = f", {row.apart} of them NaN or Inf" if row.apart else ""
    share = f"{row.differing} of {row.elements}{apart}"
    return (
        row.outcome.value,
        row.names,
        row.kind,
        f"{row.largest:.3g}",
        f"{row.relative:.3g}",
        share,
    )
