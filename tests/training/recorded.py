"""Recorded runs of scripts in processes that are running already: three runs of many scripts in one
pair of ranks.
"""

import gc
import os
import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState

from ckptfix.training.accelerator import patch_accelerate
from ckptfix.training.resume_proofs.recorded_runs import Settings, read_run
from ckptfix.training.resume_proofs.recorder import Recorder
from ckptfix.training.resume_proofs.resume_verdict import Comparison, compare
from tests.training.ranks import run_ranks

Script = Callable[[Path, bool], None]
"""Trains into a folder; goes on from what is there if asked to."""

INTERRUPTED, RESUMED, REFERENCE = "interrupted", "resumed", "reference"


class Stopped(BaseException):
    """The end that a recorder asks for."""


def _stop(settings: Settings) -> None:
    raise Stopped


def _begin_anew() -> None:
    """Make this process look like one that has just started: nothing seeded but torch, as python
    does.
    """
    gc.collect()
    GradientState._reset_state()
    AcceleratorState._reset_state(False)
    random.seed()
    np.random.seed()
    torch.manual_seed(67280421310721)


def record(
    name: str, train: Script, folder: Path, place: str, *, resume: bool = False, **settings: Any
) -> None:
    """Run the script once with a recorder."""
    records = folder / f"records-{name}"
    records.mkdir(exist_ok=True)
    (folder / place).mkdir(exist_ok=True)
    _begin_anew()
    recorder = Recorder(Settings(str(records), os.getpid(), **settings), _stop)
    recorder.install()
    try:
        train(folder / place, resume)
        recorder.script_ended()
    except Stopped:
        pass
    finally:
        recorder.remove()


def record_three(train: Script, folder: Path) -> None:
    """Run the script as a proof does: interrupted, resumed, uninterrupted."""
    record(INTERRUPTED, train, folder, INTERRUPTED, kill_at=1)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    step = max(one.saves[-1].number for one in read_run(folder / f"records-{INTERRUPTED}"))
    record(RESUMED, train, folder, INTERRUPTED, resume=True, base=step)
    record(REFERENCE, train, folder, REFERENCE, entry_at=step)


def comparison(folder: Path) -> Comparison:
    """Return the verdict of what was recorded in a folder."""
    runs = [read_run(folder / f"records-{name}") for name in (INTERRUPTED, REFERENCE, RESUMED)]
    return compare(*runs, files=frozenset(os.listdir(runs[0][0].saves[-1].folder)))


def record_on_ranks(
    scripts: Mapping[str, Script],
    folder: Path,
    ranks: int,
    *,
    patience: float = 300.0,
    guard: bool = False,
) -> None:
    """Record every script in one set of processes."""

    def work(rank: int) -> None:
        if guard:
            patch_accelerate()
        warnings.simplefilter("ignore")  # what libraries think of these scripts
        for name, train in scripts.items():
            (folder / name).mkdir(exist_ok=True)
            try:
                record_three(train, folder / name)
            except Exception as error:
                raise RuntimeError(f"{name}: {error!r}") from error

    statuses = run_ranks(ranks, work, patience=patience)
    assert statuses == [0] * ranks, statuses
