"""Many small copies, very large copies, and copies that depend on each other."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ckptfix.devices.probe import payload
from ckptfix.devices.probe import trials as host_path
from ckptfix.devices.probe.cases import Case, Route, exact_size
from ckptfix.devices.probe.payload import Damage, Memory, classify, compared, free_memory, same
from ckptfix.devices.probe.probe_report import Kind
from ckptfix.devices.probe.task import Failure
from ckptfix.devices.probe.trials import REMEMBERED, Evidence, judge
from ckptfix.devices.routing import bypassed
from ckptfix.devices.torch_devices import Pair, device
from ckptfix.errors import CkptfixError
from ckptfix.wording import human_size

# Payloads that are windows into one long row of random bytes, which lies on every device: copies of more
# than 8 MiB.
#
# The host made the row and put it there, and has read it back, so making and sending 64 MiB anew for each
# copy is saved. Each copy takes another window: no byte of it lies where it lay in the one before. A window
# is finite values of every float dtype: hardware may rewrite the bits of a NaN that passes a kernel.
#
# Pairs without a device in common may copy at once: all copies are queued before the host waits for the
# first.

_WINDOWS = 1 << 14
_STEP = 64
"""Bytes between the starts of two windows; keeps them aligned."""

_FINITE = 0xBFFF - (1 << 16)
"""In each word of 16 bits: an exponent with its highest bit clear is that of a finite number, in floats of any size."""

_BESIDE = 24 << 20
"""Bytes of a device that are left for what copies and comparisons need beside their payloads."""

_PATIENCE = 60.0
"""Seconds that pairs wait for each other. Longer than a hang is waited for, so that one that hangs is found as such."""

_LEAST = 4 << 20
"""Bytes of the row below which no batch of small copies fits."""


class NoRoom(CkptfixError):
    """A device has too little free memory for some copies: ``what``, in words."""

    def __init__(self, what: str, index: int, free: int) -> None:
        super().__init__(
            f"device {index} has only {human_size(free)} free. To measure before a model fills it: "
            "ckptfix doctor --peer-copies"
        )
        self.what = what


class Row:
    """The long row of bytes: on the host, with its complement, and on each device once it is proven to be there.

    A device with little free memory holds the beginning of it.
    """

    def __init__(self, size: int, seed: int) -> None:
        size += _WINDOWS * _STEP
        self.bytes = payload.random_bytes(size + size % 2, payload.seed_of(seed, "row"))
        self.bytes.view(torch.int16).bitwise_and_(_FINITE)
        self.complement = torch.bitwise_not(self.bytes)
        self._there: dict[int, Any] = {}
        self._free: dict[int, int] = {}

    def on(self, index: int) -> Any:
        """Return the row on a device. Raises NoRoom.

        Whether it is right there is looked at where a copy is found wrong, before a pair is blamed.
        """
        if index not in self._there:
            self._there[index] = self.bytes[: self._fitting(index)].to(device(index))
        return self._there[index]

    def prove(self, index: int) -> None:
        """Put the row on a device, over its complement. Raises UnusableDevice when the host reads other bytes there."""
        size = int(self.on(index).numel())
        there = self._there[index].copy_(self.complement[:size])
        there.copy_(self.bytes[:size])
        host_path.still_holds(index, there, self.bytes[:size])

    def window(self, pair: Pair, size: int, seed: int, what: str) -> slice:
        """Return where a window of ``size`` bytes lies. Raises NoRoom when a device of the pair holds too little."""
        least = min(pair, key=lambda index: int(self.on(index).numel()))
        spare = int(self.on(least).numel()) - size
        if spare < 0:
            raise NoRoom(what, least, self._free[least])
        start = seed % min(_WINDOWS, spare // _STEP + 1) * _STEP
        return slice(start, start + size)

    def _fitting(self, index: int) -> int:
        size = int(self.bytes.numel())
        free = free_memory(index)
        if free is None:
            return size
        self._free[index] = free
        # As much again for the destination, and for a copy that makes its own.
        size = min(size, (free - _BESIDE) // 3 // _STEP * _STEP)
        if size < _LEAST:
            raise NoRoom("copies", index, free)
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """One copy that is under way: its ``block`` at the destination, and what a kernel behind it will have seen."""

    case: Case
    pair: Pair
    window: slice
    block: Any
    seen: Any


def queue_large(case: Case, pair: Pair, row: Row, seed: int, memory: Memory) -> Queued:
    """Queue one copy of a window, poisoned before and compared behind, without waiting for it."""
    window = row.window(pair, case.size, seed, f"copies of {exact_size(case.size)}")
    to = device(pair[1])
    source, reference = row.on(pair[0])[window], row.on(pair[1])[window]
    if case.route is Route.TO:
        block = row.complement[window].to(to)
        del block
        block = source.to(to)
    else:
        block = memory.upload(row.complement[window], to, "block")
        block.view(payload.dtype_of(case.dtype)).copy_(laid_out(case, source))
    return Queued(case=case, pair=pair, window=window, block=block, seen=compared(block, reference))


def read_back(queued: Queued, memory: Memory) -> tuple[bool, Any]:
    """Wait for a copy; return what the kernel behind it saw, and the bytes that the host reads there."""
    in_time = bool(queued.seen)
    return in_time, memory.on_host(queued.case.size, f"back from {queued.pair[1]}").copy_(queued.block)


def judge_large(queued: Queued, in_time: bool, back: Any, row: Row, earlier: "deque[Any]") -> Failure | None:
    """Return what is wrong with a copy, or None. ``earlier`` remembers what the pair carried.

    Raises UnusableDevice when it is a device's exchange with the host that is wrong.
    """
    expected, failure = row.bytes[queued.window], None
    if not in_time or not same(back, expected):
        evidence = Evidence(
            source=row.on(queued.pair[0])[queued.window],
            sent=expected,
            block=queued.block,
            arrived=back,
            reference=row.on(queued.pair[1])[queued.window],
            expected=expected,
        )
        damage = judge(queued.pair, evidence, earlier=tuple(earlier))
        failure = Failure.of(queued.pair, damage, queued.case.size, str(queued.case))
    earlier.append(expected[:REMEMBERED].clone())
    return failure


def run_large(
    case: Case,
    pairs: Sequence[Pair],
    row: Row,
    seeds: Sequence[int],
    memory: Memory,
    tell: Callable[[str | None], None],
    earlier: "Callable[[Pair], deque[Any]]",
) -> tuple[Failure, ...]:
    """Make one copy over each of these pairs, which have no device in common, and return what is wrong with them.

    Raises UnusableDevice, NoRoom, and whatever a copy raises.
    """
    for pair in pairs:  # before anything is queued: putting the row somewhere makes the host wait
        row.window(pair, case.size, 0, f"copies of {exact_size(case.size)}")
    all_queued = threading.Barrier(len(pairs))

    def copied(pair: Pair, seed: int) -> tuple[Queued, bool, Any]:
        try:
            with bypassed(counted=False):
                queued = queue_large(case, pair, row, seed, memory)
                all_queued.wait(_PATIENCE)
                return queued, *read_back(queued, memory)
        except BaseException:
            all_queued.abort()  # which ends the others' waiting
            raise

    tell(str(case) + (f" over {len(pairs)} pairs without a device in common" if len(pairs) > 1 else ""))
    if len(pairs) == 1:
        done = [copied(pairs[0], seeds[0])]
    else:
        with ThreadPoolExecutor(len(pairs)) as pool:  # much of it is the host's work, on bytes that came back
            done = list(pool.map(copied, pairs, seeds))
    tell(None)
    found = (judge_large(*one, row, earlier(one[0].pair)) for one in done)
    return tuple(failure for failure in found if failure is not None)


def laid_out(case: Case, window: Any) -> Any:
    """Return a window on the source device with the dtype that the case asks for, strided where it says so."""
    dense = window.view(payload.dtype_of(case.source_dtype or case.dtype))
    if case.route is not Route.STRIDED_SOURCE:
        return dense
    wide = dense.new_empty((case.count, 2))
    wide[:, 0].copy_(dense)
    return wide[:, 0]


# Many small copies over one pair, all queued before the host waits once: what a single one takes is mostly
# waiting.
#
# Their payloads are slots of a window into the long row (see ``large``), with a guard behind each. Every
# slot is poisoned before, and compared by a kernel queued right behind its own copy; the host compares them
# all, and the guards, in the end.

LARGEST = 3 << 20
"""Bytes of a batch; what is left of a section after it is the next one."""

_GUARD = 64
"""Bytes behind each slot that no copy may write to."""


def _guarded(size: int) -> int:
    """Return the bytes that a payload takes in a window: whole words, and a guard behind it."""
    return size + -size % _GUARD + _GUARD


def next_batch(cases: Sequence[Case]) -> Sequence[Case]:
    """Return as many of the first cases as make one batch: at least one."""
    total = 0
    for count, case in enumerate(cases):
        total += _guarded(case.size)
        if total > LARGEST:
            return cases[: max(count, 1)]
    return cases


def run_batch(
    cases: Sequence[Case],
    pair: Pair,
    row: Row,
    seed: int,
    memory: Memory,
    tell: Callable[[str | None], None],
    earlier: "deque[Any]",
    most: int,
) -> tuple[Failure, ...]:
    """Make these copies and return what is wrong with them, at most ``most`` of it.

    Raises UnusableDevice, NoRoom, and whatever a copy raises.
    """
    sizes = [case.size for case in cases]
    *starts, whole = accumulate(map(_guarded, sizes), initial=0)
    slots = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    what = f"{len(cases)} copies at once, such as {cases[0]}"
    window = row.window(pair, whole, seed, what)
    source, reference = (row.on(index)[window] for index in pair)
    block = row.complement[window].to(device(pair[1]))
    tell(what)
    seen = []
    for case, slot in zip(cases, slots, strict=True):
        block[slot].view(payload.dtype_of(case.dtype)).copy_(laid_out(case, source[slot]))
        seen.append(compared(block[slot], reference[slot]))
    in_time = torch.stack(seen).tolist()
    back = memory.on_host(whole, "batch").copy_(block)
    tell(None)
    sent, expected = row.bytes[window], row.complement[window].clone()
    for slot in slots:
        expected[slot] = sent[slot]
    failures: list[Failure] = []
    if not all(in_time) or not same(back, expected):
        carried = [*earlier, *(sent[slot] for slot in slots)]
        for number, (case, slot) in enumerate(zip(cases, slots, strict=True)):
            if len(failures) >= most:
                break
            guarded = slice(slot.start, slot.start + _guarded(case.size))
            damage = None
            if not in_time[number] or not same(back[slot], sent[slot]):
                evidence = Evidence(
                    source=source[slot],
                    sent=sent[slot],
                    block=block[slot],
                    arrived=back[slot],
                    reference=reference[slot],
                    expected=sent[slot],
                )
                before = carried[max(len(earlier) + number - 2, 0) : len(earlier) + number]
                damage = judge(pair, evidence, earlier=before)
            elif not same(back[guarded], expected[guarded]):
                host_path.prove_again(pair[1], whole)
                beside = int((back[guarded] != expected[guarded]).sum())
                damage = Damage(kind=Kind.OUTSIDE, first_offset=None, wrong_bytes=beside)
            if damage is not None:
                failures.append(Failure.of(pair, damage, case.size, str(case)))
    for slot in slots[-2:]:
        earlier.append(sent[slot][:REMEMBERED].clone())
    return tuple(failures)


# Copies that depend on each other: all pairs at once in both directions, and chains through several
# devices.

_AT_ONCE = 1 << 20
"""Bytes of each copy when all pairs are at work at once."""


def all_at_once(
    pairs: Sequence[Pair], round_number: int, seed: int, tell: Callable[[str | None], None]
) -> tuple[Failure, ...]:
    """Queue a copy on every pair before the host waits for one of them; return those that were wrong."""
    size = _AT_ONCE + 8 * round_number
    sent = {
        pair: payload.random_bytes(size, payload.seed_of(seed, "at once", *pair, round_number))
        for pair in pairs
    }
    sources = {pair: bits.to(device(pair[0])) for pair, bits in sent.items()}
    references = {pair: bits.to(device(pair[1])) for pair, bits in sent.items()}
    blocks = {pair: torch.bitwise_not(bits).to(device(pair[1])) for pair, bits in sent.items()}
    what = f"{exact_size(size)} with all {len(pairs)} pairs at once"
    tell(what)
    for pair in pairs:
        blocks[pair].copy_(sources[pair], non_blocking=True)
    seen = {pair: compared(blocks[pair], references[pair]) for pair in pairs}
    in_time = {pair: bool(seen[pair]) for pair in pairs}
    back = {pair: torch.bitwise_not(sent[pair]).copy_(blocks[pair]) for pair in pairs}
    tell(None)
    failures = []
    for pair in pairs:
        if in_time[pair] and same(back[pair], sent[pair]):
            continue
        evidence = Evidence(
            source=sources[pair],
            sent=sent[pair],
            block=blocks[pair],
            arrived=back[pair],
            reference=references[pair],
            expected=sent[pair],
        )
        failures.append(Failure.of(pair, judge(pair, evidence), size, what))
    return tuple(failures)


def chain(
    hops: Sequence[Pair], size: int, seed: int, tell: Callable[[str | None], None]
) -> tuple[Failure, ...]:
    """Send bytes over all hops with nothing but a kernel between two of them; return the first hop that was wrong.

    The kernel complements what arrived, and its result is both what travels on and the evidence: it shows what a
    consumer saw. Only when a hop's own source was right is the hop to blame.
    """
    route = " -> ".join(str(index) for index in (hops[0][0], *(pair[1] for pair in hops)))
    start = payload.random_bytes(size, payload.seed_of(seed, "chain", route, size))
    expected = [start if not number % 2 else ~start for number in range(len(hops) + 1)]
    blocks = [(~bits).to(device(pair[1])) for pair, bits in zip(hops, expected, strict=False)]
    travelling = start.to(device(hops[0][0]))
    what = f"{exact_size(size)} through the chain {route}"
    tell(what)
    consumed = []
    for block in blocks:
        block.copy_(travelling, non_blocking=True)
        travelling = block.bitwise_not()
        consumed.append(travelling)
    back = [torch.empty_like(start).copy_(bits) for bits in consumed]
    tell(None)
    for pair, bits, block, seen in zip(hops, expected, blocks, back, strict=False):
        if not same(seen, ~bits):
            host_path.prove_again(pair[0], size)
            host_path.prove_again(pair[1], size)
            arrived = (~bits).copy_(block)
            damage = classify(arrived, bits, held=~bits)
            late = Damage(kind=Kind.LATE, first_offset=None, wrong_bytes=0)
            return (Failure.of(pair, damage or late, size, what),)
    return ()
