"""Saves that are whole or absent, and the newest whole one is what is loaded."""

import ctypes
import hashlib
import json
import logging
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file

from ckptfix import check
from ckptfix.checkpoint.latest import candidates, incomplete
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.diagnosis.resumable import newest_complete
from ckptfix.errors import OperationError, UsageError
from ckptfix.storage.files import on_disk
from ckptfix.training import ranks
from ckptfix.training.accelerator import Accelerator
from ckptfix.training.guard import guard_of
from ckptfix.training.resuming.guarded_load import latest_checkpoint
from ckptfix.training.saving import joint_saves, save_state
from tests.repairs.builders import TRAINER_RANDOM_STATES
from tests.sampling import is_sampled
from tests.training.killing import Steps, arm
from tests.training.ranks import run_ranks

FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Views(torch.nn.Module):  # type: ignore[misc]
    """Two halves of one buffer, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.arange(8.0)
        self.register_buffer("low", both[:4])
        self.register_buffer("high", both[4:])
        self.one, self.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.other.weight = self.one.weight


def run(project: Path | str | None, **options: Any) -> tuple[Accelerator, torch.nn.Module]:
    """A run with one model and one optimizer, and with automatic names where it has a project."""
    torch.manual_seed(0)
    config = ProjectConfiguration(
        project_dir=None if project is None else str(project),
        automatic_checkpoint_naming=project is not None,
        **options,
    )
    accelerator = Accelerator(cpu=True, project_config=config)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    return accelerator, model


def set_weight(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def weight_of(model: torch.nn.Module) -> float:
    return float(next(model.parameters()).flatten()[0].item())


def weight_in(checkpoint: Path) -> float:
    return float(next(iter(load_file(checkpoint / "model.safetensors").values())).flatten()[0])


def save_values(accelerator: Any, model: torch.nn.Module, *values: float) -> Any:
    """Save once with each value; return the last checkpoint."""
    for value in values:
        set_weight(model, value)
        saved = accelerator.save_state()
    return saved


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def without_numbers(folder: Path) -> Accelerator:
    """Return a run that names its checkpoints itself."""
    accelerator, _ = run(folder)
    accelerator.project_configuration.automatic_checkpoint_naming = False
    return accelerator


def full(*_: object, **__: object) -> None:
    """Stand in for a function that writes."""
    raise OSError(28, "No space left on device")


def test_a_save_has_a_manifest_and_stock_accelerate_loads_it(tmp_path: Path) -> None:
    accelerator, model = run(tmp_path)
    saved = save_values(accelerator, model, 3.0)
    assert saved == tmp_path / "checkpoints" / "checkpoint_0"
    manifest = read_manifest(saved)
    assert manifest is not None
    assert [entry.type for entry in manifest.models] == ["torch.nn.modules.linear.Linear"]
    assert [entry.type for entry in manifest.optimizers] == ["torch.optim.adamw.AdamW"]
    files = ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "run_state_0.pt"]
    assert sorted(manifest.files) == files
    assert incomplete(saved) is None
    assert check(saved).findings == ()
    assert names(tmp_path) == ["checkpoints"]
    set_weight(model, 0.0)
    accelerate.Accelerator.load_state(accelerator, str(saved))
    assert weight_of(model) == 3.0


def test_digests_are_recorded_when_asked_for(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, tensor_digests=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    with torch.no_grad():
        model.weight.zero_()
    accelerator.save_state(tmp_path / "c")
    manifest = read_manifest(tmp_path / "c")
    assert manifest is not None
    digests = manifest.models[0].digests
    assert set(digests) == {"weight", "bias"}
    expected = hashlib.sha256(b'["F32", [2, 2]]\n' + bytes(16)).hexdigest()
    assert digests["weight"] == expected


def test_numbers_go_on_after_a_resume(tmp_path: Path) -> None:
    """Stock accelerate starts at 0 again, and a later load_state() takes an older one for the
    newest.
    """
    save_values(*run(tmp_path), 1.0, 2.0)
    again, model = run(tmp_path)
    again.load_state()
    assert weight_of(model) == 2.0
    assert save_values(again, model, 3.0).name == "checkpoint_2"
    third, _ = run(tmp_path)  # without a load
    assert third.save_state().name == "checkpoint_3"


def test_total_limit_counts_whole_ones(tmp_path: Path) -> None:
    save_values(*run(tmp_path, total_limit=2), 1.0, 2.0, 3.0, 4.0)
    assert names(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3"]


def test_a_failed_save_leaves_nothing_and_rotates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, _ = run(tmp_path, total_limit=1)
    accelerator.save_state()
    with monkeypatch.context() as patch:
        patch.setattr("accelerate.checkpointing.torch.save", full)
        with pytest.raises(OSError, match="No space left"):
            accelerator.save_state()
    assert names(tmp_path) == ["checkpoints"]
    assert names(tmp_path / "checkpoints") == ["checkpoint_0"]
    assert accelerator.project_configuration.automatic_checkpoint_naming
    assert accelerator.save_state().name == "checkpoint_1"


def test_a_folder_that_is_saved_again_keeps_what_the_user_puts_there(tmp_path: Path) -> None:
    """In the folder, and in that of a hook."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))

    def hook(models: list[Any], weights: list[dict[str, Any]], output_dir: str) -> None:
        Path(output_dir, "unet").mkdir()
        Path(output_dir, "unet", "config.json").write_text("{}")
        secret = Path(output_dir, "secret")
        secret.write_text("")
        secret.chmod(0o600)

    accelerator.register_save_state_pre_hook(hook)
    for value in (1.0, 2.0, 3.0):
        set_weight(model, value)
        saved = accelerator.save_state(tmp_path / "c")
        assert weight_in(saved) == value
        (saved / "notes.txt").write_text("mine")
        (saved / "unet" / "notes.txt").write_text("mine")
        (saved / "empty").mkdir(exist_ok=True)
    assert (saved / "notes.txt").read_text() == (saved / "unet" / "notes.txt").read_text() == "mine"
    assert (saved / "empty").is_dir()
    assert (saved / "secret").stat().st_mode & 0o777 == 0o600
    written = [path for path in saved.iterdir() if path.suffix in (".safetensors", ".pkl")]
    assert len({path.stat().st_mode & 0o777 for path in written}) == 1
    assert incomplete(saved) is None
    assert names(tmp_path) == ["c"]


def test_an_error_half_way_through_a_replacement_keeps_what_is_not_yet_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = without_numbers(tmp_path)
    target = tmp_path / "c"
    accelerator.save_state(target)
    (target / "notes.txt").write_text("mine")  # so files are replaced one by one
    replace, count = os.replace, iter(range(100))

    def failing(source: Any, place: Any) -> None:
        if Path(place).suffix in (".safetensors", ".bin", ".pkl") and next(count) == 1:
            raise OSError(5, "Input/output error")
        replace(source, place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with pytest.raises(OSError, match=r"now contains files of two saves: .*next: save again"):
            accelerator.save_state(target)
    assert incomplete(target) is not None
    kept = names(next(tmp_path.glob(".ckptfix-saving*")))
    assert kept
    assert {*kept, *names(target)} >= {"model.safetensors", "optimizer.bin"}
    accelerator.save_state(target)
    assert incomplete(target) is None
    assert names(tmp_path) == ["c"]


def test_a_disk_that_keeps_whole_seconds_loses_no_model(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    save = accelerator.save

    def saved_in_the_same_second(state: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        inode = os.stat(path).st_ino if os.path.exists(path) else None
        save(state, path, *args, **kwargs)
        assert inode in (None, os.stat(path).st_ino)
        os.utime(path, (1, 1))

    accelerator.save = saved_in_the_same_second
    for sharded in ({}, {"max_shard_size": 20}):
        for _ in range(2):
            accelerator.save_model(
                model, tmp_path / str(len(sharded)), safe_serialization=False, **sharded
            )
            for path in (tmp_path / str(len(sharded))).iterdir():
                os.utime(path, (1, 1))
    assert accelerator.save is saved_in_the_same_second
    assert (tmp_path / "0" / "pytorch_model.bin").exists()
    assert (tmp_path / "1" / "pytorch_model.bin.index.json").exists()


@pytest.mark.slow
@FORKS
def test_a_process_that_waits_in_vain_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfix.training.ranks.PATIENCE", 0.2)
    said = tmp_path / "said"

    def work(rank: int) -> None:
        logging.basicConfig(filename=said, level=logging.WARNING, force=True)
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(torch.nn.Linear(2, 2))
        if rank == 1:
            end = time.monotonic() + 50
            while "waited" not in said.read_text():
                assert time.monotonic() < end
                time.sleep(0.05)
            time.sleep(0.8)
            assert said.read_text().count("waited") == 1, "once a wait, however long it is"
        accelerator.save_state(tmp_path / "c")

    assert run_ranks(2, work) == [0, 0]
    assert (
        "save_state has waited 0.2 s for 1 process (rank 1): every process must call it"
        in said.read_text()
    )
    assert "if only the main process saves, pass save_together=False" in said.read_text()
    assert "this save fails after 540 s" in said.read_text()


def wait_long(accelerator: Accelerator) -> None:
    """Let a save wait as long as by default: on a busy machine a process may come a second after
    another.
    """
    os.environ.pop("CKPTFIX_SAVE_TIMEOUT", None)
    guard_of(accelerator).settings.save_timeout = None


@pytest.mark.slow
@FORKS
@pytest.mark.parametrize("given", ["argument", "environment"])
def test_a_save_of_the_main_process_alone_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """It waited for ever. The others train on meanwhile, so nothing of torch.distributed may be
    waited for.
    """
    if given == "environment":
        monkeypatch.setenv("CKPTFIX_SAVE_TIMEOUT", "0.5")

    def work(rank: int) -> None:
        accelerator = Accelerator(cpu=True, save_timeout=0.5 if given == "argument" else None)
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        for _ in range(2):
            if rank == 0:
                with pytest.raises(
                    OperationError, match=r"0\.5 s for 1 process \(rank 1\)"
                ) as caught:
                    accelerator.save_state(tmp_path / "alone")
                assert "save_together=False" in str(caught.value)
                assert "nothing was written" in str(caught.value)
            accelerator.backward(model(torch.ones(1, 2)).sum())
        wait_long(accelerator)
        assert accelerator.save_state(tmp_path / "all") == tmp_path / "all", "later all meet again"
        accelerator.save_state(tmp_path / "all")

    assert run_ranks(2, work) == [0, 0]
    assert names(tmp_path) == ["all"]
    assert incomplete(tmp_path / "all") is None


@pytest.mark.slow
@FORKS
def test_a_process_that_comes_after_another_gave_up_waits_for_the_next_meeting(
    tmp_path: Path,
) -> None:
    def work(rank: int) -> None:
        accelerator = Accelerator(cpu=True, save_timeout=0.5)
        accelerator.prepare(torch.nn.Linear(2, 2))
        if rank == 0:
            for _ in range(2):
                with pytest.raises(OperationError, match=r"2 processes \(ranks 1, 2\)"):
                    accelerator.save_state(tmp_path / "c")
        torch.distributed.barrier()
        wait_long(accelerator)
        accelerator.save_state(tmp_path / "c")

    assert run_ranks(3, work) == [0, 0, 0]
    assert incomplete(tmp_path / "c") is None


def test_a_process_goes_on_as_soon_as_it_sees_that_all_are_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It slept once more, and all others waited for it in the next step of the save."""
    store, sleeps = torch.distributed.HashStore(), []

    def arrive(seconds: float) -> None:
        sleeps.append(seconds)
        meeting = torch.distributed.PrefixStore(f"ckptfix/save/{ranks._number}", store)
        meeting.set("1", "folder")
        meeting.compare_set("verdict", "", "all")

    monkeypatch.setattr(ranks, "_store", lambda: store)
    monkeypatch.setattr(time, "sleep", arrive)
    assert ranks.meet(0, 2, "folder", 60.0, can_save_alone=False) == ["folder", "folder"]
    assert len(sleeps) == 1


@FORKS
@pytest.mark.parametrize(("nodes", "expected"), [(1, 2), (2, 4)])
def test_processes_wait_for_each_other_no_more_than_they_must(
    tmp_path: Path, nodes: int, expected: int
) -> None:
    """They have written, and the checkpoint is in its place; of two nodes, each has its folder and
    its checkpoint.
    """
    waits = ("all_reduce", "all_gather_object", "barrier", "broadcast", "broadcast_object_list")

    def work(rank: int) -> None:
        if nodes == 2:
            os.environ["LOCAL_RANK"] = "0"  # each is the first process of its node
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(torch.nn.Linear(2, 2))
        calls = Counter[str]()

        def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls[name] += 1
                return function(*args, **kwargs)

            return call

        for name in waits:
            setattr(torch.distributed, name, counted(name, getattr(torch.distributed, name)))
        accelerator.save_state(tmp_path / "c")
        assert calls == {"broadcast_object_list": 1, "all_reduce": expected}, "one: the plan"

    assert run_ranks(2, work) == [0, 0]
    assert incomplete(tmp_path / "c") is None


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan"])
def test_a_timeout_that_is_none_is_refused_at_once(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTFIX_SAVE_TIMEOUT", value)
    said = f"CKPTFIX_SAVE_TIMEOUT={value}: expected a number of seconds above 0"
    with pytest.raises(UsageError, match=said):
        Accelerator(cpu=True)
    monkeypatch.setenv("CKPTFIX_SAVE_TIMEOUT", "inf")
    Accelerator(cpu=True)


def test_views_are_kept_and_ties_are_named(tmp_path: Path) -> None:
    """Stock accelerate drops ``high``: it takes two halves of one buffer for duplicates."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Views())
    accelerator.save_state(tmp_path / "c")
    tensors = load_file(tmp_path / "c" / "model.safetensors")
    assert tensors["high"].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert "other.weight" not in tensors
    manifest = read_manifest(tmp_path / "c")
    assert manifest is not None
    assert manifest.models[0].aliases == {"other.weight": "one.weight"}
    model.high.fill_(0)
    model.load_state_dict(
        tensors, strict=False
    )  # safetensors' load_model refuses such a model, whatever the file
    assert model.high.tolist() == [4.0, 5.0, 6.0, 7.0]
    accelerator.save_model(model, tmp_path / "m")
    assert load_file(tmp_path / "m" / "model.safetensors")["high"].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_save_model_leaves_no_shards_of_an_earlier_save(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    accelerator.save_model(model, tmp_path, max_shard_size=80)
    assert (tmp_path / "model.safetensors.index.json").exists()
    (tmp_path / "config.json").write_text("{}")
    accelerator.save_model(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    accelerator.save_model(model, tmp_path, max_shard_size=80)
    assert not (tmp_path / "model.safetensors").exists()
    assert check(tmp_path).findings == ()


class Unwrapped(torch.nn.Module):  # type: ignore[misc]
    """Saves what is inside of it without its own name for it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


class HasCache(torch.nn.Module):  # type: ignore[misc]
    """One child called ``module``, a buffer that is not saved, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None:
        assert state == {"version": 1}


class Tied(torch.nn.Module):  # type: ignore[misc]
    """Two names for one tensor: safetensors has one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2, bias=False)
        self.other = torch.nn.Linear(2, 2, bias=False)
        self.other.weight = self.module.weight


@pytest.mark.parametrize("kind", [Unwrapped, HasCache, Tied])
def test_a_healthy_folder_is_loaded_without_a_word_of_duplicates(
    tmp_path: Path, kind: type[torch.nn.Module], recwarn: pytest.WarningsRecorder
) -> None:
    """Names of the model that its file does not have made it a folder that a repair had renamed."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(kind())
    accelerator.save_state(str(tmp_path / "out"), safe_serialization=kind is Tied)
    # As stock accelerate leaves it: nothing records a tie.
    shutil.rmtree(tmp_path / "out" / ".ckptfix")
    saved = model.module.weight.detach().clone()
    torch.nn.init.zeros_(model.module.weight)
    recwarn.clear()
    accelerator.load_state(str(tmp_path / "out"))
    assert torch.equal(model.module.weight, saved)
    assert not any("Loaded by content instead" in str(one.message) for one in recwarn)


def test_the_newest_whole_one_is_loaded_and_the_skipped_are_named(tmp_path: Path) -> None:
    accelerator, model = run(tmp_path)
    newest = save_values(accelerator, model, 1.0, 2.0)
    (newest / "optimizer.bin").unlink()
    with pytest.warns(UserWarning, match=r"passed over checkpoint_1: optimizer.bin is missing"):
        assert latest_checkpoint(tmp_path).name == "checkpoint_0"
    with pytest.warns(UserWarning, match="passed over checkpoint_1"):
        accelerator.load_state()
    assert weight_of(model) == 1.0
    for checkpoint in (tmp_path / "checkpoints").iterdir():
        (checkpoint / "random_states_0.pkl").unlink()
    with pytest.raises(UsageError, match="no complete checkpoint"):
        latest_checkpoint(tmp_path)


def test_a_checkpoint_that_lacks_what_the_run_registers_is_passed_over(tmp_path: Path) -> None:
    """Of a stock save no manifest shows that a scheduler was there."""
    accelerator, model = run(tmp_path)
    (optimizer,) = accelerator._optimizers
    accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 2))
    for value in (1.0, 2.0):
        set_weight(model, value)
        accelerate.Accelerator.save_state(accelerator)
    newest = tmp_path / "checkpoints" / "checkpoint_1"
    (newest / "scheduler.bin").unlink()
    said = "passed over checkpoint_1: no scheduler.bin, which this run needs"
    with pytest.warns(UserWarning, match=said):
        accelerator.load_state()
    assert weight_of(model) == 1.0


def test_a_stock_folder_is_judged_by_what_save_state_writes_last(tmp_path: Path) -> None:
    accelerator, _ = run(tmp_path)
    accelerate.Accelerator.save_state(accelerator)
    (tmp_path / "checkpoints" / "checkpoint_1").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_1" / "model.safetensors").write_bytes(b"half")
    with pytest.warns(UserWarning, match=r"only weights; a resume also needs random_states_0\.pkl"):
        assert latest_checkpoint(tmp_path / "checkpoints").name == "checkpoint_0"


def test_hooks_of_the_user_see_and_change_what_is_saved(tmp_path: Path) -> None:
    accelerator, _ = run(tmp_path)
    seen = []

    def hook(models: list[Any], weights: list[dict[str, Any]], output_dir: str) -> None:
        seen.append(len(models))
        Path(output_dir, "config.json").write_text("{}")

    accelerator.register_save_state_pre_hook(hook)
    saved = accelerator.save_state()
    assert seen == [1]
    assert (saved / "config.json").exists()
    assert len(accelerator._save_model_state_pre_hook) == 1


@FORKS
def test_one_rank_that_fails_fails_all(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        accelerator, _ = run(tmp_path)
        accelerator.save_state()
        if rank == 1:
            torch.save = full
        with pytest.raises(OSError, match="No space left"):
            accelerator.save_state()

    assert run_ranks(2, work) == [0, 0]
    assert names(tmp_path) == ["checkpoints"]
    assert names(tmp_path / "checkpoints") == ["checkpoint_0"]


@FORKS
def test_every_rank_may_load_at_once_what_was_saved(tmp_path: Path) -> None:
    """Stock accelerate has no barrier after save_state: rank 1 fails every time."""

    def work(rank: int) -> None:
        accelerator, _ = run(tmp_path)
        for _ in range(3):
            accelerator.load_state(str(accelerator.save_state()))

    assert run_ranks(2, work) == [0, 0]


def own_disk(folder: Path) -> bool:
    """Mount a disk of this process's own on a folder; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private = 0x20000, 0x44000
    statuses = (
        libc.unshare(new_namespace),
        libc.mount(b"none", b"/", None, private, None),
        libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, None),
    )
    return statuses == (0, 0, 0)


@FORKS
def test_nodes_without_a_shared_disk_each_have_a_whole_part(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    def work(rank: int) -> None:
        os.environ["LOCAL_RANK"] = "0"  # the first process of its node
        if rank == 1 and not own_disk(disk):
            (tmp_path / "not allowed").touch()
        accelerator, _ = run(disk, total_limit=1)
        if rank == 1 and not (tmp_path / "not allowed").exists():
            # Of an earlier run, on this node alone.
            leftover = disk / "checkpoints" / "checkpoint_0"
            leftover.mkdir(parents=True)
            (leftover / "mine.txt").write_text("mine")
        for number in range(2):
            saved = accelerator.save_state()
            assert incomplete(saved) is None
            states = [path.name for path in saved.glob("random_states_*")]
            if not (tmp_path / "not allowed").exists():
                assert states == [f"random_states_{rank}.pkl"]
                assert (saved / "model.safetensors").exists() == (rank == 0)
            assert saved.name == f"checkpoint_{number}"
        assert [path.name for path in disk.iterdir()] == ["checkpoints"]

    assert run_ranks(2, work) == [0, 0]
    if (tmp_path / "not allowed").exists():
        pytest.skip("no mount namespace for this user")


_PARTS: list[tuple[Any, str, int]] = [
    (save_state, "plan_staging", 0),
    (joint_saves, "begin", 0),
    (joint_saves, "begin", 1),
    (save_state, "_recorded", 0),
    (save_state, "_recorded", 1),
    (save_state, "sync_file", 1),
    (save_state, "make_manifest", 0),
    (joint_saves, "commit", 0),
    (save_state, "rotate", 0),
]
"""The parts of a save of two nodes with one disk, and the rank that does each."""


@FORKS
def test_whatever_part_of_a_save_fails_on_one_rank_fails_on_all_and_the_next_save_is_complete(
    tmp_path: Path,
) -> None:
    def work(rank: int) -> None:
        os.environ["LOCAL_RANK"] = "0"  # each is the first process of its node
        accelerator, model = run(tmp_path, total_limit=1)
        for number, (module, part, victim) in enumerate(_PARTS):
            with pytest.MonkeyPatch.context() as patch:
                if rank == victim:
                    patch.setattr(module, part, full)
                with pytest.raises(OSError, match="No space left"):
                    accelerator.save_state()
            saved = save_values(accelerator, model, float(number))
            assert incomplete(saved) is None, part
            set_weight(model, -1.0)
            accelerator.load_state(str(saved))
            assert weight_of(model) == number, part

    assert run_ranks(2, work) == [0, 0]
    assert names(tmp_path) == ["checkpoints"]
    assert len(names(tmp_path / "checkpoints")) == 1


@FORKS
def test_no_rank_goes_on_while_another_commits_or_removes_old_checkpoints(tmp_path: Path) -> None:
    disk, ended = tmp_path / "disk", tmp_path / "ended"
    disk.mkdir()
    ended.mkdir()

    def work(rank: int) -> None:
        os.environ["LOCAL_RANK"] = "0"
        owns = rank == 0 or own_disk(disk)
        accelerator, _ = run(disk, total_limit=1)

        def slowed(name: str, part: Callable[..., Any], pause: float) -> Callable[..., Any]:
            def slowly(*given: Any) -> Any:
                time.sleep(pause)
                result = part(*given)
                (ended / f"{name}-{rank}").touch()
                return result

            return slowly

        for module, name, pause in (
            (joint_saves, "commit", 0.3 + rank),
            (save_state, "rotate", 1.3 - rank),
        ):
            setattr(module, name, slowed(name, getattr(module, name), pause))
        accelerator.save_state()
        seen = {path.name for path in ended.iterdir()}
        assert {"commit-0", "rotate-0"} <= seen
        if owns:
            (ended / f"owns-{rank}").touch()
        accelerator.wait_for_everyone()
        if (ended / "owns-1").exists():
            assert {"commit-1", "rotate-1"} <= seen

    assert run_ranks(2, work) == [0, 0]
    if not (ended / "owns-1").exists():
        pytest.skip("no mount namespace for this user")


@FORKS
def test_nodes_with_a_shared_disk_save_once_whatever_is_left_over(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        os.environ["LOCAL_RANK"] = "0"
        accelerator, model = run(None)
        for value in (1.0, 2.0):
            set_weight(model, value)
            saved = accelerator.save_state(tmp_path / "c")
            assert weight_in(saved) == value
            manifest = read_manifest(saved)
            assert manifest is not None
            assert "random_states_1.pkl" in manifest.files

    assert run_ranks(2, work) == [0, 0]


@pytest.mark.slow
@FORKS
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_any_step_leaves_no_half_checkpoint(tmp_path: Path, victim: int) -> None:
    for kill_at in filter(is_sampled, range(1000)):
        project = tmp_path / str(kill_at)

        def work(rank: int, project: Path = project, kill_at: int = kill_at) -> None:
            accelerator, model = run(project, total_limit=1)
            save_values(accelerator, model, 1.0)
            if rank == victim:
                arm(Steps(str(project), kill_at))
            save_values(accelerator, model, 2.0)

        # The other one waits in vain.
        statuses = run_ranks(2, work, notice=0.5)
        folder = project / "checkpoints"
        found = candidates(folder)
        best = newest_complete(found)
        assert best is not None
        assert weight_in(on_disk(best.path)) == best.number + 1.0
        assert all(one.problem is None for one in found), "half a checkpoint has a number"
        assert set(names(folder)) <= {"checkpoint_0", "checkpoint_1"}
        if statuses == [0, 0]:
            assert kill_at > 2
            return
        assert os.WIFSIGNALED(statuses[victim])
        assert os.WTERMSIG(statuses[victim]) == signal.SIGKILL

        def resume(rank: int, project: Path = project, expected: float = best.number + 1.0) -> None:
            accelerator, model = run(project, total_limit=1)
            accelerator.load_state()
            assert weight_of(model) == expected
            accelerator.save_state()

        if kill_at % 5 == 0:
            assert run_ranks(2, resume) == [0, 0]
            assert names(project) == ["checkpoints"]
            assert len(names(folder)) == 1


def test_what_is_there_is_said_where_no_name_counts(tmp_path: Path) -> None:
    (tmp_path / "run-4").mkdir()
    said = "expected folders named checkpoint_<number>, .*found run-4"
    with pytest.raises(UsageError, match=said):
        latest_checkpoint(tmp_path)


def test_checkpoints_of_every_kind_of_name_are_found(tmp_path: Path) -> None:
    accelerator = without_numbers(tmp_path)
    for name in ("step_9", "step_10", "mine-3-x", "mine-12-x"):
        accelerator.save_state(tmp_path / name)
    (tmp_path / "step_11").mkdir()
    (tmp_path / "step_last").mkdir()
    with pytest.warns(UserWarning, match="chose step_10 and passed over step_11: no model weights"):
        assert latest_checkpoint(tmp_path) == tmp_path / "step_10"
    assert latest_checkpoint(tmp_path, pattern="mine-{}-x") == tmp_path / "mine-12-x"
    with pytest.raises(UsageError, match=r"pattern='step_': expected .* 'step_\{\}'"):
        latest_checkpoint(tmp_path, pattern="step_")
    with pytest.raises(UsageError, match="expected folders named other_<number>"):
        latest_checkpoint(tmp_path, pattern="other_{}")


def test_numbers_of_two_kinds_are_not_compared(tmp_path: Path) -> None:
    accelerator = without_numbers(tmp_path)
    for age, name in ((50, "step_100"), (0, "epoch_1"), (90, "epoch_0")):
        accelerator.save_state(tmp_path / name)
        os.utime(tmp_path / name / "random_states_0.pkl", (1e9 - age,) * 2)
    with pytest.warns(UserWarning, match=r"chose epoch_1; saved earlier: step_100; to choose"):
        assert latest_checkpoint(tmp_path) == tmp_path / "epoch_1"
    assert latest_checkpoint(tmp_path, pattern="step_{}") == tmp_path / "step_100"
    os.utime(tmp_path / "step_100" / "random_states_0.pkl", (1e9,) * 2)
    said = r"step_100, epoch_1 follow different naming patterns, .* next: latest_checkpoint"
    with pytest.raises(UsageError, match=said):
        latest_checkpoint(tmp_path)


def test_folders_of_the_trainer_are_complete_by_its_own_files(tmp_path: Path) -> None:
    accelerator, _ = run(tmp_path / "elsewhere")
    saved = accelerator.save_state()
    for step in (5, 10, 15, 20, 25):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
        shutil.copyfile(saved / "optimizer.bin", folder / "optimizer.pt")
        torch.save({"last_epoch": step, "_last_lr": [0.1]}, folder / "scheduler.pt")
        (folder / "rng_state.pth").write_bytes(TRAINER_RANDOM_STATES)
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    (tmp_path / "checkpoint-25" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-20" / "optimizer.pt").unlink()
    with (tmp_path / "checkpoint-15" / "model.safetensors").open("r+b") as file:
        file.truncate(90)
    with pytest.warns(UserWarning, match="chose checkpoint-10 and passed over") as seen:
        assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    text = str(seen[0].message)
    assert "checkpoint-25: neither random_states_0.pkl, which" in text
    assert "checkpoint-20: scheduler.pt without optimizer.pt" in text
    assert "checkpoint-15: model.safetensors: " in text
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"global_step": 4}')
    with pytest.warns(
        UserWarning,
        match=r"checkpoint-10: trainer_state\.json: \"global_step\" is 4 \(expected 10",
    ):
        assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-5"


def test_a_stock_folder_without_a_model_is_passed_over_at_the_line_that_asks(
    tmp_path: Path,
) -> None:
    accelerator, _ = run(tmp_path)
    for _ in range(2):
        accelerate.Accelerator.save_state(accelerator)
    (tmp_path / "checkpoints" / "checkpoint_1" / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="checkpoint_1: no model weights") as seen:
        assert latest_checkpoint(tmp_path).name == "checkpoint_0"
    assert seen[0].filename == __file__


@pytest.mark.parametrize(
    ("config", "content", "model", "weights"),
    [
        ("config.json", {"_class_name": "UNet2DModel"}, "UNet2DModel", "diffusion_pytorch_model"),
        ("adapter_config.json", {"peft_type": "LORA"}, "a PEFT adapter (LORA)", "adapter_model"),
    ],
)
def test_a_model_of_a_hook_without_its_weights_is_passed_over(
    tmp_path: Path, config: str, content: dict[str, str], model: str, weights: str
) -> None:
    """A copy that was cut: ``unet/`` holds the config alone, and ``check`` warns of
    ``missing-model``.
    """
    accelerator, _ = run(tmp_path)
    folders = [tmp_path / "checkpoints" / f"checkpoint_{number}" for number in range(3)]
    for folder in folders:
        accelerate.Accelerator.save_state(accelerator)
        for below in ("unet", "unet_ema"):
            (folder / below).mkdir()
            (folder / below / config).write_text(json.dumps(content))
            shutil.copyfile(folder / "model.safetensors", folder / below / f"{weights}.safetensors")
        (folder / "model.safetensors").unlink()
    assert latest_checkpoint(tmp_path) == folders[2]
    for path in (folders[2] / "unet", folders[1] / "unet", folders[1] / "unet_ema"):
        (path / f"{weights}.safetensors").unlink()
    with pytest.warns(UserWarning, match="chose checkpoint_0 and passed over") as seen:
        assert latest_checkpoint(tmp_path) == folders[0]
    said = str(seen[0].message)
    assert f"checkpoint_2: unet/ has no weights, but its {config} is for {model}" in said
    assert "checkpoint_1: no model weights" in said
    for folder in folders[1:]:
        assert "missing-model" in {one.code for one in check(folder).findings}
