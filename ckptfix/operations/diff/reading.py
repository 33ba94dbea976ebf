"""Two sides read at once, by several threads that each take a part of a tensor at a time."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence

from ckptfix.checkpoint.pairing import Progress
from ckptfix.errors import ChangedError
from ckptfix.storage.comparing import is_cached
from ckptfix.storage.pieces import OpenFiles, Piece, page_buffer
from ckptfix.storage.reading import open_reader
from ckptfix.weights.layouts import Contiguous, Layout

_MOST_THREADS = 8
BUFFER = 1 << 20
"""Bytes for each side in each thread; from 2 MiB on blocks fall out of the cores' caches."""


class Sides:
    """What one thread reads with: its own files, and a buffer for each side."""

    def __init__(self, files: OpenFiles, progress: Callable[[int], None]) -> None:
        """Use these files; ``progress`` may be called from any thread."""
        self._files = files
        self._buffers = (page_buffer(BUFFER), page_buffer(BUFFER))
        self.progress = progress

    def blocks(
        self, one: Layout, other: Layout, widths: tuple[int, int], elements: int
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield as many elements of both, at most ``elements`` where both are contiguous; for bytes, widths of 1."""
        left = one.blocks(self._files, self._buffers[0][: elements * widths[0]])
        right = other.blocks(self._files, self._buffers[1][: elements * widths[1]])
        a = b = memoryview(b"")
        while True:
            if not len(a):
                a = next(left, a)
            if not len(b):
                b = next(right, b)
            many = min(len(a) // widths[0], len(b) // widths[1])
            if not many:
                if len(a) or len(b):
                    raise ChangedError(
                        "one side of a tensor ended before the other: a file changed while it was read"
                    )
                return
            yield a[: many * widths[0]], b[: many * widths[1]]
            self.progress(many * (widths[0] + widths[1]))
            a, b = a[many * widths[0] :], b[many * widths[1] :]


Task = Callable[[Sides], object]


def run_all(tasks: Iterator[Task], threads: int, progress: Progress | None) -> None:
    """Run every task in one of several threads, this one included; the first error ends all, and is raised."""
    lock = threading.Lock()
    errors: list[BaseException] = []

    def advance(count: int) -> None:
        if progress is not None:
            with lock:
                progress(count)

    def work() -> None:
        try:
            with OpenFiles() as files:
                sides = Sides(files, advance)
                while not errors:
                    with lock:
                        task = next(tasks, None)
                    if task is None:
                        return
                    task(sides)
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=work, daemon=True) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    try:
        work()
    finally:
        for thread in others:
            thread.join()
    if errors:
        raise errors[0]


def threads_for(layouts: Sequence[Layout], nbytes: int) -> int:
    """Return how many threads read best: one a processor when the files are in memory, four at least for a disk."""
    if nbytes < 8 * BUFFER:
        return 1
    firsts = [one.pieces[0] for one in layouts if isinstance(one, Contiguous) and one.pieces]
    sampled = firsts[:: max(1, len(firsts) // 8)]
    processors = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    return max(2 if all(map(_in_memory, sampled)) else 4, processors)


def _in_memory(piece: Piece) -> bool:
    with open_reader(piece.path) as reader:
        return is_cached(reader.fd, piece.offset)


def part_of(layout: Contiguous, begin: int, end: int) -> Contiguous:
    """Return bytes ``begin`` to ``end`` of a contiguous tensor."""
    pieces = []
    for path, offset, length in layout.pieces:
        low, high = max(0, begin), min(length, end)
        if low < high:
            pieces.append(Piece(path, offset + low, high - low))
        begin, end = begin - length, end - length
    return Contiguous(tuple(pieces))
