"""Which copies between devices arrive: measured, for every ordered pair, in a process of its own.

``schedule`` says what is done and when, ``watching`` has a ``worker`` do it, ``trial`` makes one copy over one pair,
``together`` those that need several, ``host_path`` proves each device first, ``damage`` names what is wrong, ``record``
decides, ``summary`` says what was and was not exercised.

>>> report = probe_peer_copies(budget=30.0)
>>> report.pairs[0, 1].verdict
<Verdict.HEALTHY: 'healthy'>
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptfix.runtime.devices.probe import cache
from ckptfix.runtime.devices.probe.report import PairReport, ProbeReport, Verdict

if TYPE_CHECKING:
    from ckptfix.runtime.devices.pairs import Pair

__all__ = [
    "BUDGET",
    "PairReport",
    "ProbeReport",
    "Verdict",
    "cached_report",
    "probe_peer_copies",
    "remember",
    "unproven_pairs",
]

BUDGET = 30.0
"""Seconds of measuring that complete the full plan for three devices."""


def probe_peer_copies(
    *, budget: float = BUDGET, seed: int | None = None, in_process: bool = False
) -> ProbeReport:
    """Measure every ordered pair of devices of the current accelerator, and report what was exercised.

    It always measures, past any safe transfers that are installed, and never reads what was remembered.

    ``budget``: seconds of measuring. Starting a process for it (importing torch, initialising the devices) comes on
    top, and so does waiting for a copy that hangs: at least 5 s. Below 10 s a shorter plan is used. ``seed``: repeats
    the very bits of an earlier report, in the same order; below 2**63. ``in_process``: measure in this process, for
    devices that no second process may use; a copy that hangs then hangs the caller.

    With fewer than two devices nothing is exercised, and the report says so. It raises ValueError for a budget or seed
    out of range, and nothing else: whatever goes wrong makes pairs inconclusive.
    """
    from ckptfix.runtime.devices.pairs import ordered_pairs

    return _measured(ordered_pairs(), budget=budget, seed=seed, in_process=in_process)


def cached_report() -> ProbeReport | None:
    """Return the remembered report for these very devices, driver, boot, torch and allocator; None when there is none.

    Makes torch initialise the devices, whose identity it needs.
    """
    from ckptfix.runtime.devices.probe.identity import this_machine

    return cache.load(this_machine().identity)


def remember(report: ProbeReport) -> None:
    """Keep a report for ``cached_report``, in the user's cache folder.

    Not one of devices that cannot be told from others. A folder that cannot be written to gives a UserWarning.
    """
    cache.store(report)


def unproven_pairs(budget: float = 3.0) -> frozenset[Pair]:
    """Return the ordered pairs that are not proven, by what is remembered of these very devices.

    Pairs that nothing is known of, and those that an earlier probe could not decide, are measured first, for ``budget``
    seconds, and what comes out is remembered.
    """
    from ckptfix.runtime.devices.pairs import ordered_pairs

    pairs = ordered_pairs()
    if not pairs:
        return frozenset()
    known = cached_report()
    asked = pairs if known is None else sorted(known.with_verdict(Verdict.INCONCLUSIVE))
    if asked:
        newer = _measured(asked, budget=budget)
        known = newer if known is None else known.renewed_by(newer)
        remember(known)
    assert known is not None
    return known.unproven


def _measured(
    pairs: Sequence[Pair], *, budget: float, seed: int | None = None, in_process: bool = False
) -> ProbeReport:
    if not 0 < budget < float("inf"):
        raise ValueError(f"budget={budget}: a positive number of seconds is needed")
    if seed is None:
        seed = secrets.randbits(31)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed}: from 0 to {2**63 - 1}")
    from ckptfix.runtime.devices.pairs import device_count
    from ckptfix.runtime.devices.probe.measuring import measure, nothing_to_measure

    if not pairs:
        return nothing_to_measure(device_count(), seed)
    return measure(pairs, budget=budget, seed=seed, in_process=in_process)
