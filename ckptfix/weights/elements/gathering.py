"""Put the elements of a tensor in order that lie apart in their files."""

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy

from ckptfix.storage.pieces import OpenFiles
from ckptfix.weights.elements.strides import box_bytes, element_dtype, read_box
from ckptfix.weights.layouts import Contiguous, Strided, Tile, Tiled


def gathered(layout: Strided, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the elements of a strided tensor in row-major order, as many at a time as ``buffer`` has."""
    if 0 in layout.shape:
        return
    most = len(buffer) // layout.width * layout.width
    many = min(max(box_bytes(layout), most) // layout.width, prod(layout.shape))
    room: Any = numpy.empty(many, element_dtype(layout.width))
    for begin, lengths in _boxes(layout.shape, many):
        box = room[: prod(lengths)]
        read_box(layout, begin, box.reshape(lengths), files)
        data = memoryview(box.view(numpy.uint8))
        for done in range(0, len(data), most):
            yield data[done : done + most]


def assembled(layout: Tiled, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
    """Yield a tensor that is cut into tiles in row-major order, as much at a time as ``buffer`` has."""
    if 0 in layout.shape:
        return
    tiles = [tile for tile in layout.tiles if 0 not in tile.lengths]
    begins = numpy.array([tile.offsets for tile in tiles], numpy.int64)
    ends = begins + numpy.array([tile.lengths for tile in tiles], numpy.int64)
    for begin, lengths in _boxes(layout.shape, len(buffer) // layout.width):
        box: Any = numpy.empty(lengths, element_dtype(layout.width))
        end = numpy.add(begin, lengths)
        for number in numpy.flatnonzero(((begins < end) & (begin < ends)).all(axis=1)):
            _place(box, begin, tiles[number], layout.width, files)
        yield memoryview(box.reshape(-1).view(numpy.uint8))


def _boxes(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a tensor into boxes of at most ``most`` elements that follow each other in memory: first indexes, lengths."""
    axis, inner = len(shape), 1
    while axis and inner * shape[axis - 1] <= most:
        axis -= 1
        inner *= shape[axis]
    if not axis:
        yield (0,) * len(shape), shape
        return
    axis -= 1
    many = most // inner
    for outer in numpy.ndindex(shape[:axis]):
        for first in range(0, shape[axis], many):
            lengths = (*(1 for _ in outer), min(many, shape[axis] - first), *shape[axis + 1 :])
            yield (*outer, first, *(0 for _ in shape[axis + 1 :])), lengths


def _place(box: Any, begin: tuple[int, ...], tile: Tile, width: int, files: OpenFiles) -> None:
    """Put the part of a tile into a box that lies in it. ``begin``: the first index of the box."""
    low = [max(pair) for pair in zip(begin, tile.offsets, strict=True)]
    ends = (
        (first + length, start + many)
        for first, length, start, many in zip(begin, box.shape, tile.offsets, tile.lengths, strict=True)
    )
    lengths = [min(pair) - start for pair, start in zip(ends, low, strict=True)]
    place, inside = (
        tuple(
            slice(start - first, start - first + length)
            for start, first, length in zip(low, firsts, lengths, strict=True)
        )
        for firsts in (begin, tile.offsets)
    )
    if isinstance(tile.layout, Strided):
        read_box(tile.layout, tuple(part.start for part in inside), box[place], files)
        return
    skip = (
        0  # the box is cut along one dimension and has all of those behind it: its part of a tile is one run
    )
    for part, length in zip(inside, tile.lengths, strict=True):
        skip = skip * length + part.start
    data = memoryview(bytearray(prod(lengths) * width))
    _read(tile.layout, skip * width, data, files)
    box[place] = numpy.frombuffer(data, element_dtype(width)).reshape(lengths)


def _read(run: Contiguous, skip: int, view: memoryview, files: OpenFiles) -> None:
    """Fill ``view`` with the bytes of a tile from ``skip`` on."""
    for path, offset, length in run.pieces:
        take = max(0, min(length - skip, len(view)))
        if take:
            files.fill(view[:take], path, offset + skip)
            view = view[take:]
        skip = max(0, skip - length)
