"""The newest checkpoint of a store, and loads from there, while others repair, delete and write."""

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from ckptfix import UsageError, latest_checkpoint, repair, undo
from ckptfix.errors import ChangedError, OperationError
from ckptfix.storage import object_copies, store_files, stores, uploads
from ckptfix.training.loading import fetching
from ckptfix.training.loading.fetching import fetched
from tests.repairs.test_object_stores import FIXTURES, URL, objects, put
from tests.stores.simulated_s3 import Cloud, KillAt, Killed, cloud, open_simulated, read

__all__ = ["cloud"]

RUN = URL.rpartition("/")[0]
STUDENT_AND_TEACHER = FIXTURES / "student-teacher-wrapper-safetensors" / "checkpoint"


@pytest.fixture
def bucket(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """A store with one checkpoint; what is loaded from there is kept in ``tmp_path``."""
    for module in (stores, store_files, object_copies, uploads, fetching):
        monkeypatch.setattr(module, "open_store", lambda url: open_simulated(cloud, url))
    monkeypatch.setenv("CKPTFIX_STAGING", str(tmp_path))
    put(cloud, STUDENT_AND_TEACHER)
    yield cloud
    cloud.strike = lambda method, key, is_after: None


@pytest.mark.parametrize("verb", [repair, undo])
def test_what_a_killed_repair_has_changed_in_part_is_neither_the_newest_nor_loaded(
    bucket: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: object
) -> None:
    """A teacher gets its new number before the student's duplicate has gone: every file is complete
    by its header.
    """
    old = objects(bucket)
    repair(URL)
    new = objects(bucket)
    mixtures = at = 0
    was_killed = True
    while was_killed:
        at += 1
        put(bucket, STUDENT_AND_TEACHER)
        if verb is undo:
            repair(URL)
        bucket.strike = kill = KillAt(at, is_after=False)
        with suppress(Killed):
            repair(URL) if verb is repair else undo(URL)
        bucket.strike = lambda method, key, is_after: None
        was_killed = kill.is_dead
        if objects(bucket) in (old, new):
            continue
        mixtures += 1
        with pytest.raises(
            UsageError, match="checkpoint_7: a repair was interrupted or is still running"
        ):
            latest_checkpoint(RUN)
        with pytest.raises(UsageError, match=f"next: ckptfix repair {URL}"), fetched(URL):
            pass
        repair(URL, break_lock=True)
        assert latest_checkpoint(RUN) == URL
        with fetched(URL) as copy:
            assert (copy / "model.safetensors").read_bytes() == new["model.safetensors"]
    assert mixtures > 1


def test_a_folder_that_a_killed_repair_has_changed_in_part_is_not_the_newest(
    tmp_path: Path,
) -> None:
    for number, journal in ((1, ""), (2, ".ckptfix/0001.pending")):
        for name in STUDENT_AND_TEACHER.iterdir():
            (tmp_path / f"checkpoint_{number}").mkdir(exist_ok=True)
            (tmp_path / f"checkpoint_{number}" / name.name).write_bytes(name.read_bytes())
        (tmp_path / f"checkpoint_{number}" / journal).mkdir(parents=True, exist_ok=True)
    with pytest.warns(UserWarning, match="passed over checkpoint_2: a repair was interrupted"):
        assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint_1"


def test_the_newest_is_found_while_a_run_deletes_its_oldest(bucket: Cloud) -> None:
    """A job that evaluates asks for the newest one all the time."""
    for key, one in [*bucket.objects.items()]:
        bucket.write(key.replace("checkpoint_7", "checkpoint_6"), read(one.body))

    def rotate(method: str, key: str, is_after: bool) -> None:
        if method == "get_object" and "checkpoint_6" in key:
            for old in [key for key in bucket.objects if "checkpoint_6" in key]:
                del bucket.objects[old]

    bucket.strike = rotate
    assert latest_checkpoint(RUN) == URL

    def write(method: str, key: str, is_after: bool) -> None:
        if method == "get_object":
            bucket.write(key, b"always another one")

    bucket.strike = write
    with pytest.raises(ChangedError, match="next: wait until the save has ended"):
        latest_checkpoint(RUN)


def test_what_is_kept_for_an_undo_is_not_fetched_and_copies_of_killed_loads_go(
    bucket: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is as large as a checkpoint: the disk of a node that died twice while it loaded would be
    full.
    """
    repair(URL)
    bucket.write(
        "run/checkpoint_7/.ckptfix/new-1234/model.safetensors", b"of an upload that was cut short"
    )
    with fetched(URL) as copy:
        assert not (copy / ".ckptfix").exists()
        (folder,) = copies_in(tmp_path)
        killed = folder.with_name("of-a-killed-load")
        (killed / "checkpoint_6").mkdir(parents=True)
        bucket.write("run/checkpoint_7/notes.txt", b"another state of the checkpoint")
        with fetched(URL) as other:
            assert not killed.exists()
            assert (copy / "model.safetensors").exists()  # somebody loads it
            assert other != copy
    assert not copies_in(tmp_path)


def copies_in(staging: Path) -> list[Path]:
    return [
        path
        for path in (staging / f"ckptfix-copies-{os.geteuid()}").iterdir()
        if path.suffix != ".lock"
    ]


def fetches(bucket: Cloud) -> list[str]:
    """Return the keys of the models that are read from now on."""
    read: list[str] = []

    def note(method: str, key: str, is_after: bool) -> None:
        if method == "get_object" and key.endswith("model.safetensors") and not is_after:
            read.append(key)

    bucket.strike = note
    return read


def test_processes_that_look_at_once_share_one_copy_and_wait_for_no_end_of_a_load(
    bucket: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw that nothing was there: one fetched, the other waited to be alone, which it never
    was, as the first one waited for it.
    """
    read = fetches(bucket)
    both, seen = threading.Barrier(2, timeout=20), threading.local()
    real = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        real(fd, operation)
        if operation == fcntl.LOCK_SH and not hasattr(seen, "first"):
            seen.first = True
            both.wait()

    monkeypatch.setattr(fcntl, "flock", flock)

    def load() -> int:
        with fetched(URL) as copy:
            both.wait()
            return (copy / "model.safetensors").stat().st_size

    with ThreadPoolExecutor(2) as pool:
        sizes = [one.result() for one in [pool.submit(load) for _ in range(2)]]
    assert sizes == [(STUDENT_AND_TEACHER / "model.safetensors").stat().st_size] * 2
    assert len(read) == 1
    assert not copies_in(tmp_path)


def test_a_copy_is_complete_while_anybody_loads_it(
    bucket: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {
        path.name: path.read_bytes() for path in STUDENT_AND_TEACHER.iterdir() if path.is_file()
    }

    def load() -> None:
        for _ in range(20):
            with fetched(URL) as copy:
                assert {name: (copy / name).read_bytes() for name in expected} == expected

    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(load) for _ in range(4)]:
            one.result()
    assert not copies_in(tmp_path)


def test_a_copy_whose_removal_was_killed_is_fetched_anew(
    bucket: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark of a complete copy outlived some of its files."""

    def killed(folder: Path, *, ignore_errors: bool) -> None:
        next(folder.rglob("model.safetensors"), folder / "none").unlink(missing_ok=True)

    with monkeypatch.context() as patch:
        patch.setattr("ckptfix.training.loading.fetching.shutil.rmtree", killed)
        with fetched(URL):
            pass
    assert copies_in(tmp_path)
    with fetched(URL) as copy:
        assert (copy / "model.safetensors").exists()
    assert not copies_in(tmp_path)


def test_a_fetch_that_fails_leaves_no_part_and_the_next_one_begins_anew(
    bucket: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ckptfix.training.loading.fetching.os.pwrite", full)
        with pytest.raises(OSError, match="No space left"), fetched(URL):
            pass
    assert not copies_in(tmp_path)
    with fetched(URL) as copy:
        assert (copy / "model.safetensors").exists()


def test_the_marker_of_a_folder_is_left_out(bucket: Cloud) -> None:
    """The console of S3 makes such an object of no bytes, and many tools do."""
    bucket.write("run/checkpoint_7/logs/", b"")
    with fetched(URL) as copy:
        assert not (copy / "logs").exists()
        assert (copy / "model.safetensors").exists()
    bucket.write("run/checkpoint_7/logs//x", b"bytes")
    with (
        pytest.raises(OperationError, match=r"logs//x: not a valid file name .*empty name"),
        fetched(URL),
    ):
        pass
