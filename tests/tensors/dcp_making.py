"""DCP folders made by torch for a test, digests of what is read from them, and new files as
bytes.
"""

import hashlib
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from ckptfix.formats.torch_tensors import TORCH_DTYPES
from ckptfix.storage.reading import OpenFiles
from ckptfix.storage.recipes import Literal
from ckptfix.tensors.new_files import Computed, Data, NewTensor, OutputFile
from ckptfix.tensors.stored import Weights, digest_head, tensor_digest


def save(folder: Path, state: Any, **options: Any) -> None:
    """Save as ``torch.distributed.checkpoint.save`` does, in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)


def load(folder: Path, state: Any) -> None:
    """Fill ``state`` as ``torch.distributed.checkpoint.load`` does, in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor in row-major order."""
    if not tensor.numel():
        return b""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.numpy().tobytes())


def noun(tensor: torch.Tensor) -> str:
    return TORCH_DTYPES[str(tensor.dtype).removeprefix("torch.")]


def digest_of(tensor: torch.Tensor) -> str:
    """Return the digest that a tensor must have, computed from torch's own values."""
    return hashlib.sha256(digest_head(noun(tensor), tuple(tensor.shape)) + raw(tensor)).hexdigest()


def digests_of(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest_of(tensor) for name, tensor in state.items()}


def digests(weights: Weights, size: int = 1 << 16) -> dict[str, str]:
    """Return the digest of every tensor as it is read from its files, ``size`` bytes at a time."""
    buffer = memoryview(bytearray(size))
    with OpenFiles() as files:
        return {
            name: tensor_digest(tensor, files, buffer) for name, tensor in weights.named().items()
        }


def every_dtype() -> dict[str, torch.Tensor]:
    """Return a small tensor of each dtype that has a noun, and of the shapes that are easily got
    wrong.
    """
    torch.manual_seed(0)
    found = {}
    for name in TORCH_DTYPES:
        dtype = getattr(torch, name)
        width = torch.empty((), dtype=dtype).element_size()
        data = torch.randint(0, 2 if name == "bool" else 256, (6 * width,), dtype=torch.uint8)
        found[f"of.{name}"] = data.view(dtype).reshape(2, 3)
    found["scalar"] = torch.tensor(3.5, dtype=torch.bfloat16)
    found["none"] = torch.zeros(0, 3)
    found["none.inside"] = torch.zeros(2, 0)
    found["ünïcödé \U0001f600"] = torch.arange(5)
    found["a.module.weight"] = torch.randn(64, 33)
    return found


def new_tensors(state: Mapping[str, torch.Tensor]) -> list[NewTensor]:
    return [
        NewTensor(name, noun(one), tuple(one.shape), one.numel() * one.element_size())
        for name, one in state.items()
    ]


def write(root: Path, files: Sequence[OutputFile], state: Mapping[str, torch.Tensor]) -> None:
    """Write new files with the bytes of these tensors."""
    for file in files:
        path = root / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        crcs: dict[str, int] = {}
        data = bytearray()
        for part in file.parts:
            match part:
                case Literal(content):
                    data += content
                case Data(fqn, length):
                    content = raw(state[fqn])
                    assert len(content) == length
                    crcs[fqn] = zlib.crc32(content)
                    data += content
                case Computed(length, make):
                    content = make(crcs)
                    assert len(content) == length
                    data += content
        assert len(data) == file.size
        path.write_bytes(data)
