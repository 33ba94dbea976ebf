"""Durable writing: short writes completed, folders synced, and renames that never cover another
file.
"""

import ctypes
import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from ckptfix.storage.files import AnyPath, StorePath
from ckptfix.wording import human_size

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk or an exhausted quota."""


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``; one ``pwrite`` may write less, and never more than 2
    GiB.

    Raises OSError with the path of the file, and of a full disk with the bytes that are missing.
    """
    view = memoryview(data)
    while view:
        try:
            done = os.pwrite(fd, view, offset)
        except OSError as error:
            raise located(error, fd, len(view)) from error
        view, offset = view[done:], offset + done


def sync_file(fd: int) -> None:
    """Make the bytes of a file durable. Raises OSError with its path."""
    try:
        os.fsync(fd)
    except OSError as error:
        raise located(error, fd) from error


def located(error: OSError, fd: int, missing: int = 0) -> OSError:
    """Return an error of a descriptor with the path of its file, and for a full disk the free
    space.

    ``missing``: how many bytes could not be written.
    """
    words = error.strerror or str(error)
    if error.errno in DISK_FULL:
        space = os.fstatvfs(fd)
        needed = f"{human_size(missing)} more needed, " if missing else ""
        words += f": {needed}{human_size(space.f_bavail * space.f_frsize)} free"
    try:
        return OSError(error.errno, words, os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:  # no Linux
        return OSError(error.errno, words)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.EOPNOTSUPP,
        ):  # some network file systems sync names at once
            raise located(error, fd) from error
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """Make every file below ``folder``, and their names, durable."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            if path.is_file() and not path.is_symlink():
                fd = os.open(path, os.O_RDONLY)
                try:
                    sync_file(fd)
                finally:
                    os.close(fd)
        sync_folder(Path(root))


def create_file(path: Path, data: bytes | memoryview, *, mode: int = 0o666) -> None:
    """Write a new file and sync it; ``mode`` is subject to the umask. Raises FileExistsError.

    Raises OSError when not all of it can be written; the incomplete file is then removed.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        write_all(fd, data, 0)
        sync_file(fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def umask() -> int:
    """Return the permissions that new files of this process lack."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    # No such line in some sandboxes. This changes the mask of all threads for a moment.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def read_file(path: AnyPath) -> bytes:
    """Return the bytes of ``path``. Raises OSError when it is a symbolic link or a special file."""
    if isinstance(path, StorePath):
        reader = path.files.reader(path)
        return reader.read(0, reader.size)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # a FIFO would give nothing, or never end
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        parts = []
        while part := os.read(fd, 1 << 24):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def keep(path: Path, kept: Path) -> None:
    """Give the inode at ``path`` the name ``kept``, too; without links, move it there."""
    try:
        os.link(path, kept, follow_symlinks=False)
    except OSError as error:
        # EPERM: no links on this file system (FAT, some FUSE), or fs.protected_hardlinks and
        # another owner.
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        os.rename(path, kept)


def remove_folder(folder: Path) -> None:
    """Delete a folder of the journal with its files. Raises OSError when it is a link."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in os.listdir(fd):
            # Never a folder: ckptfix makes none in there, and deletes no other.
            os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(folder)


_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # an old kernel or libc, NFS, many FUSE


def renameat2(source: Path, target: Path, flags: int = _NOREPLACE) -> None:
    """Rename in one step of the kernel. Raises FileExistsError, OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(source), None, str(target))


def rename_to_free(source: Path, target: Path) -> None:
    """Rename to a name that must be free. Raises FileExistsError; never replaces a file where the
    kernel can help.
    """
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
    """Exchange two names in one step; return False where that is impossible. Raises OSError."""
    try:
        renameat2(one, other, _EXCHANGE)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        return False
    return True


def move(source: Path, target: Path) -> None:
    """Rename durably to a free name, synced first: no crash leaves the file without a name."""
    rename_to_free(source, target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)


def put_back(kept: Path, path: Path) -> None:
    """Move ``kept`` to or over ``path``, also when both are links to one inode already."""
    if os.path.lexists(path):
        os.rename(kept, path)
        # Rename does nothing, and succeeds, when both names are one inode (POSIX).
        if os.path.lexists(kept):
            os.unlink(kept)
    else:
        rename_to_free(kept, path)
