"""Two checkpoints of any formats compared, for ``diff``.

``matching`` pairs models and tensors, ``optimizer_pairs`` the states of optimizers. Several threads
read both sides, each a part of a tensor at a time: bytes first, numbers only where those differ.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ckptfix.errors import ChangedError
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.storage.executor import Assume, Done, Executor
from ckptfix.storage.parallel import Control, Progress, reading_threads, run_all
from ckptfix.storage.reading import OpenFiles, Piece, open_reader, page_buffer
from ckptfix.storage.results import Units
from ckptfix.tensors.numbers import ELEMENTS, Tally, Tolerance, has_numbers, same_bytes, tally
from ckptfix.tensors.stored import Contiguous, Layout, StoredTensor, Weights
from ckptfix.verification.diff_report import (
    ModelDiff,
    OptimizerDiff,
    Outcome,
    TensorDiff,
)
from ckptfix.verification.matching import Matched, match_names, pair_models, tied_keys, without_ties
from ckptfix.verification.optimizer_pairs import OptimizerPair, Side, pair_optimizers

BUFFER = 1 << 20
"""Bytes for each side in each thread; from 2 MiB on blocks fall out of the cores' caches."""


class Sides:
    """Reader of one thread: its own files, and a buffer for each side."""

    def __init__(self, files: OpenFiles, progress: Callable[[int], None]) -> None:
        """Use these files; ``progress`` may be called from any thread."""
        self._files = files
        self._buffers = (page_buffer(BUFFER), page_buffer(BUFFER))
        self.progress = progress

    def blocks(
        self, one: Layout, other: Layout, widths: tuple[int, int], elements: int
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield as many elements of both, at most ``elements`` where both are contiguous; for
        bytes, widths of 1.
        """
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
                        "a file changed while it was read: one side of a tensor is shorter than "
                        "the other"
                    )
                return
            yield a[: many * widths[0]], b[: many * widths[1]]
            self.progress(many * (widths[0] + widths[1]))
            a, b = a[many * widths[0] :], b[many * widths[1] :]


Task = Callable[[Sides], object]


def read_all(tasks: Iterable[Task], threads: int, progress: Progress | None) -> None:
    """Run every task in one of several threads; the first error ends all, and is raised."""

    @contextmanager
    def worker(control: Control) -> Iterator[Callable[[Task], object]]:
        with OpenFiles() as files:
            sides = Sides(files, control.advance)
            yield lambda task: task(sides)

    run_all(tasks, worker, threads=threads, progress=progress)


def threads_for(layouts: Sequence[Layout], nbytes: int) -> int:
    """Return how many threads read best."""
    if nbytes < 8 * BUFFER:
        return 1
    firsts = [one.pieces[0] for one in layouts if isinstance(one, Contiguous) and one.pieces]
    return reading_threads(is_cached=all(map(_in_memory, firsts[:: max(1, len(firsts) // 8)])))


def _in_memory(piece: Piece) -> bool:
    with open_reader(piece.path) as reader:
        return reader.is_cached(piece.offset)


def part_of(layout: Contiguous, begin: int, end: int) -> Contiguous:
    """Return bytes ``begin`` to ``end`` of a contiguous tensor."""
    pieces = []
    for path, offset, length in layout.pieces:
        low, high = max(0, begin), min(length, end)
        if low < high:
            pieces.append(Piece(path, offset + low, high - low))
        begin, end = begin - length, end - length
    return Contiguous(tuple(pieces))


Pair = tuple[StoredTensor, StoredTensor]
Tensors = tuple[StoredTensor | None, StoredTensor | None]
_SEGMENT = 1 << 24
"""Elements that a thread takes at a time: long enough for the kernel's readahead to run ahead."""

_ELEMENTS = BUFFER // 16
"""Elements that are read at a time: a buffer holds so many of every dtype."""


class Part(NamedTuple):
    """The same elements of both tensors of a pair, from ``begin`` on. ``pair``: its number."""

    pair: int
    begin: int
    one: Layout
    other: Layout
    dtypes: tuple[str, str]
    nbytes: int


def compare_tensors(
    pairs: Sequence[Pair],
    tolerance: Tolerance | None,
    progress: Progress | None,
    executor: Executor,
) -> dict[int, Tally | None]:
    """Return the numbers of the pairs whose dtypes or bytes differ, and how far apart they are;
    None for dtypes below a byte.

    The tensors of a pair have one shape. ``progress`` gets the bytes read, of both sides together.
    Raises ChangedError, OSError.
    """
    unequal = {number for number, (one, other) in enumerate(pairs) if one.dtype != other.dtype}

    def differ(sides: Sides, part: Part) -> bool:
        for a, b in sides.blocks(part.one, part.other, (1, 1), BUFFER):
            if part.pair not in unequal and not same_bytes(a, b):
                unequal.add(part.pair)
            if part.pair in unequal:  # by this thread, or by another in its own part
                return True
        return part.pair in unequal

    def tallied(sides: Sides, part: Part) -> list[Any]:
        widths = (DTYPE_BITS[part.dtypes[0]] // 8, DTYPE_BITS[part.dtypes[1]] // 8)
        total = Tally()
        for a, b in sides.blocks(part.one, part.other, widths, _ELEMENTS):
            for begin in range(0, len(a) // widths[0], ELEMENTS):
                end = begin + ELEMENTS
                total.add(
                    tally(
                        a[begin * widths[0] : end * widths[0]],
                        b[begin * widths[1] : end * widths[1]],
                        part.dtypes,
                        tolerance,
                    )
                )
        values = (getattr(total, name) for name in Tally.__struct_fields__)
        # Numpy's numbers, which JSON does not know.
        return [value.item() if hasattr(value, "item") else value for value in values]

    layouts = [tensor.layout for pair in pairs for tensor in pair]
    threads = threads_for(layouts, sum(one.nbytes for one, _ in pairs))

    def each(
        what: str,
        parts: Sequence[Part],
        how: object,
        work: Callable[[Sides, Part], Any],
        assume: Assume | None,
    ) -> list[Any]:
        def share(numbers: Sequence[int], done: Done, progress: Progress) -> None:
            def task(number: int) -> Task:
                return lambda sides: done(number, work(sides, parts[number]))

            read_all(map(task, numbers), threads, progress)

        units = Units()
        every = [
            units.of((part.one, part.other, part.dtypes, how), 2 * part.nbytes, part.begin)
            for part in parts
        ]
        return executor.map(what, every, share, assume, progress)

    parts = [
        part
        for number, pair in enumerate(pairs)
        if number not in unequal
        for part in _parts(number, *pair)
    ]
    found = each("bytes", parts, "", differ, lambda number: False)
    unequal |= {part.pair for part, is_unequal in zip(parts, found, strict=True) if is_unequal}
    result: dict[int, Tally | None] = {}
    parts = []
    for number in sorted(unequal):
        has_all = all(has_numbers(one.dtype) for one in pairs[number])
        result[number] = Tally() if has_all else None
        parts += _parts(number, *pairs[number]) if has_all else ()
    # In their order, for the same sums in every run.
    for part, values in zip(parts, each("numbers", parts, tolerance, tallied, None), strict=True):
        total = result[part.pair]
        if total is not None and values is not None:  # a share of a job array knows no numbers
            total.add(Tally(**dict(zip(Tally.__struct_fields__, values, strict=True))))
    return result


def _parts(number: int, one: StoredTensor, other: StoredTensor) -> Iterator[Part]:
    """Yield the parts of a pair that threads read; the whole where it cannot be cut."""
    a, b = one.layout, other.layout
    dtypes = one.dtype, other.dtype
    bits = DTYPE_BITS[one.dtype], DTYPE_BITS[other.dtype]
    elements = one.nbytes * 8 // bits[0]
    if elements <= _SEGMENT or not (isinstance(a, Contiguous) and isinstance(b, Contiguous)):
        yield Part(number, 0, a, b, dtypes, one.nbytes)
        return
    for begin in range(0, elements, _SEGMENT):  # a multiple of 8: parts begin with whole bytes
        end = min(begin + _SEGMENT, elements)
        yield Part(
            number,
            begin,
            part_of(a, begin * bits[0] // 8, end * bits[0] // 8),
            part_of(b, begin * bits[1] // 8, end * bits[1] // 8),
            dtypes,
            (end - begin) * bits[0] // 8,
        )


class ComparedModel(NamedTuple):
    """A pair of models, None where one side has no more, and what was found of their tensors."""

    a: Weights | None
    b: Weights | None
    diff: ModelDiff


class ComparedOptimizer(NamedTuple):
    """A pair of optimizers, and what was found of their states."""

    pair: OptimizerPair
    diff: OptimizerDiff


class Compared(NamedTuple):
    """The models and optimizers of two checkpoints. ``not_paired``: optimizers without a partner,
    in words.

    ``is_complete``: every optimizer that both sides have was compared, and could be read.
    """

    models: tuple[ComparedModel, ...]
    optimizers: tuple[ComparedOptimizer, ...]
    not_paired: tuple[str, ...]
    is_complete: bool

    @property
    def pairs(self) -> list[tuple[Weights | None, Weights | None]]:
        """The pairs of models."""
        return [(one.a, one.b) for one in self.models]


def compare(
    left: Side,
    right: Side,
    *,
    model: str | Callable[[], object] | None = None,
    tolerance: Tolerance | None = None,
    progress: Progress | None,
    executor: Executor,
) -> Compared:
    """Compare the models and optimizers of two checkpoints.

    Raises as ``pair_optimizers`` does, ChangedError, OSError.
    """
    optimizers, not_paired, is_complete = pair_optimizers(
        left, right, model=model, tolerance=tolerance
    )
    pairs: dict[tuple[int, int, str, str], Pair] = {}  # each once: a tie has several names
    found: dict[tuple[int, int, str, str], Tally | None] = {}

    def key(a: StoredTensor, b: StoredTensor) -> tuple[int, int, str, str]:
        return id(a.layout), id(b.layout), a.dtype, b.dtype

    def collect(matched: Iterable[Matched], of: Callable[[Matched], Tensors]) -> None:
        for a, b in map(of, matched):
            if a is not None and b is not None and a.shape == b.shape:
                pairs.setdefault(key(a, b), (a, b))

    def finished(one: Matched, a: StoredTensor | None, b: StoredTensor | None) -> TensorDiff:
        if b is None:
            assert a is not None, "a name comes from one side at least"
            return TensorDiff(one.name, Outcome.ONLY_A, a=one.a, dtype_a=a.dtype, shape_a=a.shape)
        if a is None:
            return TensorDiff(one.name, Outcome.ONLY_B, b=one.b, dtype_b=b.dtype, shape_b=b.shape)
        tally = found.get(key(a, b))
        if a.shape != b.shape:
            outcome = Outcome.SHAPE
        elif key(a, b) not in found:
            outcome = Outcome.EQUAL
        elif tolerance is not None and tally is not None and not tally.beyond:
            outcome = Outcome.WITHIN
        else:
            outcome = Outcome.VALUES if a.dtype == b.dtype else Outcome.DTYPE
        return TensorDiff(
            one.name, outcome, one.a, one.b, a.dtype, b.dtype, a.shape, b.shape, tally
        )

    drafts = [
        _Draft(*both) for both in pair_models(left.checkpoint.weights, right.checkpoint.weights)
    ]
    for draft in drafts:
        collect(draft.matched, draft.of)
    for pair in optimizers:
        collect(pair.matched, pair.of)
    differing = compare_tensors(list(pairs.values()), tolerance, progress, executor)
    found |= {one: differing[number] for number, one in enumerate(pairs) if number in differing}
    return Compared(
        models=tuple(
            ComparedModel(
                draft.a,
                draft.b,
                ModelDiff(
                    index=next(one.index for one in (draft.a, draft.b) if one is not None),
                    a=draft.a.label if draft.a else None,
                    b=draft.b.label if draft.b else None,
                    names=draft.names,
                    tensors=tuple(finished(one, *draft.of(one)) for one in draft.matched),
                    ties=draft.ties,
                ),
            )
            for draft in drafts
        ),
        optimizers=tuple(
            ComparedOptimizer(
                pair,
                OptimizerDiff(
                    index=pair.a.index,
                    a=pair.a.label,
                    b=pair.b.label,
                    strategy_a=pair.a.strategy.value,
                    strategy_b=pair.b.strategy.value,
                    names=pair.words,
                    tensors=tuple(finished(one, *pair.of(one)) for one in pair.matched),
                    values=pair.values,
                    differences=pair.differences,
                ),
            )
            for pair in optimizers
        ),
        not_paired=not_paired,
        is_complete=is_complete,
    )


class _Draft:
    """A pair of models, or one alone, before their tensors are read."""

    def __init__(self, a: Weights | None, b: Weights | None) -> None:
        self.a, self.b = a, b
        self._left: Mapping[str, StoredTensor] = a.named() if a else {}
        self._right: Mapping[str, StoredTensor] = b.named() if b else {}
        matched, self.names = match_names(self._left, self._right)
        self.ties = tied_keys(matched, a, b)
        self.matched = without_ties(matched, self.ties)

    def of(self, one: Matched) -> Tensors:
        """Return the tensors of both sides that a matched key means."""
        return (
            self._left[one.a] if one.a is not None else None,
            self._right[one.b] if one.b is not None else None,
        )
