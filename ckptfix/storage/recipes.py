"""Files described by where their bytes come from, so that the journal need not hold gigabytes to undo an edit."""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes given outright."""

    data: bytes = field(repr=False)

    @property
    def length(self) -> int:
        """The number of bytes."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Range:
    """``length`` bytes from ``offset`` of the file ``path``, which is relative to the folder."""

    path: PurePosixPath
    offset: int
    length: int


Piece = Literal | Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A file: its pieces one after the other, its mode bits, and its owner (-1: whoever makes it).

    ``digests``: for each file that ranges name, the digest of the bytes in those ranges (``recipe_digests``); empty in
    journals of 0.4.0 and before, which had none.
    """

    pieces: tuple[Piece, ...]
    mode: int = 0o644
    uid: int = -1
    gid: int = -1
    digests: tuple[tuple[PurePosixPath, str], ...] = ()

    @property
    def size(self) -> int:
        """The size in bytes of the file that it makes."""
        return sum(piece.length for piece in self.pieces)

    @staticmethod
    def like(path: Path, pieces: tuple[Piece, ...]) -> "Recipe":
        """Return a recipe with mode and owner of the file that ``path`` leads to. Raises OSError."""
        status = os.stat(path)
        return Recipe(pieces=pieces, mode=stat.S_IMODE(status.st_mode), uid=status.st_uid, gid=status.st_gid)


@dataclass(frozen=True, slots=True)
class Kept:
    """The previous file itself (the same inode, be it a symbolic link) stays in the journal until the undo."""


@dataclass(frozen=True, slots=True)
class Absent:
    """There was no previous file."""


KEPT = Kept()
ABSENT = Absent()
