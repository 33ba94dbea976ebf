"""What opening a checkpoint does not do: it walks no folder below, which may hold any number of
files.
"""

from pathlib import Path, PurePosixPath

import pytest
import torch
from safetensors.torch import save_file

from ckptfix.errors import UsageError
from ckptfix.tensors import opening
from ckptfix.tensors.opening import open_checkpoint, other_files


def test_only_who_asks_for_other_files_walks_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "logs" / "deep").mkdir(parents=True)
    (tmp_path / "logs" / "deep" / "log.txt").write_text("x")
    (tmp_path / ".ckptfix").mkdir()
    (tmp_path / ".ckptfix" / "manifest.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "logs")
    found = open_checkpoint(tmp_path)
    assert found.rivals == (PurePosixPath("pytorch_model.bin"),)
    assert [str(path) for path in other_files(found)] == [
        "link",
        "logs/deep/log.txt",
        "pytorch_model.bin",
    ]
    monkeypatch.setattr(opening, "listed_files", None)
    assert open_checkpoint(tmp_path) == found
    assert other_files(open_checkpoint(tmp_path / "model.safetensors")) == ()


def test_a_folder_with_a_dictionary_of_a_script_says_what_to_name(tmp_path: Path) -> None:
    """Its check is clean, so that "next: ckptfix check" led in a circle."""
    torch.save({"state_dict": {"w": torch.ones(3)}, "epoch": 3}, tmp_path / "last.ckpt")
    with pytest.raises(UsageError, match=r"next: name the file with the weights: \S*last\.ckpt$"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "last.ckpt").weights
