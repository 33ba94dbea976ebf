"""Tensors that are put together from stretches of others: the flat partitions that ZeRO cuts param
groups into.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from msgspec import Struct

from ckptfix.storage.reading import OpenFiles, Piece
from ckptfix.tensors.stored import Contiguous, Layout


class Inline(Struct, frozen=True):
    """A few bytes that are at hand: a step that a file holds as a number, and the new one as a
    tensor.
    """

    data: bytes

    def blocks(self, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes, as ``Layout`` says."""
        for begin in range(0, len(self.data), len(buffer)):
            yield memoryview(self.data)[begin : begin + len(buffer)]


class Stretch(NamedTuple):
    """The bytes ``begin`` to ``end`` of a layout; of whole elements."""

    layout: Layout
    begin: int
    end: int

    @property
    def run(self) -> Contiguous | None:
        """The pieces of files that it is, None where there is more to do than to read them."""
        return (
            cut(self.layout, self.begin, self.end) if isinstance(self.layout, Contiguous) else None
        )


class Zeros(NamedTuple):
    """So many bytes of zero: the padding behind the last parameter, or moments that a parameter
    never had.
    """

    length: int


class Joined(Struct, frozen=True):
    """Stretches and zeros whose bytes, one after the other, are the tensor."""

    parts: tuple[Stretch | Zeros, ...]

    def blocks(self, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes, as ``Layout`` says. A stretch of elements that lie apart is read from
        its tensor's start.
        """
        for part in self.parts:
            if isinstance(part, Zeros):
                yield from _zeros(part.length, buffer)
            else:
                yield from _within(part, files, buffer)


def joined(parts: Iterable[Stretch | Zeros]) -> Contiguous | Joined:
    """Return the layout of stretches and zeros, one after the other: one run of pieces wherever
    that is possible.
    """
    found: list[Stretch | Zeros] = []
    run: list[Piece] = []

    def end_run() -> None:
        if run:
            found.append(Stretch(Contiguous(tuple(run)), 0, sum(piece.length for piece in run)))
            run.clear()

    for part in parts:
        if isinstance(part, Stretch) and (pieces := part.run) is not None:
            run += pieces.pieces
        elif (part.length if isinstance(part, Zeros) else part.end - part.begin) > 0:
            end_run()
            found.append(part)
    if not found:
        return Contiguous(tuple(run))
    end_run()
    return Joined(tuple(found))


def cut(run: Contiguous, begin: int, end: int) -> Contiguous:
    """Return the bytes ``begin`` to ``end`` of a run of pieces."""
    starts = [0, *accumulate(piece.length for piece in run.pieces)]
    pieces = []
    for piece, start in zip(run.pieces, starts, strict=False):
        first, last = max(begin, start), min(end, start + piece.length)
        if first < last:
            pieces.append(Piece(piece.path, piece.offset + first - start, last - first))
    return Contiguous(tuple(pieces))


def _zeros(length: int, buffer: memoryview) -> Iterator[memoryview]:
    block = buffer[:length]
    block[:] = bytes(len(block))
    while length > 0:
        yield block[:length]
        length -= len(block)


def _within(part: Stretch, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
    if (run := part.run) is not None:
        yield from files.blocks(run.pieces, buffer)
        return
    done = 0
    for block in part.layout.blocks(files, buffer):
        first, last = max(part.begin - done, 0), min(part.end - done, len(block))
        if first < last:
            yield block[first:last]
        done += len(block)
        if done >= part.end:
            return


class Converted(Struct, frozen=True):
    """The elements of a layout in another dtype. ``source``, ``target``: as ``numbers.converter``
    takes them.
    """

    layout: Layout
    source: str
    target: str

    def blocks(self, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes, as ``Layout`` says; takes as much memory again."""
        from ckptfix.tensors.numbers import converter  # imports numpy

        convert = converter(self.source, self.target)
        return (convert(block) for block in self.layout.blocks(files, buffer))
