"""The zip files of torch.save since 1.6: find the records without trusting any number, and append an edit.

Layout facts: PKWARE's APPNOTE 6.3 (records, ZIP64), and for torch 2.13 ``caffe2/serialize/inline_container.cc``: every
record is stored, its data starts on a multiple of 64 bytes, the end records are always those of ZIP64.
"""

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event, Lock

from ckptfix.errors import BeyondLimits, FormatError, UnsupportedFormat
from ckptfix.formats.zip_directory import (
    END,
    END64,
    ENTRY,
    IN_UTF8,
    LOCAL,
    LOCATOR,
    STORED,
    U16,
    U32,
    ZipRecord,
    read_records,
)
from ckptfix.storage.pieces import page_buffer
from ckptfix.storage.reading import FileReader

MAX_PICKLE = 1 << 28
"""Longest pickle that is read, in bytes; a tensor takes about 150."""

MAX_UNPACKED = 1 << 24
"""Longest packed record that is unpacked, in bytes. torch.save never packs one."""

ALIGNMENT = 64
"""torch starts the data of every record on a multiple of this."""

CHUNK = 1 << 20
"""Bytes per read of a checksum."""

_WORTH_THREADS = 8 << 20
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class TorchZip:
    """A parsed zip file of torch.

    ``root``: the folder all of torch's records are in. ``end``: where the last end record ends; ``trailing`` bytes
    follow. ``directory``: the bytes of the central directory. ``big_endian``: what its byteorder record says.
    ``is_torchscript``: it holds code beside its state; torch.load goes by the same record.
    """

    root: str
    records: tuple[ZipRecord, ...]
    pickle: ZipRecord
    directory: bytes = field(repr=False)
    comment: bytes
    big_endian: bool
    is_torchscript: bool
    end: int
    trailing: int


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
    end, directory, records = read_records(reader)
    by_name = _by_folded_name(records)
    root, slash, _ = records[0].name.partition("/")
    pickle = _record(by_name, f"{root}/data.pkl")
    if not slash or pickle is None:
        raise FormatError(f"a zip archive, but none of torch.save: no data.pkl next to {records[0].name!r}")
    byteorder = _record(by_name, f"{root}/byteorder")
    is_big = byteorder is not None and read_record(reader, byteorder) == b"big"
    return TorchZip(
        root=root,
        records=records,
        pickle=pickle,
        directory=directory,
        comment=end.comment,
        big_endian=is_big,
        is_torchscript=_record(by_name, f"{root}/constants.pkl") is not None,
        end=end.end,
        trailing=reader.size - end.end,
    )


def read_record(reader: FileReader, record: ZipRecord) -> bytes:
    """Return the bytes of one record, unpacked.

    Raises UnsupportedFormat when they are more than ``MAX_PICKLE``, or than ``MAX_UNPACKED`` if they are packed;
    FormatError when they are not what the directory says.
    """
    most = MAX_PICKLE if record.is_stored else MAX_UNPACKED
    if max(record.size, record.packed) > most:
        kind = "" if record.is_stored else "packed "
        raise BeyondLimits(f"{record.name!r} has {record.size} {kind}bytes, at most {most} are read")
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


def _folded(name: str) -> str:
    """Return a record's name as torch compares it: without regard to the case of A to Z."""
    return name.encode().lower().decode()


def _by_folded_name(records: tuple[ZipRecord, ...]) -> dict[str, ZipRecord]:
    names = [record.name for record in records]
    fold = str.lower if "".join(names).isascii() else _folded  # the same there, and three times as fast
    found = dict(zip(map(fold, names), records, strict=True))
    if len(found) != len(records):
        raise FormatError(
            "the zip archive has two records of one name: the second is under a name used before, "
            "and torch does not tell upper case from lower"
        )
    return found


def _record(records: dict[str, ZipRecord], name: str) -> ZipRecord | None:
    record = records.get(_folded(name))
    if record is not None and record.name != name:
        raise FormatError(
            f"the zip record {record.name!r} differs only in case from {name!r}, which torch reads"
        )
    return record


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
    says nothing. ``progress`` is called with the bytes read since the last call, by one thread at a time.
    """
    prefix = f"{archive.root}/data/"
    records = [
        record
        for record in archive.records
        if record.crc and record.is_stored and (every_record or not record.name.startswith(prefix))
    ]
    lock, stop = Lock(), Event()

    def crc_of(record: ZipRecord) -> int:
        crc, buffer = 0, page_buffer(min(CHUNK, record.size))
        for position in range(0, record.size, CHUNK):
            chunk = buffer[: record.size - position]
            reader.fill(chunk, record.data_offset + position)
            crc = zlib.crc32(chunk, crc)
            if stop.is_set():
                break
            if progress is not None:
                with lock:
                    progress(len(chunk))
        return crc

    if sum(record.size for record in records) < _WORTH_THREADS:
        yield from (record for record in records if crc_of(record) != record.crc)
        return
    from concurrent.futures import ThreadPoolExecutor  # its import takes a tenth of a small check

    pool = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS))
    try:
        found = zip(records, pool.map(crc_of, records), strict=True)
        yield from (record for record, crc in found if crc != record.crc)
    finally:  # also when nobody wants the rest
        stop.set()
        pool.shutdown(cancel_futures=True)


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
    local = LOCAL.pack(b"PK\3\4", 20, flags, STORED, time, date, crc, size, size, len(name), len(extra))
    extra64 = b"\1\0\x08\0" + archive.end.to_bytes(8, "little") if archive.end >= U32 else b""
    fields[2], fields[3], fields[4] = 45 if extra64 else 20, flags, STORED
    fields[7:10] = crc, size, size
    fields[11], fields[12], fields[16] = len(extra64), 0, min(archive.end, U32)
    after = archive.directory[old.entry + old_entry_size :]
    directory = archive.directory[: old.entry] + ENTRY.pack(*fields) + name + extra64 + after
    record = local + name + extra + new_pickle
    tail = _end_records(archive.end + len(record), len(directory), len(archive.records))
    return AppendedBytes(record + directory + tail, len(tail))


def _end_records(directory_offset: int, directory_size: int, count: int) -> bytes:
    end64 = END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, directory_size, directory_offset)
    locator = LOCATOR.pack(b"PK\6\7", 0, directory_offset + directory_size, 1)
    few = min(count, U16)
    end = END.pack(b"PK\5\6", 0, 0, few, few, min(directory_size, U32), min(directory_offset, U32), 0)
    return end64 + locator + end
