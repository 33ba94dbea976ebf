"""Hash files and tensors on all cores, in constant memory, each byte read from the disk about once.

Every thread takes the next job. Jobs of one file are adjacent, the file itself first and its tensors by
offset: the thread that hashes the file and those that hash its tensors go through it side by side, so the
second read of a block finds it in the page cache.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptfix.errors import CkptfixError, UsageError
from ckptfix.storage.parallel import Control, Progress, run_all
from ckptfix.storage.reading import OpenFiles, Piece, page_buffer
from ckptfix.tensors.stored import BLOCK, Contiguous, Layout, StoredTensor, Strided, Tiled, digest_head

if TYPE_CHECKING:
    from ckptfix.tensors.scanning import Scan

_ENDS = 16


class FileJob(NamedTuple):
    """A file to be hashed, or ``size`` bytes of it from ``offset`` on. ``algorithm``: one of ``ALGORITHMS``."""

    path: Path
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


class Hashed(NamedTuple):
    """The result of a job. ``digest``: "" when it could not be read; ``problem``: the reason. ``zeros``:
    number of zero bytes at its end. ``scan``: its values, None when they were not looked at.
    """

    digest: str
    zeros: int = 0
    scan: "Scan | None" = None
    problem: str = ""


def hash_all(
    jobs: Sequence[Job],
    *,
    threads: int | None = None,
    keep_cached: bool = True,
    progress: Progress | None = None,
) -> list[Hashed]:
    """Do all jobs and return their results, in their order. ``threads``: as many as this process has cores.
    ``keep_cached`` off, for files that nobody else needs: their pages leave the page cache.

    ``progress`` is called with numbers of bytes, from any thread, never from two at once. A file that cannot be read is
    a value, not an exception.
    """
    threads = threads or len(os.sched_getaffinity(0))
    if any(isinstance(job, TensorJob) and job.scan for job in jobs):
        import ckptfix.tensors.scanning  # noqa: F401 - not by several threads at once
    results = [Hashed("")] * len(jobs)

    @contextmanager
    def worker(control: Control) -> Iterator[Callable[[int], None]]:
        buffer = page_buffer(BLOCK)
        with OpenFiles(keep_cached=keep_cached) as files:

            def hash_one(number: int) -> None:
                results[number] = _done(jobs[number], files, buffer, control)

            yield hash_one

    run_all(_reading_order(jobs), worker, threads=threads, progress=progress)
    return results


def _done(job: Job, files: OpenFiles, buffer: memoryview, control: Control) -> Hashed:
    look = None
    if isinstance(job, FileJob):
        digest = new_digest(job.algorithm)
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
        return Hashed("", problem=error.strerror or str(error))
    except (CkptfixError, ValueError, MemoryError) as error:
        return Hashed("", problem=str(error) or type(error).__name__)
    return Hashed(digest.hexdigest(), zeros, look.result() if look is not None else None)


def new_digest(algorithm: str) -> Any:
    """Return a new hash object. Raises UsageError for blake3 where it is not installed."""
    if algorithm != "blake3":
        return hashlib.new(algorithm)
    try:
        from blake3 import blake3
    except ImportError:
        raise UsageError("blake3 digests need the extra: pip install 'ckptfix[signing]'") from None
    return blake3()


def _zeros_at_end(block: memoryview, before: int) -> int:
    """Return how many zero bytes all ends with, when ``before`` were at the end before this block."""
    if any(block[-_ENDS:]):
        return len(block[-_ENDS:]) - len(bytes(block[-_ENDS:]).rstrip(b"\0"))
    left = len(bytes(block).rstrip(b"\0"))
    return before + len(block) if left == 0 else len(block) - left


def _reading_order(jobs: Sequence[Job]) -> Iterator[int]:
    """Return the numbers of the jobs: large files first, so that no thread ends alone with one; in each by offset."""
    sizes: dict[Path, int] = {}
    places: list[tuple[Path, int]] = []
    for job in jobs:
        if isinstance(job, FileJob):
            path, offset, size = job.path, job.offset - 1, job.size
        else:
            (path, offset), size = first_place(job.tensor.layout), job.tensor.nbytes
        sizes[path] = sizes.get(path, 0) + size
        places.append((path, offset))
    order = {path: number for number, path in enumerate(sorted(sizes, key=lambda path: (-sizes[path], path)))}
    return iter(sorted(range(len(jobs)), key=lambda number: (order[places[number][0]], places[number][1])))


def first_place(layout: Layout) -> tuple[Path, int]:
    """Return the file and the offset of a tensor's first byte; an empty path for one without bytes."""
    if isinstance(layout, Contiguous) and layout.pieces:
        return layout.pieces[0].path, layout.pieces[0].offset
    if isinstance(layout, Strided):
        return layout.storage.path, layout.storage.offset + layout.first * layout.width
    if isinstance(layout, Tiled) and layout.tiles:
        return first_place(layout.tiles[0].layout)
    return Path(), 0
