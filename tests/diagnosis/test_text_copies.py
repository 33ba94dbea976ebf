"""Safetensors files that were copied as text: a carriage return before each line feed shifts the
numbers behind it.
"""

import os
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ckptfix import Policy, Severity, check, repair, salvage
from ckptfix.errors import OperationError
from ckptfix.formats import safetensors_file
from ckptfix.formats.safetensors_file import has_converted_lines, read_safetensors
from ckptfix.storage.reading import open_reader
from tests.repairs.builders import write_safetensors

TRIM = Policy(allow=frozenset({"trailing-bytes"}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "checkpoint" / "model.safetensors"
    path.parent.mkdir()
    save_file(
        {f"l{layer}.weight": torch.randn(32, 32) for layer in range(4)}, path, {"format": "pt"}
    )
    return path


def test_a_copy_as_text_is_damage_that_no_cut_repairs(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\n", b"\r\n"))
    with pytest.raises(SafetensorError):
        load_file(path)
    (finding,) = check(path.parent).findings
    assert finding.code == "malformed-file"
    assert "copied in text mode" in str(finding)
    before = path.read_bytes()
    assert repair(path.parent, policy=TRIM).status == 1
    assert path.read_bytes() == before
    with pytest.raises(OperationError):
        salvage(path.parent, tmp_path / "saved")


def test_line_feeds_behind_16_mib_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    data = torch.zeros(20 << 20, dtype=torch.uint8)
    data[-64:] = torch.arange(64)
    save_file({"a": data}, path, {"format": "pt"})
    before = path.read_bytes()
    path.write_bytes(before.replace(b"\n", b"\r\n"))
    assert [finding.code for finding in check(tmp_path).findings] == ["malformed-file"]
    path.write_bytes(before.replace(bytes([9, 10]), b"\r\n") + b"x" * 100)
    assert [finding.code for finding in check(tmp_path).findings] == ["trailing-bytes"]


@pytest.mark.parametrize(
    "surplus", [b"\r\n", b"x" * 60, b"\r\n" * 60], ids=["a line", "60 bytes", "60 lines"]
)
def test_appended_bytes_are_cut(path: Path, surplus: bytes) -> None:
    data = path.read_bytes()
    path.write_bytes(data + surplus)
    with pytest.raises(SafetensorError):
        load_file(path)
    (finding,) = check(path.parent).findings
    assert (finding.code, finding.severity) == ("trailing-bytes", Severity.ERROR)
    assert str(finding).endswith("; safetensors refuses the file")
    assert repair(path.parent, policy=TRIM).status == 0
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("is_zip", "surplus", "severity", "outcome"),
    [
        (True, 100, Severity.WARNING, "torch.load usually ignores them"),
        (True, 100_000, Severity.ERROR, "torch.load refuses the file"),
        (False, 100_000, Severity.WARNING, "torch.load usually ignores them"),
    ],
)
def test_appended_bytes_are_an_error_where_torch_refuses_them(
    tmp_path: Path, is_zip: bool, surplus: int, severity: Severity, outcome: str
) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=is_zip)
    path.write_bytes(path.read_bytes() + bytes(surplus))
    with nullcontext() if severity is Severity.WARNING else pytest.raises(RuntimeError):
        torch.load(path)
    (finding,) = check(path.parent).findings
    assert (finding.code, finding.severity) == ("trailing-bytes", severity)
    assert str(finding).endswith(f"; {outcome}")


@given(
    data=st.lists(st.sampled_from([b"\n", b"\r", b"x"]), min_size=1).map(b"".join),
    piece=st.integers(1, 5),
)
def test_pieces_of_any_length_find_the_same(data: bytes, piece: int) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setattr(safetensors_file, "_PIECE", piece)
        path = write_safetensors(folder / "model.safetensors", {"a": data})
        content = path.read_bytes()
        begin = len(content) - len(data)
        path.write_bytes(content[:begin] + data.replace(b"\n", b"\r\n"))
        if b"\n" not in data:
            return
        with open_reader(path) as reader:
            assert has_converted_lines(reader, read_safetensors(reader))
        path.write_bytes(content + os.urandom(1).replace(b"\n", b"x"))
        with open_reader(path) as reader:
            is_text = data.count(b"\n") == data.count(b"\r\n") == 1
            assert has_converted_lines(reader, read_safetensors(reader)) is is_text
