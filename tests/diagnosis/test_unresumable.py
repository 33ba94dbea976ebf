"""Models in shards in a folder of ``save_state``, which only a load hook of the script can load."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, load_checkpoint_in_model

from ckptfix import check, latest_checkpoint
from tests.diagnosis.builders import new_accelerator

INDEX = "model.safetensors.index.json"


def script(*, hooks: bool, config: bool = False) -> Accelerator:
    """Return the Accelerator of a script. ``hooks``: they save the model in shards, with ``config``
    as transformers.
    """
    accelerator = new_accelerator()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

    def save(models: list[Any], weights: list[Any], output: str) -> None:
        sharded(accelerator, Path(output), config=config)
        weights.clear()

    def load(models: list[Any], source: str) -> None:
        load_checkpoint_in_model(models.pop(), source)

    if hooks:
        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
    return accelerator


def sharded(accelerator: Accelerator, output: Path, *, config: bool = False) -> None:
    """Save the model of a script in shards."""
    accelerator.save_model(accelerator._models[0], str(output), max_shard_size=40)
    assert (output / INDEX).exists()
    if config:
        (output / "config.json").write_text(json.dumps({"architectures": ["M"], "model_type": "m"}))


def loads(checkpoint: Path, *, hooks: bool = False) -> bool:
    """Return whether load_state of the script loads a checkpoint."""
    try:
        script(hooks=hooks).load_state(str(checkpoint))
    except FileNotFoundError:
        return False
    return True


@pytest.fixture
def run(tmp_path: Path) -> Path:
    accelerator = script(hooks=False)
    for number in (1, 2, 3):
        accelerator.save_state(str(tmp_path / f"run/checkpoint_{number}"))
    return tmp_path / "run"


@pytest.fixture
def lost(run: Path) -> Path:
    """Return the newest checkpoint of a run, in which the model is in shards."""
    root = run / "checkpoint_3"
    (root / "model.safetensors").unlink()
    sharded(script(hooks=False), root)
    return root


@pytest.mark.filterwarnings("ignore:.*passed over")
def test_shards_next_to_checkpoints_with_one_file(lost: Path) -> None:
    """The checkpoint was clean and taken as the newest one."""
    assert not loads(lost)
    report = check(lost)
    (finding,) = report.findings
    assert (report.status, finding.code) == (1, "incomplete-checkpoint")
    assert (
        str(finding)
        == f"model.safetensors is missing: {INDEX} exists, but load_state does not read it, and "
        "2 of 2 neighbouring checkpoints have one file"
    )
    assert latest_checkpoint(lost.parent) == lost.parent / "checkpoint_2"


def test_shards_without_a_config_in_a_folder_alone(lost: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(lost, tmp_path / "alone"))
    assert not loads(alone)
    (finding,) = check(alone).findings
    assert (
        str(finding)
        == f"model.safetensors is missing: {INDEX} exists, but load_state does not read it"
    )


def test_a_second_copy_in_shards_shows_nothing(run: Path) -> None:
    root = run / "checkpoint_3"
    sharded(script(hooks=False), root)
    assert loads(root)
    assert not [
        finding for finding in check(root).findings if finding.code == "incomplete-checkpoint"
    ]


@pytest.mark.parametrize("config", [False, True])
def test_a_run_whose_hooks_save_shards(tmp_path: Path, config: bool) -> None:
    accelerator = script(hooks=True, config=config)
    for number in (1, 2, 3):
        accelerator.save_state(str(tmp_path / f"run/checkpoint_{number}"))
    newest = tmp_path / "run/checkpoint_3"
    assert loads(newest, hooks=True)
    assert [check(root).findings for root in (tmp_path / "run").iterdir()] == [(), (), ()]
    words = f"whether the script loads the shards: load_state reads one file per model, not {INDEX}"
    assert any(said.startswith(words) for said in check(newest).not_checked)
    assert latest_checkpoint(tmp_path / "run") == newest
    alone = Path(shutil.copytree(newest, tmp_path / "alone"))
    assert check(alone).status == (0 if config else 1)


def test_a_script_that_saves_shards_since_the_last_save(run: Path) -> None:
    """check warns, as next to lost files; the configs show that a hook can have written them."""
    root = run / "checkpoint_3"
    shutil.rmtree(root)
    script(hooks=True, config=True).save_state(str(root))
    assert loads(root, hooks=True)
    assert check(root).status == 1
    assert latest_checkpoint(run) == root
