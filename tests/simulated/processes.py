"""Running code in a process of its own that has simulated devices."""

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.simulated import building
from tests.simulated.simulator import INHERITED, MEMORY, ROOT, VARIABLE, Pair

Faults = Mapping[Pair, str | Mapping[str, Any]]
"""By ordered pair: the kind, or the arguments of `Simulator.fault` with `kind` among them."""

NOT_INHERITED = ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING")
"""Environment variables that would change which devices a program sees or uses."""

_SEED = """
import random
import torch
random.seed(0)
torch.manual_seed(0)
"""

_CALL = """
import importlib.util
import sys
spec = importlib.util.spec_from_file_location({module!r}, {path!r})
module = importlib.util.module_from_spec(spec)
sys.modules[{module!r}] = module
spec.loader.exec_module(module)
module.{name}()
"""


def variables(
    count: int,
    *,
    faults: Faults | None = None,
    accelerate: Path | None = None,
    memory: int = MEMORY,
) -> dict[str, str]:
    """Return the environment of a Python process with `count` simulated devices; builds the library
    if need be.

    `accelerate`: a folder with another version of it, to be imported in place of the installed one.
    """
    told = {
        "library": str(building.built()), "devices": count, "memory": memory, "no_peer_access": [],
        "keeps_freed": False,
        "faults": [
            [*pair, {"kind": fault} if isinstance(fault, str) else dict(fault)]
            for pair, fault in (faults or {}).items()
        ],
    }  # fmt: skip
    # Not the path that the test itself was started with: it may lead to another version of what is
    # tested.
    folders = [str(folder) for folder in (accelerate, INHERITED, ROOT) if folder is not None]
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    # All simulations have the same hardware: what a probe remembered of one must not be believed in
    # another.
    cache = Path(tempfile.gettempdir()) / f"ckptfix-simulated-cache-{os.getuid()}-{os.getpid()}"
    return {
        "XDG_CACHE_HOME": str(cache),
        **inherited,
        VARIABLE: json.dumps(told),
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",  # sums in one order, and two cores for two processes
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def start_simulated(
    arguments: Sequence[str],
    count: int = 3,
    *,
    faults: Faults | None = None,
    accelerate: Path | None = None,
    memory: int = MEMORY,
    timeout: float = 240.0,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments (`["-m", "ckptfix", "doctor"]`); return how it ended,
    whatever that was.

    `timeout` in seconds; AssertionError, with what it wrote until then, when it takes longer.
    """
    made = variables(count, faults=faults, accelerate=accelerate, memory=memory)
    done, in_time = run_to_end(
        [sys.executable, *arguments], {**made, **(environment or {})}, cwd, timeout
    )
    assert in_time, (
        f"simulated process: no end after {timeout:g} s; it "
        f"wrote:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    )
    return done


def run_to_end(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path, timeout: float
) -> tuple[subprocess.CompletedProcess[str], bool]:
    """Run a command; return how it ended, and whether by itself and within `timeout` seconds.

    None of its children is left over, though a simulated hang never ends: all are in one group, and
    that is killed.
    """
    process = subprocess.Popen(
        command, env=environment, cwd=cwd, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    in_time = True
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        in_time = False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if not in_time:
        stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr), in_time


def run_simulated(
    work: str | Callable[[], object] | Sequence[str],
    count: int = 3,
    *,
    faults: Faults | None = None,
    accelerate: Path | None = None,
    memory: int = MEMORY,
    timeout: float = 240.0,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> str:
    """Run code, a function of a module without arguments, or Python with arguments; return what it
    printed.

    The process has `count` simulated devices, the faults, and fixed seeds. AssertionError, with
    what it wrote, when it ends with another status than 0.
    """
    done = start_simulated(
        _arguments(work),
        count,
        faults=faults,
        accelerate=accelerate,
        memory=memory,
        timeout=timeout,
        environment=environment,
        cwd=cwd,
    )
    assert done.returncode == 0, (
        f"simulated process: status {done.returncode}\n--- stdout\n{done.stdout[-3000:]}\n"
        f"--- stderr\n{done.stderr[-7000:]}"
    )
    return done.stdout


def _arguments(work: str | Callable[[], object] | Sequence[str]) -> list[str]:
    if isinstance(work, str):
        return ["-c", _SEED + inspect.cleandoc(work)]
    if callable(work):
        path = str(Path(inspect.getfile(work)).resolve())
        call = _CALL.format(module=work.__module__, path=path, name=work.__qualname__)
        return ["-c", _SEED + call]
    return list(work)
