"""Ordered pairs of devices of the current accelerator, and how many devices there are.

A copy from device 0 to device 1 takes another way than one from 1 to 0, and can be broken on its own: all of this
package speaks of *ordered* pairs. Nothing here touches a device.
"""

from itertools import permutations

import torch

Pair = tuple[int, int]
"""(index of the source device, index of the destination device) of the current accelerator."""

_OLDER = ("cuda", "xpu")
"""Where to look when torch has no ``torch.accelerator`` (it came with torch 2.6)."""


def device_type() -> str | None:
    """Return the type of the current accelerator ("cuda", "xpu", ...), or None when no device of it is there."""
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
    """Return every ordered pair of ``count`` devices (None: of those that are there), by source, then destination."""
    return tuple(permutations(range(device_count() if count is None else count), 2))


def device(index: int) -> torch.device:
    """Return a device of the current accelerator.

    Raises RuntimeError on a machine without one.
    """
    name = device_type()
    if name is None:
        raise RuntimeError(f"device {index} was asked for, but torch finds no accelerator on this machine")
    return torch.device(name, index)
