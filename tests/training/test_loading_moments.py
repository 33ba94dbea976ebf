"""Moments go to the parameters of their names, whatever the order in which a run gives them."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import ckptfix
from ckptfix.storage.paths import MANIFEST
from ckptfix.training.loading.load_report import LoadError, LoadPolicy
from ckptfix.training.loading.load_state import load_state_tolerant
from tests.training.loading_runs import reset

PARTIAL = LoadPolicy(models="partial")  # type: ignore[arg-type]
STEPS = 3


class Layers(nn.Module):  # type: ignore[misc]
    """Layers of these names and widths in this order, one behind the other."""

    def __init__(self, names: str, *, head: int = 0, width: int = 3) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(width, width))
        if head:
            self.head = nn.Linear(width, head)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.children():
            x = layer(x)
        return x


Groups = Callable[[nn.Module], list[dict[str, Any]]]


def in_groups(*names: str, named: bool = False) -> Groups:
    """Return groups of the layers with these letters, each with a rate of its own."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        rates = {"a": 0.1, "b": 0.2, "c": 0.3, "h": 0.4}
        made = []
        for letters in names:
            layers = [layer for name, layer in model.named_children() if name[0] in letters]
            # As a script writes it: the names of a part begin anew in each group.
            given = [
                pair if named else pair[1] for layer in layers for pair in layer.named_parameters()
            ]
            made.append({"params": given, "lr": rates[letters[0]]})
        return made

    return groups


def run_of(*pairs: tuple[nn.Module, Any], schedule: bool = False) -> Any:
    """Return a guarded accelerator with these models and optimizers."""
    reset()
    accelerator = ckptfix.Accelerator(cpu=True)
    models, optimizers = zip(*pairs, strict=True)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 5) for one in optimizers if schedule]
    accelerator.prepare(*models, *optimizers, *schedulers)
    return accelerator


def trained(accelerator: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Train and save; return the first moments by the number of the model and the name."""
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = sum(model(torch.randn(4, 3)).square().sum() for model in accelerator._models)
        accelerator.backward(loss)
        for optimizer in accelerator._optimizers:
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(str(folder))
    return moments(accelerator)


def moments(accelerator: Any) -> dict[str, torch.Tensor]:
    state = {
        id(parameter): values["exp_avg"].clone()
        for optimizer in accelerator._optimizers
        for parameter, values in optimizer.optimizer.state.items()
    }
    return {
        f"{number}.{name}": state[id(parameter)]
        for number, model in enumerate(accelerator._models)
        for name, parameter in model.named_parameters()
        if id(parameter) in state
    }


def assert_by_name(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def loaded(accelerator: Any, folder: Path, policy: LoadPolicy = PARTIAL) -> str:
    """Load, and return the report in words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return str(load_state_tolerant(accelerator, folder, policy=policy))


def adam(model: nn.Module, parameters: Sequence[Any] = ()) -> Any:
    return torch.optim.AdamW(list(parameters) or list(model.parameters()), lr=0.1)


def saved(folder: Path, *pairs: tuple[nn.Module, Any], **run: Any) -> dict[str, torch.Tensor]:
    """Train and save these models; return their first moments."""
    return trained(run_of(*pairs, **run), folder)


def of_adam(layers: str, **model: Any) -> tuple[nn.Module, Any]:
    """Return a model and its optimizer."""
    made = Layers(layers, **model)
    return made, adam(made)


def of_groups(groups: Groups, *, is_turned: bool = False, head: int = 0) -> tuple[nn.Module, Any]:
    made = Layers("ab", head=head)
    return made, AdamW(groups(made)[::-1] if is_turned else groups(made))


def test_a_partial_load_orders_moments_once(tmp_path: Path) -> None:
    """They were ordered by name in the load, and once more by the run state."""
    wanted = saved(tmp_path / "c", of_adam("abc", head=2))
    accelerator = run_of(of_adam("cab", head=5))
    assert "matched by name" in loaded(accelerator, tmp_path / "c")
    found = moments(accelerator)
    assert len(found) == 6
    assert_by_name(found, wanted)


def test_an_optimizer_that_fails_leaves_the_order_of_the_others(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "c", of_adam("abc"), of_adam("a"))
    other = Layers("a")
    accelerator = run_of(of_adam("cab"), (other, torch.optim.SGD(other.parameters())))
    policy = LoadPolicy(optimizers="warn")  # type: ignore[arg-type]
    assert "optimizers 1 (SGD) failed" in loaded(accelerator, tmp_path / "c", policy)
    assert_by_name(moments(accelerator), wanted)


def test_optimizers_that_move_are_ordered_too(tmp_path: Path) -> None:
    before = saved(tmp_path / "c", of_adam("abc"), of_adam("a", head=4))
    wanted = {f"{1 - int(name[0])}{name[1:]}": value for name, value in before.items()}
    second = Layers("abc")
    turned = adam(second, list(second.parameters())[::-1])
    accelerator = run_of(of_adam("a", head=4), (second, turned))
    load_state_tolerant(accelerator, tmp_path / "c")
    found = moments(accelerator)
    assert len(found) == len(wanted)
    assert_by_name(found, wanted)


def test_a_full_load_orders_parameters_of_several_shapes(tmp_path: Path) -> None:
    """The guarded load_state did; the tolerant one refused, by the shapes and by the manifest."""
    wanted = saved(tmp_path / "c", of_adam("ab", head=2))
    new = Layers("ab", head=2)
    accelerator = run_of((new, adam(new, list(new.parameters())[::-1])))
    report = load_state_tolerant(accelerator, tmp_path / "c")
    assert report.is_complete
    assert report.inexact == ()
    assert_by_name(moments(accelerator), wanted)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("head", [0, 5])
def test_groups_in_another_order_are_refused(tmp_path: Path, named: bool, head: int) -> None:
    """Moments, rates and schedules went to other parameters, and the report called them restored."""
    groups = in_groups("ab", "h", named=named) if head else in_groups("a", "b", named=named)
    saved(tmp_path / "c", of_groups(groups, head=2 if head else 0))
    model, optimizer = of_groups(groups, is_turned=True, head=head)
    before = [group["lr"] for group in optimizer.param_groups]
    accelerator = run_of((model, optimizer))
    said = r"param group \d of the checkpoint; next: give the optimizer"
    with pytest.raises(LoadError, match=said):
        load_state_tolerant(accelerator, tmp_path / "c", policy=PARTIAL if head else None)
    assert moments(accelerator) == {}
    assert [group["lr"] for group in optimizer.param_groups] == before


def test_a_guarded_load_tells_that_groups_are_in_another_order(tmp_path: Path) -> None:
    groups = in_groups("a", "b")
    saved(tmp_path / "c", of_groups(groups))
    accelerator = run_of(of_groups(groups, is_turned=True))
    with pytest.warns(UserWarning, match="not bit-exact: optimizer 0: its parameters have changed"):
        accelerator.load_state(str(tmp_path / "c"))


def rename(folder: Path, change: Callable[[str], str]) -> None:
    """Change the names of parameters that a guarded save recorded."""
    state = torch.load(folder / "run_state_0.pt")
    state["parameters"] = [
        [[change(name) for name in group] for group in groups] for groups in state["parameters"]
    ]
    torch.save(state, folder / "run_state_0.pt")


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_guarded_load_orders_moments_by_name(tmp_path: Path, wrapper: str) -> None:
    """A run on several processes saves the names of its wrapper. Names that the file kept stayed
    in its order.
    """
    old = Layers("ab")
    named = [*old.named_parameters()]
    wanted = saved(tmp_path / "c", (old, adam(old, named)))
    rename(tmp_path / "c", lambda name: f"0.{wrapper}{name[2:]}")
    new = Layers("ab")
    optimizer = adam(new, [*new.named_parameters()][::-1])
    accelerator = run_of((new, optimizer))
    accelerator.load_state(str(tmp_path / "c"))
    found = moments(accelerator)
    assert found.keys() == wanted.keys()
    assert_by_name(found, wanted)
    names = optimizer.param_groups[0].get("param_names")
    assert names in (None, [name for name, _ in named][::-1])


def test_a_guarded_load_tells_that_names_and_order_have_changed(tmp_path: Path) -> None:
    """Weights of a renamed layer come from a hook of the script; the moments went by number."""
    saved(tmp_path / "c", of_adam("abc"))
    rename(tmp_path / "c", lambda name: name.replace("0.c.", "0.d."))
    new = Layers("abc")
    parameters = [*new.parameters()]
    accelerator = run_of((new, adam(new, [*parameters[2:4], *parameters[:2], *parameters[4:]])))
    with pytest.warns(UserWarning, match="optimizer 0: its parameters have changed"):
        accelerator.load_state(str(tmp_path / "c"))


def test_rates_of_a_group_that_was_divided_stay_as_in_this_run(tmp_path: Path) -> None:
    """The rate of the one old group replaced those of the script, and nothing said so."""
    saved(tmp_path / "c", of_adam("ab", head=2))
    model, optimizer = of_groups(in_groups("a", "b", "h"), head=5)
    before = [group["lr"] for group in optimizer.param_groups]
    accelerator = run_of((model, optimizer))
    said = loaded(accelerator, tmp_path / "c")
    assert "options of param groups 0 and 1 stay as in this run" in said
    assert [group["lr"] for group in optimizer.param_groups] == before
    assert len(moments(accelerator)) == 4


def test_a_new_group_leaves_the_rate_of_the_old_one(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "c", of_groups(in_groups("abh"), head=2))
    new = Layers("ab", head=5)
    optimizer = AdamW(in_groups("h", "b", "a")(new)[:1] + in_groups("ba")(new))
    accelerator = run_of((new, optimizer))
    assert "matched by name" in loaded(accelerator, tmp_path / "c")
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 0.1]
    assert_by_name(moments(accelerator), wanted)


def test_a_scheduler_of_other_groups_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "c", of_adam("ab", head=2), schedule=True)
    accelerator = run_of(of_groups(in_groups("ab", "h"), head=5), schedule=True)
    with pytest.raises(LoadError, match="it has rates for 1 param group, this run's optimizer 2"):
        load_state_tolerant(accelerator, tmp_path / "c", policy=PARTIAL)


def trainable(letters: str, *, named: bool = True) -> tuple[nn.Module, Any]:
    """Return a model and an optimizer of the layers with these letters; the script froze the
    others.
    """
    model = Layers("abc")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name[0] in letters
    pairs = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    return model, AdamW(pairs if named else [parameter for _, parameter in pairs], lr=0.1)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("abc", "ac", "moments of 4 of 4 parameters loaded, matched by name; moments of 2 saved"),
        ("ab", "abc", "moments of 4 of 6 parameters loaded, matched by name; start empty"),
        ("ab", "bc", "moments of 2 of 4 parameters loaded, matched by name; start empty"),
    ],
)
@pytest.mark.parametrize("named", [True, False], ids=["named", "guarded"])
def test_moments_of_other_trained_parameters_go_by_name(
    tmp_path: Path, before: str, now: str, said: str, named: bool
) -> None:
    """The number of parameters alone refused them, and the advice lost every moment."""
    wanted = saved(tmp_path / "c", trainable(before, named=named))
    if named:
        (tmp_path / "c" / "run_state_0.pt").unlink()
    accelerator = run_of(trainable(now, named=named))
    with pytest.raises(LoadError, match=r"next: pass policy=LoadPolicy\(models=\"partial\"\)"):
        load_state_tolerant(accelerator, tmp_path / "c")
    assert moments(accelerator) == {}
    assert said in loaded(accelerator, tmp_path / "c")
    found = moments(accelerator)
    assert {name[2] for name in found} == set(before) & set(now)
    assert_by_name(found, wanted)
    trained(accelerator, tmp_path / "d")


def test_other_trained_parameters_without_names_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "c", trainable("abc", named=False))
    (tmp_path / "c" / "run_state_0.pt").unlink()
    accelerator = run_of(trainable("ac", named=False))
    with pytest.raises(LoadError, match=r"next: pass policy=LoadPolicy\(optimizers=\"warn\"\)"):
        load_state_tolerant(accelerator, tmp_path / "c", policy=PARTIAL)


@pytest.mark.parametrize("layers", [("abc",), ("a", "c")], ids=["1 group", "2 groups"])
def test_moments_of_another_class_are_not_carried(tmp_path: Path, layers: tuple[str, ...]) -> None:
    saved(tmp_path / "c", trainable("abc"))
    (tmp_path / "c" / MANIFEST).unlink()
    new = Layers("abc")
    accelerator = run_of((new, torch.optim.SGD(in_groups(*layers, named=True)(new))))
    said = r"it lacks dampening.*|2 in this run; next: pass .*optimizers=\"warn\""
    with pytest.raises(LoadError, match=said):
        load_state_tolerant(accelerator, tmp_path / "c", policy=PARTIAL)
    assert not accelerator._optimizers[0].optimizer.state


def test_a_file_that_fits_another_optimizer_stays_there(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "c", of_adam("ab"), trainable("abc"))
    accelerator = run_of(of_adam("ab"), trainable("bc"))
    said = loaded(accelerator, tmp_path / "c")
    assert "optimizers 0 (AdamW) restored from optimizer.bin" in said
    assert "optimizers 1 (AdamW) adapted from optimizer_1.bin" in said
    assert_by_name(moments(accelerator), wanted)
