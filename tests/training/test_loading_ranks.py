"""load_state_tolerant in two real processes: all ranks load, or none, and none waits for another
for ever.
"""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import ckptfix
from ckptfix.training.loading.load_report import LoadError, LoadPolicy, Requirement
from ckptfix.training.loading.load_state import load_state_tolerant
from fixtures.models import TwoLayer
from tests.training.loading_runs import FIXTURES, Run, make_run, reset, run_of_fixture, seeded
from tests.training.rank_cases import Cases, Failures, rank, run_cases, turn_on_fsdp

pytestmark = pytest.mark.slow

CASES: Cases = {}
PARTIAL = LoadPolicy(models=Requirement.PARTIAL)


def case(work: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES[work.__name__] = work
    return work


def fresh() -> Run:
    return make_run(seeded(TwoLayer, 9), scheduler=True, custom=1)


def saved(folder: Path, name: str, kind: Any = Accelerator) -> Path:
    """Train and save on both ranks; each rank has random numbers of its own."""
    run = make_run(seeded(TwoLayer, 1), scheduler=True, custom=1, accelerator=kind(cpu=True))
    torch.manual_seed(100 + rank())
    run.train()
    run.accelerator.save_state(str(folder / name))
    run.accelerator.wait_for_everyone()
    reset()
    return folder / name


def without(folder: Path, name: str) -> None:
    """Delete a file, on one rank for all."""
    if rank() == 0:
        (folder / name).unlink()
    torch.distributed.barrier()


def fails(run: Run, path: Path, *said: str, policy: LoadPolicy | None = None) -> None:
    """Load, and expect an error that says all of this, after which nothing is modified."""
    before = run.digest()
    with pytest.raises(LoadError) as caught:
        load_state_tolerant(run.accelerator, path, policy=policy)
    for words in said:
        assert re.search(words, str(caught.value)), str(caught.value)
    assert not caught.value.modified
    assert run.digest() == before


def fails_on_rank_1(run: Run, path: Path, own: str, **policy: Any) -> None:
    """Expect that rank 1 fails, and that rank 0 names it with its reason."""
    fails(run, path, own, *(["rank 1 failed"] if rank() == 0 else []), **policy)


def refuse(state: Any) -> None:
    raise KeyError("colour")


@case
def a_healthy_folder_gives_what_stock_gives_on_every_rank(folder: Path) -> None:
    path = saved(folder, "as_stock")
    stock = fresh()
    stock.accelerator.load_state(str(path))
    wanted = stock.digest()
    reset()
    run = fresh()
    report = load_state_tolerant(run.accelerator, path)
    assert run.digest() == wanted
    assert report.is_complete
    assert run.accelerator.num_processes == 2


@case
def a_doubled_folder_of_a_real_run(_: Path) -> None:
    fixture = FIXTURES / "accelerate-1.15.0" / "student-teacher-raw-safetensors"
    run, wanted = run_of_fixture(fixture)
    load_state_tolerant(run.accelerator, fixture / "checkpoint")
    have = run.digest()
    assert {part: have[part] for part in wanted} == wanted


@case
def a_doubling_script_reads_a_healthy_folder(folder: Path) -> None:
    """What a correct one wrote; stock says pytorch_model_1.bin is missing."""
    path = saved(folder, "doubling_script")
    stock = fresh()
    stock.accelerator.load_state(str(path))
    reset()
    run = fresh()
    run.accelerator._models.append(nn.parallel.DistributedDataParallel(run.models[0]))
    report = load_state_tolerant(run.accelerator, path)
    assert len(report.of("models")) == 1
    assert report.is_complete
    assert torch.equal(run.models[0].fc1.weight, stock.models[0].fc1.weight)


@case
def a_rank_without_a_file_keeps_its_generators_and_gets_the_step(folder: Path) -> None:
    path = saved(folder, "one_rank_saved")
    without(path, "random_states_1.pkl")
    run = fresh()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (rng,) = load_state_tolerant(run.accelerator, path).of("rng")
    assert run.accelerator.step == 2
    assert rng.status.value == ("restored", "skipped")[rank()]
    assert sum("random_states" in str(one.message) for one in caught) == rank()
    if rank() == 1:
        assert "1 rank saved random states, this run has 2 ranks" in rng.reason


@case
def one_rank_fails(folder: Path) -> None:
    path = saved(folder, "one_rank_fails")
    said = "does not exist" if rank() else "rank 1 failed, so rank 0 stops too(.|\n)*does not exist"
    fails_on_rank_1(fresh(), folder / "nowhere" if rank() else path, said)


@case
def the_generators_of_one_rank_are_required(folder: Path) -> None:
    path = saved(folder, "required")
    without(path, "random_states_1.pkl")
    policy = LoadPolicy(rng=Requirement.REQUIRE)
    fails_on_rank_1(fresh(), path, "random_states_1.pkl is missing", policy=policy)


@case
def a_hook_of_one_rank_fails(folder: Path) -> None:
    path = saved(folder, "hook")
    run = fresh()

    def hook(models: list[nn.Module], _: str) -> None:
        models[0].fc1.weight.data.fill_(1.0)
        if rank() == 1:
            raise OSError("the hook cannot")

    run.accelerator.register_load_state_pre_hook(hook)
    fails_on_rank_1(run, path, "the hook cannot")


@case
def ranks_that_see_other_folders_load_nothing(folder: Path) -> None:
    paths = saved(folder, "here"), saved(folder, "there")
    without(paths[1], "scheduler.bin")
    said = "rank 1 would load different data than rank 0"
    fails(fresh(), paths[rank()], said, policy=LoadPolicy(schedulers=Requirement.WARN))


@case
def ranks_that_see_other_saves_of_a_run_load_nothing(folder: Path) -> None:
    """Node disks whose newest checkpoints differ: all files have the same names and sizes."""
    run = make_run(seeded(TwoLayer, 1), scheduler=True, custom=1)
    paths = [folder / "earlier", folder / "later"]
    for path in paths:
        run.train()
        run.accelerator.save_state(str(path))
        run.accelerator.wait_for_everyone()
    reset()
    said = "rank 1 would load different data than rank 0: optimizers 0"
    steps = [rf" at step {step} with learning rates \[" for step in (4, 2)]
    fails(fresh(), paths[rank()], said, *steps)


@case
def a_failure_after_the_agreement_is_taken_back_on_all(folder: Path) -> None:
    path = saved(folder, "refuses")
    run = fresh()
    if rank() == 1:
        run.custom[0].load_state_dict = refuse
    said = r"custom 0 \(SampleCounter\) could not load its state" if rank() else "rank 1 failed"
    fails(run, path, said, "all changes were undone")


@case
def a_hook_on_one_rank_alone_hangs_nobody(folder: Path) -> None:
    """The ranks take the same number of steps, so that none waits for ever."""
    path = saved(folder, "hook_alone")
    run = fresh()
    if rank() == 0:
        run.accelerator.register_load_state_pre_hook(lambda models, _: None)
    assert load_state_tolerant(run.accelerator, path).is_complete


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/nonexistent/evil",)


@case
def fsdp_is_left_to_accelerate_and_said(folder: Path) -> None:
    """Its own loading is called, after the files were looked at; code in a pickle stops it
    before.
    """
    accelerator = Accelerator(cpu=True)
    turn_on_fsdp(accelerator, fsdp_version=1, state_dict_type="SHARDED_STATE_DICT")
    calls: list[str] = []
    accelerator.load_state = calls.append
    accelerator._models.append(nn.Linear(1, 1))
    path = folder / "fsdp"
    if rank() == 0:
        (path / "pytorch_model_fsdp_0").mkdir(parents=True)
        torch.save({"step": 1}, path / "random_states_0.pkl")
        torch.save({"a": torch.ones(1)}, path / "optimizer.bin")
    torch.distributed.barrier()
    report = load_state_tolerant(accelerator, path)
    assert calls == [str(path)]
    assert "by accelerator.load_state (FSDP)" in str(report)
    if rank() == 0:
        torch.save({"x": Evil()}, path / "custom_checkpoint_0.pkl")
    torch.distributed.barrier()
    with pytest.raises(LoadError, match=r"custom_checkpoint_0.pkl needs posix.mkdir"):
        load_state_tolerant(accelerator, path)
    said = r"LoadPolicy\(models='partial'\) is not supported with FSDP, where accelerate's own"
    with pytest.raises(LoadError, match=said):
        load_state_tolerant(accelerator, path, policy=PARTIAL)
    assert calls == [str(path)]


class Longer(TwoLayer):
    """A model with a layer that no checkpoint here has, before those that they have."""

    def __init__(self) -> None:
        super().__init__()
        layers = dict(self._modules)
        self._modules.clear()
        self.add_module("fresh", nn.Linear(3, 3))
        self._modules.update(layers)


def longer() -> Run:
    return make_run(seeded(Longer, 9), scheduler=True, custom=1)


@case
def both_ranks_load_what_matches(folder: Path) -> None:
    path = saved(folder, "in_part", ckptfix.Accelerator)
    stock = fresh()
    stock.accelerator.load_state(str(path))
    reset()
    run = longer()
    before = run.models[0].fresh.weight.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = load_state_tolerant(run.accelerator, path, policy=PARTIAL)
    assert report.of("models")[0].fresh == ("fresh.weight", "fresh.bias")
    assert torch.equal(run.models[0].fresh.weight, before)
    _, _, *loaded = run.models[0].parameters()
    for found, wanted in zip(loaded, stock.models[0].parameters(), strict=True):
        assert torch.equal(found, wanted)
        moments = (
            one.optimizers[0].state[parameter]["exp_avg"]
            for one, parameter in ((run, found), (stock, wanted))
        )
        assert torch.equal(*moments)
    assert sum("kept as initialized" in str(one.message) for one in caught) == 1 - rank()


@case
def ranks_that_would_load_different_keys_load_nothing(folder: Path) -> None:
    path = saved(folder, "in_part_alone")
    run = longer()
    if rank() == 1:
        run.models[0].register_buffer("more", torch.zeros(1))
    fails(run, path, "rank 1 would load different data than rank 0", policy=PARTIAL)


@case
def a_failure_of_one_rank_takes_a_partial_load_back_on_both(folder: Path) -> None:
    path = saved(folder, "in_part_refused")
    run = longer()
    if rank() == 1:
        run.custom[0].load_state_dict = refuse
    fails(run, path, "all changes were undone", policy=PARTIAL)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Failures:
    return run_cases(CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_on_two_ranks(failures: Failures, name: str) -> None:
    for wrong in failures[name]:
        assert not wrong, wrong
