"""The report of torch on itself and its devices: plain values of another process, checked once
here.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

Pair = tuple[int, int]
"""(index of the source device, index of the destination device)."""


class Device(Struct, frozen=True, kw_only=True):
    """A device as torch numbers it. ``pci``: its address, "" when torch does not say. ``memory``:
    bytes, 0 unknown.
    """

    index: int
    name: str = ""
    pci: str = ""
    memory: int = 0


class PairVerdict(Struct, frozen=True, kw_only=True):
    """Verdict of the probe on the copies of one ordered pair: verdict and kind of damage, in the
    probe's words.
    """

    pair: Pair
    verdict: str
    kind: str = ""


class Torch(Struct, frozen=True, kw_only=True):
    """Answers of torch from a process of its own.

    ``problem``: why it did not say all, "" when it did; ``stage``: what it was doing then
    ("import", "devices", ...). ``builds``: what it was built for ("cuda 12.8", "hip 6.2", "xpu"),
    () for a CPU build. ``kind``: the type of the accelerator, "" without one. ``verdicts``: what
    the probe found on this very hardware before, None when it has not been run.
    """

    version: str = ""
    builds: tuple[str, ...] = ()
    kind: str = ""
    devices: tuple[Device, ...] = ()
    warnings: tuple[str, ...] = ()
    stage: str = ""
    problem: str = ""
    verdicts: tuple[PairVerdict, ...] | None = None

    @property
    def count(self) -> int:
        """Return how many devices torch can use."""
        return len(self.devices)


def parse_torch(said: Mapping[str, Any]) -> Torch:
    """Return what the process said as a value; what it did not say is left at its default."""
    known = {key: value for key, value in said.items() if value is not None}
    return msgspec.convert(known, Torch, strict=False)
