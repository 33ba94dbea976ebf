"""Temporary files and folders: killed at any call, the old or the new one is there, and the next
writer cleans up.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfix import ChangedError, check
from ckptfix.storage import staged
from ckptfix.storage.staged import Staging, put_in_place, staging_for, sweep, write_file
from tests.storage.crash import Fault, Outcome, points, strike

pytestmark = pytest.mark.alone(timeout=1800)

DAY = 86400.0
KEY = "0123456789abcdef"


def dead_pid() -> int:
    """Return the number of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def left_over(parent: Path, name: str, age: float = 0.0) -> Path:
    path = parent / name
    path.mkdir()
    (path / "model.safetensors").touch()
    for each in (path / "model.safetensors", path):
        os.utime(each, (time.time() - age,) * 2)
    return path


def test_only_what_dead_writers_left_is_swept(tmp_path: Path) -> None:
    machine, dead, alive = staged.this_machine(), dead_pid(), os.getppid()

    def ours(purpose: str, where: str, pid: int, age: float = 0.0) -> Path:
        return left_over(tmp_path, f"{purpose}{where}+{pid}+{KEY}+c", age)

    gone, kept = [], []
    for purpose in (staged.SAVING, staged.WRITING):
        gone += [ours(purpose, machine, dead), ours(purpose, machine, os.getpid())]
        gone += [ours(purpose, "a-host-that-is-no-more-1", 7, 2 * DAY)]
        kept += [
            ours(purpose, machine, alive, 2 * DAY),
            ours(purpose, "another-host-1", 7, DAY / 2),
        ]
        # the same host name and process number, in another container
        kept += [ours(purpose, machine.rpartition("-")[0] + "-1", dead)]
        # another machine of the same name: the first namespace has one number everywhere
        kept += [ours(purpose, machine.rpartition(".")[0], dead)]
        # no process can have such a number, so nobody wrote it; asking for it raised OverflowError
        kept += [
            ours(purpose, machine, 99999999999999, 2 * DAY),
            ours(purpose, machine, 0, 2 * DAY),
        ]
    file = tmp_path / f"{staged.WRITING}a-host-that-is-no-more-1+7+{KEY}+report.html"
    file.touch()
    os.utime(file, (time.time() - 2 * DAY,) * 2)
    kept += [
        left_over(tmp_path, ".ckptfix-mine", 2 * DAY),
        left_over(tmp_path, "c.ckptfix-1", 2 * DAY),
        # as 0.4.0 called the folder of a migrate, whose old checkpoint may be in it
        left_over(tmp_path, f".c.ckptfix-migrating-{KEY}-{dead}-0", 2 * DAY),
    ]
    sweep(tmp_path)
    assert not any(path.exists() for path in (*gone, file))
    assert all(path.exists() for path in kept)


@pytest.mark.parametrize("where", ["../c", "/tmp/ckptfix-never", "sub/../../c", ""])
def test_a_record_never_leads_out_of_the_folder(tmp_path: Path, where: str) -> None:
    parent = tmp_path / "parent"
    folder = parent / f"{staged.WRITING}{staged.this_machine()}+{dead_pid()}+{KEY}+c"
    for part in ("old", "new"):
        (folder / part).mkdir(parents=True)
        (folder / part / "x").touch()
    (folder / "output").write_text(where)
    sweep(parent)
    assert (folder / "old" / "x").exists()
    assert os.listdir(tmp_path) == ["parent"]
    assert os.listdir(parent) == [folder.name]


def test_a_file_killed_at_any_call_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "report.html"

    def action() -> None:
        write_file(path, b"new")

    for exists in (True, False):
        for at in range(len(points(action))):
            for fault in (Fault.KILL_BEFORE, Fault.KILL_AFTER, Fault.TORN, Fault.EIO):
                path.unlink(missing_ok=True)
                if exists:
                    path.write_bytes(b"old")
                strike(action, at, fault)
                there = path.read_bytes() if path.exists() else None
                assert there in ((b"old" if exists else None), b"new"), (at, fault)
                write_file(path, b"again")
                assert os.listdir(tmp_path) == ["report.html"], (at, fault)


def writing(output: Path, *, name: str | None, exists: bool) -> Callable[[], None]:
    def action() -> None:
        with staging_for(output, name=name) as staging:
            (staging.new / (name or "model.safetensors")).write_text("new")
            put_in_place(staging, overwrite=exists)

    return action


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("name", [None, "model.safetensors"])
@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_a_folder_killed_at_any_call_is_the_old_or_the_new_one(
    tmp_path: Path,
    exchanges: bool,
    exists: bool,
    name: str | None,
    inside: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not exchanges:
        monkeypatch.setattr(staged, "exchange", lambda one, other: False)
    count, at, ended = 0, 0, False
    while not ended:
        for fault in (Fault.KILL_BEFORE, Fault.KILL_AFTER, Fault.EIO):
            parent = tmp_path / str(count)
            output = parent / inside / "c"
            output.parent.mkdir(parents=True)
            if exists and name:
                output.write_text("old")
            elif exists:
                output.mkdir()
                (output / "model.safetensors").write_text("old")
            action = writing(output, name=name, exists=exists)
            ended |= strike(action, at, fault)[0] is Outcome.FINISHED
            assert not inside or set(os.listdir(output.parent)) <= {"c"}, (
                "Accelerate takes every name there"
            )
            sweep(parent)
            file = output if name else output / "model.safetensors"
            there = file.read_text() if file.exists() else None
            assert there in ("old" if exists else None, "new"), (at, fault)
            assert set(os.listdir(parent)) <= {inside or "c"}, (at, fault)
            count += 1
        at += 1
    assert at > 4


def test_what_came_to_the_output_meanwhile_stays(tmp_path: Path) -> None:
    output = tmp_path / "c"
    with staging_for(output) as staging:
        (staging.new / "x").touch()
        output.mkdir()
        (output / "theirs").touch()
        with pytest.raises(ChangedError, match="was created meanwhile"):
            put_in_place(staging)
    assert [path.name for path in tmp_path.rglob("*")] == ["c", "theirs"]


def test_check_names_a_staging_folder_with_the_checkpoint_that_was_to_be_replaced(
    tmp_path: Path,
) -> None:
    folder = tmp_path / f"{staged.WRITING}{staged.this_machine()}+{dead_pid()}+{KEY}+c"
    staging = Staging(folder, tmp_path / "c")
    for path in (staging.new, folder / "old"):
        path.mkdir(parents=True)
        (path / "x").touch()
    (finding,) = check(folder).findings
    assert "of a migrate, salvage or repair that was killed" in str(finding)
    assert str(finding).endswith("it holds the checkpoint that was being replaced")
    assert "rm -r" not in finding.advice_at(str(folder))
