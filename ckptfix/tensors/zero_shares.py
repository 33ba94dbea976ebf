"""Shares of ranks in DeepSpeed's files: sub-groups, partitions, and the stretch of each parameter.

``STAGES`` is the one table of what ZeRO's stages cut and pad, for the reader and for the writer
(DeepSpeed 0.18 and 0.19, ``runtime/zero/stage_1_and_2.py`` and ``stage3.py``).
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.tensors.joined import Converted, Stretch, Zeros, cut
from ckptfix.tensors.new_torch_files import Call, Global
from ckptfix.tensors.optimizers import Strategy
from ckptfix.tensors.stored import Contiguous, Layout

WIDTH = 4
"""Bytes of an element of the masters, which are fp32."""

ORDERED_DICT = Global("collections", "OrderedDict")
_SIZE = Global("torch", "Size")
_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")

SUB_GROUP_SIZE = 1_000_000_000
"""Elements of a rank after which ZeRO-3 begins another sub-group, where the configuration does not
say it.
"""

Shape = tuple[int, ...]


class FlatShare(NamedTuple):
    """A flat tensor of one rank: how many elements it has, and where they come from."""

    numel: int
    parts: tuple[Stretch | Zeros, ...]

    def padded(self, numel: int) -> "FlatShare":
        """Return it with zeros up to ``numel`` fp32 elements."""
        missing = (numel - self.numel) * WIDTH
        return FlatShare(numel, (*self.parts, Zeros(missing)) if missing else self.parts)


class Span(NamedTuple):
    """A rank's part of a parameter: its elements ``first`` to ``last``, of which the rank's flat
    tensor has ``size`` with the padding.
    """

    name: str
    first: int
    last: int
    size: int


class Stage(NamedTuple):
    """A stage of ZeRO. ``by_parameter``: each parameter is cut by itself, else a param group."""

    number: int
    by_parameter: bool

    def flats(self, shapes: Mapping[str, Shape], ranks: int) -> list[Mapping[str, Shape]]:
        """Return the parameters of each flat tensor of a param group."""
        return sub_groups(shapes, ranks) if self.by_parameter else [shapes]

    def size(self, shapes: Mapping[str, Shape], ranks: int) -> int:
        """Return the elements of a flat tensor on every rank, padding included."""
        if self.by_parameter:
            return sum(share_size(shape, ranks) for shape in shapes.values())
        return partition_size(sum(map(prod, shapes.values())), ranks)

    def spans(self, shapes: Mapping[str, Shape], rank: int, ranks: int) -> Iterator[Span]:
        """Yield what the flat tensor of a rank has of parameters, in its order."""
        if not self.by_parameter:
            yield from partition_spans(shapes, rank, self.size(shapes, ranks))
            return
        for name, shape in shapes.items():
            share, numel = share_size(shape, ranks), prod(shape)
            yield Span(name, min(rank * share, numel), min((rank + 1) * share, numel), share)


STAGES = {
    Strategy.ZERO1: Stage(1, by_parameter=False),
    Strategy.ZERO2: Stage(2, by_parameter=False),
    Strategy.ZERO3: Stage(3, by_parameter=True),
}


def partition_size(numel: int, ranks: int) -> int:
    """Return the elements of a partition of ZeRO-1 or 2: all together are a multiple of twice the
    number of ranks.
    """
    return -(-numel // (2 * ranks)) * 2


def share_size(shape: Shape, ranks: int) -> int:
    """Return the elements of a rank's share of a parameter under ZeRO-3, padding included."""
    return -(-prod(shape) // ranks)


def partition_spans(shapes: Mapping[str, Shape], rank: int, size: int) -> Iterator[Span]:
    """Yield what a rank's partition of ``size`` elements has of the parameters of a group, which lie
    end to end.
    """
    names, ends = list(shapes), list(accumulate(map(prod, shapes.values())))
    begin, end = rank * size, (rank + 1) * size
    for number in range(bisect_right(ends, begin), len(names)):
        start = ends[number - 1] if number else 0
        first, last = max(begin, start), min(end, ends[number])
        if first >= end:
            return
        if first < last:
            yield Span(names[number], first - start, last - start, last - first)


def sub_groups(
    shapes: Mapping[str, Shape], ranks: int, size: int = SUB_GROUP_SIZE
) -> list[Mapping[str, Shape]]:
    """Return the sub-groups of a param group of ZeRO-3: each is full once a rank has ``size``
    elements of it.
    """
    shares = {name: share_size(shape, ranks) for name, shape in shapes.items()}
    if size >= sum(shares.values()):
        return [shapes] if shapes else []
    found: list[Mapping[str, Shape]] = []
    current: dict[str, Shape] = {}
    filled = 0
    for name, shape in shapes.items():
        current[name] = shape
        filled += shares[name]
        if filled >= size:
            found.append(current)
            current, filled = {}, 0
    return [*found, current] if current else found


def stretch_of(layout: Layout | None, begin: int, end: int) -> Stretch | Zeros:
    """Return the bytes ``begin`` to ``end`` of a layout, None for zeros."""
    if layout is None:
        return Zeros(end - begin)
    # Converts no more than these.
    if isinstance(layout, Converted) and isinstance(layout.layout, Contiguous):
        before, after = DTYPE_BITS[layout.source] // 8, DTYPE_BITS[layout.target] // 8
        run = cut(layout.layout, begin // after * before, end // after * before)
        return Stretch(Converted(run, layout.source, layout.target), 0, end - begin)
    return Stretch(layout, begin, end)


def fragments_of(shapes: Mapping[str, Shape], rank: int, size: int) -> Call:
    """Return where the parameters lie in a rank's partition, for ``ds_to_universal.py``. Under
    ZeRO-3 no file has it.
    """
    items: dict[str, Call] = {}
    start = 0
    for span in partition_spans(shapes, rank, size):
        place = {"numel": span.size, "start": start}
        items[span.name] = Call(function=_FRAGMENT, state=place, new=True)
        start += span.size
    return ordered(items)


def ordered(items: Mapping[str, Any]) -> Call:
    """Return an OrderedDict of these items."""
    return Call(function=ORDERED_DICT, items=items)


def sizes_of(shapes: Mapping[str, Shape]) -> Call:
    """Return the shapes as DeepSpeed saves them."""
    return ordered({name: Call(function=_SIZE, args=(shape,)) for name, shape in shapes.items()})


def stage_of(strategy: Strategy) -> Call:
    """Return the stage of a strategy as DeepSpeed saves it."""
    enum = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
    return Call(function=enum, args=(STAGES[strategy].number,))
