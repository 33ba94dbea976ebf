"""Pairs of two sequences that keep one order, of which each may have members that the other lacks."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A member that the other sequence should have. ``optional``: it may lack it. ``shape``: None when unknown."""

    shape: Shape | None
    optional: bool = False


def certain_pairs(
    saved: Sequence[Shape | None], expected: Sequence[Expected], spare: Collection[Shape]
) -> dict[int, int] | None:
    """Return expected -> saved for the pairs that every alignment has; None when there is no alignment.

    An alignment pairs members of one shape in the order of both sequences; an unknown shape pairs with any. It leaves
    out only what is optional, and saved members whose shape is ``spare``.
    """
    width = len(expected)
    optional = _bits(number for number, one in enumerate(expected) if one.optional)
    known: dict[Shape | None, int] = {None: (1 << width) - 1}
    alike = []
    for shape in saved:
        if shape not in known:
            known[shape] = _bits(j for j, one in enumerate(expected) if one.shape in (None, shape))
        alike.append(known[shape])
    extra = [bool(spare) if shape is None else shape in spare for shape in saved]
    before = _reachable(alike, extra, optional)
    if not before[-1] >> width & 1:
        return None
    backward = _reachable(
        [_mirrored(bits, width) for bits in reversed(alike)], extra[::-1], _mirrored(optional, width)
    )
    after = [_mirrored(bits, width + 1) for bits in reversed(backward)]
    once = twice = left_out = 0
    possible = []
    for number, bits in enumerate(alike):
        pairs = before[number] & bits & after[number + 1] >> 1
        possible.append(pairs)
        once, twice = once | pairs, twice | once & pairs
    for reached, rest in zip(before, after, strict=True):
        left_out |= reached & optional & rest >> 1
    certain = once & ~twice & ~left_out
    return {place: number for number, pairs in enumerate(possible) for place in _members(pairs & certain)}


def _reachable(alike: Sequence[int], extra: Sequence[bool], optional: int) -> list[int]:
    """Return, for each number of saved members, the bit set of how many expected ones can be done with by then.

    Sets of numbers are bits of one int: 10,000 parameters on either side take a second, not minutes.
    """
    reached = [_past_optional(1, optional)]
    for bits, is_extra in zip(alike, extra, strict=True):
        now = reached[-1]
        reached.append(_past_optional((now & bits) << 1 | (now if is_extra else 0), optional))
    return reached


def _past_optional(reached: int, optional: int) -> int:
    """Add what is reached by leaving out optional members: the carry of an addition runs through a run of ones."""
    return reached | (optional + (reached & optional)) ^ optional


def _bits(numbers: Iterable[int]) -> int:
    found = 0
    for number in numbers:
        found |= 1 << number
    return found


def _members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _mirrored(bits: int, width: int) -> int:
    return int(f"{bits:0{width}b}"[::-1], 2) if width else 0
