"""Steps that optimizers made, by the values in them and by the files next to them: counts in a low
precision, and optimizers without a single moment in runs that made steps.

Measured with torch 2.13: ``load_state_dict`` keeps the dtype of ``step``, unless a param group is
``fused`` or ``capturable``. In bf16 256 + 1 is 256 again, and in fp16 2048 + 1 is 2048. Where a DCP
folder is loaded, the step is copied into that of the new optimizer, which has fp32.

All optimizers but SGD without momentum make states in their first step, and never drop them. A save
before the first step has none, as has one after steps that fp16 skipped. The Trainer moves its
scheduler with each step that is not skipped. A script may move a scheduler by itself, so that this
is a sign and no proof. An earlier checkpoint with moments shows that the optimizer made steps,
unless the script began another one since then.
"""

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import PurePosixPath
from typing import Any

from ckptfix.checkpoint.dcp import scan_dcp_folders
from ckptfix.checkpoint.filenames import TRAINER_STATE
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.neighbours import Neighbours
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.inconsistent import (
    EmptyOptimizer,
    LostMoments,
    RoundedSteps,
    RoundedStepsSoFar,
)
from ckptfix.diagnosis.optimizer_kinds import SCALARS, kind_of
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, saved_optimizers
from ckptfix.errors import CkptfixError
from ckptfix.formats.pickle_tree import child, is_dict_like
from ckptfix.formats.torch_file import TorchFile
from ckptfix.storage.files import AnyPath
from ckptfix.storage.reading import OpenFiles, Piece
from ckptfix.tensors.stored import Strided, Tiled
from ckptfix.wording import count_of

_STEP = "step"

_LAST_COUNTS = {"BF16": 256, "F16": 2048}
"""Dtype -> the first whole number to which it cannot add 1."""

_FORMATS = {"F64": "<d", "F32": "<f", "BF16": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}
"""Dtype of a step -> its form for ``struct``. The two bytes of bf16 are the upper ones of fp32."""

_MOST = 1 << 53
"""A larger number is not a step, and Python refuses to print the largest that a pickle can hold."""

_STEPS_READ = 16
"""Steps that are read of an optimizer: those of all parameters are nearly equal, and each is a
request to a store.
"""

_BEGINNING = 64
"""Bytes of a moment: less than any sample of its weight."""

FEW_STEPS = 20
"""Steps after which zeros may be untrained: a warm-up begins at a rate of 0, and fp16 skips about
16 steps.
"""

_RATES = ("lr", "initial_lr", "max_lr")
"""Options with a learning rate: now, at the beginning, and the highest one of a cycle."""


def diagnose_optimizer_values(case: Case) -> Iterator[RoundedSteps]:
    """Find counts of steps that do not count on."""
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


def _rounded_steps(saved: SavedOptimizer, values: "_Values") -> Iterator[RoundedSteps]:
    """Yield the finding about steps in a dtype that does not count on."""
    dtypes = {
        name: states[_STEP].dtype for name, states in saved.tensors.items() if _STEP in states
    }
    rounded = [name for name, dtype in dtypes.items() if dtype in _LAST_COUNTS]
    if not rounded:
        return
    dtype = dtypes[rounded[0]]
    steps, last = values.steps(), _LAST_COUNTS[dtype]
    is_read = not saved.values or any(map(_reads_step, saved.values))
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


def _reads_step(options: Mapping[str, object]) -> bool:
    """Return whether the updates of a class with these options depend on the step. Rprop only counts
    it; an unknown class may read it.
    """
    kind = kind_of(options)
    return kind.reads_step if kind is not None else "etas" not in options


def steps_of(root: AnyPath, saved: SavedOptimizer) -> int:
    """Return the steps that an optimizer made, 0 where it does not count them or they cannot be
    read.
    """
    with OpenFiles() as files, suppress(CkptfixError, OSError):
        return int(_Values(root, files, saved).steps())
    return 0


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
            if now.beginning(tensor, _BEGINNING) != then.beginning(before, _BEGINNING):
                return True
    return False


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
        data = self.beginning(tensor, 8)
        if tensor.dtype == "BF16":
            data = b"\0\0" + data
        if len(data) != struct.calcsize(_FORMATS[tensor.dtype]):
            return 0
        number: float = struct.unpack(_FORMATS[tensor.dtype], data)[0]
        return number if 0 <= number < _MOST else 0

    def beginning(self, tensor: Any, most: int) -> bytes:
        """Return the first bytes of a state, at most so many."""
        data = b""
        for path, offset, length in self._pieces(tensor):
            block = bytearray(min(length, most - len(data)))
            if block:
                self._files.fill(memoryview(block), path, offset)
                data += block
            if len(data) == most:
                break
        return data

    def _pieces(self, tensor: Any) -> Sequence[Piece]:
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


def diagnose_empty_optimizers(case: Case) -> Iterator[EmptyOptimizer]:
    """Yield the optimizers without states that made steps by the files next to them.

    The options of a DCP folder have no values there, so that only an earlier checkpoint shows that
    its optimizer keeps states.
    """
    if case.is_file:
        return
    optimizers, damaged, step = case.optimizers, case.damaged, case.step
    counts = Counter(saved.path for saved in optimizers)
    in_dcp = {state.path for state in case.sharded}
    empty = {
        saved.path: saved
        for saved in optimizers
        if saved.path not in damaged
        and counts[saved.path] == 1
        and (saved.path in in_dcp or _keeps_states(saved))
        and not _has_states(saved)
    }
    if not empty:
        return
    earlier = _with_states(empty, case.neighbours)
    moves = _moves(case.folder)
    for path, saved in empty.items():
        kind, evidence, parameters = EmptyOptimizer, "", len(set(saved.parameters))
        if path in earlier:
            name, trained = earlier[path]
            kind, evidence = LostMoments, f"the earlier {name} has them"
            parameters = parameters or len(trained.states)
        elif path in in_dcp:
            continue
        elif step and moves:
            kind, evidence = LostMoments, f"{TRAINER_STATE} is at step {step}"
        elif step:
            evidence = f"{TRAINER_STATE} is at step {step}"
        elif moves and len(optimizers) == 1:
            evidence = f"its scheduler took {count_of(moves, 'step')}"
        if evidence:
            yield kind(
                path=path,
                names=(),
                parameters=parameters,
                evidence=evidence,
                is_in_dcp=path in in_dcp,
            )


def _keeps_states(saved: SavedOptimizer) -> bool:
    """Return whether all param groups are of one of torch's optimizers that needs states after its
    first step.
    """
    kinds = [kind_of(options) for options in saved.values]
    return bool(saved.parameters) and all(
        kind is not None and kind.has_exact(options) and bool(kind.needed_with(options))
        for kind, options in zip(kinds, saved.values, strict=True)
    )


def _has_states(saved: SavedOptimizer) -> bool:
    """Return whether a parameter has a state, or the optimizer keeps states in a form of its own."""
    return saved.has_strangers or any(saved.states.values())


def _with_states(
    empty: Mapping[PurePosixPath, SavedOptimizer], neighbours: Neighbours
) -> dict[PurePosixPath, tuple[str, SavedOptimizer]]:
    """Return the earlier checkpoints in which the optimizers of these paths have states, by their
    names.
    """
    having: dict[PurePosixPath, tuple[str, SavedOptimizer]] = {}
    for neighbour in neighbours.spread():
        if not neighbour.is_earlier:
            continue
        # A run may delete it now.
        with suppress(CkptfixError, OSError), neighbour.opened() as root:
            there = neighbour.scan(Role.OPTIMIZER, root=root)
            for saved in saved_optimizers(there, scan_dcp_folders(there)):
                own = empty.get(saved.path)
                is_same = (
                    own is not None and saved.options == own.options and _sets(saved) == _sets(own)
                )
                if is_same and any(saved.states.values()):
                    having.setdefault(saved.path, (neighbour.name, saved))
    return having


def _sets(saved: SavedOptimizer) -> list[frozenset[str]]:
    """Return the parameters of each param group. DCP has no order of them in flattened keys."""
    return [frozenset(group) for group in saved.groups]


def _moves(folder: CheckpointFolder) -> int:
    """Return how often the only scheduler of a folder was moved, 0 where that is not known."""
    schedulers = [one for one in folder.components if one.role is Role.SCHEDULER]
    if len(schedulers) != 1 or not isinstance(schedulers[0].content, TorchFile):
        return 0
    state = schedulers[0].content.tree.root
    moves = child(state, "last_epoch") if is_dict_like(state) else None
    return moves if type(moves) is int and 0 < moves < _MOST else 0
