"""Transactions on the files of one folder: all edits happen, or none, and a committed one can be
undone.

The journal of ``ROOT`` is the folder ``ROOT/.ckptfix``; transaction 7 is a folder in it::

    0007.building   the plan and the new files are being written; garbage after a crash
    0007.pending    edits happen, one note in ``steps`` before each; rolled back by the next run after a crash
    0007.done       committed by the rename to this name; an undo renames back to pending and rolls back

Each name is made durable before the step that it announces begins, so there is one way forward, one
way back, and no state in which a reader of the journal has to guess.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.errors import (
    ChangedError,
    CkptfixError,
    FileChangedError,
    JournalError,
    OperationError,
    RolledBackError,
    UsageError,
)
from ckptfix.storage.applying import act, check_kept, hold, prepare, undo_edit
from ckptfix.storage.atomic import remove_folder, sync_folder
from ckptfix.storage.comparing import Digests, fingerprint, samples_digest
from ckptfix.storage.edits import (
    Edit,
    Move,
    Remove,
    Replace,
    check_edit,
    edited_paths,
    read_paths,
    record_of,
)
from ckptfix.storage.files import AnyPath, StorePath
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import JOURNAL, command, locate
from ckptfix.storage.reading import (
    ABSENT,
    FileIdentity,
    identity,
    open_reader,
    unchanged,
)
from ckptfix.storage.recipes import Recipe, build, with_digests
from ckptfix.storage.transaction_folder import (
    Note,
    Workspace,
    add_note,
    cut_notes,
    read_all_notes,
    read_notes,
    start_notes,
    write_after,
)
from ckptfix.storage.transaction_plan import TransactionRecord, read_record, write_record
from ckptfix.storage.transactions import (
    State,
    TransactionInfo,
    check_dropped,
    check_real,
    check_undoable,
    describe,
    journal_folders,
    transactions,
)

if TYPE_CHECKING:
    from ckptfix.storage.object_journal import StoreLock


class RecoveryReport(Struct, frozen=True, kw_only=True):
    """Result of ``recover``: the transaction rolled back (None: none), and the number of left-overs
    removed.

    ``finished``: the transaction that was finished instead, in a store.
    """

    rolled_back: TransactionInfo | None
    leftovers: int
    finished: TransactionInfo | None = None


def recover(
    root: AnyPath, *, force: bool = False, progress: Progress | None = None
) -> RecoveryReport | None:
    """Roll back the unfinished transaction and clean up after a crash; None when there was nothing
    to do.

    The caller holds the lock. Raises JournalError when the journal is damaged or a file is neither
    as before nor as the transaction left it; that file is then not touched. ``force`` accepts other
    modification times of files whose size and ends are right.

    In a store a transaction whose names were being replaced is finished, and an undo counts as
    rolled back: what it undid is as it was.
    """
    if isinstance(root, StorePath):
        return _recover_objects(root, progress)
    leftovers, rolled_back = 0, None
    folders = journal_folders(root)
    for _, _, folder in folders:
        check_real(folder)
    try:
        for number, state, folder in reversed(folders):
            if state is State.BUILDING:
                remove_folder(folder)
                leftovers += 1
            elif state is State.PENDING:
                rolled_back = describe(folder, number, state)
                if force:
                    Workspace(root, folder).accept_any_time()
                _roll_back(root, folder, progress)
            else:
                leftovers += _empty_trash(folder)
    except OSError as error:
        raise JournalError(
            f"{root}: an earlier run was cut short and cannot be rolled back yet: {error}; mend "
            f"that, then: {command('undo', root)}"
        ) from error
    return (
        RecoveryReport(rolled_back=rolled_back, leftovers=leftovers)
        if rolled_back or leftovers
        else None
    )


def _recover_objects(root: StorePath, progress: Progress | None) -> RecoveryReport | None:
    from ckptfix.storage.object_transactions import recover_objects

    pending = [one for one in transactions(root) if one.state is State.PENDING]
    if uploaded := [one for one in pending if one.foreign]:
        number = uploaded[0].number
        raise JournalError(
            f"{root / JOURNAL}: repair {number} was cut short in a folder, which was uploaded "
            "then; next: download the checkpoint, run ckptfix undo there, and upload it again"
        )
    recovered = recover_objects(root.files.store, progress=progress)
    if recovered.finished is None:  # no name changed: what was planned still holds
        return (
            RecoveryReport(rolled_back=None, leftovers=recovered.leftovers)
            if recovered.leftovers
            else None
        )
    root.files.refresh()
    number, plan = recovered.finished
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
        leftovers=recovered.leftovers,
        finished=None if is_undo else info,
    )


def commit(
    root: AnyPath,
    edits: Sequence[Edit],
    *,
    target: str,
    summary: object,
    verify: Callable[[], None],
    watched: Iterable[PurePosixPath] = (),
    known: Mapping[PurePosixPath, FileIdentity] | None = None,
    digests: Mapping[PurePosixPath, Digests] | None = None,
    indexes: Iterable[PurePosixPath] = (),
    lock: "StoreLock | None" = None,
    transfer: bool = False,
    progress: Progress | None = None,
) -> int:
    """Apply all edits in order, call ``verify``, and return the number of the committed
    transaction.

    The caller holds the lock and has called ``recover``. ``target`` is the path that the user
    named, ``summary`` any JSON value; ``watched`` are further files (besides edited ones and those
    that recipes read) whose change makes an undo refuse. ``known``: the files that the edits were
    planned for. When a save wrote one of them by the time that an edit takes it, or until the end,
    all is undone, and the save's files stay. ``digests``: of parts of files that recipes read,
    where they were read already. ``progress`` gets the bytes copied since its last call. For a path
    in a store: ``indexes`` are the files that list others, which change after them; ``lock`` is
    that of the store; ``transfer`` lets bytes go through this machine where it cannot compose.

    Raises OperationError when it failed before anything was touched, RolledBackError when an edit
    or ``verify`` failed (``__cause__``) and all was undone, JournalError when the undoing failed
    too: the next ``recover`` finishes it. KeyboardInterrupt and the like are re-raised after the
    roll-back.
    """
    if isinstance(root, StorePath):
        return _commit_objects(
            root,
            edits,
            target,
            summary,
            verify,
            indexes,
            lock,
            transfer=transfer,
            progress=progress,
        )
    number = _next_number(root)
    for edit in edits:
        check_edit(edit)
    watching = tuple(dict.fromkeys((*_all_paths(edits), *watched)))
    building = root / JOURNAL / f"{number:04}.building"
    pending, done = building.with_suffix(".pending"), building.with_suffix(".done")
    record = _build(root, building, edits, target, summary, watching, digests or {}, progress)
    try:
        os.rename(building, pending)
        sync_folder(root / JOURNAL)
        sync_folder(root)
        work = Workspace(root, pending)
        expected = dict(known or {})
        notes: list[Note] = []
        for index, edit in enumerate(edits):
            # Unchanged until after the note: so it is of the planned file, and the edit refuses to
            # take a later one.
            with unchanged(
                root, {path: expected[path] for path in edited_paths(edit) if path in expected}
            ):
                note = prepare(work, index, edit)
            add_note(pending, note)
            notes.append(note)
            _act(work, index, edit, note)
            expected |= {path: identity(root / path) for path in edited_paths(edit)}
            # Not as they are now: a save may have written these names since.
            if isinstance(edit, Remove | Move):
                expected[edit.path if isinstance(edit, Remove) else edit.source] = ABSENT
            if isinstance(edit, Move) and note.old is not None and note.old.kind == "file":
                now = expected[edit.target]
                expected[edit.target] = now._replace(size=note.old.size, mtime_ns=note.old.mtime_ns)
        hold(work, edits)
        with unchanged(root, expected):
            verify()
            write_after(
                pending,
                {path: fingerprint(root / path) for path in watching},
                {
                    path: samples_digest(root / path)
                    for path in watching
                    if os.path.lexists(root / path)
                },
            )
            sync_folder(pending)
            check_dropped(work, record, progress)
        for index, edit in enumerate(edits):
            check_kept(work, index, edit, notes[index])
        os.rename(pending, done)
        sync_folder(root / JOURNAL)
    except BaseException as error:
        _undo_after(root, building, error, progress)
        if not isinstance(error, Exception):
            raise
        if (changed := _change_behind(error)) is not None:
            raise RolledBackError(
                f"{changed.problem}; everything was rolled back; next: wait until the save has "
                "ended, then run the same command again"
            ) from error
        raise RolledBackError(f"{root}: {error}; everything is unchanged") from error
    with suppress(OSError):  # the transaction is committed; the next run frees the space
        _empty_trash(done)
    return number


def _commit_objects(
    root: StorePath,
    edits: Sequence[Edit],
    target: str,
    summary: object,
    verify: Callable[[], None],
    indexes: Iterable[PurePosixPath],
    lock: "StoreLock | None",
    *,
    transfer: bool,
    progress: Progress | None,
) -> int:
    from ckptfix.storage.files import Shown
    from ckptfix.storage.object_transactions import Staged, commit_objects

    files = root.files

    def show(staged: Mapping[PurePosixPath, Staged]) -> AbstractContextManager[None]:
        return files.showing(
            "",
            {
                str(path): (
                    Shown(one.key, one.info, str(one.moved) if one.moved is not None else None)
                    if one.key is not None and one.info is not None
                    else None
                )
                for path, one in staged.items()
            },
        )

    def read(key: str, offset: int, length: int) -> bytes:
        with open_reader(root / key) as reader:
            return reader.read(offset, length)

    def prove() -> None:
        verify()
        # Also of a read while it was planned: what could not be read decides nothing.
        files.raise_failure()

    if lock is None:
        raise OperationError(
            f"{root}: nothing was changed: this verb does not lock a checkpoint in a store"
        )
    number = commit_objects(
        files.store, edits, files.objects_below(""), lock=lock, target=target, summary=summary, indexes=indexes,
        read=read, show=show, verify=prove, transfer=transfer, progress=progress,
    )  # fmt: skip
    try:
        files.refresh()
    except CkptfixError as error:
        raise OperationError(
            f"{error}; repair {number} of {root} is complete; next: {command('check', root)}"
        ) from error
    return number


def carriage(root: AnyPath, edits: Sequence[Edit], *, is_copy: bool) -> str | None:
    """Return in words the bytes that the edits send to the store, None for a folder on this machine.

    ``is_copy``: they are made in a copy of the whole checkpoint.
    """
    if not isinstance(root, StorePath) or not (edits or is_copy):
        return None
    from ckptfix.storage.object_copies import carriage_of_copy
    from ckptfix.storage.object_transactions import carriage_of_edits

    cost = carriage_of_copy if is_copy else carriage_of_edits
    return str(cost(root.files.store, edits, root.files.objects_below("")))


def _act(work: Workspace, index: int, edit: Edit, note: Note) -> None:
    try:
        act(work, index, edit, note)
    except ChangedError:  # noticed before anything was done: there is nothing to undo of this edit
        cut_notes(work.folder, index)
        raise


def undo(
    root: AnyPath,
    number: int,
    *,
    force: bool = False,
    lock: "StoreLock | None" = None,
    transfer: bool = False,
    progress: Progress | None = None,
) -> tuple[PurePosixPath, ...]:
    """Undo a committed transaction byte for byte, and forget it; return what ``force`` accepted
    without a proof.

    Every byte that comes back is compared with the digests in the journal first; of bytes that stay
    in place, the size, both ends and pages between them. Times prove nothing. ``force`` accepts
    another time of files of which a journal of 0.4.0 or older has no digest, and nothing else.
    ``lock`` and ``transfer``: as of ``commit``.

    The caller holds the lock and has called ``recover``. Raises UsageError when there is no such
    transaction; ChangedError when a later transaction needs the current files, or when a file
    differs from the transaction's result, or cannot be proven the same; JournalError when it could
    not finish: the next ``recover`` does.
    """
    if isinstance(root, StorePath):
        from ckptfix.storage.object_transactions import undo_objects

        if lock is None:
            raise OperationError(
                f"{root}: nothing was undone: this verb does not lock a checkpoint in a store"
            )
        undo_objects(root.files.store, number, lock=lock, transfer=transfer, progress=progress)
        return ()
    _next_number(root)
    done = root / JOURNAL / f"{number:04}.done"
    if number not in (info.number for info in transactions(root)):
        numbers = ", ".join(str(info.number) for info in transactions(root)) or "there is none"
        raise UsageError(f"{root}: there is no transaction {number} to undo (known: {numbers})")
    record = read_record(done)
    read_all_notes(done, len(record.edits))
    pending = done.with_suffix(".pending")
    try:
        allowed = check_undoable(root, done, number, record, force=force)
        Workspace(root, done).accept_any_time(allowed.any_time)
        os.rename(done, pending)
    except OSError as error:
        raise OperationError(f"{root}: nothing was undone: {error}") from error
    try:
        sync_folder(root / JOURNAL)
        _roll_back(root, pending, progress)
    except OSError as error:
        raise JournalError(
            f"{root}: the undo could not finish, the next run does: {error}"
        ) from error
    return allowed.unproven


def _next_number(root: Path) -> int:
    """Return the number of the next transaction; raise JournalError when one is unfinished."""
    folders = journal_folders(root)
    for number, state, folder in folders:
        check_real(folder)
        if state is not State.DONE:
            raise JournalError(
                f"{folder}: transaction {number} is unfinished; recover it first: "
                f"{command('undo', root)}"
            )
    return folders[-1][0] + 1 if folders else 1


def _all_paths(edits: Sequence[Edit]) -> Iterable[PurePosixPath]:
    for edit in edits:
        yield from edited_paths(edit)
        yield from read_paths(edit)


def _build(
    root: Path,
    building: Path,
    edits: Sequence[Edit],
    target: str,
    summary: object,
    watching: tuple[PurePosixPath, ...],
    digests: Mapping[PurePosixPath, Digests],
    progress: Progress | None,
) -> TransactionRecord:
    """Write everything that the transaction needs, and return its plan. When that fails, for
    instance on a full disk, nothing has changed.
    """
    try:
        with suppress(FileExistsError):
            os.mkdir(root / JOURNAL)
        os.mkdir(building, 0o700)  # its contents may come from files that others must not read
        work = Workspace(root, building)
        for index, edit in enumerate(edits):
            if isinstance(edit, Replace):
                build(edit.content, root, work.new(index), progress=progress)
        record = TransactionRecord(
            target=target,
            summary=summary,
            created=time.time(),
            edits=tuple(record_of(_with_digests(root, edit, digests)) for edit in edits),
            watched=watching,
        )
        write_record(building, record)
        start_notes(building)
        sync_folder(building)
        return record
    except BaseException as error:
        with suppress(OSError):  # the next run removes it
            remove_folder(building)
        if isinstance(error, OSError):
            raise OperationError(f"{root}: nothing was changed: {error}") from error
        raise


def _with_digests(root: Path, edit: Edit, known: Mapping[PurePosixPath, Digests]) -> Edit:
    """Return the edit with the digests of the bytes that an undo will read from other files."""
    if not isinstance(edit, Remove) or not isinstance(edit.previous, Recipe):
        return edit
    path = locate(root, edit.path)
    if not path.is_file() or path.stat().st_size != edit.previous.size:
        # A file of an earlier edit, or a mismatch with the recipe that a later check reports.
        return edit
    return replace(edit, previous=with_digests(edit.previous, path, known))


def _undo_after(
    root: Path, building: Path, error: BaseException, progress: Progress | None
) -> None:
    """Roll back after ``error``, from whichever state the transaction got to."""
    pending, done = building.with_suffix(".pending"), building.with_suffix(".done")
    try:
        if os.path.lexists(done):
            os.rename(done, pending)
            # Else a crash may leave it half undone, yet committed on the disk.
            sync_folder(root / JOURNAL)
        if os.path.lexists(building):
            remove_folder(building)
        else:
            _roll_back(root, pending, progress, keeps_newer=True)
    except (
        JournalError
    ) as second:  # the next run cannot roll it back, either, before somebody does what this says
        changed = _change_behind(error)
        raise JournalError(
            f"{root}: failed ({changed.problem if changed is not None else error}), and cannot be "
            f"rolled back: {second}"
        ) from error
    except Exception as second:
        raise JournalError(
            f"{root}: failed ({error}), and rolling back failed too ({second}); the next run rolls "
            f"it back: {command('undo', root)}"
        ) from error


def _change_behind(error: BaseException) -> FileChangedError | None:
    """Return the change of a file by a save that an error is about, or that led to it."""
    changed = error if isinstance(error, FileChangedError) else error.__cause__
    return changed if isinstance(changed, FileChangedError) else None


def _roll_back(
    root: Path, folder: Path, progress: Progress | None, *, keeps_newer: bool = False
) -> None:
    """Undo the edits of a pending transaction in reverse order, and remove it. ``keeps_newer``: as
    of ``undo_edit``.
    """
    record = read_record(folder)
    notes = read_notes(folder, len(record.edits))
    work = Workspace(root, folder)
    for index in range(len(notes) - 1, -1, -1):
        undo_edit(work, index, record.edits[index], notes[index], progress, keeps_newer=keeps_newer)
        cut_notes(folder, index)
    stranded = [name for name in os.listdir(folder) if name.endswith((".kept", ".trash", ".moved"))]
    # Never reached; but the next step deletes, and these would be the user's only copy.
    if stranded:
        raise JournalError(
            f"{folder / stranded[0]}: still there after the roll-back; nothing more was done"
        )
    garbage = folder.with_suffix(".building")
    # A half-deleted pending transaction could not be read by the next run.
    os.rename(folder, garbage)
    sync_folder(folder.parent)
    remove_folder(garbage)


def _empty_trash(folder: Path) -> int:
    """Delete what only a roll-back needs, files that a recipe can rebuild and second names; return
    their number.
    """
    try:
        names = [name for name in os.listdir(folder) if name.endswith((".trash", ".moved"))]
    except PermissionError:  # another user's repair, which only that user can clean up
        return 0
    for name in names:
        os.unlink(folder / name)
    return len(names)
