"""Optimizers that torch loads or steps with an error: torch decides, and every healthy twin stays
silent.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from ckptfix import check
from ckptfix.diagnosis.findings.base import Severity
from tests.diagnosis.test_optimizer_states import found, rewrite, save, step, trained
from tests.sampling import sampled

Make = Callable[[Any], Any]


def net() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))


def several(optimizer: Any, **options: Any) -> Make:
    """Return a maker of this optimizer with two param groups, the second with another learning
    rate.
    """

    def make(model: Any) -> Any:
        parameters = list(model.parameters())
        groups = [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.05}]
        return optimizer(groups, **{"lr": 0.01, **options})

    return make


MAKERS: dict[str, Make] = {
    "adam": several(torch.optim.Adam),
    "adamw": several(torch.optim.AdamW),
    "amsgrad": several(torch.optim.AdamW, amsgrad=True),
    "foreach": several(torch.optim.AdamW, foreach=True),
    "nadam": several(torch.optim.NAdam),
    "radam": several(torch.optim.RAdam),
    "adamax": several(torch.optim.Adamax),
    "sgd": several(torch.optim.SGD),
    "momentum": several(torch.optim.SGD, momentum=0.9),
    "rmsprop": several(torch.optim.RMSprop),
    "centered": several(torch.optim.RMSprop, centered=True, momentum=0.5),
    "adagrad": several(torch.optim.Adagrad),
    "adadelta": several(torch.optim.Adadelta),
    "asgd": several(torch.optim.ASGD),
    "rprop": several(torch.optim.Rprop),
}
if hasattr(torch.optim, "Adafactor"):
    MAKERS["adafactor"] = several(torch.optim.Adafactor)


def fails(make: Make, state: dict[str, Any]) -> bool:
    """Return whether torch refuses the state, or raises in the step after it was loaded."""
    model = net()
    optimizer = make(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.load_state_dict(copy.deepcopy(state))
            step(model, optimizer, 1)
    except Exception:
        return True
    return False


def damaged(healthy: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the state without each option of the second group, and of all groups."""
    for option in healthy["param_groups"][1].keys() - {"params"}:
        state = copy.deepcopy(healthy)
        del state["param_groups"][1][option]
        yield f"no {option}", state
        state = copy.deepcopy(state)
        del state["param_groups"][0][option]
        yield f"no {option} at all", state


KNOWN = (
    "adam", "adamw", "amsgrad", "foreach", "nadam", "sgd", "momentum", "rmsprop", "centered",
    "adagrad", "adadelta",
)  # fmt: skip
"""Makers of optimizers whose class the options show."""


@pytest.mark.parametrize("name", KNOWN)
def test_torch_fails_where_an_error_is_reported_and_nowhere_else(tmp_path: Path, name: str) -> None:
    root = tmp_path / "checkpoint"
    trained(root, net(), MAKERS[name])
    healthy = torch.load(root / "optimizer.bin", weights_only=True)
    for words, state in sampled(damaged(healthy)):
        torch.save(state, root / "optimizer.bin")
        severities = {one.severity for one in check(root).all_findings} - {Severity.NOTE}
        if fails(MAKERS[name], state):
            # Only these options show the class.
            is_unknown = words.removesuffix(" at all") in ("no momentum_decay", "no rho")
            assert severities or is_unknown, words
        else:
            assert severities == set(), words


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    trained(tmp_path / "checkpoint", net(), MAKERS["adamw"])
    return tmp_path / "checkpoint"


def test_what_is_said_of_states_and_options(checkpoint: Path) -> None:
    path = checkpoint / "optimizer.bin"

    def damage(state: dict[str, Any]) -> None:
        del state["state"][4]["exp_avg_sq"]
        del state["state"][5]["step"]
        del state["param_groups"][0]["lr"]

    rewrite(path, damage)
    assert found(checkpoint) == [
        "inconsistent-groups: optimizer.bin: param group 0 has no usable 'lr'",
        (
            "missing-moments: optimizer.bin: 2 of 6 parameters have no usable 'exp_avg_sq', "
            "'step' (parameters 4, 5)"
        ),
    ]
    assert check(checkpoint).status == 1


def option_of_each(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a damage that sets an option of each param group."""

    def damage(state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group[name] = value

    return damage


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("option", ["lr", "eps", "weight_decay"])
def test_options_that_are_not_finite_are_errors(
    checkpoint: Path, option: str, value: float
) -> None:
    """torch loads them, and the weights are NaN, infinite or not trained after the next step."""
    rewrite(checkpoint / "optimizer.bin", option_of_each(option, value))
    (finding,) = check(checkpoint).all_findings
    assert finding.severity is Severity.ERROR
    assert f"no usable {option!r}" in str(finding)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("betas", [0.9, 0.99]),
        ("lr", torch.ones(1)),
        ("betas", (torch.tensor(0.9), torch.tensor(0.99))),
    ],
    ids=["betas a list", "lr of a tensor with one number", "betas of tensors"],
)
def test_options_of_another_type_that_torch_takes_are_healthy(
    checkpoint: Path, option: str, value: Any
) -> None:
    rewrite(checkpoint / "optimizer.bin", option_of_each(option, value))
    assert found(checkpoint) == []
    assert isinstance(value, tuple) or not fails(
        MAKERS["adamw"], torch.load(checkpoint / "optimizer.bin", weights_only=True)
    )


def test_one_parameter_alone_in_its_group_lacks_a_state(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    trained(
        root,
        net(),
        lambda model: torch.optim.AdamW([{"params": [one]} for one in model.parameters()]),
    )
    rewrite(root / "optimizer.bin", lambda state: state["state"][2].pop("step"))
    assert found(root) == [
        "missing-moments: optimizer.bin: 1 of 6 parameters has no usable 'step' (parameter 2)"
    ]


def test_moments_of_a_shape_that_too_few_weights_have(tmp_path: Path) -> None:
    """A head of 16 labels was saved with the optimizer, and one of 15 with the weights: the load
    succeeds.
    """
    wide = torch.nn.Sequential(
        torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 15)
    )
    narrow = torch.nn.Sequential(
        torch.nn.Linear(16, 16), torch.nn.Linear(16, 15), torch.nn.Linear(16, 15)
    )
    optimizer = torch.optim.AdamW(wide.parameters())
    step(wide, optimizer)
    root = save(tmp_path / "checkpoint", [narrow], [optimizer])
    loading = torch.optim.AdamW(narrow.parameters())
    loading.load_state_dict(torch.load(root / "optimizer.bin", weights_only=True))
    with pytest.raises(RuntimeError):
        step(narrow, loading)
    assert found(root) == [
        "unsaved-parameters: optimizer.bin: 2 parameters with moments of shape [16] (expected at "
        "most 1, the number of weights with that shape; 1 more shape)"
    ]


class SharedMemory(torch.nn.Module):  # type: ignore[misc]
    """A model with two parameters in one memory: safetensors stores one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight.data = self.embedding.weight.data


def test_parameters_that_share_their_memory_are_healthy(tmp_path: Path) -> None:
    trained(tmp_path / "checkpoint", SharedMemory())


@pytest.mark.parametrize("is_frozen", [False, True])
def test_tied_and_frozen_weights_and_buffers_are_healthy(tmp_path: Path, is_frozen: bool) -> None:
    model = SharedMemory()
    model.head.weight = model.embedding.weight
    model.norm.requires_grad_(not is_frozen)
    trained(
        tmp_path / "checkpoint",
        model,
        lambda model: torch.optim.AdamW([one for one in model.parameters() if one.requires_grad]),
    )


def test_a_model_in_two_formats_counts_once(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    root = tmp_path / "checkpoint"
    trained(root, model)
    torch.save(model.state_dict(), root / "pytorch_model.bin")
    assert found(root) == []
    for_another = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    foreign = torch.optim.AdamW(for_another.parameters())
    step(for_another, foreign)
    torch.save(foreign.state_dict(), root / "optimizer.bin")
    assert found(root) == [
        "unsaved-parameters: optimizer.bin: 3 parameters with moments of shape [4] (expected at "
        "most 2, the number of weights with that shape; 1 more shape)"
    ]


def test_names_of_torch_show_states_that_were_exchanged(tmp_path: Path) -> None:
    """An optimizer of named parameters records their keys; one of unnamed parameters has no order
    to go by.
    """
    model = net()
    root = tmp_path / "checkpoint"
    optimizer = trained(root, model, lambda model: torch.optim.AdamW(model.named_parameters()))

    def exchange(state: dict[str, Any]) -> None:
        state["state"][0], state["state"][4] = state["state"][4], state["state"][0]

    rewrite(root / "optimizer.bin", exchange)
    assert found(root) == [
        "mismatched-moments: optimizer.bin: the moments of '0.weight' have shape [3, 5] "
        "(expected [5, 6], the shape of its weights; 1 more parameter)"
    ]
    optimizer.load_state_dict(torch.load(root / "optimizer.bin", weights_only=True))
    with pytest.raises(RuntimeError):
        step(model, optimizer)


def test_names_of_torch_in_a_wrapped_model_are_healthy(tmp_path: Path) -> None:
    def of_names(model: Any) -> Any:
        return torch.optim.AdamW((f"_orig_mod.{key}", one) for key, one in model.named_parameters())

    trained(tmp_path / "checkpoint", net(), of_names)


def test_a_parameter_that_was_passed_twice_is_healthy(tmp_path: Path) -> None:
    model = net()
    parameters = list(model.parameters())
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.AdamW(
            [{"params": [*parameters[:2], *parameters[:2]]}, {"params": parameters[2:]}]
        )
    step(model, optimizer)
    root = save(tmp_path / "checkpoint", [model], [optimizer])
    assert torch.load(root / "optimizer.bin")["param_groups"][0]["params"] == [2, 3, 2, 3]
    assert found(root) == []
    optimizer.load_state_dict(torch.load(root / "optimizer.bin"))
    step(model, optimizer)


def test_groups_that_list_no_parameter(tmp_path: Path) -> None:
    def empty_first(model: Any) -> Any:
        return torch.optim.AdamW([{"params": []}, {"params": model.parameters()}])

    healthy = tmp_path / "healthy"
    trained(healthy, net(), empty_first)
    assert found(save(tmp_path / "bare", [net()], [torch.optim.AdamW([{"params": []}])])) == []
    rewrite(healthy / "optimizer.bin", lambda state: state["param_groups"][1].update(params=[]))
    assert fails(empty_first, torch.load(healthy / "optimizer.bin"))
    (finding,) = check(healthy).findings
    assert (
        str(finding)
        == "optimizer.bin: it holds an optimizer with moments but no parameters in its param "
        "groups (expected an optimizer's state)"
    )


def test_values_of_an_optimizer_of_its_own_under_a_string_are_healthy(checkpoint: Path) -> None:
    rewrite(
        checkpoint / "optimizer.bin",
        lambda state: state["state"].update(
            {"global": {"gradient_norm": torch.ones(3), "step": torch.tensor(1.0)}}
        ),
    )
    assert found(checkpoint) == []


def later_group(model: Any) -> Any:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[:2])
    step(model, optimizer)
    optimizer.add_param_group({"params": parameters[2:], "lr": 0.1, "amsgrad": True})
    return optimizer


def unused_parameters(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    model[0].requires_grad_(False)
    return optimizer


def scheduled(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
    return optimizer


def labelled_groups(model: Any) -> Any:
    groups = [{"params": [one], "name": name} for name, one in model.named_parameters()]
    return torch.optim.AdamW(groups)


def amsgrad_switched_off(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    step(model, optimizer)
    for group in optimizer.param_groups:
        group["amsgrad"] = False
    optimizer.state.pop(model[0].weight)
    return optimizer


class SharpnessAware(torch.optim.Optimizer):  # type: ignore[misc]
    """A wrapper with the groups of what it wraps, and one state of its own."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__(wrapped.param_groups, {"rho": 0.05, **wrapped.defaults})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["old_p"] = parameter.detach().clone()


class ScheduleFree(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer with the options and states of AdamWScheduleFree."""

    def __init__(self, parameters: Any) -> None:
        own = {"r": 0.0, "k": 0, "warmup_steps": 0, "train_mode": True, "weight_sum": 0.0}
        shared = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(parameters, {**shared, "foreach": True, **own, "weight_lr_power": 2.0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].update(
                        z=parameter.detach(), exp_avg_sq=torch.ones_like(parameter)
                    )


class Mini(torch.optim.AdamW):  # type: ignore[misc]
    """An optimizer with all options of AdamW and a second moment for each row, as Adam-mini has."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].update(
                        step=torch.tensor(1.0),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros(parameter.shape[0]),
                    )


class Global(torch.optim.AdamW):  # type: ignore[misc]
    """An optimizer that keeps moments of the whole model under a string."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state["global"].update(d=torch.tensor(1.0), exp_avg=torch.ones(3))


class Merged(torch.optim.Optimizer):  # type: ignore[misc]
    """Several optimizers that save one dict, the groups of each numbered from 0."""

    def __init__(self, *inner: Any) -> None:
        self.inner = inner
        super().__init__(
            [
                parameter
                for one in inner
                for group in one.param_groups
                for parameter in group["params"]
            ],
            {},
        )

    def step(self, closure: Any = None) -> None:
        for optimizer in self.inner:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        saved = [optimizer.state_dict() for optimizer in self.inner]
        states = {
            f"{number}.{key}": state
            for number, inner in enumerate(saved)
            for key, state in inner["state"].items()
        }
        return {
            "state": states,
            "param_groups": [group for inner in saved for group in inner["param_groups"]],
        }

    def load_state_dict(self, saved: Any) -> None:
        for number, optimizer in enumerate(self.inner):
            states = {
                int(key.split(".")[1]): state
                for key, state in saved["state"].items()
                if key.startswith(f"{number}.")
            }
            optimizer.load_state_dict(
                {"state": states, "param_groups": saved["param_groups"][number : number + 1]}
            )


HEALTHY: dict[str, Make] = {
    "a moment for each row": lambda model: Mini(model.parameters()),
    "a moment for each row, by name": lambda model: Mini(model.named_parameters()),
    "moments under a string": lambda model: Global(model.parameters()),
    "several optimizers in one dict": lambda model: Merged(
        torch.optim.AdamW(model[0].parameters()),
        torch.optim.SGD(model[2].parameters(), momentum=0.9),
    ),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "fused sgd": lambda model: torch.optim.SGD(model.parameters(), momentum=0.9, fused=True),
    "lr of a tensor": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)),
    "group added later": later_group,
    "unused": unused_parameters,
    "scheduled": scheduled,
    "labelled groups": labelled_groups,
    "amsgrad switched off": amsgrad_switched_off,
    "sharpness-aware sgd": lambda model: SharpnessAware(
        torch.optim.SGD(model.parameters(), momentum=0.9)
    ),
    "sharpness-aware adam": lambda model: SharpnessAware(torch.optim.Adam(model.parameters())),
    "schedule-free": lambda model: ScheduleFree(model.parameters()),
    "average": lambda model: torch.optim.ASGD(model.parameters()),
}
if hasattr(torch.optim, "Muon"):
    HEALTHY["muon"] = lambda model: torch.optim.Muon(
        [one for one in model.parameters() if one.ndim == 2]
    )


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_optimizers_change_no_status(tmp_path: Path, name: str) -> None:
    model = net()
    optimizer = HEALTHY[name](model)
    step(model, optimizer)
    root = save(tmp_path / "checkpoint", [model], [optimizer])
    assert check(root).status == 0, found(root)
    optimizer.load_state_dict(torch.load(root / "optimizer.bin", weights_only=True))
    step(model, optimizer)


def test_lbfgs_sparse_adam_and_complex_parameters_are_healthy(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    root = save(tmp_path / "lbfgs", [model], [optimizer])
    assert found(root) == []
    sparse = torch.nn.Embedding(5, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(sparse.parameters())
    sparse(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert found(save(tmp_path / "sparse", [sparse], [optimizer])) == []

    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1, momentum=0.9)
    sparse(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].is_sparse
    assert found(save(tmp_path / "sparse-sgd", [sparse], [optimizer])) == []

    complex_one = torch.nn.Linear(4, 3, dtype=torch.complex64)
    optimizer = torch.optim.AdamW(complex_one.parameters())
    step(complex_one, optimizer)
    assert found(save(tmp_path / "complex", [complex_one], [optimizer])) == []


def test_two_optimizers_of_one_model_in_one_state_are_healthy(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = net()
    optimizers = (
        torch.optim.AdamW(model[0].parameters()),
        torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adamax(model[2].parameters()),
    )
    for optimizer in optimizers:
        step(model, optimizer)
    root = save(tmp_path / "checkpoint", [model], [optimizers[0]])
    torch.save(get_optimizer_state_dict(model, optimizers), root / "optimizer.bin")
    assert check(root).status == 0, found(root)


def test_many_groups_and_many_states_end_the_look_soon(tmp_path: Path) -> None:
    group = {"lr": 0.1, "betas": (0.9, 0.99), "amsgrad": False, "foreach": None}
    states: dict[int, Any] = {0: {f"state{number}": 1 for number in range(30_000)}}
    content = {
        "state": states,
        "param_groups": [{**group, "params": [number]} for number in range(30_000)],
    }
    torch.save(content, tmp_path / "optimizer.bin")
    begin = time.process_time()
    assert (
        found(tmp_path)[0]
        == "inconsistent-groups: optimizer.bin: param groups 0, 1, 2 and 29997 more have no usable "
        "'eps', 'weight_decay'"
    )
    assert time.process_time() - begin < 10


def test_parameters_that_share_their_memory_are_said_to_lose_nothing(tmp_path: Path) -> None:
    """No header distinguishes them from parameters of a module that was not prepared."""
    model = SharedMemory()
    model.norm = torch.nn.Identity()  # no buffers
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    root = save(tmp_path / "checkpoint", [model], [optimizer])
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    step(model, optimizer)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    accelerator.load_state(str(root))
    assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())
    (finding,) = check(root).findings
    assert finding.code == "unsaved-parameters"
    assert finding.advice.startswith("nothing is lost if the parameters share their memory")
