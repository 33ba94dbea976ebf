"""Kill, tear and fail a whole repair and a whole undo at every point: the folder is the old one or the new one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfix import CkptfixError, Policy, check, repair, undo
from ckptfix.storage.journal import recover
from ckptfix.storage.lock import folder_lock
from tests.storage.crash import Fault, Outcome, points, strike

FIXTURES = Path(__file__).parents[2] / "fixtures" / "accelerate-1.15.0"
Snapshot = dict[str, tuple[str, bytes, int]]


def snapshot(root: Path) -> Snapshot:
    """Names, contents (or link targets) and modes of everything but the journal."""
    found: Snapshot = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if name.split("/")[0] == ".ckptfix":
            continue
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()).encode(), 0)
        elif path.is_file():
            found[name] = ("file", path.read_bytes(), path.stat().st_mode)
    return found


def make(folder: Path, fixture: str, linked: bool) -> None:
    shutil.copytree(FIXTURES / fixture / "checkpoint", folder)
    if linked:
        model = folder / "model.safetensors"
        model.rename(folder.parent / f"{folder.name}-blob")
        model.symlink_to(f"../{folder.name}-blob")
        other = next(iter(sorted(folder.glob("model_*.safetensors"))), None)
        if other is not None:
            (folder.parent / f"{folder.name}-other").hardlink_to(other)


SCENARIOS = {
    "drop": ("wrapper-safetensors", Policy(), False),
    "drop and renumber": ("student-teacher-wrapper-bin", Policy(), False),
    "rename in place": ("lone-nested-safetensors", Policy(), False),
    "rename shards and index": ("sharded-gpt2-nested", Policy(), False),
    "append to a zip": ("lone-nested-train", Policy(), False),
    "patch a legacy file": ("lone-nested-legacy", Policy(), False),
    "new files": ("lone-nested-safetensors", Policy(atomic=True), False),
    "links": ("wrapper-safetensors", Policy(), True),
    "a linked rename": ("lone-nested-safetensors", Policy(), True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("verb", ["repair", "undo"])
def test_killed_anywhere_it_is_old_or_new(tmp_path: Path, name: str, verb: str) -> None:
    fixture, policy, linked = SCENARIOS[name]
    number = 0

    def fresh() -> Path:
        nonlocal number
        number += 1
        folder = tmp_path / str(number)
        make(folder, fixture, linked)
        if verb == "undo":
            repair(folder, policy=policy)
        return folder

    def action(folder: Path) -> Callable[[], None]:
        def run() -> None:
            if verb == "repair":
                repair(folder, policy=policy)
            else:
                undo(folder)

        return run

    folder = fresh()
    before = snapshot(folder)
    total = len(points(action(folder)))
    after = snapshot(folder) if verb == "undo" else _new(fresh(), policy)
    assert total > 10
    for at in range(total):
        for fault in (Fault.KILL_BEFORE, Fault.KILL_AFTER, Fault.TORN, Fault.ENOSPC, Fault.EIO):
            folder = fresh()
            outcome, _ = strike(action(folder), at, fault)
            if fault in (Fault.ENOSPC, Fault.EIO) and outcome is Outcome.RAISED and verb == "repair":
                assert _settled(folder) == _without_links(before, folder), (at, fault)
            else:
                assert _settled(folder) in (
                    _without_links(before, folder),
                    _without_links(after, folder),
                ), (at, fault)
            shutil.rmtree(folder)


def _new(folder: Path, policy: Policy) -> Snapshot:
    repair(folder, policy=policy)
    return snapshot(folder)


def _settled(folder: Path) -> Snapshot:
    """Let the next run recover, as any verb does first."""
    with folder_lock(folder):
        recover(folder)
    return _without_links(snapshot(folder), folder)


def _without_links(found: Snapshot, folder: Path) -> Snapshot:
    """Links lead to a blob named after the folder; only that they are links matters here."""
    return {name: (kind, b"" if kind == "link" else data, mode) for name, (kind, data, mode) in found.items()}


def test_a_killed_repair_is_a_finding_and_the_next_repair_finishes(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(FIXTURES / "wrapper-safetensors" / "checkpoint", folder)
    before = snapshot(folder)
    counted = _copy(folder, tmp_path / "count")
    total = len(points(_repairing(counted)))
    for at in range(total):
        again = _copy(folder, tmp_path / f"{at}")
        strike(_repairing(again), at, Fault.KILL_BEFORE)
        if "interrupted-repair" in {finding.code for finding in check(again).findings}:
            assert repair(again, dry_run=True).status == 1
            receipt = repair(again)
            assert receipt.recovered
            assert receipt.status == 0
            undo(again)
            assert snapshot(again) == before
            return
    raise AssertionError("no kill left a pending transaction")


def test_a_second_process_is_locked_out(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(FIXTURES / "wrapper-safetensors" / "checkpoint", folder)
    before = snapshot(folder)
    with folder_lock(folder), pytest.raises(CkptfixError, match=str(folder)):
        repair(folder)
    assert snapshot(folder) == before


def _copy(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def _repairing(folder: Path) -> Callable[[], None]:
    def run() -> None:
        repair(folder)

    return run
