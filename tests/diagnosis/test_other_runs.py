"""Two runs in one folder: the highest number may be of the older one, and only the files themselves
prove that.
"""

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfix import latest_checkpoint
from ckptfix.cli import run
from ckptfix.errors import UsageError
from tests.commanding import Said, said
from tests.diagnosis.test_trainer_states import trainer_in
from tests.test_golden import FIXTURES

__all__ = ["said"]

DAY = 86400


def trained(
    output: Path, *, steps: int = 4, resume: str | None = None, rate: float = 1e-3, **options: Any
) -> Path:
    """Train with the Trainer, and save after each step."""
    trainer = trainer_in(output, learning_rate=rate, **options)
    trainer.args.max_steps, trainer.args.save_steps = steps, 1
    trainer.train(resume_from_checkpoint=str(output / resume) if resume else None)
    return output


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("older"), steps=7)


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("newer"), steps=3, rate=3e-3)


def put(run_folder: Path, source: Path, *numbers: int) -> Path:
    for number in numbers:
        shutil.rmtree(run_folder / f"checkpoint-{number}", ignore_errors=True)
        shutil.copytree(source / f"checkpoint-{number}", run_folder / f"checkpoint-{number}")
    return run_folder


@pytest.mark.parametrize(
    ("kept", "order"), [((7,), "in order"), ((5, 6, 7), "at once"), ((4, 5, 6, 7), "in order")]
)
def test_the_highest_number_of_an_older_run_is_not_taken(
    older: Path, newer: Path, tmp_path: Path, kept: tuple[int, ...], order: str, said: Said
) -> None:
    folder = put(put(tmp_path / "run", older, *kept), newer, 1, 2, 3)
    if order == "at once":
        for path in folder.iterdir():
            os.utime(path / "trainer_state.json", (1e9, 1e9))
    with pytest.raises(UsageError) as raised:
        latest_checkpoint(folder)
    words = str(raised.value)
    assert "checkpoint-7 and checkpoint-3 come from different runs (step 1: " in words
    assert "max_steps 3 and 7" in words
    calls = [
        f"trainer.train(resume_from_checkpoint='{folder}/checkpoint-{number}')" for number in (3, 7)
    ]
    assert words.endswith(" or ".join(calls))
    status, out, _ = said("check", "-r", folder)
    assert status == 1
    assert "checkpoint-7 and checkpoint-3 come from different runs" in out
    assert (
        "no checkpoint to resume from: checkpoint-7 and checkpoint-3 are complete but contradict "
        "each other" in out
    )
    (answer,) = json.loads(said("check", "-r", folder, "--json")[1])["resume"]
    assert answer["checkpoint"] is None
    assert "next: move the older run out of the folder" in answer["other_run"]


def test_the_newest_complete_one_of_the_other_run_is_named(
    older: Path, newer: Path, tmp_path: Path
) -> None:
    folder = put(put(tmp_path / "run", older, 7), newer, 1, 2, 3)
    (folder / "checkpoint-3/model.safetensors").unlink()
    with pytest.raises(UsageError, match="checkpoint-7 and checkpoint-2 come from different runs"):
        latest_checkpoint(folder)
    shutil.rmtree(folder / "checkpoint-2")
    shutil.rmtree(folder / "checkpoint-1")
    assert latest_checkpoint(folder).name == "checkpoint-7"


@pytest.fixture
def branched(older: Path, tmp_path: Path) -> list[Path]:
    """Return 3 of a run, 4 of a branch that was given up, and 5 to which the run went on from 3
    with other losses.
    """
    run_folder = put(tmp_path / "run", older, 1, 2, 3, 4)
    folders = [run_folder / f"checkpoint-{number}" for number in (3, 4, 5)]
    shutil.copytree(folders[1], folders[2])
    state = json.loads((folders[2] / "trainer_state.json").read_text())
    state["global_step"] = 5
    (last,) = [entry for entry in state["log_history"] if entry["step"] == 4 and "loss" in entry]
    last["loss"] += 1
    (folders[2] / "trainer_state.json").write_text(json.dumps(state))
    for place, path in enumerate(folders):
        os.utime(path / "trainer_state.json", (1e9 + 100 * place, 1e9 + 100 * place))
    return folders


def test_an_incomplete_checkpoint_of_another_branch_says_nothing_of_those_below(
    branched: list[Path], tmp_path: Path, said: Said
) -> None:
    _, abandoned, newest = branched
    optimizer = abandoned / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:100])
    assert latest_checkpoint(tmp_path / "run") == newest
    _, out, _ = said("check", "-r", tmp_path / "run")
    assert "different runs" not in out
    assert f"resume from {newest}" in out


def test_a_branch_that_is_older_by_number_and_time_changes_no_choice(
    branched: list[Path], tmp_path: Path, said: Said
) -> None:
    _, abandoned, newest = branched
    assert latest_checkpoint(tmp_path / "run") == newest
    status, out, _ = said("check", "-r", tmp_path / "run")
    assert status == 1
    assert "checkpoint-5 and checkpoint-4 come from different runs (step 4: loss " in out
    assert "and checkpoint-4 was saved earlier; next: move checkpoint-4 out of the folder" in out
    assert f"resume from {newest}" in out
    os.utime(abandoned / "trainer_state.json", (1e9 + 300, 1e9 + 300))
    with pytest.raises(UsageError, match="checkpoint-5 and checkpoint-4 come from different runs"):
        latest_checkpoint(tmp_path / "run")


def resumed(folder: Path, older: Path) -> None:
    put(folder, older, 1, 2)
    trained(folder, steps=7, resume="checkpoint-2")


def extended(folder: Path, older: Path) -> None:
    trained(folder, steps=2)
    trained(folder, steps=5, resume="checkpoint-2")


def resumed_with_other_batches(folder: Path, older: Path) -> None:
    """Fewer operations for each step from there on, and no logs."""
    trained(folder, steps=2, logging_strategy="no", per_device_train_batch_size=4)
    trained(folder, steps=4, logging_strategy="no", resume="checkpoint-2")


def without_logs(folder: Path, older: Path) -> None:
    trained(folder, steps=2, logging_strategy="no")
    trained(folder, steps=4, logging_strategy="no", resume="checkpoint-2")


def shortened(folder: Path, older: Path) -> None:
    """A callback keeps the last entries alone."""
    put(folder, older, *range(1, 8))
    for path in folder.glob("*/trainer_state.json"):
        state = json.loads(path.read_text())
        state["log_history"] = state["log_history"][-2:]
        path.write_text(json.dumps(state))


HEALTHY: dict[str, Callable[[Path, Path], object]] = {
    "whole": lambda folder, older: put(folder, older, *range(1, 8)),
    "rotated": lambda folder, older: put(folder, older, 2, 6, 7),
    "resumed": resumed,
    "resumed with other batches": resumed_with_other_batches,
    "extended": extended,
    "evaluated": lambda folder, older: trained(folder, eval_strategy="steps", eval_steps=1),
    "without logs": without_logs,
    "shortened": shortened,
}


@pytest.fixture(scope="module", params=HEALTHY)
def healthy(
    request: pytest.FixtureRequest, older: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("healthy") / "run"
    HEALTHY[request.param](folder, older)
    return folder


@pytest.mark.parametrize("order", ["in order", "as copied"])
def test_one_run_is_taken_by_its_numbers(order: str, healthy: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(healthy, tmp_path / "run"))
    if order == "as copied":
        now = time.time()
        for path in folder.iterdir():
            moment = now - random.Random(path.name).random() * 3600 * 5
            os.utime(path / "trainer_state.json", (moment, moment))
    highest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    assert latest_checkpoint(folder) == highest
    assert run(["check", "-r", str(folder)]) == 0


@pytest.mark.parametrize(
    "histories",
    [
        (None, None),
        ([1, None], [{"step": "1"}]),
        ([], []),
        ([{"step": 1, "x": {"y": [{}]}}], [{"step": 1, "x": {"y": [{}]}}]),
        ([{"step": 10**400}], [{"step": -1}]),
    ],
)
def test_histories_that_say_nothing_prove_nothing(
    histories: tuple[Any, Any], tmp_path: Path, older: Path
) -> None:
    folder = put(tmp_path / "run", older, 1, 2)
    for number, history in zip((1, 2), histories, strict=True):
        path = folder / f"checkpoint-{number}/trainer_state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "log_history": history}))
    assert latest_checkpoint(folder).name == "checkpoint-2"


def test_a_run_without_logs_is_told_by_its_floating_point_operations(
    tmp_path: Path, said: Said
) -> None:
    """An hour between two runs proves nothing, and without ``log_history`` nothing else was
    compared.
    """
    quiet: dict[str, Any] = {"logging_strategy": "no"}
    folder = put(tmp_path / "run", trained(tmp_path / "older", steps=3, **quiet), 3)
    put(folder, trained(tmp_path / "newer", steps=2, per_device_train_batch_size=4, **quiet), 1, 2)
    hour = time.time() - 3600
    os.utime(folder / "checkpoint-3/trainer_state.json", (hour, hour))
    with pytest.raises(
        UsageError, match=r"checkpoint-3 and checkpoint-2 come from different runs \(total_flos "
    ):
        latest_checkpoint(folder)
    status, out, _ = said("check", "-r", folder)
    assert status == 1
    assert "although it only grows" in out


def test_another_max_steps_counts_where_the_lower_number_is_days_newer(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    without_logs(folder, folder)
    moment = time.time() + 3 * DAY
    os.utime(folder / "checkpoint-2/trainer_state.json", (moment, moment))
    with pytest.raises(
        UsageError, match="max_steps 2 and 4, and the lower number was saved 3 days later"
    ):
        latest_checkpoint(folder)


@pytest.mark.parametrize(("days", "status"), [(0.5, 0), (3, 1)])
def test_times_warn_and_change_no_choice(
    days: float, status: int, tmp_path: Path, said: Said
) -> None:
    folder = tmp_path / "run"
    for number in (1, 2, 7):
        path = Path(
            shutil.copytree(
                FIXTURES / "accelerate-1.15.0/clean-safetensors/checkpoint",
                folder / f"checkpoint_{number}",
            )
        )
        moment = 1.7e9 + (0 if number == 7 else days * DAY)
        os.utime(path / "random_states_0.pkl", (moment, moment))
    assert latest_checkpoint(folder).name == "checkpoint_7"
    code, out, _ = said("check", "-r", folder)
    assert code == status
    assert (
        "checkpoint_2 was saved 3 days after checkpoint_7, which may belong to an older run" in out
    ) == bool(status)
    assert f"resume from {folder}/checkpoint_7" in out
