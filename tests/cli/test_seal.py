"""``ckptfix seal`` and ``ckptfix verify`` from the command line: what they print, their status,
their JSON.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix.cli import run
from tests.verification.sealed import flip, place

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURES / "clean-safetensors" / "checkpoint", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["version"] == 2
    return document


def test_seal_then_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(folder)]) == 3
    out = capsys.readouterr().out
    assert f"nothing was verified: there is no manifest; next: ckptfix seal {folder}" in out
    assert "no difference found" not in out
    assert "not checked: 4 tensors: no digest was recorded" in out
    assert run(["seal", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith(f"sealed {folder}: ")
    assert "written: .ckptfix/manifest.json" in out
    assert f"next: ckptfix verify {folder}" in out
    assert run(["verify", str(folder), "--data"]) == 0
    out = capsys.readouterr().out
    assert "tensors: 4 match" in out
    assert "no difference found in what was checked" in out


def test_a_flipped_bit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["seal", str(folder), "--json"]) == 0
    document = printed(capsys)
    assert document["written"] is True
    assert document["tensors"] == 4
    piece = place(folder, "fc1.weight")
    flip(piece.path, piece.offset)
    assert run(["verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "differ model.safetensors: 'fc1.weight' changed: sha256 " in out
    assert "tensors: 3 match, 1 differ" in out
    assert "no difference" not in out
    assert run(["verify", str(folder), "--json"]) == 1
    document = printed(capsys)
    wrong = [item for item in document["items"] if item["outcome"] != "match"]
    assert [(item["kind"], item["name"], item["change"]) for item in wrong] == [
        ("file", "model.safetensors", "changed"),
        ("tensor", "fc1.weight", "changed"),
    ]
    assert run(["seal", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "differs from its manifest: nothing was written" in out
    assert f"ckptfix seal --force {folder}" in out
    assert run(["seal", str(folder), "--force"]) == 0
    assert run(["verify", str(folder)]) == 0


def test_values_are_printed_with_their_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "model.safetensors")
    assert run(["verify", str(tmp_path), "--data"]) == 1
    out = capsys.readouterr().out
    assert (
        "warning nonfinite: model.safetensors: 'w' (F32 [2]) holds 1 NaN, the first at index 1"
        in out
    )
    assert run(["verify", str(tmp_path), "--data", "--json"]) == 1
    assert printed(capsys)["values"][0]["code"] == "nonfinite"


def test_many_items_are_not_all_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(
        {f"w.{number}": torch.ones(2) for number in range(50)}, tmp_path / "model.safetensors"
    )
    assert run(["seal", str(tmp_path)]) == 0
    save_file(
        {f"w.{number}": torch.full((2,), 2.0) for number in range(50)},
        tmp_path / "model.safetensors",
    )
    capsys.readouterr()
    assert run(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 15
    assert "and 47 more tensors; --json lists all" in out


def test_names_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"\x1b[2Jw": torch.ones(2)}, tmp_path / "model.safetensors")
    assert run(["seal", str(tmp_path)]) == 0
    save_file({"\x1b[2Jw": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert run(["verify", str(tmp_path), "--data"]) == 1
    assert "\x1b[2J" not in capsys.readouterr().out


def test_what_seal_leaves_out_and_what_check_warns_of_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "gone").symlink_to("nowhere")
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert run(["seal", str(folder)]) == 1
    assert run(["seal", str(folder), "--force"]) == 0
    out = capsys.readouterr().out
    assert "  error trailing-bytes: model.safetensors" in out
    assert f"sealed {folder}: " in out
    assert "not sealed: gone: is a broken symbolic link" in out
    assert run(["verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "tensors: 4 match" in out
    assert "no difference" not in out


@pytest.mark.parametrize("arguments", [["seal"], ["seal", "/nonexistent"], ["seal", "FILE"]])
def test_wrong_usage_is_status_2(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(folder / "model.safetensors") if one == "FILE" else one for one in arguments]
    assert run([*given, "--json"]) == 2
    assert printed(capsys)["error"]


def test_a_manifest_that_cannot_be_understood_is_status_3(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / ".ckptfix").mkdir()
    (folder / ".ckptfix" / "manifest.json").write_text("{")
    assert run(["verify", str(folder), "--json"]) == 3
    assert "to continue without it: rm" in printed(capsys)["error"]


@pytest.mark.parametrize("damage", ["doubled", "cut"])
def test_a_damaged_folder_says_what_to_do(
    folder: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder / "model.safetensors"
    if damage == "doubled":
        tensors = {f"module.{name}": tensor for name, tensor in load_file(model).items()}
        save_file(tensors, folder / "model_1.safetensors", {"format": "pt"})
    else:
        os.truncate(model, model.stat().st_size - 40)
    assert run(["seal", str(folder)]) == 1
    out = capsys.readouterr().out
    mend = f"ckptfix repair {folder}, then: ckptfix seal {folder}"
    assert f"next: {mend if damage == 'doubled' else f'ckptfix salvage {folder} NEW_FOLDER'}" in out
    assert (
        "or seal it anyway, and verify will treat this as the original: ckptfix seal --force "
        f"{folder}" in out
    )
