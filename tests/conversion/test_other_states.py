"""Schedulers, the scale of the loss and random states on their way to another strategy and number of processes."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfix
from tests.conversion.state_making import (
    net,
    save_state,
    trained,
)


def test_fewer_processes(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "fsdp", trained(), processes=4)
    receipt = ckptfix.migrate(source, tmp_path / "new", to="ddp", state="all", processes=2)
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= names
    assert not {"random_states_2.pkl", "random_states_3.pkl"} & names
    assert [one.what for one in receipt.left_out] == [
        "random_states_2.pkl",
        "random_states_3.pkl",
        "accelerator.step, 3, in the random states",
    ]
    assert "at 6 after 3 steps of the optimizer; " in receipt.warnings[0]
    assert "by 4 so far, by 2 from now on), unless" in receipt.warnings[0]


@pytest.mark.parametrize(("before", "processes"), [(4, 2), (2, 4), (2, 1)])
def test_another_number_of_processes_begins_a_cycle_of_gradient_accumulation(
    tmp_path: Path, before: int, processes: int
) -> None:
    """The symptom: after 5 steps of 2 batches, the first step of a run of 4 batches had 2 of them, scaled by 1/4."""
    source = save_state(tmp_path / "source", "fsdp", trained(), processes=before)
    for rank in range(before):
        torch.save(random_states(rank), source / f"random_states_{rank}.pkl")
    ckptfix.migrate(source, tmp_path / "same", to="fsdp", state="all", processes=before)
    ckptfix.migrate(source, tmp_path / "other", to="fsdp", state="all", processes=processes)
    for rank in range(max(before, processes)):
        name = f"random_states_{rank}.pkl"
        if rank < before:
            assert (tmp_path / "same" / name).read_bytes() == (source / name).read_bytes()
        if rank < processes:
            found = torch.load(tmp_path / "other" / name, weights_only=False)
            assert found.pop("step") == 0, "all ranks alike, or one of them waits for the others for ever"
            assert repr(found) == repr({} if rank >= before else random_states(rank, step=None))


def random_states(rank: int, step: int | None = 10) -> dict[str, Any]:
    """Return what Accelerate saves of a rank with two GPUs."""
    generator = torch.Generator().manual_seed(rank)
    found = {
        "step": step,
        "random_state": random.Random(rank).getstate(),
        "numpy_random_seed": np.random.RandomState(rank).get_state(),
        "torch_manual_seed": generator.get_state(),
        "torch_cuda_manual_seed": [generator.get_state()[:16], generator.get_state()[16:32]],
    }
    return {key: value for key, value in found.items() if value is not None}


def test_the_step_stays_where_it_cannot_be_written_or_the_guard_compares_the_file(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "fsdp", trained())
    torch.save({"step": 3, "of a script": {(1, 2): 3}}, source / "random_states_0.pkl")
    for name in ("plain", "guarded"):
        if name == "guarded":
            torch.save({"step": 3}, source / "random_states_0.pkl")
            torch.save({"version": 0}, source / "run_state_0.pt")
        receipt = ckptfix.migrate(source, tmp_path / name, to="fsdp", state="all", processes=3)
        for rank in range(2):
            path = f"random_states_{rank}.pkl"
            assert (tmp_path / name / path).read_bytes() == (source / path).read_bytes()
        assert torch.load(tmp_path / name / "random_states_2.pkl", weights_only=True) == {"step": 3}
        (words,) = [one for one in receipt.warnings if "random_states" in one]
        assert "with accelerator.step 3, which counts batches within gradient accumulation" in words
        assert words.endswith(
            "next, unless the guard of ckptfix resumes: accelerator.step = 0 after load_state"
        )


def test_new_processes_get_the_step_and_no_random_states(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "ddp", trained())
    (source / "dl_state_dict.bin").write_bytes((source / "custom_checkpoint_0.pkl").read_bytes())
    receipt = ckptfix.migrate(source, tmp_path / "new", to="fsdp", state="all", processes=3, model=net)
    found = torch.load(tmp_path / "new" / "random_states_2.pkl", weights_only=True)
    assert found == {"step": 0}, "accelerator.step must not differ between ranks"
    assert not (tmp_path / "new" / "dl_state_dict.bin").exists()
    assert [one.what.split("'")[0] for one in receipt.left_out] == [
        "dl_state_dict.bin",
        "accelerator.step, 3, in the random states",
        "random states in ",
    ]


def test_a_scheduler_goes_into_deepspeeds_files_and_out_of_them(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "fsdp", trained())
    ckptfix.migrate(source, tmp_path / "between", to="zero1", state="all")
    states = tmp_path / "between" / "pytorch_model" / "mp_rank_00_model_states.pt"
    content = torch.load(states, weights_only=False)
    assert content["lr_scheduler"] == {"last_epoch": 6, "_step_count": 7}
    (tmp_path / "between" / "scheduler.bin").unlink()
    ckptfix.migrate(tmp_path / "between", tmp_path / "new", to="ddp", state="all")
    found = torch.load(tmp_path / "new" / "scheduler.bin", weights_only=True)
    assert found == {"last_epoch": 6, "_step_count": 7}
    torch.save(content | {"lr_scheduler": {"last_batch_iteration": 4}}, states)
    receipt = ckptfix.migrate(tmp_path / "between", tmp_path / "other", to="ddp", state="all")
    assert "{'last_batch_iteration': 4} is left out: no scheduler of torch" in receipt.warnings[0]


def test_the_scale_of_the_loss_goes_into_deepspeeds_files_and_out_of_them(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "fsdp", trained())
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scaler._growth_tracker += 3
    torch.save(scaler.state_dict(), source / "scaler.pt")
    ckptfix.migrate(source, tmp_path / "between", to="zero2", state="all", dtype="fp16")
    (tmp_path / "between" / "scaler.pt").unlink()
    ckptfix.migrate(tmp_path / "between", tmp_path / "new", to="ddp", state="all")
    assert torch.load(tmp_path / "new" / "scaler.pt", weights_only=True) == scaler.state_dict()


@pytest.mark.parametrize("processes", [1, 3])
def test_a_scheduler_that_counted_once_for_all_processes_is_named(tmp_path: Path, processes: int) -> None:
    source = save_state(tmp_path / "source", "fsdp", trained())
    ckptfix.migrate(source, tmp_path / "between", to="zero2", state="all")
    (tmp_path / "between" / "scheduler.bin").unlink()
    receipt = ckptfix.migrate(
        tmp_path / "between", tmp_path / "new", to="fsdp", state="all", processes=processes
    )
    words = "advanced this scheduler by 1 at each step, and Accelerate advances it once per process, by 3 from now"
    assert [words in one for one in receipt.warnings] == [True] * (processes > 1)


def paces(root: Path, last_epoch: int, to: str, *, before: int, processes: int) -> list[str]:
    """Return what is said of a scheduler that is at ``last_epoch`` after three steps of its optimizer."""
    source = save_state(root / "source", "fsdp", trained(), processes=before)
    torch.save({"last_epoch": last_epoch, "_step_count": last_epoch + 1}, source / "scheduler.bin")
    receipt = ckptfix.migrate(source, root / "new", to=to, state="all", processes=processes)
    assert (root / "new" / "scheduler.bin").read_bytes() == (source / "scheduler.bin").read_bytes()
    return [words for words in receipt.warnings if "scheduler" in words]


def test_a_scheduler_that_advances_once_per_process_is_named_with_both_numbers(tmp_path: Path) -> None:
    (words,) = paces(tmp_path, 6, "ddp", before=2, processes=4)
    assert words.startswith("scheduler.bin: copied unchanged, at 6 after 3 steps of the optimizer; ")
    assert (
        "(by 2 so far, by 4 from now on); next, where the batch of a step stays as large as it was: " in words
    )
    assert words.endswith(" and, if accelerator.sync_gradients, scheduler.step() 2 times")


@pytest.mark.parametrize("to", ["zero2", "universal"])
def test_a_scheduler_that_advances_once_per_process_is_named_where_an_engine_takes_it(
    tmp_path: Path, to: str
) -> None:
    (words,) = paces(tmp_path, 6, to, before=2, processes=2)
    assert (
        "at 6 after 3 steps of the optimizer, as Accelerate advanced it by 2 at each step; a scheduler"
        in words
    )
    assert words.endswith("next: let the script prepare() its scheduler of torch, which goes on as before")


@pytest.mark.parametrize(
    ("last_epoch", "to", "before", "processes", "lines"),
    [
        (3, "ddp", 2, 4, 0),  # step_scheduler_with_optimizer=False
        (3, "zero1", 2, 4, 0),
        (3, "zero1", 1, 1, 0),
        (3, "ddp", 1, 4, 1),  # of one process nothing shows what the script says
        (6, "ddp", 2, 2, 0),
        (6, "zero1", 2, 4, 2),
        (5, "zero1", 2, 2, 1),  # a script that does otherwise
    ],
)
def test_what_is_said_of_the_pace_of_a_scheduler(
    tmp_path: Path, last_epoch: int, to: str, before: int, processes: int, lines: int
) -> None:
    found = paces(tmp_path, last_epoch, to, before=before, processes=processes)
    assert len(found) == lines
    assert all(("unless" in words) == (last_epoch != 6) for words in found)
