"""Hash files and tensors on all cores and processes, in constant memory, each byte read from the
disk about once.

Every thread takes the next job. Jobs of one file are adjacent, the file itself first and its
tensors by offset: the thread that hashes the file and those that hash its tensors go through it
side by side, so the second read of a block finds it in the page cache. Processes of a team share
the jobs (``storage.executor``).
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from ckptfix.checkpoint.manifest import joined
from ckptfix.errors import CkptfixError, UsageError
from ckptfix.storage.executor import THREADS, Done, Executor
from ckptfix.storage.files import AnyPath
from ckptfix.storage.parallel import Control, Progress, cores, run_all
from ckptfix.storage.paths import unreadable
from ckptfix.storage.reading import OpenFiles, Piece, page_buffer
from ckptfix.storage.results import Units
from ckptfix.tensors.stored import (
    BLOCK,
    Contiguous,
    Layout,
    StoredTensor,
    Strided,
    Tiled,
    digest_head,
)

if TYPE_CHECKING:
    from ckptfix.tensors.scanning import Scan

_ENDS = 16
_STRETCH = 1 << 16


class FileJob(NamedTuple):
    """A file to be hashed, or ``size`` bytes of it from ``offset`` on. ``algorithm``: of
    ``ALGORITHMS``, CRC or GIT.
    """

    path: AnyPath
    size: int
    offset: int = 0
    algorithm: str = "sha256"


class TensorJob(NamedTuple):
    """A tensor to be hashed. ``scan``: look at its values, too."""

    tensor: StoredTensor
    scan: bool = False


Job = FileJob | TensorJob

ALGORITHMS = ("sha256", "blake2b", "blake3")
"""The algorithms of OpenSSF Model Signing; ckptfix itself writes sha256 alone."""

CRC = "crc32"
"""The checksum in zip files, as an algorithm."""


GIT = "git"
"""The id that git gives a file, as an algorithm: a sha1 over its size and its bytes."""


class Hashed(NamedTuple):
    """The result of a job. ``digest``: "" when it could not be read; ``problem``: the reason.
    ``zeros``: number of zero bytes at its end. ``scan``: its values, None when they were not looked
    at.
    """

    digest: str
    zeros: int = 0
    scan: "Scan | None" = None
    problem: str = ""


class Scheme(Struct, frozen=True, kw_only=True):
    """The digests that are taken of a file: one, or one of each ``shard_size`` bytes, by many
    threads at once.
    """

    algorithm: str = "sha256"
    shard_size: int | None = None

    def jobs(self, job: FileJob) -> list[FileJob]:
        """Return what has to be hashed of a file; an empty one is hashed as a whole, since "" is
        one not read.
        """
        if self.shard_size is None or not job.size:
            return [job._replace(algorithm=self.algorithm)]
        starts = range(0, job.size, self.shard_size)
        return [
            FileJob(job.path, min(self.shard_size, job.size - start), start, self.algorithm)
            for start in starts
        ]

    def joined(self, results: Sequence[Hashed]) -> Hashed:
        """Return the result for a file from those of its jobs, in their order."""
        if problem := next((one.problem for one in results if one.problem), ""):
            return Hashed("", problem=problem)
        return Hashed(joined(one.digest for one in results), results[-1].zeros)


WHOLE = Scheme()


def hash_all(
    jobs: Sequence[Job],
    *,
    threads: int | None = None,
    keep_cached: bool = True,
    progress: Progress | None = None,
    executor: Executor = THREADS,
) -> list[Hashed]:
    """Do all jobs and return their results, in their order. ``threads``: as many as this process
    has cores. ``keep_cached`` off, for files that nobody else needs: their pages leave the page
    cache.

    ``progress`` is called with numbers of bytes, from any thread, never from two at once. A file
    that cannot be read is a value, not an exception.
    """
    threads = threads or cores()
    if any(isinstance(job, TensorJob) and job.scan for job in jobs):
        import ckptfix.tensors.scanning  # noqa: F401 - not by several threads at once

    def work(
        numbers: Sequence[int], done: Callable[[int, Hashed], object], progress: Progress | None
    ) -> None:
        @contextmanager
        def worker(control: Control) -> Iterator[Callable[[int], None]]:
            buffer = page_buffer(BLOCK)
            with OpenFiles(keep_cached=keep_cached) as files:

                def hash_one(number: int) -> None:
                    found = _done(jobs[number], files, buffer, control)
                    if not control.is_stopping:
                        done(number, found)

                yield hash_one

        run_all(_reading_order(jobs, numbers), worker, threads=threads, progress=progress)

    if not executor.has_units:
        results = [Hashed("")] * len(jobs)
        work(range(len(jobs)), results.__setitem__, progress)
        return results
    units = Units()
    every = [
        (
            units.of(job, job.size, job.offset or -1)
            if isinstance(job, FileJob)
            else units.of(
                (*job.tensor[1:], job.scan), job.tensor.nbytes, first_place(job.tensor.layout)[1]
            )
        )
        for job in jobs
    ]

    def share(numbers: Sequence[int], done: Done, progress: Progress) -> None:
        work(
            numbers,
            lambda number, one: done(number, _packed(one, jobs[number]), is_final=not one.problem),
            progress,
        )

    packed = executor.map(
        "hash",
        every,
        share,
        lambda number: _packed(_assumed(jobs[number]), jobs[number]),
        progress,
    )
    return [_unpacked(one, job) for one, job in zip(packed, jobs, strict=True)]


_FACTS = (
    "nan", "inf", "first_nan", "first_inf", "large", "largest", "least_large", "is_zero",
    "zero_pages", "is_negative",
)  # fmt: skip
"""The fields of a scan that are numbers."""


def _assumed(job: Job) -> Hashed:
    """Return a result that leads on, for a job that another process hashes."""
    if isinstance(job, TensorJob) and job.scan:
        from ckptfix.tensors.scanning import Scan

        return Hashed("", scan=Scan(is_zero=False))
    return Hashed("")


def _packed(one: Hashed, job: Job) -> list[Any]:
    """Return a result as JSON values; pieces of files by their numbers."""
    if one.scan is None or isinstance(job, FileJob):
        return [one.digest, one.zeros, one.problem]
    from ckptfix.tensors.scanning import pieces_of

    pieces = pieces_of(job.tensor.layout, job.tensor.nbytes) or ()
    scan = [getattr(one.scan, name) for name in _FACTS]
    runs = one.scan.zero_runs
    zeros = (
        None if runs is None else [[pieces.index(run.piece), run.begin, run.end] for run in runs]
    )
    numbers = [value if value is None or isinstance(value, bool) else int(value) for value in scan]
    return [one.digest, one.zeros, one.problem, numbers, zeros]


def _unpacked(packed: Sequence[Any], job: Job) -> Hashed:
    digest, zeros, problem, *values = packed
    if not values or isinstance(job, FileJob):
        return Hashed(digest, zeros, None, problem)
    from ckptfix.tensors.scanning import Scan, ZeroRun, pieces_of

    numbers, runs = values
    pieces = pieces_of(job.tensor.layout, job.tensor.nbytes) or ()
    found = (
        None
        if runs is None
        else tuple(ZeroRun(pieces[piece], begin, end) for piece, begin, end in runs)
    )
    return Hashed(
        digest, zeros, Scan(**dict(zip(_FACTS, numbers, strict=True)), zero_runs=found), problem
    )


def _done(job: Job, files: OpenFiles, buffer: memoryview, control: Control) -> Hashed:
    look = None
    if isinstance(job, FileJob):
        digest = new_digest(job.algorithm)
        if job.algorithm == GIT:
            digest.update(b"blob %d\0" % job.size)
        blocks = files.blocks((Piece(job.path, job.offset, job.size),), buffer)
    else:
        tensor = job.tensor
        digest = hashlib.sha256(digest_head(tensor.dtype, tensor.shape))
        blocks = tensor.blocks(files, buffer)
        if job.scan:
            from ckptfix.tensors.scanning import Look

            look = Look(tensor)
    zeros = 0
    try:
        for block in blocks:
            digest.update(block)
            if look is not None:
                look.feed(block)
            zeros = _zeros_at_end(block, zeros)
            control.advance(len(block))
            if control.is_stopping:
                return Hashed("", problem="interrupted")
        for _ in look.reread(files, buffer) if look is not None else ():
            if control.is_stopping:
                return Hashed("", problem="interrupted")
    except OSError as error:
        is_refused = isinstance(error, PermissionError) and isinstance(error.filename, str)
        words = (
            unreadable(Path(error.filename), error) if is_refused else error.strerror or str(error)
        )
        return Hashed("", problem=words)
    except (CkptfixError, ValueError, MemoryError) as error:
        return Hashed("", problem=str(error) or type(error).__name__)
    return Hashed(digest.hexdigest(), zeros, look.result() if look is not None else None)


def new_digest(algorithm: str) -> Any:
    """Return a new hash object. Raises UsageError for blake3 where it is not installed."""
    if algorithm == CRC:
        return _Crc()
    if algorithm == GIT:
        return hashlib.sha1(usedforsecurity=False)
    if algorithm != "blake3":
        return hashlib.new(algorithm)
    try:
        from blake3 import blake3
    except ImportError:
        raise UsageError("blake3 digests need the extra: pip install 'ckptfix[signing]'") from None
    return blake3()


class _Crc:
    """A CRC-32 in the place of a hash object."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview) -> None:
        """Take more bytes."""
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        """Return the checksum as eight digits."""
        return f"{self._value:08x}"


def _zeros_at_end(block: memoryview, before: int) -> int:
    """Return how many zero bytes all ends with, when ``before`` were at the end before this
    block.
    """
    if any(block[-_ENDS:]):
        return len(block[-_ENDS:]) - len(bytes(block[-_ENDS:]).rstrip(b"\0"))
    # bytes.rstrip takes three times as long as sha256 for a block of zeros, and lets no other
    # thread run meanwhile.
    zeros = 0
    for end in range(len(block), 0, -_STRETCH):
        part = bytes(block[max(0, end - _STRETCH) : end])
        if part != bytes(len(part)):
            return zeros + len(part) - len(part.rstrip(b"\0"))
        zeros += len(part)
    return before + zeros


def _reading_order(jobs: Sequence[Job], numbers: Sequence[int]) -> Iterator[int]:
    """Return these numbers of jobs: large files first, so that no thread ends alone with one; in
    each by offset.
    """
    sizes: dict[AnyPath, int] = {}
    places: dict[int, tuple[AnyPath, int]] = {}
    for number in numbers:
        job = jobs[number]
        if isinstance(job, FileJob):
            path, offset, size = job.path, job.offset - 1, job.size
        else:
            (path, offset), size = first_place(job.tensor.layout), job.tensor.nbytes
        sizes[path] = sizes.get(path, 0) + size
        places[number] = path, offset
    order = {
        path: number
        for number, path in enumerate(sorted(sizes, key=lambda path: (-sizes[path], str(path))))
    }
    return iter(sorted(places, key=lambda number: (order[places[number][0]], places[number][1])))


def first_place(layout: Layout) -> tuple[AnyPath, int]:
    """Return the file and the offset of a tensor's first byte; an empty path for one without
    bytes.
    """
    if isinstance(layout, Contiguous) and layout.pieces:
        return layout.pieces[0].path, layout.pieces[0].offset
    if isinstance(layout, Strided):
        return layout.storage.path, layout.storage.offset + layout.first * layout.width
    if isinstance(layout, Tiled) and layout.tiles:
        return first_place(layout.tiles[0].layout)
    return Path(), 0
