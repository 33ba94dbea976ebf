"""The intact part of a damaged file of torch.save: its pickle, and the intact part of each storage.

Names, shapes and places come from the pickle and from what precedes each storage; nothing is
guessed. Without the complete pickle nothing can be read. In an archive whose directory is lost or
does not fit its records, the records are found one by one: torch writes local headers with sizes of
0; the true ones follow the data, in a descriptor (APPNOTE 4.3.9; 24 bytes where size or offset need
more than 32 bits, none after no data: ``mz_zip_writer_add_mem_ex_v2`` of torch 2.13).
"""

import struct
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec import Struct

from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.pickle_tree import PickleTree
from ckptfix.formats.torch_file import is_legacy, read_pickle, read_pickles
from ckptfix.formats.torch_tensors import PickledStorage, storages
from ckptfix.formats.torch_zip import ENCRYPTED, LOCAL, STORED, U32, read_end, read_entries
from ckptfix.storage.files import FileReader
from ckptfix.wording import Brief, count_of

_HAS_DESCRIPTOR = 0x8
_NARROW = struct.Struct("<4s3I")
_WIDE = struct.Struct("<4sI2Q")
_HEAD = 1 << 12  # a local header of torch takes some 130 bytes
_SMALL = 1 << 16
"""Longest record without a known length whose descriptor is looked for; torch's own take up to 40
bytes.
"""

_MOST_OTHERS = 1 << 10
"""Most records that nothing lists; torch writes six. Those that the pickle refers to are bounded by
its length.
"""

_NEXT = (b"PK\3\4", b"PK\1\2", b"")


class FoundRecord(NamedTuple):
    """A record by its local header: where it begins, where its data lies, and the CRC-32 recorded
    for it (0: none).

    ``problem``: why the extent of the data is unknown, "" when known; the data may still reach
    beyond the end of the file.
    """

    name: str
    offset: int
    begin: int
    length: int
    crc: int = 0
    problem: str = ""


Lengths = Callable[[str, int], int | None]
"""Function from a record's name and data offset to its length, None when unknown."""


class _Local(NamedTuple):
    """A local header."""

    name: str
    flags: int
    method: int
    crc: int
    packed: int
    begin: int


def walk_records(reader: FileReader, lengths: Lengths) -> tuple[list[FoundRecord], str]:
    """Follow the local headers from the first byte on; return the records, and why no more were
    found.

    Ends behind the first name that comes again, and behind 1024 records without a known length.
    """
    found: list[FoundRecord] = []
    names: set[str] = set()
    others = 0
    position = 0
    while True:
        local = _local(reader, position)
        if local is None:
            return found, _why_none(reader, position)
        record, following = _record(reader, position, local, lengths)
        found.append(record)
        if following is None:
            return found, record.problem or f"the file ends at byte {reader.size}"
        others += lengths(record.name, record.begin) is None
        if record.name in names:
            return (
                found,
                f"the record {record.name!r:.80} appears again at byte {position}",
            )
        if others > _MOST_OTHERS:
            return (
                found,
                (
                    f"more than {_MOST_OTHERS} records up to byte {position} are of a kind that "
                    "torch does not write"
                ),
            )
        names.add(record.name)
        position = following


def listed_records(reader: FileReader) -> list[FoundRecord] | None:
    """Return the records that the directory lists, each checked by its own local header; None
    without a directory.
    """
    try:
        end = read_end(reader)
        entries = list(
            read_entries(reader.read(end.directory_offset, end.directory_size), end.entries)
        )
    except FormatError:
        return None
    entries.sort(key=lambda entry: entry.header_offset)
    found = []
    following = [*(entry.header_offset for entry in entries[1:]), end.directory_offset]
    for entry, limit in zip(entries, following, strict=False):
        local = _local(reader, entry.header_offset) if entry.header_offset < reader.size else None
        begin, problem = 0, ""
        if local is None or local.name != entry.name:
            problem = f"there is no local header for {entry.name!r} at byte {entry.header_offset}"
        elif entry.method != STORED or local.method != STORED:
            problem = f"the record {entry.name!r} is compressed, which torch.save never does"
        elif local.begin + entry.size > limit:
            problem = f"the record {entry.name!r} overlaps the data that begins at byte {limit}"
        else:
            begin = local.begin
        found.append(
            FoundRecord(entry.name, entry.header_offset, begin, entry.size, entry.crc, problem)
        )
    return found


def _record(
    reader: FileReader, offset: int, local: _Local, lengths: Lengths
) -> tuple[FoundRecord, int | None]:
    """Return a record, and where the next one begins: None when that is not known."""
    name, begin = local.name, local.begin
    if local.method != STORED or local.flags & ENCRYPTED:
        problem = f"the record {name!r} is compressed or encrypted, which torch.save never does"
        return FoundRecord(name, offset, begin, 0, problem=problem), None
    length = lengths(name, begin)
    if not local.flags & _HAS_DESCRIPTOR:
        problem = ""
        if length is None:
            length = local.packed
        elif length != local.packed != U32:
            problem = f"the record {name!r} has {local.packed} bytes (expected {length})"
        return FoundRecord(name, offset, begin, length, local.crc, problem), begin + length
    if length is None:
        length = _length_by_descriptor(reader, begin)
        if length is None:
            problem = f"the end of the record {name!r} at byte {offset} was not found"
            return FoundRecord(name, offset, begin, 0, problem=problem), None
    return _described(reader, FoundRecord(name, offset, begin, length))


def _described(reader: FileReader, record: FoundRecord) -> tuple[FoundRecord, int | None]:
    """Return a record with the CRC in its descriptor, and where the next one begins."""
    end = record.begin + record.length
    data = reader.read(end, min(_WIDE.size, reader.size - end)) if end < reader.size else b""
    for layout in (_NARROW, _WIDE):
        if len(data) >= layout.size:
            signature, crc, packed, size = layout.unpack_from(data)
            if signature == b"PK\7\x08" and packed == size == record.length:
                return record._replace(crc=crc), end + layout.size
    if len(data) < _NARROW.size or (data.startswith(b"PK\7\x08") and len(data) < _WIDE.size):
        return record, None  # cut in the descriptor: the data before it is complete
    problem = f"the data descriptor of {record.name!r} is missing at byte {end}"
    for layout in (_NARROW, _WIDE):
        if _local(reader, end + layout.size) is not None:
            return record._replace(problem=problem), end + layout.size
    return record._replace(problem=problem), None


def _length_by_descriptor(reader: FileReader, begin: int) -> int | None:
    """Return the length of a small record: the offset of a descriptor that gives just that
    length.
    """
    data = reader.read(begin, min(_SMALL, reader.size - begin))
    at = data.find(b"PK\7\x08")
    while at >= 0:
        following = at + _NARROW.size
        if following <= len(data):
            _, _, packed, size = _NARROW.unpack_from(data, at)
            if packed == size == at and data[following : following + 4] in _NEXT:
                return at
        at = data.find(b"PK\7\x08", at + 1)
    return None


def _local(reader: FileReader, offset: int) -> _Local | None:
    """Return the local header at an offset, None when there is none, or not all of it."""
    if not 0 <= offset <= reader.size - LOCAL.size:
        return None
    data = reader.read(offset, min(_HEAD, reader.size - offset))
    signature, _, flags, method, _, _, crc, packed, _, name_length, extra_length = (
        LOCAL.unpack_from(data)
    )
    begin = offset + LOCAL.size + name_length + extra_length
    if signature != b"PK\3\4" or begin > reader.size:
        return None
    if LOCAL.size + name_length > len(data):
        data = reader.read(offset, LOCAL.size + name_length)
    try:
        name = data[LOCAL.size : LOCAL.size + name_length].decode()
    except UnicodeDecodeError:
        return None
    return _Local(name, flags, method, crc, packed, begin)


def _why_none(reader: FileReader, position: int) -> str:
    """Return why there is no local header at an offset."""
    head = reader.read(position, min(4, reader.size - position)) if position < reader.size else b""
    if head == b"PK\1\2":
        return f"the zip directory begins at byte {position}"
    if len(head) < 4 or head == b"PK\3\4":
        return f"the file ends at byte {reader.size}"
    return f"there is no record at byte {position}, where the next one should begin"


class StorageLocation(NamedTuple):
    """Offset of a storage in the file, the number of its bytes in the file, and the CRC-32 recorded
    for it (0: none).

    ``problem``: a fault besides missing bytes, "" for none that shows without reading the bytes.
    ``doubt``: a sign that bytes were inserted into the storage or lost from it, "" without one.
    """

    offset: int
    have: int
    crc: int = 0
    problem: str = ""
    doubt: str = ""


class PartialTorchFile(Brief, Struct, frozen=True, kw_only=True):
    """A file of torch.save that may be damaged.

    ``places``: of each storage of the pickle; one that is missing there was not found. ``reason``:
    why no more storages were found. ``names_problem``: why the pickle itself is unreliable, ""
    without such evidence.
    """

    tree: PickleTree
    storages: Mapping[str, PickledStorage]
    places: Mapping[str, StorageLocation]
    reason: str
    names_problem: str = ""


def read_partial(reader: FileReader) -> PartialTorchFile:
    """Read the intact part of a file. Raises FormatError, with the reason, when that has no
    tensors.
    """
    with paused_gc():
        head = reader.read(0, min(4, reader.size))
        if head == b"PK\3\4":
            return _zip(reader)
        if head[:1] != b"\x80":
            raise FormatError("neither a zip archive nor a pickle")
        first = read_pickle(reader, 0)
        if not is_legacy(first):
            raise FormatError("a plain pickle holds no tensors")
        return _legacy(reader, first)


def _zip(reader: FileReader) -> PartialTorchFile:
    pickles = _Pickles(reader)
    listed = listed_records(reader)
    reason = ""
    if listed is None:
        records, reason = walk_records(reader, pickles.length)
    else:
        records = listed
        pickles.find(records)
    if pickles.tree is None or pickles.record is None:
        raise FormatError(
            "no intact data.pkl was found, so the tensors have no names "
            f"({reason or 'according to the zip directory'})"
        )
    root = pickles.root
    by_name: dict[str, FoundRecord] = {}
    for record in records:
        if by_name.setdefault(record.name, record) is not record:
            raise FormatError(f"the zip archive has two records named {record.name!r}")
    _check_kind(reader, root, by_name)
    places = {}
    for key, storage in pickles.known.items():
        found = by_name.get(f"{root}/data/{key}")
        if found is not None:
            have = max(0, min(storage.nbytes, found.length, reader.size - found.begin))
            problem = found.problem
            if not problem and found.length != storage.nbytes:
                problem = f"its record has {found.length} bytes (expected {storage.nbytes})"
            places[key] = StorageLocation(
                found.begin, 0 if not found.begin else have, found.crc, problem
            )
    crc = by_name[pickles.record].crc
    wrong = bool(crc) and zlib.crc32(pickles.tree.data) != crc and not pickles.is_longer
    return PartialTorchFile(
        tree=pickles.tree,
        storages=pickles.known,
        places=places,
        reason=reason,
        names_problem="CRC-32 mismatch in data.pkl, which names the tensors" if wrong else "",
    )


class _Pickles:
    """Search for the pickle among the records, and the lengths of storages that it gives."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self.tree: PickleTree | None = None
        self.record: str | None = None
        self.root = ""
        self.known: Mapping[str, PickledStorage] = {}
        self.is_longer = False

    def length(self, name: str, begin: int) -> int | None:
        """Return the length of a record, None when the pickle does not give it."""
        if self.tree is None:
            root, slash, rest = name.partition("/")
            if not slash or rest != "data.pkl":
                return None
            self._read(name, root, begin)
            assert self.tree is not None, "it was read just now"
            return self.tree.end
        prefix = f"{self.root}/data/"
        storage = self.known.get(name[len(prefix) :]) if name.startswith(prefix) else None
        return storage.nbytes if storage is not None else None

    def find(self, records: "list[FoundRecord]") -> None:
        """Read the pickle that a directory names."""
        root = records[0].name.partition("/")[0] if records else ""
        for record in records:
            if record.name == f"{root}/data.pkl" and not record.problem:
                self._read(record.name, root, record.begin)
                assert self.tree is not None, "it was read just now"
                self.is_longer = record.length != self.tree.end

    def _read(self, name: str, root: str, begin: int) -> None:
        self.tree = read_pickle(self._reader, begin)
        self.record, self.root = name, root
        self.known = storages(self.tree)


def _check_kind(reader: FileReader, root: str, records: Mapping[str, FoundRecord]) -> None:
    """Raise UnsupportedFormat for archives that are never read."""
    if f"{root}/constants.pkl" in records:
        raise UnsupportedFormat("a TorchScript archive, which contains code as well as state")
    order = records.get(f"{root}/byteorder")
    is_there = order is not None and order.begin and order.begin + 3 <= reader.size
    if (
        order is not None
        and is_there
        and order.length == 3
        and reader.read(order.begin, 3) == b"big"
    ):
        raise UnsupportedFormat("it was written on a big-endian machine")


def _legacy(reader: FileReader, first: PickleTree) -> PartialTorchFile:
    tree, _, keys, position, _ = read_pickles(reader, first)
    known = storages(tree)
    if known.keys() != set(keys):
        raise FormatError(
            f"the file lists {len(keys)} storages, but its saved object refers to {len(known)}"
        )
    places: dict[str, StorageLocation] = {}
    # Bytes that were inserted into a storage, or lost from it, move all lengths that follow.
    before = shifted = ""
    for key in keys:
        storage = known[key]
        if position + 8 > reader.size:
            break
        numel = int.from_bytes(reader.read(position, 8), "little")
        problem = ""
        if numel != storage.numel:
            problem = (
                f"it begins with a length of {numel} elements, but the saved object says "
                f"{storage.numel}"
            )
            shifted = shifted or before
        elif numel:
            shifted = ""
        before = key
        begin = position + 8
        places[key] = StorageLocation(
            begin, min(storage.nbytes, reader.size - begin), problem=problem
        )
        position = begin + storage.nbytes
    if position != reader.size and shifted:
        doubt = "the next storage does not begin where it should"
        places[shifted] = places[shifted]._replace(doubt=doubt)
    elif position < reader.size and before:
        extra = count_of(reader.size - position, "extra byte")
        places[before] = places[before]._replace(doubt=f"{extra} after the last storage")
    return PartialTorchFile(
        tree=tree, storages=known, places=places, reason=f"the file ends at byte {reader.size}"
    )
