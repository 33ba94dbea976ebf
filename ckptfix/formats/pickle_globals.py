"""The globals that a pickle names: which are harmless, and which can run code. Nothing is imported
to find out.

The names that run code or touch the system are gathered from CPython's documentation, from what
picklescan and fickling look for, and from the packages that accelerate brings along. A list of
names is never complete: what is not on it is unknown, not safe. ``SAFE`` mirrors
``torch/_weights_only_unpickler.py`` of torch 2.13; a test compares it with the installed torch.
"""

import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import product
from keyword import iskeyword
from typing import Any

from ckptfix.formats.pickle_tree import (
    CALLS,
    UNRESOLVABLE,
    Kind,
    Node,
    PickleTree,
    Text,
    every_node,
)

_UNSAFE_MODULES_TEXT = """
    os posix nt posixpath ntpath sys subprocess _posixsubprocess commands popen2 pty tty signal _signal atexit threading
    _thread multiprocessing _multiprocessing concurrent asyncio _asyncio sched
    importlib _frozen_importlib _frozen_importlib_external imp _imp runpy pkgutil zipimport site zipapp
    code codeop marshal types inspect gc ctypes _ctypes cffi mmap sysconfig _sysconfig
    _interpreters _xxsubinterpreters _testcapi _pyrepl _osx_support _aix_support _pyio
    pickle _pickle cPickle pickletools shelve dbm dill cloudpickle joblib jsonpickle
    socket _socket socketserver ssl _ssl select selectors http httplib urllib urllib2 urllib3 requests aiohttp httpx
    httpcore anyio ftplib poplib imaplib smtplib smtpd telnetlib nntplib xmlrpc xmlrpclib webbrowser antigravity cgi
    wsgiref shutil tempfile glob fileinput filecmp linecache mailbox sqlite3 _sqlite3 syslog
    zipfile tarfile gzip bz2 lzma py_compile compileall distutils setuptools pip pkg_resources ensurepip venv
    pdb bdb cProfile _lsprof profile timeit trace tracemalloc doctest unittest test pytest pydoc idlelib lib2to3
    turtledemo pipes pexpect paramiko fabric rlcompleter cmd uuid platform getpass curses readline
    IPython ipykernel fickling picklescan modelscan
    yaml _yaml ruamel psutil sympy jinja2 fsspec filelock huggingface_hub click typer mpmath.libmp.backend
    logging.config logging.handlers json.tool encodings
    numpy.f2py numpy.distutils numpy.ctypeslib numpy.testing numpy.lib.npyio numpy.lib._npyio_impl
    numpy.lib.format numpy.lib._format_impl numpy.lib._datasource
    accelerate.commands accelerate.launchers accelerate.test_utils
    torch.hub torch.jit torch.package torch._dynamo torch._inductor torch._export torch.export torch.compiler torch.fx
    torch.multiprocessing torch.serialization torch.utils.cpp_extension torch.utils.model_zoo torch.utils.bottleneck
    torch.utils.collect_env torch.utils._config_module torch.utils.data.datapipes torch.distributed.rpc
    torch.utils.benchmark torch.utils.hipify torch.utils.model_dump torch.utils.show_pickle torch.utils._sympy
    torch.utils.viz torch.profiler torch.autograd.profiler torch.cuda._memory_viz
    torch.distributed.elastic torch.distributed.run torch.distributed.launch torch.distributed.launcher
    torch.distributed.nn.jit torch.testing torch._ops torch.ops
    torch._classes torch.classes torch._library torch.library torch.utils.tensorboard torch.monitor torch.onnx
    torch.os torch.sys torch._weights_only_unpickler
"""
_UNSAFE_MODULES = frozenset(_UNSAFE_MODULES_TEXT.split())
"""Modules of which nothing may be called, nor of any module below them."""

_HARMLESS_STDLIB_TEXT = """
    abc argparse array base64 binascii bisect builtins calendar cmath codecs collections colorsys configparser
    contextlib contextvars copy copyreg csv dataclasses datetime decimal difflib email enum fractions functools graphlib
    hashlib heapq hmac html io ipaddress itertools json keyword locale logging math numbers operator optparse pathlib
    queue random re secrets statistics string struct textwrap time traceback types typing unicodedata uuid warnings
    weakref zlib zoneinfo __main__ __future__ _collections_abc _weakrefset _pydecimal _pydatetime"""
_HARMLESS_STDLIB = frozenset(_HARMLESS_STDLIB_TEXT.split())
"""Modules of the standard library with classes that people keep; the rest has no place in a
checkpoint.
"""

_FUNCTIONS_RUN = frozenset(
    {"accelerate", "transformers", "diffusers", "datasets", "peft", "safetensors"}
)
"""Packages whose functions load, save and launch. Their classes are kept in ordinary checkpoints.
"""


def _named(module: str, names: str) -> set[tuple[str, str]]:
    return {(module, name) for name in names.split()}


_UNSAFE_NAMES = frozenset(
    _named(
        "torch",
        "load save compile hub jit import_ir_module _import_dotted_name classes ops from_file",
    )
    | _named("torch.storage", "_load_from_bytes")
    | _named("torch._utils", "_import_dotted_name")
    | _named("torch.cuda.memory", "_dump_snapshot _record_memory_history")
    | _named(
        "torch._C",
        "_jit_compile import_ir_module import_ir_module_from_buffer _import_ir_module_from_package",
    )
    | _named("numpy", "f2py ctypeslib")
    | _named("pandas", "eval")
    | _named("functools", "partial partialmethod reduce")
    | _named("operator", "attrgetter itemgetter methodcaller call")
    | _named("io", "open open_code FileIO OpenWrapper")
    | _named("codecs", "open")
    | _named("argparse", "FileType")
    | _named("logging", "FileHandler config handlers basicConfig")
    | _named("weakref", "finalize")
    | _named("collections", "namedtuple")  # executes a class text
    | _named("dataclasses", "make_dataclass")
    | _named("typing", "get_type_hints")
    | _named("string", "Formatter")
)
_FILE_FUNCTIONS_TEXT = """
    load loads save savez savez_compressed savetxt loadtxt genfromtxt recfromcsv recfromtxt fromfile fromregex tofile
    memmap open_memmap DataSource read_pickle read_csv read_sql read_gpickle write_gpickle"""
_FILE_FUNCTIONS = frozenset(_FILE_FUNCTIONS_TEXT.split())
"""Functions by which numpy, pandas and networkx open files, whatever module of theirs it is taken
from.
"""

_HARMLESS_TEXT = """
    bool bytes bytearray complex dict enumerate float frozenset int list object range reversed set slice str tuple zip
    NotImplemented Ellipsis None True False abs len max min sum sorted round"""
_HARMLESS_BUILTINS = frozenset(_HARMLESS_TEXT.split())
_HARMLESS = frozenset(
    _named("types", "SimpleNamespace MappingProxyType")
    | _named("uuid", "UUID SafeUUID")
    | _named("zoneinfo", "ZoneInfo._unpickle")
    | _named("numpy.random._pickle", "__randomstate_ctor __generator_ctor __bit_generator_ctor")
    | _named("numpy.random", "__RandomState_ctor")
    # A class of three numbers in jagged nested tensors; torch allows it where a script imported
    # torch._dynamo.
    | _named("torch._dynamo.decorators", "_DimRange")
)
_COMPILED = frozenset({"numpy", "scipy", "pandas", "sklearn"})
"""Packages of classes that Cython compiled, whose ``__pyx_unpickle_Name`` makes an instance and
sets its attributes.
"""
_RUNNERS = frozenset(
    {
        "eval",
        "exec",
        "exec_",
        "execfile",
        "system",
        "popen",
        "builtins",
        "runstring",
        "execWrapper",
    }
)


def is_unsafe(module: str, name: str) -> bool:
    """Return whether ``module.name``, by its Python 3 name, can run code or touch the system."""
    if (module, name) in _HARMLESS:
        return False
    parts = module.split(".")
    # A name may be a path of attributes ("system.__call__"), and a module an attribute of another
    # ("torch", "os").
    path = name.split(".")
    if _is_unsafe_module(parts) or f"{module}.{path[0]}" in _UNSAFE_MODULES:
        return True
    if parts[0] in ("builtins", "__builtin__", "__builtins__"):
        is_class = path[0] in _HARMLESS_BUILTINS or path[0].endswith(
            ("Error", "Exception", "Warning")
        )
        return len(path) > 1 or not is_class
    if (module.lstrip("_"), path[0]) in _UNSAFE_NAMES or (module, path[0]) in _UNSAFE_NAMES:
        return True
    if parts[0] in ("numpy", "pandas", "networkx") and not _FILE_FUNCTIONS.isdisjoint(path):
        return True
    if not looks_like_class(name) and (len(path) > 1 or parts[0] in _FUNCTIONS_RUN):
        # A method, or a function of a module by way of another: pathlib's Path.unlink, random's
        # _os.execv.
        return True
    if parts[0] in _COMPILED and len(path) == 1 and name.startswith("__pyx_unpickle_"):
        return False
    return any(map(_leads_outside, path))


def _leads_outside(step: str) -> bool:
    """Return whether an attribute may be a module, a function that runs text, or one of Python's
    own attributes.
    """
    bare = step.lstrip("_")
    return step.startswith("__") or bare in _UNSAFE_MODULES or bare in _RUNNERS


def looks_like_class(name: str) -> bool:
    """Return whether every step of a name is written as classes are: ``Net``, ``Outer._Inner``."""
    return all(step.lstrip("_")[:1].isupper() for step in name.split("."))


def _is_unsafe_module(parts: list[str]) -> bool:
    if any(".".join(parts[: end + 1]) in _UNSAFE_MODULES for end in range(len(parts))):
        return True
    root = parts[0]
    return root in sys.stdlib_module_names and not {root, root.lstrip("_")} & _HARMLESS_STDLIB


class GlobalSafety(Enum):
    """Level of trust in a global."""

    SAFE = "torch.load(weights_only=True) reads it"
    SAFE_IN_RNG_STATE = "accelerate allows it when it reads its own files"
    UNKNOWN = "outside the weights_only list; may be a class of the user's"
    UNSAFE = "can run code or touch the system"


_TYPES = ("Double", "Float", "Half", "Long", "Int", "Short", "Char", "Byte", "Bool", "BFloat16")
_DTYPES = """
    bfloat16 float16 float32 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
    float4_e2m1fn_x2 complex32 complex64 complex128 bool qint8 qint32 quint8 quint4x2 quint2x4
    bits1x8 bits2x4 bits4x2 bits8 bits16 int1 int2 int3 int4 int5 int6 int7 int8 int16 int32 int64
    uint1 uint2 uint3 uint4 uint5 uint6 uint7 uint8 uint16 uint32 uint64"""
DTYPES = frozenset(_DTYPES.split())
"""Names of the dtypes of torch."""

LAYOUTS = frozenset(
    f"torch.{name}"
    for name in (
        "strided",
        "sparse_coo",
        "sparse_csr",
        "sparse_csc",
        "sparse_bsr",
        "sparse_bsc",
        "_mkldnn",
        "jagged",
    )
)
"""Layouts of torch, as it pickles them."""

SAFE = frozenset(
    _named("collections", "OrderedDict Counter")
    | _named("builtins", "bytearray set complex")
    | _named("_codecs", "encode")
    | _named("torch", "Size Tensor device ComplexFloatStorage ComplexDoubleStorage")
    | _named("torch", "QInt8Storage QInt32Storage QUInt8Storage QUInt4x2Storage QUInt2x4Storage")
    | _named("torch", _DTYPES)
    | _named(
        "torch", "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric"
    )
    | _named("torch", "per_channel_affine_float_qparams")
    | _named("torch.cuda", "ComplexFloatStorage ComplexDoubleStorage")
    | {
        (m, f"{t}{kind}")
        for m, t, kind in product(("torch", "torch.cuda"), _TYPES, ("Storage", "Tensor"))
    }
    | {
        (m, f"{t}Tensor")
        for m, t in product(("torch.sparse", "torch.cuda.sparse"), _TYPES)
        if t != "Bool"
    }
    | _named("torch.nn.parameter", "Parameter")
    | _named("torch.serialization", "_get_layout")
    | _named("torch.storage", "TypedStorage UntypedStorage")
    | _named("torch._tensor", "_rebuild_from_type_v2")
    | _named(
        "torch._utils",
        """_rebuild_parameter _rebuild_parameter_with_state _rebuild_qtensor _rebuild_tensor _rebuild_tensor_v2
        _rebuild_tensor_v3 _rebuild_sparse_tensor _rebuild_meta_tensor_no_storage _rebuild_nested_tensor
        _rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor""",
    )
)
"""Globals that ``torch.load(weights_only=True)`` reads by default."""

SAFE_IN_FSDP = frozenset(
    _named("torch.distributed.tensor", "DTensor")
    | _named("torch.distributed.tensor._dtensor_spec", "DTensorSpec TensorMeta ShardOrderEntry")
    | _named("torch.distributed.tensor.placement_types", "Partial Replicate Shard _StridedShard")
    | _named("torch.distributed.device_mesh", "DeviceMesh")
    | _named("torch.distributed._mesh_layout", "_FlatLayout _MeshLayout")
)
"""Globals that ``torch.load(weights_only=True)`` reads where FSDP2 was imported, as in every run
that uses it.
"""

DTENSOR = ("torch.distributed.tensor", "DTensor")
"""The class of tensors of FSDP2, which pickles name and never call."""

OF_DTENSORS = SAFE_IN_FSDP - {DTENSOR}
"""Classes of the objects by which a DTensor is described."""

OF_DEEPSPEED = frozenset(
    _named("deepspeed.runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler")
    | _named("deepspeed.utils.tensor_fragment", "fragment_address")
)
"""Classes whose instances the optimizer states of DeepSpeed hold."""

OF_INSTANCES = OF_DTENSORS | OF_DEEPSPEED
"""Classes of torch and of DeepSpeed whose instances are made without arguments, or from the values
of a named tuple.
"""

ZERO_STAGE = ("deepspeed.runtime.zero.config", "ZeroStageEnum")

_NUMPY_DTYPES = """
    Bool Byte Bytes CLongDouble Complex128 Complex64 DateTime64 Float16 Float32 Float64 Int Int16 Int32 Int64 Int8 Long
    LongDouble LongLong Object Short Str String TimeDelta64 UByte UInt UInt16 UInt32 UInt64 UInt8 ULong ULongLong UShort
    Void"""
NUMPY_DTYPES = frozenset(f"{name}DType" for name in _NUMPY_DTYPES.split())
"""Names of the classes in ``numpy.dtypes``."""

OF_NUMPY = frozenset(
    _named("numpy", "ndarray dtype")
    | _named("numpy.core.multiarray", "_reconstruct scalar")  # as numpy before 2.0 wrote them
    | _named("numpy._core.multiarray", "_reconstruct scalar")
    | {("numpy.dtypes", name) for name in NUMPY_DTYPES}
)
"""Globals by which numpy pickles dtypes, arrays and scalars."""

_SAFE_IN_RNG_STATE = frozenset(
    _named("numpy", "ndarray dtype")
    | _named("numpy.dtypes", "UInt32DType")
    | _named("numpy.core.multiarray", "_reconstruct")  # as numpy before 2.0 wrote it
    | _named("numpy._core.multiarray", "_reconstruct")
)

_LOWERCASE_CLASSES = frozenset(
    _named(
        "builtins",
        "bool bytes dict enumerate float frozenset int list object range reversed slice str "
        "tuple zip",
    )
    | _named("collections", "defaultdict deque")
    | _named("datetime", "date datetime time timedelta timezone tzinfo")
    | _named("array", "array")
    | _named("torch", "dtype")
    | _named(
        "numpy",
        "bool bool_ bytes_ complex64 complex128 datetime64 dtype float16 float32 float64 generic "
        "int8",
    )
    | _named("numpy", "int16 int32 int64 ndarray str_ timedelta64 uint8 uint16 uint32 uint64 void")
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
        | _named("copyreg", "_reconstructor")
        | _named("re", "_compile")
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


_GETATTR, _PARTIAL = ("builtins", "getattr"), ("functools", "partial")
_MAKERS = frozenset({_GETATTR, _PARTIAL}) | _named("operator", "itemgetter attrgetter methodcaller")
"""Functions that make something to call later. Protocol 2 names nested classes and methods by
``getattr``.
"""

_LONGEST_PATH = 16
"""Most nested classes that are followed from the outermost one; real code nests two or three."""


def unsafe_globals(tree: PickleTree) -> tuple[tuple[str, str], ...]:
    """Return the globals by which a load of this pickle can run code, in the order of its
    references.

    ``getattr``, ``functools.partial`` and the getters of ``operator`` are harmless where the pickle
    stores what they make and never calls it.
    """
    unsafe = [pair for pair in tree.globals if classify(*pair) is GlobalSafety.UNSAFE]
    if any(python_3_name(*pair) in _MAKERS for pair in unsafe) and _stores_only(tree):
        unsafe = [pair for pair in unsafe if python_3_name(*pair) not in _MAKERS]
    return tuple(unsafe)


def _stores_only(tree: PickleTree) -> bool:
    """Return whether nothing of what the makers made can be called while this pickle is loaded.

    Every function may call its arguments. BUILD sets attributes: those of a class can replace its
    methods, and those of an instance what later opcodes call, ``__setstate__`` and ``extend``.
    """
    made: set[int] = set()
    callable_there: list[object] = []
    for call in tree.calls:
        maker = _maker(call.head)
        states = call.states or ()
        if maker is not None:
            is_filled = call.items is not None or call.entries is not None
            if call.kind is not Kind.CALL or is_filled or (states and maker != _PARTIAL):
                return False
            path = _path_of(call) if maker == _GETATTR else None
            if maker == _GETATTR and path is None:
                return False
            if path is None or not path[0] or is_unsafe(*path):
                made.add(id(call))
        if maker != _PARTIAL:
            callable_there += (call.head, call.args)
        if len(states) > 1 or call.items is not None:
            callable_there += states
    if any(refused.endswith(f" on {Kind.GLOBAL.value}") for refused in tree.refused_opcodes):
        return False
    values = every_node((tree.root, *tree.calls), callees=False)
    return not any(map(_maker, values)) and made.isdisjoint(
        map(id, every_node(tuple(callable_there)))
    )


def _maker(node: object) -> tuple[str, str] | None:
    """Return the Python 3 name of the maker that a node refers to, None for any other node."""
    if type(node) is not Node or node.kind is not Kind.GLOBAL:
        return None
    name = python_3_name(*node.head)
    return name if name in _MAKERS else None


def _path_of(call: Node) -> tuple[str, str] | None:
    """Return the global that calls of ``getattr`` lead to, with "" as module for an attribute of an
    instance.

    None for a call that may lead to a module or to an attribute of Python's own.
    """
    steps: list[str] = []
    value: object = call
    while type(value) is Node and value.kind in CALLS and _maker(value.head) == _GETATTR:
        args = value.args
        if type(args) is not tuple or len(args) != 2 or type(args[1]) is not Text:
            return None
        steps.insert(0, args[1].value)
        if _leads_outside(steps[0]) or len(steps) > _LONGEST_PATH:
            return None
        value = args[0]
    if type(value) is not Node or value.kind is not Kind.GLOBAL:
        return "", ".".join(steps)
    module, name = python_3_name(*value.head)
    return module, ".".join((name, *steps))


def python_3_name(module: str, name: str) -> tuple[str, str]:
    """Return the Python 3 name of a global that a pickle of protocol 2 names as Python 2 did."""
    if (module, name) in NAME_MAPPING:  # torch reads the names of Python 2 in the same way
        module, name = NAME_MAPPING[module, name]
    return IMPORT_MAPPING.get(module, module), name


def misspelt(module: str, name: str) -> str:
    """Return the global of torch or ``collections`` that differs from this one by a byte that was
    changed, lost or added; "" where this may be a global itself.

    A later torch may number its functions and dtypes on. ``torch.tensor`` is another one than
    ``torch.Tensor``.
    """
    is_own = name == "OrderedDict" or name.startswith("_rebuild_") or name.endswith("Storage")
    if not is_own and module.partition(".")[0] not in ("torch", "collections"):
        return ""
    if classify(module, name) is not GlobalSafety.UNKNOWN:
        return ""
    dotted = f"{module}.{name}"
    return next((known for known in _SAFE_NAMES if _differs_in_one(dotted, known)), "")


_SAFE_NAMES = tuple(sorted(f"{module}.{name}" for module, name in SAFE))
_NO_DIGITS = str.maketrans("", "", "0123456789")


def _differs_in_one(text: str, known: str) -> bool:
    if text.lower() == known.lower() or text.translate(_NO_DIGITS) == known.translate(_NO_DIGITS):
        return False
    pairs = enumerate(zip(text, known, strict=False))
    at = next((at for at, (char, other) in pairs if char != other), min(len(text), len(known)))
    rest, wanted = text[at + 1 :], known[at + 1 :]
    return rest == wanted or text[at:] == wanted or rest == known[at:]


def can_be_allowed(module: str, name: str) -> bool:
    """Return whether a user may be told to allow a global: a class, or a function that is known to
    make only an object.

    Whoever allows ``yaml.unsafe_load`` lets every later file run code. A name that is no Python
    identifier comes from the file and must not become code.
    """
    if classify(module, name) is GlobalSafety.UNSAFE:
        return False
    module, name = python_3_name(module, name)
    if not all(
        part.isidentifier() and not iskeyword(part)
        for part in (*module.split("."), *name.split("."))
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
    """Return the line of Python after which ``torch.load(weights_only=True)`` reads these globals
    as well.

    What cannot be allowed (``can_be_allowed``) is left out; "" when nothing is left. For numpy it
    allows the types that torch finds on the way: it looks at the type of a dtype, and each dtype
    has its own.
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
    return (
        f"import {', '.join(sorted(modules))}; "
        f"torch.serialization.add_safe_globals([{', '.join(terms)}])"
    )


_DTYPE = ("numpy", "dtype")
_LONGEST = 200
"""Characters of a key that are kept: a hostile pickle nests deeper."""

_UINT32 = frozenset({"u4", "uint32"})
_WORDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}
"""First letter of the name of a dtype of numbers in a pickle -> the word before its bits."""

_OTHERS = {
    "b": "bool",
    "O": "object",
    "U": "str",
    "S": "bytes",
    "V": "void",
    "M": "datetime64",
    "m": "timedelta64",
}


def refused_arrays(tree: PickleTree) -> dict[str, str]:
    """Return the first key and the dtype of each array that accelerate and the Trainer refuse.

    Of the classes of dtypes both allow only that of uint32, which the states of numpy's generator
    need (accelerate 1.15 ``utils/other.py``, transformers 5.23 ``trainer_pt_utils.py``). torch 2.13
    asks for the class where the pickle gives a dtype its state (``_weights_only_unpickler.py``).
    """
    if _DTYPE not in tree.globals:
        return {}
    refused = {id(node): _word(node) for node in tree.calls if _is_refused(node)}
    arrays: dict[str, str] = {}
    met: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", tree.root)]
    while refused and waiting:
        key, value = waiting.pop()
        if not isinstance(value, Node | tuple) or type(value) is Text or id(value) in met:
            continue
        if id(value) in refused:
            # Not marked as met: arrays share their dtype, and each has a key of its own.
            arrays[key] = refused[id(value)]
            continue
        met.add(id(value))
        parts = [(f"{key}.{name}".strip(".")[:_LONGEST], part) for name, part in _parts(value)]
        waiting += reversed(parts)
    return arrays


def _parts(value: Node | tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value with their keys, "" for the inside of an object."""
    if isinstance(value, tuple):
        yield from ((str(at), part) for at, part in enumerate(value))
        return
    entries = value.entries or []
    for key, part in zip(entries[::2], entries[1::2], strict=True):
        yield (key.value if type(key) is Text else str(key) if isinstance(key, int) else "?"), part
    yield from ((str(at), part) for at, part in enumerate(value.items or ()))
    inside = [value.args] if value.kind in CALLS else []
    for part in (*inside, *(value.states or ())):
        # Arguments and states are tuples, whose positions are no keys of the state dict.
        yield from (("", member) for member in (part if type(part) is tuple else (part,)))


def _is_refused(node: Node) -> bool:
    """Return whether a call makes a dtype of another class than uint32's, and gives it a state."""
    makes_dtype = type(node.head) is Node and node.head.is_global(*_DTYPE)
    return makes_dtype and bool(node.states) and _name(node) not in _UINT32


def _name(node: Node) -> str:
    name = node.args[0] if type(node.args) is tuple and node.args else None
    return name.value.lstrip("<>=|") if type(name) is Text else ""


def _word(node: Node) -> str:
    name = _name(node)
    if name[:1] in _WORDS and name[1:].isdecimal():
        return f"{_WORDS[name[0]]}{8 * int(name[1:3])}"
    return _OTHERS.get(name[:1], name or "unknown")
