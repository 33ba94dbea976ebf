"""Changes of a save near its metadata. A mutant is a function of the seed of a run and of its
number alone.
"""

import lzma
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import PurePath
from random import Random
from typing import NamedTuple

from tests.fuzz.seeds import Seed

_AROUND = 24
"""Bytes of tensors next to the metadata that are changed, too."""

_JSON_VALUE = re.compile(rb': ?("[^"]*"|[0-9]+|\[[^][]*\]|\{[^{}]*\})')
"""A value in JSON, behind its key."""

_JSON_VALUES = (b"null", b"[]", b"{}", b'""', b'"x"', b"-0", b"0.0", b"true")

_MARKED = re.compile(rb"PK[\x01-\x07][\x02-\x08]|FB|/|\x80\x02|[cX]|[0-9]+")
"""Places of a file of torch where a change is likely to reach another branch of a reader."""


_PICKLES = 0.4
"""Share of the changes of a zip file of torch that are to its pickle, and keep every checksum
correct.
"""

_VALUES = (
    b"N", b"\x88", b"\x89", b"K\x00", b"K\x07", b"J\xff\xff\xff\xff", b"G?\xf8\0\0\0\0\0\0", b")",
    b"]", b"}", b"X\x03\0\0\0foo", b"X\x03\0\0\0cpu", b"U\x010", b"K\x02K\x03\x86", b"K\x02\x85",
    b"h\x00", b"h\x05", b"\x8f",
)  # fmt: skip
_NAMES = (
    "collections OrderedDict", "collections Counter", "__builtin__ set", "__builtin__ bytearray",
    "__builtin__ complex", "_codecs encode", "torch Size", "torch device", "torch float32",
    "torch FloatStorage", "torch LongStorage", "torch Tensor", "torch.nn.parameter Parameter",
    "torch.serialization _get_layout", "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_parameter", "torch._utils _rebuild_qtensor",
    "torch._utils _rebuild_sparse_tensor", "torch._utils _rebuild_meta_tensor_no_storage",
    "torch._tensor _rebuild_from_type_v2",
)  # fmt: skip
_SWAPPED = (b"R", b"\x81", b"b", b"s", b"a", b"\x85", b"\x86", b"t", b"u", b"e")
"""What an opcode becomes: values, globals that torch allows, and opcodes without an operand."""

_UNREADABLE = (
    zipfile.BadZipFile, RuntimeError, ValueError, OSError, EOFError, IndexError, OverflowError,
    struct.error, zlib.error, lzma.LZMAError,
)  # fmt: skip
"""Errors of ``zipfile`` and ``pickletools`` for changed records; for one marked as encrypted it is
a RuntimeError.
"""


class Mutant(NamedTuple):
    """A changed save: the seed's place in the list, the files that differ, and the changes in
    words.
    """

    seed: int
    files: dict[str, bytes]
    changes: tuple[str, ...]


def format_of(formats: Sequence[str], number: int) -> str:
    """Return the format of mutant ``number``: each has the same share, for each of two processes,
    too.
    """
    return formats[number // 2 % len(formats)]


def mutant(seeds: Sequence[Seed], seed: int, number: int) -> Mutant:
    """Return mutant ``number`` of a run. Every format has the same share."""
    random = Random(f"{seed}/{number}")
    kind = format_of(sorted({one.format for one in seeds}), number)
    place = random.choice([index for index, one in enumerate(seeds) if one.format == kind])
    source = seeds[place]
    files: dict[str, bytes] = {}
    changes = []
    name = random.choice(source.targets)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        data = files.get(name, source.files[name])
        others = [path for path in source.files if path != name]
        if others and random.random() < 0.02:
            other = random.choice(others)
            files[name], files[other] = files.get(other, source.files[other]), data
            changes.append(f"{name} and {other} exchanged")
            continue
        if random.random() < _PICKLES and (edited := edited_pickle(random, data)) is not None:
            files[name], words = edited
            changes.append(f"{name}: {words}")
            continue
        position, end = _place(random, name, data)
        files[name], words = _changed(random, data, position, end, source)
        changes.append(f"{name}: {words}")
    return Mutant(
        place,
        {path: data for path, data in files.items() if data != source.files[path]},
        tuple(changes),
    )


def metadata(name: str, data: bytes) -> list[tuple[int, int]]:
    """Return where the metadata of a file begins and ends, as (begin, end): all of it for an
    unknown kind.
    """
    if name.endswith(".safetensors") and len(data) >= 8:
        return [(0, 8 + int.from_bytes(data[:8], "little") + _AROUND)]
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            records, directory = archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError):
        return [(0, len(data))]
    places = [(directory, len(data))] * 2
    for record in records:
        head = record.header_offset
        extra = int.from_bytes(data[head + 28 : head + 30], "little")
        begin = head + 30 + len(record.filename) + extra
        is_tensor = "/data/" in record.filename
        places += [
            (
                head,
                (
                    begin + min(record.file_size, _AROUND)
                    if is_tensor
                    else begin + record.file_size + 16
                ),
            )
        ]
    return places


def edited_pickle(random: Random, data: bytes) -> tuple[bytes, str] | None:
    """Return a zip file of torch with one opcode of its pickle changed, packed again with correct
    checksums.

    None for another file, or one that an earlier change made unreadable: encrypted, compressed,
    without opcodes.
    """
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        (name,) = (name for name in records if name.endswith("/data.pkl"))
        found = list(pickletools.genops(records[name]))
    except _UNREADABLE:
        return None
    pickle = records[name]
    edges = [position or 0 for _, _, position in found]
    number = random.randrange(1, len(found))
    begin, end = edges[number], ([*edges, len(pickle)])[number + 1]
    old = found[number][0].name
    match random.randrange(6):
        case 0:
            new, words = b"", "removed"
        case 1:
            new, words = pickle[begin:end] * 2, "repeated"
        case 2:
            new = b"c" + random.choice(_NAMES).replace(" ", "\n").encode() + b"\n"
            words = f"is now {new!r}"
        case 3:
            new = random.choice(_SWAPPED)
            words = f"is now {new!r}"
        case _:
            new = random.choice(_VALUES)
            words = f"is now {new!r}"
    records[name] = pickle[:begin] + new + pickle[end:]
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for path, content in records.items():
            archive.writestr(zipfile.ZipInfo(path), content)
    return (
        stream.getvalue(),
        f"the opcode {old} at byte {begin} of the pickle {words}, with correct checksums",
    )


def _place(random: Random, name: str, data: bytes) -> tuple[int, int]:
    """Return a position near the metadata, and the end of that part of the metadata."""
    begin, end = random.choice(metadata(PurePath(name).name, data))
    begin = min(max(begin, 0), len(data))
    end = max(begin, min(end, len(data)))
    if end > begin and random.random() < 0.3:
        marks = [match.start() for match in _MARKED.finditer(data, begin, end)]
        if marks:
            return min(end, random.choice(marks) + random.randrange(12)), end
    return begin + random.randrange(end - begin + 1), end


def _changed(random: Random, data: bytes, at: int, end: int, source: Seed) -> tuple[bytes, str]:
    """Return the data with one change at a position, and the change in words."""
    length = random.choice((1, 1, 2, 3, 4, 4, 8, 8, 16, random.randrange(1, 200)))
    stop = min(at + length, len(data))
    match random.randrange(15):
        case 0 | 1 | 2 | 3 if at < len(data):
            bit = random.randrange(8)
            return _put(data, at, bytes([data[at] ^ 1 << bit])), f"bit {bit} of byte {at} flipped"
        case 4 if at < len(data):
            value = random.choice(
                (0, 1, 2, 0x2E, 0x7F, 0x80, 0xFF, random.randrange(256), data[at] ^ 0x20)
            )
            return _put(data, at, bytes([value])), f"byte {at} set to {value}"
        case 5:
            return data[:at], f"cut at byte {at}"
        case 6:
            return data[:at] + data[stop:], f"bytes {at} to {stop} removed"
        case 7:
            return _put(data, at, bytes(stop - at)), f"bytes {at} to {stop} are zeros"
        case 8:
            return (
                data[:at] + random.randbytes(length) + data[at:],
                f"{length} bytes inserted at byte {at}",
            )
        case 9:
            times = random.choice((1, 1, 2, 50))
            return (
                data[:stop] + data[at:stop] * times + data[stop:],
                f"bytes {at} to {stop} repeated {times} times",
            )
        case 10:
            path = random.choice(list(source.files))
            donor = source.files[path]
            begin = random.randrange(len(donor) + 1)
            part = donor[begin : begin + length]
            put = _put(data, at, part) if random.random() < 0.5 else data[:at] + part + data[stop:]
            return put, f"bytes {at} to {at + len(part)} taken from {path} at byte {begin}"
        case 11 | 12 if at < len(data):
            width = random.choice((1, 2, 4, 8))
            number = int.from_bytes(data[at : at + width], "little")
            step = random.choice(
                (1, -1, 2, -2, 4, 8, -8, 64, 256, 1 << 16, number, (1 << 8 * width) - 1 - number)
            )
            value = (number + step) % (1 << 8 * width)
            return (
                _put(data, at, value.to_bytes(width, "little")),
                f"{width} bytes at {at}: {number} is now {value}",
            )
        case 13 if digits := [match.span() for match in re.finditer(rb"[0-9]+", data[at:end])][:4]:
            low, high = (at + edge for edge in random.choice(digits))
            old = int(data[low:high][:18])
            new = random.choice(
                (old + 1, max(0, old - 1), old * 2, old * 10, -old, 0, 1 << 32, 1 << 63, 10**30)
            )
            return (
                data[:low] + str(new).encode() + data[high:],
                f"number {old} at byte {low} is now {new}",
            )
        case 14 if values := [match.span(1) for match in _JSON_VALUE.finditer(data[at:end])][:4]:
            low, high = (at + edge for edge in random.choice(values))
            text = random.choice((*_JSON_VALUES, b"[" + data[low:high] + b"]"))
            return (
                data[:low] + text + data[high:],
                f"the JSON value at byte {low} is now {text[:40]!r}",
            )
        case _:
            other = random.randrange(len(data) + 1)
            low, high = sorted((at, other))
            size = min(length, high - low, len(data) - high)
            one, two = data[low : low + size], data[high : high + size]
            return (
                _put(_put(data, low, two), high, one),
                f"{size} bytes at {low} and {high} exchanged",
            )


def _put(data: bytes, at: int, part: bytes) -> bytes:
    return data[:at] + part + data[at + len(part) :]
