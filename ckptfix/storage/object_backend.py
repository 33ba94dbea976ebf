"""Transactions in a store: every new object is composed at a key of its own, and proven there.

Only then the state becomes "commit", and each is copied over its name by a write that holds only
while the name has its old object. No name is ever half new. N is the number of a transaction; what
is written, in this order, and what the next ``repair`` or ``undo`` does after a kill behind it::

    lock                               refused until --break-lock; deletes what has no state
    N.objects/state.json: "staging"    deletes N, its state last: nothing was changed
    N.objects/plan, kept/i, new/i      the same, with the parts of uploads that were cut short
    (proof: read with new/i shown at their names; then all ETags are compared again)
    N.objects/state.json: "commit"     copies what is not copied yet, and goes on below
    each name: data, indexes,          the same; a name with the mark of N is done, one with its old
      then deletions, the manifest     object is not, and any other one is left alone: JournalError
    (of an undo: new ETags are put into the states of the transactions before the undone one)
    N.objects/state.json: "done"       deletes the objects that no undo needs
    (of an undo: the undone transaction and N are deleted, each with its state last)

``check`` takes no lock, and reports "commit" alone as an interrupted repair. Every state is written
only while the one before it is there, so of two runs one fails. ``repair`` ends what was cut short
and plans anew. ``undo`` ends it, too, and undoes a repair that was finished so; a finished undo is
its answer.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import NoReturn

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
from ckptfix.storage.files import Prefix, Shown, StorePath
from ckptfix.storage.journal import State, TransactionInfo, journal_folders, transactions
from ckptfix.storage.object_contents import (
    Content,
    Source,
)
from ckptfix.storage.object_drafts import (
    Draft,
    carriage_of,
    draft_of,
    draft_of_undo,
    like_of,
    moved_from,
    pieces_of,
)
from ckptfix.storage.object_journal import (
    DELETIONS,
    Found,
    ObjectPlan,
    ObjectState,
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
from ckptfix.storage.paths import JOURNAL, command, shell_path
from ckptfix.storage.reading import open_reader
from ckptfix.storage.recipes import size_of
from ckptfix.storage.stores import ABSENT, ObjectInfo, ObjectRange, Piece, Store, together
from ckptfix.storage.transactions import RecoveryReport, TransactionPlan, carry_out
from ckptfix.wording import human_size, moment

_AT_ONCE = 8
"""Objects that are composed at once; each copies up to 8 of its parts at once."""

_BLOCK = 8 << 20


class ObjectBackend:
    """A checkpoint in a store, for whoever holds its lock (``store_lock``).

    ``files``: its objects, as they were listed when a transaction was planned. ``lock``: None where
    there are no transactions (``backends.ensure_in_place``).
    """

    def __init__(self, files: Prefix, lock: StoreLock | None) -> None:
        self.root = StorePath(files, files.url)
        self._files, self._lock = files, lock

    def transactions(self) -> tuple[TransactionInfo, ...]:
        """Return the transactions in its journal, oldest first."""
        return transactions(self.root)

    def begin(
        self, plan: TransactionPlan, *, transfer: bool = False, progress: Progress | None = None
    ) -> "ObjectAttempt":
        """Plan the new objects, and the way back. Nothing is written but a probe of conditions.

        Raises UsageError where bytes must travel and ``transfer`` does not allow it; ChangedError
        where an object is not the one that the edits were planned for.
        """
        store, root = self._files.store, self.root
        listed = store.list()

        def read(key: str, offset: int, length: int) -> bytes:
            with open_reader(root / key) as reader:
                return reader.read(offset, length)

        number = _next_number(store, listed)
        draft = draft_of(number, plan, self._files.objects_below(""), read)
        return self._attempt(number, draft, listed, transfer=transfer, progress=progress)

    def _attempt(
        self,
        number: int,
        draft: Draft,
        listed: Mapping[str, ObjectInfo],
        *,
        transfer: bool,
        progress: Progress | None,
    ) -> "ObjectAttempt":
        assert self._lock is not None
        _check_pins(self._files.store, draft.plan, listed)
        _check_carriage(self._files.store, number, draft, transfer)
        return ObjectAttempt(self._files, self._lock, number, draft, progress)

    def recover(
        self, *, force: bool = False, progress: Progress | None = None
    ) -> RecoveryReport | None:
        """Finish the transaction that was cut short in "commit", delete one that was staging, and
        clean up. An undo counts as rolled back: what it undid is as it was.

        Raises JournalError when the journal is damaged, or a name has an object that neither the
        transaction nor the time before it explains; that object is then not touched.
        """
        store = self._files.store
        uploaded = [
            number for number, state, _ in journal_folders(self.root) if state is State.PENDING
        ]
        if uploaded:
            raise JournalError(
                f"{self.root / JOURNAL}: this was uploaded from a folder in which repair "
                f"{uploaded[0]} was interrupted; next: download the checkpoint, run ckptfix undo "
                "there, and upload it again"
            )
        last: tuple[int, ObjectPlan] | None = None
        leftovers = 0
        for found in found_transactions(store.list(JOURNAL)):
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
                assert self._lock is not None
                _finish(
                    store,
                    found.number,
                    plan,
                    state,
                    found.objects["state.json"],
                    progress,
                    self._lock,
                )
                last = (found.number, plan)
            else:
                leftovers += _clean(store, found, {} if plan is None else plan.before, state.undoes)
                if state.undoes is not None:  # who asks for that undo again must not get one more
                    # Its plan may be deleted already.
                    gone = ObjectPlan(
                        id="", target="", summary=None, created=0.0, changes=(), undoes=state.undoes
                    )
                    last = (found.number, plan or gone)
        if last is None:  # no name changed: what was planned still holds
            return RecoveryReport(rolled_back=None, leftovers=leftovers) if leftovers else None
        self._files.refresh()
        number, plan = last
        info = TransactionInfo(
            number=number,
            state=State.DONE,
            target=plan.target,
            summary=plan.summary,
            created=plan.created,
            in_store=True,
        )
        is_undo = plan.undoes is not None
        return RecoveryReport(
            rolled_back=info if is_undo else None,
            leftovers=leftovers,
            finished=None if is_undo else info,
        )

    def undo(
        self,
        number: int,
        *,
        force: bool = False,
        transfer: bool = False,
        progress: Progress | None = None,
    ) -> tuple[PurePosixPath, ...]:
        """Restore every byte by a transaction of its own, which forgets both at its end.

        Raises ChangedError when an object is not the one that the undone transaction left;
        otherwise as ``commit`` does.
        """
        store = self._files.store
        listed = store.list()
        every = {found.number: found for found in found_transactions(listed) if found.has_begun}
        if number not in every:
            raise UsageError(f"{store.name()}: there is no transaction {number} to undo")
        state = read_state(store, every[number])
        plan = read_plan(store, every[number], state)
        if (changed := _changed(store, state.after, listed)) is not None:
            raise ChangedError(
                f"{changed} after repair {number}; nothing was undone; next: restore what repair "
                f"{number} left there, then run the same command again; or "
                f"{forget_objects(store, number)}"
            )
        draft = draft_of_undo(number, plan, listed)
        for content in draft.contents.values():
            for piece in content:
                if isinstance(piece, Source) and piece.key not in listed:
                    raise ChangedError(
                        f"{store.name(piece.key)} is missing, and the undo needs its bytes; "
                        f"nothing was undone; {forget_objects(store, number)}"
                    )
        kept = {f"{folder(number)}/kept/{index}": info for index, info in state.kept.items()}
        there = {key: info for key, info in kept.items() if key in listed}
        if (changed := _changed(store, there, listed)) is not None:
            raise ChangedError(f"{changed}; nothing was undone; {forget_objects(store, number)}")
        attempt = self._attempt(max(every) + 1, draft, listed, transfer=transfer, progress=progress)
        carry_out(attempt, lambda: None)
        return ()


class ObjectAttempt:
    """A transaction under way in a store."""

    def __init__(
        self,
        files: Prefix,
        lock: StoreLock,
        number: int,
        draft: Draft,
        progress: Progress | None,
    ) -> None:
        self.number = number
        self._files, self._store, self._lock = files, files.store, lock
        self._draft, self._progress = draft, progress
        # The states that this run wrote.
        self._begun: ObjectInfo | None = None
        self._committed: ObjectInfo | None = None
        self._state = ObjectState(stage=Stage.STAGING, undoes=draft.plan.undoes)

    @contextmanager
    def made(self) -> Iterator[None]:
        """Compose every new object aside, and show it at its name in the block."""
        store, number, draft = self._store, self.number, self._draft
        self._begun = write_state(store, number, self._state, ABSENT)
        digest = write_plan(store, number, draft.plan)
        kept = self._composed("kept", draft.kept)
        new = self._composed("new", draft.contents)
        self._state = replace(self._state, stage=Stage.COMMIT, plan=digest, new=new, kept=kept)
        # An undo restores what the journal proves, and reads nothing.
        if draft.plan.undoes is not None:
            yield
            return
        shown: dict[str, Shown | None] = {}
        for index, change in enumerate(draft.plan.changes):
            shown[change.key] = None
            if change.size is not None:
                moved = moved_from(draft.contents[index], draft.pins)
                shown[change.key] = Shown(f"{folder(number)}/new/{index}", new[index], moved)
        with self._files.showing("", shown):
            yield
        # Also of a read while it was planned: what could not be read decides nothing.
        self._files.raise_failure()

    def _composed(self, where: str, contents: Mapping[int, Content]) -> dict[int, ObjectInfo]:
        """Compose objects at keys of their own, several at once; return them by number."""
        store, draft = self._store, self._draft
        made: dict[int, ObjectInfo] = {}

        def compose(index: int) -> None:
            key, content = f"{folder(self.number)}/{where}/{index}", contents[index]
            like = like_of(content)
            if like is None and where == "new" and draft.plan.changes[index].old is not None:
                like = draft.plan.changes[index].key
            info = store.compose(key, pieces_of(content, draft.pins), like=like)
            if info.size != size_of(content):
                raise OperationError(
                    f"{store.name(key)}: wrong size after composing (expected {size_of(content)} "
                    f"bytes, found {info.size})"
                )
            made[index] = info
            if self._progress is not None:
                self._progress(info.size)

        together(sorted(contents), compose, _AT_ONCE)
        return made

    def commit(self) -> None:
        """Set the state to "commit", where this run still has the lock, and no name changed."""
        assert self._begun is not None
        _check_pins(self._store, self._draft.plan, self._store.list())
        self._lock.check()
        self._committed = write_state(self._store, self.number, self._state, self._begun.etag)

    def roll_back(self, error: BaseException) -> NoReturn:
        """Delete what was staged; nothing else was touched.

        Another state than this run wrote is there when the answer to the commit was lost, or
        another run took over: whatever it is then, the next run goes on from there.
        """
        store, number, words = self._store, self.number, "nothing was changed"
        try:
            found = _transaction(store, number)
            if found is not None and self._begun is not None and found.has_begun:
                if found.objects["state.json"].etag != self._begun.etag:
                    # An interrupt: whoever stops it says what is there now.
                    if not isinstance(error, Exception):
                        raise error
                    raise JournalError(
                        f"{error}; the next run finishes this transaction or rolls it back"
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
        raise error

    def finish(self) -> None:
        """Copy each new object over its name, and list the prefix anew."""
        store, plan = self._store, self._draft.plan
        assert self._committed is not None
        try:
            _finish(
                store, self.number, plan, self._state, self._committed, self._progress, self._lock
            )
        except LockedError:  # the run that took it over finishes this
            raise
        except CkptfixError as error:
            if isinstance(error, JournalError):
                raise
            raise JournalError(
                f"{error}; only some of the objects in {store.name()} have been replaced; next, to "
                f"finish: ckptfix {'undo' if plan.undoes is not None else 'repair'} "
                f"{shell_path(store.url)}"
            ) from error
        if plan.undoes is not None:
            return
        try:
            self._files.refresh()
        except CkptfixError as error:
            raise OperationError(
                f"{error}; repair {self.number} of {self._files.url} is complete; next: "
                f"{command('check', self._files.url)}"
            ) from error


def _transaction(store: Store, number: int) -> Found | None:
    found = found_transactions(store.list(JOURNAL))
    return next((one for one in found if one.number == number), None)


def _check_pins(store: Store, plan: ObjectPlan, listed: Mapping[str, ObjectInfo]) -> None:
    """Raise ChangedError when a name or a source is not the object that the plan is for."""
    pins: dict[str, ObjectInfo | None] = {change.key: change.old for change in plan.changes}
    if (changed := _changed(store, pins | dict(plan.sources), listed)) is not None:
        verb = "undo" if plan.undoes is not None else "repair"
        raise ChangedError(
            f"{changed}; next, when no other program writes there: ckptfix {verb} "
            f"{shell_path(store.url)}"
        )


def _changed(
    store: Store,
    expected: Mapping[str, ObjectInfo | None],
    listed: Mapping[str, ObjectInfo],
) -> str | None:
    """Return in words the first key that does not have its object any more, None for none."""
    for key, was in expected.items():
        now = listed.get(key)
        if (now.etag if now is not None else None) != (was.etag if was is not None else None):
            return _written_by_another(store, key, was, now)
    return None


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
    """Raise UsageError where bytes would travel or be overwritten unasked."""
    if transfer:
        return
    may_replace = "ckptfix could overwrite what another program writes meanwhile"
    if store.abilities.composes:
        if not store.keeps_conditions(f"{folder(number)}/probe"):
            raise UsageError(
                f"{store.name()}: this server ignores conditions on writes (If-Match), so "
                f"{may_replace}; nothing was changed; next, when no other program writes there: "
                "run the same command with --transfer"
            )
        return
    travel = carriage_of(store, draft.kept.values(), draft.contents.values())
    alone = (
        "" if store.abilities.conditions else f"; it has no conditional writes, so {may_replace}"
    )
    raise UsageError(
        f"{store.name()}: this store cannot copy parts of objects, so their bytes must be "
        f"transferred: {travel}{alone}; nothing was changed; next, to allow this: run the same "
        "command with --transfer"
    )


def _finish(
    store: Store,
    number: int,
    plan: ObjectPlan,
    state: ObjectState,
    written: ObjectInfo,
    progress: Progress | None,
    lock: StoreLock,
) -> None:
    """Copy each new object over its name, skip those that are done, and forget what is no longer
    needed.

    ``lock``: looked at before each name. A run that was only slow must not go on with what another
    one has undone since: a name can then be in the expected state again. Nothing is deleted unless
    all that stays is as it was made: it may have the bytes of what goes.
    """
    after: dict[str, ObjectInfo | None] = dict(plan.sources)

    def place(index: int) -> None:
        change = plan.changes[index]
        lock.check()
        after[change.key] = _place(store, number, plan, index, state.new.get(index))
        if progress is not None and change.size is not None:
            progress(change.size)

    for turn in sorted({change.turn for change in plan.changes}):
        if turn == DELETIONS:
            changed = _changed(store, after, store.list())
            if changed is not None:
                raise JournalError(
                    f"{changed} while the objects in {store.name()} were being replaced, so "
                    "nothing was deleted; next: restore the expected object, then run the same "
                    f"command again to finish; or {forget_objects(store, number)}"
                )
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
            f"{error}; the {verb} of {store.name()} is complete; objects that are no longer needed "
            f"may be left below {store.name(JOURNAL)}, and the next repair or undo deletes them"
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
            if change.old is not None
            and (was := state.after.get(change.key)) is not None
            # Alone: MinIO lists times in ms, and answers HEAD in seconds.
            and was.etag == change.old.etag
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
            f"{store.name(source)}: the journal contradicts itself about this object; "
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
            f"{_written_by_another(store, change.key, change.old, now)} while the objects in "
            f"{store.name()} were being replaced, so it was left alone, and only some of the "
            "others have been replaced; next: restore the expected object, then run the same "
            f"command again to finish; or {forget_objects(store, number)}"
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
    """Delete what a done transaction no longer needs; return how many objects went."""
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
    """Delete a transaction, its state last: it says what to do with the rest."""
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
