"""Uploads of folders: killed at any request, the old or the new checkpoint is there, or one that
says it is neither.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ckptfix import check, latest_checkpoint, migrate, repair, seal, undo, verify
from ckptfix.checkpoint.manifest import Manifest
from ckptfix.cli import run
from ckptfix.conversion.uploading import upload
from ckptfix.diagnosis.completeness import OF_UPLOAD
from ckptfix.errors import ChangedError, OperationError, UsageError
from ckptfix.storage import object_copies, store_files, stores, uploads
from ckptfix.storage.markers import (
    UPLOAD,
    Uploaded,
    begun_now,
    parse_begun,
    parse_commit,
    upload_problem,
)
from ckptfix.storage.parallel import Stopped
from ckptfix.storage.paths import COMMITTED, MANIFEST
from ckptfix.storage.stores import ObjectInfo, Store, open_store
from ckptfix.storage.uploads import (
    MountedFolder,
    UploadPlan,
    begin_upload,
    changed_since,
    finish_upload,
    objects_replaced,
    put_in_store,
    remove_checkpoint,
    send,
    staged_files,
    upload_folder,
)
from tests.cli.test_teamwork import checkpoint, ranks
from tests.stores.servers import bucket, ministack, ministack_process
from tests.stores.simulated_s3 import Cloud, KillAt, Killed, cloud, open_simulated, read

seal_module = import_module("ckptfix.verification.seal")

__all__ = ["bucket", "cloud", "ministack", "ministack_process"]

FIXTURES = Path(__file__).parents[2] / "fixtures"

URL = "s3://bucket/run/checkpoint_7"
OLD = {
    "model.safetensors": b"old model",
    "optimizer.bin": b"old",
    "model_1.safetensors": b"stale",
    "empty": b"",
}
NEW = {
    "model.safetensors": b"new model, longer",
    "optimizer.bin": b"new",
    "below/x.bin": b"x" * 5000,
    "empty": b"",
}


def folder_of(tmp_path: Path, name: str, files: Mapping[str, bytes]) -> Path:
    for path, data in files.items():
        (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / path).write_bytes(data)
    return tmp_path / name


def contents(place: Store) -> dict[str, bytes]:
    return {
        key: place.read(key, 0, info.size)
        for key, info in place.list().items()
        if not key.startswith(".ckptfix/")
    }


def is_committed(place: Store) -> bool:
    there = place.list()
    if COMMITTED not in there:
        return False
    commit = parse_commit(place.read(COMMITTED, 0, there[COMMITTED].size))
    begun = parse_begun(place.read(UPLOAD, 0, there[UPLOAD].size)) if UPLOAD in there else None
    return begun is None or begun.upload == commit.upload


def serve(monkeypatch: pytest.MonkeyPatch, cloud: Cloud) -> None:
    """Let every URL be one of a simulated cloud."""
    for module in (stores, store_files, uploads, object_copies):
        monkeypatch.setattr(module, "open_store", lambda url: open_simulated(cloud, url))


def test_the_files_of_linked_folders_are_uploaded_and_what_cannot_be_is_refused(
    tmp_path: Path, cloud: Cloud
) -> None:
    """The weights of a checkpoint may lie behind a link; a commit without them would be
    believed.
    """
    folder = folder_of(tmp_path, "new", NEW)
    (folder_of(tmp_path, "elsewhere", {"optimizer_0/a": b"a"}) / "optimizer_0").rename(
        tmp_path / "far"
    )
    (folder / "optimizer_0").symlink_to("../far")
    (folder / ".ckptfix").mkdir()
    (folder / MANIFEST).write_bytes(b"{}")
    (folder / ".ckptfix/lock").write_bytes(
        b"7\n"
    )  # of a killed run; in the store it would lock the checkpoint
    upload_folder(open_simulated(cloud, URL), folder)
    assert ".ckptfix/lock" not in open_simulated(cloud, URL).list()
    assert contents(open_simulated(cloud, URL)) == {**NEW, "optimizer_0/a": b"a"}
    assert MANIFEST in open_simulated(cloud, URL).list()
    cloud.objects.clear()
    for problem in ("again", "pipe", "broken", "above"):
        if problem == "pipe":
            os.mkfifo(folder / problem)
        else:
            targets = {"again": "../far", "above": "..", "broken": "nowhere"}
            (folder / problem).symlink_to(targets[problem])
        with pytest.raises(OperationError, match=rf"new/.*{problem}.*nothing was uploaded; next: "):
            upload_folder(open_simulated(cloud, URL), folder)
        (folder / problem).unlink()
    assert not cloud.objects


@pytest.mark.parametrize("where", ["", "below"])
def test_a_folder_whose_repair_was_interrupted_is_not_uploaded(tmp_path: Path, where: str) -> None:
    folder = folder_of(tmp_path, "new", NEW)
    (folder / where / ".ckptfix/0001.pending").mkdir(parents=True)
    with pytest.raises(
        UsageError, match=r"a repair was interrupted.*nothing was uploaded; next: ckptfix check"
    ):
        upload(folder, "memory://interrupted/checkpoint")


def test_the_slips_of_a_new_user_are_named_and_nothing_is_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two paths the wrong way round, a run instead of a checkpoint, a path instead of a URL, a
    lost slash.
    """
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path, "run", {"checkpoint_0/model.safetensors": NEW["model.safetensors"]})
    url = "memory://slips/checkpoint_0"
    for first, second, words in (
        (
            url,
            "run/checkpoint_0",
            f"expected the folder first.*next: ckptfix upload run/checkpoint_0 {url}$",
        ),
        (
            url,
            "new",
            "expected a folder on this machine; next, to download a checkpoint: .*aws s3 cp",
        ),
        (
            "run",
            url,
            (
                r"run has no checkpoint files, but 1 folder \('checkpoint_0'\); name the one "
                r"that is a checkpoint"
            ),
        ),
        ("run/checkpoint_0", "copy", "copy is neither a URL, such as s3://"),
        ("run/checkpoint_0", "file:///copy", "/copy is neither a URL, such as s3://"),
        ("s3:/bucket/run", url, r"s3:/bucket/run does not exist; did you mean s3://bucket/run\?"),
    ):
        with pytest.raises(UsageError, match=words):
            upload(first, second)
    assert not open_store(url).list()


def test_an_object_that_went_after_the_commit_is_missed_but_not_what_a_repair_deleted(
    monkeypatch: pytest.MonkeyPatch, cloud: Cloud
) -> None:
    """Without a manifest the commit marker alone says what was there."""
    serve(monkeypatch, cloud)
    url = "s3://simulated/run/checkpoint_7"
    upload(FIXTURES / "accelerate-1.15.0" / "wrapper-safetensors" / "checkpoint", url)
    repair(url)
    assert check(url).status == 0
    undo(url)
    repair(url)
    for key in [key for key in cloud.objects if "/.ckptfix/0" in key]:
        del cloud.objects[key]
    cloud.write("run/checkpoint_7/model_1.safetensors", b"")
    del cloud.objects["run/checkpoint_7/optimizer.bin"]
    missing = [finding for finding in check(url).findings if finding.code == "missing-file"]
    assert [str(one.path) for one in missing] == ["optimizer.bin"]
    with pytest.raises(UsageError, match=r"checkpoint_7: optimizer\.bin is missing"):
        latest_checkpoint("s3://simulated/run", pattern="checkpoint_{}")


def test_an_object_that_was_replaced_after_the_commit_is_named_and_compared(
    monkeypatch: pytest.MonkeyPatch, cloud: Cloud
) -> None:
    serve(monkeypatch, cloud)
    url = "s3://simulated/run/checkpoint_7"
    upload(FIXTURES / "accelerate-1.15.0" / "clean-safetensors" / "checkpoint", url)

    def named() -> list[str]:
        return [words for words in check(url).not_checked if words.startswith(OF_UPLOAD)]

    before = cloud.requests
    assert named() == []
    compared = cloud.requests - before
    with monkeypatch.context() as patch:
        patch.setattr("ckptfix.diagnosis.completeness.replaced_since_upload", lambda *_: [])
        check(url)
    assert cloud.requests - before == 2 * compared
    report = verify(url)
    assert report.status == 0
    assert f"{url}/{COMMITTED}: digests of the upload, not signed" in str(report)
    for name in ("optimizer_1.bin", "notes.txt"):
        cloud.write(f"run/checkpoint_7/{name}", b"mine")
    assert [item.name for item in verify(url).differences] == ["optimizer_1.bin"]
    for name in ("optimizer_1.bin", "notes.txt"):
        del cloud.objects[f"run/checkpoint_7/{name}"]
    key = "run/checkpoint_7/model.safetensors"
    data = bytearray(read(cloud.objects[key].body))
    data[-3] ^= 1
    cloud.write(key, bytes(data))
    words = (
        f"{OF_UPLOAD} of 'model.safetensors': its size or ETag changed since the upload; next: "
        f"ckptfix verify {url}"
    )
    assert check(url).not_checked[0] == words
    assert [item.name for item in verify(url).differences] == ["model.safetensors"]
    assert f"or, if the change is intended: ckptfix seal {url}" in str(verify(url))
    seal(url)
    assert named() == []
    assert (verify(url).status, verify(url).statements) == (0, ())


def test_what_a_repair_changed_is_not_compared_with_the_upload(
    monkeypatch: pytest.MonkeyPatch, cloud: Cloud
) -> None:
    serve(monkeypatch, cloud)
    url = "s3://simulated/run/checkpoint_7"
    name = "student-teacher-wrapper-safetensors"
    upload(FIXTURES / "accelerate-1.15.0" / name / "checkpoint", url)
    repair(url)
    assert not any(words.startswith(OF_UPLOAD) for words in check(url).not_checked)
    report = verify(url)
    assert (report.status, len(report.differences)) == (0, 0)
    assert f"model_1.safetensors: not covered by {url}/{COMMITTED}" in str(report)
    # A later save has a manifest of its own.
    manifest = Manifest(versions={}, world_size=1, step=0)
    cloud.write(f"run/checkpoint_7/{MANIFEST}", manifest.to_bytes())
    assert verify(url).statements == ()
    del cloud.objects[f"run/checkpoint_7/{MANIFEST}"]
    assert verify(url).statements != ()
    # An interrupted upload has the marker of the one before it.
    upload_json = begun_now("another", {"model.safetensors": 1}).to_bytes()
    cloud.write(f"run/checkpoint_7/{UPLOAD}", upload_json)
    assert verify(url).statements == ()


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("is_after", [False, True])
def test_after_ctrl_c_the_message_of_an_upload_is_true_at_any_request(
    tmp_path: Path, cloud: Cloud, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], is_after: bool, is_old: bool,
) -> None:  # fmt: skip
    serve(monkeypatch, cloud)
    place, said = open_simulated(cloud, URL), set()
    folder = FIXTURES / "accelerate-1.15.0" / "wrapper-safetensors" / "checkpoint"
    at, seen, status = 0, 0, 130

    def strike(method: str, key: str, done: bool) -> None:
        nonlocal seen
        seen += done == is_after
        if seen == at and done == is_after:
            seen += 1
            raise KeyboardInterrupt

    while status == 130:
        at, seen = at + 1, 0
        cloud.objects.clear()
        if is_old:
            upload_folder(place, folder_of(tmp_path, "old", OLD))
        before = contents(place)
        cloud.strike = strike
        status = run(["upload", str(folder), URL, *(["--overwrite"] if is_old else [])])
        cloud.strike = lambda method, key, done: None
        words = capsys.readouterr().err.strip().rpartition("interrupted: ")[2]
        now = "complete" if is_committed(place) else "not complete"
        if contents(place) == before and (
            is_committed(place) if is_old else UPLOAD not in place.list()
        ):
            now = "unchanged"
        if status == 130:
            expected = {
                "unchanged": (
                    f"{URL} is unchanged",
                    f"nothing was written to {URL}",
                    "nothing was changed",
                ),
                "complete": (f"{URL} is complete",),
                "not complete": (f"{URL} is not complete: run the same command again to finish",),
            }
            assert words in expected[now], f"request {at}: {now}"
            said.add(now)
    assert status == 0
    assert said == {"unchanged", "complete", "not complete"}


@pytest.mark.parametrize("is_after", [False, True])
def test_killed_at_any_request_a_new_place_is_committed_or_is_not(
    tmp_path: Path, cloud: Cloud, is_after: bool
) -> None:
    folder = folder_of(tmp_path, "new", NEW)
    at, seen = 0, set()
    while True:
        at += 1
        cloud.objects.clear()
        cloud.strike = kill = KillAt(at, is_after=is_after)
        with suppress(Killed):
            upload_folder(open_simulated(cloud, URL), folder)
        cloud.strike = lambda method, key, after: None
        place = open_simulated(cloud, URL)
        committed = is_committed(place)
        seen.add(committed)
        if committed:
            assert contents(place) == NEW, at
        else:
            assert UPLOAD in place.list() or not place.list(), at
            upload_folder(place, folder)  # the next one finishes
            assert is_committed(place)
            assert contents(place) == NEW
        if not kill.is_dead:
            break
    assert seen == {True, False}
    assert at > 12


@pytest.mark.parametrize("is_after", [False, True])
def test_killed_at_any_request_a_replaced_checkpoint_is_the_old_one_the_new_one_or_can_be_finished(
    tmp_path: Path, cloud: Cloud, is_after: bool
) -> None:
    old, new = folder_of(tmp_path, "old", OLD), folder_of(tmp_path, "new", NEW)
    at, seen = 0, set()
    while True:
        at += 1
        cloud.objects.clear()
        upload_folder(open_simulated(cloud, URL), old)
        cloud.write("run/checkpoint_7/notes.txt", b"mine")
        cloud.strike = kill = KillAt(at, is_after=is_after)
        with suppress(Killed):
            upload_folder(open_simulated(cloud, URL), new, stale=OLD)
        cloud.strike = lambda method, key, after: None
        place = open_simulated(cloud, URL)
        mine = {"notes.txt": b"mine"}
        if is_committed(place):
            found = contents(place)
            assert found in (OLD | mine, NEW | mine), at
            seen.add("old" if found == OLD | mine else "new")
        else:  # it says so, and everything of the new one is in the store
            seen.add("neither")
            there = {key: one for key, one in place.list().items() if "/new-" in key}
            assert {
                key.split("/", 2)[2]: place.read(key, 0, one.size) for key, one in there.items()
            } == NEW, at
            upload_folder(place, new, stale=OLD)  # the next one finishes
            assert is_committed(place)
            assert contents(place).items() >= (NEW | mine).items()
        if not kill.is_dead:
            break
    assert seen == {"old", "new", "neither"}
    assert not [key for key in place.list() if "/new-" in key]


@pytest.mark.parametrize("is_after", [False, True])
def test_killed_at_any_request_of_an_overwrite_the_same_command_leaves_the_new_checkpoint_alone(
    tmp_path: Path, cloud: Cloud, is_after: bool
) -> None:
    """What the killed run left must not be in the way, and an old model next to new shards would be
    loaded.
    """
    old, new = folder_of(tmp_path, "old", OLD), folder_of(tmp_path, "new", NEW)

    def overwrite() -> None:
        place = open_simulated(cloud, URL)
        upload_folder(place, new, stale=objects_replaced(place, overwrite=True))

    at, was_killed = 0, True
    while was_killed:
        at += 1
        cloud.objects.clear()
        upload_folder(open_simulated(cloud, URL), old)
        cloud.strike = kill = KillAt(at, is_after=is_after)
        with suppress(Killed):
            overwrite()
        cloud.strike = lambda method, key, after: None
        overwrite()
        assert contents(open_simulated(cloud, URL)) == NEW, at
        assert is_committed(open_simulated(cloud, URL))
        was_killed = kill.is_dead
    assert at > 40


@pytest.mark.parametrize("is_simulated", [False, True])
def test_a_stop_during_an_upload_is_not_an_error_of_the_store(
    tmp_path: Path, cloud: Cloud, is_simulated: bool
) -> None:
    """The team knows why it stops; rank 0 printed "Stopped", as if the store had said so."""
    place = (
        open_simulated(cloud, URL) if is_simulated else open_store("memory://stopped/checkpoint_7")
    )

    def stop(count: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        upload_folder(place, folder_of(tmp_path, "new", NEW), progress=stop)
    assert not is_committed(place)


def sent_over_another(
    tmp_path: Path, cloud: Cloud
) -> tuple[Store, UploadPlan, dict[str, Uploaded]]:
    """Return an upload over an older one, of which all was sent and no name was replaced."""
    place = open_simulated(cloud, URL)
    upload_folder(place, folder_of(tmp_path, "old", OLD))
    new = folder_of(tmp_path, "new", NEW)
    plan = begin_upload(place, staged_files(new), objects_replaced(place, overwrite=True))
    sent = send(place, plan, new, plan.files)
    return place, plan, sent


@pytest.mark.parametrize("name", ["model.safetensors", "model_1.safetensors", "below/x.bin"])
@pytest.mark.parametrize("is_late", [False, True])
def test_what_somebody_writes_during_an_overwrite_is_not_lost(
    tmp_path: Path, cloud: Cloud, name: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced, deleted, or new: an upload of terabytes takes hours, in which others write."""
    place, plan, sent = sent_over_another(tmp_path, cloud)
    put = place.put

    def write() -> None:
        cloud.write(f"run/checkpoint_7/{name}", b"of somebody")

    def write_first(key: str, *args: Any, **kwargs: Any) -> ObjectInfo:
        if key == UPLOAD:
            write()
        return put(key, *args, **kwargs)

    if is_late:
        monkeypatch.setattr(place, "put", write_first)
    else:
        write()
    with pytest.raises(ChangedError, match=f"{name}: another program wrote this object"):
        finish_upload(place, plan, sent)
    assert contents(place)[name] == b"of somebody"
    assert is_committed(place) is not is_late
    if not is_late:
        assert contents(place) == {**OLD, name: b"of somebody"}


def test_what_somebody_deletes_during_an_overwrite_stops_it_before_the_first_name(
    tmp_path: Path, cloud: Cloud
) -> None:
    """Such as a repair, which can be undone while the other names are still the old ones."""
    place, plan, sent = sent_over_another(tmp_path, cloud)
    place.delete("model_1.safetensors")  # was to be deleted
    place.delete("optimizer.bin")
    with pytest.raises(
        ChangedError, match=r"optimizer\.bin: another program deleted .*nothing was replaced"
    ):
        finish_upload(place, plan, sent)
    assert contents(place) == {name: OLD[name] for name in ("model.safetensors", "empty")}
    assert is_committed(place)


def test_two_uploads_to_one_place_never_commit_a_mix(tmp_path: Path, cloud: Cloud) -> None:
    one, other = folder_of(tmp_path, "one", NEW), folder_of(tmp_path, "other", OLD)
    first, second = open_simulated(cloud, URL), open_simulated(cloud, URL)
    plan = begin_upload(first, staged_files(one))
    sent = send(first, plan, one, ["model.safetensors"])
    upload_folder(second, other)
    with pytest.raises(ChangedError, match="another program wrote"):
        sent |= send(first, plan, one, ["optimizer.bin"])
    with pytest.raises(OperationError):
        finish_upload(first, plan, sent)
    assert is_committed(second)
    assert contents(second) == OLD


def test_an_object_that_another_program_changed_is_not_committed(
    tmp_path: Path, cloud: Cloud
) -> None:
    folder = folder_of(tmp_path, "new", NEW)
    place = open_simulated(cloud, URL)
    plan = begin_upload(place, staged_files(folder))
    sent = send(place, plan, folder, plan.files)
    cloud.write("run/checkpoint_7/optimizer.bin", b"???")
    with pytest.raises(
        ChangedError, match=r"optimizer\.bin: another program .* \(expected 3 B, ETag .*; found 3 B"
    ):
        finish_upload(place, plan, sent)
    assert not is_committed(place)


def test_only_what_was_uploaded_may_be_replaced(tmp_path: Path, cloud: Cloud) -> None:
    place = open_simulated(cloud, URL)
    assert objects_replaced(place, overwrite=False) == []
    cloud.write("run/checkpoint_7/model.safetensors", b"of somebody")
    with pytest.raises(UsageError, match="no commit marker"):
        objects_replaced(place, overwrite=True)
    cloud.objects.clear()
    upload_folder(place, folder_of(tmp_path, "old", OLD))
    with pytest.raises(UsageError, match="or add --overwrite"):
        objects_replaced(place, overwrite=False)
    assert set(objects_replaced(place, overwrite=True)) == {*OLD, MANIFEST}
    cloud.write(f"run/checkpoint_7/{MANIFEST}", b"of a seal")
    upload_folder(
        place,
        folder_of(tmp_path, "new", {"a": b"new"}),
        stale=objects_replaced(place, overwrite=True),
    )
    assert set(place.list()) == {"a", UPLOAD, COMMITTED}
    cloud.write("run/checkpoint_7/notes.txt", b"mine")
    assert changed_since(place) == ["notes.txt"]
    with pytest.raises(UsageError, match=r"changed since the upload: 'notes\.txt'"):
        objects_replaced(place, overwrite=True)


@pytest.mark.parametrize("is_of_ours", [False, True])
def test_a_checkpoint_that_is_removed_is_never_half_a_checkpoint(
    tmp_path: Path, cloud: Cloud, is_of_ours: bool
) -> None:
    at = 0
    while True:
        at += 1
        cloud.objects.clear()
        upload_folder(open_simulated(cloud, URL), folder_of(tmp_path, "old", OLD))
        if not is_of_ours:  # copied by another tool, which left the records out
            for name in (UPLOAD, COMMITTED):
                del cloud.objects[f"run/checkpoint_7/{name}"]
        cloud.strike = kill = KillAt(at, is_after=False)
        with suppress(Killed):
            remove_checkpoint(open_simulated(cloud, URL))
        cloud.strike = lambda method, key, after: None
        place = open_simulated(cloud, URL)
        there = set(contents(place))
        assert there in (set(), set(OLD)) or (UPLOAD in place.list() and not is_committed(place)), (
            at
        )
        if not kill.is_dead:
            break
    assert not place.list()


def test_a_mount_gets_the_marker_last_and_killed_at_any_write_it_says_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount has no rename: every file is written once, from its beginning, and closed."""
    folder = folder_of(tmp_path, "new", NEW)
    save, written = MountedFolder._save, 0
    at = 0

    def dying(self: MountedFolder, *arguments: Any) -> Any:
        nonlocal written
        written += 1
        if written == at:
            raise Killed
        return save(self, *arguments)

    monkeypatch.setattr(MountedFolder, "_save", dying)
    while True:
        at, written = at + 1, 0
        mount = tmp_path / f"mount{at}" / "checkpoint_7"
        try:
            upload_folder(MountedFolder(str(mount)), folder)
        except Killed:
            if mount.exists():
                assert upload_problem(mount) is not None
            continue
        break
    assert at == len(NEW) + 3
    assert upload_problem(mount) is None
    assert contents(MountedFolder(str(mount))) == NEW


def test_a_file_on_a_mount_is_neither_replaced_nor_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path, "new", NEW)
    mount = MountedFolder(str(tmp_path / "mount"))
    put_in_store(mount, folder, name="model.safetensors", overwrite=False)
    (folder / "model.safetensors").write_bytes(b"of another program")
    with pytest.raises(ChangedError, match="another program wrote"):
        put_in_store(mount, folder, name="model.safetensors", overwrite=False)
    assert contents(mount) == {"model.safetensors": NEW["model.safetensors"]}

    def lossy(descriptor: int) -> None:
        os.truncate(descriptor, 1)

    monkeypatch.setattr(os, "fsync", lossy)
    with pytest.raises(OperationError, match="now has 1 bytes: the object is not complete"):
        mount.put("other", b"bytes")


def test_a_problem_says_how_much_arrived(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "c", {"a": b"1234", "b": b"12"})
    (folder / ".ckptfix").mkdir()
    assert upload_problem(folder) is None  # of nobody's upload
    (folder / UPLOAD).write_bytes(begun_now("7", {"a": 4, "b": 3, "c": 1}).to_bytes())
    problem = upload_problem(folder)
    assert problem is not None
    assert "1 of 3 files arrived, 4 B of 8 B" in problem
    assert f"or process {os.getpid()} on {os.uname().nodename} has not finished it" in problem


def test_an_upload_of_which_nothing_has_arrived_is_named(tmp_path: Path) -> None:
    (tmp_path / ".ckptfix").mkdir()
    (tmp_path / UPLOAD).write_bytes(begun_now("7", {"model.safetensors": 4}).to_bytes())
    with pytest.raises(
        UsageError,
        match=r"has no checkpoint files: .* the upload was interrupted, .*"
        r"0 of 1 file arrived.*; next: wait until the upload has ended",
    ):
        check(tmp_path)


def test_objects_are_what_the_marker_says(tmp_path: Path, cloud: Cloud) -> None:
    place = open_simulated(cloud, URL)
    upload_folder(place, folder_of(tmp_path, "new", NEW))
    there = place.list()
    commit = parse_commit(place.read(COMMITTED, 0, there[COMMITTED].size))
    assert {name: (one.size, one.etag) for name, one in commit.objects.items()} == {
        name: (there[name].size, there[name].etag) for name in NEW
    }
    assert max(there, key=lambda key: there[key].modified_ns) == COMMITTED
    assert (
        read(cloud.objects["run/checkpoint_7/model.safetensors"].body) == NEW["model.safetensors"]
    )


@pytest.mark.slow
def test_migrate_and_salvage_write_to_a_url(
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CKPTFIX_STAGING", str(tmp_path))
    source, url = (
        FIXTURES / "accelerate-1.15.0/student-teacher-wrapper-safetensors/checkpoint",
        f"{bucket}/new",
    )
    options = ["--to", "bin", "--allow-damage"]
    assert run(["migrate", str(source), url, *options, "--dry-run"]) == 0
    assert open_store(url).list() == {}
    assert run(["migrate", str(source), url, *options]) == 0
    said = capsys.readouterr()
    assert f"in {url}" in said.out
    assert str(tmp_path) not in said.out + said.err
    assert is_committed(open_store(url))
    assert check(url).status == check(source).status
    assert not list(tmp_path.iterdir())
    migrate(source, tmp_path / "local", to="bin", allow_damage=True)
    assert {
        name: data for name, data in contents(open_store(url)).items() if name.endswith(".bin")
    } == {path.name: path.read_bytes() for path in (tmp_path / "local").glob("*.bin")}
    assert run(["migrate", str(source), url, "--to", "safetensors"]) == 2
    assert "or add --overwrite" in capsys.readouterr().err
    options = ["--to", "safetensors", "--overwrite", "--allow-damage"]
    assert run(["migrate", str(source), url, *options]) == 0
    assert "pytorch_model.bin" not in open_store(url).list()
    open_store(url).put("notes.txt", b"mine")
    assert run(["migrate", str(source), url, "--to", "bin", "--overwrite"]) == 2
    assert (
        run(["salvage", str(FIXTURES / "golden/truncated-file/checkpoint"), f"{bucket}/saved"]) == 1
    )
    assert is_committed(open_store(f"{bucket}/saved"))
    assert "salvage.json" in open_store(f"{bucket}/saved").list()


@pytest.mark.slow
def test_seal_writes_the_manifest_next_to_the_objects(
    bucket: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"{bucket}/sealed"
    source = FIXTURES / "golden" / "doubled-model" / "checkpoint"
    upload_folder(open_store(url), source)
    assert run(["seal", url, "--force"]) == 0
    assert "sealed s3://" in capsys.readouterr().out
    assert run(["verify", url]) == run(["verify", url, "--data"])
    assert ".ckptfix/manifest.json" in open_store(url).list()
    assert ".ckptfix/lock" not in open_store(url).list()
    open_store(url).put("notes.txt", b"mine")
    real = seal_module.hash_contents

    def meanwhile(*arguments: Any, **words: Any) -> Any:
        open_store(url).put(".ckptfix/manifest.json", b"of another seal")
        return real(*arguments, **words)

    monkeypatch.setattr(seal_module, "hash_contents", meanwhile)
    with pytest.raises(ChangedError, match="another program wrote"):
        seal_module.seal(url, force=True)


@pytest.mark.slow
def test_two_processes_migrate_to_a_store_as_one_does(tmp_path: Path, bucket: str) -> None:
    source = checkpoint(tmp_path / "source")
    options = ("--to", "safetensors", "--max-shard-size", "40KB")
    assert run(["migrate", str(source), f"{bucket}/one/checkpoint_7", *options]) == 0
    two = ranks("migrate", source, f"{bucket}/two/checkpoint_7", *options)
    assert [process.returncode for process in two] == [0, 0], two[0].stderr
    assert f"in {bucket}/two/checkpoint_7" in two[0].stdout
    places = [open_store(f"{bucket}/{name}/checkpoint_7") for name in ("one", "two")]
    assert all(map(is_committed, places))
    assert contents(places[0]) == contents(places[1])
    assert len(contents(places[1])) == 9
    again = ranks("migrate", source, f"{bucket}/two/checkpoint_7", *options)
    assert [process.returncode for process in again] == [2, 2]
    assert "choose another path, or add --overwrite" in again[0].stderr


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_upload_that_one_process_fails_commits_nothing(
    tmp_path: Path, bucket: str, rank: int
) -> None:
    source = checkpoint(tmp_path / "source")
    command = (
        "migrate",
        source,
        f"{bucket}/checkpoint_7",
        "--to",
        "safetensors",
        "--max-shard-size",
        "40KB",
    )
    failed = ranks(*command, strike=(rank, 0, "error-in-uploads"), CKPTFIX_STAGING=str(tmp_path))
    assert [process.returncode for process in failed] == [3, 3]
    assert "Input/output error" in failed[0].stderr
    assert not is_committed(open_store(f"{bucket}/checkpoint_7"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    refused = ranks(*command, "--partial", tmp_path / "partial")
    assert [process.returncode for process in refused] == [2, 2]
    assert "is a URL; next: migrate to a folder" in refused[0].stderr
