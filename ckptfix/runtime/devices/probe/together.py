"""Copies that depend on each other: all pairs at once in both directions, and chains through several devices."""

from collections.abc import Callable, Sequence

import torch

from ckptfix.runtime.devices.pairs import Pair, device
from ckptfix.runtime.devices.probe import host_path, payload
from ckptfix.runtime.devices.probe.cases import exact_size
from ckptfix.runtime.devices.probe.damage import Damage, Kind, classify
from ckptfix.runtime.devices.probe.judging import Evidence, judge
from ckptfix.runtime.devices.probe.payload import compared, same
from ckptfix.runtime.devices.probe.task import Failure

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
