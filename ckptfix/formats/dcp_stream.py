"""The pickle of a DCP ``.metadata`` file, in which the chunks of tensors take few objects.

A checkpoint of 400 ranks and 3,000 tensors has 1.2 million chunks, each of sixty opcodes and twenty
objects of the tree. They are read by the machine of ``pickle_stream``, and each instance becomes
one tuple as soon as BUILD has given it its state: a ``ChunkStorageMetadata`` in the lists of
``state_dict_metadata``, a ``MetadataIndex`` with its ``_StorageInfo`` in ``storage_data``. The memo
forgets the parts of an instance. A pickle that refers to one of these again, as none of torch's
does, is read as any other pickle is.
"""

from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeGuard

from ckptfix.errors import BeyondLimits, FormatError, UnsupportedFormat
from ckptfix.formats.pickle_globals import DTYPES, LAYOUTS
from ckptfix.formats.pickle_opcodes import HANDLERS, MISSING, Machine
from ckptfix.formats.pickle_stream import parse, paused_gc, run
from ckptfix.formats.pickle_tree import CALLS, Kind, Node, PickleTree, Text

_MANY = 1 << 62
_MAX_DIMENSIONS = 64
_MAX_FIELDS = 16  # of an instance; torch's classes have five at most
_WORDS = {"Text": "a string", "int": "an int", "NoneType": "None"}


def is_instance(node: object, name: str) -> TypeGuard[Node]:
    """Return whether a value is an instance of the class of torch.distributed with this name."""
    if type(node) is not Node or node.kind is not Kind.NEW:
        return False
    head = node.head
    if type(head) is not Node or head.kind is not Kind.GLOBAL:
        return False
    return bool(head.head[1] == name and head.head[0].startswith("torch.distributed."))


def fields_of(node: Node) -> dict[str, Any]:
    """Return the attributes of an instance. Raises FormatError when there are many, or other state
    than a dict.
    """
    states = node.states or []
    if not states:
        return {}
    state = states[0]
    if len(states) > 1 or type(state) is not Node or state.kind is not Kind.DICT:
        raise FormatError(f"the state of {words_for(node)} is not a dict")
    entries = state.entries or []
    if len(entries) > 2 * _MAX_FIELDS:
        raise FormatError(
            f"{words_for(node)} has {len(entries) // 2} attributes (expected at most {_MAX_FIELDS})"
        )
    if any(type(key) is not Text for key in entries[::2]):
        raise FormatError(f"{words_for(node)} has an attribute whose name is not a string")
    return {key[0]: value for key, value in zip(entries[::2], entries[1::2], strict=True)}


def torch_dtype_of(properties: object) -> str:
    """Return the name of a dtype, the first value of ``TensorProperties.__getstate__``.

    Raises FormatError for a state that its ``__setstate__`` refuses: dtype, layout, whether it has
    gradients, the memory format as a number of an enum, whether it is pinned.
    """
    if is_instance(properties, "TensorProperties"):
        states = properties.states or [None]
        state = states[0] if len(states) == 1 else None
        dtype, layout, _, memory, _ = (
            state if type(state) is tuple and len(state) == 5 else (None,) * 5
        )
        is_format = (
            type(memory) is Node and memory.kind is Kind.CALL and memory.args in ((0,), (1,), (2,))
        )
        names = layout.args if type(layout) is Node and layout.kind is Kind.CALL else ()
        is_layout = type(names) is tuple and len(names) == 1 and text_of(names[0]) in LAYOUTS
        if type(dtype) is Node and dtype.kind is Kind.GLOBAL and is_format and is_layout:
            module, name = dtype.head
            if module == "torch" and name in DTYPES:
                return str(name)
    raise FormatError(
        f"the properties of a tensor do not name a torch dtype: {words_for(properties)}"
    )


def size_of(value: object, name: str) -> tuple[int, ...]:
    """Return the numbers of a ``torch.Size``. Raises FormatError for anything else, or a number
    below 0.
    """
    if type(value) is Node and value.kind is Kind.CALL and type(value.head) is Node:
        args = value.args
        if value.head.is_global("torch", "Size") and type(args) is tuple and len(args) == 1:
            value = args[0]
    if type(value) is not tuple or len(value) > _MAX_DIMENSIONS:
        raise FormatError(
            f"a size of {name!r:.200} is {words_for(value)} (expected a torch.Size of at most "
            f"{_MAX_DIMENSIONS} dimensions)"
        )
    for number in value:
        if not is_count(number):
            raise FormatError(f"a size of {name!r:.200} contains an invalid value: {number!r:.40}")
    return value


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a number that an offset or a length can be."""
    return type(value) is int and 0 <= value < _MANY


def path_inside(text: str) -> PurePosixPath:
    """Return a relative path. Raises FormatError when it leaves the folder or cannot be a name."""
    path = PurePosixPath(text)
    try:
        sound = b"\0" not in text.encode()
    except UnicodeEncodeError:
        sound = False
    if not sound or not path.parts or path.is_absolute() or ".." in path.parts:
        raise FormatError(
            f"an item is recorded in {text!r:.200}, which is not a path inside the folder"
        )
    return path


def text_of(value: object) -> str | None:
    """Return a string, None for every other value."""
    return value.value if type(value) is Text else None


def words_for(value: object) -> str:
    """Return a value in a few words; a class by its name."""
    if type(value) is not Node:
        name = type(value).__name__
        return _WORDS.get(name, f"a {name}")
    head = value.head if value.kind in CALLS else value
    if type(head) is Node and head.kind is Kind.GLOBAL:
        return ".".join(head.head)[:200]
    return f"a {value.kind.value}"


class Chunk(NamedTuple):
    """A part of a tensor that was saved in one piece: its first index and its length in every
    dimension.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class StoredItem(NamedTuple):
    """The position of a chunk or of a bytes item: ``length`` bytes from ``offset`` of the file
    ``path`` of the folder.

    ``offsets``: the first index of the chunk, None for a bytes item. ``hint``: the place in the
    list of chunks, which torch looks at first. ``transforms``: the stream extensions its bytes went
    through, such as ``zstd``. ``site`` is where the name was pushed.
    """

    fqn: str
    offsets: tuple[int, ...] | None
    hint: int | None
    path: PurePosixPath
    offset: int
    length: int
    transforms: tuple[str, ...]
    site: int


class ChunkIndex(NamedTuple):
    """A ``MetadataIndex`` of a chunk: a key of ``storage_data`` where its value did not become a
    tuple, because a frame of the pickle ends inside of it.
    """

    fqn: Text
    offsets: tuple[int, ...]
    hint: int | None


class _Packed:
    """The type of ``PACKED``."""


PACKED = _Packed()
"""The value of a ``StoredItem`` in ``storage_data``: the key says all of key and value."""

MATCHED = frozenset({Chunk, ChunkIndex, StoredItem, _Packed})
"""The types of what replaces instances in a tree of ``dcp_stream``."""

MAX_PLACES = 6_000_000
"""Most chunks of ``storage_data`` that are read. Each takes about 600 bytes of memory."""

_BEGIN, _END = b"\x81\x94}\x94(", b"ub"
"""Opcodes by which protocol 4 begins an instance with a dict as its state, and ends it: NEWOBJ and
EMPTY_DICT, each with MEMOIZE, and MARK; SETITEMS and BUILD (CPython's ``Modules/_pickle.c``).
"""

_OF_SIZE, _OF_INSTANCE = 6, 12
"""Fewest opcodes of a size, and of an instance with its state. They do not count towards the limit
of ``pickle_stream``, as what they made is gone.
"""


def read_stream(data: bytes) -> PickleTree:
    """Read the pickle of a ``.metadata``, as ``pickle_stream.parse`` does and with the same errors.

    In the lists of chunks a ``Chunk`` may replace the instance of torch's class, and in
    ``storage_data`` a ``StoredItem`` for a key, followed by ``PACKED``, or a ``ChunkIndex``.
    """
    if data[:2] in (b"\x80\x04", b"\x80\x05"):
        with paused_gc():
            try:
                machine = _Machine(data)
                tree = run(machine)
                if not machine.begun:
                    return tree
            except UnsupportedFormat:
                raise
            except FormatError:
                pass
    return parse(data)


class _Machine(Machine):
    """The machine of ``pickle_stream``, with a memo in which only MEMOIZE writes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, [], _HANDLERS)
        self.strings: dict[str, str] = {}
        self.sizes: dict[Any, Any] = {}
        self.paths: dict[str, PurePosixPath] = {}
        self.places = 0
        self.begun = 0
        # Where the literals of a state's keys are -> the keys; and the literals that are keys alone.
        self.known_keys: dict[tuple[int, ...], list[str]] = {}
        self.of_keys: set[int] = set()
        self.keeps_texts = False

    def is_size(self, value: object) -> bool:
        """Return whether a value is what a ``torch.Size`` became."""
        return value is not None and self.sizes.get(value) is value


class _Begun(NamedTuple):
    """An instance on the stack whose state is being read. ``texts``: how many precede it."""

    head: Node
    texts: int


_Made = tuple[tuple[Text, ...], tuple[Any, ...]]
"""The names in an instance, and what replaces it and the values below it on the stack."""


def _short_text(machine: Any) -> None:
    """Push a string, which all pushes of it share."""
    site, data = machine.position, machine.data
    machine.position = end = site + 2 + data[site + 1]
    if end > len(data):
        raise machine.truncated()
    value = str(data[site + 2 : end], "utf-8", "surrogatepass")
    text = Text(machine.strings.setdefault(value, value), site, site)
    machine.texts.append(text)
    machine.stack.append(text)


def _memoize(machine: Any) -> None:
    machine.memo.append(machine.stack[-1])
    machine.position += 1


def _reduce(machine: Any) -> None:
    """Make a call; of ``torch.Size`` the tuple of numbers, which all equal sizes share."""
    args, memo = machine.stack.pop(), machine.memo
    head = machine.stack[-1]
    size = args[0] if type(args) is tuple and len(args) == 1 else None
    if (
        type(size) is tuple
        and type(head) is Node
        and head.head == _SIZE
        and {*map(type, size)} <= {int}
        and len(size) <= _MAX_DIMENSIONS
        and (size in machine.sizes or all(map(is_count, size)))
    ):
        machine.stack[-1] = machine.sizes.setdefault(size, size)
        if len(memo) > 1 and memo[-1] is args and memo[-2] is size:
            memo[-2:] = machine.stack[-1], MISSING
        machine.forgiven += _OF_SIZE
    else:
        machine.stack[-1] = machine.call(Kind.CALL, head, args)
    machine.position += 1


def _newobj(machine: Any) -> None:
    """Make an instance, or begin one of a class for chunks, of which the memo keeps nothing."""
    stack = machine.stack
    args, head = stack[-1], stack[-2]
    is_class = args == () and type(head) is Node and head.kind is Kind.GLOBAL
    if is_class and head.head in _RULES and machine.data.startswith(_BEGIN, machine.position):
        stack[-2:] = (_Begun(head, len(machine.texts)),)
        machine.begun += 1
        machine.memo += (MISSING, MISSING)
        machine.meta.append(stack)
        machine.stack = []
        machine.position += len(_BEGIN)
    else:
        HANDLERS[0x81](machine)


def _setitems(machine: Any) -> None:
    """Set the items of a dict, or end an instance that was begun: a tuple where it is of a chunk."""
    below = machine.meta[-1][-1]
    if type(below) is not _Begun or not machine.data.startswith(_END, machine.position):
        HANDLERS[ord("u")](machine)
        return
    entries = machine.pop_mark()
    if len(entries) % 2:
        raise machine.malformed("sets a key without a value")
    made = _RULES[below.head.head](machine, entries)
    if made is not None:
        names, values = made
        if not machine.keeps_texts:
            machine.texts[below.texts :] = names
        machine.stack[-len(values) :] = values
        machine.forgiven += _OF_INSTANCE
    else:
        node, state = Node(Kind.NEW, below.head, ()), Node(Kind.DICT)
        machine.calls.append(node)
        machine.built.add(below.head.head)
        node.states = [state]
        state.entries = entries
        machine.note_keys(entries[::2])
        machine.stack[-1] = node
    machine.begun -= 1
    machine.position += len(_END)


def _chunk(machine: _Machine, entries: list[Any]) -> _Made | None:
    if _keys(machine, entries) == ["offsets", "sizes"]:
        first, lengths = entries[1::2]
        if machine.is_size(first) and machine.is_size(lengths):
            return (), (Chunk(first, lengths),)
    return None


def _index(machine: _Machine, entries: list[Any]) -> _Made | None:
    if _keys(machine, entries) == ["fqn", "index", "offset"]:
        fqn, hint, first = entries[1::2]
        is_hint = hint is None or type(hint) is int
        if type(fqn) is Text and is_hint and machine.is_size(first):
            return (fqn,), (ChunkIndex(fqn, first, hint),)
    return None


def _info(machine: _Machine, entries: list[Any]) -> _Made | None:
    keys, index = _keys(machine, entries), machine.stack[-2]
    if keys[:3] != ["relative_path", "offset", "length"] or type(index) is not ChunkIndex:
        return None
    name, offset, length, *others = entries[1::2]
    if others and (keys[3:] != ["transform_descriptors"] or others != [None]):
        return None
    path = _path(machine, name.value) if type(name) is Text else None
    if path is None or not is_count(offset) or not is_count(length):
        return None
    machine.places += 1
    if machine.places > MAX_PLACES:
        raise BeyondLimits(f"it has more than {MAX_PLACES} chunks")
    fqn, first, hint = index
    item = StoredItem(fqn.value, first, hint, path, offset, length, (), fqn.site)
    return (name,), (item, PACKED)


def _keys(machine: _Machine, entries: list[Any]) -> list[str]:
    """Return the keys of a dict, an empty list where one is not a string."""
    keys = entries[::2]
    if {*map(type, keys)} != {Text}:
        return []
    sources = tuple([key[2] for key in keys])
    known = machine.known_keys.get(sources)
    if known is None:
        known = machine.known_keys[sources] = [key.value for key in keys]
        machine.of_keys.update(key.source for key in keys if key.site == key.source)
        # A parameter called "offset" can share the literal: a new name needs all its pushes.
        machine.keeps_texts |= not machine.of_keys.issuperset(sources)
    return known


def _path(machine: _Machine, text: str) -> PurePosixPath | None:
    path = machine.paths.get(text)
    if path is None:
        try:
            path = machine.paths[text] = path_inside(text)
        except FormatError:
            return None
    return path


_SIZE = ("torch", "Size")
_PACKAGE = "torch.distributed.checkpoint"
_RULES: dict[object, Callable[[_Machine, list[Any]], _Made | None]] = {
    (f"{_PACKAGE}.metadata", "ChunkStorageMetadata"): _chunk,
    (f"{_PACKAGE}.metadata", "MetadataIndex"): _index,
    (f"{_PACKAGE}.filesystem", "_StorageInfo"): _info,
}
"""Class -> what an instance with this state becomes, None for one that is not of a chunk."""

_HANDLERS = {
    **HANDLERS,
    ord("R"): _reduce,
    ord("u"): _setitems,
    0x81: _newobj,
    0x8C: _short_text,
    0x94: _memoize,
}
