"""The loaders that choose among several files of weights: the real ones, and a model of what each
of them takes.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import accelerate
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ckptfix.checkpoint.keys import WRAPPERS, adapter_name, without_adapter_name

Tensors = dict[str, bytes]

# --- the real loaders, for a model of two weights; each returns the mean of the first
# -------------------------


def net() -> Any:
    return torch.nn.ModuleDict({name: torch.nn.Linear(3, 4, bias=False) for name in "ab"})


def by_load_state(root: Path) -> float:
    model = net()
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(model)
    for state in ("random_states_0.pkl", "optimizer.bin"):
        torch.save({"step": 0}, root / state)
    accelerator.load_state(str(root))
    return float(model["a"].weight.detach().mean())


def by_load_checkpoint_in_model(root: Path) -> float:
    model = net()
    accelerate.load_checkpoint_in_model(model, str(root))
    return float(model["a"].weight.detach().mean())


def by_transformers(root: Path, **options: str) -> float:
    from transformers import PretrainedConfig, PreTrainedModel

    class Model(PreTrainedModel):  # type: ignore[misc]
        config_class = PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.a, self.b = torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(3, 4, bias=False)
            self.post_init()

    (root / "config.json").write_text("{}")
    return float(Model.from_pretrained(root, **options).a.weight.detach().mean())


def by_diffusers(root: Path, **options: str) -> float:
    diffusers: Any = pytest.importorskip("diffusers")
    mixins = (diffusers.ModelMixin, diffusers.ConfigMixin)

    class Model(*mixins):  # type: ignore[misc]
        config_name = "config.json"

        @diffusers.configuration_utils.register_to_config  # type: ignore[untyped-decorator]
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(3, 4, bias=False)

    (root / "config.json").write_text('{"_class_name": "Model"}')
    return float(Model.from_pretrained(root, **options).a.weight.detach().mean())


def by_peft(root: Path) -> float:
    from peft.utils import load_peft_weights

    return float(load_peft_weights(str(root), device="cpu")["a.weight"].mean())


REAL: dict[str, Callable[[Path], float]] = {
    "load_state": by_load_state,
    "load_checkpoint_in_model": by_load_checkpoint_in_model,
    "transformers": by_transformers,
    "diffusers": by_diffusers,
    "PEFT": by_peft,
}


# --- the model of them
# ----------------------------------------------------------------------------------------


def loaded(root: Path) -> dict[str, Tensors]:
    """Return the tensors that each loader takes from a folder, without the loaders that fail."""
    results = {}
    for loader, take in _TAKES.items():
        try:
            results[loader] = take(root)
        except _FAILURES:
            continue
    return results


_FAILURES = (
    OSError, LookupError, TypeError, ValueError, RuntimeError, EOFError, SafetensorError,
    UnpicklingError
)  # fmt: skip


def tensors_of(path: Path) -> Tensors:
    """Return the tensors of a file of weights, or of the shards that an index lists."""
    if path.name.endswith(".json"):
        return _shards(path, of_hub=False)
    state = (
        load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    )
    return {
        name: tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, tensor in state.items()
    }


def _shards(index: Path, *, of_hub: bool) -> Tensors:
    """Return the tensors of all shards in an index. ``of_hub``: as transformers and diffusers read
    it.
    """
    document = json.loads(index.read_text())
    names = sorted(set(document["weight_map"].values()))
    if of_hub and not isinstance(document["metadata"], dict):
        raise ValueError("transformers writes into the metadata")
    return {
        name: data for shard in names for name, data in tensors_of(index.parent / shard).items()
    }


def _first(root: Path, names: Iterable[str]) -> Tensors:
    for name in names:
        if (root / name).is_file():
            is_index = name.endswith(".json")
            return _shards(root / name, of_hub=True) if is_index else tensors_of(root / name)
    raise FileNotFoundError(root)


def _in_model(root: Path) -> Tensors:
    for name in ("pytorch_model.bin", "model.safetensors"):
        if (root / name).is_file():
            return tensors_of(root / name)
    (index,) = root.glob("*.index.json")
    return _shards(index, of_hub=False)


def _names(stem: str, kinds: str) -> list[str]:
    return [f"{stem}{kind}" for kind in kinds.split()]


_TAKES: dict[str, Callable[[Path], Tensors]] = {
    "load_state": lambda root: _first(root, ["model.safetensors", "pytorch_model.bin"]),
    "load_checkpoint_in_model": _in_model,
    "transformers": lambda root: _first(
        root,
        [
            *_names("model", ".safetensors .safetensors.index.json"),
            *_names("pytorch_model", ".bin .bin.index.json"),
        ],
    ),
    "diffusers": lambda root: _first(
        root, _names("diffusion_pytorch_model", ".safetensors.index.json .safetensors .bin")
    ),
    "PEFT": lambda root: _first(root, _names("adapter_model", ".safetensors .bin")),
}


def bare(tensors: Tensors) -> set[tuple[str, bytes]]:
    """Return tensors without the wrappers and the adapters' names in their keys, which a repair may
    rename.
    """
    unwrapped = {
        ".".join(segment for segment in name.split(".") if segment not in WRAPPERS): data
        for name, data in tensors.items()
    }
    return {(without_adapter_name(key, adapter_name(key)), data) for key, data in unwrapped.items()}


def assert_none_switched(before: dict[str, Tensors], after: dict[str, Tensors]) -> None:
    """Assert that no loader switched. One that took a part of the weights, by its index, may take
    more.
    """
    for loader, tensors in before.items():
        assert loader in after, f"{loader} fails after the repair"
        assert bare(tensors) <= bare(after[loader]), f"{loader} takes other weights"
