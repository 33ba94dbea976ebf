"""What the globals of a pickle may do, by their names alone: nothing is imported to find out.

``SAFE`` mirrors ``torch/_weights_only_unpickler.py`` of torch 2.13; a test compares it with the installed torch. The
unsafe names were gathered from CPython's documentation and from what picklescan and fickling look for.
"""

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterable
from enum import Enum
from itertools import product

from ckptfix.formats.pickle_tree import UNRESOLVABLE


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

_UNSAFE_MODULES_TEXT = """
    os posix nt posixpath ntpath sys subprocess _posixsubprocess commands popen2 pty tty signal _signal atexit threading
    _thread multiprocessing _multiprocessing concurrent asyncio _asyncio sched
    importlib _frozen_importlib _frozen_importlib_external imp _imp runpy pkgutil zipimport site zipapp
    code codeop marshal types inspect gc ctypes _ctypes cffi mmap sysconfig _sysconfig
    _interpreters _xxsubinterpreters _testcapi _pyrepl _osx_support _aix_support
    pickle _pickle cPickle pickletools shelve dbm dill cloudpickle joblib jsonpickle
    socket _socket socketserver ssl _ssl select selectors http httplib urllib urllib2 urllib3 requests aiohttp httpx
    ftplib poplib imaplib smtplib smtpd telnetlib nntplib xmlrpc xmlrpclib webbrowser antigravity cgi wsgiref
    shutil tempfile glob fileinput filecmp linecache mailbox sqlite3 _sqlite3 syslog
    zipfile tarfile gzip bz2 lzma py_compile compileall distutils setuptools pip pkg_resources ensurepip venv
    pdb bdb cProfile _lsprof profile timeit trace tracemalloc doctest unittest test pytest pydoc idlelib lib2to3
    turtledemo pipes pexpect paramiko fabric rlcompleter cmd uuid platform getpass curses readline
    IPython ipykernel
    fickling picklescan modelscan
    numpy.f2py numpy.distutils numpy.ctypeslib numpy.testing numpy.lib.npyio numpy.lib._npyio_impl
    torch.hub torch.jit torch.package torch._dynamo torch._inductor torch._export torch.export torch.compiler torch.fx
    torch.multiprocessing torch.serialization torch.utils.cpp_extension torch.utils.model_zoo torch.utils.bottleneck
    torch.utils.collect_env torch.utils._config_module torch.utils.data.datapipes torch.distributed.rpc
    torch.distributed.elastic torch.distributed.run torch.distributed.launch torch.testing torch._ops torch.ops
    torch._classes torch.classes torch._library torch.library torch.utils.tensorboard torch.monitor torch.onnx
    torch.os torch.sys torch._weights_only_unpickler
"""
_UNSAFE_MODULES = frozenset(_UNSAFE_MODULES_TEXT.split())
"""Modules of which nothing may be called, nor of any module below them."""

_UNSAFE_NAMES = frozenset(
    _names("torch", "load save compile hub jit import_ir_module _import_dotted_name classes ops")
    | _names("torch.storage", "_load_from_bytes")
    | _names("torch._utils", "_import_dotted_name")
    | _names(
        "torch._C",
        "_jit_compile import_ir_module import_ir_module_from_buffer _import_ir_module_from_package",
    )
    | _names(
        "numpy", "load save savez savez_compressed savetxt loadtxt genfromtxt fromfile memmap f2py ctypeslib"
    )
    | _names("numpy.core.multiarray", "fromfile")
    | _names("numpy._core.multiarray", "fromfile")
    | _names("pandas", "read_pickle eval read_csv read_sql")
    | _names("functools", "partial partialmethod reduce")
    | _names("_functools", "partial reduce")
    | _names("operator", "attrgetter itemgetter methodcaller call")
    | _names("_operator", "attrgetter itemgetter methodcaller call")
    | _names("io", "open open_code FileIO")
    | _names("_io", "open open_code FileIO")
    | _names("codecs", "open")
    | _names("logging", "FileHandler config handlers")
    | _names("weakref", "finalize")
    | _names("collections", "namedtuple")  # executes a class text
    | _names("dataclasses", "make_dataclass")
    | _names("typing", "get_type_hints")
    | _names("string", "Formatter")
    | _names("sympy", "sympify parse_expr lambdify")
)
_UNSAFE_BELOW = ("logging.config", "logging.handlers", "encodings.", "ctypes.", "sympy.parsing")

_HARMLESS_TEXT = """
    bool bytes bytearray complex dict enumerate float frozenset int list object range reversed set slice str tuple zip
    NotImplemented Ellipsis None True False abs len max min sum sorted round"""
_HARMLESS_BUILTINS = frozenset(_HARMLESS_TEXT.split())
_HARMLESS = frozenset(_names("types", "SimpleNamespace MappingProxyType") | _names("uuid", "UUID SafeUUID"))
_RUNNERS = frozenset({"eval", "exec", "execfile", "system", "popen", "builtins", "runstring", "execWrapper"})


def classify(module: str, name: str) -> GlobalSafety:
    """Return how far ``module.name`` can be trusted, by its Python 3 name."""
    if (module, name) == UNRESOLVABLE:
        return GlobalSafety.UNSAFE
    if (module, name) in NAME_MAPPING:  # torch reads the names of Python 2 in the same way
        module, name = NAME_MAPPING[module, name]
    module = IMPORT_MAPPING.get(module, module)
    if (module, name) in SAFE:
        return GlobalSafety.SAFE
    if (module, name) in _SAFE_IN_RNG_STATE:
        return GlobalSafety.SAFE_IN_RNG_STATE
    return GlobalSafety.UNSAFE if _is_unsafe(module, name) else GlobalSafety.UNKNOWN


def _is_unsafe(module: str, name: str) -> bool:
    # A name may be a path of attributes ("system.__call__"), and a module an attribute of another ("torch", "os").
    if (module, name) in _HARMLESS:
        return False
    parts = module.split(".")
    if any(".".join(parts[: end + 1]) in _UNSAFE_MODULES for end in range(len(parts))):
        return True
    if parts[0] in ("builtins", "__builtin__", "__builtins__"):
        root = name.partition(".")[0]
        return "." in name or not (
            root in _HARMLESS_BUILTINS or root.endswith(("Error", "Exception", "Warning"))
        )
    path = name.split(".")
    if (module, path[0]) in _UNSAFE_NAMES or f"{module}.{path[0]}" in _UNSAFE_MODULES:
        return True
    if f"{module}.".startswith(_UNSAFE_BELOW):
        return True
    return any(step in _UNSAFE_MODULES or step.startswith("__") or step in _RUNNERS for step in path)


def safe_globals_line(names: Iterable[tuple[str, str]]) -> str:
    """Return the line of Python after which ``torch.load(weights_only=True)`` reads these globals as well.

    A name that is no Python identifier is left out: it comes from the file and must not become code.
    """
    modules, terms = {"torch"}, []
    for module, name in sorted(set(names)):
        if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
            continue
        home = module.replace("numpy.core", "numpy._core", 1) if module.startswith("numpy.core") else module
        modules.add(home)
        # numpy 2 knows these under another name than the file does, and torch compares the name in the file.
        terms.append(f"{home}.{name}" if home == module else f'({home}.{name}, "{module}.{name}")')
    return f"import {', '.join(sorted(modules))}; torch.serialization.add_safe_globals([{', '.join(terms)}])"
