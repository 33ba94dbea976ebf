"""What salvaged files are called: stock loaders find them where they found the old ones, and no two
meet.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file, save_file

from ckptfix import salvage
from ckptfix.conversion.salvage_sources import stems_of
from tests.conversion.test_salvage import cut


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.parametrize("is_safe", [True, False])
def test_stock_load_state_loads_what_was_salvaged(
    accelerator: Accelerator, tmp_path: Path, is_safe: bool
) -> None:
    models = [accelerator.prepare(torch.nn.Linear(size, size)) for size in (3, 5)]
    accelerator.save_state(str(tmp_path / "old"), safe_serialization=is_safe)
    files = ["model.safetensors", "model_1.safetensors"]
    if not is_safe:
        files = ["pytorch_model.bin", "pytorch_model_1.bin"]
        for name in files:
            # The list of records at the end; every tensor is there.
            cut(tmp_path / "old" / name, 60)
    else:
        (tmp_path / "old" / files[1]).write_bytes(
            (tmp_path / "old" / files[1]).read_bytes() + b"\0" * 9
        )
    receipt = salvage(tmp_path / "old", tmp_path / "new")
    assert {file.path for file in receipt.saved} <= {"model.safetensors", "model_1.safetensors"}
    assert len(receipt.saved) == (1 if is_safe else 2)
    saved = [
        {name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models
    ]
    for model in models:
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
    accelerator.load_state(str(tmp_path / "new"))
    for model, state in zip(models, saved, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_stock_load_state_takes_the_rest_of_a_cut_model(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    model = accelerator.prepare(torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(4))))
    accelerator.save_state(str(tmp_path / "old"), safe_serialization=False)
    path = tmp_path / "old" / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    receipt = salvage(tmp_path / "old", tmp_path / "new")
    wanted = {name: model.state_dict()[name].clone() for name in receipt.saved[0].names}
    assert 0 < len(wanted) < 8
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    accelerator.load_state(str(tmp_path / "new"), strict=False)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("stem", "taken", "is_folder", "expected"),
    [
        ("model", (), False, ("model", "model", False)),
        ("model_1", (), False, ("model_1", "model_1", False)),
        ("pytorch_model", (), False, ("model", "pytorch_model", False)),
        ("pytorch_model_12", (), False, ("model_12", "pytorch_model_12", False)),
        ("pytorch_model.fp16", (), False, ("model.fp16", "pytorch_model.fp16", False)),
        ("pytorch_model_fsdp", (), False, ("pytorch_model_fsdp", "pytorch_model_fsdp", True)),
        (
            "pytorch_model_fsdp_1",
            (),
            False,
            ("pytorch_model_fsdp_1", "pytorch_model_fsdp_1", True),
        ),
        ("pytorch_model_fsdp_0", (), True, ("model", "pytorch_model", False)),
        ("pytorch_model_fsdp_2", (), True, ("model_2", "pytorch_model_2", False)),
        ("my_weights", (), False, ("my_weights", "my_weights", False)),
        ("pytorch_model_best", (), False, ("pytorch_model_best", "pytorch_model_best", False)),
        ("diffusion_pytorch_model", (), False, ("diffusion_pytorch_model",) * 2 + (False,)),
        (
            "pytorch_model",
            ("model.safetensors",),
            False,
            ("pytorch_model", "pytorch_model", False),
        ),
        (
            "pytorch_model",
            ("model.safetensors.index.json",),
            False,
            ("pytorch_model", "pytorch_model", False),
        ),
        (
            "pytorch_model",
            ("model.safetensors", "pytorch_model.safetensors", "pytorch_model.bin"),
            False,
            ("pytorch_model-salvaged", "pytorch_model-salvaged", False),
        ),
        (
            "m",
            ("m.safetensors", "m-salvaged.safetensors"),
            False,
            ("m-salvaged-salvaged", "m", False),
        ),
    ],
)
def test_names(stem: str, taken: "tuple[str, ...]", is_folder: bool, expected: Any) -> None:
    assert tuple(stems_of(stem, taken, is_folder=is_folder)) == expected


def test_two_sources_never_get_one_name(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for name in ("pytorch_model.bin", "pytorch_model_1.bin", "m.bin", "m.pt"):
        torch.save({name: torch.ones(9), "z": torch.ones(999)}, old / name)
        cut(old / name, 3000)
    for name in ("model.safetensors", "model_1.safetensors"):
        save_file({f"a{name}": torch.ones(9), "z": torch.ones(999)}, old / name)
    cut(old / "model.safetensors", 1)
    receipt = salvage(old, tmp_path / "new")
    assert {file.source: file.path for file in receipt.saved} == {
        "model.safetensors": "model.safetensors",
        "pytorch_model.bin": "pytorch_model.safetensors",
        "pytorch_model_1.bin": "pytorch_model_1-salvaged.safetensors",
        "m.bin": "m.safetensors",
        "m.pt": "m-salvaged.safetensors",
    }
    for file in receipt.saved:
        assert load_file(tmp_path / "new" / file.path).keys() == set(file.names)


def test_a_full_fsdp_save_stays_a_file_of_torch(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(9), "z": torch.ones(999)}, tmp_path / "pytorch_model_fsdp.bin")
    cut(tmp_path / "pytorch_model_fsdp.bin", 3000)
    receipt = salvage(tmp_path / "pytorch_model_fsdp.bin", tmp_path / "new")
    assert [file.path for file in receipt.saved] == ["pytorch_model_fsdp.bin"]
    assert torch.load(tmp_path / "new" / "pytorch_model_fsdp.bin", weights_only=True).keys() == {
        "w"
    }
