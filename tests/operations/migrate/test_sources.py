"""A source that is damaged, half written, or written to meanwhile never becomes a checkpoint that looks sound."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptfix import ChangedError, OperationError, migrate, seal
from ckptfix.operations.sealing.verify import verify
from ckptfix.storage.atomic import create_file
from tests.operations.migrate.making import FORMATS, digests_at, write_safetensors


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "a"
    folder.mkdir()
    for name, fill in (("model.safetensors", 1.0), ("model_1.safetensors", 2.0)):
        write_safetensors(folder / name, {"w": torch.full((64,), fill), "b": torch.zeros(0)})
    for name in ("random_states_0.pkl", "optimizer.bin"):
        torch.save({"state": {0: {"exp_avg": torch.ones(64)}}, "param_groups": []}, folder / name)
    assert seal(folder).written
    return folder


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("to", FORMATS)
def test_a_flipped_bit_of_a_sealed_model_is_not_sealed_again(sealed: Path, to: str, verified: bool) -> None:
    flip(sealed / "model_1.safetensors", -9)
    with pytest.raises(OperationError, match=r"model_1\.safetensors: 'w' has other bytes than its manifest"):
        migrate(sealed, sealed.parent / "b", to=to, keys="ddp", verify=verified)
    assert os.listdir(sealed.parent) == ["a"]


def test_a_flipped_bit_is_found_when_the_file_is_named(sealed: Path) -> None:
    flip(sealed / "model.safetensors", -9)
    with pytest.raises(OperationError, match="ckptfix verify"):
        migrate(sealed / "model.safetensors", sealed.parent / "b.bin", to="bin")


def test_a_flipped_bit_in_a_sealed_file_that_is_carried(sealed: Path) -> None:
    flip(sealed / "optimizer.bin", 900)
    with pytest.raises(OperationError, match=r"optimizer\.bin has other bytes than its manifest says"):
        migrate(sealed, sealed.parent / "b", to="bin")
    assert os.listdir(sealed.parent) == ["a"]


def test_a_sealed_model_whose_dtype_changes_is_said_not_to_be_compared(sealed: Path) -> None:
    receipt = migrate(sealed, sealed.parent / "b", to="bin", dtype="bf16")
    assert any("4 tensors whose dtype changes" in words for words in receipt.not_checked)
    assert verify(sealed.parent / "b").status == 0


def test_a_file_that_the_manifest_lists_is_gone(sealed: Path) -> None:
    os.unlink(sealed / "model_1.safetensors")
    with pytest.raises(OperationError, match=r"model_1\.safetensors is missing.*ckptfix verify"):
        migrate(sealed, sealed.parent / "b", to="bin")
    assert os.listdir(sealed.parent) == ["a"]


def test_a_file_of_the_user_that_was_sealed_may_be_gone(sealed: Path) -> None:
    (sealed / "notes.txt").write_text("mine")
    assert seal(sealed, force=True).written
    os.unlink(sealed / "notes.txt")
    receipt = migrate(sealed, sealed.parent / "b", to="bin")
    assert [one.what for one in receipt.left_out] == ["notes.txt"]
    assert verify(sealed.parent / "b").status == 0


def half_saved(folder: Path) -> None:
    create_file(folder / ".ckptfix" / "unfinished", b"[]")


def half_repaired(folder: Path) -> None:
    (folder / ".ckptfix" / "0001.pending").mkdir()


@pytest.mark.parametrize(
    ("leave", "words"),
    [(half_saved, "two saves.*ckptfix check"), (half_repaired, "transaction 1.*ckptfix undo")],
)
@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_what_was_interrupted_is_not_migrated(
    sealed: Path, leave: Callable[[Path], None], words: str, name: str
) -> None:
    leave(sealed)
    with pytest.raises(OperationError, match=words):
        migrate(sealed / name, sealed.parent / ("b.bin" if name else "b"), to="bin")
    assert os.listdir(sealed.parent) == ["a"]


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("kind", ["whole", "view", "converted"])
def test_a_record_without_its_checksum_is_found(tmp_path: Path, to: str, kind: str) -> None:
    base = torch.ones(1000)
    path = tmp_path / "a.bin"
    torch.save({"w": base[1:] if kind == "view" else base, "x": torch.zeros(3)}, path)
    at = path.read_bytes().find(b"\0\0\x80\x3f" * 20)
    migrate(path, tmp_path / "sound", to=to)
    shutil.rmtree(tmp_path / "sound")
    flip(path, at + 43)
    with pytest.raises(OperationError, match=r"has the CRC-32 [0-9a-f]{8}, [0-9a-f]{8} was written.*salvage"):
        migrate(path, tmp_path / "b", to=to, dtype="bf16" if kind == "converted" else None)
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("when", ["copied", "opened"])
def test_a_save_into_the_source_meanwhile_is_not_mixed_in(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, new = tmp_path / "a", tmp_path / "new"
    for folder, fill in ((source, 1.0), (new, 2.0)):
        write_safetensors(tmp_path / "x.safetensors", {f"l{n}": torch.full((250,), fill) for n in range(8)})
        migrate(tmp_path / "x.safetensors", folder, to="safetensors", max_shard_size=1000)
    os.unlink(tmp_path / "x.safetensors")

    def save_again(count: int = 0) -> None:
        if new.exists():
            for path in new.iterdir():
                os.replace(path, source / path.name)
            new.rmdir()

    if when == "opened":
        from ckptfix.operations.migrate import planning

        real = planning.make_plan

        def slow(*args: object) -> object:
            save_again()
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr("ckptfix.operations.migrate.make_plan", slow)
    with pytest.raises(ChangedError, match=r"a/model-.* changed while it was read.*run again"):
        migrate(source, tmp_path / "b", to="bin", progress=save_again if when == "copied" else None)
    assert os.listdir(tmp_path) == ["a"]
    migrate(source, tmp_path / "b", to="bin")
    assert digests_at(tmp_path / "b") == digests_at(source)
