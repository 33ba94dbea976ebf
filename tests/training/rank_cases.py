"""Cases that two real processes work through, one after the other, and how a test starts them.

A module of tests marks each case with `case`, and asserts in it, on each rank. The test of a case
shows what a rank found wrong.
"""

import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from functools import partial
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
Case = Callable[[Path], None]
Cases = dict[str, Case]
Failures = dict[str, list[str]]
"""Name of a case -> what went wrong on rank 0 and rank 1, "" for nothing."""


def rank() -> int:
    number: int = torch.distributed.get_rank()
    return number


def turn_on_fsdp(accelerator: Any, **plugin: Any) -> None:
    """accelerate turns FSDP on for GPUs alone; on gloo the rest of its path runs all the same."""
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**plugin)
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = accelerate.DistributedType.FSDP
    accelerator.state.device = torch.device("cpu")  # FSDP takes cpu:0 for another device


def _work_through(cases: Cases, folder: Path, number: int) -> None:
    """Work through the cases as one rank; the process group stays, accelerate's state is fresh for
    each.
    """
    # As in a script: pytest has made errors of them.
    warnings.resetwarnings()
    for name, work in cases.items():
        try:
            work(folder)
            wrong = ""
        except BaseException:
            wrong = traceback.format_exc()
        (folder / f"{name}-{number}.txt").write_text(wrong)
        torch.distributed.barrier()
        reset()


def run_cases(cases: Cases, folder: Path) -> Failures:
    """Run every case once in two processes; return what went wrong on each rank."""
    assert run_ranks(2, partial(_work_through, cases, folder), patience=120) == [0, 0]
    return {
        name: [(folder / f"{name}-{number}.txt").read_text() for number in range(2)]
        for name in cases
    }


def run_python(
    *arguments: str, variables: Mapping[str, str] = MappingProxyType({}), timeout: float = 400
) -> str:
    """Run Python in a process of its own, on the CPU; return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **variables},
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout
