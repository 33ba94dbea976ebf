"""State dicts to migrate, and what must be the same afterwards: names, ties and digests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptfix.storage.paths import RECEIPT
from ckptfix.storage.reading import OpenFiles
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.stored import Weights, tensor_digest

StateDict = dict[str, torch.Tensor]

FORMATS = ("safetensors", "bin", "dcp")
SUFFIXES = {"safetensors": ".safetensors", "bin": ".bin", "dcp": ""}

COMMON = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
"""Dtypes that every format has."""


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return a contiguous tensor of any bytes that its dtype may have."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(
        0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator
    )
    return data.view(dtype).reshape(shape)


@st.composite
def state_dicts(draw: st.DrawFn) -> StateDict:
    """State dicts with all that others get wrong: no dimension, no element, strides, ties, views,
    odd names.
    """
    names = draw(
        st.lists(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
                lambda name: name not in ("__metadata__", "format")
            ),
            min_size=1,
            max_size=6,
            unique=True,
        )
    )
    state: StateDict = {}
    for number, name in enumerate(names):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        kind = draw(st.sampled_from(["own", "own", "tied", "view", "transposed", "every second"]))
        before = list(state.values())
        if kind == "tied" and before:
            state[name] = before[-1]
        elif kind == "view" and before and before[-1].dim() and len(before[-1]) > 1:
            state[name] = before[-1][1:]
        else:
            tensor = random_tensor(draw(st.sampled_from(COMMON)), shape, number)
            if kind == "transposed":
                tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
            elif kind == "every second" and tensor.dim():
                tensor = tensor[::2]
            state[name] = tensor
    return state


def digests(weights: Weights) -> dict[str, str]:
    """Return the digest of every tensor by every name it has."""
    buffer = memoryview(bytearray(1 << 16))
    with OpenFiles() as files:
        return {
            name: tensor_digest(tensor, files, buffer) for name, tensor in weights.named().items()
        }


def digests_at(path: Path) -> dict[str, str]:
    """Return those of the one model at a path."""
    (weights,) = open_checkpoint(path).weights
    return digests(weights)


def ties_at(path: Path) -> set[frozenset[str]]:
    """Return which names of the one model at a path are one tensor."""
    (weights,) = open_checkpoint(path).weights
    found: dict[str, set[str]] = {}
    for name, kept in weights.ties.items():
        found.setdefault(kept, {kept}).add(name)
    return {frozenset(names) for names in found.values()}


def write_safetensors(path: Path, state: Mapping[str, Any]) -> None:
    """Save as a user does."""
    save_file(dict(state), path, metadata={"format": "pt"})


def names_below(folder: Path) -> set[str]:
    """Return every file below a folder, relative, but for the receipt of a migration."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    return {name for name in found if not name.endswith(RECEIPT)}
