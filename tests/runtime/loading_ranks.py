"""The cases of load_state_tolerant in two processes, for `test_loading_ranks.py`."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ckptfix.runtime.loading import LoadError, LoadPolicy, load_state_tolerant
from fixtures.models import TwoLayer
from tests.runtime.loading_runs import FIXTURES, Run, make_run, reset, run_of_fixture, seeded
from tests.runtime.rank_cases import Seen, case, main, rank, turn_on_fsdp


def fresh() -> Run:
    return make_run(seeded(TwoLayer, 9), scheduler=True, custom=1)


def saved(folder: Path, name: str) -> Path:
    """Train and save on both ranks; each rank has random numbers of its own."""
    run = make_run(seeded(TwoLayer, 1), scheduler=True, custom=1)
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
    """The script that prepares twice reads what a correct one wrote; stock says pytorch_model_1.bin is missing."""
    path = saved(folder, "doubling_script")
    run = fresh()
    run.accelerator._models.append(nn.parallel.DistributedDataParallel(run.models[0]))
    report = load_state_tolerant(run.accelerator, path)
    weight = run.models[0].fc1.weight.detach().clone()
    return {"models": len(report.of("models")), "sum": float(weight.sum()), "complete": report.is_complete}


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
    """FSDP's own loading is called, after the files were looked at; code in a pickle stops it before."""
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
    return {"calls": calls == [str(path)], "report": str(report), "error": error}


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


if __name__ == "__main__":
    main()
