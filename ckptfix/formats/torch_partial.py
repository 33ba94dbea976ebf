"""What is left of a damaged file of torch.save: its pickle, and for each storage how much of it is there.

Names, shapes and places come from the pickle and from what stands before each storage; nothing is guessed. Without the
whole pickle nothing can be read.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.pickle_tree import PickleTree
from ckptfix.formats.torch_legacy import is_legacy, read_pickle, read_pickles
from ckptfix.formats.torch_tensors import PickledStorage, storages
from ckptfix.formats.zip_walk import FoundRecord, listed_records, walk_records
from ckptfix.storage.reading import FileReader


class StoragePlace(NamedTuple):
    """Where a storage begins in the file, how many of its bytes are there, and the CRC-32 recorded for it (0: none).

    ``problem``: what is wrong although the bytes may be there, "" for nothing that can be seen without reading them.
    """

    offset: int
    have: int
    crc: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialTorchFile:
    """A file of torch.save that may be damaged.

    ``places``: of each storage of the pickle; one that is missing there was not found. ``reason``: why no more storages
    were found. ``names_problem``: why the pickle itself is not to be believed, "" when nothing says so.
    """

    tree: PickleTree = field(repr=False)
    storages: Mapping[str, PickledStorage] = field(repr=False)
    places: Mapping[str, StoragePlace] = field(repr=False)
    reason: str
    names_problem: str = ""


def read_partial(reader: FileReader) -> PartialTorchFile:
    """Read what is left of a file. Raises FormatError, saying why, when that is no tensor at all."""
    with paused_gc():
        head = reader.read(0, min(4, reader.size))
        if head == b"PK\3\4":
            return _zip(reader)
        if head[:1] != b"\x80":
            raise FormatError("neither a zip archive nor a pickle begins here")
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
            f"its first record is not data.pkl, which holds the names ({reason or 'by its directory'})"
        )
    root = pickles.root
    by_name: dict[str, FoundRecord] = {}
    for record in records:
        if by_name.setdefault(record.name, record) is not record:
            raise FormatError(f"the zip archive has two records of the name {record.name!r}")
    _check_kind(reader, root, by_name)
    places = {}
    for key, storage in pickles.known.items():
        found = by_name.get(f"{root}/data/{key}")
        if found is not None:
            have = max(0, min(storage.nbytes, found.length, reader.size - found.begin))
            problem = found.problem
            if not problem and found.length != storage.nbytes:
                problem = f"its record has {found.length} bytes, its object says {storage.nbytes}"
            places[key] = StoragePlace(found.begin, 0 if not found.begin else have, found.crc, problem)
    crc = by_name[pickles.record].crc
    wrong = bool(crc) and zlib.crc32(pickles.tree.data) != crc and not pickles.is_longer
    return PartialTorchFile(
        tree=pickles.tree,
        storages=pickles.known,
        places=places,
        reason=reason,
        names_problem="the names (data.pkl) do not have their recorded CRC-32" if wrong else "",
    )


class _Pickles:
    """Finds the pickle among the records, and knows from it how long the storages are."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self.tree: PickleTree | None = None
        self.record: str | None = None
        self.root = ""
        self.known: Mapping[str, PickledStorage] = {}
        self.is_longer = False

    def length(self, name: str, begin: int) -> int | None:
        """Return how long a record is, when the pickle tells."""
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
        raise UnsupportedFormat("a TorchScript archive: it holds code next to its state")
    order = records.get(f"{root}/byteorder")
    is_there = order is not None and order.begin and order.begin + 3 <= reader.size
    if order is not None and is_there and order.length == 3 and reader.read(order.begin, 3) == b"big":
        raise UnsupportedFormat("it was written on a big-endian machine")


def _legacy(reader: FileReader, first: PickleTree) -> PartialTorchFile:
    tree, _, keys, position, _ = read_pickles(reader, first)
    known = storages(tree)
    if known.keys() != set(keys):
        raise FormatError(f"the file lists {len(keys)} storages, its object refers to {len(known)}")
    places = {}
    for key in keys:
        storage = known[key]
        if position + 8 > reader.size:
            break
        numel = int.from_bytes(reader.read(position, 8), "little")
        problem = ""
        if numel != storage.numel:
            problem = f"it begins with a length of {numel} elements, its object says {storage.numel}"
        begin = position + 8
        places[key] = StoragePlace(begin, min(storage.nbytes, reader.size - begin), problem=problem)
        position = begin + storage.nbytes
    return PartialTorchFile(
        tree=tree, storages=known, places=places, reason=f"the file ends at byte {reader.size}"
    )
