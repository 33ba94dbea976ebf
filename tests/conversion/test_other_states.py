"""Schedulers, the scale of the loss and random states on their way to another strategy and number of processes."""

from pathlib import Path

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
    assert [one.what for one in receipt.left_out] == ["random_states_2.pkl", "random_states_3.pkl"]
    assert "by 4 so far, by 2 from now on" in receipt.warnings[0]


def test_new_processes_get_the_step_and_no_random_states(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "ddp", trained())
    (source / "dl_state_dict.bin").write_bytes((source / "custom_checkpoint_0.pkl").read_bytes())
    receipt = ckptfix.migrate(source, tmp_path / "new", to="fsdp", state="all", processes=3, model=net)
    found = torch.load(tmp_path / "new" / "random_states_2.pkl", weights_only=True)
    assert found == {"step": 3}, "accelerator.step must not differ between ranks"
    assert not (tmp_path / "new" / "dl_state_dict.bin").exists()
    assert [one.what.split("'")[0] for one in receipt.left_out] == ["dl_state_dict.bin", "random states in "]


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
