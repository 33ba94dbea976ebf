"""A seal by one process on one core and by two on two, against what disk and cores themselves do:
``--part ranks``.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from operator import truediv
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from ckptfix.storage.executor import plan_shares
from tests.benchmarks.digesting import _write_numbers
from tests.benchmarks.making import drop_from_cache
from tests.benchmarks.printing import show
from tests.storage.listings import long_files, saved_by_ranks

_BLOCK = 1 << 20
_SEAL = """
import json, os, sys, time
rank, count, port, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
from ckptfix.storage.executor import THREADS
from ckptfix.storage.launched_ranks import LaunchedRanks
from ckptfix.training.rendezvous import Launched, join
from ckptfix.verification.seal import seal
executor = THREADS
if count > 1:
    place = Launched(rank, count, rank, count, "127.0.0.1", port, "")
    executor = LaunchedRanks(rank, count, join(place, ""))
begin, used = time.perf_counter(), time.process_time()
with executor.as_one():
    receipt = seal(path, executor=executor)
print(json.dumps([time.perf_counter() - begin, time.process_time() - used, receipt.written]))
sys.stdout.flush()
if count > 1:
    executor.finish(0)
os._exit(0)
"""


def share(folder: Path, size: int, rounds: int) -> None:
    """Print the efficiency of two processes, start-up apart, and the largest share of 64 and 1,024
    processes.
    """
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    for number in range(4):
        _write_numbers(
            (
                checkpoint / f"model_{number}.safetensors"
                if number
                else checkpoint / "model.safetensors"
            ),
            size // 4,
        )
    for cold in (False, True):
        ratios: list[float] = []
        walls: dict[int, list[float]] = {1: [], 2: []}
        plain: dict[int, list[float]] = {1: [], 2: []}
        of_cores: list[float] = []
        for number in range(
            rounds
        ):  # ratios of neighbours: a machine that others use changes its speed meanwhile
            used: dict[int, float] = {}
            own: dict[int, float] = {}
            for count in (1, 2):
                seconds, own[count] = _read_and_hashed(checkpoint, count, cold=cold)
                plain[count].append(seconds)
                seconds, used[count] = _sealed(checkpoint, count, 29500 + number, cold=cold)
                walls[count].append(seconds)
            ratios.append(walls[1][-1] / walls[2][-1] / (plain[1][-1] / plain[2][-1]))
            of_cores.append(used[1] / used[2] / (own[1] / own[2]))
        state = "cold" if cold else "warm"
        faster, by_itself = (median(map(truediv, one[1], one[2])) for one in (walls, plain))
        figure = (
            f"{median(ratios):.2f} of what disk and cores do ({_all(ratios)}); wall clock "
            f"{median(walls[1]):.2f} s -> {median(walls[2]):.2f} s, {faster:.2f}x; plain reads, "
            f"hashed twice: {median(plain[1]):.2f} s -> {median(plain[2]):.2f} s, "
            f"{by_itself:.2f}x"
        )
        label = f"seal of {size / (1 << 30):.1f} GiB, 1 -> 2 processes, {state}"
        show(label, figure, ">= 0.9", median(ratios) >= 0.9)
        figure = (
            f"{median(of_cores):.2f} of the same by CPU seconds of the slower process "
            f"({_all(of_cores)})"
        )
        show(
            "the same, as on a machine that nobody else uses",
            figure,
            ">= 0.9",
            median(of_cores) >= 0.9,
        )
    shutil.rmtree(checkpoint)
    for name, units in (
        ("saved by 1,024 ranks", saved_by_ranks()),
        ("200 files of 50 GB, by range", long_files(part=10**9)),
        ("one file of 10 TB, by range", long_files(10**13, 1, part=10**9)),
    ):
        total = sum(unit.size for unit in units)
        for count in (64, 1024):
            begin = perf_counter()
            shares = plan_shares(units, count)
            largest = (
                max(sum(units[number].size for number in share) for share in shares) * count / total
            )
            figure = f"{largest:.3f} of the mean, planned in {perf_counter() - begin:.1f} s"
            show(
                f"{total / 1e12:.1f} TB to hash, {name}, {count} processes",
                figure,
                "<= 1.05",
                largest <= 1.05,
            )


def _all(ratios: list[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def _sealed(checkpoint: Path, count: int, port: int, *, cold: bool) -> tuple[float, float]:
    """Return the seconds of the slowest process, and its CPU seconds, start-up apart."""
    shutil.rmtree(checkpoint / ".ckptfix", ignore_errors=True)
    if cold:
        for path in checkpoint.iterdir():
            drop_from_cache(path)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _SEAL, str(rank), str(count), str(port), str(checkpoint)],
            stdout=subprocess.PIPE,
        )
        for rank in range(count)
    ]
    answers = [json.loads(process.communicate()[0]) for process in started]
    assert all(written for _, _, written in answers)
    return max(seconds for seconds, _, _ in answers), max(used for _, used, _ in answers)


def _read_and_hash(core: int, paths: Sequence[Path], answers: "SimpleQueue[float]") -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})
    begin = process_time()
    block = bytearray(_BLOCK)
    for path in paths:
        digests = hashlib.sha256(), hashlib.sha256()  # of the file, and of its tensors
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(block):
                for digest in digests:
                    digest.update(memoryview(block)[:count])
    answers.put(process_time() - begin)


def _read_and_hashed(checkpoint: Path, count: int, *, cold: bool) -> tuple[float, float]:
    """Return the seconds that processes take to read and hash the files together, and the CPU
    seconds of the slowest.

    Nothing of ours is in them.
    """
    paths = sorted(checkpoint.glob("*.safetensors"))
    if cold:
        drop_from_cache(*paths)
    context = get_context("fork")
    answers: SimpleQueue[float] = context.SimpleQueue()
    processes = [
        context.Process(target=_read_and_hash, args=(core, paths[core::count], answers))
        for core in range(count)
    ]
    begin = perf_counter()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return perf_counter() - begin, max(answers.get() for _ in processes)
