"""A seal on a full disk says so, and leaves nothing but what was there."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import seal
from ckptfix.cli import run
from ckptfix.storage import atomic


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_nothing_is_left_of_a_manifest_that_could_not_be_written(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    assert seal(tmp_path).written
    before = (tmp_path / ".ckptfix" / "manifest.json").read_bytes()
    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = atomic.create_file

    def create_file(path: Path, data: bytes) -> None:
        with monkeypatch.context() as patch:
            if call != "replace":
                patch.setattr(os, call, full)
            real(path, data)

    monkeypatch.setattr("ckptfix.storage.staged.create_file", create_file)
    if call == "replace":
        monkeypatch.setattr("ckptfix.verification.seal.os.replace", full)
    assert run(["seal", str(tmp_path), "--force"]) == 3
    assert "next: free up space on that disk, then run the command again" in capsys.readouterr().err
    assert os.listdir(tmp_path / ".ckptfix") == ["manifest.json"]
    assert (tmp_path / ".ckptfix" / "manifest.json").read_bytes() == before
