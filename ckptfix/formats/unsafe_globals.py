"""Names whose call can run code or touch the system, and the few that look so and do not.

Gathered from CPython's documentation, from what picklescan and fickling look for, and from the packages that accelerate
brings along. A list of names is never complete: what is not on it is unknown, not safe.
"""

import sys

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
"""Modules of the standard library with classes that people keep; the rest has no place in a checkpoint."""

_FUNCTIONS_RUN = frozenset({"accelerate", "transformers", "diffusers", "datasets", "peft", "safetensors"})
"""Packages whose functions load, save and launch. Their classes are kept in honest checkpoints."""


def _names(module: str, names: str) -> set[tuple[str, str]]:
    return {(module, name) for name in names.split()}


_UNSAFE_NAMES = frozenset(
    _names("torch", "load save compile hub jit import_ir_module _import_dotted_name classes ops from_file")
    | _names("torch.storage", "_load_from_bytes")
    | _names("torch._utils", "_import_dotted_name")
    | _names("torch.cuda.memory", "_dump_snapshot _record_memory_history")
    | _names(
        "torch._C",
        "_jit_compile import_ir_module import_ir_module_from_buffer _import_ir_module_from_package",
    )
    | _names("numpy", "f2py ctypeslib")
    | _names("pandas", "eval")
    | _names("functools", "partial partialmethod reduce")
    | _names("operator", "attrgetter itemgetter methodcaller call")
    | _names("io", "open open_code FileIO OpenWrapper")
    | _names("codecs", "open")
    | _names("argparse", "FileType")
    | _names("logging", "FileHandler config handlers basicConfig")
    | _names("weakref", "finalize")
    | _names("collections", "namedtuple")  # executes a class text
    | _names("dataclasses", "make_dataclass")
    | _names("typing", "get_type_hints")
    | _names("string", "Formatter")
)
_FILE_FUNCTIONS_TEXT = """
    load loads save savez savez_compressed savetxt loadtxt genfromtxt recfromcsv recfromtxt fromfile fromregex tofile
    memmap open_memmap DataSource read_pickle read_csv read_sql read_gpickle write_gpickle"""
_FILE_FUNCTIONS = frozenset(_FILE_FUNCTIONS_TEXT.split())
"""What numpy, pandas and networkx open files with, whatever module of theirs it is taken from."""

_HARMLESS_TEXT = """
    bool bytes bytearray complex dict enumerate float frozenset int list object range reversed set slice str tuple zip
    NotImplemented Ellipsis None True False abs len max min sum sorted round"""
_HARMLESS_BUILTINS = frozenset(_HARMLESS_TEXT.split())
_HARMLESS = frozenset(
    _names("types", "SimpleNamespace MappingProxyType")
    | _names("uuid", "UUID SafeUUID")
    | _names("zoneinfo", "ZoneInfo._unpickle")
    | _names("numpy.random._pickle", "__randomstate_ctor __generator_ctor __bit_generator_ctor")
)
_RUNNERS = frozenset(
    {"eval", "exec", "exec_", "execfile", "system", "popen", "builtins", "runstring", "execWrapper"}
)


def is_unsafe(module: str, name: str) -> bool:
    """Whether ``module.name``, by its Python 3 name, can run code or touch the system."""
    if (module, name) in _HARMLESS:
        return False
    parts = module.split(".")
    # A name may be a path of attributes ("system.__call__"), and a module an attribute of another ("torch", "os").
    path = name.split(".")
    if _is_unsafe_module(parts) or f"{module}.{path[0]}" in _UNSAFE_MODULES:
        return True
    if parts[0] in ("builtins", "__builtin__", "__builtins__"):
        is_class = path[0] in _HARMLESS_BUILTINS or path[0].endswith(("Error", "Exception", "Warning"))
        return len(path) > 1 or not is_class
    if (module.lstrip("_"), path[0]) in _UNSAFE_NAMES or (module, path[0]) in _UNSAFE_NAMES:
        return True
    if parts[0] in ("numpy", "pandas", "networkx") and not _FILE_FUNCTIONS.isdisjoint(path):
        return True
    if not looks_like_class(name) and (len(path) > 1 or parts[0] in _FUNCTIONS_RUN):
        return True  # a method, or a function of a module by way of another: pathlib's Path.unlink, random's _os.execv
    return any(
        step.lstrip("_") in _UNSAFE_MODULES or step.startswith("__") or step.lstrip("_") in _RUNNERS
        for step in path
    )


def looks_like_class(name: str) -> bool:
    """Whether every step of a name is written as classes are: ``Net``, ``Outer._Inner``."""
    return all(step.lstrip("_")[:1].isupper() for step in name.split("."))


def _is_unsafe_module(parts: list[str]) -> bool:
    if any(".".join(parts[: end + 1]) in _UNSAFE_MODULES for end in range(len(parts))):
        return True
    root = parts[0]
    return root in sys.stdlib_module_names and not {root, root.lstrip("_")} & _HARMLESS_STDLIB
