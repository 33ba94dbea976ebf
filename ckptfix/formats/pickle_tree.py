"""The content of a pickle as a tree that was read and never executed, and the comparison of two
such trees.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from struct import pack
from typing import Any, NamedTuple

from msgspec import Struct

from ckptfix.errors import FormatError
from ckptfix.wording import Brief

UNRESOLVABLE = ("?", "?")
"""The global of an opcode that names it indirectly: a number of the extension registry, or a
computed name.
"""

_NOT_PAIRS = "an OrderedDict is made from something other than a list of pairs"
_SHARED = "two dicts of the pickle are made from the same list"


class Text(NamedTuple):
    """One push of a string.

    ``site`` is the offset of the opcode that pushed it, counted from the start of the pickle; every
    push, of a literal or out of the memo, has its own. ``source`` is the site whose value the memo
    held, for a literal its own site.
    """

    value: str
    site: int
    source: int


class Kind(Enum):
    """The kind of a node. Constants are Python values and tuples are Python tuples, so they are not
    nodes.
    """

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

    ``head``: (module, name) of a global, the callee of a call, the id of a persistent object, the
    bytes of a bytearray, a view of the UTF-8 of a long string. ``args``: the arguments of a call, a
    tuple in every real pickle; (args, keywords) for NEW_EX. ``items``: what was appended or added.
    ``entries``: keys and values in turn, as they were set. ``states``: the states that BUILD set.
    The last three are None while empty. A value is a Node, a Text, a tuple of values, or a constant
    (int, float, bool, None, bytes).
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
        """Return whether this is the global ``module.name``."""
        return self.kind is Kind.GLOBAL and bool(self.head == (module, name))


class PickleTree(Brief, Struct, frozen=True, kw_only=True, eq=False):
    """One pickle. Offsets count from its first byte.

    ``data``: its bytes, STOP included. ``end``: where it ends in the bytes given to ``parse``.
    ``globals``: every (module, name) it refers to, with the offset of the first reference.
    ``texts``: every push of a string except long ones, in stream order. ``persistent``: the nodes
    of its persistent ids. ``frames``: offset and length of each FRAME. ``duplicated``: sites of
    strings that a DUP used a second time. ``refused_opcodes``: why
    ``torch.load(weights_only=True)`` refuses it whatever is allowed: "FRAME", or "APPENDS on
    collections.deque". ``impossible``: what no unpickler does, such as "applies SETITEM to a
    set". ``built``: (module, name) of what made the objects that BUILD gave a state. ``leftover``:
    values stay on the stack after STOP. ``calls``: every call, in stream order. ``keys``: keys and
    members that are neither strings nor numbers. ``last_memo``: the highest entry of the memo, 0
    for one without gaps.
    """

    root: Any
    data: bytes
    end: int
    protocol: int
    globals: Mapping[tuple[str, str], int]
    texts: tuple[Text, ...]
    persistent: tuple[Node, ...]
    frames: tuple[tuple[int, int], ...]
    duplicated: frozenset[int]
    refused_opcodes: tuple[str, ...]
    impossible: tuple[str, ...]
    built: frozenset[tuple[str, str]]
    leftover: bool
    calls: tuple[Node, ...]
    keys: tuple[Any, ...]
    last_memo: int = 0


def pairs(node: object) -> Iterator[tuple[Any, Any]]:
    """Iterate over (key, value) of a dict-like node: a dict, an OrderedDict, an instance with items
    set.

    Protocols 0 and 1 give an OrderedDict its items as a list of lists in the call (Python 2 did in
    2, too). Raises FormatError for one that is made from anything else, as no pickler writes it:
    its items would not be seen.
    """
    if type(node) is not Node:
        return
    source = made_from(node)
    if source is None and node.kind is Kind.CALL and node.args and _is_ordered_dict(node):
        raise FormatError(_NOT_PAIRS)
    for item in (source.items or ()) if source is not None else ():
        values = item.items if type(item) is Node and item.kind is Kind.LIST else item
        if not isinstance(values, list | tuple) or len(values) != 2:
            raise FormatError(_NOT_PAIRS)
        yield values[0], values[1]
    if node.entries is not None:
        yield from zip(node.entries[::2], node.entries[1::2], strict=True)


def text_keys(node: object) -> frozenset[str]:
    """Return the keys of a dict-like node that are strings, none for anything else. Raises
    FormatError as ``pairs``.
    """
    return frozenset(key.value for key, _ in pairs(node) if type(key) is Text)


def is_dict_like(node: object) -> bool:
    """Return whether a value is a dict, an OrderedDict, or an instance that had items set."""
    if type(node) is not Node:
        return False
    return node.kind is Kind.DICT or node.entries is not None or _is_ordered_dict(node)


def items_of(node: object) -> tuple[Any, ...]:
    """Return the values of a list or a tuple, () for anything else."""
    if type(node) is Node and node.kind is Kind.LIST:
        return tuple(node.items or ())
    return node if type(node) is tuple else ()


def child(node: object, name: str) -> Any:
    """Return the value under a string key of a dict-like node, the last one if there are several,
    else None.
    """
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


def every_node(
    root: Any, *, callees: bool = True, without: Iterable[Node] = (), met: set[int] | None = None
) -> Iterator[Node]:
    """Yield every node that a value refers to, once, however deep: keys, arguments and states, too.

    ``callees``: go into what is called as well. ``without``: nodes that are left out, with what
    only they refer to. ``met``: ids of what earlier walks met, which is left out; this walk adds
    its own. So walks of many values that share their parts take as long together as one of the
    whole tree. Values and parts must outlive the set.
    """
    values = _every_value(root, callees=callees, without=without, met=met)
    return (value for value in values if type(value) is Node)


def _every_value(
    root: Any, *, callees: bool, without: Iterable[Node], met: set[int] | None = None
) -> Iterator[Any]:
    """Yield every node once, and every constant wherever a node or a tuple refers to it."""
    met = set() if met is None else met
    met.update(map(id, without))
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if not isinstance(value, Node | tuple) or type(value) is Text:
            yield value
        elif id(value) not in met:
            met.add(id(value))
            if isinstance(value, tuple):
                waiting += value
                continue
            yield value
            goes_into_callee = callees or value.kind not in CALLS
            waiting += (value.head, value.args) if goes_into_callee else (value.args,)
            for values in (value.items, value.entries, value.states):
                waiting += values or ()


class Visits:
    """Nodes that a walk has met, so that it visits each only once however often it is referred
    to.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._met: set[int] = set()
        self._sources: set[int] = set()

    def first(self, node: object) -> bool:
        """Return whether a value is a node and this is the first visit.

        Raises FormatError for a dict made from a list that another was made from: no pickler writes
        that, and to read the list once for each dict would take time that grows with the square of
        the bytes.
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
    if (
        type(node) is not Node
        or node.kind is not Kind.CALL
        or type(node.args) is not tuple
        or not node.args
    ):
        return None
    first = node.args[0]
    if type(first) is Node and first.kind is Kind.LIST and _is_ordered_dict(node):
        return first
    return None


def _is_ordered_dict(node: Node) -> bool:
    head = node.head
    return (
        node.kind in CALLS and type(head) is Node and head.is_global("collections", "OrderedDict")
    )


_LONG = 64  # constants shorter than this, in elements, are compared wherever they occur


def same_tree(one: PickleTree, other: PickleTree, new_names: Mapping[int, str]) -> bool:
    """Return whether ``other`` is ``one`` with these strings (site in ``one`` -> string) and no
    other difference.
    """
    walk = TreeWalk(lambda text: new_names.get(text.site, text.value), lambda text: text.value)
    return walk.same(one.root, other.root)


def constants(
    root: Any, text: Callable[[Text], str], *, without: Iterable[Node]
) -> frozenset[tuple[type, object]]:
    """Return every constant that a value refers to; two values that ``TreeWalk`` finds the same
    refer to the same ones.

    ``text`` gives the string of a push. ``without``: nodes that are left out, with what only they
    refer to.
    """
    values = _every_value(root, callees=True, without=without)
    return frozenset(_exactly(value, text) for value in values if type(value) is not Node)


class TreeWalk:
    """One comparison of two trees, by identity: each shared object once and never by recursion.

    So its time grows with the bytes of the pickles, however deep objects nest and however often
    they refer to one another. ``text_one`` and ``text_other`` give the string by which a push is
    compared.

    ``persistent``: compares two persistent ids; by default they are compared like any value.
    Objects that can change must correspond one to one: what is shared in one tree is shared in the
    other.
    """

    def __init__(
        self,
        text_one: Callable[[Text], str],
        text_other: Callable[[Text], str],
        *,
        persistent: Callable[[Node, Node], bool] | None = None,
        merged: Iterable[Node] = (),
    ) -> None:
        """Prepare a comparison.

        ``merged``: dicts, of either tree, in which keys that become equal count as one and the
        later entry wins.
        """
        self._text_one = text_one
        self._text_other = text_other
        self._persistent = persistent
        self._merged = frozenset(id(node) for node in merged)
        self._forward: dict[int, int] = {}
        self._backward: dict[int, int] = {}
        self._waiting: list[tuple[Any, Any]] = []
        # Long constants, which a few bytes can refer to again and again: each one's place in a list
        # of distinct ones.
        self._places: dict[tuple[bool, int], int] = {}
        self._distinct: dict[object, int] = {}

    def same(self, one: object, other: object) -> bool:
        """Return whether the two values are the same tree."""
        self._waiting = [(one, other)]
        while self._waiting:
            if not self._same_here(*self._waiting.pop()):
                return False
        return True

    def _same_here(self, one: Any, other: Any) -> bool:
        """Compare two values without what they hold, and queue that."""
        kind = type(one)
        if kind is not type(other):
            return False
        if kind is Text:
            left, right = self._text_one(one), self._text_other(other)
            if len(left) > _LONG and len(left) == len(right):
                return self._place(left) == self._place(right)
            return left == right
        if kind is tuple:
            return self._same_tuple(one, other)
        if kind is Node:
            return self._same_node(one, other)
        if kind is float:  # NaN is not equal to itself, and 0.0 is equal to -0.0
            return pack("<d", one) == pack("<d", other)
        if kind is bytes and len(one) > _LONG:
            return len(one) == len(other) and self._place(one) == self._place(other)
        return bool(one == other)

    def _same_tuple(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
        if len(one) != len(other):
            return False
        if id(one) in self._forward or id(other) in self._backward:
            return bool(self._correspond(one, other))
        if len(one) > _LONG:
            left, right = self._tuple_place(one, False), self._tuple_place(other, True)
            if left is not None or right is not None:
                return left == right
        nested = [both for both in zip(one, other, strict=True) if type(both[0]) in (tuple, Node)]
        # A tuple of constants is compared by value: whether two of those are shared says nothing.
        if nested:
            self._correspond(one, other)
            self._waiting += nested
        return all(
            self._same_here(left, right)
            for left, right in zip(one, other, strict=True)
            if type(left) not in (tuple, Node)
        )

    def _place(self, value: str | bytes) -> int:
        place = self._places.get((False, id(value)))
        if place is None:
            place = self._places[False, id(value)] = self._distinct.setdefault(
                value, len(self._distinct)
            )
        return place

    def _tuple_place(self, value: tuple[Any, ...], is_other: bool) -> int | None:
        """Return the place of a tuple of constants, None for any other."""
        place = self._places.get((is_other, id(value)))
        if place is None:
            if any(type(item) in (tuple, Node) for item in value):
                return None
            text = self._text_other if is_other else self._text_one
            key = tuple([_exactly(item, text) for item in value])
            place = self._places[is_other, id(value)] = self._distinct.setdefault(
                key, len(self._distinct)
            )
        return place

    def _same_node(self, one: Node, other: Node) -> bool:
        if one.kind is not other.kind:
            return False
        if one.kind is Kind.GLOBAL:
            if one.head != other.head or one.args != other.args:
                return False
            if not (_was_changed(one) or _was_changed(other)):
                return True  # whether two references to one global are shared says nothing
        if one.kind is Kind.PERSISTENT and self._persistent is not None:
            return self._persistent(one, other)
        known = self._correspond(one, other)
        if known is not None:
            return known
        self._waiting += ((one.head, other.head), (one.args, other.args))
        if not self._same_lists(one.states, other.states):
            return False
        if id(one) in self._merged or id(other) in self._merged:
            return self._same_merged(one, other)
        return self._same_lists(one.items, other.items) and self._same_lists(
            one.entries, other.entries
        )

    def _correspond(self, one: object, other: object) -> bool | None:
        """Return whether two containers correspond to each other, None when neither was met
        before.
        """
        forward, backward = self._forward.get(id(one)), self._backward.get(id(other))
        if forward is None and backward is None:
            self._forward[id(one)], self._backward[id(other)] = id(other), id(one)
            return None
        return forward == id(other) and backward == id(one)

    def _same_lists(self, one: list[Any] | None, other: list[Any] | None) -> bool:
        if len(one or ()) != len(other or ()):
            return False
        self._waiting += zip(one or (), other or (), strict=True)
        return True

    def _same_merged(self, one: Node, other: Node) -> bool:
        left, right = _merge(one, self._text_one), _merge(other, self._text_other)
        if left is None or right is None or list(left) != list(right):
            return False
        self._waiting += zip(left.values(), right.values(), strict=True)
        return True


def _was_changed(node: Node) -> bool:
    return node.states is not None or node.items is not None or node.entries is not None


def _exactly(constant: Any, text: Callable[[Text], str]) -> tuple[type, object]:
    """Return a key that only an equal constant of the same type has: 1, 1.0 and True differ, and so
    do 0.0 and -0.0.
    """
    kind = type(constant)
    if kind is Text:
        return kind, text(constant)
    if (
        kind is int
    ):  # as text, whose hash nobody can foresee: a file could hold integers that all have one hash
        return kind, f"{constant:x}"
    return kind, pack("<d", constant) if kind is float else constant


def _merge(node: Node, text: Callable[[Text], str]) -> dict[str, Any] | None:
    """Return a dict as it is once its keys are renamed, None when a key is not a string."""
    merged = {}
    for key, value in pairs(node):
        if type(key) is not Text:
            return None
        merged[text(key)] = value
    return merged
