"""The bytes of a DCP folder's tensors: heads at every check, checksums with ``--data``."""

import errno
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat

from ckptfix import CheckReport, check
from ckptfix.diagnosis.findings.damaged import CrcMismatch, MalformedFile, NotATensorFile
from ckptfix.storage.executor import Remembering
from ckptfix.storage.results import PartialResults
from tests.repairs.dcp_folders import MODEL, change, copy
from tests.tensors.dcp_making import save


def clean(tmp_path: Path) -> Path:
    return copy(tmp_path, "fsdp2-clean", keep=(MODEL,))


def place_of(folder: Path, name: str) -> Any:
    content = pickle.loads((folder / ".metadata").read_bytes())
    return next(value for key, value in content.storage_data.items() if key.fqn == name)


def test_a_file_of_zeros(tmp_path: Path) -> None:
    folder = clean(tmp_path)
    path = folder / MODEL / "__1_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    for data in (False, True):
        (finding,) = check(folder, data=data).findings
        assert isinstance(finding, NotATensorFile)
        assert str(finding.path) == f"{MODEL}/__1_0.distcp"
        assert "zeros instead of a header" in str(finding)


def test_an_item_that_begins_as_none(tmp_path: Path) -> None:
    folder = clean(tmp_path)
    place = place_of(folder / MODEL, "model.2.weight")
    path = folder / MODEL / place.relative_path
    data = bytearray(path.read_bytes())
    data[place.offset : place.offset + 4096] = bytes(min(4096, len(data) - place.offset))
    path.write_bytes(data[: path.stat().st_size])
    (finding,) = check(folder).findings
    assert isinstance(finding, MalformedFile)
    assert "model.2.weight" in str(finding)
    assert f"byte {place.offset}" in str(finding)


def test_a_flipped_bit_is_found_with_data(tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    save(folder, {"model": {"a": torch.arange(1000.0), "b": torch.arange(8.0)}})
    report = check(folder)
    assert report.findings == ()
    assert any(".distcp" in words and "--data" in words for words in report.not_checked)
    assert not any(".distcp" in words for words in check(folder, data=True).not_checked)
    place = place_of(folder, "model.a")
    path = folder / place.relative_path
    data = bytearray(path.read_bytes())
    begin = data.index(torch.arange(1000.0).numpy().tobytes())
    data[begin + 2000] ^= 1
    path.write_bytes(data)
    assert check(folder).findings == ()
    read = 0

    def progress(count: int) -> None:
        nonlocal read
        read += count

    (finding,) = check(folder, data=True, progress=progress).findings
    assert isinstance(finding, CrcMismatch)
    assert finding.tensors == ("model.a",)
    assert finding.record.endswith("data/0")
    assert read > 4000


def with_partial_results(folder: Path, results: Path) -> CheckReport:
    """Check a checkpoint as a process does that goes on from what an earlier run has found."""
    executor = Remembering(PartialResults(results), lambda words: None)
    return check(folder, data=True, executor=executor)


def test_items_of_another_metadata_are_read_again(tmp_path: Path) -> None:
    folder = clean(tmp_path)
    place = place_of(folder / MODEL, "model.2.weight")

    def shift(metadata: Any) -> None:
        for key, one in metadata.storage_data.items():
            if key.fqn == "model.2.weight" and one.relative_path == place.relative_path:
                one.offset -= 3

    good = (folder / MODEL / ".metadata").read_bytes()
    change(folder / MODEL, shift)
    assert with_partial_results(folder, tmp_path / "partial").findings
    (folder / MODEL / ".metadata").write_bytes(good)
    assert check(folder, data=True).findings == ()
    assert with_partial_results(folder, tmp_path / "partial").findings == ()


def test_a_file_that_could_not_be_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of files that is away for a moment is no result for the next run to go on from."""
    folder = clean(tmp_path)

    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(folder))

    with monkeypatch.context() as during:
        during.setattr("ckptfix.diagnosis.dcp_folders._of_file", fail)
        assert any(
            "/output" in words
            for words in with_partial_results(folder, tmp_path / "partial").unfinished
        )
    assert with_partial_results(folder, tmp_path / "partial").unfinished == ()


@pytest.mark.parametrize("name", ["optimizer.lr", "step"])
def test_a_flipped_bit_in_what_is_no_tensor_is_found_with_data(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "whole"
    state = {"model": {"a": torch.arange(8.0)}, "optimizer": {"lr": 0.25}, "step": 7}
    save(folder, state)
    assert check(folder, data=True).findings == ()
    place = place_of(folder, name)
    path = folder / place.relative_path
    data = bytearray(path.read_bytes())
    value = (
        data.index(b"\x80\x02", place.offset) + 3
    )  # behind the protocol, and the opcode that the number is of
    data[value] ^= 1
    path.write_bytes(data)
    (finding,) = check(folder, data=True).findings
    assert isinstance(finding, CrcMismatch)
    assert finding.tensors == (name,)
    assert finding.record.endswith("data.pkl")


def test_a_directory_that_is_gone_is_found_with_data(tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    save(folder, {"model": {"a": torch.arange(1000.0)}})
    place = place_of(folder, "model.a")
    path = folder / place.relative_path
    data = bytearray(path.read_bytes())
    data[place.offset + place.length - 200 : place.offset + place.length] = bytes(200)
    path.write_bytes(data)
    (finding,) = check(folder, data=True).findings
    assert isinstance(finding, MalformedFile)
    assert "model.a" in str(finding)


@pytest.mark.parametrize("data", [False, True])
def test_safetensors_in_a_file_are_whole(tmp_path: Path, data: bool) -> None:
    state = {"model": {"a": torch.ones(3), "b": torch.ones(2, 2), "empty": torch.zeros(0)}}
    save(tmp_path / "x", state, serialization_format=SerializationFormat.SAFETENSORS)
    assert check(tmp_path / "x", data=data).findings == ()
    path = tmp_path / "x" / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    assert [finding.code for finding in check(tmp_path / "x", data=data).findings] == [
        "not-a-tensor-file"
    ]
