"""The probe on real devices. Nothing here runs without one; what needs two is skipped with one, and
says so.
"""

from collections import deque

import pytest
import torch

from ckptfix.devices.probe import probe_peer_copies
from ckptfix.devices.probe.bulk import Row, next_batch, run_batch, run_large
from ckptfix.devices.probe.cases import FULL, WINDOWED
from ckptfix.devices.probe.payload import Memory, free_memory
from ckptfix.devices.probe.probe_report import Verdict
from ckptfix.devices.probe.trials import PairTrials, prove
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
    for index in range(device_count()):
        assert sum(1 for _ in prove(index, 1, Memory(), lambda stage: None)) > 50
        Row(WINDOWED, 1).prove(index)


@one_gpu
def test_every_case_of_the_plan_runs_within_one_device() -> None:
    trials = PairTrials((0, 0), Memory(), deque(maxlen=2), lambda stage: None)
    row, memory = Row(FULL.largest, 1), Memory()
    for section in FULL.sections:
        for seed, case in enumerate(section.cases):
            if case.size >= WINDOWED:
                failures = run_large(
                    case, ((0, 0),), row, (seed,), memory, lambda stage: None, lambda pair: deque()
                )
                assert failures == (), failures
                continue
            # `to()` of the same device returns the tensor itself, which is no copy: only its bits
            # are of interest.
            failure = trials.run(case, seed)
            assert failure is None, failure


@one_gpu
def test_batches_of_small_copies_run_within_one_device() -> None:
    row, memory = Row(FULL.largest, 1), Memory()
    for section in FULL.sections:
        cases = section.cases if section.batched else ()
        while cases:
            batch = next_batch(cases)
            assert run_batch(batch, (0, 0), row, 7, memory, lambda stage: None, deque(), 6) == ()
            cases = cases[len(batch) :]


@one_gpu
def test_free_memory_is_what_the_device_says() -> None:
    free = free_memory(0)
    assert free is not None
    assert 0 < free <= torch.cuda.get_device_properties(0).total_memory


@two_gpus
def test_pairs_at_once_and_one_by_one_arrive() -> None:
    pairs = [pair for pair in ordered_pairs() if pair in ((0, 1), (2, 3))]
    row = Row(FULL.largest, 1)
    for case in next(section for section in FULL.sections if section.is_large).cases:
        failures = run_large(
            case, pairs, row, range(len(pairs)), Memory(), lambda stage: None, lambda pair: deque()
        )
        assert failures == (), failures


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
    assert any("full plan" in line for line in report.exercised) or report.unproven
