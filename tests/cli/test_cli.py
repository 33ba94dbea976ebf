"""Exit statuses, JSON, and what is printed of names that nobody should trust."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptfix.cli import run
from ckptfix.cli.report import collapse_layers, escape, human_size
from ckptfix.storage.lock import folder_lock
from tests.operations.builders import write_safetensors

FIXTURE = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0" / "wrapper-safetensors" / "checkpoint"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURE, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The one JSON object on stdout."""
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["version"] == 1
    return document


def test_status_0_1_2_3_with_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(folder), "--json"]) == 1
    document = printed(capsys)
    assert [finding["code"] for finding in document["checkpoints"][0]["findings"]] == ["doubled-model"]
    with folder_lock(folder):
        assert run(["repair", str(folder), "--json"]) == 3
    assert str(folder) in printed(capsys)["error"]
    assert run(["repair", str(folder), "--json"]) == 0
    assert printed(capsys)["transaction"] == 1
    assert run(["check", str(folder), "--json"]) == 0
    assert printed(capsys)["status"] == 0
    assert run(["undo", str(folder), "--json"]) == 0
    assert printed(capsys)["steps"]
    assert run(["undo", str(folder), "--json"]) == 2
    assert "no repair to undo" in printed(capsys)["error"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "/nonexistent", "--json"],
        ["repair", "--json"],
        ["repair", ".", "--allow", "no-such-code", "--json"],
        ["repair", ".", "--allow", "truncated-file", "--json"],
        ["repair", ".", "--keep", "models", "--json"],
        ["repair", ".", "--models", "1", "--keep", "models=2", "--json"],
        ["repair", ".", "--models", "0", "--json"],
        ["nonsense", "--json"],
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert printed(capsys)["error"]


def test_many_paths_and_recursive(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder, folder.parent / "deep" / "er" / "second")
    assert run(["check", str(folder), str(folder), "--json"]) == 1
    assert len(printed(capsys)["checkpoints"]) == 2
    assert run(["check", "--recursive", str(folder.parent), "--json"]) == 1
    assert len(printed(capsys)["checkpoints"]) == 2


def test_output_refuses_what_stands_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["repair", str(folder), "--output", str(folder.parent)]) == 2
    assert "exists" in capsys.readouterr().err


def test_names_from_files_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"module.module.\x1b[2J\u202eevil\n": b"1"})
    assert run(["repair", str(tmp_path), "--dry-run"]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "evil" in out


def test_a_dry_run_changes_nothing_and_shows_the_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert run(["repair", str(folder), "--dry-run"]) == 1
    assert "drop model_1.safetensors" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == names


def test_escape_leaves_plain_text_alone() -> None:
    assert escape("layers.0.größe.重み") == "layers.0.größe.重み"
    assert escape("a\ud800b\x00") == "a\\ud800b\\x00"


def test_collapse_layers() -> None:
    names = [f"layers.{index}.w" for index in range(32)] + ["head", "layers.40.w"]
    assert collapse_layers(names) == ["layers.{0...31,40}.w", "head"]


def test_human_size() -> None:
    assert [human_size(size) for size in (0, 1023, 1536, 10 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "10.0 TiB",
    ]
