"""Weights that are not where the model says: tensors on the meta device, kept elsewhere by
accelerate's hooks.

``load_state_dict`` copies into a meta tensor without effect and without an error. Here each such
tensor gets a slot: the place that its value is read from before every forward pass.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset, set_module_tensor_to_device
from accelerate.utils.offload import offload_weight
from msgspec import Struct


class Slot(Protocol):
    """The real place of the value of one meta tensor."""

    def read(self) -> torch.Tensor:
        """Return the value that the model computes with."""

    def write(self, value: torch.Tensor) -> None:
        """Put a value there, in the dtype that the place has."""


class MemorySlot(Struct, frozen=True, kw_only=True):
    """A tensor in a dict that a hook reads."""

    store: Mapping[str, torch.Tensor]
    key: str

    def read(self) -> torch.Tensor:
        """Return the tensor itself."""
        return self.store[self.key]

    def write(self, value: torch.Tensor) -> None:
        """Copy into the tensor, so that everything that shares it follows."""
        with torch.no_grad():
            self.store[self.key].copy_(value)


class DiskSlot(Struct, frozen=True, kw_only=True):
    """A file of an offload folder. A value that comes from a checkpoint of the user's is never
    written there.
    """

    loader: Any
    key: str

    @property
    def folder(self) -> Path | None:
        """The offload folder, None when the value lies in a safetensors file that is not ours to
        write.
        """
        entry = self.loader.index[self.key]
        if entry.get("safetensors_file") is not None or self.loader.save_folder is None:
            return None
        return Path(self.loader.save_folder)

    def read(self) -> torch.Tensor:
        """Return the value as a tensor in memory."""
        value = self.loader[self.key]
        assert isinstance(value, torch.Tensor)
        return value

    def write(self, value: torch.Tensor) -> None:
        """Write the offload file again; without one of our own, keep the value in memory, which has
        precedence.
        """
        value = value.detach().to("cpu", self.read().dtype).contiguous()
        if self.folder is None:
            self.loader.state_dict[self.key] = value.clone()
        else:
            offload_weight(value, self.key, str(self.folder), index=self.loader.index)


class EmptySlot(Struct, frozen=True, kw_only=True):
    """A tensor that was never there, as ``init_empty_weights`` leaves it: it is made on
    ``device``.
    """

    model: Any
    name: str
    device: torch.device

    def read(self) -> torch.Tensor:
        """Return the tensor of the module."""
        value = self.model
        for step in self.name.split("."):
            value = getattr(value, step)
        assert isinstance(value, torch.Tensor)
        return value

    def write(self, value: torch.Tensor) -> None:
        """Give the module a new tensor with this value."""
        set_module_tensor_to_device(self.model, self.name, self.device, value=value)


def find_slots(
    model: Any, names: Iterable[str], device: torch.device
) -> tuple[dict[str, Slot], list[str]]:
    """Return the slot of each meta tensor, and in words why others have none. Changes nothing.

    ``device``: where tensors go that no hook looks after.
    """
    slots: dict[str, Slot] = {}
    wrong = []
    for name in names:
        slot = _slot(model, name, device)
        if slot is None:
            wrong.append(f"{name!r} is on the meta device, and its hook has no writable weights")
            continue
        if (
            isinstance(slot, DiskSlot)
            and slot.folder is not None
            and not os.access(slot.folder, os.W_OK)
        ):
            wrong.append(f"{name!r} is offloaded to {slot.folder}, which is not writable")
            continue
        slots[name] = slot
    return slots, wrong


def offloaded_ties(model: Any, names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return name -> other names whose offloaded values are the same memory: what is left of tied
    parameters.
    """
    groups: dict[object, list[str]] = {}
    for name in names:
        slot = _slot(model, name, torch.device("cpu"))
        if isinstance(slot, MemorySlot):
            value = slot.read()
            key: object = (
                value.untyped_storage().data_ptr(),
                value.storage_offset(),
                value.shape,
                value.stride(),
            )
        elif isinstance(slot, EmptySlot):
            key = id(slot.read())
        else:
            continue
        groups.setdefault(key, []).append(name)
    return {
        name: frozenset(group) - {name}
        for group in groups.values()
        if len(group) > 1
        for name in group
    }


def _slot(model: Any, name: str, device: torch.device) -> Slot | None:
    path = name.split(".")
    for depth in range(len(path) - 1, -1, -1):
        owner = model
        for step in path[:depth]:
            owner = getattr(owner, step)
        for hook in _hooks(owner):
            reaches = depth == len(path) - 1 or getattr(hook, "place_submodules", False)
            if reaches and getattr(hook, "offload", False):
                weights = getattr(hook, "weights_map", None)
                return None if weights is None else _stored(weights, ".".join(path[depth:]))
    return EmptySlot(model=model, name=name, device=device)


def _hooks(module: Any) -> Iterator[Any]:
    hook = getattr(module, "_hf_hook", None)
    yield from getattr(hook, "hooks", () if hook is None else (hook,))


def _stored(weights: Any, key: str) -> Slot | None:
    while isinstance(weights, PrefixedDataset):
        weights, key = weights.dataset, f"{weights.prefix}{key}"
    if isinstance(weights, OffloadedWeightsLoader):
        if key in weights.state_dict:
            return MemorySlot(store=weights.state_dict, key=key)
        return DiskSlot(loader=weights, key=key) if key in weights.index else None
    if isinstance(weights, dict) and isinstance(weights.get(key), torch.Tensor):
        return MemorySlot(store=weights, key=key)
    return None
