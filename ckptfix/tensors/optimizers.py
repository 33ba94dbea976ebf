"""Optimizer states by fqn, whatever strategy saved them: param groups, moments and fp32 masters.

PyTorch's DDP numbers parameters through the param groups (``optimizer.bin`` of Accelerate,
``optimizer.pt`` of the Trainer); FSDP names them, in one file or in a DCP folder; DeepSpeed's ZeRO
lays the moments of a group end to end and cuts that into a partition for each rank. A reader of
each turns its files into an ``OptimizerState``, and a writer of each turns an ``OptimizerState``
into files, so that any of them becomes any other.
"""

import struct
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import PurePosixPath
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.errors import OperationError
from ckptfix.storage.reading import OpenFiles, Piece
from ckptfix.tensors.joined import Zeros, joined
from ckptfix.tensors.stored import StoredTensor
from ckptfix.wording import Brief, count_of, list_names


class Strategy(Enum):
    """The strategy whose loader finds an optimizer. The value is the word of ``--to``, and for
    reports.
    """

    DDP = "ddp"
    FSDP = "fsdp"
    FSDP_FULL = "fsdp-full"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    UNIVERSAL = "universal"


STEP = "step"
"""The state that counts the steps of a parameter."""

COUNTS = frozenset((STEP, "mu_product", "eta", "mu"))
"""States of which torch's optimizers have one number for a parameter: the step, and those of NAdam
and ASGD.
"""

ZERO_AT_FIRST = frozenset(
    f"{STEP} exp_avg exp_avg_sq max_exp_avg_sq exp_inf square_avg momentum_buffer grad_avg "
    "acc_delta".split()
)
"""States that optimizers of torch begin with zeros, when a parameter gets its first gradient."""

BY_TORCH = (Strategy.DDP, Strategy.FSDP, Strategy.FSDP_FULL)
"""The strategies of PyTorch itself; DeepSpeed's keep fp32 masters, and steps of their own kind."""

StateValue = StoredTensor | int | float | bool | str | None
"""The value of one state of a parameter: a tensor where it lies, or what the pickle itself holds,
such as a step.
"""


class ParamGroup(Brief, Struct, frozen=True, kw_only=True):
    """One param group: its parameters in the optimizer's order, and its hyperparameters.

    ``options``: ``lr``, ``betas``, ``weight_decay`` and the others in their order, without
    ``params``: None, bool, int, float, str, tuples, lists and dicts of those; a tensor, such as a
    capturable ``lr``, is a ``StoredTensor``.
    """

    names: tuple[str, ...]
    options: Mapping[str, Any]


class OptimizerState(Brief, Struct, frozen=True, kw_only=True):
    """The state of one optimizer.

    ``label``: its name in messages, a file or a folder. ``index``: its position among the
    optimizers of the checkpoint. ``files``: relative to the checkpoint. ``is_named``: False where
    its names are still the numbers that PyTorch gives parameters, as text ("0", "1"), which
    ``named`` turns into fqns. ``states``: fqn -> state -> value, such as ``exp_avg``; a parameter
    that never had a gradient, or was frozen, is not in it. ``masters``: fqn -> fp32 copy of the
    parameter, where the strategy keeps one apart from the weights. ``shapes``: fqn -> shape, where
    the files say it. ``world_size``: number of processes, where the files say it. ``model``: the
    position of the model whose parameters it has, None where nothing says it. ``extra``: the other
    entries of its state dict, such as a loss scaler. ``unfit``: what the files of no other strategy
    can hold -> the reason in words, by the names that lead to it, with dots between: tensors in a
    dict or list, which ``states`` has under such a name, and values that are not read.
    ``checksums``: stretch of a file -> the CRC-32 that the file has for it.
    """

    label: str
    strategy: Strategy
    index: int = 0
    files: tuple[PurePosixPath, ...] = ()
    is_named: bool = True
    groups: tuple[ParamGroup, ...]
    states: Mapping[str, Mapping[str, StateValue]]
    masters: Mapping[str, StoredTensor] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    world_size: int | None = None
    model: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    unfit: Mapping[str, str] = field(default_factory=dict)
    checksums: Mapping[Piece, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The size of all moments and masters in bytes."""
        states = (value for state in self.states.values() for value in state.values())
        tensors = [
            *self.masters.values(),
            *(value for value in states if isinstance(value, StoredTensor)),
        ]
        return sum(tensor.nbytes for tensor in tensors)

    def named(self, names: Mapping[str, str]) -> "OptimizerState":
        """Return the same state under fqns. ``names``: number as text -> fqn, of every parameter in
        a param group.
        """
        return replace(
            self,
            is_named=True,
            groups=tuple(
                replace(group, names=tuple(names[name] for name in group.names))
                for group in self.groups
            ),
            states={names.get(name, name): state for name, state in self.states.items()},
            masters={names.get(name, name): tensor for name, tensor in self.masters.items()},
            shapes={names.get(name, name): shape for name, shape in self.shapes.items()},
        )

    def by_position(self) -> "OptimizerState":
        """Return a numbered state under the positions of its parameters, which torch's load goes
        by.

        A parameter in no param group keeps its number, and is told apart from the parameter of that
        position.
        """
        listed = (name for group in self.groups for name in group.names)
        positions = {name: str(position) for position, name in enumerate(listed)}
        taken = {*positions.values()}
        names = {name: f"{name} (in no param group)" for name in self.states if name in taken}
        return replace(self.named({**names, **positions}), is_named=False)

    def started(
        self, shapes: Mapping[str, tuple[int, ...]], frozen: Collection[str] = ()
    ) -> "OptimizerState":
        """Return the same optimizer with states for all its parameters: zeros, and step 0, for
        those without any.

        That is how torch starts them at their first gradient. FSDP and ZeRO expect every parameter
        to have states. ``shapes``: of the parameters. ``frozen``: those that never get a gradient,
        and no states. Raises OperationError for an optimizer that starts in another way.
        """
        first = next((states for states in self.states.values() if states), None)
        lacking = dict.fromkeys(self.lacking(frozen))
        if not lacking or first is None:
            return self
        moments = moments_of(self, shapes)
        started: dict[str, dict[str, StateValue]] = {}
        unknown: set[str] = set()
        for group in self.groups:
            # Groups can differ in their states: amsgrad adds max_exp_avg_sq to its own group.
            kind = next(filter(None, map(self.states.get, group.names)), first)
            for name in filter(lacking.__contains__, group.names):
                unknown |= kind.keys() - ZERO_AT_FIRST
                # The parameter of `kind` can have no dimension, as its moments then.
                started[name] = {
                    key: _zero(value, shapes.get(name, ()) if key in moments else None)
                    for key, value in kind.items()
                }
        if unknown:
            raise OperationError(
                f"{self.label}: {count_of(len(lacking), 'parameter')} without states "
                f"({list_names(lacking)}), and the initial value of {list_names(sorted(unknown))} "
                "is unknown; next: take a step in which every parameter gets a gradient and save "
                "again, or migrate to ddp"
            )
        return replace(self, states={**self.states, **started})

    def lacking(self, frozen: Collection[str] = ()) -> list[str]:
        """Return the parameters of its groups, but for the ``frozen`` ones, that have no states."""
        listed = (name for group in self.groups for name in group.names)
        return [name for name in listed if name not in frozen and not self.states.get(name)]


def moments_of(state: OptimizerState, shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Return the states that have a number for each element of a parameter; the others have one for
    all elements.

    ``shapes``: of the parameters. In a parameter of no dimension both look the same: the other
    parameters decide, else the names that torch gives.
    """
    found: dict[str, bool] = {}
    unclear: set[str] = set()
    for name, values in state.states.items():
        for key, value in values.items():
            shape = value.shape if isinstance(value, StoredTensor) else None
            if key != STEP and shape == shapes.get(name) == ():
                unclear.add(key)
            else:
                found[key] = found.get(key, False) or (key != STEP and bool(shape))
    return frozenset(
        {key for key, is_moment in found.items() if is_moment} | (unclear - found.keys() - COUNTS)
    )


def _zero(like: StateValue, shape: tuple[int, ...] | None) -> StateValue:
    """Return zeros in the place of a state of another parameter. ``shape``: None for that of the
    state.
    """
    if not isinstance(like, StoredTensor):
        return None if like is None else type(like)()
    zeros = like if shape is None else like._replace(shape=shape)
    return zeros._replace(layout=joined([Zeros(zeros.nbytes)]))


_NUMBERS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q", "F16": "<e"}


def number_in(tensor: StoredTensor, files: OpenFiles) -> float | int | bytes:
    """Return the number in a tensor of one element, such as a step; the bytes of any other.

    Raises ChangedError when its file has become shorter, OSError.
    """
    data = b"".join(map(bytes, tensor.blocks(files, memoryview(bytearray(1 << 16)))))
    form = _NUMBERS.get(tensor.dtype)
    if form is None or len(data) != struct.calcsize(form):
        return data
    number: float | int = struct.unpack(form, data)[0]
    return number
