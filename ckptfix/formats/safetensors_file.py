"""safetensors files and the index of shards.

A file is eight bytes of header length, a JSON header, then the tensors' bytes without a gap. The
rules are those of the reference parser (safetensors 0.8, ``safetensors/src/tensor.rs``), made
stricter where a rename would make an accepted fault worse: a duplicate key whose ranges agree is
refused here. The index of a sharded model is a JSON object with ``metadata`` and ``weight_map``
(fqn -> file name).
"""

import json
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from math import inf
from pathlib import PurePosixPath
from sys import float_info
from typing import Any

from msgspec import Struct

from ckptfix.errors import BeyondLimits, FormatError, TruncatedError
from ckptfix.formats.tensor import DTYPE_BITS, TensorInfo
from ckptfix.storage.files import FileReader

MAX_HEADER = 100_000_000
"""Longest header that the reference parser accepts, in bytes."""

MAX_VALUES = 4_000_000
"""Most values in a header; a tensor takes about ten, and a value up to 60 bytes of memory."""

METADATA_KEY = "__metadata__"
DCP_SHARDING_INFO = "DCP_SHARDING_INFO"
"""Metadata key of torch's ``HuggingFaceStorageWriter``: a JSON object, fqn -> the place of its part
in the tensor.
"""

_U64 = (1 << 64) - 1
_BITS = {dtype: bits for dtype, bits in DTYPE_BITS.items() if dtype != "C128"}
_KEYS = ("dtype", "shape", "data_offsets")
_DEEPEST = 127
"""Levels of brackets that the reference parser reads (serde_json's recursion limit)."""


class SafetensorsFile(Struct, frozen=True):
    """A parsed header. ``header`` is the JSON object in file order, ``data_start`` = 8 + header
    length.
    """

    header: Mapping[str, Any]
    raw: bytes
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    data_start: int
    data_end: int
    size: int

    @property
    def trailing(self) -> int:
        """Bytes after the last tensor, which belong to no tensor."""
        return self.size - self.data_end


COPIED_AS_TEXT = (
    "the file was copied in text mode: each line feed got a carriage return, which shifts all data "
    "after it; copy the file in binary mode"
)
_PIECE = 1 << 16
"""Bytes of a read in the search for line feeds: weights have a bare one in a few hundred bytes."""


def has_converted_lines(reader: FileReader, file: SafetensorsFile) -> bool:
    """Return whether a copy as text put a carriage return before each line feed in the data, so
    that it is shifted.

    FTP in text mode and ``core.autocrlf`` of git do. The surplus at the end is then as long as
    there are pairs.
    """
    pairs, begin, last = 0, file.data_start, b""
    while begin < file.size and pairs <= file.trailing:
        piece = reader.read(begin, min(_PIECE, file.size - begin))
        together = last + piece
        pairs += together.count(b"\r\n")
        if piece.count(b"\n") != together.count(b"\r\n"):
            return False
        begin, last = begin + len(piece), piece[-1:].replace(b"\n", b"")
    return 0 < pairs == file.trailing


def looks_like_safetensors(head: bytes) -> bool:
    """Return whether the first bytes of a file can begin a safetensors file: a sane length, then
    ``{``.
    """
    return (
        len(head) >= 9
        and head[8:9] == b"{"
        and 2 <= struct.unpack_from("<Q", head)[0] <= MAX_HEADER
    )


def read_safetensors(reader: FileReader, *, cut: bool = False) -> SafetensorsFile:
    """Parse the header of an open file. ``cut``: accept one that ends before its last tensor does.

    Raises TruncatedError when the file ends before its last tensor, FormatError for everything else
    that the reference parser refuses.
    """
    if reader.size < 8:
        raise TruncatedError(
            f"it has only {reader.size} bytes, but the header length alone takes 8",
            have=reader.size,
            need=8,
            in_header=True,
        )
    (length,) = struct.unpack("<Q", reader.read(0, 8))
    if length > MAX_HEADER:
        raise FormatError(f"the header claims {length} bytes, but the format allows {MAX_HEADER}")
    if 8 + length > reader.size:
        raise TruncatedError(
            f"the header ends at byte {8 + length}, but the file has only {reader.size} bytes",
            have=reader.size,
            need=8 + length,
            in_header=True,
        )
    raw = reader.read(8, length)
    # White space in front is JSON, and the reference parser reads it.
    if raw.lstrip(b" \t\n\r")[:1] != b"{":
        raise FormatError("the header does not begin with '{'")
    # A hook for every integer takes a third longer.
    integer = _integer if b"-0" in raw else None
    header = _parse_json(raw, "the header", 8, parse_constant=_no_constant, parse_int=integer)
    metadata = _metadata(header)
    tensors, data_end = _tensors(header, 8 + length)
    if data_end > reader.size and not cut:
        raise TruncatedError(
            f"the last tensor ends at byte {data_end}, but the file has only {reader.size} bytes",
            have=reader.size,
            need=data_end,
        )
    return SafetensorsFile(header, raw, tensors, metadata, 8 + length, data_end, reader.size)


def rename_header(
    file: SafetensorsFile, rename: Callable[[str], str], *, add_format: bool = False
) -> bytes:
    """Return the JSON header with every name mapped, unpadded; order, metadata and offsets stay.

    Alias records that ``save_model`` leaves in the metadata (a dropped tied name -> the name kept)
    follow. So do the names in ``DCP_SHARDING_INFO``, without which torch's reader fails. With
    ``add_format`` a missing ``"format": "pt"`` is added, without which transformers refuses the
    file.

    Raises FormatError when two names would become one, or a name would become ``__metadata__``.
    """
    out: dict[str, Any] = {}
    metadata = _renamed_metadata(file, rename)
    if add_format:
        metadata.setdefault("format", "pt")
    if metadata or METADATA_KEY in file.header:
        out[METADATA_KEY] = metadata
    origin: dict[str, str] = {}
    for key, value in file.header.items():
        if key == METADATA_KEY:
            continue
        new = rename(key)
        if new in origin:
            raise FormatError(f"{origin[new]!r} and {key!r} would both become {new!r}")
        if new == METADATA_KEY:
            raise FormatError(f"{key!r} would become the reserved name {METADATA_KEY!r}")
        origin[new] = key
        out[new] = value
    return json.dumps(out, separators=(",", ":"), ensure_ascii=False).encode()


def pad_header(header: bytes, length: int) -> bytes:
    """Pad a header with spaces, the only padding the format promises, to ``length`` bytes.

    Raises FormatError when it is longer than that.
    """
    if len(header) > length:
        raise FormatError(
            f"the new header takes {len(header)} bytes, but there is only room for {length}"
        )
    return header + b" " * (length - len(header))


def same_phase_length(header: bytes, old_length: int, block: int) -> int:
    """Return the shortest length >= ``len(header)`` that is congruent to ``old_length`` modulo
    ``block``.

    Tensor bytes then keep their phase within file system blocks, so that ``copy_file_range`` can
    share them between the old file and the new one on XFS and btrfs; and their alignment, in any
    case.
    """
    return len(header) + (old_length - len(header)) % block


def _parse_json(
    raw: bytes, what: str, start: int = 0, repeated: list[str] | None = None, **hooks: Any
) -> Any:
    """Return the value of a JSON text; ``what`` and ``start`` name it in errors, and the byte at
    which it begins.

    ``repeated``: gets the keys of which an object has two, of which the last counts; without it
    they are refused. ``hooks``: those of ``json.loads``.
    """
    # At most this many values: a few more are counted where strings hold commas or brackets.
    if raw.count(b"{") + raw.count(b"[") + raw.count(b",") > MAX_VALUES:
        raise BeyondLimits(f"{what} holds more than {MAX_VALUES} values")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # The reference parser keeps the last of two equal keys when their ranges agree; a rename
        # must not choose.
        result = dict(pairs)
        if len(result) != len(pairs):
            twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
            if repeated is None:
                raise FormatError(f"{what} has the key {twice[0]!r} more than once")
            repeated.extend(twice)
        return result

    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique, parse_float=_finite, **hooks)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{what} is not UTF-8 at byte {start + error.start}") from None
    except UnicodeEncodeError:
        raise FormatError(f"a name in {what} has an unpaired surrogate") from None
    except RecursionError:
        raise FormatError(f"{what} is nested too deeply") from None
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(f"{what} is not JSON: {error}") from None
    return value


def _finite(text: str) -> float:
    """Return the float that a JSON number spells. Raises FormatError for 1e999, which would be
    written as Infinity.
    """
    number = float(text)
    if number in (inf, -inf):
        raise FormatError(f"the number {text:.40} in the JSON is larger than any float")
    return number


def _integer(text: str) -> int | float:
    """Return the number that a JSON integer spells. The reference parser takes -0 for a float."""
    return -0.0 if text == "-0" else int(text)


def _no_constant(text: str) -> Any:
    raise FormatError(f"the header contains {text}, which is not JSON")


def _metadata(header: Mapping[str, Any]) -> dict[str, str]:
    metadata = header.get(METADATA_KEY)
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise FormatError(f"{METADATA_KEY} is not a map of strings")
    return metadata


def _renamed_metadata(file: SafetensorsFile, rename: Callable[[str], str]) -> dict[str, str]:
    result = {}
    for key, value in file.metadata.items():
        is_alias = value in file.header and key not in file.header and value != METADATA_KEY
        new_key, new_value = (rename(key), rename(value)) if is_alias else (key, value)
        if key == DCP_SHARDING_INFO:
            new_value = _renamed_places(value, rename)
        if new_key in result:
            raise FormatError(f"two entries of {METADATA_KEY} would both become {new_key!r}")
        result[new_key] = new_value
    return result


def _renamed_places(text: str, rename: Callable[[str], str]) -> str:
    try:
        places = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(places, dict):
        return text
    return json.dumps({rename(fqn): place for fqn, place in places.items()})


def _tensors(header: Mapping[str, Any], start: int) -> tuple[tuple[TensorInfo, ...], int]:
    """Return the tensors in the order of their bytes, and where the last one ends."""
    found: list[TensorInfo] = []
    for fqn, entry in header.items():
        if fqn == METADATA_KEY:
            continue
        try:
            begin, end = entry["data_offsets"]
            dtype, sizes = entry["dtype"], entry["shape"]
        except (TypeError, KeyError, ValueError):
            raise FormatError(
                f"the entry of {fqn!r} lacks dtype, shape or two data_offsets"
            ) from None
        if type(sizes) is not list:
            raise FormatError(f"the shape of {fqn!r} is not a list")
        shape = tuple(sizes)
        _check_entry(fqn, dtype, shape, begin, end)
        if len(entry) > len(_KEYS):
            _check_more(fqn, entry)
        found.append(TensorInfo(fqn, dtype, shape, (start + begin, start + end)))
    found.sort(key=_offsets)
    position = start
    for tensor in found:
        begin, end = _offsets(tensor)
        if begin != position:
            kind = "overlap the data before" if begin < position else "leave a gap"
            raise FormatError(
                f"the bytes of {tensor.fqn!r} {kind}: they begin at {begin}, but the data before "
                f"them ends at {position}"
            )
        position = end
    return tuple(found), position


def _offsets(tensor: TensorInfo) -> tuple[int, int]:
    assert tensor.data_offsets is not None  # a safetensors entry always has them
    return tensor.data_offsets


def _check_entry(
    fqn: str, dtype: object, shape: tuple[object, ...], begin: object, end: object
) -> None:
    # type() and not isinstance(): JSON's true would pass as 1.
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise FormatError(f"the data_offsets of {fqn!r} are invalid: {begin!r} to {end!r}")
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise FormatError(f"the dtype of {fqn!r} is {dtype!r}, which safetensors does not have")
    count = 1
    for size in shape:
        # The reference reads sizes up to 64 bits, torch and numpy up to 63.
        if type(size) is not int or not 0 <= size <= _U64 >> 1:
            raise FormatError(f"the shape of {fqn!r} has an invalid size: {size!r}")
        count *= size
        if count > _U64:  # as the reference refuses it, even where a later 0 makes it empty
            raise FormatError(f"the shape of {fqn!r} has more elements than 64 bits can count")
    if count == 0:
        stride = 1
        for size in shape[1:]:
            assert type(size) is int
            stride *= size or 1
            # torch 2.13 counts it over sizes of 0, too, and fails with "Stride calculation
            # overflowed". load_file of safetensors 0.8 takes what is 0 modulo 64 bits; load and
            # numpy refuse that as well.
            if stride > _U64 >> 1:
                raise FormatError(f"the shape of {fqn!r} needs a stride of more than 63 bits")
    if count * bits != (end - begin) * 8:
        raise FormatError(
            f"{fqn!r} has {count * bits / 8:g} bytes by its dtype and shape, but {end - begin} by "
            "its data_offsets"
        )


def _check_more(fqn: str, entry: Mapping[str, Any]) -> None:
    """Check the fields that the format does not know. The reference parser ignores them, but parses
    them first.
    """
    values: list[Any] = [entry[key] for key in entry if key not in _KEYS]
    # The header and the entry.
    depth = 2
    while values:
        if any(type(value) is int and abs(value) > float_info.max for value in values):
            raise FormatError(f"the entry of {fqn!r} has an integer that is larger than any float")
        nested = [value for value in values if isinstance(value, dict | list)]
        depth += 1
        if nested and depth > _DEEPEST:
            raise FormatError(f"the entry of {fqn!r} is nested too deeply")
        values = [
            item
            for value in nested
            for item in (value.values() if isinstance(value, dict) else value)
        ]


MAX_INDEX = 128 << 20
"""Longest index that is read, in bytes; a million names take about 100 MB."""


class WeightsIndex(Struct, frozen=True):
    """A parsed index: ``weight_map`` from fqn to the name of a file in the same folder.

    ``repeated``: the keys that the JSON text has twice. ``spelled``: the paths in the JSON text
    that are not file names and lead to files in the folder all the same, such as ``./x``, in order.
    """

    document: Mapping[str, Any]
    weight_map: Mapping[str, str]
    repeated: tuple[str, ...] = ()
    spelled: tuple[str, ...] = ()

    @property
    def leads_back(self) -> tuple[str, ...]:
        """The spelled paths that go through other folders: the index of a copy leads to the files
        of this folder.
        """
        paths = ((path, PurePosixPath(path)) for path in self.spelled)
        return tuple(path for path, parsed in paths if parsed.is_absolute() or ".." in parsed.parts)


class ListsPaths(FormatError):
    """An index that lists paths, and not only names of files. ``index``: it, with these paths in
    its map.
    """

    def __init__(self, message: str, index: WeightsIndex) -> None:
        super().__init__(message)
        self.index = index


def parse_index(data: bytes) -> WeightsIndex:
    """Parse the bytes of an index file.

    Raises FormatError; ListsPaths for paths (``./x``, ``shards/x``, ``../../x``, ``/x``), which
    some loaders take. None of them is followed here.
    """
    repeated: list[str] = []
    document = _parse_json(data, "the index", repeated=repeated)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict):
        raise FormatError("the index has no weight_map")
    paths: set[str] = set()  # 100,000 names lie in a few files
    odd = ""
    for fqn, name in weight_map.items():
        if isinstance(name, str) and name in paths:
            continue
        message = (
            f"the weight_map maps {fqn!r} to {name!r}, which is not a file name in this folder"
        )
        if (
            not isinstance(name, str)
            or not is_plain_name(name.rpartition("/")[2])
            or set("\\\0") & set(name)
        ):
            raise FormatError(message)
        odd = odd or ("" if is_plain_name(name) else message)
        paths.add(name)
    index = WeightsIndex(document, weight_map, tuple(repeated))
    if odd:
        raise ListsPaths(odd, index)
    return index


def is_plain_name(name: str) -> bool:
    """Return whether ``name`` can only mean a file directly in the folder at hand."""
    return name not in ("", ".", "..") and not any(char in name for char in "/\\\0")


def format_index(
    index: WeightsIndex | None, weight_map: Mapping[str, str], total_size: int
) -> bytes:
    """Return the bytes of an index with this weight map, laid out as transformers and accelerate
    write it.

    Other entries of ``index`` stay. ``total_size`` (bytes of all tensors) goes into the metadata.
    """
    document: dict[str, Any] = dict(index.document) if index else {}
    metadata = document.get("metadata")
    document["metadata"] = {
        **(metadata if isinstance(metadata, dict) else {}),
        "total_size": total_size,
    }
    document["weight_map"] = dict(weight_map)
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
