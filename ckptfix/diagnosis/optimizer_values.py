"""Values in optimizers that their headers do not show: counts of steps in a low precision, and
moments of zeros alone.

Measured with torch 2.13: ``load_state_dict`` keeps the dtype of ``step``, unless a param group is
``fused`` or ``capturable``. In bf16 256 + 1 is 256 again, and in fp16 2048 + 1 is 2048. Where a DCP
folder is loaded, the step is copied into that of the new optimizer, which has fp32.
"""

import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import Any

from ckptfix.checkpoint.load_inputs import SAMPLE, SAMPLED
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.inconsistent import (
    OptimizerFinding,
    RoundedSteps,
    RoundedStepsSoFar,
    ZeroMoments,
)
from ckptfix.diagnosis.optimizer_kinds import SCALARS, STATES, kind_of
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, Shape
from ckptfix.errors import CkptfixError
from ckptfix.storage.files import AnyPath
from ckptfix.storage.reading import OpenFiles, Piece
from ckptfix.tensors.stored import Strided, Tiled
from ckptfix.wording import human_size

_STEP = "step"

_LAST_COUNTS = {"BF16": 256, "F16": 2048}
"""Dtype -> the first whole number to which it cannot add 1."""

_FORMATS = {"F64": "<d", "F32": "<f", "BF16": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}
"""Dtype of a step -> its form for ``struct``. The two bytes of bf16 are the upper ones of fp32."""

_MOST = 1 << 53
"""A larger number is not a step."""

_BLOCK = 1 << 16

_STEPS_READ = 16
"""Steps that are read of an optimizer: those of all parameters are nearly equal, and each is a
request to a store.
"""

_FIRST_STEPS = 10
"""Steps after which moments may be zero: the first gradients of a new layer can be."""

_ENOUGH = 8
"""Parameters of which samples of all moments are zero by no accident. Textual inversion trains one
or two embeddings, in which only the rows of the words of its prompts have moments.
"""


def diagnose_optimizer_values(case: Case) -> Iterator[OptimizerFinding | str]:
    """Find counts of steps that do not count on, and optimizers that made steps and have moments of
    zeros alone; with ``data`` moments are read as a whole.
    """
    root = case.folder.root
    with OpenFiles() as files:
        for saved in case.every_optimizer:
            if saved.path in case.unreliable:
                continue
            values = _Values(root, files, saved)
            # Headers say where the bytes are: a folder that is written now may not have them any
            # more.
            with suppress(CkptfixError, OSError):
                yield from _rounded_steps(saved, values)
            with suppress(CkptfixError, OSError):
                yield from _judge_zeros(saved, values, data=case.data)


_BEGINNING = 64
"""Bytes of a moment: less than any sample of its weight."""

FEW_STEPS = 20
"""Steps after which zeros may be untrained: a warm-up begins at a rate of 0, and fp16 skips about
16 steps.
"""

_RATES = ("lr", "initial_lr", "max_lr")
"""Options with a learning rate: now, at the beginning, and the highest one of a cycle."""


def steps_of(root: AnyPath, saved: SavedOptimizer) -> int:
    """Return the steps that an optimizer made, 0 where it does not count them or they cannot be
    read.
    """
    with OpenFiles() as files, suppress(CkptfixError, OSError):
        return int(_Values(root, files, saved).steps())
    return 0


def made_no_step(root: AnyPath, saved: SavedOptimizer) -> bool:
    """Return whether an optimizer counts its steps, and made none. Reads one step of a healthy
    one.
    """
    tensors = [states[_STEP] for states in saved.tensors.values() if _STEP in states]
    if not tensors:
        return saved.step == 0
    with OpenFiles() as files, suppress(CkptfixError, OSError):
        values = _Values(root, files, saved)
        return all(
            not any(b"".join(values.blocks(tensor, 8))) for tensor in _spread(tensors, _STEPS_READ)
        )
    return False


def has_moved(
    root: AnyPath, saved: SavedOptimizer, other: AnyPath, earlier: SavedOptimizer, name: str
) -> bool:
    """Return whether the beginning of a moment of a parameter differs from that in an earlier save,
    in ``other``.
    """
    with OpenFiles() as files, suppress(CkptfixError, OSError):
        now, then = _Values(root, files, saved), _Values(other, files, earlier)
        for state, tensor in saved.tensors[name].items():
            before = earlier.tensors.get(name, {}).get(state)
            if before is None or state in SCALARS:
                continue
            if b"".join(now.blocks(tensor, _BEGINNING)) != b"".join(
                then.blocks(before, _BEGINNING)
            ):
                return True
    return False


def moved_shapes(root: AnyPath, saved: SavedOptimizer) -> Iterator[Shape]:
    """Yield the shapes of the parameters of an optimizer that have a moment with more than zeros at
    its beginning, of some of them.
    """
    with OpenFiles() as files, suppress(CkptfixError, OSError):
        values = _Values(root, files, saved)
        for states in _spread(list(saved.tensors.values()), SAMPLED // SAMPLE):
            moments = [tensor for state, tensor in states.items() if state not in SCALARS]
            if any(
                block.strip(b"\0") for one in moments for block in values.blocks(one, _BEGINNING)
            ):
                yield max((moment.shape for moment in moments), key=len)


def trained_steps(root: AnyPath, step: int | None, optimizers: Sequence[SavedOptimizer]) -> int:
    """Return the steps that may have changed weights: none where every learning rate of the run was
    0.

    ``step``: of the Trainer. A schedule that ended at 0 began elsewhere, as ``initial_lr`` or
    ``max_lr`` show.
    """
    groups = [values for saved in optimizers for values in saved.values]
    if groups and all(
        "lr" in values and all(values.get(rate, 0) == 0 for rate in _RATES) for values in groups
    ):
        return 0
    return max((step or 0, *(steps_of(root, saved) for saved in optimizers)))


class _Values:
    """Reads the states of one optimizer. Its methods raise CkptfixError and OSError where one
    cannot be read.
    """

    def __init__(self, root: AnyPath, files: OpenFiles, saved: SavedOptimizer) -> None:
        self._root = root
        self._files = files
        self._saved = saved

    def steps(self) -> float:
        """Return the largest of some steps."""
        tensors = [
            states[_STEP]
            for states in self._saved.tensors.values()
            if _STEP in states
            and states[_STEP].dtype in _FORMATS
            and prod(states[_STEP].shape) == 1
        ]
        return max((self._saved.step or 0, *map(self._number, _spread(tensors, _STEPS_READ))))

    def _number(self, tensor: Any) -> float:
        data = b"".join(self.blocks(tensor, 8))
        if tensor.dtype == "BF16":
            data = b"\0\0" + data
        if len(data) != struct.calcsize(_FORMATS[tensor.dtype]):
            return 0
        number: float = struct.unpack(_FORMATS[tensor.dtype], data)[0]
        return number if 0 <= number < _MOST else 0

    def size(self, tensor: Any) -> int:
        """Return the number of bytes of a state."""
        return sum(piece.length for piece in self.pieces(tensor))

    def blocks(self, tensor: Any, most: int = sys.maxsize, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes of a state, ``most`` of them from ``start``."""
        for path, offset, length in self.pieces(tensor):
            skipped = min(start, length)
            start -= skipped
            for begin in range(skipped, length, _BLOCK):
                block = bytearray(min(length - begin, _BLOCK, most))
                self._files.fill(memoryview(block), path, offset + begin)
                yield bytes(block)
                most -= len(block)
                if not most:
                    return

    def pieces(self, tensor: Any) -> Sequence[Piece]:
        """Return the pieces of files with the bytes of a state; of one that is not contiguous its
        storage.
        """
        assert self._saved.layout is not None
        layout = self._saved.layout(self._root, tensor)
        tiles = [tile.layout for tile in layout.tiles] if isinstance(layout, Tiled) else [layout]
        return [
            piece
            for tile in tiles
            for piece in (
                (tile.storage,) if isinstance(tile, Strided) else getattr(tile, "pieces", ())
            )
        ]


def _spread(items: Sequence[Any], most: int) -> Sequence[Any]:
    """Return some of the items, from all over them."""
    return items[:: -(-len(items) // most) or 1]


def _rounded_steps(saved: SavedOptimizer, values: _Values) -> Iterator[OptimizerFinding]:
    """Yield the finding about steps in a dtype that does not count on."""
    dtypes = {
        name: states[_STEP].dtype for name, states in saved.tensors.items() if _STEP in states
    }
    rounded = [name for name, dtype in dtypes.items() if dtype in _LAST_COUNTS]
    if not rounded:
        return
    dtype = dtypes[rounded[0]]
    steps, last = values.steps(), _LAST_COUNTS[dtype]
    present = STATES.intersection(state for states in saved.states.values() for state in states)
    kinds = [kind_of(options, present) for options in saved.values]
    is_read = not kinds or any(kind is None or _STEP in kind.single for kind in kinds)
    # The metadata of a DCP folder has no values of options.
    becomes_fp32 = not saved.values or all(
        options.get("fused") is True or options.get("capturable") is True
        for options in saved.values
    )
    if becomes_fp32:
        effect = "a load converts it to fp32 and continues from the rounded number"
    elif not is_read:
        effect = "its updates do not depend on it"
    elif steps < last:
        effect = f"a load keeps the dtype, and the count will stop at {last}"
    else:
        effect = (
            "a load keeps the dtype, so adding 1 changes nothing and the bias correction stays "
            "constant"
        )
    is_stuck = is_read and not becomes_fp32 and steps >= last
    yield (RoundedSteps if is_stuck else RoundedStepsSoFar)(
        path=saved.path,
        key=saved.key,
        parameters=len(rounded),
        dtype=dtype,
        steps=int(steps),
        last=last,
        effect=effect,
    )


def _judge_zeros(
    saved: SavedOptimizer, values: _Values, *, data: bool
) -> Iterator[ZeroMoments | str]:
    """Judge an optimizer whose moments are all zero. Reads one moment of a healthy one."""
    moments = [
        tensor
        for states in saved.tensors.values()
        for state, tensor in states.items()
        if state not in SCALARS and 0 not in tensor.shape
    ]
    read = moments if data else _spread(moments, SAMPLED // SAMPLE)
    for tensor in read:
        if any(
            block.strip(b"\0") for block in values.blocks(tensor, sys.maxsize if data else SAMPLE)
        ):
            return
    # Another value than a tensor may be a moment of a class that is not known here.
    are_known = all(
        state in SCALARS or state in saved.tensors.get(name, ())
        for name, states in saved.states.items()
        for state in states
    )
    steps = int(values.steps()) if moments and are_known else 0
    if steps <= _FIRST_STEPS:
        return
    long = [(tensor, size) for tensor in read if (size := values.size(tensor)) > SAMPLE]
    # The first rows of embeddings are often of words that no text uses: their middle and their end
    # are read, too.
    for tensor, size in () if data else long:
        for start in ((size - SAMPLE) // 2, size - SAMPLE):
            if any(block.strip(b"\0") for block in values.blocks(tensor, SAMPLE, start)):
                return
    is_sampled = not data and (bool(long) or len(read) < len(moments))
    if is_sampled and len(saved.tensors) < _ENOUGH:
        yield (
            f"{saved.path}: whether all its moments are zero, like the samples of "
            f"{human_size(SAMPLE)}; ckptfix check --data reads the rest"
        )
        return
    yield ZeroMoments(
        path=saved.path,
        key=saved.key,
        names=(),
        parameters=len(saved.tensors),
        steps=steps,
        sampled=is_sampled,
    )
