"""Kinds of the values that a pickle makes, as far as they show without making any: "int", "tensor",
"torch.Size".
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ckptfix.formats.pickle_globals import (
    DTENSOR,
    DTYPES,
    OF_INSTANCES,
    OF_NUMPY,
    SAFE,
    ZERO_STAGE,
    python_3_name,
)
from ckptfix.formats.pickle_tree import CALLS, UNRESOLVABLE, Kind, Node, Text
from ckptfix.formats.torch_tensors import PickledStorage, is_rebuild

QSCHEMES = frozenset(
    {
        "per_tensor_affine",
        "per_tensor_symmetric",
        "per_channel_affine",
        "per_channel_symmetric",
        "per_channel_affine_float_qparams",
    }
)
"""Names of the ways to quantize, in ``torch``."""

MAPPINGS = frozenset({"dict", "OrderedDict", "Counter"})
"""Kinds of dicts."""

ITERABLE = frozenset(
    {"str", "bytes", "tuple", "list", "set", "frozenset", "torch.Size", "bytearray", *MAPPINGS}
)
"""Kinds whose members ``members`` returns."""

_UNHASHABLE = frozenset(
    {
        "list",
        "dict",
        "set",
        "bytearray",
        "OrderedDict",
        "Counter",
        "numpy.ndarray",
        "fragment_address",
    }
)
_OF_NODES = {
    Kind.LIST: "list",
    Kind.DICT: "dict",
    Kind.SET: "set",
    Kind.FROZENSET: "frozenset",
    Kind.BYTEARRAY: "bytearray",
    Kind.LONG_TEXT: "str",
    Kind.PERSISTENT: "storage",
}
OF_RESULTS = {
    ("collections", "OrderedDict"): "OrderedDict",
    ("collections", "Counter"): "Counter",
    ("builtins", "set"): "set",
    ("builtins", "complex"): "complex",
    ("builtins", "bytearray"): "bytearray",
    ("_codecs", "encode"): "bytes",
    ("torch", "Size"): "torch.Size",
    ("torch", "device"): "torch.device",
    ("torch.serialization", "_get_layout"): "torch.layout",
    ZERO_STAGE: "ZeroStageEnum",
}
"""Functions and classes -> the kind of what they make; tensors and arrays apart."""

KNOWN_GLOBAL, OTHER_GLOBAL = "function or class", "function or class of another package"
"""Kinds of globals: one that torch or numpy pickles by, and any other. No pickler names a number or
a dict so.
"""

_JUDGED = SAFE | OF_NUMPY | OF_INSTANCES | {DTENSOR, ZERO_STAGE}


class Pickle(NamedTuple):
    """The storages of a pickle by their keys, and ids of tuples that can be keys."""

    known: Mapping[str, PickledStorage]
    hashable: set[int]


class Parameter(NamedTuple):
    """A parameter in words, the kinds that fit it (None: all), and what a value of these must be.

    ``of_others``: the kinds of nodes that fit it although their function or class is not known: of
    a class of the user's, say, where a tensor can be one of a subclass.
    """

    words: str
    kinds: Collection[str] | None
    accepts: Callable[[Any], bool] | None = None
    of_others: Collection[Kind] = ()

    def fits(self, value: Any) -> bool:
        """Return whether the function can take a value."""
        kind = kind_of(value)
        if not kind:
            return self.kinds is None or value.kind in self.of_others
        if kind == OTHER_GLOBAL:
            return self.kinds is None or KNOWN_GLOBAL in self.kinds
        is_of_kind = self.kinds is None or kind in self.kinds
        return is_of_kind and (self.accepts is None or self.accepts(value))


class Rule(NamedTuple):
    """The parameters of a function, how many of them must be there, and what is wrong with them
    together.
    """

    parameters: tuple[Parameter, ...]
    least: int
    problem: Callable[[tuple[Any, ...], Pickle], str] | None = None


def function_of(head: object) -> tuple[str, str] | None:
    """Return the Python 3 name of a global that torch allows by default or whose calls are known,
    or None.
    """
    if type(head) is not Node or head.kind is not Kind.GLOBAL:
        return None
    name = python_3_name(*head.head)
    return name if name in _JUDGED else None


def kind_of(value: Any) -> str:
    """Return the kind of a value, "" for one that only its class or its function knows."""
    if type(value) is Text:
        return "str"
    if type(value) is not Node:
        return "None" if value is None else type(value).__name__
    if value.kind in _OF_NODES:
        return _OF_NODES[value.kind]
    function = function_of(value if value.kind is Kind.GLOBAL else value.head)
    if function is None:
        # A later torch can have more dtypes.
        is_of_others = (
            value.kind is Kind.GLOBAL and value.head[0] != "torch" and value.head != UNRESOLVABLE
        )
        return OTHER_GLOBAL if is_of_others else ""
    module, name = function
    if value.kind is Kind.GLOBAL:
        if module == "torch" and name in DTYPES:
            return "torch.dtype"
        return "torch.qscheme" if name in QSCHEMES else KNOWN_GLOBAL
    if value.kind not in CALLS or name == "_rebuild_from_type_v2":
        return ""
    if function in OF_INSTANCES:
        return name
    if function in OF_NUMPY:
        return _kind_of_numpy(function, value.args)
    if is_rebuild(*function) or name.endswith("Tensor") or name == "Parameter":
        return "tensor"
    return OF_RESULTS.get(function, "")


def _kind_of_numpy(function: tuple[str, str], args: Any) -> str:
    """Return the kind of what a function of numpy makes: "" for a scalar, or an array of a class of
    the user's.
    """
    module, name = function
    if name == "dtype" or module == "numpy.dtypes":
        return "numpy.dtype"
    cls = args[0] if name == "_reconstruct" and type(args) is tuple and args else None
    is_array = name == "ndarray" or function_of(cls) == ("numpy", "ndarray")
    return "numpy.ndarray" if is_array else ""


def noun(kind: str) -> str:
    """Return a kind with its article."""
    if kind in ("", "None"):
        return kind or "an object"
    return f"{'an' if kind[0] in 'aeiouO' else 'a'} {kind}"


def is_hashable(value: Any, met: set[int]) -> bool:
    """Return whether a value can be a key, however deep its tuples nest.

    ``met``: ids of tuples of which this is known already; many keys can share one.
    """
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if type(item) is not tuple:
            if kind_of(item) in _UNHASHABLE:
                return False
        elif id(item) not in met:
            met.add(id(item))
            waiting += item
    return True


def count(value: Any) -> int:
    """Return about how many members a value has, without looking at them: never fewer than
    ``members`` returns.
    """
    if type(value) is Text:
        return len(value.value)
    if type(value) is not Node:
        return len(value) if isinstance(value, tuple | bytes) else 0
    source = (
        value.args[0] if value.kind in CALLS and type(value.args) is tuple and value.args else ()
    )
    inner = len(source) if type(source) is tuple else 0
    nodes = (value, source) if type(source) is Node else (value,)
    return inner + sum(len(node.items or ()) + len(node.entries or ()) for node in nodes)


def members(value: Any) -> tuple[Any, ...]:
    """Return what iterating over a value gives: characters, members, or keys; () where that is not
    known.
    """
    if type(value) is Text:
        return tuple([Text(character, value.site, value.source) for character in value.value])
    if type(value) is not Node:
        return tuple(value) if isinstance(value, tuple | bytes) else ()
    inner: tuple[Any, ...] = ()
    if value.kind in CALLS and type(value.args) is tuple and value.args:
        # A set or a Size is made of a list or a tuple; one that is made of another set is not
        # looked into.
        source = value.args[0]
        if type(source) is tuple:
            inner = source
        elif type(source) is Node and source.kind is Kind.LIST:
            inner = tuple(source.items or ())
        elif type(source) is Node and source.kind is Kind.DICT:
            inner = tuple((source.entries or ())[::2])
        if kind_of(value) == "OrderedDict" and not (
            type(source) is Node and source.kind is Kind.DICT
        ):
            inner = tuple([pair[0] for pair in inner if type(pair) is tuple and pair])
    return (*inner, *(value.items or ()), *(value.entries or ())[::2])
