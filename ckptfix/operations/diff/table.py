"""The tensors of a comparison as rows for people: layers of one kind in one row."""

from collections.abc import Iterable
from dataclasses import dataclass

from ckptfix.operations.diff.report import Outcome, TensorDiff
from ckptfix.wording import collapse_layers, layer_of

_RANK = {outcome: rank for rank, outcome in enumerate(Outcome)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
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
        """How many elements differ."""
        return sum(one.tally.differing for one in self.tensors if one.tally)

    @property
    def apart(self) -> int:
        """How many of those are NaN or infinite on a side."""
        return sum(one.tally.apart for one in self.tensors if one.tally)

    @property
    def elements(self) -> int:
        """How many elements were compared as numbers."""
        return sum(one.tally.elements for one in self.tensors if one.tally)


def rows(tensors: Iterable[TensorDiff]) -> list[Row]:
    """Return the rows of these tensors: by outcome, the worst first, then by relative norm, then in their order."""
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
    return sorted(found, key=lambda row: (_RANK[row.outcome], -row.relative, not row.apart, -row.largest))
