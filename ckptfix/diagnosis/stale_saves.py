"""Saves with the tensors of the one before: a save that reports success and writes old bytes, a
folder that mixes the files of two saves, and a plain copy.

Each checkpoint is compared with the one before it, file by file. A healthy file differs in its
first sample, so that counters and moments are only read where all samples of a file are equal.

Equal weights can be right. Facts from torch 2.13, accelerate 1.15 and transformers 5.23: a step of
the optimizer at learning rate 0 changes moments alone, and so does one in bfloat16 whose updates
round to nothing: weights of 1.0 stay at a rate of 1e-3. One that fp16 skips changes nothing, moves
neither the optimizer's step nor the schedule, and halves the scale of the gradients, while the
Trainer counts it. A script may skip a step and move the schedule. SGD without momentum keeps no
states. The rows of an embedding that no batch uses have moments of zeros, and stay unchanged.

Some weights may be frozen, or an average of others, and a file of torch does not say which weight a
moment belongs to. But where a shape has as many moments as weights, all of these are trained: then
weights and moments of the shape change together, or a file is of another save.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ckptfix.checkpoint.dcp import DcpFolder, scan_dcp_folders
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.load_inputs import SAMPLE, SAMPLED
from ckptfix.checkpoint.model_configs import is_of_average
from ckptfix.checkpoint.neighbours import Neighbour, Neighbours
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.samples import (
    Piece,
    are_equal,
    dtypes_of,
    is_table,
    must_change,
    optimizers_in,
    samples_of,
    weights_in,
)
from ckptfix.diagnosis.findings.stale import CopiedSave, DoubtfulSave, StaleSave
from ckptfix.diagnosis.optimizer_values import has_moved
from ckptfix.diagnosis.save_progress import progress_of, steps_between
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, Shape, saved_optimizers
from ckptfix.errors import CkptfixError
from ckptfix.storage.files import AnyPath, store_of

_READ = (Role.OPTIMIZER, Role.SCHEDULER, Role.GRAD_SCALER)

_MOST_SHAPES = 4
"""Shapes of a file whose moments are read: those with the fewest moments first."""


_Moments = Mapping[Shape, Sequence[tuple[SavedOptimizer, str]]]
"""Shapes of which every weight is trained, each with its moments: optimizer and parameter."""


class _Pair(NamedTuple):
    """A checkpoint with the bytes of its tensors, and the one before it in the folder ``earlier``.

    ``equal``: the files whose tensors are the same in both. ``is_sampled``: their first bytes were
    compared.
    """

    folder: CheckpointFolder
    earlier: AnyPath
    weights: Sequence[Piece]
    optimizers: Sequence[Piece]
    equal: Collection[PurePosixPath]
    is_sampled: bool

    def has_same(self, pieces: Sequence[Piece]) -> bool:
        """Return whether all files of these pieces are equal in both."""
        paths = {piece.path for piece in pieces if piece.length}
        return bool(paths) and paths.issubset(self.equal)

    def are_equal(self, pieces: Sequence[Piece]) -> bool:
        """Return whether both have the same bytes in these pieces. Raises OSError."""
        return are_equal(self.folder.root, self.earlier, pieces)


def diagnose_stale_saves(
    folder: CheckpointFolder, sharded: Sequence[DcpFolder], neighbours: Neighbours, *, data: bool
) -> Iterator[StaleSave]:
    """Yield that a checkpoint has weights or optimizers of the one before it, though the run went
    on, or that it is a copy.

    ``data``: compare every byte where all samples are equal. An earlier checkpoint that cannot be
    read shows nothing: a run may delete it.
    """
    before = neighbours.before()
    if folder.only is not None or before is None:
        return
    with suppress(CkptfixError, OSError), before.opened() as earlier:
        weights = weights_in(folder, sharded) or ()
        optimizers = optimizers_in(folder, sharded) or ()
        equal = [
            path
            for pieces in (weights, optimizers)
            for path in _equal_files(folder.root, earlier, pieces, data=data)
        ]
        if equal:
            is_sampled = not data and store_of(earlier) is None
            pair = _Pair(folder, earlier, weights, optimizers, equal, is_sampled)
            yield from _judged(pair, sharded, before, is_newest=neighbours.after() is None)


def _equal_files(
    root: AnyPath, earlier: AnyPath, pieces: Sequence[Piece], *, data: bool
) -> Iterator[PurePosixPath]:
    """Yield the files of these pieces whose samples, and with ``data`` all bytes, are equal."""
    samples = samples_of(pieces) or (pieces if data else ())
    for path, of_file in groupby(samples, key=attrgetter("path")):
        with suppress(FileNotFoundError):
            if not are_equal(root, earlier, list(of_file)):
                continue
            if data and not are_equal(
                root, earlier, [piece for piece in pieces if piece.path == path]
            ):
                continue
            yield path


def _judged(
    pair: _Pair, sharded: Sequence[DcpFolder], before: Neighbour, *, is_newest: bool
) -> Iterator[StaleSave]:
    """Yield the findings about two checkpoints with equal files."""
    folder, weights, optimizers = pair.folder, pair.weights, pair.optimizers
    there = before.scan(*_READ, root=pair.earlier)
    now, then = progress_of(folder, sharded), progress_of(there, scan_dcp_folders(there))
    same_weights, same_optimizers = pair.has_same(weights), pair.has_same(optimizers)
    steps = steps_between(then, now, has_new_weights=bool(weights) and not same_weights)
    saved = list(saved_optimizers(folder, sharded))
    facts = {"save": before.name, "sampled": pair.is_sampled, **(steps.shown if steps else {})}

    same = [*(weights if same_weights else ()), *(optimizers if same_optimizers else ())]
    state = " and ".join(["weights"] * same_weights + ["optimizer state"] * same_optimizers)
    has_optimizer = bool(optimizers) or any(
        file.role is Role.OPTIMIZER for file in (*folder.components, *there.components)
    )
    if same_weights and (same_optimizers or not has_optimizer) and now.is_at(then):
        yield CopiedSave(path=same[0].path, state=state, **facts)
        return
    if same and steps is not None:
        shapes = {shape for optimizer in saved for of in optimizer.shapes.values() for shape in of}
        # The beginning of an embedding need not change.
        if pair.is_sampled and shapes and all(map(is_table, shapes)):
            if sum(piece.length for piece in same) > SAMPLED or not pair.are_equal(same):
                return
            facts["sampled"] = False
        is_sure = not steps.is_doubtful and (
            (same_optimizers and steps.rate is not None)
            or must_change(steps.rate, dtypes_of(weights))
        )
        yield (StaleSave if is_sure else DoubtfulSave)(path=same[0].path, state=state, **facts)
    if sharded:
        return

    models = _without_averages(pair)
    # Weights in objects of the script, or in a part of a storage, have no shape here: their moments
    # would count as those of frozen weights with the same shape.
    are_counted = not any(piece.shape is None for piece in models) and not any(
        file.role is Role.CUSTOM and file.tensors for file in folder.components
    )
    moments = _trained(models, saved) if are_counted else {}
    if steps is not None and not same_weights and steps.lowest_rate != 0:
        old = list(_old_weights(pair, models, moments, list(saved_optimizers(there, ()))))
        dtypes = dtypes_of([piece for piece in models if piece.path in old])
        kind = StaleSave if must_change(steps.lowest_rate, dtypes) else DoubtfulSave
        yield from _of_files(kind, old, state="weights", **facts)
    # An optimizer without states may train any weights, as where a script goes on with SGD.
    have_states = all(optimizer.tensors and not optimizer.key for optimizer in saved)
    if have_states and (steps is None or not same_optimizers):
        old = list(_old_optimizers(pair, models, moments))
        # An average may replace the weights without a step at the end of a run.
        kind = DoubtfulSave if steps is None and is_newest else StaleSave
        yield from _of_files(kind, old, state="optimizer state", **facts)


def _of_files(
    kind: type[StaleSave], files: Sequence[PurePosixPath], **facts: Any
) -> Iterator[StaleSave]:
    """Yield the finding about files of another save, if there are any."""
    if files:
        path, *more = files
        yield kind(path=path, more=tuple(map(str, more)), **facts)


def _without_averages(pair: _Pair) -> list[Piece]:
    """Return the weights but for those of ``EMAModel``, which no optimizer trains."""
    folders = {piece.path.parent for piece in pair.weights}
    averages = {path for path in folders if is_of_average(pair.folder.root / path)}
    return [piece for piece in pair.weights if piece.path.parent not in averages]


def _trained(weights: Sequence[Piece], optimizers: Sequence[SavedOptimizer]) -> _Moments:
    """Return the shapes with as many moments as weights, those with the fewest first."""
    counts = Counter(piece.shape for piece in weights)
    moments: dict[Shape, list[tuple[SavedOptimizer, str]]] = {}
    for optimizer in optimizers:
        for name, shapes in optimizer.shapes.items():
            for shape in shapes:
                moments.setdefault(shape, []).append((optimizer, name))
    fewest = sorted(moments, key=lambda shape: len(moments[shape]))
    return {shape: moments[shape] for shape in fewest if len(moments[shape]) == counts[shape]}


def _old_weights(
    pair: _Pair, weights: Sequence[Piece], moments: _Moments, earlier: Sequence[SavedOptimizer]
) -> Iterator[PurePosixPath]:
    """Yield the equal files with weights of a shape whose moments have all changed."""
    root, then = pair.folder.root, {optimizer.path: optimizer for optimizer in earlier}

    @cache
    def have_changed(shape: Shape) -> bool:
        return all(
            optimizer.path in then
            and has_moved(root, optimizer, pair.earlier, then[optimizer.path], name)
            for optimizer, name in moments[shape]
        )

    for path, pieces in groupby(weights, key=attrgetter("path")):
        if path in pair.equal:
            own = {piece.shape for piece in pieces}
            # The beginning of an embedding need not change.
            own -= {shape for shape in moments if pair.is_sampled and is_table(shape)}
            shapes = [shape for shape in moments if shape in own]
            if any(map(have_changed, shapes[:_MOST_SHAPES])):
                yield path


def _old_optimizers(
    pair: _Pair, weights: Sequence[Piece], moments: _Moments
) -> Iterator[PurePosixPath]:
    """Yield the equal files with moments of a shape whose weights have all changed."""
    # Objects of a store are compared as wholes, with the buffers in them.
    is_stored = store_of(pair.earlier) is not None
    mixed = {piece.path for piece in weights if is_stored and piece.shape not in moments}

    @cache
    def have_changed(shape: Shape) -> bool:
        return not any(
            piece.path in mixed or pair.are_equal([piece.sample(SAMPLE)])
            for piece in weights
            if piece.shape == shape
        )

    for path in dict.fromkeys(piece.path for piece in pair.optimizers if piece.path in pair.equal):
        shapes = [
            shape
            for shape, named in moments.items()
            if any(optimizer.path == path for optimizer, _ in named)
        ]
        if any(map(have_changed, shapes[:_MOST_SHAPES])):
            yield path
