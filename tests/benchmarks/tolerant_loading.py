"""Time of load_state_tolerant, against stock load_state."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ckptfix.training.loading.load_state import load_state_tolerant
from ckptfix.wording import count_of
from tests.training.loading_runs import make_run

LIMIT = 1.1


def measure(
    folder: Path, *, layers: int, width: int, safe: bool, custom: int, rounds: int = 9
) -> tuple[float, float]:
    """Return the ratios of the medians, ours over stock: of the time, and of the processors' time
    in this process.

    One model of ``4 * layers * width**2`` bytes with AdamW. ``custom``: registered objects of the
    script's, for whose sake the weights are copied first. Both are measured in turn, so that other
    work on the machine slows both.
    """
    run = make_run(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))), custom=custom)
    run.train(1)
    run.accelerator.save_state(str(folder), safe_serialization=safe)
    loads: tuple[Callable[[], object], ...] = (
        lambda: run.accelerator.load_state(str(folder)),
        lambda: load_state_tolerant(run.accelerator, folder),
    )
    times: list[list[tuple[float, float]]] = [[], []]
    for load in loads:
        load()
    for _ in range(rounds):
        for load, taken in zip(loads, times, strict=True):
            start = time.perf_counter(), time.process_time()
            load()
            taken.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    stock, ours = (tuple(map(statistics.median, zip(*taken, strict=True))) for taken in times)
    return ours[0] / stock[0], ours[1] / stock[1]


def load_against_stock(folder: Path) -> None:
    """Print the ratios for 600 MB, 200 of weights, in both formats."""
    for safe in (True, False):
        for custom in (0, 1):
            torch.manual_seed(0)
            kind = "safetensors" if safe else "bin"
            wall, processor = measure(
                folder / f"{kind}-{custom}", layers=48, width=1024, safe=safe, custom=custom
            )
            print(
                f"load_state_tolerant / load_state, {kind}, {count_of(custom, 'custom object')}: "
                f"{wall:.2f} of the time, {processor:.2f} of the processors' time (limit {LIMIT})"
            )
