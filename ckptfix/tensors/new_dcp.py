"""New folders of torch.distributed.checkpoint (DCP), such as Accelerate's FSDP reads.

The layout is that of torch 2.13 for one rank (``torch/distributed/checkpoint``: ``metadata.py``,
``filesystem.py``): in ``__0_0.distcp`` one torch zip file after the other, of one tensor or one
other value each, and their places in ``.metadata``. Read by ``torch.distributed.checkpoint.load``
on any number of ranks.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ckptfix.checkpoint.rank_names import DcpFileName, DcpPart
from ckptfix.errors import UnsupportedFormat
from ckptfix.formats.dcp_metadata import MAX_METADATA, METADATA_NAME, MODEL_KEY
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.storage.recipes import Literal
from ckptfix.tensors.new_files import Computed, Data, NewTensor, OutputFile, Part, in_shards
from ckptfix.tensors.new_torch_files import (
    BUILD,
    DTYPE_NAMES,
    EMPTY_DICT,
    MARK,
    SETITEMS,
    Call,
    Global,
    PickleWriter,
    archive_records,
    tensor_pickle,
    zip_parts,
)

_ARCHIVE = "archive"  # what torch.save calls the root folder when it writes into a stream
_ANY = ""  # in place of the name in what is the same for all tensors of one dtype and shape
_VERSION = "1.0.0"
_PACKAGE = "torch.distributed.checkpoint"
_METADATA = Global(f"{_PACKAGE}.metadata", "Metadata")
_TENSOR = Global(f"{_PACKAGE}.metadata", "TensorStorageMetadata")
_PROPERTIES = Global(f"{_PACKAGE}.metadata", "TensorProperties")
_BYTES = Global(f"{_PACKAGE}.metadata", "BytesStorageMetadata")
_CHUNK = Global(f"{_PACKAGE}.metadata", "ChunkStorageMetadata")
_INDEX = Global(f"{_PACKAGE}.metadata", "MetadataIndex")
_PLACE = Global(f"{_PACKAGE}.filesystem", "_StorageInfo")
_SIZE = Global("torch", "Size")
StatePath = tuple[str | int, ...]
"""The keys, and positions in lists, that lead to a value in the state dict that was saved."""

NO_VALUES: Mapping[StatePath, Any] = {}
_STRIDED = Call(function=Global("torch.serialization", "_get_layout"), args=("torch.strided",))
_CONTIGUOUS = Call(function=Global(f"{_PACKAGE}.metadata", "_MEM_FORMAT_ENCODING"), args=(0,))


class _Placed(NamedTuple):
    """A tensor, None for another value, with the file, and the bytes of it, that its item takes."""

    tensor: NewTensor | None
    file: str
    offset: int
    length: int


def dcp_files(
    folder: PurePosixPath,
    tensors: Sequence[NewTensor],
    ties: Mapping[str, str],
    *,
    prefix: str = MODEL_KEY,
    most: int | None = None,
) -> tuple[OutputFile, ...]:
    """Return the files of one model, in the order in which they must be written: ``.metadata`` is
    the last.

    ``ties``: other name -> name in ``tensors``; both lead to one place. ``prefix``: the key under
    which the state dict is, ``model`` for Accelerate, "" for the state dict alone. ``most``: bytes
    of tensors a file takes; a larger tensor gets a file to itself. Raises UnsupportedFormat for a
    dtype of which torch has no tensors, or for more tensors than are read back.
    """
    paths = {
        (prefix, name) if prefix else (name,): name
        for name in (*(one.fqn for one in tensors), *ties)
    }
    return dcp_state_files(
        folder, tensors, {path: ties.get(name, name) for path, name in paths.items()}, most=most
    )


def dcp_state_files(
    folder: PurePosixPath,
    tensors: Sequence[NewTensor],
    paths: Mapping[StatePath, str],
    *,
    values: Mapping[StatePath, Any] = NO_VALUES,
    most: int | None = None,
) -> tuple[OutputFile, ...]:
    """Return the files of any state dict, as ``dcp_files`` does. ``paths``: path of each tensor ->
    its ``fqn``.

    ``values``: path -> a value that is not a tensor, as ``PickleWriter.value`` takes it, such as a
    learning rate.
    """
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise UnsupportedFormat(
                f"{tensor.fqn!r} has dtype {tensor.dtype}, which torch.save cannot write"
            )
    files = []
    with paused_gc():
        placed: dict[str, _Placed] = {}
        placed_values: dict[StatePath, _Placed] = {}
        for number, shard in enumerate(in_shards(tensors, most)):
            name = str(DcpFileName(part=DcpPart.DATA, rank=0, number=number))
            parts: list[Part] = []
            offset = 0
            # Torch writes them before the tensors.
            for path, value in values.items() if not number else ():
                item: tuple[Part, ...] = (Literal(_value_item(value)),)
                placed_values[path] = _Placed(None, name, offset, item[0].length)
                parts += item
                offset += item[0].length
            for tensor in shard:
                item = _item(tensor)
                length = sum(part.length for part in item)
                placed[tensor.fqn] = _Placed(tensor, name, offset, length)
                parts += item
                offset += length
            files.append(OutputFile(path=folder / name, parts=tuple(parts)))
        named = [(".".join(map(str, path)), path, placed[fqn]) for path, fqn in paths.items()]
        named += [(".".join(map(str, path)), path, one) for path, one in placed_values.items()]
        metadata = _metadata(named)
    if len(metadata) > MAX_METADATA:
        raise UnsupportedFormat(
            f"its {METADATA_NAME} takes {len(metadata)} bytes, but at most {MAX_METADATA} can be "
            "read back"
        )
    return (*files, OutputFile(path=folder / METADATA_NAME, parts=(Literal(metadata),)))


def _value_item(value: Any) -> bytes:
    """Return the torch zip file of a value without tensors."""
    writer = PickleWriter()
    writer.value(value)
    return _rendered(tuple(zip_parts(archive_records(_ARCHIVE, writer.finish(), []))), {})


def _item(tensor: NewTensor) -> tuple[Part, ...]:
    """Return the parts of the torch zip file of one tensor; few, as there may be 100,000."""
    kind = tensor._replace(fqn=_ANY)
    head, tail = _archive(kind)
    if not tensor.nbytes:
        return (Literal(head),)
    made = Computed(tail, partial(_tail, kind, tensor.fqn), of=tensor.fqn)
    return Literal(head), Data(tensor.fqn, tensor.nbytes), made


@lru_cache(maxsize=1024)
def _archive(kind: NewTensor) -> tuple[bytes, int]:
    """Return the bytes before the data of a tensor, and the number of bytes after the data; the
    name is in neither.
    """
    before, _, behind = _parts(kind)
    return _rendered(before, {}), sum(part.length for part in behind)


def _tail(kind: NewTensor, fqn: str, crcs: Mapping[str, int]) -> bytes:
    """Return the bytes after the data of a tensor with this CRC-32: checksums, small records, the
    directory.
    """
    _, _, behind = _parts(kind)
    return _rendered(behind, {_ANY: crcs[fqn]})


@lru_cache(maxsize=1024)
def _parts(kind: NewTensor) -> tuple[tuple[Part, ...], tuple[Part, ...], tuple[Part, ...]]:
    """Return the parts of an item before, with and after its data."""
    parts = tuple(zip_parts(archive_records(_ARCHIVE, tensor_pickle(kind), [kind])))
    at = next((number for number, part in enumerate(parts) if isinstance(part, Data)), len(parts))
    return parts[:at], parts[at : at + 1], parts[at + 1 :]


def _rendered(parts: Sequence[Part], crcs: Mapping[str, int]) -> bytes:
    """Return parts without data as bytes."""
    data = bytearray()
    for part in parts:
        assert not isinstance(part, Data)
        data += part.data if isinstance(part, Literal) else part.make(crcs)
    return bytes(data)


def _metadata(named: Sequence[tuple[str, StatePath, _Placed]]) -> bytes:
    """Return the pickle of a ``Metadata``. ``named``: name, path, and place of each tensor by each
    of its names.
    """
    pickle = PickleWriter(protocol=4)
    pickle.value(Call(function=_METADATA, new=True))
    pickle.opcodes(EMPTY_DICT)
    pickle.memoize()
    pickle.opcodes(MARK)
    # Entry by entry: objects for 100,000 tensors would take a gigabyte.
    pickle.value("state_dict_metadata")
    pickle.dict((name, _described(placed.tensor)) for name, _, placed in named)
    pickle.value("planner_data")
    pickle.dict((name, path) for name, path, _ in named)
    pickle.value("storage_data")
    pickle.dict((_index(name, placed.tensor), _info(placed)) for name, _, placed in named)
    for name, value in (("storage_meta", None), ("version", _VERSION)):
        pickle.value(name)
        pickle.value(value)
    pickle.opcodes(SETITEMS + BUILD)
    return pickle.finish()


def _described(tensor: NewTensor | None) -> Call:
    if tensor is None:
        return Call(function=_BYTES, new=True)
    dtype = Global("torch", DTYPE_NAMES[tensor.dtype])
    chunk = {"offsets": _size((0,) * len(tensor.shape)), "sizes": _size(tensor.shape)}
    state = {
        "properties": Call(
            function=_PROPERTIES, state=(dtype, _STRIDED, False, _CONTIGUOUS, False), new=True
        ),
        "size": _size(tensor.shape),
        "chunks": [Call(function=_CHUNK, state=chunk, new=True)],
    }
    return Call(function=_TENSOR, state=state, new=True)


def _index(name: str, tensor: NewTensor | None) -> Call:
    first = _size((0,) * len(tensor.shape)) if tensor is not None else None
    state = {"fqn": name, "index": None if tensor is None else 0, "offset": first}
    return Call(function=_INDEX, state=state, new=True)


def _info(placed: _Placed) -> Call:
    state = {"relative_path": placed.file, "offset": placed.offset, "length": placed.length}
    return Call(function=_PLACE, state=state, new=True)


def _size(numbers: tuple[int, ...]) -> Call:
    return Call(function=_SIZE, args=(numbers,))
