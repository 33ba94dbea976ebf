"""Copies are exact at every phase; a full disk is an error that changes nothing; nothing changes
unseen.
"""

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfix.errors import ChangedError, OperationError
from ckptfix.storage import copying
from ckptfix.storage.copying import copy_range, supports_reflink
from ckptfix.storage.edits import Replace, Truncate
from ckptfix.storage.recipes import ABSENT, Literal, Recipe
from tests.storage.crash import points
from tests.storage.folders import P, all_edits, do, make_folder, snapshot, undo_last


def test_the_probe_for_reflinks_leaves_nothing(tmp_path: Path) -> None:
    supports_reflink(tmp_path)
    assert not list(tmp_path.iterdir())
    assert not supports_reflink(tmp_path / "missing")


@pytest.mark.parametrize(
    ("source", "target"), [(0, 0), (5000, 904), (1, 0), (4096, 8192), (4095, 4095)]
)
def test_copies_at_any_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: int, target: int
) -> None:
    monkeypatch.setattr(copying, "_BLOCK", 30_000)
    monkeypatch.setattr(copying, "_PACE", 70_000)
    data = os.urandom(400_000)
    (tmp_path / "a").write_bytes(data)
    seen: list[int] = []
    with (tmp_path / "a").open("rb") as one, (tmp_path / "b").open("w+b") as two:
        copy_range(one.fileno(), source, two.fileno(), target, 300_001, progress=seen.append)
    assert (tmp_path / "b").read_bytes() == bytes(target) + data[source : source + 300_001]
    assert sum(seen) == 300_001


def test_a_source_that_ends_early(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    with (
        (tmp_path / "a").open("rb") as one,
        (tmp_path / "b").open("w+b") as two,
        pytest.raises(ChangedError),
    ):
        copy_range(one.fileno(), 0, two.fileno(), 0, 4)


def test_a_full_disk_after_sharing_blocks_is_no_reason_to_copy_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(bytes(20_000))
    shared: list[int] = []

    def ioctl(fd: int, request: int, arguments: bytes) -> int:
        shared.append(request)
        return 0

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("fcntl.ioctl", ioctl)
    monkeypatch.setattr(copying, "write_all", full)
    written: list[int] = []
    with (
        (tmp_path / "a").open("rb") as one,
        (tmp_path / "b").open("w+b") as two,
        pytest.raises(OSError, match="full"),
    ):
        copy_range(one.fileno(), 0, two.fileno(), 0, 20_000, progress=written.append)
    assert len(shared) == 1
    assert written == [16_384]  # the blocks, once


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount command")
def test_a_full_disk_at_every_fill_level(small_disk: Path) -> None:
    """A real ENOSPC wherever it strikes: from no page left to enough for all."""
    root = make_folder(small_disk / "folder")
    (root / "big").write_bytes(os.urandom(50_000))
    edits = (
        *all_edits(root)[:-1],
        Truncate(path=P("big"), old_size=50_000, new_size=10),
        Replace(
            path=P("index 2"), content=Recipe(pieces=(Literal(bytes(20_000)),)), previous=ABSENT
        ),
    )
    old = snapshot(root)
    failed = done = 0
    for pages in range(60):
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
            os.ftruncate(file.fileno(), max(0, file.tell() // 4096 - pages) * 4096)
        try:
            do(root, edits)
        except OperationError:
            failed += 1
            assert snapshot(root) == old, pages
            filler.unlink()
            continue
        done += 1
        room = "the undo had room"
        try:
            undo_last(root)
        except OperationError as error:
            room = str(error)
        filler.unlink()
        if room != "the undo had room":
            undo_last(root)
        assert room == "the undo had room" or "; free up space, then: ckptfix" in room
        assert snapshot(root) == old, pages
    assert failed > 10
    assert done > 10


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_harness_sees_every_change_that_the_kernel_sees(tmp_path: Path) -> None:
    """Changing system calls on the folder, counted by strace, are those that the kill test
    counts.
    """
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    root = make_folder(tmp_path / "one" / "folder")
    edits = all_edits(root)

    def both() -> None:
        do(root, edits)
        undo_last(root)

    counted = points(both)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.storage.folders import *\n"
        "root = make_folder(Path(sys.argv[1]))\n"
        "edits = all_edits(root)\n"
        "os.getppid()\n"  # marks the start in the trace
        "do(root, edits)\n"
        "undo_last(root)\n"
        "os.getppid()\n"
    )
    log = tmp_path / "trace"
    trace = "trace=%file,%desc,getppid"
    command = ["strace", "-f", "-y", "-e", trace, "-o", str(log), sys.executable, "-B", "-c", code]
    done = subprocess.run(
        [*command, str(tmp_path / "two" / "folder")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path.cwd(),
    )
    if done.returncode and "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    inside = log.read_text().split("getppid()")[1]
    seen: dict[str, int] = {}
    for line in inside.splitlines():
        name = re.match(r"\d+ +(\w+)\(", line)
        if name and _changes(name[1], line):
            short = _SAME.get(name[1], name[1])
            seen[short] = seen.get(short, 0) + 1
    expected: dict[str, int] = {}
    for call in counted:
        expected[call] = expected.get(call, 0) + 1
    assert seen == expected


_SAME = {
    "openat": "open",
    "pwrite64": "pwrite",
    "unlinkat": "unlink",
    "mkdirat": "mkdir",
    "renameat": "rename",
    "renameat2": "rename",
    "linkat": "link",
    "fchmodat": "chmod",
    "fchownat": "chown",
    "utimensat": "utime",
}
_READS = (
    *(
        "read",
        "pread64",
        "preadv",
        "preadv2",
        "readv",
        "lseek",
        "close",
        "stat",
        "lstat",
        "fstat",
        "newfstatat",
        "statx",
    ),
    *(
        "readlink",
        "readlinkat",
        "getdents64",
        "access",
        "faccessat",
        "faccessat2",
        "fcntl",
        "flock",
        "fadvise64",
    ),
    *(
        "mmap",
        "statfs",
        "fstatfs",
        "getcwd",
        "ioctl",
        "chdir",
        "poll",
        "dup",
        "execve",
        "epoll_wait",
        "inotify_add_watch",
    ),
)


def _changes(name: str, line: str) -> bool:
    if name in ("open", "openat"):
        return "O_CREAT" in line or "O_TRUNC" in line or "O_TMPFILE" in line
    if name == "ioctl":
        return "FICLONE" in line and line.rstrip().endswith("= 0")
    return name not in _READS
