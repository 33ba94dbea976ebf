"""The cases of load_state_tolerant in two processes, for `test_loading_ranks.py`."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import ckptfix
from ckptfix.training.loading.load_report import LoadError, LoadPolicy, Requirement
from ckptfix.training.loading.load_state import load_state_tolerant
from fixtures.models import TwoLayer
from tests.training.loading_runs import FIXTURES, Run, make_run, reset, run_of_fixture, seeded
from tests.training.rank_cases import Seen, case, rank, turn_on_fsdp


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


def failing(run: Run, path: Path, **arguments: Any) -> Seen:
    """Load, and tell the error, and whether anything changed."""
    before = run.digest()
    try:
        load_state_tolerant(run.accelerator, path, **arguments)
    except LoadError as error:
        return {"error": str(error), "modified": error.modified, "same": run.digest() == before}
    return {"error": None}


@case
def as_stock(folder: Path) -> Seen:
    path = saved(folder, "as_stock")
    stock = fresh()
    stock.accelerator.load_state(str(path))
    wanted = stock.digest()
    reset()
    run = fresh()
    report = load_state_tolerant(run.accelerator, path)
    return {
        "same": run.digest() == wanted,
        "complete": report.is_complete,
        "ranks": run.accelerator.num_processes,
    }


@case
def doubled_fixture(_: Path) -> Seen:
    fixture = FIXTURES / "accelerate-1.15.0" / "student-teacher-raw-safetensors"
    run, wanted = run_of_fixture(fixture)
    load_state_tolerant(run.accelerator, fixture / "checkpoint")
    have = run.digest()
    return {"same": all(have[part] == wanted[part] for part in wanted)}


@case
def doubling_script(folder: Path) -> Seen:
    """The script that prepares twice reads what a correct one wrote; stock says pytorch_model_1.bin
    is missing.
    """
    path = saved(folder, "doubling_script")
    run = fresh()
    run.accelerator._models.append(nn.parallel.DistributedDataParallel(run.models[0]))
    report = load_state_tolerant(run.accelerator, path)
    weight = run.models[0].fc1.weight.detach().clone()
    return {
        "models": len(report.of("models")),
        "sum": float(weight.sum()),
        "complete": report.is_complete,
    }


@case
def one_rank_saved(folder: Path) -> Seen:
    path = saved(folder, "one_rank_saved")
    if rank() == 0:
        (path / "random_states_1.pkl").unlink()
    torch.distributed.barrier()
    run = fresh()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = load_state_tolerant(run.accelerator, path)
    (rng,) = report.of("rng")
    return {
        "rng": rng.status.value,
        "reason": rng.reason,
        "step": run.accelerator.step,
        "warnings": sum("random_states" in str(one.message) for one in caught),
    }


@case
def one_rank_fails(folder: Path) -> Seen:
    path = saved(folder, "one_rank_fails")
    return failing(fresh(), path if rank() == 0 else folder / "nowhere")


@case
def required_generators_of_one_rank(folder: Path) -> Seen:
    path = saved(folder, "required")
    if rank() == 0:
        (path / "random_states_1.pkl").unlink()
    torch.distributed.barrier()
    return failing(fresh(), path, policy=LoadPolicy(rng="require"))  # type: ignore[arg-type]


@case
def ranks_that_see_other_folders(folder: Path) -> Seen:
    path = saved(folder, "here")
    other = saved(folder, "there")
    if rank() == 0:
        (other / "scheduler.bin").unlink()
    torch.distributed.barrier()
    policy = LoadPolicy(schedulers="warn")  # type: ignore[arg-type]
    return failing(fresh(), path if rank() == 0 else other, policy=policy)


@case
def ranks_that_see_other_saves(folder: Path) -> Seen:
    """Node disks whose newest checkpoints differ: all files have the same names and sizes."""
    run = make_run(seeded(TwoLayer, 1), scheduler=True, custom=1)
    paths = [folder / "earlier", folder / "later"]
    for path in paths:
        run.train()
        run.accelerator.save_state(str(path))
        run.accelerator.wait_for_everyone()
    reset()
    return failing(fresh(), paths[rank()])


@case
def an_object_of_one_rank_refuses(folder: Path) -> Seen:
    path = saved(folder, "refuses")
    run = fresh()
    if rank() == 1:

        def refuse(state: Any) -> None:
            raise KeyError("colour")

        run.custom[0].load_state_dict = refuse
    return failing(run, path)


@case
def a_hook_of_one_rank_fails(folder: Path) -> Seen:
    path = saved(folder, "hook")
    run = fresh()

    def hook(models: list[nn.Module], _: str) -> None:
        with torch.no_grad():
            models[0].fc1.weight.fill_(1.0)
        if rank() == 1:
            raise OSError("the hook cannot")

    run.accelerator.register_load_state_pre_hook(hook)
    return failing(run, path)


@case
def a_hook_on_one_rank_alone(folder: Path) -> Seen:
    """The ranks take the same number of steps, so that none waits for ever."""
    path = saved(folder, "hook_alone")
    run = fresh()
    if rank() == 0:
        run.accelerator.register_load_state_pre_hook(lambda models, _: None)
    return {"complete": load_state_tolerant(run.accelerator, path).is_complete}


@case
def fully_sharded(folder: Path) -> Seen:
    """FSDP's own loading is called, after the files were looked at; code in a pickle stops it
    before.
    """
    accelerator = Accelerator(cpu=True)
    turn_on_fsdp(accelerator, fsdp_version=1, state_dict_type="SHARDED_STATE_DICT")
    calls: list[str] = []
    accelerator.load_state = calls.append
    accelerator._models.append(nn.Linear(1, 1))
    path = saved_plain(folder)
    report = load_state_tolerant(accelerator, path)
    if rank() == 0:
        torch.save({"x": Evil()}, path / "custom_checkpoint_0.pkl")
    torch.distributed.barrier()
    try:
        load_state_tolerant(accelerator, path)
        error = ""
    except LoadError as refusal:
        error = str(refusal)
    try:
        load_state_tolerant(accelerator, path, policy=LoadPolicy(models=Requirement.PARTIAL))
        in_part = ""
    except LoadError as refusal:
        in_part = str(refusal)
    return {
        "calls": calls == [str(path)],
        "report": str(report),
        "error": error,
        "in_part": in_part,
    }


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
def in_part(folder: Path) -> Seen:
    path = saved(folder, "in_part", ckptfix.Accelerator)
    stock = fresh()
    stock.accelerator.load_state(str(path))
    wanted = [
        stock.optimizers[0].state[one]["exp_avg"].sum().item()
        for one in stock.models[0].parameters()
    ]
    weights = [one.detach().sum().item() for one in stock.models[0].parameters()]
    reset()
    run = longer()
    before = run.models[0].fresh.weight.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = load_state_tolerant(
            run.accelerator, path, policy=LoadPolicy(models=Requirement.PARTIAL)
        )
    _, _, *loaded = run.models[0].parameters()
    return {
        "fresh": report.of("models")[0].fresh,
        "untouched": bool(torch.equal(run.models[0].fresh.weight, before)),
        "weights": [one.detach().sum().item() for one in loaded] == weights,
        "moments": (
            [run.optimizers[0].state[one]["exp_avg"].sum().item() for one in loaded] == wanted
        ),
        "warnings": sum("kept as initialized" in str(one.message) for one in caught),
    }


@case
def in_part_on_one_rank_alone(folder: Path) -> Seen:
    """The ranks would load different keys."""
    path = saved(folder, "in_part_alone")
    run = longer()
    if rank() == 1:
        run.models[0].register_buffer("more", torch.zeros(1))
    return failing(run, path, policy=LoadPolicy(models=Requirement.PARTIAL))


@case
def in_part_and_an_object_of_one_rank_refuses(folder: Path) -> Seen:
    path = saved(folder, "in_part_refused")
    run = longer()
    if rank() == 1:

        def refuse(state: Any) -> None:
            raise KeyError("colour")

        run.custom[0].load_state_dict = refuse
    return failing(run, path, policy=LoadPolicy(models=Requirement.PARTIAL))


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/nonexistent/evil",)


def saved_plain(folder: Path) -> Path:
    path = folder / "fsdp"
    if rank() == 0:
        (path / "pytorch_model_fsdp_0").mkdir(parents=True)
        torch.save({"step": 1}, path / "random_states_0.pkl")
        torch.save({"a": torch.ones(1)}, path / "optimizer.bin")
    torch.distributed.barrier()
    return path
