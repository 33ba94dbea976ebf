"""Copies of more than 8 MiB. Their payloads are windows into one long row of random bytes that lies on every device.

The host made it and put it there, and has read it back, so making and sending 64 MiB anew for each copy is saved. Each
copy takes another window: no byte of it lies where it lay in the one before. A window is finite values of every float
dtype: hardware may rewrite the bits of a NaN that passes a kernel.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ckptfix.runtime.devices.pairs import Pair, device
from ckptfix.runtime.devices.probe import host_path, payload
from ckptfix.runtime.devices.probe.cases import Case, Route
from ckptfix.runtime.devices.probe.judging import REMEMBERED, Evidence, judge
from ckptfix.runtime.devices.probe.memory import Memory
from ckptfix.runtime.devices.probe.payload import compared, same
from ckptfix.runtime.devices.probe.task import Failure

_WINDOWS = 1 << 14
_STEP = 64
"""Bytes between the starts of two windows; keeps them aligned."""

_FINITE = 0xBFFF - (1 << 16)
"""In each word of 16 bits: an exponent with its highest bit clear is that of a finite number, in floats of any size."""


class Row:
    """The long row of bytes: on the host, with its complement, and on each device once it is proven to be there."""

    def __init__(self, size: int, seed: int) -> None:
        size += _WINDOWS * _STEP
        self.bytes = payload.random_bytes(size + size % 2, payload.seed_of(seed, "row"))
        self.bytes.view(torch.int16).bitwise_and_(_FINITE)
        self.complement = torch.bitwise_not(self.bytes)
        self._there: dict[int, Any] = {}

    def on(self, index: int) -> Any:
        """Return the row on a device. Raises UnusableDevice when the host reads other bytes there than it sent."""
        if index not in self._there:
            there = self.complement.to(device(index))
            there.copy_(self.bytes)
            host_path.still_holds(index, there, self.bytes)
            self._there[index] = there
        return self._there[index]


def run_large(
    case: Case,
    pair: Pair,
    row: Row,
    seed: int,
    memory: Memory,
    tell: Callable[[str | None], None],
    earlier: "deque[Any]",
) -> Failure | None:
    """Make one copy of a window and return what is wrong with it, or None. ``earlier`` remembers what the pair carried.

    Raises UnusableDevice when it is a device's exchange with the host that is wrong, and whatever the copy raises.
    """
    start = seed % _WINDOWS * _STEP
    window = slice(start, start + case.size)
    to = device(pair[1])
    source, reference = row.on(pair[0])[window], row.on(pair[1])[window]
    poison = row.complement[window]
    block = poison.to(to) if case.route is Route.TO else memory.upload(poison, to, "block")
    tell(str(case))
    if case.route is Route.TO:
        del block
        block = source.to(to)
    else:
        block.view(payload.dtype_of(case.dtype)).copy_(_laid_out(case, source))
    in_time = bool(compared(block, reference))
    back = memory.on_host(case.size, "back").copy_(poison).copy_(block)
    tell(None)
    expected = row.bytes[window]
    failure = None
    if not in_time or not same(back, expected):
        evidence = Evidence(
            source=source, sent=expected, block=block, arrived=back, reference=reference, expected=expected
        )
        failure = Failure.of(pair, judge(pair, evidence, earlier=tuple(earlier)), case.size, str(case))
    earlier.append(expected[:REMEMBERED].clone())
    return failure


def _laid_out(case: Case, window: Any) -> Any:
    """Return a window on the source device with the dtype that the case asks for, strided where it says so."""
    dense = window.view(payload.dtype_of(case.source_dtype or case.dtype))
    if case.route is not Route.STRIDED_SOURCE:
        return dense
    wide = dense.new_empty((case.count, 2))
    wide[:, 0].copy_(dense)
    return wide[:, 0]
