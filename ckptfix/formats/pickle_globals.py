"""What the globals of a pickle may do, by their names alone: nothing is imported to find out.

``SAFE`` mirrors ``torch/_weights_only_unpickler.py`` of torch 2.13; a test compares it with the installed torch.
"""

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterable
from enum import Enum
from itertools import product
from keyword import iskeyword

from ckptfix.formats.pickle_tree import UNRESOLVABLE
from ckptfix.formats.unsafe_globals import is_unsafe, looks_like_class


class GlobalSafety(Enum):
    """How far a global can be trusted."""

    SAFE = "torch.load(weights_only=True) reads it"
    SAFE_IN_RNG_STATE = "accelerate allows it when it reads its own files"
    UNKNOWN = "outside the weights_only list; may be a class of the user's"
    UNSAFE = "can run code or touch the system"


def _names(module: str, names: str) -> set[tuple[str, str]]:
    return {(module, name) for name in names.split()}


_TYPES = ("Double", "Float", "Half", "Long", "Int", "Short", "Char", "Byte", "Bool", "BFloat16")
_DTYPES = """
    bfloat16 float16 float32 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
    float4_e2m1fn_x2 complex32 complex64 complex128 bool qint8 qint32 quint8 quint4x2 quint2x4
    bits1x8 bits2x4 bits4x2 bits8 bits16 int1 int2 int3 int4 int5 int6 int7 int8 int16 int32 int64
    uint1 uint2 uint3 uint4 uint5 uint6 uint7 uint8 uint16 uint32 uint64"""
SAFE = frozenset(
    _names("collections", "OrderedDict Counter")
    | _names("builtins", "bytearray set complex")
    | _names("_codecs", "encode")
    | _names("torch", "Size Tensor device ComplexFloatStorage ComplexDoubleStorage")
    | _names("torch", "QInt8Storage QInt32Storage QUInt8Storage QUInt4x2Storage QUInt2x4Storage")
    | _names("torch", _DTYPES)
    | _names("torch", "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric")
    | _names("torch", "per_channel_affine_float_qparams")
    | _names("torch.cuda", "ComplexFloatStorage ComplexDoubleStorage")
    | {(m, f"{t}{kind}") for m, t, kind in product(("torch", "torch.cuda"), _TYPES, ("Storage", "Tensor"))}
    | {(m, f"{t}Tensor") for m, t in product(("torch.sparse", "torch.cuda.sparse"), _TYPES) if t != "Bool"}
    | _names("torch.nn.parameter", "Parameter")
    | _names("torch.serialization", "_get_layout")
    | _names("torch.storage", "TypedStorage UntypedStorage")
    | _names("torch._tensor", "_rebuild_from_type_v2")
    | _names(
        "torch._utils",
        """_rebuild_parameter _rebuild_parameter_with_state _rebuild_qtensor _rebuild_tensor _rebuild_tensor_v2
        _rebuild_tensor_v3 _rebuild_sparse_tensor _rebuild_meta_tensor_no_storage _rebuild_nested_tensor
        _rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor""",
    )
)
"""What ``torch.load(weights_only=True)`` reads without being told."""

_SAFE_IN_RNG_STATE = frozenset(
    _names("numpy", "ndarray dtype")
    | _names("numpy.dtypes", "UInt32DType")
    | _names("numpy.core.multiarray", "_reconstruct")  # as numpy before 2.0 wrote it
    | _names("numpy._core.multiarray", "_reconstruct")
)

_LOWERCASE_CLASSES = frozenset(
    _names(
        "builtins",
        "bool bytes dict enumerate float frozenset int list object range reversed slice str tuple zip",
    )
    | _names("collections", "defaultdict deque")
    | _names("datetime", "date datetime time timedelta timezone tzinfo")
    | _names("array", "array")
    | _names("torch", "dtype")
    | _names(
        "numpy",
        "bool bool_ bytes_ complex64 complex128 datetime64 dtype float16 float32 float64 generic int8",
    )
    | _names("numpy", "int16 int32 int64 ndarray str_ timedelta64 uint8 uint16 uint32 uint64 void")
)
_ALLOWED_BY_NAME = (
    SAFE
    | _LOWERCASE_CLASSES
    | frozenset(
        {
            (module, name)
            for module in ("numpy._core.multiarray", "numpy.core.multiarray")
            for name in ("_reconstruct", "scalar")
        }
        | _names("copyreg", "_reconstructor")
        | _names("re", "_compile")
    )
)


def classify(module: str, name: str) -> GlobalSafety:
    """Return how far ``module.name`` can be trusted, by its Python 3 name."""
    if (module, name) == UNRESOLVABLE:
        return GlobalSafety.UNSAFE
    module, name = python_3_name(module, name)
    if (module, name) in SAFE:
        return GlobalSafety.SAFE
    if (module, name) in _SAFE_IN_RNG_STATE:
        return GlobalSafety.SAFE_IN_RNG_STATE
    return GlobalSafety.UNSAFE if is_unsafe(module, name) else GlobalSafety.UNKNOWN


def python_3_name(module: str, name: str) -> tuple[str, str]:
    """Return the Python 3 name of a global that a pickle of protocol 2 names as Python 2 did."""
    if (module, name) in NAME_MAPPING:  # torch reads the names of Python 2 in the same way
        module, name = NAME_MAPPING[module, name]
    return IMPORT_MAPPING.get(module, module), name


def can_be_allowed(module: str, name: str) -> bool:
    """Whether to tell a user how to allow a global: a class, or a function that is known to make only an object.

    Whoever allows ``yaml.unsafe_load`` lets every later file run code. A name that is no Python identifier comes from
    the file and must not become code.
    """
    if classify(module, name) is GlobalSafety.UNSAFE:
        return False
    module, name = python_3_name(module, name)
    if not all(
        part.isidentifier() and not iskeyword(part) for part in (*module.split("."), *name.split("."))
    ):
        return False
    return looks_like_class(name) or (module, name) in _ALLOWED_BY_NAME


def _importable(module: str) -> str:
    """Return the module that a global is taken from by a user's script."""
    if module == "numpy.core" or module.startswith("numpy.core."):  # so called before numpy 2
        return module.replace("numpy.core", "numpy._core", 1)
    if module.startswith("torch.optim.") and module not in (
        "torch.optim.lr_scheduler",
        "torch.optim.swa_utils",
    ):
        return "torch.optim"  # which deletes the attributes by which its modules would be reached
    return module


def safe_globals_line(names: Iterable[tuple[str, str]]) -> str:
    """Return the line of Python after which ``torch.load(weights_only=True)`` reads these globals as well.

    What cannot be allowed (``can_be_allowed``) is left out; "" when nothing is left. For numpy it allows the types that
    torch finds on the way: it looks at the type of a dtype, and each dtype has its own.
    """
    allowed = {python_3_name(*pair) for pair in names if can_be_allowed(*pair)}
    if not allowed:
        return ""
    has_numpy = any(module.startswith("numpy") for module, _ in allowed)
    if has_numpy:
        allowed |= {("numpy", "dtype"), ("numpy", "ndarray")}
    modules, terms = {"torch"}, []
    for module, name in sorted(allowed):
        home = _importable(module)
        modules.add(home)
        # Known under another name than the file has: torch compares the name in the file.
        terms.append(f"{home}.{name}" if home == module else f'({home}.{name}, "{module}.{name}")')
    if has_numpy:
        modules.add("numpy.dtypes")
        terms.append("*(getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__)")
    return f"import {', '.join(sorted(modules))}; torch.serialization.add_safe_globals([{', '.join(terms)}])"
