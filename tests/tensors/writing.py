"""Write new files from their parts the plain way, one part after the other, and read what
checkpoints hold.
"""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from ckptfix.formats.torch_tensors import TORCH_DTYPES
from ckptfix.storage.atomic import write_all
from ckptfix.storage.reading import OpenFiles
from ckptfix.storage.recipes import Literal
from ckptfix.tensors.new_files import Computed, Data, NewStates, NewTensor, OutputFile
from ckptfix.tensors.numbers import converter
from ckptfix.tensors.stored import Weights, digest_head, tensor_digest


def write_file(root: Path, file: OutputFile, source: Callable[[str], Iterator[memoryview]]) -> Path:
    """Write one new file below ``root``; ``source`` gives the bytes of a tensor by its name.
    Returns its path.
    """
    path = root / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    crcs: dict[str, int] = {}
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        offset = 0
        for part in file.parts:
            match part:
                case Literal(data):
                    blocks: Iterator[bytes | memoryview] = iter([data])
                case Data(fqn):
                    blocks = source(fqn)
                    crcs[fqn] = 0
                case Computed(_, make):
                    blocks = iter([make(crcs)])
            end = offset + part.length
            for block in blocks:
                write_all(fd, block, offset)
                offset += len(block)
                if isinstance(part, Data):
                    crcs[part.fqn] = zlib.crc32(block, crcs[part.fqn])
            assert offset == end, f"{part} was planned with {part.length} bytes"
    finally:
        os.close(fd)
    return path


def write_tensors(
    root: Path, files: tuple[OutputFile, ...], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write new files whose tensors are these."""
    for file in files:
        write_file(root, file, lambda fqn: iter([memoryview(raw(tensors[fqn]))]))


def write_states(root: Path, new: NewStates) -> None:
    """Write the files of an optimizer's states."""

    def source(key: str) -> Iterator[memoryview]:
        stored = new.sources[key]
        with OpenFiles() as files:
            for block in stored.blocks(files, memoryview(bytearray(1 << 16))):
                yield (
                    converter(stored.dtype, new.dtypes[key])(block) if key in new.dtypes else block
                )

    for file in new.files:
        write_file(root, file, source)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor in row-major order."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def new_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[list[NewTensor], dict[str, str]]:
    """Return what to write of a state dict, and its ties: tensors of one storage."""
    nouns = {getattr(torch, name): noun for name, noun in TORCH_DTYPES.items()}
    new: list[NewTensor] = []
    ties: dict[str, str] = {}
    first: dict[object, str] = {}
    for fqn, tensor in tensors.items():
        kept = first.setdefault(tensor.untyped_storage()._cdata if tensor.numel() else fqn, fqn)
        if kept != fqn:
            ties[fqn] = kept
            continue
        new.append(NewTensor(fqn, nouns[tensor.dtype], tuple(tensor.shape), tensor.nbytes))
    return new, ties


def torch_digest(tensor: torch.Tensor) -> str:
    """Return the digest that ``tensor_digest`` gives the same tensor in a file."""
    nouns = {getattr(torch, name): noun for name, noun in TORCH_DTYPES.items()}
    return hashlib.sha256(
        digest_head(nouns[tensor.dtype], tuple(tensor.shape)) + raw(tensor)
    ).hexdigest()


def digests(weights: Weights) -> dict[str, str]:
    """Return the digest of every tensor of a model, by every name it has."""
    buffer = memoryview(bytearray(1 << 16))
    with OpenFiles() as files:
        return {
            fqn: tensor_digest(tensor, files, buffer) for fqn, tensor in weights.named().items()
        }
