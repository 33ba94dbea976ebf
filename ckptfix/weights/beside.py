"""What a pickle holds beside its state dicts, at any depth and under any kind of key."""

from collections.abc import Collection, Iterator
from typing import Any

from ckptfix.formats.pickle_tree import Kind, Node, PickleTree, Text, Visits, is_dict_like, pairs
from ckptfix.formats.torch_tensors import is_tensor

_LONGEST_NUMBER = 64  # bits; a pickle can hold a number that takes minutes to print
Path = tuple[str, ...]


def held_beside(tree: PickleTree, taken: Collection[Path]) -> tuple[str, ...]:
    """Return everything that is no part of the state dicts at the paths in ``taken``, each once.

    A value is named by the keys that lead to it, with dots between. The values of a state dict under string keys are
    its own affair (``PickledStateDict.opaque_keys``), those under other keys are none of its tensors.
    """
    return tuple(_beside((), tree.root, frozenset(taken), _steps(taken)))


def holds_tensors(value: Any, visits: Visits) -> bool:
    """Whether a value is a dict or list in which a tensor lies, at any depth: a state dict, an optimizer's state.

    What ``visits`` has met is not looked into again. Raises FormatError for a pickle that no pickler writes.
    """
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if not visits.first(node):
            continue
        if node is not value and is_tensor(node):
            return True
        waiting += (one for _, one in pairs(node))
        if node.kind is Kind.LIST:
            waiting += node.items or ()
    return False


def leads_to(path: Path, taken: Collection[Path]) -> bool:
    """Whether one of the paths in ``taken`` begins with this one."""
    return any(one[: len(path)] == path for one in taken)


def _steps(taken: Collection[Path]) -> frozenset[Path]:
    """Return every path on the way to one of ``taken``, those included."""
    return frozenset(path[:length] for path in taken for length in range(len(path) + 1))


def _beside(path: Path, node: Any, taken: frozenset[Path], steps: frozenset[Path]) -> Iterator[str]:
    """Yield what is beside in a value on the way; each step on the way is a node of its own, and so met once."""
    is_state_dict = path in taken
    for is_name, word, value in _members(node):
        inner = (*path, word)
        if is_name and inner in steps:
            yield from _beside(inner, value, taken, steps)
        elif not (is_name and is_state_dict):
            yield ".".join(inner)


def _members(node: Any) -> Iterator[tuple[bool, str, Any]]:
    """Yield whether a key can be a step of a path, the word for it, and its value."""
    if type(node) is Node and node.kind is Kind.LIST and not is_dict_like(node):
        yield from ((True, str(index), value) for index, value in enumerate(node.items or ()))
        return
    for key, value in pairs(node):
        yield type(key) is Text, _word(key), value


def _word(key: Any) -> str:
    if type(key) is Text:
        return key.value
    if type(key) is int and key.bit_length() > _LONGEST_NUMBER:
        return "<a long number>"
    if key is None or type(key) in (int, float, bool):
        return str(key)
    if type(key) is bytes:
        return repr(key[:40])
    return "<a tuple>" if type(key) is tuple else repr(key)
