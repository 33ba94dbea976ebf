"""Copies that the probe makes over each ordered pair: one fixed plan, the same for every pair.

torch has two engines for a copy from device to device. Equal dtypes and dense, equal layouts go as
one memcpy; anything else goes, with peer access, as a kernel that writes into the other device's
memory. Either may be broken alone, so either gets its own repeats.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from msgspec import Struct

from ckptfix.wording import human_size

REPEATS = 459
"""Small copies by each engine. A fault that hits a share p of the copies shows in n of them with
the chance 1 - (1 - p) ** n: 459 find one of 1 % with 99 %.
"""

LARGE = 8 << 20
"""Bytes from which a copy is large: made alone, and compared on its device by samples."""

GUARD = 64
"""Bytes behind each destination that no copy may write to. Keeps every dtype aligned."""

_LARGEST_BATCH = 3 << 20


class Route(Enum):
    """A way of asking for a copy. The value is for reports."""

    TO = "to()"
    COPY = "copy_()"
    NON_BLOCKING = "copy_(non_blocking=True)"
    AFTER_KERNELS = "copy_() queued behind kernels"
    SIDE_STREAMS = "copy_() on side streams"
    STRIDED_SOURCE = "copy_() from a strided tensor"
    STRIDED_DESTINATION = "copy_() into a strided tensor"
    TRANSPOSED = "copy_() from a transposed tensor"
    CONVERTING = "converting copy_()"


# No memcpy can do these.
_BY_KERNEL = (
    Route.STRIDED_SOURCE,
    Route.STRIDED_DESTINATION,
    Route.TRANSPOSED,
    Route.CONVERTING,
)


class Case(Struct, frozen=True, kw_only=True):
    """One copy of ``count`` elements."""

    route: Route
    count: int
    dtype: str = "uint8"

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return self.count * int(self.torch_dtype.itemsize)

    @property
    def torch_dtype(self) -> Any:
        """The dtype of the destination."""
        return getattr(torch, self.dtype)

    @property
    def reach(self) -> int:
        """Bytes from the first to the last one that is written."""
        return self.size * (2 if self.route is Route.STRIDED_DESTINATION else 1)

    @property
    def slot(self) -> int:
        """Bytes of the destination with its guard: whole 64-bit words."""
        return self.reach + -self.reach % GUARD + GUARD

    @property
    def kind(self) -> str:
        """The size and the engine, in words: copies of one kind are counted together.

        Where the driver offers no peer access, torch gathers strided and converting copies first
        and sends them as it sends dense ones.
        """
        size = "small" if self.size < LARGE else "large"
        return f"{size} {'strided or converting' if self.route in _BY_KERNEL else 'dense'}"

    def __str__(self) -> str:
        return f"{self.route.value} of {exact_size(self.size)}, {self.dtype}"


def exact_size(size: int) -> str:
    """Return a size for people that is exact: 64.0 MiB + 13 B."""
    for unit in (1 << 20, 1 << 10):
        whole, rest = divmod(size, unit)
        if whole and rest < 1024:
            return human_size(whole * unit) + (f" + {rest} B" if rest else "")
    return f"{size} B"


def _plan() -> Iterator[Case]:
    # Counts that two small factors make, for the transposed tensor: 27 x 37, 3 x 21847, 17 x 61681.
    for count in (65541, 999, (1 << 20) + 1):
        for route in Route:
            yield Case(route=route, count=count)
    engines = (Route.COPY, Route.STRIDED_SOURCE)
    for dtype in ("int64", "float16"):
        for route in engines:
            yield Case(route=route, count=4099, dtype=dtype)
    # 16 KiB + 5 B: more than three pages. In fewer, a fault that loses every second page does no
    # harm. The dtypes take turns in blocks, since a fault may hit every second or third copy.
    dtypes = ("uint8", "float32", "bfloat16")
    for number in range(REPEATS):
        dtype = dtypes[number * len(dtypes) // REPEATS]
        size = getattr(torch, dtype).itemsize
        for route in engines:
            yield Case(route=route, count=(4 * 4096 + 5 + size - 1) // size, dtype=dtype)
    # What a split model sends.
    for dtype in ("float32", "bfloat16", "float16"):
        for route in engines:
            yield Case(route=route, count=LARGE // getattr(torch, dtype).itemsize + 3, dtype=dtype)
    # Faults are known that begin at 32 MB. The bits of int8 stay in uint8, but a kernel copies.
    for route in (Route.COPY, Route.CONVERTING):
        yield Case(route=route, count=(64 << 20) + 13)


PLAN = tuple(_plan())

LARGEST_COPY = max(case.size for case in PLAN)
"""Bytes of the largest payload."""

LARGEST = max(case.slot for case in PLAN)
"""Bytes of the largest slot."""


def _batches() -> Iterator[tuple[Case, ...]]:
    batch: list[Case] = []
    size = 0
    for case in PLAN:
        if batch and size + case.slot > _LARGEST_BATCH:
            yield tuple(batch)
            batch, size = [], 0
        batch.append(case)
        size += case.slot
    yield tuple(batch)


BATCHES = tuple(_batches())
"""The plan in its order: small copies that are queued together, and large ones alone."""
