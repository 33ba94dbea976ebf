"""Which blocks of the disk a range of a file lies on (Linux FIEMAP)."""

import errno
import fcntl
import struct
from collections.abc import Iterator

_FS_IOC_FIEMAP = 0xC020660B
_SYNC = (
    1  # what is only in memory has no place yet, and a write to shared blocks moves them when it is synced
)
_LAST = 1
# UNKNOWN, DELALLOC, ENCODED, DATA_ENCRYPTED, NOT_ALIGNED, DATA_INLINE, DATA_TAIL, UNWRITTEN: such an extent's place
# says nothing about its bytes.
_UNPROVEN = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
_SHARED = 0x2000  # without it two files cannot lie on one place; equal numbers are then places on two devices
_HEADER = struct.Struct("=QQLLLL")
_EXTENT = struct.Struct("=QQQQQLLLL")
_AT_ONCE = 256


def same_extents(fd_a: int, offset_a: int, fd_b: int, offset_b: int, length: int) -> bool:
    """True when two ranges of files on one device lie on the same blocks. False: they do not, or nobody knows."""
    try:
        parts_a, parts_b = _physical(fd_a, offset_a, length), _physical(fd_b, offset_b, length)
        done = 0
        start_a = end_a = start_b = end_b = place_a = place_b = 0
        while done < length:
            if done >= end_a:
                start_a, end_a, place_a = next(parts_a)
            if done >= end_b:
                start_b, end_b, place_b = next(parts_b)
            if not (start_a <= done and start_b <= done and place_a - start_a == place_b - start_b):
                return False
            done = min(end_a, end_b)
    except (OSError, StopIteration):
        return False
    return True


def _physical(fd: int, offset: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, place) of each proven extent; start and end count from ``offset``, place is on the disk.

    Ends early at an extent that proves nothing or belongs to one file alone; holes are left out.
    """
    position = offset
    while position < offset + length:
        request = bytearray(_HEADER.size + _AT_ONCE * _EXTENT.size)
        _HEADER.pack_into(request, 0, position, offset + length - position, _SYNC, 0, _AT_ONCE, 0)
        fcntl.ioctl(fd, _FS_IOC_FIEMAP, request)
        found = _HEADER.unpack_from(request)[3]
        if not found:
            return
        for number in range(found):
            logical, place, size, _, _, flags, *_ = _EXTENT.unpack_from(
                request, _HEADER.size + number * _EXTENT.size
            )
            if flags & _UNPROVEN or not flags & _SHARED:
                return
            if logical + size <= position:
                raise OSError(errno.EIO, "FIEMAP made no progress")
            skipped = max(0, offset - logical)
            yield logical + skipped - offset, logical + size - offset, place + skipped
            position = logical + size
            if flags & _LAST:
                return
