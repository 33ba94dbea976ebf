"""Put the elements of a tensor in order that lie apart in their files."""

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy
from numpy.lib.stride_tricks import as_strided

from ckptfix.errors import ChangedError
from ckptfix.storage.pieces import OpenFiles
from ckptfix.weights.layouts import Strided, Tile, Tiled


def gathered(layout: Strided, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the elements of a strided tensor in row-major order. Its storage is mapped, not read into memory."""
    if 0 in layout.shape:
        return
    path, offset, length = layout.storage
    try:
        storage: Any = numpy.memmap(
            path, dtype=f"V{layout.width}", mode="r", offset=offset, shape=length // layout.width
        )
    except ValueError as error:  # numpy's word for a file that is too short
        raise ChangedError(f"{path} changed while it was read: {error}") from error
    strides = tuple(step * layout.width for step in layout.stride)
    view = as_strided(storage[layout.first :], shape=layout.shape, strides=strides, writeable=False)
    for part in _parts(view, len(buffer) // layout.width):
        yield memoryview(numpy.ascontiguousarray(part).reshape(-1).view(numpy.uint8))


def assembled(layout: Tiled, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
    """Yield a tensor that is cut into tiles in row-major order, some steps of its first real dimension at a time."""
    if 0 in layout.shape:
        return
    axis = next((number for number, length in enumerate(layout.shape) if length > 1), 0)
    step = prod(layout.shape[axis + 1 :]) * layout.width
    many = max(1, len(buffer) // step)
    for begin in range(0, layout.shape[axis], many):
        end = min(begin + many, layout.shape[axis])
        slab: Any = numpy.empty(
            (*layout.shape[:axis], end - begin, *layout.shape[axis + 1 :]), f"V{layout.width}"
        )
        for tile in layout.tiles:
            _place(slab, tile, axis, begin, end, layout.width, files)
        yield memoryview(slab.reshape(-1).view(numpy.uint8))


def _place(slab: Any, tile: Tile, axis: int, begin: int, end: int, width: int, files: OpenFiles) -> None:
    """Put the part of a tile into the slab that lies in steps ``begin`` to ``end`` of an axis."""
    low, high = max(begin, tile.offsets[axis]), min(end, tile.offsets[axis] + tile.lengths[axis])
    if low >= high or 0 in tile.lengths:
        return
    row = prod(tile.lengths[axis + 1 :]) * width
    data = memoryview(bytearray((high - low) * row))
    _read(tile, (low - tile.offsets[axis]) * row, data, files)
    lengths = (*tile.lengths[:axis], high - low, *tile.lengths[axis + 1 :])
    starts = (*tile.offsets[:axis], low - begin, *tile.offsets[axis + 1 :])
    place = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
    slab[place] = numpy.frombuffer(data, f"V{width}").reshape(lengths)


def _read(tile: Tile, skip: int, view: memoryview, files: OpenFiles) -> None:
    """Fill ``view`` with the bytes of a tile from ``skip`` on."""
    for path, offset, length in tile.layout.pieces:
        take = max(0, min(length - skip, len(view)))
        if take:
            files.fill(view[:take], path, offset + skip)
            view = view[take:]
        skip = max(0, skip - length)


def _parts(view: Any, most: int) -> Iterator[Any]:
    """Cut an array along its first dimensions into parts of at most ``most`` elements, in order."""
    if view.size <= most:
        yield view
        return
    inner = view.size // len(view)
    if inner > most:
        for one in view:
            yield from _parts(one, most)
        return
    many = most // inner
    for begin in range(0, len(view), many):
        yield view[begin : begin + many]
