"""The memory of FSDP1 by fqn, and what lets it gather full state dicts on the CPU.

FSDP1 lays the parameters of a wrapped module end to end into one flat parameter, and cuts that
among the ranks. With ``use_orig_params`` the optimizer has a view for each parameter, of the
elements that lie on its rank; without, it has the flat parameter alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle

LOWEST = float("-inf")


class Parameter(NamedTuple):
    """A parameter of a wrapped model. ``mine``: its elements on this rank; ``held``: where the flat
    parameter has them.

    ``owner``: the parameter that the optimizer knows. Without ``use_orig_params`` that is the flat
    one.
    """

    shape: torch.Size
    flat: torch.nn.Parameter
    owner: torch.nn.Parameter
    mine: slice
    held: slice

    def _values(self, optimizer: Any, key: str | None) -> torch.Tensor | None:
        """Return this rank's elements of the weight, or of a moment; None where it has no
        moments.
        """
        if key is None:
            return self.flat.detach()[self.held]
        state = optimizer.state.get(self.owner, {})
        if key not in state:
            return None
        flat: torch.Tensor = state[key].view(-1)
        return flat[self.held] if self.owner is self.flat else flat

    def whole(self, optimizer: Any, key: str | None = None) -> torch.Tensor:
        """Return all elements of the weight, or of a moment."""
        found = torch.zeros(self.shape.numel())
        values = self._values(optimizer, key)
        if values is not None:
            found[self.mine] = values
        torch.distributed.all_reduce(found)
        return found.view(self.shape)

    def assign(self, optimizer: Any, value: torch.Tensor, key: str | None = None) -> None:
        """Set the weight, or a moment."""
        values = self._values(optimizer, key)
        if values is not None:
            values.copy_(value.flatten()[self.mine])

    def number(self, optimizer: Any, key: str) -> float:
        """Return a state that a parameter has one number for: that of the ranks that have elements
        of it.
        """
        found = float(optimizer.state.get(self.owner, {}).get(key, LOWEST))
        both = torch.tensor([found, -found if found != LOWEST else LOWEST], dtype=torch.float64)
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX)
        highest, lowest = float(both[0]), -float(both[1])
        assert highest in (lowest, LOWEST), f"ranks differ in {key}: {lowest} and {highest}"
        return highest


def parameters_of(model: Any) -> dict[str, Parameter]:
    """Return the parameters of a model that FSDP1 wrapped, by fqn."""
    found = {}
    for name, module in model.named_modules():
        handle = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if handle is None:
            continue
        flat = handle.flat_param
        above = [part for part in name.split(".") if part not in ("", "_fsdp_wrapped_module")]
        owners = flat._params or [flat] * len(flat._fqns)
        for fqn, shape, place, owner in zip(
            flat._fqns, flat._shapes, flat._shard_param_infos, owners, strict=True
        ):
            mine, held = slice(0), slice(0)
            if place.in_shard:
                mine = slice(place.intra_param_start_idx, place.intra_param_end_idx + 1)
                held = slice(place.offset_in_shard, place.offset_in_shard + place.numel_in_shard)
            found[".".join([*above, fqn])] = Parameter(shape, flat, owner, mine, held)
    return found


@contextmanager
def gathering_on_the_cpu() -> Iterator[None]:
    """Let FSDP1 gather full state dicts on the CPU.

    It frees or reuses what it gathered once ``cpu()`` has made a copy, and that makes none of a
    tensor on the CPU: torch 2.13.0 ends in a segmentation fault, or gives all moments the values of
    the last one.
    """
    with (
        mock.patch.object(FlatParamHandle, "to_cpu", return_value=nullcontext()),
        mock.patch.object(torch.Tensor, "cpu", torch.Tensor.clone),
    ):
        yield
