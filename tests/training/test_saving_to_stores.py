"""Saves to an object store, and to a mount of one: complete, or known not to be; the commit marker
is written last.
"""

import logging
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from ckptfix import check
from ckptfix.checkpoint.latest import incomplete
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.cli import run as run_cli
from ckptfix.errors import OperationError, UsageError
from ckptfix.storage import mounts, uploads
from ckptfix.storage.markers import DESTINATION, UPLOAD, parse_commit
from ckptfix.storage.paths import COMMITTED
from ckptfix.storage.stores import open_store
from ckptfix.training.loading.load_state import load_state_tolerant
from ckptfix.training.resuming.guarded_load import latest_checkpoint
from tests.stores.faults import proxied
from tests.stores.servers import Server, bucket, ministack, ministack_process
from tests.training.ranks import run_ranks
from tests.training.test_saving import run, set_weight, weight_of

__all__ = ["bucket", "ministack", "ministack_process"]

pytestmark = pytest.mark.slow
FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    staging = tmp_path / "staging"
    staging.mkdir()
    monkeypatch.setenv("CKPTFIX_STAGING", str(staging))
    yield staging
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_a_save_arrives_with_its_marker_last_and_is_loaded(
    bucket: str, staging: Path, tmp_path: Path
) -> None:
    accelerator, model = run(None)
    set_weight(model, 3.0)
    url = f"{bucket}/run/checkpoint_7"
    assert accelerator.save_state(url) == url
    store = open_store(url)
    there = store.list()
    commit = parse_commit(store.read(COMMITTED, 0, there[COMMITTED].size))
    assert set(there) == {COMMITTED, UPLOAD, *commit.objects}
    assert {
        "model.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
        ".ckptfix/manifest.json",
    } < set(there)
    assert not list(staging.iterdir())
    assert check(url).findings == ()
    set_weight(model, 0.0)
    accelerator.load_state(url)
    assert weight_of(model) == 3.0
    set_weight(model, 0.0)
    load_state_tolerant(accelerator, url)
    assert weight_of(model) == 3.0
    for name in there:  # copied by any tool, stock accelerate loads it
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(store.read(name, 0, there[name].size))
    set_weight(model, 0.0)
    accelerate.Accelerator.load_state(accelerator, str(tmp_path / "copy"))
    assert weight_of(model) == 3.0
    assert check(tmp_path / "copy").findings == ()
    assert [
        path.name
        for path in staging.rglob("*")
        if not path.name.startswith("ckptfix-copies-") and path.suffix != ".lock"
    ] == []


def test_numbers_rotation_and_the_newest_one(bucket: str) -> None:
    project = f"{bucket}/run"
    accelerator, model = run(project, total_limit=2)
    for value in (1.0, 2.0, 3.0):
        set_weight(model, value)
        saved = accelerator.save_state()
    assert saved == f"{project}/checkpoints/checkpoint_2"
    assert open_store(f"{project}/checkpoints").folders() == ["checkpoint_1", "checkpoint_2"]
    assert latest_checkpoint(project) == saved
    again, model = run(project)
    again.load_state()
    assert weight_of(model) == 3.0
    assert again.save_state() == f"{project}/checkpoints/checkpoint_3"


def test_a_save_over_another_one_takes_its_place(bucket: str) -> None:
    accelerator, model = run(None)
    url = f"{bucket}/latest"
    for value in (1.0, 2.0):
        set_weight(model, value)
        accelerator.save_state(url)
        open_store(url).put("notes.txt", b"mine")
    open_store(url).put("model_1.safetensors", b"left by a run that doubled its model")
    accelerator.save_state(url)
    there = open_store(url).list()
    assert "notes.txt" in there
    assert "model_1.safetensors" not in there
    assert not [name for name in there if "/new-" in name]
    set_weight(model, 0.0)
    accelerator.load_state(url)
    assert weight_of(model) == 2.0


def test_an_upload_that_fails_loses_no_save_and_the_command_finishes_it(
    ministack: Server,
    bucket: str,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    accelerator, model = run(f"{bucket}/run")
    set_weight(model, 1.0)
    first = accelerator.save_state()
    set_weight(model, 2.0)
    monkeypatch.setattr(uploads, "_AT_ONCE", 1)
    with proxied(ministack.endpoint) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        sent = iter(range(100))
        proxy.choose = lambda number, method, path: (
            "expired" if method == "PUT" and next(sent) > 2 else None
        )  # the credential expires between two files
        with pytest.raises(
            OperationError, match=r"the upload stopped.*expired.*next: ckptfix upload"
        ) as failed:
            accelerator.save_state()
    message = str(failed.value)
    kept = next(path for path in staging.iterdir() if path.name.startswith(".ckptfix-saving+"))
    assert f"the complete checkpoint is in {kept}" in message
    assert incomplete(kept) is None
    assert weight_of(model) == 2.0  # the run goes on
    url = f"{bucket}/run/checkpoints/checkpoint_1"
    report = check(url)
    assert [one.code for one in report.findings if one.code == "interrupted-save"] == [
        "interrupted-save"
    ]
    assert report.status == 1
    with pytest.warns(
        UserWarning, match=r"checkpoint_0 and passed over checkpoint_1: no commit marker"
    ):
        assert latest_checkpoint(f"{bucket}/run") == first
    with pytest.raises(UsageError, match="the upload was interrupted"):
        accelerator.load_state(url)
    command = message.rpartition("next: ckptfix ")[2]
    assert run_cli(shlex.split(command)) == 0
    assert "committed" in capsys.readouterr().out
    assert latest_checkpoint(f"{bucket}/run") == url
    set_weight(model, 0.0)
    accelerator.load_state(url)
    assert weight_of(model) == 2.0


def test_passing_faults_are_not_noticed(
    ministack: Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, model = run(None)
    set_weight(model, 4.0)
    for every, fault in ((3, "500"), (4, "503"), (5, "cut")):
        url = f"{bucket}/{fault}"
        with proxied(ministack.endpoint) as proxy, monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
            proxy.choose = lambda number, method, path, every=every, fault=fault: (  # type: ignore[misc]
                fault if number % every == 1 else None
            )
            accelerator.save_state(url)
            set_weight(model, 0.0)
            accelerator.load_state(url)
        assert weight_of(model) == 4.0
        assert check(url).findings == ()


@FORKS
def test_a_run_that_is_killed_while_it_uploads_leaves_the_previous_one_and_its_staging(
    bucket: str, staging: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def work(rank: int) -> None:
        accelerator, model = run(f"{bucket}/run")
        set_weight(model, 1.0)
        accelerator.save_state()
        monkeypatch.setattr(uploads, "_say_begun", lambda *given: os._exit(9))
        accelerator.save_state()

    assert run_ranks(1, work) != [0]
    assert latest_checkpoint(f"{bucket}/run") == f"{bucket}/run/checkpoints/checkpoint_0"
    (kept,) = staging.iterdir()
    assert incomplete(kept) is None
    assert (kept / DESTINATION).read_text() == f"{bucket}/run/checkpoints/checkpoint_1"
    accelerator, _ = run(f"{bucket}/run")
    with caplog.at_level(logging.WARNING, "ckptfix"):
        accelerator.save_state()
    assert f"next: ckptfix upload {kept} {bucket}/run/checkpoints/checkpoint_1" in caplog.text
    assert kept.exists()  # no sweep removes the only copy


@FORKS
def test_the_files_of_both_ranks_arrive(
    bucket: str, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/run/checkpoint_7"

    def work(rank: int) -> None:
        accelerator, model = run(None)
        set_weight(model, 5.0)
        assert accelerator.save_state(url) == url
        set_weight(model, 0.0)
        accelerator.load_state(url)
        assert weight_of(model) == 5.0

    assert run_ranks(2, work) == [0, 0]
    there = open_store(url).list()
    assert {"random_states_0.pkl", "random_states_1.pkl", COMMITTED} <= set(there)
    assert check(url).findings == ()


@FORKS
def test_a_rank_whose_upload_fails_fails_all_and_nothing_is_committed(
    bucket: str, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/run/checkpoint_7"

    def work(rank: int) -> None:
        accelerator, _ = run(None)
        if rank == 0:

            def refused(*_: object, **__: object) -> None:
                raise OperationError("the store refused")

            monkeypatch.setattr("ckptfix.training.saving.joint_saves.finish_upload", refused)
        with pytest.raises(OperationError, match=r"the store refused.*next: ckptfix upload"):
            accelerator.save_state(url)

    assert run_ranks(2, work) == [0, 0]
    assert COMMITTED not in open_store(url).list()
    (kept,) = staging.iterdir()
    assert incomplete(kept) is None
    assert {path.name for path in kept.iterdir()} >= {"random_states_0.pkl", "random_states_1.pkl"}


@FORKS
def test_a_rank_that_cannot_write_leaves_no_trace(bucket: str, staging: Path) -> None:
    url = f"{bucket}/run/checkpoint_7"

    def work(rank: int) -> None:
        accelerator, _ = run(None)
        if rank == 1:
            torch.save = lambda *_, **__: (_ for _ in ()).throw(
                OSError(28, "No space left on device")
            )
        with pytest.raises(OSError, match="No space left"):
            accelerator.save_state(url)

    assert run_ranks(2, work) == [0, 0]
    assert open_store(url).list() == {}
    assert not list(staging.iterdir())


def test_a_url_in_a_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator, _ = run(None)
    with pytest.raises(UsageError, match=r"s3:/b/run: a URL in a Path .*: s3://b/run"):
        accelerator.save_state(Path("s3://b/run"))
    assert not Path("s3:").exists()


def test_a_url_that_no_verb_reads_is_refused_before_anything_is_saved(staging: Path) -> None:
    accelerator, _ = run(None)
    with pytest.raises(UsageError, match="s3://b//run: a path in a store cannot contain '//'"):
        accelerator.save_state("s3://b//run")
    assert not list(staging.iterdir())


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the kernel's list calls a mount of gcsfuse, where no folder can be renamed."""
    mount = tmp_path / "mount"
    mount.mkdir()
    info = tmp_path / "mountinfo"
    info.write_text(
        f"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n44 22 0:43 / {mount} "
        "rw,nosuid,nodev,relatime shared:49 - fuse.gcsfuse my-bucket rw,user_id=0\n"
    )
    monkeypatch.setattr(mounts, "MOUNTINFO", str(info))
    for name in ("rename", "replace"):
        real = getattr(os, name)

        def refusing(source: Any, target: Any, real: Any = real, **words: Any) -> None:
            if str(target).startswith(str(mount)):
                raise OSError(95, "Operation not supported")
            real(source, target, **words)

        monkeypatch.setattr(os, name, refusing)
    return mount


def test_a_save_to_a_mount_renames_nothing_and_has_a_marker(mount: Path, staging: Path) -> None:
    accelerator, model = run(str(mount), total_limit=2)
    for value in (1.0, 2.0, 3.0):
        set_weight(model, value)
        saved = accelerator.save_state()
    assert saved == mount / "checkpoints" / "checkpoint_2"
    assert sorted(path.name for path in (mount / "checkpoints").iterdir()) == [
        "checkpoint_1",
        "checkpoint_2",
    ]
    assert (saved / COMMITTED).exists()
    assert incomplete(saved) is None
    assert check(saved).findings == ()
    manifest = read_manifest(saved)
    assert manifest is not None
    assert not list(staging.iterdir())
    set_weight(model, 0.0)
    accelerate.Accelerator.load_state(accelerator, str(saved))
    assert weight_of(model) == 3.0


def test_a_save_to_a_mount_that_is_cut_short_is_passed_over(
    mount: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, _ = run(str(mount))
    first = accelerator.save_state()
    save, count = uploads.MountedFolder._save, iter(range(100))

    def full(self: Any, *arguments: Any) -> Any:
        if next(count) == 3:
            raise OSError(28, "No space left on device")
        return save(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(uploads.MountedFolder, "_save", full)
        with pytest.raises(OperationError, match=r"No space left.*next: ckptfix upload") as failed:
            accelerator.save_state()
    cut = mount / "checkpoints" / "checkpoint_1"
    assert "no commit marker" in str(incomplete(cut))
    assert [one.code for one in check(cut).findings if one.code == "interrupted-save"]
    with pytest.warns(UserWarning, match="passed over checkpoint_1"):
        assert latest_checkpoint(mount) == first
    assert run_cli(shlex.split(str(failed.value).rpartition("next: ckptfix ")[2])) == 0
    assert latest_checkpoint(mount) == cut
