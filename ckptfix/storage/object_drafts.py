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
    size_of,
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
from ckptfix.storage.recipes import Recipe
from ckptfix.storage.stores import ObjectInfo, ObjectRange, Piece, Store
from ckptfix.storage.transactions import TransactionPlan
from ckptfix.wording import human_size

Read = Callable[[str, int, int], bytes]
"""Reads bytes of an object as it was when the edits were planned: key, offset, length."""


class Carriage(NamedTuple):
    """Bytes of a transaction: those that go through this machine, and those that the store copies
    by itself.
    """

    down: int
    up: int
    copied: int

    def __str__(self) -> str:
        inside = f"; the store copies {human_size(self.copied)} by itself" if self.copied else ""
        return f"{human_size(self.down)} down and {human_size(self.up)} up{inside}"


def carriage_of(
    store: Store,
    contents: Iterable[Content],
    *,
    is_placed: bool = True,
) -> Carriage:
    """Return the bytes that objects of these contents cost; the journal and headers come on top.

    ``is_placed``: each is made at a key of its own first, and then copied over its name.
    """
    down = up = copied = 0
    for content in contents:
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
    """Return the bytes that a transaction with these edits costs. Raises OperationError for
    impossible ones.
    """
    after = contents_after(edits, {key: info.size for key, info in infos.items()})
    contents = [
        content
        for path, content in after.by_path.items()
        if content is not None and content != _whole(str(path), infos.get(str(path)))
    ]
    return total_cost(store, contents, after.aside.values())


def total_cost(
    store: Store,
    placed: Iterable[Content],
    kept: Iterable[Content],
) -> Carriage:
    """Return what a transaction costs: new objects, which are placed, and copies that are kept."""
    both = carriage_of(store, placed), carriage_of(store, kept, is_placed=False)
    return Carriage(*map(sum, zip(*both, strict=True)))


class Draft(Struct, frozen=True, kw_only=True):
    """A transaction before its first request: the changes, their contents, and what is kept
    aside.
    """

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


def like_of(content: Content, draft: Draft) -> str | None:
    """Return the object that passes on its storage class and metadata: the one with most of the
    bytes.
    """
    sources = [piece for piece in content if isinstance(piece, Source)]
    if sources:
        return max(sources, key=lambda piece: piece.length).key
    index = next((index for index, one in draft.contents.items() if one is content), None)
    change = draft.plan.changes[index] if index is not None else None
    return change.key if change is not None and change.old is not None else None


def pieces_of(content: Content, pins: Mapping[str, ObjectInfo]) -> list[Piece]:
    """Return a content as a store composes it, its ranges in the state of ``pins``."""
    return [
        (
            piece
            if isinstance(piece, bytes)
            else ObjectRange(
                piece.key,
                piece.offset,
                piece.length,
                pins[piece.key].etag if piece.key in pins else "",
            )
        )
        for piece in content
    ]
