"""What torch.load makes of packed records, which torch.save never writes: the reason for
``compressed-record``.
"""

import zipfile
from pathlib import Path

import pytest
import torch

from ckptfix import check


def packed(path: Path, *ends: str) -> Path:
    """Save ten numbers, and pack the records that end so."""
    torch.save({"w": torch.arange(10.0)}, path)
    with zipfile.ZipFile(path) as archive:
        records = [(one.filename, archive.read(one)) for one in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records:
            archive.writestr(
                name, data, zipfile.ZIP_DEFLATED if name.endswith(ends) else zipfile.ZIP_STORED
            )
    return path


def test_packed_numbers_load_as_other_numbers_with_mmap(tmp_path: Path) -> None:
    path = packed(tmp_path / "model.bin", "data/0")
    assert torch.equal(torch.load(path, weights_only=True)["w"], torch.arange(10.0))
    assert not torch.equal(torch.load(path, weights_only=True, mmap=True)["w"], torch.arange(10.0))
    (finding,) = check(path).findings
    assert finding.code == "compressed-record"
    assert "reads compressed bytes as numbers" in str(finding)


def test_a_packed_pickle_loads_and_is_a_warning(tmp_path: Path) -> None:
    path = packed(tmp_path / "model.bin", "data.pkl")
    assert torch.equal(torch.load(path, weights_only=True, mmap=True)["w"], torch.arange(10.0))
    report = check(path)
    assert report.status == 1
    assert [finding.code for finding in report.findings] == ["compressed-record"]


@pytest.mark.parametrize("limit", ["MAX_PICKLE", "MAX_UNPACKED"])
def test_a_pickle_larger_than_is_read_is_a_warning(
    tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(
        tmp_path / "model.bin", *(["data.pkl"] if limit == "MAX_UNPACKED" else ["nothing"])
    )
    monkeypatch.setattr(f"ckptfix.formats.torch_zip.{limit}", 16)
    report = check(path)
    assert report.status == 1
    (finding,) = report.findings
    assert finding.code == "unchecked-file"
    assert "over the limit of 16" in str(finding)
    assert not any("limit of 16" in words for words in report.not_checked)
