"""One writer per folder, and no trace of the lock afterwards."""

import errno
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from ckptfix.errors import JournalError, LockedError, OperationError
from ckptfix.storage.journal import transactions
from ckptfix.storage.lock import folder_lock
from tests.storage.crash import Outcome, in_child


def test_a_second_process_is_told_who_holds_it(tmp_path: Path) -> None:
    def second() -> None:
        with (
            pytest.raises(LockedError, match=f"process {parent} is working"),
            folder_lock(tmp_path),
        ):
            pass

    parent = os.getpid()
    with folder_lock(tmp_path):
        assert in_child(second) == (Outcome.FINISHED, "")
    assert not list(tmp_path.iterdir())


def test_a_lock_file_left_by_a_killed_process_locks_nothing(tmp_path: Path) -> None:
    def killed() -> None:
        with folder_lock(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(killed)[0] is Outcome.KILLED
    assert (tmp_path / ".ckptfix" / "lock").exists()
    with folder_lock(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_never_two_holders_at_once(tmp_path: Path) -> None:
    """Many threads take and give it back; the lock file and its folder come and go all the time."""
    inside, most, taken = 0, 0, 0
    until = time.monotonic() + 0.5

    def fight() -> None:
        nonlocal inside, most, taken
        while time.monotonic() < until:
            try:
                with folder_lock(tmp_path):
                    inside += 1
                    most = max(most, inside)
                    time.sleep(0)
                    inside -= 1
                    taken += 1
            except LockedError:
                pass

    threads = [threading.Thread(target=fight) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert taken > 20
    assert not list(tmp_path.iterdir())


def test_a_journal_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".ckptfix").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JournalError, match="symbolic link"), folder_lock(tmp_path / "folder"):
        pass
    with pytest.raises(JournalError, match="symbolic link"):
        transactions(tmp_path / "folder")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="cannot lock"), folder_lock(tmp_path / "nowhere"):
        pass


@pytest.mark.skipif(os.getuid() == 0, reason="root may write to a read-only folder")
def test_a_read_only_folder(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o555)
    with pytest.raises(OperationError, match="Permission denied"), folder_lock(tmp_path):
        pass


def test_a_lock_file_with_a_second_name_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"of value")
    root = tmp_path / "folder"
    (root / ".ckptfix").mkdir(parents=True)
    os.link(tmp_path / "precious", root / ".ckptfix" / "lock")
    with folder_lock(root):
        assert (tmp_path / "precious").read_bytes() == b"of value"
    assert (tmp_path / "precious").read_bytes() == b"of value"


def test_a_file_system_that_locks_only_what_may_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS, and a lock file that a killed run of another user left behind."""
    (tmp_path / ".ckptfix").mkdir()
    (tmp_path / ".ckptfix" / "lock").write_bytes(b"")
    real_open, real_flock = os.open, fcntl.flock

    def open_(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_RDWR and str(path).endswith("lock"):
            raise PermissionError(errno.EACCES, "not yours")
        return real_open(path, flags, *rest)

    def flock(fd: int, operation: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real_flock(fd, operation)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OperationError, match=r"another user.* rm -f "), folder_lock(tmp_path):
        pass
    monkeypatch.undo()
    with folder_lock(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
