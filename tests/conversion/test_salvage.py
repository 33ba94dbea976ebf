"""Damaged checkpoints into new folders: what is written, what is listed, and that nothing else is
left behind.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix import OperationError, UsageError, diff, salvage
from ckptfix.conversion import salvage as writing
from ckptfix.conversion.streaming import write_file
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.verification.diff_report import Outcome
from tests.repairs.builders import snapshot
from tests.tensors import dcp_making
from tests.tensors.zero_making import make_zero

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"


def copy_of(name: str, tmp_path: Path) -> Path:
    shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def cut(path: Path, off: int) -> None:
    path.write_bytes(path.read_bytes()[:-off])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def left(folder: Path) -> "set[str]":
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    "name",
    ["clean-safetensors", "clean-bin", "sharded-gpt2", "tied-weights-bin", "lone-bare-train"],
)
def test_a_whole_checkpoint_is_copied(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name / "checkpoint"
    receipt = salvage(source, tmp_path / "new")
    assert receipt.status == 0
    assert not receipt.saved
    new = snapshot(tmp_path / "new")
    document = json.loads(new.pop("salvage.json"))
    assert (document["version"], document["lost"], document["source"]) == (1, [], str(source))
    assert new == {
        name: data for name, data in snapshot(source).items() if not name.startswith(".ckptfix")
    }
    assert left(tmp_path) == {"new"}


@pytest.mark.parametrize(
    ("name", "model"),
    [("clean-safetensors", "model.safetensors"), ("clean-bin", "pytorch_model.bin")],
)
def test_a_save_state_folder_with_a_cut_model(name: str, model: str, tmp_path: Path) -> None:
    folder = copy_of(name, tmp_path)
    whole = FIXTURES / name / "checkpoint"
    size = (folder / model).stat().st_size
    (folder / model).write_bytes((folder / model).read_bytes()[: size * 3 // 5])
    cut(folder / "optimizer.bin", 7)
    before = snapshot(folder)
    receipt = salvage(folder, tmp_path / "new")
    assert snapshot(folder) == before
    assert receipt.status == 1
    new = "model.safetensors"
    assert [file.path for file in receipt.saved] == [new]
    result = diff(whole / model, tmp_path / "new" / new)
    assert result.count(Outcome.EQUAL) == receipt.tensors > 0
    assert {one.name for one in receipt.lost if one.name} == {
        one.name for one in result.tensors() if one.outcome is Outcome.ONLY_A
    }
    assert [one.file for one in receipt.lost if one.name is None] == ["optimizer.bin"]
    rest = snapshot(tmp_path / "new")
    assert json.loads(rest.pop("salvage.json")) == json.loads(
        json.dumps({"version": 1, **receipt.as_json()})
    )
    rest.pop(new)
    assert rest == {name: before[name] for name in before if name not in (model, "optimizer.bin")}
    assert os.stat(tmp_path / "new" / new).st_mode & 0o044, "readable as other new files are"


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = copy_of("sharded-gpt2", tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"]
    shards = sorted(set(index.values()))
    (folder / shards[0]).unlink()
    cut(folder / shards[1], 1)
    receipt = salvage(folder, tmp_path / "new")
    assert {one.name for one in receipt.lost} >= {
        name for name, file in index.items() if file == shards[0]
    }
    assert {one.reason for one in receipt.lost if one.file == shards[0]} == {"its file is missing"}
    assert sum(one.file == shards[1] for one in receipt.lost) >= 1
    (file,) = receipt.saved
    assert (file.path, file.source) == ("model.safetensors", "model.safetensors.index.json")
    assert {*file.names} | {one.name for one in receipt.lost} == index.keys()
    found = load_file(tmp_path / "new" / "model.safetensors")
    for shard in shards[1:]:
        path = FIXTURES / "sharded-gpt2" / "checkpoint" / shard
        for name, tensor in load_file(path).items():
            if name in file.names:
                assert torch.equal(found[name], tensor)
    assert not list((tmp_path / "new").glob("*.index.json")), "one file needs no index"


def test_cut_and_missing_shards_of_torch_files(tmp_path: Path) -> None:
    folder = copy_of("sharded-gpt2-bin", tmp_path)
    index = json.loads((folder / "pytorch_model.bin.index.json").read_bytes())["weight_map"]
    shards = sorted(set(index.values()))
    (folder / shards[-1]).unlink()
    size = (folder / shards[0]).stat().st_size
    (folder / shards[0]).write_bytes((folder / shards[0]).read_bytes()[: size * 2 // 3])
    receipt = salvage(folder, tmp_path / "new")
    result = diff(
        FIXTURES / "sharded-gpt2-bin" / "checkpoint", tmp_path / "new" / "model.safetensors"
    )
    assert {one.name for one in result.tensors() if one.outcome is Outcome.EQUAL} == set(
        receipt.saved[0].names
    )
    lost = {one.name: one for one in receipt.lost}
    assert lost.keys() == {one.name for one in result.tensors() if one.outcome is Outcome.ONLY_A}
    assert {lost[name].file for name in lost} == {shards[0], shards[-1]}


def test_a_lost_shard_without_an_index(tmp_path: Path) -> None:
    for number in (1, 3):
        save_file(
            {f"w{number}": torch.ones(number)},
            tmp_path / f"model-0000{number}-of-00003.safetensors",
        )
    receipt = salvage(tmp_path, tmp_path.parent / f"{tmp_path.name}-new")
    assert [(one.file, one.name) for one in receipt.lost] == [
        ("model-00002-of-00003.safetensors", None)
    ]
    assert receipt.saved[0].names == ("w1", "w3")
    shutil.rmtree(tmp_path.parent / f"{tmp_path.name}-new")


def test_a_cut_header_saves_nothing_and_says_so(tmp_path: Path) -> None:
    save_file({"w": torch.ones(9)}, tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:30])
    with pytest.raises(OperationError, match=r"nothing can be salvaged.*header"):
        salvage(tmp_path / "a.safetensors", tmp_path / "new")
    assert left(tmp_path) == {"a.safetensors"}


def test_dtypes_that_safetensors_lacks_stay_in_a_torch_file(tmp_path: Path) -> None:
    state = {
        "c": torch.randn(4, dtype=torch.complex128),
        "w": torch.randn(3),
        "v": torch.randn(99),
    }
    torch.save(state, tmp_path / "m.bin")
    data = (tmp_path / "m.bin").read_bytes()
    (tmp_path / "m.bin").write_bytes(data[: data.index(b"data/2")])
    receipt = salvage(tmp_path / "m.bin", tmp_path / "new")
    assert [file.path for file in receipt.saved] == ["m.bin"]
    found = torch.load(tmp_path / "new" / "m.bin", weights_only=True)
    assert found.keys() == {"c", "w"}
    assert all(torch.equal(found[name], state[name]) for name in found)


def test_a_tie_stays_a_tie(tmp_path: Path) -> None:
    weight = torch.randn(5, 5)
    torch.save({"a": weight, "b": weight, "z": torch.randn(999)}, tmp_path / "m.bin")
    cut(tmp_path / "m.bin", 3000)
    receipt = salvage(tmp_path / "m.bin", tmp_path / "new")
    (weights,) = open_checkpoint(tmp_path / "new" / "m.safetensors").weights
    assert (weights.ties, receipt.saved[0].names) == ({"b": "a"}, ("a", "b"))


def test_several_state_dicts_of_one_file(tmp_path: Path) -> None:
    def module(size: int) -> Any:
        return torch.nn.Linear(size, size).state_dict()

    torch.save({"teacher/1": module(3), "student": module(4), "step": 5}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(data[: data.index(b"version", data.index(b"data/3"))])
    receipt = salvage(tmp_path / "x.pt", tmp_path / "new")
    assert [file.path for file in receipt.saved] == [
        "x-teacher_1.safetensors",
        "x-student.safetensors",
    ]
    assert [one.name for one in receipt.lost] == ["step"]


def test_new_names_do_not_meet_old_ones(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "m.safetensors")
    torch.save({"w": torch.ones(3), "z": torch.ones(999)}, tmp_path / "m.pt")
    cut(tmp_path / "m.pt", 3000)
    (tmp_path / "salvage.json").write_text("{}")
    new = tmp_path.parent / f"{tmp_path.name}-new"
    receipt = salvage(tmp_path, new)
    assert [file.path for file in receipt.saved] == ["m-salvaged.safetensors"]
    assert receipt.copied == ("m.safetensors",)
    assert json.loads((new / "salvage.json").read_text())["lost"]
    shutil.rmtree(new)


def test_a_flipped_bit_in_files_with_checksums(tmp_path: Path) -> None:
    folder = copy_of("clean-bin", tmp_path)
    for name in ("pytorch_model.bin", "optimizer.bin"):
        data = (folder / name).read_bytes()
        flip(folder / name, data.index(b"PK\7\x08", data.index(b"data/0")) - 1)
    receipt = salvage(folder, tmp_path / "new")
    assert {one.file for one in receipt.lost} == {"pytorch_model.bin", "optimizer.bin"}
    assert all("CRC-32" in one.reason for one in receipt.lost)
    kept = salvage(folder, tmp_path / "kept", keep_damaged=True)
    assert (kept.lost, kept.status) == ((), 1)
    assert {one.file for one in kept.damaged} == {"pytorch_model.bin", "optimizer.bin"}
    assert (tmp_path / "kept" / "optimizer.bin").read_bytes() == (
        folder / "optimizer.bin"
    ).read_bytes()


def test_what_stands_in_the_way(tmp_path: Path) -> None:
    folder = copy_of("sharded-gpt2", tmp_path)
    with pytest.raises(UsageError, match="exists"):
        salvage(folder, tmp_path)
    with pytest.raises(UsageError, match="inside"):
        salvage(folder, folder / "new")
    with pytest.raises(UsageError, match=r"none does not exist; next: mkdir -p \S*none$"):
        salvage(folder, tmp_path / "none" / "new")
    with pytest.raises(UsageError, match="does not exist"):
        salvage(tmp_path / "none", tmp_path / "new")
    with pytest.raises(UsageError, match="is an index; name its folder instead"):
        salvage(folder / "model.safetensors.index.json", tmp_path / "new")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        salvage(tmp_path / "empty", tmp_path / "new")
    assert left(tmp_path) == {"checkpoint", "empty"}


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(9), "b": torch.ones(9)}, tmp_path / "m.safetensors")
    cut(tmp_path / "m.safetensors", 1)

    def damaging(target: Path, *arguments: Any, **options: Any) -> Any:
        result = write_file(target, *arguments, **options)
        flip(target, target.stat().st_size - 1)
        return result

    monkeypatch.setattr(writing, "write_file", damaging)
    with pytest.raises(OperationError, match="'a' differs from what was read"):
        salvage(tmp_path / "m.safetensors", tmp_path / "new")
    assert left(tmp_path) == {"m.safetensors"}


def test_links_and_special_files_are_not_followed_or_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"a": torch.ones(9)}, source / "m.safetensors")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("secret")
    (source / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(source / "pipe")
    (source / "folder").mkdir()
    (source / "folder" / "note").write_text("note")
    (source / "gone").symlink_to(tmp_path / "nowhere")
    receipt = salvage(source, tmp_path / "new")
    assert {one.file for one in receipt.lost} == {"link", "pipe", "gone"}
    assert set(snapshot(tmp_path / "new")) == {"m.safetensors", "folder/note", "salvage.json"}


def dcp_state() -> "dict[str, Any]":
    torch.manual_seed(1)
    return {f"layers.{i}.w": torch.randn(40, 10) for i in range(6)}


def test_a_dcp_folder_with_a_cut_file(tmp_path: Path) -> None:
    source = tmp_path / "source" / "pytorch_model_fsdp_0"
    source.mkdir(parents=True)
    dcp_making.save(source, {"model": dcp_state()})
    shutil.copytree(source, tmp_path / "source" / "optimizer_0")
    whole = salvage(tmp_path / "source", tmp_path / "whole")
    assert whole.status == 0
    assert (
        snapshot(tmp_path / "whole").keys() - {"salvage.json"}
        == snapshot(tmp_path / "source").keys()
    )
    (data,) = source.glob("*.distcp")
    cut(data, data.stat().st_size // 2)
    cut(next((tmp_path / "source" / "optimizer_0").glob("*.distcp")), 1)
    receipt = salvage(tmp_path / "source", tmp_path / "new")
    (file,) = receipt.saved
    assert file.path == "model.safetensors"
    assert 0 < len(file.names) < 6
    assert {*file.names} | {one.name for one in receipt.lost if one.name} == dcp_state().keys()
    for name, tensor in load_file(tmp_path / "new" / file.path).items():
        assert torch.equal(tensor, dcp_state()[name])
    assert [one.file for one in receipt.lost if one.name is None] == ["optimizer_0"]
    assert not (tmp_path / "new" / "optimizer_0").exists()
    data.unlink()
    with pytest.raises(OperationError, match="nothing can be salvaged"):
        salvage(tmp_path / "source", tmp_path / "other")


def test_files_in_other_folders_are_checked_too(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "pytorch_model").mkdir(parents=True)
    save_file({"a": torch.ones(9)}, source / "model.safetensors")
    make_zero(source / "pytorch_model", [{"w": torch.randn(99)}], stage=2, ranks=1)
    (source / "pytorch_model" / "latest").write_text("x")
    assert salvage(source, tmp_path / "whole").status == 0
    cut(source / "pytorch_model" / "mp_rank_00_model_states.pt", 1000)
    receipt = salvage(source, tmp_path / "new")
    assert [one.file for one in receipt.lost] == ["pytorch_model/mp_rank_00_model_states.pt"]
    assert "ckptfix salvage" not in receipt.lost[0].reason, "no tensor of it is whole"
    assert snapshot(tmp_path / "new").keys() - {"salvage.json"} == {
        "model.safetensors",
        "pytorch_model/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "pytorch_model/latest",
    }


def test_a_dcp_folder_itself(tmp_path: Path) -> None:
    dcp_making.save(tmp_path / "source", dcp_state())
    assert salvage(tmp_path / "source", tmp_path / "whole").status == 0
    assert diff(tmp_path / "source", tmp_path / "whole").status == 0
    (tmp_path / "source" / ".metadata").unlink()
    with pytest.raises(OperationError, match=r"nothing can be salvaged.*\.metadata"):
        salvage(tmp_path / "source", tmp_path / "new")
