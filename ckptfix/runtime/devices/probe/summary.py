"""From what a probe knows to its report: what was exercised, and what was not, in words."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckptfix.runtime.devices.pairs import Pair
from ckptfix.runtime.devices.probe.cases import Plan, exact_size
from ckptfix.runtime.devices.probe.identity import Machine
from ckptfix.runtime.devices.probe.report import (
    STRICTEST,
    PairReport,
    ProbeReport,
    Verdict,
    seconds_since_boot,
)
from ckptfix.runtime.devices.probe.schedule import Found
from ckptfix.wording import count_of

_SHOWN = 4
_CONFIDENCE = 0.99
_OTHER_WAYS = "NCCL, CUDA IPC, and kernels of other libraries that read the memory of a peer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a probe was run. ``blind``: what in the environment hid faults from it."""

    plan: Plan
    budget: float
    seed: int
    seconds: float
    starting: float
    in_process: bool
    blind: str = ""


def summarise(run: Run, machine: Machine, found: Found) -> ProbeReport:
    """Return the report of a probe; hints are for others to add."""
    now = seconds_since_boot()
    pairs = {
        pair: record.report(
            plan=run.plan,
            seed=run.seed,
            peer_access=machine.peer_access.get(pair),
            unusable=found.of_device(pair),
            blind=bool(run.blind),
            began=now - run.seconds - run.starting,
            measured=now,
        )
        for pair, record in found.records.items()
    }
    return ProbeReport(
        pairs=pairs,
        seed=run.seed,
        seconds=run.seconds,
        starting=run.starting,
        devices=machine.names,
        exercised=tuple(_exercised(run, found)),
        not_exercised=tuple(_not_exercised(run, found, pairs)),
        identity=machine.identity,
        hosts={index: now for index in found.proven if index not in found.unusable},
    )


def _exercised(run: Run, found: Found) -> Iterator[str]:
    trips = [count for count in found.round_trips.values() if count]
    if trips:
        yield f"the way from the host and back of {count_of(len(trips), 'device')}, {max(trips)} times each"
    finished = [pair for pair, record in found.records.items() if record.finished(run.plan)]
    if finished:
        yield (
            f"{_pairs(finished)}: {run.plan.copies} copies each ({run.plan.name} plan), up to "
            f"{exact_size(run.plan.largest)}, by memcpy and by copy kernel; destinations poisoned, compared by a "
            "kernel queued behind the copy, and on the host"
        )
    if found.at_once:
        yield f"{found.at_once} ordered pairs at once, {count_of(run.plan.rounds, 'round')}"
    if found.chains:
        yield f"{count_of(found.chains, 'chain')} through {'two' if found.triples == 2 else 'three'} devices"


def _not_exercised(run: Run, found: Found, pairs: Mapping[Pair, PairReport]) -> Iterator[str]:
    verdicts = {pair: pairs[pair].verdict for pair in pairs}
    if found.stopped:
        yield found.stopped
    out_of_time = f"the budget of {run.budget:g} s was spent"
    for section in run.plan.sections:
        cut = [
            pair
            for pair, record in found.records.items()
            if record.left(section) and verdicts[pair] is Verdict.INCONCLUSIVE and not record.doubt
        ]
        if cut:
            yield f"{section.name} of {_pairs(cut)}: {out_of_time}"
    settled = [
        pair for pair, verdict in verdicts.items() if verdict not in (Verdict.HEALTHY, Verdict.INCONCLUSIVE)
    ]
    if settled:
        yield f"the rest of the plan for {_pairs(settled)}: the verdict was clear"
    if not found.at_once and len(found.records) - len(settled) > 1:
        yield "several pairs at once: no time, or no verdict for them"
    if found.chains < found.triples:
        yield f"{found.triples - found.chains} of {found.triples} chains: no time, or no verdict for a pair of them"
    if run.plan.name != STRICTEST:
        yield "the full plan: ckptfix doctor --peer-copies"
    unpoisoned = sum(record.unpoisoned for record in found.records.values())
    if unpoisoned:
        yield f"poison under {unpoisoned} copies by to(): the allocator handed out another block than before"
    if run.in_process:
        yield "copies that hang: in_process=True cannot end them"
    if run.blind:
        yield f"{run.blind}; so no pair is remembered as healthy"
    yield from found.left_out
    yield from _rarer_faults(pairs.values())
    yield "faults that need other loads, sizes or temperatures"
    yield _OTHER_WAYS


def _rarer_faults(reports: Iterable[PairReport]) -> Iterator[str]:
    """Yield, for each kind of copy, how rare a fault may be that the healthy pairs' own trials would have missed.

    A fault that hits a share p of the copies shows in n of them with the chance 1 - (1 - p) ** n: 99 % is asked for.
    """
    tried = [report.trials_by_kind() for report in reports if report.verdict is Verdict.HEALTHY]
    for kind in sorted({kind for counts in tried for kind in counts}):
        least = min(counts.get(kind, 0) for counts in tried)
        if least:
            share = 1.0 - (1.0 - _CONFIDENCE) ** (1.0 / least)
            yield (
                f"faults of {kind} copies that hit fewer than {100 * share:.2g} % of them: {least} by each "
                f"healthy pair find more frequent ones with {_CONFIDENCE:.0%}"
            )
        else:
            yield f"{kind} copies by some of the pairs that are called healthy"


def _pairs(pairs: Iterable[Pair]) -> str:
    some = [f"{source} -> {destination}" for source, destination in pairs]
    more = f" and {len(some) - _SHOWN} more" if len(some) > _SHOWN else ""
    return ", ".join(some[:_SHOWN]) + more
