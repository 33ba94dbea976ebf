"""Saves with the tensors of an earlier one: a save that reports success and writes old bytes, and a
plain copy.

Each checkpoint is compared with the one before it. A healthy one differs in the first sample that
is read, so that the counters of the earlier one are only read where all samples of the weights, or
of the optimizers, are equal. The page of a file that differs is then looked up in the checkpoints
further back: a third more files are opened, and no request goes to a store.

Equal weights can be right. Facts from torch 2.13, accelerate 1.15 and transformers 5.23: a step of
the optimizer at learning rate 0 changes moments alone, and so does one in bfloat16 whose updates
round to nothing: weights of 1.0 stay at a rate of 1e-3. One that fp16 skips changes nothing, moves
neither the optimizer's step nor the schedule, and halves the scale of the gradients, while the
Trainer counts it. A script may skip a step and move the schedule, or go back to a model's best
weights, of which a save further back has the same. SGD without momentum keeps no states. The rows
of an embedding that no batch uses have moments of zeros, and stay unchanged.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from enum import Enum
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from msgspec.structs import replace

from ckptfix.checkpoint.dcp import DcpFolder, scan_dcp_folders
from ckptfix.checkpoint.filenames import TRAINER_STATE
from ckptfix.checkpoint.folder import CheckpointFolder, Component, scan_folder
from ckptfix.checkpoint.folder_names import split_number
from ckptfix.checkpoint.load_inputs import SAMPLED
from ckptfix.checkpoint.model_configs import is_of_average
from ckptfix.checkpoint.neighbours import Neighbour, Neighbours, Place
from ckptfix.checkpoint.roles import NOT_STATES, Role
from ckptfix.checkpoint.samples import (
    Piece,
    are_equal,
    dtypes_in,
    first_unequal,
    is_table,
    must_change,
    optimizers_in,
    samples_of,
    weights_in,
)
from ckptfix.diagnosis.findings.base import Finding, as_kind
from ckptfix.diagnosis.findings.stale import (
    CopiedSave,
    DoubtfulSave,
    DoubtfulShard,
    LaterState,
    OldShard,
    PerhapsRestored,
    StaleSave,
)
from ckptfix.diagnosis.optimizer_kinds import SCALARS
from ckptfix.diagnosis.optimizer_values import has_moved, moved_shapes, steps_of
from ckptfix.diagnosis.save_progress import MOVES, OWN_STEP, Progress, progress_of
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, Shape, saved_optimizers
from ckptfix.errors import CkptfixError
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
    """Yield that a checkpoint has the weights or the optimizers of an earlier one, or the optimizers
    of a later one.

    ``data``: compare every byte where all samples are equal. An earlier checkpoint that cannot be
    read shows nothing: a run may delete it.
    """
    if folder.only is not None or not (neighbours.before() or neighbours.after()):
        return
    with suppress(CkptfixError, OSError):
        save = _Save(
            folder,
            sharded,
            neighbours,
            weights_in(folder, sharded) or (),
            optimizers_in(folder, sharded) or (),
            data,
        )
        for later in _saves_with_files_of(save, is_before=False) if save.optimizers else ():
            with later.save.opened() as root:
                yield from _of_later(save, later, root)
        has_any = save.weights or save.optimizers
        for earlier in _saves_with_files_of(save, is_before=True) if has_any else ():
            with earlier.save.opened() as root:
                yield from _of_earlier(save, earlier, root)


class _Save(NamedTuple):
    """A checkpoint that is compared with others: the bytes of its weights and optimizers.

    ``data``: compare every byte where all samples are equal.
    """

    folder: CheckpointFolder
    sharded: Sequence[DcpFolder]
    neighbours: Neighbours
    weights: Sequence[Piece]
    optimizers: Sequence[Piece]
    data: bool


class _Compared(NamedTuple):
    """A checkpoint that another one is compared with. ``files``: those that only one further away
    than ``next_to_it`` has, None for that one itself.
    """

    save: Neighbour
    files: Collection[PurePosixPath] | None = None
    next_to_it: str = ""

    def may_have(self, path: PurePosixPath) -> bool:
        """Return whether a file may be of this checkpoint, and not of one nearer by."""
        return self.files is None or path in self.files


_MOST_EQUAL = 4
"""Files with an equal page, all samples of which are compared with those of saves further away."""


def _saves_with_files_of(save: _Save, *, is_before: bool) -> Iterator[_Compared]:
    """Yield the checkpoint before one, or after it, and those further away that have files of it
    which differ from those of the nearest.

    Of a healthy file the page that the nearest checkpoint has with other bytes is looked up in the
    others, where it differs, too: what is frozen is equal in the nearest one.
    """
    near = save.neighbours.before() if is_before else save.neighbours.after()
    if near is None:
        return
    yield _Compared(near)
    own = {
        path: list(pieces)
        for path, pieces in groupby(
            (*(save.weights if is_before else ()), *save.optimizers), key=attrgetter("path")
        )
    }
    places: dict[Place, PurePosixPath] = {}
    with near.opened() as root:
        for path, pieces in own.items():
            samples = samples_of(pieces) or (pieces if save.data else ())
            page = next(iter(samples), None)
            with suppress(FileNotFoundError):
                page = first_unequal(save.folder.root, root, samples)
            if page is not None:
                places[str(page.path), page.offset, page.length] = path
    compared = 0
    for far, equal in save.neighbours.with_same_samples(
        save.folder.root, list(places), is_before=is_before
    ):
        files = [places[place] for place in equal if place in places]
        compared += len(files)
        if compared > _MOST_EQUAL * len(own):
            return
        with far.opened() as root:
            files = [
                path
                for path in files
                if _are_equal(save.folder.root, root, own[path], data=save.data)
            ]
        if files:
            yield _Compared(far, files, near.name)
            places = {place: path for place, path in places.items() if path not in files}


def _of_later(save: _Save, later: _Compared, root: AnyPath) -> Iterator[Finding]:
    """Yield that optimizers are those of a later checkpoint, which has its files in ``root``."""
    folder, optimizers = save.folder, save.optimizers
    if _are_equal(folder.root, root, optimizers, data=save.data):
        paths = [optimizers[0].path]
    else:
        paths = list(_old_optimizers(save, later, root))
    paths = [path for path in paths if later.may_have(path)]
    if paths:
        yield from _of_its_step(save, later, root, paths)


def _of_earlier(save: _Save, earlier: _Compared, root: AnyPath) -> Iterator[Finding]:
    """Yield that weights or optimizers are those of an earlier checkpoint, which has its files in
    ``root``.
    """
    # Objects that a script registered may be what is trained, where the weights never change.
    custom = {file.path for file in save.folder.components if file.role is Role.CUSTOM}
    weights = [piece for piece in save.weights if earlier.files is None or piece.path not in custom]
    same_weights, same_optimizers = (
        bool(pieces)
        and any(earlier.may_have(piece.path) for piece in pieces)
        and _are_equal(save.folder.root, root, pieces, data=save.data)
        for pieces in (weights, save.optimizers)
    )
    judge = partial(_judged, save, earlier, root)
    if same_weights or same_optimizers:
        yield from judge(same_weights=same_weights, same_optimizers=same_optimizers)
    if weights and not same_weights:
        parts = [*_old_shards(save, root), *_old_models(save, root)]
        parts = [part for part in parts if earlier.may_have(part.path)]
        if parts:
            yield from judge(same_weights=True, same_optimizers=False, parts=parts)
    if save.optimizers and not same_optimizers:
        old = _old_optimizers(save, earlier, root)
        if parts := [_Part(path, {}) for path in old if earlier.may_have(path)]:
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


def _old_shards(save: _Save, earlier: AnyPath) -> Iterator[_Part]:
    """Yield the shards of models that equal those of the earlier checkpoint, where others of the
    model do not.
    """
    folder, data = save.folder, save.data
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
            shard.path: [piece for piece in save.weights if piece.path == shard.path]
            for shard in shards
        }
        equal = [
            shard
            for shard in shards
            if _are_equal(folder.root, earlier, pieces[shard.path], data=data)
        ]
        for shard in equal if len(equal) < len(shards) else ():
            shapes = {tensor.shape for tensor in shard.tensors}
            yield _Part(shard.path, {shape: of_all[shape] for shape in shapes})


def _old_models(save: _Save, earlier: AnyPath) -> Iterator[_Part]:
    """Yield the models that equal those of the earlier checkpoint, where other weights do not: each
    of several that ``save_state`` wrote, and those that hooks of diffusers' scripts save to
    sub-folders.

    The moments of an optimizer never belong to an average of ``EMAModel``.
    """
    folder, data = save.folder, save.data
    states = {state.path for state in save.sharded}
    in_root: dict[PurePosixPath, list[Component]] = {}
    for file in _models_of(folder):
        # One name for all shards of a model.
        entry = f"{file.name.stem}_{file.name.index}{file.name.suffix}"
        in_root.setdefault(file.path.with_name(entry), []).append(file)
    places = {file.path: where for where, files in in_root.items() for file in files}
    pieces: dict[PurePosixPath, list[Piece]] = {}
    for piece in save.weights:
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
        if not is_of_average(folder.root / where):
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
        # SGD without momentum has none: then the saves around it show whether it changes.
        may_be_trained = not moments or any(moments[shape] >= n for shape, n in own.items())
        if may_be_trained and (
            where in equal or _are_equal(folder.root, earlier, pieces[where], data=data)
        ):
            yield _Part(pieces[where][0].path, own, pieces[where])


def _models_of(folder: CheckpointFolder) -> list[Component]:
    return [file for file in folder.components if file.role in NOT_STATES]


def _old_optimizers(save: _Save, of: _Compared, other: AnyPath) -> Iterator[PurePosixPath]:
    """Yield the optimizers whose bytes are those of another save, in ``other``, though weights that
    they alone train differ, or their step went back.

    A step of an optimizer with states changes these. Which weights it trains, a file of torch does
    not say: those of a shape of which it alone has moments, as many as there are weights. Averages
    and buffers have none, so that a shape of theirs shows nothing. An optimizer without states may
    train the weights of another, as where a script goes on with plain SGD.
    """
    folder, weights, data = save.folder, save.weights, save.data
    own = {path: list(pieces) for path, pieces in groupby(save.optimizers, key=attrgetter("path"))}
    if any(piece.path.parent.parts for piece in weights):
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
    for optimizer in [optimizer for optimizer in saved if optimizer.path in equal]:
        path = optimizer.path
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
        else:
            shapes = {shape for shape, owners in moments.items() if path in owners}
            if shapes <= of_all.keys() and _went_back(save, optimizer, of, other):
                yield path


def _went_back(save: _Save, optimizer: SavedOptimizer, of: _Compared, other: AnyPath) -> bool:
    """Return whether an optimizer with the bytes of a save further away, in ``other``, counts other
    steps than the save next to it: fewer than the one before, or more than the one after.

    A script that sets a model back to that save has its weights, too, which differ in the save
    between the two. Rows of a table that no batch used have equal moments in all.
    """
    root, is_before = save.folder.root, of.save.is_before
    near = save.neighbours.before() if is_before else save.neighbours.after()
    if near is None or of.files is None or optimizer.path not in of.files:
        return False
    if not any(save.data or not is_table(shape) for shape in moved_shapes(root, optimizer)):
        return False
    samples = samples_of(save.weights) or ()
    with suppress(CkptfixError, OSError), near.opened() as between:
        there = saved_optimizers(near.scan(Role.OPTIMIZER, root=between), ())
        steps = steps_of(root, optimizer)
        steps_there = max(
            (steps_of(between, nearby) for nearby in there if nearby.path == optimizer.path),
            default=0,
        )
        # One without a count of steps has 0.
        fewer, more = (steps, steps_there) if is_before else (steps_there, steps)
        if not 0 < fewer < more or are_equal(root, other, samples):
            return False
        return not any(
            are_equal(root, other, (sample,)) and not are_equal(root, between, (sample,))
            for sample in samples
        )
    return False


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
    save: _Save,
    of: _Compared,
    root: AnyPath,
    *,
    same_weights: bool,
    same_optimizers: bool,
    parts: Sequence[_Part] = (),
) -> Iterator[StaleSave]:
    """Yield the finding about weights or optimizers that equal those of an earlier checkpoint, or
    those about parts with equal bytes.

    ``root``: the folder of the earlier checkpoint.
    """
    folder, sharded, neighbours, weights, optimizers, data = save
    before = of.save
    earlier = before.scan(*_READ, root=root)
    now, then = progress_of(folder, sharded), progress_of(earlier, scan_dcp_folders(earlier))
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
        is_copy = same_weights and (same_optimizers or has_no_optimizer) and are_equal_counters
        if is_copy and of.files is None:
            yield CopiedSave(path=path, save=before.name, state=state, sampled=is_sampled)
        if same_optimizers and not same_weights and then.own_steps == now.own_steps:
            yield from _without_counters(save, of, root, path, then.own_steps, sampled=is_sampled)
    if not moved:
        return
    steps = now.counters[moved] - then.counters[moved]
    if not moved.startswith(OWN_STEP) and now.may_have_skipped(steps, then):
        return
    of_current = saved_optimizers(folder, sharded)
    shapes = chain.from_iterable(moved_shapes(folder.root, optimizer) for optimizer in of_current)
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
    # Values that changed in the checkpoint between the two had a rate.
    if 0 in rates and (of.files is None or not any(rates)):
        return
    rate = min(rates) if len(rates) == len(shown) else None
    pair = (before.name, neighbours.home.name)
    owner = _owner(now, then, moved, neighbours, pair) if same_optimizers else None
    if owner is _Owner.LATER:
        return
    is_by_schedule = may_be_same and moved.startswith(MOVES)
    is_sure = (
        rate is not None
        and (
            same_optimizers or of.files is not None or must_change(rate, dtypes_in(folder, sharded))
        )
        and (bool(own) or not is_by_schedule)
    )
    is_of_trainer = folder.has_file(TRAINER_STATE)
    # The script may have skipped all steps: then the next save shows that the schedule went ahead.
    is_known = owner is _Owner.EARLIER and neighbours.after() is not None
    may_be_skipped = is_by_schedule and not (is_of_trainer or is_known)
    may_be_restored = of.files is not None and not (same_optimizers or is_of_trainer)
    kind: type[StaleSave] = StaleSave if is_sure else DoubtfulSave
    if is_sure and (may_be_skipped or (may_be_restored and not parts)):
        kind = PerhapsRestored
    finding = kind(
        path=path,
        is_undecided=owner is None,
        save=before.name,
        between=of.next_to_it,
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
    stale: dict[type[OldShard], list[PurePosixPath]] = {}
    has_moments = any(optimizer.tensors for optimizer in saved)
    for part in parts:
        may_rest = same_weights and not has_moments
        # Of a shard nothing else shows whether it was trained.
        if may_rest and not part.pieces:
            continue
        if same_weights and has_moments and not _is_trained(part, folder, saved, root, of_earlier):
            continue
        is_changing = of.files is not None or not part.pieces or _is_changing(part, save)
        if is_changing or (is_changing is None and not may_rest):
            kind = OldShard if is_sure and is_changing and not may_rest else DoubtfulShard
            if part.weights and not part.pieces:
                stale.setdefault(kind, []).append(part.path)
            elif is_sure and may_be_restored:
                yield as_kind(PerhapsRestored, replace(finding, path=part.path))
            else:
                yield as_kind(kind, replace(finding, path=part.path))
    for kind, (shard, *more) in stale.items():
        yield as_kind(kind, replace(finding, path=shard, more=tuple(map(str, more))))


def _without_counters(
    save: _Save,
    of: _Compared,
    root: AnyPath,
    path: PurePosixPath,
    steps: Sequence[float],
    *,
    sampled: bool,
) -> Iterator[StaleSave]:
    """Yield that all optimizers are those of an earlier checkpoint where no counter moved, as with
    its schedulers, too: the weights that they train differ.

    A script may change these once more without a step, as by an average at its end: only a step
    that goes back, or does not fit the number of a checkpoint between others, is a warning.
    """
    if not any(_old_optimizers(save, of, root)):
        return
    pair = of.save.name, save.neighbours.home.name
    owner = _owner_by_number(steps[0], save.neighbours, pair) if steps else None
    if owner is _Owner.LATER:
        return
    begin, _ = map(_number_of, pair)
    is_sure = owner is _Owner.EARLIER and (
        of.files is not None or steps[0] == begin or save.neighbours.after() is not None
    )
    yield (StaleSave if is_sure else DoubtfulSave)(
        path=path,
        is_undecided=owner is None,
        save=of.save.name,
        between=of.next_to_it,
        state="optimizer state",
        sampled=sampled,
        more=tuple(sorted({str(piece.path) for piece in save.optimizers} - {str(path)})),
    )


def _is_changing(part: _Part, save: _Save) -> bool | None:
    """Return whether a model differs from that of the save before the earlier one, or after this
    one: a frozen one is equal in all. None without such saves.
    """
    neighbours, before = save.neighbours, save.neighbours.before()
    assert before is not None
    first = neighbours.siblings.of(neighbours.home.parent / before.name).before()
    answers: list[bool] = []
    for other in filter(None, (first, neighbours.after())):
        with suppress(CkptfixError, OSError), other.opened() as root:
            answers.append(not _are_equal(save.folder.root, root, part.pieces, data=save.data))
    return any(answers) if answers else None


def _of_its_step(
    save: _Save, later: _Compared, root: AnyPath, paths: Sequence[PurePosixPath]
) -> Iterator[LaterState]:
    """Yield that optimizers of a checkpoint, at these paths, are those of a later one, in ``root``,
    by their step.
    """
    folder, sharded, neighbours, weights, _, data = save
    after = later.save
    there = after.scan(*_READ, root=root)
    now, then = progress_of(there, scan_dcp_folders(there)), progress_of(folder, sharded)
    same = bool(weights) and _are_equal(folder.root, root, weights, data=data)
    moved = now.moved_since(then, may_be_same=same)
    pair = (neighbours.home.name, after.name)
    if moved:
        owner = _owner(now, then, moved, neighbours, pair)
        begin, end = then.counters[moved], now.counters[moved]
    elif (
        then.own_steps
        and then.own_steps == now.own_steps
        and any(_old_optimizers(save, later, root))
    ):
        # The schedulers are of the later checkpoint, too, or there are none.
        owner = _owner_by_number(then.own_steps[0], neighbours, pair)
        begin, end = map(_number_of, pair)
    else:
        return
    for path in paths if owner is _Owner.LATER else ():
        yield LaterState(
            path=path,
            save=after.name,
            state="optimizer state",
            counter=moved or "the number in the name",
            begin=begin,
            end=end,
            step=then.own_steps[0],
            sampled=not data and store_of(root) is None,
        )


def _number_of(name: str) -> int:
    _, number = split_number(name) or ("", 0)
    return number


class _Owner(Enum):
    """The one of two checkpoints with equal optimizers to which these belong."""

    EARLIER = "earlier"
    LATER = "later"


def _owner(
    now: Progress,
    then: Progress,
    moved: str,
    neighbours: Neighbours,
    pair: tuple[str, str],
) -> _Owner | None:
    """Return which of two checkpoints with equal optimizers these belong to, None where nothing
    decides.

    Their step fits one value of the counter that moved: by the saves on either side, of which
    ``pair`` are none, or without any where it is equal to one of the two values.
    """
    names = [name for name in then.counters if name.startswith(OWN_STEP)]
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
            counters = progress_of(there, scan_dcp_folders(there)).counters
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


def _owner_by_number(step: float, neighbours: Neighbours, pair: tuple[str, str]) -> _Owner | None:
    """Return which of two checkpoints a step of an optimizer belongs to by the numbers in their
    names, None where nothing decides.

    The numbers count steps, or saves after as many steps each, from 0 or 1. ``pair``: the earlier
    and the later one.
    """
    begin, end = map(_number_of, pair)
    points: dict[float, float] = {}
    # Two on either side: one of them may be of the pair.
    sides = (side[:2] for side in neighbours.saves())
    for near in (save for side in sides for save in side if save.name not in pair):
        with suppress(CkptfixError, OSError), near.opened() as root:
            there = near.scan(*_READ, root=root)
            steps = progress_of(there, scan_dcp_folders(there)).own_steps
            points |= {steps[0]: _number_of(near.name)} if steps else {}
    # An optimizer that three saves hold alike waits, or they are copies.
    if step in points:
        return None
    if not points:
        return _Owner.EARLIER if step == begin else _Owner.LATER if step == end else None
    (first, number), *more = points.items()
    slopes = [number / first, (number + 1) / first]
    if more:
        ((second, number_there), *_) = more
        slopes = [(number_there - number) / (second - first)]
    tolerance = (end - begin) / 4
    owners: set[_Owner | None] = set()
    for slope in filter(None, slopes):
        expected = number + (step - first) * slope
        is_later = expected >= end - tolerance
        owner = _Owner.LATER if is_later else None
        owners.add(_Owner.EARLIER if expected <= begin + tolerance else owner)
    return owners.pop() if len(owners) == 1 else None
