"""The loads that a folder promises: by the config of a library, and the names of its weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix.checkpoint.folder import scan_folder
from ckptfix.checkpoint.load_inputs import SAMPLE, Load, loads_of
from ckptfix.checkpoint.model_files import group_files

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
TRANSFORMERS = {"architectures": ["BertModel"], "model_type": "bert"}
DIFFUSERS = {"_class_name": "UNet2DModel", "_diffusers_version": "0.42.1"}
PEFT = {"peft_type": "LORA", "r": 8}


def loads(folder: Path) -> list[Load]:
    scanned = scan_folder(folder)
    return [*loads_of(scanned, group_files(scanned))]


@pytest.mark.parametrize(
    ("config", "content", "weights", "library"),
    [
        ("config.json", TRANSFORMERS, "model.safetensors", "transformers"),
        ("config.json", TRANSFORMERS, "pytorch_model.bin", "transformers"),
        ("config.json", DIFFUSERS, "diffusion_pytorch_model.safetensors", "diffusers"),
        ("adapter_config.json", PEFT, "adapter_model.safetensors", "peft"),
        ("adapter_config.json", PEFT, "adapter_model.bin", "peft"),
    ],
)
def test_a_load(
    tmp_path: Path, config: str, content: dict[str, object], weights: str, library: str
) -> None:
    (tmp_path / config).write_text(json.dumps(content))
    if weights.endswith(".bin"):
        torch.save(WEIGHTS, tmp_path / weights)
    else:
        save_file(WEIGHTS, tmp_path / weights, {"format": "pt"})
    (load,) = loads(tmp_path)
    assert (str(load.path), load.library, load.config, load.is_whole) == (
        weights,
        library,
        content,
        True,
    )
    assert {key: tensor.shape for key, tensor in load.tensors.items()} == {"a": (2, 3), "b": (4,)}
    assert load.sample("a", SAMPLE) == WEIGHTS["a"].numpy().tobytes()
    assert load.sample("b", 8) == WEIGHTS["b"].numpy().tobytes()[:8]


@pytest.mark.parametrize(
    ("config", "content", "weights"),
    [
        ("config.json", TRANSFORMERS, "diffusion_pytorch_model.safetensors"),
        ("config.json", TRANSFORMERS, "model.fp16.safetensors"),
        ("config.json", TRANSFORMERS, "model_1.safetensors"),
        ("config.json", {"hidden": 8}, "model.safetensors"),
        ("config.json", [TRANSFORMERS], "model.safetensors"),
        ("adapter_config.json", PEFT, "model.safetensors"),
        ("notes.json", PEFT, "adapter_model.safetensors"),
    ],
)
def test_no_load(tmp_path: Path, config: str, content: object, weights: str) -> None:
    (tmp_path / config).write_text(json.dumps(content))
    save_file(WEIGHTS, tmp_path / weights, {"format": "pt"})
    assert loads(tmp_path) == []


def test_samples_end_with_a_megabyte(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TRANSFORMERS))
    save_file(
        {"a": torch.ones(1 << 18), "b": torch.ones(1)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    (load,) = loads(tmp_path)
    assert load.sample("b", SAMPLE) is not None
    assert load.sample("a", 1 << 20) is None
    assert load.sample("a", (1 << 20) - 4) is not None
    assert load.sample("b", SAMPLE) is None
