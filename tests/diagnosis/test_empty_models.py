"""One of several models whose file lost all tensors, and the healthy twin: a module without
parameters.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ckptfix import check, latest_checkpoint
from tests.diagnosis.builders import new_accelerator


def saves(root: Path, numbers: tuple[int, ...], sizes: tuple[int, int] = (3, 5)) -> list[Path]:
    """Save two networks and a loss without parameters."""
    accelerator = new_accelerator()
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
    assert str(finding) == "optimizer_1.bin: 2 parameters, but model_1.safetensors has no tensors"


def test_two_models_of_equal_shapes_are_listed_as_not_checked(tmp_path: Path) -> None:
    (root,) = saves(tmp_path, (1,), (3, 3))
    healthy = Path(shutil.copytree(root, tmp_path / "healthy"))
    empty(root)
    assert check(root).findings == ()
    assert "whether model_1.safetensors lost its tensors" in " ".join(check(root).not_checked)
    assert "lost its tensors" not in " ".join(check(healthy).not_checked)


# Tensors without elements, of which accelerate keeps only the first one.


class Sparse(nn.Module):  # type: ignore[misc]
    """A layer, and buffers and parameters of these kinds without elements."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        for number, kind in enumerate(kinds):
            if kind == "buffer":
                self.register_buffer(f"empty_{number}", torch.empty(0, number))
            else:
                self.register_parameter(f"empty_{number}", nn.Parameter(torch.empty(0, number)))


def _prepared(kinds: tuple[str, ...]) -> Any:
    accelerator = new_accelerator()
    model = Sparse(*kinds)
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, optimizer)
    model.layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return accelerator


@pytest.mark.parametrize("is_safe", [True, False])
@pytest.mark.parametrize(
    "kinds",
    [("buffer",), ("parameter",), ("buffer",) * 2, ("parameter", "buffer"), ("parameter",) * 3],
)
def test_accelerate_keeps_one_tensor_without_elements(
    tmp_path: Path, kinds: tuple[str, ...], is_safe: bool
) -> None:
    _prepared(kinds).save_state(str(tmp_path / "folder"), safe_serialization=is_safe)
    report = check(tmp_path / "folder")
    assert report.status == 0
    words = "tensors without elements: model.safetensors has 'empty_0'"
    assert any(words in sentence for sentence in report.not_checked) is is_safe
    if is_safe and len(kinds) > 1:
        with pytest.raises(RuntimeError, match=r"Missing key.*empty_1"):
            _prepared(kinds).load_state(str(tmp_path / "folder"))
    else:
        _prepared(kinds).load_state(str(tmp_path / "folder"))


def test_a_model_without_such_tensors_has_no_line(tmp_path: Path) -> None:
    (folder,) = saves(tmp_path, (1,))
    assert not any("without elements" in sentence for sentence in check(folder).not_checked)
