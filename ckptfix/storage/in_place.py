"""Undo the edits that wrote into a file: Patch, Append and Truncate.

First it is proved, from the size and the ends that the file will have again, that it is the file that was edited; a
newer save is left alone. Then the old bytes are written even where the file seems to hold them already: after a
failed fsync the kernel shows bytes that are not on the disk.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import assert_never

from ckptfix.errors import JournalError
from ckptfix.storage.atomic import sync_folder, write_all
from ckptfix.storage.copying import copy_range
from ckptfix.storage.edits import Appended, Patch, Truncate
from ckptfix.storage.fingerprints import digest_before, ends_digest
from ckptfix.storage.metadata import Metadata
from ckptfix.storage.notes import Note
from ckptfix.storage.paths import forget
from ckptfix.storage.workspace import Workspace, opened

_SECTOR = 512
_CHUNK = 1 << 20


def undo_in_place(work: Workspace, index: int, edit: Patch | Appended | Truncate, note: Note) -> None:
    """Bring the file back durably to what it was before ``edit``. Raises JournalError and OSError."""
    path = work.at(edit.path)
    if not os.path.lexists(path):
        raise work.unexplained(path, "is not there")
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise work.unexplained(path, "is no longer a regular file")
    with opened(path, os.O_RDWR) as fd:
        match edit:
            case Patch():
                _check_patch(work, path, fd, edit, note)
                with _without_other_names(work, index, path, fd) as own:
                    write_all(own, edit.old, edit.offset)
                    _finish(work, own, note)
            case Appended():
                _check_append(work, path, fd, edit, note)
                with _without_other_names(work, index, path, fd) as own:
                    os.ftruncate(own, edit.old_size)
                    _finish(work, own, note)
            case Truncate():
                with opened(work.tail(index), os.O_RDONLY) as tail:
                    _check_truncate(work, path, fd, edit, note, tail)
                    with _without_other_names(work, index, path, fd) as own:
                        _write_tail(own, edit, tail)
                        _finish(work, own, note)
            case _:
                assert_never(edit)


def _finish(work: Workspace, fd: int, note: Note) -> None:
    if note.metadata is not None and not note.metadata.restore(fd):
        work.accept_any_time()  # somebody else's file keeps its new time, which earlier edits then have to accept
    os.fsync(fd)


@contextmanager
def _without_other_names(work: Workspace, index: int, path: Path, fd: int) -> Iterator[int]:
    """Yield a descriptor of the file at ``path`` when it has no other name, else of a copy that takes its place.

    A snapshot made of hard links since the repair (``cp -al``, ``rsync --link-dest``) must keep its bytes.
    """
    status = os.fstat(fd)
    if status.st_nlink == 1:
        yield fd
        return
    copy = work.copy(index)
    with suppress(FileNotFoundError):  # from an undo cut short
        os.unlink(copy)
    own = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        copy_range(fd, 0, own, 0, status.st_size)
        Metadata.of(status).restore(own)
        os.fsync(own)
        os.rename(copy, path)
        sync_folder(path.parent)
        sync_folder(work.folder)
        yield own
    finally:
        os.close(own)
        with suppress(FileNotFoundError):  # a full disk stays no fuller than it was
            os.unlink(copy)


def _check_patch(work: Workspace, path: Path, fd: int, edit: Patch, note: Note) -> None:
    size = os.fstat(fd).st_size
    current = os.pread(fd, len(edit.old), edit.offset)
    if note.old is None or size != note.old.size:
        raise work.unexplained(path, f"has {size} bytes, {note.old.size if note.old else 0} would be")
    if not _is_mixture(current, edit.old, edit.new):
        raise work.unexplained(path, f"holds other bytes at {edit.offset}")

    def read(offset: int, length: int) -> bytes:
        data = bytearray(os.pread(fd, length, offset))
        start, end = max(offset, edit.offset), min(offset + length, edit.offset + len(edit.old))
        if start < end:
            data[start - offset : end - offset] = edit.old[start - edit.offset : end - edit.offset]
        return bytes(data)

    _check_ends(work, path, note, ends_digest(read, size))


def _check_ends(work: Workspace, path: Path, note: Note, digest: str) -> None:
    if note.old is None or digest != note.old.sha256:
        raise work.unexplained(path, "holds other bytes at its ends, besides those that were edited")


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


def _check_append(work: Workspace, path: Path, fd: int, edit: Appended, note: Note) -> None:
    size, most = os.fstat(fd).st_size, edit.old_size + edit.length
    if not edit.old_size <= size <= most:
        raise work.unexplained(path, f"has {size} bytes, {edit.old_size} to {most} would be")
    digest = ends_digest(lambda offset, length: os.pread(fd, length, offset), edit.old_size)
    _check_ends(work, path, note, digest)


def _check_truncate(work: Workspace, path: Path, fd: int, edit: Truncate, note: Note, tail: int) -> None:
    size = os.fstat(fd).st_size
    if not edit.new_size <= size <= edit.old_size:
        raise work.unexplained(path, f"has {size} bytes, {edit.new_size} to {edit.old_size} would be")
    if digest_before(fd, edit.new_size) != note.digest:
        raise work.unexplained(path, f"holds other bytes before byte {edit.new_size}")
    if _digest(tail, edit.old_size - edit.new_size) != note.tail:
        raise JournalError(
            f"{work.folder}: the end cut off from {path} is damaged, its sha256 is another; {forget(work.root)}"
        )

    def read(offset: int, length: int) -> bytes:
        before = max(0, min(length, edit.new_size - offset))
        after = os.pread(tail, length - before, max(0, offset - edit.new_size))
        return os.pread(fd, before, offset) + after

    _check_ends(work, path, note, ends_digest(read, edit.old_size))


def _write_tail(fd: int, edit: Truncate, tail: int) -> None:
    length = edit.old_size - edit.new_size
    for start in range(0, length, _CHUNK):
        write_all(fd, os.pread(tail, min(_CHUNK, length - start), start), edit.new_size + start)


def _digest(fd: int, length: int) -> str:
    digest = hashlib.sha256()
    for start in range(0, length, _CHUNK):
        digest.update(os.pread(fd, min(_CHUNK, length - start), start))
    return digest.hexdigest()
