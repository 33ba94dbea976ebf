"""Where the bytes of a tensor are: in one run, with strides, or in tiles of several files.

Every layout gives the bytes in the order that safetensors has: row-major, little-endian, without a gap.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ckptfix.storage.pieces import OpenFiles, Piece


class Layout(Protocol):
    """Where the bytes of a tensor are."""

    def blocks(self, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes in order, in views that hold until the next one; each but the last has whole elements.

        ``buffer``: memory to use, at least 64 KiB and a multiple of 16 bytes. Raises ChangedError when a file has
        become shorter, OSError.
        """


@dataclass(frozen=True, slots=True)
class Contiguous:
    """Pieces of files whose bytes, one after the other, are the tensor."""

    pieces: tuple[Piece, ...]

    def blocks(self, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes, as ``Layout`` says."""
        return files.blocks(self.pieces, buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided:
    """Elements of one storage that lie apart: a transposed matrix, every second row, an expanded row.

    ``storage``: the whole storage. ``first`` and ``stride`` count elements of ``width`` bytes.
    """

    storage: Piece
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    width: int

    def blocks(self, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes, as ``Layout`` says."""
        from ckptfix.weights.elements.gathering import gathered

        return gathered(self, files, buffer)


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangular part of a tensor: its first index and its length in every dimension, and its own bytes."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    layout: Contiguous | Strided


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiled:
    """Tiles that cover a tensor once, cut in other dimensions than the first. ``width``: bytes of an element."""

    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]
    width: int

    def blocks(self, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes, as ``Layout`` says; takes as much memory again."""
        from ckptfix.weights.elements.gathering import assembled

        return assembled(self, files, buffer)
