"""Weights that were converted to whole numbers: stock loaders take them, and no optimizer trains
such a parameter.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckptfix import check, latest_checkpoint
from ckptfix.diagnosis.findings.base import Resume
from tests.diagnosis.test_optimizer_states import save, step
from tests.diagnosis.test_trainer_states import trainer_in


def rounded(root: Path) -> list[str]:
    """Return the sentences about weights of whole numbers, each of which stops a resume."""
    findings = [one for one in check(root).findings if type(one).__name__ == "RoundedWeights"]
    assert all(one.resume is Resume.FAILS for one in findings)
    return list(map(str, findings))


def convert(path: Path, *keys: str, dtype: torch.dtype = torch.int8) -> None:
    """Convert these weights of a file, all of them without keys."""
    weights = load_file(path)
    save_file(
        {
            key: value.to(dtype) if key in keys or not keys else value
            for key, value in weights.items()
        },
        path,
        metadata={"format": "pt"},
    )


def test_converted_weights_next_to_their_optimizer(tmp_path: Path) -> None:
    models = [nn.Linear(8, 16), nn.Linear(8, 4)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    for number in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer)
        save(tmp_path / f"checkpoint_{number}", models, optimizers)
    root = tmp_path / "checkpoint_1"
    assert check(root).status == 0
    expected = models[0].weight.detach().clone()
    convert(root / "model.safetensors")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(*models, *optimizers)
    accelerator.load_state(str(root))
    assert torch.equal(models[0].weight, expected.to(torch.int8).float()), (
        "load_state rounds the weights"
    )
    assert rounded(root) == [
        "model.safetensors: 'bias' has dtype I8, but optimizer.bin has moments for it (expected "
        "a floating-point dtype; 1 more parameter)"
    ]
    with pytest.warns(
        UserWarning, match="passed over checkpoint_1: model.safetensors: 'bias' has dtype I8"
    ):
        assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint_0"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64], ids=str)
def test_some_converted_weights_and_named_parameters(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    for name, parameters in (("numbers", model.parameters()), ("names", model.named_parameters())):
        optimizer = torch.optim.AdamW(parameters)
        step(model, optimizer)
        root = save(tmp_path / name, [model], [optimizer])
        assert check(root).status == 0
        convert(root / "model.safetensors", "2.weight", dtype=dtype)
        assert [words.partition(" has")[0] for words in rounded(root)] == [
            "model.safetensors: '2.weight'"
        ]


def test_a_model_of_the_trainer(tmp_path: Path) -> None:
    trainer_in(tmp_path).train()
    root = sorted(tmp_path.glob("checkpoint-*"))[-1]
    assert check(root).status == 0
    convert(root / "model.safetensors")
    assert len(rounded(root)) == 1


def test_shapes_that_another_model_has_too(tmp_path: Path) -> None:
    models = [nn.Linear(8, 16), nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    root = save(tmp_path / "checkpoint", models, optimizers)
    convert(root / "model_1.safetensors", "1.weight")
    assert [words.partition(" has")[0] for words in rounded(root)] == [
        "model_1.safetensors: '1.weight'"
    ]
    convert(root / "model_1.safetensors", "0.weight")
    assert len(rounded(root)) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_folder(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = nn.Linear(8, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    for name, values in (
        ("healthy", weights),
        ("int8", {key: value.to(torch.int8) for key, value in weights.items()}),
    ):
        for folder, content in (
            ("pytorch_model_fsdp_0", {"model": values}),
            ("optimizer_0", {"optimizer": states}),
        ):
            writer = dcp.FileSystemWriter(tmp_path / name / folder)
            dcp.save(content, storage_writer=writer, no_dist=True)
        assert len(rounded(tmp_path / name)) == (name == "int8")


class Int8Base(nn.Module):  # type: ignore[misc]
    """A frozen base of whole numbers with a trained low-rank part, as bitsandbytes and PEFT make
    it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 8, dtype=torch.int8), requires_grad=False)
        self.register_buffer("SCB", torch.ones(16))
        self.register_buffer("position_ids", torch.arange(8))
        self.lora_A = nn.Linear(8, 2, bias=False)
        self.lora_B = nn.Linear(2, 16, bias=False)


class Scaled(nn.Module):  # type: ignore[misc]
    """A module with a counter of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(()))


HEALTHY: dict[str, Callable[[], Any]] = {
    "frozen base": Int8Base,
    "counter": Scaled,
    "bf16": lambda: nn.Linear(8, 16).bfloat16(),
    "binary mask": lambda: masked(nn.Linear(8, 16)),
}


def masked(model: Any) -> Any:
    """Add a mask of the shape of the weight, as pruning keeps it."""
    model.register_buffer("weight_mask", torch.ones(16, 8, dtype=torch.uint8))
    return model


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("is_named", [False, True])
def test_healthy_whole_numbers(tmp_path: Path, name: str, is_named: bool) -> None:
    model = HEALTHY[name]()
    trained = [(key, value) for key, value in model.named_parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained if is_named else [value for _, value in trained])
    step(model, optimizer)
    assert rounded(save(tmp_path / "checkpoint", [model], [optimizer])) == []


def test_moments_in_fp32_of_weights_in_fp8_are_healthy(tmp_path: Path) -> None:
    model = nn.Linear(8, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    root = save(tmp_path / "checkpoint", [model], [optimizer])
    convert(root / "model.safetensors", dtype=torch.float8_e4m3fn)
    assert rounded(root) == []


def test_a_frozen_quantized_twin_is_healthy(tmp_path: Path) -> None:
    student = nn.Linear(8, 16)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters())
    step(student, optimizer)
    root = save(tmp_path / "checkpoint", [student, teacher], [optimizer])
    convert(root / "model_1.safetensors")
    assert rounded(root) == []
