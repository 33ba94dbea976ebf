"""Transactions in a folder: edits in place with a note before each, rolled back from wherever they
stopped (``transactions`` has the states).
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import NoReturn

from msgspec.structs import replace

from ckptfix.errors import (
    ChangedError,
    FileChangedError,
    JournalError,
    OperationError,
    RolledBackError,
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
from ckptfix.storage.folder_journal import (
    Note,
    TransactionRecord,
    Workspace,
    add_note,
    cut_notes,
    read_all_notes,
    read_notes,
    read_record,
    start_notes,
    write_after,
    write_record,
)
from ckptfix.storage.journal import (
    State,
    TransactionInfo,
    check_real,
    describe,
    downloaded,
    journal_folders,
    transactions,
)
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import JOURNAL, command, locate, shell_path
from ckptfix.storage.reading import ABSENT, identity, unchanged
from ckptfix.storage.recipes import Recipe, build, with_digests
from ckptfix.storage.transactions import RecoveryReport, TransactionPlan
from ckptfix.storage.undoable import check_dropped, check_undoable


class FolderBackend:
    """A checkpoint in a folder of this machine, for whoever holds its lock (``folder_lock``)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def transactions(self) -> tuple[TransactionInfo, ...]:
        """Return the transactions in its journal, oldest first."""
        return transactions(self.root)

    def begin(
        self, plan: TransactionPlan, *, transfer: bool = False, progress: Progress | None = None
    ) -> "FolderAttempt":
        """Write everything that the transaction needs.

        Raises JournalError when another one is unfinished, OperationError when it cannot be
        written, for instance on a full disk: nothing has changed then.
        """
        number = _next_number(self.root)
        for edit in plan.edits:
            check_edit(edit)
        return FolderAttempt(self.root, number, plan, progress)

    def recover(
        self, *, force: bool = False, progress: Progress | None = None
    ) -> RecoveryReport | None:
        """Roll back the transaction that was cut short, and clean up. Raises JournalError."""
        root = self.root
        leftovers, rolled_back = 0, None
        for info in downloaded(root):
            if info.state is State.PENDING:
                raise JournalError(
                    f"{root}: this folder was downloaded from a store in which repair "
                    f"{info.number} was interrupted; next: undo it there with ckptfix undo URL, "
                    "and download the checkpoint again; or, if the checkpoint there is complete: "
                    f"rm -r {shell_path(root / JOURNAL)}/*.objects"
                )
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
                f"{root}: an earlier run was interrupted and cannot be rolled back yet: {error}; "
                f"fix that, then: {command('undo', root)}"
            ) from error
        if rolled_back is None and not leftovers:
            return None
        return RecoveryReport(rolled_back=rolled_back, leftovers=leftovers)

    def undo(
        self,
        number: int,
        *,
        force: bool = False,
        transfer: bool = False,
        progress: Progress | None = None,
    ) -> tuple[PurePosixPath, ...]:
        """Make a committed transaction pending again, and roll it back."""
        root = self.root
        _next_number(root)
        done = root / JOURNAL / f"{number:04}.done"
        record = read_record(done)
        read_all_notes(done, record.edits)
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
                f"{root}: the undo did not finish, but the next run will finish it: {error}"
            ) from error
        return allowed.unproven


class FolderAttempt:
    """A transaction under way in a folder."""

    def __init__(
        self, root: Path, number: int, plan: TransactionPlan, progress: Progress | None
    ) -> None:
        self.number = number
        self._root, self._plan, self._progress = root, plan, progress
        read = (path for edit in plan.edits for path in (*edited_paths(edit), *read_paths(edit)))
        self._watching = tuple(dict.fromkeys((*read, *plan.watched)))
        self._building = root / JOURNAL / f"{number:04}.building"
        self._pending = self._building.with_suffix(".pending")
        self._done = self._building.with_suffix(".done")
        self._notes: list[Note] = []
        self._record = self._build()

    def _build(self) -> TransactionRecord:
        root, plan, building = self._root, self._plan, self._building
        try:
            with suppress(FileExistsError):
                os.mkdir(root / JOURNAL)
            os.mkdir(building, 0o700)  # its contents may come from files that others must not read
            work = Workspace(root, building)
            for index, edit in enumerate(plan.edits):
                if isinstance(edit, Replace):
                    build(edit.content, root, work.new(index), progress=self._progress)
            record = TransactionRecord(
                target=plan.target,
                summary=plan.summary,
                created=time.time(),
                edits=tuple(
                    record_of(_with_digests(root, edit, plan.digests)) for edit in plan.edits
                ),
                watched=self._watching,
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

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make every edit, a note before each, and record at the end what the files are then."""
        root = self._root
        os.rename(self._building, self._pending)
        sync_folder(root / JOURNAL)
        sync_folder(root)
        work = Workspace(root, self._pending)
        expected = dict(self._plan.known)
        for index, edit in enumerate(self._plan.edits):
            # Unchanged until after the note: so it is of the planned file, and the edit refuses to
            # take a later one.
            with unchanged(
                root, {path: expected[path] for path in edited_paths(edit) if path in expected}
            ):
                note = prepare(work, index, edit)
            add_note(self._pending, note)
            self._notes.append(note)
            try:
                act(work, index, edit, note)
            except ChangedError:  # noticed before anything was done: this edit needs no undo
                cut_notes(self._pending, index)
                raise
            expected |= {path: identity(root / path) for path in edited_paths(edit)}
            # Not as they are now: a save may have written these names since.
            if isinstance(edit, Remove | Move):
                expected[edit.path if isinstance(edit, Remove) else edit.source] = ABSENT
            if isinstance(edit, Move) and note.old is not None and note.old.kind == "file":
                now = expected[edit.target]
                expected[edit.target] = now._replace(size=note.old.size, mtime_ns=note.old.mtime_ns)
        hold(work, self._plan.edits)
        with unchanged(root, expected):
            yield
            write_after(
                self._pending,
                {path: fingerprint(root / path) for path in self._watching},
                {
                    path: samples_digest(root / path)
                    for path in self._watching
                    if os.path.lexists(root / path)
                },
            )
            sync_folder(self._pending)
            check_dropped(work, self._record, self._progress)

    def commit(self) -> None:
        """Commit by one rename."""
        work = Workspace(self._root, self._pending)
        for index, edit in enumerate(self._plan.edits):
            check_kept(work, index, edit, self._notes[index])
        os.rename(self._pending, self._done)
        sync_folder(self._root / JOURNAL)

    def roll_back(self, error: BaseException) -> NoReturn:
        """Undo every edit, from whichever state the transaction got to."""
        # A save changed a file, or that led to this error.
        change = error if isinstance(error, FileChangedError) else error.__cause__
        changed = change if isinstance(change, FileChangedError) else None
        try:
            if os.path.lexists(self._done):
                os.rename(self._done, self._pending)
                # Else a crash may leave it half undone, yet committed on the disk.
                sync_folder(self._root / JOURNAL)
            if os.path.lexists(self._building):
                remove_folder(self._building)
            else:
                _roll_back(self._root, self._pending, self._progress, keeps_newer=True)
        except JournalError as second:
            # The next run cannot roll it back, either, before somebody does what this says.
            raise JournalError(
                f"{self._root}: failed ({changed.problem if changed is not None else error}), and "
                f"cannot be rolled back: {second}"
            ) from error
        except Exception as second:
            raise JournalError(
                f"{self._root}: failed ({error}), and rolling back failed too ({second}); the next "
                f"run rolls it back: {command('undo', self._root)}"
            ) from error
        if not isinstance(error, Exception):
            raise error
        if changed is not None:
            raise RolledBackError(
                f"{changed.problem}; everything was rolled back; next: wait until the save has "
                "ended, then run the same command again"
            ) from error
        raise RolledBackError(f"{self._root}: {error}; everything is unchanged") from error

    def finish(self) -> None:
        """Free the space of what only a roll-back needs."""
        with suppress(OSError):  # the transaction is committed; the next run frees it
            _empty_trash(self._done)


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


def _with_digests(root: Path, edit: Edit, known: Mapping[PurePosixPath, Digests]) -> Edit:
    """Return the edit with the digests of the bytes that an undo will read from other files."""
    if not isinstance(edit, Remove) or not isinstance(edit.previous, Recipe):
        return edit
    path = locate(root, edit.path)
    if not path.is_file() or path.stat().st_size != edit.previous.size:
        # A file of an earlier edit, or a mismatch with the recipe that a later check reports.
        return edit
    return replace(edit, previous=with_digests(edit.previous, path, known))


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
            f"{folder / stranded[0]}: still exists after the roll-back; nothing more was done"
        )
    garbage = folder.with_suffix(".building")
    # A half-deleted pending transaction could not be read by the next run.
    os.rename(folder, garbage)
    sync_folder(folder.parent)
    remove_folder(garbage)


def _empty_trash(folder: Path) -> int:
    """Delete what only a roll-back needs; return the number of files."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith((".trash", ".moved"))]
    except PermissionError:  # another user's repair, which only that user can clean up
        return 0
    for name in names:
        os.unlink(folder / name)
    return len(names)
