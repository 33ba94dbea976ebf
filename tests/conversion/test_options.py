"""The words of a migration, and names of files."""

from pathlib import Path

import pytest
import torch

from ckptfix import Keys, OperationError, UsageError, migrate
from ckptfix.conversion.migration_plan import parse_size
from ckptfix.tensors.stored import Format
from tests.conversion.making import FORMATS, SUFFIXES, digests_at, names_below, write_safetensors


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500MiB", 500 << 20),
        ("1000", 1000),
        ("1.5 kb", 1500),
        ("2TB", 2 * 10**12),
        ("3B", 3),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "5 apples", "GB", "1e9", "0.1B", "9" * 40, "٣GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="expected a size such as 5GB"):
        parse_size(text)


def test_words_of_the_library(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"module.w": torch.ones(2)})
    migrate(
        tmp_path / "a.safetensors",
        tmp_path / "b",
        to=Format.TORCH,
        keys=Keys.BARE,
        max_shard_size=1,
    )
    assert digests_at(tmp_path / "b").keys() == {"w"}
    for wrong in (
        {"to": "gguf"},
        {"to": Format.DEEPSPEED},
        {"to": "bin", "keys": "x"},
        {"to": "bin", "dtype": "int8"},
    ):
        with pytest.raises(UsageError, match="expected one of"):
            migrate(tmp_path / "a.safetensors", tmp_path / "c", **wrong)
    assert names_below(tmp_path) == {"a.safetensors", "b/pytorch_model.bin"}


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        migrate(tmp_path / "a", tmp_path / "b", to="bin")


def test_two_files_that_would_become_one(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    write_safetensors(folder / "x.safetensors", {"w": torch.ones(2)})
    torch.save({"w": torch.ones(2)}, folder / "x.pt")
    with pytest.raises(UsageError, match=r"x\.pt and x\.safetensors would both become x"):
        migrate(folder, tmp_path / "b", to="bin")


def test_several_state_dicts_of_a_file_that_only_its_script_knows(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    states = {name: torch.nn.Linear(2, 2).state_dict() for name in ("net", "ema")}
    torch.save(states, tmp_path / "a" / "ckpt.pt")
    migrate(tmp_path / "a", tmp_path / "b", to="safetensors")
    assert names_below(tmp_path / "b") == {"ckpt.net.safetensors", "ckpt.ema.safetensors"}


@pytest.mark.parametrize("to", FORMATS)
def test_a_tensor_that_claims_more_than_there_is(tmp_path: Path, to: str) -> None:
    torch.save(
        {"w": torch.zeros(1, dtype=torch.complex64).expand(1 << 30, 1 << 29)}, tmp_path / "a.bin"
    )
    with pytest.raises(OperationError, match="claims 4611686018427387904 bytes of a storage of 8"):
        migrate(tmp_path / "a.bin", tmp_path / f"b{SUFFIXES[to]}", to=to)
    state = {f"w{number}": torch.zeros(1).expand(1 << 14, 1 << 14) for number in range(1 << 12)}
    torch.save(state, tmp_path / "a.bin")
    with pytest.raises(OperationError, match=r"needs 4\.0 TiB of free space"):
        migrate(tmp_path / "a.bin", tmp_path / f"b{SUFFIXES[to]}", to=to)
    assert names_below(tmp_path) == {"a.bin"}


def test_the_longest_name_and_an_odd_one(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"w": torch.ones(2)})
    for name in ("x" * 251 + ".bin", "é ∀\n.bin", "-rf.bin"):
        migrate(tmp_path / "a.safetensors", tmp_path / name, to="bin")
        assert digests_at(tmp_path / name) == digests_at(tmp_path / "a.safetensors")
