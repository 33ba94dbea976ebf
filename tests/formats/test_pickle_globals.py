"""The classification of globals, against the installed torch and accelerate."""

import pytest

from ckptfix.formats.pickle_globals import SAFE, GlobalSafety, classify, safe_globals_line

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
types SimpleNamespace
"""


def _paths(text: str) -> list[str]:
    return [path.strip() for path in text.split(";")]


def test_safe_is_what_the_installed_torch_allows() -> None:
    from torch._weights_only_unpickler import _get_allowed_globals

    assert {f"{module}.{name}" for module, name in SAFE} == set(_get_allowed_globals())


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

    names = [("collections", "deque"), ("fractions", "Fraction"), ("x); import os; (", "y"), ("a", "b[0]")]
    line = safe_globals_line(names)
    assert line == (
        "import collections, fractions, torch; "
        "torch.serialization.add_safe_globals([collections.deque, fractions.Fraction])"
    )
    before = torch.serialization.get_safe_globals()
    try:
        exec(line)
        assert len(torch.serialization.get_safe_globals()) == len(before) + 2
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
