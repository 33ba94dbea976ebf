"""Small runs to load into: the objects of a fixture, or of a test, with one digest of all their
state.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from fixtures.digests import state_digest, tensor_digests
from fixtures.models import SampleCounter, build_model

FIXTURES = Path(__file__).parents[2] / "fixtures"


def reset() -> None:
    """Forget accelerate's state, which is one for the whole process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@dataclass(slots=True)
class Run:
    """An accelerator with its objects, all prepared once."""

    accelerator: Any
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)

    def digest(self) -> dict[str, Any]:
        """Return everything that a load may modify."""
        return {
            "models": [tensor_digests(_tensors(model)) for model in self.models],
            "optimizers": [state_digest(optimizer.state_dict()) for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "custom": [item.state_dict() for item in self.custom],
            "step": self.accelerator.step,
            "random": [
                repr(random.getstate()),
                state_digest(torch.get_rng_state()),
                _numpy_state(),
            ],
        }

    def train(self, steps: int = 2) -> None:
        """Give every object a state."""
        for _ in range(steps):
            for model in self.models:
                first = next(iter(model.parameters()))
                model(torch.randn(4, first.shape[1])).pow(2).mean().backward()
            for item in (*self.optimizers, *self.schedulers):
                item.step()
            self.accelerator.step += 1


class Loader:
    """A dataloader with ``use_stateful_dataloader``, as accelerate sees it: torchdata is not needed
    for it.
    """

    use_stateful_dataloader = True
    dataset = (1, 2, 3)

    def __init__(self, place: int = 0) -> None:
        self.state: dict[str, Any] = {"place": place}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.update(state)


class Names(nn.Module):  # type: ignore[misc]
    """A model of these tensors, in modules as the dots say; ``ties``: further names of some."""

    def __init__(self, state: dict[str, torch.Tensor], ties: dict[str, str] | None = None) -> None:
        super().__init__()
        for name, value in state.items():
            self._place(name, nn.Parameter(value))
        for name, source in (ties or {}).items():
            self._place(name, self.get_parameter(source))

    def _place(self, name: str, parameter: nn.Parameter) -> None:
        *path, last = name.split(".")
        module: nn.Module = self
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module._modules[step]
        module.register_parameter(last, parameter)


def make_run(
    *models: nn.Module,
    optimizer: Callable[..., Any] | None = torch.optim.AdamW,
    scheduler: bool = False,
    custom: int = 0,
    accelerator: Any = None,
) -> Run:
    """Prepare models, each with an optimizer."""
    accelerator = accelerator or Accelerator(cpu=True)
    run = Run(accelerator, list(models))
    if optimizer is not None:
        run.optimizers = [optimizer(model.parameters(), lr=0.1) for model in models]
    if scheduler:
        run.schedulers = [
            torch.optim.lr_scheduler.StepLR(one, step_size=3) for one in run.optimizers
        ]
    run.custom = [SampleCounter() for _ in range(custom)]
    accelerator.prepare(*run.models, *run.optimizers, *run.schedulers)
    accelerator.register_for_checkpointing(*run.custom)
    return run


def run_of_fixture(fixture: Path) -> tuple[Run, dict[str, Any]]:
    """Build what a correct script of a fixture holds, with other values; and return what the values
    shall be.
    """
    record = json.loads((fixture / "run.json").read_text(encoding="utf-8"))
    run = Run(Accelerator(cpu=True))
    run.models = [
        build_model(entry["class"], 900 + index) for index, entry in enumerate(record["models"])
    ]
    run.optimizers = [
        torch.optim.AdamW(run.models[entry["model"]].parameters(), lr=0.5)
        for entry in record["optimizers"]
    ]
    run.schedulers = [
        torch.optim.lr_scheduler.StepLR(run.optimizers[entry["optimizer"]], step_size=9)
        for entry in record["schedulers"]
    ]
    run.custom = [SampleCounter() for _ in record["custom"]]
    run.accelerator.prepare(*run.models, *run.optimizers, *run.schedulers)
    run.accelerator.register_for_checkpointing(*run.custom)
    wanted = {
        "models": [entry["tensors"] for entry in record["models"]],
        "optimizers": [entry["digest"] for entry in record["optimizers"]],
        "schedulers": [entry["state"] for entry in record["schedulers"]],
        "custom": [entry["state"] for entry in record["custom"]],
    }
    return run, wanted


def seeded(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a model with the weights of a seed."""
    torch.manual_seed(seed)
    return model()


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return every file below a folder with its bytes and modification time."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: value for name, value in state.items() if value.device.type != "meta"}


def _numpy_state() -> str:
    return repr(
        [part.tolist() if hasattr(part, "tolist") else part for part in numpy.random.get_state()]
    )
