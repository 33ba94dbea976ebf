"""Files of torch.save, whatever their container: zip, a plain pickle, or the legacy one of torch
before 1.6.

A legacy file is five pickles, then the bytes of every storage. Facts from torch 2.13,
``torch/serialization.py`` (``_legacy_save``, ``_legacy_load``): a magic number, the protocol
version 1001, a dict about the system, the object, the list of storage keys; then for each key eight
bytes with the number of elements, and the elements. Nothing is aligned and the next pickle follows
at once, so nothing can move.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.errors import (
    BeyondLimits,
    FormatError,
    OtherArchive,
    TruncatedError,
    UnsupportedFormat,
)
from ckptfix.formats import torch_zip
from ckptfix.formats.pickle_calls import ensure_calls
from ckptfix.formats.pickle_rewrite import rewrite
from ckptfix.formats.pickle_stream import parse, paused_gc
from ckptfix.formats.pickle_tree import CALLS, Kind, Node, PickleTree, Text, TreeWalk, constants
from ckptfix.formats.torch_pickle import PickledStateDict, name_lists, state_dicts
from ckptfix.formats.torch_tensors import (
    PickledStorage,
    PickledTensor,
    is_rebuild,
    read_storage,
    storages,
)
from ckptfix.formats.torch_zip import MAX_PICKLE, AppendedBytes, TorchZip
from ckptfix.storage.files import FileReader
from ckptfix.wording import Brief

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257

_SMALL = 1 << 16  # the pickles before the object take some hundred bytes
_FIRST_WINDOW = 1 << 16
_GROWTH = 8  # each wider window is parsed from its start: 1/7 more work than one that fits


class LegacyFile(Struct, frozen=True):
    """A parsed legacy file.

    ``offset``: where the pickle of the object begins. ``storage_ranges``: storage key -> offset and
    length of its bytes. ``end``: where the last storage ends.
    """

    tree: PickleTree
    offset: int
    storage_ranges: dict[str, tuple[int, int]]
    end: int


class PatchedBytes(Brief, Struct, frozen=True):
    """Patch of ``old`` bytes at ``offset`` by ``new`` of the same length."""

    offset: int
    old: bytes
    new: bytes


def is_tar(reader: FileReader) -> bool:
    """Return whether it is a tar archive, as torch.save wrote before 0.4."""
    end = _TAR_MAGIC_AT + len(_TAR_MAGIC)
    return reader.size >= end and reader.read(_TAR_MAGIC_AT, len(_TAR_MAGIC)) == _TAR_MAGIC


def read_pickle(reader: FileReader, offset: int, limit: int = MAX_PICKLE) -> PickleTree:
    """Parse one pickle in a file, from ``offset``, without reading much further than it reaches.

    Raises TruncatedError when the file ends inside it, FormatError for the rest, also beyond
    ``limit`` bytes.
    """
    window = _FIRST_WINDOW
    while True:
        length = min(window, reader.size - offset, limit)
        try:
            return parse(reader.read(offset, length))
        except TruncatedError as error:
            if length == reader.size - offset:
                message = f"{error}; the file ends at byte {reader.size}"
                raise TruncatedError(message, have=reader.size, in_header=True) from None
            if length == limit:
                raise BeyondLimits(f"the pickle is longer than {limit} bytes") from None
        window *= _GROWTH


UNTYPED = "BINPERSID of an UntypedStorage"
"""The opcode of a legacy file that no ``torch.load`` executes."""


def is_legacy(first: PickleTree) -> bool:
    """Return whether the first pickle of a file is torch's magic number."""
    return type(first.root) is int and first.root == MAGIC_NUMBER


class LegacyPickles(NamedTuple):
    """The pickles of a legacy file, which precede its storages: the object and its offset, the
    storages' keys.

    ``end``: where the first storage begins. ``parts``: all five pickles, the object last.
    """

    tree: PickleTree
    offset: int
    keys: tuple[str, ...]
    end: int
    parts: tuple[PickleTree, ...]


def read_legacy(reader: FileReader, first: PickleTree) -> LegacyFile:
    """Parse a legacy file whose first pickle is the magic number.

    Raises TruncatedError when it ends too early, FormatError for the rest.
    """
    tree, offset, keys, position, parts = read_pickles(reader, first)
    known = storages(tree)
    ranges, end = _ranges(reader, known, keys, position)
    for part in parts:
        if part is not tree and part.persistent:
            raise FormatError("the legacy torch file refers to a storage outside its saved object")
        ensure_calls(part, known)
    if any(len(node.head) != 6 for node in tree.persistent):
        raise FormatError("the legacy torch file has a storage id in the format of torch zip files")
    # torch.load executes all five: a global in any of them is a global of the file, and a refusal
    # of one refuses the file.
    named = {name: at for part in parts for name, at in part.globals.items()}
    refused = {reason for part in parts for reason in part.refused_opcodes}
    if any(storage.type == "UntypedStorage" for storage in known.values()):
        # torch.save writes one for uint16 and float8; the reader asks it for a dtype, and fails (up
        # to 2.13).
        refused.add(UNTYPED)
    return LegacyFile(
        replace(tree, globals=named, refused_opcodes=tuple(sorted(refused))), offset, ranges, end
    )


def read_pickles(reader: FileReader, first: PickleTree) -> LegacyPickles:
    """Parse the pickles of a legacy file; ``first`` is its magic number. Raises as
    ``read_legacy``.
    """
    if first.end > _SMALL:
        raise FormatError(f"the magic number of the legacy torch file takes {first.end} bytes")
    version = read_pickle(reader, first.end, _SMALL)
    if type(version.root) is not int or version.root != PROTOCOL_VERSION:
        # Printed only if it is small: a tuple can be too deep for repr, an integer too long.
        is_small = type(version.root) is int and abs(version.root) < 1 << 32
        what = f"{version.root}" if is_small else f"<{type(version.root).__name__}>"
        raise FormatError(f"a legacy torch file of version {what} (expected {PROTOCOL_VERSION})")
    position = first.end + version.end
    # The dict has the byte order of the machine, and ``_legacy_load`` ignores it:
    # ``THPStorage_writeFileRaw`` (``torch/csrc/serialization.cpp``) writes numbers as little-endian
    # on every machine.
    system = read_pickle(reader, position, _SMALL)
    offset = position + system.end
    tree = _with_classes(read_pickle(reader, offset))
    keys_offset = offset + tree.end
    key_list = read_pickle(reader, keys_offset)
    parts = (key_list, system, version, first, tree)
    return LegacyPickles(tree, offset, _keys(key_list), keys_offset + key_list.end, parts)


def _with_classes(tree: PickleTree) -> PickleTree:
    """Return the object of a legacy file with classes of modules in the place of their persistent
    ids.

    ``_legacy_save`` writes ``("module", class, source file, source)`` for a class of a module, and
    a load puts the class there. ``weights_only`` refuses the id, whatever is allowed.
    """
    storage_ids: list[Node] = []
    for node in tree.persistent:
        pid = node.head
        cls = (
            pid[1] if type(pid) is tuple and len(pid) == 4 and _is_text(pid[0], "module") else None
        )
        if (
            type(cls) is not Node
            or cls.kind not in (Kind.GLOBAL, *CALLS)
            or (cls.kind is Kind.GLOBAL and is_rebuild(*cls.head))
        ):
            storage_ids.append(node)
        elif all(part is None or _is_text(part) for part in pid[2:]):
            node.kind, node.head, node.args = cls.kind, cls.head, cls.args
        else:
            raise FormatError("the source of a module's class is not text, so torch.load fails")
    if len(storage_ids) == len(tree.persistent):
        return tree
    refused = (*tree.refused_opcodes, "BINPERSID of a module's class")
    return replace(tree, persistent=tuple(storage_ids), refused_opcodes=refused)


def _is_text(value: object, expected: str | None = None) -> bool:
    if type(value) is Text:
        return expected is None or value.value == expected
    return expected is None and type(value) is Node and value.kind is Kind.LONG_TEXT


def patch(file: LegacyFile, new_pickle: bytes) -> PatchedBytes:
    """Return the patch that puts ``new_pickle`` in place of the object, padded to the old length.

    The padding is memo writes before STOP, which change nothing: ``q 00`` takes 2 bytes, ``r 00 00
    00 00`` takes 5. Raises UnsupportedFormat when the length cannot be met.
    """
    old = file.tree.data
    slack = len(old) - len(new_pickle)
    if slack < 0:
        raise UnsupportedFormat(
            f"a legacy torch file has no room for names that are {-slack} bytes longer"
        )
    if slack in (1, 3):
        raise UnsupportedFormat(
            f"a legacy torch file cannot shrink by {slack} byte{'s' if slack > 1 else ''}: padding "
            "takes 2 or 5 bytes"
        )
    if slack and file.tree.frames:
        raise UnsupportedFormat(
            f"a legacy torch file of pickle protocol {file.tree.protocol} cannot be padded"
        )
    padding = b"r\0\0\0\0" * (slack % 2) + b"q\0" * ((slack - 5 * (slack % 2)) // 2)
    return PatchedBytes(file.offset, old, new_pickle[:-1] + padding + new_pickle[-1:])


def _keys(tree: PickleTree) -> tuple[str, ...]:
    root = tree.root
    items = (root.items or []) if type(root) is Node and root.kind is Kind.LIST else [None]
    keys = tuple([item.value for item in items if type(item) is Text])
    if len(keys) != len(items) or len(set(keys)) != len(keys):
        raise FormatError(
            "the storage keys of the legacy torch file are not a list of distinct strings"
        )
    return keys


def _ranges(
    reader: FileReader, known: dict[str, PickledStorage], keys: tuple[str, ...], position: int
) -> tuple[dict[str, tuple[int, int]], int]:
    if known.keys() != set(keys):
        raise FormatError(
            f"the legacy torch file lists {len(keys)} storages, but its saved object refers to "
            f"{len(known)}"
        )
    end = position + sum(8 + storage.nbytes for storage in known.values())
    if end > reader.size:
        message = f"the last storage ends at byte {end}, but the file has only {reader.size} bytes"
        raise TruncatedError(message, have=reader.size, need=end)
    ranges = {}
    for key in keys:
        numel = int.from_bytes(reader.read(position, 8), "little")
        if numel != known[key].numel:
            raise FormatError(
                f"the storage {key!r:.80} has {numel} elements, but the saved object says "
                f"{known[key].numel}"
            )
        ranges[key] = (position + 8, known[key].nbytes)
        position += 8 + known[key].nbytes
    return ranges, end


class NameMap(Protocol):
    """A rule for renaming: called with an fqn, or ``module`` with a module's name in
    ``_metadata``.
    """

    def __call__(self, fqn: str, /) -> str:
        """Return the new name of a tensor."""

    def module(self, name: str, /) -> str:
        """Return the new name of a module, "" for the root."""


def same_structure(
    one: PickleTree, other: PickleTree, rename_one: NameMap, rename_other: NameMap
) -> tuple[tuple[str, str], ...] | None:
    """Return pairs of storage keys whose bytes must be equal for the two pickles to mean the same.

    None when they differ already: after renaming, every name, value, type, shape, stride and
    sharing must be equal, and so must location, type and size of every storage; storage keys must
    correspond one to one.
    """
    keys: dict[str, str] = {}
    back: dict[str, str] = {}

    def persistent(left: Node, right: Node) -> bool:
        try:
            (key, storage), (other_key, other_storage) = read_storage(left), read_storage(right)
        except FormatError:
            return False
        if storage != other_storage:
            return False
        return (
            keys.setdefault(key, other_key) == other_key and back.setdefault(other_key, key) == key
        )

    text_one, merged_one = _renamed(one, rename_one)
    text_other, merged_other = _renamed(other, rename_other)
    walk = TreeWalk(
        text_one, text_other, persistent=persistent, merged=[*merged_one, *merged_other]
    )
    return tuple(keys.items()) if walk.same(one.root, other.root) else None


def _renamed(tree: PickleTree, rename: NameMap) -> tuple[Callable[[Text], str], list[Node]]:
    """Return how a tree's strings read under a map, and its ``_metadata`` dicts, where two names
    may become one.
    """
    names: dict[int, str] = {}
    metadata = []
    renamed: dict[tuple[bool, str], str] = {}  # a name can be referred to a million times
    for place in name_lists(tree):
        is_metadata = place.kind == "metadata"
        if is_metadata:
            metadata.append(place.node)
        new = rename.module if is_metadata else rename
        for name, site in place.names:
            known = renamed.get((is_metadata, name))
            if known is None:
                known = renamed[is_metadata, name] = new(name)
            names[site] = known
    return lambda text: names.get(text.site, text.value), metadata


Appended = AppendedBytes
Patched = PatchedBytes


class TorchFile(Brief, Struct, frozen=True):
    """A parsed file of torch.save, or of pickle.dump.

    ``container``: the zip archive, the legacy file, or None for a plain pickle. ``storage_ranges``:
    storage key -> offset in the file and length, in bytes; a compressed record has none.
    ``trailing``: bytes after its end.
    """

    container: TorchZip | LegacyFile | None
    tree: PickleTree
    state_dicts: tuple[PickledStateDict, ...]
    storage_ranges: Mapping[str, tuple[int, int]]
    trailing: int

    @property
    def kind(self) -> str:
        """The container, in words."""
        if self.container is None:
            return "a plain pickle"
        return "a torch zip file" if isinstance(self.container, TorchZip) else "a legacy torch file"

    def tensors_of(self, storage_key: str) -> tuple[PickledTensor, ...]:
        """Return the tensors that lie in a storage."""
        return tuple(
            tensor
            for state_dict in self.state_dicts
            for tensor in state_dict.tensors
            if tensor.storage_key == storage_key
        )

    def edit(self, reader: FileReader, new_names: Mapping[int, str]) -> Patched | Appended:
        """Return the edit that puts these strings at these push sites (``name_lists``) and changes
        nothing else.

        An Appended goes where the file ends without its trailing bytes. Raises UnsupportedFormat
        with the reason when the file cannot be edited, FormatError when it is no longer what was
        parsed.
        """
        if isinstance(self.container, TorchZip):
            if (
                torch_zip.read_record(reader, self.container.pickle)[: self.tree.end]
                != self.tree.data
            ):
                raise FormatError("data.pkl has changed since the file was read")
            return torch_zip.append_edit(self.container, rewrite(self.tree, new_names))
        if isinstance(self.container, LegacyFile):
            if reader.read(self.container.offset, self.tree.end) != self.tree.data:
                raise FormatError("the pickle has changed since the file was read")
            return patch(self.container, rewrite(self.tree, new_names))
        raise UnsupportedFormat(
            "ckptfix edits only files that torch.save wrote, never a plain pickle"
        )


def read_torch_file(reader: FileReader) -> TorchFile:
    """Parse a file of torch.save: a zip archive, a legacy file, or a plain pickle of protocol 2 or
    newer.

    Raises TruncatedError when it ends too early, UnsupportedFormat for TorchScript, tar (before
    0.4) and big-endian zip files, FormatError for anything else that torch.load could not read.
    """
    with paused_gc():
        return _read(reader)


def _read(reader: FileReader) -> TorchFile:
    head = reader.read(0, min(4, reader.size))
    if head == b"PK\3\4":
        return _read_zip(reader)
    if is_tar(reader):
        raise OtherArchive("a tar archive, as torch.save wrote before 0.4")
    if head[:1] != b"\x80":
        raise FormatError("neither a zip archive nor a pickle")
    first = read_pickle(reader, 0)
    if is_legacy(first):
        file = read_legacy(reader, first)
        return TorchFile(
            file, file.tree, state_dicts(file.tree), file.storage_ranges, reader.size - file.end
        )
    found = () if first.persistent else state_dicts(first)
    return TorchFile(None, first, found, {}, reader.size - first.end)


def crc_mismatches(
    file: TorchFile,
    reader: FileReader,
    *,
    every_record: bool,
    among: slice = slice(None),
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[str, str | None]]:
    """Yield (record name, storage key or None) of each zip record whose bytes do not have their
    CRC.

    Without ``every_record`` the storages are left out. ``among``: look at these records alone.
    Other containers have no CRC. ``progress`` is called with the bytes read since the last call.
    """
    if not isinstance(file.container, TorchZip):
        return
    prefix = f"{file.container.root}/data/"
    found = torch_zip.crc_mismatches(
        file.container, reader, every_record=every_record, among=among, progress=progress
    )
    for record in found:
        name = record.name
        yield name, name.removeprefix(prefix) if name.startswith(prefix) else None


def same_storages(
    one: TorchFile, other: TorchFile, rename_one: NameMap, rename_other: NameMap
) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...] | None:
    """Return pairs of (offset, length) whose bytes must be equal for the two files to mean the
    same.

    None when their pickles differ already (``same_structure``), or a storage is compressed.
    """
    with paused_gc():
        keys = same_structure(one.tree, other.tree, rename_one, rename_other)
    if keys is None:
        return None
    ranges = []
    for key_one, key_other in keys:
        left, right = one.storage_ranges.get(key_one), other.storage_ranges.get(key_other)
        if left is None or right is None or left[1] != right[1]:
            return None
        ranges.append((left, right))
    return tuple(ranges)


def content_hash(file: TorchFile, rename: NameMap) -> int:
    """Return a number that is the same for files of equal contents, and for different ones by
    chance alone.

    It is computed from the constants of the pickle and the CRCs of the storages; no storage is
    read. Files of one save have a CRC for every storage, or none.
    """
    text, merged = _renamed(file.tree, rename)
    values = constants(file.tree.root, text, without=[*file.tree.persistent, *merged])
    crcs: list[int] = []
    if isinstance(file.container, TorchZip):
        records = torch_zip.storage_records(file.container)
        crcs = sorted(records[key].crc for key in file.storage_ranges)
    return hash((values, tuple(crcs)))


_VERSION = re.compile(rb"\s*\+?(\d{1,9})")
_VERSIONS = range(1, 11)
"""The versions that torch 2.13 reads (``kMinSupportedFileFormatVersion`` and its maximum)."""


def _ensure_loadable(reader: FileReader, archive: TorchZip) -> None:
    """Raise FormatError for an archive whose small records torch.load refuses.

    ``PyTorchStreamReader::init`` needs a version; ``torch.serialization._load`` reads the alignment
    by ``int()`` and the id of the save as UTF-8.
    """
    records = {record.name.lower(): record for record in archive.records}
    root = archive.root.lower()
    record = records.get(f"{root}/.data/version") or records.get(f"{root}/version")
    if record is None:
        raise FormatError("the zip archive has no record 'version', so torch.load refuses it")
    text = torch_zip.read_record(reader, record)
    version = _VERSION.match(text)
    if version is None or int(version[1]) not in _VERSIONS:
        raise FormatError(
            f"the record version is {text[:16]!r}, which torch.load refuses (expected "
            f"{_VERSIONS[0]} to {_VERSIONS[-1]})"
        )
    for name, read in ((".storage_alignment", int), (".data/serialization_id", bytes.decode)):
        record = records.get(f"{root}/{name}")
        if record is not None:
            text = torch_zip.read_record(reader, record)
            try:
                read(text)
            except ValueError:
                if torch_zip.fails_its_crc(record, text):
                    continue
                raise FormatError(
                    f"the record {name} is {text[:16]!r}, which torch.load refuses"
                ) from None


def _read_zip(reader: FileReader) -> TorchFile:
    archive = torch_zip.read_zip(reader)
    if archive.is_torchscript:
        raise OtherArchive("a TorchScript archive, which contains code as well as state")
    _ensure_loadable(reader, archive)
    outside = [one.name for one in archive.records if not one.name.startswith(f"{archive.root}/")]
    if outside:  # PyTorchStreamReader::getAllRecords
        raise FormatError(
            f"the zip record {outside[0]!r:.80} is not in {archive.root}/, so torch.load refuses it"
        )
    data = torch_zip.read_record(reader, archive.pickle)
    tree = parse(data)
    known = storages(tree)
    try:
        ensure_calls(tree, known, has_checksum=bool(archive.pickle.crc))
    except FormatError:
        # Its wrong checksum is the better finding: it says that these bytes changed.
        if not torch_zip.fails_its_crc(archive.pickle, data):
            raise
    if any(len(node.head) != 5 for node in tree.persistent):
        raise FormatError("the torch zip file has a storage id in the format of legacy files")
    if known and archive.big_endian:
        raise UnsupportedFormat("it was written on a big-endian machine")
    records = torch_zip.storage_records(archive)
    ranges = {}
    for key, storage in known.items():
        record = records.get(key)
        if record is None or record.size != storage.nbytes:  # torch 2.13 refuses a longer one, too
            have = "no record" if record is None else f"a record of {record.size} bytes"
            raise FormatError(
                f"the storage {key!r:.80} needs {storage.nbytes} bytes but has {have}"
            )
        if record.is_stored:
            ranges[key] = (record.data_offset, storage.nbytes)
    return TorchFile(archive, tree, state_dicts(tree, known), ranges, archive.trailing)
