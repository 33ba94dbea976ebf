"""The zip files of torch.save since 1.6: find the records without trusting any number, and append an edit.

Layout facts: PKWARE's APPNOTE 6.3 (records, ZIP64), and for torch 2.13 ``caffe2/serialize/inline_container.cc``: every
record is stored, its data starts on a multiple of 64 bytes, the end records are always those of ZIP64.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from struct import Struct
from typing import NamedTuple

from ckptfix.errors import FormatError, TruncatedError, UnsupportedFormat
from ckptfix.storage.reading import FileReader

MAX_PICKLE = 1 << 30
"""Longest pickle that is read, in bytes; a tensor takes about 150."""

MAX_DIRECTORY = 1 << 30
"""Longest central directory that is read, in bytes; a record takes about 65."""

ALIGNMENT = 64
"""torch starts the data of every record on a multiple of this."""

CHUNK = 1 << 20
"""Bytes per read of a checksum."""

TAIL = 98
"""Bytes of the three end records: ZIP64 end of central directory, its locator, end of central directory."""

_U16, _U32 = 0xFFFF, 0xFFFFFFFF
_END = Struct("<4s4H2IH")
_LOCATOR = Struct("<4sIQI")
_END64 = Struct("<4sQ2H2I4Q")
_ENTRY = Struct("<4s6H3I5H2I")
_LOCAL = Struct("<4s5H3I2H")
_STORED, _DEFLATED = 0, 8
_IN_UTF8 = 0x800
_ENCRYPTED = 0x1


class ZipRecord(NamedTuple):
    """One record. Offsets count from the start of the file; ``size`` is unpacked, ``packed`` what it takes there.

    ``crc`` is the one in the central directory, 0 when none was written. ``entry`` is where its entry begins in the
    directory.
    """

    name: str
    method: int
    crc: int
    header_offset: int
    data_offset: int
    packed: int
    size: int
    entry: int

    @property
    def is_stored(self) -> bool:
        """Whether the bytes lie in the file as they are."""
        return self.method == _STORED


@dataclass(frozen=True, slots=True)
class TorchZip:
    """A parsed zip file of torch.

    ``root``: the folder all of torch's records are in. ``end``: where the last end record ends; ``trailing`` bytes
    follow. ``directory``: the bytes of the central directory. ``big_endian``: what its byteorder record says.
    """

    root: str
    records: tuple[ZipRecord, ...]
    pickle: ZipRecord
    directory: bytes = field(repr=False)
    comment: bytes
    big_endian: bool
    end: int
    trailing: int

    @property
    def is_torchscript(self) -> bool:
        """Whether it is a TorchScript archive, which holds code beside its state."""
        names = {record.name for record in self.records}
        return f"{self.root}/constants.pkl" in names or any(
            name.startswith(f"{self.root}/code/") for name in names
        )


@dataclass(frozen=True, slots=True)
class AppendedBytes:
    """``data`` goes where the zip ends; its last ``tail`` bytes are written when all before them are on disk."""

    data: bytes = field(repr=False)
    tail: int


def read_zip(reader: FileReader) -> TorchZip:
    """Parse the directory and every local header.

    Raises TruncatedError when the file is cut, FormatError when numbers contradict one another, records overlap or a
    name could leave its folder, UnsupportedFormat for encryption.
    """
    end = _read_end(reader)
    directory = reader.read(end.directory_offset, end.directory_size)
    entries = list(_entries(directory, end.entries))
    records = _locate(reader, entries, end.directory_offset)
    if not records:
        raise FormatError("the zip archive is empty")
    by_name = {record.name: record for record in records}
    if len(by_name) != len(records):
        raise FormatError(
            f"the zip archive has {len(records) - len(by_name)} records under a name used before"
        )
    root, slash, _ = records[0].name.partition("/")
    pickle = by_name.get(f"{root}/data.pkl")
    if not slash or pickle is None:
        raise FormatError(f"a zip archive, but none of torch.save: no data.pkl beside {records[0].name!r}")
    byteorder = by_name.get(f"{root}/byteorder")
    is_big = byteorder is not None and read_record(reader, byteorder) == b"big"
    return TorchZip(root, records, pickle, directory, end.comment, is_big, end.end, reader.size - end.end)


def read_record(reader: FileReader, record: ZipRecord) -> bytes:
    """Return the bytes of one record, unpacked.

    Raises FormatError when they are not what the directory says, or more than ``MAX_PICKLE``.
    """
    if max(record.size, record.packed) > MAX_PICKLE:
        raise FormatError(f"{record.name!r} has {record.size} bytes, at most {MAX_PICKLE} are read")
    raw = reader.read(record.data_offset, record.packed)
    if record.is_stored:
        return raw
    try:
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(raw, record.size + 1)
    except zlib.error as error:
        raise FormatError(f"{record.name!r} cannot be unpacked: {error}") from None
    if len(data) != record.size:
        raise FormatError(f"{record.name!r} does not unpack to its {record.size} bytes")
    return data


def storage_records(archive: TorchZip) -> dict[str, ZipRecord]:
    """Return the record of every storage, by its key."""
    prefix = f"{archive.root}/data/"
    skip = len(prefix)
    return {record.name[skip:]: record for record in archive.records if record.name.startswith(prefix)}


def crc_mismatches(
    archive: TorchZip,
    reader: FileReader,
    *,
    every_record: bool,
    progress: Callable[[int], None] | None = None,
) -> Iterator[ZipRecord]:
    """Yield each record whose bytes do not have the CRC in the directory.

    Without ``every_record`` the storages are left out. A CRC of 0 was never written (torch can leave them out), and
    says nothing. ``progress`` is called with the bytes read since the last call.
    """
    prefix = f"{archive.root}/data/"
    for record in archive.records:
        if record.crc == 0 or not record.is_stored or (record.name.startswith(prefix) and not every_record):
            continue
        crc = 0
        for position in range(0, record.size, CHUNK):
            chunk = reader.read(record.data_offset + position, min(CHUNK, record.size - position))
            crc = zlib.crc32(chunk, crc)
            if progress is not None:
                progress(len(chunk))
        if crc != record.crc:
            yield record


def append_edit(archive: TorchZip, new_pickle: bytes) -> AppendedBytes:
    """Return what to add at ``archive.end`` so that its data.pkl is ``new_pickle``; the old bytes all stay.

    Raises UnsupportedFormat for an archive with code in it, a comment, or a packed data.pkl.
    """
    if archive.is_torchscript:
        raise UnsupportedFormat("it is a TorchScript archive, whose code refers to the names")
    if archive.comment:
        raise UnsupportedFormat("the zip archive has a comment")
    if not archive.pickle.is_stored:
        raise UnsupportedFormat("its data.pkl is compressed, which torch.save never does")
    old = archive.pickle
    fields = list(_ENTRY.unpack_from(archive.directory, old.entry))
    old_entry_size = _ENTRY.size + sum(fields[10:13])
    name = old.name.encode()
    flags, time, date, crc, size = (
        fields[3] & _IN_UTF8,
        fields[5],
        fields[6],
        zlib.crc32(new_pickle),
        len(new_pickle),
    )
    padding = -(archive.end + _LOCAL.size + len(name) + 4) % ALIGNMENT
    extra = (
        b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    )  # as torch pads: readers skip an unknown field
    local = _LOCAL.pack(b"PK\3\4", 20, flags, _STORED, time, date, crc, size, size, len(name), len(extra))
    extra64 = b"\1\0\x08\0" + archive.end.to_bytes(8, "little") if archive.end >= _U32 else b""
    fields[2], fields[3], fields[4] = 45 if extra64 else 20, flags, _STORED
    fields[7:10] = crc, size, size
    fields[11], fields[12], fields[16] = len(extra64), 0, min(archive.end, _U32)
    after = archive.directory[old.entry + old_entry_size :]
    directory = archive.directory[: old.entry] + _ENTRY.pack(*fields) + name + extra64 + after
    record = local + name + extra + new_pickle
    tail = _end_records(archive.end + len(record), len(directory), len(archive.records))
    return AppendedBytes(record + directory + tail, len(tail))


def _end_records(directory_offset: int, directory_size: int, count: int) -> bytes:
    end64 = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, directory_size, directory_offset)
    locator = _LOCATOR.pack(b"PK\6\7", 0, directory_offset + directory_size, 1)
    few = min(count, _U16)
    end = _END.pack(b"PK\5\6", 0, 0, few, few, min(directory_size, _U32), min(directory_offset, _U32), 0)
    return end64 + locator + end


class _End(NamedTuple):
    entries: int
    directory_size: int
    directory_offset: int
    end: int
    comment: bytes


def _read_end(reader: FileReader) -> _End:
    window_start = max(0, reader.size - _END.size - _U16)
    window = reader.read(window_start, reader.size - window_start)
    found = window.rfind(b"PK\5\6")
    if found < 0:
        raise TruncatedError(
            f"the zip archive has no end record: it was cut, at byte {reader.size} at the latest",
            have=reader.size,
        )
    position = window_start + found
    if len(window) - found < _END.size:
        _check_end(reader, position + _END.size)
    _, disk, first_disk, here, count, size, offset, comment_length = _END.unpack_from(window, found)
    end = position + _END.size + comment_length
    _check_end(reader, end)
    comment = window[found + _END.size : found + _END.size + comment_length]
    limit = position
    if found >= _LOCATOR.size and window.startswith(b"PK\6\7", found - _LOCATOR.size):
        narrow = (disk, first_disk, here, count, size, offset)
        limit = _LOCATOR.unpack_from(window, found - _LOCATOR.size)[2]
        disk, first_disk, here, count, size, offset = _read_end64(reader, limit, position, narrow)
    elif _U32 in (size, offset) or count == _U16:
        raise FormatError("the zip archive needs ZIP64 end records and has none")
    if disk or first_disk or here != count:
        raise FormatError("the zip archive claims to be one of several volumes")
    if offset + size > limit or count * _ENTRY.size > size or size > MAX_DIRECTORY:
        raise FormatError(
            f"the zip directory is said to have {count} entries in {size} bytes from byte {offset}; "
            f"its end record is at byte {limit}"
        )
    return _End(count, size, offset, end, comment)


def _check_end(reader: FileReader, end: int) -> None:
    if end > reader.size:
        message = f"the zip archive ends at byte {end}, the file has {reader.size}"
        raise TruncatedError(message, have=reader.size, need=end)


def _read_end64(reader: FileReader, offset: int, before: int, narrow: tuple[int, ...]) -> tuple[int, ...]:
    """Return the six numbers of the ZIP64 end record, which must agree with those of the old one where it has any."""
    if offset + _END64.size > before:
        raise FormatError(f"the ZIP64 end record is said to be at byte {offset}, behind its locator")
    signature, _, _, _, *wide = _END64.unpack(reader.read(offset, _END64.size))
    if signature != b"PK\6\6":
        raise FormatError(f"there is no ZIP64 end record at byte {offset}")
    for small, large, unknown in zip(narrow, wide, (_U16,) * 4 + (_U32,) * 2, strict=True):
        if small not in (large, unknown):
            raise FormatError(f"the end records of the zip archive disagree: {small} and {large}")
    return tuple(wide)


def _entries(directory: bytes, count: int) -> Iterator[ZipRecord]:
    """Iterate over the directory; data offsets are still 0."""
    position, total = 0, len(directory)
    unpack, head = _ENTRY.unpack_from, _ENTRY.size
    for _ in range(count):
        if position + head > total:
            raise FormatError(f"the zip directory ends inside the entry at byte {position} of it")
        (
            signature, _, _, flags, method, _, _, crc, packed, size,
            name_length, extra_length, comment_length, _, _, _, offset,
        ) = unpack(directory, position)  # fmt: skip
        name_end = position + head + name_length
        following = name_end + extra_length + comment_length
        if signature != b"PK\1\2" or following > total:
            raise FormatError(f"the zip directory is broken at byte {position} of it")
        name = _checked_name(directory[position + head : name_end])
        if flags & _ENCRYPTED or method not in (_STORED, _DEFLATED):
            raise UnsupportedFormat(f"the zip record {name!r} is encrypted, or packed by method {method}")
        if packed == _U32 or size == _U32 or offset == _U32:
            size, packed, offset = _wide(
                name, directory[name_end : name_end + extra_length], size, packed, offset
            )
        if method == _STORED and packed != size:
            raise FormatError(f"the zip record {name!r} is stored, yet has {size} bytes in {packed}")
        yield ZipRecord(name, method, crc, offset, 0, packed, size, position)
        position = following
    if position != total:
        raise FormatError(f"{total - position} bytes follow the last entry of the zip directory")


def _checked_name(raw: bytes) -> str:
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise FormatError(f"the zip record name {raw!r} is not UTF-8") from None
    if (
        not name
        or b"\\" in raw
        or b"\0" in raw
        or raw[0] == 0x2F
        or (".." in name and ".." in name.split("/"))
    ):
        raise FormatError(f"the zip record name {name!r} could leave its folder")
    return name


def _wide(name: str, extra: bytes, size: int, packed: int, offset: int) -> list[int]:
    """Return size, packed size and offset, those of 0xFFFFFFFF taken from the ZIP64 field."""
    position = 0
    while position + 4 <= len(extra):
        length = int.from_bytes(extra[position + 2 : position + 4], "little")
        if extra[position : position + 2] == b"\1\0":
            values = extra[position + 4 : position + 4 + length]
            result = []
            for value in (size, packed, offset):
                if value == _U32:
                    if len(values) < 8:
                        break
                    value, values = int.from_bytes(values[:8], "little"), values[8:]
                result.append(value)
            else:
                return result
            break
        position += 4 + length
    raise FormatError(f"the zip record {name!r} lacks its ZIP64 sizes")


def _locate(reader: FileReader, entries: list[ZipRecord], limit: int) -> tuple[ZipRecord, ...]:
    """Return the records with the offset of their data, which only the local header tells."""
    order = sorted(range(len(entries)), key=lambda index: entries[index].header_offset)
    located: list[ZipRecord] = list(entries)
    window, window_start = b"", 0
    for rank, index in enumerate(order):
        name, method, crc, offset, _, packed, size, entry = entries[index]
        following = entries[order[rank + 1]].header_offset if rank + 1 < len(order) else limit
        raw_name = name.encode()
        need = _LOCAL.size + len(raw_name)
        if offset + need > following:
            raise FormatError(
                f"the zip record {name!r} at byte {offset} overlaps what begins at byte {following}"
            )
        if not window_start <= offset <= offset + need <= window_start + len(window):
            # Small tensors lie close together: one read for many headers. Large ones: nothing but the header.
            length = need if following - offset > _NEAR else min(_WINDOW, limit - offset)
            window, window_start = reader.read(offset, length), offset
        at = offset - window_start
        signature, _, flags, local_method, *_, name_length, extra_length = _LOCAL.unpack_from(window, at)
        if (
            signature != b"PK\3\4"
            or flags & _ENCRYPTED
            or local_method != method
            or window[at + _LOCAL.size : at + need] != raw_name
            or name_length != len(raw_name)
        ):
            raise FormatError(f"the local header of {name!r} at byte {offset} contradicts the zip directory")
        data = offset + need + extra_length
        if data + packed > following:
            raise FormatError(
                f"the zip record {name!r} ends at byte {data + packed}, the next begins at {following}"
            )
        located[index] = ZipRecord(name, method, crc, offset, data, packed, size, entry)
    return tuple(located)


_NEAR = 4096
_WINDOW = 1 << 18
