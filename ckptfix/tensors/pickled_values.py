"""Values of a file of torch.save as Python values: what an optimizer stores next to its moments.

Tensors become ``StoredTensor``. Other objects, such as a loss scaler, stay inert: ``Global`` and ``Call`` name what
torch.load would call, and ``PickleWriter`` writes them as they were.
"""

from pathlib import Path
from typing import Any

from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import CALLS, Kind, Node, Text, is_dict_like, made_from, pairs
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_tensors import is_tensor, kind_of_tensor, storages
from ckptfix.tensors.new_torch_files import Call, Global
from ckptfix.tensors.single_files import tensor_of
from ckptfix.tensors.stored import StoredTensor

_MOST = 1 << 20
"""Values that one file is read for: a few bytes can refer to one list again and again, 2**40 times."""

_DEEPEST = 32


class PickledValues:
    """Reader of the values of one file."""

    def __init__(self, path: Path, file: TorchFile) -> None:
        """Prepare to read values of ``file``, which lies at ``path``. Raises FormatError as ``storages`` does."""
        self._path, self._file = path, file
        self._known = storages(file.tree)
        self._left = _MOST

    def tensor(self, node: object, fqn: str) -> StoredTensor | None:
        """Return a plain tensor under the name ``fqn``, None for any other value.

        Raises FormatError for a tensor that is not inside its storage, OperationError for a compressed one.
        """
        return tensor_of(self._path, self._file, node, fqn, self._known)

    def value(self, node: object, fqn: str) -> Any:
        """Return None, a bool, number, str, bytes, tuple, list, dict, ``StoredTensor``, ``Global`` or ``Call``.

        ``fqn``: its name, for tensors and for messages. Raises FormatError for what a file of torch.save never
        has, such as values nested without end, and for tensors of other kinds; OperationError as ``tensor`` does.
        """
        return self._value(node, fqn, 0)

    def _value(self, node: Any, fqn: str, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            raise FormatError(f"{fqn!r:.200} has more than {_MOST} values, or they are nested too deep")
        if type(node) is Text:
            return node.value
        if type(node) is tuple:
            return tuple(self._value(one, fqn, depth + 1) for one in node)
        if type(node) is not Node:
            return node
        if is_tensor(node):
            tensor = self.tensor(node, fqn)
            if tensor is None:
                raise FormatError(f"{fqn!r:.200} is {kind_of_tensor(node)}, which is not read")
            return tensor
        if node.kind is Kind.LIST:
            return [self._value(one, fqn, depth + 1) for one in node.items or ()]
        if is_dict_like(node) and (node.kind is Kind.DICT or made_from(node) or _is_plain_ordered(node)):
            return self._entries(node, fqn, depth)
        return self._object(node, fqn, depth)

    def _entries(self, node: Node, fqn: str, depth: int) -> dict[Any, Any]:
        found = {}
        for key, value in pairs(node):
            name = self._value(key, fqn, depth + 1)
            try:
                hash(name)
            except TypeError:
                raise FormatError(f"{fqn!r:.200} has a key that no dict can have") from None
            found[name] = self._value(value, f"{fqn}.{name}" if fqn else f"{name}", depth + 1)
        return found

    def _object(self, node: Node, fqn: str, depth: int) -> Any:
        """Return an object by the names of what makes it."""
        match node.kind:
            case Kind.GLOBAL:
                return Global(*node.head)
            case Kind.LONG_TEXT:
                return bytes(node.head).decode("utf-8", "surrogatepass")
            case Kind.BYTEARRAY:
                return bytes(node.head)
            case Kind.SET | Kind.FROZENSET:
                items = [self._value(one, fqn, depth + 1) for one in node.items or ()]
                return Call(function=Global("__builtin__", node.kind.value), args=(items,))
        function = node.head
        if node.kind not in CALLS or node.kind is Kind.NEW_EX or type(node.args) is not tuple or node.items:
            raise FormatError(f"{fqn!r:.200} is an object that is not read ({node.kind.value})")
        if type(function) is not Node or function.kind is not Kind.GLOBAL or len(node.states or ()) > 1:
            raise FormatError(
                f"{fqn!r:.200} is an object that is not read: it is made by a computed function"
            )
        return Call(
            function=Global(*function.head),
            args=self._value(node.args, fqn, depth + 1),
            items=self._entries(node, fqn, depth) or None,
            state=self._value(node.states[0], fqn, depth + 1) if node.states else None,
            new=node.kind is Kind.NEW,
        )


def _is_plain_ordered(node: Node) -> bool:
    head = node.head
    return type(head) is Node and head.is_global("collections", "OrderedDict") and not node.states
