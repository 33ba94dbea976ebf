"""DCP folders, whose tensors lie in several files: sealed, moved, damaged, compared with other
formats.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import diff, seal, verify
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.storage.files import on_disk
from ckptfix.verification.diff_report import Outcome as Difference
from ckptfix.verification.verify_report import Kind, Outcome
from tests.tensors.dcp_making import save
from tests.verification.sealed import flip, place, state, wrong


@pytest.mark.parametrize("name", ["", "pytorch_model_fsdp_0"])
def test_a_dcp_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    save(folder / name, {"model": state()})
    (folder / "notes.txt").write_text("mine")
    assert seal(folder).tensors == 4
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.models[0].file.split("[")[0] == (name or ".")
    moved = folder.rename(tmp_path / "elsewhere")
    report = verify(moved, data=True)
    assert (report.status, wrong(report)) == (0, {})
    assert report.count(Kind.TENSOR)[Outcome.MATCH] == 4
    one = tmp_path / "one"
    one.mkdir()
    save_file(state(), one / "model.safetensors")
    assert diff(moved, one).count(Difference.EQUAL) == 4
    piece = place(moved, "layers.2.weight")
    flip(piece.path, piece.offset + 100)
    file = str(on_disk(piece.path).relative_to(moved))
    assert wrong(verify(moved)) == {"layers.2.weight": ("changed", file), file: ("changed", None)}


def test_a_dcp_folder_without_its_metadata(tmp_path: Path) -> None:
    save(tmp_path / "pytorch_model_fsdp_0", {"model": state()})
    save_file({"w": torch.ones(3)}, tmp_path / "model_1.safetensors")
    seal(tmp_path, force=True)
    (tmp_path / "pytorch_model_fsdp_0" / ".metadata").unlink()
    report = verify(tmp_path)
    assert report.status == 1
    assert wrong(report)["pytorch_model_fsdp_0/.metadata"] == ("missing", None)
    lost = [
        item
        for item in report.items
        if item.kind is Kind.TENSOR and item.outcome is not Outcome.MATCH
    ]
    assert {item.outcome for item in lost} == {Outcome.NOT_CHECKED}
    assert len(lost) == 4
    shutil.rmtree(tmp_path / "pytorch_model_fsdp_0")
    report = verify(tmp_path)
    assert {wrong(report)[name][0] for name in state()} == {"missing"}
