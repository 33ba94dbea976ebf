"""Models that hooks of diffusers' scripts save in sub-folders, against the optimizer.

The load hook of the script decides what is damaged.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

from ckptfix import check, latest_checkpoint
from tests.diagnosis.builders import new_accelerator, problems

WEIGHTS = "diffusion_pytorch_model.safetensors"
Tensors = dict[str, torch.Tensor]


def unet() -> Any:
    kind: Any = diffusers.UNet2DModel
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {
        "sample_size": 8,
        "block_out_channels": (4, 8),
        "norm_num_groups": 2,
        "layers_per_block": 1,
    }
    return kind(add_attention=False, **blocks, **sizes)


def text_encoder() -> Any:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=9,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=5,
        )
    )


def controlnet() -> Any:
    kind: Any = diffusers.ControlNetModel
    return kind(
        block_out_channels=(4, 8),
        down_block_types=("DownBlock2D",) * 2,
        norm_num_groups=2,
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=2,
        conditioning_embedding_out_channels=(4, 8),
    )


class Script:
    """A run with the hooks of ``train_text_to_image.py`` and ``train_dreambooth.py`` of diffusers
    0.42.

    ``frozen``: beginnings of the names of parameters that are not trained. ``options``: of
    ``save_pretrained``.
    """

    def __init__(
        self,
        *names: str,
        average: str = "",
        frozen: tuple[str, ...] = (),
        kind: Any = torch.optim.AdamW,
        optimizers: int = 1,
        pops: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.accelerator = new_accelerator()
        makers: dict[str, Callable[[], Any]] = {
            "text_encoder": text_encoder,
            "controlnet": controlnet,
        }
        self.models = {name: makers.get(name, unet)() for name in names}
        self.options, self.average, self.pops = options, average, pops
        model = next(iter(self.models.values()))
        self.ema: Any = None
        if average:
            self.ema = EMAModel(
                model.parameters(), model_cls=type(model), model_config=model.config
            )
        for one in self.models.values():
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
        groups = [[model] for model in self.models.values()]
        groups = groups if optimizers > 1 else [list(self.models.values())]
        self.optimizers = [
            kind([p for model in group for p in model.parameters() if p.requires_grad])
            for group in groups
        ]
        self.accelerator.prepare(*self.models.values(), *self.optimizers)
        self.accelerator.register_save_state_pre_hook(self._save)
        self.accelerator.register_load_state_pre_hook(self._load)

    def step(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        if self.ema is not None:
            self.ema.step(next(iter(self.models.values())).parameters())

    def saved(self, folder: Path) -> Path:
        self.step()
        self.accelerator.save_state(str(folder))
        return folder

    def loads(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))
        self.step()

    def _save(self, models: list[Any], weights: list[Any], path: str) -> None:
        if self.ema is not None:
            self.ema.save_pretrained(os.path.join(path, self.average))
        for name, model in zip(self.models, models, strict=True):
            model.save_pretrained(os.path.join(path, name), **self.options)
        if self.pops:
            weights.clear()

    def _load(self, models: list[Any], path: str) -> None:
        if self.ema is not None:
            self.ema.load_state_dict(
                EMAModel.from_pretrained(
                    os.path.join(path, self.average), diffusers.UNet2DModel
                ).state_dict()
            )
        for name, model in zip(self.models, list(models), strict=True):
            loaded = type(model).from_pretrained(os.path.join(path, name))
            model.load_state_dict(loaded.state_dict())
        if self.pops:
            models.clear()


def unchecked(folder: Path) -> list[str]:
    return [words for words in check(folder).not_checked if "optimizer" in words]


HEALTHY: dict[str, Callable[[], Script]] = {
    "text to image": lambda: Script("unet"),
    "an average": lambda: Script("unet", average="unet_ema"),
    "an average under a name of its own": lambda: Script("unet", average="ema_model"),
    "shards": lambda: Script("unet", average="unet_ema", max_shard_size="5KB"),
    "pickles": lambda: Script("unet", safe_serialization=False),
    "ControlNet": lambda: Script("controlnet"),
    "a text encoder": lambda: Script("unet", "text_encoder"),
    "a text encoder and an average": lambda: Script("unet", "text_encoder", average="unet_ema"),
    "two networks": lambda: Script("unet", "discriminator", optimizers=2),
    "frozen weights": lambda: Script("unet", frozen=("conv_in", "down_blocks")),
    "a frozen text encoder": lambda: Script(
        "unet", "text_encoder", frozen=("text_model", "embeddings", "encoder")
    ),
    "SGD": lambda: Script("unet", kind=lambda parameters: torch.optim.SGD(parameters, 0.1)),
    "Adafactor": lambda: Script("unet", kind=torch.optim.Adafactor),
    "weights that the hook keeps": lambda: Script("unet", pops=False),
}


@pytest.mark.parametrize("kind", HEALTHY)
@pytest.mark.filterwarnings("ignore")
def test_models_of_hooks_are_healthy(kind: str, tmp_path: Path) -> None:
    script = HEALTHY[kind]()
    for step in (1, 2, 3):
        script.saved(tmp_path / f"run/checkpoint-{step}")
    HEALTHY[kind]().loads(tmp_path / "run/checkpoint-2")
    for folder in (tmp_path / "run").iterdir():
        assert problems(folder) == []
    shutil.copytree(tmp_path / "run/checkpoint-2", tmp_path / "alone/checkpoint-2")
    alone = tmp_path / "alone/checkpoint-2"
    assert problems(alone) == []
    words = " against the load hooks of the script (keys, dtypes, EMA counters)"
    assert any(each.endswith(words) for each in check(alone).not_checked)


@pytest.mark.filterwarnings("ignore")
def test_gradient_checkpointing_is_healthy(tmp_path: Path) -> None:
    script = Script("unet")
    model = script.models["unet"]
    model.enable_gradient_checkpointing()
    model.train()
    script.accelerator.backward(model(torch.ones(1, 3, 8, 8), 1).sample.sum())
    folder = script.saved(tmp_path / "checkpoint-1")
    Script("unet").loads(folder)
    assert (problems(folder), unchecked(folder)) == ([], [])


def _changed(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def _without_a_key(tensors: Tensors) -> Tensors:
    return dict(list(tensors.items())[1:])


def _transposed(tensors: Tensors) -> Tensors:
    return {
        key: tensor.transpose(0, 1).contiguous() if tensor.ndim > 1 else tensor
        for key, tensor in tensors.items()
    }


def _refused(script: Script, folder: Path) -> None:
    with pytest.raises((OSError, RuntimeError, ValueError, NotImplementedError)):
        script.loads(folder)


@pytest.mark.parametrize("change", [_without_a_key, _transposed])
@pytest.mark.parametrize("others", [(), ("text_encoder",)])
@pytest.mark.filterwarnings("ignore")
def test_weights_contradict_the_optimizer(
    change: Callable[[Tensors], Tensors], others: tuple[str, ...], tmp_path: Path
) -> None:
    folder = Script("unet", *others).saved(tmp_path / "run/checkpoint-2")
    assert (problems(folder), unchecked(folder)) == ([], [])
    _changed(folder / "unet" / WEIGHTS, change)
    _refused(Script("unet", *others), folder)
    (problem,) = problems(folder)
    assert problem.startswith("optimizer.bin: ")
    assert check(folder).status == 1


@pytest.mark.parametrize("change", [_without_a_key, _transposed])
@pytest.mark.filterwarnings("ignore")
def test_the_newest_checkpoint_lost_what_its_optimizer_has(
    change: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    script = Script("unet")
    for step in (1, 2, 3):
        script.saved(tmp_path / f"checkpoint-{step}")
    _changed(tmp_path / f"checkpoint-3/unet/{WEIGHTS}", change)
    _refused(Script("unet"), tmp_path / "checkpoint-3")
    (problem,) = problems(tmp_path / "checkpoint-3")
    assert problem.startswith("optimizer.bin: ")
    with pytest.warns(UserWarning, match="passed over checkpoint-3"):
        assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


@pytest.mark.filterwarnings("ignore")
def test_a_lost_frozen_weight_is_not_checked(tmp_path: Path) -> None:
    script = Script("unet", frozen=("conv_in",))
    folder = script.saved(tmp_path / "checkpoint-2")
    _changed(
        folder / "unet" / WEIGHTS,
        lambda tensors: {k: v for k, v in tensors.items() if k != "conv_in.bias"},
    )
    _refused(Script("unet", frozen=("conv_in",)), folder)
    assert problems(folder) == []
    (words,) = unchecked(folder)
    assert words.startswith(
        "whether unet/ lost frozen weights: the optimizers have no moments for 1 of"
    )


@pytest.mark.parametrize("inner", ["unet", "copy"])
@pytest.mark.filterwarnings("ignore")
def test_a_model_one_level_too_deep(inner: str, tmp_path: Path) -> None:
    script = Script("unet", average="unet_ema")
    for step in (1, 2):
        folder = script.saved(tmp_path / f"checkpoint-{step}")
    (folder / "unet").rename(folder / "third")
    (folder / "unet").mkdir()
    (folder / "third").rename(folder / "unet" / inner)
    _refused(Script("unet", average="unet_ema"), folder)
    (problem,) = problems(folder)
    assert (
        "only this folder of the same name" if inner == "unet" else "unet/config.json"
    ) in problem
    assert [words for words in check(folder).not_checked if words.startswith("unet/ (")] == []
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
