"""Two checkpoints side by side, whatever their formats: which tensors are the same, and how far apart the others are.

``weights.pairing`` and ``matching`` say what belongs together, ``reading`` and ``comparing`` read both sides,
``report`` is the answer, ``page`` lays it out as HTML.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.pairing import Progress
from ckptfix.errors import UsageError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.operations.diff.comparing import Comparison, Pair
from ckptfix.operations.diff.matching import Matched, match_names
from ckptfix.operations.diff.report import DiffReport, ModelDiff, Outcome, TensorDiff
from ckptfix.storage.paths import command, shell_path
from ckptfix.weights.elements.differing import Tally, Tolerance, has_numbers
from ckptfix.weights.opening import open_checkpoint, other_files
from ckptfix.weights.pairing import crossed, crossing, moved, pair_models
from ckptfix.weights.stored import StoredCheckpoint, StoredTensor, Weights
from ckptfix.wording import count_of, list_names

__all__ = ["DiffReport", "ModelDiff", "Outcome", "TensorDiff", "diff"]


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    progress: Progress | None = None,
) -> DiffReport:
    """Compare the weights of two checkpoints, tensor by tensor.

    ``rtol``, ``atol``: an element of A and one of B count as equal where ``|a - b| <= atol + rtol * |a|``; when either
    is given, two dtypes count as equal, too. ``progress`` gets the bytes read, of both sides together, from any thread.

    Raises UsageError when nothing can be compared, OperationError when a checkpoint cannot be read, OSError.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{name} is {value}: a tolerance is a number, 0 or more")
    tolerance = None if rtol is None and atol is None else (rtol or 0.0, atol or 0.0)
    with paused_gc():
        left, right = open_checkpoint(a, lone_shard=True), open_checkpoint(b, lone_shard=True)
        _ensure_tensors(left, right)
        drafts = [_Draft(*models) for models in pair_models(left.weights, right.weights)]
        pairs = _Pairs()
        for draft in drafts:
            pairs.collect(draft)
        pairs.compare(tolerance, progress)
        models = tuple(draft.finished(pairs, tolerance) for draft in drafts)
    others = other_files(left), other_files(right)
    return DiffReport(
        a=os.fspath(a),
        b=os.fspath(b),
        models=models,
        tolerance=tolerance,
        crossed=crossing(list(crossed((draft.a, draft.b) for draft in drafts))),
        is_partial=any(weights.opaque for one in (left, right) for weights in one.weights),
        not_compared=(
            *_other_weights(left, right, others),
            *_not_compared("A", left, others[0]),
            *_not_compared("B", right, others[1]),
            *_moved(drafts),
            *_opaque(drafts),
            *_too_small(models),
        ),
    )


class _Draft:
    """A pair of models, or one alone, before their tensors are read."""

    def __init__(self, a: Weights | None, b: Weights | None) -> None:
        self.a, self.b = a, b
        self.left: Mapping[str, StoredTensor] = a.named() if a else {}
        self.right: Mapping[str, StoredTensor] = b.named() if b else {}
        self.matched, self.names = match_names(self.left, self.right)

    def of(self, one: Matched) -> tuple[StoredTensor | None, StoredTensor | None]:
        """Return what a matched name stands for on each side."""
        return (
            self.left[one.a] if one.a is not None else None,
            self.right[one.b] if one.b is not None else None,
        )

    def finished(self, pairs: "_Pairs", tolerance: Tolerance | None) -> ModelDiff:
        """Return what was found."""
        either = self.a or self.b
        return ModelDiff(
            index=either.index if either else 0,
            a=self.a.label if self.a else None,
            b=self.b.label if self.b else None,
            names=self.names,
            tensors=tuple(_finished(one, *self.of(one), pairs, tolerance) for one in self.matched),
        )


class _Pairs:
    """The pairs of tensors that are to be read, each once: a tie has several names and one place."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, str, str], int] = {}
        self._pairs: list[Pair] = []
        self._unequal: set[int] = set()
        self._tallies: dict[int, Tally] = {}

    def collect(self, draft: _Draft) -> None:
        """Take note of the pairs of a model."""
        for one in draft.matched:
            a, b = draft.of(one)
            if a is not None and b is not None and a.shape == b.shape and _key(a, b) not in self._numbers:
                self._numbers[_key(a, b)] = len(self._pairs)
                self._pairs.append((a, b))

    def compare(self, tolerance: Tolerance | None, progress: Progress | None) -> None:
        """Read them all."""
        comparison = Comparison(self._pairs, tolerance, progress)
        self._unequal = comparison.unequal()
        self._tallies = comparison.tallies(self._unequal)

    def found(self, a: StoredTensor, b: StoredTensor) -> tuple[bool, Tally | None]:
        """Return whether two tensors have equal dtypes and bytes, and how far apart their numbers are."""
        number = self._numbers[_key(a, b)]
        return number not in self._unequal, self._tallies.get(number)


def _key(a: StoredTensor, b: StoredTensor) -> tuple[int, int, str, str]:
    return id(a.layout), id(b.layout), a.dtype, b.dtype


def _finished(
    one: Matched, a: StoredTensor | None, b: StoredTensor | None, pairs: _Pairs, tolerance: Tolerance | None
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
    held = f", only values that no plain tensor are: {list_names(dict.fromkeys(opaque))}" if opaque else ""
    where = " and ".join(str(one.root / (one.only or "")) for one in checkpoints)
    raise UsageError(f"{where} hold no tensor that can be compared{held}")


def _other_weights(
    a: StoredCheckpoint, b: StoredCheckpoint, others: Sequence[Sequence[PurePosixPath]]
) -> Iterator[str]:
    """Yield what holds other weights next to a model, such as an adapter or a variant, and how to compare them."""
    homes = {one.home for checkpoint in (a, b) for one in checkpoint.weights}
    for path in sorted({*others[0]}.intersection(others[1])):
        name = parse_file_name(path.name)
        if path.parent in homes and name is not None and name.is_of_library and name.shard is None:
            words = f"{command('diff', a.root, str(path))} {shell_path(b.root / path)}"
            yield f"weights of {path}, next to a model that is loaded first; {words} compares them"


def _not_compared(side: str, checkpoint: StoredCheckpoint, others: Sequence[PurePosixPath]) -> Iterator[str]:
    """Yield in words what of one side was left out as a whole."""
    if others:
        yield f"{count_of(len(others), 'other file')} in {side}: {list_names(map(str, others))}"
    for weights in {one.files: one for one in checkpoint.weights}.values():
        if weights.left:
            label = weights.label.partition("[")[0] if weights.path else weights.label
            yield f"what {label} in {side} holds next to what was compared: {list_names(weights.left)}"


def _moved(drafts: Sequence[_Draft]) -> Iterator[str]:
    """Yield in words which models at other positions were compared; where that is no difference in itself."""
    told = {id(a) for a, _ in crossed((draft.a, draft.b) for draft in drafts)}
    for a, b in moved((draft.a, draft.b) for draft in drafts):
        if id(a) in told:
            continue
        pair = f"{a.label} in A was compared with {b.label} in B"
        yield f"positions of models: {pair}: their names fit, or no other was left"


def _opaque(drafts: Sequence[_Draft]) -> Iterator[str]:
    """Yield in words which values of the models cannot be compared, as only executing tells what they are."""
    for draft in drafts:
        for side, weights in (("A", draft.a), ("B", draft.b)):
            if weights is not None and weights.opaque:
                yield f"what is not a plain tensor in {weights.label} in {side}: {list_names(weights.opaque)}"


def _too_small(models: Sequence[ModelDiff]) -> Iterator[str]:
    """Yield in words which tensors were compared by bytes alone."""
    for model in models:
        names = [
            one.name
            for one in model.tensors
            if one.dtype_a and one.dtype_b and not (has_numbers(one.dtype_a) and has_numbers(one.dtype_b))
        ]
        if names:
            yield f"numbers of less than a byte, by bytes alone: {list_names(names)}"
