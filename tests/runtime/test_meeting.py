"""Saves of scripts that call `save_state` on some processes only: nothing hangs, and what is saved is whole."""

import datetime
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import InitProcessGroupKwargs

from ckptfix.checkpoint.latest import incomplete
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.errors import OperationError
from ckptfix.runtime.accelerator import patch_accelerate, unpatch_accelerate
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    yield
    unpatch_accelerate()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def run(patience: float = 0.5, timeout: float = 60.0) -> tuple[Any, Any]:
    """A run of a script that knows nothing of the guard; `timeout` is that of collective operations."""
    patch_accelerate(wait_for_ranks=patience)
    warnings.filterwarnings("ignore", "save_state .*: not all other processes came")
    torch.manual_seed(0)
    limit = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=timeout))
    accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[limit])
    model = torch.nn.Linear(2, 2)
    return accelerator, accelerator.prepare(model)


def train(accelerator: Any, model: Any) -> None:
    accelerator.backward(model(torch.ones(1, 2)).sum())


def states(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("random_states_*"))


def test_saves_on_the_main_process_alone_wait_once(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        accelerator, model = run()
        times = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for name in ("a", "b", "a"):
                start = time.monotonic()
                if accelerator.is_main_process:
                    accelerator.save_state(tmp_path / name)
                times.append(time.monotonic() - start)
                train(accelerator, model)
        messages = [str(one.message) for one in caught if "not all other processes" in str(one.message)]
        if rank == 0:
            assert len(messages) == 1
            assert "test_meeting.py:" in messages[0]
            assert "later saves do not wait" in messages[0]
            assert times[0] > 0.5 > max(times[1:]), times
            accelerator.load_state(str(tmp_path / "a"))

    assert run_ranks(2, work) == [0, 0]
    for name in ("a", "b"):
        assert incomplete(tmp_path / name) is None
        assert read_manifest(tmp_path / name) is not None
        assert states(tmp_path / name) == ["random_states_0.pkl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_processes_that_all_come_save_together(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        accelerator, _ = run(patience=30)
        start = time.monotonic()
        for name in ("a", "b", "a"):
            accelerator.save_state(tmp_path / name)
            accelerator.load_state(str(tmp_path / name))
        assert time.monotonic() - start < 20

    assert run_ranks(3, work) == [0, 0, 0]
    for name in ("a", "b"):
        manifest = read_manifest(tmp_path / name)
        assert manifest is not None
        assert manifest.world_size == 3
        assert {f"random_states_{rank}.pkl" for rank in range(3)} <= set(manifest.files)


def test_who_comes_late_adds_its_own_and_the_next_time_all_wait(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        accelerator, model = run()
        if rank == 1:
            time.sleep(2)
        accelerator.save_state(tmp_path / "late")
        train(accelerator, model)
        if rank == 1:
            time.sleep(0.2)
        accelerator.save_state(tmp_path / "next")
        accelerator.save_state(tmp_path / "late")

    assert run_ranks(2, work) == [0, 0]
    both = ["random_states_0.pkl", "random_states_1.pkl"]
    for name in ("late", "next"):
        assert states(tmp_path / name) == both
        manifest = read_manifest(tmp_path / name)
        assert manifest is not None
        assert set(both) <= set(manifest.files), name
        assert incomplete(tmp_path / name) is None


def test_a_late_process_hears_that_the_save_failed(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        accelerator, _ = run()
        if rank == 0:
            torch.save = lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device"))
            with pytest.raises(OSError, match="No space left"):
                accelerator.save_state(tmp_path / "c")
        else:
            time.sleep(1.5)
            with pytest.raises(OperationError, match=r"failed on the main process: OSError: .*No space left"):
                accelerator.save_state(tmp_path / "c")
        accelerator.wait_for_everyone()

    assert run_ranks(2, work) == [0, 0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("delayed", [0, 1])
def test_a_folder_for_each_process_is_no_trap(tmp_path: Path, delayed: int) -> None:
    def work(rank: int) -> None:
        accelerator, model = run()
        for step in range(2):
            if rank == delayed:
                time.sleep(1)
            accelerator.save_state(tmp_path / f"{step}-rank{rank}")
            train(accelerator, model)

    start = time.monotonic()
    assert run_ranks(2, work, patience=40) == [0, 0]
    assert time.monotonic() - start < 30
    for step in range(2):
        assert states(tmp_path / f"{step}-rank0") == ["random_states_0.pkl"]
        assert states(tmp_path / f"{step}-rank1") == ["random_states_1.pkl"]


def test_a_save_without_the_main_process_ends_as_without_the_guard(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        accelerator, _ = run(timeout=3)
        if rank == 1:
            accelerator.save_state(tmp_path / "c")
        else:
            time.sleep(5)

    assert run_ranks(2, work) == [0, 0]
    assert states(tmp_path / "c") == ["random_states_1.pkl"]


def test_the_newest_is_chosen_by_the_main_process_which_waits_for_nobody(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        patch_accelerate()
        config = accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
        accelerator = accelerate.Accelerator(cpu=True, project_config=config)
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        accelerator.save_state()
        accelerator.save_state()
        if rank == 0:
            accelerator.load_state()
            assert accelerator.project_configuration.iteration == 2
        train(accelerator, model)
        if rank == 1:
            accelerator.load_state()
            assert accelerator.project_configuration.iteration == 2
        accelerator.wait_for_everyone()

    assert run_ranks(2, work) == [0, 0]


def test_a_choice_that_fails_fails_on_all(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        patch_accelerate()
        config = accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
        (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True, exist_ok=True)
        accelerator = accelerate.Accelerator(cpu=True, project_config=config)
        accelerator.prepare(torch.nn.Linear(2, 2))
        with pytest.raises(Exception, match="no whole checkpoint"):
            accelerator.load_state()
        accelerator.wait_for_everyone()

    assert run_ranks(2, work) == [0, 0]
