"""The way back: what a load is going to modify, kept so that it can be put back as it was."""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy
import torch

from ckptfix.runtime.held import innermost, levels
from ckptfix.runtime.loading.draft import Action, LoadModel, LoadState
from ckptfix.runtime.loading.offloaded import EmptySlot, MemorySlot, Slot
from ckptfix.runtime.loading.report import Part
from ckptfix.runtime.loading.targets import distinct


def may_refuse(part: Part, action: Action) -> bool:
    """Whether code of the script, or of another library, runs in an action, so that it can fail half way.

    Classes of torch and accelerate are given only what was found to suit them.
    """
    match action:
        case LoadModel(target=target):
            hooked = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
            return _loads_itself(target.thing) or any(
                getattr(module, name, None) for module in target.inner.modules() for name in hooked
            )
        case LoadState(thing=thing):
            is_unknown = part is Part.DATALOADERS or (
                part is Part.CUSTOM and not isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
            )
            return is_unknown or _loads_itself(thing)
    return False


def _loads_itself(thing: Any) -> bool:
    for level in levels(thing):
        method = getattr(type(level), "load_state_dict", None)
        is_known = str(getattr(method, "__module__", "")).startswith(("torch.", "accelerate."))
        if not is_known or "load_state_dict" in getattr(level, "__dict__", {}):
            return True
        hooked = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
        if any(getattr(level, name, None) for name in hooked):
            return True
    return False


class Tensors:
    """The parameters and buffers of models, copied to the CPU: both the objects in their places and their values.

    What is done to submodules, and to weights that are kept offloaded on a disk, is not taken back.
    """

    def __init__(self, models: Sequence[Any], slots: Sequence[Slot] = ()) -> None:
        self._before: list[tuple[dict[str, Any], str, Any, torch.Tensor | None]] = []
        modules = {id(module): module for target in distinct(models) for module in target.thing.modules()}
        copies: dict[int, torch.Tensor | None] = {}
        for module in modules.values():
            for registry in (module._parameters, module._buffers):
                for name, tensor in registry.items():
                    if id(tensor) not in copies:  # tied ones are kept once
                        is_here = tensor is not None and tensor.device.type != "meta"
                        copies[id(tensor)] = copied(tensor) if is_here else None
                    self._before.append((registry, name, tensor, copies[id(tensor)]))
        self._slots = [(slot, copied(slot.read())) for slot in slots if isinstance(slot, MemorySlot)]

    def restore(self) -> None:
        """Put every tensor back in its place, with its value."""
        with torch.no_grad():
            for registry, name, tensor, value in self._before:
                registry[name] = tensor
                if value is not None:
                    tensor.copy_(value)
        for slot, value in self._slots:
            slot.write(value)


def can_be_kept(slots: Sequence[Slot]) -> bool:
    """Whether ``Tensors`` covers these slots: what lies on a disk is there because memory is short."""
    return all(isinstance(slot, MemorySlot | EmptySlot) for slot in slots)


class State:
    """The attributes and the ``state_dict()`` of one object, tensors copied to the CPU."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing
        self._inner = innermost(thing)
        self._attributes = dict(getattr(self._inner, "__dict__", {}))
        # torch's optimizers make a new state of what they load, and let go of the old one untouched.
        self._is_replaced = isinstance(self._inner, torch.optim.Optimizer) and not _loads_itself(thing)
        self._state: Any = None
        self._is_known = True
        if not self._is_replaced:
            try:
                self._state = copied(thing.state_dict())
            except Exception:  # of a class of the script; a load that works does not need it
                self._is_known = False

    def restore(self) -> bool:
        """Put back what was there; return whether it is there again."""
        self._restore_attributes()
        if self._is_replaced:
            return True
        if not self._is_known:
            return False
        for keeps_attributes in (True, False):
            if self._is_as_before():
                return True
            with suppress(Exception):  # it may refuse this as well, and be as it was all the same
                self._thing.load_state_dict(copied(self._state))
            if keeps_attributes:
                self._restore_attributes()
        return self._is_as_before()

    def _restore_attributes(self) -> None:
        own = getattr(self._inner, "__dict__", None)
        if own is not None:
            own.clear()
            own.update(self._attributes)

    def _is_as_before(self) -> bool:
        return same(self._thing.state_dict(), self._state)


def copied(value: Any) -> Any:
    """Return a deep copy of a state, its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, copied(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return copy.deepcopy(value)


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal; NaN equals NaN, and objects that do not compare have equal attributes."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and same_bytes(one.to("cpu"), other.to("cpu"))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, numpy.ndarray):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return is_alike and same(one.tolist(), other.tolist())
    if bool(one == other) or (one != one and other != other):
        return True
    attributes = getattr(one, "__dict__", None)
    return attributes is not None and same(attributes, getattr(other, "__dict__", None))


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare the bits of two tensors on one device, for NaN equals nothing."""
    if one.shape != other.shape:
        return False
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return bool(torch.equal(*flat))
