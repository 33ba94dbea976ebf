"""The files of torch.save before 1.6: five pickles, then the bytes of every storage.

Facts from torch 2.13, ``torch/serialization.py`` (``_legacy_save``, ``_legacy_load``): a magic number, the protocol
version 1001, a dict about the system, the object, the list of storage keys; then for each key eight bytes with the
number of elements, and the elements. Nothing is aligned and the next pickle follows at once, so nothing can move.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckptfix.errors import BeyondLimits, FormatError, TruncatedError, UnsupportedFormat
from ckptfix.formats.pickle_stream import parse
from ckptfix.formats.pickle_tree import Kind, Node, PickleTree, Text, child
from ckptfix.formats.torch_tensors import PickledStorage, storages
from ckptfix.formats.torch_zip import MAX_PICKLE
from ckptfix.storage.reading import FileReader

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
TAR_MAGIC_OFFSET = 257

_TAR_BLOCK = 512
_TAR_NUMBERS = (
    (100, 108),
    (108, 116),
    (116, 124),
    (124, 136),
    (136, 148),
    (148, 156),
    (329, 337),
    (337, 345),
)

_SMALL = 1 << 16  # the pickles before the object take some hundred bytes
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
    """Return whether it is a tar archive, as torch.save wrote before 0.4."""
    if reader.size < _TAR_BLOCK:
        return False
    head = reader.read(0, _TAR_BLOCK)
    if head[TAR_MAGIC_OFFSET : TAR_MAGIC_OFFSET + 5] == b"ustar":
        return True
    # The oldest kind has no magic, and torch.load tries tar before it looks for a pickle: a header it is, by the
    # rules of tarfile, when its numbers are numbers and one is its checksum, over signed or unsigned bytes.
    if any(_tar_number(head[begin:end]) is None for begin, end in _TAR_NUMBERS):
        return False
    rest = head[:148] + b" " * 8 + head[156:]
    return _tar_number(head[148:156]) in (sum(rest), sum(rest) - 256 * sum(byte > 127 for byte in rest))


def _tar_number(field: bytes) -> int | None:
    """Return the number in a field of a tar header, octal or in base 256, as tarfile reads it."""
    if field[0] in (0o200, 0o377):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0o377 else 0)
    try:
        return int(field.partition(b"\0")[0].decode("ascii").strip() or "0", 8)
    except ValueError:
        return None


def read_pickle(reader: FileReader, offset: int, limit: int = MAX_PICKLE) -> PickleTree:
    """Parse one pickle in a file, from ``offset``, without reading much further than it reaches.

    Raises TruncatedError when the file ends inside it, FormatError for the rest, also beyond ``limit`` bytes.
    """
    window = _FIRST_WINDOW
    while True:
        length = min(window, reader.size - offset, limit)
        try:
            return parse(reader.read(offset, length))
        except TruncatedError as error:
            if length == reader.size - offset:
                message = f"{error}; the file ends at {reader.size}"
                raise TruncatedError(message, have=reader.size, in_header=True) from None
            if length == limit:
                raise BeyondLimits(f"the pickle is longer than {limit} bytes") from None
        window *= _GROWTH


def is_legacy(first: PickleTree) -> bool:
    """Return whether the first pickle of a file is torch's magic number."""
    return type(first.root) is int and first.root == MAGIC_NUMBER


class LegacyPickles(NamedTuple):
    """The pickles of a legacy file, which precede its storages: the object and its offset, the storages' keys.

    ``end``: where the first storage begins. ``parts``: all five pickles, the object last.
    """

    tree: PickleTree
    offset: int
    keys: tuple[str, ...]
    end: int
    parts: tuple[PickleTree, ...]


def read_legacy(reader: FileReader, first: PickleTree) -> LegacyFile:
    """Parse a legacy file whose first pickle is the magic number.

    Raises TruncatedError when it ends too early, UnsupportedFormat for one of a big-endian machine.
    """
    tree, offset, keys, position, parts = read_pickles(reader, first)
    ranges, end = _ranges(reader, storages(tree), keys, position)
    # torch.load executes all five: what any of them names is named by the file, and what it refuses is refused.
    named = {name: at for part in parts for name, at in part.globals.items()}
    refused = tuple(sorted({reason for part in parts for reason in part.refused_opcodes}))
    return LegacyFile(replace(tree, globals=named, refused_opcodes=refused), offset, ranges, end)


def read_pickles(reader: FileReader, first: PickleTree) -> LegacyPickles:
    """Parse the pickles of a legacy file; ``first`` is its magic number. Raises as ``read_legacy``."""
    if first.end > _SMALL:
        raise FormatError(f"the magic number of the legacy torch file takes {first.end} bytes")
    version = read_pickle(reader, first.end, _SMALL)
    if type(version.root) is not int or version.root != PROTOCOL_VERSION:
        # Printed only if it is small: a tuple can be too deep for repr, an integer too long.
        is_small = type(version.root) is int and abs(version.root) < 1 << 32
        what = f"{version.root}" if is_small else f"<{type(version.root).__name__}>"
        raise FormatError(f"a legacy torch file of version {what}, known is {PROTOCOL_VERSION}")
    position = first.end + version.end
    system = read_pickle(reader, position, _SMALL)
    if child(system.root, "little_endian") is False:
        raise UnsupportedFormat("it was written on a big-endian machine")
    offset = position + system.end
    tree = read_pickle(reader, offset)
    keys_offset = offset + tree.end
    key_list = read_pickle(reader, keys_offset)
    parts = (key_list, system, version, first, tree)
    return LegacyPickles(tree, offset, _keys(key_list), keys_offset + key_list.end, parts)


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
        raise FormatError("the storage keys of the legacy torch file are not a list of distinct strings")
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
            raise FormatError(
                f"the storage {key!r:.80} has {numel} elements, its object says {known[key].numel}"
            )
        ranges[key] = (position + 8, known[key].nbytes)
        position += 8 + known[key].nbytes
    return ranges, end
