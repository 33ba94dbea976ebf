"""Optimizers without a state that their step needs: torch decides, and every other state stays
unreported.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from ckptfix import check
from ckptfix.diagnosis.findings.base import Resume, Severity
from tests.diagnosis.test_optimizer_states import found, rewrite, save
from tests.diagnosis.test_optimizer_steps import KNOWN, MAKERS, Make, net, several


def matrices() -> Any:
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False))


RUNS: dict[str, tuple[Callable[[], Any], Make]] = {
    **{name: (net, MAKERS[name]) for name in KNOWN},
    "fused": (net, several(torch.optim.AdamW, fused=True, amsgrad=True)),
    "decoupled nadam": (net, several(torch.optim.NAdam, decoupled_weight_decay=True)),
    "adafactor of transformers": (net, lambda model: Adafactor(model.parameters())),
    "adafactor with momentum": (
        net,
        lambda model: Adafactor(
            model.parameters(), lr=0.01, beta1=0.9, relative_step=False, scale_parameter=False
        ),
    ),
}
if hasattr(torch.optim, "Muon"):
    RUNS["muon"] = (matrices, lambda model: torch.optim.Muon(model.parameters()))


def run(model: Any, optimizer: Any, count: int) -> None:
    """Make steps with gradients."""
    data = torch.ones(4, 6)

    def closure() -> Any:
        with torch.enable_grad():
            optimizer.zero_grad()
            loss = (model(data) - 1).square().sum()
            loss.backward()
        return loss

    for _ in range(count):
        optimizer.step(closure)


def fails(build: Callable[[], Any], make: Make, state: dict[str, Any]) -> bool:
    """Return whether the optimizer refuses the state, or raises in the step after it was loaded."""
    model = build()
    optimizer = make(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.load_state_dict(copy.deepcopy(state))
            run(model, optimizer, 1)
    except Exception:
        return True
    return False


def without_one_state(healthy: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the optimizer without each of its states, for all parameters and for one."""
    for name in sorted({name for states in healthy["state"].values() for name in states}):
        having = [number for number, states in healthy["state"].items() if name in states]
        for words, numbers in (("all", having), ("last", having[-1:])):
            state = copy.deepcopy(healthy)
            for number in numbers:
                del state["state"][number][name]
            yield f"{name} of {words}", state


@pytest.mark.parametrize("name", RUNS)
def test_a_state_is_missed_exactly_where_the_next_step_fails(tmp_path: Path, name: str) -> None:
    build, make = RUNS[name]
    model = build()
    optimizer = make(model)
    run(model, optimizer, 6)
    root = save(tmp_path / "checkpoint", [model], [optimizer])
    assert found(root) == []
    healthy = torch.load(root / "optimizer.bin", weights_only=True)
    for words, state in without_one_state(healthy):
        torch.save(state, root / "optimizer.bin")
        report = check(root)
        assert (report.status == 1) is fails(build, make, state), words
        stops = (finding.resume is not Resume.SUCCEEDS for finding in report.findings)
        assert any(stops) is (report.status == 1)


def test_an_lbfgs_that_converged_at_once_is_healthy(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), tolerance_grad=1e9)
    run(model, optimizer, 1)
    root = save(tmp_path / "checkpoint", [model], [optimizer])
    assert sorted(torch.load(root / "optimizer.bin")["state"][0]) == ["func_evals", "n_iter"]
    assert found(root) == []


@pytest.mark.parametrize(("gone", "severity"), [
    ("step", Severity.ERROR), ("max_exp_avg_sq", Severity.ERROR), ("exp_avg", Severity.WARNING),
    ("exp_avg_sq", Severity.WARNING),
])  # fmt: skip
def test_a_subclass_may_do_without_a_moment_alone(
    tmp_path: Path, gone: str, severity: Severity
) -> None:
    """The load of every subclass asks for the step, and only a subclass that keeps other moments
    has none of one.
    """
    model = net()
    optimizer = MAKERS["amsgrad"](model)
    run(model, optimizer, 1)
    root = save(tmp_path / "checkpoint", [model], [optimizer])
    rewrite(root / "optimizer.bin", lambda state: drop(state, gone))
    assert found(root) == [f"missing-moments: optimizer.bin: {unusable(gone)} (parameters {FIRST})"]
    (finding,) = check(root).findings
    assert finding.severity is severity
    assert ("ignore this" in finding.advice) is (severity is Severity.WARNING)
    assert finding.resume is not Resume.SUCCEEDS


FIRST = "0, 1, 2 and 3 more"


def unusable(name: str) -> str:
    return f"6 of 6 parameters have no usable '{name}'"


def drop(state: dict[str, Any], name: str) -> None:
    for value in state["state"].values():
        del value[name]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (
            slice(None),
            f"{unusable('exp_avg_sq')} (parameters '0.weight', '0.bias', '1.weight' and 3 more)",
        ),
        (slice(1), "1 of 6 parameters has no usable 'exp_avg_sq' (parameter '0.weight')"),
    ],
    ids=["all", "one"],
)
def test_a_dcp_folder_without_a_state_of_parameters(
    lost: slice, words: str, tmp_path: Path
) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    run(model, optimizer, 1)
    root = save(tmp_path / "checkpoint", [model], [optimizer])
    (root / "optimizer.bin").unlink()
    expected = get_optimizer_state_dict(model, optimizer)
    state = copy.deepcopy(expected)
    for name in list(state["state"])[lost]:
        del state["state"][name]["exp_avg_sq"]
    place = root / "optimizer_0"
    dcp.save({"optimizer": state}, storage_writer=dcp.FileSystemWriter(place), no_dist=True)
    assert found(root) == [f"missing-moments: optimizer_0: {words}"]
    reader = dcp.FileSystemReader(place)
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        dcp.load({"optimizer": expected}, storage_reader=reader, no_dist=True)


def test_a_bundle_without_a_state_of_all_parameters(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    run(model, optimizer, 1)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "epoch_1.pt")
    assert found(tmp_path) == []
    drop(content["optimizer"], "exp_avg_sq")
    torch.save(content, tmp_path / "epoch_1.pt")
    words = f"epoch_1.pt: optimizer: {unusable('exp_avg_sq')} (parameters {FIRST})"
    assert found(tmp_path) == [f"missing-moments: {words}"]
