"""Calls of a pickle that ``torch.load(weights_only=True)`` cannot make, found without making any.

A changed byte can leave a pickle readable as opcodes, and turn a number of a call into a string, or drop an argument.
A checksum shows that; legacy files have none, and torch can leave it out of a zip archive. There each call is
compared with the parameters of the function that it names. A global outside of torch's list is another finding.

Facts from torch 2.13: ``torch/_weights_only_unpickler.py`` (what may be called, built and filled), ``torch/_utils.py``
and ``torch/_tensor.py`` (parameters of ``_rebuild_*``), ``torch/serialization.py`` (``persistent_load``, the devices).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from ckptfix.errors import FormatError
from ckptfix.formats.pickle_tree import CALLS, Kind, Node, PickleTree, Text, every_node
from ckptfix.formats.torch_tensors import (
    STORAGE_DTYPES,
    PickledStorage,
    is_rebuild,
    read_storage,
    read_tensor,
)

_DEVICES = re.compile(
    r"(?:cpu|cuda|hip|mps|meta|xpu|hpu|mtia|maia|xla|lazy|ipu|ve|fpga|vulkan|opencl|opengl|ideep|mkldnn|privateuseone"
    r"|npu|mlu|musa|gcu|sdaa|ort)(?::[0-9]+)?"
)
"""Places where a storage was: the device types of ``c10/core/DeviceType.h``, and known names of its private one."""

_UNHASHABLE = frozenset({Kind.LIST, Kind.DICT, Kind.SET, Kind.BYTEARRAY})
_UNHASHABLE_CALLS = frozenset(
    {
        ("collections", "OrderedDict"),
        ("collections", "Counter"),
        ("builtins", "set"),
        ("builtins", "bytearray"),
    }
)
_FILLED = frozenset({("collections", "OrderedDict"), ("collections", "Counter")})
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "C64", "C128"})


def ensure_calls(tree: PickleTree, known: Mapping[str, PickledStorage]) -> None:
    """Raise FormatError where torch cannot make what a pickle says. ``known``: its storages."""
    if tree.leftover:
        raise FormatError("the pickle ends with values that belong to nothing, which no pickler leaves")
    for node in tree.persistent:
        _, storage = read_storage(node)
        if not _DEVICES.fullmatch(storage.location):
            raise FormatError(f"a storage was saved on {storage.location!r:.80}, which torch does not know")
    for node in every_node(tree.root):
        for key in (node.entries or ())[::2]:
            if not _is_hashable(key):
                raise FormatError("the pickle has a dict with a key that cannot be one")
        if node.kind in CALLS:
            problem = _call_problem(node, known)
            if problem:
                raise FormatError(f"the pickle calls {_name(node)} {problem}, so torch.load fails")


def _name(node: Node) -> str:
    head = node.head
    return ".".join(head.head) if type(head) is Node and head.kind is Kind.GLOBAL else "an object"


def _call_problem(node: Node, known: Mapping[str, PickledStorage]) -> str:
    """Return what is wrong with a call, in words that follow its name; "" for one that torch can make."""
    head, args = node.head, node.args
    if type(head) is not Node or head.kind is not Kind.GLOBAL:
        return "by its value"
    function: tuple[str, str] = head.head
    module, name = function
    is_class = name.endswith("Storage") or (module == "torch" and name.islower() and name != "device")
    if is_class and module in (
        "torch",
        "torch.cuda",
        "torch.storage",
    ):  # storages, dtypes, kinds of quantization
        return "which is not a function"
    if node.states and function in _RULES and function not in _FILLED and not is_rebuild(*function):
        return "and gives it a state"
    if function in _FILLED:
        if any(type(state) is not Node or state.kind is not Kind.DICT for state in node.states or ()):
            return "and gives it a state that is not a dict"
        if node.kind is Kind.NEW:
            return "" if args == () else "with arguments"
    rule = _RULES.get(function)
    if rule is None:
        return ""
    if node.kind is not Kind.CALL or type(args) is not tuple:
        return "in a way that no torch writes"
    return rule(args, known)


def _is_hashable(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_hashable, value))
    if type(value) is not Node:
        return True
    head = value.head
    if value.kind in CALLS and type(head) is Node and head.kind is Kind.GLOBAL:
        return head.head not in _UNHASHABLE_CALLS
    return value.kind not in _UNHASHABLE


_Rule = Callable[[tuple[Any, ...], Mapping[str, PickledStorage]], str]


def _counted(least: int, most: int | None = None) -> _Rule:
    most = least if most is None else most
    expected = str(least) if most == least else f"{least} to {most}"

    def rule(args: tuple[Any, ...], known: Mapping[str, PickledStorage]) -> str:
        is_right = least <= len(args) <= most
        return "" if is_right else f"with {len(args)} arguments (expected {expected})"

    return rule


def _is_sized(value: Any) -> bool:
    """Return whether a value is a tuple or a ``torch.Size`` of numbers from 0."""
    if type(value) is Node and value.kind is Kind.CALL and type(value.args) is tuple and len(value.args) == 1:
        value = value.args[0] if type(value.head) is Node and value.head.is_global("torch", "Size") else None
    return type(value) is tuple and all(type(number) is int and number >= 0 for number in value)


def _tensor(least: int, dtype_at: int | None = None) -> _Rule:
    """Return the rule of a function that makes a tensor of a storage; its last parameter may be left out."""
    most = least if least == 4 else least + 1

    def rule(args: tuple[Any, ...], known: Mapping[str, PickledStorage]) -> str:
        if problem := _counted(least, most)(args, known):
            return problem
        storage, offset, shape, stride = args[:4]
        if type(storage) is not Node or storage.kind is not Kind.PERSISTENT:
            return "without a storage"
        if type(offset) is not int or offset < 0 or not _is_sized(shape) or not _is_sized(stride):
            return "with an offset, a shape or strides that are not numbers"
        if least == 4:
            return ""
        requires_grad, hooks = args[4:6]
        if type(requires_grad) is not bool:
            return "with a flag for gradients that is not a flag"
        if hooks is not None and (type(hooks) is not Node or hooks.kind not in (Kind.CALL, Kind.DICT)):
            return "with hooks that are not a dict"
        if dtype_at is not None and (
            type(args[dtype_at]) is not Node or args[dtype_at].kind is not Kind.GLOBAL
        ):
            return "with a dtype that is not a dtype"
        dtype = STORAGE_DTYPES.get(known[storage.head[2].value].type) if dtype_at is None else None
        if requires_grad and dtype is not None and dtype not in _FLOATS:
            return f"for gradients of integers ({dtype})"
        metadata = args[least] if len(args) > least else None
        if metadata is not None and not _is_of_flags(metadata):
            return "with metadata that are not flags"
        if metadata is None and dtype is not None:
            call = Node(Kind.CALL, Node(Kind.GLOBAL, ("torch._utils", "_rebuild_tensor_v2")), args)
            if read_tensor(Text("", 0, 0), call, known) is None:
                return "with a shape that does not fit its strides"
        return ""

    return rule


def _is_of_flags(value: Any) -> bool:
    entries = value.entries or [] if type(value) is Node and value.kind is Kind.DICT else [None]
    return all(type(key) is Text for key in entries[::2]) and all(
        type(flag) is bool for flag in entries[1::2]
    )


def _parameter(count: int) -> _Rule:
    def rule(args: tuple[Any, ...], known: Mapping[str, PickledStorage]) -> str:
        if problem := _counted(count)(args, known):
            return problem
        if type(args[0]) is not Node or args[0].kind is not Kind.CALL:
            return "without a tensor"
        return "" if type(args[1]) is bool else "with a flag for gradients that is not a flag"

    return rule


def _from_type(args: tuple[Any, ...], known: Mapping[str, PickledStorage]) -> str:
    if len(args) != 4:
        return _counted(4)(args, known)
    function, cls, inner, _ = args
    if type(cls) is not Node or cls.kind is not Kind.GLOBAL:
        return "without a class"
    problem = _call_problem(Node(Kind.CALL, function, inner), known)
    return f"for a call {problem}" if problem else ""


def _ordered(args: tuple[Any, ...], known: Mapping[str, PickledStorage]) -> str:
    if not args:
        return ""
    source = args[0]
    if len(args) > 1 or type(source) is not Node or source.kind not in (Kind.LIST, Kind.DICT):
        return "with something else than pairs"
    pairs = [
        item.items if type(item) is Node and item.kind is Kind.LIST else item for item in source.items or ()
    ]
    is_right = all(
        isinstance(pair, list | tuple) and len(pair) == 2 and _is_hashable(pair[0]) for pair in pairs
    )
    return "" if is_right else "with something else than pairs"


def _numbers(args: tuple[Any, ...], known: Mapping[str, PickledStorage]) -> str:
    return "" if len(args) == 1 and _is_sized(args[0]) else "with something else than sizes"


def _device(args: tuple[Any, ...], known: Mapping[str, PickledStorage]) -> str:
    is_named = len(args) in (1, 2) and type(args[0]) is Text and _DEVICES.fullmatch(args[0].value)
    return "" if is_named and all(type(index) is int for index in args[1:]) else "for an unknown device"


def _set(args: tuple[Any, ...], known: Mapping[str, PickledStorage]) -> str:
    source = args[0] if len(args) == 1 else None
    items = source.items or [] if type(source) is Node and source.kind is Kind.LIST else source
    is_right = isinstance(items, list | tuple) and all(map(_is_hashable, items))
    return "" if is_right or not args else "with something else than a list"


def _encode(args: tuple[Any, ...], known: Mapping[str, PickledStorage]) -> str:
    if len(args) != 2 or not all(type(arg) is Text for arg in args):
        return "with something else than two strings"
    try:
        args[0].value.encode(args[1].value)
    except (LookupError, ValueError):
        return "for characters that have no byte"
    return ""


def _complex(args: tuple[Any, ...], known: Mapping[str, PickledStorage]) -> str:
    is_right = 1 <= len(args) <= 2 and all(type(arg) in (int, float) for arg in args)
    return "" if is_right else "with something else than numbers"


_RULES: dict[tuple[str, str], _Rule] = {
    ("collections", "OrderedDict"): _ordered,
    ("collections", "Counter"): _counted(0, 1),
    ("builtins", "set"): _set,
    ("__builtin__", "set"): _set,
    ("builtins", "complex"): _complex,
    ("__builtin__", "complex"): _complex,
    ("_codecs", "encode"): _encode,
    ("torch", "Size"): _numbers,
    ("torch", "device"): _device,
    ("torch._utils", "_rebuild_tensor"): _tensor(4),
    ("torch._utils", "_rebuild_tensor_v2"): _tensor(6),
    ("torch._utils", "_rebuild_tensor_v3"): _tensor(7, dtype_at=6),
    ("torch._utils", "_rebuild_parameter"): _parameter(3),
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter(4),
    ("torch._utils", "_rebuild_qtensor"): _counted(7),
    ("torch._utils", "_rebuild_sparse_tensor"): _counted(2),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _counted(4),
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): _counted(4),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _counted(4),
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
}
"""Each function that weights_only calls by default -> what its arguments must be; only those that torch writes."""
