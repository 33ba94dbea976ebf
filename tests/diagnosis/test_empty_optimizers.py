"""Optimizers that lost all their moments: stock loaders take them, and no save before a first step
is blamed.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

from ckptfix import check, latest_checkpoint
from ckptfix.diagnosis.findings.base import Resume
from tests.diagnosis.test_lacking_states import RUNS, run
from tests.diagnosis.test_optimizer_states import save
from tests.diagnosis.test_schedules import SCHEDULES, Run
from tests.diagnosis.test_trainer_states import trainer_in


def told(root: Path) -> list[str]:
    """Return the sentences about optimizers without states."""
    return [str(one) for one in check(root).all_findings if one.code == "missing-moments"]


def clear(path: Path) -> None:
    """Drop all states of an optimizer."""
    state = torch.load(path, weights_only=True)
    torch.save({**state, "state": {}}, path)


@pytest.mark.parametrize("name", ["adamw", "momentum", "adafactor of transformers"])
def test_an_earlier_checkpoint_shows_that_the_moments_are_lost(tmp_path: Path, name: str) -> None:
    build, make = RUNS[name]
    model = build()
    optimizer = make(model)
    for number in range(3):
        save(tmp_path / f"checkpoint_{number}", [model], [optimizer])
        run(model, optimizer, 1)
    begin, middle, last = sorted(tmp_path.iterdir())
    assert [check(root).status for root in (begin, middle, last)] == [0, 0, 0]
    assert told(begin) == []
    clear(last / "optimizer.bin")
    accelerate.Accelerator(cpu=True).prepare(model, optimizer)
    optimizer.load_state_dict(torch.load(last / "optimizer.bin", weights_only=True))
    report = check(last)
    assert report.status == 1
    (finding,) = (one for one in report.findings if one.code == "missing-moments")
    assert finding.resume is Resume.FAILS
    run(model, optimizer, 1)
    count = len(list(model.parameters()))
    assert (
        str(finding)
        == f"optimizer.bin: none of {count} parameter{'s' * (count > 1)} has moments, but the "
        "earlier checkpoint_1 has them"
    )
    with pytest.warns(UserWarning, match="passed over checkpoint_2"):
        assert latest_checkpoint(tmp_path) == middle


def in_dcp(root: Path, state: Any, layout: str) -> None:
    """Save an optimizer as scripts with DCP do, or as accelerate does next to its random states."""
    import torch.distributed.checkpoint as dcp

    if layout == "accelerate":
        (root / "optimizer.bin").unlink()
        root = root / "optimizer_0"
    dcp.save({"optimizer": state}, storage_writer=dcp.FileSystemWriter(root), no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("layout", "form"),
    [
        *(("accelerate", form) for form in ("named", "flattened", "numbered")), ("alone", "named"),
    ],
)  # fmt: skip
def test_an_earlier_dcp_folder_shows_that_the_moments_are_lost(
    tmp_path: Path, layout: str, form: str
) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    build, make = RUNS["adamw"]
    model = build()
    optimizer = make(model)
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    for number in range(3):
        run(model, optimizer, 1)
        state = (
            optimizer.state_dict()
            if form == "numbered"
            else get_optimizer_state_dict(model, optimizer, options=options)
        )
        if number == 2:
            # torch flattens to keys such as "state.0.weight.exp_avg".
            state = {
                key: {} if key == "state" else value
                for key, value in state.items()
                if "state." not in key
            }
        root = tmp_path / f"checkpoint_{number}"
        if layout == "accelerate":
            save(root, [model], [optimizer])
        in_dcp(root, state, layout)
    begin, middle, last = sorted(tmp_path.iterdir())
    assert told(begin) == told(middle) == []
    place = last / "optimizer_0" if layout == "accelerate" else last
    if form != "numbered":
        wanted = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
        with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
            dcp.load(wanted, storage_reader=dcp.FileSystemReader(place), no_dist=True)
    count = len(list(model.parameters()))
    where = place.relative_to(last)
    assert told(last) == [
        f"{where}: none of {count} parameters has moments, but the earlier checkpoint_1 has them"
    ]
    report = check(last)
    assert report.status == 1
    assert "dcp.load fails, or the moments start at zero" in report.findings[0].advice


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor of transformers"])
def test_healthy_dcp_folders_have_no_such_finding(tmp_path: Path, name: str) -> None:
    """get_optimizer_state_dict makes states for an optimizer without a step, and a plain
    state_dict() has none.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    build, make = RUNS[name]
    model = build()
    optimizer = make(model)
    in_dcp(tmp_path / "named/step_0", get_optimizer_state_dict(model, make(model)), "alone")
    for number in range(2):
        in_dcp(tmp_path / f"numbered/step_{number}", optimizer.state_dict(), "alone")
        run(model, optimizer, 1)
        in_dcp(
            tmp_path / f"named/step_{number + 1}",
            get_optimizer_state_dict(model, optimizer),
            "alone",
        )
    for root in tmp_path.glob("*/step_*"):
        assert told(root) == []


def test_a_later_checkpoint_shows_nothing(tmp_path: Path) -> None:
    build, make = RUNS["adamw"]
    model = build()
    optimizer = make(model)
    save(tmp_path / "checkpoint_0", [model], [optimizer])
    run(model, optimizer, 1)
    save(tmp_path / "checkpoint_1", [model], [optimizer])
    assert told(tmp_path / "checkpoint_0") == []


def test_a_scheduler_that_moved_is_a_note(tmp_path: Path) -> None:
    training = Run(1, SCHEDULES["LambdaLR"])
    training.step(3)
    root = training.save(tmp_path / "checkpoint")
    clear(root / "optimizer.bin")
    assert told(root) == [
        "optimizer.bin: none of 1 parameter has moments, but its scheduler took 3 steps"
    ]
    assert check(root).status == 0, (
        "a script may move its scheduler without a step of the optimizer"
    )


def test_a_part_that_never_made_a_step_next_to_one_that_did(tmp_path: Path) -> None:
    """A GAN trains its generator first, and moves one scheduler."""
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(*models, *optimizers, scheduler)
    for number in range(2):
        models[0](torch.ones(2, 4)).sum().backward()
        optimizers[0].step()
        scheduler.step()
        accelerator.save_state(str(tmp_path / f"checkpoint_{number}"))
        assert told(tmp_path / f"checkpoint_{number}") == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run")
    trainer = trainer_in(output)
    trainer.train()
    return sorted(output.glob("checkpoint-*"))[-1]


def test_the_trainer_counts_its_steps(trained: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(trained, tmp_path / "alone"))
    assert told(root) == []
    clear(root / "optimizer.pt")
    step = json.loads((root / "trainer_state.json").read_text())["global_step"]
    (words,) = told(root)
    assert words.endswith(f"has moments, but trainer_state.json is at step {step}")
    assert check(root).status == 1


def test_steps_of_the_trainer_that_fp16_skipped_are_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped: Any = property(lambda _: True)
    monkeypatch.setattr(accelerate.Accelerator, "optimizer_step_was_skipped", skipped)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_, **__: None)
    trainer_in(tmp_path).train()
    for root in tmp_path.glob("checkpoint-*"):
        assert torch.load(root / "optimizer.pt", weights_only=True)["state"] == {}
        assert len(told(root)) == 1
        assert check(root).status == 0
