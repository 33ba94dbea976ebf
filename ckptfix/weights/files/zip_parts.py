"""The zip archives of torch.save, as parts that can be written one after the other without going back.

As ``caffe2/serialize/inline_container.cc`` of torch 2.13 (and the miniz in it) writes them: every record is stored, its
data starts on a multiple of 64 bytes of the archive thanks to an extra field ``FB``; sizes and CRC-32 are zero in the
local header and follow the data in a descriptor, which a record of no bytes lacks; numbers from 2**32 - 1 on are in a
ZIP64 field, and then the descriptor has 64-bit sizes; the end records are always those of ZIP64.

All offsets count from the first byte of the archive, so an archive can stand anywhere in a larger file, as DCP has it.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from struct import pack
from typing import NamedTuple

from ckptfix.formats.torch_zip import ALIGNMENT
from ckptfix.formats.zip_directory import END, END64, ENTRY, IN_UTF8, LOCAL, LOCATOR, STORED, U16, U32
from ckptfix.weights.files.parts import Computed, Data, Literal, Part

_IN_DESCRIPTOR = 0x8
_MADE_BY, _NEEDS = 0x031E, 45  # what miniz puts into the end record: Unix and version 3.0; 4.5 for ZIP64


class NewRecord(NamedTuple):
    """A record of a new archive: its whole name with the root folder, and its bytes."""

    name: str
    content: Part


class _Placed(NamedTuple):
    """A record with the offset of its local header in the archive."""

    name: bytes
    content: Part
    offset: int

    @property
    def flags(self) -> int:
        return IN_UTF8 | (_IN_DESCRIPTOR if self.content.length else 0)

    @property
    def zip64(self) -> bytes:
        """The ZIP64 field, empty where all numbers are small; the same in the local header and in the directory."""
        size, offset = self.content.length, self.offset
        values = pack("<QQ", size, size) if size >= U32 else b""
        values += pack("<Q", offset) if offset >= U32 else b""
        return pack("<HH", 1, len(values)) + values if values else b""

    def crc(self, crcs: Mapping[str, int]) -> int:
        """The CRC-32 of its bytes."""
        match self.content:
            case Data(fqn, length):
                return crcs[fqn] if length else 0
            case Literal(data):
                return zlib.crc32(data)
            case Computed(_, make):
                return zlib.crc32(make(crcs))


def zip_parts(records: Iterable[NewRecord]) -> Iterator[Part]:
    """Yield the parts of an archive of these records, in their order."""
    placed: list[_Placed] = []
    offset = 0
    for name, content in records:
        record = _Placed(name.encode(), content, offset)
        placed.append(record)
        header = _local_header(record)
        yield Literal(header)
        if content.length:
            yield content
            if isinstance(content, Literal):
                yield Literal(_descriptor(record, {}))
            else:
                yield Computed(_descriptor_size(record), partial(_descriptor, record))
        offset += len(header) + content.length + (_descriptor_size(record) if content.length else 0)
    size = sum(ENTRY.size + len(record.name) + len(record.zip64) for record in placed)
    end = _end_records(offset, size, len(placed))
    yield Computed(size + len(end), lambda crcs: _directory(placed, crcs) + end)


def _local_header(record: _Placed) -> bytes:
    wide = record.zip64
    before = record.offset + LOCAL.size + len(record.name) + len(wide) + 4
    padding = -before % ALIGNMENT
    extra = wide + b"FB" + pack("<H", padding) + b"Z" * padding
    head = LOCAL.pack(b"PK\3\4", 0, record.flags, STORED, 0, 0, 0, 0, 0, len(record.name), len(extra))
    return head + record.name + extra


def _descriptor_size(record: _Placed) -> int:
    return 24 if record.zip64 else 16


def _descriptor(record: _Placed, crcs: Mapping[str, int]) -> bytes:
    """Return what follows the data of a record."""
    size = record.content.length
    return b"PK\7\x08" + pack("<IQQ" if record.zip64 else "<III", record.crc(crcs), size, size)


def _directory(placed: Iterable[_Placed], crcs: Mapping[str, int]) -> bytes:
    """Return the central directory."""
    directory = bytearray()
    for record in placed:
        size, offset = min(record.content.length, U32), min(record.offset, U32)
        wide = record.zip64
        lengths = (len(record.name), len(wide), 0, 0, 0, 0)
        numbers = (0, 0, record.flags, STORED, 0, 0, record.crc(crcs), size, size)
        directory += ENTRY.pack(b"PK\1\2", *numbers, *lengths, offset) + record.name + wide
    return bytes(directory)


def _end_records(offset: int, size: int, count: int) -> bytes:
    """Return the ZIP64 end record, its locator, and the end record."""
    end64 = END64.pack(b"PK\6\6", END64.size - 12, _MADE_BY, _NEEDS, 0, 0, count, count, size, offset)
    locator = LOCATOR.pack(b"PK\6\7", 0, offset + size, 1)
    few = min(count, U16)
    return end64 + locator + END.pack(b"PK\5\6", 0, 0, few, few, min(size, U32), min(offset, U32), 0)
