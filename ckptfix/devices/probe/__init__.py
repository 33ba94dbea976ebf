"""Probe of the P2P copies between devices: measured for every ordered pair, in a process of its
own.

``schedule`` decides what is done and when, ``measuring`` has a ``worker`` do it, ``trials`` makes
the copies of the ``cases``, and ``probe_report`` holds the verdicts, which ``cache`` keeps.

>>> report = probe_peer_copies(budget=30.0)
>>> report.pairs[0, 1].verdict
<Verdict.HEALTHY: 'healthy'>
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from msgspec.structs import replace
from typing import TYPE_CHECKING

from ckptfix.devices.probe import cache
from ckptfix.devices.probe.probe_report import ProbeReport, Verdict, seconds_since_boot

if TYPE_CHECKING:
    from ckptfix.hardware import Pair
    from ckptfix.devices.torch_devices import Machine

BUDGET = 30.0
"""Seconds of measuring that complete the full plan for three devices."""

SAMPLE_AFTER = 24 * 3600.0
"""Seconds after which a healthy pair is looked at again: a link may break, or be set otherwise,
within a boot.

A hard limit would have healthy hosts stage everything until a new probe settles; a look each day
costs about the start of one process, finds what breaks for good, and stages nothing meanwhile.
"""

SAMPLE_BUDGET = 1.0
"""Seconds of such a look."""


def probe_peer_copies(
    *, budget: float = BUDGET, seed: int | None = None, in_process: bool = False
) -> ProbeReport:
    """Measure every ordered pair of devices of the current accelerator, and report what was
    exercised.

    It always measures, past any safe transfers that are installed, and never reads what was
    remembered.

    ``budget``: seconds of measuring. Starting a process for it (importing torch, initialising the
    devices) comes on top, and so does waiting for a copy that hangs: at least 5 s. Below 10 s a
    shorter plan is used. ``seed``: repeats the very bits of an earlier report, in the same order;
    below 2**63. ``in_process``: measure in this process, for devices that no second process may
    use; a copy that hangs then hangs the caller.

    With fewer than two devices nothing is exercised, and the report says so. It raises ValueError
    for a budget or seed out of range, and nothing else: whatever goes wrong makes pairs
    inconclusive.
    """
    from ckptfix.devices.torch_devices import ordered_pairs

    return _measured(ordered_pairs(), budget=budget, seed=seed, in_process=in_process)


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

    Damage that was found before stays, until the full plan finds the pair healthy, and an
    inconclusive probe changes no verdict; a probe that was blind for some damage proves nothing.
    Not remembered are devices that cannot be told from others. A folder that cannot be written to,
    or that others can write to, gives a UserWarning.
    """
    cache.store(report)
    return cache.load(report.identity) or report


def unproven_pairs(budget: float = 3.0) -> frozenset[Pair]:
    """Return the ordered pairs that are not proven, by what is known of these very devices.

    Pairs that nothing is known of, and those that an earlier probe could not decide, are measured
    first, for ``budget`` seconds: each goes on where the last process ended, and what comes out is
    remembered. A process measures once: what it could not decide then, or not keep, is for the next
    process.

    Where all is decided, pairs that were found healthy more than a day ago get a look of up to 1 s,
    the oldest first, by one process at a time. A wrong copy among them counts; an unfinished look
    changes no verdict.
    """
    from ckptfix.devices.torch_devices import ordered_pairs, this_machine

    pairs = frozenset(ordered_pairs())
    if not pairs:
        return pairs
    machine = this_machine()
    known = _known(machine)
    asked = pairs - _decided(known)
    if asked and _key(machine) not in _measured_here:
        known = _with(
            known,
            _measured(sorted(asked), budget=budget, here=machine, known=_fresh(known)),
            machine,
        )
    elif known is not None and _key(machine) not in _measured_here:
        old = _healthy_for_long(known)
        if old:
            with cache.only_one(machine.identity) as first:
                if first:
                    known = _with(
                        known,
                        _measured(old, budget=SAMPLE_BUDGET, here=machine, sample=True),
                        machine,
                    )
    return pairs if known is None else pairs - known.with_verdict(Verdict.HEALTHY)


_measured_here: dict[str, ProbeReport] = {}
"""Machine -> the report after ``unproven_pairs`` measured in this process."""


def _with(known: ProbeReport | None, newer: ProbeReport, machine: Machine) -> ProbeReport:
    """Return what is known with a new report taken in, which is remembered."""
    both = (known or newer.only(())).renewed_by(newer)
    _measured_here[_key(machine)] = both
    remember(newer)
    return both


def _fresh(known: ProbeReport | None) -> ProbeReport | None:
    """Return what is known without proofs of devices' own exchange with the host that are old."""
    if known is None:
        return None
    return replace(
        known, hosts={index: when for index, when in known.hosts.items() if not _is_old(when)}
    )


def _healthy_for_long(known: ProbeReport) -> list[Pair]:
    """Return the healthy pairs that were last measured long ago, the oldest first."""
    healthy = sorted(
        known.with_verdict(Verdict.HEALTHY), key=lambda pair: known.pairs[pair].measured
    )
    return [pair for pair in healthy if _is_old(known.pairs[pair].measured)]


def _is_old(when: float) -> bool:
    return not 0.0 <= seconds_since_boot() - when < SAMPLE_AFTER


def _known(machine: Machine) -> ProbeReport | None:
    kept, here = cache.load(machine.identity), _measured_here.get(_key(machine))
    if kept is None or here is None:
        return kept or here
    return here.renewed_by(kept.only(_decided(kept)))  # another process may have decided more since


def _decided(report: ProbeReport | None) -> frozenset[Pair]:
    if report is None:
        return frozenset()
    return frozenset(report.pairs) - report.with_verdict(Verdict.INCONCLUSIVE)


def _key(machine: Machine) -> str:
    return json.dumps(machine.to_json(), sort_keys=True)


def _measured(
    pairs: Sequence[Pair],
    *,
    budget: float,
    seed: int | None = None,
    in_process: bool = False,
    here: Machine | None = None,
    known: ProbeReport | None = None,
    sample: bool = False,
) -> ProbeReport:
    if not 0 < budget < float("inf"):
        raise ValueError(f"budget={budget}: expected a positive number of seconds")
    if seed is None:
        seed = secrets.randbits(31)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed}: expected 0 to {2**63 - 1}")
    from ckptfix.devices.probe.measuring import measure, nothing_to_measure
    from ckptfix.devices.torch_devices import device_count, machine_in_use

    if not pairs:
        return nothing_to_measure(device_count(), seed)
    return measure(
        pairs,
        budget=budget,
        seed=seed,
        in_process=in_process,
        here=here or machine_in_use(),
        known=known,
        sample=sample,
    )
