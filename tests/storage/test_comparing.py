"""Comparison of ranges: exact, with few threads or many, and without reading where that is a
proof.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.errors import ChangedError
from ckptfix.storage.comparing import (
    Difference,
    Run,
    first_difference,
    same_bytes_without_reading,
    sample_runs,
)
from ckptfix.storage.files import FileReader
from ckptfix.storage.reading import open_reader
from tests.sampling import examples

SIZE = (40 << 20) + 123


@contextmanager
def both(one: Path, two: Path) -> Iterator[tuple[FileReader, FileReader]]:
    with open_reader(one) as a, open_reader(two) as b:
        yield a, b


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    body = os.urandom(SIZE)
    (folder / "a").write_bytes(b"head" + body)
    (folder / "b").write_bytes(b"a longer head" + body)
    return folder / "a", folder / "b"


RUN = Run(4, 13, SIZE)


def test_equal(pair: tuple[Path, Path]) -> None:
    seen: list[int] = []
    with both(*pair) as (a, b):
        assert first_difference(a, b, [RUN], progress=seen.append) is None
    assert sum(seen) == 2 * SIZE


@pytest.mark.parametrize("threads", [None, 1, 2, 7])
def test_the_first_of_several_differences_is_found(
    pair: tuple[Path, Path], tmp_path: Path, threads: int
) -> None:
    data = bytearray(pair[1].read_bytes())
    for places in ([13], [13 + SIZE - 1], [9_000_000], [35_000_000, 20_000_017, 38_000_000]):
        for place in places:
            data[place] ^= 1
        (tmp_path / "c").write_bytes(data)
        with both(pair[0], tmp_path / "c") as (a, b):
            found = first_difference(a, b, [RUN], threads=threads)
        first = min(places)
        assert found == Difference(run=0, offset_a=first - 9, offset_b=first)
        for place in places:
            data[place] ^= 1


def test_no_thread_is_left_behind(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow thread's segment counts too: the last byte read late still decides."""
    real = os.preadv
    main = threading.main_thread()

    def slow(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if threading.current_thread() is not main:
            time.sleep(0.02)
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", slow)
    seen: list[int] = []
    with both(*pair) as (a, b):
        assert first_difference(a, b, [RUN], progress=seen.append) is None
        assert sum(seen) == 2 * SIZE


def test_a_file_that_ends_inside_a_run(pair: tuple[Path, Path]) -> None:
    with both(*pair) as (a, b), pytest.raises(ChangedError, match="a changed while it was read"):
        first_difference(a, b, [Run(4, 13, SIZE + 1)])


def test_an_exception_in_progress_stops_all_threads(pair: tuple[Path, Path]) -> None:
    def progress(done: int) -> None:
        raise KeyboardInterrupt

    with both(*pair) as (a, b), pytest.raises(KeyboardInterrupt):
        first_difference(a, b, [RUN], progress=progress)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.binary(max_size=300),
    st.lists(st.tuples(st.integers(0, 299), st.integers(0, 299), st.integers(0, 50))),
)
def test_agrees_with_a_plain_comparison(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, drawn: list[tuple[int, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("plain") / "file"
    path.write_bytes(data)
    runs = [Run(a, b, n) for a, b, n in drawn if max(a, b) + n <= len(data)]
    expected = None
    for index, run in enumerate(runs):
        pairs = range(run.length)
        first = next((i for i in pairs if data[run.offset_a + i] != data[run.offset_b + i]), None)
        if first is not None:
            expected = Difference(
                run=index, offset_a=run.offset_a + first, offset_b=run.offset_b + first
            )
            break
    with both(path, path) as (a, b):
        assert first_difference(a, b, runs) == expected


def test_one_inode_is_equal_only_at_equal_offsets(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(8192))
    os.link(tmp_path / "a", tmp_path / "b")
    with both(tmp_path / "a", tmp_path / "b") as (a, b):
        assert same_bytes_without_reading(a, b, [Run(0, 0, 100), Run(5000, 5000, 3192)])
        assert not same_bytes_without_reading(a, b, [Run(0, 1, 100)])
        assert not same_bytes_without_reading(a, b, [Run(0, 0, 8193)])


@pytest.mark.parametrize("links", [1, 0])
def test_equal_inode_numbers_alone_prove_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: int
) -> None:
    """Some FUSE and SMB mounts number two files alike; each then has one link and a name of its
    own.
    """
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 8192)
    (tmp_path / "link").symlink_to("a")
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        status = list(real(fd))
        status[1], status[3] = 7, links  # st_ino, st_nlink
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", fstat)
    with both(tmp_path / "a", tmp_path / "b") as (a, b):
        assert not same_bytes_without_reading(a, b, [Run(0, 0, 100)])
    with both(tmp_path / "a", tmp_path / "link") as (a, b):
        assert same_bytes_without_reading(a, b, [Run(0, 0, 100)])


def test_a_copy_proves_nothing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 400)
    with both(tmp_path / "a", tmp_path / "b") as (a, b):
        assert not same_bytes_without_reading(a, b, [Run(0, 0, 102_400)])


def test_samples_reach_from_the_first_byte_to_the_last() -> None:
    runs = [
        Run(100, 200, 1 << 30),
        Run(1 << 31, 1 << 32, 10_000),
        Run(0, 0, 0),
        Run(1 << 40, 1 << 41, 1 << 34),
    ]
    samples = sample_runs(runs)
    assert len(samples) <= 24
    assert samples[0] == Run(100, 200, 4096)
    assert samples[-1].offset_a + samples[-1].length == (1 << 40) + (1 << 34)
    for sample in samples:
        assert 0 < sample.length <= 4096
        assert any(
            run.offset_a <= sample.offset_a
            and sample.offset_a + sample.length <= run.offset_a + run.length
            and sample.offset_b - sample.offset_a == run.offset_b - run.offset_a
            for run in runs
        )
    assert sample_runs([Run(1, 2, 5000)]) == (Run(1, 2, 5000),)
    assert sample_runs([]) == ()
    small = [Run(n, n, 10) for n in range(100)]
    assert sample_runs(small) == tuple(small)  # less to read than 24 samples


@pytest.mark.slow
def test_memory_stays_small(pair: tuple[Path, Path]) -> None:
    code = (
        "import os, resource, sys\n"
        "from ckptfix.storage.comparing import *\n"
        "from ckptfix.storage.reading import open_reader\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "with open_reader(sys.argv[1]) as a, open_reader(sys.argv[2]) as b:\n    "
        f"assert first_difference(a, b, [Run(4, 13, {SIZE})]) is None\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *pair], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) < 16 << 10  # KiB
