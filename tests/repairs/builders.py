"""Small safetensors checkpoints, written by hand, and optimizers that show that they were
trained.
"""

import io
import json
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


RANDOM_STATES = _saved({
    "step": 0,
    "random_state": random.getstate(),
    "numpy_random_seed": numpy.random.get_state(),
    "torch_manual_seed": torch.get_rng_state(),
})  # fmt: skip
"""Bytes of a file of random states, as ``save_state`` writes it on a machine without a device."""

TRAINER_RANDOM_STATES = _saved({
    "python": random.getstate(),
    "numpy": numpy.random.get_state(),
    "cpu": torch.get_rng_state(),
})  # fmt: skip
"""Bytes of a file of random states, as transformers' Trainer writes it on such a machine."""


def write_safetensors(
    path: Path,
    tensors: Mapping[str, bytes],
    *,
    metadata: Mapping[str, str] | None = None,
    tail: bytes = b"",
) -> Path:
    """Write tensors with these bytes, in this order: F32 where they are numbers of four bytes, else
    U8.
    """
    header: dict[str, object] = {
        "__metadata__": dict(metadata if metadata is not None else {"format": "pt"})
    }
    position = 0
    for name, data in tensors.items():
        dtype, count = layout_of(data)
        header[name] = {
            "dtype": dtype,
            "shape": [count],
            "data_offsets": [position, position + len(data)],
        }
        position += len(data)
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(tensors.values()) + tail)
    return path


def layout_of(data: bytes) -> tuple[str, int]:
    """Return the dtype of a tensor with these bytes, and the number of its elements."""
    return ("U8", len(data)) if len(data) % 4 else ("F32", len(data) // 4)


def write_trained_optimizer(path: Path, *models: Mapping[str, bytes]) -> Path:
    """Write the state of an AdamW that has made two steps with gradients for every tensor of these
    models.
    """
    gradients = [
        torch.frombuffer(bytearray(data), dtype=torch.uint8)[: layout_of(data)[1]].float() + 1
        for tensors in models
        for data in tensors.values()
    ]
    parameters = [torch.nn.Parameter(torch.zeros_like(one)) for one in gradients]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for _ in range(2):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    torch.save(optimizer.state_dict(), path)
    return path


def read_safetensors_bytes(path: Path) -> dict[str, bytes]:
    """Read a file back, without the package under test."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: data[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]]
        for name, entry in header.items()
    }


def save_states(
    folder: Path,
    models: Sequence[Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any] = (),
    ranks: int = 2,
) -> Path:
    """Write what ``save_state`` of several ranks does, of objects with a ``state_dict()``."""
    folder.mkdir(parents=True)
    for stem, values in (
        ("pytorch_model", models),
        ("optimizer", optimizers),
        ("scheduler", schedulers),
    ):
        for index, value in enumerate(values):
            torch.save(value.state_dict(), folder / f"{stem}{f'_{index}' if index else ''}.bin")
    for rank in range(ranks):
        (folder / f"random_states_{rank}.pkl").write_bytes(RANDOM_STATES)
    return folder


def snapshot(root: Path) -> dict[str, bytes]:
    """Return every file below a folder with its bytes."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
