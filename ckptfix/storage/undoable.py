"""What must hold before a committed transaction is undone."""

import os
import stat
from pathlib import Path, PurePosixPath

from ckptfix.errors import ChangedError, OperationError
from ckptfix.storage.copying import supports_reflink
from ckptfix.storage.edits import Appended, Patch, Remove, Replaced, Truncate, edited_paths
from ckptfix.storage.fingerprints import fingerprint, moment
from ckptfix.storage.notes import read_after
from ckptfix.storage.paths import command, forget, locate
from ckptfix.storage.recipes import Recipe
from ckptfix.storage.records import TransactionRecord
from ckptfix.storage.transaction import transactions


def check_undoable(root: Path, done: Path, number: int, record: TransactionRecord, *, force: bool) -> None:
    """Raise ChangedError, JournalError or OperationError when an undo would lose something or could not finish."""
    _check_later(root, number, record)
    _check_unchanged(root, done, number, record, force)
    _check_space(root, record)


def _check_later(root: Path, number: int, record: TransactionRecord) -> None:
    edited = {path for edit in record.edits for path in edited_paths(edit)}
    for info in transactions(root):
        if info.number <= number:
            continue
        if info.foreign or info.problem:
            why = info.problem or "it belongs to another user, who alone can read and undo it"
            raise ChangedError(
                f"{root}: transaction {info.number} came later; undo {info.number} first ({why})"
            )
        changed, needed = set(record.watched).intersection(info.paths), edited.intersection(info.watched)
        if changed or needed:
            what = f"changed {min(changed)} too" if changed else f"needs {min(needed)} as it is now"
            raise ChangedError(
                f"{root}: transaction {info.number} came later and {what}; undo {info.number} first: "
                f"{command('undo', root, info.target)}"
            )


def _check_unchanged(root: Path, done: Path, number: int, record: TransactionRecord, force: bool) -> None:
    for path, left in read_after(done, record.watched).items():
        now = fingerprint(locate(root, path))
        if now == left:
            continue
        if left is None or now is None:
            raise ChangedError(
                f"{root / path}: {'appeared' if now else 'disappeared'} since transaction {number}; {_advice(root)}"
            )
        if not left.same_content(now):
            sizes = f"it has {now.size} bytes, {left.size} were left; " if now.size != left.size else ""
            raise ChangedError(
                f"{root / path}: changed since transaction {number}: {sizes}"
                f"the sha256 of its ends is {now.sha256[:12]}, was {left.sha256[:12]}; {_advice(root)}"
            )
        if not force:
            again = command("undo", root, record.target, "--force")
            raise ChangedError(
                f"{root / path}: was written to since transaction {number}: its time is {moment(now.mtime_ns)}, was "
                f"{moment(left.mtime_ns)}; its size and ends are the same; if it is only the time: {again}"
            )


def _check_space(root: Path, record: TransactionRecord) -> None:
    """Refuse before anything is touched: an undo that runs out of space halfway must wait for the user."""
    needed = 1 << 16
    in_place = any(isinstance(edit, Patch | Appended | Truncate) for edit in record.edits)
    if in_place:
        needed += sum(_linked_size(root, path) for path in record.watched)
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


def _advice(root: Path) -> str:
    return f"undo would lose what came later; {forget(root)}"


def _linked_size(root: Path, path: PurePosixPath) -> int:
    """A file that got a second name is copied before it is changed in place."""
    try:
        status = os.lstat(locate(root, path))
    except FileNotFoundError:
        return 0
    return status.st_size + 4096 if stat.S_ISREG(status.st_mode) and status.st_nlink > 1 else 0
