"""Gradient scalers whose scale ends a run in fp16: torch decides, and healthy ones stay silent."""

import math
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from ckptfix import check, latest_checkpoint
from ckptfix.diagnosis.findings.base import Severity

SCALER = "scaler.pt"


def saved(**values: Any) -> dict[str, Any]:
    """Return the state of a healthy scaler that grows soon, with some other values."""
    state = torch.amp.GradScaler("cpu", growth_interval=10).state_dict()
    return {**state, **values}


def run() -> accelerate.Accelerator:
    """Return a run with a scaler, as with fp16 on a GPU, that can load a checkpoint."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.scaler = torch.amp.GradScaler("cpu")
    return accelerator


def save(root: Path, state: Any) -> Path:
    run().save_state(str(root))
    torch.save(state, root / SCALER)
    return root


def dead(root: Path) -> list[str]:
    findings = [one for one in check(root).all_findings if one.code == "dead-scaler"]
    assert all(finding.severity is Severity.ERROR for finding in findings)
    return [str(finding) for finding in findings]


def outcome(state: dict[str, Any]) -> str:
    """Train 40 steps with a state, one of them with an overflow: the run "trains" to its end, makes
    its weights "nan", or is "stuck" and skips every step of its second half.
    """
    torch.manual_seed(0)
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(layer.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(state)
    half = layer.weight.detach().clone()
    for step in range(40):
        optimizer.zero_grad()
        scaler.scale(layer(torch.randn(3, 2)).pow(2).mean()).backward()
        if step == 5:
            layer.weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        if step == 20:
            half = layer.weight.detach().clone()
    if layer.weight.isnan().any():
        return "nan"
    return "stuck" if torch.equal(layer.weight, half) else "trains"


@pytest.mark.parametrize(
    ("key", "value", "end"),
    [
        *(("scale", value, "nan") for value in (0.0, -0.0, 0, False)),
        *(("scale", value, "stuck") for value in (math.nan, math.inf, -math.inf)),
        *(("backoff_factor", value, "nan") for value in (0.0, 0)),
        *(("backoff_factor", value, "stuck") for value in (math.nan, math.inf, -math.inf)),
        *(("growth_factor", value, "nan") for value in (0.0, 0)),
    ],
)
def test_a_dead_scaler(key: str, value: Any, end: str, tmp_path: Path) -> None:
    state = saved(**{key: value})
    assert outcome(state) == end
    (sentence,) = dead(save(tmp_path / "checkpoint_0", state))
    assert sentence.startswith(f"{SCALER}: {key!r} is {value!r} (expected a ")
    assert ("makes the weights NaN" in sentence) is (end == "nan")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        # 1e-38 is denormal in fp32.
        *(("scale", value) for value in (65536.0, 65536, 1, True, 1e-38, -1.0)),
        *(("backoff_factor", value) for value in (0.5, 1.0, -0.5)),
        # torch keeps the scale where the product is not finite.
        *(("growth_factor", value) for value in (2.0, 1, -2.0, math.nan, math.inf)),
    ],
)
def test_a_scaler_that_trains(key: str, value: Any, tmp_path: Path) -> None:
    state = saved(**{key: value})
    assert outcome(state) == "trains"
    root = save(tmp_path / "checkpoint_0", state)
    assert dead(root) == []
    assert check(root).status == 0


@pytest.mark.parametrize("scale", [1e-40, 5e-324, 1 << 62])
def test_a_scale_above_zero_is_not_judged(scale: float, tmp_path: Path) -> None:
    assert dead(save(tmp_path / "checkpoint_0", saved(scale=scale))) == []


@pytest.mark.parametrize(
    "state",
    [
        {},
        [],
        {"scale": 0.0},
        {"scale": torch.zeros(3), "mean": torch.ones(3)},
        saved(scale="0"),
        saved(scale=None),
        saved(scale=[0.0]),
        saved(scale=torch.tensor(0.0)),
        saved(scale=1 << 100_000),
    ],
    ids=lambda state: repr(type(state)),
)
def test_other_contents(state: Any, tmp_path: Path) -> None:
    assert dead(save(tmp_path / "checkpoint_0", state)) == []


def test_a_scaler_is_told_once_and_also_alone(tmp_path: Path) -> None:
    root = save(tmp_path / "checkpoint_0", saved(scale=math.nan, backoff_factor=0.0))
    (sentence,) = dead(root)
    assert "'scale' is nan" in sentence
    (finding,) = check(root / SCALER).all_findings
    assert finding.code == "dead-scaler"


def test_the_advice_mends_it(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint_0", saved())
    root = save(tmp_path / "checkpoint_1", saved(scale=0.0))
    with pytest.warns(UserWarning, match=f"passed over checkpoint_1: {SCALER}: 'scale' is 0.0"):
        assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint_0"
    (root / SCALER).unlink()
    with pytest.raises(FileNotFoundError):  # accelerate's own, without which only the Trainer loads
        run().load_state(str(root))
    (finding,) = check(save(root, saved(scale=0.0))).findings
    command = 'torch.save(torch.amp.GradScaler("cpu").state_dict(), "scaler.pt")'
    assert command in finding.advice
    torch.save(torch.amp.GradScaler("cpu").state_dict(), root / SCALER)
    loading = run()
    loading.load_state(str(root))
    assert loading.scaler.get_scale() == 65536.0
    assert check(root).status == 0
