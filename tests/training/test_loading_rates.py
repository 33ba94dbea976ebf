"""Learning rates and options of param groups after a load where an optimizer or a scheduler of the
script is not the one that was saved.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, StepLR

from ckptfix.training.loading.load_report import LoadPolicy, LoadReport
from ckptfix.training.loading.load_state import load_state_tolerant
from tests.training.loading_runs import reset

Schedule = Callable[[Any], Any]


def steps(optimizer: Any) -> Any:
    return StepLR(optimizer, 2)


def linear(optimizer: Any) -> Any:
    return LinearLR(optimizer, 0.1, total_iters=8)


def one_cycle(optimizer: Any) -> Any:
    return OneCycleLR(optimizer, 1e-2, total_steps=40)


def run_of(kind: type, *schedules: Schedule, is_custom: bool = False) -> Any:
    """Return an accelerator with a model, its optimizer and schedulers."""
    reset()
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 3)
    optimizer = kind(model.parameters(), lr=1e-2)
    schedulers = [schedule(optimizer) for schedule in schedules]
    accelerator.prepare(model, optimizer, *(() if is_custom else schedulers))
    accelerator.register_for_checkpointing(*(schedulers if is_custom else ()))
    return accelerator


def train(accelerator: Any, count: int = 5) -> None:
    for _ in range(count):
        accelerator.backward(accelerator._models[0](torch.ones(4, 3)).square().mean())
        for optimizer in accelerator._optimizers:
            optimizer.step()
        for scheduler in (*accelerator._schedulers, *accelerator._custom_objects):
            scheduler.step()


def saved(folder: Path, kind: type, *schedules: Schedule, is_custom: bool = False) -> Path:
    accelerator = run_of(kind, *schedules, is_custom=is_custom)
    train(accelerator)
    accelerator.save_state(str(folder))
    return folder


def load(accelerator: Any, folder: Path, **policy: str) -> tuple[LoadReport, list[str]]:
    """Load, and return the report with the warnings about rates."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = load_state_tolerant(accelerator, folder, policy=LoadPolicy(**policy))  # type: ignore[arg-type]
    return report, [
        text for text in (str(each.message) for each in caught) if "learning rates" in text
    ]


def rate(accelerator: Any) -> float:
    return float(accelerator._optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("word", ["warn", "ignore"])
@pytest.mark.parametrize(
    ("schedule", "last"), [(steps, "0.0001"), (linear, "0.006625")], ids=["StepLR", "LinearLR"]
)
def test_a_scheduler_without_its_optimizer_says_that_the_rates_differ(
    tmp_path: Path, schedule: Schedule, last: str, word: str
) -> None:
    folder = saved(tmp_path / "c", AdamW, schedule)
    accelerator = run_of(SGD, schedule)
    own = rate(accelerator)
    report, (told,) = load(accelerator, folder, optimizers=word)
    (line,) = report.of("schedulers")
    assert (line.status.value, rate(accelerator)) == ("restored", own)
    assert (
        f"optimizers 0 (SGD) keeps the learning rates of this run: param group 0 has lr {own:g} "
        f"({last} in the saved schedule); next: set "
    ) in line.reason
    assert told == f"{folder}: {line}"


def test_a_scheduler_that_is_registered_for_checkpointing_is_compared_too(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", AdamW, steps, is_custom=True)
    report, told = load(run_of(SGD, steps, is_custom=True), folder, optimizers="warn")
    (line,) = report.of("custom")
    assert "param group 0 has lr 0.01 (0.0001 in the saved schedule)" in line.reason
    assert told == [f"{folder}: {line}"]


@pytest.mark.parametrize("word", ["warn", "ignore"])
@pytest.mark.parametrize(
    ("before", "now"), [((one_cycle,), steps), ((steps,), one_cycle), ((), linear)],
    ids=["to StepLR", "to OneCycleLR", "to the first scheduler"],
)  # fmt: skip
def test_an_optimizer_without_its_scheduler_says_whose_rate_it_has(
    tmp_path: Path, before: tuple[Schedule, ...], now: Schedule, word: str
) -> None:
    folder = saved(tmp_path / "c", AdamW, *before)
    accelerator = run_of(AdamW, now)
    own = rate(accelerator)
    report, (told,) = load(accelerator, folder, schedulers=word)
    (line,) = report.of("optimizers")
    assert rate(accelerator) != own
    (name,) = (each.name for each in report.of("schedulers") if each.index is not None)
    assert (
        f"{name} was not loaded, so the learning rates are those of the checkpoint: param group 0 "
        f"has lr {rate(accelerator):g} ({own:g} before the load)"
    ) in line.reason
    assert told == f"{folder}: {line}"


def test_rates_that_the_checkpoint_itself_has_are_no_news(tmp_path: Path) -> None:
    """The last rate of the first of two chained schedulers never is that of the group."""
    folder = saved(tmp_path / "c", AdamW, linear, steps)
    accelerator = run_of(AdamW, linear, steps)
    report, told = load(accelerator, folder)
    assert told == []
    assert "rate" not in str(report.of("schedulers") + report.of("optimizers"))


def test_options_that_the_checkpoint_lacks_stay_as_in_the_script(tmp_path: Path) -> None:
    """OneCycleLR raised KeyError for max_lr at its first step."""
    folder = saved(tmp_path / "c", AdamW, steps)
    accelerator = run_of(AdamW, one_cycle)
    load(accelerator, folder, schedulers="warn")
    (group,) = accelerator._optimizers[0].param_groups
    assert (group["max_lr"], group["lr"]) == (1e-2, 1e-4)
    train(accelerator)
