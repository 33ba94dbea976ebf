"""Copies made together: many small ones, large ones over several pairs, all pairs at once, and
chains.

Payloads of batches and large copies are windows into one long row of random bytes. The host made
the row and put it on every device, so making and sending 64 MiB anew for each copy is saved. Each
copy takes another window: no byte of it lies where it lay in the one before. A window is finite
values of every float dtype: hardware may rewrite the bits of a NaN that passes a kernel.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import torch

from ckptfix.devices.probe import payload
from ckptfix.devices.probe.cases import Case, Route, exact_size
from ckptfix.devices.probe.payload import Damage, Memory, classify, compared, free_memory, same
from ckptfix.devices.probe.probe_report import Kind
from ckptfix.devices.probe.task import Announce, Failure
from ckptfix.devices.probe.trials import REMEMBERED, Copy, prove_again, still_holds
from ckptfix.devices.routing import bypassed
from ckptfix.devices.torch_devices import device
from ckptfix.errors import CkptfixError
from ckptfix.hardware import Pair
from ckptfix.wording import human_size

_WINDOWS = 1 << 14
_STEP = 64
"""Bytes between the starts of two windows; keeps them aligned."""

_FINITE = 0xBFFF - (1 << 16)
"""In each word of 16 bits: an exponent with its highest bit clear is that of a finite number, in
floats of any size.
"""

_BESIDE = 24 << 20
"""Bytes of a device that are left for what copies and comparisons need next to their payloads."""

_PATIENCE = 60.0
"""Seconds that pairs wait for each other. Longer than a hang is waited for, so that one that hangs
is found as such.
"""

_LEAST = 4 << 20
"""Bytes of the row below which no batch of small copies fits."""


class NoRoom(CkptfixError):
    """A device has too little free memory for some copies: ``what``, in words."""

    def __init__(self, what: str, index: int, free: int) -> None:
        super().__init__(
            f"device {index} has only {human_size(free)} of free memory. To measure before a model "
            "fills it: ckptfix doctor --peer-copies"
        )
        self.what = what


class Row:
    """The long row of bytes: on the host, with its complement, and on each device once it is proven
    to be there.

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
        """Put the row on a device, over its complement. Raises UnusableDevice when the host reads
        other bytes there.
        """
        size = int(self.on(index).numel())
        there = self._there[index].copy_(self.complement[:size])
        there.copy_(self.bytes[:size])
        still_holds(index, there, self.bytes[:size])

    def window(self, pair: Pair, size: int, seed: int, what: str) -> slice:
        """Return where a window of ``size`` bytes lies. Raises NoRoom when a device of the pair
        holds too little.
        """
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


def queue_large(case: Case, pair: Pair, row: Row, seed: int, memory: Memory) -> Copy:
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
    sent = row.bytes[window]
    return Copy(
        pair=pair, case=str(case), size=case.size, source=source, sent=sent, block=block,
        reference=reference, expected=sent, seen=compared(block, reference),
    )  # fmt: skip


def run_large(
    case: Case,
    pairs: Sequence[Pair],
    row: Row,
    seeds: Sequence[int],
    memory: Memory,
    announce: Announce,
    earlier: "Callable[[Pair], deque[Any]]",
) -> tuple[Failure, ...]:
    """Make one copy over each of these pairs, which have no device in common, and return what is
    wrong with them.

    All are queued before the host waits for the first. ``earlier``: gives what a pair carried
    before. Raises UnusableDevice, NoRoom, and whatever a copy raises.
    """
    for pair in pairs:  # before anything is queued: putting the row somewhere makes the host wait
        row.window(pair, case.size, 0, f"copies of {exact_size(case.size)}")
    all_queued = threading.Barrier(len(pairs))

    def copied(pair: Pair, seed: int) -> Copy:
        try:
            with bypassed(counted=False):
                copy = queue_large(case, pair, row, seed, memory)
                all_queued.wait(_PATIENCE)
                copy.read_back(memory.on_host(case.size, f"back from {pair[1]}"))
                return copy
        except BaseException:
            all_queued.abort()  # which ends the others' waiting
            raise

    announce(
        str(case)
        + (f" over {len(pairs)} pairs without a device in common" if len(pairs) > 1 else "")
    )
    if len(pairs) == 1:
        done = [copied(pairs[0], seeds[0])]
    else:
        # Much of it is the host's work, on bytes that came back.
        with ThreadPoolExecutor(len(pairs)) as pool:
            done = list(pool.map(copied, pairs, seeds))
    announce(None)
    failures = []
    for copy in done:
        failures.append(copy.failure(tuple(earlier(copy.pair))))
        earlier(copy.pair).append(copy.expected[:REMEMBERED].clone())
    return tuple(failure for failure in failures if failure is not None)


def laid_out(case: Case, window: Any) -> Any:
    """Return a window on the source device with the dtype that the case asks for, strided where it
    says so.
    """
    dense = window.view(payload.dtype_of(case.source_dtype or case.dtype))
    if case.route is not Route.STRIDED_SOURCE:
        return dense
    wide = dense.new_empty((case.count, 2))
    wide[:, 0].copy_(dense)
    return wide[:, 0]


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
    announce: Announce,
    earlier: "deque[Any]",
    most: int,
) -> tuple[Failure, ...]:
    """Make these copies, all queued before the host waits once, and return what is wrong with them:
    at most ``most``.

    A single small copy takes mostly waiting. Payloads are slots of a window, with a guard behind
    each. Every slot is poisoned before, and compared by a kernel queued right behind its own copy;
    the host compares them all, and the guards, in the end. Raises UnusableDevice, NoRoom, and
    whatever a copy raises.
    """
    sizes = [case.size for case in cases]
    *starts, whole = accumulate(map(_guarded, sizes), initial=0)
    slots = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    what = f"{len(cases)} copies at once, such as {cases[0]}"
    window = row.window(pair, whole, seed, what)
    source, reference = (row.on(index)[window] for index in pair)
    block = row.complement[window].to(device(pair[1]))
    announce(what)
    seen = []
    for case, slot in zip(cases, slots, strict=True):
        block[slot].view(payload.dtype_of(case.dtype)).copy_(laid_out(case, source[slot]))
        seen.append(compared(block[slot], reference[slot]))
    in_time = torch.stack(seen).tolist()
    back = memory.on_host(whole, "batch").copy_(block)
    announce(None)
    sent, expected = row.bytes[window], row.complement[window].clone()
    for slot in slots:
        expected[slot] = sent[slot]
    failures: list[Failure] = []
    if not all(in_time) or not same(back, expected):
        carried = [*earlier, *(sent[slot] for slot in slots)]
        for number, (case, slot) in enumerate(zip(cases, slots, strict=True)):
            if len(failures) >= most:
                break
            copy = Copy(
                pair=pair, case=str(case), size=case.size, source=source[slot], sent=sent[slot],
                block=block[slot], reference=reference[slot], expected=sent[slot],
                in_time=in_time[number], arrived=back[slot],
            )  # fmt: skip
            failure = copy.failure(
                carried[max(len(earlier) + number - 2, 0) : len(earlier) + number]
            )
            guarded = slice(slot.start, slot.start + _guarded(case.size))
            if failure is None and not same(back[guarded], expected[guarded]):
                prove_again(pair[1], whole)
                outside = int((back[guarded] != expected[guarded]).sum())
                damage = Damage(kind=Kind.OUTSIDE, first_offset=None, wrong_bytes=outside)
                failure = Failure.of(pair, damage, case.size, copy.case)
            failures += [] if failure is None else [failure]
    for slot in slots[-2:]:
        earlier.append(sent[slot][:REMEMBERED].clone())
    return tuple(failures)


_AT_ONCE = 1 << 20
"""Bytes of each copy when all pairs are at work at once."""


def all_at_once(
    pairs: Sequence[Pair], round_number: int, seed: int, announce: Announce
) -> tuple[Failure, ...]:
    """Queue a copy on every pair before the host waits for one of them; return those that were
    wrong.
    """
    size = _AT_ONCE + 8 * round_number
    what = f"{exact_size(size)} with all {len(pairs)} pairs at once"
    copies = []
    for pair in pairs:
        sent = payload.random_bytes(size, payload.seed_of(seed, "at once", *pair, round_number))
        source, reference = (sent.to(device(index)) for index in pair)
        copies.append(
            Copy(
                pair=pair, case=what, size=size, source=source, sent=sent,
                block=torch.bitwise_not(sent).to(device(pair[1])), reference=reference,
                expected=sent,
            )
        )  # fmt: skip
    announce(what)
    for copy in copies:
        copy.block.copy_(copy.source, non_blocking=True)
    for copy in copies:
        copy.seen = compared(copy.block, copy.reference)
    for copy in copies:
        copy.in_time = bool(copy.seen)
    for copy in copies:
        copy.read_back(torch.bitwise_not(copy.sent))
    announce(None)
    return tuple(failure for copy in copies if (failure := copy.failure()) is not None)


def chain(hops: Sequence[Pair], size: int, seed: int, announce: Announce) -> tuple[Failure, ...]:
    """Send bytes over all hops with nothing but a kernel between two of them; return the first hop
    that was wrong.

    The kernel complements what arrived, and its result is both what travels on and the evidence: it
    shows what a consumer saw. Only when a hop's own source was right is the hop to blame.
    """
    route = " -> ".join(str(index) for index in (hops[0][0], *(pair[1] for pair in hops)))
    start = payload.random_bytes(size, payload.seed_of(seed, "chain", route, size))
    expected = [start if not number % 2 else ~start for number in range(len(hops) + 1)]
    blocks = [(~bits).to(device(pair[1])) for pair, bits in zip(hops, expected, strict=False)]
    travelling = start.to(device(hops[0][0]))
    what = f"{exact_size(size)} through the chain {route}"
    announce(what)
    consumed = []
    for block in blocks:
        block.copy_(travelling, non_blocking=True)
        travelling = block.bitwise_not()
        consumed.append(travelling)
    back = [torch.empty_like(start).copy_(bits) for bits in consumed]
    announce(None)
    for pair, bits, block, seen in zip(hops, expected, blocks, back, strict=False):
        if not same(seen, ~bits):
            prove_again(pair[0], size)
            prove_again(pair[1], size)
            arrived = (~bits).copy_(block)
            damage = classify(arrived, bits, held=~bits)
            late = Damage(kind=Kind.LATE, first_offset=None, wrong_bytes=0)
            return (Failure.of(pair, damage or late, size, what),)
    return ()
