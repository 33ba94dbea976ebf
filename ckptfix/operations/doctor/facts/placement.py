"""A device map: which module of a model goes to which device."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptfix.errors import UsageError

_MAX_FILE = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMap:
    """A device map. ``source``: where it stands. ``entries``: module name -> device, in the map's own spelling.

    The name "" is the whole model. A device is a number, "cpu", "disk", or a type with or without a number.
    """

    source: str
    entries: Mapping[str, int | str]

    def device_of(self, name: str) -> int | str | None:
        """Return the device of a tensor: that of the nearest module above it, as accelerate looks it up, or None."""
        while True:
            if name in self.entries:
                return normal(self.entries[name])
            if not name:
                return None
            name = name.rpartition(".")[0]

    def devices(self) -> tuple[int | str, ...]:
        """Return each device once, in the order of the map."""
        return tuple(dict.fromkeys(normal(device) for device in self.entries.values()))


def normal(device: int | str) -> int | str:
    """Return one spelling for a device: the number of an accelerator, or "cpu", "disk", "meta"."""
    if isinstance(device, int) or device in ("cpu", "disk", "meta"):
        return device
    index = device.rpartition(":")[2]
    return int(index) if index.isdecimal() else 0  # "cuda" alone is the current device, the first one


def read_map(path: str) -> DeviceMap:
    """Read a device map from a JSON file.

    Raises UsageError when it holds none, OSError when it cannot be read.
    """
    file = Path(path)
    if file.stat().st_size > _MAX_FILE:
        raise UsageError(f"{path} has {file.stat().st_size} bytes, too many for a device map")
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error!s:.100}") from None
    found = parse_map(values, path)
    if found is None:
        raise UsageError(f"{path} is not a device map: write an object of module names and devices")
    return found


def parse_map(values: object, source: str) -> DeviceMap | None:
    """Return the device map that JSON values hold, None when they are none."""
    if not isinstance(values, dict) or not values:
        return None
    if not all(isinstance(device, int | str) and not isinstance(device, bool) for device in values.values()):
        return None
    return DeviceMap(source=source, entries={str(name): device for name, device in values.items()})
