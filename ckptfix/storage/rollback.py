"""Undo one edit, whether it is done, half done or not begun, and whether its undo was itself interrupted.

Each case looks at the folder, decides how far things got, and goes back from there; so it can be killed and
repeated at any point. It syncs even what it finds in order: the run before may have been killed ahead of its sync.
Anything that no interruption explains (somebody saved the file again) is a JournalError, and that file is left alone.
"""

import hashlib
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from typing_extensions import assert_never

from ckptfix.errors import ChangedError, JournalError
from ckptfix.storage.applying import Workspace, move, opened
from ckptfix.storage.atomic import keep, rename_back, set_owner_and_mode, sync_folder, write_all
from ckptfix.storage.building import build
from ckptfix.storage.edits import Appended, Move, Patch, Record, Remove, Replaced, Truncate
from ckptfix.storage.fingerprints import Fingerprint, digest_before, fingerprint
from ckptfix.storage.recipes import Absent, Recipe
from ckptfix.storage.records import Metadata, Note

_SECTOR = 512
_CHUNK = 1 << 20
Progress = Callable[[int], None]


def undo_edit(
    work: Workspace, index: int, edit: Record, note: Note, progress: Progress | None = None
) -> None:
    """Bring the files of ``edit`` durably back to what they were before it. Raises JournalError and OSError."""
    match edit:
        case Patch():
            _undo_patch(work.at(edit.path), edit, note)
        case Appended():
            _undo_append(work.at(edit.path), edit, note)
        case Truncate():
            _undo_truncate(work.at(edit.path), edit, note, work.tail(index))
        case Replaced():
            _undo_replace(work, index, edit, note, progress)
        case Remove():
            _undo_remove(work, index, edit, note, progress)
        case Move():
            source, target = work.at(edit.source), work.at(edit.target)
            if not os.path.lexists(source):
                _expect(target, note.old)
                os.rename(target, source)
            for folder in dict.fromkeys((source.parent, target.parent)):
                sync_folder(folder)
        case _:
            assert_never(edit)


def restore_metadata(path: Path, before: Metadata) -> None:
    """Restore mode, owner and modification time of a regular file where they differ and that is permitted."""
    current = os.lstat(path)
    if not stat.S_ISREG(current.st_mode):
        return
    with suppress(PermissionError):
        set_owner_and_mode(path, current, uid=before.uid, gid=before.gid, mode=before.mode)
    current = os.lstat(path)
    if current.st_mtime_ns != before.mtime_ns:
        with suppress(PermissionError):
            os.utime(path, ns=(current.st_atime_ns, before.mtime_ns), follow_symlinks=False)


def _unexplained(path: Path, why: str) -> JournalError:
    return JournalError(
        f"{path}: {why}. Something else changed it after ckptfix did, so it was left alone; move it out of the "
        f"folder, or bring back the version that ckptfix left, then run again"
    )


def _expect(path: Path, expected: Fingerprint | None) -> None:
    found = fingerprint(path)
    if found is None:
        raise _unexplained(path, "is not there")
    if not found.same_content(expected):
        size = expected.size if expected else 0
        raise _unexplained(path, f"has {found.size} bytes and is not the file of {size} bytes that it was")


def _undo_patch(path: Path, edit: Patch, note: Note) -> None:
    with opened(path, os.O_RDWR) as fd:
        size = os.fstat(fd).st_size
        current = os.pread(fd, len(edit.old), edit.offset)
        if size != note.size or not _is_mixture(current, edit.old, edit.new):
            raise _unexplained(path, f"holds other bytes at {edit.offset}, or has not its {note.size} bytes")
        if current != edit.old:
            write_all(fd, edit.old, edit.offset)
        os.fsync(fd)


def _is_mixture(current: bytes, old: bytes, new: bytes) -> bool:
    """True when every byte is the old or the new one: what a torn write leaves, in any order of its sectors."""
    if current in (old, new):
        return True
    if len(current) != len(old):
        return False
    for start in range(0, len(old), _SECTOR):
        part = slice(start, start + _SECTOR)
        if current[part] in (old[part], new[part]):
            continue
        if any(c not in (a, b) for c, a, b in zip(current[part], old[part], new[part], strict=True)):
            return False
    return True


def _undo_append(path: Path, edit: Appended, note: Note) -> None:
    with opened(path, os.O_RDWR) as fd:
        size = os.fstat(fd).st_size
        if not edit.old_size <= size <= edit.old_size + edit.length:
            raise _unexplained(
                path, f"has {size} bytes, {edit.old_size} to {edit.old_size + edit.length} would be"
            )
        if digest_before(fd, edit.old_size) != note.digest:
            raise _unexplained(path, f"holds other bytes before byte {edit.old_size}")
        if size > edit.old_size:
            os.ftruncate(fd, edit.old_size)
        os.fsync(fd)


def _undo_truncate(path: Path, edit: Truncate, note: Note, tail: Path) -> None:
    with opened(path, os.O_RDWR) as fd, opened(tail, os.O_RDONLY) as source:
        size, length = os.fstat(fd).st_size, edit.old_size - edit.new_size
        if not edit.new_size <= size <= edit.old_size:
            raise _unexplained(path, f"has {size} bytes, {edit.new_size} to {edit.old_size} would be")
        if digest_before(fd, edit.new_size) != note.digest:
            raise _unexplained(path, f"holds other bytes before byte {edit.new_size}")
        if _digest(source, 0, length) != note.tail:
            raise JournalError(f"{tail}: damaged: its bytes do not match their sha256")
        if size < edit.old_size or _digest(fd, edit.new_size, length) != note.tail:
            for start in range(0, length, _CHUNK):
                write_all(fd, os.pread(source, min(_CHUNK, length - start), start), edit.new_size + start)
        os.fsync(fd)


def _digest(fd: int, offset: int, length: int) -> str:
    digest = hashlib.sha256()
    for start in range(0, length, _CHUNK):
        digest.update(os.pread(fd, min(_CHUNK, length - start), offset + start))
    return digest.hexdigest()


def _undo_replace(work: Workspace, index: int, edit: Replaced, note: Note, progress: Progress | None) -> None:
    """``N.new`` is there exactly while the new file is not at its place, or a second name of it is kept here."""
    path, new = work.at(edit.path), work.new(index)
    if isinstance(edit.previous, Absent):
        if not os.path.lexists(new) and os.path.lexists(path):
            _expect(path, note.new)
            move(path, new)
        return
    old = work.old(index, edit.previous)
    if not os.path.lexists(new):
        _expect(path, note.new)
        if not os.path.lexists(old):
            _rebuild(work, edit.path, edit.previous, old, note, progress)
        keep(path, new)
        sync_folder(work.folder)
    if os.path.lexists(old):
        rename_back(old, path)
    sync_folder(path.parent)
    sync_folder(work.folder)


def _undo_remove(work: Workspace, index: int, edit: Remove, note: Note, progress: Progress | None) -> None:
    path, old = work.at(edit.path), work.old(index, edit.previous)
    if os.path.lexists(path):
        if os.path.lexists(old):
            raise _unexplained(path, "is there again")
        sync_folder(path.parent)
        return
    if not os.path.lexists(old):
        _rebuild(work, edit.path, edit.previous, old, note, progress)
    move(old, path)


def _rebuild(
    work: Workspace, path: PurePosixPath, previous: object, old: Path, note: Note, progress: Progress | None
) -> None:
    """Make the previous file at ``old``, complete or not at all, and check that it is the one that was there."""
    if not isinstance(previous, Recipe):
        raise JournalError(f"{old}: the previous version of {path} is no longer in the journal")
    part = old.with_suffix(".part")
    with suppress(FileNotFoundError):
        os.unlink(part)
    try:
        build(previous, work.root, part, progress=progress)
        made = fingerprint(part)
    except ChangedError:  # a source is shorter than it was
        made = None
    if made is None or not made.same_content(note.old):
        os.unlink(part)
        raise JournalError(
            f"{work.root / path}: cannot be rebuilt: the files that hold its bytes are no longer what they were"
        )
    os.rename(part, old)
    sync_folder(work.folder)
