"""What must hold before a committed transaction is undone."""

import os
import stat
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.errors import ChangedError, OperationError
from ckptfix.storage.copying import supports_reflink
from ckptfix.storage.edits import Appended, Patch, Remove, Replaced, Truncate, edited_paths
from ckptfix.storage.fingerprints import fingerprint, moment, samples_digest
from ckptfix.storage.foreseeing import rebuilt_files
from ckptfix.storage.notes import read_after, read_samples
from ckptfix.storage.paths import command, forget, locate
from ckptfix.storage.pieces import Piece
from ckptfix.storage.recipe_digests import differing, parts_of
from ckptfix.storage.recipes import Recipe
from ckptfix.storage.records import TransactionRecord
from ckptfix.storage.transaction import transactions
from ckptfix.storage.workspace import Workspace
from ckptfix.wording import human_size


class Allowed(NamedTuple):
    """What an undo may rely on.

    ``any_time``: times of files differ and their content was proven, or ``--force`` accepts it. ``unproven``: the files
    of which ``--force`` accepts it.
    """

    any_time: bool
    unproven: tuple[PurePosixPath, ...]


def check_undoable(root: Path, done: Path, number: int, record: TransactionRecord, *, force: bool) -> Allowed:
    """Raise ChangedError, JournalError or OperationError when an undo would lose something or could not finish."""
    _check_later(root, number, record)
    allowed = _check_unchanged(root, done, number, record, force)
    _check_space(root, record)
    _check_restored(root, done, number, record)
    return allowed


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


def _check_unchanged(root: Path, done: Path, number: int, record: TransactionRecord, force: bool) -> Allowed:
    """Compare every file with what was left of it. Its time says nothing: a copy and ``touch`` give another one."""
    samples = read_samples(done)
    any_time, unproven = False, dict[PurePosixPath, str]()
    for path, left in read_after(done, record.watched).items():
        full = locate(root, path)
        now = fingerprint(full)
        if left is None or now is None:
            if left is not now:
                what = "appeared" if now else "disappeared"
                raise ChangedError(f"{root / path}: {what} since repair {number}; {_advice(root)}")
            continue
        if not left.same_content(now):
            sizes = f"it has {now.size} bytes, {left.size} were left; " if now.size != left.size else ""
            raise ChangedError(
                f"{root / path}: changed since repair {number}: {sizes}"
                f"the sha256 of its ends is {now.sha256[:12]}, was {left.sha256[:12]}; {_advice(root)}"
            )
        digest = samples_digest(full) if now.kind == "file" else ""
        if samples.get(path, digest) != digest:
            raise ChangedError(
                f"{root / path}: changed since repair {number}: pages between its ends have another sha256 "
                f"({digest[:12]}, was {samples[path][:12]}); {_advice(root)}"
            )
        if now != left:
            any_time = True
            if digest and path not in samples:
                unproven[path] = f"its time is {moment(now.mtime_ns)}, was {moment(left.mtime_ns)}"
    if unproven and not force:
        path, why = next(iter(unproven.items()))
        raise ChangedError(
            f"{root / path}: cannot be proven unchanged since repair {number}: {why}, and the journal, written by "
            f"ckptfix 0.4.0 or older, has no digest of its bytes; nothing was undone; if you know that only its time "
            f"changed, as in a copy: {command('undo', root, record.target, '--force')}"
        )
    return Allowed(any_time, tuple(unproven))


def _check_restored(root: Path, done: Path, number: int, record: TransactionRecord) -> None:
    """Hash every byte that other files are to give to a file that comes back."""
    for path, recipe, bytes_of in rebuilt_files(Workspace(root, done), record):
        for source in differing(recipe, bytes_of):
            now = {
                piece.path
                for part in parts_of(recipe)
                if part.source == source
                for piece in bytes_of(part)
                if isinstance(piece, Piece)
            }
            names = ", ".join(sorted(map(str, now)))
            raise ChangedError(
                f"{names}: changed since repair {number}: the bytes that {path} had in common with it have another "
                f"sha256, so that an undo would restore {path} with other bytes; nothing was undone; bring back "
                f"{names} as the repair left it, then: {command('undo', root, record.target)}; or {forget(root)}"
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
            f"{root}: an undo writes {human_size(needed)}, {human_size(free)} are free on this disk; free some, then: "
            f"{command('undo', root, record.target)}"
        )


def _advice(root: Path) -> str:
    return f"nothing was undone; bring back what the repair left and undo again, or {forget(root)}"


def _linked_size(root: Path, path: PurePosixPath) -> int:
    """A file that got a second name is copied before it is changed in place."""
    try:
        status = os.lstat(locate(root, path))
    except FileNotFoundError:
        return 0
    return status.st_size + 4096 if stat.S_ISREG(status.st_mode) and status.st_nlink > 1 else 0
