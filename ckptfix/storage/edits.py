"""The changes a transaction can make to the files of one folder, as plain values.

Every path is relative to the folder. No edit follows a symbolic link, none creates a directory, and
an edit in place (Patch, Append, Truncate) is refused for a file that has a second hard link: the
other name would change too.
"""

from collections.abc import Iterator
from dataclasses import field
from pathlib import PurePosixPath

from typing_extensions import assert_never

from ckptfix.dataclass import dataclass
from ckptfix.errors import OperationError
from ckptfix.storage.paths import check_path
from ckptfix.storage.recipes import Absent, Kept, Literal, Range, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Overwrite ``old`` at ``offset`` by ``new`` in place; both have the same length."""

    path: PurePosixPath
    offset: int
    old: bytes = field(repr=False)
    new: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Add ``data`` to a file of ``old_size`` bytes.

    The last ``tail`` bytes are written only when all before them are on disk: for a zip file the
    end records, so that a reader finds the old directory or the complete new one.
    """

    path: PurePosixPath
    old_size: int
    data: bytes = field(repr=False)
    tail: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate:
    """Cut a file of ``old_size`` bytes to ``new_size``; the journal keeps what is cut off."""

    path: PurePosixPath
    new_size: int
    old_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """Put a new file at ``path`` by one rename.

    ``content``: its ranges name files as they are before the first edit of the transaction.
    ``previous``: how an undo gets the old file back. A recipe's ranges name files as they are right
    after this edit, with all later edits undone; ``path`` itself is then the new file.
    """

    path: PurePosixPath
    content: Recipe
    previous: Recipe | Kept | Absent


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Remove the file. With a recipe its space is free as soon as the transaction is committed."""

    path: PurePosixPath
    previous: Recipe | Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Rename ``source`` to ``target``, which must be free."""

    source: PurePosixPath
    target: PurePosixPath


Edit = Patch | Append | Truncate | Replace | Remove | Move


def edited_paths(edit: "Edit | Record") -> tuple[PurePosixPath, ...]:
    """Return the paths that ``edit`` changes."""
    return (edit.source, edit.target) if isinstance(edit, Move) else (edit.path,)


def read_paths(edit: "Edit | Record") -> Iterator[PurePosixPath]:
    """Yield the paths that the recipes of ``edit`` read, each range's path once per range."""
    for recipe in _recipes(edit):
        yield from (piece.path for piece in recipe.pieces if isinstance(piece, Range))


def check_edit(edit: "Edit | Record") -> None:
    """Raise OperationError when the edit makes no sense whatever the files are, or leaves the
    folder.
    """
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
            sound = all(_is_sound(recipe) for recipe in _recipes(edit))
        case Move():
            sound = edit.source != edit.target
        case _:
            assert_never(edit)
    if not sound:
        raise OperationError(f"{edit!r}: the numbers of this edit contradict each other")


def _recipes(edit: "Edit | Record") -> Iterator[Recipe]:
    if isinstance(edit, Replace):
        yield edit.content
    if isinstance(edit, Replace | Replaced | Remove) and isinstance(edit.previous, Recipe):
        yield edit.previous


def _is_sound(recipe: Recipe) -> bool:
    pieces = (isinstance(p, Literal) or (p.offset >= 0 and p.length >= 0) for p in recipe.pieces)
    return all(pieces) and recipe.size < 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """Record of an Append in the journal: enough to cut it off again."""

    path: PurePosixPath
    old_size: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
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
