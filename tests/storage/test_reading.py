"""Stretches of files: read in order, through few buffers, and out of the page cache again where
nobody needs them.
"""

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from ckptfix.errors import ChangedError
from ckptfix.storage.reading import OpenFiles, Piece, page_buffer


def test_pieces_are_read_one_after_another(tmp_path: Path) -> None:
    data = os.urandom(300_000)
    (tmp_path / "a").write_bytes(data)
    pieces = (
        Piece(tmp_path / "a", 7, 100_000),
        Piece(tmp_path / "a", 0, 5),
        Piece(tmp_path / "a", 200_000, 99_999),
    )
    with OpenFiles() as files:
        blocks = [bytes(block) for block in files.blocks(pieces, memoryview(bytearray(1 << 16)))]
    assert [len(block) for block in blocks] == [1 << 16] * 3 + [200_004 - 3 * (1 << 16)]
    assert b"".join(blocks) == data[7:100_007] + data[:5] + data[200_000:299_999]


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    with (
        OpenFiles() as files,
        pytest.raises(ChangedError, match=r"a changed while .*\(expected at least 15"),
    ):
        list(files.blocks((Piece(tmp_path / "a", 0, 15),), memoryview(bytearray(1 << 16))))


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_read_leaves_the_cache_where_asked(
    tmp_path: Path, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, at_once = 20 << 20, 8 << 20
    (tmp_path / "a").write_bytes(bytes(size))
    dropped: list[tuple[int, int]] = []

    def note(fd: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append((offset, length))

    monkeypatch.setattr(os, "posix_fadvise", note)
    with OpenFiles(keep_cached=keep) as files:
        for _ in files.blocks((Piece(tmp_path / "a", 100, size - 100),), page_buffer(1 << 20)):
            pass
    assert dropped == ([] if keep else [(0, at_once), (at_once, at_once)])


def test_a_buffer_begins_on_a_page() -> None:
    for size in (0, 1, 5000, 1 << 20):
        buffer = page_buffer(size)
        assert len(buffer) == max(size, 1)
        assert ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % mmap.PAGESIZE == 0


def test_more_files_than_stay_open(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / str(number)).write_bytes(bytes([number]))
    with OpenFiles() as files:
        pieces = [Piece(tmp_path / str(number), 0, 1) for number in (*range(100), *range(100))]
        blocks = [bytes(block) for block in files.blocks(pieces, memoryview(bytearray(64)))]
    assert b"".join(blocks) == bytes(range(100)) * 2
    assert not [name for name in os.listdir("/proc/self/fd") if _leads_into(name, tmp_path)]


def _leads_into(name: str, folder: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith(str(folder))
    except FileNotFoundError:
        return False
