"""How long load_state_tolerant takes, against stock load_state; printed (``pytest -s``), never a
failure.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptfix.training.loading.load_state import load_state_tolerant
from tests.sampling import one_of
from tests.training.loading_runs import make_run

LIMIT = 1.1


def measure(
    folder: Path, *, layers: int, width: int, safe: bool, custom: int, rounds: int = 9
) -> tuple[float, float]:
    """Return the ratios of the medians, ours over stock: of the time, and of the processors' time
    in this process.

    One model of ``4 * layers * width**2`` bytes with AdamW. ``custom``: registered objects of the
    script's, for whose sake the weights are copied first. Both are measured in turn, so that other
    work on the machine hits both.
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "safe", one_of([True, False]), ids=lambda safe: "safetensors" if safe else "bin"
)
@pytest.mark.parametrize("custom", [0, 1], ids=["torch's objects", "an object of the script's"])
def test_time_against_stock(tmp_path: Path, safe: bool, custom: int) -> None:
    torch.manual_seed(0)
    wall, processor = measure(
        tmp_path / "c", layers=48, width=1024, safe=safe, custom=custom
    )  # 600 MB, 200 of weights
    kind = f"{'safetensors' if safe else 'bin'}, {custom} custom objects"
    print(
        f"\nload_state_tolerant / load_state, {kind}: {wall:.2f} of the time, "
        f"{processor:.2f} of the processors' time (limit {LIMIT})"
    )
