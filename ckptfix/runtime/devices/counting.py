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

    def __add__(self, other: "Count") -> "Count":
        return Count(
            staged=self.staged + other.staged,
            staged_bytes=self.staged_bytes + other.staged_bytes,
            direct=self.direct + other.direct,
            direct_bytes=self.direct_bytes + other.direct_bytes,
        )

    def __sub__(self, other: "Count") -> "Count":
        return Count(
            staged=self.staged - other.staged,
            staged_bytes=self.staged_bytes - other.staged_bytes,
            direct=self.direct - other.direct,
            direct_bytes=self.direct_bytes - other.direct_bytes,
        )


class Counts:
    """A count for each pair that made a copy. Threads may add at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[Pair, Count] = {}

    def add(self, pair: Pair, size: int, *, staged: bool) -> None:
        """Count one copy of ``size`` bytes."""
        one = Count(staged=1, staged_bytes=size) if staged else Count(direct=1, direct_bytes=size)
        with self._lock:
            self._of[pair] = self._of.get(pair, Count()) + one

    def all(self) -> Mapping[Pair, Count]:
        """Return the counts as they are now; a pair without a copy is not in it."""
        with self._lock:
            return dict(self._of)
