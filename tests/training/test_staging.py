"""From a staging folder to a checkpoint: killed at any step, the old one or the new one is
there.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ckptfix import check
from ckptfix.checkpoint.latest import UNFINISHED, candidates, incomplete
from ckptfix.checkpoint.manifest import Manifest
from ckptfix.cli import run
from ckptfix.diagnosis.resumable import mixed, newest_complete
from ckptfix.storage import staged
from ckptfix.storage.paths import JOURNAL
from ckptfix.storage.staged import SAVING, sweep, temporary_name
from ckptfix.training.saving.staged_saves import (
    How,
    StagedSave,
    abandon,
    begin,
    commit,
    plan_staging,
    rotate,
)
from tests.sampling import is_sampled
from tests.training.killing import Steps, in_child

OLD = {
    "model.safetensors": b"old",
    "model_1.safetensors": b"second",
    "random_states_0.pkl": b"old",
}
NEW = {
    "model.safetensors": b"newer",
    "random_states_0.pkl": b"new!",
    "random_states_1.pkl": b"new!",
}

CLEAN = Path(__file__).parents[2] / "fixtures/accelerate-1.15.0/clean-single-process/checkpoint"
WHOLE = {path.name: path.read_bytes() for path in CLEAN.iterdir()}


def manifest(files: dict[str, bytes]) -> bytes:
    sizes = {name: len(data) for name, data in files.items()}
    return Manifest(versions={}, world_size=1, step=0, files=sizes).to_bytes()


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def save(target: Path, files: dict[str, bytes]) -> StagedSave:
    staging = plan_staging(target)
    begin(staging)
    write(staging.folder, files)
    commit(staging, manifest(files))
    return staging


def prepare(root: Path, how: How) -> Path:
    target = root / "project" / "checkpoints" / "checkpoint_0"
    if how is not How.NEW:
        save(target, OLD)
    if how is How.INSIDE:
        (target / "notes.txt").write_text("mine")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def killed_at(root: Path, kill_at: int, work: Callable[[], object]) -> int:
    """Kill a process that does ``work`` at one of its steps below ``root``; return its status."""

    def armed() -> None:
        steps = Steps(str(root), kill_at)
        steps.armed = True
        work()

    status = in_child(armed)
    assert status in (0, signal.SIGKILL)
    return status


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.training.saving.staged_saves.exchange", lambda one, other: False)


FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.mark.parametrize("how", [How.NEW, How.SWAP, How.INSIDE])
def test_a_save_replaces_the_old_one_and_leaves_nothing_behind(tmp_path: Path, how: How) -> None:
    target = prepare(tmp_path, how)
    assert save(target, NEW).how is how
    expected = {**NEW, "notes.txt": b"mine"} if how is How.INSIDE else NEW
    assert contents(target) == expected
    assert incomplete(target) is None
    assert [path.name for path in (tmp_path / "project").iterdir()] == ["checkpoints"]
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint_0"]
    assert [path.name for path in (target / ".ckptfix").iterdir()] == ["manifest.json"]


def test_nothing_is_staged_where_accelerate_counts_names(tmp_path: Path) -> None:
    target = tmp_path / "project" / "checkpoints" / "checkpoint_7"
    assert plan_staging(target).folder.parent == tmp_path / "project"
    assert plan_staging(tmp_path / "checkpoints" / "checkpoints" / "a").folder.parent == tmp_path
    (tmp_path / "big").mkdir()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "checkpoints").symlink_to("../big")
    assert plan_staging(target).folder.parent == tmp_path / "project"


def test_a_link_to_a_checkpoint_stays_a_link(tmp_path: Path) -> None:
    save(tmp_path / "real", OLD)
    (tmp_path / "latest").symlink_to("real")
    save(tmp_path / "latest", NEW)
    assert (tmp_path / "latest").is_symlink()
    assert contents(tmp_path / "real") == NEW


def test_the_folder_of_the_process_is_not_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "c", OLD)
    monkeypatch.chdir(tmp_path / "c")
    assert save(Path("."), NEW).how is How.INSIDE
    assert contents(Path()) == NEW


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    """safetensors 0.8 makes files that only their owner can read."""
    staging = plan_staging(tmp_path / "c")
    begin(staging)
    write(staging.folder, NEW)
    (staging.folder / "model.safetensors").chmod(0o600)
    old = os.umask(0o027)
    try:
        commit(staging, manifest(NEW))
    finally:
        os.umask(old)
    assert (tmp_path / "c" / "model.safetensors").stat().st_mode & 0o777 == 0o640


@pytest.mark.slow
@pytest.mark.parametrize("how", [How.NEW, How.SWAP, How.INSIDE])
@FORKS
def test_killed_at_any_step_the_old_or_the_new_one_is_there(tmp_path: Path, how: How) -> None:
    for kill_at in filter(is_sampled, range(1000)):
        root = tmp_path / str(kill_at)
        target = prepare(root, how)
        before = contents(target) if target.exists() else None
        status = killed_at(root, kill_at, partial(save, target, NEW))
        found = newest_complete(candidates(target.parent))
        now = contents(target) if target.exists() else None
        expected = {**NEW, "notes.txt": b"mine"} if how is How.INSIDE else NEW
        if found is None:
            assert how is not How.SWAP or before is None
            assert how is How.INSIDE or now is None
        else:
            assert now in (before, expected)
        # Accelerate trips over any other name.
        assert all(path.name == "checkpoint_0" for path in target.parent.iterdir())
        if how is How.INSIDE:
            assert (target / "notes.txt").read_text() == "mine"
        save(target, NEW)
        assert contents(target) == expected
        assert incomplete(target) is None
        assert [path.name for path in (root / "project").iterdir()] == ["checkpoints"]
        if status == 0:
            assert kill_at > 10
            return
    pytest.fail("it never ended")


def test_rotation_keeps_whole_ones_and_never_the_last_goes(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for number in range(4):
        save(folder / f"checkpoint_{number}", NEW)
    (folder / "checkpoint_3" / "model.safetensors").unlink()  # broken: it does not count
    (folder / "checkpoint_0" / "model.safetensors").unlink()
    rotate(folder, 1)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_2", "checkpoint_3"]
    rotate(folder, 0)
    assert (folder / "checkpoint_2").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.slow
@FORKS
def test_rotation_killed_at_any_step_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    for kill_at in filter(is_sampled, range(1000)):
        folder = tmp_path / str(kill_at) / "checkpoints"
        for number in range(3):
            save(folder / f"checkpoint_{number}", NEW)
        status = killed_at(folder.parent, kill_at, partial(rotate, folder, 1))
        assert all(incomplete(path) is None for path in folder.iterdir())
        assert (folder / "checkpoint_2").exists()
        save(folder / "checkpoint_3", NEW)
        rotate(folder, 1)
        assert [path.name for path in folder.parent.iterdir()] == ["checkpoints"]
        if status == 0:
            assert kill_at > 5
            return


OLD_SAVE = dict.fromkeys(
    (
        "model.safetensors", "model_1.safetensors", "pytorch_model_2.bin", "optimizer.bin",
        "optimizer_1.bin", "scheduler.bin", "scheduler_1.bin", "sampler.bin", "sampler_1.bin",
        "dl_state_dict_1.bin", "scaler.pt", "custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl",
        *(f"random_states_{rank}.pkl" for rank in range(4)),
        *(f"model-0000{number}-of-00002.safetensors" for number in (1, 2)),
        "model.safetensors.index.json",
    ),
    b"old",
)  # fmt: skip
"""What stock accelerate left, over several runs, of which none is of ours: there is no manifest."""

OLD_FOLDERS = (
    "pytorch_model_fsdp_0/.metadata",
    "pytorch_model_fsdp_0/__0_0.distcp",
    "pytorch_model_fsdp_0/.ckptfix/0001.done/journal",
    "optimizer_0/.metadata",
    "optimizer_0/__1_0.distcp",
    "pytorch_model/mp_rank_00_model_states.pt",
    "latest",
)

STRANGERS = dict.fromkeys(
    (
        "config.json", "adapter_model.safetensors", "model.fp16.safetensors",
        "my-00001-of-00001.bin", "optimizer.pt", "rng_state.pth", "model_01.safetensors",
        "model.safetensors.bak",
    ),
    b"mine",
)  # fmt: skip


def write_old(target: Path, strangers: dict[str, bytes]) -> None:
    write(target, {**OLD_SAVE, **strangers})
    for name in OLD_FOLDERS:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(b"old")


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("strangers", [{}, STRANGERS], ids=["alone", "with strangers"])
def test_a_save_replaces_all_that_older_runs_left(
    tmp_path: Path, strangers: dict[str, bytes], can_exchange: bool, request: pytest.FixtureRequest
) -> None:
    """``model_1.safetensors`` of a doubling run stayed, and ``check`` called the folder a mix of
    two saves.
    """
    if not can_exchange:
        request.getfixturevalue("no_exchange")
    target = tmp_path / "out"
    write_old(target, strangers)
    # Of a repair.
    (target / ".ckptfix" / "0001.done").mkdir(parents=True)
    assert save(target, NEW).how is (How.INSIDE if strangers else How.SWAP)
    assert contents(target) == {**strangers, **NEW}
    assert [path.name for path in target.iterdir() if path.is_dir()] == [".ckptfix"]
    assert incomplete(target) is None
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_strangers_file_in_a_folder_of_an_older_save_stays(tmp_path: Path) -> None:
    target = tmp_path / "out"
    write_old(target, {})
    mine = [target / "pytorch_model_fsdp_0" / "notes.txt", target / "pytorch_model" / "notes.txt"]
    for path in mine:
        path.write_text("mine")
    (target / "optimizer_7").write_text("mine")
    assert save(target, NEW).how is How.INSIDE
    assert contents(target) == {**NEW, "optimizer_7": b"mine"}
    assert [sorted(path.parent.iterdir()) for path in mine] == [[path] for path in mine]


def test_random_states_of_ranks_that_are_no_more_go(tmp_path: Path) -> None:
    """Other ranks of the run add their own; those of an older run with more ranks are of another
    moment.
    """
    target = tmp_path / "out"
    write(target, {f"random_states_{rank}.pkl": b"%d" % rank for rank in range(4)})
    own = {"model.safetensors": b"newer", "random_states_0.pkl": b"new!"}
    for _ in range(2):
        staging = plan_staging(target, processes=2)
        begin(staging)
        write(staging.folder, own)
        commit(staging, manifest(own))
        assert contents(target) == {**own, "random_states_1.pkl": b"1"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exchange", "no exchange", "strangers"])
@FORKS
def test_killed_over_an_older_save_it_is_the_old_the_new_or_known_as_a_mix(
    tmp_path: Path, way: str, request: pytest.FixtureRequest
) -> None:
    if way == "no exchange":
        request.getfixturevalue("no_exchange")
    strangers = {"notes.txt": b"mine"} if way == "strangers" else {}
    old = dict.fromkeys(("model_1.safetensors", "optimizer_1.bin"), b"old") | WHOLE | strangers
    new = {**NEW, **strangers}
    for kill_at in filter(is_sampled, range(1000)):
        target = tmp_path / str(kill_at) / "out"
        write(target, old)
        status = killed_at(target.parent, kill_at, partial(save, target, NEW))
        now = contents(target)
        assert strangers.items() <= now.items()
        is_one = now in (old, new)
        assert is_one or incomplete(target) is not None
        assert is_one or way != "exchange"
        save(target, NEW)
        assert contents(target) == new
        assert incomplete(target) is None
        assert [path.name for path in target.parent.iterdir()] == ["out"]
        if status == 0:
            assert kill_at > 10
            return
    pytest.fail("it never ended")


def test_files_that_only_look_like_ours_stay(tmp_path: Path) -> None:
    """A folder that no guarded save wrote: what has the name of a checkpoint's file may be the
    user's.
    """
    target = tmp_path / "out"
    mine = {"pytorch_model.bin": b"mine", "scheduler.bin": b"mine", "model_7.safetensors": b"mine"}
    write(target, mine)
    assert save(target, NEW).how is How.INSIDE
    assert contents(target) == {**mine, **NEW}


@pytest.mark.parametrize("saved_by", ["ckptfix", "accelerate"])
def test_best_weights_that_a_script_keeps_in_the_folder_stay(tmp_path: Path, saved_by: str) -> None:
    """They had a name of Accelerate's that no save there used, and the next save deleted them."""
    target = tmp_path / "out"
    mine = {"pytorch_model.bin": b"best"}
    old = {**OLD, "random_states_0.pkl": b"old"}
    if saved_by == "ckptfix":
        save(target, old)
        mine |= {"scaler.pt": b"of the features", "model.safetensors.index.json": b"{}"}
        mine |= {"model-00001-of-00001.safetensors": b"exported"}
    else:
        write(target, old)
    write(target, {**mine, "model_1.safetensors": b"doubled", "optimizer_1.bin": b"doubled"})
    for _ in range(2):
        save(target, NEW)
        assert contents(target) == {**mine, **NEW}
    write(target, {"model.safetensors": b"old"})
    assert save(target, {"random_states_0.pkl": b"new", "pytorch_model.bin": b"new"})
    assert "model.safetensors" not in contents(target), (
        "load_state would take it for the model that was saved"
    )


def test_a_file_that_appears_while_a_save_is_written_stays(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for files in (OLD, NEW):
        staging = plan_staging(target)
        begin(staging)
        write(staging.folder, files)
        write(target, {"ema.pt": b"mine"})
        commit(staging, manifest(files))
        assert contents(target) == {**files, "ema.pt": b"mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_rotation_leaves_folders_and_links_that_are_not_of_a_save(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    write(folder / "checkpoint_0", {"my_eval.json": b"{}"})
    (folder / "checkpoint_1").symlink_to(tmp_path)
    for number in (2, 3, 4):
        save(folder / f"checkpoint_{number}", NEW)
    rotate(folder, 1)
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint_0",
        "checkpoint_1",
        "checkpoint_4",
    ]


def test_the_empty_folder_of_the_process_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert save(Path("."), NEW).how is How.INSIDE
    assert Path.cwd() == tmp_path
    assert contents(tmp_path) == NEW


def left_over(folder: Path, machine: str, pid: int, age: float = 0.0) -> Path:
    path = folder / f".ckptfix-saving+{machine}+{pid}+0123456789abcdef+c"
    path.mkdir()
    (path / "model.safetensors").touch()
    for each in (path / "model.safetensors", path):
        os.utime(each, (time.time() - age,) * 2)
    return path


@pytest.fixture
def left(tmp_path: Path) -> dict[str, Path]:
    """Return staging folders next to a checkpoint: of a process that is no more, of one that runs,
    and of other machines.
    """
    machine = staged.this_machine()
    save(tmp_path / "checkpoints" / "checkpoint_0", WHOLE)
    folders = {
        "dead": left_over(tmp_path, machine, in_child_pid()),
        "running": left_over(tmp_path, machine, os.getppid()),
        "elsewhere": left_over(tmp_path, "gpu-17-99", 7),
        "old": left_over(tmp_path, "gpu-18-99", 7, age=2 * 86400),
    }
    (folders["dead"] / "pytorch_model_fsdp_0").mkdir()
    (folders["dead"] / "pytorch_model_fsdp_0" / "__0_0.distcp").touch()
    return folders


def test_check_names_staging_folders_and_judges_nothing_in_them(
    tmp_path: Path, left: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut files in them were "truncated-file", with salvage as the next step."""
    assert run(["check", "-r", str(tmp_path), "--json"]) == 0
    found = {
        Path(one["path"]): [
            (each["code"], each["message"], each["advice"]) for each in one["findings"]
        ]
        for one in json.loads(capsys.readouterr().out)["checkpoints"]
    }
    assert {path: [each[0] for each in several] for path, several in found.items()} == {
        tmp_path / "checkpoints" / "checkpoint_0": [],
        **{path: ["staging-folder"] for path in left.values()},
    }
    for path in (left["dead"], left["old"]):
        ((_, message, advice),) = found[path]
        assert message.startswith("abandoned staging folder of a save that was killed (pid ")
        assert message.endswith("; safe to delete")
        assert advice.endswith(f": rm -r {shlex.quote(str(path))}")
    for name, words in (
        ("running", f"a save is running (pid {os.getppid()} on {socket.gethostname()})"),
        ("elsewhere", "(pid 7 on gpu-17); it changed less than a day ago"),
    ):
        ((_, message, advice),) = found[left[name]]
        assert words in message
        assert "rm -r" not in advice
    assert run(["check", "-r", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("; safe to delete") == 2, "each is printed with what to do"
    assert out.count("no error found") == 1, "nothing in the others was looked at"
    assert out.count("+c: staging folder of c, not a checkpoint; not read\n") == 4
    assert "0 files" not in out, "their files were not counted"
    assert "\n5 checkpoints: 4 staging, 1 clean\nresume from " in out


def test_a_staging_folder_by_its_path(
    left: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = left["dead"]
    assert run(["verify", str(dead)]) == 3
    assert capsys.readouterr().out.endswith(
        ", and this is the staging folder of a save or another command, not a checkpoint\n"
    )
    assert run(["check", str(dead)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{dead}: staging folder of c, not a checkpoint; not read\n")
    with monkeypatch.context() as patch:
        patch.chdir(dead)
        assert run(["check", "."]) == 0
    same = capsys.readouterr().out
    assert same.partition("\n")[2] == out.partition("\n")[2], "named as . it is the same"
    assert "salvage" not in out
    assert "no error found" not in out
    command = out.partition("or you can delete it now: ")[2].splitlines()[0]
    subprocess.run(["sh", "-c", command], check=True)
    assert not dead.exists()


def test_check_of_a_save_that_goes_on_in_this_process(tmp_path: Path) -> None:
    staging = plan_staging(tmp_path / "c")
    begin(staging)
    (finding,) = check(staging.folder).findings
    assert f"a save is running (pid {os.getpid()} on" in str(finding)
    write(staging.folder, NEW)
    commit(staging, manifest(NEW))


def test_a_folder_of_two_saves_is_no_healthy_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "c"
    save(target, WHOLE)
    (target / "notes.txt").write_text("mine")  # so files are replaced one by one
    replace = os.replace

    def failing(source: Path, place: Path) -> None:
        if Path(place).name == "random_states_0.pkl":
            raise OSError(5, "Input/output error")
        replace(source, place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with pytest.raises(OSError, match="two saves"):
            save(target, WHOLE)
    report = check(target)
    assert "interrupted-save" in [finding.code for finding in report.findings]
    assert report.status == 1


@pytest.mark.parametrize("way", ["no exchange", "strangers", "inside"])
def test_the_rest_of_an_interrupted_save_stays_until_the_next_one_is_complete(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the only complete checkpoint: any writer next to it, and a save that failed in
    turn, deleted it.
    """
    target = tmp_path / "out"
    save(target, {**WHOLE, "model_1.safetensors": b"old"})
    if way == "strangers":
        (target / "notes.txt").write_text("mine")
    name = "_can_rename" if way == "inside" else "exchange"
    monkeypatch.setattr(f"ckptfix.training.saving.staged_saves.{name}", lambda one, other: False)

    def work() -> None:
        monkeypatch.setattr(os, "replace", dying)
        save(target, NEW)

    assert os.waitstatus_to_exitcode(in_child(work)) == 7
    place = target / JOURNAL if way == "inside" else tmp_path
    (folder,) = [path for path in place.iterdir() if path.name.startswith(SAVING)]
    assert contents(folder) == NEW
    for _ in range(2):
        sweep(place)
        failed = plan_staging(target)
        begin(failed)
        write(failed.folder, {"model.safetensors": b"half"})
        abandon(failed)
        assert not failed.folder.exists()
        assert contents(folder) == NEW
    (finding,) = check(folder).findings
    assert "so the checkpoint mixes two saves" in str(finding)
    assert "rm -r" not in finding.advice_at(str(folder))
    save(target, NEW)
    assert not folder.exists()
    assert contents(target) == {**NEW, **({"notes.txt": b"mine"} if way == "strangers" else {})}


def dying(source: Path, place: Path) -> None:
    """Stand in for ``os.replace``: the process ends at the first file that a save moves."""
    if Path(place).name == UNFINISHED:
        os.rename(source, place)
    else:
        os._exit(7)


def test_a_mix_of_two_saves_names_what_to_load_instead(tmp_path: Path) -> None:
    """ "Load another checkpoint" was a dead end."""
    target = shutil.copytree(CLEAN, tmp_path / "checkpoints" / "checkpoint_7")
    journal = target / JOURNAL
    journal.mkdir()
    (journal / UNFINISHED).write_text(json.dumps(list(WHOLE)))
    assert "save again; there is no complete checkpoint" in str(mixed(target))
    target.with_name("checkpoint_6").mkdir()
    older = shutil.copytree(CLEAN, target.with_name("checkpoint_5"))
    assert str(mixed(target)).endswith(f"next: load {older}, which is complete, or save again")
    for folder in (journal, target.parents[1]):
        place = shutil.copytree(CLEAN, folder / temporary_name(target, SAVING))
        said = f"next: load the interrupted save, which is intact in {place}"
        assert str(mixed(target)).endswith(said)
        (place / "optimizer.bin").unlink()  # moved: in no folder is all of it
        assert f"load {older}" in str(mixed(target))


def in_child_pid() -> int:
    """Return the number of a process that is no more."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_a_name_of_any_length_can_be_saved(tmp_path: Path) -> None:
    target = tmp_path / ("ä" * 127)
    save(target, NEW)
    assert contents(target) == NEW
