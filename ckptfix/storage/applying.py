"""One edit applied, or undone, whether it is done, half done or not begun.

``prepare`` reads the folder and writes only into the journal; ``act`` checks again and changes the
folder.

An undo may itself be interrupted. Each case looks at the folder, decides how far the edit got, and
goes back from there; so it can be killed and repeated at any point. It syncs even a file that is
already right: the run before may have been killed ahead of its sync. Anything that no interruption
explains (somebody saved the file again) is a JournalError, and that file is left alone. A newer
file where nothing has to be restored is left alone, too.

After an edit that wrote into a file (Patch, Append, Truncate), the restored size and ends must
first prove that it is the file that was edited. Then the old bytes are written even where the file
seems to hold them already: after a failed fsync the kernel shows bytes that are not on the disk.
"""

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from msgspec.structs import replace
from typing_extensions import assert_never

from ckptfix.errors import ChangedError, FileChangedError, JournalError, OperationError
from ckptfix.storage.atomic import (
    create_file,
    keep,
    move,
    put_back,
    rename_to_free,
    sync_folder,
    write_all,
)
from ckptfix.storage.comparing import (
    Fingerprint,
    digest_before,
    ends_digest,
    fingerprint,
    fingerprint_of_open,
    samples_digest,
)
from ckptfix.storage.copying import copy_range
from ckptfix.storage.edits import (
    Append,
    Appended,
    Edit,
    Move,
    Patch,
    Record,
    Remove,
    Replace,
    Replaced,
    Truncate,
    edited_paths,
)
from ckptfix.storage.folder_journal import Metadata, Note, Workspace, opened
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import command, forget
from ckptfix.storage.reading import Piece
from ckptfix.storage.recipes import Absent, Recipe, build, differing
from ckptfix.wording import moment

_BLOCK = 1 << 20
_AGAIN = "run again when nothing else writes to the folder"


def prepare(work: Workspace, index: int, edit: Edit) -> Note:
    """Check that the edit applies, put what it needs into the journal, and return what an undo
    needs to know.

    Raises ChangedError when a file is not what the edit expects, OperationError when it must not be
    edited so.
    """
    match edit:
        case Patch():
            with _opened_to_write(work.at(edit.path)) as fd:
                note = _note_of_open(fd, edit.path)
                _check_patched(fd, edit)
            return note
        case Append():
            with _opened_to_write(work.at(edit.path)) as fd:
                _check_size(fd, edit.path, edit.old_size)
                return _note_of_open(fd, edit.path)
        case Truncate():
            with _opened_to_write(work.at(edit.path)) as fd:
                _check_size(fd, edit.path, edit.old_size)
                note = _note_of_open(fd, edit.path)
                tail = _copy_tail(
                    fd, work.at(edit.path), edit.new_size, edit.old_size, work.tail(index)
                )
                sync_folder(work.folder)
                digest = digest_before(fd, edit.new_size)
            return Note(old=note.old, metadata=note.metadata, digest=digest, tail=tail)
        case Replace() | Remove():
            return _prepare_whole_file(work, index, edit)
        case Move():
            note = _note_of(work, edit.source)
            if note.old is None:
                raise ChangedError(f"{edit.source}: no longer exists; {_AGAIN}")
            if os.path.lexists(work.at(edit.target)):
                raise ChangedError(
                    f"{edit.target}: already exists, so {edit.source} cannot be renamed to it"
                )
            return note
        case _:
            assert_never(edit)


@contextmanager
def _opened_to_write(path: Path) -> Iterator[int]:
    """Yield a file that is changed in place later.

    In a folder that everyone may write to, a file of somebody else was refused when it was written
    to, and again in each rollback.
    """
    try:
        with opened(path, os.O_RDWR) as fd:
            yield fd
    except PermissionError:
        raise OperationError(
            f"{path}: cannot be written: permission denied; next: add --atomic, which replaces it "
            "with a new file, or make it writable"
        ) from None


def act(work: Workspace, index: int, edit: Edit, note: Note) -> None:
    """Do a prepared edit, durably.

    Raises ChangedError when a file is no longer the one of ``note``: this edit has then changed
    nothing. Any other OperationError or OSError: it may be half done.
    """
    match edit:
        case Patch():
            with opened(work.at(edit.path), os.O_RDWR) as fd:
                _check_same(fd, work.at(edit.path), note.old)
                _check_patched(fd, edit)
                write_all(fd, edit.new, edit.offset)
                os.fsync(fd)
        case Append():
            with opened(work.at(edit.path), os.O_RDWR) as fd:
                _check_same(fd, work.at(edit.path), note.old)
                _append(fd, edit)
        case Truncate():
            with opened(work.at(edit.path), os.O_RDWR) as fd:
                _check_same(fd, work.at(edit.path), note.old)
                os.ftruncate(fd, edit.new_size)
                os.fsync(fd)
        case Replace():
            _replace(work, index, edit, note)
        case Remove():
            path, old = work.at(edit.path), work.old(index, edit.previous)
            _check_still(path, note.old)
            move(path, old)
            _check_taken(old, path, note.old)
        case Move():
            source, target, moved = work.at(edit.source), work.at(edit.target), work.moved(index)
            _check_still(source, note.old)
            # First to a name that no save writes: a save that wrote the file at the last moment
            # wrote it as ``source``, so there it returns. At ``target`` it would be a file that the
            # save wrote as ``target``.
            move(source, moved)
            try:
                _check_taken(moved, source, note.old)
                move(moved, target)
            except FileExistsError:
                raise OperationError(
                    f"{target}: saved again while it was being replaced"
                ) from FileChangedError(target)
        case _:
            assert_never(edit)


def hold(work: Workspace, edits: Sequence[Edit]) -> None:
    """Give each file that was moved a second name in the journal until the commit, where hard links
    are possible.

    A save that writes the new name meanwhile replaces the file there, as safetensors 0.8 does: the
    bytes of the save before stay. torch.save and safetensors 0.7 empty the file instead, under both
    names.
    """
    for index, edit in enumerate(edits):
        # A roll-back would copy a file with two names before it undoes a change in place.
        if isinstance(edit, Move) and not any(
            edit.target in edited_paths(later) for later in edits[index + 1 :]
        ):
            with suppress(OSError):
                os.link(work.at(edit.target), work.moved(index), follow_symlinks=False)


def check_kept(work: Workspace, index: int, edit: Edit, note: Note) -> None:
    """Check that nobody wrote into the previous file in the journal, as a save does that had it
    open.

    Raises OperationError, OSError.
    """
    if (
        isinstance(edit, Remove | Replace)
        and not isinstance(edit.previous, Absent)
        and note.old is not None
    ):
        status = os.lstat(work.old(index, edit.previous))
        if (status.st_size, status.st_mtime_ns) != (note.old.size, note.old.mtime_ns):
            raise FileChangedError(work.root / edit.path)


def _append(fd: int, edit: Append) -> None:
    body = memoryview(edit.data)[: len(edit.data) - edit.tail]
    write_all(fd, body, edit.old_size)
    os.fsync(fd)
    if edit.tail:
        write_all(fd, memoryview(edit.data)[len(body) :], edit.old_size + len(body))
        os.fsync(fd)


def _replace(work: Workspace, index: int, edit: Replace, note: Note) -> None:
    path, new = work.at(edit.path), work.new(index)
    _check_still(path, note.old)
    if not isinstance(edit.previous, Absent):
        old = work.old(index, edit.previous)
        keep(path, old)
        sync_folder(work.folder)
        _check_taken(old, path, note.old)
    # No links here: keep() moved it.
    if isinstance(edit.previous, Absent) or not os.path.lexists(path):
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
            raise ChangedError(
                f"{edit.path}: already exists (expected no file with this name); {_AGAIN}"
            )
    elif old is None:
        raise ChangedError(f"{edit.path}: no longer exists; {_AGAIN}")
    elif isinstance(edit.previous, Recipe) and (old.kind, old.size) != (
        "file",
        edit.previous.size,
    ):
        raise ChangedError(
            f"{edit.path}: changed since it was read (expected a file of {edit.previous.size} "
            f"bytes, found a {old.kind} of {old.size} bytes); {_AGAIN}"
        )
    new = fingerprint(work.new(index)) if isinstance(edit, Replace) else None
    return Note(old=old, metadata=note.metadata, new=new)


def _note_of(work: Workspace, path: PurePosixPath) -> Note:
    full = work.at(path)
    old = fingerprint(full)
    if old is None:
        return Note()
    if old.kind == "folder":
        raise OperationError(f"{full}: is a folder (expected a file)")
    return Note(old=old, metadata=Metadata.of(os.lstat(full)))


def _note_of_open(fd: int, path: PurePosixPath) -> Note:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise OperationError(
            f"{path}: has {status.st_nlink} hard links; a change in place would change all of them"
        )
    return Note(old=fingerprint_of_open(fd), metadata=Metadata.of(status))


def _check_size(fd: int, path: PurePosixPath, expected: int) -> None:
    size = os.fstat(fd).st_size
    if size != expected:
        raise ChangedError(
            f"{path}: changed since it was read (expected {expected} bytes, found {size}); {_AGAIN}"
        )


def _check_patched(fd: int, edit: Patch) -> None:
    if os.pread(fd, len(edit.old), edit.offset) != edit.old:
        raise ChangedError(
            f"{edit.path}: changed at byte {edit.offset} since it was read; {_AGAIN}"
        )


def _check_same(fd: int, path: Path, expected: Fingerprint | None) -> None:
    """Check the very file that is written to next; its name may lead to another file by now."""
    if os.fstat(fd).st_nlink != 1 or fingerprint_of_open(fd) != expected:
        raise _saved_again(path, fingerprint_of_open(fd), expected)


def _check_still(path: Path, expected: Fingerprint | None) -> None:
    found = fingerprint(path)
    if found != expected:
        raise _saved_again(path, found, expected)


def _check_taken(old: Path, path: Path, expected: Fingerprint | None) -> None:
    """Check that the file in the journal, which a commit may delete, is the planned one."""
    found = fingerprint(old)
    if found != expected:
        raise OperationError(f"{path}: saved again while it was being moved") from _saved_again(
            path, found, expected
        )


def _saved_again(
    path: Path, found: Fingerprint | None, expected: Fingerprint | None
) -> FileChangedError:
    was, now = (
        f"{f.size} bytes, modified at {moment(f.mtime_ns)}" if f else "nothing"
        for f in (expected, found)
    )
    return FileChangedError(path, f"expected {was}; found {now}")


def _copy_tail(fd: int, path: Path, start: int, end: int, target: Path) -> str:
    """Copy the end of a file into the journal, and return its sha256."""
    digest = hashlib.sha256()
    out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        position = start
        while position < end:
            data = os.pread(fd, min(_BLOCK, end - position), position)
            if not data:
                raise FileChangedError(path)
            digest.update(data)
            write_all(out, data, position - start)
            position += len(data)
        os.fsync(out)
    finally:
        os.close(out)
    return digest.hexdigest()


_SECTOR = 512


def undo_edit(
    work: Workspace,
    index: int,
    edit: Record,
    note: Note,
    progress: Progress | None = None,
    *,
    keeps_newer: bool = False,
) -> None:
    """Bring the files of ``edit`` durably back to what they were before it. Raises OperationError
    and OSError.

    ``keeps_newer``: of a file that this run moved or removed, and that a save wrote again
    meanwhile, keep the new version alone, as if the save had come after the roll-back. Else such a
    file is a JournalError.
    """
    match edit:
        case Move():
            _undo_move(work, index, edit, note, keeps_newer=keeps_newer)
        case Remove():
            _undo_remove(work, index, edit, note, progress, keeps_newer=keeps_newer)
        case Replaced(previous=Absent()):
            _undo_new_file(work, index, edit, note)
        case Replaced():
            _undo_replace(work, index, edit, note, progress)
        case _:
            _undo_in_place(work, index, edit, note)


def _undo_in_place(
    work: Workspace, index: int, edit: Patch | Appended | Truncate, note: Note
) -> None:
    """Bring the file back durably to what it was. Raises JournalError and OSError."""
    path = work.at(edit.path)
    if not os.path.lexists(path):
        raise work.unexplained(path, "is missing")
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
        work.accept_any_time()  # another writer's file keeps its new time
    os.fsync(fd)


@contextmanager
def _without_other_names(work: Workspace, index: int, path: Path, fd: int) -> Iterator[int]:
    """Yield a descriptor of the file at ``path``; if the file has other names, of a copy that
    replaces it.

    A snapshot made of hard links since the repair (``cp -al``, ``rsync --link-dest``) must keep its
    bytes.
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
        raise work.unexplained(
            path, f"has {size} bytes (expected {note.old.size if note.old else 0})"
        )
    if not _is_mixture(current, edit.old, edit.new):
        raise work.unexplained(path, f"has unexpected bytes at offset {edit.offset}")

    def read(offset: int, length: int) -> bytes:
        data = bytearray(os.pread(fd, length, offset))
        start, end = max(offset, edit.offset), min(offset + length, edit.offset + len(edit.old))
        if start < end:
            data[start - offset : end - offset] = edit.old[start - edit.offset : end - edit.offset]
        return bytes(data)

    _check_ends(work, path, note, ends_digest(read, size))


def _check_ends(work: Workspace, path: Path, note: Note, digest: str) -> None:
    if note.old is None or digest != note.old.sha256:
        raise work.unexplained(path, "has unexpected bytes at its start or end, outside the edit")


def _is_mixture(current: bytes, old: bytes, new: bytes) -> bool:
    """Return True when every byte is old or new: a torn write leaves sectors in any order."""
    if current in (old, new):
        return True
    if len(current) != len(old):
        return False
    for start in range(0, len(old), _SECTOR):
        part = slice(start, start + _SECTOR)
        if current[part] in (old[part], new[part]):
            continue
        if any(
            c not in (a, b) for c, a, b in zip(current[part], old[part], new[part], strict=True)
        ):
            return False
    return True


def _check_append(work: Workspace, path: Path, fd: int, edit: Appended, note: Note) -> None:
    size, most = os.fstat(fd).st_size, edit.old_size + edit.length
    if not edit.old_size <= size <= most:
        raise work.unexplained(path, f"has {size} bytes (expected {edit.old_size} to {most})")
    digest = ends_digest(lambda offset, length: os.pread(fd, length, offset), edit.old_size)
    _check_ends(work, path, note, digest)


def _check_truncate(
    work: Workspace, path: Path, fd: int, edit: Truncate, note: Note, tail: int
) -> None:
    size = os.fstat(fd).st_size
    if not edit.new_size <= size <= edit.old_size:
        raise work.unexplained(
            path, f"has {size} bytes (expected {edit.new_size} to {edit.old_size})"
        )
    if digest_before(fd, edit.new_size) != note.digest:
        raise work.unexplained(path, f"has unexpected bytes before byte {edit.new_size}")
    if _digest(tail, edit.old_size - edit.new_size) != note.tail:
        raise JournalError(
            f"{work.folder}: the end that was cut off from {path} is damaged (sha256 mismatch); "
            f"{forget(work.root)}"
        )

    def read(offset: int, length: int) -> bytes:
        before = max(0, min(length, edit.new_size - offset))
        after = os.pread(tail, length - before, max(0, offset - edit.new_size))
        return os.pread(fd, before, offset) + after

    _check_ends(work, path, note, ends_digest(read, edit.old_size))


def _write_tail(fd: int, edit: Truncate, tail: int) -> None:
    length = edit.old_size - edit.new_size
    for start in range(0, length, _BLOCK):
        write_all(fd, os.pread(tail, min(_BLOCK, length - start), start), edit.new_size + start)


def _digest(fd: int, length: int) -> str:
    digest = hashlib.sha256()
    for start in range(0, length, _BLOCK):
        digest.update(os.pread(fd, min(_BLOCK, length - start), start))
    return digest.hexdigest()


def _undo_move(work: Workspace, index: int, edit: Move, note: Note, *, keeps_newer: bool) -> None:
    source, target, moved = work.at(edit.source), work.at(edit.target), work.moved(index)
    at_source, at_target = fingerprint(source), fingerprint(target)
    # ``hold`` made a second name. Once a save has replaced the file at ``target``, it is the only
    # name.
    is_second_name = any(_is_second_name(moved, path, note.old) for path in (source, target))
    if os.path.lexists(moved) and not is_second_name:
        if at_source is None:
            _make_folder(source.parent)
            move(moved, source)
        # A save that wrote both names replaced this file.
        elif keeps_newer or at_target is not None:
            os.unlink(moved)
        else:
            raise work.unexplained(source, "exists again")
        return
    if at_source is None:
        if at_target is not None and not at_target.same_content(note.old):
            raise JournalError(
                f"{source}: its bytes are lost: it was moved to {target}, and a save overwrote it "
                "there; that file was left alone; next: wait until the save has ended, then: "
                f"{command('undo', work.root)}; or {forget(work.root)}"
            )
        if not work.is_the(at_target, note.old):
            raise work.not_the(target, at_target, note.old)
        _make_folder(source.parent)
        move(target, source)
    elif not work.is_the(at_source, note.old) and work.is_the(at_target, note.old):
        if not keeps_newer:
            raise work.unexplained(source, f"exists again, and the moved file is now {edit.target}")
        os.unlink(target)
    if is_second_name:
        os.unlink(moved)
    for folder in dict.fromkeys((source.parent, target.parent)):
        sync_folder(folder)


def _is_second_name(moved: Path, path: Path, old: Fingerprint | None) -> bool:
    """Return whether two names are one file, or were before the folder was copied: links do not
    survive that.

    A save that replaced the file with the same bytes left another time than the file in the journal
    has.
    """
    held, at = fingerprint(moved), fingerprint(path)
    if held is None or at is None:
        return False
    # Not samefile(): it follows a link, and one that points to a neighbour leads nowhere from
    # within the journal.
    if os.path.samestat(os.lstat(moved), os.lstat(path)):
        return True
    was_replaced = old is not None and held.mtime_ns == old.mtime_ns != at.mtime_ns
    return (
        not was_replaced and held.same_content(at) and samples_digest(moved) == samples_digest(path)
    )


def _undo_new_file(work: Workspace, index: int, edit: Replaced, note: Note) -> None:
    path, new = work.at(edit.path), work.new(index)
    if not os.path.lexists(new) and os.path.lexists(path):
        found = fingerprint(path)
        if not work.is_the(found, note.new):
            raise work.not_the(path, found, note.new)
        move(path, new)
    sync_folder(work.folder)
    sync_folder(path.parent)


def _undo_replace(
    work: Workspace, index: int, edit: Replaced, note: Note, progress: Progress | None
) -> None:
    """Undo a Replace; ``N.new`` exists while the new file is not in place, or linked here."""
    assert not isinstance(edit.previous, Absent)
    path, new, old = work.at(edit.path), work.new(index), work.old(index, edit.previous)
    if not os.path.lexists(new):
        found = fingerprint(path)
        if found is not None and not work.is_the(found, note.new):
            raise work.not_the(path, found, note.new)
        if not os.path.lexists(old):
            _rebuild(work, edit.path, edit.previous, old, note, progress)
        if found is None:  # moved away by hand; the rule above needs a stand-in
            create_file(new, b"", mode=0o600)
        else:
            keep(path, new)
        sync_folder(work.folder)
    if os.path.lexists(old):
        _check_place(work, path, (old, new), note)
        put_back(old, path)
    sync_folder(path.parent)
    sync_folder(work.folder)


def _check_place(work: Workspace, path: Path, ours: tuple[Path, ...], note: Note) -> None:
    """Raise JournalError for a file at ``path`` that is neither the previous nor the new."""
    if not os.path.lexists(path):
        return
    status = os.lstat(path)
    if any(os.path.lexists(one) and os.path.samestat(status, os.lstat(one)) for one in ours):
        return
    found = fingerprint(path)
    if not work.is_the(found, note.old) and not work.is_the(found, note.new):
        raise work.not_the(path, found, note.new)


def _undo_remove(
    work: Workspace,
    index: int,
    edit: Remove,
    note: Note,
    progress: Progress | None,
    *,
    keeps_newer: bool,
) -> None:
    path, old = work.at(edit.path), work.old(index, edit.previous)
    if os.path.lexists(path):
        if os.path.lexists(old):
            if not keeps_newer:
                raise work.unexplained(path, "exists again")
            os.unlink(old)
        # The file was never removed, or is restored. After a commit that deleted it, it must be
        # rebuilt.
        elif (
            work.was_committed
            and not keeps_newer
            and not work.is_the(found := fingerprint(path), note.old)
        ):
            raise work.not_the(path, found, note.old)
        sync_folder(path.parent)
        return
    if not os.path.lexists(old):
        _rebuild(work, edit.path, edit.previous, old, note, progress)
    _make_folder(path.parent)
    move(old, path)


def _make_folder(folder: Path) -> None:
    """Make the folder of a restored file; somebody may have deleted it when it was empty."""
    if not os.path.lexists(folder):
        os.mkdir(folder)
        sync_folder(folder.parent)


def _rebuild(
    work: Workspace,
    path: PurePosixPath,
    previous: object,
    old: Path,
    note: Note,
    progress: Progress | None,
) -> None:
    """Rebuild the previous file at ``old``, the same one or not at all."""
    if not isinstance(previous, Recipe):
        raise JournalError(
            f"{old}: the previous version of {path} is no longer in the journal; "
            f"{forget(work.root)}"
        )
    part = old.with_suffix(".part")
    with suppress(FileNotFoundError):
        os.unlink(part)
    try:
        # private until it is verified to be the previous file
        build(replace(previous, mode=0o600, uid=-1, gid=-1), work.root, part, progress=progress)
        made, why = fingerprint(part), "the files that hold its bytes have changed"
        if any(differing(previous, lambda one: (Piece(part, one.position, one.length),))):
            made = None
    except (
        OperationError,
        FileNotFoundError,
    ) as error:  # a source is shorter than it was, or gone
        made, why = None, f"the files that hold its bytes cannot be read ({error})"
    if made is None or not made.same_content(note.old):
        with suppress(FileNotFoundError):
            os.unlink(part)
        raise JournalError(
            f"{work.root / path}: cannot be rebuilt: {why}; restore them, or {forget(work.root)}"
        )
    if note.metadata is not None:
        with opened(part, os.O_RDWR) as fd:
            note.metadata.restore(fd)
            os.fsync(fd)
    os.rename(part, old)
    sync_folder(work.folder)
