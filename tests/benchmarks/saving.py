"""A guarded save with digests against one without: ``--part saves``."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep

import torch

from ckptfix.training.accelerator import Accelerator
from ckptfix.training.guard import guard_of
from tests.benchmarks.printing import show

_WIDTH = 2048
_BLOCK = 1 << 20
_SPEEDS = (0.5, 1.0, 2.0, 4.0)


def save_with_digests(folder: Path, size: int, rounds: int) -> None:
    """Print the time of a save of a model with AdamW with digests, as a ratio to that of one without.

    On the disk of ``folder``, then in memory with an fsync that takes as long as that of a disk of some speed: other
    work on a disk does not change those. ``size``: bytes of the model and its two moments.
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
    for number in range(rounds + 1):  # in turns: a machine that others use changes its speed meanwhile
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
    """Let an fsync take as long as a disk of this speed, in GB/s, takes to write the file; None: no time."""
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
