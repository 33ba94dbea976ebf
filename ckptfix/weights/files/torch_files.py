"""New files of torch.save that hold the state dict of a module.

Their pickle is byte for byte the one that torch 2.13 writes for an OrderedDict of tensors on the CPU, each of a storage
of its own (``torch/serialization.py``, ``torch/_tensor.py``): ``_rebuild_tensor_v2`` over a typed storage, and
``_rebuild_tensor_v3`` over an untyped one for the dtypes that have no storage class.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from struct import pack
from typing import Any

from ckptfix.errors import UnsupportedFormat
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_tensors import STORAGE_DTYPES, TORCH_DTYPES
from ckptfix.formats.torch_zip import ALIGNMENT, MAX_PICKLE
from ckptfix.weights.files.parts import Computed, Data, Literal, NewTensor, OutputFile, Part
from ckptfix.weights.files.pickle_writing import (
    BINPERSID,
    BUILD,
    EMPTY_TUPLE,
    FALSE,
    MARK,
    REDUCE,
    TUPLE,
    Call,
    Global,
    PickleWriter,
)
from ckptfix.weights.files.sharding import NO_WORDS, in_shards, index_file, shard_names
from ckptfix.weights.files.zip_parts import NewRecord, zip_parts

STORAGE_CLASSES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}
"""Dtype in safetensors' nouns -> typed storage class."""

DTYPE_NAMES = {noun: name for name, noun in TORCH_DTYPES.items()}
"""Dtype in safetensors' nouns -> its name in torch. torch.save has no tensors of those that are missing."""

# One object each, and the pickle refers to it when it comes again.
_STORAGE, _CPU, _VERSION, _METADATA = "storage", "cpu", "version", "_metadata"
_ORDERED_DICT = Global("collections", "OrderedDict")
_NO_VERSIONS: Mapping[str, int] = {}


@paused_gc()
def torch_files(
    stem: str,
    tensors: Sequence[NewTensor],
    ties: Mapping[str, str],
    *,
    most: int | None = None,
    versions: Mapping[str, int] = _NO_VERSIONS,
    suffix: str = ".bin",
    index_words: Mapping[str, Any] = NO_WORDS,
) -> tuple[OutputFile, ...]:
    """Return the files of one model: one, or shards of at most ``most`` bytes of tensors and their index.

    The tensors keep their order. ``ties``: other name -> name in ``tensors``; both name one storage, the other at the
    end of its file. ``versions``: module -> version, for the ``_metadata`` that a module's state dict has; every shard
    has it whole. ``index_words``: what their index says beside its map. Raises UnsupportedFormat for a dtype that
    torch.save has no tensors of, or a pickle that is too long.
    """
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise UnsupportedFormat(
                f"{tensor.fqn!r} is of {tensor.dtype}, of which torch.save has no tensors"
            )
    shards = in_shards(tensors, most)
    tied = [_tied(shard, ties) for shard in shards]
    names = shard_names(stem, suffix, len(shards))
    files = [_file(*one, versions) for one in zip(names, shards, tied, strict=True)]
    if len(shards) > 1:
        named = [  # the total size counts a storage once
            [*shard, *(kept._replace(fqn=other, nbytes=0) for other, kept in own.items())]
            for shard, own in zip(shards, tied, strict=True)
        ]
        files.append(index_file(stem, suffix, named, index_words))
    return tuple(files)


def _tied(shard: Sequence[NewTensor], ties: Mapping[str, str]) -> dict[str, NewTensor]:
    """Return other name -> tensor, of the ties to the tensors of a shard."""
    held = {tensor.fqn: tensor for tensor in shard}
    return {other: held[kept] for other, kept in ties.items() if kept in held}


def _file(
    name: PurePosixPath,
    tensors: Sequence[NewTensor],
    tied: Mapping[str, NewTensor],
    versions: Mapping[str, int],
) -> OutputFile:
    data = state_dict_pickle(tensors, tied, versions)
    if len(data) > MAX_PICKLE:
        raise UnsupportedFormat(
            f"the pickle of {name} takes {len(data)} bytes, {MAX_PICKLE} are read back at most; use shards"
        )
    return OutputFile(path=name, parts=tuple(zip_parts(archive_records(_root(name.stem), data, tensors))))


def _root(stem: str) -> str:
    """Return the folder in the archive: the name of the file, or torch's own word where zip has no such name."""
    try:
        stem.encode()
    except UnicodeEncodeError:
        return "archive"
    return stem


def archive_records(root: str, data: bytes, tensors: Sequence[NewTensor]) -> Iterator[NewRecord]:
    """Yield the records of an archive in the order that torch has: a pickle, and the storages 0, 1, 2 and so on."""
    heads = {
        "data.pkl": data,
        ".format_version": b"1",
        ".storage_alignment": b"%d" % ALIGNMENT,
        "byteorder": b"little",
    }
    names = [*heads, *(f"data/{number}" for number in range(len(tensors))), "version"]
    for name, content in heads.items():
        yield NewRecord(f"{root}/{name}", Literal(content))
    for number, tensor in enumerate(tensors):
        yield NewRecord(f"{root}/data/{number}", Data(tensor.fqn, tensor.nbytes))
    yield NewRecord(f"{root}/version", Literal(b"3\n"))
    yield NewRecord(f"{root}/.data/serialization_id", serialization_id(names, tensors))


def serialization_id(names: Sequence[str], tensors: Sequence[NewTensor]) -> Part:
    """Return 40 digits that name the content of an archive: 20 of its records' names, 20 of the tensors' CRC-32.

    torch makes them with hash functions of its own; nothing compares them.
    """
    first = _digits("\n".join(names).encode())
    return Computed(40, lambda crcs: first + _digits(b"".join(_crc(one, crcs) for one in tensors)))


def _crc(tensor: NewTensor, crcs: Mapping[str, int]) -> bytes:
    return pack("<I", crcs[tensor.fqn] if tensor.nbytes else 0)


def _digits(data: bytes) -> bytes:
    return b"%020d" % int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def state_dict_pickle(
    tensors: Sequence[NewTensor], tied: Mapping[str, NewTensor], versions: Mapping[str, int]
) -> bytes:
    """Return the data.pkl of a state dict; the tensors' storages have the keys 0, 1, 2 and so on."""
    writer = PickleWriter()
    writer.value(Call(function=_ORDERED_DICT))
    keys: dict[str, int] = {}

    def entry(pair: tuple[str, NewTensor]) -> None:
        writer.text(pair[0])
        _push_tensor(writer, pair[1], keys)

    writer.batches([*((tensor.fqn, tensor) for tensor in tensors), *tied.items()], entry)
    if versions:
        items = {module: {_VERSION: version} for module, version in versions.items()}
        writer.value({_METADATA: Call(function=_ORDERED_DICT, items=items)})
        writer.opcodes(BUILD)
    return writer.finish()


def tensor_pickle(tensor: NewTensor) -> bytes:
    """Return the data.pkl of a tensor that is saved alone, as each is in a DCP folder."""
    writer = PickleWriter()
    _push_tensor(writer, tensor, {})
    return writer.finish()


def _push_tensor(writer: PickleWriter, tensor: NewTensor, keys: dict[str, int]) -> None:
    """Push a tensor over a storage of its own, or the same one again. ``keys``: where the memo has the storage keys."""
    storage_class = STORAGE_CLASSES.get(tensor.dtype)
    writer.named("torch._utils", "_rebuild_tensor_v2" if storage_class else "_rebuild_tensor_v3")
    writer.opcodes(MARK + MARK)
    writer.value(_STORAGE)
    if storage_class:
        writer.named("torch", storage_class)
    else:
        writer.named("torch.storage", "UntypedStorage")
    if tensor.fqn in keys:
        writer.get(keys[tensor.fqn])
    else:
        keys[tensor.fqn] = writer.text(str(len(keys)))
    writer.value(_CPU)
    writer.integer(tensor.nbytes * 8 // DTYPE_BITS[tensor.dtype] if storage_class else tensor.nbytes)
    writer.opcodes(TUPLE)
    writer.put()
    writer.opcodes(BINPERSID)
    writer.integer(0)  # where in the storage it begins
    writer.sizes(tensor.shape)
    writer.sizes(_contiguous(tensor.shape))
    writer.opcodes(FALSE)  # requires_grad
    writer.value(_ORDERED_DICT)
    writer.opcodes(EMPTY_TUPLE + REDUCE)  # no hooks
    writer.put()
    if not storage_class:
        writer.named("torch", DTYPE_NAMES[tensor.dtype])
    writer.opcodes(TUPLE)
    writer.put()
    writer.opcodes(REDUCE)
    writer.put()


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that torch gives a contiguous tensor; a dimension of no elements counts as one."""
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides)) if shape else ()
