"""Files of torch.save, whatever their container: zip, legacy, or a plain pickle."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats import torch_legacy, torch_zip
from ckptfix.formats.pickle_rewrite import rewrite
from ckptfix.formats.pickle_stream import parse, paused_gc
from ckptfix.formats.pickle_tree import Node, PickleTree, Text, TreeWalk
from ckptfix.formats.torch_legacy import LegacyFile, PatchedBytes
from ckptfix.formats.torch_pickle import PickledStateDict, name_lists, state_dicts
from ckptfix.formats.torch_tensors import PickledTensor, read_storage, storages
from ckptfix.formats.torch_zip import AppendedBytes, TorchZip
from ckptfix.storage.reading import FileReader


class NameMap(Protocol):
    """A rule for renaming: called with an fqn, or ``module`` with a module's name in ``_metadata``."""

    def __call__(self, fqn: str, /) -> str:
        """Return the new name of a tensor."""

    def module(self, name: str, /) -> str:
        """Return the new name of a module, "" for the root."""


def same_structure(
    one: PickleTree, other: PickleTree, rename_one: NameMap, rename_other: NameMap
) -> tuple[tuple[str, str], ...] | None:
    """Return pairs of storage keys whose bytes must be equal for the two pickles to mean the same.

    None when they differ already: after renaming, every name, value, type, shape, stride and sharing must be equal, and
    so must location, type and size of every storage; storage keys must correspond one to one.
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
        return keys.setdefault(key, other_key) == other_key and back.setdefault(other_key, key) == key

    text_one, merged_one = _renamed(one, rename_one)
    text_other, merged_other = _renamed(other, rename_other)
    walk = TreeWalk(text_one, text_other, persistent=persistent, merged=[*merged_one, *merged_other])
    return tuple(keys.items()) if walk.same(one.root, other.root) else None


def _renamed(tree: PickleTree, rename: NameMap) -> tuple[Callable[[Text], str], list[Node]]:
    """Return how a tree's strings read under a map, and its ``_metadata`` dicts, where two names may become one."""
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


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A parsed file of torch.save, or of pickle.dump.

    ``container``: the zip archive, the legacy file, or None for a plain pickle. ``storage_ranges``: storage key ->
    offset in the file and length, in bytes; a compressed record has none. ``trailing``: bytes after its end.
    """

    container: TorchZip | LegacyFile | None
    tree: PickleTree
    state_dicts: tuple[PickledStateDict, ...]
    storage_ranges: Mapping[str, tuple[int, int]] = field(repr=False)
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
        """Return the edit that puts these strings at these push sites (``name_lists``) and changes nothing else.

        An Appended goes where the file ends without its trailing bytes. Raises UnsupportedFormat with the reason when
        the file cannot be edited, FormatError when it is no longer what was parsed.
        """
        if isinstance(self.container, TorchZip):
            if torch_zip.read_record(reader, self.container.pickle)[: self.tree.end] != self.tree.data:
                raise FormatError("data.pkl is not what it was when the file was read")
            return torch_zip.append_edit(self.container, rewrite(self.tree, new_names))
        if isinstance(self.container, LegacyFile):
            if reader.read(self.container.offset, self.tree.end) != self.tree.data:
                raise FormatError("the pickle is not what it was when the file was read")
            return torch_legacy.patch(self.container, rewrite(self.tree, new_names))
        raise UnsupportedFormat("a plain pickle is not edited, only what torch.save wrote")


def read_torch_file(reader: FileReader) -> TorchFile:
    """Parse a file of torch.save: a zip archive, a legacy file, or a plain pickle of protocol 2 or newer.

    Raises TruncatedError when it ends too early, UnsupportedFormat for TorchScript, tar (before 0.4) and big-endian
    files, FormatError for anything else that torch.load could not read.
    """
    with paused_gc():
        return _read(reader)


def _read(reader: FileReader) -> TorchFile:
    head = reader.read(0, min(4, reader.size))
    if head == b"PK\3\4":
        return _read_zip(reader)
    if torch_legacy.is_tar(reader):
        raise UnsupportedFormat("a tar archive, as torch.save wrote before 0.4")
    if head[:1] != b"\x80":
        raise FormatError("neither a zip archive nor a pickle")
    first = torch_legacy.read_pickle(reader, 0)
    if torch_legacy.is_legacy(first):
        file = torch_legacy.read_legacy(reader, first)
        return TorchFile(file, file.tree, state_dicts(file.tree), file.storage_ranges, reader.size - file.end)
    found = () if first.persistent else state_dicts(first)
    return TorchFile(None, first, found, {}, reader.size - first.end)


def crc_mismatches(
    file: TorchFile,
    reader: FileReader,
    *,
    every_record: bool,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[str, str | None]]:
    """Yield (record name, storage key or None) of each zip record whose bytes do not have their CRC.

    Without ``every_record`` the storages are left out. Other containers have no CRC. ``progress`` is called with the
    bytes read since the last call.
    """
    if not isinstance(file.container, TorchZip):
        return
    prefix = f"{file.container.root}/data/"
    found = torch_zip.crc_mismatches(file.container, reader, every_record=every_record, progress=progress)
    for record in found:
        name = record.name
        yield name, name.removeprefix(prefix) if name.startswith(prefix) else None


def same_storages(
    one: TorchFile, other: TorchFile, rename_one: NameMap, rename_other: NameMap
) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...] | None:
    """Return pairs of (offset, length) whose bytes must be equal for the two files to mean the same.

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


def _read_zip(reader: FileReader) -> TorchFile:
    archive = torch_zip.read_zip(reader)
    if archive.is_torchscript:
        raise UnsupportedFormat("a TorchScript archive: it holds code next to its state")
    tree = parse(torch_zip.read_record(reader, archive.pickle))
    known = storages(tree)
    if known and archive.big_endian:
        raise UnsupportedFormat("it was written on a big-endian machine")
    records = torch_zip.storage_records(archive)
    ranges = {}
    for key, storage in known.items():
        record = records.get(key)
        if record is None or record.size < storage.nbytes:
            have = "no record" if record is None else f"a record of {record.size} bytes"
            raise FormatError(f"the storage {key!r:.80} takes {storage.nbytes} bytes and has {have}")
        if record.is_stored:
            ranges[key] = (record.data_offset, storage.nbytes)
    return TorchFile(archive, tree, state_dicts(tree, known), ranges, archive.trailing)
