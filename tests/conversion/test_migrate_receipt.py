"""The receipt of a migration: entries of headers and indexes, tensors of torch's own kinds, parts
of one storage.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptfix.conversion.migrate import MigrateReceipt, migrate
from ckptfix.errors import OperationError
from tests.tensors.test_single_files import LONG, quantized, two_shards


def words_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def left_out(receipt: MigrateReceipt) -> dict[str, str]:
    return {one.what.partition(": ")[2]: one.reason for one in receipt.left_out}


@pytest.mark.parametrize("to", ["safetensors", "bin", "dcp"])
def test_words_that_differ_between_shards_are_named(tmp_path: Path, to: str) -> None:
    two_shards(tmp_path / "a", {"format": "pt", "rank": "0"}, {"format": "pt", "rank": "1"})
    receipt = migrate(tmp_path / "a", tmp_path / "b", to=to)
    assert left_out(receipt) == {"'rank'": "metadata that differs from shard to shard"}
    if to == "safetensors":
        assert words_of(tmp_path / "b" / "model.safetensors") == {"format": "pt"}


def test_a_tie_of_another_shard_stays_one(tmp_path: Path) -> None:
    two_shards(tmp_path / "a", {"format": "pt", "head.weight": "emb.weight"}, {"format": "pt"})
    migrate(tmp_path / "a", tmp_path / "b", to="safetensors")
    assert words_of(tmp_path / "b" / "model.safetensors") == {
        "format": "pt",
        "head.weight": "emb.weight",
    }
    migrate(tmp_path / "a", tmp_path / "c", to="bin")
    state = torch.load(tmp_path / "c" / "pytorch_model.bin")
    assert state["head.weight"].data_ptr() == state["emb.weight"].data_ptr()


def test_a_word_that_would_become_a_tie_is_left_out_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    words = {"format": "pt", "best.weight": "a.weight", "mine": "kept"}
    save_file(
        {"module.a.weight": torch.ones(2)}, tmp_path / "a" / "model.safetensors", metadata=words
    )
    receipt = migrate(tmp_path / "a", tmp_path / "b", to="safetensors", keys="bare")
    assert left_out(receipt) == {
        "'best.weight'": "metadata that would be read as the key of a tied tensor"
    }
    assert words_of(tmp_path / "b" / "model.safetensors") == {"format": "pt", "mine": "kept"}


def test_what_an_index_says_goes_to_the_new_index_or_is_named(tmp_path: Path) -> None:
    metadata = {"total_size": 1, "total_parameters": 6, "license": "mit"}
    two_shards(tmp_path / "a", {"format": "pt"}, {"format": "pt"}, metadata=metadata, made_by="me")
    for to, name in (("safetensors", "model.safetensors"), ("bin", "pytorch_model.bin")):
        receipt = migrate(tmp_path / "a", tmp_path / to, to=to, max_shard_size=20)
        assert not receipt.left_out
        index = json.loads((tmp_path / to / f"{name}.index.json").read_text())
        assert index["metadata"] == {**metadata, "total_size": 24}
        assert index["made_by"] == "me"
    for to in ("safetensors", "dcp"):
        receipt = migrate(tmp_path / "a", tmp_path / f"one-{to}", to=to)
        assert list(left_out(receipt)) == ["'license', 'made_by'"]


@pytest.mark.parametrize("drop_opaque", [False, True])
def test_tensors_of_kinds_that_are_not_carried_are_never_dropped(
    tmp_path: Path, drop_opaque: bool
) -> None:
    state = {"q.weight": quantized(torch.qint8), "b": torch.ones(2), "_extra_state": {"amax": 1}}
    torch.save(state, tmp_path / "a.bin")
    words = (
        r"a\.bin: 'q\.weight': a quantized tensor \(torch\.qint8\), which only torch can store;"
        r" next: "
    )
    with pytest.raises(
        OperationError, match=words + r"load the file with torch, call dequantize\(\) on such "
    ):
        migrate(
            tmp_path / "a.bin",
            tmp_path / "b.safetensors",
            to="safetensors",
            drop_opaque=drop_opaque,
        )
    assert not (tmp_path / "b.safetensors").exists()


def test_an_extra_state_is_still_dropped_when_asked(tmp_path: Path) -> None:
    torch.save({"b": torch.ones(2), "_extra_state": {"amax": 1}}, tmp_path / "a.bin")
    with pytest.raises(OperationError, match="--drop-opaque"):
        migrate(tmp_path / "a.bin", tmp_path / "b.safetensors", to="safetensors")
    migrate(tmp_path / "a.bin", tmp_path / "b.safetensors", to="safetensors", drop_opaque=True)
    assert list(load_file(tmp_path / "b.safetensors")) == ["b"]


def test_parts_of_one_storage_are_named(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    torch.save({"a": base[:4], "b": base[2:]}, tmp_path / "a.bin")
    receipt = migrate(tmp_path / "a.bin", tmp_path / "b.bin", to="bin")
    assert list(left_out(receipt)) == ["'a', 'b'"]
    assert "their shared storage: each tensor gets its own" in receipt.left_out[0].reason


@pytest.mark.parametrize("to", ["safetensors", "bin", "dcp"])
def test_long_names_are_carried_and_too_long_ones_refused_truly(tmp_path: Path, to: str) -> None:
    save_file({"w": torch.ones(2), LONG: torch.ones(3)}, tmp_path / "a.safetensors")
    receipt = migrate(tmp_path / "a.safetensors", tmp_path / "b", to=to)
    assert (receipt.models[0].tensors, receipt.left_out) == (2, ())
    save_file(
        {"w": torch.ones(2), "x" * (1 << 20) + "y": torch.ones(3)}, tmp_path / "a.safetensors"
    )
    if to == "safetensors":
        migrate(tmp_path / "a.safetensors", tmp_path / "c", to=to)
        return
    with pytest.raises(
        OperationError, match=r"takes 10485[78][0-9] bytes in a pickle, but at most 1048576"
    ):
        migrate(tmp_path / "a.safetensors", tmp_path / "c", to=to)
