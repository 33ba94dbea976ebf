"""Do one edit: ``prepare`` looks and writes only into the journal, ``act`` changes the folder.

In the folder of a transaction, edit number 3 has ``3.new`` (the new file until its rename), ``3.kept`` (a previous
file kept until the undo), ``3.trash`` (one that goes at the commit, its recipe staying) and ``3.tail``.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from typing_extensions import assert_never

from ckptfix.errors import ChangedError, OperationError
from ckptfix.storage.atomic import keep, sync_folder, write_all
from ckptfix.storage.edits import Append, Edit, Move, Patch, Remove, Replace, Truncate
from ckptfix.storage.fingerprints import digest_before, fingerprint
from ckptfix.storage.recipes import Absent, Kept, Recipe
from ckptfix.storage.records import Note

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Workspace:
    """A checkpoint folder, and the folder of one transaction in its journal."""

    root: Path
    folder: Path

    def at(self, path: PurePosixPath) -> Path:
        """Return the full path of a file of the checkpoint. Raises OperationError below a symbolic link."""
        full = self.root / path
        for parent in path.parents:
            if os.path.islink(self.root / parent) and parent.parts:
                raise OperationError(f"{full}: lies behind the symbolic link {parent}; name the real folder")
        return full

    def new(self, index: int) -> Path:
        """Where the new file of a Replace waits."""
        return self.folder / f"{index}.new"

    def old(self, index: int, previous: Recipe | Kept) -> Path:
        """Where the previous file of a Replace or Remove goes."""
        return self.folder / f"{index}.{'kept' if isinstance(previous, Kept) else 'trash'}"

    def tail(self, index: int) -> Path:
        """Where the bytes go that a Truncate cuts off."""
        return self.folder / f"{index}.tail"


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file of the checkpoint that is to be changed in place; a symbolic link is an OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def prepare(work: Workspace, index: int, edit: Edit) -> Note:
    """Check that the edit applies, put what it needs into the journal, and return what an undo needs to know.

    Raises ChangedError when a file is not what the edit expects, OperationError when it must not be edited so.
    """
    match edit:
        case Patch():
            with opened(work.at(edit.path), os.O_RDONLY) as fd:
                size = _size_of_only_name(fd, edit.path)
                if os.pread(fd, len(edit.old), edit.offset) != edit.old:
                    raise ChangedError(
                        f"{edit.path}: changed at byte {edit.offset} since it was read; run again"
                    )
            return Note(size=size)
        case Append():
            with opened(work.at(edit.path), os.O_RDONLY) as fd:
                _check_size(fd, edit.path, edit.old_size)
                return Note(digest=digest_before(fd, edit.old_size))
        case Truncate():
            with opened(work.at(edit.path), os.O_RDONLY) as fd:
                _check_size(fd, edit.path, edit.old_size)
                tail = _copy_tail(fd, edit.new_size, edit.old_size, work.tail(index))
                sync_folder(work.folder)
                return Note(digest=digest_before(fd, edit.new_size), tail=tail)
        case Replace() | Remove():
            return _prepare_whole_file(work, index, edit)
        case Move():
            source, target = fingerprint(work.at(edit.source)), work.at(edit.target)
            if source is None:
                raise ChangedError(f"{edit.source}: no longer there; run again")
            if os.path.lexists(target):
                raise ChangedError(f"{edit.target}: already there, so {edit.source} cannot take its name")
            return Note(old=source)
        case _:
            assert_never(edit)


def act(work: Workspace, index: int, edit: Edit) -> None:
    """Do a prepared edit, durably. Raises OSError; the edit may then be half done."""
    match edit:
        case Patch():
            with opened(work.at(edit.path), os.O_RDWR) as fd:
                write_all(fd, edit.new, edit.offset)
                os.fsync(fd)
        case Append():
            body = memoryview(edit.data)[: len(edit.data) - edit.tail]
            with opened(work.at(edit.path), os.O_RDWR) as fd:
                write_all(fd, body, edit.old_size)
                os.fsync(fd)
                if edit.tail:
                    write_all(fd, memoryview(edit.data)[len(body) :], edit.old_size + len(body))
                    os.fsync(fd)
        case Truncate():
            with opened(work.at(edit.path), os.O_RDWR) as fd:
                os.ftruncate(fd, edit.new_size)
                os.fsync(fd)
        case Replace():
            path = work.at(edit.path)
            if not isinstance(edit.previous, Absent):
                keep(path, work.old(index, edit.previous))
                sync_folder(work.folder)
            os.rename(work.new(index), path)
            sync_folder(path.parent)
            sync_folder(work.folder)
        case Remove():
            move(work.at(edit.path), work.old(index, edit.previous))
        case Move():
            move(work.at(edit.source), work.at(edit.target))
        case _:
            assert_never(edit)


def move(source: Path, target: Path) -> None:
    """Rename durably. The new name is made durable first, so that no crash leaves the file without any."""
    os.rename(source, target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)


def _prepare_whole_file(work: Workspace, index: int, edit: Replace | Remove) -> Note:
    old = fingerprint(work.at(edit.path))
    if isinstance(edit.previous, Absent):
        if old is not None:
            raise ChangedError(f"{edit.path}: already there, though it should be a new file; run again")
    elif old is None:
        raise ChangedError(f"{edit.path}: no longer there; run again")
    elif isinstance(edit.previous, Recipe) and (old.kind, old.size) != ("file", edit.previous.size):
        raise ChangedError(
            f"{edit.path}: is a {old.kind} of {old.size} bytes, its recipe makes {edit.previous.size}; run again"
        )
    return Note(old=old, new=fingerprint(work.new(index)) if isinstance(edit, Replace) else None)


def _size_of_only_name(fd: int, path: PurePosixPath) -> int:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise OperationError(
            f"{path}: has {status.st_nlink} names; a change in place would change all of them"
        )
    return status.st_size


def _check_size(fd: int, path: PurePosixPath, expected: int) -> None:
    size = _size_of_only_name(fd, path)
    if size != expected:
        raise ChangedError(f"{path}: has {size} bytes, it had {expected} when it was read; run again")


def _copy_tail(fd: int, start: int, end: int, target: Path) -> str:
    """Copy the end of a file into the journal, and return its sha256."""
    digest = hashlib.sha256()
    out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        position = start
        while position < end:
            data = os.pread(fd, min(_CHUNK, end - position), position)
            if not data:
                raise ChangedError(f"{target.name}: the file ends at byte {position}, it had {end}")
            digest.update(data)
            write_all(out, data, position - start)
            position += len(data)
        os.fsync(out)
    finally:
        os.close(out)
    return digest.hexdigest()
