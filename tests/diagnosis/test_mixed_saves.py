"""Files of two saves of a run in one folder: two files that record different progress are told, no
healthy run is.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.optim import lr_scheduler

from ckptfix import check, repair
from ckptfix.cli import run as run_cli
from tests.diagnosis.test_schedules import SCHEDULES, Run
from tests.diagnosis.test_trainer_states import trainer_in
from tests.sampling import sampled
from tests.stores.servers import upload_folder
from tests.test_golden import FIXTURES


def told(root: Path, *, proves: bool | None = True) -> list[str]:
    """Return the sentences about mixed saves. ``proves``: they make the status 1, None for any."""
    report = check(root)
    findings = [str(one) for one in report.all_findings if one.code == "mixed-saves"]
    assert not findings or proves is None or report.status == proves
    return findings


def saves(
    root: Path, *makes: str, groups: int = 2, numbers: tuple[int, ...] = (0, 3, 6)
) -> list[Path]:
    """Save a run of accelerate after these numbers of steps."""
    run = Run(groups, *(SCHEDULES[make] for make in makes))
    folders = []
    for before, number in zip((0, *numbers), numbers, strict=False):
        run.step(number - before)
        folders.append(run.save(root / f"checkpoint_{number}"))
    return folders


@pytest.mark.parametrize("make", sampled(list(SCHEDULES)))
def test_no_healthy_run_is_told_and_every_change_of_rates_is(make: str, tmp_path: Path) -> None:
    first, older, newer = saves(tmp_path, make)
    assert [told(root) for root in (first, older, newer)] == [[], [], []]
    rates = [
        [group["lr"] for group in torch.load(root / "optimizer.bin")["param_groups"]]
        for root in (older, newer, first)
    ]
    shutil.copy(older / "optimizer.bin", newer)
    findings = told(newer, proves=False)
    assert len(findings) == (rates[0] != rates[1])
    shutil.copy(first / "optimizer.bin", newer)
    assert len(told(newer, proves=None)) == (rates[2] != rates[1])
    shutil.copy(older / "optimizer.bin", newer)
    resumed = Run(2, SCHEDULES[make])
    assert resumed.goes_on(newer), "stock accelerate takes the mix without an error"
    if findings:
        group = 0 if rates[0][0] != rates[1][0] else 1
        assert findings == [
            f"optimizer.bin: learning rate {rates[0][group]:.6g} in param group {group} (expected "
            f"{rates[1][group]:.6g}, as in scheduler.bin); checkpoint_3 has the same rate"
        ]


def test_two_files_that_were_exchanged_between_saves_are_both_told(tmp_path: Path) -> None:
    _, older, newer = saves(tmp_path, "LambdaLR", groups=1)
    content = (older / "optimizer.bin").read_bytes()
    shutil.copy(newer / "optimizer.bin", older)
    (newer / "optimizer.bin").write_bytes(content)
    words = [told(root, proves=False)[0].rpartition("; ")[2] for root in (older, newer)]
    assert words == ["checkpoint_6 has the same rate", "checkpoint_3 has the same rate"]


def test_a_folder_alone_is_a_note_without_the_other_save(tmp_path: Path) -> None:
    _, older, newer = saves(tmp_path, "LambdaLR", groups=1)
    alone = Path(shutil.copytree(newer, tmp_path / "alone"))
    shutil.copy(older / "optimizer.bin", alone)
    assert told(alone, proves=False) == [
        "optimizer.bin: learning rate 0.0125 (expected 0.0015625, as in scheduler.bin)"
    ]


def test_of_several_optimizers_the_checkpoints_next_to_them_show_the_pairs(tmp_path: Path) -> None:
    _, older, newer = saves(tmp_path, "LambdaLR", "StepLR", groups=1)
    shutil.copy(older / "optimizer_1.bin", newer)
    assert [words.partition(":")[0] for words in told(newer, proves=False)] == ["optimizer_1.bin"]
    alone = Path(shutil.copytree(newer, tmp_path / "alone"))
    assert [words.partition(":")[0] for words in told(alone, proves=False)] == ["optimizer_1.bin"]


def exchange(root: Path, name: str, partner: str, *, is_recorded: bool = True) -> None:
    """Give two files of a folder each other's name.

    ``is_recorded``: torch's files still have the names that they were saved under, unlike those of
    a script that prepares its objects in another order.
    """
    (root / name).rename(root / "third")
    (root / partner).rename(root / name)
    (root / "third").rename(root / partner)
    for path in () if is_recorded or not name.endswith(".bin") else (root / name, root / partner):
        torch.save(torch.load(path, weights_only=True), path)


def test_schedulers_that_were_exchanged_are_told_by_their_recorded_names(tmp_path: Path) -> None:
    """Without these names a script may have exchanged the rates: nothing is told."""
    _, older, newer = saves(tmp_path, "ExponentialLR", "StepLR", groups=1)
    renamed = Path(shutil.copytree(newer, tmp_path / "renamed"))
    exchange(renamed, "scheduler.bin", "scheduler_1.bin")
    assert [finding.code for finding in check(renamed).findings] == ["wrong-state"]
    exchange(newer, "scheduler.bin", "scheduler_1.bin", is_recorded=False)
    assert [told(root) for root in (older, newer)] == [[], []]


def test_a_scheduler_that_was_copied_over_another_is_told(tmp_path: Path) -> None:
    _, older, newer = saves(tmp_path, "ExponentialLR", "StepLR", groups=1)
    shutil.copy(older / "scheduler.bin", older / "scheduler_1.bin")
    (words,) = told(older, proves=True)
    assert words.startswith("optimizer_1.bin: learning rate ")
    assert "as in scheduler_1.bin)" in words
    assert "identical-states" in {finding.code for finding in check(older).findings}
    assert told(newer) == []


def test_a_script_that_prepares_its_schedulers_in_another_order_is_not_told(
    tmp_path: Path,
) -> None:
    folders = saves(tmp_path, "ExponentialLR", "StepLR", groups=1)
    for root in folders:
        exchange(root, "scheduler.bin", "scheduler_1.bin", is_recorded=False)
    assert [told(root) for root in folders] == [[], [], []]


def test_a_repair_of_a_script_that_sets_rates_has_no_new_finding(tmp_path: Path) -> None:
    """With its duplicates gone the folder has one optimizer and one scheduler for each model."""
    root = Path(
        shutil.copytree(FIXTURES / "golden/doubled-states/checkpoint", tmp_path / "checkpoint")
    )
    for path in root.glob("optimizer*.bin"):
        state = torch.load(path)
        state["param_groups"][0]["lr"] = 0.0123
        torch.save(state, path)
    assert repair(root).transaction == 1
    assert len(told(root, proves=False)) == 2


def saved_by_a_script_that_sets_rates(root: Path, rates: dict[int, float]) -> list[Path]:
    """Save a run whose script sets the rate after some steps of its scheduler."""
    run = Run(1, SCHEDULES["StepLR"])
    folders = []
    for number in range(1, 6):
        if number > 1:
            run.step(1)
        if number in rates:
            run.optimizers[0].param_groups[0]["lr"] = rates[number]
        folders.append(run.save(root / f"checkpoint_{number}"))
    return folders


@pytest.mark.parametrize(
    "rates",
    [
        {number: 0.02 * number for number in range(1, 6)},
        {number: 0.1 * 0.7**number for number in range(1, 6)},
        {1: 0.01},
    ],
    ids=["rising", "falling", "a warm-up before the schedule moves"],
)
def test_a_script_that_sets_the_rates_itself_is_not_told(
    rates: dict[int, float], tmp_path: Path
) -> None:
    for root in saved_by_a_script_that_sets_rates(tmp_path, rates):
        assert told(root) == []


Counts = tuple[int, int, float, float]
"""Steps of an optimizer, moves of its scheduler, and the rates that both record."""

GOES_ON: list[Counts] = [(3 * number, 3 * number, 0.1, 0.1) for number in range(1, 6)]


def with_counts(root: Path, *positions: list[Counts]) -> list[Path]:
    """Save five checkpoints by hand, with an optimizer and its scheduler at each position."""
    folders = [root / f"checkpoint_{number}" for number in range(1, 6)]
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        torch.save({"step": number}, folder / "random_states_0.pkl")
        for index, counts in enumerate(positions):
            steps, moves, rate, last = counts[number]
            end = f"_{index}" if index else ""
            weights = torch.tensor([float(number), float(index)])
            save_file({"weight": weights}, folder / f"model{end}.safetensors")
            moments = {name: torch.ones(2) for name in ("exp_avg", "exp_avg_sq")}
            optimizer = {
                "state": {0: {"step": torch.tensor(float(steps)), **moments}},
                "param_groups": [{"lr": rate, "initial_lr": 0.1, "params": [0]}],
            }
            scheduler = {
                "base_lrs": [0.1], "last_epoch": moves, "_step_count": moves + 1, "_last_lr": [last]
            }  # fmt: skip
            torch.save(optimizer, folder / f"optimizer{end}.bin")
            torch.save(scheduler, folder / f"scheduler{end}.bin")
    return folders


def severities(folders: list[Path]) -> list[str]:
    return [
        "".join(one.severity.value for one in check(root).all_findings if one.code == "mixed-saves")
        for root in folders
    ]


LOWERED, RAISED, FLOOR = (0, 0, 0.01, 0.1), (0, 0, 1.0, 0.1), (0, 0, 0.1, 0.01)
OLDER_OPTIMIZER, OLDER_SCHEDULE = (-6, 0, 0.2, 0.1), (0, -6, 0.1, 0.2)


@pytest.mark.parametrize(
    ("changed", "at"),
    [
        *((LOWERED, at) for at in range(5)),
        (RAISED, 2), (FLOOR, 2),
        *((older, at) for older in (OLDER_OPTIMIZER, OLDER_SCHEDULE) for at in (0, 2, 4)),
    ],
)  # fmt: skip
def test_rates_that_a_script_changed_once_are_a_note(
    changed: Counts, at: int, tmp_path: Path
) -> None:
    """The next save goes on from them: from an older count, too."""
    steps, moves, rate, last = changed
    counts = list(GOES_ON)
    for number in range(at, 5):
        now, then, *_ = counts[number]
        counts[number] = (max(now + steps, 1), max(then + moves, 1), 0.1, 0.1)
    counts[at] = (*counts[at][:2], rate, last)
    folders = with_counts(tmp_path, counts)
    expected = [""] * 5
    expected[at] = "note"
    assert severities(folders) == expected
    report = check(folders[at])
    (advice,) = [one.advice for one in report.all_findings if one.code == "mixed-saves"]
    assert advice.startswith("if the script set the learning rate itself")
    assert (report.status, report.verdict) == (0, "with differences")


@pytest.mark.parametrize("at", [0, 1])
def test_one_of_two_equal_rates_that_a_script_changed_once_is_a_note(
    at: int, tmp_path: Path
) -> None:
    positions = [list(GOES_ON), list(GOES_ON)]
    positions[at][2] = (9, 9, 0.12, 0.1)
    folders = with_counts(tmp_path, *positions)
    assert severities(folders) == ["", "", "note", "", ""]


@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.bin"])
@pytest.mark.parametrize(
    ("source", "target", "per_step"),
    [
        (1, 3, 1), (2, 3, 1), (4, 3, 1), (5, 2, 1), (4, 5, 1), (2, 1, 1),
        (2, 3, 2), (4, 5, 2), (2, 3, 0.5), (4, 5, 0.5),
    ],
)  # fmt: skip
def test_a_file_of_another_save_is_a_warning_where_no_count_fits(
    name: str, source: int, target: int, per_step: float, tmp_path: Path
) -> None:
    """No save after the newest shows whether its script went back to an older optimizer. A schedule
    of epochs may make no move between two saves.
    """
    counts = [
        (4 * number, int(4 * number * per_step), 0.1 / number, 0.1 / number)
        for number in range(1, 6)
    ]
    folders = with_counts(tmp_path, counts)
    assert severities(folders) == [""] * 5
    shutil.copy(folders[source - 1] / name, folders[target - 1])
    is_proven = target in (2, 3) and per_step >= 1
    expected = [""] * 5
    expected[target - 1] = "warning" if is_proven else "note"
    assert severities(folders) == expected
    (words,) = told(folders[target - 1], proves=None)
    assert f"; checkpoint_{source} has the same rate" in words
    assert words.endswith("; nor do the step counts of the two files match") == is_proven


def test_the_counts_of_saves_in_a_store_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = with_counts(tmp_path / "run", [(n, n, 0.1 / n, 0.1 / n) for n in range(1, 6)])
    shutil.copy(folders[0] / "scheduler.bin", folders[2])
    url = f"memory://{os.urandom(6).hex()}/run"
    upload_folder(tmp_path / "run", url)
    for place in (str(tmp_path / "run"), url):
        assert run_cli(["check", "-r", place]) == 1
        out = capsys.readouterr().out
        assert "warning mixed-saves: scheduler.bin: learning rate 0.1 (expected" in out
        assert "5 checkpoints: 1 with warnings, 4 clean" in out


def test_rates_in_tensors_and_a_second_scheduler_are_not_judged(tmp_path: Path) -> None:
    _, older, newer = saves(tmp_path, "LambdaLR", groups=1)
    shutil.copy(older / "optimizer.bin", newer)
    shutil.copy(newer / "scheduler.bin", newer / "scheduler_1.bin")
    assert told(newer) == []
    (newer / "scheduler_1.bin").unlink()
    state = torch.load(newer / "optimizer.bin")
    state["param_groups"][0]["lr"] = torch.tensor(0.1)
    torch.save(state, newer / "optimizer.bin")
    assert told(newer) == []


@pytest.mark.parametrize("rate", [10**5000, -(10**5000), float("inf"), "0.1", None, True], ids=type)
def test_a_rate_that_is_no_number_is_not_judged_and_none_is_printed_in_full(
    rate: Any, tmp_path: Path
) -> None:
    (root,) = saves(tmp_path, "LambdaLR", groups=1, numbers=(3,))
    state = torch.load(root / "scheduler.bin", weights_only=False)
    state["_last_lr"], state["last_epoch"] = [rate], rate
    torch.save(state, root / "scheduler.bin")
    assert all(len(words) < 200 for words in told(root, proves=False))


# --- the Trainer
# ---------------------------------------------------------------------------------------------------


def trained(output: Path, **arguments: Any) -> Any:
    trainer = trainer_in(output)
    for name, value in arguments.items():
        setattr(trainer.args, name, value)
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run")
    trained(output, max_steps=6).train()
    return output


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def put(run: Path, source: str, target: str, *names: str) -> Path:
    for name in names:
        shutil.copy(run / source / name, run / target)
    return run / target


BOTH = ("optimizer.pt", "scheduler.pt")


def test_files_of_another_checkpoint_of_the_trainer_are_told(run: Path, tmp_path: Path) -> None:
    assert [told(root) for root in sorted(run.iterdir())] == [[], [], []]
    (words,) = told(put(run, "checkpoint-2", "checkpoint-4", "optimizer.pt"))
    assert words.startswith("optimizer.pt: learning rate ")
    assert "; checkpoint-2 has the same rate; " in words
    put(run, "checkpoint-2", "checkpoint-4", "scheduler.pt")
    assert told(run / "checkpoint-4") == [
        "scheduler.pt: 2 steps (expected 4, as in trainer_state.json); it comes from checkpoint-2"
    ]
    trainer = trained(tmp_path / "resumed", max_steps=6)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert (trainer.state.global_step, trainer.lr_scheduler.last_epoch) == (6, 4)
    put(run, "checkpoint-6", "checkpoint-4", *BOTH)
    assert told(run / "checkpoint-4") == [
        "scheduler.pt: 6 steps (expected at most 4, as in trainer_state.json); it comes from "
        "checkpoint-6"
    ]
    shutil.rmtree(run / "checkpoint-6")
    assert told(run / "checkpoint-4") == []


def test_next_to_random_states_of_accelerate_the_steps_are_a_script_s(run: Path) -> None:
    root = put(run, "checkpoint-6", "checkpoint-4", *BOTH)
    (root / "rng_state.pth").unlink()
    _, accelerates = saves(run.parent / "accelerate", "LambdaLR", numbers=(0, 1))
    shutil.copy(accelerates / "random_states_0.pkl", root)
    assert told(root) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"lr_scheduler_type": "constant"},
        {"lr_scheduler_type": "cosine", "warmup_steps": 3},
        {"gradient_accumulation_steps": 2},
        {"optim": "adafactor"},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 4},
    ],
    ids=lambda arguments: "-".join(map(str, arguments.values())),
)
def test_no_run_of_the_trainer_is_told(arguments: dict[str, Any], tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=6, **arguments)
    trainer.eval_dataset = trainer.train_dataset
    trainer.args.metric_for_best_model = "eval_loss"
    trainer.train()
    assert [told(root) for root in sorted(tmp_path.glob("checkpoint-*"))] == [[], [], []]


def test_steps_that_fp16_skips_and_a_scheduler_that_made_steps_before_are_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import accelerate

    skipped = [True, False, False, True, False, False]
    trainer = trained(tmp_path / "fp16", max_steps=6)
    monkeypatch.setattr(
        accelerate.Accelerator,
        "optimizer_step_was_skipped",
        property(lambda _: skipped[trainer.state.global_step]),
    )
    trainer.train()
    moves = [
        torch.load(root / "scheduler.pt")["last_epoch"]
        for root in sorted((tmp_path / "fp16").iterdir())
    ]
    assert moves == [1, 2, 4]
    assert [told(root) for root in sorted((tmp_path / "fp16").iterdir())] == [[], [], []]
    monkeypatch.undo()

    twice = trained(tmp_path / "twice", max_steps=4)
    twice.optimizer = torch.optim.AdamW(twice.model.parameters())
    twice.lr_scheduler = lr_scheduler.OneCycleLR(twice.optimizer, 0.1, total_steps=20)
    twice.train()
    twice.train()
    state = json.loads((tmp_path / "twice/checkpoint-4/trainer_state.json").read_text())
    assert (
        state["global_step"]
        < torch.load(tmp_path / "twice/checkpoint-4/scheduler.pt")["last_epoch"]
    )
    assert [told(root) for root in sorted((tmp_path / "twice").iterdir())] == [[], []]
