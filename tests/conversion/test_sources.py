"""A source that is damaged, half written, or written to meanwhile never becomes a checkpoint that
looks sound.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptfix import ChangedError, OperationError, migrate, seal
from ckptfix.storage.atomic import create_file
from ckptfix.verification.verify import verify
from tests.conversion.making import FORMATS, digests_at, names_below, write_safetensors
from tests.repairs.builders import RANDOM_STATES


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "a"
    folder.mkdir()
    for name, fill in (("model.safetensors", 1.0), ("model_1.safetensors", 2.0)):
        write_safetensors(folder / name, {"w": torch.full((64,), fill), "b": torch.zeros(0)})
    (folder / "random_states_0.pkl").write_bytes(RANDOM_STATES)
    torch.save(
        {"state": {0: {"exp_avg": torch.ones(64)}}, "param_groups": [{"params": [0]}]},
        folder / "optimizer.bin",
    )
    assert seal(folder).written
    return folder


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("to", FORMATS)
def test_a_flipped_bit_of_a_sealed_model_is_not_sealed_again(
    sealed: Path, to: str, verified: bool
) -> None:
    flip(sealed / "model_1.safetensors", -9)
    with pytest.raises(
        OperationError, match=r"model_1\.safetensors: 'w' does not match its digest in the manifest"
    ):
        migrate(sealed, sealed.parent / "b", to=to, keys="ddp", verify=verified)
    assert os.listdir(sealed.parent) == ["a"]


def test_a_flipped_bit_is_found_when_the_file_is_named(sealed: Path) -> None:
    flip(sealed / "model.safetensors", -9)
    with pytest.raises(OperationError, match="ckptfix verify"):
        migrate(sealed / "model.safetensors", sealed.parent / "b.bin", to="bin")


def test_a_flipped_bit_in_a_sealed_file_that_is_carried(sealed: Path) -> None:
    flip(sealed / "optimizer.bin", 900)
    with pytest.raises(
        OperationError, match=r"optimizer\.bin does not match its digest in the manifest"
    ):
        migrate(sealed, sealed.parent / "b", to="bin")
    assert os.listdir(sealed.parent) == ["a"]


def test_a_sealed_model_whose_dtype_changes_is_said_not_to_be_compared(sealed: Path) -> None:
    receipt = migrate(sealed, sealed.parent / "b", to="bin", dtype="bf16")
    assert any("4 tensors with a new dtype" in words for words in receipt.not_checked)
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
    with pytest.raises(
        OperationError,
        match=r"CRC-32 mismatch .*\(expected [0-9a-f]{8}, found [0-9a-f]{8}\).*salvage",
    ):
        migrate(path, tmp_path / "b", to=to, dtype="bf16" if kind == "converted" else None)
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize(
    "name", ["model_2.safetensors", "custom_checkpoint_0.pkl", "config.json", "pytorch_model_fsdp_1/.metadata",
             "sub/optimizer.bin"]
)  # fmt: skip
def test_a_file_of_the_checkpoint_that_comes_meanwhile_is_not_missing(
    sealed: Path, name: str
) -> None:
    (sealed / "sub").mkdir()
    (sealed / "sub" / "model.safetensors").write_bytes((sealed / "model.safetensors").read_bytes())
    assert seal(sealed, force=True).written

    def save(count: int) -> None:
        (sealed / name).parent.mkdir(exist_ok=True)
        (sealed / name).write_bytes((sealed / "model.safetensors").read_bytes())

    with pytest.raises(
        ChangedError, match=rf"a/{name} was added while .*nothing was written; run again"
    ):
        migrate(sealed, sealed.parent / "b", to="bin", progress=save)
    assert os.listdir(sealed.parent) == ["a"]


def test_what_comes_meanwhile_and_is_none_of_the_checkpoint_does_not_matter(sealed: Path) -> None:
    def write(count: int) -> None:
        (sealed / "train.log").write_text("step 3")
        (sealed / "next").mkdir(exist_ok=True)
        (sealed / "next" / "model.safetensors").write_text("another one")
        (sealed.parent / "model_2.safetensors").write_text("next to a lone file")

    migrate(sealed, sealed.parent / "b", to="bin", progress=write)
    (sealed / "next" / "model.safetensors").unlink()
    migrate(sealed / "model.safetensors", sealed.parent / "b.bin", to="bin", progress=write)


def test_a_manifest_that_cannot_be_understood_is_not_passed_over(sealed: Path) -> None:
    for text in ("{bad", '{"version": 2}'):
        (sealed / ".ckptfix" / "manifest.json").write_text(text)
        for given, place in ((sealed, "b"), (sealed / "model.safetensors", "b.bin")):
            with pytest.raises(
                OperationError,
                match=r"manifest\.json .*to continue without it: rm .*manifest\.json",
            ):
                migrate(given, sealed.parent / place, to="bin")
    assert os.listdir(sealed.parent) == ["a"]


def test_a_manifest_that_may_not_be_read_is_not_passed_over(
    sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(root: Path) -> None:
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.setattr("ckptfix.conversion.producing.readable_manifest", refuse)
    with pytest.raises(
        OperationError,
        match=r"cannot be read: Permission denied; next.*chmod u\+rX .*manifest\.json",
    ):
        migrate(sealed, sealed.parent / "b", to="bin")


@pytest.mark.parametrize("when", ["copied", "opened"])
def test_a_save_into_the_source_meanwhile_is_not_mixed_in(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, new = tmp_path / "a", tmp_path / "new"
    for folder, fill in ((source, 1.0), (new, 2.0)):
        write_safetensors(
            tmp_path / "x.safetensors", {f"l{n}": torch.full((250,), fill) for n in range(8)}
        )
        migrate(tmp_path / "x.safetensors", folder, to="safetensors", max_shard_size=1000)
    os.unlink(tmp_path / "x.safetensors")

    def save_again(count: int = 0) -> None:
        if new.exists():
            for name in names_below(new):
                os.replace(new / name, source / name)
            shutil.rmtree(new)

    if when == "opened":
        from ckptfix.conversion import migration_plan

        real = migration_plan.make_plan

        def slow(*args: object) -> object:
            save_again()
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr("ckptfix.conversion.migrate.make_plan", slow)
    with pytest.raises(ChangedError, match=r"a/model-.* changed while it was read.*run again"):
        migrate(source, tmp_path / "b", to="bin", progress=save_again if when == "copied" else None)
    assert os.listdir(tmp_path) == ["a"]
    migrate(source, tmp_path / "b", to="bin")
    assert digests_at(tmp_path / "b") == digests_at(source)
