"""One of several models whose file lost all tensors, and the healthy twin: a module without parameters."""

import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import save_file
from torch import nn

from ckptfix import check, latest_checkpoint


def saves(root: Path, numbers: tuple[int, ...], sizes: tuple[int, int] = (3, 5)) -> list[Path]:
    """Save two networks and a loss without parameters."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    models = [nn.Linear(4, size) for size in sizes]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    accelerator.prepare(*models, nn.MSELoss(), *optimizers)
    folders = []
    for number in numbers:
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.rand(2, 4)).sum().backward()
            optimizer.step()
        folders.append(root / f"checkpoint_{number}")
        accelerator.save_state(str(folders[-1]))
    return folders


def empty(root: Path) -> None:
    save_file({}, root / "model_1.safetensors", {"format": "pt"})


@pytest.mark.parametrize("sizes", [(3, 5), (3, 3)])
@pytest.mark.parametrize("numbers", [(1, 2), (1, 2, 3)])
def test_neighbours_show_that_a_model_is_lost(
    numbers: tuple[int, ...], sizes: tuple[int, int], tmp_path: Path
) -> None:
    folders = saves(tmp_path, numbers, sizes)
    assert [check(root).findings for root in folders] == [()] * len(folders)
    assert latest_checkpoint(tmp_path) == folders[-1]
    empty(folders[-1])
    assert {finding.severity.value for finding in check(folders[-1]).findings} == {"warning"}
    with pytest.warns(UserWarning, match="model_1"):
        assert latest_checkpoint(tmp_path) == folders[-2]


def test_the_optimizer_names_the_empty_file(tmp_path: Path) -> None:
    (root,) = saves(tmp_path, (1,))
    empty(root)
    (finding,) = check(root).findings
    assert (finding.severity.value, finding.code) == ("warning", "unsaved-parameters")
    assert str(finding) == "optimizer_1.bin: it has 2 parameters, and model_1.safetensors holds no tensors"


def test_two_models_of_equal_shapes_are_listed_as_not_checked(tmp_path: Path) -> None:
    (root,) = saves(tmp_path, (1,), (3, 3))
    healthy = Path(shutil.copytree(root, tmp_path / "healthy"))
    empty(root)
    assert check(root).findings == ()
    assert "whether model_1.safetensors lost its tensors" in " ".join(check(root).not_checked)
    assert "lost its tensors" not in " ".join(check(healthy).not_checked)
