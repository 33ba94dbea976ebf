"""Undoing what was written into a file: never through a second name, never into a newer save,
always to the disk.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfix.errors import JournalError, OperationError
from ckptfix.storage.edits import Append, Edit, Patch, Truncate
from ckptfix.storage.lock import folder_lock
from tests.storage.crash import Fault, intercepted, points, strike
from tests.storage.folders import (
    P,
    do,
    killed,
    recover,
    run_recovery,
    snapshot,
    undo_last,
    without_journal,
)

pytestmark = pytest.mark.alone(timeout=1800)

BODY = b"old header" + bytes(range(256)) * 1200 + b"the end"
IN_PLACE: dict[str, Edit] = {
    "patch": Patch(path=P("model"), offset=0, old=b"old header", new=b"NEW HEADER"),
    "append": Append(path=P("model"), old_size=len(BODY), data=b"directory and tail", tail=4),
    "truncate": Truncate(path=P("model"), old_size=len(BODY), new_size=len(BODY) - 9),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make(tmp_path / "folder")


def make(root: Path) -> Path:
    root.mkdir()
    (root / "model").write_bytes(BODY)
    os.chmod(root / "model", 0o640)
    os.utime(root / "model", ns=(10**18, 10**18 + 5))
    return root


@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize("how", ["undo", "recover"])
def test_a_hard_link_made_since_keeps_its_bytes(root: Path, kind: str, how: str) -> None:
    old = snapshot(root)
    if how == "undo":
        do(root, (IN_PLACE[kind],))
    else:
        killed(root, IN_PLACE[kind])
    os.link(root / "model", root.parent / "snapshot")
    kept = (root.parent / "snapshot").read_bytes()
    assert kept != BODY
    if how == "undo":
        undo_last(root)
    else:
        run_recovery(root)
    assert (root.parent / "snapshot").read_bytes() == kept
    assert snapshot(root) == old


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault.KILL_BEFORE, Fault.KILL_AFTER, Fault.TORN, Fault.ENOSPC])
def test_an_undo_of_a_linked_file_killed_at_every_call(tmp_path: Path, fault: Fault) -> None:
    edits = tuple(IN_PLACE[kind] for kind in ("patch", "truncate"))
    number = 0

    def fresh() -> Path:
        nonlocal number
        number += 1
        folder = make(tmp_path / str(number))
        do(folder, edits)
        os.link(folder / "model", tmp_path / f"snapshot {number}")
        return folder

    old = snapshot(make(tmp_path / "old"))
    first = fresh()
    new = without_journal(snapshot(first, times=False))
    total = len(points(lambda: undo_last(first)))
    kept = (tmp_path / "snapshot 1").read_bytes()
    assert snapshot(first) == old
    for at in range(total):
        folder = fresh()

        def undo_this(folder: Path = folder) -> None:
            undo_last(folder)

        strike(undo_this, at, fault)
        run_recovery(folder)
        now = snapshot(folder)
        assert now == old or without_journal(snapshot(folder, times=False)) == new, at
        assert (tmp_path / f"snapshot {number}").read_bytes() == kept, at


def test_the_room_for_the_copy_of_a_linked_file_is_asked_for_first(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(root, (IN_PLACE["patch"],))
    os.link(root / "model", root.parent / "snapshot")
    real = os.statvfs(root)

    class Full:
        f_bavail, f_frsize = 1, len(BODY)

    monkeypatch.setattr("ckptfix.storage.undoable.supports_reflink", lambda path: False)
    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    before = snapshot(root)
    with pytest.raises(
        OperationError,
        match=rf"the undo needs .* of free space.*free up space, then: ckptfix undo {root}",
    ):
        undo_last(root)
    assert snapshot(root) == before
    monkeypatch.setattr(os, "statvfs", lambda path: real)
    undo_last(root)


NEWER: dict[str, Callable[[bytes], bytes]] = {
    "patch": lambda now: b"old header" + now[10:-1] + b"!",
    "append": lambda now: b"?" + now[1:],
    "truncate": lambda now: b"?" + now[1:],
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_newer_save_keeps_bytes_and_time(root: Path, kind: str) -> None:
    killed(root, IN_PLACE[kind])
    (root / "model").write_bytes(NEWER[kind]((root / "model").read_bytes()))
    before = snapshot(root)
    with pytest.raises(JournalError, match=r"left alone.*rm -r"):
        run_recovery(root)
    assert snapshot(root) == before


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_file_that_is_gone_or_a_link_is_a_journal_error(root: Path, kind: str) -> None:
    killed(root, IN_PLACE[kind])
    (root / "model").rename(root.parent / "model")
    with pytest.raises(JournalError, match="is missing"):
        run_recovery(root)
    (root / "model").symlink_to(root.parent / "model")
    with pytest.raises(JournalError, match="no longer a regular file"):
        run_recovery(root)
    (root / "model").unlink()
    (root.parent / "model").rename(root / "model")
    run_recovery(root)
    assert (root / "model").read_bytes() == BODY


@pytest.mark.parametrize("kind", IN_PLACE)
def test_after_a_failed_sync_everything_is_written_again(root: Path, kind: str) -> None:
    """The kernel forgets that pages are dirty when writing them failed; reading them proves
    nothing.
    """
    do(root, (IN_PLACE[kind],))
    inode = (root / "model").stat().st_ino
    failed: list[str] = []

    def fail_once(
        name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name == "fsync" and os.fstat(args[0]).st_ino == inode and not failed:
            failed.append(name)
            raise OSError(errno.EIO, "the disk is ill")
        return real(*args, **kwargs)

    with intercepted(fail_once), pytest.raises(JournalError, match="ill"):
        undo_last(root)
    calls: list[str] = []

    def note(
        name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name in ("pwrite", "ftruncate") and os.fstat(args[0]).st_ino == inode:
            calls.append(name)
        return real(*args, **kwargs)

    with intercepted(note), folder_lock(root):
        assert recover(root) is not None
    assert calls == (["ftruncate"] if kind == "append" else ["pwrite"])
    assert (root / "model").read_bytes() == BODY
