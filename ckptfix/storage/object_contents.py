"""Edits of a transaction as contents of objects: what lies at each key afterwards, and the way
back.

A content is made of new bytes and of ranges of objects that exist, as a store composes it.
``contents_after`` takes its ranges from the objects before the transaction. ``way_back`` takes them
from those after it and from kept copies.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from ckptfix.errors import ChangedError, OperationError
from ckptfix.storage.edits import Edit, Move, Pieces, Remove, Replace, WayBack, check_edit
from ckptfix.storage.recipes import Absent, Kept, Literal, Recipe, size_of


class Source(NamedTuple):
    """``length`` bytes from ``offset`` of the object ``key``."""

    key: str
    offset: int
    length: int


Content = tuple[bytes | Source, ...]
"""The bytes of an object, piece by piece; () is an empty one."""


class Contents(NamedTuple):
    """Contents by path, None for none; and what is kept aside by the number of its edit."""

    by_path: dict[PurePosixPath, Content | None]
    aside: dict[int, Content]


def joined(pieces: Iterable[bytes | Source]) -> Content:
    """Return pieces without empty ones, neighbours that follow each other as one."""
    found: list[bytes | Source] = []
    for piece in pieces:
        last = found[-1] if found else None
        if not size_of((piece,)):
            continue
        if isinstance(piece, bytes) and isinstance(last, bytes):
            found[-1] = last + piece
        elif (
            isinstance(piece, Source)
            and isinstance(last, Source)
            and (piece.key, piece.offset) == (last.key, last.offset + last.length)
        ):
            found[-1] = Source(last.key, last.offset, last.length + piece.length)
        else:
            found.append(piece)
    return tuple(found)


def contents_after(edits: Sequence[Edit], sizes: Mapping[str, int]) -> Contents:
    """Return what the edits leave at the paths that they change, in ranges of the objects before
    them.

    ``sizes``: of the objects before, by key. ``aside``: of each Remove, and of each Replace that
    keeps the previous file, what lies there right before it. Raises OperationError for an edit that
    a store cannot make.
    """
    now: dict[PurePosixPath, Content | None] = {}
    aside: dict[int, Content] = {}

    def at(path: PurePosixPath) -> Content | None:
        if path not in now:
            size = sizes.get(str(path))
            now[path] = None if size is None else joined((Source(str(path), 0, size),))
        return now[path]

    def existing(path: PurePosixPath) -> Content:
        content = at(path)
        if content is None:
            raise ChangedError(f"{path}: no such object; nothing was changed")
        return content

    for index, edit in enumerate(edits):
        check_edit(edit)
        match edit:
            case Move():
                content = existing(edit.source)
                if at(edit.target) is not None:
                    raise ChangedError(
                        f"{edit.target} exists, so {edit.source} cannot be moved there"
                    )
                now[edit.source], now[edit.target] = None, content
            case Remove():
                aside[index] = existing(edit.path)
                now[edit.path] = None
            case Replace():
                if isinstance(edit.previous, Absent):
                    if at(edit.path) is not None:
                        raise ChangedError(f"{edit.path} was created after the repair was planned")
                elif isinstance(edit.previous, Kept):
                    aside[index] = existing(edit.path)
                now[edit.path] = _made(edit.content)
            case _:
                raise OperationError(
                    f"{edit!r}: an object cannot be changed in place; nothing was changed"
                )
    return Contents(now, aside)


def way_back(
    edits: Sequence[Edit], after: Contents, sizes: Mapping[str, int], kept: Mapping[int, str]
) -> Contents:
    """Return what lay before the edits at the paths that they change, in ranges of the objects
    after them.

    ``sizes``: of the objects before, by key. ``kept``: the keys of the copies of the files that
    edits keep, by the number of the edit. Of a Remove with a recipe no copy is needed. ``aside`` is
    empty.
    """

    def find(path: PurePosixPath) -> Pieces[Source] | None:
        # What no edit changes is as before.
        content = after.by_path.get(path)
        size = sizes.get(str(path)) if path not in after.by_path else None
        size = size_of(content) if content is not None else size
        return None if size is None else Pieces((Source(str(path), 0, size),))

    def copy(index: int) -> Pieces[Source]:
        return Pieces((Source(kept[index], 0, size_of(after.aside[index])),))

    def missing(path: PurePosixPath) -> ChangedError:
        return ChangedError(
            f"{path}: an undo would need its bytes, and the repair does not keep them"
        )

    back = WayBack(find, copy, missing)
    for index in range(len(edits) - 1, -1, -1):
        back.undo(index, edits[index])
    left = {path: back.at(path) for path in after.by_path}
    return Contents(
        {path: None if there is None else joined(there.pieces) for path, there in left.items()}, {}
    )


def _made(recipe: Recipe) -> Content:
    return joined(
        piece.data
        if isinstance(piece, Literal)
        else Source(str(piece.path), piece.offset, piece.length)
        for piece in recipe.pieces
    )


def traced(content: Content, after: Contents, kept: Mapping[str, Content]) -> Content:
    """Return a content of objects after a transaction in ranges of the objects before it.

    ``kept``: the contents of the copies that it keeps, by key.
    """
    contents: dict[str, Content | None] = {str(path): one for path, one in after.by_path.items()}
    known = {
        key: None if made is None else Pieces(made) for key, made in (contents | {**kept}).items()
    }
    pieces: list[bytes | Source] = []
    for piece in content:
        if isinstance(piece, bytes) or piece.key not in known:
            pieces.append(piece)
            continue
        made = known[piece.key]
        if made is None:
            raise ChangedError(
                f"{piece.key}: an undo would need its bytes, and the repair does not keep them"
            )
        pieces += made.cut(piece.offset, piece.length)
    return joined(pieces)
