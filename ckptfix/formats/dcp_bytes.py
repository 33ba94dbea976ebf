"""The items of a DCP checkpoint that are no tensors: any object, each a file of torch.save inside of a ``.distcp``."""

from collections.abc import Mapping

from ckptfix.errors import UnsupportedFormat
from ckptfix.formats.dcp_metadata import StoredItem
from ckptfix.formats.dcp_names import GROUPS_KEY
from ckptfix.formats.pickle_tree import Kind, Node, Text, child, is_dict_like
from ckptfix.formats.torch_file import Appended, TorchFile, read_torch_file
from ckptfix.storage.reading import FileReader

MAX_ITEM = 1 << 26
"""Longest item that is read, in bytes. The names of a million parameters take about 40 million."""

NAME_KEYS = ("params", "param_names")
"""Keys of a parameter group whose value is a list of names."""


def read_item(reader: FileReader, item: StoredItem) -> TorchFile:
    """Parse an item of an open ``.distcp``; nothing is unpickled.

    Raises FormatError when it is none, TruncatedError or UnsupportedFormat with the reason when it cannot be read.
    """
    if item.transforms:
        raise UnsupportedFormat(f"its bytes went through {', '.join(item.transforms)}, which is not read")
    if item.length > MAX_ITEM:
        raise UnsupportedFormat(f"it has {item.length} bytes, at most {MAX_ITEM} are read")
    return read_torch_file(reader.window(item.offset, item.length))


def listed_names(file: TorchFile) -> tuple[Text, ...] | None:
    """Return the strings of an item that is a list of nothing else, None for any other."""
    root = file.tree.root
    values = root.items or [] if type(root) is Node and root.kind is Kind.LIST else root
    if not isinstance(values, list | tuple) or not all(type(value) is Text for value in values):
        return None
    return tuple(values)


def grouped_names(file: TorchFile) -> dict[str, tuple[Text, ...]]:
    """Return the names in all groups of an optimizer that is one item, by the key that holds them; empty for any other.

    So saves a planner that takes an object without tensors as a whole, as that of torch before 2.4 does
    (``_traverse.traverse_state_dict_v_2_3`` of 2.13): the list of the groups, or the dict that holds it.
    """
    root = file.tree.root
    groups = child(root, GROUPS_KEY) if is_dict_like(root) else root
    if type(groups) is not Node or groups.kind is not Kind.LIST:
        return {}
    found: dict[str, list[Text]] = {}
    met: set[int] = set()
    for group in groups.items or ():
        for key in NAME_KEYS if is_dict_like(group) and id(group) not in met else ():
            names = child(group, key)
            listed = names.items or [] if type(names) is Node and names.kind is Kind.LIST else ()
            if listed and id(names) not in met and all(type(value) is Text for value in listed):
                met.add(id(names))
                found.setdefault(key, []).extend(listed)
        met.add(id(group))
    return {key: tuple(names) for key, names in found.items()}


def renamed_item(reader: FileReader, item: StoredItem, new_names: Mapping[int, str]) -> bytes:
    """Return the bytes of an item with these strings at these push sites. Raises as ``read_item`` does."""
    window = reader.window(item.offset, item.length)
    edit = read_item(reader, item).edit(window, new_names)
    old = window.read(0, window.size)
    if isinstance(edit, Appended):
        return old + edit.data
    return old[: edit.offset] + edit.new + old[edit.offset + len(edit.new) :]
