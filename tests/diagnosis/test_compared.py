"""Checkpoints of accelerate that lack a file which the checkpoints next to them have."""

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

from ckptfix import check, latest_checkpoint, repair, seal
from ckptfix.checkpoint.neighbours import Neighbour, Neighbours
from ckptfix.diagnosis import siblings
from tests.checkpoint.test_second_prepare import Net, adamw, step, wrap
from tests.diagnosis.builders import new_accelerator
from tests.repairs.builders import save_states

LOST = ("custom_checkpoint_0.pkl", "optimizer_1.bin", "scheduler_1.bin", "random_states_0.pkl")


class Average:
    """An average of weights that a script registers for its checkpoints."""

    def state_dict(self) -> dict[str, int]:
        """Return its state."""
        return {"decay": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Accept any state."""


def prepared(folder: Path, *, optimizers: int = 2, averages: int = 1) -> Accelerator:
    """Return the Accelerator of a script with a model per optimizer and scheduler."""
    accelerator = new_accelerator(
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    )
    for number in range(optimizers):
        model = nn.Linear(2, 2 + number)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + number)
        accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    for _ in range(averages):
        accelerator.register_for_checkpointing(Average())
    return accelerator


def saved(folder: Path, averages: Sequence[int]) -> list[Path]:
    """Return the checkpoints of a run, each of a script with so many averages."""
    for number, count in enumerate(averages):
        accelerator = prepared(folder, averages=count)
        accelerator.project_configuration.iteration = number
        accelerator.save_state()
    return [folder / "checkpoints" / f"checkpoint_{number}" for number in range(len(averages))]


def refused(folder: Path, checkpoint: Path) -> bool:
    """Return whether load_state of the script refuses a checkpoint."""
    try:
        prepared(folder).load_state(str(checkpoint))
    except (OSError, RuntimeError):
        return True
    return False


def missing(paths: Iterable[str | Path]) -> list[list[str]]:
    """Return the files that check misses in each checkpoint."""
    return [
        [name for finding in check(path).findings for name in getattr(finding, "missing", ())]
        for path in paths
    ]


@pytest.mark.parametrize(
    ("lost", "at"), [*((lost, 1) for lost in LOST), ("optimizer_1.bin", 0), ("optimizer_1.bin", 2)]
)
def test_a_checkpoint_alone_is_compared_with_those_next_to_it(
    tmp_path: Path, lost: str, at: int
) -> None:
    """load_state starts with new random states in silence, and refuses the others."""
    checkpoints = saved(tmp_path, [1, 1, 1])
    assert missing(checkpoints) == [[], [], []]
    (checkpoints[at] / lost).unlink()
    assert refused(tmp_path, checkpoints[at]) == (not lost.startswith("random_states"))
    report = check(checkpoints[at])
    (finding,) = report.findings
    assert (report.status, finding.code) == (1, "incomplete-checkpoint")
    assert str(finding) == f"{lost} is missing: 2 of 2 neighbouring checkpoints have it"
    assert [check(path).status for path in checkpoints].count(1) == 1


@pytest.mark.parametrize("lost", LOST[:2])
def test_one_checkpoint_next_to_it_is_enough(
    tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saved(tmp_path, [1, 1])
    (checkpoints[1] / lost).unlink()
    monkeypatch.chdir(checkpoints[1])
    assert missing([".", checkpoints[1], checkpoints[0]]) == [[lost], [lost], []]


@pytest.mark.parametrize(
    ("averages", "unsure"),
    [
        ([0, 0, 1, 1], []),
        ([1, 1, 0, 0], []),
        ([0, 0, 0, 1, 1, 0, 0], []),
        ([1, 1, 0, 0, 1, 1], [2, 3]),
        ([1, 0, 1, 0], [1]),
        ([1, 1, 0], [2]),
        ([0, 1, 1], [0]),
    ],
)
def test_a_script_gains_or_loses_an_object(
    tmp_path: Path, averages: list[int], unsure: list[int]
) -> None:
    """Every later checkpoint then lacks it, too. The newest and the oldest alone look as if they
    were cut.
    """
    checkpoints = saved(tmp_path, averages)
    lacking = [number for number, names in enumerate(missing(checkpoints)) if names]
    assert lacking == unsure
    for number in lacking:
        (finding,) = check(checkpoints[number]).findings
        assert "if the script has no such object, ignore this" in finding.advice
        accelerator = prepared(tmp_path, averages=averages[number])
        accelerator.load_state(str(checkpoints[number]))


def with_a_correction(folder: Path, *, has_average: bool, has_optimizers: bool) -> list[Path]:
    """Save two checkpoints of a script that prepares its model twice, with its optimizer or not,
    and one of the corrected script.
    """
    net, average = Net(), Net(7)
    optimizer = adamw(net)
    checkpoints = []
    for number in range(3):
        step(optimizer)
        for old, new in zip(average.parameters(), net.parameters(), strict=True):
            old.data.lerp_(new.data, 0.5)
        again = 2 if number < 2 else 1
        checkpoints.append(
            save_states(
                folder / f"epoch_{number}",
                [net, wrap(net)][:again] + [wrap(average)] * has_average,
                [optimizer] * (again if has_optimizers else 1),
                [torch.optim.lr_scheduler.ConstantLR(optimizer)] * (again if has_optimizers else 1),
            )
        )
    return checkpoints


@pytest.mark.parametrize(
    ("has_average", "has_optimizers"), [(False, False), (False, True), (True, False)]
)
def test_a_corrected_script_saves_no_duplicates(
    tmp_path: Path, has_average: bool, has_optimizers: bool
) -> None:
    """The duplicates of the checkpoints before it counted as missing, though none of them needs a
    repair. A later entry has another number than in those.
    """
    *doubled, last = with_a_correction(
        tmp_path, has_average=has_average, has_optimizers=has_optimizers
    )
    codes = {one.code for path in doubled for one in check(path).findings}
    assert {"doubled-model", "doubled-states"} - codes == (
        set() if has_optimizers else {"doubled-states"}
    )
    assert missing([last]) == [[]]
    assert check(last).status == 0
    assert latest_checkpoint(tmp_path) == last
    assert seal(last).status == 0
    lost = last / ("pytorch_model_1.bin" if has_average else "optimizer.bin")
    lost.unlink()
    assert missing([last]) == [[lost.name]]


def test_a_lost_duplicate_between_two_others_is_missing(tmp_path: Path) -> None:
    """The script prepared its model twice after this save, too, and needs the file."""
    net = Net()
    optimizer = adamw(net)
    folders = []
    for number in range(3):
        step(optimizer)
        folders.append(save_states(tmp_path / f"epoch_{number}", [net, wrap(net)], [optimizer]))
    (folders[1] / "pytorch_model_1.bin").unlink()
    assert missing([folders[1]]) == [["pytorch_model_1.bin"]]


def test_an_average_that_a_script_with_duplicates_lost_is_missing(tmp_path: Path) -> None:
    first, second, _ = with_a_correction(tmp_path, has_average=True, has_optimizers=False)
    (second / "pytorch_model_2.bin").unlink()
    shutil.rmtree(tmp_path / "epoch_2")
    assert missing([second]) == [["pytorch_model_2.bin"]]
    # Nothing shows whether a damaged model is a duplicate.
    os.truncate(second / "pytorch_model_1.bin", 100)
    assert missing([second]) == [["pytorch_model_2.bin"]]
    assert missing([first]) == [[]]


def test_a_model_that_no_other_one_equals_is_missing(tmp_path: Path) -> None:
    """A second model is none that was prepared twice, though its script has the same classes."""
    nets = [Net(), Net(7)]
    optimizers = [adamw(net) for net in nets]
    for number in range(3):
        for optimizer in optimizers:
            step(optimizer)
        save_states(tmp_path / f"epoch_{number}", [nets[0], wrap(nets[1])], optimizers)
    last = tmp_path / "epoch_2"
    (last / "pytorch_model_1.bin").unlink()
    assert missing([last]) == [["pytorch_model_1.bin"]]


def test_neighbours_are_read_for_duplicates_only_where_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of a whole run would read each checkpoint once for each one next to it."""
    checkpoints = saved(tmp_path, [1, 1, 1])
    read: list[str] = []
    real = siblings.without_duplicates

    def recorded(save: Neighbour, neighbours: Neighbours) -> Any:
        read.append(save.name)
        return real(save, neighbours)

    monkeypatch.setattr(siblings, "without_duplicates", recorded)
    (checkpoints[1] / "custom_checkpoint_0.pkl").unlink()
    assert missing(checkpoints) == [[], ["custom_checkpoint_0.pkl"], []]
    assert read == []
    (checkpoints[1] / "optimizer_1.bin").unlink()
    assert missing(checkpoints[1:2]) == [["optimizer_1.bin", "custom_checkpoint_0.pkl"]]
    assert read == []
    (checkpoints[2] / "optimizer_2.bin").unlink(missing_ok=True)
    (checkpoints[2] / "optimizer_1.bin").unlink()
    (checkpoints[1] / "optimizer_1.bin").write_bytes(
        (checkpoints[0] / "optimizer_1.bin").read_bytes()
    )
    assert missing(checkpoints[2:]) == [["optimizer_1.bin"]]
    assert sorted(read) == ["checkpoint_0", "checkpoint_1"]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_custom_object_that_no_checkpoint_next_to_it_has_is_told(tmp_path: Path, at: int) -> None:
    checkpoints = saved(tmp_path, [1, 1, 1])
    assert [check(path).findings for path in checkpoints] == [(), (), ()]
    state = {"decay": 2}
    torch.save(state, checkpoints[at] / "custom_checkpoint_1.pkl")
    assert refused(tmp_path, checkpoints[at])
    (finding,) = check(checkpoints[at]).findings
    assert finding.severity.value == ("warning" if at == 1 else "note")
    assert (
        str(finding)
        == "custom_checkpoint_1.pkl: it holds one of 2 custom objects (expected 1, as in 2 "
        "neighbouring checkpoints)"
    )
    assert "move the file out of the folder" in finding.advice
    assert [check(path).status for path in checkpoints].count(1) == (at == 1)


def test_exchanged_custom_objects_are_told_once(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, [2] * 3)
    for path in checkpoints:
        torch.save({"best_loss": 1.0}, path / "custom_checkpoint_1.pkl")
    first, second = (checkpoints[1] / f"custom_checkpoint_{number}.pkl" for number in range(2))
    first.rename(tmp_path / "first")
    second.rename(first)
    (tmp_path / "first").rename(second)
    (finding,) = check(checkpoints[1]).findings
    assert "swapped with custom_checkpoint_1.pkl" in str(finding)


def test_a_first_custom_object_between_checkpoints_without_any_is_a_note(tmp_path: Path) -> None:
    """The script may have registered it in this save alone: a good checkpoint had a warning."""
    for number in (1, 2, 3):
        root = tmp_path / f"checkpoint_{number}"
        shutil.copytree("fixtures/accelerate-1.15.0/clean-safetensors/checkpoint", root)
    torch.save({"decay": 2}, tmp_path / "checkpoint_2/custom_checkpoint_0.pkl")
    report = check(tmp_path / "checkpoint_2")
    assert "contents of custom objects; only the script can read them" in report.not_checked
    (note,) = report.findings
    assert note.severity.value == "note"
    assert (
        str(note)
        == "custom_checkpoint_0.pkl: it holds a custom object (expected none, as in 2 neighbouring "
        "checkpoints)"
    )


def test_a_repaired_copy_keeps_the_findings_of_its_neighbours(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        root = tmp_path / f"run/checkpoint_{number}"
        shutil.copytree("fixtures/accelerate-1.15.0/wrapper-safetensors/checkpoint", root)
        torch.save({"decay": 2}, root / "custom_checkpoint_0.pkl")
    root = tmp_path / "run/checkpoint_2"
    shutil.copy(root / "custom_checkpoint_0.pkl", root / "custom_checkpoint_1.pkl")
    assert "wrong-state" in {finding.code for finding in check(root).findings}
    receipt = repair(root, output=tmp_path / "copy")
    assert receipt.steps
    assert "wrong-state" in {finding.code for finding in receipt.left}


def test_other_folders_are_no_neighbours(tmp_path: Path) -> None:
    first, second = saved(tmp_path, [1, 0])
    for name in ("checkpoint_best", "last", "run-2"):
        shutil.copytree(second, first.parent / name)
        assert missing([first.parent / name]) == [[]]


def test_a_run_that_changed_to_deepspeed_lacks_nothing(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, [0, 0])
    shutil.rmtree(checkpoints[1])
    source = Path("fixtures/deepspeed-0.18.2/accelerate-zero2/checkpoint")
    shutil.copytree(source, checkpoints[1])
    assert not {"model.safetensors", "optimizer.bin"} & set(missing([checkpoints[1]])[0])


def test_a_folder_above_that_may_not_be_listed_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saved(tmp_path, [1, 1])
    (checkpoints[1] / "optimizer_1.bin").unlink()

    def refuse(folder: Path) -> list[str]:
        raise PermissionError(folder)

    monkeypatch.setattr("ckptfix.checkpoint.neighbours.folders_next_to", refuse)
    assert missing(checkpoints) == [[], []]
