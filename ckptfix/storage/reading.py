"""Random reads of open files, and stretches of bytes read block by block."""

import mmap
import os
import stat
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import NamedTuple

from ckptfix.errors import FileChangedError, FormatError, OperationError
from ckptfix.storage.files import AnyPath, FileReader, StorePath, stat_of


class FileIdentity(NamedTuple):
    """Facts that distinguish a file from others and from its earlier versions."""

    size: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(status: os.stat_result) -> "FileIdentity":
        """Return the identity of a file with this status."""
        return FileIdentity(status.st_size, status.st_mtime_ns, status.st_ino)


ABSENT = FileIdentity(0, 0, 0)
"""Identity of a file that does not exist, or that may not be looked at."""


def identity(path: AnyPath) -> FileIdentity:
    """Return the identity of the file at a path, ``ABSENT`` where there is none."""
    try:
        return FileIdentity.of(stat_of(path))
    except OSError:
        return ABSENT


def ensure_unchanged(root: AnyPath, known: Mapping[PurePosixPath, FileIdentity]) -> None:
    """Raise FileChangedError when a file has another size or time than ``known`` says."""
    for path, was in known.items():
        now = identity(root / path)
        # Some FUSE mounts number an unchanged file anew once the kernel forgot it, so inodes are
        # not compared.
        if now[:2] != was[:2]:
            sizes = f"expected {was.size} bytes, found {now.size}" if now.size != was.size else ""
            raise FileChangedError(root / path, sizes)


@contextmanager
def unchanged(root: AnyPath, known: Mapping[PurePosixPath, FileIdentity]) -> Iterator[None]:
    """Raise FileChangedError when a file changed by the end of this block: an answer from two
    states is none.

    The same after a failure: a save wrote the bytes that it is about.
    """
    try:
        yield
    except (FormatError, OperationError):
        ensure_unchanged(root, known)
        raise
    ensure_unchanged(root, known)


def read_start(path: AnyPath, most: int) -> bytes | None:
    """Return at most ``most`` first bytes, None for no regular file. Raises OSError."""
    if isinstance(path, StorePath):
        reader = path.files.reader(path)
        return reader.read(0, min(most, reader.size))
    with open(path, "rb", opener=_without_waiting) as file:
        return file.read(most) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without blocking, even a pipe without a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def open_reader(path: AnyPath) -> Iterator[FileReader]:
    """Open ``path`` for reading. Raises OSError as ``open`` does."""
    if isinstance(path, StorePath):
        yield path.files.reader(path)
        return
    # O_NONBLOCK: a FIFO that happens to be called model.bin must not hang the scan.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield FileReader(fd, os.fstat(fd).st_size, path)
    finally:
        os.close(fd)


_MOST_OPEN = 64
_DROPPED_AT_ONCE = 8 << 20
"""Bytes: pages that a range only touches cannot be dropped with it, and the kernel stops every core
to find their users.
"""


class Piece(NamedTuple):
    """``length`` bytes from ``offset`` of a file."""

    path: AnyPath
    offset: int
    length: int


def page_buffer(size: int) -> memoryview:
    """Return ``size`` bytes, one at least, that begin on a page.

    Measured: the kernel copies cached pages to them at 18 GB/s, and at 7 GB/s to a bytearray, which
    begins 16 bytes after a page.
    """
    return memoryview(mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class OpenFiles:
    """Files that are open for reading, the 64 used last; for one thread, as the kernel's readahead
    is kept per file.

    Use as a context manager. ``keep_cached`` off, for files that nobody else needs: read pages
    leave the page cache, 8 MiB at a time, so that few pages serve for all of it.
    """

    def __init__(self, *, keep_cached: bool = True) -> None:
        self._keep_cached = keep_cached
        self._open: OrderedDict[Path, int] = OrderedDict()

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def fill(self, view: memoryview, path: AnyPath, offset: int) -> None:
        """Fill ``view`` from ``offset`` on. Raises FileChangedError when the file is shorter."""
        if isinstance(path, StorePath):
            reader = path.files.reader(path)
            if offset + len(view) > reader.size:
                raise FileChangedError(path, _sizes(offset + len(view), reader.size))
            reader.fill(view, offset)
            return
        fd = self.descriptor(path)
        done = 0
        while done < len(view):
            got = os.preadv(fd, [view[done:]], offset + done)
            if not got:
                raise FileChangedError(path, _sizes(offset + len(view), offset + done))
            done += got
        if not self._keep_cached:
            end = (offset + done) // _DROPPED_AT_ONCE * _DROPPED_AT_ONCE
            if offset < end:
                begin = offset // _DROPPED_AT_ONCE * _DROPPED_AT_ONCE
                os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def blocks(self, pieces: Iterable[Piece], buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes of ``pieces`` one after another, ``buffer`` full each time but the last.

        Each is a view of ``buffer``, valid until the next one.
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
        """Return the descriptor of a file, valid until 63 others were requested. Raises OSError."""
        fd = self._open.pop(path, None)
        if fd is None:
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._open[path] = fd
        return fd


def _sizes(expected: int, found: int) -> str:
    return f"expected at least {expected} bytes, found {found}"
