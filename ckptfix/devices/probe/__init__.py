"""Probe of the P2P copies between devices: measured for every ordered pair, in a process of its
own.

``measuring`` decides what is done and when, and has a ``worker`` do it; ``trials`` makes the copies
of the plan in ``cases``, and ``probe_report`` holds the verdicts, which ``cache`` keeps.

>>> report = probe_peer_copies(budget=30.0)
>>> report.pairs[0, 1].verdict
<Verdict.HEALTHY: 'healthy'>
"""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING

from ckptfix.devices.probe import cache
from ckptfix.devices.probe.probe_report import ProbeReport, Verdict, seconds_since_boot

if TYPE_CHECKING:
    from ckptfix.devices.torch_devices import Machine
    from ckptfix.hardware import Pair

BUDGET = 30.0
"""Seconds of measuring that complete the plan for eight devices."""

_REPEATED = 4
"""Times that ``probe_peer_copies`` makes the plan; a larger budget makes it more often."""


def probe_peer_copies(
    *, budget: float = BUDGET, seed: int | None = None, in_process: bool = False
) -> ProbeReport:
    """Measure every ordered pair of devices of the current accelerator, and report what was
    exercised.

    It always measures, past any safe transfers that are installed, and never reads what was
    remembered.

    ``budget``: a limit, in seconds of measuring. Starting a process for it (importing torch,
    initialising the devices) comes on top, and so does waiting for a copy that hangs: at least 5 s.
    Pairs that it does not reach are inconclusive; a larger one repeats the plan with other bits,
    and so finds rarer faults. ``seed``: repeats the very bits of an earlier report, in the same
    order; below 2**63. ``in_process``: measure in this process, for devices that no second process
    may use; a copy that hangs then hangs the caller.

    With fewer than two devices nothing is exercised, and the report says so. It raises ValueError
    for a budget or seed out of range, and nothing else: whatever goes wrong makes pairs
    inconclusive.
    """
    from ckptfix.devices.torch_devices import device_count, machine_in_use, ordered_pairs

    if not 0 < budget < float("inf"):
        raise ValueError(f"budget={budget}: expected a positive number of seconds")
    if seed is None:
        seed = secrets.randbits(31)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed}: expected 0 to {2**63 - 1}")
    from ckptfix.devices.probe.measuring import measure, nothing_to_measure

    if not (pairs := ordered_pairs()):
        return nothing_to_measure(device_count(), seed)
    return measure(
        pairs,
        budget=budget,
        seed=seed,
        in_process=in_process,
        here=machine_in_use(),
        times=int(_REPEATED * budget / BUDGET),
    )


def cached_report() -> ProbeReport | None:
    """Return the known verdicts for these very devices, driver, boot, torch and allocator; None
    without any.

    That is what was remembered, or measured by ``unproven_pairs`` in this process. Makes torch
    initialise the devices, whose identity it needs.
    """
    from ckptfix.devices.torch_devices import this_machine

    return _known(this_machine())


def remember(report: ProbeReport) -> ProbeReport:
    """Add a report to what ``cached_report`` knows, in the user's cache folder, and return what
    that is now.

    Damage that was found before stays, until a later probe completes the plan and finds the pair
    healthy, and an inconclusive probe changes no verdict. Not remembered are devices that cannot be
    told from others. A folder that cannot be written to gives a UserWarning.
    """
    with cache.locked(report.identity):
        cache.store(report)
    return cache.load(report.identity) or report


def unproven_pairs(budget: float = BUDGET) -> frozenset[Pair]:
    """Return the ordered pairs that are not proven, by what is known of these very devices.

    Pairs that nothing is known of, and those that an earlier probe could not decide, are measured
    first, for at most ``budget`` seconds, and what comes out is remembered. One process does that;
    others, such as the ranks of a job, wait for it and take what it found. A process measures once.
    """
    from ckptfix.devices.torch_devices import ordered_pairs, this_machine

    pairs = frozenset(ordered_pairs())
    if not pairs:
        return pairs
    machine = this_machine()
    began = seconds_since_boot()
    if _undecided(pairs, _known(machine)) and _key(machine) not in _measured_here:
        with cache.locked(machine.identity):
            known = _known(machine)
            # What another process measured while this one waited would come out the same again.
            asked = _undecided(pairs, known, before=began)
            if asked:
                from ckptfix.devices.probe.measuring import measure

                seed = secrets.randbits(31)
                found = measure(asked, budget=budget, seed=seed, in_process=False, here=machine)
                cache.store(found)
                known = found if known is None else known.renewed_by(found)
            if known is not None:
                _measured_here[_key(machine)] = known
    known = _known(machine)
    return pairs if known is None else pairs - known.with_verdict(Verdict.HEALTHY)


_measured_here: dict[str, ProbeReport] = {}
"""Machine -> the report after ``unproven_pairs`` measured in this process."""


def _undecided(
    pairs: frozenset[Pair], known: ProbeReport | None, before: float = float("inf")
) -> list[Pair]:
    """Return the pairs that nothing is known of, or not decided by what was measured ``before``."""
    reports = {} if known is None else known.pairs
    return [
        pair
        for pair in sorted(pairs)
        if pair not in reports
        or (reports[pair].verdict is Verdict.INCONCLUSIVE and reports[pair].measured < before)
    ]


def _known(machine: Machine) -> ProbeReport | None:
    kept, here = cache.load(machine.identity), _measured_here.get(_key(machine))
    if kept is None or here is None:
        return kept or here
    return here.renewed_by(kept)  # another process may have decided more since


def _key(machine: Machine) -> str:
    return json.dumps(machine.to_json(), sort_keys=True)
