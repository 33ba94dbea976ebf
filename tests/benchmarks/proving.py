"""Comparing two files byte for byte against the fastest plain read of both."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter

from tests.benchmarks.making import drop_from_cache, measure, write_safetensors
from tests.benchmarks.printing import show

SETUPS = tuple((threads, block) for threads in (1, 2, 4) for block in (256 << 10, 1 << 20, 8 << 20))


def prove(folder: Path, size: int, rounds: int) -> None:
    """Print the ratio of our comparison to the best plain read, warm and cold, and the memory that
    it takes.
    """
    paths = (folder / "model.safetensors", folder / "model_1.safetensors")
    write_safetensors(paths[0], size, "")
    _copy_with_prefix(paths[0], paths[1], size)
    for cold in (False, True):
        ours: list[float] = []
        best: dict[tuple[int, int], list[float]] = {setup: [] for setup in SETUPS}
        for _ in range(rounds):
            for setup in SETUPS:
                _prepare(paths, cold)
                best[setup].append(_plain_read(paths, *setup))
                if setup[1] == 1 << 20:
                    _prepare(paths, cold)
                    ours.append(_compare(folder)["seconds"])
        setup, plain = min(
            ((setup, median(times)) for setup, times in best.items()), key=lambda item: item[1]
        )
        ratio, limit = plain / median(ours), 0.9 if cold else 0.7
        speed = 2 * size / median(ours) / 1e9
        label = f"compare a double of 2 x {size / (1 << 30):.0f} GiB, {'cold' if cold else 'warm'}"
        how = f"{ratio:.2f}x ({speed:.1f} GB/s; read with {setup[0]} threads, {setup[1] >> 10} KiB)"
        show(label, how, f">= {limit}x", ratio >= limit)
        if not cold:
            _show_hashed(folder, paths[0], size, rounds)
    used = _compare(folder)
    extra = used["peak"] - used["start"]
    show(
        "prove a double, memory above start-up", f"{extra / 1e6:.1f} MB", "<= 32 MB", extra <= 32e6
    )
    for path in paths:
        path.unlink()


def _show_hashed(folder: Path, path: Path, size: int, rounds: int) -> None:
    """Print the ratio of a comparison that hashes on the way, as a repair does, to sha256 alone
    with two threads.
    """
    ours, alone = [], []
    for _ in range(rounds):
        alone.append(_hash(path, size))
        ours.append(_compare(folder, digests="{}")["seconds"])
    ratio = median(alone) / median(ours)
    label = f"the same and hash it for an undo, {size / (1 << 30):.0f} GiB, warm"
    show(label, f"{ratio:.2f}x ({size / median(ours) / 1e9:.1f} GB/s)", ">= 0.6x", ratio >= 0.6)


def _hash(path: Path, size: int) -> float:
    fd, part = os.open(path, os.O_RDONLY), 64 << 20

    def digest(start: int) -> None:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 20))
        for position in range(start, start + part, 1 << 20):
            digest.update(buffer[: os.preadv(fd, [buffer], position)])

    begin = perf_counter()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(digest, range(0, size, part)))
    seconds = perf_counter() - begin
    os.close(fd)
    return seconds


def _compare(folder: Path, digests: str = "None") -> dict[str, float]:
    return measure(
        "from pathlib import Path\nfrom ckptfix.checkpoint.folder import scan_folder\nfrom "
        f"ckptfix.checkpoint.pairing import first_unequal, pair_up\nroot = Path({str(folder)!r}); "
        "one, two = scan_folder(root).components; pair = pair_up(one, two)",
        f"assert first_unequal(root, pair, full=True, digests={digests}) is None",
    )


def _copy_with_prefix(source: Path, target: Path, size: int) -> None:
    header = write_safetensors(target, size, "module.", sparse=True)
    with source.open("rb") as one, target.open("r+b") as two:
        start = 8 + int.from_bytes(one.read(8), "little")
        one.seek(start)
        two.seek(8 + header)
        while block := one.read(8 << 20):
            two.write(block)
        two.flush()
        os.fsync(two.fileno())


def _prepare(paths: tuple[Path, Path], cold: bool) -> None:
    if cold:
        drop_from_cache(*paths)
    else:
        _plain_read(paths, 2, 1 << 20)


def _plain_read(paths: tuple[Path, Path], threads: int, block: int) -> float:
    fds = [os.open(path, os.O_RDONLY) for path in paths]
    part = 64 << 20
    jobs = [(fd, offset) for offset in range(0, os.fstat(fds[0]).st_size, part) for fd in fds]

    def read(worker: int) -> None:
        buffer = memoryview(bytearray(block))
        for fd, offset in jobs[worker::threads]:
            for position in range(offset, offset + part, block):
                os.preadv(fd, [buffer], position)

    begin = perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    seconds = perf_counter() - begin
    for fd in fds:
        os.close(fd)
    return seconds
