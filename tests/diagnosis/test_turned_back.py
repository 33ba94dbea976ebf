"""A checkpoint with a higher number than others and fewer steps: an old backup under a new name, or
two exchanged folders. A run may go back itself, and then nothing is told.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptfix import latest_checkpoint
from ckptfix.errors import UsageError
from ckptfix.storage import store_files, stores
from tests.commanding import Said, said
from tests.diagnosis.test_lacking_states import run
from tests.diagnosis.test_optimizer_states import save
from tests.diagnosis.test_wrong_states import exchanged
from tests.stores.simulated_s3 import Cloud, cloud, open_simulated

__all__ = ["cloud", "said"]


def saved(folder: Path, *, steps: tuple[int, ...] = (3, 3, 3, 3, 3)) -> Path:
    """Train, and save in stock folders with their numbers; one is an hour older than the next."""
    model = nn.Linear(6, 6)
    optimizer = torch.optim.AdamW(model.parameters())
    for number, count in enumerate(steps):
        if count < 0:
            optimizer = torch.optim.AdamW(model.parameters())
        run(model, optimizer, abs(count))
        save(folder / f"checkpoint_{number}", [model], [optimizer])
        dated(folder / f"checkpoint_{number}", number)
    return folder


def dated(checkpoint: Path, hour: int) -> None:
    for path in checkpoint.iterdir():
        os.utime(path, (1.7e9 + 3600 * hour, 1.7e9 + 3600 * hour))


def restored(folder: Path) -> Path:
    """Put an old checkpoint in the place of the newest one, as of now."""
    shutil.rmtree(folder / "checkpoint_4")
    shutil.copytree(folder / "checkpoint_1", folder / "checkpoint_4")
    dated(folder / "checkpoint_4", 9)
    return folder


@pytest.mark.parametrize("kind", ["optimizer", "scheduler"])
def test_exchanged_folders_are_not_taken_by_their_numbers(
    tmp_path: Path, kind: str, said: Said
) -> None:
    """SGD counts no steps, but its scheduler: a resume took the older folder, and nothing was
    said.
    """
    folder = (saved if kind == "optimizer" else scheduled)(tmp_path / "run")
    exchanged(folder, "checkpoint_4", "checkpoint_2")
    words = (
        f"checkpoint_4 is at {kind} step 9, checkpoint_2 at step 15, and checkpoint_2 was saved "
        "later"
    )
    status, out, _ = said("check", "-r", folder)
    assert status == 1
    assert f"{words}; next: give swapped folders their original names" in out
    assert "the newest complete one" not in out
    with pytest.raises(UsageError, match=words) as raised:
        latest_checkpoint(folder)
    assert f"next: accelerator.load_state('{folder / 'checkpoint_2'}') or" in str(raised.value)


def scheduled(folder: Path, *, steps: tuple[int, ...] = (3, 3, 3, 3, 3)) -> Path:
    """Train with SGD, which counts no steps, and a schedule; a negative number starts a new one."""
    model = nn.Linear(6, 6)
    for number, count in enumerate(steps):
        if number == 0 or count < 0:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        for _ in range(abs(count)):
            run(model, optimizer, 1)
            scheduler.step()
        save(folder / f"checkpoint_{number}", [model], [optimizer, scheduler])
        dated(folder / f"checkpoint_{number}", number)
    return folder


def test_a_backup_of_a_run_with_a_scheduler_is_told(tmp_path: Path, said: Said) -> None:
    status, out, _ = said("check", "-r", restored(scheduled(tmp_path / "run")))
    assert status == 1
    assert "checkpoint_4 is at scheduler step 6, checkpoint_3 at step 12" in out


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((3, 3, 3, 3, 3), id="only forward"),
        pytest.param((3, 3, 3, -3, 3), id="a new schedule for a second phase"),
        pytest.param((1, 0, 1, 0, 0), id="a schedule of epochs"),
        pytest.param((3, -3, -3, -3, -2), id="a schedule that restarts"),
    ],
)
def test_a_run_with_a_scheduler_is_taken_by_its_numbers(
    tmp_path: Path, steps: tuple[int, ...], said: Said
) -> None:
    folder = scheduled(tmp_path / "run", steps=steps)
    ensure_newest_is_taken(folder, said)
    _, out, _ = said("check", "-r", folder)
    question = "not checked: whether checkpoint_4 (scheduler step 2) is in the run of checkpoint_3 "
    assert (question in out) is (steps[-1] < 0)


def test_a_restored_backup_is_told_and_taken_as_after_a_run_that_went_back(
    tmp_path: Path, said: Said
) -> None:
    folder = restored(saved(tmp_path / "run"))
    status, out, _ = said("check", "-r", folder)
    assert status == 1
    assert (
        "checkpoint_4 is at optimizer step 6, checkpoint_3 at step 12: checkpoint_4 is a copy of "
        "checkpoint_1, as after restoring a backup, or in a run that went back to it\n"
    ) in out
    assert latest_checkpoint(folder).name == "checkpoint_4"
    answer = (
        f"resume from {folder / 'checkpoint_4'}, the newest complete one, but checkpoint_4 is "
        f"a copy of an earlier checkpoint; the newest one without problems: {folder / 'checkpoint_3'}"
    )
    assert [line for line in out.splitlines() if "resume from" in line] == [answer]


def test_a_copy_with_a_problem_of_its_own_gets_one_recommendation(
    tmp_path: Path, said: Said
) -> None:
    folder = restored(saved(tmp_path / "run"))
    shutil.copytree(folder / "checkpoint_0", folder / "checkpoint_5")
    (folder / "checkpoint_3/random_states_0.pkl").unlink()
    _, out, _ = said("check", "-r", folder)
    assert "checkpoint_5 is a copy of checkpoint_0" in out
    (answer,) = [
        line for line in out.splitlines() if "resume from" in line and not line.startswith(" ")
    ]
    assert f"resume from {folder / 'checkpoint_5'}, the newest complete one, but" in answer
    assert answer.endswith(f"; the newest one without problems: {folder / 'checkpoint_2'}")


def test_a_link_to_an_earlier_checkpoint_is_called_a_link(tmp_path: Path, said: Said) -> None:
    folder = saved(tmp_path / "run")
    shutil.rmtree(folder / "checkpoint_4")
    (folder / "checkpoint_4").symlink_to("checkpoint_1")
    status, out, _ = said("check", "-r", folder)
    assert status == 1
    assert "checkpoint_4 is a link to checkpoint_1" in out
    assert latest_checkpoint(folder).name == "checkpoint_4"
    answer = (
        f"resume from {folder / 'checkpoint_4'}, the newest complete one, but checkpoint_4 is "
        f"a link to an earlier checkpoint; the newest one without problems: {folder / 'checkpoint_3'}"
    )
    assert [line for line in out.splitlines() if "resume from" in line] == [answer]


@pytest.mark.parametrize("hours", [(5, 4, 3, 2, 1), (1, 1, 1, 1, 1)], ids=["backwards", "at once"])
def test_a_second_phase_that_was_copied_is_taken_by_its_numbers(
    tmp_path: Path, said: Said, hours: tuple[int, ...]
) -> None:
    """``cp -r`` writes in any order, and images give one time to all files."""
    folder = saved(tmp_path / "run", steps=(10, 10, 10, -4, 4))
    for number, hour in enumerate(hours):
        dated(folder / f"checkpoint_{number}", hour)
    assert latest_checkpoint(folder).name == "checkpoint_4"
    status, out, _ = said("check", "-r", folder)
    assert status == 0
    question = "not checked: whether checkpoint_4 (optimizer step 8) is in the run of checkpoint_0 "
    assert (question in out) is (hours[0] > 1)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((3, 3, 3, 3, 3), id="only forward"),
        pytest.param((3, 3, 3, -3, 3), id="a new optimizer for a second phase"),
        pytest.param((3, 3, 3, 0, 0), id="nothing trained between the last saves"),
    ],
)
def test_a_run_that_goes_on_is_taken_by_its_numbers(
    tmp_path: Path, steps: tuple[int, ...], said: Said
) -> None:
    ensure_newest_is_taken(saved(tmp_path / "run", steps=steps), said)


def ensure_newest_is_taken(folder: Path, said: Said) -> None:
    status, out, _ = said("check", "-r", folder)
    assert status == 0
    assert f"resume from {folder / 'checkpoint_4'}, the newest complete one" in out
    assert latest_checkpoint(folder).name == "checkpoint_4"


def test_a_run_that_went_back_to_an_earlier_checkpoint_is_taken_by_its_numbers(
    tmp_path: Path, said: Said
) -> None:
    folder = saved(tmp_path / "run")
    model = nn.Linear(6, 6)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(torch.load(folder / "checkpoint_1/optimizer.bin", weights_only=True))
    run(model, optimizer, 3)
    save(folder / "checkpoint_5", [model], [optimizer])
    status, out, _ = said("check", "-r", folder)
    assert status == 0
    assert f"resume from {folder / 'checkpoint_5'}, the newest complete one" in out
    question = (
        "whether checkpoint_5 (optimizer step 9) is in the run of checkpoint_4 (step 15): a run "
        "that went back or began with a new optimizer looks like a different run"
    )
    assert f"\nnot checked: {question}\n" in out
    _, out, _ = said("check", "-r", "--json", folder)
    assert [answer["not_checked"] for answer in json.loads(out)["resume"]] == [question]


def test_a_copy_of_an_old_checkpoint_is_told_in_a_store(
    tmp_path: Path, said: Said, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (stores, store_files):
        monkeypatch.setattr(module, "open_store", lambda url: open_simulated(cloud, url))
    for path in restored(saved(tmp_path / "run")).rglob("*/*"):
        cloud.write(str(path.relative_to(tmp_path)), path.read_bytes())
    status, out, err = said("check", "-r", "s3://simulated/run")
    assert status == 1, err
    assert "checkpoint_4 is a copy of checkpoint_1" in out


def test_a_lower_number_with_newer_files_is_told(tmp_path: Path, said: Said) -> None:
    """Two runs of a day look like one that was copied without its times: the choice is told, and
    stays.
    """
    folder = saved(tmp_path / "run", steps=(3, 3, 3))
    dated(folder / "checkpoint_0", 4)
    status, out, _ = said("check", "-r", folder)
    assert status == 0
    assert (
        f"resume from {folder / 'checkpoint_2'}, the newest complete one by number (the files "
        "of checkpoint_0 are 120 minutes newer; likely causes: a second run in this folder, or a copy)"
    ) in out
