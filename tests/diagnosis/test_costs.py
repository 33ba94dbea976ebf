"""Costs of checks: they grow with the bytes of a file, however it nests and shares its objects."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckptfix import check

ONE = torch.zeros(1)
RANDOM_STATES = {"step": 1, "random_state": (3, (1,) * 625, None)}


def calls(action: Callable[[], object]) -> int:
    """Return how many Python functions an action calls, and how often it resumes generators."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def optimizers_of_one_state(folder: Path, count: int) -> None:
    state = {number: {"exp_avg": torch.empty(2, device="meta")} for number in range(count)}
    torch.save({str(i): {"state": state, "param_groups": []} for i in range(count)}, folder / "states.pt")


def state_dicts(folder: Path, count: int) -> None:
    torch.save({f"a{i}": {"w": ONE, "l.b": ONE} for i in range(count)}, folder / "model.pth")


def nested_state_dicts(folder: Path, count: int) -> None:
    torch.save(
        {f"a{i}": {"module.module.w": ONE, f"module.module.{i}": ONE} for i in range(count)}, folder / "m.pth"
    )
    save_file({"w": ONE}, folder / "model.safetensors")
    for rank in range(2):
        torch.save(RANDOM_STATES, folder / f"random_states_{rank}.pkl")


def values_that_share_a_list(folder: Path, count: int) -> None:
    """Values next to weights, in which quantized weights may hide."""
    shared = [{"number": number} for number in range(count)]
    save_file({"w": ONE}, folder / "model.safetensors")
    dicts = {f"m{i}": {"w": ONE, "o": [shared]} for i in range(count)}
    torch.save(dicts, folder / "extra.pth")
    group = {"lr": 0.1, "params": [0, 1, 2]}
    state = {number: {"step": ONE, "exp_avg": ONE, "exp_avg_sq": ONE} for number in range(3)}
    torch.save({"state": state, "param_groups": [group]}, folder / "optimizer.bin")
    torch.save(RANDOM_STATES, folder / "random_states_0.pkl")


def duplicates(folder: Path, count: int) -> None:
    for number in range(count):
        end = f"_{number}" if number else ""
        save_file({"module." * (number % 2) + f"{number // 2}.w": ONE}, folder / f"model{end}.safetensors")
        state = {0: {"step": ONE, "exp_avg": ONE, "exp_avg_sq": ONE}}
        torch.save(
            {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}, folder / f"optimizer{end}.bin"
        )
    for rank in range(2):
        torch.save(RANDOM_STATES, folder / f"random_states_{rank}.pkl")


def nested_in_dcp(folder: Path, count: int) -> None:
    models = {f"m{i}": {"module.module.w": ONE, "module.module.b": ONE} for i in range(count)}
    dcp.save(models, checkpoint_id=folder / "all", no_dist=True)
    for rank in range(2):
        torch.save(RANDOM_STATES, folder / f"random_states_{rank}.pkl")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (optimizers_of_one_state, 50),
        (state_dicts, 100),
        (nested_state_dicts, 80),
        (values_that_share_a_list, 50),
        (duplicates, 70),
        (nested_in_dcp, 60),
    ],
)
def test_twice_the_objects_cost_twice_the_calls(
    tmp_path: Path, make: Callable[[Path, int], None], count: int
) -> None:
    folders = [tmp_path / str(times) for times in (1, 2, 4)]
    for folder, times in zip(folders, (1, 2, 4), strict=True):
        folder.mkdir()
        make(folder, count * times)
    check(folders[0])  # imports modules
    first, second, third = (calls(partial(check, folder)) for folder in folders)
    assert third - second < 3 * (second - first), (first, second, third)
