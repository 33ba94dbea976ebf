"""Which of many pairs of tensors differ, and by how much: bytes first, numbers only where those differ."""

from collections.abc import Iterator, Sequence

from ckptfix.checkpoint.pairing import Progress
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.operations.diff.reading import BUFFER, Sides, Task, part_of, run_all, threads_for
from ckptfix.weights.elements.differing import ELEMENTS, Tally, Tolerance, has_numbers, same_bytes, tally
from ckptfix.weights.layouts import Contiguous, Layout
from ckptfix.weights.stored import StoredTensor

Pair = tuple[StoredTensor, StoredTensor]
_SEGMENT = 1 << 24
"""Elements that a thread takes at a time: long enough for the kernel's readahead to run ahead."""

_ELEMENTS = BUFFER // 16
"""Elements that are read at a time: a buffer holds so many of every dtype."""


class Comparison:
    """Pairs of tensors of equal shape, one comparison each, however many names a pair has."""

    def __init__(self, pairs: Sequence[Pair], tolerance: Tolerance | None, progress: Progress | None) -> None:
        """Take pairs to compare. ``progress`` gets bytes read, of both sides together."""
        self._pairs = pairs
        self._tolerance = tolerance
        self._progress = progress
        layouts = [tensor.layout for pair in pairs for tensor in pair]
        self._threads = threads_for(layouts, sum(one.nbytes for one, _ in pairs))
        self._parts: dict[int, dict[int, Tally]] = {}

    def unequal(self) -> set[int]:
        """Return the numbers of the pairs whose dtypes or bytes differ. Raises ChangedError, OSError."""
        found: set[int] = set()
        run_all(self._byte_tasks(found), self._threads, self._progress)
        return found

    def tallies(self, numbers: set[int]) -> dict[int, Tally]:
        """Return how far apart the pairs of these numbers are; not for dtypes below a byte. Raises as ``unequal``."""
        run_all(self._number_tasks(numbers), self._threads, self._progress)
        result = {}
        for number, parts in self._parts.items():
            result[number] = Tally()
            for _, part in sorted(parts.items()):  # in their order, for the same sums in every run
                result[number].add(part)
        return result

    def _byte_tasks(self, found: set[int]) -> Iterator[Task]:
        for number, (one, other) in enumerate(self._pairs):
            if one.dtype != other.dtype:
                found.add(number)
                continue
            for _, a, b in _segments(one, other):
                yield _ByteTask(number, a, b, found)

    def _number_tasks(self, numbers: set[int]) -> Iterator[Task]:
        for number in sorted(numbers):
            one, other = self._pairs[number]
            if has_numbers(one.dtype) and has_numbers(other.dtype):
                parts = self._parts.setdefault(number, {})
                for begin, a, b in _segments(one, other):
                    yield _NumberTask((one.dtype, other.dtype), (a, b), self._tolerance, parts, begin)


class _ByteTask:
    """Find out whether two parts have the same bytes."""

    def __init__(self, number: int, one: Layout, other: Layout, found: set[int]) -> None:
        self.number, self.one, self.other, self.found = number, one, other, found

    def __call__(self, sides: Sides) -> None:
        if self.number in self.found:
            return
        for a, b in sides.blocks(self.one, self.other, (1, 1), BUFFER):
            if not same_bytes(a, b):
                self.found.add(self.number)
            if self.number in self.found:  # by this thread, or by another in its own part
                return


class _NumberTask:
    """Tally the elements of two parts."""

    def __init__(
        self,
        dtypes: tuple[str, str],
        layouts: tuple[Layout, Layout],
        tolerance: Tolerance | None,
        parts: dict[int, Tally],
        begin: int,
    ) -> None:
        self.dtypes, self.layouts, self.tolerance = dtypes, layouts, tolerance
        self.parts, self.begin = parts, begin

    def __call__(self, sides: Sides) -> None:
        widths = (DTYPE_BITS[self.dtypes[0]] // 8, DTYPE_BITS[self.dtypes[1]] // 8)
        total = Tally()
        for a, b in sides.blocks(*self.layouts, widths, _ELEMENTS):
            for begin in range(0, len(a) // widths[0], ELEMENTS):
                end = begin + ELEMENTS
                parts = (a[begin * widths[0] : end * widths[0]], b[begin * widths[1] : end * widths[1]])
                total.add(tally(*parts, self.dtypes, self.tolerance))
        self.parts[self.begin] = total


def _segments(one: StoredTensor, other: StoredTensor) -> Iterator[tuple[int, Layout, Layout]]:
    """Yield the first element and the layouts of parts that are the same elements; the whole where it cannot be cut."""
    a, b = one.layout, other.layout
    bits = DTYPE_BITS[one.dtype], DTYPE_BITS[other.dtype]
    elements = one.nbytes * 8 // bits[0]
    if elements <= _SEGMENT or not (isinstance(a, Contiguous) and isinstance(b, Contiguous)):
        yield 0, a, b
        return
    for begin in range(0, elements, _SEGMENT):  # a multiple of 8: parts begin with whole bytes
        end = min(begin + _SEGMENT, elements)
        yield (
            begin,
            part_of(a, begin * bits[0] // 8, end * bits[0] // 8),
            part_of(b, begin * bits[1] // 8, end * bits[1] // 8),
        )
