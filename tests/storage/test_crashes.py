"""The kill test: whatever is killed, torn or failed, and wherever, the folder is the old one or the
new one.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfix.storage.edits import Edit, Move, Patch
from ckptfix.storage.journal import State, transactions
from tests.sampling import is_exhaustive, sampled
from tests.storage.crash import Fault, Outcome, points, strike
from tests.storage.folders import (
    P,
    Snapshot,
    all_edits,
    do,
    make_folder,
    run_recovery,
    snapshot,
    undo_last,
    without_journal,
)

pytestmark = [pytest.mark.slow, pytest.mark.alone(timeout=1800)]


def small_edits(root: Path) -> tuple[Edit, ...]:
    every = all_edits(root)
    return (every[0], every[2], every[4 + 1])


def patch_only(root: Path) -> tuple[Edit, ...]:
    return (all_edits(root)[1],)


class Scene:
    """A fresh folder for each point, and what it looks like before and after the edits."""

    def __init__(self, base: Path, edits: Callable[[Path], tuple[Edit, ...]]) -> None:
        self.root = base / "run" / "folder"
        self.edits = edits
        self.count()

    def count(self) -> None:
        self.fresh()
        self.old = snapshot(self.root)
        self.do_points = points(self.do)
        self.new = without_journal(snapshot(self.root, times=False))
        self.undo_points = points(self.undo)
        assert snapshot(self.root) == self.old

    def fresh(self) -> None:
        shutil.rmtree(self.root.parent, ignore_errors=True)
        self.root.parent.mkdir()
        make_folder(self.root)
        self.planned = self.edits(self.root)

    def fresh_and_done(self) -> None:
        self.fresh()
        self.do()

    def do(self) -> None:
        do(self.root, self.planned)

    def undo(self) -> None:
        undo_last(self.root)

    def recover(self) -> None:
        run_recovery(self.root)

    def check(self, where: str) -> bool:
        """The folder is exactly old (with no trace of a journal) or exactly new; True: new."""
        now = snapshot(self.root)
        if ".ckptfix" not in now:
            assert now == self.old, where
            return False
        assert without_journal(snapshot(self.root, times=False)) == self.new, where
        (info,) = transactions(self.root)
        assert info.state is State.DONE, where
        assert info.problem is None, where
        assert sorted(path.name for path in (self.root / ".ckptfix").iterdir()) == ["0001.done"], (
            where
        )
        assert not list((self.root / ".ckptfix" / "0001.done").glob("*.trash")), where
        return True


def no_links(*args: object, **kwargs: object) -> None:
    raise PermissionError(errno.EPERM, "no hard links here")


@pytest.fixture(params=["links", "no links"])
def scene(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """The scene on a file system with hard links, and on one (FAT, some FUSE) that refuses new
    ones.
    """
    if request.param == "no links":
        monkeypatch.setattr(os, "link", no_links)
    return Scene(tmp_path, all_edits)


@pytest.mark.parametrize("fault", [Fault.KILL_BEFORE, Fault.KILL_AFTER, Fault.TORN])
def test_repair_killed_at_every_call(scene: Scene, fault: Fault) -> None:
    ends = []
    for at, name in enumerate(scene.do_points):
        scene.fresh()
        assert strike(scene.do, at, fault)[0] is Outcome.KILLED
        scene.recover()
        ends.append(scene.check(f"{fault.value} {at} {name}"))
    assert ends == sorted(ends)  # old up to the commit, new from there on
    assert len(ends) > 60


@pytest.mark.parametrize("fault", [Fault.KILL_BEFORE, Fault.KILL_AFTER, Fault.TORN])
def test_undo_killed_at_every_call(scene: Scene, fault: Fault) -> None:
    ends = []
    for at, name in enumerate(scene.undo_points):
        scene.fresh_and_done()
        assert strike(scene.undo, at, fault)[0] is Outcome.KILLED
        scene.recover()
        ends.append(scene.check(f"{fault.value} {at} {name}"))
    assert ends == sorted(ends, reverse=True)
    assert len(ends) > 40


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EIO])
def test_repair_with_an_error_at_every_call(scene: Scene, fault: Fault) -> None:
    for at, name in enumerate(scene.do_points):
        where = f"{fault.name} at {at} {name}"
        scene.fresh()
        outcome, error = strike(scene.do, at, fault)
        if outcome is Outcome.RAISED:
            assert error in ("RolledBackError", "OperationError"), where
            now = snapshot(scene.root)
            assert now == scene.old, where
        else:  # an error in what is tried only, or when all is done and only rubbish is left
            scene.recover()
            assert scene.check(where), where


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EIO])
def test_undo_with_an_error_at_every_call(scene: Scene, fault: Fault) -> None:
    for at, name in enumerate(scene.undo_points):
        where = f"{fault.name} at {at} {name}"
        scene.fresh_and_done()
        outcome, error = strike(scene.undo, at, fault)
        if outcome is Outcome.RAISED:
            assert error in ("JournalError", "OperationError"), where
        scene.recover()
        assert scene.check(where) is (error == "OperationError"), where


@pytest.mark.parametrize(("edits", "stride"), [(patch_only, 1), (small_edits, 3)])
def test_recovery_killed_at_every_call_of_every_killed_run(
    tmp_path: Path, edits: Callable[[Path], tuple[Edit, ...]], stride: int
) -> None:
    """All pairs of points for a patch; for the longer scene every third recovery point, shifted
    with the first.

    Unless the run is exhaustive, of an eighth of the first points: their number is squared here.
    """
    scene = Scene(tmp_path, edits)
    struck = 0
    for start, action, calls in (
        (scene.fresh, scene.do, scene.do_points),
        (scene.fresh_and_done, scene.undo, scene.undo_points),
    ):
        for first in sampled(range(len(calls))):
            second = first % stride
            outcome = Outcome.KILLED
            while outcome is Outcome.KILLED:
                start()
                strike(action, first, Fault.TORN if second % 2 else Fault.KILL_AFTER)
                outcome, _ = strike(scene.recover, second, Fault.KILL_AFTER)
                scene.recover()
                scene.check(f"killed at {first} {calls[first]}, recovery at {second}")
                second, struck = second + stride, struck + 1
    assert struck > (100 if is_exhaustive() else 10)


def test_a_killed_run_does_not_stop_the_next(scene: Scene) -> None:
    for at in range(0, len(scene.do_points), 7):
        scene.fresh()
        strike(scene.do, at, Fault.KILL_BEFORE)
        if not scene_is_new(scene):
            scene.do()
        assert scene.check(f"killed at {at}, then run again")


def scene_is_new(scene: Scene) -> bool:
    scene.recover()
    return any(info.state is State.DONE for info in transactions(scene.root))


def test_the_harness_finds_a_missing_journal(tmp_path: Path) -> None:
    """A control: the same edits without a journal do not survive."""
    from ckptfix.storage.applying import act, prepare
    from ckptfix.storage.folder_journal import Workspace

    root = make_folder(tmp_path / "folder")
    old: Snapshot = snapshot(root, times=False)

    def unsafe() -> None:
        work = Workspace(root, root)
        patch = Patch(path=P("model"), offset=0, old=b"old header", new=b"NEW HEADER")
        move = Move(source=P("model_2"), target=P("model_9"))
        act(work, 0, patch, prepare(work, 0, patch))
        act(work, 1, move, prepare(work, 1, move))

    assert strike(unsafe, 1, Fault.KILL_AFTER)[0] is Outcome.KILLED
    assert snapshot(root, times=False) != old
