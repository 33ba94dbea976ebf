"""Do one edit: ``prepare`` looks and writes only into the journal, ``act`` looks again and changes the folder."""

import hashlib
import os
import stat
from pathlib import Path, PurePosixPath

from typing_extensions import assert_never

from ckptfix.errors import ChangedError, OperationError
from ckptfix.storage.atomic import keep, move, rename_to_free, sync_folder, write_all
from ckptfix.storage.edits import Append, Edit, Move, Patch, Remove, Replace, Truncate
from ckptfix.storage.fingerprints import Fingerprint, digest_before, fingerprint, fingerprint_of_open, moment
from ckptfix.storage.recipes import Absent, Recipe
from ckptfix.storage.records import Metadata
from ckptfix.storage.workspace import Note, Workspace, opened

_CHUNK = 1 << 20
_AGAIN = "run again when nothing else writes to the folder"


def prepare(work: Workspace, index: int, edit: Edit) -> Note:
    """Check that the edit applies, put what it needs into the journal, and return what an undo needs to know.

    Raises ChangedError when a file is not what the edit expects, OperationError when it must not be edited so.
    """
    match edit:
        case Patch():
            with opened(work.at(edit.path), os.O_RDONLY) as fd:
                note = _note_of_open(fd, edit.path)
                _check_patched(fd, edit)
            return note
        case Append():
            with opened(work.at(edit.path), os.O_RDONLY) as fd:
                _check_size(fd, edit.path, edit.old_size)
                return _note_of_open(fd, edit.path)
        case Truncate():
            with opened(work.at(edit.path), os.O_RDONLY) as fd:
                _check_size(fd, edit.path, edit.old_size)
                note = _note_of_open(fd, edit.path)
                tail = _copy_tail(fd, edit.new_size, edit.old_size, work.tail(index))
                sync_folder(work.folder)
                digest = digest_before(fd, edit.new_size)
            return Note(old=note.old, metadata=note.metadata, digest=digest, tail=tail)
        case Replace() | Remove():
            return _prepare_whole_file(work, index, edit)
        case Move():
            note = _note_of(work, edit.source)
            if note.old is None:
                raise ChangedError(f"{edit.source}: no longer there; {_AGAIN}")
            if os.path.lexists(work.at(edit.target)):
                raise ChangedError(f"{edit.target}: already there, so {edit.source} cannot take its name")
            return note
        case _:
            assert_never(edit)


def act(work: Workspace, index: int, edit: Edit, note: Note) -> None:
    """Do a prepared edit, durably.

    Raises ChangedError when a file is no longer the one of ``note``: this edit has then changed nothing. Any other
    OperationError or OSError: it may be half done.
    """
    match edit:
        case Patch():
            with opened(work.at(edit.path), os.O_RDWR) as fd:
                _check_same(fd, edit.path, note.old)
                _check_patched(fd, edit)
                write_all(fd, edit.new, edit.offset)
                os.fsync(fd)
        case Append():
            with opened(work.at(edit.path), os.O_RDWR) as fd:
                _check_same(fd, edit.path, note.old)
                _append(fd, edit)
        case Truncate():
            with opened(work.at(edit.path), os.O_RDWR) as fd:
                _check_same(fd, edit.path, note.old)
                os.ftruncate(fd, edit.new_size)
                os.fsync(fd)
        case Replace():
            _replace(work, index, edit, note)
        case Remove():
            path, old = work.at(edit.path), work.old(index, edit.previous)
            _check_still(path, edit.path, note.old)
            move(path, old)
            _check_taken(old, edit.path, note.old)
        case Move():
            source, target = work.at(edit.source), work.at(edit.target)
            _check_still(source, edit.source, note.old)
            try:
                move(source, target)
            except FileExistsError:
                raise ChangedError(f"{edit.target}: appeared since it was looked for; {_AGAIN}") from None
        case _:
            assert_never(edit)


def _append(fd: int, edit: Append) -> None:
    body = memoryview(edit.data)[: len(edit.data) - edit.tail]
    write_all(fd, body, edit.old_size)
    os.fsync(fd)
    if edit.tail:
        write_all(fd, memoryview(edit.data)[len(body) :], edit.old_size + len(body))
        os.fsync(fd)


def _replace(work: Workspace, index: int, edit: Replace, note: Note) -> None:
    path, new = work.at(edit.path), work.new(index)
    _check_still(path, edit.path, note.old)
    if not isinstance(edit.previous, Absent):
        old = work.old(index, edit.previous)
        keep(path, old)
        sync_folder(work.folder)
        _check_taken(old, edit.path, note.old)
    if isinstance(edit.previous, Absent) or not os.path.lexists(path):  # no links here: keep() moved it
        rename_to_free(new, path)
    elif os.path.samestat(os.lstat(path), os.lstat(old)):
        os.rename(new, path)
    else:
        raise OperationError(f"{edit.path}: saved again while it was being replaced; {_AGAIN}")
    sync_folder(path.parent)
    sync_folder(work.folder)


def _prepare_whole_file(work: Workspace, index: int, edit: Replace | Remove) -> Note:
    note = _note_of(work, edit.path)
    old = note.old
    if isinstance(edit.previous, Absent):
        if old is not None:
            raise ChangedError(f"{edit.path}: already there, though it should be a new file; {_AGAIN}")
    elif old is None:
        raise ChangedError(f"{edit.path}: no longer there; {_AGAIN}")
    elif isinstance(edit.previous, Recipe) and (old.kind, old.size) != ("file", edit.previous.size):
        raise ChangedError(
            f"{edit.path}: is a {old.kind} of {old.size} bytes, its recipe makes {edit.previous.size}; {_AGAIN}"
        )
    new = fingerprint(work.new(index)) if isinstance(edit, Replace) else None
    return Note(old=old, metadata=note.metadata, new=new)


def _note_of(work: Workspace, path: PurePosixPath) -> Note:
    full = work.at(path)
    old = fingerprint(full)
    if old is None:
        return Note()
    if old.kind == "folder":
        raise OperationError(f"{full}: is a folder; only files are edited")
    return Note(old=old, metadata=Metadata.of(os.lstat(full)))


def _note_of_open(fd: int, path: PurePosixPath) -> Note:
    _check_only_name(fd, path)
    return Note(old=fingerprint_of_open(fd), metadata=Metadata.of(os.fstat(fd)))


def _check_only_name(fd: int, path: PurePosixPath) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise OperationError(
            f"{path}: has {status.st_nlink} names; a change in place would change all of them"
        )


def _check_size(fd: int, path: PurePosixPath, expected: int) -> None:
    size = os.fstat(fd).st_size
    if size != expected:
        raise ChangedError(f"{path}: has {size} bytes, it had {expected} when it was read; {_AGAIN}")


def _check_patched(fd: int, edit: Patch) -> None:
    if os.pread(fd, len(edit.old), edit.offset) != edit.old:
        raise ChangedError(f"{edit.path}: changed at byte {edit.offset} since it was read; {_AGAIN}")


def _check_same(fd: int, path: PurePosixPath, expected: Fingerprint | None) -> None:
    """Look at the very file that is written to next; its name may lead to another one than a moment ago."""
    if os.fstat(fd).st_nlink != 1 or fingerprint_of_open(fd) != expected:
        raise _saved_again(path, fingerprint_of_open(fd), expected)


def _check_still(full: Path, path: PurePosixPath, expected: Fingerprint | None) -> None:
    found = fingerprint(full)
    if found != expected:
        raise _saved_again(path, found, expected)


def _check_taken(old: Path, path: PurePosixPath, expected: Fingerprint | None) -> None:
    """Check the file in the journal, which may be deleted at the commit: the recipe must be able to make it again."""
    found = fingerprint(old)
    if found != expected:
        raise OperationError(str(_saved_again(path, found, expected)))


def _saved_again(
    path: PurePosixPath, found: Fingerprint | None, expected: Fingerprint | None
) -> ChangedError:
    now, was = (f"{f.size} bytes of {moment(f.mtime_ns)}" if f else "nothing" for f in (found, expected))
    return ChangedError(f"{path}: changed just now: {now}, was {was}; {_AGAIN}")


def _copy_tail(fd: int, start: int, end: int, target: Path) -> str:
    """Copy the end of a file into the journal, and return its sha256."""
    digest = hashlib.sha256()
    out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
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
