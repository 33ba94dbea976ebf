"""``python -m tests.benchmarks.resuming``: what exact resume costs a batch, a save and a file."""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.utils.data import DataLoader, TensorDataset

import ckptfix
from ckptfix.checkpoint.filenames import run_state_name

BATCHES, ROUNDS, STEP = 400, 5, 0.050
SIZE = 600 << 20


def loader_of(kind: Callable[..., Any], workers: int) -> Any:
    accelerator = kind(cpu=True)
    data = TensorDataset(torch.zeros(BATCHES * 4, 8))
    return accelerator, accelerator.prepare(DataLoader(data, batch_size=4, num_workers=workers))


def seconds_a_batch(loader: Any) -> float:
    begin = time.perf_counter()
    count = sum(1 for _ in loader)
    return (time.perf_counter() - begin) / count


def batches(workers: int) -> None:
    """Print the cost of a batch; the two are measured in turns."""
    kept = [loader_of(kind, workers) for kind in (accelerate.Accelerator, ckptfix.Accelerator)]
    stock, guarded = (
        [seconds_a_batch(loader) for _ in range(ROUNDS)] for loader in [one[1] for one in kept]
    )
    more = statistics.median(guarded) - statistics.median(stock)
    print(
        f"{workers} workers: {1000 * more:.3f} ms a batch more than stock (at most 0.5), "
        f"{100 * more / STEP:.2f} % of a step of 50 ms (at most 2)"
    )


def saves(folder: Path) -> None:
    """Print the time of a save against stock's, and the size of the run state."""
    times: dict[str, list[float]] = {"stock": [], "guarded": [], "guarded without": []}
    runs: dict[str, Any] = {}
    for name, kind in (("stock", accelerate.Accelerator), ("guarded", ckptfix.Accelerator)):
        accelerator, loader = loader_of(kind, 0)
        model = torch.nn.Linear(SIZE // 4 // 1024 // 3, 1024, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        iterator = iter(loader)
        next(iterator)
        runs[name] = (accelerator, model, optimizer, iterator)
    from ckptfix.training.resuming import run_state

    def save(name: str) -> None:
        begin = time.perf_counter()
        runs[name.partition(" ")[0]][0].save_state(str(folder / name))
        times[name].append(time.perf_counter() - begin)

    original = run_state.save
    for _ in range(ROUNDS):
        save("stock")
        save("guarded")
        run_state.save = lambda *args: None
        save("guarded without")
        run_state.save = original
    median = {name: statistics.median(values) for name, values in times.items()}
    size = (folder / "guarded" / run_state_name(0)).stat().st_size
    print(
        f"save of {SIZE >> 20} MiB: guarded {median['guarded']:.2f} s, "
        f"{median['guarded'] / median['stock']:.2f}x stock; the run state takes "
        f"{median['guarded'] / median['guarded without']:.3f}x of a guarded save without it (at "
        f"most 1.05), {size / 1000:.0f} kB (at most 1000)"
    )


def main() -> None:
    torch.set_num_threads(1)
    for workers in (0, 2):
        batches(workers)
    root = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=root) as name:
        saves(Path(name))


if __name__ == "__main__":
    main()
