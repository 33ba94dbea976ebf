"""One copy over one ordered pair: poisoned before, compared twice after.

The destination's memory first holds the complement of what will arrive, in the very block that the copy writes to: a
caching allocator hands back blocks that still hold the right bytes, and then a copy that writes nothing looks right.
The first comparison is a kernel, queued on the destination behind the copy before the host waits for anything: it sees
a late arrival. The second is the host's, against the bits that it sent.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckptfix.runtime.devices.pairs import Pair, device
from ckptfix.runtime.devices.probe import payload
from ckptfix.runtime.devices.probe.cases import Case, Route
from ckptfix.runtime.devices.probe.judging import REMEMBERED, Evidence, judge
from ckptfix.runtime.devices.probe.memory import Memory
from ckptfix.runtime.devices.probe.payload import bits, compared, same
from ckptfix.runtime.devices.probe.streams import on_side_streams
from ckptfix.runtime.devices.probe.task import Failure

_GUARD = 64
"""Bytes to either side of a destination that no copy may write to. Keeps every dtype aligned."""

_KERNELS_BEFORE = 8
"""An even number, so that as many complements of the payload are the payload."""


class Sent(NamedTuple):
    """One payload on the host: the source's elements, and the destination's block before and after the copy."""

    source: Any
    before: Any
    after: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Where in a block of bytes the payload lands: past a guard, and in every second element where ``strided``."""

    case: Case

    @property
    def whole(self) -> bool:
        """Whether the copy itself makes the block, so that there is nothing beside it."""
        return self.case.route is Route.TO

    @property
    def strided(self) -> bool:
        """Whether elements that are not written lie between those that are."""
        return self.case.route is Route.STRIDED_DESTINATION

    @property
    def _used(self) -> int:
        return self.case.size * (2 if self.strided else 1)

    @property
    def size(self) -> int:
        """Bytes of the block; with guards, of 64-bit words."""
        return self.case.size if self.whole else _GUARD + self._used + -self._used % 8 + _GUARD

    def view(self, block: Any) -> Any:
        """Return the destination in a block."""
        elements = block if self.whole else block[_GUARD : _GUARD + self._used]
        elements = elements.view(payload.dtype_of(self.case.dtype))
        if self.case.route is Route.TRANSPOSED:
            return elements.view(*_rectangle(self.case.count))
        return elements[::2] if self.strided else elements

    def bytes_of(self, block: Any) -> Any:
        """Return the destination's bytes in a block, as a view of uint8."""
        if not self.strided:
            return block if self.whole else block[_GUARD : _GUARD + self._used]
        return block[_GUARD : _GUARD + self._used].view(self.case.count, 2, -1)[:, 0]


class PairTrials:
    """Copies over one ordered pair. ``tell`` is called with a case before its copy, and with None when all is back.

    ``earlier`` remembers what this pair carried.
    """

    def __init__(
        self, pair: Pair, memory: Memory, earlier: "deque[Any]", tell: Callable[[str | None], None]
    ) -> None:
        self.pair = pair
        self._memory = memory
        self.source, self.destination = (device(index) for index in pair)
        self.unpoisoned = 0
        self._earlier = earlier
        self._tell = tell

    def run(self, case: Case, seed: int) -> Failure | None:
        """Make one copy and return what is wrong with it, or None.

        Raises UnusableDevice when it is a device's exchange with the host that is wrong, and whatever the copy raises.
        """
        landing = Landing(case=case)
        sent = _sent(landing, seed, self._memory)
        reference = self._memory.upload(sent.after, self.destination, "reference")
        source = self._laid_out(case, self._memory.upload(bits(sent.source), self.source, "source"))
        block = self._poisoned(landing, sent.before)
        address = block.data_ptr()
        self._tell(str(case))
        with self._streams(case):
            if landing.whole:
                del block
                block = bits(source.to(self.destination))
                self.unpoisoned += block.data_ptr() != address
            else:
                landing.view(block).copy_(source, non_blocking=case.route is Route.NON_BLOCKING)
            seen = compared(block, reference)
        in_time = bool(seen)
        back = sent.before.copy_(block)  # into host memory that holds no right byte either
        self._tell(None)
        failure = None
        if not in_time or not same(back, sent.after):
            evidence = Evidence(
                source=bits(source),
                sent=bits(sent.source),
                block=block,
                arrived=back,
                reference=reference,
                expected=sent.after,
            )
            damage = judge(self.pair, evidence, landing.bytes_of, tuple(self._earlier))
            failure = Failure.of(self.pair, damage, case.size, str(case))
        self._earlier.append(bits(landing.view(sent.after))[:REMEMBERED].clone())
        return failure

    def _poisoned(self, landing: Landing, before: Any) -> Any:
        """Return the destination's block; for ``to()``, one that the allocator will hand out again at once."""
        if landing.whole:
            return before.to(self.destination)
        return self._memory.upload(before, self.destination, "block")

    def _laid_out(self, case: Case, payload_bytes: Any) -> Any:
        """Return the payload on the source device in the layout that the case asks for."""
        dense = payload_bytes.view(payload.dtype_of(case.source_dtype or case.dtype))
        if case.route is Route.STRIDED_SOURCE:
            wide = torch.empty((case.count, 2), dtype=dense.dtype, device=dense.device)
            wide[:, 0].copy_(dense)
            return wide[:, 0]
        if case.route is Route.TRANSPOSED:
            return dense.view(*_rectangle(case.count)).t().contiguous().t()
        if case.route is Route.AFTER_KERNELS:
            for _ in range(_KERNELS_BEFORE):
                dense = dense.bitwise_not()
        return dense

    def _streams(self, case: Case) -> AbstractContextManager[None]:
        if case.route is Route.SIDE_STREAMS:
            return on_side_streams(self.source, self.destination)
        return nullcontext()


def _rectangle(count: int) -> tuple[int, int]:
    """Return two factors of ``count``, as near to each other as small ones allow."""
    rows = max(factor for factor in range(1, 513) if count % factor == 0)
    return rows, count // rows


def _sent(landing: Landing, seed: int, memory: Memory) -> Sent:
    case = landing.case
    after = payload.fill(memory.on_host(landing.size, "after"), seed)
    elements = landing.view(after)
    if case.source_dtype:
        source = payload.small_integers(memory.on_host(case.count, "integers"), case.source_dtype, seed)
        elements.copy_(source)
    else:
        payload.make_values(elements)
        source = elements.reshape(-1)
    before = memory.on_host(landing.size, "before").copy_(after)
    landing.bytes_of(before).bitwise_not_()
    return Sent(source, before, after)
