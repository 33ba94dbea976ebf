"""The newest checkpoint of a store, and loads from there, while others repair, delete and write."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckptfix import UsageError, latest_checkpoint, repair, undo
from ckptfix.errors import ChangedError
from ckptfix.storage import object_copies, store_files, stores, uploads
from ckptfix.training.loading import fetching
from ckptfix.training.loading.fetching import fetched
from tests.repairs.test_object_stores import FIXTURES, URL, objects, put
from tests.stores.simulated_s3 import Cloud, KillAt, Killed, cloud, open_simulated, read

__all__ = ["cloud"]

RUN = URL.rpartition("/")[0]
STUDENT_AND_TEACHER = FIXTURES / "student-teacher-wrapper-safetensors" / "checkpoint"


@pytest.fixture
def bucket(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    for module in (stores, store_files, object_copies, uploads, fetching):
        monkeypatch.setattr(module, "open_store", lambda url: open_simulated(cloud, url))
    yield cloud
    cloud.strike = lambda method, key, is_after: None


@pytest.mark.parametrize("verb", [repair, undo])
def test_what_a_killed_repair_has_changed_in_part_is_neither_the_newest_nor_loaded(
    bucket: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: object
) -> None:
    """A teacher gets its new number before the student's duplicate has gone: every file is complete
    by its header.
    """
    monkeypatch.setenv("CKPTFIX_STAGING", str(tmp_path))
    old = put(bucket, STUDENT_AND_TEACHER)
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
    put(bucket, STUDENT_AND_TEACHER)
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
    monkeypatch.setenv("CKPTFIX_STAGING", str(tmp_path))
    put(bucket, STUDENT_AND_TEACHER)
    repair(URL)
    bucket.write(
        "run/checkpoint_7/.ckptfix/new-1234/model.safetensors", b"of an upload that was cut short"
    )
    with fetched(URL) as copy:
        assert not (copy / ".ckptfix").exists()
        (folder,) = (tmp_path / f"ckptfix-loads-{os.geteuid()}").iterdir()
        killed = folder.with_name("of-a-killed-load")
        (killed / "checkpoint_6").mkdir(parents=True)
        bucket.write("run/checkpoint_7/notes.txt", b"another state of the checkpoint")
        with fetched(URL) as other:
            assert not killed.exists()
            assert (copy / "model.safetensors").exists()  # somebody loads it
            assert other != copy
    assert not list(folder.parent.iterdir())
