"""``ckptfix salvage``: exit status, what is printed, JSON."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix.cli import run


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Six layers, the last three of them cut off."""
    path = tmp_path / "m.safetensors"
    save_file({f"layers.{i}.w": torch.ones(64) for i in range(6)}, path)
    path.write_bytes(path.read_bytes()[: -2 * 256 - 100])
    return path


def test_what_is_lost_is_printed(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["salvage", str(damaged), str(damaged.parent / "new")]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "  m.safetensors: 3 tensors, 768 B, from m.safetensors" in out
    assert "lost: 3" in out
    assert any("'layers.{3...5}.w': the file ends at byte" in line for line in out)
    assert any(line.startswith("not checked: ") for line in out)
    assert run(["salvage", str(damaged.parent / "new"), str(damaged.parent / "again")]) == 0
    assert "no losses found" in capsys.readouterr().out, "safetensors has no checksums"


def test_json_at_every_status(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = str(damaged.parent / "new")
    assert run(["salvage", str(damaged), new, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["version"], document["status"]) == (2, 1)
    assert [one["have"] for one in document["lost"]] == [156, 0, 0]
    saved = json.loads(Path(new, "salvage.json").read_text())
    assert saved["version"] == 1, "the format of this file, and not that of the output"
    assert {**saved, "version": 2, "status": 1} == document
    assert run(["salvage", str(damaged), new, "--json"]) == 2
    assert "exists" in json.loads(capsys.readouterr().out)["error"]
    damaged.write_bytes(damaged.read_bytes()[:20])
    assert run(["salvage", str(damaged), str(damaged.parent / "other"), "--json"]) == 3
    assert "nothing can be salvaged" in json.loads(capsys.readouterr().out)["error"]
    assert not (damaged.parent / "other").exists()


def test_many_reasons_are_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({f"w{i}": torch.ones(64) for i in range(50)}, tmp_path / "m.safetensors")
    path = tmp_path / "m.safetensors"
    path.write_bytes(path.read_bytes()[: -40 * 256])
    assert run(["salvage", str(path), str(tmp_path / "new")]) == 1
    assert "and 20 more lines; salvage.json and --json list all" in capsys.readouterr().out


def test_what_may_never_have_been_written_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"w": torch.zeros(5000)}, tmp_path / "m.safetensors")
    assert run(["salvage", str(tmp_path / "m.safetensors"), str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert "kept, but possibly not as saved: 1" in out
    assert "m.safetensors: 'w': its last 20000 bytes are zeros" in out
    assert "no losses found" in out
    torch.save({"w": torch.zeros(5000)}, tmp_path / "m.bin")
    assert run(["salvage", str(tmp_path / "m.bin"), str(tmp_path / "other")]) == 0
    assert "everything was intact" in capsys.readouterr().out
