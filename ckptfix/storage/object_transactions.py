"""Transactions on the objects of one checkpoint in a store: all names change, or none, and it can
be undone.

Every new object is composed at a key of its own, and proven there. Only then the state becomes
"commit", and each is copied over its name by a write that holds only while the name has its old
object. No name is ever half new, and a run that is cut short is rolled back before "commit", and
finished after it.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import PurePosixPath
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.errors import (
    ChangedError,
    CkptfixError,
    JournalError,
    LockedError,
    OperationError,
    RolledBackError,
    StoreError,
    UsageError,
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
    Found,
    ObjectPlan,
    ObjectState,
    Rank,
    Stage,
    StoreLock,
    folder,
    forget_objects,
    found_transactions,
    read_plan,
    read_state,
    write_plan,
    write_state,
)
from ckptfix.storage.parallel import Progress
from ckptfix.storage.parts import plan_parts
from ckptfix.storage.paths import JOURNAL, MANIFEST, shell_path
from ckptfix.storage.recipes import Recipe
from ckptfix.storage.stores import ABSENT, ObjectInfo, ObjectRange, Piece, Store, together
from ckptfix.wording import human_size, moment

_AT_ONCE = 8
"""Objects that are composed at once; each copies up to 8 of its parts at once."""

_BLOCK = 8 << 20

Read = Callable[[str, int, int], bytes]
"""Reads bytes of an object as it was when the edits were planned: key, offset, length."""

Shown = Callable[[Mapping[PurePosixPath, "Staged"]], AbstractContextManager[None]]
"""Shows the changed names with their new objects, for the time of a proof."""


class Staged(NamedTuple):
    """The new object of a name, at a key of its own; ``key`` and ``info`` are None where the name
    is deleted.

    ``moved``: the name that has had exactly these bytes, None for new ones.
    """

    key: str | None
    info: ObjectInfo | None
    moved: PurePosixPath | None = None


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
    infos: Mapping[str, ObjectInfo],
    *,
    is_placed: bool = True,
) -> Carriage:
    """Return the bytes that objects of these contents cost; the journal and headers come on top.

    ``infos``: the objects that they are made of. ``is_placed``: each is made at a key of its own
    first, and then copied over its name; where many writes are made at once, that costs nothing.
    """
    down = up = copied = 0
    for content in contents:
        size = size_of(content)
        if store.abilities.atomic:
            [*sources] = {piece.key for piece in content if isinstance(piece, Source)}
            is_whole = len(sources) == 1 and content == _whole(sources[0], infos.get(sources[0]))
            copied += is_whole * size
            down += (
                0
                if is_whole
                else sum(piece.length for piece in content if isinstance(piece, Source))
            )
            up += 0 if is_whole else size
            continue
        if not store.abilities.composes:
            down += (
                sum(piece.length for piece in content if isinstance(piece, Source))
                + is_placed * size
            )
            up += size + is_placed * size
            continue
        for part in plan_parts(_pieces(content, {}), store.abilities):
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
    return _total(store, contents, after.aside.values(), infos)


def _total(
    store: Store,
    placed: Iterable[Content],
    kept: Iterable[Content],
    infos: Mapping[str, ObjectInfo],
) -> Carriage:
    both = carriage_of(store, placed, infos), carriage_of(store, kept, infos, is_placed=False)
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
    number: int,
    edits: Sequence[Edit],
    infos: Mapping[str, ObjectInfo],
    *,
    target: str,
    summary: object,
    indexes: Iterable[PurePosixPath],
    read: Read,
) -> Draft:
    """Return what a transaction with these edits writes, and its way back. Nothing is written.

    ``infos``: the objects that the edits were planned for. Raises OperationError where the edits
    are impossible, or do not lead back to every old byte.
    """
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
    late = frozenset(indexes)
    changes: list[Change] = []
    contents: dict[int, Content] = {}
    for path, content in after.by_path.items():
        old = infos.get(str(path))
        if content == _whole(str(path), old) or (content is None and old is None):
            continue
        if content is not None:
            contents[len(changes)] = content
        rank = Rank.MANIFEST if str(path) == MANIFEST else Rank.INDEX if path in late else Rank.DATA
        size = None if content is None else size_of(content)
        changes.append(Change(path=path, old=old, size=size, rank=rank))
    names = {change.key for change in changes}
    read_keys = {str(path) for edit in edits for path in read_paths(edit)} | {
        piece.key
        for content in (*contents.values(), *back.by_path.values())
        for piece in content or ()
        if isinstance(piece, Source)
    }
    plan = ObjectPlan(
        id=secrets.token_hex(8),
        target=target,
        summary=summary,
        created=time.time(),
        changes=tuple(changes),
        before={change.path: back.by_path[change.path] for change in changes},
        sources={key: infos[key] for key in sorted(read_keys - names - set(kept_keys.values()))},
    )
    return Draft(plan=plan, contents=contents, kept=after.aside, pins=infos)


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
            raise OperationError(f"{path}: an undo would not restore it; nothing was changed")
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
                    f"{path}: an undo would restore other bytes at {position}; nothing was changed"
                )


def commit_objects(
    store: Store,
    edits: Sequence[Edit],
    infos: Mapping[str, ObjectInfo],
    *,
    lock: StoreLock,
    target: str,
    summary: object,
    indexes: Iterable[PurePosixPath],
    read: Read,
    show: Shown,
    verify: Callable[[], None],
    transfer: bool = False,
    progress: Progress | None = None,
) -> int:
    """Make all edits, or none, and return the number of the transaction. The caller holds the lock.

    ``infos``: the objects that the edits were planned for, by key. ``indexes``: names that change
    after the others. ``show`` and ``verify``: the proof of the new objects, before any name
    changes. ``transfer``: let the bytes of a store that cannot compose go through this machine.

    Raises UsageError where that was not asked for; ChangedError, StoreError, RolledBackError when
    nothing was changed; JournalError when names were being replaced: the next ``recover_objects``
    finishes that.
    """
    listed = store.list()
    number = _next_number(store, listed)
    draft = draft_of(
        number, edits, infos, target=target, summary=summary, indexes=indexes, read=read
    )
    _carry_out(
        store, number, draft, lock, listed, show, verify, transfer=transfer, progress=progress
    )
    return number


def _carry_out(
    store: Store,
    number: int,
    draft: Draft,
    lock: StoreLock,
    listed: Mapping[str, ObjectInfo],
    show: Shown,
    verify: Callable[[], None],
    *,
    transfer: bool,
    progress: Progress | None,
) -> None:
    plan = draft.plan
    _check_pins(store, plan, listed)
    _check_carriage(store, number, draft, transfer)
    begun: ObjectInfo | None = None
    try:
        begun = write_state(
            store, number, ObjectState(stage=Stage.STAGING, undoes=plan.undoes), ABSENT
        )
        digest = write_plan(store, number, plan)
        kept = _compose_all(
            store,
            {
                index: (f"{folder(number)}/kept/{index}", content)
                for index, content in draft.kept.items()
            },
            draft,
            progress,
        )
        new = _compose_all(
            store,
            {
                index: (f"{folder(number)}/new/{index}", content)
                for index, content in draft.contents.items()
            },
            draft,
            progress,
        )
        with show(_staged(number, draft, new)):
            verify()
        _check_pins(store, plan, store.list())
        lock.check()
        state = ObjectState(stage=Stage.COMMIT, plan=digest, new=new, kept=kept, undoes=plan.undoes)
        committed = write_state(store, number, state, begun.etag)
    except BaseException as error:
        _roll_back(store, number, begun, error)
        raise
    try:
        _finish(store, number, plan, state, committed, progress, lock)
    except LockedError:  # the run that took it over finishes this
        raise
    except CkptfixError as error:
        if store.abilities.atomic:  # none of it was sent
            raise RolledBackError(f"{error}; nothing was changed") from error
        if isinstance(error, JournalError):
            raise
        raise JournalError(
            f"{error}; the names of {store.name()} are being replaced, and only some are new; "
            f"next, to finish: ckptfix {'undo' if plan.undoes is not None else 'repair'} "
            f"{shell_path(store.url)}"
        ) from error


def _roll_back(store: Store, number: int, begun: ObjectInfo | None, error: BaseException) -> None:
    """Delete what was staged, and raise an OperationError as one that says so; nothing else was
    touched.

    ``begun``: the state that this run wrote. Another one is there when the answer to the commit was
    lost, or another run took over: whatever it is then, the next run goes on from there.
    """
    words = "nothing was changed"
    try:
        found = _transaction(store, number)
        if found is not None and begun is not None and found.has_begun:
            if found.objects["state.json"].etag != begun.etag:
                # An interrupt: whoever stops it says what is there now.
                if not isinstance(error, Exception):
                    return
                raise JournalError(
                    f"{error}; nothing was changed yet; the next run finishes or rolls back"
                )
            _delete_transaction(store, found)
    except CkptfixError as second:
        if isinstance(second, JournalError):
            raise second from error
        words += f"; the next run deletes the new objects below {store.name(folder(number))}"
    if isinstance(error, ChangedError):
        raise ChangedError(f"{error}; {words}") from error
    if isinstance(error, CkptfixError):
        raise RolledBackError(f"{error}; {words}") from error


def _transaction(store: Store, number: int) -> Found | None:
    found = found_transactions(store.list(JOURNAL))
    return next((one for one in found if one.number == number), None)


def _check_pins(store: Store, plan: ObjectPlan, listed: Mapping[str, ObjectInfo]) -> None:
    """Raise ChangedError when a name or a source is not the object that the plan is for."""
    pins: dict[str, ObjectInfo | None] = {change.key: change.old for change in plan.changes}
    for key, was in (pins | dict(plan.sources)).items():
        now = listed.get(key)
        if (now is None) != (was is None) or (
            now is not None and was is not None and now.etag != was.etag
        ):
            raise ChangedError(
                f"{_written_by_another(store, key, was, now)}; next: {_when_idle(store, plan)}"
            )


def _when_idle(store: Store, plan: ObjectPlan) -> str:
    verb = "undo" if plan.undoes is not None else "repair"
    return f"when nothing writes there: ckptfix {verb} {shell_path(store.url)}"


def _written_by_another(
    store: Store, key: str, was: ObjectInfo | None, now: ObjectInfo | None
) -> str:
    expected = "no object" if was is None else f"ETag {was.etag}, {human_size(was.size)}"
    if now is None:
        return f"{store.name(key)}: another program deleted this object (expected {expected})"
    when = f" at {moment(now.modified_ns)}" if now.modified_ns else ""
    found = f"ETag {now.etag}, {human_size(now.size)}"
    return (
        f"{store.name(key)}: another program wrote this object{when} (expected {expected}; found "
        f"{found})"
    )


def _check_carriage(store: Store, number: int, draft: Draft, transfer: bool) -> None:
    """Raise UsageError where bytes must travel, or another program's be replaced, and nobody
    allowed it.
    """
    if transfer:
        return
    may_replace = (
        "it overwrites what another program wrote meanwhile: make sure that none writes there"
    )
    if store.abilities.composes:
        if not store.keeps_conditions(f"{folder(number)}/probe"):
            raise UsageError(
                f"{store.name()}: this server ignores conditions on writes (If-Match), so "
                f"{may_replace}; nothing was changed; next, when none does: the same command with "
                "--transfer"
            )
        return
    travel = _total(store, draft.contents.values(), draft.kept.values(), draft.pins)
    if store.abilities.atomic and not travel.down:  # duplicates go, and entries get other names
        return
    alone = "" if store.abilities.conditions else f", and {may_replace}"
    raise UsageError(
        f"{store.name()}: this store cannot cut parts out of objects, so their bytes must travel: "
        f"{travel}{alone}; nothing was changed; next, to let them travel: the same command with "
        "--transfer"
    )


def _compose_all(
    store: Store,
    objects: Mapping[int, tuple[str, Content]],
    draft: Draft,
    progress: Progress | None,
) -> dict[int, ObjectInfo]:
    """Compose objects at keys of their own, several at once; return them by number."""
    made: dict[int, ObjectInfo] = {}

    def compose(index: int) -> None:
        key, content = objects[index]
        info = store.compose(key, _pieces(content, draft.pins), like=_like(content, draft))
        if info.size != size_of(content):
            raise OperationError(
                f"{store.name(key)}: has {info.size} bytes, {size_of(content)} were composed"
            )
        made[index] = info
        if progress is not None:
            progress(info.size)

    together(sorted(objects), compose, _AT_ONCE)
    return made


def _like(content: Content, draft: Draft) -> str | None:
    """Return the object that passes on its storage class and metadata: the one with most of the
    bytes.
    """
    sources = [piece for piece in content if isinstance(piece, Source)]
    if sources:
        return max(sources, key=lambda piece: piece.length).key
    index = next((index for index, one in draft.contents.items() if one is content), None)
    change = draft.plan.changes[index] if index is not None else None
    return change.key if change is not None and change.old is not None else None


def _pieces(content: Content, pins: Mapping[str, ObjectInfo]) -> list[Piece]:
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


def _staged(
    number: int, draft: Draft, new: Mapping[int, ObjectInfo]
) -> dict[PurePosixPath, Staged]:
    staged: dict[PurePosixPath, Staged] = {}
    for index, change in enumerate(draft.plan.changes):
        if change.size is None:
            staged[change.path] = Staged(None, None)
            continue
        [*sources] = draft.contents[index]
        moved = None
        if len(sources) == 1 and isinstance(sources[0], Source):
            whole = draft.pins.get(sources[0].key)
            if whole is not None and sources[0] == Source(sources[0].key, 0, whole.size):
                moved = PurePosixPath(sources[0].key)
        staged[change.path] = Staged(f"{folder(number)}/new/{index}", new[index], moved)
    return staged


def _finish(
    store: Store,
    number: int,
    plan: ObjectPlan,
    state: ObjectState,
    written: ObjectInfo,
    progress: Progress | None,
    lock: StoreLock | None = None,
) -> None:
    """Copy each new object over its name, skip those that are done, and forget what is no longer
    needed.

    ``lock``: looked at before each name. A run that was only slow must not go on with what another
    one has undone since: a name can then be in the expected state again.
    """
    after: dict[str, ObjectInfo | None] = dict(plan.sources)

    def place(index: int) -> None:
        change = plan.changes[index]
        if lock is not None and not store.abilities.atomic:
            lock.check()
        after[change.key] = _place(store, number, plan, index, state.new.get(index))
        if progress is not None and change.size is not None:
            progress(change.size)

    for turn in sorted({change.turn for change in plan.changes}):
        together(
            [index for index, one in enumerate(plan.changes) if one.turn == turn], place, _AT_ONCE
        )
    if plan.undoes is not None:
        _pass_on(store, plan.undoes, after)
    done = ObjectState(
        stage=Stage.DONE,
        plan=state.plan,
        new=state.new,
        kept=state.kept,
        after=after,
        undoes=plan.undoes,
    )
    write_state(store, number, done, written.etag)
    try:
        found = _transaction(store, number)
        if found is not None:
            _clean(store, found, plan.before, plan.undoes)
    except CkptfixError as error:
        verb = "undo" if plan.undoes is not None else "repair"
        raise JournalError(
            f"{error}; the {verb} of {store.name()} is complete; objects that nothing needs any "
            f"more may be left below {store.name(JOURNAL)}, and the next repair or undo deletes "
            "them"
        ) from error


def _pass_on(store: Store, undone: int, restored: Mapping[str, ObjectInfo | None]) -> None:
    """Tell the transactions before an undone one which objects have their bytes now, so that they
    can be undone, too.

    A store may give an object another ETag though its bytes are the same: it was encrypted anew, or
    has other parts.
    """
    every = {one.number: one for one in found_transactions(store.list(JOURNAL)) if one.has_begun}
    if undone not in every:
        return
    left = read_plan(store, every[undone], read_state(store, every[undone]))
    for number, one in every.items():
        if number >= undone:
            continue
        state = read_state(store, one)
        after = {
            change.key: restored[change.key]
            for change in left.changes
            if change.old is not None and state.after.get(change.key) == change.old
        }
        if after:
            new = replace(state, after={**state.after, **after})
            write_state(store, number, new, one.objects["state.json"].etag)


def _place(
    store: Store, number: int, plan: ObjectPlan, index: int, staged: ObjectInfo | None
) -> ObjectInfo | None:
    """Copy a new object over its name, or delete the name; return what is there now."""
    change, source = plan.changes[index], f"{folder(number)}/new/{index}"
    if (staged is None) != (change.size is None) or (
        staged is not None and staged.size != change.size
    ):
        raise JournalError(
            f"{store.name(source)}: the journal contradicts itself about it; "
            f"{forget_objects(store, number)}"
        )
    try:
        if staged is None:
            store.delete(change.key, expected=change.expected)
            return None
        pieces: list[Piece] = (
            [ObjectRange(source, 0, staged.size, staged.etag)] if staged.size else [b""]
        )
        return store.compose(
            change.key, pieces, expected=change.expected, like=source, mark=plan.mark(index)
        )
    except ChangedError as error:
        now = store.stat(change.key)
        if staged is None and now is None:
            return None
        if (
            staged is not None
            and now is not None
            and _is_ours(store, change.key, now, source, staged, plan.mark(index))
        ):
            return now
        if (now is None and change.old is None) or (
            now is not None and change.old and now.etag == change.old.etag
        ):
            raise error  # the name is as it was: the new object is what changed
        raise JournalError(
            f"{_written_by_another(store, change.key, change.old, now)} while the names of "
            f"{store.name()} were being replaced, so that it was left alone, and the others are "
            "not all new; next: bring back what was there, then run the same command again to "
            f"finish; or {forget_objects(store, number)}"
        ) from error


def _is_ours(
    store: Store, key: str, now: ObjectInfo, source: str, staged: ObjectInfo, mark: str
) -> bool:
    """Return whether the object at a name is the new one that an earlier run copied there."""
    if now.size != staged.size:
        return False
    if store.abilities.composes:
        return store.mark(key) == mark
    for begin in range(0, now.size, _BLOCK):
        length = min(_BLOCK, now.size - begin)
        if store.read(key, begin, length) != store.read(source, begin, length):
            return False
    return True


def _clean(
    store: Store, found: Found, before: Mapping[PurePosixPath, Content | None], undoes: int | None
) -> int:
    """Delete what a done transaction no longer needs: all of it for an undo; return how many
    objects went.
    """
    if undoes is not None:
        undone = _transaction(store, undoes)
        gone = _delete_transaction(store, undone) if undone is not None else 0
        return gone + _delete_transaction(store, found)
    prefix = f"{folder(found.number)}/"
    needed = {
        piece.key.removeprefix(prefix)
        for content in before.values()
        for piece in content or ()
        if isinstance(piece, Source) and piece.key.startswith(prefix)
    }
    names = [name for name in found.objects if name not in {"state.json", "plan", *needed}]
    together(names, lambda name: store.delete(f"{prefix}{name}"), _AT_ONCE)
    return len(names)


def _delete_transaction(store: Store, found: Found) -> int:
    """Delete all objects of a transaction, its state last: until then the next run knows what to
    do.
    """
    prefix = f"{folder(found.number)}/"
    names = [name for name in found.objects if name not in {"state.json", "plan"}]
    together(names, lambda name: store.delete(f"{prefix}{name}"), _AT_ONCE)
    if "plan" in found.objects:  # it says what the state is about
        store.delete(f"{prefix}plan")
    if found.has_begun:
        store.delete(f"{prefix}state.json", expected=found.objects["state.json"].etag)
    return len(found.objects)


def _next_number(store: Store, listed: Mapping[str, ObjectInfo]) -> int:
    """Return the number of the next transaction. Raises JournalError when one is unfinished."""
    found = found_transactions(listed)
    for one in found:
        if not one.has_begun or read_state(store, one).stage is not Stage.DONE:
            raise JournalError(
                f"{store.name(folder(one.number))}: transaction {one.number} is unfinished; "
                f"recover it first: ckptfix undo {shell_path(store.url)}"
            )
    return found[-1].number + 1 if found else 1


class Recovered(NamedTuple):
    """Result of ``recover_objects``: the transaction that it finished, None for none, and how many
    left-overs went.

    An undo counts as finished here when only its cleaning up was left.
    """

    finished: tuple[int, ObjectPlan] | None
    leftovers: int


def recover_objects(store: Store, *, progress: Progress | None = None) -> Recovered:
    """Finish the transaction that was cut short in "commit", delete one that was staging, and clean
    up.

    The caller holds the lock. Raises JournalError when the journal is damaged, or a name has an
    object that neither the transaction nor the time before it explains; that object is then not
    touched.
    """
    finished, leftovers = None, 0
    listed = store.list(JOURNAL)
    for found in found_transactions(listed):
        if not found.has_begun:
            leftovers += _delete_transaction(store, found)
            continue
        state = read_state(store, found)
        if state.stage is Stage.STAGING:
            with suppress(StoreError):  # a credential may not be allowed to list uploads
                leftovers += store.abandoned(folder(found.number))
            leftovers += _delete_transaction(store, found)
            continue
        # Of kept copies only the plan says which an undo needs; 0.5.0 let all of them be.
        is_clean = set(found.objects) <= {"state.json", "plan"}
        if state.stage is Stage.DONE and state.undoes is None and is_clean:
            continue
        plan = (
            read_plan(store, found, state)
            if "plan" in found.objects or state.undoes is None
            else None
        )
        if state.stage is Stage.COMMIT:
            assert plan is not None
            _finish(store, found.number, plan, state, found.objects["state.json"], progress)
            finished = (found.number, plan)
        else:
            leftovers += _clean(store, found, {} if plan is None else plan.before, state.undoes)
            if state.undoes is not None:  # who asks for that undo again must not get one more
                finished = (found.number, plan or _forgotten(state.undoes))
    return Recovered(finished, leftovers)


def _forgotten(undoes: int) -> ObjectPlan:
    """Return what is known of an undo that was cut short after its plan was deleted."""
    return ObjectPlan(id="", target="", summary=None, created=0.0, changes=(), undoes=undoes)


def undo_objects(
    store: Store,
    number: int,
    *,
    lock: StoreLock,
    transfer: bool = False,
    progress: Progress | None = None,
) -> None:
    """Restore every byte from before a transaction, and forget it. The caller holds the lock and
    has recovered.

    Raises UsageError when there is no such transaction; ChangedError when an object is not the one
    that it left; otherwise as ``commit_objects`` does.
    """
    listed = store.list()
    every = found_transactions(listed)
    found = next((one for one in every if one.number == number and one.has_begun), None)
    if found is None:
        raise UsageError(f"{store.name()}: there is no transaction {number} to undo")
    state = read_state(store, found)
    plan = read_plan(store, found, state)
    _check_later(store, plan, [one for one in every if one.number > number])
    for key, was in state.after.items():
        now = listed.get(key)
        if (now is None) != (was is None) or (
            now is not None and was is not None and now.etag != was.etag
        ):
            raise ChangedError(
                f"{_written_by_another(store, key, was, now)} since repair {number}; nothing was "
                f"undone; next: bring back what repair {number} left there, then run the same "
                f"command again; or {forget_objects(store, number)}"
            )
    pins = dict(listed)
    contents: dict[int, Content] = {}
    changes: list[Change] = []
    for one in plan.changes:
        content = plan.before[one.path]
        if content is not None:
            contents[len(changes)] = content
        size = None if content is None else size_of(content)
        changes.append(Change(path=one.path, old=listed.get(one.key), size=size, rank=one.rank))
    for content in contents.values():
        for piece in content:
            if isinstance(piece, Source) and piece.key not in pins:
                raise ChangedError(
                    f"{store.name(piece.key)} is missing, and an undo needs its bytes; nothing was "
                    f"undone; {forget_objects(store, number)}"
                )
    for index, info in state.kept.items():
        key = f"{folder(number)}/kept/{index}"
        if key in pins and pins[key].etag != info.etag:
            raise ChangedError(
                f"{_written_by_another(store, key, info, pins[key])}; nothing was undone; "
                f"{forget_objects(store, number)}"
            )
    back = ObjectPlan(
        id=secrets.token_hex(8),
        target=plan.target,
        summary=plan.summary,
        created=time.time(),
        changes=tuple(changes),
        undoes=number,
    )
    draft = Draft(plan=back, contents=contents, kept={}, pins=pins)
    _carry_out(
        store, max(one.number for one in every) + 1, draft, lock, listed,
        lambda staged: nullcontext(), lambda: None, transfer=transfer, progress=progress,
    )  # fmt: skip


def _check_later(store: Store, plan: ObjectPlan, later: Iterable[Found]) -> None:
    mine = {change.key for change in plan.changes} | set(plan.sources)
    for one in later:
        theirs = read_plan(store, one, read_state(store, one))
        changed = mine.intersection(change.key for change in theirs.changes)
        needed = set(theirs.sources).intersection(change.key for change in plan.changes)
        if changed or needed:
            what = f"changed {min(changed)} too" if changed else f"needs {min(needed)} as it is now"
            url = f"{store.url}/{theirs.target}" if theirs.target else store.url
            raise ChangedError(
                f"{store.name()}: transaction {one.number} came later and {what}; undo "
                f"{one.number} first: ckptfix undo {shell_path(url)}"
            )
