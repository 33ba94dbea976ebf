"""The zip files of torch.save since 1.6: records read without trusting any number, and edits
appended.

Every offset is checked before it is followed and every size against the size of the file before it
is read; records may not overlap, and each local header must agree with the directory.

Layout facts: PKWARE's APPNOTE 6.3 (records, ZIP64), and for torch 2.13
``caffe2/serialize/inline_container.cc``: every record is stored, its data starts on a multiple of
64 bytes, the end records are always those of ZIP64.
"""

import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from ckptfix.errors import BeyondLimits, FormatError, TruncatedError, UnsupportedFormat
from ckptfix.storage.files import FileReader
from ckptfix.storage.parallel import Control, processors, run_all
from ckptfix.storage.reading import page_buffer
from ckptfix.wording import Brief

MAX_DIRECTORY = 64 << 20
"""Longest central directory that is read, in bytes. A record takes about 65, and 300 once it is
read.
"""

MAX_ZEROS = 64 << 20
"""Most zeros at the end of a file behind which the end of the archive is looked for."""

U16, U32 = 0xFFFF, 0xFFFFFFFF
END = struct.Struct("<4s4H2IH")
LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQ2H2I4Q")
ENTRY = struct.Struct("<4s6H3I5H2I")
LOCAL = struct.Struct("<4s5H3I2H")
STORED, DEFLATED = 0, 8
NEEDS_ZIP64 = 45  # version 4.5
IN_UTF8 = 0x800
ENCRYPTED = 0x1
_UNREADABLE = 0x1 | 0x20 | 0x40 | 0x2000
"""Flags of entries that miniz refuses: encrypted, a patch, strongly encrypted, a masked local
header.
"""

_FOLDER = 0x10
"""The attribute of MS-DOS that makes an entry a folder: miniz then reads none of its bytes, and
reports no error.
"""

_LEAST_END64 = END64.size - 12
"""Least size that a ZIP64 end record may give for itself; the first 12 bytes are not counted."""

_NEAR = 4096  # records closer than this are read many at a time ...
_WINDOW = 1 << 18  # ... with this many bytes
_BLOCK = 1 << 20
_MAX_JUNK = 16 << 20


class ZipRecord(NamedTuple):
    """One record. Offsets count from the start of the file; ``size`` is unpacked, ``packed`` its
    size in the file.

    ``crc`` is the one in the central directory, 0 when none was written. ``entry`` is where its
    entry begins in the directory.
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
        """Return whether the bytes lie in the file as they are."""
        return self.method == STORED


_as_record: Callable[[tuple[object, ...]], ZipRecord] = partial(
    tuple.__new__, ZipRecord
)  # a fifth of the time of a call


class EndRecords(NamedTuple):
    """The numbers in the end records. ``end`` is where the archive ends in the file."""

    entries: int
    directory_size: int
    directory_offset: int
    end: int
    comment: bytes


def read_records(reader: FileReader) -> tuple[EndRecords, bytes, tuple[ZipRecord, ...]]:
    """Return the end records, the bytes of the central directory, and its records in their order;
    names can recur.

    In a store the data of records is looked for where torch puts it, at multiples of 64: other zip
    files need their local headers read there, too.

    Raises TruncatedError when the archive is cut, UnsupportedFormat for encryption and rare
    compressions, FormatError for anything that does not add up.
    """
    end = read_end(reader)
    directory = reader.read(end.directory_offset, end.directory_size)
    records = _locate(reader, list(read_entries(directory, end.entries)), end.directory_offset)
    if not records:
        raise FormatError("the zip archive is empty")
    return end, directory, records


def read_end(reader: FileReader) -> EndRecords:
    """Find the end records, the last ones in the file as every reader does.

    Raises TruncatedError when there are none or they are cut, FormatError when their numbers
    contradict one another.
    """
    window_start, window = _tail(reader)
    found = window.rfind(b"PK\5\6")
    position = window_start + found
    if len(window) - found < END.size:
        _check_end(reader, position + END.size)
    _, disk, first_disk, here, count, size, offset, comment_length = END.unpack_from(window, found)
    end = position + END.size + comment_length
    _check_end(reader, end)
    comment = window[found + END.size : found + END.size + comment_length]
    limit = position
    if found >= LOCATOR.size and window.startswith(b"PK\6\7", found - LOCATOR.size):
        narrow = (disk, first_disk, here, count, size, offset)
        _, _, limit, disks = LOCATOR.unpack_from(window, found - LOCATOR.size)
        if disks != 1:  # miniz: MZ_ZIP_UNSUPPORTED_MULTIDISK
            raise FormatError(
                f"the zip archive claims to be one of {disks} volumes, so torch.load refuses it"
            )
        disk, first_disk, here, count, size, offset = _read_end64(reader, limit, position, narrow)
    elif U32 in (size, offset) or count == U16:
        raise FormatError("the zip archive needs ZIP64 end records but has none")
    if disk or first_disk or here != count:
        raise FormatError("the zip archive claims to be one of several volumes")
    if offset + size > limit or count * ENTRY.size > size or size > MAX_DIRECTORY:
        raise FormatError(
            f"the zip directory cannot have {count} entries in {size} bytes from byte {offset}; "
            f"its end record is at byte {limit}"
        )
    return EndRecords(count, size, offset, end, comment)


_MANY_ZEROS = 64


def _tail(reader: FileReader) -> tuple[int, bytes]:
    """Return the bytes among which the end record is, and where they begin; zeros or other bytes
    may follow them.

    Raises TruncatedError when there is none.
    """
    end = reader.size
    for attempt in ("as every reader looks", "behind zeros at the end"):
        start = max(0, end - END.size - U16)
        window = reader.read(start, end - start)
        if b"PK\5\6" in window:
            return start, window
        if attempt == "as every reader looks":
            content = _end_without_zeros(reader)
            end = min(reader.size, content + END.size)  # an end record ends in zeros, too
    if (found := _end_before_junk(reader)) is not None:
        start = found - LOCATOR.size
        return start, reader.read(start, LOCATOR.size + END.size)
    zeros = reader.size - content
    # A pickle that was cut may end in a few zeros of its own.
    if zeros >= _MANY_ZEROS:
        cause = (
            f"; the last {zeros} of {reader.size} bytes are zeros, so the write was probably "
            "interrupted"
        )
    elif reader.size <= _MAX_JUNK:
        cause = f": the file was cut off at byte {reader.size} or earlier"
    else:
        cause = (
            f" in its last 16 MiB: it was cut off at byte {reader.size} or earlier, or other data "
            "follows its end"
        )
    raise TruncatedError(f"the zip archive has no end record{cause}", have=reader.size)


def _end_without_zeros(reader: FileReader) -> int:
    """Return where the zeros begin in which a file ends; at most ``MAX_ZEROS`` are looked at."""
    end = reader.size
    while end > max(0, reader.size - MAX_ZEROS):
        start = max(0, end - _BLOCK)
        block = reader.read(start, end - start).rstrip(b"\0")
        if block:
            return start + len(block)
        end = start
    return end


def _end_before_junk(reader: FileReader) -> int | None:
    """Return where the last end record is of those that torch writes: behind a ZIP64 locator, and
    without a comment.

    Further from the end than any zip reader looks (torch 2.13 gives up beyond 64 KiB), at most
    ``_MAX_JUNK`` are read.
    """
    end = reader.size
    while end > max(0, reader.size - _MAX_JUNK):
        start = max(0, end - _BLOCK)
        block = reader.read(start, min(reader.size, end + LOCATOR.size + END.size) - start)
        found = len(block)
        while (found := block.rfind(b"PK\5\6", 0, found)) >= LOCATOR.size:
            is_of_torch = block.startswith(b"PK\6\7", found - LOCATOR.size)
            if is_of_torch and block[found + END.size - 2 : found + END.size] == b"\0\0":
                return start + found
        end = start
    return None


def _check_end(reader: FileReader, end: int) -> None:
    if end > reader.size:
        message = f"the zip archive ends at byte {end}, but the file has only {reader.size} bytes"
        raise TruncatedError(message, have=reader.size, need=end)


def _read_end64(
    reader: FileReader, offset: int, before: int, narrow: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the six numbers of the ZIP64 end record, which must agree with those of the old one
    where it has any.
    """
    if offset + END64.size > before:
        raise FormatError(f"the ZIP64 end record cannot be at byte {offset}, after its locator")
    signature, size, _, _, *wide = END64.unpack(reader.read(offset, END64.size))
    if signature != b"PK\6\6":
        raise FormatError(f"there is no ZIP64 end record at byte {offset}")
    if size < _LEAST_END64:
        raise FormatError(
            f"the ZIP64 end record is too short (expected {_LEAST_END64} bytes or more, found "
            f"{size})"
        )
    for small, large, unknown in zip(narrow, wide, (U16,) * 4 + (U32,) * 2, strict=True):
        if small not in (large, unknown):
            raise FormatError(f"the end records of the zip archive disagree: {small} and {large}")
    return tuple(wide)


def read_entries(directory: bytes, count: int) -> Iterator[ZipRecord]:
    """Iterate over the directory; data offsets are still 0. Raises as ``read_records`` does."""
    position, total = 0, len(directory)
    unpack, head = ENTRY.unpack_from, ENTRY.size
    for _ in range(count):
        if position + head > total:
            raise FormatError(f"the zip directory ends inside its entry at byte {position}")
        (
            signature, _, _, flags, method, _, _, crc, packed, size,
            name_length, extra_length, comment_length, disk, _, attributes, offset,
        ) = unpack(directory, position)  # fmt: skip
        name_end = position + head + name_length
        following = name_end + extra_length + comment_length
        if signature != b"PK\1\2" or following > total:
            raise FormatError(f"the zip directory is broken at byte {position} of the directory")
        name = _checked_name(directory[position + head : name_end])
        if flags & _UNREADABLE or method not in (STORED, DEFLATED):
            raise BeyondLimits(
                f"torch.load refuses the zip record {name!r}: it is encrypted or a patch (flags "
                f"{flags:#x}), or compressed with method {method}"
            )
        if disk > 1:  # miniz takes 1 for the only volume, too
            raise FormatError(
                f"the zip record {name!r} is in volume {disk}, so torch.load refuses the archive"
            )
        if attributes & _FOLDER and size and name[-1] != "/":
            raise FormatError(
                f"the zip record {name!r} is marked as a folder, so torch.load reads none of it"
            )
        if packed == U32 or size == U32 or offset == U32:
            size, packed, offset = _wide(
                name, directory[name_end : name_end + extra_length], size, packed, offset
            )
        if packed != size and (method == STORED or not packed):
            raise FormatError(f"the zip record {name!r} has {size} bytes, but {packed} are stored")
        yield _as_record((name, method, crc, offset, 0, packed, size, position))
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
        raise FormatError(f"the zip record name {name!r} could point outside its folder")
    return name


def _wide(name: str, extra: bytes, size: int, packed: int, offset: int) -> list[int]:
    """Return size, packed size and offset, those of 0xFFFFFFFF taken from the ZIP64 field."""
    position = 0
    while position + 4 <= len(extra):
        length = int.from_bytes(extra[position + 2 : position + 4], "little")
        if extra[position : position + 2] == b"\1\0" and position + 4 + length <= len(extra):
            values = extra[position + 4 : position + 4 + length]
            result = []
            for value in (size, packed, offset):
                if value == U32:
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
    """Return the records with the offset of their data, which only the local header gives."""
    starts = [entry[3] for entry in entries]
    order = sorted(range(len(entries)), key=starts.__getitem__)
    if order and starts[order[-1]] >= limit:
        name, offset = entries[order[-1]].name, starts[order[-1]]
        raise FormatError(
            f"the zip record {name!r} at byte {offset} overlaps the directory, which begins at "
            f"{limit}"
        )
    located: list[ZipRecord] = list(entries)
    window, window_start = b"", 0
    far = _far_apart(entries, order, limit) if reader.fd < 0 else []
    is_spared = reader.spares(far) if far else False
    following_starts = [*(starts[index] for index in order[1:]), limit]
    unpack, head = LOCAL.unpack_from, LOCAL.size
    for index, following in zip(order, following_starts, strict=False):
        name, method, crc, offset, _, packed, size, entry = entries[index]
        raw_name = name.encode()
        need = head + len(raw_name)
        if offset + need > following:
            raise FormatError(
                f"the zip record {name!r} at byte {offset} overlaps the data that begins at byte "
                f"{following}"
            )
        if is_spared and method == STORED and following - offset > _NEAR:
            data = _by_the_directory(offset + need, packed, following)
            if data is not None:
                located[index] = _as_record((name, method, crc, offset, data, packed, size, entry))
                continue
        if not window_start <= offset <= offset + need <= window_start + len(window):
            # Small tensors lie close together: one read for many headers. Large ones: nothing but
            # the header.
            length = need if following - offset > _NEAR else min(_WINDOW, limit - offset)
            if (
                far and length != need
            ):  # what lies behind the header of the next large one would cost a request
                begin, header = far[min(bisect_right(far, (offset, limit)), len(far) - 1)]
                length = min(length, begin + header - offset if begin > offset else length)
            window, window_start = reader.read(offset, length), offset
        at = offset - window_start
        signature, _, flags, local_method, *_, name_length, extra_length = unpack(window, at)
        if (
            signature != b"PK\3\4"
            or flags & ENCRYPTED
            or local_method != method
            or window[at + head : at + need] != raw_name
            or name_length != len(raw_name)
        ):
            raise FormatError(
                f"the local header of {name!r} at byte {offset} contradicts the zip directory"
            )
        data = offset + need + extra_length
        if data + packed > following:
            raise FormatError(
                f"the zip record {name!r} ends at byte {data + packed}, but the next one begins at "
                f"{following}"
            )
        located[index] = _as_record((name, method, crc, offset, data, packed, size, entry))
    return tuple(located)


def _far_apart(entries: list[ZipRecord], order: list[int], limit: int) -> list[tuple[int, int]]:
    """Return where the local headers are that lie far from the next one, with their lengths."""
    starts = [entries[index].header_offset for index in order]
    return [
        (start, LOCAL.size + len(entries[index].name.encode()))
        for index, start, following in zip(order, starts, [*starts[1:], limit], strict=True)
        if following - start > _NEAR and start + _NEAR < limit
    ]


_DESCRIPTORS = (0, 16, 24)
"""Bytes of a data descriptor: none, one, one with sizes of 64 bits."""


def _by_the_directory(least: int, packed: int, following: int) -> int | None:
    """Return where the data of a record begins, without its local header, None where only that
    knows.

    torch begins the data at a multiple of 64, and the next record follows it, or its descriptor: at
    most one of the three sizes of a descriptor fits. ``least``: where the local header ends without
    its extra field.
    """
    for descriptor in _DESCRIPTORS:
        data = following - descriptor - packed
        if data % ALIGNMENT == 0 and least <= data < least + 2 * ALIGNMENT:
            return data
    return None


MAX_PICKLE = 1 << 28
"""Longest pickle that is read, in bytes; a tensor takes about 150."""

MAX_UNPACKED = 1 << 24
"""Longest packed record that is unpacked, in bytes. torch.save never packs one."""

ALIGNMENT = 64
"""torch starts the data of every record on a multiple of this."""

CHUNK = 1 << 20
"""Bytes per read of a checksum."""

_WORTH_THREADS = 8 << 20


class TorchZip(Brief, Struct, frozen=True):
    """A parsed zip file of torch.

    ``root``: the folder all of torch's records are in. ``end``: where the last end record ends;
    ``trailing`` bytes follow. ``directory``: the bytes of the central directory. ``big_endian``:
    what its byteorder record says. ``is_torchscript``: it holds code next to its state; torch.load
    goes by the same record.
    """

    root: str
    records: tuple[ZipRecord, ...]
    pickle: ZipRecord
    directory: bytes
    comment: bytes
    big_endian: bool
    is_torchscript: bool
    end: int
    trailing: int


class AppendedBytes(Brief, Struct, frozen=True):
    """``data`` goes where the zip ends; its last ``tail`` bytes are written when all before them
    are on disk.
    """

    data: bytes
    tail: int


def read_zip(reader: FileReader) -> TorchZip:
    """Parse the directory and every local header.

    Raises TruncatedError when the file is cut, FormatError when numbers contradict one another,
    records overlap or a name could leave its folder, UnsupportedFormat for encryption.
    """
    end, directory, records = read_records(reader)
    by_name = _by_folded_name(records)
    root, slash, _ = records[0].name.partition("/")
    pickle = _record(by_name, f"{root}/data.pkl")
    if not slash or pickle is None:
        raise FormatError(
            f"a zip archive, but not from torch.save: no data.pkl next to {records[0].name!r}"
        )
    byteorder = _record(by_name, f"{root}/byteorder")
    order = b"little" if byteorder is None else read_record(reader, byteorder)
    if order not in (b"little", b"big"):
        raise FormatError(f"the record byteorder is {order[:16]!r}, which torch.load refuses")
    return TorchZip(
        root=root,
        records=records,
        pickle=pickle,
        directory=directory,
        comment=end.comment,
        big_endian=order == b"big",
        is_torchscript=_record(by_name, f"{root}/constants.pkl") is not None,
        end=end.end,
        trailing=reader.size - end.end,
    )


def read_record(reader: FileReader, record: ZipRecord) -> bytes:
    """Return the bytes of one record, unpacked.

    Raises UnsupportedFormat when they are more than ``MAX_PICKLE``, or than ``MAX_UNPACKED`` if
    they are packed; FormatError when they are not what the directory says.
    """
    most = MAX_PICKLE if record.is_stored else MAX_UNPACKED
    if max(record.size, record.packed) > most:
        kind = "" if record.is_stored else "compressed record "
        size = max(record.size, record.packed)
        raise BeyondLimits(f"the {kind}{record.name!r} has {size} bytes, over the limit of {most}")
    raw = reader.read(record.data_offset, record.packed)
    if record.is_stored:
        return raw
    try:
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(raw, record.size + 1)
    except zlib.error as error:
        raise FormatError(f"{record.name!r} cannot be unpacked: {error}") from None
    if len(data) != record.size:
        raise FormatError(f"{record.name!r} does not unpack to {record.size} bytes")
    return data


def _folded(name: str) -> str:
    """Return a record's name as torch compares it: without regard to the case of A to Z."""
    return name.encode().lower().decode()


def _by_folded_name(records: tuple[ZipRecord, ...]) -> dict[str, ZipRecord]:
    names = [record.name for record in records]
    # The same there, and three times as fast.
    fold = str.lower if "".join(names).isascii() else _folded
    found = dict(zip(map(fold, names), records, strict=True))
    if len(found) != len(records):
        raise FormatError(
            "the zip archive has two records of the same name (torch ignores case in names)"
        )
    return found


def _record(records: dict[str, ZipRecord], name: str) -> ZipRecord | None:
    record = records.get(_folded(name))
    if record is not None and record.name != name:
        raise FormatError(
            f"the zip record {record.name!r} differs from {name!r} only in case, and torch reads "
            "it instead"
        )
    return record


def storage_records(archive: TorchZip) -> dict[str, ZipRecord]:
    """Return the record of every storage, by its key."""
    prefix = f"{archive.root}/data/"
    skip = len(prefix)
    return {
        record.name[skip:]: record for record in archive.records if record.name.startswith(prefix)
    }


def records_with_crc(
    archive: TorchZip, *, every_record: bool = True, among: slice = slice(None)
) -> list[ZipRecord]:
    """Return the records whose CRC can be compared: one of 0 was never written, as torch can leave
    them out.

    Without ``every_record`` the storages are left out. ``among``: look at these records alone.
    """
    prefix = f"{archive.root}/data/"
    return [
        record
        for record in archive.records[among]
        if record.crc and record.is_stored and (every_record or not record.name.startswith(prefix))
    ]


def fails_its_crc(record: ZipRecord, data: bytes) -> bool:
    """Return whether ``crc_mismatches`` yields a record of these bytes."""
    return record.is_stored and record.crc not in (0, zlib.crc32(data))


def crc_mismatches(
    archive: TorchZip,
    reader: FileReader,
    *,
    every_record: bool,
    among: slice = slice(None),
    progress: Callable[[int], None] | None = None,
) -> Iterator[ZipRecord]:
    """Yield each record whose bytes do not have the CRC in the directory.

    ``every_record``, ``among``: of ``records_with_crc``. ``progress`` is called with the bytes read
    since the last call, by one thread at a time.
    """
    records = records_with_crc(archive, every_record=every_record, among=among)
    found: dict[int, int] = {}

    @contextmanager
    def worker(control: Control) -> Iterator[Callable[[int], None]]:
        def read(number: int) -> None:
            record, crc = records[number], 0
            buffer = page_buffer(min(CHUNK, record.size))
            for position in range(0, record.size, CHUNK):
                chunk = buffer[: record.size - position]
                reader.fill(chunk, record.data_offset + position)
                crc = zlib.crc32(chunk, crc)
                if control.is_stopping:
                    return
                control.advance(len(chunk))
            found[number] = crc

        yield read

    is_small = sum(record.size for record in records) < _WORTH_THREADS
    run_all(range(len(records)), worker, threads=1 if is_small else processors(), progress=progress)
    yield from (record for number, record in enumerate(records) if found[number] != record.crc)


def append_edit(archive: TorchZip, new_pickle: bytes) -> AppendedBytes:
    """Return the bytes to append at ``archive.end`` so that its data.pkl is ``new_pickle``; the old
    bytes all stay.

    Raises UnsupportedFormat for an archive with code in it, a comment, or a packed data.pkl.
    """
    if archive.is_torchscript:
        raise UnsupportedFormat("it is a TorchScript archive, whose code refers to the names")
    if archive.comment:
        raise UnsupportedFormat("the zip archive has a comment")
    if not archive.pickle.is_stored:
        raise UnsupportedFormat("its data.pkl is compressed, which torch.save never does")
    old = archive.pickle
    fields = list(ENTRY.unpack_from(archive.directory, old.entry))
    old_entry_size = ENTRY.size + sum(fields[10:13])
    name = old.name.encode()
    flags, time, date, crc, size = (
        fields[3] & IN_UTF8,
        fields[5],
        fields[6],
        zlib.crc32(new_pickle),
        len(new_pickle),
    )
    padding = -(archive.end + LOCAL.size + len(name) + 4) % ALIGNMENT
    extra = (
        b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    )  # as torch pads: readers skip an unknown field
    local = LOCAL.pack(
        b"PK\3\4", 20, flags, STORED, time, date, crc, size, size, len(name), len(extra)
    )
    extra64 = b"\1\0\x08\0" + archive.end.to_bytes(8, "little") if archive.end >= U32 else b""
    fields[2], fields[3], fields[4] = 45 if extra64 else 20, flags, STORED
    fields[7:10] = crc, size, size
    fields[11], fields[12], fields[16] = len(extra64), 0, min(archive.end, U32)
    after = archive.directory[old.entry + old_entry_size :]
    directory = archive.directory[: old.entry] + ENTRY.pack(*fields) + name + extra64 + after
    record = local + name + extra + new_pickle
    tail = end_records(archive.end + len(record), len(directory), len(archive.records))
    return AppendedBytes(record + directory + tail, len(tail))


def end_records(
    directory_offset: int, directory_size: int, count: int, made_by: int = NEEDS_ZIP64
) -> bytes:
    """Return the ZIP64 end record, its locator, and the end record, which torch writes for every
    archive.
    """
    end64 = END64.pack(
        b"PK\6\6",
        END64.size - 12,
        made_by,
        NEEDS_ZIP64,
        0,
        0,
        count,
        count,
        directory_size,
        directory_offset,
    )
    locator = LOCATOR.pack(b"PK\6\7", 0, directory_offset + directory_size, 1)
    few = min(count, U16)
    end = END.pack(
        b"PK\5\6", 0, 0, few, few, min(directory_size, U32), min(directory_offset, U32), 0
    )
    return end64 + locator + end
