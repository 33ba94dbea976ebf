"""The current device, made to follow the blocks of a dispatched model.

Accelerate moves tensors and never sets the current device: in a block on device 1 it is still device 0, and a kernel
that does not look where its tensors are launches there (unsloth #6831).
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ckptfix.runtime.devices.pairs import device_type


def follow_devices(model: nn.Module) -> Callable[[], None]:
    """Make the device of each block current inside its forward, and the former one again behind it, errors included.

    The blocks are those to which accelerate gave a device other than that of what holds them. Returns what ends it.
    """
    name = device_type()
    handles = [
        handle
        for block, index in _blocks(model, name, None)
        for handle in _guard(block, index, torch.get_device_module(name))
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


class _Entered(threading.local):
    """The blocks whose forward this thread is in, each with the device that was current before it."""

    def __init__(self) -> None:
        self.blocks: list[tuple[nn.Module, int]] = []


_entered = _Entered()


def _guard(block: nn.Module, index: int, devices: Any) -> Iterator[Any]:
    def enter(module: nn.Module, _arguments: Any) -> None:
        _entered.blocks.append((module, devices.current_device()))
        devices.set_device(index)

    def leave(module: nn.Module, _arguments: Any, _output: Any) -> None:
        # Called behind every forward, even one that did not come to enter().
        if _entered.blocks and _entered.blocks[-1][0] is module:
            devices.set_device(_entered.blocks.pop()[1])

    for hook in (enter, leave):
        vars(hook)["_torchdynamo_disable"] = (
            True  # what torch.compiler.disable sets, which imports for seconds
        )
    yield block.register_forward_pre_hook(enter, prepend=True)
    yield block.register_forward_hook(leave, always_call=True)


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
