"""Cases that two real processes work through, and how a test starts them and reads what they saw.

A module of cases marks each with `case`. Every case writes what it saw into FOLDER/CASE-RANK.json;
the test judges it.
"""

import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import accelerate
import torch
from accelerate.state import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin

from tests.training.loading_runs import reset
from tests.training.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
Seen = dict[str, Any]
Ranks = dict[str, list[Seen]]
"""Name of a case -> what rank 0 and rank 1 saw."""

Case = Callable[[Path], Seen]

_CASES: dict[str, dict[str, Case]] = {}
"""Name of a module -> its cases."""


def case(work: Case) -> Case:
    _CASES.setdefault(work.__module__, {})[work.__name__] = work
    return work


def rank() -> int:
    number: int = torch.distributed.get_rank()
    return number


def turn_on_fsdp(accelerator: Any, **plugin: Any) -> None:
    """accelerate turns FSDP on for GPUs alone; on gloo the rest of its path runs all the same."""
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**plugin)
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = accelerate.DistributedType.FSDP
    accelerator.state.device = torch.device("cpu")  # FSDP takes cpu:0 for another device


def _work_through(cases: Mapping[str, Case], folder: Path, _: int) -> None:
    """Work through the cases as one rank; the process group stays, accelerate's state is fresh for
    each.
    """
    # As in a script: pytest has made errors of them.
    warnings.resetwarnings()
    for name, work in cases.items():
        try:
            seen = work(folder)
        except Exception:
            seen = {"crash": traceback.format_exc()}
        (folder / f"{name}-{rank()}.json").write_text(json.dumps(seen))
        torch.distributed.barrier()
        reset()


def run_python(*arguments: str, variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run Python in a process of its own, on the CPU; return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **variables},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def run_cases(module: str, folder: Path) -> Ranks:
    """Run every case of a module once in two processes; return what each rank saw. None may
    crash.
    """
    import_module(module)
    statuses = run_ranks(2, partial(_work_through, _CASES[module], folder), patience=120)
    found: Ranks = {}
    for path in sorted(folder.glob("*-[01].json")):
        found.setdefault(path.stem[:-2], []).append(json.loads(path.read_text()))
    for name, ranks in found.items():
        assert len(ranks) == 2, name
        for seen in ranks:
            assert "crash" not in seen, seen["crash"]
    assert statuses == [0, 0]
    assert found.keys() == _CASES[module].keys()
    return found
