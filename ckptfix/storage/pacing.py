"""Write large files at the speed of the disk: what is written goes out at once, and leaves the page cache."""

import ctypes
import errno
import os
from typing import Any

from ckptfix.storage.atomic import located, sync_file

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_STEP = 16 << 20
_IN_FLIGHT = 64 << 20
_PACE = 256 << 20
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ESPIPE)


class Pacer:
    """Follows one file that is written from its beginning to its end.

    The disk is kept busy (``sync_file_range`` starts writing and does not wait), and at most 80 MiB wait to be written:
    left to the kernel, dirty pages fill the page cache and then stop every writer at once. What is on the disk is
    dropped from the cache: the user's own files stay in it, a check that follows reads what the disk has, and the same
    few pages are used again and again, where new ones would cost a virtual machine four times as much as the copying.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._started = self._settled = 0
        self._call: Any = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)

    def wrote(self, end: int) -> None:
        """Say that the file is written up to byte ``end``. Raises OSError where writing it out failed."""
        if self._call is None:
            if end - self._settled >= _PACE:
                os.fdatasync(self._fd)
                self._drop(end)
            return
        if end - self._started < _STEP:
            return
        self._sync(self._started, end, _WRITE)
        self._started = end
        if self._started - self._settled > _IN_FLIGHT:
            settled = self._started - _IN_FLIGHT
            self._sync(self._settled, settled, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            self._drop(settled)

    def finish(self, end: int) -> None:
        """Make the whole file durable. Raises OSError."""
        sync_file(self._fd)
        self._drop(end)

    def _drop(self, end: int) -> None:
        os.posix_fadvise(self._fd, self._settled, end - self._settled, os.POSIX_FADV_DONTNEED)
        self._settled = end

    def _sync(self, begin: int, end: int, flags: int) -> None:
        if self._call is None:
            return
        offset, length = ctypes.c_int64(begin), ctypes.c_int64(end - begin)
        if self._call(self._fd, offset, length, ctypes.c_uint(flags)):
            code = ctypes.get_errno()
            if code in _NOT_HERE:  # fdatasync, now and then, must do
                self._call = None
                return
            raise located(OSError(code, os.strerror(code)), self._fd)
