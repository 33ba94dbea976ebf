"""Eight simulated devices, 56 ordered pairs, within the default budget."""

import time

import pytest

from ckptfix.devices.probe import BUDGET, probe_peer_copies
from ckptfix.devices.probe.cases import PLAN
from tests.simulated.library import Kind
from tests.simulated.simulator import Simulator

pytestmark = pytest.mark.simulated(8, timeout=900)


def test_eight_simulated_devices_settle_within_the_default_budget(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processor seconds of this process at a third: 17 s on a quiet machine, 31 s on a busy one. A
    GPU makes the copies faster than the processor that simulates eight.
    """
    monkeypatch.setattr(time, "monotonic", lambda: time.process_time() / 3)
    simulator.fault(6, 2, Kind.LATE, every=459)
    report = probe_peer_copies(seed=1, in_process=True)
    assert len(report.pairs) == 56
    assert report.unproven == {(6, 2)}, str(report)
    assert report.pairs[6, 2].kind == "late"
    healthy = [found for pair, found in report.pairs.items() if pair != (6, 2)]
    assert min(found.trials for found in healthy) >= len(PLAN)
    assert report.seconds < BUDGET
    assert any("55 ordered pairs at once" in line for line in report.exercised)
