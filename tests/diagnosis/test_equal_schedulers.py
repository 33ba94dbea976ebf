"""Equal schedulers of a healthy run: no advice whose repair deletes a file that the script
loads.
"""

from pathlib import Path

import torch
from accelerate import Accelerator

from ckptfix import check


def save(folder: Path, *, optimizers: int, schedulers: int) -> Path:
    """Save a run with so many of each, as ``save_state`` does; a scheduler is passed twice where
    they are more.
    """
    accelerator = Accelerator(cpu=True)
    models = [accelerator.prepare(torch.nn.Linear(size, 1)) for size in range(2, 2 + optimizers)]
    prepared = [
        accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1)) for model in models
    ]
    for number in range(schedulers):
        optimizer = prepared[number % optimizers]
        accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 10))
    for model, optimizer in zip(models, prepared, strict=True):
        model(torch.ones(1, model.in_features)).sum().backward()
        optimizer.step()
    accelerator.save_state(str(folder))
    return folder


OF_LOST_OPTIMIZER = (
    "if the script has an optimizer for each scheduler, optimizer_1.bin is missing and load_state "
    "fails: copy it from its source, or resume from another checkpoint; if the script registers "
    "fewer: ckptfix repair DIR --keep schedulers=N"
)


def advice(folder: Path) -> list[str]:
    report = check(folder)
    assert report.status == 0
    return [finding.advice for finding in report.findings if finding.code == "identical-states"]


def test_two_optimizers_with_one_schedule_each(tmp_path: Path) -> None:
    (words,) = advice(save(tmp_path / "gan", optimizers=2, schedulers=2))
    assert words == "nothing to do if the script has two optimizers with the same schedule"


def test_more_schedulers_than_optimizers(tmp_path: Path) -> None:
    (words,) = advice(save(tmp_path / "twice", optimizers=1, schedulers=2))
    assert words == OF_LOST_OPTIMIZER


def test_a_scheduler_whose_optimizer_is_lost(tmp_path: Path) -> None:
    """``load_state`` fails: to drop the scheduler, too, is not the first thing to do."""
    folder = save(tmp_path / "gan", optimizers=2, schedulers=2)
    (folder / "optimizer_1.bin").unlink()
    assert advice(folder) == [OF_LOST_OPTIMIZER]
