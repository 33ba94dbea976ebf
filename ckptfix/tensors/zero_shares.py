"""Shares of ranks in DeepSpeed's files: sub-groups, partitions, and the stretch of each parameter."""

from collections.abc import Iterator, Mapping
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


def partition_size(numel: int, ranks: int) -> int:
    """Return the elements of a partition of ZeRO-1 or 2: all together are a multiple of twice the
    number of ranks.
    """
    return -(-numel // (2 * ranks)) * 2


def sub_groups(
    shapes: Mapping[str, Shape], ranks: int, size: int = SUB_GROUP_SIZE
) -> list[Mapping[str, Shape]]:
    """Return the sub-groups of a param group of ZeRO-3: each is full once a rank has ``size``
    elements of it.
    """
    shares = {name: -(-prod(shape) // ranks) for name, shape in shapes.items()}
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


def spans_of(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, int, int]]:
    """Yield where each parameter begins and ends in the flat tensor of them all."""
    start = 0
    for name, shape in shapes.items():
        yield name, start, start + prod(shape)
        start += prod(shape)


def share_of(layout: Layout | None, numel: int, width: int, rank: int, ranks: int) -> FlatShare:
    """Return a rank's share of a parameter under ZeRO-3. ``layout``: None for zeros."""
    share = -(-numel // ranks)
    first, last = min(rank * share, numel), min((rank + 1) * share, numel)
    padding = Zeros((share - (last - first)) * width)
    return FlatShare(share, (stretch_of(layout, first * width, last * width), padding))


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
    """Return where the parameters lie in a rank's partition, for ``ds_to_universal.py``."""
    items: dict[str, Call] = {}
    for name, start, stop in spans_of(shapes):
        first, last = max(rank * size, start), min((rank + 1) * size, stop)
        if first < last:
            place = {"numel": last - first, "start": first - rank * size}
            items[name] = Call(function=_FRAGMENT, state=place, new=True)
    return ordered(items)


def ordered(items: Mapping[str, Any]) -> Call:
    """Return an OrderedDict of these items."""
    return Call(function=ORDERED_DICT, items=items)


def sizes_of(shapes: Mapping[str, Shape]) -> Call:
    """Return the shapes as DeepSpeed saves them."""
    return ordered({name: Call(function=_SIZE, args=(shape,)) for name, shape in shapes.items()})


def stage_of(strategy: Strategy) -> Call:
    """Return the stage of a strategy as DeepSpeed saves it."""
    stage = {Strategy.ZERO1: 1, Strategy.ZERO2: 2, Strategy.ZERO3: 3}[strategy]
    return Call(function=Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), args=(stage,))
