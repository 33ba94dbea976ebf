"""The changes a transaction can make to the files of one folder, as plain values.

Every path is relative to the folder. No edit follows a symbolic link, none creates a directory, and
an edit in place (Patch, Append, Truncate) is refused for a file that has a second hard link: the
other name would change too.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Generic, TypeVar

from msgspec import Struct
from typing_extensions import assert_never

from ckptfix.errors import ChangedError, OperationError
from ckptfix.storage.paths import check_path
from ckptfix.storage.recipes import (
    Absent,
    Kept,
    Literal,
    Range,
    Recipe,
    Stretch,
)
from ckptfix.wording import Brief


class Patch(Brief, Struct, frozen=True, kw_only=True):
    """Overwrite ``old`` at ``offset`` by ``new`` in place; both have the same length."""

    path: PurePosixPath
    offset: int
    old: bytes
    new: bytes


class Append(Brief, Struct, frozen=True, kw_only=True):
    """Add ``data`` to a file of ``old_size`` bytes.

    The last ``tail`` bytes are written only when all before them are on disk: for a zip file the
    end records, so that a reader finds the old directory or the complete new one.
    """

    path: PurePosixPath
    old_size: int
    data: bytes
    tail: int = 0


class Truncate(Struct, frozen=True, kw_only=True):
    """Cut a file of ``old_size`` bytes to ``new_size``; the journal keeps what is cut off."""

    path: PurePosixPath
    new_size: int
    old_size: int


class Replace(Struct, frozen=True, kw_only=True):
    """Put a new file at ``path`` by one rename.

    ``content``: its ranges name files as they are before the first edit of the transaction.
    ``previous``: how an undo gets the old file back. A recipe's ranges name files as they are right
    after this edit, with all later edits undone; ``path`` itself is then the new file.
    """

    path: PurePosixPath
    content: Recipe
    previous: Recipe | Kept | Absent


class Remove(Struct, frozen=True, kw_only=True):
    """Remove the file. With a recipe its space is free as soon as the transaction is committed."""

    path: PurePosixPath
    previous: Recipe | Kept


class Move(Struct, frozen=True, kw_only=True):
    """Rename ``source`` to ``target``, which must be free."""

    source: PurePosixPath
    target: PurePosixPath


Edit = Patch | Append | Truncate | Replace | Remove | Move


def edited_paths(edit: "Edit | Record") -> tuple[PurePosixPath, ...]:
    """Return the paths that ``edit`` changes."""
    return (edit.source, edit.target) if isinstance(edit, Move) else (edit.path,)


def gone_after(edits: "Iterable[Edit | Record]") -> tuple[PurePosixPath, ...]:
    """Return the paths at which no file is after the edits, of those that they change."""
    gone: dict[PurePosixPath, None] = {}
    for edit in edits:
        if isinstance(edit, Remove | Move):
            gone[edit.path if isinstance(edit, Remove) else edit.source] = None
        if isinstance(edit, Replace | Replaced | Move):
            gone.pop(edit.target if isinstance(edit, Move) else edit.path, None)
    return tuple(gone)


def read_paths(edit: "Edit | Record") -> Iterator[PurePosixPath]:
    """Yield the paths that the recipes of ``edit`` read, each range's path once per range."""
    for recipe in _recipes(edit):
        yield from (piece.path for piece in recipe.pieces if isinstance(piece, Range))


def check_edit(edit: "Edit | Record") -> None:
    """Raise OperationError when the edit makes no sense for any file, or leaves the folder."""
    for path in (*edited_paths(edit), *dict.fromkeys(read_paths(edit))):
        check_path(path)
    match edit:
        case Patch():
            sound = edit.offset >= 0 and len(edit.old) == len(edit.new)
        case Append():
            sound = edit.old_size >= 0 and 0 <= edit.tail <= len(edit.data)
        case Appended():
            sound = edit.old_size >= 0 and edit.length >= 0
        case Truncate():
            sound = 0 <= edit.new_size <= edit.old_size
        case Replace() | Replaced() | Remove():
            sound = all(
                all(isinstance(p, Literal) or min(p.offset, p.length) >= 0 for p in recipe.pieces)
                and recipe.size < 1 << 63
                for recipe in _recipes(edit)
            )
        case Move():
            sound = edit.source != edit.target
        case _:
            assert_never(edit)
    if not sound:
        raise OperationError(f"{edit!r}: the numbers of this edit are inconsistent")


def _recipes(edit: "Edit | Record") -> Iterator[Recipe]:
    if isinstance(edit, Replace):
        yield edit.content
    if isinstance(edit, Replace | Replaced | Remove) and isinstance(edit.previous, Recipe):
        yield edit.previous


class Appended(Struct, frozen=True, kw_only=True):
    """Record of an Append in the journal: enough to cut it off again."""

    path: PurePosixPath
    old_size: int
    length: int


class Replaced(Struct, frozen=True, kw_only=True):
    """Record of a Replace in the journal: the way to get the old file back."""

    path: PurePosixPath
    previous: Recipe | Kept | Absent


Record = Patch | Appended | Truncate | Replaced | Remove | Move
"""Record of an edit in the journal: all that an undo needs."""


def record_of(edit: Edit) -> Record:
    """Return the journal's record of ``edit``."""
    match edit:
        case Append():
            return Appended(path=edit.path, old_size=edit.old_size, length=len(edit.data))
        case Replace():
            return Replaced(path=edit.path, previous=edit.previous)
        case Patch() | Truncate() | Remove() | Move():
            return edit
        case _:
            assert_never(edit)


_S = TypeVar("_S", bound=Stretch)


class Pieces(Generic[_S]):
    """The bytes of a file as bytes and stretches of files that exist, one after the other."""

    __slots__ = ("_ends", "pieces")

    def __init__(self, pieces: tuple[bytes | _S, ...]) -> None:
        self.pieces = pieces
        self._ends = tuple(
            accumulate(len(piece) if isinstance(piece, bytes) else piece.length for piece in pieces)
        )

    @property
    def size(self) -> int:
        """Their number of bytes."""
        return self._ends[-1] if self._ends else 0

    def cut(self, offset: int, length: int) -> tuple[bytes | _S, ...]:
        """Return ``length`` bytes from ``offset``. Raises ChangedError when there are fewer."""
        if offset + length > self.size:
            raise ChangedError(
                f"the file is too short (expected at least {offset + length} bytes, found "
                f"{self.size})"
            )
        stretches: list[bytes | _S] = []
        index, done = bisect_right(self._ends, offset), 0
        while done < length:
            piece, end = self.pieces[index], self._ends[index]
            inside = offset + done - (self._ends[index - 1] if index else 0)
            take = min(length - done, end - offset - done)
            stretches.append(
                piece[inside : inside + take]
                if isinstance(piece, bytes)
                else piece._replace(offset=piece.offset + inside, length=take)
            )
            index, done = index + 1, done + take
        return tuple(stretches)


class WayBack(Generic[_S]):
    """The way from the files after a transaction to those before it. Nothing is read or changed.

    ``find``: returns what lies at a path now, None for nothing. ``kept``: returns what the journal
    keeps for the edit of a number. ``missing``: the error about a path that has no bytes for an
    undo.
    """

    def __init__(
        self,
        find: Callable[[PurePosixPath], Pieces[_S] | None],
        kept: Callable[[int], Pieces[_S] | None],
        missing: Callable[[PurePosixPath], Exception],
    ) -> None:
        self._find, self._kept, self._missing = find, kept, missing
        self._known: dict[PurePosixPath, Pieces[_S] | None] = {}

    def at(self, path: PurePosixPath) -> Pieces[_S] | None:
        """Return what lies at a path as far as edits were undone."""
        if path not in self._known:
            self._known[path] = self._find(path)
        return self._known[path]

    def cut(self, path: PurePosixPath, offset: int, length: int) -> tuple[bytes | _S, ...]:
        """Return a part of what lies at a path. Raises ChangedError where it is missing."""
        return self._needed(path).cut(offset, length)

    def made(self, recipe: Recipe) -> Pieces[_S]:
        """Return what a recipe makes now. Raises ChangedError where bytes are missing."""
        pieces: list[bytes | _S] = []
        for piece in recipe.pieces:
            pieces += (
                (piece.data,)
                if isinstance(piece, Literal)
                else self.cut(piece.path, piece.offset, piece.length)
            )
        return Pieces(tuple(pieces))

    def undo(self, index: int, edit: "Edit | Record") -> None:
        """Undo the edit of a number, the last one first."""
        match edit:
            case Move():
                self._known[edit.source], self._known[edit.target] = self.at(edit.target), None
            case Patch():
                old, after = self._needed(edit.path), edit.offset + len(edit.old)
                rest = old.cut(after, old.size - after)
                patched = (*old.cut(0, edit.offset), edit.old, *rest)
                self._known[edit.path] = Pieces(patched)
            case Append() | Appended():
                self._known[edit.path] = Pieces(self.cut(edit.path, 0, edit.old_size))
            case Truncate():
                tail = self._kept(index)
                assert tail is not None
                self._known[edit.path] = Pieces(
                    (*self.cut(edit.path, 0, edit.new_size), *tail.pieces)
                )
            case Replace() | Replaced() | Remove():
                match edit.previous:
                    case Absent():
                        self._known[edit.path] = None
                    case Kept():
                        self._known[edit.path] = self._kept(index)
                    case Recipe():
                        self._known[edit.path] = self.made(edit.previous)
            case _:
                assert_never(edit)

    def _needed(self, path: PurePosixPath) -> Pieces[_S]:
        known = self.at(path)
        if known is None:
            raise self._missing(path)
        return known
