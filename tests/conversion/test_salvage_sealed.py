"""A manifest of the source is a check of what is whole: a flipped bit in safetensors shows in no
other way.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix import OperationError, salvage, seal
from ckptfix.conversion.salvage_sources import OTHER
from tests.conversion.test_salvage import cut
from tests.repairs.builders import snapshot
from tests.tensors import dcp_making
from tests.tensors.zero_making import make_zero
from tests.verification.sealed import flip, place, sealed, state

FQN = "layers.2.weight"
REST = state().keys() - {FQN}


def flip_tensor(folder: Path, fqn: str = FQN) -> str:
    piece = place(folder, fqn)
    flip(piece.path, piece.offset + 5)
    return piece.path.name


@pytest.mark.parametrize("kind", ["safetensors", "sharded"])
def test_a_flipped_bit_is_found_by_its_digest(tmp_path: Path, kind: str) -> None:
    folder = sealed(tmp_path / "a", kind)
    file = flip_tensor(folder)
    receipt = salvage(folder, tmp_path / "new")
    assert [(one.file, one.name, one.reason) for one in receipt.lost] == [(file, FQN, OTHER)]
    assert (receipt.status, receipt.not_checked, receipt.doubtful) == (1, (), ())
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert found.keys() == REST
    assert all(torch.equal(found[name], state()[name]) for name in found)
    assert not (tmp_path / "new" / ".ckptfix").exists()
    assert len(receipt.left_out) == 1
    assert ".ckptfix" in receipt.left_out[0]


def test_a_statement_about_the_old_files_is_left_out(tmp_path: Path) -> None:
    """The reference verifier would refuse the new folder; that of the tensors says which of them
    are still there.
    """
    folder = sealed(tmp_path / "a", "safetensors")
    seal(folder, oms=True)
    flip_tensor(folder)
    receipt = salvage(folder, tmp_path / "new")
    assert [
        words for words in receipt.left_out if "model.oms.json" in words and "ckptfix seal" in words
    ]
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "README.md", "model.safetensors", "tensors.oms.json", "salvage.json",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["safetensors", "sharded", "dict"])
def test_what_is_damaged_is_kept_when_asked(tmp_path: Path, kind: str) -> None:
    folder = sealed(tmp_path / "a", kind)
    flip_tensor(folder)
    receipt = salvage(folder, tmp_path / "new", keep_damaged=True)
    assert receipt.status == 1
    assert [one.name for one in receipt.damaged] == [FQN]
    if kind == "dict":  # the file's own checksum disagrees, too, so it was taken apart
        assert set(receipt.saved[0].names) == state().keys()
        assert [one.name for one in receipt.lost] == ["epoch"]
        return
    assert not receipt.lost
    kept = snapshot(tmp_path / "new")
    kept.pop("salvage.json")
    assert kept == {
        name: data for name, data in snapshot(folder).items() if not name.startswith(".ckptfix")
    }


@pytest.mark.parametrize("kind", ["safetensors", "bin", "sharded", "dict"])
def test_all_that_was_sealed_and_is_the_same_is_whole(tmp_path: Path, kind: str) -> None:
    receipt = salvage(sealed(tmp_path / "a", kind), tmp_path / "new")
    assert (receipt.verdict, receipt.not_checked) == ("everything was intact", ())
    assert not receipt.saved


def test_a_whole_tensor_of_a_cut_file_is_proven(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(5000), "b": torch.zeros(5000), "c": torch.ones(9)},
        tmp_path / "m.safetensors",
    )
    seal(tmp_path)
    piece = place(tmp_path, "a")
    cut(tmp_path / "m.safetensors", 30)
    flip(piece.path, piece.offset)
    receipt = salvage(tmp_path / "m.safetensors", tmp_path.parent / f"{tmp_path.name}-new")
    lost = {one.name: one.reason for one in receipt.lost}
    assert lost.keys() == {"a", "c"}
    assert lost["a"] == OTHER
    assert receipt.saved[0].names == ("b",)
    assert (receipt.doubtful, receipt.not_checked) == (
        (),
        (),
    ), "zeros that have their digest are no doubt"


def test_files_without_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.bin")
    (folder / "scheduler.bin").write_bytes(b"\x80\x02}.")
    sealed(folder, "safetensors")
    (folder / "README.md").write_text("my own words")
    torch.save({"state": {}, "param_groups": [1]}, folder / "optimizer.bin")
    (folder / "scheduler.bin").unlink()
    receipt = salvage(folder, tmp_path / "new")
    assert {(one.file, one.reason) for one in receipt.lost} == {
        ("optimizer.bin", OTHER),
        ("scheduler.bin", "listed in the manifest, but missing"),
    }
    assert [(one.file, one.reason) for one in receipt.doubtful] == [("README.md", OTHER)]
    assert (tmp_path / "new" / "README.md").read_text() == "my own words"
    kept = salvage(folder, tmp_path / "kept", keep_damaged=True)
    assert [one.file for one in kept.damaged] == ["optimizer.bin"]


def test_other_words_in_the_header_are_no_damage_to_tensors(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "a", "safetensors")
    save_file(state(), folder / "model.safetensors", {"format": "pt", "note": "mine"})
    receipt = salvage(folder, tmp_path / "new")
    assert receipt.status == 0
    assert [one.file for one in receipt.doubtful] == ["model.safetensors"]
    assert "every sealed tensor of its model matches its digest" in receipt.doubtful[0].reason


def test_what_the_manifest_knows_of_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "a", "safetensors")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:30])
    sealed(tmp_path / "b", "safetensors")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.bin")
    receipt = salvage(folder, tmp_path / "new")
    names = {one.name for one in receipt.lost if one.reason == "its file cannot be read"}
    assert names == state().keys()
    less = {name: tensor for name, tensor in state().items() if name != FQN}
    save_file(less, folder / "model.safetensors")
    receipt = salvage(folder, tmp_path / "less")
    assert [(one.name, one.reason) for one in receipt.lost] == [
        (FQN, "listed in the manifest, but in no file")
    ]


def test_a_shard_alone(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "a", "sharded")
    assert flip_tensor(folder) == "model-00002-of-00002.safetensors"
    one = salvage(folder / "model-00001-of-00002.safetensors", tmp_path / "one")
    assert [(lost.file, lost.name) for lost in one.lost] == [
        ("model-00002-of-00002.safetensors", None)
    ]
    assert len(one.saved[0].names) == 2
    assert not one.not_checked
    two = salvage(folder / "model-00002-of-00002.safetensors", tmp_path / "two")
    assert {lost.name for lost in two.lost} == {FQN, None}


def test_a_manifest_of_another_save_is_told_and_can_be_put_aside(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "a", "safetensors")
    (folder / "README.md").unlink()
    save_file({name: tensor + 1 for name, tensor in state().items()}, folder / "model.safetensors")
    with pytest.raises(
        OperationError, match=r"if the manifest belongs to an earlier save: rm .*manifest\.json"
    ):
        salvage(folder, tmp_path / "new")
    receipt = salvage(folder, tmp_path / "kept", keep_damaged=True)
    assert any("earlier save" in words for words in receipt.not_checked)
    (folder / ".ckptfix" / "manifest.json").unlink()
    assert salvage(folder, tmp_path / "new").status == 0


def test_a_manifest_that_cannot_be_understood_stops_nothing(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "a", "safetensors")
    (folder / ".ckptfix" / "manifest.json").write_text("{")
    receipt = salvage(folder, tmp_path / "new")
    assert receipt.status == 0
    assert any(
        words.startswith("digests, because the manifest cannot be used")
        for words in receipt.not_checked
    )


def test_a_tie_is_lost_with_its_tensor(tmp_path: Path) -> None:
    weight = torch.randn(5, 5)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": weight, "b": weight, "c": torch.ones(3)}, tmp_path / "m.bin")
    finally:
        torch.serialization.set_crc32_options(True)
    seal(tmp_path)
    flip_tensor(tmp_path, "a")
    receipt = salvage(tmp_path / "m.bin", tmp_path.parent / f"{tmp_path.name}-new")
    assert {one.name: one.reason for one in receipt.lost} == {
        "a": OTHER,
        "b": "it is tied to 'a', which is lost",
    }
    assert receipt.saved[0].names == ("c",)


@pytest.mark.parametrize("name", ["", "pytorch_model_fsdp_0"])
def test_a_dcp_folder_without_checksums(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a"
    torch.serialization.set_crc32_options(False)
    try:
        dcp_making.save(folder / name, {"model": state()})
        dcp_making.save(folder / "optimizer_0", {"x": torch.ones(50), "y": torch.ones(3)})
    finally:
        torch.serialization.set_crc32_options(True)
    seal(folder)
    whole = salvage(folder, tmp_path / "whole")
    assert (whole.status, whole.not_checked) == (0, ())
    flip_tensor(folder)
    kept = salvage(folder, tmp_path / "kept", keep_damaged=True)
    assert [OTHER in one.reason for one in kept.damaged] == [True]
    receipt = salvage(folder, tmp_path / "new")
    assert [(one.name, one.reason) for one in receipt.lost] == [(FQN, OTHER)]
    assert load_file(tmp_path / "new" / "model.safetensors").keys() == REST
    (data,) = (folder / "optimizer_0").glob("*.distcp")
    flip(data, data.read_bytes().index(torch.ones(50).numpy().tobytes()) + 3)
    again = salvage(folder, tmp_path / "again")
    assert [OTHER in one.reason for one in again.lost if one.file == "optimizer_0"] == [True]


def test_files_in_folders_below(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    (folder / "below").mkdir(parents=True)
    save_file({"w": torch.ones(50)}, folder / "below" / "model.safetensors")
    (folder / "pytorch_model").mkdir()
    make_zero(folder / "pytorch_model", [{"w": torch.randn(99)}], stage=2, ranks=1)
    sealed(folder, "safetensors")
    assert salvage(folder, tmp_path / "whole").status == 0
    flip(
        folder / "below" / "model.safetensors",
        (folder / "below" / "model.safetensors").stat().st_size - 1,
    )
    receipt = salvage(folder, tmp_path / "new")
    (lost,) = receipt.lost
    assert lost.file == "below/model.safetensors"
    assert lost.reason.startswith(OTHER)
