"""Many small copies over one pair, all queued before the host waits once: what a single one takes is mostly waiting.

Their payloads are slots of a window into the long row (see ``large``), with a guard behind each. Every slot is poisoned
before, and compared by a kernel queued right behind its own copy; the host compares them all,
and the guards, in the end.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from ckptfix.runtime.devices.pairs import Pair, device
from ckptfix.runtime.devices.probe import host_path, payload
from ckptfix.runtime.devices.probe.cases import Case
from ckptfix.runtime.devices.probe.damage import Damage, Kind
from ckptfix.runtime.devices.probe.judging import REMEMBERED, Evidence, judge
from ckptfix.runtime.devices.probe.large import Row, laid_out
from ckptfix.runtime.devices.probe.memory import Memory
from ckptfix.runtime.devices.probe.payload import compared, same
from ckptfix.runtime.devices.probe.task import Failure

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
