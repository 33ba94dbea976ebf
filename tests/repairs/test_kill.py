"""Kill, tear and fail a whole repair and a whole undo at every point: the folder is the old one or
the new one.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from ckptfix import CkptfixError, Policy, UsageError, check, repair, undo
from ckptfix.cli import run as cli
from ckptfix.storage.lock import folder_lock
from tests.sampling import sampled
from tests.storage.crash import Fault, Outcome, points, strike
from tests.storage.folders import recover

pytestmark = pytest.mark.alone(timeout=1800)

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
    "drop two and a zip": ("triple-bin", Policy(), False),
    "drop and renumber headers": ("student-teacher-wrapper-safetensors", Policy(), False),
    "new zip": ("lone-nested-train", Policy(atomic=True), False),
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
    for at, fault in sampled(product(range(total), Fault)):
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
    return {
        name: (kind, b"" if kind == "link" else data, mode)
        for name, (kind, data, mode) in found.items()
    }


@pytest.mark.slow
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


def _repairing(folder: Path, policy: Policy | None = None) -> Callable[[], None]:
    def run() -> None:
        repair(folder, policy=policy)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_after_a_kill_every_verb_goes_on(tmp_path: Path, name: str) -> None:
    """Killed at each point: a dry run changes nothing, the next repair ends in the new one, undo in
    the old one.
    """
    fixture, policy, linked = SCENARIOS[name]
    made = _Made(tmp_path, fixture, linked)
    before = snapshot(made.fresh())
    after = _new(made.fresh(), policy)
    total = len(points(_repairing(made.fresh(), policy)))
    for at in sampled(range(total)):
        folder = made.fresh()
        strike(_repairing(folder, policy), at, Fault.KILL_AFTER)
        left = _tree(folder)
        repair(folder, policy=policy, dry_run=True)
        assert _tree(folder) == left, (at, "a dry run changed something")
        check(folder)
        assert _tree(folder) == left, (at, "a check changed something")
        receipt = repair(folder, policy=policy)
        assert receipt.status == 0, at
        assert _without_links(snapshot(folder), folder) == _without_links(after, folder), at
        undo(folder)
        assert _without_links(snapshot(folder), folder) == _without_links(before, folder), at
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_undo_after_a_killed_repair_gives_the_old_one(tmp_path: Path, name: str) -> None:
    fixture, policy, linked = SCENARIOS[name]
    made = _Made(tmp_path, fixture, linked)
    before = snapshot(made.fresh())
    total = len(points(_repairing(made.fresh(), policy)))
    undone = 0
    for at in sampled(range(total)):
        folder = made.fresh()
        strike(_repairing(folder, policy), at, Fault.KILL_BEFORE)
        try:
            undo(folder)
            undone += 1
        except UsageError:  # nothing had begun
            pass
        assert _without_links(snapshot(folder), folder) == _without_links(before, folder), at
        assert "interrupted-repair" not in {finding.code for finding in check(folder).findings}, at
        shutil.rmtree(folder)
    assert undone > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "fixture", ["wrapper-safetensors", "lone-nested-bin", "sharded-gpt2-nested"]
)
def test_a_killed_copy_leaves_the_source_alone(tmp_path: Path, fixture: str) -> None:
    """``--output``: the source is never touched, and DST is there whole or not at all."""
    source = tmp_path / "c"
    shutil.copytree(FIXTURES / fixture / "checkpoint", source)
    before = _tree(source)

    def copying(target: Path) -> Callable[[], None]:
        def run() -> None:
            repair(source, output=target)

        return run

    total = len(points(copying(tmp_path / "whole")))
    whole = snapshot(tmp_path / "whole")
    assert total > 3
    for at, fault in sampled(product(range(total), Fault)):
        target = tmp_path / f"{at}-{fault.name}"
        strike(copying(target), at, fault)
        assert _tree(source) == before, (at, fault)
        assert not target.exists() or snapshot(target) == whole, (at, fault)
        repair(source, output=target.with_name(f"{target.name}-again"))
        assert not [one.name for one in tmp_path.iterdir() if one.name.startswith(".")], (
            at,
            fault,
        )


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["repair", "undo"])
def test_a_read_only_folder_is_status_3(
    tmpfs: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmpfs / "c"
    shutil.copytree(FIXTURES / "wrapper-safetensors" / "checkpoint", folder)
    if verb == "undo":
        repair(folder)
    before = _tree(folder)
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    try:
        assert cli([verb, str(folder)]) == 3
        assert "Read-only file system" in capsys.readouterr().err
        assert cli(["check", str(folder)]) == (1 if verb == "repair" else 0)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", tmpfs], check=True)
    assert _tree(folder) == before
    assert cli([verb, str(folder)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["drop and renumber", "append to a zip", "new files", "rename shards and index"]
)
def test_a_full_disk_changes_nothing(
    tmpfs: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real ENOSPC wherever it strikes: from no free page to enough, as if another process took
    the room.
    """
    monkeypatch.setattr("ckptfix.repairs.repair.free_space", lambda path: (1 << 40, 4096))
    fixture, policy, _ = SCENARIOS[name]
    folder = tmpfs / "c"
    shutil.copytree(FIXTURES / fixture / "checkpoint", folder)
    before = snapshot(folder)
    failed = done = 0
    for pages in range(40):
        filler = tmpfs / "filler"
        with filler.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            os.ftruncate(file.fileno(), max(0, file.tell() // 4096 - pages) * 4096)
        status = cli(["repair", str(folder), *(["--atomic"] if policy.atomic else [])])
        filler.unlink()
        assert status in (0, 3), pages
        if status == 0:
            done += 1
            undo(folder)
        else:
            failed += 1
        assert snapshot(folder) == before, pages
        assert cli(["check", str(folder)]) == 1
    assert failed > 2
    assert done > 5


@pytest.mark.slow
def test_too_little_room_is_noticed_before_anything_is_touched(
    tmpfs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmpfs / "c"
    shutil.copytree(FIXTURES / "wrapper-safetensors" / "checkpoint", folder)
    before = snapshot(folder)
    with (tmpfs / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert cli(["repair", str(folder)]) == 3
    assert "free space" in capsys.readouterr().err
    assert snapshot(folder) == before


@pytest.mark.slow
def test_another_process_with_the_lock_is_status_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "c"
    shutil.copytree(FIXTURES / "wrapper-safetensors" / "checkpoint", folder)
    program = (
        "import sys\nfrom pathlib import Path\nfrom ckptfix.storage.lock import folder_lock\nwith "
        "folder_lock(Path(sys.argv[1])):\n    print('locked', flush=True)\n    sys.stdin.read()\n"
    )
    before = snapshot(folder)
    with subprocess.Popen(
        [sys.executable, "-c", program, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        assert cli(["repair", str(folder)]) == 3
        assert str(other.pid) in capsys.readouterr().err
        assert cli(["repair", str(folder), "--dry-run"]) == 1
        assert cli(["check", str(folder)]) == 1
        assert snapshot(folder) == before
        other.stdin.close()
    assert cli(["repair", str(folder)]) == 0


class _Made:
    """Makes one folder of a scenario after the other."""

    def __init__(self, base: Path, fixture: str, linked: bool) -> None:
        self.base, self.fixture, self.linked, self.number = base, fixture, linked, 0

    def fresh(self) -> Path:
        self.number += 1
        folder = self.base / str(self.number)
        make(folder, self.fixture, self.linked)
        return folder


def _tree(folder: Path) -> dict[str, tuple[str, int, bytes]]:
    """Everything in a folder, its journal included."""
    return {
        str(path.relative_to(folder)): (
            os.readlink(path) if path.is_symlink() else "",
            path.lstat().st_mode,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["drop and renumber", "append to a zip", "new files", "rename shards and index"]
)
def test_a_repair_asks_for_no_more_room_than_it_may_need(
    tmpfs: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An edit of a header needed 1 MiB of free space. What is asked for must be enough."""
    fixture, policy, _ = SCENARIOS[name]
    folder = tmpfs / "c"
    shutil.copytree(FIXTURES / fixture / "checkpoint", folder)
    filler = tmpfs / "filler"
    for pages in range(10, 60):
        with filler.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            os.ftruncate(file.fileno(), file.tell() // 4096 * 4096 - pages * 4096)
        if cli(["repair", str(folder), *(["--atomic"] if policy.atomic else [])]) == 0:
            break
        assert "of free space, but only" in capsys.readouterr().err
    assert 10 < pages < 50
