"""Two models of equal shapes, each with its optimizer and its schedule, as of an ensemble: rates show
an optimizer of another save.
"""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from ckptfix import check
from tests.diagnosis.stale_runs import Script, adam, net

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIMIZERS = ("optimizer.bin", "optimizer_1.bin")


def with_equal_models(
    output: Path, trained: Callable[[int], tuple[int, ...]] = lambda number: (0, 1)
) -> Path:
    """Save six times. ``trained``: which of the two make steps before the save of this number."""
    schedule = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100)
    script = Script(net(), net(), make=partial(adam, lr=1e-2), schedule=schedule, trained=trained)
    return script.save(output, *range(6))


def mixed(output: Path) -> dict[str, list[str]]:
    """Return the findings about files of two saves, by checkpoint."""
    found = {
        folder.name: [
            str(finding)
            for finding in check(folder, siblings=output.iterdir()).all_findings
            if finding.code == "mixed-saves"
        ]
        for folder in sorted(output.iterdir())
    }
    return {name: findings for name, findings in found.items() if findings}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("source", "target"), [(4, 5), (1, 2), (3, 2)])
def test_rates_that_no_scheduler_gave_are_found_where_both_schedules_are_equal(
    source: int, target: int, name: str, tmp_path: Path
) -> None:
    """The step of a direct neighbour may be that of an optimizer that waits, with its schedule."""
    output = with_equal_models(tmp_path)
    shutil.copy(output / f"checkpoint_{source}" / name, output / f"checkpoint_{target}")
    found = mixed(output)
    assert found.keys() == {f"checkpoint_{target}"}
    (words,) = found[f"checkpoint_{target}"]
    assert words.startswith(f"{name}: learning rate 0.00")
    assert f", as in {name.replace('optimizer', 'scheduler')})" in words


@pytest.mark.parametrize(
    ("waits", "crossed"), [({5}, False), ({3}, False), ({3, 4, 5}, False), ({3}, True)]
)
def test_an_optimizer_that_waits_with_its_schedule_is_clean(
    waits: set[int], crossed: bool, tmp_path: Path
) -> None:
    """A script may prepare its schedulers in another order than its optimizers."""
    output = with_equal_models(tmp_path, lambda number: (1,) if number in waits else (0, 1))
    for folder in output.iterdir() if crossed else ():
        states = [torch.load(folder / f"scheduler{end}.bin") for end in ("_1", "")]
        for state, end in zip(states, ("", "_1"), strict=True):
            torch.save(state, folder / f"scheduler{end}.bin")
    assert mixed(output) == {}


def test_two_schedulers_of_one_optimizer_are_clean(tmp_path: Path) -> None:
    """No scheduler gave the rate of the second optimizer, which stays."""
    output = with_equal_models(tmp_path)
    for number in range(6):
        folder = output / f"checkpoint_{number}"
        state = torch.load(folder / OPTIMIZERS[1])
        (group,) = state["param_groups"]
        rate = torch.load(folder / "scheduler.bin")["_last_lr"][0]
        group["lr"] = rate if number < 5 else 1e-2
        del group["initial_lr"]
        torch.save(state, folder / OPTIMIZERS[1])
    assert mixed(output) == {}
