"""Other names, and other places of items, in the ``.metadata`` of a DCP checkpoint; nothing else of it changes.

A name stands in four places (``metadata.py`` and ``_nested_dict.py`` of torch 2.4 to 2.13): as a key of
``state_dict_metadata``, as a key of ``planner_data``, in the path there, and in the keys of ``storage_data``.
"""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats.dcp_metadata import DcpMetadata, parse_dcp_metadata
from ckptfix.formats.pickle_rewrite import number_behind, rewrite, rewrite_numbers
from ckptfix.formats.pickle_tree import Node, PickleTree, Text, attribute, pairs

Steps = tuple[str | int, ...]
"""The keys that lead to an item in the state dict that was saved."""


class Place(NamedTuple):
    """Where an item lies: ``length`` bytes from ``offset`` of a file of the folder."""

    path: PurePosixPath
    offset: int
    length: int


class Renamed(NamedTuple):
    """A new ``.metadata``, and DCP's names in it by those before."""

    data: bytes
    names: dict[str, str]


def paths_of(metadata: DcpMetadata) -> dict[str, Steps]:
    """Return the keys that lead to each item, by its name; a name that the planner left no path of is its own key."""
    planned = {one.fqn: one.path for one in metadata.planned or ()}
    every = (*(tensor.fqn for tensor in metadata.tensors), *(item.fqn for item in metadata.items))
    return {fqn: planned.get(fqn, (fqn,)) for fqn in every}


def rewrite_metadata(
    metadata: DcpMetadata, new_paths: Mapping[str, Steps], places: Mapping[str, Place]
) -> Renamed:
    """Return a ``.metadata`` in which items have other paths, names with them, and bytes items lie elsewhere.

    ``new_paths``: by name, as long as the old ones. ``places``: by old name. Raises UnsupportedFormat when a name
    cannot be changed alone or two would become one; FormatError when the result, read again, does not say exactly
    that: a fault of this module.
    """
    names = _new_names(metadata, new_paths)
    moved = metadata
    if places:
        moved = parse_dcp_metadata(_with_numbers(metadata.tree, places))
        _check_moved(metadata, moved, places)
    data = rewrite(moved.tree, _sites(moved, names, new_paths) | _path_sites(moved.tree, places))
    return Renamed(data, names)


def _new_names(metadata: DcpMetadata, new_paths: Mapping[str, Steps]) -> dict[str, str]:
    names: dict[str, str] = {}
    origin: dict[str, str] = {}
    for fqn, path in paths_of(metadata).items():
        new = new_paths.get(fqn, path)
        if new != path and ".".join(map(str, path)) != fqn:
            raise UnsupportedFormat(f"the name {fqn!r:.200} is not made of its path, as torch makes names")
        names[fqn] = ".".join(map(str, new)) if new != path else fqn
        first = origin.setdefault(names[fqn], fqn)
        if first != fqn:
            raise UnsupportedFormat(f"{first!r:.200} and {fqn!r:.200} would both become {names[fqn]!r:.200}")
    return names


def _sites(metadata: DcpMetadata, names: Mapping[str, str], new_paths: Mapping[str, Steps]) -> dict[int, str]:
    """Return every push of a name, or of a key in a path, with what it has to be."""
    wanted: dict[int, str] = {}

    def want(site: int, new: str) -> None:
        if wanted.setdefault(site, new) != new:
            raise UnsupportedFormat(
                f"two names share the string at byte {site} of the metadata: {new!r:.200} and {wanted[site]!r:.200}"
            )

    pushes = [(one.site, one.fqn) for one in metadata.tensors]
    pushes += [(one.site, one.fqn) for one in metadata.items]
    pushes += [(one.site, one.fqn) for one in metadata.stored.values()]
    for site, fqn in pushes:
        want(site, names.get(fqn, fqn))
    for planned in metadata.planned or ():
        want(planned.site, names.get(planned.fqn, planned.fqn))
        for where, step in zip(planned.sites, new_paths.get(planned.fqn, planned.path), strict=True):
            if where is not None:
                want(where, str(step))
    return wanted


def _infos(tree: PickleTree, places: Mapping[str, Place]) -> dict[str, Node]:
    """Return the ``_StorageInfo`` of the bytes items that move."""
    found = {}
    for key, info in pairs(attribute(tree.root, "storage_data")):
        name = attribute(key, "fqn")
        if type(name) is Text and name.value in places:
            found[name.value] = info
    if found.keys() != places.keys():
        raise FormatError(f"the metadata has no place of {min(places.keys() - found.keys())!r:.200}")
    return found


def _with_numbers(tree: PickleTree, places: Mapping[str, Place]) -> bytes:
    numbers: dict[int, int] = {}
    for fqn, info in _infos(tree, places).items():
        for name, number in (("offset", places[fqn].offset), ("length", places[fqn].length)):
            numbers[number_behind(tree, _key(info, name).site)] = number
    return rewrite_numbers(tree, numbers)


def _path_sites(tree: PickleTree, places: Mapping[str, Place]) -> dict[int, str]:
    return {
        attribute(info, "relative_path").site: str(places[fqn].path)
        for fqn, info in _infos(tree, places).items()
    }


def _key(info: Node, name: str) -> Text:
    """Return the push of the name of an attribute."""
    states: list[Any] = info.states or []
    keys = [key for state in states for key, _ in pairs(state) if type(key) is Text and key.value == name]
    if len(keys) != 1:
        raise UnsupportedFormat(f"the place of an item has {len(keys)} attributes called {name!r}")
    return keys[0]


def _check_moved(before: DcpMetadata, after: DcpMetadata, places: Mapping[str, Place]) -> None:
    """Raise FormatError unless these items have new offsets and lengths, and nothing else has changed."""
    want = [
        item._replace(offset=places[item.fqn].offset, length=places[item.fqn].length)
        if item.offsets is None and item.fqn in places
        else item
        for item in before.stored.values()
    ]
    same = [one._replace(site=0) for one in before.tensors] == [one._replace(site=0) for one in after.tensors]
    same = same and [item._replace(site=0) for item in want] == [
        item._replace(site=0) for item in after.stored.values()
    ]
    same = same and [item.fqn for item in before.items] == [item.fqn for item in after.items]
    same = same and [(one.fqn, one.path) for one in before.planned or ()] == [
        (one.fqn, one.path) for one in after.planned or ()
    ]
    if not same:
        raise FormatError("the new metadata is not the old one with new places; nothing was changed")
