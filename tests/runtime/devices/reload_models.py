"""Checkpoints and factories for the tests of reloads. Import it by its name, as the user's own module is."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fixtures.models import ConvNorm, Tied, TwoLayer
from tests.simulated.models import Transformer, tokens, transformer


def two_layer() -> Any:
    return TwoLayer(), torch.linspace(-1, 1, 24).reshape(4, 6)


def two_layer_alone() -> Any:
    return TwoLayer()


def conv_norm() -> Any:
    return ConvNorm(), {"image": torch.linspace(-1, 1, 72).reshape(2, 1, 6, 6)}


def tied() -> Any:
    return Tied(), (torch.arange(10).reshape(2, 5),)


def half() -> Any:
    return TwoLayer().half(), torch.ones(1, 6)


def split() -> Any:
    """The small transformer of the simulated devices, with other random weights than the checkpoint's."""
    torch.manual_seed(99)
    return Transformer(), {"input_ids": tokens("cpu")}


def no_model() -> Any:
    return {"weight": torch.ones(2)}


def broken() -> Any:
    raise RuntimeError("no data here")


def wrong_inputs() -> Any:
    return TwoLayer(), torch.ones(2, 5)


def save_transformer(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file(transformer().state_dict(), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def save_tied(folder: Path, *, suffix: str = ".safetensors") -> Path:
    """Save a model whose head is its embedding, as accelerate does: safetensors keeps one name, torch both."""
    torch.manual_seed(3)
    folder.mkdir(parents=True)
    state = Tied().state_dict()
    if suffix == ".bin":
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    del state["lm_head.weight"]
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


class Drawing(torch.nn.Module):  # type: ignore[misc]  # torch is not followed, so nn.Module is Any
    """Draws random numbers in its forward pass, and none when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight + torch.rand(3)


def drawing() -> Any:
    return Drawing(), torch.ones(3)
