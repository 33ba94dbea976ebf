"""The values that the classes of torch.distributed.checkpoint pickle, out of a tree that was never executed."""

from pathlib import PurePosixPath
from typing import Any, TypeGuard

from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import CALLS, Kind, Node, Text

_MANY = 1 << 62
_MAX_DIMENSIONS = 64
_MAX_FIELDS = 16  # of an instance; torch's classes have five at most
_WORDS = {"Text": "a string", "int": "an int", "NoneType": "None"}


def is_instance(node: object, name: str) -> TypeGuard[Node]:
    """Whether a value is an instance of the class of torch.distributed with this name."""
    if type(node) is not Node or node.kind is not Kind.NEW:
        return False
    head = node.head
    if type(head) is not Node or head.kind is not Kind.GLOBAL:
        return False
    return bool(head.head[1] == name and head.head[0].startswith("torch.distributed."))


def fields_of(node: Node) -> dict[str, Any]:
    """Return the attributes of an instance. Raises FormatError when there are many, or other state than a dict."""
    states = node.states or []
    if not states:
        return {}
    state = states[0]
    if len(states) > 1 or type(state) is not Node or state.kind is not Kind.DICT:
        raise FormatError(f"the state of {words_for(node)} is not a dict")
    entries = state.entries or []
    if len(entries) > 2 * _MAX_FIELDS:
        raise FormatError(f"{words_for(node)} has {len(entries) // 2} attributes")
    return {
        key[0]: value for key, value in zip(entries[::2], entries[1::2], strict=True) if type(key) is Text
    }


def torch_dtype_of(properties: object) -> str:
    """Return the name of a dtype, the first value of what ``TensorProperties.__getstate__`` gives."""
    if is_instance(properties, "TensorProperties"):
        state = (properties.states or [None])[0]
        dtype = state[0] if type(state) is tuple and state else None
        if type(dtype) is Node and dtype.kind is Kind.GLOBAL and dtype.head[0] == "torch":
            return str(dtype.head[1])
    raise FormatError(f"the properties of a tensor name no dtype of torch's: {words_for(properties)}")


def size_of(value: object, name: str) -> tuple[int, ...]:
    """Return the numbers of a ``torch.Size``. Raises FormatError for anything else, or a number below 0."""
    if type(value) is Node and value.kind is Kind.CALL and type(value.head) is Node:
        args = value.args
        if value.head.is_global("torch", "Size") and type(args) is tuple and len(args) == 1:
            value = args[0]
    if type(value) is not tuple or len(value) > _MAX_DIMENSIONS:
        raise FormatError(f"a size of {name!r:.200} is {words_for(value)}")
    for number in value:
        if not is_count(number):
            raise FormatError(f"a size of {name!r:.200} holds {number!r:.40}")
    return value


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a number that an offset or a length can be."""
    return type(value) is int and 0 <= value < _MANY


def path_inside(text: str) -> PurePosixPath:
    """Return a relative path. Raises FormatError when it leaves the folder or cannot be a name."""
    path = PurePosixPath(text)
    try:
        sound = b"\0" not in text.encode()
    except UnicodeEncodeError:
        sound = False
    if not sound or not path.parts or path.is_absolute() or ".." in path.parts:
        raise FormatError(f"an item is said to be in {text!r:.200}, which is not a file of the folder")
    return path


def text_of(value: object) -> str | None:
    """Return a string, None for every other value."""
    return value.value if type(value) is Text else None


def words_for(value: object) -> str:
    """Return what a value is, in a few words; a class by its name."""
    if type(value) is not Node:
        name = type(value).__name__
        return _WORDS.get(name, f"a {name}")
    head = value.head if value.kind in CALLS else value
    if type(head) is Node and head.kind is Kind.GLOBAL:
        return ".".join(head.head)[:200]
    return f"a {value.kind.value}"
