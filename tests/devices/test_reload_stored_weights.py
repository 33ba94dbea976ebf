"""Weights read twice: by a library and as the file's bytes; each must catch what the other gets
wrong.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from ckptfix.devices.reload import outputs as comparing
from ckptfix.devices.reload.outputs import Mismatch, first_mismatch, host_bytes
from ckptfix.devices.reload.stored_weights import Weights, file_bytes, find_weights
from ckptfix.errors import OperationError, UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"


def only(path: Path) -> Weights:
    (weights,), _ = find_weights(path)
    return weights


def all_bytes(weights: Weights, name: str, chunk: int = 7) -> bytes:
    return b"".join(part.tobytes() for part in file_bytes(weights.tensors[name], chunk))


@pytest.mark.parametrize(
    "name",
    [
        "clean-safetensors",
        "clean-bin",
        "sharded-gpt2",
        "sharded-qwen2-bin",
        "lone-bare-train",
        "lone-nested-legacy",
    ],
)
def test_every_tensor_is_its_files_bytes(name: str) -> None:
    with only(FIXTURES / name / "checkpoint") as weights:
        assert weights.tensors
        assert not weights.opaque
        for fqn in weights.tensors:
            value = weights.read(fqn)
            assert (
                all_bytes(weights, fqn)
                == value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
            assert first_mismatch(value, file_bytes(weights.tensors[fqn], comparing.CHUNK)) is None


EVERY_DTYPE = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_every_dtype(tmp_path: Path, dtype: torch.dtype, suffix: str) -> None:
    raw = torch.arange(48, dtype=torch.uint8)
    value = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    state = {
        "layer.full": value.clone(),
        "layer.scalar": value[0].clone(),
        "layer.empty": value[:0].clone(),
    }
    if suffix == ".bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_file(state, str(tmp_path / "model.safetensors"))
    weights = only(tmp_path)
    if dtype is torch.uint16 and suffix == ".bin" and weights.opaque:
        pytest.skip("torch wrote a storage without a dtype of its own")
    assert set(weights.tensors) == set(state)
    for fqn, tensor in state.items():
        assert first_mismatch(weights.read(fqn), file_bytes(weights.tensors[fqn], 5)) is None
        assert weights.tensors[fqn].nbytes == tensor.nbytes


def test_strided_tensors_are_gathered_and_shared_ones_are_ties(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "m.a": base,
        "m.t": base.t(),
        "m.part": base[1:, 2:4],
        "m.same": base,
        "m.wide": torch.ones(1).expand(9),
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    weights = only(tmp_path)
    for fqn in ("m.a", "m.t", "m.part", "m.same"):
        assert (
            all_bytes(weights, fqn)
            == state[fqn].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    assert weights.ties == (("m.a", "m.same"),)
    assert weights.opaque == ("m.wide",), "nine elements of one value are not written out"


def test_aliases_of_save_model_are_ties(tmp_path: Path) -> None:
    metadata = {"format": "pt", "lm_head.weight": "embed.weight"}
    save_file(
        {"embed.weight": torch.ones(2, 2)}, str(tmp_path / "model.safetensors"), metadata=metadata
    )
    assert only(tmp_path).ties == (("embed.weight", "lm_head.weight"),)


@pytest.mark.parametrize("position", [0, 63, 64, 999, 1000])
def test_one_flipped_byte_is_found(position: int) -> None:
    right: Any = numpy.arange(1001, dtype=numpy.uint8)
    wrong = right.copy()
    wrong[position] ^= 4
    chunks = [right[begin : begin + 64] for begin in range(0, 1001, 64)]
    found = first_mismatch(torch.from_numpy(wrong), chunks)
    assert found == Mismatch(position, int(wrong[position]), int(right[position]))


def test_other_lengths_are_found() -> None:
    long: Any = numpy.arange(10, dtype=numpy.uint8)
    short = torch.arange(9, dtype=torch.uint8)
    assert str(first_mismatch(short, [long])) == "it ends at byte 9"
    assert first_mismatch(torch.from_numpy(long), [long[:9]]) == Mismatch(9, None, None)
    assert first_mismatch(short[:0], []) is None
    assert first_mismatch(short, []) == Mismatch(0, None, None)


def test_bytes_of_strided_and_conjugated_tensors() -> None:
    value = torch.tensor([[1 + 2j, 3 - 1j]]).conj().t()
    plain = numpy.array([1 - 2j, 3 + 1j], dtype=numpy.complex64)
    assert b"".join(part.tobytes() for part in host_bytes(value, 8)) == plain.tobytes()


def test_a_folder_offers_its_models_or_else_any_state_dict(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES / "clean-teacher-student" / "checkpoint", folder)
    found, _ = find_weights(folder)
    assert [one.label for one in found] == ["model.safetensors", "model_1.safetensors"]
    assert only(folder / "model_1.safetensors").prefix == ""
    (folder / "model.safetensors").rename(folder / "student.safetensors")
    (folder / "model_1.safetensors").unlink()
    assert only(folder).label == "student.safetensors"
    with pytest.raises(UsageError, match="does not exist"):
        find_weights(folder / "none")
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            path.unlink()
    with pytest.raises(UsageError, match=r"has no model weights; next: ckptfix check"):
        find_weights(folder)


def test_an_index_brings_its_shards() -> None:
    folder = FIXTURES / "sharded-gpt2" / "checkpoint"
    weights = only(folder / "model.safetensors.index.json")
    assert len(weights.tensors) == 28
    assert len(weights.entry.members) > 1


def test_a_file_that_shrinks_is_no_end_of_bytes(tmp_path: Path) -> None:
    save_file({"a.b": torch.ones(100)}, str(tmp_path / "model.safetensors"))
    weights = only(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 200)
    with pytest.raises(OperationError, match="changed while it was read"):
        all_bytes(weights, "a.b")


def test_what_cannot_be_loaded_is_said_once(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2), "a.extra": Forbidden()}, tmp_path / "pytorch_model.bin")
    weights = only(tmp_path)
    problem = weights.problem()
    assert "Forbidden" in problem
    assert problem.count("next:") == 1


class Forbidden:
    """A class that weights_only refuses."""

    def __init__(self) -> None:
        self.values: list[Any] = []
