"""One probe from beginning to end: in a worker or in this process, over the pairs that are asked for."""

from collections.abc import Sequence
from dataclasses import replace

from ckptfix.errors import OperationError
from ckptfix.runtime.devices.pairs import Pair
from ckptfix.runtime.devices.probe.cases import SAMPLE, plan_for
from ckptfix.runtime.devices.probe.hints import hints
from ckptfix.runtime.devices.probe.identity import Machine
from ckptfix.runtime.devices.probe.report import ProbeReport
from ckptfix.runtime.devices.probe.running import InProcess, blinded
from ckptfix.runtime.devices.probe.schedule import Bench, Schedule
from ckptfix.runtime.devices.probe.summary import Run, summarise
from ckptfix.runtime.devices.probe.watching import Watched

_LEAST_PATIENCE, _MOST_PATIENCE = 5.0, 20.0
"""Seconds of silence after which a copy counts as hanging; within them, a sixth of the budget."""


def measure(
    pairs: Sequence[Pair],
    *,
    budget: float,
    seed: int,
    in_process: bool,
    here: Machine | None = None,
    known: ProbeReport | None = None,
    sample: bool = False,
) -> ProbeReport:
    """Measure these pairs; whatever goes wrong makes them inconclusive.

    ``here``: the machine as this process sees it, whose devices must be those that are measured; None for any.
    ``known``: what earlier probes did, which is not done again. ``sample``: only look whether the pairs still are what
    they were.
    """
    plan = SAMPLE if sample else plan_for(budget)
    patience = min(max(budget / 6, _LEAST_PATIENCE), _MOST_PATIENCE)
    bench: Bench = InProcess() if in_process else Watched(patience)
    try:
        machine, wrong = _machine(bench, pairs, here)
        schedule = Schedule(bench, pairs, plan, budget=budget, seed=seed, known=known)
        found = schedule.stopped(wrong) if wrong else schedule.run()
        run = Run(
            plan=plan,
            budget=budget,
            seed=seed,
            seconds=schedule.spent,
            starting=bench.starting,
            in_process=in_process,
            blind=blinded() if in_process else "",
        )
        report = summarise(run, machine, found)
        return replace(report, hints=hints(machine.pci, report.unproven, machine.peer_access))
    finally:
        bench.close()


def _machine(bench: Bench, pairs: Sequence[Pair], here: Machine | None) -> tuple[Machine, str]:
    """Return the devices that the bench sees, and why it cannot measure these pairs; "" when it can."""
    try:
        machine = bench.machine()
    except OperationError as error:
        return Machine(), str(error)
    last = max(index for pair in pairs for index in pair)
    if last >= len(machine.names):
        return (
            Machine(),
            f"the probe's worker sees {len(machine.names)} devices, this process at least {last + 1}",
        )
    if here is not None and _what_is_compared(machine) != _what_is_compared(here):
        # Device 1 there is another one than device 1 here, if it is only the number of them that tells.
        return (
            Machine(),
            f"the probe's worker sees other devices ({', '.join(machine.names)}) or another driver or allocator than "
            f"this process ({', '.join(here.names)}): did the environment change since this process began to use them? "
            "To measure in this process: probe_peer_copies(in_process=True)",
        )
    return machine, ""


def _what_is_compared(machine: Machine) -> tuple[object, ...]:
    return machine.names, machine.pci, dict(machine.identity)


def nothing_to_measure(devices: int, seed: int) -> ProbeReport:
    """Return the report of a machine with fewer than two devices."""
    seen = "no accelerator" if not devices else "one device"
    return ProbeReport(
        pairs={}, seed=seed, not_exercised=(f"copies between devices: torch sees {seen} on this machine",)
    )
