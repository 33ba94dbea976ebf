"""Which tensors end in zeros: after a crash the last pages of a file are often zeros that were never written."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ckptfix.storage.reading import FileReader, open_reader

PAGE = 4096
"""Bytes that a file system writes, and loses, together."""

_BLOCK = 1 << 20


class Place(NamedTuple):
    """A tensor that is one run of bytes, from ``begin`` to ``end`` of its file."""

    name: str
    begin: int
    end: int


def zero_ends(path: Path, places: Iterable[Place]) -> dict[str, int]:
    """Return name -> how many zero bytes a tensor ends in: a page or more of its own, or a part of the file's own end.

    Reads the last page of every tensor, and of the others as much as is zero. Raises OSError, FormatError.
    """
    found = {}
    with open_reader(path) as reader:
        tail = _zeros_before(reader, 0, reader.size)
        limit = reader.size - tail if tail >= PAGE else reader.size
        for name, begin, end in places:
            zeros = end - begin if begin >= limit else _zeros_before(reader, begin, end)
            if zeros >= PAGE or end > max(begin, limit):
                found[name] = zeros
    return found


def _zeros_before(reader: FileReader, begin: int, end: int) -> int:
    """Return how many of the bytes from ``begin`` to ``end`` are zeros that reach up to ``end``."""
    position, length = end, PAGE
    while position > begin:
        block = reader.read(max(begin, position - length), min(length, position - begin))
        kept = len(block.rstrip(b"\0"))
        position -= len(block) - kept
        if kept:
            break
        length = _BLOCK
    return end - position
