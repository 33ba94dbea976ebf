"""Copies between devices, counted for each ordered pair."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from ckptfix.runtime.devices.pairs import Pair


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
