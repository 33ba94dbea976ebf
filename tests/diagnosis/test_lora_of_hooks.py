"""LoRA weights that hooks of diffusers' scripts save into ``save_state``, against their load hook
and the optimizer.
"""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from diffusers import utils as diffusers_utils
from safetensors.torch import load_file, save_file

from ckptfix import check
from tests.diagnosis.builders import new_accelerator, problems
from tests.diagnosis.test_models_of_hooks import unet

peft: Any = pytest.importorskip("peft")

WEIGHTS = "pytorch_lora_weights.safetensors"
TARGETS = ["conv1", "conv2", "time_emb_proj"]
Tensors = dict[str, torch.Tensor]


class Script:
    """A run with the hooks of ``train_text_to_image_lora.py`` of diffusers 0.42.

    ``embeddings``: it trains some, too, and saves them elsewhere, as
    ``train_dreambooth_lora_sdxl_advanced.py`` does. ``pipeline``: the hooks go by a pipeline, and
    not by a file name of their own.
    """

    def __init__(self, *, embeddings: bool = False, pipeline: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.accelerator = new_accelerator()
        self.pipeline: Any = StableDiffusionPipeline if pipeline else None
        self.utils: Any = diffusers_utils
        self.model = unet().requires_grad_(False)
        config = peft.LoraConfig(
            target_modules=TARGETS, **{"r": 2, "init_lora_weights": False, **options}
        )
        peft.inject_adapter_in_model(config, self.model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if embeddings:
            trained.append(torch.nn.Parameter(torch.ones(99, 32)))
        self.optimizer = torch.optim.AdamW(trained)
        self.accelerator.prepare(self.model, self.optimizer)
        self.accelerator.register_save_state_pre_hook(self._save)
        self.accelerator.register_load_state_pre_hook(self._load)

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def saved(self, folder: Path) -> Path:
        self.step()
        self.accelerator.save_state(str(folder))
        return folder

    def loads(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))
        self.step()

    def _save(self, models: list[Any], weights: list[Any], path: str) -> None:
        tensors = peft.get_peft_model_state_dict(models[0])
        if self.pipeline is None:
            contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
            save_file(contiguous, Path(path, WEIGHTS), metadata={"format": "pt"})
        else:
            self.pipeline.save_lora_weights(
                path, unet_lora_layers=self.utils.convert_state_dict_to_diffusers(tensors)
            )
        weights.clear()

    def _load(self, models: list[Any], path: str) -> None:
        model = models.pop()
        if self.pipeline is None:
            tensors = load_file(Path(path, WEIGHTS))
        else:
            stored, _ = self.pipeline.lora_state_dict(path)
            tensors = {key.removeprefix("unet."): tensor for key, tensor in stored.items()}
        peft.set_peft_model_state_dict(model, tensors)


HEALTHY: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "a file name of the script": {"pipeline": False},
    "DoRA": {"use_dora": True},
    "biases": {"lora_bias": True},
    "a rank above all sizes": {"r": 64},
    "ranks": {"rank_pattern": {"conv1": 3}},
    "modules besides": {"modules_to_save": ["conv_in"], "pipeline": False},
    "embeddings besides": {"embeddings": True},
}


@pytest.mark.parametrize("kind", HEALTHY)
@pytest.mark.filterwarnings("ignore")
def test_lora_is_healthy(kind: str, tmp_path: Path) -> None:
    script = Script(**HEALTHY[kind])
    for step in (1, 2, 3):
        script.saved(tmp_path / f"run/checkpoint-{step}")
    Script(**HEALTHY[kind]).loads(tmp_path / "run/checkpoint-2")
    for folder in (tmp_path / "run").iterdir():
        assert problems(folder) == []
        words = [words for words in check(folder).not_checked if "optimizer" in words]
        assert [words.partition(";")[0] for words in words] == (
            [
                "whether the checkpoint has all weights of optimizer.bin: 1 of its parameters "
                "cannot be a LoRA matrix"
            ]
            if "embeddings" in kind
            else []
        )
    shutil.copytree(tmp_path / "run/checkpoint-2", tmp_path / "alone/checkpoint-2")
    assert problems(tmp_path / "alone/checkpoint-2") == []


def _changed(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    changed = {key: tensor.contiguous() for key, tensor in change(load_file(path)).items()}
    save_file(changed, path, metadata={"format": "pt"})


def _of_twice_the_rank(tensors: Tensors) -> Tensors:
    return {
        key: torch.cat([value, value], 0 if "lora_A" in key else 1)
        for key, value in tensors.items()
    }


@pytest.mark.parametrize("others", [(), ("checkpoint-1",), ("checkpoint-3",)])
@pytest.mark.filterwarnings("ignore")
def test_lora_of_other_shapes(others: Iterable[str], tmp_path: Path) -> None:
    script = Script(pipeline=False)
    for name in ("checkpoint-2", *others):
        script.saved(tmp_path / name)
    folder = tmp_path / "checkpoint-2"
    _changed(folder / WEIGHTS, _of_twice_the_rank)
    with pytest.raises(RuntimeError, match="size mismatch"):
        Script(pipeline=False).loads(folder)
    (problem,) = problems(folder)
    assert "does not match the weights" in problem
    for name in others:
        assert problems(tmp_path / name) == []


@pytest.mark.parametrize("is_pipeline", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_lora_that_lost_its_tensors(is_pipeline: bool, tmp_path: Path) -> None:
    folder = Script(pipeline=is_pipeline).saved(tmp_path / "checkpoint-2")
    _changed(folder / WEIGHTS, lambda tensors: {})
    (problem,) = problems(folder)
    assert problem.endswith(f"parameters, but {WEIGHTS} has no tensors")
    folder = Script(pipeline=is_pipeline).saved(tmp_path / "second/checkpoint-2")
    _changed(folder / WEIGHTS, lambda tensors: dict(list(tensors.items())[2:]))
    (problem,) = problems(folder)
    assert "weight tensors" in problem


@pytest.mark.parametrize(
    "others", [("checkpoint-1",), ("checkpoint-3",), ("checkpoint-1", "checkpoint-3")]
)
@pytest.mark.parametrize("renamed", ["lora.safetensors", "pytorch_lora_weights (1).safetensors"])
@pytest.mark.filterwarnings("ignore")
def test_lora_under_another_name(renamed: str, others: Iterable[str], tmp_path: Path) -> None:
    script = Script(pipeline=False)
    for name in ("checkpoint-2", *others):
        script.saved(tmp_path / name)
    folder = tmp_path / "checkpoint-2"
    (folder / WEIGHTS).rename(folder / renamed)
    with pytest.raises(FileNotFoundError):
        Script(pipeline=False).loads(folder)
    (finding,) = [one for one in check(folder).findings if one.severity.value != "note"]
    have = {1: "the neighbouring checkpoint has it", 2: "2 of 2 neighbouring checkpoints have it"}
    assert str(finding) == f"{WEIGHTS} is missing: {have[len(list(others))]}"
    assert f"if {renamed!r} is that file, rename it to {WEIGHTS}" in finding.advice
    for name in others:
        assert problems(tmp_path / name) == []


@pytest.mark.filterwarnings("ignore")
def test_a_script_may_save_lora_under_a_name_of_its_own(tmp_path: Path) -> None:
    script = Script(pipeline=False)
    for step in (1, 2):
        folder = script.saved(tmp_path / f"checkpoint-{step}")
        (folder / WEIGHTS).rename(folder / "lora.safetensors")
    assert problems(tmp_path / "checkpoint-1") == []
