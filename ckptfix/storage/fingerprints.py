"""Fingerprints of files: a millisecond shows that a file is no longer what it was."""

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_ENDS = 1 << 16
_PAGES, _PAGE = 24, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Fingerprint of a file, link or folder (``kind``).

    ``sha256`` is over the first and last 64 KiB of a file, or over where a link points; ``mtime_ns`` is in
    nanoseconds since 1970.
    """

    kind: str
    size: int
    mtime_ns: int
    sha256: str

    def same_content(self, other: "Fingerprint | None") -> bool:
        """Return True when only the modification time may differ, and the bytes between the ends of a file."""
        return other is not None and (self.kind, self.size, self.sha256) == (
            other.kind,
            other.size,
            other.sha256,
        )


def fingerprint(path: Path) -> Fingerprint | None:
    """Return the fingerprint of ``path``, None when there is nothing. Raises OSError for a special file."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            digest = hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
            return Fingerprint(kind="link", size=status.st_size, mtime_ns=status.st_mtime_ns, sha256=digest)
        if stat.S_ISDIR(status.st_mode):
            return Fingerprint(kind="folder", size=0, mtime_ns=status.st_mtime_ns, sha256="")
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is neither a file nor a link nor a folder", str(path))
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return fingerprint_of_open(fd)
    finally:
        os.close(fd)


def fingerprint_of_open(fd: int) -> Fingerprint:
    """Return the fingerprint of an open regular file."""
    status = os.fstat(fd)
    digest = ends_digest(lambda offset, length: os.pread(fd, length, offset), status.st_size)
    return Fingerprint(kind="file", size=status.st_size, mtime_ns=status.st_mtime_ns, sha256=digest)


def ends_digest(read: Callable[[int, int], bytes], size: int) -> str:
    """Return the sha256 of both ends of a file of ``size`` bytes, whose bytes ``read(offset, length)`` gives."""
    digest = hashlib.sha256(read(0, min(_ENDS, size)))
    if size > _ENDS:
        start = max(_ENDS, size - _ENDS)
        digest.update(read(start, size - start))
    return digest.hexdigest()


def samples_digest(path: Path) -> str:
    """Return the sha256 of 24 pages between the ends of a file, "" where the ends are all of it or it is no file.

    A training step changes nearly every page of a model whose ends are frozen. Raises OSError.
    """
    status = os.lstat(path)
    between = status.st_size - 2 * _ENDS
    if not stat.S_ISREG(status.st_mode) or between <= 0:
        return ""
    digest = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        for number in range(_PAGES):
            digest.update(os.pread(fd, _PAGE, _ENDS + max(0, between - _PAGE) * number // (_PAGES - 1)))
    finally:
        os.close(fd)
    return digest.hexdigest()


def digest_before(fd: int, end: int) -> str:
    """Return the sha256 of the 64 KiB (or fewer) that end at byte ``end``."""
    length = min(_ENDS, end)
    return hashlib.sha256(os.pread(fd, length, end - length)).hexdigest()


def moment(nanoseconds: int) -> str:
    """Return a modification time as people read it, to the nanosecond."""
    seconds = time.localtime(nanoseconds // 10**9)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', seconds)}.{nanoseconds % 10**9:09}"
