"""The classification of globals, against the installed torch and accelerate."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from ckptfix.formats.pickle_globals import (
    SAFE,
    SAFE_IN_FSDP,
    GlobalSafety,
    can_be_allowed,
    classify,
    misspelt,
    safe_globals_line,
)
from tests.formats.making import read

UNSAFE = """
os system; posix system; nt system; subprocess Popen; builtins eval; builtins exec; __builtin__ eval; __builtin__ apply;
__builtin__ execfile; builtins getattr; builtins __import__; builtins open; builtins dict.__class__; sys modules;
importlib import_module; runpy _run_code; pty spawn; socket create_connection; shutil rmtree; ctypes CDLL; pickle loads;
_pickle loads; cPickle loads; operator attrgetter; _operator methodcaller; functools partial; types CodeType;
types FunctionType; cloudpickle.cloudpickle _make_function; torch load; torch hub.load; torch.hub load; torch.jit load;
torch.serialization load; torch.storage _load_from_bytes; numpy load; numpy.testing._private.utils runstring;
numpy.f2py.crackfortran getlincoef; webbrowser open; code InteractiveInterpreter.runcode; pdb run; timeit timeit;
cProfile run; bdb Bdb; pip main; pydoc locate; asyncio run; multiprocessing.util spawnv_passfds; urllib.request urlopen;
urllib urlopen; httplib HTTPConnection; requests.api get; os system.__call__; torch os.system; torch.utils.data sys;
collections OrderedDict.__init__.__globals__; commands getoutput; ? ?; torch._utils _import_dotted_name;
numpy.core.multiarray fromfile; logging FileHandler; uuid _get_command_stdout; builtins ValueError.__init__
"""
UNKNOWN = """
mypackage.models Net; omegaconf.listconfig ListConfig; numpy.core.multiarray scalar; copyreg _reconstructor;
builtins dict; builtins ValueError; torch.nn.modules.linear Linear; argparse Namespace; pkg Outer.Inner;
torch.optim.lr_scheduler LambdaLR; accelerate.data_loader SeedableRandomSampler; datetime datetime; uuid UUID;
torch.utils.data.sampler RandomSampler; deepspeed.runtime.fp16.loss_scaler LossScaler; pathlib PosixPath;
types SimpleNamespace; torch._dynamo.decorators _DimRange; torch.nested._internal.nested_tensor _rebuild_njt
"""


def _paths(text: str) -> list[str]:
    return [path.strip() for path in text.split(";")]


def test_safe_is_what_the_installed_torch_allows() -> None:
    from torch._weights_only_unpickler import _get_allowed_globals

    assert {f"{module}.{name}" for module, name in SAFE} == set(_get_allowed_globals())


@pytest.mark.parametrize("module", ["torch", "torch._utils", "torch.storage", "torch.nn.parameter"])
def test_no_name_of_the_installed_torch_is_misspelt(module: str) -> None:
    names = dir(import_module(module))
    assert len(names) > 20
    assert not [name for name in names if misspelt(module, name)]


@pytest.mark.parametrize(
    ("module", "name", "meant"),
    [
        ("torch._utils", "_rebuid_tensor_v2", "torch._utils._rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensoor_v2", "torch._utils._rebuild_tensor_v2"),
        ("torch._utjls", "_rebuild_tensor_v2", "torch._utils._rebuild_tensor_v2"),
        ("orch._utils", "_rebuild_tensor_v2", "torch._utils._rebuild_tensor_v2"),
        ("torch", "loatStorage", "torch.FloatStorage"),
        ("collections", "OrderedDct", "collections.OrderedDict"),
        ("torch._utils", "_rebuild_tensor_v4", ""),
        ("torch", "int9", ""),
        ("torch", "tensor", ""),
        ("torchx", "Tensor", ""),
        ("collections", "UserDict", ""),
    ],
)
def test_a_global_that_a_byte_turned_into_another_is_misspelt(
    module: str, name: str, meant: str
) -> None:
    assert misspelt(module, name) == meant


def test_what_fsdp_adds_is_what_the_installed_torch_adds() -> None:
    import torch.distributed.tensor  # noqa: F401
    from torch.serialization import get_safe_globals

    added = {(one.__module__, one.__name__) for one in get_safe_globals() if isinstance(one, type)}
    assert added >= SAFE_IN_FSDP


def test_a_jagged_nested_tensor_is_no_unsafe_pickle(tmp_path: Path) -> None:
    """torch reads it with weights_only where a script imported torch._dynamo."""
    import torch._dynamo

    jagged = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged)
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(3), "jagged": jagged}, path)
    assert torch.load(path, weights_only=True)["jagged"].shape[0] == 2
    names = read(path).tree.globals
    assert ("torch._dynamo.decorators", "_DimRange") in names
    assert not [pair for pair in names if classify(*pair) is GlobalSafety.UNSAFE]


def test_rng_state_globals_are_what_the_installed_accelerate_allows() -> None:
    from accelerate.utils.other import TORCH_SAFE_GLOBALS

    for value in TORCH_SAFE_GLOBALS:
        assert classify(value.__module__, value.__qualname__) in (
            GlobalSafety.SAFE,
            GlobalSafety.SAFE_IN_RNG_STATE,
        )


@pytest.mark.parametrize("path", _paths(UNSAFE))
def test_what_can_run_code_is_unsafe(path: str) -> None:
    assert classify(*path.split()) is GlobalSafety.UNSAFE


@pytest.mark.parametrize("path", _paths(UNKNOWN))
def test_a_class_of_anybodys_is_unknown(path: str) -> None:
    assert classify(*path.split()) is GlobalSafety.UNKNOWN


def test_python_2_names_count_as_their_python_3_names() -> None:
    assert classify("__builtin__", "set") is GlobalSafety.SAFE
    assert classify("numpy.core.multiarray", "_reconstruct") is GlobalSafety.SAFE_IN_RNG_STATE


def test_the_line_runs_and_holds_no_code_of_the_file() -> None:
    import torch

    names = [
        ("collections", "deque"),
        ("fractions", "Fraction"),
        ("x); import os; (", "y"),
        ("a", "b[0]"),
    ]
    line = safe_globals_line(names)
    assert (
        line == "import collections, fractions, torch; "
        "torch.serialization.add_safe_globals([collections.deque, fractions.Fraction])"
    )
    before = torch.serialization.get_safe_globals()
    try:
        exec(line)
        assert len(torch.serialization.get_safe_globals()) == len(before) + 2
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


RUNS_CODE = """
yaml unsafe_load; yaml load; yaml full_load; yaml.constructor construct_object; yaml UnsafeLoader; psutil Popen;
random _os.execv; random _os.unlink; random _os.spawnlp; random _os; collections _sys; argparse FileType; _pyio open;
pathlib Path.unlink; pathlib Path.write_text; pathlib Path.open; torch.distributed.launcher.api launch_agent;
accelerate.launchers notebook_launcher; accelerate.commands.launch launch_command; accelerate.utils load;
torch.utils.benchmark Timer; torch.cuda os.system; huggingface_hub snapshot_download; numpy.lib._npyio_impl load;
numpy.lib.format open_memmap; torch from_file; torch.storage UntypedStorage.from_file; sympy sin; jinja2 Template;
numpy.random __reduce__; numpy.f2py __pyx_unpickle_X; mypackage __pyx_unpickle_X; numpy __pyx_unpickle_X.load;
tokenize open; fcntl ioctl; mypackage nested.function; mypackage Net.load; logging basicConfig; _io FileIO
"""
A_CLASS = """
pkg Outer._Inner; fractions Fraction; collections deque; _collections deque; datetime timedelta; decimal Decimal;
zoneinfo ZoneInfo._unpickle; numpy.random._pickle __generator_ctor; __main__ Net; numpy.random __RandomState_ctor;
numpy.random.bit_generator __pyx_unpickle_SeedSequence; pandas._libs.internals __pyx_unpickle_BlockManager;
transformers.training_args TrainingArguments; mypackage make_net; collections abc; re _compile;
accelerate.utils.dataclasses DistributedType; _pydatetime date
"""


@pytest.mark.parametrize("path", _paths(RUNS_CODE))
def test_what_runs_code_by_another_name_is_unsafe_and_never_recommended(path: str) -> None:
    assert classify(*path.split()) is GlobalSafety.UNSAFE
    assert safe_globals_line([tuple(path.split())]) == ""  # type: ignore[list-item]


@pytest.mark.parametrize("path", _paths(A_CLASS))
def test_a_class_of_a_checkpoint_is_no_false_alarm(path: str) -> None:
    assert classify(*path.split()) is GlobalSafety.UNKNOWN


def test_only_classes_are_recommended() -> None:
    assert (
        safe_globals_line([("mypackage", "make_net"), ("mypackage", "Net")])
        == "import mypackage, torch; torch.serialization.add_safe_globals([mypackage.Net])"
    )
    assert can_be_allowed("mypackage", "Net")
    assert not can_be_allowed("mypackage", "make_net")
    assert not can_be_allowed("yaml", "UnsafeLoader")


OBJECTS = """
np.ones(3) | np.arange(3).astype('i4') | np.float64(1) | np.float32(2) | np.bool_(True) | np.dtype('f2')
np.array(['a']) | np.array([b'a']) | np.array('2020-01-01', dtype='M8[D]') | np.array([1j])
np.zeros(2, dtype=[('a', 'i4')]) | np.float32 | {'a': np.ones(2), 'b': np.int64(1), 'c': Fraction(1, 3)}
np.array([frozenset([1])], dtype=object) | np.random.get_state() | collections.defaultdict(list)
frozenset([1]) | range(3) | slice(1, 2) | Fraction(1, 3) | decimal.Decimal('1.5')
datetime.datetime(2020, 1, 1) | datetime.timedelta(1) | argparse.Namespace(a=1) | pathlib.PosixPath('/x')
uuid.UUID(int=5) | types.SimpleNamespace(a=1) | torch.nn.Linear(2, 2) | (dict, list, int)
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1) | re.compile('x') | fractions.Fraction
torch.nn.Sequential(torch.nn.ReLU())
"""
IMPORTS = (
    "import argparse, collections, datetime, decimal, fractions, pathlib, re, types, uuid; import "
    "numpy as np, torch; from fractions import Fraction"
)


def _in_a_child(code: str, *arguments: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout + result.stderr


@pytest.mark.slow
def test_the_line_is_enough_to_load_real_objects(tmp_path: Path) -> None:
    """Each object is saved, its line run and the file loaded, all with the line of that object
    alone.
    """
    expressions = [text.strip() for text in OBJECTS.replace("\n", "|").split("|") if text.strip()]
    save = "\n".join(
        f"torch.save({text}, sys.argv[1] + '/{number}.pt')"
        for number, text in enumerate(expressions)
    )
    assert _in_a_child(f"{IMPORTS}; import sys\n{save}", tmp_path) == ""
    load = ["import sys, torch"]
    for number, text in enumerate(expressions):
        tree = read(tmp_path / f"{number}.pt").tree
        assert tree.refused_opcodes == (), text
        names = [pair for pair in tree.globals if classify(*pair) is not GlobalSafety.SAFE]
        assert names, text
        assert all(can_be_allowed(*pair) for pair in names), (text, names)
        load += [
            "torch.serialization.clear_safe_globals()",
            (
                f"try: torch.load(sys.argv[1] + '/{number}.pt', weights_only=True); "
                f"sys.exit(f'{number}: needs no line')"
            ),
            "except Exception: pass",
            (
                f"try:\n  {safe_globals_line(names)}\n  torch.load(sys.argv[1] + '/{number}.pt', "
                "weights_only=True)"
            ),
            f"except Exception as error: print({text!r}, error)",
        ]
    assert _in_a_child("\n".join(load), tmp_path) == ""


def test_numpy_before_2_and_python_2_names() -> None:
    line = safe_globals_line([("numpy.core.multiarray", "scalar")])
    assert '(numpy._core.multiarray.scalar, "numpy.core.multiarray.scalar")' in line
    assert "numpy.dtype," in line
    assert "numpy.dtypes.__all__" in line
    assert "__builtin__" not in safe_globals_line(
        [("__builtin__", "frozenset"), ("__builtin__", "xrange")]
    )
    assert "builtins.range" in safe_globals_line([("__builtin__", "xrange")])
