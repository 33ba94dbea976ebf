"""Schedulers, the scale of the loss and random states on their way to another strategy and number
of processes.
"""

import random
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

import ckptfix
from ckptfix.conversion.other_states import OtherStates, out_of_engines
from ckptfix.conversion.target_names import StateNames
from ckptfix.errors import ChangedError, OperationError
from ckptfix.tensors.new_torch_files import Call, Global
from ckptfix.tensors.new_zero import LOSS_SCALER
from ckptfix.tensors.optimizer_opening import open_optimizers
from ckptfix.tensors.optimizers import OptimizerState, Strategy
from ckptfix.tensors.zero_states import DTYPE, MODEL_STATES
from tests.conversion.state_making import (
    net,
    save_state,
    trained,
)
from tests.tensors.writing import write_tensors


def test_fewer_processes(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "fsdp", trained(), processes=4)
    receipt = ckptfix.migrate(source, tmp_path / "new", to="ddp", state="all", processes=2)
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= names
    assert not {"random_states_2.pkl", "random_states_3.pkl"} & names
    assert [one.what for one in receipt.left_out] == [
        "random_states_2.pkl",
        "random_states_3.pkl",
        "accelerator.step = 3 in the random states",
    ]
    assert "at scheduler step 6 after 3 optimizer steps; " in receipt.warnings[0]
    assert "by 4 so far, by 2 from now on), unless" in receipt.warnings[0]


@pytest.mark.parametrize(("before", "processes"), [(4, 2), (2, 4), (2, 1)])
def test_another_number_of_processes_begins_a_cycle_of_gradient_accumulation(
    tmp_path: Path, before: int, processes: int
) -> None:
    """The symptom: after 5 steps of 2 batches, the first step of a run of 4 batches had 2 of them,
    scaled by 1/4.
    """
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
            assert found.pop("step") == 0, (
                "all ranks alike, or one of them waits for the others for ever"
            )
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


@pytest.mark.parametrize("processes", [1, 3])
def test_random_states_that_are_damaged_or_change_are_not_written_anew(
    tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The symptom: a sealed file with another content came out of a migration without a word."""
    source = save_state(tmp_path / "source", "fsdp", trained())
    path = source / "random_states_0.pkl"
    torch.save(random_states(0), path)
    kept = path.read_bytes()
    ckptfix.seal(source)
    torch.save(random_states(1), path)
    with pytest.raises(
        OperationError, match=r"random_states_0\.pkl does not match its digest in the manifest"
    ):
        ckptfix.migrate(source, tmp_path / "new", to="fsdp", state="all", processes=processes)
    path.write_bytes(kept)

    def replaced(*values: Any, **words: Any) -> None:
        shutil.copy(path, tmp_path / "other")
        (tmp_path / "other").replace(path)

    monkeypatch.setattr("ckptfix.conversion.migrate.prove_copies", replaced)
    with pytest.raises(ChangedError, match=r"random_states_0\.pkl changed while it was read"):
        ckptfix.migrate(source, tmp_path / "new", to="fsdp", state="all", processes=processes)
    assert not (tmp_path / "new").exists()


def test_the_step_stays_where_it_cannot_be_written_or_the_guard_compares_the_file(
    tmp_path: Path,
) -> None:
    source = save_state(tmp_path / "source", "fsdp", trained())
    torch.save(
        random_states(0, step=3) | {"of a script": {(1, 2): 3}}, source / "random_states_0.pkl"
    )
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
        assert (
            "with accelerator.step = 3, which counts batches within gradient accumulation" in words
        )
        assert words.endswith(
            "next, unless the guard of ckptfix resumes the run: set accelerator.step = 0 after "
            "load_state"
        )


def test_new_processes_get_the_step_and_no_random_states(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "ddp", trained())
    (source / "dl_state_dict.bin").write_bytes((source / "custom_checkpoint_0.pkl").read_bytes())
    receipt = ckptfix.migrate(
        source, tmp_path / "new", to="fsdp", state="all", processes=3, model=net
    )
    found = torch.load(tmp_path / "new" / "random_states_2.pkl", weights_only=True)
    assert found == {"step": 0}, "accelerator.step must not differ between ranks"
    assert ckptfix.check(tmp_path / "new").status == 0
    assert not (tmp_path / "new" / "dl_state_dict.bin").exists()
    assert [one.what.split("'")[0] for one in receipt.left_out] == [
        "dl_state_dict.bin",
        "accelerator.step = 3 in the random states",
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
    assert "({'last_batch_iteration': 4}) is left out: no torch scheduler" in receipt.warnings[0]


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


@pytest.mark.parametrize(("dtype", "done", "interval"), [("fp16", 4, 7), (None, None, None)])
def test_deepspeed_grows_the_scale_of_the_loss_in_the_same_step(
    tmp_path: Path, dtype: str | None, done: int | None, interval: int | None
) -> None:
    """It looks at the steps done before it counts one, and GradScaler after. Only ``--dtype fp16``
    has a scale.
    """
    source = save_state(tmp_path / "source", "ddp", trained())
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7)
    torch.save(scaler.state_dict() | {"_growth_tracker": 3}, source / "scaler.pt")
    receipt = ckptfix.migrate(
        source, tmp_path / "new", to="zero2", state="all", model=net, dtype=dtype
    )
    (state,) = open_optimizers(tmp_path / "new")
    found = state.extra[LOSS_SCALER].state
    assert found.get("cur_iter") == done
    assert found.get("scale_window") == interval
    assert any("next: --dtype fp16" in words for words in receipt.warnings) == (dtype is None)


def of_engine(**scaler: object) -> OptimizerState:
    """Return an optimizer of DeepSpeed in fp16 with a scaler."""
    call = Call(
        function=Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler"), state=scaler, new=True
    )
    extra = {LOSS_SCALER: call, MODEL_STATES: {DTYPE: "F16"}}
    return OptimizerState(
        label="optimizer",
        strategy=Strategy.ZERO2,
        files=(PurePosixPath("x"),),
        groups=(),
        states={},
        extra=extra,
    )


@pytest.mark.parametrize(
    ("counted", "overflow", "left"),
    [
        (0, -1, 8),
        (1, -1, 7),
        (7, -1, 1),
        (8, -1, 7),
        (14, -1, 1),
        (9, 8, 8),
        (10, 8, 7),
        (15, 8, 2),
    ],
)
def test_a_grad_scaler_grows_in_the_same_step(
    tmp_path: Path, counted: int, overflow: int, left: int
) -> None:
    """``left``: the steps after which DeepSpeed's scale grows."""
    held = {"cur_scale": 8, "dynamic": True, "cur_iter": counted, "last_overflow_iter": overflow}
    names = StateNames(Strategy.DDP, is_trainer=False)
    moved = out_of_engines(
        tmp_path, [of_engine(**held, scale_factor=2.0, scale_window=7)], names, 1
    )
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(read_back(tmp_path, moved))
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    for step in range(1, left + 1):
        assert scaler.get_scale() == 8, step
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 16


def read_back(root: Path, moved: OtherStates) -> dict[str, Any]:
    """Return what is in the one file that is made."""
    (extra,) = moved.extras
    (file,) = extra.files
    write_tensors(root, (file,), {})
    found: dict[str, Any] = torch.load(root / file.path, weights_only=True)
    return found


def test_a_static_scale_of_the_loss_becomes_one_that_never_grows(tmp_path: Path) -> None:
    moved = out_of_engines(
        tmp_path,
        [of_engine(cur_scale=128.0, dynamic=False)],
        StateNames(Strategy.DDP, is_trainer=False),
        1,
    )
    assert moved.warnings == (
        (
            "optimizer: its loss scale, 128, is static, but torch's GradScaler is always dynamic: "
            "with scaler.pt it starts at this scale, never grows it, and halves it after an "
            "overflow"
        ),
    )
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(read_back(tmp_path, moved))
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (128.0, 2**31 - 1)


@pytest.mark.parametrize("processes", [1, 3])
def test_a_scheduler_that_counted_once_for_all_processes_is_named(
    tmp_path: Path, processes: int
) -> None:
    source = save_state(tmp_path / "source", "fsdp", trained())
    ckptfix.migrate(source, tmp_path / "between", to="zero2", state="all")
    (tmp_path / "between" / "scheduler.bin").unlink()
    receipt = ckptfix.migrate(
        tmp_path / "between", tmp_path / "new", to="fsdp", state="all", processes=processes
    )
    words = (
        "advanced this scheduler by 1 at each step, but Accelerate will advance it by 3 (once per "
        "process)"
    )
    assert len([one for one in receipt.warnings if words in one]) == (processes > 1)


def paces(root: Path, last_epoch: int, to: str, *, before: int, processes: int) -> list[str]:
    """Return what is said of a scheduler that is at ``last_epoch`` after three steps of its
    optimizer.
    """
    source = save_state(root / "source", "fsdp", trained(), processes=before)
    torch.save({"last_epoch": last_epoch, "_step_count": last_epoch + 1}, source / "scheduler.bin")
    receipt = ckptfix.migrate(source, root / "new", to=to, state="all", processes=processes)
    assert (root / "new" / "scheduler.bin").read_bytes() == (source / "scheduler.bin").read_bytes()
    return [words for words in receipt.warnings if "scheduler" in words]


def test_a_scheduler_that_advances_once_per_process_is_named_with_both_numbers(
    tmp_path: Path,
) -> None:
    (words,) = paces(tmp_path, 6, "ddp", before=2, processes=4)
    assert words.startswith(
        "scheduler.bin: copied unchanged, at scheduler step 6 after 3 optimizer steps; "
    )
    assert (
        "(by 2 so far, by 4 from now on); next, if the total batch size of a step does not "
        "change: " in words
    )
    assert words.endswith(
        " and when accelerator.sync_gradients is true, call scheduler.step() 2 times"
    )


def test_a_script_that_advances_a_scheduler_by_hand_is_told_to_go_on_so(tmp_path: Path) -> None:
    """As the receipt of an earlier migration, from four processes to two, said it should."""
    (words,) = paces(tmp_path, 12, "ddp", before=2, processes=1)
    assert (
        "step_scheduler_with_optimizer=False (the saved steps suggest that the script advances it "
        "by 4 each time)" in words
    )


@pytest.mark.parametrize("to", ["zero2", "universal"])
def test_a_scheduler_that_advances_once_per_process_is_named_where_an_engine_takes_it(
    tmp_path: Path, to: str
) -> None:
    (words,) = paces(tmp_path, 6, to, before=2, processes=2)
    assert (
        "at scheduler step 6 after 3 optimizer steps; Accelerate advanced it by 2 at each step; a "
        "scheduler" in words
    )
    assert words.endswith("next: prepare() a torch scheduler in the script; it continues as before")


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
