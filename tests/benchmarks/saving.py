"""A guarded save against one of stock accelerate, and with digests against one without: ``--part
saves``.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any

import accelerate
import torch

from ckptfix.training.accelerator import Accelerator
from ckptfix.training.guard import guard_of
from tests.benchmarks.printing import show
from tests.training.ranks import run_ranks

_WIDTH = 2048
_BLOCK = 1 << 20
_SPEEDS = (0.5, 1.0, 2.0, 4.0)
_SIZES = {8: 25, 3072: 6, 6528: 5, 9216: 5}
"""Width of a layer -> how many saves: of 59 kB, 113 MB, 511 MB and 1 GB with the moments of AdamW.
"""

_TINY_MOST, _LARGE_MOST = 0.030, 1.1
"""Seconds that a save of the tiny model may take longer than stock's, and times that a larger one
may take.
"""


def save_against_stock(folder: Path) -> None:
    """Print how much longer a guarded save of two processes takes than one of stock accelerate,
    fsync apart.

    The processes are forked, so a process that has computed nothing forks them.
    """
    subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.saving", str(folder / "stock")], check=True
    )


def _on_two_processes(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    widths = [width for width in _SIZES if _fits(folder, width)]
    if len(widths) < len(_SIZES):
        print(
            f"saves of 2 processes: {len(_SIZES) - len(widths)} sizes left out, memory or disk is "
            "too small"
        )

    def work(rank: int) -> None:
        for width in widths:
            _in_turns(folder, rank, width, _SIZES[width])

    assert run_ranks(2, work, patience=300.0) == [0, 0]


def _fits(folder: Path, width: int) -> bool:
    """Return whether the memory holds four of these models with gradients and moments, and all that
    is written.
    """
    nbytes = 16 * width**2
    lines = Path("/proc/meminfo").read_text().splitlines()
    memory = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return memory > 6 * nbytes and shutil.disk_usage(folder).free > 2 * nbytes


def _in_turns(folder: Path, rank: int, width: int, saves: int) -> None:
    """Save with both in turns: other work on the machine then slows both."""
    kinds: dict[str, Callable[..., Any]] = {
        "stock": accelerate.Accelerator,
        "guarded": Accelerator,
    }
    accelerators = {name: kind(cpu=True) for name, kind in kinds.items()}
    for accelerator in accelerators.values():
        layers = torch.nn.Linear(width, width)
        model, optimizer = accelerator.prepare(layers, torch.optim.AdamW(layers.parameters()))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    seconds: dict[str, list[float]] = {name: [] for name in (*kinds, "fsync")}
    for number in range(saves + 1):
        for name, accelerator in accelerators.items():
            target = folder / f"{name}-{number}"
            if rank == 0:
                # The disk must not be at the last save of stock, which nobody has made durable.
                os.sync()
            with _timed_fsync() as fsync:
                accelerator.wait_for_everyone()
                begin = perf_counter()
                accelerator.save_state(str(target))
                accelerator.wait_for_everyone()
                passed = perf_counter() - begin
            if number:  # the first one imports and connects
                seconds[name].append(passed - sum(fsync))
                seconds["fsync"] += [sum(fsync)] if name == "guarded" else []
            nbytes = sum(file.stat().st_size for file in target.iterdir() if file.is_file())
            accelerator.wait_for_everyone()
            if rank == 0:
                shutil.rmtree(target)
    if rank:
        return
    stock, guarded, fsync_time = (median(seconds[name]) for name in ("stock", "guarded", "fsync"))
    more, ratio = guarded - stock, guarded / stock
    is_tiny = nbytes < 1e6
    holds = more <= _TINY_MOST if is_tiny else ratio <= _LARGE_MOST
    size = f"{nbytes / 1e3:.0f} kB" if is_tiny else f"{nbytes / 1e6:.0f} MB"
    label = f"save of 2 processes, {size}, against stock, fsync apart"
    figure = (
        f"{1000 * stock:.0f} ms + {1000 * more:.0f} ms ({ratio:.2f}x), and {1000 * fsync_time:.0f} "
        "ms of fsync"
    )
    show(
        label, figure, f"<= {_TINY_MOST * 1000:.0f} ms" if is_tiny else f"<= {_LARGE_MOST}x", holds
    )


@contextmanager
def _timed_fsync() -> Iterator[list[float]]:
    """Yield the seconds of each fsync of this process."""
    real, seconds = os.fsync, []

    def fsync(fd: int) -> None:
        begin = perf_counter()
        real(fd)
        seconds.append(perf_counter() - begin)

    os.fsync = fsync  # type: ignore[assignment]
    try:
        yield seconds
    finally:
        os.fsync = real


def save_with_digests(folder: Path, size: int, rounds: int) -> None:
    """Print the time of a save of a model with AdamW with digests, as a ratio to that of one
    without.

    On the disk of ``folder``, then in memory with an fsync that takes as long as that of a disk of
    some speed: other work on a disk does not change those. ``size``: bytes of the model and its two
    moments.
    """
    accelerator = Accelerator(cpu=True)
    layers = max(1, size // 12 // _WIDTH**2)
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    gibibytes = f"{size / (1 << 30):.1f} GiB"
    print(f"sha256 of memory by one core: {_hashing() / 1e9:.2f} GB/s")
    _compare(accelerator, folder / "c", rounds, f"save {gibibytes} with digests, on this disk")
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 3 * size:
        print("saves in memory: left out, as /dev/shm is too small")
        return
    place = memory / f"{folder.name}-saves"
    for speed in (*_SPEEDS, None):
        with _disk(speed):
            name = "in memory" if speed is None else f"on a disk of {speed} GB/s"
            _compare(accelerator, place / "c", rounds, f"save {gibibytes} with digests, {name}")
    shutil.rmtree(place)


def _compare(accelerator: Accelerator, target: Path, rounds: int, label: str) -> None:
    settings = guard_of(accelerator).settings
    seconds: dict[bool, list[float]] = {False: [], True: []}
    used: dict[bool, list[float]] = {False: [], True: []}
    # In turns: a machine that others use changes its speed meanwhile.
    for number in range(rounds + 1):
        for settings.tensor_digests in (False, True):
            shutil.rmtree(target, ignore_errors=True)
            begin, cpu = perf_counter(), process_time()
            accelerator.save_state(str(target))
            if number:  # the first of each finds memory that was never used
                seconds[settings.tensor_digests].append(perf_counter() - begin)
                used[settings.tensor_digests].append(process_time() - cpu)
    shutil.rmtree(target)
    ratios = [one / other for one, other in zip(seconds[True], seconds[False], strict=True)]
    ratio = median(ratios)
    figure = (
        f"{ratio:.2f}x of {median(seconds[False]):.2f} s ({min(ratios):.2f} to {max(ratios):.2f}), "
        f"{median(used[True]) - median(used[False]):.2f} s more of processor time"
    )
    show(label, figure, "<= 1.05x", ratio <= 1.05)


@contextmanager
def _disk(speed: float | None) -> Iterator[None]:
    """Let an fsync take as long as a disk of this speed, in GB/s, takes to write the file; None: no
    time.
    """
    real = os.fsync

    def fsync(fd: int) -> None:
        if speed is not None:
            sleep(os.fstat(fd).st_size / speed / 1e9)

    os.fsync = fsync  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = real


def _hashing() -> float:
    block, digest, begin = os.urandom(_BLOCK), sha256(), process_time()
    for _ in range(256):
        digest.update(block)
    return 256 * _BLOCK / (process_time() - begin)


if __name__ == "__main__":
    _on_two_processes(Path(sys.argv[1]))
