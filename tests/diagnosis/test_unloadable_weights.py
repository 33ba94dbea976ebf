"""Weights and indexes that are intact, and that the readers for torch refuse."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors import safe_open as _safe_open

from ckptfix import check, repair
from ckptfix.formats.tensor import DTYPE_BITS
from tests.diagnosis.test_odd_indexes import Folder, Library, Transformers, copy_of, saved
from tests.tiny_models import reconfigure

__all__ = ["saved"]
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


def in_suffix(saved: Any, suffix: str, tmp_path: Path) -> tuple[Library, Folder]:
    """Return a sharded model of transformers, and a copy to damage."""
    library, source = saved[Transformers, suffix]
    return library, copy_of(source, tmp_path / "model")


@pytest.mark.parametrize(
    ("metadata", "suffix"),
    [({}, ".safetensors"), ({}, ".bin"), ({"metadata": None}, ".bin"), ({"metadata": []}, ".bin")],
    ids=str,
)
def test_an_index_without_metadata_is_an_error_that_a_repair_mends(
    tmp_path: Path, saved: Any, metadata: dict[str, Any], suffix: str
) -> None:
    library, folder = in_suffix(saved, suffix, tmp_path)
    weight_map = folder.map
    folder.index.write_text(json.dumps({"weight_map": weight_map, "more": 1, **metadata}))
    with pytest.raises((KeyError, TypeError)):
        next(library.loads(folder))
    (model,) = Library.loads(library, folder)
    assert library.is_equal(model)
    report = check(folder.path)
    assert report.status == 1
    assert [str(finding) for finding in report.findings if finding.code == "index-mismatch"] == [
        f'{folder.index.name} has no "metadata" object, so transformers and diffusers refuse to '
        "load the model"
    ]
    assert repair(folder.path).status == 0
    document = json.loads(folder.index.read_text())
    assert (document["weight_map"], document["more"]) == (weight_map, 1)
    assert library.is_loaded(folder)
    assert check(folder.path).status == 0


@pytest.mark.parametrize("suffix", [".safetensors"])
@pytest.mark.parametrize("metadata", [{}, {"total_size": "x"}, {"total_size": -1}, {"dtype": None}])
def test_whatever_the_metadata_hold_the_index_loads(
    tmp_path: Path, saved: Any, metadata: dict[str, Any], suffix: str
) -> None:
    library, folder = in_suffix(saved, suffix, tmp_path)
    folder.write_map(folder.map, metadata=metadata)
    # Without it transformers takes the dtype of the index.
    reconfigure(folder.path, dtype="float32")
    assert library.is_equal(next(library.loads(folder)))
    assert all(map(library.is_equal, Library.loads(library, folder)))
    assert check(folder.path).status == 0
