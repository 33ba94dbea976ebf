"""Hashing every file and tensor, against what the cores can hash and what the disk or the page
cache can give.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter

from tests.benchmarks.making import drop_from_cache, measure, names
from tests.benchmarks.printing import show

_BLOCK = 1 << 20


def digest(folder: Path, size: int, rounds: int) -> None:
    """Print the speed of ``seal``'s hashing as a ratio to the lower of two ceilings, warm and cold,
    and its memory.

    The ceilings: as many threads as there are cores, each hashing the file with ``hashlib``; and
    two threads that only read it, as every byte is hashed twice, for its file and for its tensor.
    Beside it, what the same threads hash of one block of memory, without reading anything.
    """
    path = folder / "model.safetensors"
    _write_numbers(path, size)
    threads = len(os.sched_getaffinity(0))
    for cold in (False, True):
        whole: list[float] = []
        of_memory: list[float] = []
        with_values: list[float] = []
        speeds: list[float] = []
        # Ratios of neighbours: a machine that others use changes its speed meanwhile.
        for _ in range(rounds):
            _prepare(path, cold)
            reading = 2 * size / _all(2, lambda: _read(path, size))
            _prepare(path, False)
            hashing = threads * size / _all(threads, lambda: _hash_file(path))
            _prepare(path, cold)
            ours = 2 * size / _measured(folder, scan=False)["seconds"]
            memory = threads * size / _all(threads, lambda: _hash_memory(size))
            _prepare(path, cold)
            scanning = 2 * size / _measured(folder, scan=True)["seconds"]
            speeds.append(ours)
            whole.append(ours / min(hashing, reading))
            of_memory.append(ours / memory)
            with_values.append(scanning / ours)
        state = "cold" if cold else "warm"
        ratio, speed = median(whole), median(speeds) / 1e9
        label = f"hash {size / (1 << 30):.1f} GiB, files and tensors, {state}"
        figure = (
            f"{ratio:.2f}x of {threads} threads of sha256, or of plain reads ({speed:.2f} GB/s)"
        )
        show(label, figure, ">= 0.9x", ratio >= 0.9)
        if not cold:
            ratio = median(of_memory)
            show("the same, against sha256 of memory", f"{ratio:.2f}x", ">= 0.8x", ratio >= 0.8)
        ratio = median(with_values)
        show(
            f"the same with --data, {state}", f"{ratio:.2f}x of its speed", ">= 0.8x", ratio >= 0.8
        )
    used = _measured(folder, scan=True)
    extra = used["peak"] - used["start"]
    show("hash, memory above start-up", f"{extra / 1e6:.1f} MB", "<= 32 MB", extra <= 32e6)
    path.unlink()


def _write_numbers(path: Path, size: int) -> None:
    """Write bf16 tensors of ``size`` bytes together, every number finite, as those of a sound model
    are.
    """
    keys = names("")
    each = size // len(keys) // 2 * 2
    header = {
        key: {
            "dtype": "BF16",
            "shape": [each // 2],
            "data_offsets": [number * each, (number + 1) * each],
        }
        for number, key in enumerate(keys)
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    block = bytearray(os.urandom(8 << 20))
    # Small exponents.
    block[1::2] = block[1::2].translate(bytes(byte & 0x3F for byte in range(256)))
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        left = each * len(keys)
        while left:
            left -= file.write(block[: min(left, len(block))])
        file.flush()
        os.fsync(file.fileno())


def _measured(folder: Path, *, scan: bool) -> dict[str, float]:
    return measure(
        "from pathlib import Path\nimport ckptfix.tensors.scanning\nfrom ckptfix.tensors.hashing "
        "import FileJob, TensorJob, hash_all\nfrom ckptfix.tensors.opening import "
        f"open_checkpoint\npath = Path({str(folder)!r}) / 'model.safetensors'\ntensors = "
        "open_checkpoint(path).weights[0].tensors\njobs = [FileJob(path, path.stat().st_size), "
        f"*(TensorJob(one, {scan}) for one in tensors)]",
        "assert all(one.digest for one in hash_all(jobs))",
    )


def _hash_file(path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_BLOCK))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])


def _hash_memory(size: int) -> None:
    block, digest = os.urandom(_BLOCK), hashlib.sha256()
    for _ in range(size // _BLOCK):
        digest.update(block)


def _read(path: Path, size: int) -> None:
    fd, buffer = os.open(path, os.O_RDONLY), memoryview(bytearray(_BLOCK))
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    for offset in range(0, size, _BLOCK):
        os.preadv(fd, [buffer], offset)
    os.close(fd)


def _all(threads: int, work: Callable[[], None]) -> float:
    """Return the seconds that ``threads`` threads take when each does the work."""
    begin = perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result()
    return perf_counter() - begin


def _prepare(path: Path, cold: bool) -> None:
    if cold:
        drop_from_cache(path)
    else:
        _read(path, path.stat().st_size)
