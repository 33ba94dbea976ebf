"""Two torch pickles that differ in names and storage keys only: what one model saved twice looks like."""

from collections.abc import Callable
from typing import Protocol

from ckptfix.errors import FormatError
from ckptfix.formats.pickle_compare import TreeWalk
from ckptfix.formats.pickle_tree import Node, PickleTree, Text
from ckptfix.formats.torch_pickle import name_lists
from ckptfix.formats.torch_tensors import read_storage


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
