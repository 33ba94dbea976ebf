"""Random reads of open files, and stretches of bytes read block by block."""

import mmap
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ckptfix.dataclass import dataclass
from ckptfix.errors import FileChangedError, FormatError, OperationError
from ckptfix.wording import human_size

if TYPE_CHECKING:
    from ckptfix.storage.stores import Store


@dataclass(frozen=True, slots=True)
class FileReader:
    """An open file, or a window of one: its descriptor, its size in bytes when it was opened, and
    where it starts.

    ``path``: names it in the error about a file that changed.
    """

    fd: int
    size: int
    path: Path
    start: int = 0

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``offset``.

        Raises FormatError when the range is not inside the file, FileChangedError when the file
        became shorter.
        """
        self._ensure_inside(offset, length)
        data = os.pread(self.fd, length, self.start + offset)
        # One read returns at most 2 GiB, and less on some network file systems.
        while len(data) < length:
            more = os.pread(self.fd, length - len(data), self.start + offset + len(data))
            if not more:
                raise FileChangedError(self.path)
            data += more
        return data

    def fill(self, view: memoryview, offset: int) -> None:
        """Read bytes from ``offset`` on until ``view`` is full. Any thread may. Raises as ``read``
        does.
        """
        self._ensure_inside(offset, len(view))
        done = 0
        while done < len(view):
            got = os.preadv(self.fd, [view[done:]], self.start + offset + done)
            if not got:
                raise FileChangedError(self.path)
            done += got

    def window(self, offset: int, length: int) -> "FileReader":
        """Return a reader of ``length`` bytes from ``offset``, in which offsets count from there.

        Raises FormatError when the range is not inside the file.
        """
        self._ensure_inside(offset, length)
        return FileReader(self.fd, length, self.path, self.start + offset)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begin to read ranges that will be asked for: all at once, instead of one seek after the
        other.
        """
        for offset, length in ranges:
            os.posix_fadvise(self.fd, self.start + offset, length, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def reopened(self) -> Iterator["FileReader"]:
        """Yield a reader of the same file with a readahead of its own.

        Readahead is kept per open file: threads that read from one descriptor at several places
        switch it off for each other. Measured cold on 2 files of 2 GiB: 3.0 GB/s with one
        descriptor, 3.3 to 3.5 with one a thread.
        """
        try:
            own = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no /proc, or the file is gone from its folder
            own = os.dup(self.fd)
        try:
            os.posix_fadvise(own, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            yield FileReader(own, self.size, self.path, self.start)
        finally:
            os.close(own)

    def is_cached(self, offset: int) -> bool:
        """Return whether the byte at ``offset`` is in memory already."""
        try:
            return os.preadv(self.fd, [bytearray(1)], self.start + offset, os.RWF_NOWAIT) == 1
        except OSError:  # not in memory, or a file system that does not report it
            return False

    def spares(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Return whether ranges should not be read one by one: never, as they cost microseconds.

        Of an object in a store each costs a request: it returns True while ``sparing`` is on, and
        else reads them all at once.
        """
        return False

    def _ensure_inside(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise FormatError(
                f"bytes {offset} to {offset + length} are needed, the file has {self.size}"
            )


class FileIdentity(NamedTuple):
    """Facts that distinguish a file from other files and from its earlier versions: sizes in bytes,
    times in nanoseconds.
    """

    size: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(status: os.stat_result) -> "FileIdentity":
        """Return the identity of a file with this status."""
        return FileIdentity(status.st_size, status.st_mtime_ns, status.st_ino)


ABSENT = FileIdentity(0, 0, 0)
"""Identity of a file that does not exist, or that may not be looked at."""


def identity(path: Path) -> FileIdentity:
    """Return the identity of the file at a path, ``ABSENT`` where there is none."""
    try:
        return FileIdentity.of(os.stat(path))
    except OSError:
        return ABSENT


def ensure_unchanged(root: Path, known: Mapping[PurePosixPath, FileIdentity]) -> None:
    """Raise FileChangedError when a file below ``root`` does not have its size and time of
    ``known`` any more.
    """
    for path, was in known.items():
        now = identity(root / path)
        # Some FUSE mounts number an unchanged file anew once the kernel forgot it, so inodes are
        # not compared.
        if now[:2] != was[:2]:
            sizes = f"expected {was.size} bytes, found {now.size}" if now.size != was.size else ""
            raise FileChangedError(root / path, sizes)


@contextmanager
def unchanged(root: Path, known: Mapping[PurePosixPath, FileIdentity]) -> Iterator[None]:
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


class Sparing:
    """Count of what was not read in a block that spares requests."""

    def __init__(self) -> None:
        self.headers = 0


class _OfThread(threading.local):
    spared: Sparing | None = None


_of_thread = _OfThread()


@contextmanager
def sparing() -> Iterator[Sparing]:
    """Leave out what costs a request for each tensor of an object in a store, in this block; it is
    counted.
    """
    before, _of_thread.spared = _of_thread.spared, Sparing()
    try:
        yield _of_thread.spared
    finally:
        _of_thread.spared = before


def spared() -> Sparing | None:
    """Return the count while this thread spares requests, None elsewhere."""
    return _of_thread.spared


class Unheld(NamedTuple):
    """An object of a store whose key no folder can hold. ``home``: the folder that it would be in
    or below.
    """

    key: str
    size: int
    home: Path
    why: str

    def __str__(self) -> str:
        if self.size:
            return f"an object of {human_size(self.size)} that no folder can hold: {self.why}"
        return f"an empty object, as programs mark folders with it: {self.why}"


class Names(NamedTuple):
    """The names in a folder."""

    files: list[str]
    folders: list[str]


class Elsewhere(Protocol):
    """Files whose bytes are not on this machine (``storage.images``)."""

    def open(self, path: Path) -> FileReader | None:
        """Return the reader of a file, None for one that is on this machine. Raises OSError as
        ``open`` does.
        """

    def names(self, folder: Path) -> Names | None:
        """Return the names in a folder that is only listed, None for any other one. Raises
        OSError.
        """

    def origin(self, folder: Path) -> Path | None:
        """Return the folder of a listing of which a folder was made, None for any other one."""

    def unheld(self, folder: Path) -> tuple[Unheld, ...]:
        """Return the objects in or below a folder that it cannot hold."""

    def store(self, folder: Path) -> "Store | None":
        """Return the store whose prefix a folder is the image of, None for a folder on this
        machine.
        """


_elsewhere: list[Elsewhere] = []
"""One at most; empty while only local files are read."""


def look_elsewhere(files: Elsewhere) -> None:
    """Ask for every file there first, from now on."""
    if files not in _elsewhere:
        _elsewhere.append(files)


def opened_elsewhere(path: Path) -> FileReader | None:
    """Return the reader of a file whose bytes are not on this machine, None for all others. Raises
    OSError.
    """
    for files in _elsewhere:
        if (reader := files.open(path)) is not None:
            return reader
    return None


def store_of(folder: Path) -> "Store | None":
    """Return the store whose prefix a folder is the image of, None for a folder on this machine."""
    return next((store for files in _elsewhere if (store := files.store(folder)) is not None), None)


def unheld_below(folder: Path) -> tuple[Unheld, ...]:
    """Return the objects of a store in or below a folder whose keys no folder can hold."""
    return tuple(one for files in _elsewhere for one in files.unheld(folder))


def listed_names(folder: Path) -> Names | None:
    """Return the names in a folder that only a listing of a store has, None for any other one.
    Raises OSError.
    """
    return next((found for files in _elsewhere if (found := files.names(folder)) is not None), None)


def origin_of(folder: Path) -> Path:
    """Return the folder of a listing of which a folder was made: its neighbours are there. Any
    other one as it is.
    """
    return next(
        (found for files in _elsewhere if (found := files.origin(folder)) is not None), folder
    )


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder. Raises OSError."""
    listed = listed_names(folder)
    return os.listdir(folder) if listed is None else [*listed.files, *listed.folders]


def subfolders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, without links. Raises OSError."""
    listed = listed_names(folder)
    if listed is not None:
        return listed.folders
    with os.scandir(folder) as listing:
        return [entry.name for entry in listing if entry.is_dir(follow_symlinks=False)]


def walk(
    top: Path, onerror: Callable[[OSError], None]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk through folders as ``os.walk`` does, through those that are only listed as well."""
    if listed_names(top) is None:
        yield from os.walk(top, onerror=onerror)
        return
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        if (names := listed_names(folder)) is None:
            continue
        yield str(folder), names.folders, names.files
        waiting += [folder / name for name in reversed(names.folders)]


def read_start(path: Path, most: int) -> bytes | None:
    """Return the first bytes of a file, ``most`` at most, None for anything but a regular file.
    Raises OSError.
    """
    if (reader := opened_elsewhere(path)) is not None:
        return reader.read(0, min(most, reader.size))
    with open(path, "rb", opener=_without_waiting) as file:
        return file.read(most) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without blocking, even a pipe without a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def open_reader(path: Path) -> Iterator[FileReader]:
    """Open ``path`` for reading. Raises OSError as ``open`` does."""
    if _elsewhere and (reader := opened_elsewhere(path)) is not None:
        yield reader
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

    path: Path
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
        self._readers: dict[Path, FileReader | None] = {}

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

    def fill(self, view: memoryview, path: Path, offset: int) -> None:
        """Read bytes from ``offset`` on until ``view`` is full. Raises FileChangedError when the
        file ends earlier.
        """
        if _elsewhere and (reader := self._elsewhere(path)) is not None:
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

    def _elsewhere(self, path: Path) -> FileReader | None:
        if path not in self._readers:
            self._readers[path] = opened_elsewhere(path)
        return self._readers[path]

    def holds_descriptor(self, path: Path) -> bool:
        """Return whether ``descriptor`` has one of a file: it has none of a file that is not on
        this machine.
        """
        return not _elsewhere or self._elsewhere(path) is None

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
