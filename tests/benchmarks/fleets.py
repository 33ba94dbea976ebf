"""Seconds and memory of a ``scrub`` of many checkpoints, against listing them alone."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

from ckptfix.storage import stores
from ckptfix.storage.stores import ObjectRange, open_store
from tests.benchmarks.printing import show
from tests.stores.servers import FAR, running, why_not

_SAVE = (
    Path(__file__).parents[2]
    / "fixtures"
    / "accelerate-1.15.0"
    / "clean-single-process"
    / "checkpoint"
)
_FOLDERS = 1000
"""Checkpoints below a URL, and fewest of those on a disk."""

_LISTING = (
    "import sys; from ckptfix.storage.stores import open_store; open_store(sys.argv[1]).list()"
)


_WITHOUT_SERVER = """
import sys
from pathlib import Path
from ckptfix.cli import main
from ckptfix.storage.stores import ObjectInfo, Store

files = {path.name: path.read_bytes() for path in Path(sys.argv[1]).iterdir() if path.is_file()}
Store.listed = lambda store: (
    (f"run_{one // 100}/checkpoint_{one % 100}/{name}", ObjectInfo(len(data), f"{one:032x}", 10**18 + one))
    for one in range(int(sys.argv[2])) for name, data in files.items()
)
Store._read = lambda store, key, offset, length, etag: files[key.rpartition("/")[2]][offset:offset + length]
main(["scrub", "memory://none/runs", "-q", "--state", *sys.argv[3:]])
"""
"""A scrub of so many prefixes with the same three objects, each read in no time: what is left is
the memory of ours.
"""


_STARTED = """
import os, sys
from time import perf_counter

begin = perf_counter()
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
print(perf_counter() - begin, usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""A small process that starts a command and measures it: the memory of a process counts from that
of who started it.
"""


def scrub_fleets(folder: Path, many: int) -> None:
    """``scrub`` of 1,000 and of many folders, twice each, then of 1,000 prefixes of a store, near
    and far.
    """
    files = {path.name: path.read_bytes() for path in _SAVE.iterdir() if path.is_file()}
    _scrub_folders(folder, files, many)
    _scrub_prefixes(folder, files, "ministack", "")
    _scrub_prefixes(folder, files, "ministack-far", f" {FAR * 1000:.0f} ms away")
    _scrub_without_server(folder, many // 10)


def _scrub_folders(folder: Path, files: Mapping[str, bytes], many: int) -> None:
    peaks = []
    for count in (_FOLDERS, many):
        root = folder / f"fleet-{count}"
        for number in range(count):
            place = root / f"run_{number // 100}" / f"checkpoint_{number % 100}"
            place.mkdir(parents=True)
            for name, data in files.items():
                (place / name).write_bytes(data)
        begin = perf_counter()
        assert sum(len(names) for _, _, names in os.walk(root)) == count * len(files)
        walk = perf_counter() - begin
        for what, options in (("looks at all", ()), ("finds all unchanged", ("--max-age", "1d"))):
            seconds, peak = _scrubbed(str(root), folder / f"{count}.sqlite", {}, *options)
            peaks.append(peak)
            figure = (
                f"{seconds:.1f} s, {count / seconds:.0f} a second ({seconds / walk:.0f}x of a "
                f"walk), {peak} MiB"
            )
            show(f"scrub of {count} checkpoints {what}", figure, "-", True)
    show(f"memory of {many} checkpoints against {_FOLDERS}", f"{peaks[2] - peaks[0]:+} MiB", "< 32 MiB",
         peaks[2] - peaks[0] < 32)  # fmt: skip


def _scrub_prefixes(folder: Path, files: Mapping[str, bytes], program: str, where: str) -> None:
    if reason := why_not(program):
        print(f"fleets in a store: skipped: {reason}")
        return
    with tempfile.TemporaryDirectory() as name, running(program, Path(name)) as server:
        os.environ.update(server.variables)
        url = f"{server.bucket()}/runs"
        store = open_store(url)
        keys = [
            f"run_{number // 100}/checkpoint_{number % 100}/{one}"
            for number in range(_FOLDERS)
            for one in files
        ]
        stores.together(keys, lambda key: store.put(key, files[key.rpartition("/")[2]]), 16)
        listing = perf_counter()
        listed = open_store(url).list()
        listing = perf_counter() - listing
        assert len(listed) == len(keys)
        whole = [ObjectRange(key, 0, info.size, info.etag) for key, info in listed.items()]
        reads = []
        for ranges in ([one for one in whole if one.key.endswith("model.safetensors")], whole):
            begin = perf_counter()
            store.read_many(ranges)
            reads.append(perf_counter() - begin)
        alone, _ = _timed([sys.executable, "-c", _LISTING, url], server.variables)
        figure = f"{listing:.2f} s, {alone:.1f} s with the start of a process"
        show(f"listing {len(keys)} objects of {_FOLDERS} prefixes{where}", figure, "-", True)
        figure = f"{listing + reads[0]:.1f} s, {listing + reads[1]:.1f} s"
        show(f"listing and one plain read for each prefix, each object{where}", figure, "-", True)
        seconds, peak = _scrubbed(url, folder / f"{program}.sqlite", server.variables)
        least = alone + reads[1]
        figure = (
            f"{seconds:.1f} s ({seconds / least:.1f}x of listing and reading each object), "
            f"{peak} MiB"
        )
        show(
            f"scrub of {_FOLDERS} prefixes{where} looks at all",
            figure,
            "< 3x",
            seconds < 3 * least,
        )
        seconds, peak = _scrubbed(
            url, folder / f"{program}.sqlite", server.variables, "--max-age", "1d"
        )
        figure = f"{seconds:.1f} s ({seconds / alone:.1f}x of listing), {peak} MiB"
        show(
            f"scrub of {_FOLDERS} prefixes{where} finds all unchanged",
            figure,
            "< 3x",
            seconds < 3 * alone,
        )


def _scrub_without_server(folder: Path, many: int) -> None:
    peaks = []
    for count in (_FOLDERS // 10, many):
        command = [
            sys.executable,
            "-c",
            _WITHOUT_SERVER,
            str(_SAVE),
            str(count),
            str(folder / f"{count}.none"),
        ]
        seconds, peak = _timed(command, {})
        peaks.append(peak)
        show(
            f"scrub of {count} prefixes without a server",
            f"{seconds:.1f} s, {peak} MiB",
            "-",
            True,
        )
    more = peaks[1] - peaks[0]
    limit = 16 + many // 500
    show(
        f"memory of {many} prefixes against {_FOLDERS // 10}",
        f"{more:+} MiB",
        f"< {limit} MiB",
        more < limit,
    )


def _timed(command: Sequence[str], variables: Mapping[str, str]) -> tuple[float, int]:
    """Return the seconds and the MiB of a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _STARTED, *command], env={**os.environ, **variables},
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    seconds, peak = done.stdout.splitlines()[-1].split()
    return float(seconds), int(peak) >> 10


def _scrubbed(
    path: str, state: Path, variables: Mapping[str, str], *options: str
) -> tuple[float, int]:
    """Return the seconds and the MiB of a scrub."""
    command = [
        sys.executable,
        "-m",
        "ckptfix",
        "scrub",
        path,
        "-q",
        "--state",
        str(state),
        *options,
    ]
    return _timed(command, variables)
