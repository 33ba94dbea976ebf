"""The metadata of safetensors files: words of the user's that stay, and ties that are told from
them.
"""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ckptfix import migrate
from tests.conversion.making import digests_at, ties_at

WORDS = {"format": "pt", "modelspec.title": "my lora", "ss_network_dim": "16", "best": "l.weight"}


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    save_file({"l.weight": torch.zeros(2), "b": torch.ones(2)}, path, metadata=WORDS)
    return path


def test_it_comes_along(source: Path) -> None:
    receipt = migrate(source, source.parent / "b.safetensors", to="safetensors")
    assert metadata(source.parent / "b.safetensors") == WORDS
    assert receipt.left_out == ()
    migrate(source, source.parent / "b", to="safetensors", max_shard_size=1)
    for path in (source.parent / "b").glob("*.safetensors"):
        assert metadata(path) == WORDS


@pytest.mark.parametrize(("to", "name"), [("bin", "b.bin"), ("dcp", "b")])
def test_where_there_is_no_place_for_it_the_receipt_says_so(
    source: Path, to: str, name: str
) -> None:
    receipt = migrate(source, source.parent / name, to=to)
    assert [one.what for one in receipt.left_out] == [
        "a.safetensors: 'best', 'modelspec.title', 'ss_network_dim'"
    ]
    assert digests_at(source.parent / name).keys() == {"l.weight", "b"}


def test_a_tie_is_told_from_a_word(source: Path) -> None:
    assert ties_at(source) == set()
    tied = {**WORDS, "lm_head.weight": "l.weight", "x.b": "l.weight"}
    save_file({"l.weight": torch.zeros(2), "b": torch.ones(2)}, source, metadata=tied)
    assert ties_at(source) == {frozenset({"l.weight", "lm_head.weight", "x.b"})}
    migrate(source, source.parent / "b.safetensors", to="safetensors")
    assert metadata(source.parent / "b.safetensors") == tied


def test_a_tie_under_any_name_comes_back(tmp_path: Path) -> None:
    shared = torch.ones(3)
    torch.save({"x": shared, "y": shared, "z": torch.zeros(1)}, tmp_path / "a.bin")
    migrate(tmp_path / "a.bin", tmp_path / "b.safetensors", to="safetensors")
    assert metadata(tmp_path / "b.safetensors") == {
        "format": "pt",
        "y": "x",
        "ckptfix.ties": '["y"]',
    }
    migrate(tmp_path / "b.safetensors", tmp_path / "c.safetensors", to="safetensors")
    migrate(tmp_path / "c.safetensors", tmp_path / "c.bin", to="bin")
    assert ties_at(tmp_path / "c.bin") == {frozenset({"x", "y"})}


@pytest.mark.parametrize("text", ["", "{", "[1, null]", '{"y": 1}', "[" * 100000])
def test_a_list_of_ties_that_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.safetensors"
    save_file(
        {"x": torch.zeros(2)}, path, metadata={"format": "pt", "y": "x", "ckptfix.ties": text}
    )
    assert ties_at(path) == set()
