"""What the verdicts of a probe hold for: these very devices, this driver, this boot, this torch."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckptfix.runtime.devices.pairs import Pair, device_count, device_type, ordered_pairs

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The devices that torch sees here. ``pci``: their addresses as sysfs has them, "" where torch does not say.

    ``identity``: what a remembered report is compared by; empty when it would not tell this machine from another.
    ``peer_access``: what the driver offers, by pair; None where torch cannot tell.
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
    """Return ``this_machine()`` where this process uses its devices already, which then stay the same; else None."""
    name = device_type()
    if name is None:
        return None
    initialised = getattr(torch.get_device_module(name), "is_initialized", None)
    return this_machine() if initialised is not None and initialised() else None


def _identity(name: str, module: Any, devices: list[dict[str, Any]]) -> dict[str, Any]:
    boot = _text(_BOOT)
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
            str(version) for version in (torch.version.cuda, getattr(torch.version, "hip", None)) if version
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
    # Distributions rebuild in-tree drivers without a version of their own: srcversion is of the code itself.
    return _text(_MODULES / name / "version") + " " + _text(_MODULES / name / "srcversion")


def _quietly(query: Any) -> str:
    try:
        return "" if query is None else str(query())
    except (RuntimeError, AssertionError, AttributeError):
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
