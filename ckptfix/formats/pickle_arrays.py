"""Calls by which numpy pickles arrays, torch what describes a DTensor and DeepSpeed its states, and
what follows them.

Facts from numpy 1.26 and 2.4: ``arraydescr_reduce``, ``arraydescr_setstate`` (``descriptor.c``),
``array_reduce`` and ``array_setstate`` (``methods.c``), ``array__reconstruct`` and ``array_scalar``
(``multiarraymodule.c``). A class of the user's has its own states, and what numpy takes from no
pickler of its own is judged where that is simple.

Facts from torch 2.13: ``_dtensor_spec.py`` and ``placement_types.py`` in
``torch/distributed/tensor``, ``device_mesh.py`` and ``_mesh_layout.py`` in ``torch/distributed``.
They are pickled as ``cls.__new__(cls)`` with a dict of its attributes, and the two named tuples
with their values. The placements read their attributes in C++.
"""

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

from ckptfix.formats.pickle_globals import NUMPY_DTYPES, python_3_name
from ckptfix.formats.pickle_kinds import (
    KNOWN_GLOBAL,
    MAPPINGS,
    Parameter,
    Pickle,
    Rule,
    count,
    function_of,
    kind_of,
    members,
)
from ckptfix.formats.pickle_tree import CALLS, Kind, Node, Text, pairs

_INT32 = 1 << 31
INT64 = 1 << 63
_MOST_DIMENSIONS = 64
_LISTED = 2
"""The flag ``NPY_LIST_PICKLE`` of a dtype: its arrays are pickled as lists."""

_OF_OBJECTS = 27
"""The flags that numpy gives to each dtype with objects: ``NPY_FROM_FIELDS`` (``ndarraytypes.h``).
"""

_WITH_DTYPES = ("ml_dtypes", "quaternion")
"""Libraries with dtypes of their own, which are named by their classes. No load with
``weights_only`` allows these.
"""

_MOST_PARTS = 1000
"""Dtypes of fields that are looked at. A few bytes can refer to one dtype again and again."""

RAW_OBJECTS = "with raw bytes from the file in place of Python objects"
"""The problem of arrays whose elements are addresses that the file chose."""

_OF_NUMBERS = re.compile(
    r"[<>=|]?(?:b1|[iu][1248]|f(?:[248]|12|16)|c(?:8|16|24|32)|[SUVa][0-9]*|[Mm]8?(?:\[.*\])?|[?bBhHiIlLqQpPnNefdgFDG])"
    r"|(?:bool|str|bytes|void|unicode|u?(?:int|byte|short|long)|half|single|c?(?:double|single|longdouble)"
    r"|float|complex|datetime64|timedelta64)[0-9_]*(?:\[.*\])?"
)
"""Names of dtypes without objects, and of the scalar types of numpy and Python."""

_OF_NAMED_OBJECTS = re.compile(r"[<>=|]?O[0-9]*|object_?")

_CODE = re.compile(r"([biufcOSUVMm])([0-9]*)")
_DTYPE_NAME = re.compile(
    r"[<>=|]?(?:b1|[iu][1248]|f(?:[248]|12|16)|c(?:8|16|24|32)|[SUVaO][0-9]*|[Mm]8?(?:\[.*\])?|[?bBhHiIlLqQpPnNefdgFDGcT])"
    r"|(?:bool|str|bytes|void|object|unicode|string|u?(?:int|byte|short|long)|half|single|c?(?:double|single|longdouble)"
    r"|float|complex|datetime64|timedelta64)[a-z0-9_]*(?:\[.*\])?"
    r"|.*[,(].*|[0-9]+[a-zA-Z?].*"
)
"""Names of dtypes that numpy takes, and what may be one."""

_PARTS = {
    5: "endian subarray fields elsize alignment",
    6: "version endian subarray fields elsize alignment",
    7: "version endian subarray names fields elsize alignment",
    8: "version endian subarray names fields elsize alignment flags",
    9: "version endian subarray names fields elsize alignment flags metadata",
}
"""Number of values in the state of a dtype -> their names."""

_NO_ARGUMENTS = NUMPY_DTYPES - {
    f"{name}DType" for name in ("Bytes", "DateTime64", "Str", "String", "TimeDelta64", "Void")
}


class _Layout(NamedTuple):
    """The bytes of an element of a dtype, and whether its arrays are lists; each None where that
    does not show.
    """

    size: int | None
    is_listed: bool | None


def problem_of_array_states(function: tuple[str, str], node: Node) -> str:
    """Return what is wrong with the states of what a function of numpy made, in words; "" for
    nothing.
    """
    if not node.states:
        return ""
    if function == ("numpy", "dtype") or function[0] == "numpy.dtypes":
        if _holds_objects(node) and not all(map(_knows_of_objects, node.states)):
            return RAW_OBJECTS
        is_right = all(_is_dtype_state(state, _code(node)) for state in node.states)
        return "" if is_right else "and gives it a state that a dtype cannot have"
    if kind_of(node) == "numpy.ndarray":
        is_right = all(_is_array_state(state) for state in node.states)
        return "" if is_right else "and gives it a state that an array cannot have"
    return ""


def _holds_objects(dtype: Any) -> bool | None:
    """Return whether an element of a dtype is or has a Python object, None where that does not
    show.
    """
    waiting = [dtype]
    is_known = True
    for _ in range(_MOST_PARTS):
        if not waiting:
            return False if is_known else None
        part = waiting.pop()
        if type(part) is Node and kind_of(part) == "numpy.dtype":
            inside = _inside(part)
            is_known &= inside is not None
            waiting += inside or ()
            continue
        verdict = _is_object(part)
        if verdict:
            return True
        is_known &= verdict is not None
    return None


def _is_object(specification: Any) -> bool | None:
    """Return whether ``numpy.dtype`` makes a dtype of objects from a name or a class, None where
    that does not show.
    """
    name = specification.value if type(specification) is Text else specification
    if isinstance(name, str | bytes):
        text = name if isinstance(name, str) else name.decode("latin1")
        return (
            False
            if _OF_NUMBERS.fullmatch(text)
            else True
            if _OF_NAMED_OBJECTS.fullmatch(text)
            else None
        )
    if type(specification) is not Node or specification.kind is not Kind.GLOBAL:
        return None
    module, name = python_3_name(*specification.head)
    if module in ("numpy", "builtins") and (_OF_NUMBERS.fullmatch(name) or name == "record"):
        return False
    # A class of Python means an object, unless a library has made a dtype of it.
    return None if module.partition(".")[0] in _WITH_DTYPES else True


def _inside(dtype: Node) -> list[Any] | None:
    """Return what a dtype is made from: the name, and the dtypes of its fields; None where that
    does not show.
    """
    if type(dtype.args) is not tuple:
        return None
    inside = list(dtype.args[:1])
    if function_of(dtype.head) != ("numpy", "dtype"):
        name = dtype.head.head[1]
        inside = [
            Text("O" if name == "ObjectDType" else "T" if name == "StringDType" else "V", 0, 0)
        ]
    for state in dtype.states or ():
        if type(state) is not tuple or len(state) not in _PARTS:
            return None
        parts = dict(zip(_PARTS[len(state)].split(), state, strict=True))
        fields = parts["fields"]
        if fields is not None and kind_of(fields) != "dict":
            return None
        in_fields = (fields.entries or [])[1::2] if fields is not None else []
        for pair in (parts["subarray"], *in_fields):
            inside += (
                members(pair)[:1] if kind_of(pair) == "tuple" else [] if pair is None else [pair]
            )
    return inside


def _knows_of_objects(state: Any) -> bool:
    """Return whether numpy counts the objects in a dtype after it got a state: it believes the
    flags of the file.
    """
    if type(state) is not tuple or len(state) not in _PARTS:
        return False
    parts = dict(zip(_PARTS[len(state)].split(), state, strict=True))
    version, flags = parts.get("version", 0), parts.get("flags", 0)
    if type(version) is int and version < 3:
        # numpy looks itself (``_descr_find_object_flag``).
        return True
    return type(flags) is int and flags & _OF_OBJECTS == _OF_OBJECTS


def _is_dtype_state(state: Any, code: str) -> bool:
    if not kind_of(state):
        return True
    names = _PARTS.get(len(state)) if type(state) is tuple else None
    if names is None:
        return False
    parts = dict(zip(names.split(), state, strict=True))
    if not all(_ACCEPTED[name](part) for name, part in parts.items() if kind_of(part)):
        return False
    fields, names_of_fields = parts["fields"], parts.get("names")
    if len(state) == 6 and parts["version"] > 1:
        return False
    if len(state) > 6:
        if (fields is None) != (names_of_fields is None):
            return False
        if kind_of(fields) == "dict" and type(names_of_fields) is tuple:
            entries = fields.entries or []
            keys = {key.value for key in entries[::2] if type(key) is Text}
            are_known = all(name.value in keys for name in names_of_fields if type(name) is Text)
            if not are_known or not all(map(_is_field, entries[1::2])):
                return False
    return code[:1] not in ("M", "m") or len(state) < 9 or _is_datetime(parts["metadata"])


def _is_field(value: Any) -> bool:
    if not kind_of(value):
        return True
    is_pair = type(value) is tuple and len(value) in (2, 3)
    return is_pair and kind_of(value[0]) in ("", "numpy.dtype") and kind_of(value[1]) in ("", "int")


def _is_datetime(metadata: Any) -> bool:
    """Return whether the last value of the state of a datetime64 or a timedelta64 has its unit."""
    if not kind_of(metadata):
        return True
    unit = metadata[1] if type(metadata) is tuple and len(metadata) == 2 else None
    if type(unit) is not tuple or len(unit) != 4:
        return False
    kinds = [kind_of(part) for part in unit]
    return kinds[0] in ("", "bytes", "str") and {*kinds[1:]} <= {"", "int"}


def _is_subarray(value: Any) -> bool:
    if value is None:
        return True
    is_pair = type(value) is tuple and len(value) == 2
    return is_pair and kind_of(value[0]) in ("", "numpy.dtype") and _is_shape(value[1])


def _is_character(value: Any) -> bool:
    return kind_of(value) in ("bytes", "str") and _length(value) in (1, None)


def _is_number(value: Any) -> bool:
    return type(value) in (int, bool) and -INT64 <= value < INT64


_ACCEPTED: Mapping[str, Callable[[Any], bool]] = {
    "version": lambda value: _is_number(value) and 0 <= value <= 4,
    "endian": _is_character,
    "subarray": _is_subarray,
    "names": lambda value: (
        value is None or (type(value) is tuple and {*map(kind_of, value)} <= {"", "str", "bytes"})
    ),
    "fields": lambda value: value is None or kind_of(value) in MAPPINGS,
    "elsize": _is_number,
    "alignment": _is_number,
    "flags": lambda value: type(value) in (int, bool),
    "metadata": lambda value: True,
}
"""Rule for each value in the state of a dtype, by its name."""


def _is_array_state(state: Any) -> bool:
    kind = kind_of(state)
    values = members(state) if kind in ("", "tuple", "list") else ()
    if not kind or len(values) not in (4, 5):
        return not kind
    version, shape, dtype, is_fortran, data = (0, *values)[-5:]
    is_formed = (
        type(version) in (int, bool)
        and version in (0, 1)
        and kind_of(shape) in ("", "tuple", "torch.Size")
        and _is_shape(shape)
        and kind_of(dtype) in ("", "numpy.dtype")
        and (not kind_of(is_fortran) or (_is_number(is_fortran) and abs(is_fortran) < _INT32))
    )
    return is_formed and _is_data(data, _layout(dtype), shape)


def _is_data(data: Any, layout: _Layout, shape: Any) -> bool:
    kind = kind_of(data)
    if not kind:
        return True
    sizes = members(shape)
    elements = prod(sizes) if kind_of(shape) and "" not in map(kind_of, sizes) else None
    if layout.is_listed or kind == "list":
        # numpy takes a shorter list, and leaves addresses in the array that are none.
        is_complete = elements is None or len(members(data)) == elements
        return kind == "list" and layout.is_listed is not False and is_complete
    length = _length(data)
    if length is None or layout.size is None or elements is None:
        return kind in ("bytes", "str") and length != -1
    return bool(length == layout.size * elements)


def _length(data: Any) -> int | None:
    """Return how many bytes a value gives as the content of an array, None where that does not
    show, -1 for none.
    """
    if type(data) is bytes:
        return len(data)
    text = data
    if type(data) is Node and data.kind in CALLS and kind_of(data) == "bytes":
        # Before protocol 3 bytes are a call of _codecs.encode with a text and "latin1".
        is_pair = type(data.args) is tuple and len(data.args) == 2
        text, encoding = data.args if is_pair else (None, None)
        if type(text) is not Text or type(encoding) is not Text or encoding.value != "latin1":
            return None
    if type(text) is not Text:
        return None if kind_of(data) in ("bytes", "str") else -1
    is_latin = text.value.isascii() or max(text.value) < "\u0100"
    return len(text.value) if is_latin else -1


def _code(dtype: Node) -> str:
    """Return the name that a dtype is made from: "f4", "" for one that is made from something
    else.
    """
    first = dtype.args[0] if type(dtype.args) is tuple and dtype.args else None
    return first.value if type(first) is Text else ""


def _layout(dtype: Any) -> _Layout:
    if type(dtype) is not Node or function_of(dtype.head) != ("numpy", "dtype"):
        return _Layout(None, None)
    states = dtype.states or []
    match = _CODE.fullmatch(_code(dtype))
    # numpy gives each new dtype one state. Its bytes are those of its fields, or of its characters.
    state = (
        states[0] if len(states) == 1 and type(states[0]) is tuple and len(states[0]) > 7 else None
    )
    if match is None or state is None:
        return _Layout(None, None)
    kind, digits = match.groups()
    size = state[5] if kind in "SUV" else int(digits or 0)
    is_plain = (
        state[2] is None
        and type(size) is int
        and size >= 0
        and kind != "O"
        and (digits or kind in "SUV")
    )
    is_listed = bool(state[7] & _LISTED) if type(state[7]) is int else None
    return _Layout(size if is_plain else None, is_listed)


def _is_shape(value: Any) -> bool:
    if kind_of(value) not in ("tuple", "list", "torch.Size"):
        return not kind_of(value) or (type(value) is int and 0 <= value < INT64)
    sizes = [size for size in members(value) if kind_of(size)]
    is_right = all(type(size) is int and 0 <= size < INT64 for size in sizes)
    return is_right and len(sizes) <= _MOST_DIMENSIONS


def _is_dtype(value: Any) -> bool:
    """Return whether ``numpy.dtype`` takes a value, as far as it shows."""
    # (dtype, shape), and (flexible dtype, size): the first of them is a dtype itself.
    while type(value) is tuple:
        if len(value) != 2 or kind_of(value[0]) in ("int", "bool", "float"):
            return False
        value = value[0]
    match kind_of(value):
        case "str":
            return type(value) is not Text or _DTYPE_NAME.fullmatch(value.value) is not None
        case "bytes":
            text = (
                value.args[0]
                if type(value) is Node and type(value.args) is tuple and value.args
                else value
            )
            if type(text) is Text:
                return _DTYPE_NAME.fullmatch(text.value) is not None
            return (
                type(text) is not bytes or _DTYPE_NAME.fullmatch(text.decode("latin1")) is not None
            )
        case "list":
            return all(
                kind_of(field) in ("", "tuple") and count(field) != 1 for field in members(value)
            )
        case "function or class":
            name = (function_of(value) or ("", ""))[1]
            return (
                not name.startswith("_")
                and name not in ("encode", "scalar")
                and not name.endswith("Storage")
            )
        case _:
            return True


def _of_scalar(args: tuple[Any, ...], pickle: Pickle) -> str:
    layout = _layout(args[0])
    if len(args) < 2 or not kind_of(args[1]):
        return ""
    if kind_of(args[1]) == "numpy.ndarray":
        return "" if layout.is_listed is not False else "with an array instead of bytes"
    length = _length(args[1])
    if length == -1 or layout.is_listed:
        return "with something other than its bytes"
    is_short = length is not None and layout.size is not None and length < layout.size
    return f"with only {length} of {layout.size} bytes" if is_short else ""


def _of_array(args: tuple[Any, ...], pickle: Pickle) -> str:
    """Refuse a buffer whose bytes become objects. numpy's own pickles call ``_reconstruct``
    instead.
    """
    has_buffer = len(args) > 2 and args[2] is not None
    return RAW_OBJECTS if has_buffer and _holds_objects(args[1]) is not False else ""


_ANYTHING = Parameter("anything", None)
_SPECIFICATION = ("str", "bytes", "None", "list", "tuple", "numpy.dtype", KNOWN_GLOBAL, *MAPPINGS)
_DTYPE = Parameter("a description of a dtype", _SPECIFICATION, _is_dtype, tuple(Kind))
_SHAPE = Parameter("a shape", ("tuple", "list", "torch.Size", "int"), _is_shape)
_RECONSTRUCT = Rule(
    (
        Parameter(
            "an array class",
            (KNOWN_GLOBAL,),
            lambda value: function_of(value) == ("numpy", "ndarray"),
            (Kind.GLOBAL, Kind.CALL),
        ),
        _SHAPE,
        _DTYPE,
    ),
    3,
)
_SCALAR = Rule(
    (Parameter("a numpy.dtype", ("numpy.dtype",), None, tuple(Kind)), _ANYTHING), 1, _of_scalar
)

SCALARS = frozenset({("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "scalar")})
"""Functions that make a scalar of numpy."""

ARRAY_RULES: Mapping[tuple[str, str], Rule] = {
    ("numpy", "dtype"): Rule((_DTYPE, *(_ANYTHING,) * 3), 1),
    ("numpy", "ndarray"): Rule(
        (
            _SHAPE,
            _DTYPE,
            Parameter("the bytes of an array", ("None", "bytes", "bytearray", "numpy.ndarray")),
            Parameter("an offset", ("int",)),
            *(_ANYTHING,) * 2,
        ),
        1,
        _of_array,
    ),
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    **dict.fromkeys(SCALARS, _SCALAR),
    **{("numpy.dtypes", name): Rule((), 0) for name in _NO_ARGUMENTS},
}
"""Each function by which numpy pickles -> its parameters."""


_TUPLES = {"TensorMeta": 3, "ShardOrderEntry": 2}
"""Named tuples -> their values."""

_READ: dict[str, dict[str, tuple[str, ...]]] = {
    "Shard": {"dim": ("int", "bool")},
    "_StridedShard": {"dim": ("int", "bool"), "split_factor": ("int", "bool")},
    "Partial": {"reduce_op": ("str",)},
}
"""Classes -> the attributes that a load reads, and the kinds that these can have."""


def problem_of_instance(name: str, node: Node) -> str:
    """Return what is wrong with a call of a class of DTensors' or of DeepSpeed's, in words; "" for
    nothing.
    """
    if node.kind is Kind.NEW_EX or (type(node.args) is not tuple and not kind_of(node.args)):
        return ""
    expected = _TUPLES.get(name, 0)
    given = len(members(node.args))
    if node.kind is not Kind.NEW or given != expected:
        return f"with {given} argument{'' if given == 1 else 's'}, which no pickler writes"
    if name in _TUPLES:
        return "and gives it a state, but it takes none" if node.states else ""
    states = node.states or []
    if name in _READ and not states:
        return "and gives it no state"
    return (
        ""
        if all(_is_state(name, state) for state in states)
        else "and gives it a state that does not fit"
    )


def _is_state(name: str, state: Any) -> bool:
    if not kind_of(state):
        return True
    if kind_of(state) not in MAPPINGS or {*map(kind_of, members(state))} - {"str"}:
        return False
    values = {key.value: value for key, value in pairs(state) if type(key) is Text}
    read = _READ.get(name, {})
    if name == "DeviceMesh" and "_dim_group_names" in values:
        # A load asks for the process group of each.
        groups = values["_dim_group_names"]
        is_listed = kind_of(groups) in ("", "list", "tuple")
        return is_listed and {*map(kind_of, members(groups))} <= {"", "str"}
    return all(
        key in values and kind_of(values[key]) in ("", *kinds) for key, kinds in read.items()
    )
