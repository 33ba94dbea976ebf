"""Devices of the current accelerator as torch has them: their number, ordered pairs, and the
identity of all of them.

A copy from device 0 to device 1 takes another way than one from 1 to 0, and can be broken on its
own: this package always means *ordered* pairs.
"""

import os
import platform
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct, field

from ckptfix.hardware import Pair, read_text

_OLDER = ("cuda", "xpu")
"""Accelerators to look for when torch has no ``torch.accelerator`` (it came with torch 2.6)."""

_ALLOCATOR = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_NO_HIP_MEMORY_CACHING",
)
"""Expandable segments, for one, map peer memory in another way."""

_DRIVERS = ("nvidia", "amdgpu", "xe", "i915")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MODULES = Path("/sys/module")


def device_type() -> str | None:
    """Return the type of the current accelerator ("cuda", "xpu", ...), or None when no device of it
    is there.
    """
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        return next((name for name in _OLDER if getattr(torch, name).is_available()), None)
    current = accelerator.current_accelerator()
    return str(current.type) if current is not None and accelerator.is_available() else None


def device_count() -> int:
    """Return how many devices the current accelerator has; 0 without one."""
    name = device_type()
    return int(getattr(torch, name).device_count()) if name is not None else 0


def ordered_pairs(count: int | None = None) -> tuple[Pair, ...]:
    """Return every ordered pair of ``count`` devices (None: of those that are there), by source,
    then destination.
    """
    return tuple(permutations(range(device_count() if count is None else count), 2))


def device(index: int) -> torch.device:
    """Return a device of the current accelerator.

    Raises RuntimeError on a machine without one.
    """
    name = device_type()
    if name is None:
        raise RuntimeError(
            f"device {index} was requested, but torch finds no accelerator on this machine"
        )
    return torch.device(name, index)


class Machine(Struct, frozen=True, kw_only=True):
    """The devices that torch sees here. ``pci``: their addresses as sysfs has them, "" where torch
    does not say.

    ``identity``: what a remembered report is compared by; empty when it would not tell this machine
    from another. ``peer_access``: what the driver offers, by pair; None where torch cannot tell.
    """

    names: tuple[str, ...] = ()
    pci: tuple[str, ...] = ()
    peer_access: Mapping[Pair, bool | None] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the machine as plain values."""
        return {
            "names": list(self.names),
            "pci": list(self.pci),
            "peer_access": [[*pair, access] for pair, access in self.peer_access.items()],
            "identity": dict(self.identity),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Machine":
        """Return the machine that ``to_json`` gave."""
        return cls(
            names=tuple(values["names"]),
            pci=tuple(values["pci"]),
            peer_access={(source, to): access for source, to, access in values["peer_access"]},
            identity=values["identity"],
        )


def this_machine() -> Machine:
    """Describe the devices of the current accelerator. Makes torch initialise it."""
    name = device_type()
    if name is None:
        return Machine()
    module = torch.get_device_module(name)
    properties = [_properties(module, index) for index in range(device_count())]
    devices = [
        {
            "name": str(getattr(found, "name", name)),
            "uuid": str(getattr(found, "uuid", "")),
            "pci": _pci(found),
            "memory": int(getattr(found, "total_memory", 0)),
        }
        for found in properties
    ]
    return Machine(
        names=tuple(str(found["name"]) for found in devices),
        pci=tuple(str(found["pci"]) for found in devices),
        peer_access={pair: _peer_access(module, pair) for pair in ordered_pairs()},
        identity=_identity(name, module, devices),
    )


def machine_in_use() -> Machine | None:
    """Return ``this_machine()`` where this process uses its devices already, which then stay the
    same; else None.
    """
    name = device_type()
    if name is None:
        return None
    initialised = getattr(torch.get_device_module(name), "is_initialized", None)
    return this_machine() if initialised is not None and initialised() else None


def _identity(name: str, module: Any, devices: list[dict[str, Any]]) -> dict[str, Any]:
    boot = read_text(_BOOT)
    if not boot or not all(found["uuid"] or found["pci"] for found in devices):
        return {}
    backend = getattr(module, "get_allocator_backend", None) or getattr(
        getattr(module, "memory", None), "get_allocator_backend", None
    )
    return {
        "type": name,
        "devices": devices,
        "drivers": {driver: _driver(driver) for driver in _DRIVERS if (_MODULES / driver).is_dir()},
        "boot": boot,
        "host": platform.node(),
        "torch": str(torch.__version__),
        "runtime": [
            str(version)
            for version in (torch.version.cuda, getattr(torch.version, "hip", None))
            if version
        ],
        "allocator": {key: os.environ[key] for key in _ALLOCATOR if os.environ.get(key)},
        "backend": _quietly(backend),
    }


def _properties(module: Any, index: int) -> Any:
    try:
        return module.get_device_properties(index)
    except (AttributeError, RuntimeError, AssertionError):  # a device of a kind that has none
        return None


def _pci(properties: Any) -> str:
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(number is None for number in numbers):
        return ""
    return "{:04x}:{:02x}:{:02x}.0".format(*(int(number or 0) for number in numbers))


def _peer_access(module: Any, pair: Pair) -> bool | None:
    query = getattr(module, "can_device_access_peer", None)
    try:
        return None if query is None else bool(query(*pair))
    except (RuntimeError, AssertionError):
        return None


def _driver(name: str) -> str:
    # Distributions rebuild in-tree drivers without a version of their own: srcversion is of the
    # code itself.
    return read_text(_MODULES / name / "version") + " " + read_text(_MODULES / name / "srcversion")


def _quietly(query: Any) -> str:
    try:
        return "" if query is None else str(query())
    except (RuntimeError, AssertionError, AttributeError):
        return ""
