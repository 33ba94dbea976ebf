"""Complete states of a small model as each strategy of PyTorch saves them, and the loads that prove
them.
"""

import random
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.tensors.dcp_making import load, save
from tests.tensors.writing import raw

STRATEGIES = ("ddp", "fsdp", "fsdp-full")
Trained = tuple[torch.nn.Module, torch.optim.Optimizer]


def net() -> torch.nn.Module:
    """Return a model with two layers of one shape, so that only their order tells them apart."""
    torch.manual_seed(4)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 2)
    )


def trained(*, seed: int = 0, skipped: str = "") -> Trained:
    """Return a model and its optimizer after three steps; ``skipped``: a parameter that never gets
    a gradient.
    """
    model = net()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in parameters.values() if one.dim() > 1], "weight_decay": 0.1},
            {"params": [one for one in parameters.values() if one.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.01 + seed,
    )
    torch.manual_seed(seed)
    for _ in range(3):
        model(torch.randn(4, 6)).square().sum().backward()
        if skipped:
            parameters[skipped].grad = None
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_state(root: Path, strategy: str, *runs: Trained, processes: int = 2) -> Path:
    """Save as ``save_state`` does with a strategy. Its schedulers, random states and other objects
    are stand-ins.
    """
    root.mkdir()
    for index, (model, optimizer) in enumerate(runs):
        end = f"_{index}" if index else ""
        weights = {name: one.detach().clone() for name, one in model.state_dict().items()}
        named = get_optimizer_state_dict(model, optimizer)
        if strategy == "ddp":
            save_file(weights, root / f"model{end}.safetensors", {"format": "pt"})
            torch.save(optimizer.state_dict(), root / f"optimizer{end}.bin")
        elif strategy == "fsdp-full":
            torch.save(weights, root / f"pytorch_model_fsdp{end}.bin")
            torch.save(named, root / f"optimizer{end}.bin")
        else:
            save(root / f"pytorch_model_fsdp_{index}", {"model": weights})
            save(root / f"optimizer_{index}", {"optimizer": named})
        torch.save({"last_epoch": 6, "_step_count": 7}, root / f"scheduler{end}.bin")
    torch.save({"count": 5}, root / "custom_checkpoint_0.pkl")
    for rank in range(processes):
        state = {
            "step": 3,
            "random_state": random.Random(rank).getstate(),
            "numpy_random_seed": numpy.random.RandomState(rank).get_state(),
            "torch_manual_seed": torch.Generator().manual_seed(rank).get_state(),
        }
        torch.save(state, root / f"random_states_{rank}.pkl")
    return root


def assert_loads(root: Path, strategy: str, *runs: Trained) -> None:
    """Load as the loader of a strategy does, and compare weights and optimizers bit for bit."""
    for index, (model, optimizer) in enumerate(runs):
        end = f"_{index}" if index else ""
        weights, named = model.state_dict(), get_optimizer_state_dict(model, optimizer)
        if strategy == "ddp":
            assert_same(load_file(root / f"model{end}.safetensors"), dict(weights))
            fresh = torch.optim.AdamW(
                [{"params": group["params"]} for group in optimizer.param_groups], lr=9.0
            )
            fresh.load_state_dict(torch.load(root / f"optimizer{end}.bin", weights_only=True))
            assert_same(fresh.state_dict(), optimizer.state_dict())
        elif strategy == "fsdp-full":
            assert_same(
                dict(torch.load(root / f"pytorch_model_fsdp{end}.bin", weights_only=True)),
                dict(weights),
            )
            assert_same(torch.load(root / f"optimizer{end}.bin", weights_only=True), named)
        else:
            there = {"model": {name: torch.zeros_like(one) for name, one in weights.items()}}
            load(root / f"pytorch_model_fsdp_{index}", there)
            assert_same(there["model"], dict(weights))
            state = {"optimizer": get_optimizer_state_dict(*trained(seed=5))}
            load(root / f"optimizer_{index}", state)
            assert_same(state["optimizer"], named)


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Compare two values, tensors by dtype, shape and bytes, dicts in any order."""
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert raw(found) == raw(expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}/{number}")
    else:
        assert found == expected, where


def of_trainer(root: Path, run: Trained, *, processes: int = 2) -> Path:
    """Save as the Trainer does under DDP; each process has random states of its own."""
    model, optimizer = run
    root.mkdir()
    save_file(dict(model.state_dict()), root / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), root / "optimizer.pt")
    torch.save({"last_epoch": 3, "_last_lr": [0.1, 0.1]}, root / "scheduler.pt")
    (root / "trainer_state.json").write_text('{"global_step": 3}')
    for rank in range(processes):
        name = f"rng_state_{rank}.pth" if processes > 1 else "rng_state.pth"
        state = {
            "python": random.Random(rank).getstate(),
            "numpy": numpy.random.RandomState(rank).get_state(),
            "cpu": torch.Generator().manual_seed(rank).get_state(),
        }
        torch.save(state, root / name)
    return root
