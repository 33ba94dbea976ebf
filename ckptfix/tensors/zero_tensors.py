"""Tensors of DeepSpeed, put together from the partitions of all ranks."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

from ckptfix.checkpoint.deepspeed_files import AGAIN
from ckptfix.errors import OperationError
from ckptfix.storage.files import AnyPath
from ckptfix.storage.reading import Piece
from ckptfix.tensors.optimizers import Strategy
from ckptfix.tensors.stored import Contiguous, StoredTensor
from ckptfix.tensors.zero_partitions import Flat, ModelStates, OptimizerStates, Shapes
from ckptfix.tensors.zero_shares import STAGES, partition_size, share_size


class _Run:
    """Flat tensors of one dtype, end to end. Offsets count elements."""

    def __init__(self, flats: Sequence[Flat]) -> None:
        self._flats = flats
        self._starts = [0, *accumulate(flat.numel for flat in flats)]
        self.dtype = _dtype(flats)

    @property
    def numel(self) -> int:
        """All elements."""
        return self._starts[-1]

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield where these elements are."""
        number = bisect_right(self._starts, begin) - 1
        while begin < end:
            flat, start = self._flats[number], self._starts[number]
            stop = min(end, self._starts[number + 1])
            if begin < stop:
                path, offset, _ = flat.piece
                yield Piece(
                    path, offset + (begin - start) * flat.width, (stop - begin) * flat.width
                )
                begin = stop
            number += 1


def _dtype(flats: Sequence[Flat]) -> str:
    """Return the dtype that all have. Raises OperationError when they differ."""
    dtypes = sorted({flat.dtype for flat in flats})
    if len(dtypes) > 1:
        raise OperationError(
            f"{flats[0].piece.path.parent}: its partitions have several dtypes "
            f"({', '.join(dtypes)}); "
            f"{AGAIN}"
        )
    return dtypes[0] if dtypes else "F32"


def from_groups(
    model: ModelStates, optimizers: Sequence[OptimizerStates]
) -> dict[str, StoredTensor]:
    """Return the trained parameters of ZeRO-1 and 2, in fp32.

    Raises OperationError when the partitions do not have the elements that the shapes need.
    """
    groups = model.groups or ()
    for one in optimizers:
        if len(one.flats) != len(groups):
            raise OperationError(
                f"{one.path}: it has partitions of {len(one.flats)} parameter groups, but "
                f"{model.path.name} has {len(groups)}; {AGAIN}"
            )
    found: dict[str, StoredTensor] = {}
    for number, shapes in enumerate(groups):
        flats = [one.flats[number] for one in optimizers]
        found |= cut_group(
            shapes, flats, f"{model.path.parent}: the partitions of parameter group {number}"
        )
    return found


def cut_group(
    shapes: Shapes, flats: Sequence[Flat], partitions: str, state: str = ""
) -> dict[str, StoredTensor]:
    """Return what ZeRO-1 or 2 keeps for the parameters of a group: their partitions end to end,
    rank after rank.

    ``partitions``: these, in messages. ``state``: the state of theirs that it is, "" for the
    parameters. Raises OperationError when there are fewer or more elements than the shapes need.
    """
    run = _Run(flats)
    wanted = sum(prod(shape) for shape in shapes.values())
    # Both are padded, or not at all.
    ranks = len(flats)
    if wanted > run.numel or partition_size(wanted, ranks) != partition_size(run.numel, ranks):
        raise OperationError(
            f"{partitions} have {run.numel} elements, but its {len(shapes)} parameters take "
            f"{wanted}; {AGAIN}"
        )
    found: dict[str, StoredTensor] = {}
    offset = 0
    for name, shape in shapes.items():
        end = offset + prod(shape)
        layout = Contiguous(tuple(run.pieces(offset, end)))
        found[name] = StoredTensor(state_fqn(name, state), run.dtype, shape, layout)
        offset = end
    return found


def state_fqn(name: str, state: str) -> str:
    """Return the name of a state of a parameter in messages: the parameter's own where ``state`` is
    "".
    """
    return f"{name}.{state}" if state else name


def from_shares(
    models: Sequence[ModelStates], optimizers: Sequence[OptimizerStates]
) -> dict[str, StoredTensor]:
    """Return the parameters of ZeRO-3: the trained ones in fp32, and the frozen ones as they are.

    Raises OperationError when the partitions do not have the elements that the shapes need.
    """
    groups = models[0].groups or ()
    shapes = {name: shape for group in groups for name, shape in group.items()}
    found = cut_shares(shapes, [(one.path, one.flats) for one in optimizers]) | frozen_shares(
        models
    )
    # The sum is right also where the partitions of two sub-groups are exchanged: each then goes to
    # other parameters.
    wanted = [STAGES[Strategy.ZERO3].size(group, len(optimizers)) for group in groups]
    for one in optimizers:
        sizes = [flat.numel for flat in one.flats]
        if len(sizes) == len(wanted) and sizes != wanted:
            number = next(number for number, size in enumerate(sizes) if size != wanted[number])
            raise OperationError(
                f"{one.path}: the partition of sub-group {number} has {sizes[number]} elements, "
                f"but the shares of its {len(groups[number])} parameters take {wanted[number]}; "
                f"{AGAIN}"
            )
    return found


def frozen_shares(models: Sequence[ModelStates]) -> dict[str, StoredTensor]:
    """Return the frozen parameters of ZeRO-3, of which every rank has a share in its model states.

    Raises OperationError when a rank has not the elements that the shapes need.
    """
    ranks = len(models)
    found: dict[str, StoredTensor] = {}
    for name, shape in models[0].frozen.items():
        fragments = [one.fragments.get(name) for one in models]
        share = share_size(shape, ranks)
        for states, fragment in zip(models, fragments, strict=True):
            have = fragment.numel if fragment is not None else 0
            if have != share:
                raise OperationError(
                    f"{states.path}: it has {have} of the {share} elements in its share of "
                    f"{name!r}; {AGAIN}"
                )
        flats = [one for one in fragments if one is not None]
        _dtype(flats)
        found[name] = _gathered(name, shape, [_Run([one]) for one in flats], 0)
    return found


def cut_shares(
    shapes: Shapes, ranks: Sequence[tuple[AnyPath, Sequence[Flat]]], state: str = ""
) -> dict[str, StoredTensor]:
    """Return what ZeRO-3 keeps for parameters, of which every rank has a share. ``ranks``: each
    one's file and flats.

    ``state``: as for ``cut_group``. Raises OperationError when a rank has not the elements that the
    shapes need.
    """
    runs = [_Run(flats) for _, flats in ranks]
    _dtype([flat for _, flats in ranks for flat in flats])
    wanted = STAGES[Strategy.ZERO3].size(shapes, len(ranks))
    for run, (path, _) in zip(runs, ranks, strict=True):
        if run.numel != wanted:
            raise OperationError(
                f"{path}: its partitions have {run.numel} elements, but the shares of "
                f"{len(shapes)} parameters take {wanted}; {AGAIN}"
            )
    found: dict[str, StoredTensor] = {}
    offset = 0
    for name, shape in shapes.items():
        found[name] = _gathered(state_fqn(name, state), shape, runs, offset)
        offset += share_size(shape, len(ranks))
    return found


def _gathered(name: str, shape: tuple[int, ...], runs: Sequence[_Run], offset: int) -> StoredTensor:
    """Return a parameter whose share begins at ``offset`` of every rank's run."""
    pieces: list[Piece] = []
    for rank, run in enumerate(runs):
        # The last shares can be shorter, or of nothing but padding.
        (span,) = STAGES[Strategy.ZERO3].spans({name: shape}, rank, len(runs))
        pieces += run.pieces(offset, offset + span.last - span.first)
    return StoredTensor(name, runs[0].dtype, shape, Contiguous(tuple(pieces)))
