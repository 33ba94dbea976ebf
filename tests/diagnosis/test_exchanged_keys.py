"""States of one file under each other's key, as ``torch.save({"model": ..., "optimizer": ...,
"scheduler": ...})``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ckptfix import check

Layout = Callable[[Any, Any, Any], Any]

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [2],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}

LAYOUTS: dict[str, tuple[Layout, str, str]] = {
    "a loop": (
        lambda model, optimizer, scheduler: {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
        },
        "optimizer",
        "scheduler",
    ),
    "a tutorial": (
        lambda model, optimizer, scheduler: {
            "model_state_dict": model,
            "optimizer_state_dict": optimizer,
            "lr_scheduler_state_dict": scheduler,
            "epoch": 3,
        },
        "optimizer_state_dict",
        "lr_scheduler_state_dict",
    ),
    "Lightning": (
        lambda model, optimizer, scheduler: {
            "state_dict": model,
            "optimizer_states": [optimizer],
            "lr_schedulers": [scheduler],
        },
        "optimizer_states.0",
        "lr_schedulers.0",
    ),
    "one deeper": (
        lambda model, optimizer, scheduler: {
            "state": {"optim": optimizer, "sched": scheduler},
            "net": model,
        },
        "state.optim",
        "state.sched",
    ),
}


def states(name: str) -> tuple[Any, Any, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = SCHEDULERS[name](optimizer)
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    return model.state_dict(), optimizer.state_dict(), scheduler.state_dict()


def told(path: Path, bundle: Any) -> list[tuple[str, str]]:
    torch.save(bundle, path)
    return [(finding.severity.value, str(finding)) for finding in check(path).all_findings]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_optimizer_and_a_scheduler_under_each_others_key_are_told(
    name: str, layout: str, tmp_path: Path
) -> None:
    pack, of_optimizer, of_scheduler = LAYOUTS[layout]
    model, optimizer, scheduler = states(name)
    path = tmp_path / "last.pt"
    assert told(path, pack(model, optimizer, scheduler)) == []
    with pytest.raises((KeyError, TypeError, ValueError)):
        torch.optim.AdamW(torch.nn.Linear(3, 2).parameters()).load_state_dict(scheduler)
    assert sorted(told(path, pack(model, scheduler, optimizer)), reverse=True) == sorted(
        (
            (
                "warning",
                (f"last.pt: {key}: it holds {holds} (expected {expected}); swapped with {partner}"),
            )
            for key, holds, expected, partner in (
                (of_scheduler, "an optimizer's state", "a scheduler's state", of_optimizer),
                (of_optimizer, "a scheduler's state", "an optimizer's state", of_scheduler),
            )
        ),
        reverse=True,
    )
    assert "swap the values under" in check(path).findings[0].advice


def test_a_state_that_was_copied_over_another_is_told(tmp_path: Path) -> None:
    model, optimizer, scheduler = states("StepLR")
    path = tmp_path / "last.pt"
    for bundle, key in (
        ({"model": model, "optimizer": optimizer, "scheduler": optimizer}, "scheduler"),
        ({"model": model, "optimizer": scheduler, "scheduler": scheduler}, "optimizer"),
        ({"model": optimizer, "optimizer": optimizer, "scheduler": scheduler}, "model"),
    ):
        ((severity, sentence),) = told(path, bundle)
        assert severity == "warning"
        assert sentence.startswith(f"last.pt: {key}: it holds ")


@pytest.mark.parametrize("key", ["optimizer", "scheduler", "lr_scheduler", "optim_0"])
def test_weights_under_the_key_of_another_state_are_told(key: str, tmp_path: Path) -> None:
    model, optimizer, scheduler = states("StepLR")
    bundle = {"model": model, "optimizer": optimizer, "scheduler": scheduler, key: model}
    ((severity, sentence),) = told(tmp_path / "last.pt", bundle)
    assert severity == "warning"
    assert sentence.startswith(f"last.pt: {key}: it holds a model")


@pytest.mark.parametrize("key", ["optimizer", "scheduler"])
def test_a_module_of_its_own_under_such_a_key_is_healthy(key: str, tmp_path: Path) -> None:
    """A diffusion schedule may be a module with buffers, and an optimizer may be learned."""
    model, optimizer, scheduler = states("StepLR")
    schedule = torch.nn.Module()
    schedule.register_buffer("betas", torch.linspace(0, 1, 9))
    bundle = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    assert told(tmp_path / "last.pt", {**bundle, key: schedule.state_dict()}) == []


@pytest.mark.parametrize("key", ["optimized_model", "optimizer_ema", "scheduled", "net"])
def test_weights_under_another_key_may_be_meant(key: str, tmp_path: Path) -> None:
    model, optimizer, scheduler = states("StepLR")
    bundle = {"model": model, "optimizer": optimizer, "scheduler": scheduler, key: model}
    assert told(tmp_path / "last.pt", bundle) == []


class Warmup(lr_scheduler.LRScheduler):  # type: ignore[misc]
    """A scheduler that saves its optimizer, too."""

    def get_lr(self) -> list[float]:
        return list(self.base_lrs)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "inner": self.optimizer.state_dict()}


def test_files_of_scripts_with_other_keys_are_healthy(tmp_path: Path) -> None:
    model, optimizer, scheduler = states("StepLR")
    warmup = Warmup(torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())).state_dict()
    lookahead = {"base": optimizer, "last_epoch": 3, "_last_lr": [0.1]}
    for number, bundle in enumerate(
        (
            {"model": model, "optimizer": optimizer, "scheduler": warmup},
            {"model": model, "optimizer": lookahead, "scheduler": scheduler},
            {"state_dict": optimizer},
            {"net": model, "optim": {"opt": optimizer, "lr": scheduler}},
            {"net": model, "optim": [optimizer, scheduler]},
            {"schedulers": {"optimizer_0": scheduler}, "optimizers": {"lr_scheduled": optimizer}},
            {"schedulers": {"AdamW": scheduler}, "optimizers": {"AdamW": optimizer}},
            {"optimizer_and_scheduler": {"a": optimizer, "b": scheduler}},
            {"scheduler": {"state": "warmup", "param_groups": [{"lr": 0.1}]}},
            {"model": {"optimizer": optimizer, "scheduler": scheduler, "weights": model}},
            {
                "scaler": torch.amp.GradScaler("cpu").state_dict(),
                "optimizer": optimizer,
                "sched": scheduler,
            },
        )
    ):
        assert [one for one in told(tmp_path / f"{number}.pt", bundle) if one[0] != "note"] == [], (
            bundle.keys()
        )
