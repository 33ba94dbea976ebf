"""Two pickles side by side: are they the same tree?

Trees are walked by identity, each shared object once and never by recursion, so that time grows with the bytes of the
pickles, however deep objects nest and however often they refer to one another.
"""

from collections.abc import Callable, Iterable, Mapping
from struct import pack
from typing import Any

from ckptfix.formats.pickle_tree import Kind, Node, PickleTree, Text, pairs

_LONG = 64  # constants shorter than this, in elements, are compared wherever they occur


def same_tree(one: PickleTree, other: PickleTree, new_names: Mapping[int, str]) -> bool:
    """Whether ``other`` is ``one`` with these strings (site in ``one`` -> string) and no other difference."""
    walk = TreeWalk(lambda text: new_names.get(text.site, text.value), lambda text: text.value)
    return walk.same(one.root, other.root)


class TreeWalk:
    """One comparison. ``text_one`` and ``text_other`` give the string by which a push is compared.

    ``persistent``: compares two persistent ids; by default they are compared like any value. Objects that can change
    must correspond one to one: what is shared in one tree is shared in the other.
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

        ``merged``: dicts, of either tree, in which keys that become equal count as one and the later entry wins.
        """
        self._text_one = text_one
        self._text_other = text_other
        self._persistent = persistent
        self._merged = frozenset(id(node) for node in merged)
        self._forward: dict[int, int] = {}
        self._backward: dict[int, int] = {}
        self._waiting: list[tuple[Any, Any]] = []
        # Long constants, which a few bytes can refer to again and again: each one's place in a list of distinct ones.
        self._places: dict[tuple[bool, int], int] = {}
        self._distinct: dict[object, int] = {}

    def same(self, one: object, other: object) -> bool:
        """Whether the two values are the same tree."""
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
        if nested:  # a tuple of constants is compared by value: whether two of those are shared says nothing
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
            place = self._places[False, id(value)] = self._distinct.setdefault(value, len(self._distinct))
        return place

    def _tuple_place(self, value: tuple[Any, ...], is_other: bool) -> int | None:
        """Return the place of a tuple of constants, None for any other."""
        place = self._places.get((is_other, id(value)))
        if place is None:
            if any(type(item) in (tuple, Node) for item in value):
                return None
            text = self._text_other if is_other else self._text_one
            key = tuple([_exactly(item, text) for item in value])
            place = self._places[is_other, id(value)] = self._distinct.setdefault(key, len(self._distinct))
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
        return self._same_lists(one.items, other.items) and self._same_lists(one.entries, other.entries)

    def _correspond(self, one: object, other: object) -> bool | None:
        """Return whether two containers stand for each other, None when neither was met before."""
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
    """Return what only an equal constant of the same type has: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    kind = type(constant)
    if kind is Text:
        return kind, text(constant)
    if (
        kind is int
    ):  # as text, whose hash nobody can foresee: a file could hold integers that all have one hash
        return kind, f"{constant:x}"
    return kind, pack("<d", constant) if kind is float else constant


def _merge(node: Node, text: Callable[[Text], str]) -> dict[str, Any] | None:
    """Return a dict as it is once its keys are renamed, None when a key is no string."""
    merged = {}
    for key, value in pairs(node):
        if type(key) is not Text:
            return None
        merged[text(key)] = value
    return merged
