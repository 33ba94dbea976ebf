"""Dtypes: a model gets the one that every user's ``from_pretrained`` gives, and what that loses is
no proof.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix.devices.reload.filling import holds
from ckptfix.devices.reload.reload_report import Outcome, Subject
from ckptfix.devices.reload.verifying import verify_reload
from ckptfix.devices.torch_devices import device_count
from tests.devices.reload_models import Head, eights, save_model
from tests.devices.test_reload import outcomes, text_of
from tests.devices.test_reload_transformers import edit_config, saved
from tests.simulated.models import qwen2

on_a_cpu = pytest.mark.skipif(
    device_count() > 0, reason="these say what a machine without accelerator proves"
)


@pytest.mark.parametrize(
    ("dtype", "other", "held"),
    [
        ("float32", "bfloat16", True),
        ("float32", "float16", True),
        ("bfloat16", "float16", False),
        ("float16", "bfloat16", False),
        ("bfloat16", "float32", False),
        ("float64", "float32", True),
        ("bfloat16", "float8_e4m3fn", True),
        ("float16", "float8_e5m2", True),
        ("float8_e4m3fn", "bfloat16", False),
        ("float32", "int64", False),
        ("float32", "int16", True),
        ("float32", "uint8", True),
        ("bfloat16", "uint8", True),
        ("float64", "int64", False),
        ("int64", "int32", True),
        ("int32", "int64", False),
        ("float16", "bool", True),
        ("int64", "float32", False),
        ("complex64", "float32", True),
        ("complex64", "float64", False),
        ("float32", "complex64", False),
    ],
)
def test_which_dtype_holds_every_value_of_which(dtype: str, other: str, held: bool) -> None:
    assert holds(getattr(torch, dtype), getattr(torch, other)) is held


@on_a_cpu
def test_what_a_factorys_model_holds_wider_is_no_equal_byte(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "checkpoint", Head().bfloat16())
    report = verify_reload(folder, model=lambda: (Head(), eights()))
    assert report.status == 0, str(report)
    assert "4 tensors (576 B), converted to a wider dtype" in text_of(
        report, Subject.PLACEMENT, Outcome.PROVEN
    )
    assert "equal in every byte" not in text_of(report, Subject.PLACEMENT, Outcome.PROVEN)
    assert sum(report.device_bytes.values()) == 576, "as the model holds them"


def rewrite(folder: Path, change: Any) -> None:
    path = str(folder / "model.safetensors")
    save_file({name: change(name, value) for name, value in load_file(path).items()}, path)


def half_but_norms(name: str, value: torch.Tensor) -> torch.Tensor:
    return torch.randn(value.shape) if "norm" in name else value.bfloat16()


@pytest.mark.slow
@on_a_cpu
def test_a_file_of_two_dtypes_is_loaded_as_its_config_says(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", qwen2())
    rewrite(folder, half_but_norms)
    edit_config(folder, dtype="float32")
    report = verify_reload(folder)
    assert report.status == 0, str(report)
    assert "62 converted to a wider dtype, the rest equal in every byte" in text_of(
        report, Subject.PLACEMENT, Outcome.PROVEN
    )
    assert outcomes(report, Subject.OUTPUTS) == [Outcome.PROVEN]


@pytest.mark.slow
@on_a_cpu
def test_what_from_pretrained_makes_narrower_is_a_difference(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", qwen2())
    rewrite(folder, half_but_norms)
    edit_config(folder, dtype="bfloat16")
    report = verify_reload(folder)
    assert report.status == 1
    says = text_of(report, Subject.NAMES, Outcome.FAILED)
    assert (
        "'model.layers.0.input_layernorm.weight' is float32 in the file, bfloat16 in the model"
        in says
    )
    assert "and 11 more dtypes differ" in says


@pytest.mark.slow
@on_a_cpu
def test_a_file_of_eight_bit_floats_is_loaded_as_from_pretrained_does(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", qwen2())
    rewrite(
        folder,
        lambda name, value: (
            value.to(torch.float8_e4m3fn) if "proj.weight" in name else value.clone()
        ),
    )
    edit_config(folder, dtype="float32")
    report = verify_reload(folder)
    assert report.status == 0, str(report)
    assert report.model == "Qwen2ForCausalLM from config.json"
    assert outcomes(report, Subject.OUTPUTS) == [Outcome.PROVEN]
