"""A device's own exchange with the host. All that the probe knows of a pair comes over it, so it is proven first.

With larger payloads it is proven where they are put on the device: see ``large.Row``.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ckptfix.errors import CkptfixError
from ckptfix.runtime.devices.pairs import device
from ckptfix.runtime.devices.probe import payload
from ckptfix.runtime.devices.probe.cases import exact_size
from ckptfix.runtime.devices.probe.memory import Memory
from ckptfix.runtime.devices.probe.payload import compared, same

_SIZES = (65541, 1, 4097, 70001, (8 << 20) + 5, *(4096 + 5 * index for index in range(50)))
_AGAIN = 3
_LARGE = 1 << 20
"""Bytes from which one more round trip has to do."""


class UnusableDevice(CkptfixError):
    """The device ``index`` fails in its own exchange with the host, so nothing can be said about its pairs."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"device {index}: {reason}")
        self.index = index


def prove(index: int, seed: int, memory: Memory, tell: Callable[[str | None], None]) -> Iterator[None]:
    """Send bytes to a device and back, and yield after each time. Raises UnusableDevice when others come back."""
    for number, size in enumerate(_SIZES):
        tell(f"host round trip of {exact_size(size)}")
        _round_trip(index, size, payload.seed_of(seed, "host", index, number), memory)
        tell(None)
        yield


def prove_again(index: int, size: int) -> None:
    """Look once more, when a copy was wrong, with payloads of its size."""
    for number in range(_AGAIN if size < _LARGE else 1):
        _round_trip(index, size, payload.seed_of(size, "again", index, number), Memory())


def still_holds(index: int, block: Any, sent: Any) -> None:
    """Raise UnusableDevice unless the bytes on a device are those that the host sent there."""
    back = torch.bitwise_not(sent)
    back.copy_(block)
    if not same(back, sent):
        raise UnusableDevice(
            index, f"{exact_size(sent.numel())} sent from the host are not what it gives back"
        )


def _round_trip(index: int, size: int, seed: int, memory: Memory) -> None:
    sent = payload.fill(memory.on_host(size, "after"), seed)
    complement = torch.bitwise_not(sent, out=memory.on_host(size, "before"))
    there = memory.upload(complement, device(index), "block")
    there.copy_(sent)
    seen = bool(compared(there, memory.upload(sent, device(index), "reference")))
    back = complement.copy_(there)  # into memory in which every byte is wrong
    if not same(back, sent):
        wrong = int((back != sent).sum())
        raise UnusableDevice(
            index, f"{wrong} of {exact_size(size)} are wrong after a round trip from the host and back"
        )
    if not seen:
        raise UnusableDevice(
            index, f"its kernel finds {exact_size(size)} from the host unequal to themselves"
        )
