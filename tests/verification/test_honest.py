"""``verify`` and ``seal`` call nothing good that they did not see, and nothing bad that is not."""

import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import OperationError, seal, verify
from ckptfix.checkpoint.latest import UNFINISHED
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.storage.paths import MANIFEST
from ckptfix.verification.verify_report import Kind, Outcome
from tests.tensors.dcp_making import save
from tests.verification.sealed import flip, make_safetensors, place, sealed, state, wrong


def recompress(path: Path) -> None:
    """Write an archive of torch.save as other programs do, with compressed records: its tensors
    have no place.
    """
    with zipfile.ZipFile(path) as archive:
        records = [(one.filename, archive.read(one)) for one in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records:
            archive.writestr(name, data)


@pytest.mark.parametrize("only_the_tensors", [False, True])
def test_tensors_with_a_digest_that_cannot_be_read_are_named(
    tmp_path: Path, only_the_tensors: bool
) -> None:
    folder = sealed(tmp_path, "bin")
    recompress(folder / "pytorch_model.bin")
    if only_the_tensors:  # as after a save with tensor_digests, which knows no digests of files
        document = json.loads((folder / MANIFEST).read_text())
        document["files"] = {
            name: (folder / name).stat().st_size for name in document.pop("sha256")
        }
        (folder / MANIFEST).write_text(json.dumps(document))
    report = verify(folder)
    assert report.count(Kind.TENSOR)[Outcome.NOT_CHECKED] == 4
    assert any("4 tensors of pytorch_model.bin" in words for words in report.unfinished)
    assert report.status == 1
    assert [finding.code for finding in report.findings] == ["compressed-record"]


def test_values_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "pytorch_model.bin")
    recompress(tmp_path / "pytorch_model.bin")
    assert not verify(tmp_path).is_verified, "nothing is recorded"
    report = verify(tmp_path, data=True)
    assert report.status == 1
    assert [finding.code for finding in report.findings] == ["compressed-record"]
    assert not report.is_verified
    assert "values of pytorch_model.bin" in report.unfinished[0]


def test_a_model_behind_a_link_to_a_folder_is_sealed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save(tmp_path / "elsewhere", {"model": state()})
    (folder / "pytorch_model_fsdp_0").symlink_to("../elsewhere")
    (folder / "latest").symlink_to("pytorch_model_fsdp_0")
    (folder / "above").symlink_to("..")
    (folder / "here").symlink_to(".")
    (folder / "loop").symlink_to("loop")
    (folder / "nowhere").symlink_to("gone")
    receipt = seal(folder)
    assert receipt.tensors == 4
    manifest = read_manifest(folder)
    assert manifest is not None
    listed = {name.partition("/")[0] for name in manifest.sha256}
    assert len(listed) == 1
    assert manifest.sha256.keys() == {
        f"{next(iter(listed))}/{path.name}" for path in (tmp_path / "elsewhere").iterdir()
    }
    told = " ".join(receipt.special)
    assert all(name in told for name in ("above", "here", "loop", "nowhere"))
    assert "above: is a link to a folder that contains it" in receipt.special
    assert "here: is a link to the checkpoint itself" in receipt.special
    report = verify(folder)
    assert report.status == 0
    assert {item.outcome for item in report.items if item.name in ("above", "here")} == {
        Outcome.NOT_CHECKED
    }
    (tmp_path / "elsewhere" / ".metadata").write_bytes(b"")
    assert verify(folder).status == 1


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_safetensors(tmp_path)
    (tmp_path / "sub").mkdir()
    real = os.scandir

    def refusing(path: str) -> object:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr("ckptfix.storage.paths.os.scandir", refusing)
    assert wrong(verify(tmp_path))["sub"][0] == "not checked"
    assert seal(tmp_path).special == ("sub: cannot be listed: Permission denied",)


def test_a_warning_of_check_is_status_1_and_seal_tells_it(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "pytorch_model.bin")
    with (tmp_path / "pytorch_model.bin").open("ab") as file:
        file.write(b"more")
    report = verify(tmp_path)
    assert [finding.code for finding in report.findings] == ["trailing-bytes"]
    assert report.status == 1
    receipt = seal(tmp_path)
    assert [finding.code for finding in receipt.findings] == ["trailing-bytes"]
    assert (receipt.status, receipt.written) == (0, True)


def test_a_save_that_was_cut_short_is_sealed_only_by_force(tmp_path: Path) -> None:
    save(tmp_path / "pytorch_model_fsdp_0", {"model": state()})
    make_safetensors(tmp_path)
    (tmp_path / "pytorch_model_fsdp_0" / ".metadata").unlink()
    receipt = seal(tmp_path)
    assert (receipt.status, [finding.code for finding in receipt.findings]) == (
        1,
        ["interrupted-save"],
    )
    assert verify(tmp_path).status == 1
    assert seal(tmp_path, force=True).written
    guarded = tmp_path / "guarded"
    guarded.mkdir()
    make_safetensors(guarded)
    (guarded / ".ckptfix").mkdir()
    (guarded / ".ckptfix" / UNFINISHED).write_text("[]")
    with pytest.raises(OperationError, match="seal --force"):
        seal(guarded)
    assert seal(guarded, force=True).written


def test_a_record_without_its_crc_is_not_sealed(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(5000)}, tmp_path / "pytorch_model.bin")
    piece = place(tmp_path, "w")
    flip(piece.path, piece.offset + 9000)
    assert any("checksums" in words for words in verify(tmp_path).not_checked)
    report = verify(tmp_path, data=True)
    assert [finding.code for finding in report.findings] == ["crc-mismatch"]
    assert report.status == 1
    assert not any("checksums" in words for words in report.not_checked)
    assert not any("(NaN, zeros" in words for words in report.not_checked)
    receipt = seal(tmp_path)
    assert [finding.code for finding in receipt.findings] == ["crc-mismatch"]
    assert not (tmp_path / MANIFEST).exists()


def test_values_of_weights_that_are_not_looked_at_are_named(tmp_path: Path) -> None:
    make_safetensors(tmp_path)
    torch.save(state(), tmp_path / "pytorch_model.bin")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.bin")
    (tmp_path / "sub").mkdir()
    save_file({"w": torch.zeros(4)}, tmp_path / "sub" / "adapter_model.safetensors")
    told = " ".join(verify(tmp_path, data=True).not_checked)
    assert "values of 2 weight files next to those that are loaded" in told
    assert "'pytorch_model.bin', 'sub/adapter_model.safetensors'" in told
    assert "next to those" not in " ".join(
        verify(tmp_path / "model.safetensors", data=True).not_checked
    )
