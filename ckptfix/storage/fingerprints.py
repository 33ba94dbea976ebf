"""Tell in a millisecond whether a file is still what it was."""

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

_ENDS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a name stands for: ``kind`` is file, link or folder.

    ``sha256`` is over the first and last 64 KiB of a file, or over where a link points; ``mtime_ns`` is in
    nanoseconds since 1970.
    """

    kind: str
    size: int
    mtime_ns: int
    sha256: str

    def same_content(self, other: "Fingerprint | None") -> bool:
        """True when only the modification time may differ."""
        return other is not None and (self.kind, self.size, self.sha256) == (
            other.kind,
            other.size,
            other.sha256,
        )


def fingerprint(path: Path) -> Fingerprint | None:
    """Return the fingerprint of ``path``, None when there is nothing. Raises OSError for a special file."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    kind, size, digest = "file", status.st_size, ""
    if stat.S_ISLNK(status.st_mode):
        kind, digest = "link", hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
    elif stat.S_ISDIR(status.st_mode):
        kind, size = "folder", 0
    else:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            digest = _ends_digest(fd, size)
        finally:
            os.close(fd)
    return Fingerprint(kind=kind, size=size, mtime_ns=status.st_mtime_ns, sha256=digest)


def digest_before(fd: int, end: int) -> str:
    """Return the sha256 of the 64 KiB (or fewer) that end at byte ``end``."""
    length = min(_ENDS, end)
    return hashlib.sha256(os.pread(fd, length, end - length)).hexdigest()


def _ends_digest(fd: int, size: int) -> str:
    digest = hashlib.sha256(os.pread(fd, _ENDS, 0))
    if size > _ENDS:
        start = max(_ENDS, size - _ENDS)
        digest.update(os.pread(fd, size - start, start))
    return digest.hexdigest()
