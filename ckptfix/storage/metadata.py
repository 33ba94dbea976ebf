"""What an undo restores of a file besides its bytes."""

import os
import stat
from contextlib import suppress
from dataclasses import dataclass

_BITS = 0o1777


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Permissions, owner and modification time (nanoseconds since 1970).

    Never the set-uid and set-gid bits: a journal that somebody else wrote must not get them from root.
    """

    mode: int
    uid: int
    gid: int
    mtime_ns: int

    @staticmethod
    def of(status: os.stat_result) -> "Metadata":
        """Return what ``status`` says."""
        return Metadata(
            mode=status.st_mode & _BITS, uid=status.st_uid, gid=status.st_gid, mtime_ns=status.st_mtime_ns
        )

    def restore(self, fd: int) -> bool:
        """Restore what differs and may be changed; return False when the time may not (not the owner)."""
        current = os.fstat(fd)
        moved = (current.st_uid, current.st_gid) != (self.uid, self.gid)
        if moved:
            with suppress(PermissionError):
                os.fchown(fd, self.uid, self.gid)
        if moved or current.st_mode & _BITS != self.mode:  # chown may clear bits
            with suppress(PermissionError):
                os.fchmod(fd, self.mode & _BITS | stat.S_IMODE(current.st_mode) & ~_BITS)
        if current.st_mtime_ns != self.mtime_ns:
            try:
                os.utime(fd, ns=(current.st_atime_ns, self.mtime_ns))
            except PermissionError:
                return False
        return True
