"""The directory of a zip archive, read without trusting any of its numbers.

Every offset is checked before it is followed and every size against the size of the file before it is read; records
may not overlap, and each local header must agree with the directory. Layout: PKWARE's APPNOTE 6.3, ZIP64 included.
"""

from collections.abc import Callable, Iterator
from functools import partial
from struct import Struct
from typing import NamedTuple

from ckptfix.errors import BeyondLimits, FormatError, TruncatedError
from ckptfix.storage.reading import FileReader

MAX_DIRECTORY = 64 << 20
"""Longest central directory that is read, in bytes. A record takes about 65, and 300 once it is read."""

MAX_ZEROS = 64 << 20
"""How many zeros at the end of a file are looked behind for the end of the archive."""

U16, U32 = 0xFFFF, 0xFFFFFFFF
END = Struct("<4s4H2IH")
LOCATOR = Struct("<4sIQI")
END64 = Struct("<4sQ2H2I4Q")
ENTRY = Struct("<4s6H3I5H2I")
LOCAL = Struct("<4s5H3I2H")
STORED, DEFLATED = 0, 8
IN_UTF8 = 0x800
ENCRYPTED = 0x1
_NEAR = 4096  # records closer than this are read many at a time ...
_WINDOW = 1 << 18  # ... with this many bytes
_BLOCK = 1 << 20
_MAX_JUNK = 16 << 20


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
        return self.method == STORED


_record: Callable[[tuple[object, ...]], ZipRecord] = partial(
    tuple.__new__, ZipRecord
)  # a fifth of the time of a call


class EndRecords(NamedTuple):
    """What the end records say. ``end`` is where the archive ends in the file."""

    entries: int
    directory_size: int
    directory_offset: int
    end: int
    comment: bytes


def read_records(reader: FileReader) -> tuple[EndRecords, bytes, tuple[ZipRecord, ...]]:
    """Return the end records, the bytes of the central directory, and its records in their order; names can recur.

    Raises TruncatedError when the archive is cut, UnsupportedFormat for encryption and rare compressions, FormatError
    for anything that does not add up.
    """
    end = read_end(reader)
    directory = reader.read(end.directory_offset, end.directory_size)
    records = _locate(reader, list(read_entries(directory, end.entries)), end.directory_offset)
    if not records:
        raise FormatError("the zip archive is empty")
    return end, directory, records


def read_end(reader: FileReader) -> EndRecords:
    """Find the end records, the last ones in the file as every reader does.

    Raises TruncatedError when there are none or they are cut, FormatError when their numbers contradict one another.
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
        limit = LOCATOR.unpack_from(window, found - LOCATOR.size)[2]
        disk, first_disk, here, count, size, offset = _read_end64(reader, limit, position, narrow)
    elif U32 in (size, offset) or count == U16:
        raise FormatError("the zip archive needs ZIP64 end records and has none")
    if disk or first_disk or here != count:
        raise FormatError("the zip archive claims to be one of several volumes")
    if offset + size > limit or count * ENTRY.size > size or size > MAX_DIRECTORY:
        raise FormatError(
            f"the zip directory is said to have {count} entries in {size} bytes from byte {offset}; "
            f"its end record is at byte {limit}"
        )
    return EndRecords(count, size, offset, end, comment)


def _tail(reader: FileReader) -> tuple[int, bytes]:
    """Return the bytes among which the end record is, and where they begin; zeros or other bytes may follow them.

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
    looked = f"{zeros + U16 + END.size} bytes, the last {zeros} of which are zeros" if zeros else "16 MiB"
    raise TruncatedError(
        f"the zip archive has no end record in its last {looked}: it was cut, at byte {reader.size} at the "
        "latest, or more than that follows its end",
        have=reader.size,
    )


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
    """Return where the last end record is of those that torch writes: behind a ZIP64 locator, and without a comment.

    Further from the end than any zip reader looks (torch 2.13 gives up beyond 64 KiB), at most ``_MAX_JUNK`` are read.
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
        message = f"the zip archive ends at byte {end}, the file has {reader.size}"
        raise TruncatedError(message, have=reader.size, need=end)


def _read_end64(reader: FileReader, offset: int, before: int, narrow: tuple[int, ...]) -> tuple[int, ...]:
    """Return the six numbers of the ZIP64 end record, which must agree with those of the old one where it has any."""
    if offset + END64.size > before:
        raise FormatError(f"the ZIP64 end record is said to be at byte {offset}, behind its locator")
    signature, _, _, _, *wide = END64.unpack(reader.read(offset, END64.size))
    if signature != b"PK\6\6":
        raise FormatError(f"there is no ZIP64 end record at byte {offset}")
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
        if flags & ENCRYPTED or method not in (STORED, DEFLATED):
            raise BeyondLimits(f"the zip record {name!r} is encrypted, or packed by method {method}")
        if packed == U32 or size == U32 or offset == U32:
            size, packed, offset = _wide(
                name, directory[name_end : name_end + extra_length], size, packed, offset
            )
        if method == STORED and packed != size:
            raise FormatError(f"the zip record {name!r} is stored, yet has {size} bytes in {packed}")
        yield _record((name, method, crc, offset, 0, packed, size, position))
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
    """Return the records with the offset of their data, which only the local header tells."""
    starts = [entry[3] for entry in entries]
    order = sorted(range(len(entries)), key=starts.__getitem__)
    if order and starts[order[-1]] >= limit:
        name, offset = entries[order[-1]].name, starts[order[-1]]
        raise FormatError(
            f"the zip record {name!r} at byte {offset} overlaps the directory, which begins at {limit}"
        )
    located: list[ZipRecord] = list(entries)
    window, window_start = b"", 0
    following_starts = [*(starts[index] for index in order[1:]), limit]
    unpack, head = LOCAL.unpack_from, LOCAL.size
    for index, following in zip(order, following_starts, strict=False):
        name, method, crc, offset, _, packed, size, entry = entries[index]
        raw_name = name.encode()
        need = head + len(raw_name)
        if offset + need > following:
            raise FormatError(
                f"the zip record {name!r} at byte {offset} overlaps what begins at byte {following}"
            )
        if not window_start <= offset <= offset + need <= window_start + len(window):
            # Small tensors lie close together: one read for many headers. Large ones: nothing but the header.
            length = need if following - offset > _NEAR else min(_WINDOW, limit - offset)
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
            raise FormatError(f"the local header of {name!r} at byte {offset} contradicts the zip directory")
        data = offset + need + extra_length
        if data + packed > following:
            raise FormatError(
                f"the zip record {name!r} ends at byte {data + packed}, the next begins at {following}"
            )
        located[index] = _record((name, method, crc, offset, data, packed, size, entry))
    return tuple(located)
