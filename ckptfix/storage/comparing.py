"""Byte ranges of two files compared in parallel, and fingerprints that show in a millisecond that a
file changed.

Several threads compare, in little memory.
"""

import ctypes
import errno
import hashlib
import os
import stat
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Annotated, Literal

from msgspec import Meta, Struct

from ckptfix.errors import FileChangedError, FormatError
from ckptfix.storage.executor import THREADS, Done, Executor
from ckptfix.storage.files import AnyPath, FileReader, StorePath
from ckptfix.storage.parallel import Control, Progress, reading_threads, run_all
from ckptfix.storage.reading import page_buffer
from ckptfix.storage.results import Identity, Unit

# With 256 KiB blocks the threads spend half their time handing the interpreter's lock around; from
# 2 MiB on the blocks fall out of the cores' caches before memcmp sees them.
_BLOCK = 1 << 20  # per file and thread
SEGMENT = 1 << 26
"""Bytes that a thread takes at a time: long enough for the kernel's readahead to run ahead. A
digest covers one.
"""

_PAGE = 4096


class Run(Struct, frozen=True, order=True):
    """``length`` bytes at ``offset_a`` of one file and at ``offset_b`` of the other."""

    offset_a: int
    offset_b: int
    length: int


Digests = dict[tuple[int, int], bytes]
"""(offset, length) of a part of a file, ``SEGMENT`` bytes at most -> the sha256 of its bytes."""


class Difference(Struct, frozen=True, kw_only=True):
    """First differing byte: the index of its run, and its offsets in the two files."""

    run: int
    offset_a: int
    offset_b: int


def first_difference(
    file_a: FileReader,
    file_b: FileReader,
    runs: Sequence[Run],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    digests: Digests | None = None,
    executor: Executor = THREADS,
) -> Difference | None:
    """Return the first differing byte of two files in the order of ``runs``, None when all runs are
    equal.

    ``digests``, when all are equal, gets the digest of every part of the first file that was
    compared: hashing on the way costs no second read.

    Needs 2 MiB of memory per thread, and starts at most 8 unless told, whatever the files' size.
    ``progress`` gets the bytes read, of both files together, since its last call, from any thread,
    never from two at once.

    Raises FileChangedError when a file ends inside a run.
    """
    total = sum(run.length for run in runs)
    count = threads or reading_threads(
        is_cached=all(
            file_a.is_cached(run.offset_a) and file_b.is_cached(run.offset_b)
            for run in sample_runs(runs, pages=8)
        )
    )
    count = min(count, max(1, total // SEGMENT))
    if (
        total <= len(runs) * _PAGE
    ):  # samples: all reads under way at once, instead of one seek after the other
        file_a.expect((run.offset_a, run.length) for run in runs)
        file_b.expect((run.offset_b, run.length) for run in runs)
    search = _Search(file_a, file_b, digests)
    if (
        not executor.has_units
        or digests is not None
        or total < _WORTH_SHARING
        or file_a.fd < 0
        or file_b.fd < 0
    ):
        run_all(search.segments(runs), search.worker, threads=count, progress=progress)
        return search.found
    segments = list(search.segments(runs))
    files = _identity(file_a.fd), _identity(file_b.fd)

    def share(numbers: Sequence[int], done: Done, progress: Progress) -> None:
        mine = (segments[number] for number in numbers)
        run_all(mine, search.worker, threads=count, progress=progress)
        # The one that differs comes first: of those behind it nothing is known, which only matters
        # without it.
        for number in sorted(numbers, key=lambda number: number != search.stopped_at):
            found = search.found if number == search.stopped_at else None
            done(number, None if found is None else [found.offset_a, found.offset_b])

    units = [Unit(f"{part}", 2 * part.length, files, part.offset_a) for _, _, part in segments]
    results = executor.map("comparison", units, share, lambda number: None, progress)
    for (_, index, _), offsets in zip(segments, results, strict=True):
        if offsets is not None:
            return Difference(run=index, offset_a=offsets[0], offset_b=offsets[1])
    return None


_WORTH_SHARING = 1 << 28
"""Bytes from which on the processes of a team share a comparison; each reads a shorter one itself.
"""


def _identity(fd: int) -> Identity:
    """Return which file is open, for the processes of a team."""
    status = os.fstat(fd)
    name = ""
    with suppress(OSError):  # no /proc
        name = os.readlink(f"/proc/self/fd/{fd}")
    return Identity(name, status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def same_bytes_without_reading(file_a: FileReader, file_b: FileReader, runs: Sequence[Run]) -> bool:
    """Return True when one inode proves all runs equal, else False. A store proves nothing."""
    fd_a, fd_b = file_a.fd, file_b.fd
    if fd_a < 0 or fd_b < 0:
        return False
    status_a, status_b = os.fstat(fd_a), os.fstat(fd_b)
    if (status_a.st_dev, status_a.st_ino) != (status_b.st_dev, status_b.st_ino):
        return False
    if any(
        run.offset_a + run.length > status_a.st_size or run.offset_b + run.length > status_b.st_size
        for run in runs
    ):
        return False
    if status_a.st_nlink <= 1:
        # Some FUSE and SMB mounts give two files the same inode number, and may report no links:
        # their paths decide.
        try:
            links = (os.readlink(f"/proc/self/fd/{fd}") for fd in (fd_a, fd_b))
            is_one = len(set(links)) == 1
        except OSError:  # no /proc
            is_one = False
        if not is_one:
            return False
    return all(run.offset_a == run.offset_b for run in runs)


def sample_runs(runs: Sequence[Run], *, pages: int = 24) -> tuple[Run, ...]:
    """Return samples of at most 4096 bytes, ``pages`` at most, spread evenly from the first byte to
    the last.

    Runs that are together no longer than all samples would be are returned whole, however many they
    are.
    """
    runs = [run for run in runs if run.length]
    ends = list(accumulate(run.length for run in runs))
    if not ends or ends[-1] <= pages * _PAGE:
        return tuple(runs)
    sampled = {}
    last = ends[-1] - _PAGE
    for number in range(pages):
        position = last * number // max(1, pages - 1)
        index = bisect_right(ends, position)
        run = runs[index]
        inside = position - (ends[index] - run.length)
        length = min(_PAGE, run.length - inside)
        sampled[index, inside] = Run(run.offset_a + inside, run.offset_b + inside, length)
    return tuple(sampled.values())


Segment = tuple[int, int, Run]
"""Segment number, index of its run, and a part of that run."""


class _Search:
    """Search for the first difference; segments are taken in order."""

    def __init__(self, file_a: FileReader, file_b: FileReader, digests: Digests | None) -> None:
        self._files, self._digests = (file_a, file_b), digests
        self._lock = threading.Lock()
        self._stop: float = float("inf")  # segments from this number on no longer matter
        self.found: Difference | None = None

    @property
    def stopped_at(self) -> float:
        """The number of the segment with the first difference, infinite when there is none."""
        return self._stop

    def segments(self, runs: Sequence[Run]) -> Iterator[Segment]:
        number = 0
        for index, run in enumerate(runs):
            for start in range(0, run.length, SEGMENT):
                if number >= self._stop:
                    return
                part = Run(
                    run.offset_a + start, run.offset_b + start, min(SEGMENT, run.length - start)
                )
                yield number, index, part
                number += 1

    @contextmanager
    def worker(self, control: Control) -> Iterator[Callable[[Segment], None]]:
        with self._files[0].reopened() as file_a, self._files[1].reopened() as file_b:
            blocks = _Blocks(file_a, file_b)
            yield lambda segment: self._compare(control, blocks, *segment)

    def _compare(
        self, control: Control, blocks: "_Blocks", number: int, index: int, part: Run
    ) -> None:
        done = 0
        digest = hashlib.sha256() if self._digests is not None else None
        while done < part.length and number < self._stop and not control.is_stopping:
            length = min(_BLOCK, part.length - done)
            position = blocks.differ(part.offset_a + done, part.offset_b + done, length)
            if position is not None:
                self._differs(number, index, part, done + position)
            if digest is not None:
                digest.update(blocks.views[0][:length])
            done += length
        if self._digests is not None and digest is not None and done == part.length:
            self._digests[part.offset_a, part.length] = digest.digest()
        control.advance(2 * done)

    def _differs(self, number: int, index: int, part: Run, position: int) -> None:
        with self._lock:
            if number < self._stop:
                self._stop = number
                self.found = Difference(
                    run=index, offset_a=part.offset_a + position, offset_b=part.offset_b + position
                )


# Once for all comparisons: a CDLL is a circle of references, and the command line collects none. A
# scrub of 10,000 checkpoints kept 8 of them for each, 285 MiB in all.
memcmp = ctypes.CDLL(None).memcmp
"""C's function, which ctypes calls without the interpreter's lock."""
memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memcmp.restype = ctypes.c_int


class _Blocks:
    """A pair of page-aligned buffers."""

    def __init__(self, file_a: FileReader, file_b: FileReader) -> None:
        self.files = (file_a, file_b)
        self.views = (page_buffer(_BLOCK), page_buffer(_BLOCK))
        self.memory = [(ctypes.c_char * _BLOCK).from_buffer(view) for view in self.views]

    def differ(self, offset_a: int, offset_b: int, length: int) -> int | None:
        """Return the position of the first difference in two blocks, None when they are equal."""
        self._fill(0, offset_a, length)
        self._fill(1, offset_b, length)
        if memcmp(self.memory[0], self.memory[1], length) == 0:
            return None
        low, high = 0, length  # the first difference lies in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            if self.views[0][low:middle].tobytes() == self.views[1][low:middle].tobytes():
                low = middle
            else:
                high = middle
        return low

    def _fill(self, which: int, offset: int, length: int) -> None:
        try:
            self.files[which].fill(self.views[which][:length], offset)
        except FormatError:
            # The runs are inside of the files as they were scanned.
            raise FileChangedError(self.files[which].path) from None


_ENDS = 1 << 16
_PAGES = 24


_MOST = (1 << 63) - 1
Time = Annotated[int, Meta(ge=-_MOST, le=_MOST)]
"""Nanoseconds since 1970, as a journal has them."""

Sha256 = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
"""A sha256 in hexadecimal, or the "" of what has none."""


class Fingerprint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fingerprint of a file, link or folder (``kind``).

    ``sha256`` is over the first and last 64 KiB of a file, or over where a link points;
    ``mtime_ns`` is in nanoseconds since 1970.
    """

    kind: Literal["file", "link", "folder"]
    size: Annotated[int, Meta(ge=0, le=_MOST)]
    mtime_ns: Time
    sha256: Sha256

    def same_content(self, other: "Fingerprint | None") -> bool:
        """Return True when only the time may differ, and the bytes between the ends."""
        return other is not None and (self.kind, self.size, self.sha256) == (
            other.kind,
            other.size,
            other.sha256,
        )


def fingerprint(path: AnyPath) -> Fingerprint | None:
    """Return the fingerprint of ``path``, None without one. Raises OSError for a special file."""
    try:
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            return Fingerprint(kind="folder", size=0, mtime_ns=status.st_mtime_ns, sha256="")
        if isinstance(path, StorePath):
            digest = ends_digest(path.files.reader(path).read, status.st_size)
            return Fingerprint(
                kind="file", size=status.st_size, mtime_ns=status.st_mtime_ns, sha256=digest
            )
        if stat.S_ISLNK(status.st_mode):
            digest = hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
            return Fingerprint(
                kind="link", size=status.st_size, mtime_ns=status.st_mtime_ns, sha256=digest
            )
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a file, a link or a folder", str(path))
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
    """Return the sha256 of both ends of a file of ``size`` bytes."""
    digest = hashlib.sha256(read(0, min(_ENDS, size)))
    if size > _ENDS:
        start = max(_ENDS, size - _ENDS)
        digest.update(read(start, size - start))
    return digest.hexdigest()


def samples_digest(path: AnyPath) -> str:
    """Return the sha256 of 24 pages between the ends of a file, "" where the ends cover it all, or
    for anything but a file.

    A training step changes nearly every page of a model whose ends are frozen. Raises OSError.
    """
    status = path.lstat()
    between = status.st_size - 2 * _ENDS
    if not stat.S_ISREG(status.st_mode) or between <= 0:
        return ""
    digest = hashlib.sha256()
    pages = [_ENDS + max(0, between - _PAGE) * number // (_PAGES - 1) for number in range(_PAGES)]
    if isinstance(path, StorePath):
        reader = path.files.reader(path)
        reader.expect((page, _PAGE) for page in pages)
        for page in pages:
            digest.update(reader.read(page, _PAGE))
        return digest.hexdigest()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        for page in pages:
            digest.update(os.pread(fd, _PAGE, page))
    finally:
        os.close(fd)
    return digest.hexdigest()


def digest_before(fd: int, end: int) -> str:
    """Return the sha256 of the 64 KiB (or fewer) that end at byte ``end``."""
    length = min(_ENDS, end)
    return hashlib.sha256(os.pread(fd, length, end - length)).hexdigest()
