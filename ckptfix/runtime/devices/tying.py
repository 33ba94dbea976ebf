"""Accelerate's table of tied weights, cleared of addresses that no tied weight has any more.

``dispatch_model`` notes the address of each tied weight, moves the weight, and keeps the note. Once the old memory is
freed, a weight that is read from disk may come to lie at that very address, and is then replaced by the tied weight:
6 of 20 trials with accelerate 1.15.0, without an error where the shapes agree.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def forget_freed_weights(model: nn.Module) -> None:
    """Drop the addresses of tied weights that are not held in memory; call it right after a dispatch.

    Tied weights offloaded to the disk are then read once for each use, where accelerate shares them if two of them
    are on the device at a time. Those offloaded to the host keep their entries: their memory lives.
    """
    hooks = [hook for module in model.modules() for hook in _flat(getattr(module, "_hf_hook", None))]
    live = {
        tensor.data_ptr()
        for state in {id(state): state for hook in hooks for state in _states(hook)}.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    }
    for hook in hooks:
        tied = getattr(hook, "tied_params_map", None) or {}
        for address in set(tied) - live:
            del tied[address]
        # Names whose addresses accelerate would note anew at every read.
        getattr(hook, "tied_params_names", set()).clear()


def _flat(hook: Any) -> Iterator[Any]:
    if hook is not None:
        yield hook
        for inner in getattr(hook, "hooks", ()):
            yield from _flat(inner)


def _states(hook: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the offloaded weights of a hook that are held in memory, by name."""
    weights = getattr(hook, "weights_map", None)
    weights = getattr(weights, "dataset", weights)
    state = getattr(weights, "state_dict", weights)
    if isinstance(state, Mapping):
        yield state
