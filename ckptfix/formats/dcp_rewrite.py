"""Other names, and other places of items, in the ``.metadata`` of a DCP checkpoint; nothing else of
it changes.

A name is in four places (``metadata.py`` and ``_nested_dict.py`` of torch 2.4 to 2.13): as a key of
``state_dict_metadata``, as a key of ``planner_data``, in the path there, and in the keys of
``storage_data``.
"""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from msgspec.structs import replace

from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats.dcp_metadata import DcpMetadata, parse_dcp_metadata
from ckptfix.formats.dcp_stream import MATCHED
from ckptfix.formats.pickle_rewrite import number_behind, rewrite
from ckptfix.formats.pickle_tree import Node, PickleTree, Text, TreeWalk, attribute, pairs

Steps = tuple[str | int, ...]
"""The keys that lead to an item in the state dict that was saved."""


class ItemLocation(NamedTuple):
    """The position of an item: ``length`` bytes from ``offset`` of a file of the folder."""

    path: PurePosixPath
    offset: int
    length: int


class Renamed(NamedTuple):
    """A new ``.metadata``, and DCP's names in it by those before."""

    data: bytes
    names: dict[str, str]


def paths_of(metadata: DcpMetadata) -> dict[str, Steps]:
    """Return the keys that lead to each item, by its name; a name that the planner left no path of
    is its own key.
    """
    planned = {one.fqn: one.path for one in metadata.planned or ()}
    every = (*(tensor.fqn for tensor in metadata.tensors), *(item.fqn for item in metadata.items))
    return {fqn: planned.get(fqn, (fqn,)) for fqn in every}


def with_paths(metadata: DcpMetadata, new_paths: Mapping[str, Steps]) -> DcpMetadata:
    """Return the metadata with other paths of its items; its bytes and locations are as before."""
    names = {
        fqn: ".".join(map(str, new_paths[fqn])) if fqn in new_paths else fqn
        for fqn in paths_of(metadata)
    }
    planned = metadata.planned
    if planned is not None:
        planned = tuple(
            one._replace(fqn=names.get(one.fqn, one.fqn), path=new_paths.get(one.fqn, one.path))
            for one in planned
        )
    return replace(
        metadata,
        tensors=tuple(one._replace(fqn=names[one.fqn]) for one in metadata.tensors),
        items=tuple(one._replace(fqn=names[one.fqn]) for one in metadata.items),
        planned=planned,
    )


def rewrite_metadata(
    metadata: DcpMetadata, new_paths: Mapping[str, Steps], places: Mapping[str, ItemLocation]
) -> Renamed:
    """Return a ``.metadata`` in which items have other paths, names with them, and bytes items lie
    elsewhere.

    ``new_paths``: by name, as long as the old ones. ``places``: by old name. Raises
    UnsupportedFormat when a name cannot be changed alone or two would become one; FormatError when
    the result, read again, does not say exactly that: a fault of this module.
    """
    names = _new_names(metadata, new_paths)
    tree = metadata.tree
    infos = _infos(tree, places) if places else {}
    strings = _sites(metadata, names, new_paths)
    numbers: dict[int, int] = {}
    moved: dict[int, list[Any]] = {}
    for fqn, info in infos.items():
        place = places[fqn]
        strings[attribute(info, "relative_path").site] = str(place.path)
        new = {"offset": place.offset, "length": place.length}
        for name, number in new.items():
            numbers[number_behind(tree, _key(info, name).site)] = number
        for state in info.states or ():
            moved[id(state)] = [
                new[key.value] if type(key) is Text and key.value in new else value
                for key, value in pairs(state)
            ]

    def is_right(data: bytes) -> bool:
        after = parse_dcp_metadata(data)
        walk = _Walk(strings, moved)
        return (
            after.tree.end == len(data)
            and _expected(metadata, names, new_paths, places) == _values(after)
            and walk.same(tree.root, after.tree.root)
        )

    return Renamed(rewrite(tree, strings, numbers, is_right=is_right), names)


class _Walk(TreeWalk):
    """Comparison of the trees of two metadata, without the parts matched at once (``dcp_stream``),
    which are in the values.

    ``moved``: the new values in the dict of an item that moves, by the id of its node.
    """

    def __init__(self, strings: Mapping[int, str], moved: Mapping[int, list[Any]]) -> None:
        super().__init__(lambda text: strings.get(text.site, text.value), lambda text: text.value)
        self._moved = moved

    def _same_lists(self, one: list[Any] | None, other: list[Any] | None) -> bool:
        if len(one or ()) != len(other or ()):
            return False
        both = zip(one or (), other or (), strict=True)
        self._waiting += [
            pair for pair in both if type(pair[0]) not in MATCHED and type(pair[1]) not in MATCHED
        ]
        return True

    def _same_node(self, one: Node, other: Node) -> bool:
        if id(one) not in self._moved or one.kind is not other.kind:
            return super()._same_node(one, other)
        known = self._correspond(one, other)
        if known is not None:
            return known
        keys = [key for key, _ in pairs(one)]
        new = [part for both in zip(keys, self._moved[id(one)], strict=True) for part in both]
        return self._same_lists(new, other.entries)


def _values(metadata: DcpMetadata) -> tuple[object, ...]:
    """Return the contents of a metadata, without the sites of names."""
    return (
        [one._replace(site=0) for one in metadata.tensors],
        [one.fqn for one in metadata.items],
        None if metadata.planned is None else [(one.fqn, one.path) for one in metadata.planned],
        [one._replace(site=0) for one in metadata.stored.values()],
    )


def _expected(
    metadata: DcpMetadata,
    names: Mapping[str, str],
    new_paths: Mapping[str, Steps],
    places: Mapping[str, ItemLocation],
) -> tuple[object, ...]:
    """Return the expected contents of a metadata with new names, and with bytes items in other
    places.
    """
    planned = metadata.planned
    stored = []
    for item in metadata.stored.values():
        place = places.get(item.fqn) if item.offsets is None else None
        item = item._replace(fqn=names.get(item.fqn, item.fqn), site=0)
        stored.append(item if place is None else item._replace(**place._asdict()))
    return (
        [one._replace(fqn=names[one.fqn], site=0) for one in metadata.tensors],
        [names[one.fqn] for one in metadata.items],
        (
            None
            if planned is None
            else [
                (names.get(one.fqn, one.fqn), new_paths.get(one.fqn, one.path)) for one in planned
            ]
        ),
        stored,
    )


def _new_names(metadata: DcpMetadata, new_paths: Mapping[str, Steps]) -> dict[str, str]:
    names: dict[str, str] = {}
    origin: dict[str, str] = {}
    for fqn, path in paths_of(metadata).items():
        new = new_paths.get(fqn, path)
        names[fqn] = ".".join(map(str, new))
        first = origin.setdefault(names[fqn], fqn)
        if first != fqn:
            raise UnsupportedFormat(
                f"{first!r:.200} and {fqn!r:.200} would both become {names[fqn]!r:.200}"
            )
    return names


def _sites(
    metadata: DcpMetadata, names: Mapping[str, str], new_paths: Mapping[str, Steps]
) -> dict[int, str]:
    """Return every push of a name, or of a key in a path, with its new value."""
    wanted: dict[int, str] = {}

    def want(site: int, new: str) -> None:
        if wanted.setdefault(site, new) != new:
            raise UnsupportedFormat(
                f"two names share the string at byte {site} of the metadata, which cannot become "
                f"both {new!r:.200} and {wanted[site]!r:.200}"
            )

    pushes = [(one.site, one.fqn) for one in metadata.tensors]
    pushes += [(one.site, one.fqn) for one in metadata.items]
    pushes += [(one.site, one.fqn) for one in metadata.stored.values()]
    for site, fqn in pushes:
        want(site, names.get(fqn, fqn))
    for planned in metadata.planned or ():
        want(planned.site, names.get(planned.fqn, planned.fqn))
        for where, step in zip(
            planned.sites, new_paths.get(planned.fqn, planned.path), strict=True
        ):
            if where is not None:
                want(where, str(step))
    return wanted


def _infos(tree: PickleTree, places: Mapping[str, ItemLocation]) -> dict[str, Node]:
    """Return the ``_StorageInfo`` of the bytes items that move."""
    found = {}
    for key, info in pairs(attribute(tree.root, "storage_data")):
        name = attribute(key, "fqn")
        if type(name) is Text and name.value in places:
            found[name.value] = info
    if found.keys() != places.keys():
        raise FormatError(
            f"the metadata has no location for {min(places.keys() - found.keys())!r:.200}"
        )
    return found


def _key(info: Node, name: str) -> Text:
    """Return the push of the name of an attribute."""
    states: list[Any] = info.states or []
    keys = [
        key
        for state in states
        for key, _ in pairs(state)
        if type(key) is Text and key.value == name
    ]
    if len(keys) != 1:
        raise UnsupportedFormat(
            f"the location of an item has {len(keys)} attributes named {name!r} (expected 1)"
        )
    return keys[0]
