"""States that a load takes, and that are told all the same: random states of another rank, and a
gradient scaler that was off.
"""

import shutil
from pathlib import Path

import torch

import ckptfix
from ckptfix.diagnosis.findings.base import Severity

SOURCE = Path(__file__).parents[2] / "fixtures/accelerate-1.15.0/clean-safetensors/checkpoint"


def test_random_states_that_were_copied_from_another_rank(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SOURCE, tmp_path / "checkpoint"))
    assert ckptfix.check(folder).findings == ()
    shutil.copyfile(folder / "random_states_0.pkl", folder / "random_states_1.pkl")
    report = ckptfix.check(folder)
    (finding,) = report.findings
    assert (finding.severity, finding.path.name) == (Severity.NOTE, "random_states_1.pkl")
    assert "the random states of random_states_0.pkl" in str(finding)
    assert "two processes draw the same numbers" in str(finding)
    assert "If the run has more processes now" in finding.advice
    assert not finding.differs, "from no neighbour"


def test_a_gradient_scaler_that_was_off_is_not_judged(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SOURCE, tmp_path / "checkpoint"))
    torch.save(torch.amp.GradScaler("cpu").state_dict(), folder / "scaler.pt")
    words = "scaler.pt: empty, like"
    assert not any(text.startswith(words) for text in ckptfix.check(folder).not_checked)
    torch.save(torch.amp.GradScaler("cpu", enabled=False).state_dict(), folder / "scaler.pt")
    report = ckptfix.check(folder)
    assert report.status == 0
    assert any(text.startswith(words) for text in report.not_checked)
