"""Device maps, from the user or from sizes; and the accelerators and memory of this machine."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from ckptfix.devices.reload.reload_report import Accelerators
from ckptfix.devices.torch_devices import device_count, device_type
from ckptfix.errors import UsageError

Device = int | str
"""The index of an accelerator, "cpu" or "disk", as in accelerate's maps."""

DeviceMap = Mapping[str, Device]
"""Name of a module or tensor, "" for all -> device."""

CPU, DISK = "cpu", "disk"
MOST = 1 << 62
"""Bytes: more than any device has. accelerate multiplies sizes with fractions, which larger
integers do not bear.
"""
_INDEXED = re.compile(r"(?:(?!cpu:|disk:|meta:)[a-z]+:)?([0-9]{1,4})")


class Spread(Enum):
    """Maps that are made: AUTO is BALANCED. SEQUENTIAL fills one device after another, LOW_0 spares
    device 0.
    """

    AUTO = "auto"
    BALANCED = "balanced"
    SEQUENTIAL = "sequential"
    LOW_0 = "balanced_low_0"


def read_device_map(given: object) -> Spread | dict[str, Device]:
    """Return what a device map means: one of ``Spread``, a map, or the path of a JSON file that
    holds one.

    Raises UsageError for anything else, OSError when the file cannot be read.
    """
    if isinstance(given, Mapping):
        return {str(name): _device(device, str(name)) for name, device in given.items()}
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else ""
    if text in {spread.value for spread in Spread}:
        return Spread(text)
    kinds = ", ".join(spread.value for spread in Spread)
    if not isinstance(text, str) or not text or not Path(text).is_file():
        raise UsageError(f"device map {given!r}: expected a JSON file or one of {kinds}")
    try:
        document = json.loads(Path(text).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{text} is not JSON: {error}") from None
    if not isinstance(document, dict) or not document:
        raise UsageError(
            f'{text}: expected a JSON object like {{"model.layers.0": 0, "lm_head": "cpu"}}'
        )
    return {name: _device(device, name) for name, device in document.items()}


def read_max_memory(given: object) -> dict[Device, int] | None:
    """Return device -> bytes from a mapping or its JSON text: ``{"0": "4GiB", "cpu": 8589934592}``;
    None for None.

    Raises UsageError for anything else.
    """
    if given is None:
        return None
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"max_memory {given!r} is not JSON: {error}") from None
    if not isinstance(given, Mapping) or not given:
        raise UsageError('max_memory: expected a JSON object like {"0": "4GiB", "cpu": "8GiB"}')
    return {_device(name, "max_memory"): _size(size, str(name)) for name, size in given.items()}


def device_of(fqn: str, device_map: DeviceMap) -> Device | None:
    """Return the device of a tensor: of the longest name in the map that is it or a module around
    it, else None.
    """
    name = fqn
    while name:
        if name in device_map:
            return device_map[name]
        name = name.rpartition(".")[0]
    return device_map.get("")


def split_ties(
    ties: Iterable[Sequence[str]], device_map: DeviceMap
) -> list[tuple[tuple[str, Device], tuple[str, Device]]]:
    """Return, for each group of tied names that a map splits, two of the names with their
    devices.
    """
    found = []
    for group in ties:
        placed = [
            (name, device) for name in group if (device := device_of(name, device_map)) is not None
        ]
        for name, device in placed[1:]:
            if device != placed[0][1]:
                found.append((placed[0], (name, device)))
                break
    return found


def _device(given: Any, where: str) -> Device:
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    text = str(given)
    if text in (CPU, DISK):
        return text
    if match := _INDEXED.fullmatch(text):
        return int(match[1])
    raise UsageError(f'{where}: {text!r} is not a device (expected an index, "cpu" or "disk")')


def _size(given: Any, where: str) -> int:
    from accelerate.utils.modeling import convert_file_size_to_int

    try:
        size = int(convert_file_size_to_int(given))
    except (ValueError, TypeError, AttributeError, OverflowError):
        size = -1
    if size < 0:
        raise UsageError(
            f'max_memory of {where}: {given!r} is not a size (expected "4GiB" or a number of bytes)'
        )
    return min(size, MOST)


def find_accelerators() -> Accelerators:
    """Return the accelerators that torch finds here. Touches no device's memory."""
    name = device_type()
    if name is None:
        return Accelerators(accelerator=None)
    module = torch.get_device_module(name)
    ask = getattr(module, "get_device_name", None)
    return Accelerators(
        accelerator=name,
        names=tuple(
            str(ask(index)) if ask is not None else name for index in range(device_count())
        ),
    )


def free_memory() -> dict[Device, int]:
    """Return device -> free bytes, as accelerate counts them for its own maps."""
    from accelerate.utils import get_max_memory

    free: dict[Device, int] = {}
    for device, size in get_max_memory().items():
        # "mps" is one device.
        place: Device = device if isinstance(device, int) or device == CPU else 0
        free[place] = int(size * 0.9) if isinstance(place, int) else int(size)
    return free


def has_room(where: torch.device, nbytes: int) -> bool:
    """Return whether an accelerator has room for these bytes and half as much again for what is
    computed with them.
    """
    free = free_memory().get(int(where.index or 0), 0)
    return nbytes + nbytes // 2 < free


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device has no room; its class changed between versions
    of torch.
    """
    return "out of memory" in str(error).lower()


def answers(where: torch.device) -> bool:
    """Return whether a device still computes: after a device-side assertion every call on it
    fails.
    """
    try:
        return bool(torch.ones(4, device=where).sum().item() == 4)
    except RuntimeError:
        return False
