"""Schedulers next to optimizers of other saves: the library's step decides, and every healthy twin
stays silent.
"""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from transformers import SchedulerType, get_scheduler

from ckptfix import check
from tests.sampling import sampled

Make = Callable[[Any], Any]


def half(epoch: int) -> float:
    return 0.5**epoch


SCHEDULES: dict[str, Make] = {
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=half),
    "MultiplicativeLR": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda epoch: 0.9),
    "StepLR": partial(lr_scheduler.StepLR, step_size=2),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 4]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=20),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=20),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=5),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1),
    "CyclicLR of a function": partial(
        lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, scale_fn=half, cycle_momentum=False
    ),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=50),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SWALR": partial(SWALR, swa_lr=0.05),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, total_iters=2),
            lr_scheduler.CosineAnnealingLR(optimizer, 20),
        ],
        [2],
    ),
    "SequentialLR at a LambdaLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.LambdaLR(optimizer, half)],
        [2],
    ),
    "SequentialLR before a CyclicLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, total_iters=6),
            lr_scheduler.CyclicLR(optimizer, 0.01, 0.1),
        ],
        [6],
    ),
    "SequentialLR after a LambdaLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LambdaLR(optimizer, half), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
        [2],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "ChainedScheduler with a LambdaLR": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.LambdaLR(optimizer, half)]
    ),
}
_OPTIONS = {
    "warmup_stable_decay": {"num_decay_steps": 5},
    "cosine_with_min_lr": {"min_lr": 0.001},
    "cosine_warmup_with_min_lr": {"min_lr": 0.001},
}
SCHEDULES |= {
    f"{kind.value} of transformers": partial(
        get_scheduler,
        kind,
        num_warmup_steps=2,
        num_training_steps=40,
        scheduler_specific_kwargs=_OPTIONS.get(kind.value),
    )
    for kind in SchedulerType
    # prepare() of accelerate does not know this class, which has no base rates: save_state leaves
    # it out.
    if kind.value != "greedy"
}


class Run:
    """A run of accelerate with a scheduler for each optimizer, each of which has ``groups`` param
    groups.
    """

    def __init__(self, groups: int, *makes: Make) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True)
        self.model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        self.optimizers = [
            torch.optim.SGD(
                [
                    {"params": list(layers.parameters()), "lr": 0.1 * number}
                    for number, layers in enumerate([self.model[:2], self.model[2:]][-groups:], 1)
                ],
                momentum=0.9,
            )
            for _ in makes
        ]
        self.schedulers = [make(one) for make, one in zip(makes, self.optimizers, strict=True)]
        self.accelerator.prepare(self.model, *self.optimizers, *self.schedulers)

    def step(self, times: int) -> None:
        """Make steps with gradients."""
        for _ in range(times):
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                scheduler.step(
                    *([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])
                )

    def save(self, root: Path) -> Path:
        """Save with stock accelerate."""
        self.accelerator.save_state(str(root))
        return root

    def goes_on(self, root: Path) -> bool:
        """Return whether the run loads a checkpoint with stock accelerate, and makes its next
        steps.
        """
        try:
            self.accelerator.load_state(str(root))
            self.step(5)
        except (ValueError, IndexError):
            return False
        return True


def told(root: Path) -> list[str]:
    report = check(root)
    findings = [one for one in report.all_findings if one.code == "inconsistent-groups"]
    assert not findings or report.status == 1
    return list(map(str, findings))


@pytest.mark.parametrize("name", sampled(list(SCHEDULES)))
@pytest.mark.parametrize("counts", [(1, 2), (2, 1)])
def test_base_rates_are_told_exactly_where_the_next_steps_fail(
    name: str, counts: tuple[int, int], tmp_path: Path
) -> None:
    make = SCHEDULES[name]
    folders = []
    for groups in counts:
        run = Run(groups, make)
        run.step(3)
        folders.append(run.save(tmp_path / f"of {groups}"))
        assert check(folders[-1]).findings == ()
        assert Run(groups, make).goes_on(folders[-1])
    of_scheduler, of_optimizer = folders
    shutil.copy(of_scheduler / "scheduler.bin", of_optimizer)
    goes_on = Run(counts[1], make).goes_on(of_optimizer)
    rates = "1 base learning rate" if counts[0] == 1 else "2 base learning rates"
    sentence = (
        f"scheduler.bin: {rates} (expected {counts[1]}, one for each param group of optimizer.bin)"
    )
    # Its file looks like that of LambdaLR, and nothing else says that its next step goes on.
    assert told(of_optimizer) == ([] if goes_on and name != "MultiplicativeLR" else [sentence])


@pytest.mark.parametrize("name", ["LambdaLR", "MultiplicativeLR", "CyclicLR"])
def test_a_group_that_was_added_after_such_a_schedule_is_told(name: str, tmp_path: Path) -> None:
    run = Run(1, SCHEDULES[name])
    run.step(1)
    run.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "lr": 0.3})
    assert len(told(run.save(tmp_path / "checkpoint"))) == 1
    with pytest.raises(ValueError, match="zip"):
        run.step(1)


def test_a_group_that_was_added_after_another_schedule_is_not_told(tmp_path: Path) -> None:
    run = Run(1, SCHEDULES["StepLR"])
    run.step(1)
    run.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "lr": 0.3})
    assert told(run.save(tmp_path / "checkpoint")) == []
    run.step(1)
    assert told(run.save(tmp_path / "later")) == []


def test_a_multiplicative_schedule_goes_on_with_the_base_rates_of_another_run(
    tmp_path: Path,
) -> None:
    loaded = Run(2, SCHEDULES["MultiplicativeLR"])
    first = Run(1, SCHEDULES["MultiplicativeLR"])
    loaded.schedulers[0].load_state_dict(first.schedulers[0].state_dict())
    roots = []
    for number in (1, 2):
        loaded.step(1)
        roots.append(loaded.save(tmp_path / "run" / f"checkpoint_{number}"))
    assert [check(root).status for root in roots] == [0, 0]


_IN_A_SEQUENCE = "SequentialLR at a LambdaLR"


def wrong_states(root: Path) -> list[tuple[str, str]]:
    return [
        (finding.severity.value, str(finding))
        for finding in check(root).findings
        if finding.code == "wrong-state"
    ]


def test_an_empty_state_is_told_by_the_checkpoint_next_to_it(tmp_path: Path) -> None:
    run = Run(1, SCHEDULES["StepLR"])
    run.step(1)
    root = run.save(tmp_path / "runs" / "checkpoint_0")
    torch.save({}, root / "scheduler.bin")
    assert check(root).findings == ()
    assert "whether scheduler.bin lost its state: it is an empty dict" in check(root).not_checked
    run.step(1)
    later = run.save(tmp_path / "runs" / "checkpoint_1")
    ((severity, sentence),) = wrong_states(root)
    assert severity == "warning"
    assert sentence.startswith("scheduler.bin: it holds an empty dict (expected ")
    assert wrong_states(later) == []
    # A class of a script without a state saves none each time.
    torch.save({}, later / "scheduler.bin")
    assert wrong_states(root) == wrong_states(later) == []


@pytest.mark.parametrize(
    "name", ["LambdaLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau", "OneCycleLR"]
)
def test_a_schedule_of_another_class_between_two_checkpoints_is_told(
    name: str, tmp_path: Path
) -> None:
    """Its rate may be that of its optimizer, and load_state fails or goes on with another
    schedule.
    """
    run, another = Run(1, SCHEDULES[name]), Run(1, partial(lr_scheduler.StepLR, step_size=1000))
    another.step(1)
    source = another.save(tmp_path / "another")
    roots = []
    for number in range(1, 4):
        run.step(1)
        roots.append(run.save(tmp_path / "runs" / f"checkpoint_{number}"))
    assert [wrong_states(root) for root in roots] == [[], [], []]
    shutil.copy(source / "scheduler.bin", roots[1])
    ((severity, sentence),) = wrong_states(roots[1])
    assert severity == "warning"
    assert sentence.startswith("scheduler.bin: it holds a schedule with ")
    assert sentence.endswith(", as in 2 neighbouring checkpoints)")
    assert [wrong_states(root) for root in (roots[0], roots[2])] == [[], []]
    # A script that changed its schedule since the second checkpoint.
    shutil.copy(source / "scheduler.bin", roots[2])
    assert wrong_states(roots[1]) == []
    shutil.copy(roots[0] / "scheduler.bin", roots[1])
    assert [severity for severity, _ in wrong_states(roots[2])] == ["note"]


def test_of_several_optimizers_none_may_fit(tmp_path: Path) -> None:
    makes = [SCHEDULES["LambdaLR"]] * 2
    root, of_two = (Run(groups, *makes).save(tmp_path / f"of {groups}") for groups in (1, 2))
    shutil.copy(of_two / "optimizer_1.bin", root)
    shutil.copy(of_two / "scheduler.bin", root)
    assert told(root) == []
    shutil.copy(of_two / "optimizer.bin", root)
    assert told(root) == [
        "scheduler_1.bin: 1 base learning rate (expected 2, one for each param group of "
        "optimizer_1.bin)"
    ]
    shutil.copy(root / "scheduler.bin", root / "scheduler_2.bin")
    assert told(root) == []


def test_base_rates_that_are_gone_are_told(tmp_path: Path) -> None:
    run = Run(1, SCHEDULES["CosineAnnealingWarmRestarts"])
    run.step(1)
    root = run.save(tmp_path / "checkpoint")
    state = torch.load(root / "scheduler.bin", weights_only=True)
    torch.save({**state, "base_lrs": []}, root / "scheduler.bin")
    assert not Run(1, SCHEDULES["CosineAnnealingWarmRestarts"]).goes_on(root)
    assert len(told(root)) == 1


@pytest.mark.parametrize("rates", [None, ["0.1"], [None], [float("nan")], [float("inf")]])
@pytest.mark.parametrize("name", ["LambdaLR", _IN_A_SEQUENCE])
def test_base_rates_that_are_no_numbers_are_errors(name: str, rates: Any, tmp_path: Path) -> None:
    run = Run(1, SCHEDULES[name])
    run.step(3)
    root = run.save(tmp_path / "checkpoint")
    state = torch.load(root / "scheduler.bin", weights_only=True)
    part = state["_schedulers"][1] if name == _IN_A_SEQUENCE else state
    part["base_lrs"] = rates
    torch.save(state, root / "scheduler.bin")
    report = check(root)
    assert report.status == 1
    (finding,) = report.all_findings
    assert (finding.code, finding.severity.value) == ("inconsistent-groups", "error")
    assert "'base_lrs' has no usable learning rate" in str(finding)
