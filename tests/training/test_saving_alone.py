"""Under the patch, scripts call `save_state` on whichever processes they like: nothing hangs,
nothing is lost.
"""

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import ProjectConfiguration

from ckptfix.checkpoint.latest import incomplete
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.training.accelerator import Accelerator, patch_accelerate, unpatch_accelerate
from tests.sampling import is_sampled
from tests.training.killing import Steps, arm
from tests.training.ranks import run_ranks
from tests.training.test_saving import names, set_weight, weight_in

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

BOTH = ["random_states_0.pkl", "random_states_1.pkl"]


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """The patch is one for the whole process."""
    yield
    unpatch_accelerate()


def run(**arguments: Any) -> tuple[Any, Any]:
    """A run of a script that knows nothing of the guard."""
    patch_accelerate()
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, **arguments)
    return accelerator, accelerator.prepare(torch.nn.Linear(2, 2))


def train(accelerator: Any, model: Any) -> None:
    """A step that every process takes part in: who waits for another elsewhere hangs here."""
    accelerator.backward(model(torch.ones(1, 2)).sum())


def states(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("random_states_*"))


def test_the_main_process_alone_saves_a_whole_checkpoint(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        accelerator, model = run()
        for name in ("a", "b", "a"):
            train(accelerator, model)
            if accelerator.is_main_process:
                assert accelerator.save_state(tmp_path / name) == tmp_path / name
        train(accelerator, model)

    assert run_ranks(2, work) == [0, 0]
    assert names(tmp_path) == ["a", "b"]
    for name in ("a", "b"):
        assert incomplete(tmp_path / name) is None
        assert read_manifest(tmp_path / name) is not None
        assert states(tmp_path / name) == ["random_states_0.pkl"]


@pytest.mark.parametrize("late", [0, 1])
def test_all_processes_save_into_one_folder_again_and_again(tmp_path: Path, late: int) -> None:
    def work(rank: int) -> None:
        accelerator, model = run()
        last = b""
        for step in range(3):
            train(accelerator, model)
            if rank == late:
                time.sleep(0.2)
            accelerator.save_state(tmp_path / "last")
            own = (tmp_path / "last" / BOTH[rank]).read_bytes()
            assert own != last, "the generators of an earlier save"
            last = own
            torch.rand(1)
            accelerator.wait_for_everyone()
            assert states(tmp_path / "last") == BOTH, step
            assert incomplete(tmp_path / "last") is None

    assert run_ranks(2, work) == [0, 0]
    assert names(tmp_path) == ["last"]


def test_saves_on_one_and_saves_on_all_in_turn(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        accelerator, model = run()
        for _ in range(3):
            if rank == 0:
                time.sleep(0.1)
                accelerator.save_state(tmp_path / "best")
            train(accelerator, model)
            accelerator.save_state(tmp_path / "last")
        if rank == 0:
            accelerator.save_state(tmp_path / "last")

    assert run_ranks(2, work) == [0, 0]
    assert states(tmp_path / "best") == ["random_states_0.pkl"]
    assert states(tmp_path / "last") == BOTH


@pytest.mark.parametrize("automatic", [False, True])
def test_a_folder_for_each_process(tmp_path: Path, automatic: bool) -> None:
    def work(rank: int) -> None:
        mine = tmp_path / f"rank{rank}"
        config = ProjectConfiguration(str(mine), automatic_checkpoint_naming=automatic)
        accelerator, model = run(project_config=config)
        for _ in range(2):
            saved = accelerator.save_state(None if automatic else mine / "checkpoint")
            train(accelerator, model)
            assert states(saved) == [BOTH[rank]]
            assert (saved / "model.safetensors").exists() == (rank == 0)

    assert run_ranks(2, work) == [0, 0]


def test_another_process_alone(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        accelerator, model = run()
        if rank == 1:
            accelerator.save_state(tmp_path / "c")
        train(accelerator, model)

    assert run_ranks(2, work) == [0, 0]
    assert states(tmp_path / "c") == ["random_states_1.pkl"]
    assert incomplete(tmp_path / "c") is not None, "no checkpoint without the main process"


def test_a_hook_of_the_user_may_wait_for_all(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        accelerator, model = run()
        accelerator.register_save_state_pre_hook(lambda *_: accelerator.wait_for_everyone())
        for _ in range(2):
            if rank == 1:
                time.sleep(0.3)
            accelerator.save_state(tmp_path / "c")
            train(accelerator, model)

    assert run_ranks(2, work) == [0, 0]
    assert states(tmp_path / "c") == BOTH


def test_a_save_in_a_thread_while_the_run_trains(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        accelerator, model = run()
        for step in range(3):
            thread = threading.Thread(target=accelerator.save_state, args=(tmp_path / str(step),))
            thread.start()
            for _ in range(20):
                train(accelerator, model)
                assert accelerator.prepare(model.module) is model
            thread.join()

    warnings.simplefilter("ignore")
    assert run_ranks(2, work) == [0, 0]
    assert [states(tmp_path / str(step)) for step in range(3)] == [BOTH] * 3


def test_a_save_after_the_end_of_training(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        accelerator, _ = run()
        accelerator.end_training()
        accelerator.save_state(tmp_path / "c")

    assert run_ranks(2, work) == [0, 0]
    assert states(tmp_path / "c") == BOTH
    assert incomplete(tmp_path / "c") is None


def test_each_process_may_load_the_newest_when_it_likes(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
        accelerator, model = run(project_config=config)
        accelerator.save_state()
        if rank == 0:
            accelerator.load_state()
        train(accelerator, model)
        accelerator.save_state()
        accelerator.load_state()
        assert accelerator.project_configuration.iteration == 2

    assert run_ranks(2, work) == [0, 0]


def test_two_accelerators_save_in_two_threads(tmp_path: Path) -> None:
    patch_accelerate()
    first, second = (accelerate.Accelerator(cpu=True) for _ in range(2))
    first.prepare(torch.nn.Linear(2, 2))
    second.prepare(torch.nn.Linear(2, 2))
    inside, go_on = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        inside.set()
        assert go_on.wait(20)

    first.register_save_state_pre_hook(slow)
    thread = threading.Thread(target=first.save_state, args=(tmp_path / "first",))
    thread.start()
    assert inside.wait(20)
    second.save_state(tmp_path / "second")
    go_on.set()
    thread.join()
    for name in ("first", "second"):
        assert incomplete(tmp_path / name) is None
    assert names(tmp_path) == ["first", "second"]


def test_a_subclass_for_scripts_that_save_on_the_main_process(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        accelerator = Accelerator(cpu=True, save_together=False)
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        if rank == 0:
            accelerator.save_state(tmp_path / "c")
        train(accelerator, model)

    assert run_ranks(2, work) == [0, 0]
    assert incomplete(tmp_path / "c") is None


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_killed_at_any_step_leaves_the_old_or_the_new(
    tmp_path: Path, victim: int
) -> None:
    for kill_at in filter(is_sampled, range(1000)):
        folder = tmp_path / str(kill_at)

        def work(rank: int, folder: Path = folder, kill_at: int = kill_at) -> None:
            accelerator, model = run()
            for value in (1.0, 2.0):
                set_weight(model, value)
                if value == 2.0:
                    accelerator.wait_for_everyone()
                    if rank == victim:
                        arm(Steps(str(tmp_path), kill_at))
                accelerator.save_state(folder / "last")

        # The other one waits in vain.
        statuses = run_ranks(2, work, notice=0.5)
        assert weight_in(folder / "last") in (1.0, 2.0)
        assert states(folder / "last") == BOTH
        assert all((folder / "last" / name).stat().st_size > 1000 for name in BOTH)
        assert incomplete(folder / "last") is None
        if statuses == [0, 0]:
            assert kill_at > 2
            return
        assert os.WTERMSIG(statuses[victim]) == signal.SIGKILL
