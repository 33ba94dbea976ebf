"""Renames that never put one file over another that nobody looked at."""

import ctypes
import errno
import os
from pathlib import Path

from ckptfix.storage.atomic import sync_folder

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # an old kernel or libc, NFS, many FUSE


def renameat2(source: Path, target: Path, flags: int = _NOREPLACE) -> None:
    """Rename unless ``target`` exists, in one step of the kernel. Raises FileExistsError, OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(source), None, str(target))


def rename_to_free(source: Path, target: Path) -> None:
    """Rename to a name that must be free. Raises FileExistsError; never replaces a file where the kernel can help."""
    try:
        renameat2(source, target)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        if os.path.lexists(target):
            raise FileExistsError(
                errno.EEXIST, os.strerror(errno.EEXIST), str(source), None, str(target)
            ) from None
        os.rename(source, target)


def exchange(one: Path, other: Path) -> bool:
    """Let two names change places in one step; False where the kernel or the file system cannot. Raises OSError."""
    try:
        renameat2(one, other, _EXCHANGE)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        return False
    return True


def move(source: Path, target: Path) -> None:
    """Rename durably to a free name, which is made durable first, so that no crash leaves the file without any."""
    rename_to_free(source, target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)


def put_back(kept: Path, path: Path) -> None:
    """Move ``kept`` to or over ``path``, also when both are links to one inode already."""
    if os.path.lexists(path):
        os.rename(kept, path)
        if os.path.lexists(kept):  # rename does nothing, and succeeds, when both names are one inode (POSIX)
            os.unlink(kept)
    else:
        rename_to_free(kept, path)
