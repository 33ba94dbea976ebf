"""Models that hooks of diffusers' scripts save in sub-folders: the load hook itself decides what it
needs.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix import check, latest_checkpoint
from ckptfix.diagnosis.check import resume_problem
from tests.diagnosis.builders import new_accelerator, problems, small_unet
from tests.stores.servers import upload_folder

WEIGHTS = "diffusion_pytorch_model.safetensors"


class Run:
    """The hooks of ``train_text_to_image.py`` of diffusers 0.42. ``options``: of
    ``save_pretrained``.
    """

    def __init__(self, *folders: str, **options: Any) -> None:
        self.accelerator = new_accelerator()
        torch.manual_seed(0)
        self.folders, self.options = folders, options
        model = small_unet()
        optimizer = torch.optim.AdamW(model.parameters())
        self.accelerator.prepare(model, optimizer)
        self.accelerator.register_save_state_pre_hook(self._save)
        self.accelerator.register_load_state_pre_hook(self._load)

    def _save(self, models: list[Any], weights: list[Any], path: str) -> None:
        for name in self.folders:
            models[0].save_pretrained(os.path.join(path, name), **self.options)
        weights.pop()

    def _load(self, models: list[Any], path: str) -> None:
        model = models.pop()
        for name in self.folders:
            loaded = type(model).from_pretrained(path, subfolder=name)
            model.register_to_config(**loaded.config)
            model.load_state_dict(loaded.state_dict())


KINDS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("unet",), {}),
    (("unet", "unet_ema"), {}),
    (("controlnet",), {"safe_serialization": False}),
    (("unet",), {"max_shard_size": "5KB"}),
]


@pytest.mark.parametrize(("folders", "options"), KINDS)
def test_the_config_of_a_model_of_a_hook_is_lost(
    tmp_path: Path, folders: tuple[str, ...], options: dict[str, Any]
) -> None:
    folder = tmp_path / "run/checkpoint-5"
    Run(*folders, **options).accelerator.save_state(str(folder))
    Run(*folders).accelerator.load_state(str(folder))
    assert problems(folder) == []
    (folder / folders[0] / "config.json").unlink()
    with pytest.raises(OSError, match=r"config\.json"):
        Run(*folders).accelerator.load_state(str(folder))
    (problem,) = problems(folder)
    assert problem.startswith(
        f"{folders[0]}/config.json is missing: save_pretrained writes it next to "
        f"{folders[0]}/diffusion_pytorch_model"
    )
    # A hook of another script may write the weights alone: only the checkpoints next to it decide.
    assert latest_checkpoint(folder.parent) == folder
    url = f"memory://{os.urandom(6).hex()}/checkpoint-5"
    upload_folder(folder, url)
    assert problems(url) == [problem]


class RunWithoutConfig(Run):
    """The hooks of a script that writes weights under the name of diffusers by itself, and reads
    them so.
    """

    def _save(self, models: list[Any], weights: list[Any], path: str) -> None:
        for name in self.folders:
            os.makedirs(os.path.join(path, name))
            save_file(models[0].state_dict(), os.path.join(path, name, WEIGHTS), {"format": "pt"})
        weights.pop()

    def _load(self, models: list[Any], path: str) -> None:
        model = models.pop()
        for name in self.folders:
            model.load_state_dict(load_file(os.path.join(path, name, WEIGHTS)))


@pytest.mark.parametrize("count", [1, 3])
def test_a_hook_that_writes_no_config_is_healthy(tmp_path: Path, count: int) -> None:
    script = RunWithoutConfig("transformer")
    for step in range(count):
        script.accelerator.save_state(str(tmp_path / f"checkpoint-{step}"))
    newest = tmp_path / f"checkpoint-{count - 1}"
    RunWithoutConfig("transformer").accelerator.load_state(str(newest))
    assert latest_checkpoint(tmp_path) == newest
    # Alone it looks like a folder that lost its config.
    assert [check(folder).status for folder in tmp_path.iterdir()] == (
        [1] if count == 1 else [0] * count
    )


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_checkpoints_next_to_it_have_the_config(tmp_path: Path, number: int) -> None:
    script = Run("unet")
    for step in range(3):
        script.accelerator.save_state(str(tmp_path / f"checkpoint-{step}"))
    (tmp_path / f"checkpoint-{number}/unet/config.json").unlink()
    assert [check(tmp_path / f"checkpoint-{step}").status for step in range(3)] == [
        int(step == number) for step in range(3)
    ]
    problem = resume_problem(tmp_path / f"checkpoint-{number}")
    assert problem is not None
    assert problem.startswith("unet/config.json is missing")


def test_the_config_has_another_name(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    Run("unet").accelerator.save_state(str(folder))
    (folder / "unet/config.json").rename(folder / "unet/config (1).json")
    (problem,) = problems(folder)
    assert problem.startswith("config.json is missing: 'config (1).json' exists")


def _lora(folder: Path) -> None:
    halves = {f"unet.down.lora_{half}.weight": torch.ones(2, 2) for half in "AB"}
    save_file(halves, folder / "pytorch_lora_weights.safetensors")


def _weights_of_a_script(folder: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, folder / "model.safetensors")


@pytest.mark.parametrize("write", [_lora, _weights_of_a_script])
def test_other_weights_in_a_sub_folder_need_no_config(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    folder = tmp_path / "checkpoint-5"
    Run("unet").accelerator.save_state(str(folder))
    (folder / "extra").mkdir()
    write(folder / "extra")
    Run("unet").accelerator.load_state(str(folder))
    assert problems(folder) == []


def test_weights_of_diffusers_alone_need_no_config(tmp_path: Path) -> None:
    """As many people store them, for a loader that takes a single file."""
    small_unet().save_pretrained(tmp_path / "models/unet")
    (tmp_path / "models/unet/config.json").unlink()
    assert problems(tmp_path / "models/unet") == []
    shutil.copytree(tmp_path / "models/unet", tmp_path / "models/second")
    assert problems(tmp_path / "models/second") == []
