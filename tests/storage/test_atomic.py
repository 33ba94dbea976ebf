"""What errors of a disk say, and what they leave."""

import errno
import os
from pathlib import Path

import pytest

from ckptfix.storage.atomic import create_file, sync_file, sync_folder, umask, write_all


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(fd: int, data: object, offset: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r": 5 B more needed, [0-9.]+ [KMGT]?i?B free: ") as error:
        create_file(tmp_path / "x", b"12345")
    assert (error.value.errno, error.value.filename) == (code, str(tmp_path / "x"))
    assert os.listdir(tmp_path) == []


def test_what_is_missing_is_what_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def half(fd: int, data: memoryview, offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:7], offset)

    monkeypatch.setattr(os, "pwrite", half)
    with (
        open(tmp_path / "x", "wb") as file,
        pytest.raises(OSError, match=": 3 B more needed"),
    ):
        write_all(file.fileno(), b"0123456789", 0)


def test_an_error_of_the_disk_has_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with (
        open(tmp_path / "x", "wb") as file,
        pytest.raises(OSError, match=r"Input/output error: '.*/x'"),
    ):
        sync_file(file.fileno())
    with pytest.raises(OSError, match="Input/output error") as error:
        sync_folder(tmp_path)
    assert error.value.filename == str(tmp_path)
    with pytest.raises(OSError, match=r"Input/output error: '.*/y'"):
        create_file(tmp_path / "y", b"1")
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("has_proc", [True, False])
def test_the_umask_is_read_and_kept(monkeypatch: pytest.MonkeyPatch, has_proc: bool) -> None:
    """Some sandboxes have no line about it."""
    if not has_proc:
        monkeypatch.setattr(Path, "read_text", lambda path: "Name:\tpython\n")
    before = os.umask(0o027)
    try:
        assert umask() == 0o027
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
