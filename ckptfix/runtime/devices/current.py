"""The current device, made to follow the blocks of a dispatched model.

Accelerate moves tensors and never sets the current device: in a block on device 1 it is still device 0, and a kernel
that does not look where its tensors are launches there (unsloth #6831).
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ckptfix.runtime.devices.pairs import device_type


def follow_devices(model: nn.Module) -> Callable[[], None]:
    """Make the device of each block current inside its forward, and the former one again behind it, whatever ends it.

    The blocks are those to which accelerate gave a device other than that of what holds them. Returns what ends it.
    """
    name = device_type()
    # Weakly: what ends the guards must not keep the model.
    guards = [
        weakref.ref(_Guard(block, name, index))
        for block, index in _blocks(model, name, None)
        if name is not None
    ]

    def end() -> None:
        for reference in guards:
            guard = reference()
            if guard is not None:
                guard.end()

    return end


class _Guard:
    """A block's own forward, which accelerate's hooks call, on its device.

    torch's hooks behind a forward are left out when it is interrupted from the keyboard: this one ends in any case. It
    lies below accelerate's hooks, so that those may be replaced, and copies of the model have copies of it.
    """

    def __init__(self, block: nn.Module, name: str, index: int) -> None:
        at = "_old_forward" if "_old_forward" in vars(block) else "forward"
        forward = getattr(block, at)
        functools.update_wrapper(self, forward)  # which may bring attributes along
        self._block = block
        self._name = name
        self._index = index
        self._forward = forward
        setattr(block, at, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        devices = torch.get_device_module(self._name)
        before = devices.current_device()
        try:
            devices.set_device(self._index)
            return self._forward(*args, **kwargs)
        finally:
            devices.set_device(before)

    def end(self) -> None:
        """Put back what was there, where nothing else has come to lie on it since."""
        for at in ("_old_forward", "forward"):  # accelerate's hook may have been taken off
            if vars(self._block).get(at) is self:
                setattr(self._block, at, self._forward)


def _blocks(module: nn.Module, name: str | None, outer: int | None) -> Iterator[tuple[nn.Module, int]]:
    index = _index(getattr(module, "_hf_hook", None), name)
    if index is not None and index != outer:
        yield module, index
    for child in module.children():
        yield from _blocks(child, name, outer if index is None else index)


def _index(hook: Any, name: str | None) -> int | None:
    for inner in getattr(hook, "hooks", (hook,)):
        where = getattr(inner, "execution_device", None)
        if where is not None and where not in ("meta", "disk"):
            found = torch.device(where)
            if found.type == name:
                return 0 if found.index is None else int(found.index)
    return None
