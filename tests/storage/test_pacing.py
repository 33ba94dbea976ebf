"""Writing at the pace of the disk: nothing is lost, and little waits."""

import ctypes
import errno
import os
from pathlib import Path

import pytest

from ckptfix.storage import copying
from ckptfix.storage.copying import Pacer


def write(path: Path, size: int) -> Pacer:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        pacer = Pacer(fd)
        block = bytes(range(256)) * (1 << 12)
        for offset in range(0, size, len(block)):
            os.pwrite(fd, block, offset)
            pacer.wrote(offset + len(block))
        pacer.finish(size)
    finally:
        os.close(fd)
    return pacer


def test_what_is_written_is_there_and_no_longer_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_STEP", 1 << 20)
    monkeypatch.setattr(copying, "_IN_FLIGHT", 2 << 20)
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, begin, length, advice: dropped.append((begin, length))
    )
    write(tmp_path / "file", 8 << 20)
    assert (tmp_path / "file").read_bytes() == bytes(range(256)) * (1 << 15)
    assert dropped == [(number << 20, 1 << 20) for number in range(6)] + [(6 << 20, 2 << 20)]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL])
def test_where_the_kernel_cannot_it_syncs_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(copying, "_STEP", 1 << 20)
    monkeypatch.setattr(copying, "_PACE", 3 << 20)
    monkeypatch.setattr(ctypes, "get_errno", lambda: code)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)

    class Missing:
        def __getattr__(self, name: str) -> object:
            return lambda *args: -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: Missing())
    write(tmp_path / "file", 8 << 20)
    assert len(synced) == 2


def test_an_error_of_the_disk_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __getattr__(self, name: str) -> object:
            return lambda *args: -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: Failing())
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "file", 32 << 20)
