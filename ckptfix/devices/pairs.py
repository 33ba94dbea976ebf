"""Ordered pairs of devices of the current accelerator, and the copies counted for each."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations

import torch

# Ordered pairs of devices of the current accelerator, and how many devices there are.
#
# A copy from device 0 to device 1 takes another way than one from 1 to 0, and can be broken on its own: all
# of this package speaks of *ordered* pairs. Nothing here touches a device.

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


# Copies between devices, counted for each ordered pair.


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Copies of one ordered pair, and their bytes at the source: those by way of the host, and direct ones."""

    staged: int = 0
    staged_bytes: int = 0
    direct: int = 0
    direct_bytes: int = 0

    def __sub__(self, other: "Count") -> "Count":
        return Count(
            staged=self.staged - other.staged,
            staged_bytes=self.staged_bytes - other.staged_bytes,
            direct=self.direct - other.direct,
            direct_bytes=self.direct_bytes - other.direct_bytes,
        )


class Counts:
    """A count for each pair that made a copy. Threads may add at the same time, and so may finalizers in any of them.

    The collector may run a finalizer, which may copy, wherever something is made. So nothing is made while the lock is
    held, and where the interpreter itself lets one run there, it finds no count half changed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._of: dict[Pair, list[int]] = {}  # the fields of Count, in their order

    def add(self, pair: Pair, size: int, *, staged: bool) -> None:
        """Count one copy of ``size`` bytes."""
        count = self._of.get(pair) or self._of.setdefault(pair, [0, 0, 0, 0])
        copies = 0 if staged else 2
        with self._lock:
            count[copies] += 1
            count[copies + 1] += size

    def all(self) -> Mapping[Pair, Count]:
        """Return the counts as they are now; a pair without a copy is not in it."""
        return {pair: self._now(self._of[pair]) for pair in list(self._of)}

    def _now(self, count: list[int]) -> Count:
        with self._lock:
            staged, staged_bytes, direct, direct_bytes = count
        return Count(staged=staged, staged_bytes=staged_bytes, direct=direct, direct_bytes=direct_bytes)
