"""What a pickle says, as a tree that was read and never executed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from ckptfix.errors import FormatError

UNRESOLVABLE = ("?", "?")
"""The global of an opcode that names it indirectly: a number of the extension registry, or a computed name."""

_SHARED = "two dicts of the pickle are made from one list"


class Text(NamedTuple):
    """One push of a string.

    ``site`` is the offset of the opcode that pushed it, counted from the start of the pickle; every push, of a
    literal or out of the memo, has its own. ``source`` is the site whose value the memo held, for a literal its own
    site.
    """

    value: str
    site: int
    source: int


class Kind(Enum):
    """What a node is. Constants are Python values and tuples are Python tuples, so they are no nodes."""

    LIST = "list"
    DICT = "dict"
    SET = "set"
    FROZENSET = "frozenset"
    BYTEARRAY = "bytearray"
    BUFFER = "out-of-band buffer"
    LONG_TEXT = "long string"
    GLOBAL = "global"
    CALL = "call"
    NEW = "__new__"
    NEW_EX = "__new__ with keywords"
    PERSISTENT = "persistent id"


CALLS = frozenset({Kind.CALL, Kind.NEW, Kind.NEW_EX})


class Node:
    """An object that can be shared or changed after it was made; compared by identity.

    ``head``: (module, name) of a global, the callee of a call, the id of a persistent object, the bytes of a
    bytearray, a view of the UTF-8 of a long string. ``args``: the arguments of a call, a tuple in every honest pickle;
    (args, keywords) for NEW_EX. ``items``: what was appended or added. ``entries``: keys and values in turn, as they
    were set. ``states``: what BUILD gave it. The last three are None while empty. A value is a Node, a Text, a tuple
    of values, or a constant (int, float, bool, None, bytes).
    """

    __slots__ = ("args", "entries", "head", "items", "kind", "states")

    def __init__(self, kind: Kind, head: Any = None, args: Any = None) -> None:
        """Make a node without items, entries and states."""
        self.kind = kind
        self.head = head
        self.args = args
        self.items: list[Any] | None = None
        self.entries: list[Any] | None = None
        self.states: list[Any] | None = None

    def __repr__(self) -> str:
        # Children are left out: a hostile pickle nests them deeper than the interpreter's stack.
        return f"<{self.kind.value}{f' {self.head!r}' if self.kind is Kind.GLOBAL else ''}>"

    def is_global(self, module: str, name: str) -> bool:
        """Whether this is the global ``module.name``."""
        return self.kind is Kind.GLOBAL and bool(self.head == (module, name))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PickleTree:
    """One pickle. Offsets count from its first byte.

    ``data``: its bytes, STOP included. ``end``: where it ends in the bytes given to ``parse``. ``globals``: every
    (module, name) it refers to, with the offset of the first reference. ``texts``: every push of a string that is no
    long one, in stream order. ``persistent``: the nodes of its persistent ids. ``frames``: offset and length of each
    FRAME. ``duplicated``: sites of strings that a DUP used a second time. ``refused_opcodes``: why
    ``torch.load(weights_only=True)`` refuses it whatever is allowed: "FRAME", or "APPENDS on collections.deque".
    ``leftover``: values stay on the stack after STOP.
    """

    root: Any = field(repr=False)
    data: bytes = field(repr=False)
    end: int
    protocol: int
    globals: Mapping[tuple[str, str], int]
    texts: tuple[Text, ...] = field(repr=False)
    persistent: tuple[Node, ...] = field(repr=False)
    frames: tuple[tuple[int, int], ...] = field(repr=False)
    duplicated: frozenset[int]
    refused_opcodes: tuple[str, ...]
    leftover: bool


def pairs(node: object) -> Iterator[tuple[Any, Any]]:
    """Iterate over (key, value) of a dict-like node: a dict, an OrderedDict, an instance with items set.

    Protocols 0 and 1 give an OrderedDict its items as a list of lists in the call (Python 2 did in 2, too).
    """
    if type(node) is not Node:
        return
    source = made_from(node)
    for item in (source.items or ()) if source is not None else ():
        values = item.items if type(item) is Node else item
        if isinstance(values, list | tuple) and len(values) == 2:
            yield values[0], values[1]
    if node.entries is not None:
        yield from zip(node.entries[::2], node.entries[1::2], strict=True)


def is_dict_like(node: object) -> bool:
    """Whether a value is a dict, an OrderedDict, or an instance that had items set."""
    if type(node) is not Node:
        return False
    return node.kind is Kind.DICT or node.entries is not None or _is_ordered_dict(node)


def child(node: object, name: str) -> Any:
    """Return the value under a string key of a dict-like node, the last one if there are several, else None."""
    found = None
    for key, value in pairs(node):
        if type(key) is Text and key.value == name:
            found = value
    return found


def attribute(node: object, name: str, known: dict[int, Any] | None = None) -> Any:
    """Return an attribute that BUILD gave a node (a dict, or a pair of dicts for slots), else None.

    ``known`` remembers, for one name, what each dict holds: a million nodes can share one.
    """
    known = {} if known is None else known
    found = None
    for state in (node.states or ()) if type(node) is Node else ():
        for part in state if type(state) is tuple and len(state) == 2 else (state,):
            if id(part) not in known:
                source = made_from(part)
                if source is not None and known.setdefault(-id(source), part) is not part:
                    raise FormatError(_SHARED)
                known[id(part)] = child(part, name)
            found = found if known[id(part)] is None else known[id(part)]
    return found


class Visits:
    """Which nodes a walk has met, so that it looks into each only once however often it is referred to."""

    def __init__(self) -> None:
        """Start with none."""
        self._met: set[int] = set()
        self._sources: set[int] = set()

    def first(self, node: object) -> bool:
        """Whether a value is a node and this is the first visit.

        Raises FormatError for a dict made from a list that another was made from: no pickler writes that, and to read
        the list once for each dict would take time that grows with the square of the bytes.
        """
        if type(node) is not Node or id(node) in self._met:
            return False
        self._met.add(id(node))
        source = made_from(node)
        if source is not None:
            if id(source) in self._sources:
                raise FormatError(_SHARED)
            self._sources.add(id(source))
        return True


def made_from(node: object) -> Node | None:
    """Return the list of pairs that an OrderedDict was made from, None for every other value."""
    if type(node) is not Node or node.kind is not Kind.CALL or type(node.args) is not tuple or not node.args:
        return None
    first = node.args[0]
    if type(first) is Node and first.kind is Kind.LIST and _is_ordered_dict(node):
        return first
    return None


def _is_ordered_dict(node: Node) -> bool:
    head = node.head
    return node.kind in CALLS and type(head) is Node and head.is_global("collections", "OrderedDict")
