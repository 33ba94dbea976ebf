"""The files of torch.save before 1.6: five pickles, then the bytes of every storage.

Facts from torch 2.13, ``torch/serialization.py`` (``_legacy_save``, ``_legacy_load``): a magic number, the protocol
version 1001, a dict about the system, the object, the list of storage keys; then for each key eight bytes with the
number of elements, and the elements. Nothing is aligned and the next pickle follows at once, so nothing can move.
"""

from dataclasses import dataclass, field, replace

from ckptfix.errors import FormatError, TruncatedError, UnsupportedFormat
from ckptfix.formats.pickle_stream import parse
from ckptfix.formats.pickle_tree import Kind, Node, PickleTree, Text, child
from ckptfix.formats.torch_tensors import PickledStorage, storages
from ckptfix.formats.torch_zip import MAX_PICKLE
from ckptfix.storage.reading import FileReader

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
TAR_MAGIC_OFFSET = 257

_FIRST_WINDOW = 1 << 16
_GROWTH = 8  # each wider window is parsed from its start: 1/7 more work than one that fits


@dataclass(frozen=True, slots=True)
class LegacyFile:
    """A parsed legacy file.

    ``offset``: where the pickle of the object begins. ``storage_ranges``: storage key -> offset and length of its
    bytes. ``end``: where the last storage ends.
    """

    tree: PickleTree
    offset: int
    storage_ranges: dict[str, tuple[int, int]]
    end: int


@dataclass(frozen=True, slots=True)
class PatchedBytes:
    """Overwrite ``old`` at ``offset`` by ``new`` of the same length."""

    offset: int
    old: bytes = field(repr=False)
    new: bytes = field(repr=False)


def is_tar(reader: FileReader) -> bool:
    """Whether it is a tar archive, as torch.save wrote before 0.4."""
    return reader.size >= 512 and reader.read(TAR_MAGIC_OFFSET, 5) == b"ustar"


def read_pickle(reader: FileReader, offset: int) -> PickleTree:
    """Parse one pickle in a file, from ``offset``, without reading much further than it reaches.

    Raises TruncatedError when the file ends inside it, FormatError for the rest, also beyond ``MAX_PICKLE`` bytes.
    """
    window = _FIRST_WINDOW
    while True:
        length = min(window, reader.size - offset, MAX_PICKLE)
        try:
            return parse(reader.read(offset, length))
        except TruncatedError as error:
            if length == reader.size - offset:
                raise TruncatedError(f"{error}; the file ends at {reader.size}", have=reader.size) from None
            if length == MAX_PICKLE:
                raise FormatError(f"the pickle is longer than {MAX_PICKLE} bytes") from None
        window *= _GROWTH


def is_legacy(first: PickleTree) -> bool:
    """Whether the first pickle of a file is torch's magic number."""
    return type(first.root) is int and first.root == MAGIC_NUMBER


def read_legacy(reader: FileReader, first: PickleTree) -> LegacyFile:
    """Parse a legacy file whose first pickle is the magic number.

    Raises TruncatedError when it ends too early, UnsupportedFormat for one of a big-endian machine.
    """
    version = read_pickle(reader, first.end)
    if type(version.root) is not int or version.root != PROTOCOL_VERSION:
        raise FormatError(f"a legacy torch file of version {version.root!r:.20}, known is {PROTOCOL_VERSION}")
    position = first.end + version.end
    system = read_pickle(reader, position)
    if child(system.root, "little_endian") is False:
        raise UnsupportedFormat("it was written on a big-endian machine")
    offset = position + system.end
    tree = read_pickle(reader, offset)
    keys_offset = offset + tree.end
    key_list = read_pickle(reader, keys_offset)
    ranges, end = _ranges(reader, storages(tree), _keys(key_list), keys_offset + key_list.end)
    # torch.load executes all five: what any of them names is named by the file.
    named = {
        name: at for part in (key_list, system, version, first, tree) for name, at in part.globals.items()
    }
    return LegacyFile(replace(tree, globals=named), offset, ranges, end)


def patch(file: LegacyFile, new_pickle: bytes) -> PatchedBytes:
    """Return the patch that puts ``new_pickle`` in place of the object, padded to the old length.

    The padding is memo writes before STOP, which change nothing: ``q 00`` takes 2 bytes, ``r 00 00 00 00`` takes 5.
    Raises UnsupportedFormat when the length cannot be met.
    """
    old = file.tree.data
    slack = len(old) - len(new_pickle)
    if slack < 0:
        raise UnsupportedFormat(f"a legacy torch file has no room for names that are {-slack} bytes longer")
    if slack in (1, 3):
        raise UnsupportedFormat(
            f"a legacy torch file cannot become {slack} bytes shorter: padding takes 2 or 5"
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
        raise FormatError("the storage keys of the legacy torch file are no list of distinct strings")
    return keys


def _ranges(
    reader: FileReader, known: dict[str, PickledStorage], keys: tuple[str, ...], position: int
) -> tuple[dict[str, tuple[int, int]], int]:
    if known.keys() != set(keys):
        raise FormatError(
            f"the legacy torch file lists {len(keys)} storages, its object refers to {len(known)}"
        )
    end = position + sum(8 + storage.nbytes for storage in known.values())
    if end > reader.size:
        message = f"the last storage ends at byte {end}, the file has {reader.size}"
        raise TruncatedError(message, have=reader.size, need=end)
    ranges = {}
    for key in keys:
        numel = int.from_bytes(reader.read(position, 8), "little")
        if numel != known[key].numel:
            raise FormatError(f"the storage {key!r} has {numel} elements, its object says {known[key].numel}")
        ranges[key] = (position + 8, known[key].nbytes)
        position += 8 + known[key].nbytes
    return ranges, end
