"""New files of optimizers as PyTorch's DDP and FSDP load them: by number, by fqn, and as a DCP
folder.

The state dicts are those of torch 2.13 (``torch/optim/optimizer.py``, ``state_dict``;
``torch/distributed/checkpoint/state_dict.py``, ``get_optimizer_state_dict``), in the files of
accelerate 1.15 (``checkpointing.py``, ``utils/fsdp_utils.py``). DDP numbers the parameters through
the groups, in their order. FSDP names them; in a DCP folder every tensor of a state is an item, and
so is every hyperparameter of every group.
"""

import struct
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from ckptfix.errors import UnsupportedFormat
from ckptfix.tensors.joined import Inline
from ckptfix.tensors.new_dcp import StatePath, dcp_state_files
from ckptfix.tensors.new_files import NewStates, NewTensor
from ckptfix.tensors.new_torch_files import torch_file, with_new_tensors
from ckptfix.tensors.optimizers import BY_TORCH, STEP, OptimizerState, StateValue
from ckptfix.tensors.stored import StoredTensor

_OPTIMIZER, _STATE, _GROUPS, _PARAMS = "optimizer", "state", "param_groups", "params"


def ddp_optimizer(path: PurePosixPath, state: OptimizerState) -> NewStates:
    """Return ``optimizer.bin`` as DDP saves it: parameters are numbered through the groups.

    Raises UnsupportedFormat for a dtype that torch.save has no tensors of, or a pickle that is too
    long.
    """
    new = _New(state)
    names = (name for group in state.groups for name in group.names)
    number = {name: count for count, name in enumerate(names)}
    document = {
        _STATE: {number[name]: new.states[name] for name in number if name in new.states},
        _GROUPS: [
            {**options, _PARAMS: [number[name] for name in group.names]}
            for group, options in zip(state.groups, new.groups, strict=True)
        ],
    }
    return NewStates((torch_file(path, document),), new.sources)


def fsdp_full_optimizer(path: PurePosixPath, state: OptimizerState) -> NewStates:
    """Return ``optimizer.bin`` as FSDP saves it with FULL_STATE_DICT: parameters have their fqns.
    Raises as above.
    """
    new = _New(state)
    document = {
        _STATE: new.states,
        _GROUPS: [
            {**options, _PARAMS: list(group.names)}
            for group, options in zip(state.groups, new.groups, strict=True)
        ],
    }
    return NewStates((torch_file(path, document),), new.sources)


def dcp_optimizer(folder: PurePosixPath, state: OptimizerState) -> NewStates:
    """Return ``optimizer_0/`` as FSDP saves it with SHARDED_STATE_DICT. Raises as above."""
    new = _New(state)
    flat: dict[StatePath, Any] = {}
    for name, values in new.states.items():
        _flatten((_OPTIMIZER, _STATE, name), values, flat)
    for number, (group, options) in enumerate(zip(state.groups, new.groups, strict=True)):
        _flatten((_OPTIMIZER, _GROUPS, number), {**options, _PARAMS: list(group.names)}, flat)
    tensors = {path: value for path, value in flat.items() if isinstance(value, NewTensor)}
    files = dcp_state_files(
        folder,
        list(tensors.values()),
        {path: tensor.fqn for path, tensor in tensors.items()},
        values={path: value for path, value in flat.items() if path not in tensors},
    )
    return NewStates(files, new.sources)


def _flatten(path: StatePath, value: Any, flat: dict[StatePath, Any]) -> None:
    """Add the items that DCP cuts a value into, as ``torch/distributed/checkpoint/_traverse.py``
    does.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten((*path, str(key)), inner, flat)
    elif isinstance(value, list) and any(isinstance(one, NewTensor | Mapping) for one in value):
        for number, inner in enumerate(value):
            _flatten((*path, number), inner, flat)
    elif type(value) is tuple and _has_tensor(value):
        raise UnsupportedFormat(
            f"{'.'.join(map(str, path))}: a DCP folder cannot store tensors in a tuple; next: "
            "migrate to ddp or fsdp-full"
        )
    else:
        flat[path] = value


def _has_tensor(value: Any) -> bool:
    return isinstance(value, NewTensor) or (type(value) is tuple and any(map(_has_tensor, value)))


class _New:
    """The states and hyperparameters of an optimizer with ``NewTensor`` for tensors, and where
    their bytes lie.
    """

    def __init__(self, state: OptimizerState) -> None:
        self.sources: dict[str, StoredTensor] = {}
        self._is_of_torch = state.strategy in BY_TORCH
        names = dict.fromkeys(name for group in state.groups for name in group.names)
        self.states = {
            name: {
                key: self._value(key, value, f"{name}/{key}")
                for key, value in state.states[name].items()
            }
            for name in names
            if name in state.states
        }
        self.groups = [
            with_new_tensors(group.options, f"{_GROUPS}/{number}", self.sources)
            for number, group in enumerate(state.groups)
        ]

    def _value(self, key: str, value: StateValue, name: str) -> Any:
        """Return a state. DeepSpeed's own optimizers count steps in an int, PyTorch's in a
        tensor.
        """
        if key == STEP and isinstance(value, int | float) and not self._is_of_torch:
            value = StoredTensor(key, "F32", (), Inline(struct.pack("<f", value)))
        return with_new_tensors(value, name, self.sources)
