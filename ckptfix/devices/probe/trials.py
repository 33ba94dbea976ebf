"""One copy over one ordered pair: poisoned before, compared twice after, and judged against the
host's own path.

The destination's memory first holds the complement of what will arrive, in the very block that the
copy writes to: a caching allocator hands back blocks that still hold the right bytes, and then a
copy that writes nothing looks right. The first comparison is a kernel, queued on the destination
behind the copy before the host waits for anything: it sees a late arrival. The second is the
host's, against the bits that it sent.

All that the probe knows of a pair comes over each device's own exchange with the host, so that is
proven first. When a copy is wrong, it is proven once more, before the pair is blamed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from msgspec import Struct

from ckptfix.devices.probe import payload
from ckptfix.devices.probe.cases import Case, Route, exact_size
from ckptfix.devices.probe.payload import Damage, Memory, bits, classify, compared, same
from ckptfix.devices.probe.probe_report import Kind
from ckptfix.devices.probe.task import Announce, Failure
from ckptfix.devices.torch_devices import device
from ckptfix.errors import CkptfixError
from ckptfix.hardware import Pair
from ckptfix.wording import count_of

_SIZES = (65541, 1, 4097, 70001, (8 << 20) + 5, *(4096 + 5 * index for index in range(50)))
_AGAIN = 3
_LARGE = 1 << 20
"""Bytes from which one more round trip has to do."""

REMEMBERED = 1 << 20
"""Bytes of earlier payloads that are kept, to know them when they arrive again."""

_GUARD = 64
"""Bytes to either side of a destination that no copy may write to. Keeps every dtype aligned."""

_KERNELS_BEFORE = 8
"""An even number, so that as many complements of the payload are the payload."""


class UnusableDevice(CkptfixError):
    """The device ``index`` fails in its own exchange with the host, so nothing can be said about
    its pairs.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"device {index}: {reason}")
        self.index = index


def prove(index: int, seed: int, memory: Memory, announce: Announce) -> Iterator[None]:
    """Send bytes to a device and back, and yield after each time. Raises UnusableDevice when others
    come back.
    """
    for number, size in enumerate(_SIZES):
        announce(f"host round trip of {exact_size(size)}")
        _round_trip(index, size, payload.seed_of(seed, "host", index, number), memory)
        announce(None)
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
            index, f"{exact_size(sent.numel())} sent from the host came back with wrong bytes"
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
            index,
            f"{count_of(wrong, 'wrong byte')} in {exact_size(size)} after a round trip to the host",
        )
    if not seen:
        raise UnusableDevice(
            index, f"its kernel reports two copies of the same {exact_size(size)} as unequal"
        )


class Copy(Struct, kw_only=True):
    """One copy that was queued, and what proves it: blocks of bytes on both devices and on the
    host.

    ``case``: in words; ``size``: bytes of its payload. ``source`` on the source device is what the
    host ``sent`` there. ``block`` is the destination; ``reference`` on the destination device and
    ``expected`` on the host are what it should be. ``seen``: the comparison by a kernel queued
    behind the copy; ``in_time``: its result. ``arrived``: what the host read of the block.
    """

    pair: Pair
    case: str
    size: int
    source: Any
    sent: Any
    block: Any
    reference: Any
    expected: Any
    seen: Any = None
    in_time: bool = False
    arrived: Any = None

    def read_back(self, memory: Any) -> None:
        """Wait for the copy, and read what arrived into memory of the host that holds no right
        byte.
        """
        self.in_time = bool(self.seen)
        self.arrived = memory.copy_(self.block)

    def failure(
        self, earlier: Sequence[Any] = (), payload_of: Callable[[Any], Any] = lambda block: block
    ) -> Failure | None:
        """Return what is wrong, or None. ``payload_of``: gives the payload's bytes in a block of
        the destination.

        ``earlier``: payloads that the pair carried before. Raises UnusableDevice when it is a
        device that lost bytes on their way from or to the host.
        """
        if self.in_time and same(self.arrived, self.expected):
            return None
        return Failure.of(self.pair, self._damage(earlier, payload_of), self.size, self.case)

    def _damage(self, earlier: Sequence[Any], payload_of: Callable[[Any], Any]) -> Damage:
        source, destination = self.pair
        still_holds(source, self.source, self.sent)
        still_holds(destination, self.reference, self.expected)
        prove_again(destination, self.block.numel())
        arrived, expected = (bits(payload_of(block)) for block in (self.arrived, self.expected))
        damage = classify(arrived, expected, held=~expected, earlier=earlier)
        if damage is not None:
            return damage
        if not same(self.arrived, self.expected):
            outside = self.arrived != self.expected
            return Damage(kind=Kind.OUTSIDE, first_offset=None, wrong_bytes=int(outside.sum()))
        if not bool(compared(self.block, self.reference)):
            raise UnusableDevice(destination, "its kernel reports equal bytes as unequal")
        return Damage(kind=Kind.LATE, first_offset=None, wrong_bytes=0)


class Sent(NamedTuple):
    """One payload on the host: the source's elements, and the destination's block before and after
    the copy.
    """

    source: Any
    before: Any
    after: Any


class Landing(Struct, frozen=True, kw_only=True):
    """The part of a block where the payload lands: past a guard, and in every second element where
    ``strided``.
    """

    case: Case

    @property
    def is_all(self) -> bool:
        """True if the copy itself makes the block, so that there is nothing next to it."""
        return self.case.route is Route.TO

    @property
    def strided(self) -> bool:
        """True if elements that are not written lie between those that are."""
        return self.case.route is Route.STRIDED_DESTINATION

    @property
    def _used(self) -> int:
        return self.case.size * (2 if self.strided else 1)

    @property
    def size(self) -> int:
        """Bytes of the block; with guards, of 64-bit words."""
        return self.case.size if self.is_all else _GUARD + self._used + -self._used % 8 + _GUARD

    def view(self, block: Any) -> Any:
        """Return the destination in a block."""
        elements = block if self.is_all else block[_GUARD : _GUARD + self._used]
        elements = elements.view(payload.dtype_of(self.case.dtype))
        if self.case.route is Route.TRANSPOSED:
            return elements.view(*_rectangle(self.case.count))
        return elements[::2] if self.strided else elements

    def bytes_of(self, block: Any) -> Any:
        """Return the destination's bytes in a block, as a view of uint8."""
        if not self.strided:
            return block if self.is_all else block[_GUARD : _GUARD + self._used]
        return block[_GUARD : _GUARD + self._used].view(self.case.count, 2, -1)[:, 0]


class PairTrials:
    """Copies over one ordered pair. ``announce`` gets a case before its copy, and None when all
    bytes are back.

    ``earlier`` remembers what this pair carried.
    """

    def __init__(
        self, pair: Pair, memory: Memory, earlier: "deque[Any]", announce: Announce
    ) -> None:
        self.pair = pair
        self._memory = memory
        self.source, self.destination = (device(index) for index in pair)
        self.unpoisoned = 0
        self._earlier = earlier
        self._announce = announce

    def run(self, case: Case, seed: int) -> Failure | None:
        """Make one copy and return what is wrong with it, or None.

        Raises UnusableDevice when it is a device's exchange with the host that is wrong, and
        whatever the copy raises.
        """
        landing = Landing(case=case)
        sent = _sent(landing, seed, self._memory)
        reference = self._memory.upload(sent.after, self.destination, "reference")
        source = self._laid_out(case, self._memory.upload(bits(sent.source), self.source, "source"))
        block = self._poisoned(landing, sent.before)
        address = block.data_ptr()
        self._announce(str(case))
        with self._streams(case):
            if landing.is_all:
                del block
                block = bits(source.to(self.destination))
                self.unpoisoned += block.data_ptr() != address
            else:
                landing.view(block).copy_(source, non_blocking=case.route is Route.NON_BLOCKING)
            seen = compared(block, reference)
        copy = Copy(
            pair=self.pair, case=str(case), size=case.size, source=bits(source),
            sent=bits(sent.source), block=block, reference=reference, expected=sent.after,
            seen=seen,
        )  # fmt: skip
        copy.read_back(sent.before)
        self._announce(None)
        failure = copy.failure(tuple(self._earlier), landing.bytes_of)
        self._earlier.append(bits(landing.view(sent.after))[:REMEMBERED].clone())
        return failure

    def _poisoned(self, landing: Landing, before: Any) -> Any:
        """Return the destination's block; for ``to()``, one that the allocator will hand out again
        at once.
        """
        if landing.is_all:
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
        source = payload.small_integers(
            memory.on_host(case.count, "integers"), case.source_dtype, seed
        )
        elements.copy_(source)
    else:
        payload.make_values(elements)
        source = elements.reshape(-1)
    before = memory.on_host(landing.size, "before").copy_(after)
    landing.bytes_of(before).bitwise_not_()
    return Sent(source, before, after)


def side_streams_exist() -> bool:
    """Return whether this torch can put work on another stream of any accelerator (from 2.6 on)."""
    return hasattr(torch, "accelerator") and hasattr(torch.Stream, "wait_stream")


@contextmanager
def on_side_streams(*devices: Any) -> Iterator[None]:
    """Put what is queued on these devices in the block on a stream of its own for each.

    It waits for what was queued before, and what is queued afterwards waits for it.
    """
    accelerator = torch.accelerator
    current = accelerator.current_device_index()
    usual = [accelerator.current_stream(device) for device in devices]
    aside = [torch.Stream(device=device) for device in devices]
    try:
        for before, stream in zip(usual, aside, strict=True):
            stream.wait_stream(before)
            accelerator.set_stream(stream)  # makes its device the current one
        accelerator.set_device_index(current)
        yield
    finally:
        for before, stream in zip(usual, aside, strict=True):
            before.wait_stream(stream)
            accelerator.set_stream(before)
        accelerator.set_device_index(current)
