"""Parts of a pipeline of diffusers without weights: the load of a tokenizer that is lost succeeds with
an empty one, and that of a scheduler whose config was cut fails.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import save_file

import ckptfix
from ckptfix.cli import run
from ckptfix.diagnosis.target import find_checkpoints

numpy = pytest.importorskip("numpy")

INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "scheduler": ["diffusers", "DDIMScheduler"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
}


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    root = tmp_path / "pipeline"
    for name in ("scheduler", "tokenizer", "unet"):
        (root / name).mkdir(parents=True)
    (root / "model_index.json").write_text(json.dumps(INDEX))
    (root / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "DDIMScheduler"}')
    (root / "tokenizer" / "tokenizer_config.json").write_text("{}")
    (root / "tokenizer" / "vocab.json").write_text("{}")
    (root / "unet" / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    weights = {"conv_in.weight": numpy.ones((2, 2), "float32")}
    save_file(weights, root / "unet" / "diffusion_pytorch_model.safetensors")
    return root


def test_a_healthy_pipeline_is_clean(pipeline: Path) -> None:
    report = ckptfix.check(pipeline)
    assert report.status == 0
    assert "scheduler/ (a folder): not looked into" in report.not_checked
    assert [path.name for path in find_checkpoints(pipeline)] == ["unet"]


def test_a_component_whose_config_is_of_another_class_is_told(pipeline: Path) -> None:
    """diffusers 0.42 fails with ``KeyError: 'conv_in.weight'`` or a ValueError on such lists."""
    (pipeline / "model_index.json").write_text(
        json.dumps({**INDEX, "unet": ["diffusers", "AutoencoderKL"]})
    )
    (finding,) = ckptfix.check(pipeline).findings
    assert finding.code == "incomplete-checkpoint"
    assert "lists AutoencoderKL for unet/, but unet/config.json is for UNet2DConditionModel" in str(
        finding
    )


@pytest.mark.parametrize(
    ("listed", "own"),
    [
        ("Transformer2DModel", "DiTTransformer2DModel"),
        ("UNet2DConditionModel", "FlaxUNet2DConditionModel"),
    ],
)
def test_other_names_of_one_class_are_not_told(pipeline: Path, listed: str, own: str) -> None:
    (pipeline / "model_index.json").write_text(json.dumps({**INDEX, "unet": ["diffusers", listed]}))
    (pipeline / "unet" / "config.json").write_text(json.dumps({"_class_name": own}))
    assert ckptfix.check(pipeline).findings == ()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda root: shutil.rmtree(root / "tokenizer"), "tokenizer/ is missing"),
        (lambda root: (root / "tokenizer" / "vocab.json").unlink(), "tokenizer/ has no vocabulary"),
        (
            lambda root: [path.unlink() for path in (root / "tokenizer").iterdir()],
            "tokenizer/ is empty",
        ),
    ],
)
def test_a_tokenizer_without_words_is_told(
    pipeline: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(pipeline)
    (finding,) = ckptfix.check(pipeline).findings
    assert finding.code == "missing-model"
    assert str(finding).startswith(words)
    assert "silently loads an empty vocabulary instead" in str(finding)
    assert run(["check", "-r", str(pipeline)]) == 1


def test_a_cut_config_of_a_scheduler_is_told(
    pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pipeline / "scheduler" / "scheduler_config.json").write_text('{"_class_na')
    for command in (["check"], ["check", "-r"]):
        assert run([*command, str(pipeline)]) == 1
        assert "scheduler/scheduler_config.json: not JSON, so DiffusionPipeline" in " ".join(
            capsys.readouterr().out.split()
        )
