"""States that one of two checkpoints lacks: load_state fails in it, so the two are not equal."""

import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from ckptfix import diff


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    objects = (model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    accelerator.prepare(*objects)
    accelerator.register_for_checkpointing(nn.Linear(1, 1))
    model(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    accelerator.save_state(str(tmp_path / "checkpoint_1"))
    return tmp_path / "checkpoint_1"


@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_state_that_one_of_two_saves_lacks_is_a_difference(
    name: str, is_first: bool, saved: Path
) -> None:
    copy = Path(shutil.copytree(saved, saved.parent / "checkpoint_2"))
    assert diff(saved, copy).status == 0
    (copy / name).unlink()
    report = diff(saved, copy) if is_first else diff(copy, saved)
    assert (report.status, report.verdict) == (1, "different")
    assert report.one_sided == (f"states only in {'A' if is_first else 'B'}: {name!r}",)
    assert report.as_json()["one_sided"] == list(report.one_sided)


def test_an_export_of_the_weights_is_equal_to_the_save(saved: Path, tmp_path: Path) -> None:
    export = tmp_path / "export"
    export.mkdir()
    shutil.copy(saved / "model.safetensors", export)
    for report in (
        diff(saved, export),
        diff(export, saved),
        diff(saved / "model.safetensors", export),
    ):
        assert (report.status, report.one_sided) == (0, ())


def test_more_processes_are_not_a_difference(saved: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "checkpoint_2"))
    shutil.copy(copy / "random_states_0.pkl", copy / "random_states_1.pkl")
    assert diff(saved, copy).status == 0
