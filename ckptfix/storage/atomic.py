"""Durable writing: short writes completed, folders synced, whole files replaced by one rename."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``; one ``pwrite`` may write less, and never more than 2 GiB."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


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
            raise
    finally:
        os.close(fd)


def create_file(path: Path, data: bytes | memoryview, *, mode: int = 0o666) -> None:
    """Write a new file and sync it; ``mode`` is subject to the umask. Raises FileExistsError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        write_all(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_file(path: Path) -> bytes:
    """Return the bytes of ``path``, which must not be a symbolic link."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        parts = []
        while part := os.read(fd, 1 << 24):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def keep(path: Path, kept: Path) -> None:
    """Give the inode at ``path`` the second name ``kept``; where links are not possible, move it there."""
    try:
        os.link(path, kept, follow_symlinks=False)
    except OSError as error:
        # EPERM: no links on this file system (FAT, some FUSE), or fs.protected_hardlinks and another owner.
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        os.rename(path, kept)


def rename_back(kept: Path, path: Path) -> None:
    """Move ``kept`` over ``path``, also when both are links to one inode already."""
    os.rename(kept, path)
    if os.path.lexists(kept):  # rename does nothing, and succeeds, when both names are one inode (POSIX)
        os.unlink(kept)


def set_owner_and_mode(path: Path, current: os.stat_result, *, uid: int, gid: int, mode: int) -> None:
    """Change owner (where permitted) and mode bits of a regular file where ``current`` has others."""
    moved = (current.st_uid, current.st_gid) != (uid, gid)
    if moved:
        with suppress(PermissionError):
            os.chown(path, uid, gid, follow_symlinks=False)
    if moved or stat.S_IMODE(current.st_mode) != mode:  # chown clears set-uid bits
        os.chmod(path, mode)


def remove_tree(folder: Path) -> None:
    """Delete a folder of the journal and all in it; symbolic links in it are removed, not followed."""
    with os.scandir(folder) as entries:
        found = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries]
    for path, is_folder in found:
        if is_folder:
            remove_tree(path)
        else:
            os.unlink(path)
    os.rmdir(folder)
