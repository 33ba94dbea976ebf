"""Parameters of the functions of torch that a pickle calls: the kinds of values that each takes."""

import re
from typing import Any

from ckptfix.formats.pickle_arrays import INT64, SCALARS
from ckptfix.formats.pickle_globals import DTENSOR, LAYOUTS
from ckptfix.formats.pickle_kinds import (
    ITERABLE,
    MAPPINGS,
    Parameter,
    count,
    function_of,
    kind_of,
    members,
)
from ckptfix.formats.pickle_tree import Kind, Node, Text

DEVICES = re.compile(
    r"(?:cpu|cuda|hip|mps|meta|xpu|hpu|mtia|maia|xla|lazy|ipu|ve|fpga|vulkan|opencl|opengl|ideep|mkldnn|privateuseone"
    r"|npu|mlu|musa|gcu|sdaa|ort|neuron|openreg|spyre|tpu)(?::(?:0|[1-9][0-9]*))?"
)
"""Places where a storage was: the device types of ``c10/core/DeviceType.h``, and known names of its
private one.
"""

_SYMBOLS = 1 << 62
"""torch takes smaller numbers than its negative for symbols (``c10/core/SymInt.h``), and refuses
them as strides.
"""
_READ_ONLY_TEXT = """
    T _base _version device dtype grad_fn is_cpu is_cuda is_leaf is_meta is_nested is_quantized is_sparse itemsize
    layout name nbytes ndim output_nr shape"""
_READ_ONLY = frozenset(_READ_ONLY_TEXT.split())
"""Attributes of every tensor that cannot be set."""


def can_be_a_tuple(args: Any) -> bool:
    """Return whether a pickle makes a tuple of a value, as of the arguments of a call."""
    if type(args) is tuple or kind_of(args) == "torch.Size":
        return True
    # A named tuple is made from its values, and gets no state.
    is_made = type(args) is Node and args.kind is Kind.NEW and not args.states
    return is_made and not kind_of(args) and type(args.args) is tuple and bool(args.args)


def _are_numbers(value: Any) -> bool:
    """Return whether a value can be strides: numbers, or nothing for those of a contiguous
    tensor.
    """
    if value is None:
        return True
    numbers = members(value)
    if kind_of(value) != "torch.Size" and not {kind_of(number) for number in numbers} <= {"int"}:
        return False
    return all(type(number) is not int or -_SYMBOLS <= number < INT64 for number in numbers)


def _are_sizes(value: Any) -> bool:
    return _are_numbers(value) and all(
        type(size) is not int or size >= 0 for size in members(value)
    )


def _are_of_kinds(value: Any, *kinds: str) -> bool:
    return {kind_of(member) for member in members(value)} <= {"", *kinds}


def make_a_size(value: Any) -> bool:
    """Return whether ``torch.Size`` takes a value."""
    # The numbers in a tensor or a storage are not read.
    if kind_of(value) in ("bytes", "bytearray", "tensor", "storage"):
        return True
    kinds = {kind_of(size) for size in members(value) if not _is_scalar_of_numpy(size)}
    return kinds <= {"int", "bool"}


def _is_scalar_of_numpy(value: Any) -> bool:
    return type(value) is Node and value.kind is Kind.CALL and function_of(value.head) in SCALARS


def is_empty(value: Any) -> bool:
    """Return whether a value is None, 0 or has no members."""
    if kind_of(value) in ITERABLE:
        return not members(value)
    return value is None or (type(value) in (int, bool) and not value)


def _are_flags(value: Any) -> bool:
    """Return whether ``torch._utils.set_tensor_metadata`` takes a value."""
    if is_empty(value):
        return True
    flags = (value.entries or ())[1::2] if type(value) is Node else ()
    is_dict = kind_of(value) in MAPPINGS and _are_of_kinds(value, "str")
    return is_dict and {kind_of(flag) for flag in flags} <= {"bool", "int"}


def _are_attributes(value: Any) -> bool:
    """Return whether ``torch._utils._set_obj_state`` takes a state."""
    parts = value if type(value) is tuple else (value,)
    if type(value) is tuple and len(value) != 2:
        return False
    for part in parts:
        is_dict = kind_of(part) in MAPPINGS and _are_of_kinds(part, "str")
        if is_dict and any(key.value in _READ_ONLY for key in members(part) if type(key) is Text):
            return False
        if not (is_dict or not kind_of(part) or is_empty(part)):
            return False
    return True


def are_pairs(value: Any) -> bool:
    """Return whether a dict can be made of a value."""
    kinds = [] if kind_of(value) in MAPPINGS else [(kind_of(pair), pair) for pair in members(value)]
    return all(not kind or (kind in ITERABLE and count(pair) == 2) for kind, pair in kinds)


def make_bytes(value: Any) -> bool:
    """Return whether ``bytearray`` takes a value."""
    kind = kind_of(value)
    if kind in ("int", "bool"):
        return bool(0 <= value < INT64)
    if kind in ("bytes", "bytearray", "str", "storage", "tensor"):
        return True
    numbers = [member for member in members(value) if kind_of(member) not in ("", "tensor")]
    return all(type(number) in (int, bool) and 0 <= number < 256 for number in numbers)


def is_quantizer(value: Any) -> bool:
    """Return whether a value describes a quantized tensor as ``torch._utils._rebuild_qtensor``
    takes it.
    """
    scheme, *numbers = members(value) or (None,)
    kinds = [kind_of(number) for number in numbers]
    match scheme.head[1] if type(scheme) is Node and kind_of(scheme) == "torch.qscheme" else "":
        case "per_tensor_affine":
            return len(kinds) == 2 and kinds[0] in ("", "float", "int") and kinds[1] in ("", "int")
        case "per_channel_affine" | "per_channel_affine_float_qparams":
            return (
                len(kinds) == 3
                and {*kinds[:2]} <= {"", "tensor", "list"}
                and kinds[2] in ("", "int")
            )
        case _:
            return not kind_of(scheme)


def is_class_of_tensors(value: Any) -> bool:
    """Return whether a value is a class of torch whose objects are tensors."""
    return function_of(value) in (
        DTENSOR,
        ("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
    )


def is_dtensor(value: Any) -> bool:
    """Return whether a value is the class DTensor."""
    return function_of(value) == DTENSOR


def _is_plain_dtype(value: Any) -> bool:
    return value is None or not value.head[1].startswith(("qint", "quint"))


def is_device(value: Any) -> bool:
    """Return whether torch knows a device by this name."""
    return type(value) is not Text or DEVICES.fullmatch(value.value) is not None


def is_layout(value: Any) -> bool:
    """Return whether torch has a layout of this name."""
    return type(value) is Text and value.value in LAYOUTS


_CALL, _GLOBAL = (Kind.CALL,), (Kind.GLOBAL,)
STORAGE = Parameter("a storage", ("storage",))
OFFSET = Parameter("a non-negative int", ("int",), lambda value: 0 <= value < INT64)
SIZES = Parameter(
    "a tuple of non-negative 64-bit ints", ("tuple", "torch.Size", "list"), _are_sizes
)
STRIDES = Parameter("a tuple of 64-bit ints", ("tuple", "torch.Size", "list", "None"), _are_numbers)
FLAG = Parameter("a bool", ("bool",))
FLAG_OR_NONE = Parameter("a bool", ("bool", "None"))
DTYPE = Parameter("a torch.dtype", ("torch.dtype", "None"), None, _GLOBAL)
PLAIN_DTYPE = Parameter(
    "a torch.dtype that is not quantized", ("torch.dtype", "None"), _is_plain_dtype, _GLOBAL
)
TENSOR = Parameter("a tensor", ("tensor",), None, _CALL)
TENSOR_OR_NONE = Parameter("a tensor", ("tensor", "None"), None, _CALL)
LAYOUT = Parameter("a torch.layout", ("torch.layout",))
DEVICE = Parameter("a torch device", ("torch.device", "str", "None"), is_device)
METADATA = Parameter(
    "a dict of flags", ("tuple", "None", "int", "list", "bool", *MAPPINGS), _are_flags
)
ATTRIBUTES = Parameter(
    "a dict of attributes",
    ("tuple", "None", "int", "list", "bool", *MAPPINGS),
    _are_attributes,
    _CALL,
)
HOOKS = Parameter("anything", None)


TEXT = Parameter("a str", ("str",))
NUMBER = Parameter("a number", ("int", "float", "bool", "complex"))
MADE_OF = ("None", "tensor", "storage", *ITERABLE)
