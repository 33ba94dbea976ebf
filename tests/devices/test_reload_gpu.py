"""Reloads on real accelerators; skipped where there are too few of them. Nothing here is
simulated.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptfix.devices.reload.reload_report import Outcome, ReloadReport, Subject
from ckptfix.devices.reload.verifying import verify_reload
from ckptfix.devices.torch_devices import device_count

COUNT = device_count() if torch.version.cuda or torch.version.hip else 0
one_or_more = pytest.mark.skipif(COUNT < 1, reason="needs a real accelerator")
two_or_more = pytest.mark.skipif(COUNT < 2, reason="needs two real accelerators")
pytestmark = pytest.mark.slow


class Stack(torch.nn.Module):  # type: ignore[misc]  # torch is not followed, so nn.Module is Any
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(8)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def build() -> Any:
    return Stack(), torch.ones(4, 256)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file(Stack().state_dict(), str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    return tmp_path


def found(report: ReloadReport, subject: Subject) -> set[Outcome]:
    return {proof.outcome for proof in report.proofs if proof.subject is subject}


@one_or_more
@pytest.mark.parametrize("model", [None, build])
def test_every_tensor_reaches_the_device_and_the_split_with_the_host_is_right(
    folder: Path, model: Any
) -> None:
    report = verify_reload(folder, max_memory={0: "1MiB", "cpu": "8GiB"}, model=model)
    assert report.status == 0, str(report)
    assert Outcome.PROVEN in found(report, Subject.PLACEMENT)
    if model is not None:
        assert found(report, Subject.OUTPUTS) <= {Outcome.PROVEN, Outcome.TOLERANCE}
    if COUNT == 1:
        assert found(report, Subject.PEER_PROBE) == {Outcome.NOT_EXERCISED}


@two_or_more
def test_direct_copies_are_those_that_staging_makes(folder: Path) -> None:
    """On a machine with a broken pair this fails, and says which: that is what it is for."""
    report = verify_reload(folder, model=build, require_transfer_proof=True)
    assert report.status == 0, str(report)
    assert found(report, Subject.SPLIT) == {Outcome.PROVEN}
