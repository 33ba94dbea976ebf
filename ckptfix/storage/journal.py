"""Transactions on the files of one folder: all edits happen, or none, and what happened can be undone.

The journal of ``ROOT`` is the folder ``ROOT/.ckptfix``; transaction 7 is a folder in it::

    0007.building   the plan and the new files are being written; garbage after a crash
    0007.pending    edits happen, one note in ``steps`` before each; rolled back by the next run after a crash
    0007.done       committed by the rename to this name; an undo renames back to pending and rolls back

Each name is made durable before what it promises begins, so there is one way forward, one way back, and no state
in which a reader of the journal has to guess.
"""

import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ckptfix.errors import ChangedError, JournalError, OperationError, RolledBackError, UsageError
from ckptfix.storage.applying import Workspace, act, prepare
from ckptfix.storage.atomic import remove_tree, sync_folder
from ckptfix.storage.building import build
from ckptfix.storage.copying import supports_reflink
from ckptfix.storage.edits import (
    JOURNAL,
    Edit,
    Remove,
    Replace,
    Replaced,
    Truncate,
    check_edit,
    edited_paths,
    read_paths,
    record_of,
)
from ckptfix.storage.fingerprints import fingerprint
from ckptfix.storage.recipes import Recipe
from ckptfix.storage.records import (
    Metadata,
    TransactionRecord,
    add_note,
    cut_notes,
    read_after,
    read_notes,
    read_record,
    write_after,
    write_record,
)
from ckptfix.storage.rollback import restore_metadata, undo_edit
from ckptfix.storage.transaction import State, TransactionInfo, describe, journal_folders, transactions

__all__ = [
    "Progress",
    "RecoveryReport",
    "State",
    "TransactionInfo",
    "commit",
    "recover",
    "transactions",
    "undo",
]

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What ``recover`` did: the transaction rolled back (None: none), and the number of left-overs removed."""

    rolled_back: TransactionInfo | None
    leftovers: int


def recover(root: Path, *, progress: Progress | None = None) -> RecoveryReport | None:
    """Roll back the unfinished transaction and clean up after a crash; None when there was nothing to do.

    The caller holds the lock. Raises JournalError when the journal is damaged or a file is neither as before nor
    as the transaction left it; that file is then not touched.
    """
    leftovers, rolled_back = 0, None
    try:
        for number, state, folder in reversed(journal_folders(root)):
            if state is State.BUILDING:
                remove_tree(folder)
                leftovers += 1
            elif state is State.PENDING:
                rolled_back = describe(folder, number, state)
                _roll_back(root, folder, progress)
            else:
                leftovers += _empty_trash(folder)
    except OSError as error:
        raise JournalError(
            f"{root}: an earlier run was cut short and cannot be rolled back yet: {error}"
        ) from error
    return RecoveryReport(rolled_back=rolled_back, leftovers=leftovers) if rolled_back or leftovers else None


def commit(
    root: Path,
    edits: Sequence[Edit],
    *,
    target: str,
    summary: object,
    verify: Callable[[], None],
    watched: Iterable[PurePosixPath] = (),
    progress: Progress | None = None,
) -> int:
    """Do all edits in order, call ``verify``, and return the number of the committed transaction.

    The caller holds the lock and has called ``recover``. ``target`` is the path that the user named, ``summary``
    any JSON value; ``watched`` are further files (besides edited ones and those that recipes read) whose change
    makes an undo refuse. ``progress`` gets the bytes copied since its last call.

    Raises OperationError when it failed before anything was touched, RolledBackError when an edit or ``verify``
    failed (``__cause__``) and all was undone, JournalError when the undoing failed too: the next ``recover``
    finishes it. KeyboardInterrupt and the like are re-raised after the roll-back.
    """
    number = _next_number(root)
    for edit in edits:
        check_edit(edit)
    watching = tuple(dict.fromkeys((*_all_paths(edits), *watched)))
    building = root / JOURNAL / f"{number:04}.building"
    pending, done = building.with_suffix(".pending"), building.with_suffix(".done")
    _build(root, building, edits, target, summary, watching, progress)
    try:
        os.rename(building, pending)
        sync_folder(root / JOURNAL)
        sync_folder(root)
        work = Workspace(root, pending)
        for index, edit in enumerate(edits):
            add_note(pending, prepare(work, index, edit))
            act(work, index, edit)
        verify()
        write_after(pending, {path: fingerprint(root / path) for path in watching})
        sync_folder(pending)
        os.rename(pending, done)
        sync_folder(root / JOURNAL)
    except BaseException as error:
        _take_back(root, building, error, progress)
        if not isinstance(error, Exception):
            raise
        raise RolledBackError(f"{root}: {error}; everything is as it was") from error
    with suppress(OSError):  # the transaction stands; the next run frees the space
        _empty_trash(done)
    return number


def undo(root: Path, number: int, *, force: bool = False, progress: Progress | None = None) -> None:
    """Undo a committed transaction byte for byte, and forget it.

    The caller holds the lock and has called ``recover``. Raises UsageError when there is no such transaction;
    ChangedError when a later transaction edited the same files, or when a file differs from what the transaction
    left (``force`` accepts a changed modification time, never changed bytes); JournalError when it could not
    finish: the next ``recover`` does.
    """
    _next_number(root)
    done = root / JOURNAL / f"{number:04}.done"
    if not done.is_dir():
        numbers = ", ".join(str(info.number) for info in transactions(root)) or "there is none"
        raise UsageError(f"{root}: there is no transaction {number} to undo (known: {numbers})")
    record = read_record(done)
    _check_later(root, number, set(record.watched))
    _check_unchanged(root, done, number, force)
    _check_space(root, record)
    pending = done.with_suffix(".pending")
    try:
        os.rename(done, pending)
    except OSError as error:
        raise OperationError(f"{root}: nothing was undone: {error}") from error
    try:
        sync_folder(root / JOURNAL)
        _roll_back(root, pending, progress)
    except OSError as error:
        raise JournalError(f"{root}: the undo could not finish, the next run does: {error}") from error


def _next_number(root: Path) -> int:
    """Return the number of the next transaction; raise JournalError when one is unfinished."""
    folders = journal_folders(root)
    for number, state, folder in folders:
        if state is not State.DONE:
            raise JournalError(f"{folder}: transaction {number} is unfinished; recover it first")
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
    progress: Progress | None,
) -> None:
    """Write all that the transaction needs. When that fails, for instance on a full disk, nothing has changed."""
    try:
        with suppress(FileExistsError):
            os.mkdir(root / JOURNAL)
        os.mkdir(building)
        work = Workspace(root, building)
        for index, edit in enumerate(edits):
            if isinstance(edit, Replace):
                build(edit.content, root, work.new(index), progress=progress)
        record = TransactionRecord(
            target=target,
            summary=summary,
            created=time.time(),
            edits=tuple(map(record_of, edits)),
            before=_metadata(work, edits),
            watched=watching,
        )
        write_record(building, record)
        sync_folder(building)
    except BaseException as error:
        with suppress(OSError):  # the next run removes it
            remove_tree(building)
        if isinstance(error, OSError):
            raise OperationError(f"{root}: nothing was changed: {error}") from error
        raise


def _metadata(work: Workspace, edits: Sequence[Edit]) -> dict[PurePosixPath, Metadata]:
    found = {}
    for path in dict.fromkeys(path for edit in edits for path in edited_paths(edit)):
        with suppress(FileNotFoundError):
            status = os.lstat(work.at(path))
            found[path] = Metadata(
                mode=stat.S_IMODE(status.st_mode),
                uid=status.st_uid,
                gid=status.st_gid,
                mtime_ns=status.st_mtime_ns,
            )
    return found


def _take_back(root: Path, building: Path, error: BaseException, progress: Progress | None) -> None:
    """Roll back after ``error``, from whichever state the transaction got to."""
    pending, done = building.with_suffix(".pending"), building.with_suffix(".done")
    try:
        if os.path.lexists(done):
            os.rename(done, pending)
        if os.path.lexists(building):
            remove_tree(building)
        else:
            _roll_back(root, pending, progress)
    except Exception as second:
        raise JournalError(
            f"{root}: failed ({error}), and rolling back failed too ({second}); the next run rolls it back"
        ) from error


def _roll_back(root: Path, folder: Path, progress: Progress | None) -> None:
    """Undo the edits of a pending transaction in reverse order, and remove it."""
    record, notes = read_record(folder), read_notes(folder)
    work = Workspace(root, folder)
    for index in range(len(notes) - 1, -1, -1):
        undo_edit(work, index, record.edits[index], notes[index], progress)
        cut_notes(folder, index)
    for path, metadata in record.before.items():
        restore_metadata(work.at(path), metadata)
    stranded = [name for name in os.listdir(folder) if name.endswith((".kept", ".trash"))]
    if stranded:  # never reached; but what follows deletes, and these would be the user's only copy
        raise JournalError(f"{folder / stranded[0]}: still there after the roll-back; nothing more was done")
    garbage = folder.with_suffix(".building")
    os.rename(folder, garbage)  # a half-deleted pending transaction could not be read by the next run
    sync_folder(folder.parent)
    remove_tree(garbage)


def _empty_trash(folder: Path) -> int:
    """Delete the previous files that a recipe can rebuild; return how many."""
    names = [name for name in os.listdir(folder) if name.endswith(".trash")]
    for name in names:
        os.unlink(folder / name)
    return len(names)


def _check_later(root: Path, number: int, paths: set[PurePosixPath]) -> None:
    for info in transactions(root):
        both = paths.intersection(info.paths)
        if info.number > number and (both or info.problem):
            path = min(both) if both else info.problem
            raise ChangedError(
                f"{root}: transaction {info.number} came later and changed {path} too; undo {info.number} first"
            )


def _check_unchanged(root: Path, done: Path, number: int, force: bool) -> None:
    for path, left in read_after(done).items():
        now = fingerprint(root / path)
        if now == left:
            continue
        if left is None or now is None:
            raise ChangedError(
                f"{root / path}: {'appeared' if now else 'disappeared'} since transaction {number}"
            )
        if not left.same_content(now):
            raise ChangedError(
                f"{root / path}: changed since transaction {number}: it has {now.size} bytes, {left.size} were left "
                f"(sha256 of its ends {now.sha256[:12]}, was {left.sha256[:12]})"
            )
        if not force:
            raise ChangedError(
                f"{root / path}: was written to since transaction {number}: its time is {_time(now.mtime_ns)}, was "
                f"{_time(left.mtime_ns)}; its size and ends are the same; use --force if it is only the time"
            )


def _check_space(root: Path, record: TransactionRecord) -> None:
    """Refuse before anything is touched: an undo that runs out of space halfway must wait for the user."""
    needed = 1 << 16
    for edit in record.edits:
        if isinstance(edit, Truncate):
            needed += edit.old_size - edit.new_size + 4096
        elif isinstance(edit, Remove | Replaced) and isinstance(edit.previous, Recipe):
            needed += edit.previous.size + 4096
    status = os.statvfs(root)
    free = status.f_bavail * status.f_frsize
    if needed > free and not supports_reflink(
        root
    ):  # where blocks are shared, a rebuilt file takes almost none
        raise OperationError(
            f"{root}: an undo writes {needed} bytes, {free} are free on this disk; free some, then undo again"
        )


def _time(nanoseconds: int) -> str:
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(nanoseconds // 10**9))
        + f".{nanoseconds % 10**9:09}"
    )
