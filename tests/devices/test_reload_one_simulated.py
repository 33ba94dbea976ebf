"""Reloads on one simulated device: the device, the host's memory and the disk are exercised, P2P
copies are not.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix.devices.reload.reload_report import Outcome, Subject
from ckptfix.devices.reload.verifying import verify_reload
from tests.devices.reload_models import save_tied, save_transformer
from tests.simulated.models import gpt2, qwen2
from tests.simulated.simulator import HOST, Simulator

pytestmark = [pytest.mark.simulated(1), pytest.mark.usefixtures("each_accelerate")]


def texts(report: Any, subject: Subject, outcome: Outcome) -> list[str]:
    return [
        proof.text
        for proof in report.proofs
        if proof.subject is subject and proof.outcome is outcome
    ]


@pytest.mark.parametrize("make", [qwen2, gpt2])
def test_the_device_and_a_split_with_the_host_are_proven(
    simulator: Simulator, tmp_path: Path, make: Any
) -> None:
    make().save_pretrained(tmp_path / "model")
    report = verify_reload(tmp_path / "model", repeats=2)
    assert report.status == 0, str(report)
    assert texts(report, Subject.OUTPUTS, Outcome.PROVEN) == [
        "split over 0 == cuda:0 alone: 2 runs, equal in every bit",
        "split over 0, cpu == cuda:0 alone: 2 runs, equal in every bit",
    ]
    assert texts(report, Subject.PEER_PROBE, Outcome.NOT_EXERCISED) == [
        "copies between accelerators: this machine has only one"
    ]
    assert report.pairs == ()
    assert verify_reload(tmp_path / "model", repeats=1, require_transfer_proof=True).status == 1


def test_without_a_class_every_tensor_goes_to_the_device_and_back(
    simulator: Simulator, tmp_path: Path
) -> None:
    folder = save_transformer(tmp_path / "checkpoint")
    simulator.clear()
    report = verify_reload(folder, max_memory={0: "100KiB", "cpu": "1GiB"})
    assert report.status == 0
    assert set(report.device_bytes) == {"0", "cpu"}
    (placed,) = texts(report, Subject.PLACEMENT, Outcome.PROVEN)
    assert placed.startswith("file -> device -> host: 76 tensors")
    assert len(simulator.host_log()[HOST, 0]) >= 76, "those that the map leaves on the CPU, too"


def test_a_broken_way_to_the_device_is_a_failed_placement(
    simulator: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        there = right(self, *args, **kwargs)
        if there.device.type == "cuda":
            there.view(torch.uint8).bitwise_xor_(1)
        return there

    folder = save_tied(tmp_path / "checkpoint")
    right = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", wrong)
    report = verify_reload(folder)
    assert report.status == 1
    (says,) = texts(report, Subject.PLACEMENT, Outcome.FAILED)
    assert "3 of 3 tensors differ: 'embed.weight': on device 0: byte 0" in says
