"""The bytes that an undo will restore, found where they are now: edits are undone in thought, nothing is touched."""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from typing_extensions import assert_never

from ckptfix.errors import ChangedError
from ckptfix.storage.edits import Appended, Move, Patch, Record, Remove, Replaced, Truncate
from ckptfix.storage.paths import locate
from ckptfix.storage.pieces import Piece
from ckptfix.storage.recipe_digests import Bytes, Part
from ckptfix.storage.recipes import Absent, Kept, Literal, Recipe
from ckptfix.storage.records import TransactionRecord
from ckptfix.storage.workspace import Workspace


class Rebuilt(NamedTuple):
    """A dropped file that an undo makes again: its path, its recipe, and where the bytes of a part of it are now.

    ``bytes_of`` raises ChangedError where they are not there.
    """

    path: PurePosixPath
    recipe: Recipe
    bytes_of: Callable[[Part], Bytes]


@dataclass(frozen=True, slots=True)
class _View:
    """The bytes of a file as pieces of the files that are there."""

    pieces: Bytes
    ends: tuple[int, ...] = field(repr=False)

    @staticmethod
    def of(pieces: Bytes) -> "_View":
        lengths = (len(one) if isinstance(one, bytes) else one.length for one in pieces)
        return _View(pieces, tuple(accumulate(lengths)))

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def cut(self, offset: int, length: int) -> Bytes:
        """Return ``length`` bytes from ``offset``. Raises ChangedError when there are fewer."""
        if offset + length > self.size:
            raise ChangedError(f"byte {offset + length} is needed, the file has {self.size}")
        found: list[Piece | bytes] = []
        index, done = bisect_right(self.ends, offset), 0
        while done < length:
            one = self.pieces[index]
            inside = offset + done - (self.ends[index - 1] if index else 0)
            take = min(length - done, self.ends[index] - offset - done)
            found.append(
                one[inside : inside + take]
                if isinstance(one, bytes)
                else Piece(one.path, one.offset + inside, take)
            )
            index, done = index + 1, done + take
        return tuple(found)


def rebuilt_files(work: Workspace, record: TransactionRecord) -> Iterator[Rebuilt]:
    """Yield every file that an undo makes again from ranges of other files; each holds until the next one.

    Raises ChangedError, OperationError, OSError.
    """
    views: dict[PurePosixPath, _View | None] = {}

    def find(path: PurePosixPath) -> _View | None:
        if path not in views:
            views[path] = _file(locate(work.root, path))
        return views[path]

    def view(path: PurePosixPath) -> _View:
        known = find(path)
        if known is None:
            raise ChangedError(f"{work.root / path}: is not there, and an undo needs its bytes")
        return known

    def made(recipe: Recipe) -> _View:
        pieces: list[Piece | bytes] = []
        for piece in recipe.pieces:
            pieces += (
                (piece.data,)
                if isinstance(piece, Literal)
                else view(piece.path).cut(piece.offset, piece.length)
            )
        return _View.of(tuple(pieces))

    def bytes_of(part: Part) -> Bytes:
        return view(part.source).cut(part.offset, part.length)

    rebuilt = [number for number, edit in enumerate(record.edits) if _is_rebuilt(edit)]
    for index in range(len(record.edits) - 1, min(rebuilt, default=len(record.edits)) - 1, -1):
        edit = record.edits[index]
        match edit:
            case Move():
                views[edit.source], views[edit.target] = find(edit.target), None
            case Patch():
                old, after = view(edit.path), edit.offset + len(edit.old)
                patched = (*old.cut(0, edit.offset), edit.old, *old.cut(after, old.size - after))
                views[edit.path] = _View.of(patched)
            case Appended():
                views[edit.path] = _View.of(view(edit.path).cut(0, edit.old_size))
            case Truncate():
                tail = Piece(work.tail(index), 0, edit.old_size - edit.new_size)
                views[edit.path] = _View.of((*view(edit.path).cut(0, edit.new_size), tail))
            case Remove() | Replaced():
                match edit.previous:
                    case Absent():
                        views[edit.path] = None
                    case Kept():
                        views[edit.path] = _file(work.old(index, edit.previous))
                    case Recipe():
                        if isinstance(edit, Remove):
                            yield Rebuilt(edit.path, edit.previous, bytes_of)
                        views[edit.path] = made(edit.previous)
            case _:
                assert_never(edit)


def _is_rebuilt(edit: Record) -> bool:
    return isinstance(edit, Remove) and isinstance(edit.previous, Recipe)


def _file(path: Path) -> _View | None:
    try:
        return _View.of((Piece(path, 0, os.stat(path).st_size),))
    except (FileNotFoundError, NotADirectoryError):
        return None
