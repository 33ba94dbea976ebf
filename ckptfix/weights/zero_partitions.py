"""Where ZeRO puts the elements of each parameter: in flat partitions, one or more for each rank.

Rules from DeepSpeed 0.18, ``utils/zero_to_fp32.py``. ZeRO-1 and 2 lay the parameters of a group end to end, pad that
and cut it into one partition a rank; the padding of the last rank is not saved. ZeRO-3 cuts each parameter by itself,
so that rank r has elements ``r * share`` to ``(r + 1) * share``, with ``share = ceil(n / ranks)``; a rank lays its
shares end to end, over one flat partition for each sub-group.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

from ckptfix.errors import OperationError
from ckptfix.storage.pieces import Piece
from ckptfix.weights.deepspeed_files import AGAIN
from ckptfix.weights.layouts import Contiguous
from ckptfix.weights.stored import StoredTensor
from ckptfix.weights.zero_states import Flat, ModelStates, OptimizerStates


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
                yield Piece(path, offset + (begin - start) * flat.width, (stop - begin) * flat.width)
                begin = stop
            number += 1


def _dtype(flats: Sequence[Flat]) -> str:
    """Return the dtype that all have. Raises OperationError when they differ."""
    dtypes = sorted({flat.dtype for flat in flats})
    if len(dtypes) > 1:
        raise OperationError(
            f"{flats[0].piece.path.parent}: partitions of several dtypes ({', '.join(dtypes)}); {AGAIN}"
        )
    return dtypes[0] if dtypes else "F32"


def from_groups(model: ModelStates, optimizers: Sequence[OptimizerStates]) -> dict[str, StoredTensor]:
    """Return the trained parameters of ZeRO-1 and 2, in fp32.

    Raises OperationError when the partitions do not have the elements that the shapes need.
    """
    groups = model.groups or ()
    for one in optimizers:
        if len(one.flats) != len(groups):
            raise OperationError(
                f"{one.path}: partitions of {len(one.flats)} parameter groups, {model.path.name} has {len(groups)}; "
                f"{AGAIN}"
            )
    found: dict[str, StoredTensor] = {}
    for number, shapes in enumerate(groups):
        run = _Run([one.flats[number] for one in optimizers])
        wanted = sum(prod(shape) for shape in shapes.values())
        step = 2 * len(optimizers)  # both are padded to a multiple of this, or not at all
        if wanted > run.numel or -(-wanted // step) != -(-run.numel // step):
            raise OperationError(
                f"{model.path.parent}: the partitions of parameter group {number} have {run.numel} elements, its "
                f"{len(shapes)} parameters take {wanted}; {AGAIN}"
            )
        offset = 0
        for name, shape in shapes.items():
            end = offset + prod(shape)
            found[name] = StoredTensor(name, run.dtype, shape, Contiguous(tuple(run.pieces(offset, end))))
            offset = end
    return found


def from_shares(
    models: Sequence[ModelStates], optimizers: Sequence[OptimizerStates]
) -> dict[str, StoredTensor]:
    """Return the parameters of ZeRO-3: the trained ones in fp32, and the frozen ones as they are.

    Raises OperationError when the partitions do not have the elements that the shapes need.
    """
    ranks = len(optimizers)
    shapes = {name: shape for group in models[0].groups or () for name, shape in group.items()}
    runs = [_Run(one.flats) for one in optimizers]
    _dtype([flat for one in optimizers for flat in one.flats])
    wanted = sum(-(-prod(shape) // ranks) for shape in shapes.values())
    for run, one in zip(runs, optimizers, strict=True):
        if run.numel != wanted:
            raise OperationError(
                f"{one.path}: partitions of {run.numel} elements, the shares of {len(shapes)} parameters take "
                f"{wanted}; {AGAIN}"
            )
    found: dict[str, StoredTensor] = {}
    offset = 0
    for name, shape in shapes.items():
        found[name] = _gathered(name, shape, runs, offset)
        offset += -(-prod(shape) // ranks)
    for name, shape in models[0].frozen.items():
        fragments = [one.fragments.get(name) for one in models]
        share = -(-prod(shape) // ranks)
        for states, fragment in zip(models, fragments, strict=True):
            have = fragment.numel if fragment is not None else 0
            if have != share:
                raise OperationError(
                    f"{states.path}: {have} of the {share} elements that its share of {name!r} has; {AGAIN}"
                )
        flats = [one for one in fragments if one is not None]
        _dtype(flats)
        found[name] = _gathered(name, shape, [_Run([one]) for one in flats], 0)
    return found


def _gathered(name: str, shape: tuple[int, ...], runs: Sequence[_Run], offset: int) -> StoredTensor:
    """Return a parameter whose share begins at ``offset`` of every rank's run."""
    numel = prod(shape)
    share = -(-numel // len(runs))
    pieces: list[Piece] = []
    for rank, run in enumerate(runs):
        take = min(share, numel - rank * share)  # the last shares can be shorter, or of nothing but padding
        pieces += run.pieces(offset, offset + max(take, 0))
    return StoredTensor(name, runs[0].dtype, shape, Contiguous(tuple(pieces)))
