"""Copies over one ordered pair, or several: poisoned before, compared twice after, and judged
against the host's own path.

Payloads are windows into one long row of random bytes, which the host made and put on every device;
each batch takes another window. The destination first holds the complement of what will arrive: a
caching allocator hands back blocks that still hold the right bytes, and then a copy that writes
nothing looks right. The first comparison is a kernel, queued on the destination behind the copy
before the host waits for anything: it sees a late arrival. The second is the host's, byte by byte.

All that the probe knows of a pair comes over each device's own exchange with the host, so that is
proven first. When a copy is wrong, it is proven once more, before the pair is blamed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import torch
from msgspec import Struct

from ckptfix.devices.probe.cases import LARGE, LARGEST, Case, Route, exact_size
from ckptfix.devices.torch_devices import device
from ckptfix.errors import CkptfixError
from ckptfix.hardware import Pair
from ckptfix.wording import count_of

Announce = Callable[[str | None], None]
"""A function to call with words before anything that can hang, and with None after it."""

_WINDOWS = 1 << 14
_STEP = 64
"""Bytes between the starts of two windows; keeps them aligned."""

_FINITE = 0xBFFF - (1 << 16)
"""In each word of 16 bits: an exponent with its highest bit clear is that of a finite number, in
floats of any size. Hardware may rewrite the bits of a NaN that passes a kernel.
"""

_ROUND_TRIPS = (1, 999, 65541, *(4096 + 5 * index for index in range(20)), (1 << 20) + 1)
_SAMPLED = 4096
"""Elements of a large copy that are compared on its device: so many all over, and the last ones."""

_KERNELS_BEFORE = 8
"""An even number, so that as many complements of the payload are the payload."""

_AT_ONCE = 1 << 20
ROUNDS = 3
"""Rounds of all pairs at once."""


class Kind(Enum):
    """A kind of damage. The value is the word used in reports."""

    ZEROS = "zeros"
    UNWRITTEN = "not written"  # wrong bytes are those that the destination held before
    LATE = "late"  # right after the host has waited, wrong for the kernel queued behind the copy
    OTHER = "other bytes"
    ERROR = "error"  # the copy raised
    CRASH = "crash"  # the process died in the copy


class Failure(Struct, frozen=True, kw_only=True):
    """One copy that was wrong. ``first_offset``: of its first wrong byte, from the start of the
    destination; None where it came late. ``case``: in words.
    """

    pair: Pair
    kind: Kind
    first_offset: int | None = None
    wrong_bytes: int = 0
    case: str


class UnusableDevice(CkptfixError):
    """The device ``index`` fails in its own exchange with the host, so nothing can be said about
    its pairs.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"device {index}: {reason}")
        self.index = index


def seed_of(seed: int, *where: object) -> int:
    """Return a number of 63 bits from the probe's seed and a place in the probe."""
    text = repr((seed, *where)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


class Row:
    """The long row of bytes: on the host, with its complement, and on each device. ``largest``:
    bytes of the largest window. Keeps one destination of that size for each device, and what a
    batch is ``expected`` to be: to map and clear 64 MiB takes longer than to fill it.
    """

    def __init__(self, seed: int, largest: int = LARGEST) -> None:
        words = (largest + _WINDOWS * _STEP) // 8
        generator = torch.Generator(device="cpu").manual_seed(seed_of(seed, "row"))
        random = torch.empty(words, dtype=torch.int64, device="cpu")
        random.random_(-(2**63), None, generator=generator)
        self.bytes = random.view(torch.uint8)
        self.bytes.view(torch.int16).bitwise_and_(_FINITE)
        self.complement = torch.bitwise_not(self.bytes)
        self._there: dict[int, Any] = {}
        self._blocks: dict[int, Any] = {}
        self._back = torch.empty_like(self.bytes)
        self.expected = torch.empty_like(self.bytes)

    def on(self, index: int) -> Any:
        """Return the row on a device."""
        if index not in self._there:
            self._there[index] = self.bytes.to(device(index))
        return self._there[index]

    def window(self, size: int, seed: int) -> slice:
        """Return the place of a window of ``size`` bytes."""
        start = seed % _WINDOWS * _STEP
        return slice(start, start + size)

    def poisoned(self, index: int, window: slice) -> Any:
        """Return a block on a device that holds the complement of a window."""
        if index not in self._blocks:
            self._blocks[index] = torch.empty_like(self.on(index))
        size = window.stop - window.start
        return self._blocks[index][:size].copy_(self.complement[window])

    def read_back(self, block: Any) -> Any:
        """Return the bytes of a block, in memory of the host that is used again."""
        return self._back[: block.numel()].copy_(block)

    def prove_host(
        self, index: int, announce: Announce, largest: int | None = None
    ) -> Iterator[None]:
        """Send bytes to a device and back, and yield after each time, ``largest`` bytes (None: the
        row) last. Raises UnusableDevice when other bytes come back.
        """
        reference = self.on(index)
        for size in (*_ROUND_TRIPS, self.bytes.numel() if largest is None else largest):
            announce(f"host round trip of {exact_size(size)}")
            there = self.poisoned(index, slice(0, size)).copy_(self.bytes[:size])
            equal = bool(queue_comparison(there, reference[:size]))
            # Proves that the comparison can fail; a single byte may be that of the other place.
            shifted = reference[_STEP : size + _STEP]
            differs = not 256 < shifted.numel() == size or not bool(
                queue_comparison(there, shifted)
            )
            wrong = self._wrong_on_host(there)
            announce(None)
            if wrong:
                trip = f"{exact_size(size)} after a round trip to the host"
                raise UnusableDevice(index, f"{count_of(wrong, 'wrong byte')} in {trip}")
            if not equal or not differs:
                raise UnusableDevice(index, f"its kernels compare {exact_size(size)} wrongly")
            yield
        if largest is None and self._wrong_on_host(reference):
            raise UnusableDevice(index, "bytes sent from the host came back wrong")

    def _wrong_on_host(self, block: Any) -> int:
        """Return how many bytes of a block are not the row's when the host reads them, into memory
        in which each is wrong: it held the right ones the time before.
        """
        size = block.numel()
        self._back[:size].copy_(self.complement[:size])
        return _count_wrong(self.read_back(block), self.bytes[:size])


def queue_comparison(arrived: Any, expected: Any) -> Any:
    """Queue a comparison on the device of two tensors, and return what it will give: a tensor of
    one bool.

    Of large ones, samples are compared: that shows better what comes late, being faster.
    """
    if arrived.numel() * arrived.element_size() < LARGE:
        return (arrived == expected).all()
    step = arrived.numel() // _SAMPLED
    return (arrived[::step] == expected[::step]).all() & (
        arrived[-_SAMPLED:] == expected[-_SAMPLED:]
    ).all()


def _count_wrong(arrived: Any, expected: Any) -> int:
    """Return how many of the bytes on the host differ."""
    whole = arrived.numel() // 8 * 8
    words = (block[:whole].view(torch.int64) for block in (arrived, expected))
    # Words compare six times as fast as bytes.
    if torch.equal(*words) and torch.equal(arrived[whole:], expected[whole:]):
        return 0
    return int((arrived != expected).sum())


def landing(case: Case, slot: Any) -> Any:
    """Return the part of a slot's bytes that the copy writes, as the tensor that it writes to."""
    elements = slot[: case.reach].view(case.torch_dtype)
    if case.route is Route.STRIDED_DESTINATION:
        return elements[::2]
    if case.route is Route.TRANSPOSED:
        rows = max(factor for factor in range(1, 513) if case.count % factor == 0)
        return elements.view(rows, -1)
    return elements


def _laid_out(case: Case, values: Any) -> Any:
    """Return the payload on its source device in the layout that the case asks for."""
    match case.route:
        case Route.STRIDED_DESTINATION:
            return values.contiguous()
        case Route.STRIDED_SOURCE:
            wide = values.new_empty((case.count, 2))
            wide[:, 0].copy_(values)
            return wide[:, 0]
        case Route.TRANSPOSED:
            return values.t().contiguous().t()
        case Route.CONVERTING:
            return values.view(torch.int8)
    return values


def side_streams_exist() -> bool:
    """Return whether this torch can put work on another stream of any accelerator (from 2.6 on)."""
    return hasattr(torch, "accelerator") and hasattr(torch.Stream, "wait_stream")


def make_batch(
    cases: Sequence[Case], pair: Pair, row: Row, seed: int, announce: Announce
) -> list[Failure]:
    """Make these copies, all queued before the host waits once, and return those that were wrong.

    A small copy that is made alone takes mostly waiting. Raises UnusableDevice when it is a device
    that lost bytes on their way from or to the host, and whatever a copy raises.
    """
    *starts, total = accumulate((case.slot for case in cases), initial=0)
    slots = [slice(start, start + case.slot) for start, case in zip(starts, cases, strict=True)]
    window = row.window(total, seed)
    source, reference = (row.on(index)[window] for index in pair)
    block = row.poisoned(pair[1], window)
    laid_out = [
        _laid_out(case, landing(case, source[slot]))
        for case, slot in zip(cases, slots, strict=True)
    ]
    # A hang is blamed on these words.
    announce(str(cases[0]) if len(cases) == 1 else f"{len(cases)} copies, such as {cases[0]}")
    seen, elsewhere = [], []
    for case, slot, payload in zip(cases, slots, laid_out, strict=True):
        there, expected = landing(case, block[slot]), landing(case, reference[slot])
        if case.route is Route.AFTER_KERNELS:
            for _ in range(_KERNELS_BEFORE):
                payload = payload.bitwise_not()
        with _streams(case, pair):
            if case.route is Route.TO:
                # The allocator hands out this block again at once.
                poison = there.clone()
                del poison
                made = payload.to(device(pair[1]))
                seen.append(queue_comparison(made, expected))
                elsewhere.append((there, made))
            else:
                there.copy_(payload, non_blocking=case.route is Route.NON_BLOCKING)
                seen.append(queue_comparison(there, expected))
    in_time = torch.stack(seen).tolist()
    for there, made in elsewhere:
        there.copy_(made)
    arrived = row.read_back(block)
    announce(None)
    sent, poison = row.bytes[window], row.complement[window]
    if cases[0].size >= LARGE and all(in_time):
        # It is alone, and dense where it arrives: that saves building 64 MiB to compare with.
        end = cases[0].reach
        if torch.equal(arrived[end:], poison[end:]) and not _count_wrong(arrived[:end], sent[:end]):
            return []
    expected = row.expected[:total].copy_(poison)
    for case, slot in zip(cases, slots, strict=True):
        landing(case, expected[slot]).copy_(landing(case, sent[slot]))
    if all(in_time) and not _count_wrong(arrived, expected):
        return []
    judged = [
        _judged(pair, str(case), arrived[slot], expected[slot], poison[slot], was_in_time)
        for case, slot, was_in_time in zip(cases, slots, in_time, strict=True)
    ]
    _prove_again(row, pair, total)
    return [failure for failure in judged if failure is not None]


def all_at_once(pairs: Sequence[Pair], row: Row, seed: int, announce: Announce) -> list[Failure]:
    """Queue a copy on every pair before the host waits for one of them; return those that were
    wrong.
    """
    windows = {pair: row.window(_AT_ONCE, seed_of(seed, "at once", *pair)) for pair in pairs}
    sources = {pair: row.on(pair[0])[window] for pair, window in windows.items()}
    references = {pair: row.on(pair[1])[window] for pair, window in windows.items()}
    blocks = {pair: row.complement[window].to(device(pair[1])) for pair, window in windows.items()}
    what = (
        f"{exact_size(_AT_ONCE)} over {pairs[0][0]} -> {pairs[0][1]} and back at once"
        if len(pairs) == 2
        else f"{exact_size(_AT_ONCE)} with all {len(pairs)} pairs at once"
    )
    announce(what)
    for pair in pairs:
        blocks[pair].copy_(sources[pair], non_blocking=True)
    seen = {pair: queue_comparison(blocks[pair], references[pair]) for pair in pairs}
    in_time = {pair: bool(result) for pair, result in seen.items()}
    arrived = {pair: row.complement[windows[pair]].clone().copy_(blocks[pair]) for pair in pairs}
    announce(None)
    failures = []
    for pair, window in windows.items():
        sent, poison = row.bytes[window], row.complement[window]
        failure = _judged(pair, what, arrived[pair], sent, poison, in_time[pair])
        if failure is not None:
            _prove_again(row, pair, _AT_ONCE)
            failures.append(failure)
    return failures


def _judged(
    pair: Pair, case: str, arrived: Any, expected: Any, poison: Any, in_time: bool
) -> Failure | None:
    """Return what is wrong with bytes that the host read, or that they came late; None if
    neither.
    """
    count = _count_wrong(arrived, expected)
    if not count:
        return None if in_time else Failure(pair=pair, kind=Kind.LATE, case=case)
    wrong = arrived != expected
    # A few bytes may be zero, or what was there before, by chance.
    if count > 8 and not bool((wrong & (arrived != 0)).any()):
        kind = Kind.ZEROS
    elif count > 8 and not bool((wrong & (arrived != poison)).any()):
        kind = Kind.UNWRITTEN
    else:
        kind = Kind.OTHER
    first = int(wrong.to(torch.uint8).argmax())
    return Failure(pair=pair, kind=kind, first_offset=first, wrong_bytes=count, case=case)


def _prove_again(row: Row, pair: Pair, size: int) -> None:
    """Raise UnusableDevice when a device of the pair loses bytes on their way from or to the
    host.
    """
    for index in pair:
        for _ in row.prove_host(index, lambda stage: None, size):
            pass


@contextmanager
def _streams(case: Case, pair: Pair) -> Iterator[None]:
    """Put what is queued on the pair's devices in the block on a stream of its own for each, where
    the case asks for it.

    It waits for what was queued before, and what is queued afterwards waits for it.
    """
    if case.route is not Route.SIDE_STREAMS:
        yield
        return
    accelerator = torch.accelerator
    current = accelerator.current_device_index()
    usual = [accelerator.current_stream(device(index)) for index in pair]
    aside = [torch.Stream(device=device(index)) for index in pair]
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
