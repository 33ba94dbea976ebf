"""New files of optimizers: torch loads them as those of its own optimizers, every bit of every
state.
"""

from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ckptfix.errors import OperationError
from ckptfix.formats.torch_tensors import TORCH_DTYPES
from ckptfix.tensors.joined import Inline
from ckptfix.tensors.new_optimizers import dcp_optimizer, ddp_optimizer, fsdp_full_optimizer
from ckptfix.tensors.optimizers import OptimizerState, ParamGroup, Strategy
from ckptfix.tensors.stored import StoredTensor
from tests.tensors.dcp_making import load
from tests.tensors.writing import raw, write_states

NOUNS = {getattr(torch, name): noun for name, noun in TORCH_DTYPES.items()}


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model with two param groups after three steps, one parameter without a gradient."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2))
    flat = [one for one in model.parameters() if one.dim() < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in model.parameters() if one.dim() > 1]},
            {"params": flat, "weight_decay": 0.0},
        ],
        lr=torch.tensor(0.01),
        foreach=False,
    )
    for _ in range(3):
        model(torch.randn(5, 4)).sum().backward()
        model[2].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def stored(value: Any) -> Any:
    """Return a value with its tensors as files hold them."""
    if isinstance(value, torch.Tensor):
        return StoredTensor("", NOUNS[value.dtype], tuple(value.shape), Inline(raw(value)))
    return value


def described(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy = Strategy.DDP
) -> OptimizerState:
    names = {id(one): name for name, one in model.named_parameters()}
    return OptimizerState(
        label="optimizer.bin",
        strategy=strategy,
        groups=tuple(
            ParamGroup(
                names=tuple(names[id(one)] for one in group["params"]),
                options={key: stored(value) for key, value in group.items() if key != "params"},
            )
            for group in optimizer.param_groups
        ),
        states={
            names[id(one)]: {key: stored(value) for key, value in state.items()}
            for one, state in optimizer.state.items()
        },
    )


def assert_same(found: Any, expected: Any) -> None:
    """Compare two values, tensors by dtype, shape and bytes."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape, raw(found)) == (
            expected.dtype,
            expected.shape,
            raw(expected),
        )
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def test_ddp_numbers_parameters_through_the_groups(tmp_path: Path) -> None:
    model, optimizer = trained()
    write_states(
        tmp_path, ddp_optimizer(PurePosixPath("optimizer.bin"), described(model, optimizer))
    )
    found = torch.load(tmp_path / "optimizer.bin", weights_only=True)
    assert_same(found, optimizer.state_dict())
    assert sorted(found["state"]) == [0, 1, 2, 3, 4], "the last bias never had a gradient"


def test_fsdp_full_has_fqns(tmp_path: Path) -> None:
    model, optimizer = trained()
    write_states(
        tmp_path, fsdp_full_optimizer(PurePosixPath("optimizer.bin"), described(model, optimizer))
    )
    found = torch.load(tmp_path / "optimizer.bin", weights_only=True)
    expected = get_optimizer_state_dict(model, optimizer)
    assert_same(found["param_groups"], expected["param_groups"])
    assert found["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        assert_same(found["state"][name], state)


def with_all_moments() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained()
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_dcp_is_loaded_into_a_new_optimizer(tmp_path: Path) -> None:
    model, optimizer = with_all_moments()
    write_states(tmp_path, dcp_optimizer(PurePosixPath("optimizer_0"), described(model, optimizer)))
    other, fresh = trained()
    fresh.state.clear()
    fresh.param_groups[1]["weight_decay"] = 0.7
    state = {"optimizer": get_optimizer_state_dict(other, fresh)}
    load(tmp_path / "optimizer_0", state)
    set_optimizer_state_dict(other, fresh, state["optimizer"])
    assert_same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("strategy", [Strategy.ZERO2, Strategy.DDP])
def test_a_step_of_deepspeed_becomes_a_tensor(tmp_path: Path, strategy: Strategy) -> None:
    state = OptimizerState(
        label="x",
        strategy=strategy,
        groups=(ParamGroup(names=("a",), options={"lr": 0.1}),),
        states={"a": {"step": 7}},
    )
    write_states(tmp_path, ddp_optimizer(PurePosixPath("optimizer.bin"), state))
    found = torch.load(tmp_path / "optimizer.bin", weights_only=True)["state"][0]["step"]
    assert_same(found, torch.tensor(7.0) if strategy is Strategy.ZERO2 else 7)


def test_a_parameter_without_a_gradient_starts_from_zero(tmp_path: Path) -> None:
    model, optimizer = trained()
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    state = described(model, optimizer).started(shapes)
    write_states(tmp_path, fsdp_full_optimizer(PurePosixPath("optimizer.bin"), state))
    found = torch.load(tmp_path / "optimizer.bin", weights_only=True)["state"]
    expected = {"step": torch.tensor(0.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    assert_same(found.pop("2.bias"), expected)
    assert found.keys() == get_optimizer_state_dict(model, optimizer)["state"].keys()


def test_zeros_have_the_shape_of_their_own_parameter_and_the_states_of_their_own_group() -> None:
    """The first parameter with states has no dimension and, without amsgrad, no maximum."""
    model = torch.nn.ParameterDict(
        {name: torch.ones(shape) for name, shape in (("scale", ()), ("a", 2), ("b", 3), ("c", 2))}
    )
    groups = [{"params": [model["scale"], model["a"]]}, {"params": [model["b"], model["c"]]}]
    optimizer = torch.optim.AdamW([groups[0], {**groups[1], "amsgrad": True}])
    model["scale"].grad, model["c"].grad = torch.ones(()), torch.ones(2)
    optimizer.step()
    shapes = {name: tuple(one.shape) for name, one in model.items()}
    states = described(model, optimizer).started(shapes).states
    found = {
        name: {
            key: value.shape
            for key, value in states[name].items()
            if isinstance(value, StoredTensor)
        }
        for name in "ab"
    }
    assert found == {
        "a": {"step": (), "exp_avg": (2,), "exp_avg_sq": (2,)},
        "b": {"step": (), "exp_avg": (3,), "exp_avg_sq": (3,), "max_exp_avg_sq": (3,)},
    }


def test_an_optimizer_that_starts_otherwise_is_refused() -> None:
    groups = (ParamGroup(names=("a", "b"), options={}),)
    state = OptimizerState(
        label="x", strategy=Strategy.DDP, groups=groups, states={"a": {"mu_product": 0.9}}
    )
    with pytest.raises(OperationError, match=r"x: 1 parameter without states \('b'\).*mu_product"):
        state.started({"b": (2,)})
