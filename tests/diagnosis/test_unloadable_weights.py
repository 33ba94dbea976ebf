"""Weights and indexes that are intact, and that the readers for torch refuse."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors import SafetensorError
from safetensors import safe_open as _safe_open

from ckptfix import check, repair
from ckptfix.formats.tensor import DTYPE_BITS

safe_open: Any = _safe_open


def write(path: Path, dtype: str, shape: list[int], size: int) -> None:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def load(path: Path) -> Mapping[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "words"),
    [
        ("F6_E2M3", [4], 3, "'a' has dtype F6_E2M3, which torch does not have"),
        ("F6_E3M2", [0], 0, "'a' has dtype F6_E3M2, which torch does not have"),
        ("F4", [2, 3], 3, "'a' has dtype F4 and last dimension 3: torch loads only even sizes"),
        ("F4", [4, 1], 2, "'a' has dtype F4 and last dimension 1: torch loads only even sizes"),
    ],
)
def test_a_dtype_that_torch_cannot_load_is_an_error(
    tmp_path: Path, dtype: str, shape: list[int], size: int, words: str
) -> None:
    path = tmp_path / "model.safetensors"
    write(path, dtype, shape, size)
    with pytest.raises(SafetensorError):
        load(path)
    report = check(tmp_path)
    assert report.status == 1
    assert [str(finding) for finding in report.findings] == [
        f"model.safetensors is malformed: {words}"
    ]


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS.keys() - {"C128", "F6_E2M3", "F6_E3M2"}))
@pytest.mark.parametrize("shape", [[2, 4], [0]])
def test_a_dtype_that_torch_loads_is_no_finding(
    tmp_path: Path, dtype: str, shape: list[int]
) -> None:
    path = tmp_path / "model.safetensors"
    write(path, dtype, shape, DTYPE_BITS[dtype] if len(shape) == 2 else 0)
    assert list(load(path)) == ["a"]
    assert check(tmp_path).status == 0


class Folder:
    """A model in shards, as transformers saves it."""

    def __init__(self, path: Path, *, safetensors: bool) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {
            "hidden_size": 8,
            "intermediate_size": 8,
            "vocab_size": 16,
            "num_attention_heads": 2,
        }
        self.path, self.kind = path, LlamaForCausalLM
        self.config = LlamaConfig(num_hidden_layers=1, **sizes)
        self.model = LlamaForCausalLM(self.config)
        self.model.save_pretrained(path, max_shard_size="1KB")
        if not safetensors:
            for shard in path.glob("*.safetensors"):
                torch.save(
                    load(shard),
                    shard.with_name(shard.name.replace("model", "pytorch_model", 1)).with_suffix(
                        ".bin"
                    ),
                )
                shard.unlink()
            text = (path / "model.safetensors.index.json").read_text()
            text = text.replace("model-0", "pytorch_model-0").replace(".safetensors", ".bin")
            (path / "pytorch_model.bin.index.json").write_text(text)
            (path / "model.safetensors.index.json").unlink()
        (self.index,) = path.glob("*.index.json")

    def write(self, document: Mapping[str, Any]) -> None:
        """Replace the index."""
        self.index.write_text(json.dumps(document))

    def of_transformers(self) -> bool:
        """Return whether transformers loads the weights of the model."""
        return self._is_equal(self.kind.from_pretrained(self.path))

    def of_accelerate(self) -> bool:
        """Return whether accelerate loads the weights of the model."""
        model = self.kind(self.config)
        accelerate.load_checkpoint_in_model(model, self.path)
        return self._is_equal(model)

    def _is_equal(self, model: torch.nn.Module) -> bool:
        state = self.model.state_dict()
        return all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


_REFUSED: dict[str, dict[str, Any]] = {
    "none": {},
    "null": {"metadata": None},
    "a list": {"metadata": []},
    "a text": {"metadata": "x"},
    "a number": {"metadata": 3},
    "a boolean": {"metadata": True},
}


@pytest.mark.parametrize("safetensors", [True, False])
@pytest.mark.parametrize("name", _REFUSED)
def test_an_index_without_metadata_is_an_error_that_a_repair_mends(
    tmp_path: Path, name: str, safetensors: bool
) -> None:
    folder = Folder(tmp_path / "model", safetensors=safetensors)
    weight_map = json.loads(folder.index.read_text())["weight_map"]
    folder.write({"weight_map": weight_map, "more": 1, **_REFUSED[name]})
    with pytest.raises((KeyError, TypeError)):
        folder.of_transformers()
    assert folder.of_accelerate()
    report = check(folder.path)
    assert report.status == 1
    assert [str(finding) for finding in report.findings if finding.code == "index-mismatch"] == [
        f'{folder.index.name} has no "metadata" object, so transformers and diffusers refuse to '
        "load the model"
    ]
    assert repair(folder.path).status == 0
    document = json.loads(folder.index.read_text())
    assert (document["weight_map"], document["more"]) == (weight_map, 1)
    assert folder.of_transformers()
    assert check(folder.path).status == 0


@pytest.mark.parametrize("safetensors", [True, False])
@pytest.mark.parametrize("metadata", [{}, {"total_size": "x"}, {"total_size": -1}, {"dtype": None}])
def test_whatever_the_metadata_hold_the_index_loads(
    tmp_path: Path, metadata: dict[str, Any], safetensors: bool
) -> None:
    folder = Folder(tmp_path / "model", safetensors=safetensors)
    weight_map = json.loads(folder.index.read_text())["weight_map"]
    assert check(folder.path).status == 0
    folder.write({"weight_map": weight_map, "metadata": metadata})
    assert folder.of_transformers()
    assert folder.of_accelerate()
    assert check(folder.path).status == 0
