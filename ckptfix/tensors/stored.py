"""Tensors as they are stored, the models and folders that they make up, and the digest of a tensor.

The digest is the same through a rename, other shards, a tie, another format. ``formats.tensor.TensorInfo`` is the same
tensor as one file describes it: a header is parsed without the path of its file, and a scan makes 100,000 of them in a
second, so it has offsets where a ``StoredTensor`` has a layout.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.storage.reading import OpenFiles, Piece
from ckptfix.tensors.layouts import Layout


class Format(Enum):
    """The format in which the weights of a model are stored. The value is the word of ``--to``, and for reports."""

    SAFETENSORS = "safetensors"
    TORCH = "bin"
    DCP = "dcp"
    DEEPSPEED = "deepspeed"


class StoredTensor(NamedTuple):
    """One tensor: its name, its dtype in safetensors' nouns, its shape, and where its bytes are."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def blocks(self, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
        """Yield its bytes in row-major order, as ``Layout.blocks`` does."""
        return self.layout.blocks(files, buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of one model.

    ``label``: what to call it: a file, an index, a folder, or ``ckpt.pt['model']``. ``index``: its position among the
    models of a ``save_state`` folder. ``home``: the sub-folder that it lies in, such as ``unet`` of a script's hook.
    ``files``: what holds it, relative to the checkpoint, an index included.
    ``tensors``: in the order of their files; a tie is in it once. ``ties``: other name -> name in ``tensors``.
    ``opaque``: names whose values are no tensors that can be read without executing, such as an extra state.
    ``unread``: those of them that are tensors all the same, of a kind that only torch itself can store -> what it is
    in words: "a quantized tensor (torch.qint8)".
    ``nested``: those of them in which tensors lie all the same, such as an optimizer next to tensors.
    ``left``: what else its file holds and no other model of the checkpoint is, such as an optimizer in a training dict.
    ``path``: the keys that lead to it in its file. ``versions``: module -> version, of the
    ``_metadata`` of a torch file. ``checksums``: stretch of a file -> the CRC-32 that the file has for it.
    ``metadata``: the words in the header of safetensors files, without the ties. ``disputed``: those that shards do
    not agree on, which are in no ``metadata``. ``index_words``: what an index says besides its map of names.
    ``views``: tensors that lie in one storage with others in a torch file, and are not the same as they.
    """

    label: str
    format: Format
    index: int = 0
    files: tuple[PurePosixPath, ...] = ()
    tensors: tuple[StoredTensor, ...] = field(default=(), repr=False)
    ties: Mapping[str, str] = field(default_factory=dict, repr=False)
    opaque: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict, repr=False)
    nested: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    versions: Mapping[str, int] = field(default_factory=dict, repr=False)
    checksums: Mapping[Piece, int] = field(default_factory=dict, repr=False)
    metadata: Mapping[str, str] = field(default_factory=dict, repr=False)
    disputed: tuple[str, ...] = ()
    index_words: Mapping[str, Any] = field(default_factory=dict, repr=False)
    views: tuple[str, ...] = field(default=(), repr=False)
    home: PurePosixPath = field(default_factory=PurePosixPath)

    @property
    def position(self) -> tuple[PurePosixPath, int]:
        """The position at which a loader finds it: its folder, and its index among the models there."""
        return self.home, self.index

    def below(self, where: PurePosixPath) -> "Weights":
        """Return the same weights as a checkpoint has them in whose sub-folder ``where`` they lie."""
        is_folder = self.format in (Format.DCP, Format.DEEPSPEED) and any(
            len(file.parts) == 1 for file in self.files
        )
        return replace(
            self,
            label=str((where.parent if is_folder else where) / self.label),
            files=tuple(where / file for file in self.files),
            home=where / self.home,
        )

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes, each tie once."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def named(self) -> dict[str, StoredTensor]:
        """Return every tensor by every name it has, those of ties too."""
        found = {tensor.fqn: tensor for tensor in self.tensors}
        return found | {name: found[kept]._replace(fqn=name) for name, kept in self.ties.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """The content of a path: the weights of its models in the order of their positions.

    ``root``: the folder; for a lone file the folder it lies in. ``only``: the name of the lone file. ``rivals``: files,
    relative to the root, that hold weights and none of these: of one of the models in a second format, or of an earlier
    save with other shards.
    """

    root: Path
    only: str | None = None
    weights: tuple[Weights, ...] = ()
    rivals: tuple[PurePosixPath, ...] = ()
    is_save_state: bool = False


BLOCK = 1 << 20
"""Bytes that are read and hashed at a time: hashlib lets other threads run meanwhile."""


def digest_head(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return what the digest of a tensor begins with, before its bytes."""
    return json.dumps([dtype, list(shape)]).encode() + b"\n"


def tensor_digest(tensor: StoredTensor, files: OpenFiles, buffer: memoryview) -> str:
    """Return the sha256 over dtype, shape and bytes. Raises as ``StoredTensor.blocks`` does."""
    digest = hashlib.sha256(digest_head(tensor.dtype, tensor.shape))
    for block in tensor.blocks(files, buffer):
        digest.update(block)
    return digest.hexdigest()
