"""Saves with the tensors of an earlier one: a save that reports success and writes old bytes, and a
plain copy.

Each checkpoint is compared with the one before it. A healthy one differs in the first sample that
is read, so that the counters of the earlier one are only read where all samples of the weights, or
of the optimizers, are equal.

Equal weights can be right. Facts from torch 2.13, accelerate 1.15 and transformers 5.23: a step of
the optimizer at learning rate 0 changes moments alone, and so does one in bfloat16 whose updates
round to nothing: weights of 1.0 stay at a rate of 1e-3. One that fp16 skips changes nothing, moves
neither the optimizer's step nor the schedule, and halves the scale of the gradients, while the
Trainer counts it. SGD without momentum keeps no states. The rows of an embedding that no batch uses
have moments of zeros, and stay unchanged.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from enum import Enum
from functools import partial
from itertools import groupby
from math import nan
from operator import attrgetter
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from msgspec.structs import replace

from ckptfix.checkpoint.dcp import DcpFolder, scan_dcp_folders
from ckptfix.checkpoint.filenames import TRAINER_STATE
from ckptfix.checkpoint.folder import CheckpointFolder, Component, scan_folder
from ckptfix.checkpoint.load_inputs import SAMPLED
from ckptfix.checkpoint.model_configs import config_of_model
from ckptfix.checkpoint.neighbours import Neighbours
from ckptfix.checkpoint.roles import NOT_STATES, Role
from ckptfix.checkpoint.samples import (
    Piece,
    are_equal,
    dtypes_in,
    is_table,
    must_change,
    optimizers_in,
    samples_of,
    weights_in,
)
from ckptfix.checkpoint.trainer_folders import trainer_progress
from ckptfix.diagnosis.findings.base import Finding, as_kind
from ckptfix.diagnosis.findings.stale import (
    CopiedSave,
    DoubtfulSave,
    DoubtfulShard,
    LaterState,
    OldShard,
    StaleSave,
)
from ckptfix.diagnosis.optimizer_kinds import SCALARS, name_of
from ckptfix.diagnosis.optimizer_values import has_moved, moved_shapes, steps_of
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, Shape, saved_optimizers
from ckptfix.diagnosis.schedules import moves_of, numbers_of
from ckptfix.errors import CkptfixError
from ckptfix.formats.pickle_tree import child, is_dict_like, items_of
from ckptfix.formats.torch_file import TorchFile
from ckptfix.storage.files import AnyPath, store_of

_READ = (Role.OPTIMIZER, Role.SCHEDULER, Role.GRAD_SCALER)
_MOST_SHAPES = 4
"""Shapes of a part whose moments are read: those with the fewest moments first."""


class _Part(NamedTuple):
    """A shard, a model among several, or an optimizer among several, with the bytes of the earlier
    checkpoint.

    ``weights``: how many weights of each of its shapes there are, among which the moments must be.
    ``pieces``: those of a model among several, which may be frozen; none of a shard.
    """

    path: PurePosixPath
    weights: Mapping[Shape, int]
    pieces: Sequence[Piece] = ()


def diagnose_stale_saves(
    folder: CheckpointFolder, sharded: Sequence[DcpFolder], neighbours: Neighbours, *, data: bool
) -> Iterator[Finding]:
    """Yield that a checkpoint has the weights or the optimizers of the one before it.

    ``data``: compare every byte where all samples are equal. An earlier checkpoint that cannot be
    read shows nothing: a run may delete it.
    """
    before, after = neighbours.before(), neighbours.after()
    if folder.only is not None or (before is None and after is None):
        return
    with suppress(CkptfixError, OSError):
        weights, optimizers = weights_in(folder, sharded), optimizers_in(folder, sharded)
        if after is not None and optimizers:
            with after.opened() as root:
                if _are_equal(folder.root, root, optimizers, data=data):
                    paths = [optimizers[0].path]
                else:
                    paths = list(
                        _old_optimizers(folder, root, weights or (), optimizers, data=data)
                    )
                if paths:
                    same = bool(weights) and _are_equal(folder.root, root, weights or (), data=data)
                    yield from _of_later(
                        folder, sharded, root, neighbours, paths, same_weights=same, data=data
                    )
        if before is None or not (weights or optimizers):
            return
        with before.opened() as root:
            same_weights, same_optimizers = (
                bool(pieces) and _are_equal(folder.root, root, pieces, data=data)
                for pieces in (weights or (), optimizers or ())
            )
            judge = partial(
                _judged,
                folder,
                sharded,
                root,
                neighbours,
                weights or (),
                optimizers or (),
                data=data,
            )
            if same_weights or same_optimizers:
                yield from judge(same_weights=same_weights, same_optimizers=same_optimizers)
            if weights and not same_weights:
                parts = [
                    *_old_shards(folder, root, weights, data=data),
                    *_old_models(folder, sharded, root, weights, data=data),
                ]
                if parts:
                    yield from judge(same_weights=True, same_optimizers=False, parts=parts)
            if optimizers and not same_optimizers:
                old = _old_optimizers(folder, root, weights or (), optimizers, data=data)
                if parts := [_Part(path, {}) for path in old]:
                    yield from judge(same_weights=False, same_optimizers=True, parts=parts)


def _are_equal(root: AnyPath, earlier: AnyPath, pieces: Sequence[Piece], *, data: bool) -> bool:
    samples = samples_of(pieces)
    if samples is None and not data:
        return False
    try:
        return are_equal(root, earlier, samples or ()) and (
            not data or are_equal(root, earlier, pieces)
        )
    except FileNotFoundError:
        return False


def _old_shards(
    folder: CheckpointFolder, earlier: AnyPath, weights: Sequence[Piece], *, data: bool
) -> Iterator[_Part]:
    """Yield the shards of models that equal those of the earlier checkpoint, where others of the
    model do not.
    """
    models: dict[tuple[str, str], list[Component]] = {}
    for component in folder.components:
        if component.role is Role.MODEL and component.name.shard is not None:
            models.setdefault((component.name.stem, component.name.suffix), []).append(component)
    of_all = Counter(
        tensor.shape
        for file in folder.components
        if file.role is Role.MODEL
        for tensor in file.tensors
    )
    for shards in models.values():
        pieces = {
            shard.path: [piece for piece in weights if piece.path == shard.path] for shard in shards
        }
        equal = [
            shard
            for shard in shards
            if _are_equal(folder.root, earlier, pieces[shard.path], data=data)
        ]
        for shard in equal if len(equal) < len(shards) else ():
            shapes = {tensor.shape for tensor in shard.tensors}
            yield _Part(shard.path, {shape: of_all[shape] for shape in shapes})


def _old_models(
    folder: CheckpointFolder,
    sharded: Sequence[DcpFolder],
    earlier: AnyPath,
    weights: Sequence[Piece],
    *,
    data: bool,
) -> Iterator[_Part]:
    """Yield the models that equal those of the earlier checkpoint, where other weights do not: each
    of several that ``save_state`` wrote, and those that hooks of diffusers' scripts save to
    sub-folders.

    The moments of an optimizer never belong to an average of ``EMAModel``.
    """
    states = {state.path for state in sharded}
    in_root: dict[PurePosixPath, list[Component]] = {}
    for file in _models_of(folder):
        in_root.setdefault(file.path.with_name(_entry(file)), []).append(file)
    places = {file.path: where for where, files in in_root.items() for file in files}
    pieces: dict[PurePosixPath, list[Piece]] = {}
    for piece in weights:
        if piece.path.parent.parts and piece.path.parent not in states:
            pieces.setdefault(piece.path.parent, []).append(piece)
        elif piece.path in places:
            pieces.setdefault(places[piece.path], []).append(piece)
    if len(pieces) == 1 and places:
        return
    # The models of a healthy save differ in their first sample, and its optimizers are not read.
    equal = {
        where
        for where in in_root.keys() & pieces.keys()
        if _are_equal(folder.root, earlier, pieces[where], data=data)
    }
    candidates = [where for where in pieces if where in equal or where not in in_root]
    if not candidates:
        return
    models = dict(in_root)
    for where in candidates:
        if where in in_root:
            continue
        config = config_of_model(folder.root / where)
        if config is None or not config.is_of_average:
            models[where] = _models_of(scan_folder(folder.root / where))
    counts = {
        where: Counter(tensor.shape for file in files for tensor in file.tensors)
        for where, files in models.items()
    }
    of_all = sum(counts.values(), Counter[Shape]())
    moments = Counter(
        shape
        for optimizer in saved_optimizers(folder, ())
        for tensors in optimizer.tensors.values()
        for shape in _shapes_of(tensors)
    )
    for where in candidates:
        if where not in models:
            continue
        # The beginning of a table need not change.
        own = {shape: of_all[shape] for shape in counts[where] if data or not is_table(shape)}
        may_be_trained = any(moments[shape] >= count for shape, count in own.items())
        if may_be_trained and (
            where in equal or _are_equal(folder.root, earlier, pieces[where], data=data)
        ):
            yield _Part(pieces[where][0].path, own, pieces[where])


def _models_of(folder: CheckpointFolder) -> list[Component]:
    return [file for file in folder.components if file.role in NOT_STATES]


def _entry(file: Component) -> str:
    """Return one name for all shards of a model."""
    return f"{file.name.stem}_{file.name.index}{file.name.suffix}"


def _old_optimizers(
    folder: CheckpointFolder,
    other: AnyPath,
    weights: Sequence[Piece],
    optimizers: Sequence[Piece],
    *,
    data: bool,
) -> Iterator[PurePosixPath]:
    """Yield the optimizers among several whose bytes are those of another save, though weights that
    they alone train differ.

    A step of an optimizer with states changes these. Which weights it trains, a file of torch does
    not say: those of a shape of which it alone has moments, as many as there are weights. Averages
    and buffers have none, so that a shape of theirs shows nothing. An optimizer without states may
    train the weights of another, as where a script goes on with plain SGD.
    """
    own = {path: list(pieces) for path, pieces in groupby(optimizers, key=attrgetter("path"))}
    if len(own) < 2 or any(piece.path.parent.parts for piece in weights):
        return
    equal = {
        path for path, pieces in own.items() if _are_equal(folder.root, other, pieces, data=data)
    }
    # The optimizers of a healthy save differ in their first sample, and are not read further.
    saved = list(saved_optimizers(folder, ())) if equal else []
    if any(optimizer.key or not optimizer.tensors for optimizer in saved):
        return
    moments: dict[Shape, Counter[PurePosixPath]] = {}
    for optimizer in saved:
        for tensors in optimizer.tensors.values():
            for shape in _shapes_of(tensors):
                moments.setdefault(shape, Counter())[optimizer.path] += 1
    models = _models_of(folder)
    of_all = Counter(tensor.shape for file in models for tensor in file.tensors)
    for path in [optimizer.path for optimizer in saved if optimizer.path in equal]:
        trained = {
            shape
            for shape, owners in moments.items()
            if owners.keys() == {path}
            and owners[path] >= of_all[shape] > 0
            # The beginning of a table need not change.
            and (data or not is_table(shape))
        }
        for file in models:
            pieces = _pieces_of_shapes(
                file, trained, weights, is_stored=store_of(other) is not None
            )
            samples = samples_of(pieces)
            with suppress(FileNotFoundError):
                if samples and not are_equal(folder.root, other, samples):
                    yield path
                    break


def _pieces_of_shapes(
    file: Component, shapes: Collection[Shape], weights: Sequence[Piece], *, is_stored: bool
) -> list[Piece]:
    """Return the weights of these shapes in a file of a model: all or none of a torch file, which
    has a piece for each storage, and of an object of a store, which is compared by its ETag.
    """
    pieces = [piece for piece in weights if piece.path == file.path]
    if all(tensor.shape in shapes for tensor in file.tensors):
        return pieces
    begins = {
        tensor.data_offsets[0]
        for tensor in file.tensors
        if tensor.data_offsets is not None and tensor.shape in shapes
    }
    return [] if is_stored else [piece for piece in pieces if piece.offset in begins]


def _shapes_of(tensors: Mapping[str, Any]) -> set[Shape]:
    return {tensor.shape for state, tensor in tensors.items() if state not in SCALARS}


def _is_trained(
    part: _Part,
    folder: CheckpointFolder,
    saved: Sequence[SavedOptimizer],
    root: AnyPath,
    earlier: Sequence[SavedOptimizer],
) -> bool:
    """Return whether an optimizer trained tensors of a part since the earlier save, which has its
    files in ``root``.

    Files of torch do not say to which weight a moment belongs. But a shape whose moments are as
    many as the weights of it, and have all changed at their beginning, is trained in each part.
    """
    trained: dict[Shape, list[tuple[SavedOptimizer, SavedOptimizer | None, str]]] = {}
    then = {(optimizer.path, optimizer.key): optimizer for optimizer in earlier}
    for optimizer in saved:
        for name, tensors in optimizer.tensors.items():
            for shape in _shapes_of(tensors):
                before = then.get((optimizer.path, optimizer.key))
                trained.setdefault(shape, []).append((optimizer, before, name))
    enough = [
        shape
        for shape, count in part.weights.items()
        if shape in trained and len(trained[shape]) >= count > 0
    ]
    return any(
        all(
            before is not None and has_moved(folder.root, optimizer, root, before, name)
            for optimizer, before, name in trained[shape]
        )
        for shape in sorted(enough, key=lambda shape: len(trained[shape]))[:_MOST_SHAPES]
    )


def _judged(
    folder: CheckpointFolder,
    sharded: Sequence[DcpFolder],
    root: AnyPath,
    neighbours: Neighbours,
    weights: Sequence[Piece],
    optimizers: Sequence[Piece],
    *,
    same_weights: bool,
    same_optimizers: bool,
    parts: Sequence[_Part] = (),
    data: bool,
) -> Iterator[StaleSave]:
    """Yield the finding about equal weights or optimizers, or one for each of some parts with
    equal weights.

    ``root``: the folder of the earlier checkpoint.
    """
    before = neighbours.before()
    assert before is not None
    earlier = before.scan(*_READ, root=root)
    now, then = _progress_of(folder, sharded), _progress_of(earlier, scan_dcp_folders(earlier))
    is_sampled = not data and store_of(root) is None
    known = [name for name in now.counters if name in then.counters]
    may_be_same = not parts and (same_weights or not weights)
    own = then.own_steps
    moved = now.moved_since(then, may_be_same=may_be_same)
    words = ("weights",) * same_weights + ("optimizer state",) * same_optimizers
    path, state = (weights if same_weights else optimizers)[0].path, " and ".join(words)
    if not moved and not parts:
        are_equal_counters = all(now.counters[name] == then.counters[name] for name in known)
        has_no_optimizer = not optimizers and not any(
            one.role is Role.OPTIMIZER for one in (*folder.components, *earlier.components)
        )
        if same_weights and (same_optimizers or has_no_optimizer) and are_equal_counters:
            yield CopiedSave(path=path, save=before.name, state=state, sampled=is_sampled)
    if not moved:
        return
    steps = now.counters[moved] - then.counters[moved]
    if not moved.startswith(_OWN_STEP) and now.may_have_skipped(steps, then):
        return
    shapes = _moved_shapes(folder, sharded)
    shape = next(shapes, None)
    if shape is None and (same_optimizers or not now.is_without_states):
        return
    if is_sampled and shape is not None and is_table(shape) and all(map(is_table, shapes)):
        # The beginning of an embedding need not change.
        pieces = (*(weights if same_weights else ()), *(optimizers if same_optimizers else ()))
        if sum(piece.length for piece in pieces) > SAMPLED or not are_equal(
            folder.root, root, pieces
        ):
            return
        is_sampled = False
    # The rate of the later save may be that of a step after it: 0 where a schedule ends.
    shown = (then,) if now.has_rate_of_next_step(then) else (then, now)
    rates = [progress.rate for progress in shown if progress.rate is not None]
    if 0 in rates:
        return
    rate = min(rates) if len(rates) == len(shown) else None
    is_sure = (
        rate is not None
        and (same_optimizers or must_change(rate, dtypes_in(folder, sharded)))
        and (bool(own) or not may_be_same or not moved.startswith(_MOVES))
    )
    owner = (
        _owner(now, then, moved, neighbours, (before.name, neighbours.home.name))
        if same_optimizers
        else None
    )
    if owner is _Owner.LATER:
        return
    finding = (StaleSave if is_sure else DoubtfulSave)(
        path=path,
        is_undecided=owner is None,
        save=before.name,
        state=state,
        counter=moved,
        begin=then.counters[moved],
        end=now.counters[moved],
        rate=rate,
        sampled=is_sampled,
    )
    if not parts:
        yield finding
        return
    saved, of_earlier = list(saved_optimizers(folder, ())), list(saved_optimizers(earlier, ()))
    for part in parts:
        if same_weights and not _is_trained(part, folder, saved, root, of_earlier):
            continue
        is_changing = _is_changing(part, folder, neighbours, data=data) if part.pieces else True
        if is_changing is not False:
            kind = OldShard if is_sure and is_changing else DoubtfulShard
            yield as_kind(kind, replace(finding, path=part.path))


def _moved_shapes(folder: CheckpointFolder, sharded: Sequence[DcpFolder]) -> Iterator[Shape]:
    """Yield the shapes of the parameters with a moment that is not zero."""
    for optimizer in saved_optimizers(folder, sharded):
        yield from moved_shapes(folder.root, optimizer)


def _is_changing(
    part: _Part, folder: CheckpointFolder, neighbours: Neighbours, *, data: bool
) -> bool | None:
    """Return whether a model differs from that of the save before the earlier one: a frozen one is
    equal in all. None without such a save.
    """
    before = neighbours.before()
    assert before is not None
    first = neighbours.siblings.of(neighbours.home.parent / before.name).before()
    if first is None:
        return None
    with suppress(CkptfixError, OSError), first.opened() as root:
        return not _are_equal(folder.root, root, part.pieces, data=data)
    return None


def _of_later(
    folder: CheckpointFolder,
    sharded: Sequence[DcpFolder],
    root: AnyPath,
    neighbours: Neighbours,
    paths: Sequence[PurePosixPath],
    *,
    same_weights: bool,
    data: bool,
) -> Iterator[LaterState]:
    """Yield that optimizers of a checkpoint, at these paths, are those of the one after it, in
    ``root``, by their step.
    """
    after = neighbours.after()
    assert after is not None
    later = after.scan(*_READ, root=root)
    now, then = _progress_of(later, scan_dcp_folders(later)), _progress_of(folder, sharded)
    moved = now.moved_since(then, may_be_same=same_weights)
    pair = (neighbours.home.name, after.name)
    if not moved or _owner(now, then, moved, neighbours, pair) is not _Owner.LATER:
        return
    for path in paths:
        yield LaterState(
            path=path,
            save=after.name,
            state="optimizer state",
            counter=moved,
            begin=then.counters[moved],
            end=now.counters[moved],
            step=next(iter(then.own_steps)),
            sampled=not data and store_of(root) is None,
        )


class _Owner(Enum):
    """The one of two checkpoints with equal optimizers to which these belong."""

    EARLIER = "earlier"
    LATER = "later"


def _owner(
    now: "_Progress",
    then: "_Progress",
    moved: str,
    neighbours: Neighbours,
    pair: tuple[str, str],
) -> _Owner | None:
    """Return which of two checkpoints with equal optimizers these belong to, None where nothing
    decides.

    Their step fits one value of the counter that moved: by the saves on either side, of which
    ``pair`` are none, or without any where it is equal to one of the two values.
    """
    names = [name for name in then.counters if name.startswith(_OWN_STEP)]
    name = next((name for name in names if now.counters.get(name) == then.counters[name]), "")
    if not name:
        return None
    step, begin, end = then.counters[name], then.counters[moved], now.counters[moved]
    points: list[tuple[float, float]] = []
    before, after = neighbours.saves()
    for side in (before, after):
        near = next((save for save in side if save.name not in pair), None)
        with suppress(CkptfixError, OSError), near.opened() if near else nullcontext() as root:
            if near is None or root is None:
                continue
            there = near.scan(*_READ, root=root)
            counters = _progress_of(there, scan_dcp_folders(there)).counters
            if counters.get(moved) and counters.get(name, step) != step:
                points.append((counters[name], counters[moved]))
    if not points:
        return {begin: _Owner.EARLIER, end: _Owner.LATER}.get(step)
    (step_there, value), *more = points
    slope = value / step_there
    if more and more[0][0] != step_there:
        slope = (more[0][1] - value) / (more[0][0] - step_there)
    expected = value + (step - step_there) * slope
    tolerance = (end - begin) / 4
    if expected <= begin + tolerance:
        return _Owner.EARLIER
    return _Owner.LATER if expected >= end - tolerance else None


_OWN_STEP = "step in "
_MOVES = "last_epoch in "
_GLOBAL_STEP = f"global_step in {TRAINER_STATE}"


class _Progress(NamedTuple):
    """The progress that a checkpoint records.

    ``counters``: by their names in messages; those that prove a step of the optimizer first.
    ``rate``: the highest learning rate of a param group with states, None where it is not known.
    ``scale``: of the gradients in fp16; None in a run without, NaN where it cannot be read.
    ``backoff``: its factor for a skipped step. ``is_without_states``: there is no optimizer, or it
    is SGD without momentum.
    """

    counters: Mapping[str, float]
    rate: float | None
    scale: float | None
    backoff: float
    is_without_states: bool

    @property
    def own_steps(self) -> list[float]:
        """The steps that the optimizers count."""
        return [self.counters[name] for name in self.counters if name.startswith(_OWN_STEP)]

    def moved_since(self, then: "_Progress", *, may_be_same: bool) -> str:
        """Return the first counter that moved since then, "" where none did.

        ``may_be_same``: nothing else is new. A script may move its schedule after each epoch, and
        save again: so a schedule shows a step if it moves with each.
        """
        return next(
            (
                name
                for name, value in self.counters.items()
                if name in then.counters
                and value > then.counters[name]
                and not (
                    may_be_same
                    and name.startswith(_MOVES)
                    and then.counters[name] < max(then.own_steps or [0])
                )
            ),
            "",
        )

    def may_have_skipped(self, steps: float, then: "_Progress") -> bool:
        """Return whether fp16 may have skipped all of these steps since then: each skipped one
        lowers the scale.
        """
        if self.scale is None:
            return False
        return then.scale is None or not self.scale > 1.01 * then.scale * self.backoff**steps

    def has_rate_of_next_step(self, then: "_Progress") -> bool:
        """Return whether a schedule moved before each of two saves, so that its rates are those of
        the steps after it.

        Its moves are then in proportion to the steps. In a script that saves first they are behind:
        0 moves at step 1, 1 at step 2.
        """
        both = [(name, self.counters[name], then.counters.get(name, 0)) for name in self.counters]
        return any(
            0 < before < moves and moves * steps_before == steps * before
            for schedule, moves, before in both
            if schedule.startswith(_MOVES)
            for name, steps, steps_before in both
            if not name.startswith(_MOVES)
        )


def _progress_of(folder: CheckpointFolder, sharded: Sequence[DcpFolder]) -> _Progress:
    saved = list(saved_optimizers(folder, sharded))
    counters: dict[str, float] = {
        f"{_OWN_STEP}{optimizer.path}": step
        for optimizer in saved
        if (step := steps_of(folder.root, optimizer))
    }
    last_rates: list[float] = []
    scale: float | None = None
    backoff = 0.5
    for component in folder.components:
        content = component.content
        if not isinstance(content, TorchFile):
            continue
        root = content.tree.root
        if component.role is Role.SCHEDULER:
            if (moves := moves_of(root)) is not None:
                counters[f"{_MOVES}{component.path}"] = moves
            last_rates += numbers_of(items_of(child(root, "_last_lr")))
        elif component.role is Role.GRAD_SCALER and is_dict_like(root):
            value = child(root, "scale")
            scale = value if isinstance(value, float) else nan
            factor = child(root, "backoff_factor")
            backoff = factor if isinstance(factor, float) and 0 < factor < 1 else backoff
    step_of_trainer = trainer_progress(folder.root).step
    if step_of_trainer is not None:
        counters[_GLOBAL_STEP] = step_of_trainer
    rates = [rate for optimizer in saved for rate in _rates_of(optimizer)] or last_rates
    return _Progress(
        counters=counters,
        rate=max(rates, default=None),
        scale=scale,
        backoff=backoff,
        is_without_states=all(
            not optimizer.states and _is_plain_sgd(optimizer) for optimizer in saved
        ),
    )


def _rates_of(optimizer: SavedOptimizer) -> Iterator[float]:
    """Yield the learning rates of the param groups whose parameters have states; of all groups
    without any states.
    """
    for group, values in zip(optimizer.groups, optimizer.values, strict=False):
        if not optimizer.states or not optimizer.states.keys().isdisjoint(group):
            yield from numbers_of([values.get("lr")])


def _is_plain_sgd(optimizer: SavedOptimizer) -> bool:
    return name_of(optimizer.options, ()) == "SGD" and not any(map(_has_momentum, optimizer.values))


def _has_momentum(values: Mapping[str, object]) -> bool:
    return values.get("momentum") not in (0, 0.0)
