"""Manifests in the folders around and below, and those that would be too long."""

import os
from pathlib import Path

import pytest
import torch

from ckptfix import migrate, repair, seal, undo
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.conversion import producing
from ckptfix.verification.verify import verify
from tests.conversion.making import names_below, write_safetensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A sealed checkpoint with another one below that was sealed, and repaired."""
    folder = tmp_path / "a"
    (folder / "epoch_1").mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", {"w": torch.ones(3)})
    write_safetensors(folder / "epoch_1" / "model.safetensors", {"module.module.w": torch.ones(3)})
    assert seal(folder / "epoch_1", force=True).written
    assert repair(folder / "epoch_1").transaction
    os.chmod(folder / "epoch_1" / ".ckptfix", 0o700)
    assert seal(folder).written
    return folder


def test_what_is_known_of_a_checkpoint_below_goes_with_it(source: Path) -> None:
    new = source.parent / "b"
    receipt = migrate(source, new, to="bin")
    assert "epoch_1/.ckptfix/manifest.json" in receipt.carried
    assert not receipt.left_out
    assert names_below(new / "epoch_1") == names_below(source / "epoch_1")
    assert (new / "epoch_1" / ".ckptfix").stat().st_mode & 0o777 == 0o700
    assert verify(new).status == verify(new / "epoch_1").status == 0
    undo(new / "epoch_1")
    undo(source / "epoch_1")
    name = "epoch_1/model.safetensors"
    assert (new / name).read_bytes() == (source / name).read_bytes()


def test_a_lock_is_not_carried(source: Path) -> None:
    (source / "epoch_1" / ".ckptfix" / "lock").write_text("1")
    migrate(source, source.parent / "b", to="bin")
    assert not (source.parent / "b" / "epoch_1" / ".ckptfix" / "lock").exists()


def test_what_is_known_of_a_folder_that_is_not_carried_whole_is_named(source: Path) -> None:
    (source / "epoch_1" / "away").symlink_to("nowhere")
    receipt = migrate(source, source.parent / "b", to="bin")
    assert [one.what for one in receipt.left_out] == ["epoch_1/away", "epoch_1/.ckptfix"]
    assert "describes the old files of its folder" in receipt.left_out[1].reason
    assert names_below(source.parent / "b" / "epoch_1") == {"model.safetensors"}


def test_what_is_known_of_a_folder_that_is_converted_is_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"w": torch.ones(3)})
    (tmp_path / "a").mkdir()
    migrate(tmp_path / "m.safetensors", tmp_path / "a" / "pytorch_model_fsdp_0", to="dcp")
    assert seal(tmp_path / "a" / "pytorch_model_fsdp_0").written
    receipt = migrate(tmp_path / "a", tmp_path / "b", to="bin")
    assert [one.what for one in receipt.left_out] == ["pytorch_model_fsdp_0/.ckptfix"]
    assert names_below(tmp_path / "b") == {"pytorch_model.bin"}


def test_a_link_in_what_is_known_is_not_followed(source: Path) -> None:
    (source / "epoch_1" / ".ckptfix" / "0001.done" / "secret").symlink_to("/etc/hostname")
    receipt = migrate(source, source.parent / "b", to="bin")
    assert [(one.what, one.reason) for one in receipt.left_out] == [
        (
            "epoch_1/.ckptfix",
            "it contains files that ckptfix did not write, or that are not regular files",
        )
    ]


def test_a_manifest_that_becomes_false_is_named_with_what_makes_it_true(source: Path) -> None:
    (planned,) = migrate(
        source / "model.safetensors", source / "x.bin", to="bin", dry_run=True
    ).warnings
    receipt = migrate(source / "model.safetensors", source / "x.bin", to="bin")
    assert receipt.warnings == (planned,)
    assert (
        f"does not list the files in x.bin; next, to update the manifest: ckptfix seal {source}"
        in planned
    )
    assert verify(source).status == 1
    assert seal(source).written
    assert verify(source).status == 0
    os.unlink(source / "x.bin")
    (words,) = migrate(
        source / "epoch_1" / "model.safetensors", source / "x.bin", to="bin"
    ).warnings
    assert (
        "describes the previous files in x.bin; next, to update the manifest: ckptfix seal "
        f"--force {source}" in words
    )
    assert seal(source, force=True).written
    assert verify(source).status == 0
    (words,) = migrate(source / "model.safetensors", source / "new", to="bin").warnings
    assert "does not list the files in new;" in words


def test_no_word_of_a_manifest_that_speaks_of_no_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(3)})
    assert migrate(tmp_path / "model.safetensors", tmp_path / "x.bin", to="bin").warnings == ()
    assert migrate(tmp_path / "x.bin", tmp_path / "b", to="safetensors").warnings == ()


def test_a_manifest_that_would_be_too_long_has_no_digests_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a"
    source.mkdir()
    write_safetensors(source / "model.safetensors", {f"w{n}": torch.ones(3) for n in range(40)})
    assert seal(source).written
    monkeypatch.setattr(producing, "MAX_MANIFEST", 2000)
    receipt = migrate(source, tmp_path / "b", to="bin")
    (words,) = receipt.warnings
    assert "has no digests of tensors: with them it would have" in words
    assert "(limit: 2000)" in words
    manifest = read_manifest(tmp_path / "b")
    assert manifest is not None
    assert not manifest.models[0].digests
    assert set(manifest.sha256) == {"pytorch_model.bin"}
    assert verify(tmp_path / "b").status == 0
    monkeypatch.setattr(producing, "MAX_MANIFEST", 200)
    with pytest.raises(
        Exception,
        match=r"without the digests of tensors; nothing was written; next, .*: mv .* ELSE",
    ):
        migrate(source, tmp_path / "c", to="bin")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
