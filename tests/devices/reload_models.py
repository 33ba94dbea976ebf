"""Checkpoints and factories for the tests of reloads. Import it by its name, as the user's own
module is.
"""

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
    """The small transformer of the simulated devices, with other random weights than the
    checkpoint's.
    """
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
    save_file(
        transformer().state_dict(), str(folder / "model.safetensors"), metadata={"format": "pt"}
    )
    return folder


def save_tied(folder: Path, *, suffix: str = ".safetensors") -> Path:
    """Save a model whose head is its embedding, as accelerate does: safetensors keeps one name,
    torch both.
    """
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


class Head(torch.nn.Module):  # type: ignore[misc]  # torch is not followed, so nn.Module is Any
    """Two layers in a row, and something between or behind them that a test says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 8)
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.last(self.between(self.first(x))))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def after(self, output: torch.Tensor) -> Any:
        return output


def save_model(folder: Path, model: torch.nn.Module) -> Path:
    folder.mkdir(parents=True)
    save_file(model.state_dict(), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


class Looking(Head):
    """Looks the first layer's output up in a table: of wrong bytes IndexError."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Embedding(4, 8)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.sum(-1) > 0).long() + 1


class Strict(Head):
    """Its last layer refuses zeros, as a router that checks its input does."""

    class Checked(torch.nn.Linear):  # type: ignore[misc]  # torch is not followed, so nn.Linear is Any
        error: type[BaseException] = ValueError

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not bool((x != 0).any()):
                raise self.error("an empty input")
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.last = self.Checked(8, 8)


class Opaque(Head):
    """Returns its tensor in an object of its own."""

    class Result:
        def __init__(self, logits: torch.Tensor) -> None:
            self.logits = logits

    def after(self, output: torch.Tensor) -> Any:
        return self.Result(output)


class Empty(Head):
    """Returns no tensor at all."""

    def after(self, output: torch.Tensor) -> Any:
        return {"text": "a sentence", "cache": [], "none": output[:0]}


class Changing(Head):
    """Changes its input, as preprocessing in place does."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.div_(255.0))


class Leaving(Head):
    """Ends the process from its forward pass."""

    def after(self, output: torch.Tensor) -> Any:
        raise SystemExit(0)


class Expanded(Head):
    """Has a buffer whose rows are one row of memory, into which torch copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(1, 8).expand(3, 8))


class Lazy(Head):
    """Has a layer that learns its shape from what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.LazyLinear(8)


class Remembering(Head):
    """Keeps a dict in its state dict, which accelerate cannot offload."""

    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


class Counting(Head):
    """Keeps a tensor in its state dict that only ``set_extra_state`` can set."""

    scale = 1.0

    def get_extra_state(self) -> Any:
        return torch.tensor([self.scale])

    def set_extra_state(self, state: Any) -> None:
        self.scale = float(state[0])

    def after(self, output: torch.Tensor) -> Any:
        return output * self.scale


def eights() -> torch.Tensor:
    return torch.linspace(-1, 1, 16).reshape(2, 8)


def two_models() -> tuple[torch.nn.Module, torch.nn.Module]:
    return torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
