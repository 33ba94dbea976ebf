"""Writing at the pace of the disk: nothing is lost, and little waits."""

import ctypes
import errno
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from ckptfix.storage import copying
from ckptfix.storage.copying import Pacer

MIB = 1 << 20
BLOCK = bytes(range(256)) * (1 << 12)


def write(path: Path, size: int) -> None:
    with Pacer() as pacer:
        fd = pacer.create(path)
        for offset in range(0, size, len(BLOCK)):
            os.pwrite(fd, BLOCK, offset)
            pacer.wrote(fd, offset, offset + len(BLOCK))
        pacer.ended(fd)
        pacer.finish()


def failing(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(copying, "_sync_file_range", lambda *args: -1)
    monkeypatch.setattr(ctypes, "get_errno", lambda: code)


def test_what_is_written_is_there_and_no_longer_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_IN_FLIGHT", 2 * MIB)
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, begin, length, advice: dropped.append((begin, length))
    )
    write(tmp_path / "file", 8 * MIB)
    assert (tmp_path / "file").read_bytes() == BLOCK * 8
    assert dropped == [(number * MIB, MIB) for number in range(6)] + [(0, 0)]


def test_where_the_kernel_cannot_it_writes_at_its_own_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, errno.ENOSYS)
    write(tmp_path / "file", 8 * MIB)
    assert (tmp_path / "file").read_bytes() == BLOCK * 8


def test_an_error_of_the_disk_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=r"Input/output error: .*/file"):
        write(tmp_path / "file", MIB)


def test_many_small_files_are_synced_together_and_no_descriptor_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_MOST_ENDED", 4)
    order: list[str] = []
    real = os.fsync

    def sync(fd: int) -> None:
        order.append("sync")
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    before = len(os.listdir("/proc/self/fd"))
    with Pacer() as pacer:
        for number in range(10):
            fd = pacer.create(tmp_path / str(number))
            os.pwrite(fd, b"x", 0)
            order.append("write")
            pacer.wrote(fd, 0, 1)
            pacer.ended(fd)
        pacer.finish()
    batch = ["write"] * 4 + ["sync"] * 4
    assert order == batch * 2 + ["write"] * 2 + ["sync"] * 2
    assert len(os.listdir("/proc/self/fd")) == before


def test_after_an_error_every_descriptor_is_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with suppress(FileExistsError), Pacer() as pacer:
        pacer.ended(pacer.create(tmp_path / "complete"))
        pacer.create(tmp_path / "begun")
        pacer.create(tmp_path / "begun")
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_write_one_file_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_IN_FLIGHT", 2 * MIB)
    with Pacer() as pacer:
        fd = pacer.create(tmp_path / "file")

        def some(numbers: range) -> None:
            for number in numbers:
                os.pwrite(fd, BLOCK, number * MIB)
                pacer.wrote(fd, number * MIB, (number + 1) * MIB)

        threads = [threading.Thread(target=some, args=(range(first, 12, 3),)) for first in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pacer.ended(fd)
        pacer.finish()
    assert (tmp_path / "file").read_bytes() == BLOCK * 12
