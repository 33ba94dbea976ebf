"""Where accelerate loads itself (FSDP, DeepSpeed, Megatron): what it swallows is found, and
everything is reported.

Without models and optimizers, accelerate's own load_state runs as under FSDP, in one process.
"""

import enum
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from ckptfix.training.loading.load_report import LoadError, LoadPolicy, LoadReport, Status
from ckptfix.training.loading.load_state import load_state_tolerant
from fixtures.models import SampleCounter
from tests.training.loading_runs import Loader, Run, reset
from tests.training.rank_cases import turn_on_fsdp


class Colour(enum.Enum):
    """What torch.load(weights_only=True) refuses unless it is told, as accelerate does not."""

    RED = "red"


def sharded(step: int) -> Run:
    run = Run(Accelerator(cpu=True), custom=[SampleCounter()])
    run.accelerator.register_for_checkpointing(*run.custom)
    loose = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    run.schedulers = [torch.optim.lr_scheduler.StepLR(loose, step_size=3)]
    run.accelerator._schedulers += run.schedulers
    run.accelerator._dataloaders.append(Loader())
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=float(step))
    run.accelerator.step = step
    turn_on_fsdp(run.accelerator, fsdp_version=1, state_dict_type="SHARDED_STATE_DICT")
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = sharded(7)
    run.schedulers[0].last_epoch = 4
    run.custom[0].samples = 3
    run.accelerator._dataloaders[0].state = {"place": 2}
    run.accelerator.save_state(str(tmp_path / "c"))
    reset()
    return tmp_path / "c"


def load(run: Run, folder: Path, **policy: Any) -> LoadReport:
    return load_state_tolerant(run.accelerator, folder, policy=LoadPolicy(**policy))


def generators(folder: Path) -> list[int]:
    states = torch.load(folder, weights_only=False)
    found: list[int] = states["torch_manual_seed"].tolist()
    return found


def test_every_part_is_reported(folder: Path) -> None:
    run = sharded(1)
    report = load(run, folder)
    assert [component.name for component in report] == [
        "schedulers 0 (StepLR)",
        "dataloaders 0 (Loader)",
        "scaler",
        "rng",
        "step",
        "custom 0 (SampleCounter)",
    ]
    assert {component.status for component in report} == {Status.RESTORED}
    assert "by accelerator.load_state (FSDP)" in report.of("scaler")[0].reason
    assert (run.accelerator.step, type(run.accelerator.step)) == (7, int)
    assert torch.get_rng_state().tolist() == generators(folder / "random_states_0.pkl")
    assert (run.schedulers[0].last_epoch, run.custom[0].samples) == (4, 3)
    assert run.accelerator._dataloaders[0].state == {"place": 2}


def test_generators_and_step_that_accelerate_could_not_read(folder: Path) -> None:
    path = folder / "random_states_0.pkl"
    torch.save({**torch.load(path, weights_only=False), "colour": Colour.RED}, path)
    stock = sharded(1)
    stock.accelerator.load_state(str(folder))
    assert stock.accelerator.step == 1, (
        "accelerate reads it by now (accelerate#4283): this test has no case any more"
    )
    reset()
    run = sharded(1)
    torch.manual_seed(0)
    assert load(run, folder).is_complete
    assert run.accelerator.step == 7
    assert torch.get_rng_state().tolist() == generators(path)


@pytest.mark.parametrize("own", ["missing", "damaged"])
def test_the_step_without_the_generators(folder: Path, own: str) -> None:
    (folder / "random_states_0.pkl").rename(folder / "random_states_3.pkl")
    if own == "damaged":
        (folder / "random_states_0.pkl").write_bytes(b"no pickle")
    run = sharded(1)
    before = torch.get_rng_state().tolist()
    with pytest.warns(UserWarning, match="rng"):
        report = load(run, folder)
    assert run.accelerator.step == 7
    assert torch.get_rng_state().tolist() == before
    assert report.of("rng")[0].status is (Status.SKIPPED if own == "missing" else Status.FAILED)
    assert "from rank 3" in report.of("step")[0].reason
    before_all = run.digest()
    with pytest.raises(LoadError, match=r"random_states_0\.pkl") as caught:
        load(run, folder, rng="require")
    assert not caught.value.modified
    assert run.digest() == before_all


def test_generators_that_are_half_wrong_are_left_as_they_were(folder: Path) -> None:
    path = folder / "random_states_0.pkl"
    torch.save({**torch.load(path, weights_only=False), "numpy_random_seed": "none"}, path)
    run = sharded(1)
    before = run.digest()["random"]
    with pytest.warns(UserWarning, match="numpy_random_seed cannot be set"):
        load(run, folder)
    assert run.digest()["random"] == before
    assert run.accelerator.step == 7


def test_what_the_policy_ignores(folder: Path) -> None:
    run = sharded(1)
    before = run.digest()["random"]
    report = load(run, folder, rng="ignore", step="ignore")
    assert (run.digest()["random"], run.accelerator.step) == (before, 1)
    assert [report.of(part)[0].status for part in ("rng", "step")] == [Status.SKIPPED] * 2


def test_a_dataloader_whose_state_is_not_there(folder: Path) -> None:
    (folder / "dl_state_dict.bin").unlink()
    with pytest.warns(UserWarning, match=r"dl_state_dict\.bin is missing"):
        report = load(sharded(1), folder)
    assert report.of("dataloaders")[0].status is Status.SKIPPED


def test_a_load_that_fails_half_way_keeps_the_step(folder: Path) -> None:
    run = sharded(1)
    (folder / "custom_checkpoint_0.pkl").unlink()
    with pytest.raises(LoadError, match="FSDP could not load this checkpoint: ") as caught:
        load(run, folder)
    assert caught.value.modified
    assert type(run.accelerator.step) is int


def test_numbers_go_on(folder: Path) -> None:
    target = folder.parent / "checkpoints" / "checkpoint_4"
    target.parent.mkdir()
    folder.rename(target)
    run = sharded(1)
    run.accelerator.project_configuration.automatic_checkpoint_naming = True
    run.accelerator.project_configuration.set_directories(str(folder.parent))
    load(run, target)
    assert run.accelerator.project_configuration.iteration == 5
