"""What a salvage may not pass over: all that is lost is named, nothing stale is taken, nothing
doubtful is whole.
"""

import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix import OperationError, UsageError, check, salvage
from ckptfix.tensors.dcp_tensors import read_metadata_of
from tests.commanding import Said, said
from tests.conversion.test_salvage import cut, flip, left
from tests.diagnosis.test_completeness import make
from tests.repairs.builders import snapshot
from tests.tensors import dcp_making

__all__ = ["said"]

OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(300)}}, "param_groups": [{"params": [0]}]}


def module(seed: int) -> "dict[Any, Any]":
    torch.manual_seed(seed)
    return {f"l.{i}.weight": torch.randn(16, 16) for i in range(3)}


def flip_in_record(path: Path, ending: str) -> None:
    """Flip a bit in the data of a record of a zip file."""
    with zipfile.ZipFile(path) as archive:
        (record,) = [one for one in archive.infolist() if one.filename.endswith(ending)]
    data = path.read_bytes()
    lengths = data[record.header_offset + 26 : record.header_offset + 30]
    begin = (
        record.header_offset
        + 30
        + int.from_bytes(lengths[:2], "little")
        + int.from_bytes(lengths[2:], "little")
    )
    flip(path, begin + 5)


@pytest.mark.parametrize(
    ("value", "record", "lost"),
    [
        ({"ckpt": {"model": module(0), "optimizer": OPTIMIZER}}, "data/3", ["ckpt.optimizer"]),
        ([module(0), {"x": torch.ones(100)}, module(1)], "data/3", ["1"]),
        ({**module(0), 5: torch.ones(100)}, "data/3", ["5"]),
        (
            {"model": module(0), "ema": module(1), "opt": OPTIMIZER, "epoch": 3},
            "data/6",
            ["opt", "epoch"],
        ),
        (
            {**module(0), "ema": module(1), "step": 4, "x": torch.ones(3)},
            "data/6",
            [*module(0), "step", "x"],
        ),
    ],
    ids=["nested", "list", "number", "two", "inside"],
)
def test_all_that_is_no_saved_state_dict_is_lost_once(
    tmp_path: Path, value: Any, record: str, lost: "list[str]"
) -> None:
    torch.save(value, tmp_path / "s.pt")
    flip_in_record(tmp_path / "s.pt", record)
    receipt = salvage(tmp_path / "s.pt", tmp_path / "new")
    assert [one.name for one in receipt.lost] == lost
    assert receipt.status == 1


def test_a_damaged_file_without_a_state_dict_is_lost(tmp_path: Path) -> None:
    torch.save(OPTIMIZER, tmp_path / "mine.pt")
    flip_in_record(tmp_path / "mine.pt", "data/0")
    with pytest.raises(OperationError, match=r"nothing can be salvaged.*CRC-32"):
        salvage(tmp_path / "mine.pt", tmp_path / "new")


def save_dcp(folder: Path, state: "Mapping[str, Any]") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    dcp_making.save(folder, state)
    (data,) = folder.glob("*.distcp")
    return data


def test_a_dcp_folder_whose_optimizer_is_cut(tmp_path: Path) -> None:
    moments = {"state": {"l.0.weight": {"exp_avg": torch.ones(16, 16)}}}
    data = save_dcp(tmp_path / "source", {"model": module(0), "optimizer": moments})
    assert salvage(tmp_path / "source", tmp_path / "whole").status == 0
    cut(data, 500)
    receipt = salvage(tmp_path / "source", tmp_path / "new")
    assert [one.name for one in receipt.lost] == ["optimizer.state.l.0.weight.exp_avg"]
    assert "too short (expected at least " in receipt.lost[0].reason
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in module(0).items())
    cut(data, data.stat().st_size // 2)
    names = [one.name for one in salvage(tmp_path / "source", tmp_path / "less").lost]
    assert "optimizer.state.l.0.weight.exp_avg" in names
    assert len(names) > 1


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_a_flipped_bit_in_a_dcp_folder(tmp_path: Path, what: str) -> None:
    state: dict[str, Any] = {"model": {**module(0), "none": torch.empty(0, 3)}}
    state["optimizer"] = {"state": {"l.0.weight": {"exp_avg": torch.full((16, 16), 7.0)}}}
    data = save_dcp(tmp_path / "source", state)
    raw = dcp_making.raw(module(0)["l.1.weight"] if what == "model" else torch.full((16, 16), 7.0))
    flip(data, data.read_bytes().index(raw) + 9)
    receipt = salvage(tmp_path / "source", tmp_path / "new")
    wrong = "l.1.weight" if what == "model" else "optimizer.state.l.0.weight.exp_avg"
    (reason,) = [one.reason for one in receipt.lost if one.name == wrong]
    assert "CRC-32 mismatch in the record" in reason
    assert len(load_file(tmp_path / "new" / "model.safetensors")) == (3 if what == "model" else 4)
    kept = salvage(tmp_path / "source", tmp_path / "kept", keep_damaged=True)
    assert (kept.lost, kept.status) == ((), 1)
    assert [one.name for one in kept.damaged] == [
        wrong if what == "optimizer" else "model.l.1.weight"
    ]
    assert (
        snapshot(tmp_path / "kept").keys() - {"salvage.json"}
        == snapshot(tmp_path / "source").keys()
    )


def test_dcp_folders_without_their_metadata_are_no_whole_ones(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_dcp(source / "pytorch_model_fsdp_0", {"model": module(0)})
    save_dcp(source / "optimizer_0", {"optimizer": {"state": {"w": torch.ones(9)}}})
    assert salvage(source, tmp_path / "whole").lost == ()
    (source / "optimizer_0" / ".metadata").unlink()
    receipt = salvage(source, tmp_path / "new")
    (lost,) = receipt.lost
    assert lost.file == "optimizer_0"
    assert "the save was interrupted" in lost.reason
    assert not (tmp_path / "new" / "optimizer_0").exists()


def test_a_lone_optimizer_in_dcp_is_copied(tmp_path: Path) -> None:
    data = save_dcp(tmp_path / "optimizer_0", {"optimizer": {"state": {"w": torch.ones(9)}}})
    assert salvage(tmp_path / "optimizer_0", tmp_path / "new").status == 0
    assert (tmp_path / "new" / data.name).read_bytes() == data.read_bytes()


def test_folders_below_are_judged_as_models(tmp_path: Path) -> None:
    source = tmp_path / "source"
    below = source / "sub"
    below.mkdir(parents=True)
    torch.save({"last_epoch": 3}, source / "scheduler.bin")
    torch.save(OPTIMIZER, source / "optimizer.bin")
    shards = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    torch.save(module(0), below / shards[0])
    torch.save({"x": torch.ones(3)}, below / shards[1])
    index = {"metadata": {}, "weight_map": {**dict.fromkeys(module(0), shards[0]), "x": shards[1]}}
    (below / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    data = save_dcp(source / "deep" / "er", {"model": module(0)})
    whole = salvage(source, tmp_path / "whole")
    assert whole.lost == ()
    assert snapshot(tmp_path / "whole").keys() - {"salvage.json"} == snapshot(source).keys()
    (below / shards[1]).unlink()
    cut(data, 2000)
    receipt = salvage(source, tmp_path / "new")
    assert {one.file for one in receipt.lost} == {f"sub/{shards[1]}", "deep/er"}
    assert all("ckptfix salvage" in one.reason for one in receipt.lost)
    torch.save({"y": torch.ones(3)}, below / shards[1])
    (lost,) = [
        one for one in salvage(source, tmp_path / "other").lost if one.file.startswith("sub")
    ]
    assert (lost.file, lost.name) == (f"sub/{shards[1]}", "x")


def test_a_link_far_below_is_said(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "extra" / "deep").mkdir(parents=True)
    save_file({"w": torch.ones(3)}, source / "model.safetensors")
    (tmp_path / "elsewhere").mkdir()
    (source / "extra" / "deep" / "linked").symlink_to(tmp_path / "elsewhere")
    assert [one.file for one in salvage(source, tmp_path / "new").lost] == ["extra/deep/linked"]


def test_a_folder_under_the_name_of_a_file_is_lost(tmp_path: Path) -> None:
    """The symptom: 'everything was intact', and no file of that name in the new folder."""
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.ones(3)}, source / "model.safetensors")
    (source / "optimizer.bin").mkdir()
    (source / "optimizer.bin" / "data.pkl").write_bytes(b"1")
    (lost,) = salvage(source, tmp_path / "new").lost
    assert (lost.file, lost.reason) == ("optimizer.bin", "not a tensor file: a folder")


def write_shards(
    folder: Path, weight_map: "Mapping[str, int]", *shards: "Mapping[str, Any]"
) -> "list[Path]":
    """Write shards and their index: name -> number of its shard."""
    folder.mkdir()
    names = [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]
    for name, tensors in zip(names, shards, strict=True):
        save_file(dict(tensors), folder / name)
    index = {
        "metadata": {},
        "weight_map": {name: names[number - 1] for name, number in weight_map.items()},
    }
    if weight_map:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return [folder / name for name in names]


def test_an_old_copy_in_another_shard_is_not_taken(tmp_path: Path) -> None:
    first, second = write_shards(
        tmp_path / "source",
        {"b": 1, "z": 1, "a": 2, "c": 2},
        {"b": torch.ones(5), "z": torch.ones(1000)},
        {"a": torch.zeros(9), "z": torch.zeros(1000), "c": torch.ones(5)},
    )
    cut(first, 100)
    receipt = salvage(tmp_path / "source", tmp_path / "new")
    (lost,) = receipt.lost
    assert (lost.file, lost.name) == (first.name, "z")
    assert f"{second.name} holds another copy" in lost.reason
    assert load_file(tmp_path / "new" / "model.safetensors").keys() == {"a", "b", "c"}
    first.unlink()
    gone = {one.name: one.reason for one in salvage(tmp_path / "source", tmp_path / "less").lost}
    assert gone.keys() == {"b", "z"}
    assert gone["z"].startswith("its file is missing; ")
    assert f"{second.name} holds another copy" in gone["z"]


def write_stale_copy(folder: Path) -> "list[Path]":
    """Write shards of which the second has another z than the first, where the index sends it."""
    return write_shards(
        folder,
        {"b": 1, "z": 1, "a": 2},
        {"b": torch.ones(5), "z": torch.ones(1000)},
        {"a": torch.zeros(9), "b": torch.ones(5), "z": torch.zeros(1000)},
    )


def test_a_stale_copy_in_a_shard_of_a_complete_model_is_left_out(tmp_path: Path) -> None:
    """transformers took the copy of the last shard, also from the salvaged folder."""
    source = tmp_path / "source"
    first, second = write_stale_copy(source)
    receipt = salvage(source, tmp_path / "new")
    assert (receipt.status, receipt.verdict) == (0, "no losses found")
    (doubt,) = receipt.doubtful
    assert (doubt.file, doubt.name) == (first.name, "z")
    assert f"{second.name} holds it with different values, which are left out" in doubt.reason
    assert left(tmp_path / "new") == {"model.safetensors", "salvage.json"}
    saved = load_file(tmp_path / "new" / "model.safetensors")
    assert saved.keys() == {"a", "b", "z"}
    assert torch.equal(saved["z"], torch.ones(1000))
    save_file({"a": torch.zeros(9), "b": torch.ones(5)}, second)  # an equal copy does no harm
    assert set(salvage(source, tmp_path / "equal").copied) == left(source)


def test_a_stale_copy_in_shards_below_is_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_shards(source, {}, {"w": torch.ones(3)})
    first, _ = write_stale_copy(source / "below")
    receipt = salvage(source, tmp_path / "new")
    (lost,) = receipt.lost
    assert (lost.file, lost.name) == (f"below/{first.name}", "z")
    assert lost.reason.startswith("two files store it with different values")
    assert "ckptfix salvage" in lost.reason


def test_another_value_in_a_second_shard_without_an_index_is_lost(tmp_path: Path) -> None:
    write_shards(
        tmp_path / "source",
        {},
        {"a": torch.ones(3), "b": torch.ones(1)},
        {"a": torch.zeros(3)},
    )
    receipt = salvage(tmp_path / "source", tmp_path / "new")
    assert (receipt.status, receipt.saved[0].names) == (1, ("b",))
    assert all("no index shows which is used" in gone.reason for gone in receipt.lost)


def test_a_name_in_two_shards_without_an_index_is_lost(tmp_path: Path) -> None:
    _, _, third = write_shards(
        tmp_path / "source",
        {},
        {"a": torch.ones(3), "b": torch.ones(1)},
        {"a": torch.zeros(3)},
        {"z": torch.ones(99)},
    )
    cut(third, 8)
    receipt = salvage(tmp_path / "source", tmp_path / "new")
    assert receipt.saved[0].names == ("b",)
    assert {one.name for one in receipt.lost} == {"a", "z"}
    assert any("no index shows which is used" in one.reason for one in receipt.lost)


def test_the_folder_through_a_link_is_still_inside(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.ones(3)}, source / "model.safetensors")
    (tmp_path / "link").symlink_to(source)
    before = snapshot(source)
    for given, output in (
        (source, tmp_path / "link" / "out"),
        (tmp_path / "link", source / "out"),
    ):
        with pytest.raises(UsageError, match=r"is inside .*, the folder to copy"):
            salvage(given, output)
    assert snapshot(source) == before


def test_bytes_behind_the_last_tensor(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    for path in (source / "model.safetensors", source / "below" / "model.safetensors"):
        save_file(module(0), path)
        path.write_bytes(path.read_bytes() + bytes(64))
    receipt = salvage(source, tmp_path / "new")
    assert [(one.file, one.reason.partition(":")[0]) for one in receipt.lost] == [
        ("model.safetensors", "64 bytes are left out"),
        ("below/model.safetensors", "64 bytes are left out"),
    ]
    assert load_file(tmp_path / "new" / "model.safetensors").keys() == module(0).keys()
    assert not (tmp_path / "new" / "below").exists()


@pytest.mark.parametrize("shards", [1, 2])
def test_tensors_of_a_safetensors_file_with_extra_bytes_may_be_shifted(
    tmp_path: Path, shards: int
) -> None:
    """They were saved as intact, although bytes were doubled before them."""
    source = tmp_path / "source"
    source.mkdir()
    names = ["model.safetensors"]
    if shards == 2:
        names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for seed, name in enumerate(names):
        save_file({f"{seed}.{key}": value for key, value in module(seed).items()}, source / name)
    if shards == 2:
        keys = {f"{seed}.{key}": name for seed, name in enumerate(names) for key in module(0)}
        index = {"metadata": {"total_size": 1}, "weight_map": keys}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
    path = source / names[-1]
    data = path.read_bytes()
    path.write_bytes(data[:-1500] + data[-1508:-1500] + data[-1500:])
    receipt = salvage(source, tmp_path / "new")
    reason = "its values may be shifted: 8 extra bytes in the file"
    kept = [f"{shards - 1}.{key}" for key in module(0)]
    assert [(one.name, one.reason) for one in receipt.doubtful] == [(key, reason) for key in kept]
    assert receipt.status == 1


def legacy(path: Path, state: "dict[str, Any]") -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def tensor_bytes(value: torch.Tensor) -> bytes:
    return bytes(value.reshape(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("change", [b"", b"\x01" * 16], ids=["lost", "inserted"])
def test_a_tensor_before_a_moved_storage_of_a_legacy_file_may_be_shifted(
    tmp_path: Path, change: bytes
) -> None:
    state = {f"{number}": torch.arange(100.0) + 1000 * number for number in range(4)}
    legacy(tmp_path / "m.bin", state)
    data = (tmp_path / "m.bin").read_bytes()
    # Storages are in the order of their addresses.
    places = sorted((data.index(tensor_bytes(value)), key) for key, value in state.items())
    at, moved = places[1][0] + 40, places[1][1]
    (tmp_path / "m.bin").write_bytes(data[:at] + change + data[at + 8 * (not change) :])
    receipt = salvage(tmp_path / "m.bin", tmp_path / "new")
    reason = "its values may be shifted: the next storage does not begin where it should"
    assert [(one.name, one.reason) for one in receipt.doubtful] == [(moved, reason)]
    saved = load_file(tmp_path / "new" / "m.safetensors")
    assert not torch.equal(saved[moved], state[moved])
    assert all(torch.equal(saved[key], state[key]) for key in saved.keys() - {moved})


def test_a_damaged_length_in_a_legacy_file_moves_no_storage(tmp_path: Path) -> None:
    state = {f"{number}": torch.arange(100.0) + 1000 * number for number in range(3)}
    legacy(tmp_path / "m.bin", state)
    data = (tmp_path / "m.bin").read_bytes()
    _, key = sorted((data.index(tensor_bytes(value)), key) for key, value in state.items())[1]
    flip(tmp_path / "m.bin", data.index(tensor_bytes(state[key])) - 6)
    receipt = salvage(tmp_path / "m.bin", tmp_path / "new")
    assert [one.name for one in receipt.lost] == [key]
    assert receipt.doubtful == ()


def test_a_copied_file_with_extra_bytes_may_be_shifted(tmp_path: Path) -> None:
    legacy(tmp_path / "m.bin", {"a": torch.arange(100.0) + 1})
    data = (tmp_path / "m.bin").read_bytes()
    (tmp_path / "m.bin").write_bytes(data[:-40] + data[-44:])
    receipt = salvage(tmp_path / "m.bin", tmp_path / "new")
    assert [str(one) for one in receipt.doubtful] == [
        "m.bin: its values may be shifted: 4 extra bytes after its end"
    ]


def test_a_legacy_file_that_no_torch_reads_is_written_anew(tmp_path: Path) -> None:
    """It was copied, and nothing was lost."""
    state = {"a": torch.arange(9).to(torch.uint16), "b": torch.ones(3)}
    legacy(tmp_path / "m.bin", state)
    for weights_only in (True, False):
        with pytest.raises(AttributeError):
            torch.load(tmp_path / "m.bin", weights_only=weights_only)
    (finding,) = check(tmp_path / "m.bin").findings
    assert finding.code == "unloadable-pickle"
    assert finding.advice == "to write its tensors to a new file: ckptfix salvage DIR NEW_DIR"
    receipt = salvage(tmp_path / "m.bin", tmp_path / "new")
    assert (receipt.status, receipt.copied) == (0, ())
    saved = load_file(tmp_path / "new" / "m.safetensors")
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[key], value) for key, value in state.items())


def test_zeros_at_the_end_are_named(tmp_path: Path) -> None:
    path = tmp_path / "source" / "model.safetensors"
    path.parent.mkdir()
    save_file({f"l.{i}.w": torch.randn(5000) + 9 for i in range(4)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:-30_000] + bytes(30_000))
    receipt = salvage(path.parent, tmp_path / "new")
    assert [(one.name, one.reason) for one in receipt.doubtful] == [
        ("l.2.w", "its last 10000 bytes are zeros"),
        ("l.3.w", "its last 20000 bytes are zeros"),
    ]
    assert (receipt.status, receipt.verdict) == (0, "no losses found")
    document = json.loads((tmp_path / "new" / "salvage.json").read_text())
    assert [one["name"] for one in document["doubtful"]] == ["l.2.w", "l.3.w"]
    cut(path, 10)
    again = salvage(path.parent, tmp_path / "again")
    assert [one.name for one in again.doubtful] == ["l.2.w"], (
        "of what was taken out of a cut file, too"
    )


def test_whole_is_said_of_what_has_checksums(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(5000)}, tmp_path / "m.bin")
    whole = salvage(tmp_path / "m.bin", tmp_path / "new")
    assert (whole.verdict, whole.doubtful, whole.not_checked) == ("everything was intact", (), ())
    torch.save({"w": torch.zeros(5000)}, tmp_path / "l.bin", _use_new_zipfile_serialization=False)
    legacy = salvage(tmp_path / "l.bin", tmp_path / "other")
    assert (legacy.verdict, [one.name for one in legacy.doubtful]) == (
        "no losses found",
        ["w"],
    )


def test_one_number_that_claims_to_be_many_is_lost_alone(tmp_path: Path) -> None:
    wide = torch.zeros(1).expand(1 << 20, 1 << 20)
    torch.save(
        {"w.a": wide, "w.t": wide, "w.b": torch.ones(1000), "w.c": torch.ones(100)},
        tmp_path / "m.bin",
    )
    cut(tmp_path / "m.bin", 100)
    receipt = salvage(tmp_path / "m.bin", tmp_path / "new")
    assert receipt.saved[0].names == ("w.b", "w.c")
    assert {one.name for one in receipt.lost} == {"w.a", "w.t"}
    assert all("claims 4398046511104 bytes of a storage of 4" in one.reason for one in receipt.lost)


def test_a_tensor_beyond_its_storage_is_lost_alone(tmp_path: Path) -> None:
    torch.save(
        {"w.a": torch.ones(77), "w.b": torch.ones(1000)},
        tmp_path / "m.bin",
        _use_new_zipfile_serialization=False,
    )
    data = (tmp_path / "m.bin").read_bytes()
    assert data.count(b"KM\x85") == 1
    (tmp_path / "m.bin").write_bytes(data.replace(b"KM\x85", b"KN\x85"))
    receipt = salvage(tmp_path / "m.bin", tmp_path / "new")
    assert receipt.saved[0].names == ("w.b",)
    assert [
        (one.name, "beyond its storage of 308 bytes" in one.reason) for one in receipt.lost
    ] == [("w.a", True)]


def test_lost_tensors_of_a_dcp_folder_are_in_the_order_of_its_metadata(tmp_path: Path) -> None:
    data = save_dcp(tmp_path / "source", {f"l{number}": torch.ones(4) for number in range(12)})
    order = [tensor.fqn for tensor in read_metadata_of(tmp_path / "source").tensors]
    cut(data, data.stat().st_size * 3 // 4)
    lost = [one.name for one in salvage(tmp_path / "source", tmp_path / "new").lost]
    assert len(lost) > 6
    assert lost == [name for name in order if name in lost]


def without(*names: str) -> Callable[[Path], object]:
    def change(root: Path) -> None:
        for name in names:
            (root / name).unlink()

    return change


def renamed(root: Path) -> None:
    (root / "model.safetensors").rename(root / "model.safetensors.tmp")


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (without("model.safetensors", "optimizer.bin"), ["model.safetensors", "optimizer.bin"]),
        (renamed, ["model.safetensors"]),
        (without("random_states_0.pkl"), ["random_states_0.pkl"]),
        (without("model.safetensors", "model_1.safetensors"), ["model.safetensors"]),
    ],
)
def test_files_that_the_source_lacks_are_lost(
    tmp_path: Path, said: Said, change: Callable[[Path], object], lost: list[str]
) -> None:
    """It said "no losses found" and exited with 0, where ``check`` found errors in its
    source.
    """
    source = make(tmp_path / "source", "clean-teacher-student")
    shutil.copy(source / "optimizer.bin", source / "optimizer_1.bin")
    change(source)
    assert check(source).status == 1
    status, out, _ = said("salvage", source, tmp_path / "new")
    assert status == 1
    assert "no losses found" not in out
    for name in lost:
        assert f"  {name}: " in out
    assert f"next: copy {', '.join(map(repr, lost))} again into {tmp_path / 'new'}" in out
    document = json.loads((tmp_path / "new" / "salvage.json").read_text())
    assert [one["file"] for one in document["lost"]] == lost
    assert "salvaged" in {finding.code for finding in check(tmp_path / "new").findings}


def test_a_file_that_only_the_checkpoints_next_to_the_source_have(tmp_path: Path) -> None:
    roots = [make(tmp_path / "run" / f"checkpoint_{number}") for number in (1, 2, 3)]
    (roots[2] / "optimizer.bin").unlink()
    receipt = salvage(roots[2], tmp_path / "new")
    assert [str(lost) for lost in receipt.lost] == [
        "optimizer.bin: missing: 2 of 2 neighbouring checkpoints have it"
    ]
    assert receipt.status == 1
