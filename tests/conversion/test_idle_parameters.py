"""Migration of trained parameters that never got a gradient, so that the optimizer has no states
for them: alone in a param group, in all of it, and next to parameters of other shapes.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.tensors.optimizer_opening import open_optimizers
from tests.conversion.state_making import Trained, assert_same, save_state

ZERO = ("zero1", "zero2", "zero3", "universal")
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
}


class Scaled(torch.nn.Module):  # type: ignore[misc]
    """A model whose first parameter has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.first = torch.nn.Linear(6, 4)
        self.second = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run both layers."""
        hidden: torch.Tensor = self.second(self.first(x)) * self.scale
        return hidden


def grouped(model: torch.nn.Module, *apart: Collection[str]) -> list[dict[str, Any]]:
    """Return param groups: all parameters but those of ``apart``, then each of ``apart``."""
    named = dict(model.named_parameters())
    rest = [name for name in named if not any(name in names for names in apart)]
    return [
        {"params": [named[name] for name in names], "weight_decay": number / 10}
        for number, names in enumerate((rest, *apart))
    ]


def stepped(run: Trained, idle: Collection[str]) -> Trained:
    """Take three steps in which the parameters ``idle`` get no gradient."""
    model, optimizer = run
    torch.manual_seed(1)
    for _ in range(3):
        model(torch.randn(5, 6)).square().sum().backward()
        for name, parameter in model.named_parameters():
            if name in idle:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return run


def zeros_for(run: Trained, idle: Collection[str]) -> dict[str, Any]:
    """Return the state dict of an optimizer with zeros and step 0 for the parameters ``idle``."""
    model, optimizer = run
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {parameter: name for name, parameter in model.named_parameters()}
    saved: dict[str, Any] = optimizer.state_dict()
    like = next(iter(saved["state"].values()))
    for number, parameter in enumerate(every):
        if names[parameter] in idle:
            saved["state"][number] = {
                key: torch.zeros(()) if key == "step" else torch.zeros_like(parameter)
                for key in like
            }
    return saved


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "idle", [("scale",), ("second.weight",), ("first.weight", "first.bias")], ids=str
)
@pytest.mark.parametrize("to", [*ZERO, "fsdp", "fsdp-full"])
def test_a_param_group_without_any_states_gets_zeros(
    tmp_path: Path, to: str, idle: tuple[str, ...], kind: str
) -> None:
    def factory() -> Trained:
        model = Scaled()
        return model, OPTIMIZERS[kind](grouped(model, ("second.bias",), idle))

    run = stepped(factory(), idle)
    source = save_state(tmp_path / "source", "ddp", run)
    receipt = ckptfix.migrate(source, tmp_path / "new", to=to, state="all", model=factory)
    assert receipt.verified
    (words,) = [one for one in receipt.warnings if "without moments" in one]
    assert "written with zeros and step 0" in words
    assert all(repr(name) in words for name in idle)
    ckptfix.migrate(tmp_path / "new", tmp_path / "back", to="ddp", state="all", model=factory)
    saved = torch.load(tmp_path / "back" / "optimizer.bin", weights_only=True)
    for states in saved["state"].values():
        if "step" in states:
            states["step"] = torch.as_tensor(states["step"], dtype=torch.float32)
    assert_same(saved, zeros_for(run, idle))
    fresh = factory()[1]
    fresh.load_state_dict(saved)
    fresh.step()


def test_groups_without_states_in_one_optimizer_of_both_kinds(tmp_path: Path) -> None:
    """A group with some states shares its step, and a group without any starts at step 0."""
    idle = ("first.bias", "second.weight", "second.bias")

    def factory() -> Trained:
        model = Scaled()
        apart = ("second.weight", "second.bias")
        return model, torch.optim.AdamW(grouped(model, apart), lr=0.01)

    source = save_state(tmp_path / "source", "ddp", stepped(factory(), idle))
    receipt = ckptfix.migrate(source, tmp_path / "new", to="zero2", state="all", model=factory)
    (state,) = open_optimizers(tmp_path / "new")
    ckptfix.migrate(tmp_path / "new", tmp_path / "back", to="ddp", state="all", model=factory)
    saved = torch.load(tmp_path / "back" / "optimizer.bin", weights_only=True)["state"]
    names = [name for group in state.groups for name in group.names]
    steps = {name: float(saved[number]["step"]) for number, name in enumerate(names)}
    assert steps == {
        "scale": 3.0,
        "first.weight": 3.0,
        "first.bias": 3.0,
        "second.weight": 0.0,
        "second.bias": 0.0,
    }
    first, second = [one for one in receipt.warnings if "without moments" in one]
    assert "('second.weight', 'second.bias'): written with zeros and step 0" in first
    assert "('first.bias'): ZeRO stores the moments of a param group together" in second


@pytest.mark.parametrize("to", ["fsdp", "fsdp-full"])
def test_zeros_have_the_shape_of_their_parameter(tmp_path: Path, to: str) -> None:
    """The first parameter with states has no dimension: zeros of its shape do not load."""
    idle = ("first.weight",)

    def factory() -> Trained:
        model = Scaled()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    run = stepped(factory(), idle)
    source = save_state(tmp_path / "source", "ddp", run)
    ckptfix.migrate(source, tmp_path / "new", to=to, state="all", model=factory)
    ckptfix.migrate(tmp_path / "new", tmp_path / "back", to="ddp", state="all", model=factory)
    saved = torch.load(tmp_path / "back" / "optimizer.bin", weights_only=True)
    assert_same(saved, zeros_for(run, idle))


@pytest.mark.parametrize("to", ["zero1", "zero3", "fsdp-full"])
def test_zeros_are_for_the_states_of_their_own_group(tmp_path: Path, to: str) -> None:
    """AMSGrad in one param group only: a parameter of that group needs its maximum, too."""

    def factory() -> Trained:
        model = Scaled()
        first, second = grouped(model, ("second.weight", "second.bias"))
        return model, torch.optim.AdamW([first, {**second, "amsgrad": True}], lr=0.01)

    run = stepped(factory(), ("second.bias",))
    source = save_state(tmp_path / "source", "ddp", run)
    receipt = ckptfix.migrate(source, tmp_path / "new", to=to, state="all", model=factory)
    assert receipt.verified
    (state,) = open_optimizers(tmp_path / "new")
    held = {name: {*states} for name, states in state.states.items()}
    assert held["second.bias"] == held["second.weight"] > held["first.bias"]
