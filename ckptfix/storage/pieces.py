"""Stretches of bytes in files, read block by block."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from ckptfix.errors import ChangedError

_MOST_OPEN = 64
_WORTH_DROPPING = 64 << 10


class Piece(NamedTuple):
    """``length`` bytes from ``offset`` of a file."""

    path: Path
    offset: int
    length: int


class OpenFiles:
    """Files that are open for reading, the 64 used last; for one thread, as the kernel's readahead is kept per file.

    Use as a context manager. ``keep_cached`` off, for files that nobody else needs: what was read leaves the page
    cache, so that few pages serve for all of it.
    """

    def __init__(self, *, keep_cached: bool = True) -> None:
        self._keep_cached = keep_cached
        self._open: OrderedDict[Path, int] = OrderedDict()

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def fill(self, view: memoryview, path: Path, offset: int) -> None:
        """Read bytes from ``offset`` on until ``view`` is full. Raises ChangedError when the file ends before that."""
        fd = self.descriptor(path)
        done = 0
        while done < len(view):
            got = os.preadv(fd, [view[done:]], offset + done)
            if not got:
                raise ChangedError(
                    f"{path} ends at byte {offset + done}, {len(view) - done} more are needed: it changed while it "
                    "was read"
                )
            done += got
        if not self._keep_cached and done >= _WORTH_DROPPING:
            os.posix_fadvise(fd, offset, done, os.POSIX_FADV_DONTNEED)

    def blocks(self, pieces: Iterable[Piece], buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes of ``pieces`` one after another, ``buffer`` full each time but the last.

        What is yielded is a view of ``buffer``, and holds until the next one.
        """
        filled = 0
        for path, offset, length in pieces:
            done = 0
            while done < length:
                take = min(length - done, len(buffer) - filled)
                self.fill(buffer[filled : filled + take], path, offset + done)
                filled, done = filled + take, done + take
                if filled == len(buffer):
                    yield buffer
                    filled = 0
        if filled:
            yield buffer[:filled]

    def descriptor(self, path: Path) -> int:
        """Return the descriptor of a file, which holds until 63 others were asked for. Raises OSError."""
        fd = self._open.pop(path, None)
        if fd is None:
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._open[path] = fd
        return fd
