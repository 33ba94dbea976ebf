"""A transaction in a store before its first request: the new objects, the way back, and what they cost.

Nothing is written here.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.errors import (
    OperationError,
)
from ckptfix.storage.edits import Edit, Remove, read_paths
from ckptfix.storage.object_contents import (
    Content,
    Contents,
    Source,
    contents_after,
    joined,
    traced,
    way_back,
)
from ckptfix.storage.object_journal import (
    Change,
    ObjectPlan,
    Rank,
    folder,
)
from ckptfix.storage.parts import plan_parts
from ckptfix.storage.paths import MANIFEST
from ckptfix.storage.recipes import Recipe, size_of
from ckptfix.storage.stores import ObjectInfo, ObjectRange, Piece, Store
from ckptfix.storage.transactions import TransactionPlan
from ckptfix.wording import human_size

Read = Callable[[str, int, int], bytes]
"""Reads bytes of an object as it was when the edits were planned: key, offset, length."""


class Carriage(NamedTuple):
    """Bytes that go through this machine, and that the store copies by itself."""

    down: int
    up: int
    copied: int

    def __str__(self) -> str:
        inside = f"; the store copies {human_size(self.copied)} by itself" if self.copied else ""
        return f"{human_size(self.down)} down and {human_size(self.up)} up{inside}"


def carriage_of(store: Store, made: Iterable[Content], placed: Iterable[Content] = ()) -> Carriage:
    """Return the bytes that objects of these contents cost; the journal and headers come on top.

    ``placed``: each of them is made at a key of its own first, and then copied over its name.
    """
    down = up = copied = 0
    both = (*((content, False) for content in made), *((content, True) for content in placed))
    for content, is_placed in both:
        size = size_of(content)
        if not store.abilities.composes:
            down += (
                sum(piece.length for piece in content if isinstance(piece, Source))
                + is_placed * size
            )
            up += size + is_placed * size
            continue
        for part in plan_parts(pieces_of(content, {}), store.abilities):
            if part.is_copied:
                copied += part.length
                continue
            up += part.length
            down += sum(piece.length for piece in part.pieces if isinstance(piece, ObjectRange))
        copied += is_placed * size
    return Carriage(down, up, copied)


def carriage_of_edits(
    store: Store, edits: Sequence[Edit], infos: Mapping[str, ObjectInfo]
) -> Carriage:
    """Return the bytes that edits cost. Raises OperationError for impossible ones."""
    after = contents_after(edits, {key: info.size for key, info in infos.items()})
    contents = [
        content
        for path, content in after.by_path.items()
        if content is not None and content != _whole(str(path), infos.get(str(path)))
    ]
    return carriage_of(store, after.aside.values(), contents)


class Draft(Struct, frozen=True, kw_only=True):
    """A transaction before its first request: changes, contents, and what is kept aside."""

    plan: ObjectPlan
    contents: Mapping[int, Content]
    kept: Mapping[int, Content]
    pins: Mapping[str, ObjectInfo]


def draft_of(
    number: int, asked: TransactionPlan, infos: Mapping[str, ObjectInfo], read: Read
) -> Draft:
    """Return what a transaction with these edits writes, and its way back. Nothing is written.

    ``infos``: the objects that the edits were planned for. Raises OperationError where the edits
    are impossible, or do not lead back to every old byte.
    """
    edits = asked.edits
    sizes = {key: info.size for key, info in infos.items()}
    after = contents_after(edits, sizes)
    kept_keys = {index: f"{folder(number)}/kept/{index}" for index in after.aside}
    back = way_back(edits, after, sizes, kept_keys)
    dropped = {
        edit.path
        for edit in edits
        if isinstance(edit, Remove) and isinstance(edit.previous, Recipe)
    }
    _check_way_back(
        after,
        back,
        {kept_keys[index]: one for index, one in after.aside.items()},
        infos,
        dropped,
        read,
    )
    late = frozenset(asked.indexes)
    new: list[tuple[Change, Content | None]] = []
    for path, content in after.by_path.items():
        old = infos.get(str(path))
        if content == _whole(str(path), old) or (content is None and old is None):
            continue
        rank = Rank.MANIFEST if str(path) == MANIFEST else Rank.INDEX if path in late else Rank.DATA
        new.append((Change(path=path, old=old, size=None, rank=rank), content))
    changes, contents = _numbered(new)
    names = {change.key for change in changes}
    read_keys = {str(path) for edit in edits for path in read_paths(edit)} | {
        piece.key
        for content in (*contents.values(), *back.by_path.values())
        for piece in content or ()
        if isinstance(piece, Source)
    }
    plan = ObjectPlan(
        id=secrets.token_hex(8),
        target=asked.target,
        summary=asked.summary,
        created=time.time(),
        changes=changes,
        before={change.path: back.by_path[change.path] for change in changes},
        sources={key: infos[key] for key in sorted(read_keys - names - set(kept_keys.values()))},
    )
    return Draft(plan=plan, contents=contents, kept=after.aside, pins=infos)


def draft_of_undo(number: int, undone: ObjectPlan, listed: Mapping[str, ObjectInfo]) -> Draft:
    """Return what the undo of a transaction writes: the contents that its plan recorded."""
    changes, contents = _numbered(
        (replace(change, old=listed.get(change.key)), undone.before[change.path])
        for change in undone.changes
    )
    plan = ObjectPlan(
        id=secrets.token_hex(8),
        target=undone.target,
        summary=undone.summary,
        created=time.time(),
        changes=changes,
        undoes=number,
    )
    return Draft(plan=plan, contents=contents, kept={}, pins=listed)


def _numbered(
    new: Iterable[tuple[Change, Content | None]],
) -> tuple[tuple[Change, ...], dict[int, Content]]:
    """Return changes with the sizes of what they write, and this by their numbers."""
    changes: list[Change] = []
    contents: dict[int, Content] = {}
    for change, content in new:
        if content is not None:
            contents[len(changes)] = content
        changes.append(replace(change, size=None if content is None else size_of(content)))
    return tuple(changes), contents


def _whole(key: str, info: ObjectInfo | None) -> Content | None:
    return None if info is None else joined((Source(key, 0, info.size),))


def _check_way_back(
    after: Contents,
    back: Contents,
    kept: Mapping[str, Content],
    infos: Mapping[str, ObjectInfo],
    dropped: set[PurePosixPath],
    read: Read,
) -> None:
    """Raise OperationError unless the way back ends in every old byte.

    Of a duplicate (``dropped``) the plan compared every byte with the bytes that stay.
    """
    for path, content in back.by_path.items():
        info = infos.get(str(path))
        if (info is None) != (content is None) or (
            content is not None and info and size_of(content) != info.size
        ):
            raise OperationError(
                f"{path}: an undo would not restore this object; nothing was changed"
            )
        position = 0
        for piece in traced(content or (), after, kept):
            if isinstance(piece, bytes):
                same = read(str(path), position, len(piece)) == piece
                position += len(piece)
            else:
                same = path in dropped or (piece.key, piece.offset) == (str(path), position)
                position += piece.length
            if not same:
                raise OperationError(
                    f"{path}: an undo would restore different bytes at offset {position}; nothing "
                    "was changed"
                )


def like_of(content: Content) -> str | None:
    """Return the object with most of the bytes, which passes on its metadata; None: all new."""
    sources = [piece for piece in content if isinstance(piece, Source)]
    return max(sources, key=lambda piece: piece.length).key if sources else None


def moved_from(content: Content, infos: Mapping[str, ObjectInfo]) -> str | None:
    """Return the object of which a content has all bytes and no others, None for none."""
    keys = [piece.key for piece in content if isinstance(piece, Source)]
    return keys[0] if keys and content == _whole(keys[0], infos.get(keys[0])) else None


def pieces_of(content: Content, pins: Mapping[str, ObjectInfo], *, before: str = "") -> list[Piece]:
    """Return a content as a store composes it, its ranges in the state of ``pins``. ``before``: what
    precedes its keys in that store.
    """
    return [
        piece
        if isinstance(piece, bytes)
        else ObjectRange(
            f"{before}{piece.key}",
            piece.offset,
            piece.length,
            pins[piece.key].etag if piece.key in pins else "",
        )
        for piece in content
    ]
