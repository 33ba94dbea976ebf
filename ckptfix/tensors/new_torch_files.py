"""New files of torch.save: the pickle of a module's state dict, and the zip archive that holds it.

The archive is as ``caffe2/serialize/inline_container.cc`` of torch 2.13 (and the miniz in it)
writes it: every record is stored, its data starts on a multiple of 64 bytes of the archive thanks
to an extra field ``FB``; sizes and CRC-32 are zero in the local header and follow the data in a
descriptor, which a record of no bytes lacks; numbers from 2**32 - 1 on are in a ZIP64 field, and
then the descriptor has 64-bit sizes; the end records are always those of ZIP64. It is described as
parts that are written one after the other without going back, and all offsets count from its first
byte: an archive can lie anywhere in a larger file, as DCP has it.

The pickle says what torch 2.13 writes for an OrderedDict of tensors on the CPU, each of a storage of
its own (``torch/serialization.py``, ``torch/_tensor.py``): ``_rebuild_tensor_v2`` over a typed
storage, and ``_rebuild_tensor_v3`` over an untyped one for the dtypes that have no storage class.
It is of protocol 2, as ``torch.load(weights_only=True)`` reads no opcode of a newer one; DCP's
metadata has protocol 4. Python's own pickle module takes no part: classes are names here, and are
never imported.
"""

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from struct import pack
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.errors import UnsupportedFormat
from ckptfix.formats.pickle_opcodes import MAX_TEXT
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_tensors import STORAGE_DTYPES, TORCH_DTYPES
from ckptfix.formats.torch_zip import (
    ALIGNMENT,
    ENTRY,
    IN_UTF8,
    LOCAL,
    MAX_PICKLE,
    STORED,
    U32,
    end_records,
)
from ckptfix.storage.recipes import Literal
from ckptfix.tensors.new_files import (
    NO_WORDS,
    Computed,
    Data,
    NewTensor,
    OutputFile,
    Part,
    in_shards,
    index_file,
    shard_names,
)
from ckptfix.tensors.stored import StoredTensor

_IN_DESCRIPTOR = 0x8
_MADE_BY = 0x031E  # as miniz puts it into the end record: Unix, version 3.0
_MOST_JOINED = 64 << 10
"""Bytes of a record that are copied next to what lies around them, to be one part with it."""


class NewRecord(NamedTuple):
    """A record of a new archive: its full name with the root folder, and its bytes."""

    name: str
    content: Part


class _Placed(NamedTuple):
    """A record with the offset of its local header in the archive.

    ``zip64``: the ZIP64 field, empty where all numbers are small; the same in the local header and
    in the directory. ``known``: its CRC-32, None where that is known when its bytes are.
    """

    name: bytes
    content: Part
    length: int
    offset: int
    zip64: bytes
    known: int | None

    @property
    def flags(self) -> int:
        return IN_UTF8 | (_IN_DESCRIPTOR if self.length else 0)

    def crc(self, crcs: Mapping[str, int]) -> int:
        """The CRC-32 of its bytes."""
        if self.known is not None:
            return self.known
        if isinstance(self.content, Data):
            return crcs[self.content.fqn]
        assert isinstance(self.content, Computed)
        return zlib.crc32(self.content.make(crcs))


def _placed(name: str, content: Part, offset: int) -> _Placed:
    size = content.length
    values = pack("<QQ", size, size) if size >= U32 else b""
    values += pack("<Q", offset) if offset >= U32 else b""
    wide = pack("<HH", 1, len(values)) + values if values else b""
    known = zlib.crc32(content.data) if isinstance(content, Literal) else None if size else 0
    return _Placed(name.encode(), content, size, offset, wide, known)


def zip_parts(records: Iterable[NewRecord]) -> Iterator[Part]:
    """Yield the parts of an archive of these records, in their order; few, as there may be 100,000
    archives.
    """
    placed: list[_Placed] = []
    offset = 0
    before = bytearray()  # what is known already, and goes before the next part
    for name, content in records:
        record = _placed(name, content, offset)
        placed.append(record)
        header = _local_header(record)
        before += header
        if isinstance(content, Literal) and record.length <= _MOST_JOINED:
            before += content.data
        elif record.length:
            yield Literal(bytes(before))
            yield content
            before.clear()
        if not record.length:
            offset += len(header)
            continue
        if isinstance(content, Literal):
            before += _descriptor(record, {})
        else:
            of = content.fqn if isinstance(content, Data) else None
            yield Computed(_descriptor_size(record), partial(_descriptor, record), of)
        offset += len(header) + record.length + _descriptor_size(record)
    if before:
        yield Literal(bytes(before))
    size = sum(ENTRY.size + len(record.name) + len(record.zip64) for record in placed)
    end = end_records(offset, size, len(placed), _MADE_BY)
    yield Computed(size + len(end), lambda crcs: _directory(placed, crcs) + end)


def _local_header(record: _Placed) -> bytes:
    wide = record.zip64
    before = record.offset + LOCAL.size + len(record.name) + len(wide) + 4
    padding = -before % ALIGNMENT
    extra = wide + b"FB" + pack("<H", padding) + b"Z" * padding
    head = LOCAL.pack(
        b"PK\3\4", 0, record.flags, STORED, 0, 0, 0, 0, 0, len(record.name), len(extra)
    )
    return head + record.name + extra


def _descriptor_size(record: _Placed) -> int:
    return 24 if record.zip64 else 16


def _descriptor(record: _Placed, crcs: Mapping[str, int]) -> bytes:
    """Return the bytes after the data of a record."""
    size = record.length
    return b"PK\7\x08" + pack("<IQQ" if record.zip64 else "<III", record.crc(crcs), size, size)


def _directory(placed: Iterable[_Placed], crcs: Mapping[str, int]) -> bytes:
    """Return the central directory."""
    directory = bytearray()
    for record in placed:
        size, offset = min(record.length, U32), min(record.offset, U32)
        wide = record.zip64
        lengths = (len(record.name), len(wide), 0, 0, 0, 0)
        numbers = (0, 0, record.flags, STORED, 0, 0, record.crc(crcs), size, size)
        directory += ENTRY.pack(b"PK\1\2", *numbers, *lengths, offset) + record.name + wide
    return bytes(directory)


MARK, EMPTY_TUPLE, TUPLE, REDUCE, NEWOBJ, BUILD, BINPERSID = (
    b"(",
    b")",
    b"t",
    b"R",
    b"\x81",
    b"b",
    b"Q",
)
EMPTY_DICT, SETITEMS, EMPTY_LIST, APPENDS = b"}", b"u", b"]", b"e"
NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"
_SHORT_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


class Global(Struct, frozen=True, eq=False):
    """A function or a class by its name: ``Global("collections", "OrderedDict")``."""

    module: str
    name: str


class Call(Struct, frozen=True, kw_only=True, eq=False):
    """The result of a call: ``function(*args)``, then its dict ``items`` are set, then ``state`` is
    given to BUILD.

    ``new``: ``function.__new__(function, *args)`` is called, as for most classes, and not the
    function itself.
    """

    function: Global
    args: tuple[Any, ...] = ()
    items: Mapping[Any, Any] | None = None
    state: Any = None
    new: bool = False


def with_new_tensors(value: Any, name: str, sources: dict[str, StoredTensor]) -> Any:
    """Return a value for ``torch_file``: with ``NewTensor`` for the tensors in it, which go into
    ``sources``.

    ``name``: of a tensor that is the value itself; those below have the keys that lead to them
    behind it.
    """
    if isinstance(value, StoredTensor):
        sources[name] = value
        return NewTensor(name, value.dtype, value.shape, value.nbytes)
    if isinstance(value, Mapping):
        return {key: with_new_tensors(one, f"{name}/{key}", sources) for key, one in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return type(value)(
            with_new_tensors(one, f"{name}/{place}", sources) for place, one in enumerate(value)
        )
    if isinstance(value, Call):
        parts = {"args": value.args, "items": value.items, "state": value.state}
        return replace(
            value,
            **{key: with_new_tensors(one, f"{name}/{key}", sources) for key, one in parts.items()},
        )
    return value


class Persistent(Struct, frozen=True, eq=False):
    """An object that the reader finds by an id, as torch finds storages."""

    id: Any


class PickleWriter:
    """One pickle that grows at its end. Its memo has the strings and the globals; of anything else
    two references are two objects.
    """

    def __init__(self, protocol: int = 2) -> None:
        """Begin a pickle of protocol 2, or of 4, without its frames, which no reader needs."""
        self._data = bytearray(b"\x80" + pack("<B", protocol))
        self._is_new = protocol >= 4
        self._puts = 0
        self._known: dict[str | tuple[str, str], int] = {}

    def finish(self) -> bytes:
        """Return the pickle; its value is what was pushed last."""
        return bytes(self._data + b".")

    def opcodes(self, data: bytes) -> None:
        """Write opcodes unchanged."""
        self._data += data

    def value(self, value: Any) -> None:
        """Push a value: None, bool, int, float, str, tuple, list, mapping, Global, Call or
        Persistent.

        Raises UnsupportedFormat for a string or an int that is too long, TypeError for anything
        else: that is the caller's mistake.
        """
        if value is None or value is True or value is False:
            self._data += NONE if value is None else TRUE if value else FALSE
        elif isinstance(value, int):
            self._integer(value)
        elif isinstance(value, float):
            self._data += b"G" + pack(">d", value)
        elif isinstance(value, str):
            if not self._recalls(value):
                self._text(value)
        elif isinstance(value, tuple):
            short = _SHORT_TUPLES.get(len(value), b"" if value else EMPTY_TUPLE)
            self._data += b"" if short else MARK
            for item in value:
                self.value(item)
            self._data += short or TUPLE
        elif isinstance(value, list):
            self._data += EMPTY_LIST + MARK
            for item in value:
                self.value(item)
            self._data += APPENDS
        elif isinstance(value, Mapping):
            self.dict(value.items())
        elif isinstance(value, Global):
            self._global(value)
        elif isinstance(value, Persistent):
            self.value(value.id)
            self._data += BINPERSID
        elif isinstance(value, Call):
            self._global(value.function)
            self.value(value.args)
            self._data += NEWOBJ if value.new else REDUCE
            if value.new:
                self.memoize()
            if value.items:
                self.entries(value.items.items())
            if value.state is not None:
                self.value(value.state)
                self._data += BUILD
        else:
            raise TypeError(f"ckptfix cannot write a {type(value).__name__} to a pickle")

    def dict(self, entries: Iterable[tuple[Any, Any]]) -> None:
        """Push a dict with these entries."""
        self._data += EMPTY_DICT
        self.memoize()
        self.entries(entries)

    def entries(self, entries: Iterable[tuple[Any, Any]]) -> None:
        """Set entries of the dict that was pushed last."""
        self._data += MARK
        for key, value in entries:
            self.value(key)
            self.value(value)
        self._data += SETITEMS

    def memoize(self) -> None:
        """Memoize an instance or a dict in protocol 4, as pickle does and fast readers expect."""
        if self._is_new:
            self._put()

    def _put(self) -> int:
        """Keep the value on top of the stack in the memo, and return its number there."""
        number = self._puts
        if self._is_new:
            self._data += b"\x94"
        else:
            self._data += b"q" + pack("<B", number) if number < 256 else b"r" + pack("<I", number)
        self._puts = number + 1
        return number

    def _recalls(self, key: str | tuple[str, str]) -> bool:
        """Push what the memo has for a string or a global; False where it has nothing."""
        number = self._known.get(key)
        if number is None:
            return False
        self._data += b"h" + pack("<B", number) if number < 256 else b"j" + pack("<I", number)
        return True

    def _text(self, value: str) -> None:
        """Push a new string; half of a surrogate pair is written as pickle writes it."""
        data = value.encode("utf-8", "surrogatepass")
        if len(data) > MAX_TEXT:
            raise UnsupportedFormat(
                f"the name {value!r:.80}... takes {len(data)} bytes in a pickle, but at most "
                f"{MAX_TEXT} can be read back"
            )
        is_short = self._is_new and len(data) < 256
        self._data += b"\x8c" + pack("<B", len(data)) if is_short else b"X" + pack("<I", len(data))
        self._data += data
        self._known[value] = self._put()

    def _integer(self, value: int) -> None:
        """Push an integer in the shortest form."""
        if 0 <= value <= 0xFF:
            self._data += b"K" + pack("<B", value)
        elif 0 <= value <= 0xFFFF:
            self._data += b"M" + pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self._data += b"J" + pack("<i", value)
        else:
            length = (value if value >= 0 else ~value).bit_length() // 8 + 1
            if length > 0xFF:
                raise UnsupportedFormat(
                    f"ckptfix cannot write an integer of {length} bytes to a pickle (limit: 255)"
                )
            self._data += (
                b"\x8a" + pack("<B", length) + value.to_bytes(length, "little", signed=True)
            )

    def _global(self, value: Global) -> None:
        key = (value.module, value.name)
        if self._recalls(key):
            return
        if self._is_new:
            self.value(value.module)
            self.value(value.name)
            self._data += b"\x93"
        else:
            self._data += b"c" + "\n".join((*key, "")).encode("ascii")
        self._known[key] = self._put()


STORAGE_CLASSES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}
"""Dtype in safetensors' nouns -> typed storage class."""

DTYPE_NAMES = {noun: name for name, noun in TORCH_DTYPES.items()}
"""Dtype in safetensors' nouns -> its name in torch. torch.save has no tensors of those that are
missing.
"""

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
    """Return the files of one model: one, or shards of at most ``most`` bytes of tensors and their
    index.

    The tensors keep their order. ``ties``: other name -> name in ``tensors``; both name one
    storage, the other at the end of its file. ``versions``: module -> version, for the
    ``_metadata`` that a module's state dict has; every shard has all of it. ``index_words``: the
    other content of their index. Raises UnsupportedFormat for a dtype that torch.save has no
    tensors of, or a pickle that is too long.
    """
    _ensure_torch_has(tensors)
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
    return _archived(name, state_dict_pickle(tensors, tied, versions), tensors)


def _ensure_torch_has(tensors: Iterable[NewTensor]) -> None:
    """Raise UnsupportedFormat for a tensor of a dtype that torch.save has no tensors of."""
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise UnsupportedFormat(
                f"{tensor.fqn!r} has dtype {tensor.dtype}, which torch.save cannot write"
            )


def _archived(name: PurePosixPath, data: bytes, tensors: Sequence[NewTensor]) -> OutputFile:
    """Return the file of a pickle and of the storages of its tensors. Raises UnsupportedFormat when
    it is too long.
    """
    if len(data) > MAX_PICKLE:
        raise UnsupportedFormat(
            f"the pickle of {name} takes {len(data)} bytes, but at most {MAX_PICKLE} can be read "
            "back; use shards"
        )
    return OutputFile(
        path=name, parts=tuple(zip_parts(archive_records(_root(name.stem), data, tensors)))
    )


def _root(stem: str) -> str:
    """Return the folder in the archive: the name of the file, or torch's own word where zip has no
    such name.
    """
    try:
        stem.encode()
    except UnicodeEncodeError:
        return "archive"
    return stem


def archive_records(root: str, data: bytes, tensors: Sequence[NewTensor]) -> Iterator[NewRecord]:
    """Yield the records of an archive in the order that torch has: a pickle, and the storages 0, 1,
    2 and so on.
    """
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
    """Return 40 digits that identify the content of an archive: 20 of its records' names, 20 of the
    tensors' CRC-32.

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
    """Return the data.pkl of a state dict; the tensors' storages have the keys 0, 1, 2 and so
    on.
    """
    writer = _WithTensors()
    writer.value(Call(function=_ORDERED_DICT))
    writer.entries([*((tensor.fqn, tensor) for tensor in tensors), *tied.items()])
    if versions:
        items = {module: {"version": version} for module, version in versions.items()}
        writer.value({"_metadata": Call(function=_ORDERED_DICT, items=items)})
        writer.opcodes(BUILD)
    return writer.finish()


def tensor_pickle(tensor: NewTensor) -> bytes:
    """Return the data.pkl of a tensor that is saved alone, as each is in a DCP folder."""
    writer = _WithTensors()
    writer.value(tensor)
    return writer.finish()


class _WithTensors(PickleWriter):
    """Pickle whose values contain ``NewTensor`` in place of tensors. ``tensors``: each of them
    once, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, NewTensor] = {}
        self._keys: dict[str, str] = {}

    def value(self, value: Any) -> None:
        """Push a value as ``PickleWriter`` does, or a tensor; those of one fqn share a storage."""
        if isinstance(value, NewTensor):
            self.tensors.setdefault(value.fqn, value)
            key = self._keys.setdefault(value.fqn, str(len(self._keys)))
            super().value(_tensor_call(value, key))
        else:
            super().value(value)


@paused_gc()
def torch_file(path: PurePosixPath, value: Any) -> OutputFile:
    """Return a file as ``torch.save`` writes it, of a value as ``PickleWriter.value`` takes it.

    A ``NewTensor`` in it becomes a tensor with a storage of its own; those of one fqn share it.
    Raises UnsupportedFormat for a dtype that torch.save has no tensors of, or a pickle that is too
    long.
    """
    writer = _WithTensors()
    writer.value(value)
    tensors = tuple(writer.tensors.values())
    _ensure_torch_has(tensors)
    return _archived(path, writer.finish(), tensors)


def _tensor_call(tensor: NewTensor, key: str) -> Call:
    """Return the call that makes a tensor over the storage of this key."""
    cls = STORAGE_CLASSES.get(tensor.dtype)
    numel = tensor.nbytes * 8 // DTYPE_BITS[tensor.dtype] if cls else tensor.nbytes
    storage = Global("torch", cls) if cls else Global("torch.storage", "UntypedStorage")
    no_hooks = Call(function=_ORDERED_DICT)
    # The storage from its first element on, and no gradients.
    args = (
        Persistent(("storage", storage, key, "cpu", numel)),
        *(0, tensor.shape, _contiguous(tensor.shape), False, no_hooks),
    )
    if cls:
        return Call(function=Global("torch._utils", "_rebuild_tensor_v2"), args=args)
    dtype = Global("torch", DTYPE_NAMES.get(tensor.dtype, ""))
    return Call(function=Global("torch._utils", "_rebuild_tensor_v3"), args=(*args, dtype))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that torch gives a contiguous tensor; a dimension of no elements counts as
    one.
    """
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides)) if shape else ()
