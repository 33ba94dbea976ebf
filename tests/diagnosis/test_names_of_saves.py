"""Saves whose names no library gives: which of them are compared as those of one run, and what is
said of a resume.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.commanding import Said, said
from tests.stores.servers import upload_folder

__all__ = ["said"]

LAST = "optimizer_1.bin"


def save(folder: Path, steps: int, *, processes: int = 1, schedulers: int = 1) -> Path:
    """Save two optimizers after so many steps, of which the second one counts them."""
    folder.mkdir(parents=True)
    weights = torch.arange(8.0) + steps
    save_file({"weight": weights}, folder / "model.safetensors", metadata={"format": "pt"})
    groups = [{"lr": 0.1, "initial_lr": 0.1, "params": [0]}]
    momentum = {0: {"momentum_buffer": weights / 2}}
    torch.save({"state": momentum, "param_groups": groups}, folder / "optimizer.bin")
    adam = {0: {"step": torch.tensor(float(steps)), "exp_avg": weights, "exp_avg_sq": weights}}
    torch.save({"state": adam, "param_groups": groups}, folder / LAST)
    for index in range(schedulers):
        schedule = {
            "base_lrs": [0.1], "last_epoch": steps, "_step_count": steps + 1, "_last_lr": [0.1],
            "total_iters": index,
        }  # fmt: skip
        torch.save(schedule, folder / f"scheduler{f'_{index}' if index else ''}.bin")
    for rank in range(processes):
        torch.save({"step": steps}, folder / f"random_states_{rank}.pkl")
    return folder


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (("e0", "e1", "e2"), (5, 10, 15)),
        (("r1", "r2", "r3"), (12, 24, 36)),
        (("d0", "d1", "d2"), (2, 9, 16)),
        (("x_008", "x_016"), (8, 16)),
        (("swa_0", "swa_1"), (5, 10)),
        (("it_8", "it_16"), (3, 5)),
        (("model_1000", "model_2000"), (10, 20)),
        (("ckpt-1", "ckpt-2"), (5, 5)),
    ],
)
def test_a_file_that_one_of_several_saves_lost_is_found_under_any_names(
    names: tuple[str, ...],
    steps: tuple[int, ...],
    is_stored: bool,
    tmp_path: Path,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A path relative to the working directory was looked up by its absolute one: nothing was
    compared, and three saves, one without its second optimizer, were clean.
    """
    for name, count in zip(names, steps, strict=True):
        save(tmp_path / "run" / name, count)
    (tmp_path / "run" / names[-1] / LAST).unlink()
    monkeypatch.chdir(tmp_path)
    place = f"memory://{os.urandom(6).hex()}/run" if is_stored else "run"
    if is_stored:
        upload_folder(tmp_path / "run", place)
    status, out, _ = said("check", "-r", place)
    assert status == 1
    assert f"warning incomplete-checkpoint: {LAST} is missing: " in out
    pattern = f"{names[0].rstrip('0123456789')}{{}}"
    assert out.splitlines()[-1] == (
        f"{place}: no checkpoint was chosen: {names[0]} to {names[-1]} have other names than the "
        "usual ones (checkpoint_N, checkpoint-N, step_N, epoch_N); next, in Python: "
        f"ckptfix.latest_checkpoint({place!r}, pattern={pattern!r})"
    )


@pytest.mark.parametrize("is_absolute", [False, True])
@pytest.mark.parametrize("is_recursive", [False, True])
@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (("fold0", "fold1", "fold2"), (5, 10, 15)),
        (("run1", "run2"), (5, 10)),
        (("model1", "model2"), (5, 5)),
        (("rank0", "rank1"), (5, 10)),
        (("exp_1", "exp_2", "exp_3"), (5, 10, 15)),
        (("stage_1", "stage_2"), (5, 10)),
        (("my-seed-1", "my-seed-2"), (5, 10)),
    ],
)
def test_runs_next_to_each_other_may_have_other_objects(
    names: tuple[str, ...],
    steps: tuple[int, ...],
    is_recursive: bool,
    is_absolute: bool,
    tmp_path: Path,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for at, (name, count) in enumerate(zip(names, steps, strict=True)):
        save(tmp_path / name, count, processes=at + 1, schedulers=2 - at % 2)
    (tmp_path / names[-1] / LAST).unlink()
    monkeypatch.chdir(tmp_path)
    top = tmp_path if is_absolute else Path()
    status, out, _ = (
        said("check", "-r", top) if is_recursive else said("check", *map(top.joinpath, names))
    )
    assert (status, "note" in out) == (0, False), out
    assert "no checkpoint" not in out


@pytest.mark.parametrize("steps", [(10, 10, 10), (10, 7, 30), (30, 20, 10), (10, 20, 31)])
def test_runs_of_unknown_names_are_those_whose_steps_do_not_keep_pace_with_the_numbers(
    steps: tuple[int, ...], tmp_path: Path, said: Said
) -> None:
    for at, count in enumerate(steps):
        save(tmp_path / f"big{at}", count, processes=at + 1)
    (tmp_path / "big2" / LAST).unlink()
    status, out, _ = said("check", "-r", tmp_path)
    assert (status, "note" in out) == (0, False), out


def test_a_run_with_usual_names_is_the_one_to_resume(tmp_path: Path, said: Said) -> None:
    for number in (1, 2):
        save(tmp_path / f"checkpoint_{number}", number)
        save(tmp_path / f"swa_{number}", number)
    status, out, _ = said("check", "-r", tmp_path)
    assert status == 0
    assert "no checkpoint was chosen" not in out
    assert out.splitlines()[-1].startswith(f"resume from {tmp_path}/checkpoint_2, ")


def test_a_lone_folder_shows_without_options_that_its_counts_contradict_each_other(
    tmp_path: Path, said: Said
) -> None:
    folder = save(tmp_path / "last", 5, schedulers=2)
    (folder / LAST).unlink()
    shutil.copytree(folder, tmp_path / "runs" / "x" / "last")
    for arguments in ([folder], ["-r", tmp_path]):
        status, out, _ = said("check", *arguments)
        assert status == 0
        assert "whether 1 optimizer is enough for 2 schedulers" in out
