"""Staging of accelerate's own moves, for a torch that does not let ``aten::copy_`` be overridden.

Accelerate moves the inputs of each block, the output of the model and the weights of a dispatch by two functions, which
its hooks look up by name at each call. Both get a stand-in that takes tensors to the host first. All other copies stay
as they are: ``NOT_COVERED`` lists them, and every reference to staging carries that list.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch

from ckptfix.runtime.devices.pairs import Pair


class Decide(Protocol):
    """Says whether a copy has to take the way through the host, and counts it."""

    def __call__(self, pair: Pair, source: torch.Tensor, *, back: bool = False) -> bool:
        """``back``: a gradient will take the same way in the other direction."""


NOT_COVERED = (
    "everything but the moves of accelerate's hooks: this torch does not let aten::copy_ be overridden",
    ".to(device) in the code of a model, and backward passes of it",
    "Module.to, load_state_dict, Tensor.copy_ and storages",
    "slices (a[1:3] = b) and _foreach_copy_",
    "the caches of generate(), which beam search moves from device to device",
    "torch.nn.DataParallel, replicate and torch.cuda.comm",
    "NCCL and other collectives, CUDA IPC, kernels that read another device's memory",
)


class HookPatch:
    """``accelerate.hooks`` with moves that ask ``decide``, until ``remove``."""

    def __init__(self, decide: Decide) -> None:
        """Put the stand-ins in place."""
        import accelerate.hooks

        self._module = accelerate.hooks
        self._originals = {
            name: getattr(self._module, name) for name in ("send_to_device", "set_module_tensor_to_device")
        }
        self._stand_ins = {
            "send_to_device": _sending(self._originals["send_to_device"], decide),
            "set_module_tensor_to_device": _setting(self._originals["set_module_tensor_to_device"], decide),
        }
        for name, stand_in in self._stand_ins.items():
            setattr(self._module, name, stand_in)

    def remove(self) -> bool:
        """Put the originals back, and leave in place what others put there since; always done at once: True."""
        for name, original in self._originals.items():
            if getattr(self._module, name) is self._stand_ins[name]:
                setattr(self._module, name, original)
        return True


def _sending(original: Callable[..., Any], decide: Decide) -> Callable[..., Any]:
    def send_to_device(
        tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | Collection[str] | None = None
    ) -> Any:
        skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
        staged = _to_host(tensor, device, skipped, decide)
        return original(staged, device, non_blocking=non_blocking, skip_keys=skip_keys)

    return send_to_device


def _to_host(things: Any, end: Any, skipped: tuple[str, ...], decide: Decide) -> Any:
    """Return the same structure, with the tensors on the host that must not go to ``end`` directly."""
    if isinstance(things, torch.Tensor):
        return things.to("cpu") if _must_stage(things, end, decide) else things
    if hasattr(things, "to"):  # its own to() moves what it holds, as accelerate does it
        held = vars(things).values() if hasattr(things, "__dict__") else ()
        return things.to("cpu") if any(_holds_staged(thing, end, decide) for thing in held) else things
    if isinstance(things, Mapping):
        return type(things)(  # type: ignore[call-arg]
            {
                key: thing if key in skipped else _to_host(thing, end, skipped, decide)
                for key, thing in things.items()
            }
        )
    if isinstance(things, (tuple, list)):
        from accelerate.utils.operations import honor_type

        return honor_type(things, (_to_host(thing, end, skipped, decide) for thing in things))
    return things


def _holds_staged(thing: Any, end: Any, decide: Decide) -> bool:
    if isinstance(thing, torch.Tensor):
        return _must_stage(thing, end, decide)
    if isinstance(thing, Mapping):
        return any(_holds_staged(inner, end, decide) for inner in thing.values())
    return isinstance(thing, (tuple, list)) and any(_holds_staged(inner, end, decide) for inner in thing)


def _must_stage(tensor: torch.Tensor, end: Any, decide: Decide) -> bool:
    pair = _pair(tensor, end)
    return pair is not None and decide(pair, tensor, back=torch.is_grad_enabled() and tensor.requires_grad)


def _pair(tensor: torch.Tensor, end: Any) -> Pair | None:
    where = torch.device(end) if end is not None else tensor.device
    if tensor.device.type in ("cpu", "meta") or where.type != tensor.device.type:
        return None
    index = where.index if where.index is not None else torch.get_device_module(where).current_device()
    return None if index == tensor.device.index else (tensor.device.index, index)


def _setting(original: Callable[..., Any], decide: Decide) -> Callable[..., Any]:
    def set_module_tensor_to_device(
        module: torch.nn.Module, tensor_name: str, device: Any, value: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        moving = value if value is not None else _named(module, tensor_name)
        tied = kwargs.get("tied_params_map") or {}
        placed = isinstance(moving, torch.Tensor) and device in tied.get(moving.data_ptr(), ())
        if isinstance(moving, torch.Tensor) and not placed and _must_stage(moving.detach(), device, decide):
            value = moving.detach().to("cpu")
        return original(module, tensor_name, device, value, *args, **kwargs)

    return set_module_tensor_to_device


def _named(module: torch.nn.Module, tensor_name: str) -> Any:
    owner, _, name = tensor_name.rpartition(".")
    return getattr(module.get_submodule(owner), name)
