"""New files of weights and states, described byte by byte before anything is written; safetensors
files and indexes.

safetensors files are byte for byte as ``safetensors.torch.save_file`` writes them (0.8,
``tensor.rs``): larger dtypes first, then by name; a compact JSON header, padded with spaces to a
multiple of 8 bytes.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import force_setattr

from ckptfix.checkpoint.filenames import index_name, shard_name
from ckptfix.errors import UnsupportedFormat
from ckptfix.formats.safetensors_file import MAX_HEADER, METADATA_KEY
from ckptfix.storage.recipes import Literal
from ckptfix.tensors.single_files import LISTED, metadata_of, unwritable
from ckptfix.tensors.stored import StoredTensor
from ckptfix.wording import Brief


class NewTensor(NamedTuple):
    """A tensor to be written: its name, its dtype in safetensors' nouns, its shape and its size in
    bytes.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Data(Struct, frozen=True):
    """Here go the ``length`` bytes of the tensor ``fqn``."""

    fqn: str
    length: int


class Computed(Brief, Struct, frozen=True):
    """``length`` bytes that need the CRC-32 of tensors written before them in this file:
    ``make(crcs)``.

    ``of``: the one tensor whose CRC-32 they need, which is just before them; None where they may
    need any.
    """

    length: int
    make: Callable[[Mapping[str, int]], bytes]
    of: str | None = None


Part = Literal | Data | Computed


class OutputFile(Struct, frozen=True, kw_only=True):
    """A file to be written: its path relative to the new checkpoint, its parts in order, and its
    size in bytes.
    """

    path: PurePosixPath
    parts: tuple[Part, ...]
    size: int = 0

    def __post_init__(self) -> None:
        force_setattr(self, "size", sum(part.length for part in self.parts))

    @property
    def needs_crc(self) -> bool:
        """Return whether the CRC-32 of its tensors must be computed while they are written."""
        return any(isinstance(part, Computed) for part in self.parts)


class NewStates(NamedTuple):
    """New files of an optimizer's states, or of weights with them. ``sources``: key of each
    ``Data`` -> its bytes.

    ``dtypes``: key -> dtype in the new file, in safetensors' nouns, where its source has another
    one: such a tensor is converted while it is written. ``notes``: what the new files hold
    otherwise than the old ones, in sentences. ``modules``: file -> name in DeepSpeed's module there
    -> key of its ``Data``.
    """

    files: tuple[OutputFile, ...]
    sources: Mapping[str, StoredTensor]
    dtypes: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()
    modules: Mapping[PurePosixPath, Mapping[str, str]] = {}


NO_WORDS: Mapping[str, Any] = {}


def in_shards(tensors: Sequence[NewTensor], most: int | None) -> list[list[NewTensor]]:
    """Split tensors in their order into shards of at most ``most`` bytes; a larger tensor gets a
    shard to itself.
    """
    shards: list[list[NewTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if most is not None and shards[-1] and filled + tensor.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return shards


def shard_names(stem: str, suffix: str, count: int) -> list[PurePosixPath]:
    """Return the names of the files of a model, as accelerate and transformers call them."""
    if count == 1:
        return [PurePosixPath(stem + suffix)]
    return [
        PurePosixPath(shard_name(stem, suffix, number, count)) for number in range(1, count + 1)
    ]


def index_file(
    stem: str,
    suffix: str,
    shards: Sequence[Sequence[NewTensor]],
    words: Mapping[str, Any] = NO_WORDS,
) -> OutputFile:
    """Return the index of a model in several files, as ``save_pretrained`` writes it.

    ``words``: its other content, from an old index; the size in its metadata is corrected. That of
    a variant has its word elsewhere: shards of ``model.fp16`` are of
    ``model.safetensors.index.fp16.json``.
    """
    names = shard_names(stem, suffix, len(shards))
    metadata = words.get("metadata")
    document = {
        **words,
        "metadata": {
            **(metadata if isinstance(metadata, Mapping) else {}),
            "total_size": sum(tensor.nbytes for shard in shards for tensor in shard),
        },
        "weight_map": {
            tensor.fqn: str(name)
            for name, shard in zip(names, shards, strict=True)
            for tensor in shard
        },
    }
    data = json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"
    return OutputFile(path=PurePosixPath(index_name(stem, suffix)), parts=(Literal(data),))


_ORDER_TEXT = """
    BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 I32 U32 F32 C64
    F64 I64 U64"""
DTYPES = {name: rank for rank, name in enumerate(_ORDER_TEXT.split())}
"""The dtypes that safetensors knows, with their rank in the order of a file."""

_NO_METADATA: Mapping[str, str] = {}


def safetensors_files(
    stem: str,
    tensors: Sequence[NewTensor],
    ties: Mapping[str, str],
    *,
    most: int | None = None,
    metadata: Mapping[str, str] = _NO_METADATA,
    index_words: Mapping[str, Any] = NO_WORDS,
) -> tuple[OutputFile, ...]:
    """Return the files of one model: one, or shards of at most ``most`` bytes of tensors and their
    index.

    ``ties``: other name -> name in ``tensors``; recorded in the metadata of the file, as
    ``save_model`` does. ``metadata``: of every file, with the ties, without ``unwritable`` keys.
    ``index_words``: the other content of their index. Raises UnsupportedFormat for a dtype or a
    name that safetensors does not have.
    """
    shards = in_shards(sorted(tensors, key=lambda tensor: tensor.fqn), most)
    names = shard_names(stem, ".safetensors", len(shards))
    files = []
    lost = unwritable(metadata, ties, {tensor.fqn for tensor in tensors})
    metadata = {key: text for key, text in metadata.items() if key not in lost}
    for name, shard in zip(names, shards, strict=True):
        held = {tensor.fqn for tensor in shard}
        own = {other: kept for other, kept in ties.items() if kept in held}
        header, ordered = _header(shard, own, metadata)
        parts: tuple[Part, ...] = (
            Literal(header),
            *(Data(tensor.fqn, tensor.nbytes) for tensor in ordered if tensor.nbytes),
        )
        files.append(OutputFile(path=name, parts=parts))
    if len(shards) > 1:
        files.append(index_file(stem, ".safetensors", shards, index_words))
    return tuple(files)


def safetensors_place(tensor: NewTensor | StoredTensor) -> tuple[int, str]:
    """Return the key by which safetensors sorts the tensors of a file; a dtype that it does not
    have is the last.
    """
    return -DTYPES.get(tensor.dtype, 0), tensor.fqn


def _header(
    tensors: Sequence[NewTensor], ties: Mapping[str, str], metadata: Mapping[str, str]
) -> tuple[bytes, list[NewTensor]]:
    """Return the bytes before the first tensor, and the tensors in the order of the file."""
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise UnsupportedFormat(
                f"{tensor.fqn!r} has dtype {tensor.dtype}, which safetensors does not have"
            )
        if tensor.fqn == METADATA_KEY:
            raise UnsupportedFormat(
                f"a tensor is named {METADATA_KEY!r}, which safetensors reserves"
            )
    for name in ("format", LISTED):
        if name in ties:
            raise UnsupportedFormat(
                f"a tied tensor is named {name!r}, which is reserved in safetensors files"
            )
    ordered = sorted(tensors, key=safetensors_place)
    document: dict[str, Any] = {
        METADATA_KEY: {
            "format": "pt",
            **metadata,
            **metadata_of(ties, {tensor.fqn for tensor in tensors}),
        }
    }
    offset = 0
    for tensor in ordered:
        document[tensor.fqn] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    try:
        data = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UnsupportedFormat(
            "a name has an unpaired surrogate, which a safetensors header cannot store"
        ) from None
    data += b" " * (-len(data) % 8)
    if len(data) > MAX_HEADER:
        raise UnsupportedFormat(
            f"the header takes {len(data)} bytes, but safetensors allows {MAX_HEADER}; use shards"
        )
    return struct.pack("<Q", len(data)) + data, ordered
