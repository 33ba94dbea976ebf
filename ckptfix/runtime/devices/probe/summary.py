"""From what a probe knows to its report: what was exercised, and what was not, in words."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckptfix.runtime.devices.pairs import Pair
from ckptfix.runtime.devices.probe.cases import REPEATS, Plan, exact_size
from ckptfix.runtime.devices.probe.identity import Machine
from ckptfix.runtime.devices.probe.report import ProbeReport, Verdict
from ckptfix.runtime.devices.probe.schedule import Found
from ckptfix.wording import count_of

_SHOWN = 4
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
    pairs = {
        pair: record.report(
            sections=len(run.plan.sections),
            seed=run.seed,
            peer_access=machine.peer_access.get(pair),
            unusable=found.of_device(pair),
            plan=run.plan.name,
            blind=bool(run.blind),
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
        not_exercised=tuple(_not_exercised(run, found, {pair: pairs[pair].verdict for pair in pairs})),
        identity=machine.identity,
    )


def _exercised(run: Run, found: Found) -> Iterator[str]:
    trips = [count for count in found.round_trips.values() if count]
    if trips:
        yield f"the way from the host and back of {count_of(len(trips), 'device')}, {max(trips)} times each"
    finished = [
        pair for pair, record in found.records.items() if len(record.sections) == len(run.plan.sections)
    ]
    if finished:
        yield (
            f"{_pairs(finished)}, one after the other: {run.plan.copies} copies each ({run.plan.name} plan), up to "
            f"{exact_size(run.plan.largest)}, by memcpy and by copy kernel, at least {REPEATS} small ones by each; "
            "destinations poisoned, compared by a kernel queued behind the copy, and on the host"
        )
    if found.at_once:
        yield f"{found.at_once} ordered pairs at once, {count_of(run.plan.rounds, 'round')}"
    if found.chains:
        yield f"{count_of(found.chains, 'chain')} through {'two' if found.triples == 2 else 'three'} devices"


def _not_exercised(run: Run, found: Found, verdicts: dict[Pair, Verdict]) -> Iterator[str]:
    if found.stopped:
        yield found.stopped
    out_of_time = f"the budget of {run.budget:g} s was spent"
    for number, section in enumerate(run.plan.sections):
        cut = [
            pair
            for pair, record in found.records.items()
            if number not in record.sections and verdicts[pair] is Verdict.INCONCLUSIVE and not record.doubt
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
    if run.plan.name == "quick":
        yield "the full plan: ckptfix doctor --peer-copies"
    unpoisoned = sum(record.unpoisoned for record in found.records.values())
    if unpoisoned:
        yield f"poison under {unpoisoned} copies by to(): the allocator handed out another block than before"
    if run.in_process:
        yield "copies that hang: in_process=True cannot end them"
    if run.blind:
        yield f"{run.blind}; so no pair is remembered as healthy"
    yield from found.left_out
    # A fault of one copy in n shows in 3 n copies with 95 %.
    yield f"faults rarer than one copy in {run.plan.copies // 3}, or that need other loads, sizes or temperatures"
    yield _OTHER_WAYS


def _pairs(pairs: Iterable[Pair]) -> str:
    some = [f"{source} -> {destination}" for source, destination in pairs]
    more = f" and {len(some) - _SHOWN} more" if len(some) > _SHOWN else ""
    return ", ".join(some[:_SHOWN]) + more
