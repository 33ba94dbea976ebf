"""The probe on real devices. Nothing here runs without one; what needs two is skipped with one, and
says so.
"""

import pytest
import torch

from ckptfix.devices.probe import probe_peer_copies
from ckptfix.devices.probe.cases import BATCHES
from ckptfix.devices.probe.probe_report import Verdict
from ckptfix.devices.probe.trials import Row, all_at_once, make_batch
from ckptfix.devices.torch_devices import device_count, ordered_pairs, this_machine
from tests.simulated.simulator import running

pytestmark = pytest.mark.slow


def real_devices() -> int:
    return 0 if running() is not None else device_count()


one_gpu = pytest.mark.skipif(real_devices() < 1, reason="no GPU")
two_gpus = pytest.mark.skipif(
    real_devices() < 2, reason=f"needs two GPUs, there are {real_devices()}"
)


@one_gpu
def test_each_device_passes_its_own_round_trip() -> None:
    row = Row(1)
    for index in range(device_count()):
        assert sum(1 for _ in row.prove_host(index, lambda stage: None)) > 20


@one_gpu
def test_every_batch_of_the_plan_runs_within_one_device() -> None:
    row = Row(1)
    for seed, batch in enumerate(BATCHES):
        assert make_batch(batch, (0, 0), row, seed, lambda stage: None) == []


@two_gpus
def test_pairs_at_once_arrive() -> None:
    assert all_at_once(ordered_pairs(), Row(1), 1, lambda stage: None) == []


@one_gpu
def test_the_machine_can_be_told_from_others() -> None:
    machine = this_machine()
    assert len(machine.names) == device_count()
    assert machine.identity["torch"] == torch.__version__
    assert all(found["uuid"] or found["pci"] for found in machine.identity["devices"])


@two_gpus
@pytest.mark.parametrize("in_process", [False, True])
def test_every_pair_gets_a_verdict(in_process: bool) -> None:
    report = probe_peer_copies(budget=120.0, in_process=in_process)
    assert set(report.pairs) == set(ordered_pairs())
    for found in report.pairs.values():
        assert found.trials > 0 or found.verdict is not Verdict.HEALTHY
        assert (found.verdict is Verdict.WRONG) == bool(found.kind) or found.verdict is Verdict.HANG
    assert any("copies each" in line for line in report.exercised) or report.unproven
