"""Look at one tensor while it is hashed: its values in their order, pages of zeros in the order of its files."""

from collections.abc import Iterator
from math import prod

import numpy

from ckptfix.storage.pieces import OpenFiles, Piece
from ckptfix.weights.elements.pages import PageSearch
from ckptfix.weights.elements.scanning import Scan, Scanner
from ckptfix.weights.layouts import Contiguous, Layout, Strided, Tiled
from ckptfix.weights.stored import StoredTensor

_MOST_SPREAD = 2
"""How many times the bytes of a tensor its stretch of a storage may have to be read for pages of zeros."""


class Look:
    """Takes the blocks of a tensor; what does not lie in the order of its elements is read again after that."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._values = Scanner(tensor.dtype)
        pieces = pieces_of(tensor.layout, tensor.nbytes)
        self._again = () if isinstance(tensor.layout, Contiguous) else pieces or ()
        self._pages = None if pieces is None else PageSearch(pieces)

    def feed(self, block: memoryview) -> None:
        """Look at the next bytes: whole elements."""
        data = numpy.frombuffer(block, numpy.uint8)
        self._values.feed(data)
        if self._pages is not None and not self._again:
            self._pages.feed(data)

    def reread(self, files: OpenFiles, buffer: memoryview) -> Iterator[None]:
        """Read what is still to be read, a step for each block. Raises as ``OpenFiles.blocks`` does."""
        for block in files.blocks(self._again, buffer):
            assert self._pages is not None
            self._pages.feed(numpy.frombuffer(block, numpy.uint8))
            yield

    def result(self) -> Scan:
        """Return what was found."""
        found = self._values.result()
        if self._pages is not None:
            found.zero_pages, found.zero_runs = self._pages.pages, tuple(self._pages.runs)
        return found


def pieces_of(layout: Layout, nbytes: int) -> tuple[Piece, ...] | None:
    """Return the stretches of files that hold a tensor of so many bytes; None when they hold far more than that."""
    if isinstance(layout, Contiguous):
        return _joined(layout.pieces)
    if isinstance(layout, Strided):
        if 0 in layout.shape:
            return ()
        steps = zip(layout.shape, layout.stride, strict=True)
        last = layout.first + sum((count - 1) * step for count, step in steps)
        length = (last + 1 - layout.first) * layout.width
        if length > _MOST_SPREAD * nbytes:
            return None
        return (Piece(layout.storage.path, layout.storage.offset + layout.first * layout.width, length),)
    if isinstance(layout, Tiled):
        width = layout.width
        parts = [pieces_of(tile.layout, prod(tile.lengths) * width) for tile in layout.tiles]
        if any(part is None for part in parts):
            return None
        return _joined(tuple(piece for part in parts for piece in part or ()))
    return None


def _joined(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Return pieces, those as one that follow each other in a file, and none that is empty."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and (last.path, last.offset + last.length) == (piece.path, piece.offset):
            found[-1] = last._replace(length=last.length + piece.length)
        elif piece.length:
            found.append(piece)
    return tuple(found)
