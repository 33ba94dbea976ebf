"""The lock that allows one writer per folder."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptfix.errors import JournalError, LockedError, OperationError
from ckptfix.storage.paths import JOURNAL, shell_path

LOCK = "lock"
"""The name of the lock file in ``.ckptfix/``."""


@contextmanager
def folder_lock(root: Path, *, verb: str = "repair") -> Iterator[None]:
    """Hold the lock of the folder ``root``; readers do not need it.

    The lock dies with the process that holds it, so a lock file that a killed run left behind locks
    nothing. At the end the lock file is removed, and ``.ckptfix/`` with it when it is empty.

    Raises LockedError when another process holds it, JournalError when ``.ckptfix`` is a symbolic
    link or no directory, OperationError when the folder cannot be written to or its file system has
    no locks.
    """
    try:
        fd = _acquire(root)
    except OSError as error:
        with suppress(OSError):  # made in vain; stays when somebody else uses it
            os.rmdir(root / JOURNAL)
        copy = (
            f"; next: ckptfix repair {shell_path(root)} --output COPY" if verb == "repair" else ""
        )
        raise OperationError(
            f"{root}: cannot lock this folder for writing: {error.strerror}{copy}"
        ) from error
    try:
        yield
    finally:
        # While the descriptor is open nobody else gets the lock; whoever has opened the file
        # already finds that it is no longer there (see _acquire) and makes a new one.
        with suppress(OSError):
            os.unlink(root / JOURNAL / LOCK)
        with suppress(OSError):
            os.rmdir(root / JOURNAL)
        os.close(fd)


def _acquire(root: Path) -> int:
    folder = root / JOURNAL
    path = folder / LOCK
    while True:
        with suppress(FileExistsError):
            os.mkdir(folder)
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                raise JournalError(
                    f"{folder}: is a symbolic link or not a directory; move it away first"
                )
        try:
            fd = _open(path)
        except FileNotFoundError:  # the holder removed lock file and folder just now
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, path):
                _write_pid(fd)
                return fd
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            os.close(fd)
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise LockedError(
                f"{root}: {who} is working on this folder; wait until it has ended, then try again"
            ) from None
        except OSError as error:
            os.close(fd)
            if error.errno == errno.EBADF:  # NFS: only files open for writing are locked, see _open
                raise OperationError(
                    f"{path}: left by a killed run of another user, and on this file system only "
                    f"its owner can lock it; to remove it: rm -f {shell_path(path)}"
                ) from error
            raise
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _open(path: Path) -> int:
    flags = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_RDWR, 0o666)
    except PermissionError:
        # Left by a killed run of somebody else: flock needs no right to write, but on NFS.
        with suppress(FileNotFoundError):
            return os.open(path, flags & ~os.O_CREAT | os.O_RDONLY)
        if os.access(path.parent, os.W_OK, effective_ids=True):  # the holder removed it just now
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        raise  # nobody holds it, and it cannot be created: a retry would never end


def _is_at(fd: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    return False


def _write_pid(fd: int) -> None:
    # Only for the message of the other side; a full disk must not stop an undo.
    with suppress(OSError):
        # A snapshot of hard links, or a trap: the file has another name.
        if os.fstat(fd).st_nlink > 1:
            return
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
