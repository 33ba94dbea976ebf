"""Param groups without trained parameters: DeepSpeed has none of them, and the loaders of other
strategies look for all groups of the script.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import ckptfix
from ckptfix.errors import OperationError
from ckptfix.tensors.optimizer_opening import open_optimizers
from tests.commanding import Said, said
from tests.conversion.state_making import Trained, assert_same, net

__all__ = ["said"]

ZERO = ("zero1", "zero2", "zero3", "universal")
KINDS = ("first", "last", "named", "empty")


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def frozen_group(kind: str = "first") -> Trained:
    """Return a model with a frozen layer, and its optimizer with that layer in a group of its
    own.
    """
    model = net()
    model[0].requires_grad_(False)
    named = dict(model.named_parameters())
    frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
    trained = [name for name in named if name not in frozen]
    if kind == "empty":
        frozen, trained = [], [name for name in named if not name.startswith("0.")]

    def members(names: list[str]) -> list[Any]:
        return [(name, named[name]) if kind == "named" else named[name] for name in names]

    groups = [
        {"params": members(frozen), "lr": 0.5, "betas": (0.8, 0.95)},
        {"params": members(trained[:3]), "weight_decay": 0.1},
        {"params": members(trained[3:])},
    ]
    if kind == "last":
        groups = groups[1:] + groups[:1]
    return model, torch.optim.AdamW(groups, lr=0.01)


def saved(
    root: Path, made: Trained, schedule: Callable[[Any], LRScheduler] | None = None
) -> Mapping[str, Any]:
    """Save with stock accelerate after three steps; return the optimizer's state dict."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*made)
    scheduler = accelerator.prepare(schedule(made[1])) if schedule is not None else None
    torch.manual_seed(1)
    for _ in range(3):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    accelerator.save_state(str(root))
    state: dict[str, Any] = torch.load(root / "optimizer.bin", weights_only=True)
    return state


def loaded(root: Path, made: Trained) -> Mapping[str, Any]:
    """Load with stock accelerate, take a step, and return the optimizer's state dict as loaded."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*made)
    accelerator.load_state(str(root))
    state: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    return state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("between", ZERO)
def test_a_frozen_group_comes_back_from_deepspeed(tmp_path: Path, between: str, kind: str) -> None:
    expected = saved(tmp_path / "source", frozen_group(kind))
    options: Any = {"state": "all", "model": lambda: frozen_group(kind)}
    ckptfix.migrate(tmp_path / "source", tmp_path / "between", to=between, **options)
    receipt = ckptfix.migrate(tmp_path / "between", tmp_path / "new", to="ddp", **options)
    assert receipt.verified
    number = 2 if kind == "last" else 0
    (words,) = [one for one in receipt.warnings if "without trained parameters" in one]
    assert f"are restored: {number};" in words
    found = loaded(tmp_path / "new", frozen_group(kind))
    assert_same(found["param_groups"], expected["param_groups"])
    assert_same(
        torch.load(tmp_path / "new" / "optimizer.bin", weights_only=True)["param_groups"],
        expected["param_groups"],
    )
    assert found["state"].keys() == expected["state"].keys()
    for place, states in expected["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same(found["state"][place][key], states[key])


@pytest.mark.parametrize("to", ["fsdp", "fsdp-full", "zero2"])
def test_it_comes_back_for_every_strategy_of_torch(tmp_path: Path, to: str) -> None:
    saved(tmp_path / "source", frozen_group())
    options: Any = {"state": "all", "model": frozen_group}
    ckptfix.migrate(tmp_path / "source", tmp_path / "between", to="zero3", **options)
    ckptfix.migrate(tmp_path / "between", tmp_path / "new", to=to, **options)
    ckptfix.migrate(tmp_path / "source", tmp_path / "direct", to=to, **options)
    (state,), (direct,) = map(open_optimizers, (tmp_path / "new", tmp_path / "direct"))
    assert state.groups == direct.groups
    assert len(state.groups) == (2 if to == "zero2" else 3)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
        lambda optimizer: OneCycleLR(optimizer, [0.7, 0.02, 0.02], total_steps=9),
    ],
    ids=["lambda", "one-cycle"],
)
def test_it_gets_the_learning_rate_of_the_scheduler(
    tmp_path: Path, schedule: Callable[[Any], LRScheduler]
) -> None:
    """OneCycleLR reads the hyperparameters that it added to the groups, also of a frozen one."""
    expected = saved(tmp_path / "source", frozen_group(), schedule)
    options: Any = {"state": "all", "model": frozen_group, "processes": 1}
    there = ckptfix.migrate(tmp_path / "source", tmp_path / "between", to="zero2", **options)
    (words,) = [one for one in there.warnings if "are left out: 0" in one]
    assert "the saved one has learning rates for 3 param groups" in words
    receipt = ckptfix.migrate(tmp_path / "between", tmp_path / "new", to="ddp", **options)
    group = torch.load(tmp_path / "new" / "optimizer.bin", weights_only=True)["param_groups"][0]
    original = expected["param_groups"][0]
    assert group.keys() == original.keys()
    assert (group["lr"], group["params"]) == (original["lr"], original["params"])
    (words,) = [one for one in receipt.warnings if "without trained parameters" in one]
    if "max_lr" in original:
        assert "'max_lr'" in words
    else:
        assert_same(group, original)
        assert "taken from" not in words


def test_the_hyperparameters_come_out_of_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    expected = saved(tmp_path / "source", frozen_group())
    factory = "tests.conversion.test_frozen_groups:frozen_group"
    monkeypatch.chdir(Path(__file__).parents[2])
    before = tmp_path / "source"
    for to in ("zero1", "ddp"):
        options = ("--to", to, "--state", "all", "--model", factory)
        status, _, err = said("migrate", before, tmp_path / to, *options)
        assert status < 2, err
        before = tmp_path / to
    found = torch.load(before / "optimizer.bin", weights_only=True)
    assert_same(found["param_groups"], expected["param_groups"])


def test_what_the_command_says_is_frozen_comes_back_too(tmp_path: Path) -> None:
    """A script can freeze a layer after it made the optimizer."""

    def factory() -> Trained:
        model, optimizer = frozen_group()
        return model.requires_grad_(True), optimizer

    expected = saved(tmp_path / "source", frozen_group())
    options: Any = {"state": "all", "model": factory, "frozen": r"^0\."}
    ckptfix.migrate(tmp_path / "source", tmp_path / "between", to="zero2", **options)
    ckptfix.migrate(tmp_path / "between", tmp_path / "new", to="ddp", **options)
    found = loaded(tmp_path / "new", frozen_group())
    assert_same(found["param_groups"], expected["param_groups"])


def test_groups_that_differ_otherwise_are_refused(tmp_path: Path) -> None:
    def factory() -> Trained:
        model, optimizer = frozen_group()
        first, second = optimizer.param_groups[1:]
        first["params"], second["params"] = second["params"], first["params"]
        return model, optimizer

    saved(tmp_path / "source", frozen_group())
    ckptfix.migrate(
        tmp_path / "source", tmp_path / "between", to="zero2", state="all", model=frozen_group
    )
    with pytest.raises(OperationError, match=r"the parameters of its 2 param groups differ"):
        ckptfix.migrate(
            tmp_path / "between", tmp_path / "new", to="ddp", state="all", model=factory
        )
