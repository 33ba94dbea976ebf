"""How long load_state_tolerant takes, against stock load_state; printed (``pytest -s``), never a failure."""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptfix.runtime.loading import load_state_tolerant
from tests.runtime.loading_runs import make_run, reset

LIMIT = 1.1


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    reset()
    yield
    reset()


def measure(folder: Path, *, layers: int, width: int, safe: bool, rounds: int = 5) -> float:
    """Return the ratio of the medians, ours over stock, for one model of ``4 * layers * width**2`` bytes with AdamW.

    Both are measured in turn, so that other work on the machine hits both.
    """
    run = make_run(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
    run.train(1)
    run.accelerator.save_state(str(folder), safe_serialization=safe)
    loads: tuple[Callable[[], object], ...] = (
        lambda: run.accelerator.load_state(str(folder)),
        lambda: load_state_tolerant(run.accelerator, folder),
    )
    times: tuple[list[float], list[float]] = ([], [])
    for load in loads:
        load()
    for _ in range(rounds):
        for load, taken in zip(loads, times, strict=True):
            start = time.perf_counter()
            load()
            taken.append(time.perf_counter() - start)
    return statistics.median(times[1]) / statistics.median(times[0])


@pytest.mark.slow
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_time_against_stock(tmp_path: Path, safe: bool) -> None:
    torch.manual_seed(0)
    ratio = measure(tmp_path / "c", layers=48, width=1024, safe=safe)  # 200 MB of weights, 600 MB in all
    print(
        f"\nload_state_tolerant / load_state, {'safetensors' if safe else 'bin'}: {ratio:.2f} (limit {LIMIT})"
    )
