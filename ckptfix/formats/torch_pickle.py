"""The state dicts in a pickle of torch, and every place where names live in it.

Facts from torch 2.13: ``torch/nn/modules/module.py`` and ``torch/optim/optimizer.py``
(``state_dict``).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from msgspec import Struct

from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats.pickle_opcodes import MAX_TEXT
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.formats.pickle_tree import (
    Kind,
    Node,
    PickleTree,
    Text,
    Visits,
    attribute,
    child,
    is_dict_like,
    items_of,
    made_from,
    pairs,
    text_keys,
)
from ckptfix.formats.tensor import TensorInfo
from ckptfix.formats.torch_tensors import (
    PickledStorage,
    PickledTensor,
    is_tensor,
    read_tensor,
    storages,
)
from ckptfix.wording import Brief

MAX_NESTING = 4
"""Most dicts that are descended for a state dict: ``checkpoint["state"]["model"]`` is 2."""

MAX_LIST = 64
"""Longest list that is looked into: a few optimizers, not a data set."""


class PickledStateDict(Struct, frozen=True):
    """A dict with tensors under string keys. ``path``: the keys that lead to it. ``opaque_keys``:
    other values.
    """

    path: tuple[str, ...]
    tensors: tuple[PickledTensor, ...]
    opaque_keys: tuple[str, ...]


class NameList(Brief, Struct, frozen=True):
    """A place where names live.

    ``kind``: "state dict" (its keys), "metadata" (module names without trailing dot in the
    ``_metadata`` of the state dict of the same path, "" is the root), or of an optimizer
    "param_names", "params" (FSDP) and "optimizer state" (its string keys). ``names``: each name
    with the site that pushed it. ``node``: the dict or list itself. ``is_model``: a state dict that
    looks like a module's, and not like a dict in which a tensor happens to lie.
    """

    path: tuple[str, ...]
    kind: str
    names: tuple[tuple[str, int], ...]
    node: Node
    is_model: bool = False


class HasTensors(Protocol):
    """A file of a torch pickle: its state dicts, and storage key -> offset in the file and length,
    in bytes.
    """

    @property
    def state_dicts(self) -> tuple[PickledStateDict, ...]:
        """The state dicts of the pickle."""

    @property
    def storage_ranges(self) -> Mapping[str, tuple[int, int]]:
        """Storage key -> offset and length."""


@paused_gc()
def state_dicts(
    tree: PickleTree,
    known: Mapping[str, PickledStorage] | None = None,
    broken: dict[tuple[tuple[str, ...], str], str] | None = None,
) -> tuple[PickledStateDict, ...]:
    """Return every state dict, at the root or under string keys. ``known``: what ``storages``
    returns.

    Raises FormatError when a tensor does not lie inside its storage, or as ``storages`` does;
    UnsupportedFormat for a name beyond ``MAX_TEXT``. With ``broken`` a tensor outside of its
    storage counts as no tensor, and path and key -> what is wrong with it is noted there.
    """
    known = storages(tree) if known is None else known
    found = []
    for path, node in _dicts(tree):
        if is_optimizer(node):
            continue
        tensors: list[PickledTensor] = []
        opaque: list[str] = []
        any_tensor = False
        long_name = None
        for key, value in pairs(node):
            if type(key) is not Text:
                if type(key) is Node and key.kind is Kind.LONG_TEXT:
                    long_name = key
                continue
            tensor = None
            try:
                tensor = read_tensor(key, value, known) if type(value) is Node else None
            except FormatError as error:
                if broken is None:
                    raise
                broken[path, key.value] = str(error)
            if tensor is not None:
                tensors.append(tensor)
            else:
                opaque.append(key.value)
                any_tensor = any_tensor or is_tensor(value)
        if long_name is not None and any(is_tensor(value) for _, value in pairs(node)):
            raise UnsupportedFormat(
                f"a state dict has a key of {len(long_name.head)} bytes, over the limit of "
                f"{MAX_TEXT}"
            )
        if tensors or any_tensor:
            found.append(PickledStateDict(path, tuple(tensors), tuple(opaque)))
    return tuple(found)


@paused_gc()
def name_lists(tree: PickleTree) -> tuple[NameList, ...]:
    """Return every place where names live, with the sites to rewrite."""
    found: list[NameList] = []
    listed = _Listed(len(tree.texts))
    attributes: dict[int, Any] = {}
    for path, node in _dicts(tree):
        if is_optimizer(node):
            found += _optimizer_names(path, node, listed)
        elif any(type(key) is Text and is_tensor(value) for key, value in pairs(node)):
            metadata = attribute(node, "_metadata", attributes)
            names = _keys(node)
            found.append(NameList(path, "state dict", names, node, _is_model(path, node, metadata)))
            if is_dict_like(metadata) and listed.may_list(metadata):
                found.append(NameList(path, "metadata", _keys(metadata), metadata))
    return tuple(found)


@paused_gc()
def tensor_infos(file: HasTensors) -> tuple[TensorInfo, ...]:
    """Return the tensors of every state dict with the offsets of their bytes in the file."""
    infos = []
    ranges = file.storage_ranges
    for state_dict in file.state_dicts:
        for fqn, dtype, shape, _, key, _, begin, end, _ in state_dict.tensors:
            storage = ranges.get(key)
            offsets = None
            if storage is not None and begin is not None and end is not None:
                offsets = (storage[0] + begin, storage[0] + end)
            infos.append(TensorInfo(fqn, dtype, shape, offsets))
    return tuple(infos)


def is_optimizer(node: Node) -> bool:
    """Return whether a dict is an optimizer's ``state_dict()``: ``state`` and ``param_groups``, and
    few keys more.
    """
    source = made_from(node)
    if len(node.entries or ()) > 2 * MAX_LIST or (
        source is not None and len(source.items or ()) > MAX_LIST
    ):
        return False
    keys = text_keys(node)
    return keys >= {"state", "param_groups"}


def optimizers(root: Any) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Yield the state dict of each optimizer in a pickle once, however deep, with the keys that
    lead to it.

    An optimizer inside another one belongs to it, as SAM's does. Attributes of objects are left
    out.
    """
    visits = Visits()
    tuples: set[int] = set()
    # Each way is a key and the way to its dict: a copy of every path would grow with the square of
    # the depth.
    waiting: list[tuple[Any, _Way]] = [(root, None)]
    while waiting:
        value, way = waiting.pop()
        if type(value) is tuple:
            if id(value) in tuples:
                continue
            tuples.add(id(value))
        elif not visits.first(value):
            continue
        if is_dict_like(value):
            if is_optimizer(value):
                yield _keys_of(way), value
                continue
            inner = [(_word(key), held) for key, held in pairs(value)]
        else:
            inner = [
                (str(index), held)
                for index, held in enumerate(items_of(value))
                if _is_container(held)
            ]
        waiting += [(held, (word, way)) for word, held in reversed(inner) if _is_container(held)]


_Way = tuple[str, "_Way"] | None
_LAST_KEYS = 16
"""Most keys that a path to an optimizer shows: real ones have three."""


def _keys_of(way: "_Way") -> tuple[str, ...]:
    keys: list[str] = []
    while way is not None and len(keys) < _LAST_KEYS:
        word, way = way
        keys.append(word)
    return tuple(reversed(keys))


def _word(key: Any) -> str:
    if type(key) is Text:
        return key.value
    return str(key) if type(key) in (int, bool) and abs(key) < 1 << 31 else "?"


def _is_container(value: Any) -> bool:
    return type(value) is tuple or (
        type(value) is Node and (value.kind is Kind.LIST or is_dict_like(value))
    )


def _dicts(tree: PickleTree) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Iterate over the dicts that can be state dicts, each once, with the keys that lead to it."""
    visits = Visits()
    waiting: list[tuple[tuple[str, ...], Any]] = [((), tree.root)]
    while waiting:
        path, node = waiting.pop()
        if not visits.first(node):
            continue
        if is_dict_like(node):
            yield path, node
            if len(path) < MAX_NESTING and not is_optimizer(node):
                waiting += reversed(_children(path, node))
        elif (
            node.kind is Kind.LIST and len(path) < MAX_NESTING and len(node.items or ()) <= MAX_LIST
        ):
            items = enumerate(node.items or ())
            waiting += reversed([((*path, str(index)), value) for index, value in items])


def _children(path: tuple[str, ...], node: Node) -> list[tuple[tuple[str, ...], Any]]:
    # The extra state of a module belongs to the module alone, dict or not.
    return [
        ((*path, key.value), value)
        for key, value in pairs(node)
        if type(value) is Node
        and (value.kind is not Kind.CALL or not is_tensor(value))
        and type(key) is Text
        and not key.value.endswith("_extra_state")
    ]


def _is_model(path: tuple[str, ...], node: Node, metadata: object) -> bool:
    """Return whether a dict looks like a ``Module.state_dict()``: only tensors, and a sign of
    submodules.
    """
    named = [(key.value, value) for key, value in pairs(node) if type(key) is Text]
    if not all(is_tensor(value) or key.endswith("_extra_state") for key, value in named):
        return False
    return not path or is_dict_like(metadata) or any("." in key for key, _ in named)


class _Listed:
    """The nodes that were listed: ordinary optimizers share lists of names, and copies of a state
    dict its metadata.
    """

    def __init__(self, texts: int) -> None:
        self._visits = Visits()
        self._left = MAX_LIST * texts

    def may_list(self, node: Any) -> bool:
        """Return whether a node may be listed: it is new, or all listed again stays a multiple of
        the strings.
        """
        if self._visits.first(node):
            return True
        if type(node) is not Node:
            return False
        source = made_from(node)
        self._left -= 1 + len(node.items or ()) + len(node.entries or ())
        self._left -= len(source.items or ()) if source is not None else 0
        return self._left >= 0


def _keys(node: Node) -> tuple[tuple[str, int], ...]:
    return tuple([(key.value, key.site) for key, _ in pairs(node) if type(key) is Text])


def _optimizer_names(path: tuple[str, ...], node: Node, listed: "_Listed") -> Iterator[NameList]:
    groups = child(node, "param_groups")
    for index, group in enumerate((groups.items or ()) if listed.may_list(groups) else ()):
        if not listed.may_list(group):
            continue
        for kind in ("param_names", "params"):
            names = child(group, kind)
            if type(names) is Node and names.kind is Kind.LIST and listed.may_list(names):
                texts = tuple(
                    [(item.value, item.site) for item in names.items or () if type(item) is Text]
                )
                if texts:
                    yield NameList((*path, "param_groups", str(index)), kind, texts, names)
    state = child(node, "state")
    if is_dict_like(state) and listed.may_list(state) and _keys(state):
        yield NameList((*path, "state"), "optimizer state", _keys(state), state)
