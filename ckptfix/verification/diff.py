"""``diff``: two checkpoints of any formats compared tensor by tensor.

``matching`` pairs models and tensors, ``optimizer_pairs`` the states of optimizers. Several threads
read both sides, each a part of a tensor at a time: bytes first, numbers only where those differ.
``diff_report`` is the answer, ``diff_page`` lays it out as HTML.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.folder_names import parse_deepspeed_folder_name
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, is_pretrained, read_config
from ckptfix.checkpoint.roles import Role
from ckptfix.errors import ChangedError, UsageError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.storage.executor import THREADS, Assume, Done, Executor
from ckptfix.storage.files import Openable, names_in
from ckptfix.storage.opened import takes_urls
from ckptfix.storage.parallel import Control, Progress, reading_threads, run_all
from ckptfix.storage.paths import command, shell_path
from ckptfix.storage.reading import OpenFiles, Piece, open_reader, page_buffer
from ckptfix.storage.results import Units
from ckptfix.tensors.numbers import ELEMENTS, Tally, Tolerance, has_numbers, same_bytes, tally
from ckptfix.tensors.opening import other_files
from ckptfix.tensors.stored import Contiguous, Layout, StoredCheckpoint, StoredTensor, Weights
from ckptfix.verification.diff_report import (
    DiffReport,
    ModelDiff,
    OptimizerDiff,
    Outcome,
    TensorDiff,
    ValueDiff,
)
from ckptfix.verification.matching import (
    Matched,
    crossed,
    crossing,
    match_names,
    moved,
    pair_models,
    tied_keys,
    without_ties,
)
from ckptfix.verification.optimizer_pairs import (
    OptimizerPair,
    Side,
    left_of,
    open_side,
    pair_optimizers,
)
from ckptfix.wording import count_of, list_names

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
_SEGMENT = 1 << 24
"""Elements that a thread takes at a time: long enough for the kernel's readahead to run ahead."""

_ELEMENTS = BUFFER // 16
"""Elements that are read at a time: a buffer holds so many of every dtype."""


class Comparison:
    """Pairs of tensors of equal shape, one comparison each, however many names a pair has."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        tolerance: Tolerance | None,
        progress: Progress | None,
        executor: Executor = THREADS,
    ) -> None:
        """Take pairs to compare. ``progress`` gets bytes read, of both sides together."""
        self._pairs = pairs
        self._tolerance = tolerance
        self._progress = progress
        self._executor = executor
        layouts = [tensor.layout for pair in pairs for tensor in pair]
        self._threads = threads_for(layouts, sum(one.nbytes for one, _ in pairs))
        self._parts: dict[int, dict[int, Tally]] = {}

    def unequal(self) -> set[int]:
        """Return the numbers of the pairs whose dtypes or bytes differ. Raises ChangedError,
        OSError.
        """
        found: set[int] = set()
        self._read("bytes", self._byte_tasks(found), lambda number: False)
        return found

    def tallies(self, numbers: set[int]) -> dict[int, Tally]:
        """Return how far apart the pairs of these numbers are; not for dtypes below a byte. Raises
        as ``unequal``.
        """
        self._read("numbers", self._number_tasks(numbers), None)
        result = {}
        for number, parts in self._parts.items():
            result[number] = Tally()
            for _, part in sorted(parts.items()):  # in their order, for the same sums in every run
                result[number].add(part)
        return result

    def _read(
        self, what: str, found: Iterable["_ByteTask | _NumberTask"], assume: Assume | None
    ) -> None:
        """Do all tasks; in a team, this process does its share of them."""
        if not self._executor.has_units:
            read_all(found, self._threads, self._progress)
            return
        tasks, units = list(found), Units()

        def share(numbers: Sequence[int], done: Done, progress: Progress) -> None:
            def each(number: int) -> Task:
                def do(sides: Sides) -> None:
                    tasks[number](sides)
                    done(number, tasks[number].packed())

                return do

            read_all(map(each, numbers), self._threads, progress)

        every = [
            units.of((task.one, task.other, task.how), task.nbytes, task.begin) for task in tasks
        ]
        for task, packed in zip(
            tasks, self._executor.map(what, every, share, assume, self._progress), strict=True
        ):
            if packed is not None:
                task.take(packed)

    def _byte_tasks(self, found: set[int]) -> Iterator["_ByteTask"]:
        for number, (one, other) in enumerate(self._pairs):
            if one.dtype != other.dtype:
                found.add(number)
                continue
            for begin, a, b in _segments(one, other):
                yield _ByteTask(number, begin, a, b, one.nbytes, found)

    def _number_tasks(self, numbers: set[int]) -> Iterator["_NumberTask"]:
        for number in sorted(numbers):
            one, other = self._pairs[number]
            if has_numbers(one.dtype) and has_numbers(other.dtype):
                parts = self._parts.setdefault(number, {})
                for begin, a, b in _segments(one, other):
                    yield _NumberTask(
                        (one.dtype, other.dtype), (a, b), one.nbytes, self._tolerance, parts, begin
                    )


class _ByteTask:
    """Find out whether two parts have the same bytes."""

    how = ""

    def __init__(
        self, number: int, begin: int, one: Layout, other: Layout, nbytes: int, found: set[int]
    ) -> None:
        self.number, self.begin, self.one, self.other, self.found = (
            number,
            begin,
            one,
            other,
            found,
        )
        self.nbytes = 2 * min(nbytes, _SEGMENT)

    def __call__(self, sides: Sides) -> None:
        if self.number in self.found:
            return
        for a, b in sides.blocks(self.one, self.other, (1, 1), BUFFER):
            if not same_bytes(a, b):
                self.found.add(self.number)
            if self.number in self.found:  # by this thread, or by another in its own part
                return

    def packed(self) -> bool:
        """Return whether the tensors differ, as far as this process has found out."""
        return self.number in self.found

    def take(self, differ: Any) -> None:
        """Take the result of another process."""
        if differ:
            self.found.add(self.number)


class _NumberTask:
    """Tally the elements of two parts."""

    def __init__(
        self,
        dtypes: tuple[str, str],
        layouts: tuple[Layout, Layout],
        nbytes: int,
        tolerance: Tolerance | None,
        parts: dict[int, Tally],
        begin: int,
    ) -> None:
        self.dtypes, self.tolerance = dtypes, tolerance
        self.one, self.other = layouts
        self.parts, self.begin = parts, begin
        self.nbytes = 2 * min(nbytes, _SEGMENT)
        self.how = (*dtypes, tolerance)

    def __call__(self, sides: Sides) -> None:
        widths = (DTYPE_BITS[self.dtypes[0]] // 8, DTYPE_BITS[self.dtypes[1]] // 8)
        total = Tally()
        for a, b in sides.blocks(self.one, self.other, widths, _ELEMENTS):
            for begin in range(0, len(a) // widths[0], ELEMENTS):
                end = begin + ELEMENTS
                parts = (
                    a[begin * widths[0] : end * widths[0]],
                    b[begin * widths[1] : end * widths[1]],
                )
                total.add(tally(*parts, self.dtypes, self.tolerance))
        self.parts[self.begin] = total

    def packed(self) -> list[Any]:
        """Return the tally as JSON values."""
        found = self.parts[self.begin]
        values = (getattr(found, name) for name in Tally.__struct_fields__)
        # Numpy's numbers.
        return [value.item() if hasattr(value, "item") else value for value in values]

    def take(self, tally: Sequence[Any]) -> None:
        """Take the result of another process."""
        self.parts[self.begin] = Tally(**dict(zip(Tally.__struct_fields__, tally, strict=True)))


def _segments(one: StoredTensor, other: StoredTensor) -> Iterator[tuple[int, Layout, Layout]]:
    """Yield the first element and the layouts of parts that are the same elements; the whole where
    it cannot be cut.
    """
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


@takes_urls("a", "b")
def diff(
    a: Openable,
    b: Openable,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    model: str | Callable[[], object] | None = None,
    progress: Progress | None = None,
    executor: Executor = THREADS,
) -> DiffReport:
    """Compare the weights of two checkpoints, tensor by tensor, and their optimizers, parameter by
    parameter.

    ``rtol``, ``atol``: an element of A and one of B count as equal where ``|a - b| <= atol + rtol *
    |a|``; when either is given, two dtypes count as equal, too. ``model``: "module:factory", or the
    function, that makes the models of the run, for optimizers that number their parameters where
    the other side names them. ``progress`` gets the bytes read, of both sides together, from any
    thread. ``executor``: shares the work.

    Raises UsageError when nothing can be compared, OperationError when a checkpoint cannot be read,
    OSError.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{name} is {value}: expected a finite tolerance of 0 or greater")
    tolerance = None if rtol is None and atol is None else (rtol or 0.0, atol or 0.0)
    with paused_gc():
        sides = open_side(a, lone_shard=True), open_side(b, lone_shard=True)
        left, right = sides[0].checkpoint, sides[1].checkpoint
        optimizers, not_paired, is_complete = pair_optimizers(
            *sides, model=model, tolerance=tolerance
        )
        if not optimizers:
            _ensure_tensors(left, right)
        drafts = [_Draft(*models) for models in pair_models(left.weights, right.weights)]
        pairs = _Pairs()
        for draft in drafts:
            pairs.collect(draft.pairs())
        for pair in optimizers:
            pairs.collect(map(pair.of, pair.matched))
        pairs.compare(tolerance, progress, executor)
        models = tuple(draft.finished(pairs, tolerance) for draft in drafts)
        states = tuple(_optimizer(pair, pairs, tolerance) for pair in optimizers)
    compared = (
        {file for pair in optimizers for file in pair.a.files},
        {file for pair in optimizers for file in pair.b.files},
    )
    others = [
        [path for path in other_files(one) if path not in of_optimizers]
        for one, of_optimizers in zip((left, right), compared, strict=True)
    ]
    return DiffReport(
        a=str(a),
        b=str(b),
        models=models,
        optimizers=states,
        tolerance=tolerance,
        one_sided=tuple(_one_sided(*sides)),
        crossed=crossing(list(crossed((draft.a, draft.b) for draft in drafts))),
        are_pretrained=left.root != right.root
        and is_pretrained(left.root)
        and is_pretrained(right.root),
        is_partial=not is_complete
        or any(weights.opaque for one in (left, right) for weights in one.weights),
        not_compared=(
            *not_paired,
            *_settings(left, right, others),
            *_other_weights(left, right, others),
            *_not_compared("A", left, others[0], compared[0]),
            *_not_compared("B", right, others[1], compared[1]),
            *_moved(drafts),
            *_opaque(drafts),
            *(words for pair in optimizers for words in pair.notes),
            *_too_small(models),
        ),
    )


class _Draft:
    """A pair of models, or one alone, before their tensors are read."""

    def __init__(self, a: Weights | None, b: Weights | None) -> None:
        self.a, self.b = a, b
        self.left: Mapping[str, StoredTensor] = a.named() if a else {}
        self.right: Mapping[str, StoredTensor] = b.named() if b else {}
        matched, self.names = match_names(self.left, self.right)
        self.ties = tied_keys(matched, a, b)
        self.matched = without_ties(matched, self.ties)

    def of(self, one: Matched) -> tuple[StoredTensor | None, StoredTensor | None]:
        """Return the tensors of both sides that a matched key means."""
        return (
            self.left[one.a] if one.a is not None else None,
            self.right[one.b] if one.b is not None else None,
        )

    def pairs(self) -> Iterator[tuple[StoredTensor | None, StoredTensor | None]]:
        """Yield the tensors of both sides."""
        return map(self.of, self.matched)

    def finished(self, pairs: "_Pairs", tolerance: Tolerance | None) -> ModelDiff:
        """Return what was found."""
        either = self.a or self.b
        return ModelDiff(
            index=either.index if either else 0,
            a=self.a.label if self.a else None,
            b=self.b.label if self.b else None,
            names=self.names,
            tensors=tuple(_finished(one, *self.of(one), pairs, tolerance) for one in self.matched),
            ties=self.ties,
        )


class _Pairs:
    """The pairs of tensors that are to be read, each once: a tie has several names and one
    place.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, str, str], int] = {}
        self._pairs: list[Pair] = []
        self._unequal: set[int] = set()
        self._tallies: dict[int, Tally] = {}

    def collect(self, found: Iterable[tuple[StoredTensor | None, StoredTensor | None]]) -> None:
        """Take note of the pairs of a model or an optimizer."""
        for a, b in found:
            if (
                a is not None
                and b is not None
                and a.shape == b.shape
                and _key(a, b) not in self._numbers
            ):
                self._numbers[_key(a, b)] = len(self._pairs)
                self._pairs.append((a, b))

    def compare(
        self, tolerance: Tolerance | None, progress: Progress | None, executor: Executor
    ) -> None:
        """Read them all."""
        comparison = Comparison(self._pairs, tolerance, progress, executor)
        self._unequal = comparison.unequal()
        self._tallies = comparison.tallies(self._unequal)

    def found(self, a: StoredTensor, b: StoredTensor) -> tuple[bool, Tally | None]:
        """Return whether two tensors have equal dtypes and bytes, and how far apart their numbers
        are.
        """
        number = self._numbers[_key(a, b)]
        return number not in self._unequal, self._tallies.get(number)


def _optimizer(pair: OptimizerPair, pairs: _Pairs, tolerance: Tolerance | None) -> OptimizerDiff:
    """Return what was found of a pair of optimizers."""
    return OptimizerDiff(
        index=pair.a.index,
        a=pair.a.label,
        b=pair.b.label,
        strategy_a=pair.a.strategy.value,
        strategy_b=pair.b.strategy.value,
        names=pair.words,
        tensors=tuple(_finished(one, *pair.of(one), pairs, tolerance) for one in pair.matched),
        values=sum(pair.values.values()),
        differences=tuple(
            ValueDiff(name=one.name, a=one.a, b=one.b, parameters=one.names)
            for one in pair.differences
        ),
    )


def _key(a: StoredTensor, b: StoredTensor) -> tuple[int, int, str, str]:
    return id(a.layout), id(b.layout), a.dtype, b.dtype


def _finished(
    one: Matched,
    a: StoredTensor | None,
    b: StoredTensor | None,
    pairs: _Pairs,
    tolerance: Tolerance | None,
) -> TensorDiff:
    if b is None:
        assert a is not None, "a name comes from one side at least"
        return TensorDiff(one.name, Outcome.ONLY_A, a=one.a, dtype_a=a.dtype, shape_a=a.shape)
    if a is None:
        return TensorDiff(one.name, Outcome.ONLY_B, b=one.b, dtype_b=b.dtype, shape_b=b.shape)
    tally = None
    if a.shape != b.shape:
        outcome = Outcome.SHAPE
    else:
        equal, tally = pairs.found(a, b)
        if equal:
            outcome = Outcome.EQUAL
        elif tolerance is not None and tally is not None and not tally.beyond:
            outcome = Outcome.WITHIN
        else:
            outcome = Outcome.VALUES if a.dtype == b.dtype else Outcome.DTYPE
    return TensorDiff(one.name, outcome, one.a, one.b, a.dtype, b.dtype, a.shape, b.shape, tally)


def _ensure_tensors(*checkpoints: StoredCheckpoint) -> None:
    """Raise UsageError when neither side has a tensor: "equal" would be said of nothing."""
    if any(weights.tensors for one in checkpoints for weights in one.weights):
        return
    opaque = [name for one in checkpoints for weights in one.weights for name in weights.opaque]
    held = (
        f"; these values are not plain tensors: {list_names(dict.fromkeys(opaque))}"
        if opaque
        else ""
    )
    where = " and ".join(str(one.root / (one.only or "")) for one in checkpoints)
    raise UsageError(f"{where} have no tensors to compare{held}")


def _one_sided(left: Side, right: Side) -> Iterator[str]:
    """Yield in words the states of a run that only one of two folders of ``save_state`` has: the
    other misses them.

    Random states differ in number after a change of the processes. DeepSpeed keeps all states in
    its own folder, and ``migrate`` leaves out its optimizer. Raises OSError.
    """
    sides = (left.checkpoint, right.checkpoint)
    if any(side.only is not None for side in sides):
        return
    names = [names_in(side.root) for side in sides]
    parsed = [
        [file for name in side if (file := parse_file_name(name)) is not None] for side in names
    ]
    if not all(any(file.is_of_save_state for file in side) for side in parsed):
        return
    if any(parse_deepspeed_folder_name(name) is not None for side in names for name in side):
        return
    states = [{str(file) for file in side if file.role in _OF_A_RUN} for side in parsed]
    labels = [
        {optimizer.index: optimizer.label for optimizer in side.optimizers}
        for side in (left, right)
    ]
    if left.unread or right.unread:
        labels = [{}, {}]
    for letter, own, absent in (("A", 0, 1), ("B", 1, 0)):
        optimizers = [
            labels[own][index] for index in sorted(labels[own].keys() - labels[absent].keys())
        ]
        # A single optimizer is compared with a single one, whatever their numbers.
        if len(labels[own]) == len(labels[absent]) == 1:
            optimizers = []
        if files := [*optimizers, *sorted(states[own] - states[absent])]:
            yield f"states only in {letter}: {list_names(files)}"


_OF_A_RUN = (Role.SCHEDULER, Role.GRAD_SCALER, Role.SAMPLER, Role.DATALOADER, Role.CUSTOM)


_OF_A_SAVE = {
    "_diffusers_version", "_name_or_path", "base_model_name_or_path", "dtype", "peft_version",
    "torch_dtype", "transformers_version",
}  # fmt: skip
"""Settings of configs that say how a model was saved, and not what it computes."""


def _settings(
    a: StoredCheckpoint, b: StoredCheckpoint, others: Sequence[Sequence[PurePosixPath]]
) -> Iterator[str]:
    """Yield in words the settings that differ between configs: equal tensors then compute other
    numbers.
    """
    for path in sorted({*others[0]}.intersection(others[1])):
        if path.name not in (CONFIG, ADAPTER):
            continue
        one, other = (read_config(side.root / path.parent, path.name) for side in (a, b))
        differing = [
            f"{_plain(key)} is {_plain(one.get(key))} in A, {_plain(other.get(key))} in B"
            for key in dict.fromkeys((*one, *other))
            if key not in _OF_A_SAVE and _unordered(one.get(key)) != _unordered(other.get(key))
        ]
        if differing:
            more = [f"and {len(differing) - 3} more"] if len(differing) > 3 else []
            words = "; ".join((*differing[:3], *more))
            yield f"outputs of the models, although {path} differs: {words}"


def _unordered(value: object) -> object:
    """Return a value for a comparison: PEFT writes sets of names as lists in any order."""
    is_of_names = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return sorted(value) if isinstance(value, list) and is_of_names else value


def _plain(value: object) -> str:
    text = json.dumps(value)
    return text.strip('"') if len(text) <= _LONGEST_SETTING else f"{text[:_LONGEST_SETTING]}..."


_LONGEST_SETTING = 40


def _other_weights(
    a: StoredCheckpoint, b: StoredCheckpoint, others: Sequence[Sequence[PurePosixPath]]
) -> Iterator[str]:
    """Yield what holds other weights next to a model, such as an adapter or a variant, and how to
    compare them.
    """
    homes = {one.home for checkpoint in (a, b) for one in checkpoint.weights}
    for path in sorted({*others[0]}.intersection(others[1])):
        name = parse_file_name(path.name)
        if path.parent in homes and name is not None and name.is_of_library and name.shard is None:
            words = f"{command('diff', a.root, str(path))} {shell_path(b.root / path)}"
            yield (
                f"weights in {path}: another model in its folder is loaded first; to compare them: "
                f"{words}"
            )


def _not_compared(
    side: str,
    checkpoint: StoredCheckpoint,
    others: Sequence[PurePosixPath],
    of_optimizers: Collection[PurePosixPath],
) -> Iterator[str]:
    """Yield in words what of one side was left out as a whole. ``of_optimizers``: files of those
    that were compared.
    """
    if others:
        yield f"{count_of(len(others), 'other file')} in {side}: {list_names(map(str, others))}"
    for weights in {one.files: one for one in checkpoint.weights}.values():
        if left := left_of(weights, of_optimizers):
            label = weights.label.partition("[")[0] if weights.path else weights.label
            yield f"other entries of {label} in {side}: {list_names(left)}"


def _moved(drafts: Sequence[_Draft]) -> Iterator[str]:
    """Yield in words which models at other positions were compared; which is not a difference in
    itself.
    """
    known = {id(a) for a, _ in crossed((draft.a, draft.b) for draft in drafts)}
    for a, b in moved((draft.a, draft.b) for draft in drafts):
        if id(a) in known:
            continue
        pair = f"{a.label} in A was compared with {b.label} in B"
        yield f"positions of models: {pair}, because their keys match or no other was left"


def _opaque(drafts: Sequence[_Draft]) -> Iterator[str]:
    """Yield in words which values of the models cannot be compared, as only executing the pickle
    would show them.
    """
    for draft in drafts:
        for side, weights in (("A", draft.a), ("B", draft.b)):
            if weights is not None and weights.opaque:
                yield (
                    f"values in {weights.label} in {side} that are not plain tensors: "
                    f"{list_names(weights.opaque)}"
                )


def _too_small(models: Sequence[ModelDiff]) -> Iterator[str]:
    """Yield in words which tensors were compared by bytes alone."""
    for model in models:
        names = [
            one.name
            for one in model.tensors
            if one.dtype_a
            and one.dtype_b
            and not (has_numbers(one.dtype_a) and has_numbers(one.dtype_b))
        ]
        if names:
            why = "only bytes were compared"
            yield f"values of dtypes smaller than a byte ({why}): {list_names(names)}"
