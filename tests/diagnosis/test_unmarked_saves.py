"""Marks that other libraries write last: a checkpoint without one was interrupted, where others of
its run have it.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import check, latest_checkpoint
from ckptfix.cli import run
from tests.commanding import Said, said
from tests.stores.servers import upload_folder
from tests.test_golden import FIXTURES

__all__ = ["said"]


def of_torch_checkpointing(root: Path, value: int) -> None:
    """A step of torchtitan: files of the ranks, then ``metadata.pkl``."""
    root.mkdir(parents=True)
    for rank in range(2):
        save_file({"w": torch.full((3,), float(value + rank))}, root / f"model_{rank}.safetensors")
    (root / "metadata.pkl").write_bytes(b"\x80\x04N.")


def of_speculators(root: Path, value: int) -> None:
    root.mkdir(parents=True)
    save_file({"w": torch.full((3,), float(value))}, root / "model.safetensors")
    (root / ".complete").touch()


def of_cosmos(root: Path, value: int) -> None:
    policy = root / "policy"
    policy.mkdir(parents=True)
    for rank in range(2):
        torch.save({"w": torch.full((3,), float(value + rank))}, policy / f"model_rank_{rank}.pth")
        (policy / f".rank_{rank}_complete").touch()


LIBRARIES: dict[str, tuple[Callable[[Path, int], None], str, str, tuple[str, ...]]] = {
    "torch_checkpointing": (of_torch_checkpointing, "step-{}", "", ("metadata.pkl",)),
    "speculators": (of_speculators, "{}", "", (".complete",)),
    "cosmos-rl": (of_cosmos, "step_{}", "policy", (".rank_0_complete", ".rank_1_complete")),
}


def saves(run_folder: Path, library: str, count: int = 4) -> list[Path]:
    make, name, below, _ = LIBRARIES[library]
    folders = []
    for number in range(1, count + 1):
        make(run_folder / name.format(number), number)
        folders.append(run_folder / name.format(number) / below)
    return folders


def told(folder: Path | str) -> list[tuple[str, str, str]]:
    return [
        (one.severity.value, one.code, str(one.path))
        for one in check(folder).findings
        if one.code == "interrupted-save"
    ]


@pytest.mark.parametrize(
    ("library", "place"),
    [*(("cosmos-rl", place) for place in range(4)), ("torch_checkpointing", 3), ("speculators", 3)],
)
def test_a_save_without_its_mark_was_interrupted(library: str, place: int, tmp_path: Path) -> None:
    folders = saves(tmp_path, library)
    assert [told(folder) for folder in folders] == [[], [], [], []]
    assert run(["check", "-r", str(tmp_path)]) == 0
    for mark in LIBRARIES[library][3][::-1]:
        (folders[place] / mark).unlink()
        found = [told(folder) for folder in folders]
        assert found.pop(place) == [("warning", "interrupted-save", mark)]
        assert found == [[], [], []]
        assert run(["check", "-r", str(tmp_path)]) == 1


@pytest.mark.parametrize("library", LIBRARIES)
def test_marks_that_a_later_version_writes_are_a_note(library: str, tmp_path: Path) -> None:
    folders = saves(tmp_path, library)
    for folder in folders[:2]:
        for mark in LIBRARIES[library][3]:
            (folder / mark).unlink()
    assert [[severity for severity, _, _ in told(folder)] for folder in folders] == [
        ["warning"],
        ["note"],
        [],
        [],
    ]


def test_a_run_that_goes_on_with_fewer_ranks_is_a_note(tmp_path: Path) -> None:
    folders = saves(tmp_path, "cosmos-rl")
    for folder in folders[2:]:
        (folder / ".rank_1_complete").unlink()
        (folder / "model_rank_1.pth").unlink()
    assert [[severity for severity, _, _ in told(folder)] for folder in folders] == [
        [],
        [],
        ["note"],
        ["note"],
    ]


@pytest.mark.parametrize("files", [(), ("notes.txt",), ("rank_0.data",)])
def test_a_folder_without_files_that_are_known_is_listed(
    files: tuple[str, ...], tmp_path: Path, said: Said
) -> None:
    saves(tmp_path, "torch_checkpointing")
    newest = tmp_path / "step-5"
    newest.mkdir()
    for name in files:
        (newest / name).write_bytes(b"x")
    status, out, _ = said("check", newest)
    assert status == 1
    assert "metadata.pkl is missing (found in step-4)" in out
    assert said("check", "-r", tmp_path)[0] == 1
    shutil.rmtree(newest)
    assert said("check", "-r", tmp_path)[0] == 0


def test_folders_that_are_numbered_otherwise_are_not_compared(tmp_path: Path) -> None:
    for name in ("fold_1", "fold_2", "run_1"):
        of_speculators(tmp_path / name, 1)
    (tmp_path / "fold_2/.complete").unlink()
    assert run(["check", "-r", str(tmp_path)]) == 0


def accelerated(root: Path) -> None:
    shutil.copytree(FIXTURES / "accelerate-1.15.0/clean-single-process/checkpoint", root)


def weights_alone(root: Path) -> None:
    of_speculators(root, 1)
    (root / ".complete").unlink()


def trained(root: Path) -> None:
    weights_alone(root)
    (root / "trainer_state.json").write_text("{}")


@pytest.mark.parametrize(
    ("make", "mark"),
    [
        (accelerated, "metadata.pkl"),
        (accelerated, ".complete"),
        (trained, ".complete"),
        (weights_alone, "metadata.pkl"),
    ],
)
def test_files_that_a_script_writes_to_some_checkpoints_are_no_marks(
    make: Callable[[Path], None], mark: str, tmp_path: Path
) -> None:
    folders = [tmp_path / f"checkpoint-{number}" for number in (20, 40, 60)]
    for folder in folders:
        make(folder)
    (folders[0] / mark).write_bytes(b"\x80\x04N.")
    assert [told(folder) for folder in folders] == [[], [], []]
    if make is accelerated:
        assert latest_checkpoint(tmp_path) == folders[2]
        assert run(["check", "-r", str(tmp_path)]) == 0


def test_numbered_folders_of_data_are_no_checkpoints(tmp_path: Path, said: Said) -> None:
    accelerated(tmp_path / "checkpoint-20")
    for number in range(3):
        folder = tmp_path / f"data/{number}"
        folder.mkdir(parents=True)
        (folder / "img_0.png").write_bytes(b"x")
    of_torch_checkpointing(tmp_path / "data/3", 1)
    for mark in ("metadata.pkl", ".complete"):
        (tmp_path / "data/0" / mark).write_bytes(b"x")
    status, out, _ = said("check", "-r", tmp_path)
    assert status == 0
    assert "data/1" not in out


TRACKER = "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("3", ""),
        ("1\n", ""),
        ("0000003", ""),
        ("4", "names 4 (expected the number of an existing checkpoint, such as global_step_3)"),
        ("release", "names release, which does not exist"),
        ("", "is empty"),
        ("three", ""),
        ("²", ""),
        (None, ""),
    ],
)
@pytest.mark.parametrize("below", ["", "actor"])
def test_a_tracker_names_a_checkpoint_that_exists(
    text: str | None, problem: str, below: str, tmp_path: Path, said: Said
) -> None:
    for number in (1, 2, 3):
        of_speculators(tmp_path / f"global_step_{number}" / below, number)
    if text is not None:
        (tmp_path / TRACKER).write_text(text)
    status, out, _ = said("check", "-r", tmp_path)
    assert status == bool(problem)
    assert (f"{tmp_path}: {TRACKER} {problem}" in out) == bool(problem)
    document = json.loads(said("check", "-r", tmp_path, "--json")[1])
    assert len(document.get("trackers", [])) == bool(problem)
    (tmp_path / "release").mkdir()
    assert text != "release" or said("check", "-r", tmp_path)[0] == 0


@pytest.fixture
def bucket() -> str:
    return f"memory://{os.urandom(6).hex()}"


def test_a_store_is_looked_at_as_a_folder(tmp_path: Path, bucket: str, said: Said) -> None:
    folders = saves(tmp_path / "run", "torch_checkpointing")
    (folders[3] / "metadata.pkl").unlink()
    (tmp_path / "run" / TRACKER).write_text("7")
    upload_folder(tmp_path / "run", f"{bucket}/run")
    status, out, _ = said("check", "-r", f"{bucket}/run")
    assert status == 1
    assert "metadata.pkl is missing (found in step-3)" in out
    assert (
        f"{TRACKER} names 7 (expected the number of an existing checkpoint, such as step-4)" in out
    )
    assert told(f"{bucket}/run/step-4") == [("warning", "interrupted-save", "metadata.pkl")]
    assert told(f"{bucket}/run/step-3") == []
