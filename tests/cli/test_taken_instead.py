"""Entries in accelerate's own folder of checkpoints that stock ``load_state()`` takes for the
newest one.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration

import ckptfix
from ckptfix.cli import run

Change = Callable[[Path], object]
WITHOUT = "load_state() without a folder"


class Run:
    """Three checkpoints with automatic naming; the weight is the number of the checkpoint."""

    def __init__(self, root: Path) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        assert PartialState._shared_state == {}
        project = ProjectConfiguration(project_dir=str(root), automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(cpu=True, project_config=project)
        self.model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.accelerator.prepare(self.model, optimizer)
        for number in range(3):
            with torch.no_grad():
                self.model.weight.fill_(float(number))
            self.accelerator.save_state()

    def loaded(self) -> float | None:
        """Return the number of the checkpoint that ``load_state()`` loads, None where it fails."""
        with torch.no_grad():
            self.model.weight.fill_(-1.0)
        try:
            self.accelerator.load_state()
        except (IndexError, OSError, ValueError):
            return None
        number: float = self.model.weight[0, 0].item()
        return number


def copied(name: str) -> Change:
    return lambda folder: shutil.copytree(folder / "checkpoint_0", folder / name)


TAKEN: dict[str, tuple[Change, float | None, str]] = {
    "checkpoint_99.bak": (copied("checkpoint_99.bak"), 0.0, "picks it instead of checkpoint_2"),
    "old_9": (copied("old_9"), 0.0, "picks it instead of checkpoint_2"),
    "best": (
        lambda folder: (folder / "best").mkdir(),
        None,
        "fails with an IndexError, because this name has no number",
    ),
    "notes.txt": (
        lambda folder: (folder / "notes.txt").write_text("x"),
        None,
        "fails with an IndexError, because this name has no number",
    ),
    "log_77.txt": (
        lambda folder: (folder / "log_77.txt").write_text("x"),
        None,
        "picks it instead of checkpoint_2 and fails, because it is not a folder",
    ),
    "checkpoint_3": (
        lambda folder: (folder / "checkpoint_3").symlink_to("none"),
        None,
        "picks it instead of checkpoint_2 and fails, because it is not a folder",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_an_entry_that_load_state_takes_is_reported(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, loaded, words = TAKEN[name]
    saved = Run(tmp_path)
    folder = tmp_path / "checkpoints"
    assert saved.loaded() == 2.0
    assert run(["check", "-r", str(tmp_path)]) == 0
    assert WITHOUT not in capsys.readouterr().out
    edit(folder)
    assert saved.loaded() == loaded
    assert run(["check", "-r", str(tmp_path)]) == 1
    sentence = f"{folder / name}: {WITHOUT} {words}"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        f"{sentence}; next: move it out of the folder",
        f"resume from {folder / 'checkpoint_2'}, the newest complete one",
    ]
    assert ckptfix.latest_checkpoint(folder) == folder / "checkpoint_2"
    assert run(["check", "-r", str(tmp_path), "--json"]) == 1
    (answer,) = json.loads(capsys.readouterr().out)["resume"]
    assert answer["taken_instead"] == sentence


def _as_a_script_numbers(folder: Path) -> None:
    (folder / "checkpoint_1").rename(folder / "checkpoint_7")
    (folder / "best").mkdir()


def _under_another_name(folder: Path) -> None:
    (folder / "best").mkdir()
    folder.rename(folder.parent / "saves")


HARMLESS: dict[str, Change] = {
    "a lower number": lambda folder: (folder / "log_1.txt").write_text("x"),
    "numbers of a script": _as_a_script_numbers,
    "another name of the folder": _under_another_name,
}


@pytest.mark.parametrize("case", HARMLESS)
def test_entries_that_load_state_does_not_take_are_passed(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = Run(tmp_path)
    HARMLESS[case](tmp_path / "checkpoints")
    if case == "a lower number":
        assert saved.loaded() == 2.0
    assert run(["check", "-r", str(tmp_path)]) == 0
    assert WITHOUT not in capsys.readouterr().out
