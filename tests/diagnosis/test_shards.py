"""Sharded models: renamed as a whole or not at all, and an index is written only where the headers
settle it.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from ckptfix import Keys, Policy, check, repair, undo
from tests.repairs.builders import (
    RANDOM_STATES,
    read_safetensors_bytes,
    snapshot,
    write_safetensors,
    write_trained_optimizer,
)

INDEX = "model.safetensors.index.json"


def shard(number: int, total: int, suffix: str = ".safetensors") -> str:
    return f"model-{number:05}-of-{total:05}{suffix}"


def write(
    folder: Path, files: Mapping[str, Mapping[str, bytes]], *, index: str | None = INDEX
) -> None:
    folder.mkdir(exist_ok=True)
    for name, tensors in files.items():
        write_safetensors(folder / name, tensors)
    if index is not None:
        write_index(
            folder / index, {fqn: name for name, tensors in files.items() for fqn in tensors}
        )


def write_index(path: Path, weight_map: Mapping[str, str]) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def names(folder: Path) -> dict[str, list[str]]:
    return {
        path.name: list(read_safetensors_bytes(path))
        for path in sorted(folder.glob("*.safetensors"))
    }


def weight_map(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def codes(folder: Path) -> list[str]:
    return [finding.code for finding in check(folder).findings]


NESTED = {shard(1, 2): {"module.module.a": b"1"}, shard(2, 2): {"module.module.b": b"2"}}


def test_shards_and_index_are_renamed_together(tmp_path: Path) -> None:
    write(tmp_path, NESTED)
    before = snapshot(tmp_path)
    assert repair(tmp_path).status == 0
    assert names(tmp_path) == {shard(1, 2): ["module.a"], shard(2, 2): ["module.b"]}
    assert weight_map(tmp_path) == {"module.a": shard(1, 2), "module.b": shard(2, 2)}
    undo(tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("damage", ["unsafe", "trailing"])
@pytest.mark.parametrize("with_index", [True, False])
def test_one_shard_that_must_stay_keeps_the_others(
    tmp_path: Path, damage: str, with_index: bool
) -> None:
    """Renamed in part, the model would load wrong, and nobody could see any more what it was."""

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            import os

            return os.system, ("true",)

    for number, fqn in enumerate("abc", 1):
        state: dict[str, object] = {f"module.module.{fqn}": torch.ones(2)}
        if number == 2 and damage == "unsafe":
            state["module.module.x"] = Evil()
        torch.save(state, tmp_path / shard(number, 3, ".bin"))
    if damage == "trailing":
        with (tmp_path / shard(2, 3, ".bin")).open("ab") as file:
            file.write(b"\0" * 100)
    if with_index:
        found = {
            f"module.module.{fqn}": shard(number, 3, ".bin") for number, fqn in enumerate("abc", 1)
        }
        write_index(tmp_path / "model.bin.index.json", found)
    before = snapshot(tmp_path)
    receipt = repair(tmp_path, policy=Policy(only=frozenset({"nested-prefix"})))
    assert (receipt.status, receipt.steps) == (1, ())
    assert {path.name for stay in receipt.unplanned for path in stay.paths} >= {
        shard(number, 3, ".bin") for number in (1, 2, 3)
    }
    assert snapshot(tmp_path) == before


def test_a_repair_of_names_does_not_hide_lost_tensors(tmp_path: Path) -> None:
    write(tmp_path, NESTED, index=None)
    listed = {fqn: name for name, tensors in NESTED.items() for fqn in tensors}
    write_index(tmp_path / INDEX, {**listed, "module.module.lost": shard(2, 2)})
    before = snapshot(tmp_path)
    for only in ((), ("nested-prefix",)):
        receipt = repair(tmp_path, policy=Policy(only=frozenset(only)))
        assert (receipt.status, receipt.steps) == (1, ())
    assert snapshot(tmp_path) == before
    assert "index-mismatch" in codes(tmp_path)


def test_shards_of_one_model_get_one_target(tmp_path: Path) -> None:
    """The index knows one bare name: that speaks for no shard alone."""
    write(tmp_path, NESTED, index=None)
    write_index(tmp_path / INDEX, {"a": shard(1, 2), "b": shard(2, 2)})
    repair(tmp_path)
    assert names(tmp_path) == {shard(1, 2): ["a"], shard(2, 2): ["b"]}
    assert codes(tmp_path) == []


def test_shards_follow_an_index_only_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path, NESTED, index=None)
    write_index(tmp_path / INDEX, {"a": shard(1, 2), "module.module.b": shard(2, 2)})
    before = snapshot(tmp_path)
    receipt = repair(tmp_path)
    assert (receipt.status, receipt.steps) == (1, ())
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("beside", [True, False])
def test_an_own_module_may_fill_a_shard(tmp_path: Path, beside: bool) -> None:
    files = {shard(1, 2): {"head": b"1"}, shard(2, 2): {"module.module.w": b"2"}}
    write(tmp_path, files)
    if beside:
        write_safetensors(tmp_path / "model.safetensors", {"other": b"3"})
    assert "nested-prefix" not in codes(tmp_path)
    assert repair(tmp_path).steps == ()


def test_an_index_over_files_of_any_name_makes_one_model(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"part_a.safetensors": {"head": b"1"}, "part_b.safetensors": {"module.module.w": b"2"}},
    )
    assert codes(tmp_path) == []
    assert repair(tmp_path).steps == ()


def test_a_lone_shard_is_not_repaired_by_itself(tmp_path: Path) -> None:
    write(tmp_path, NESTED)
    before = snapshot(tmp_path)
    for policy in (Policy(), Policy(keys=Keys.BARE)):
        receipt = repair(tmp_path / shard(1, 2), policy=policy)
        assert receipt.steps == ()
        assert "repair the folder" in receipt.unplanned[0].reason
    assert snapshot(tmp_path) == before


def test_shards_of_two_saves_without_an_index_are_not_joined(tmp_path: Path) -> None:
    write(tmp_path, {shard(1, 3): {"a": b"1"}, shard(2, 2): {"b": b"2"}}, index=None)
    assert set(codes(tmp_path)) == {"missing-shard"}
    assert repair(tmp_path).steps == ()


def test_two_whole_sets_without_an_index_are_not_chosen_from(tmp_path: Path) -> None:
    files = {
        shard(1, 2): {"a": b"1"},
        shard(2, 2): {"b": b"2"},
        shard(1, 1): {"a": b"3", "b": b"4"},
    }
    write(tmp_path, files, index=None)
    receipt = repair(tmp_path)
    assert (receipt.status, receipt.steps) == (1, ())
    assert "unclear" in str(receipt.left[0])


def test_left_over_shards_are_told_and_not_indexed(tmp_path: Path) -> None:
    files = {shard(1, 2): {"a": b"1"}, shard(2, 2): {"b": b"2"}}
    write(tmp_path, files)
    write_safetensors(tmp_path / shard(3, 3), {"c": b"3"})
    listed = weight_map(tmp_path)
    assert codes(tmp_path) == ["stale-shard"]
    assert repair(tmp_path).steps == ()
    assert weight_map(tmp_path) == listed


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        ({"a": 1}, "does not list 1 tensor of the shards"),  # and not its shard
        ({"a": 2, "b": 2}, "names the wrong shard for 1 tensor"),
        ({"a": 2}, "names the wrong shard for 1 tensor and does not list 1 tensor of the shards"),
    ],
)
def test_what_the_index_says_wrongly_is_written_again(
    tmp_path: Path, listed: dict[str, int], problem: str
) -> None:
    files = {shard(1, 2): {"a": b"1"}, shard(2, 2): {"b": b"2"}}
    write(tmp_path, files)
    write_index(tmp_path / INDEX, {name: shard(number, 2) for name, number in listed.items()})
    (finding,) = check(tmp_path).findings
    assert (finding.code, str(finding)) == ("index-mismatch", f"{INDEX} {problem}")
    assert repair(tmp_path).status == 0
    assert weight_map(tmp_path) == {"a": shard(1, 2), "b": shard(2, 2)}


def test_the_index_of_a_variant_is_an_index(tmp_path: Path) -> None:
    files = {
        "model.fp16-00001-of-00002.safetensors": {"a": b"1"},
        "model.fp16-00002-of-00002.safetensors": {"b": b"2"},
    }
    write(tmp_path, files, index="model.safetensors.index.fp16.json")
    assert codes(tmp_path) == []
    assert repair(tmp_path).steps == ()


@pytest.mark.parametrize(
    "content", [b"", b'{"weight_map": {"a": "model-000', b'{"metadata": {}}', b"\xff\xfe"]
)
def test_an_unreadable_index_is_written_again(tmp_path: Path, content: bytes) -> None:
    files = {shard(1, 2): {"a": b"1"}, shard(2, 2): {"b": b"2"}}
    write(tmp_path, files)
    (tmp_path / INDEX).write_bytes(content)
    before = snapshot(tmp_path)
    assert codes(tmp_path) == ["index-mismatch"]
    assert repair(tmp_path).status == 0
    assert weight_map(tmp_path) == {"a": shard(1, 2), "b": shard(2, 2)}
    assert codes(tmp_path) == []
    undo(tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("target", ["../blobs/gone", INDEX])
def test_an_index_that_is_a_link_to_nothing_is_written_again(tmp_path: Path, target: str) -> None:
    """The cache of the hub has lost a blob, or the link leads to itself."""
    write(tmp_path, {shard(1, 2): {"a": b"1"}, shard(2, 2): {"b": b"2"}}, index=None)
    (tmp_path / shard(1, 2)).chmod(0o640)
    (tmp_path / INDEX).symlink_to(target)
    assert codes(tmp_path) == ["index-mismatch"]
    assert repair(tmp_path).status == 0
    assert weight_map(tmp_path) == {"a": shard(1, 2), "b": shard(2, 2)}
    assert (tmp_path / INDEX).stat().st_mode & 0o777 == 0o640
    assert codes(tmp_path) == []
    undo(tmp_path)
    assert str((tmp_path / INDEX).readlink()) == target


def test_an_unreadable_index_of_shards_that_lack_one_stays(tmp_path: Path) -> None:
    write(tmp_path, {shard(1, 2): {"a": b"1"}})
    (tmp_path / INDEX).write_bytes(b"{")
    assert set(codes(tmp_path)) == {"missing-shard", "malformed-file"}
    assert repair(tmp_path).steps == ()


def test_an_index_alone_names_what_is_missing(tmp_path: Path) -> None:
    write_index(tmp_path / INDEX, {"a": shard(1, 2), "b": shard(2, 2)})
    (finding,) = check(tmp_path).findings
    assert (finding.code, str(finding.path)) == ("missing-shard", shard(1, 2))
    assert "1 more shard are missing" in str(finding)


def test_a_double_that_an_index_names_stays(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": b"1"})
    write_safetensors(tmp_path / "model_1.safetensors", {"module.a": b"1"})
    write_trained_optimizer(tmp_path / "optimizer.bin", {"a": b"1"})
    for rank in range(2):
        (tmp_path / f"random_states_{rank}.pkl").write_bytes(RANDOM_STATES)
    write_index(tmp_path / INDEX, {"module.a": "model_1.safetensors"})
    before = snapshot(tmp_path)
    receipt = repair(tmp_path)
    assert "lists it" in receipt.unplanned[0].reason
    assert snapshot(tmp_path) == before


def test_shards_that_two_indexes_name_keep_their_names(tmp_path: Path) -> None:
    write(tmp_path, NESTED)
    write_index(
        tmp_path / "model.safetensors.index.v2.json",
        {fqn: name for name, tensors in NESTED.items() for fqn in tensors},
    )
    before = snapshot(tmp_path)
    receipt = repair(tmp_path)
    assert (receipt.status, receipt.steps) == (1, ())
    assert "two indexes list" in receipt.unplanned[0].reason
    assert snapshot(tmp_path) == before
