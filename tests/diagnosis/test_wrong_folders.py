"""Folders of sharded states that are empty, one level too deep, or hold the state of the other
role.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from ckptfix import Policy, check, repair
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.diagnosis.resumable import choose
from ckptfix.diagnosis.target import find_checkpoints
from tests.diagnosis.test_wrong_states import exchanged
from tests.repairs.builders import RANDOM_STATES
from tests.repairs.dcp_folders import copy

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DEEPSPEED = Path(__file__).parents[2] / "fixtures" / "deepspeed-0.18.2"
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"

Kind = Callable[[Any], torch.optim.Optimizer]


def save(root: Path, states: dict[str, Any]) -> None:
    """Write DCP folders and the random states of a single process, as ``save_state`` does with
    FSDP.
    """
    root.mkdir(parents=True)
    for name, content in states.items():
        dcp.save(content, storage_writer=dcp.FileSystemWriter(root / name), no_dist=True)
    (root / "random_states_0.pkl").write_bytes(RANDOM_STATES)


def trained(
    model: nn.Module, kind: Kind = torch.optim.AdamW, *, flattened: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    optimizer = kind(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    return model.state_dict(), get_optimizer_state_dict(model, optimizer, options=options)


def run(root: Path, **how: Any) -> list[Path]:
    folders = [root / f"checkpoint_{number}" for number in range(3)]
    for folder in folders:
        model, optimizer = trained(nn.Linear(4, 3), **how)
        save(folder, {MODEL: {"model": model}, OPTIMIZER: {"optimizer": optimizer}})
    return folders


def told(folder: Path) -> list[str]:
    return [
        f"{finding.code}: {finding}"
        for finding in check(folder).findings
        if finding.severity is not Severity.NOTE
    ]


def resumed(root: Path) -> str:
    choice = choose(root)
    assert choice is not None
    assert choice.best is not None
    return choice.best.path.name


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


HOW = [{}, {"flattened": True}, {"kind": sgd}]


@pytest.mark.parametrize("how", HOW)
def test_exchanged_folders(tmp_path: Path, how: dict[str, Any]) -> None:
    folders = run(tmp_path, **how)
    assert list(map(told, folders)) == [[], [], []]
    assert resumed(tmp_path) == "checkpoint_2"
    last = folders[-1]
    exchanged(last, MODEL, OPTIMIZER)
    assert told(last) == [
        (f"wrong-state: {OPTIMIZER}: it holds a model's weights (expected an optimizer's state)"),
        f"wrong-state: {MODEL}: it holds an optimizer's state (expected a model's weights)",
    ]
    assert resumed(tmp_path) == "checkpoint_1"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("over", "by"), [(OPTIMIZER, MODEL), (MODEL, OPTIMIZER)])
def test_a_folder_that_was_copied_over_the_other(
    tmp_path: Path, over: str, by: str, how: dict[str, Any]
) -> None:
    last = run(tmp_path, **how)[-1]
    shutil.rmtree(last / over)
    shutil.copytree(last / by, last / over)
    words = [said for said in told(last) if said.startswith("wrong-state")]
    assert len(words) == 1
    assert words[0].startswith(f"wrong-state: {over}: it holds ")
    assert resumed(tmp_path) == "checkpoint_1"
    model, optimizer = trained(nn.Linear(4, 3))
    wanted = {"model": model} if over == MODEL else {"optimizer": optimizer}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict"):
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(last / over), no_dist=True)


class Learned(nn.Module):  # type: ignore[misc]
    """A model whose modules have the names of an optimizer's parts."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(4, 4)
        self.optimizer = nn.Linear(4, 4)
        self.model = nn.Linear(4, 4)


def test_folders_of_other_tools_and_odd_names_are_healthy(tmp_path: Path) -> None:
    model, optimizer = trained(Learned())
    both = {"model": model, "optimizer": optimizer}
    states = {
        "odd": {MODEL: {"model": model}, OPTIMIZER: {"optimizer": optimizer}},
        "both": {MODEL: both, OPTIMIZER: both},
        "together": {MODEL: both},
        "bare": {MODEL: model, OPTIMIZER: optimizer},
        "optim": {MODEL: {"state_dict": model}, OPTIMIZER: {"optim": optimizer}},
        "app": {MODEL: {"app": both}, OPTIMIZER: {"app": both}},
        # A script's own: nothing says what its optimizer keeps.
        "own": {MODEL: {"model": model}, OPTIMIZER: {"momentum": model}},
    }
    for name, content in states.items():
        save(tmp_path / name, content)
        assert "wrong-state" not in {finding.code for finding in check(tmp_path / name).findings}, (
            name
        )


def deepen(root: Path, name: str) -> None:
    """Move a folder into a new one of its name."""
    (root / name).rename(root / "third")
    (root / name).mkdir()
    (root / "third").rename(root / name / name)


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
def test_a_folder_one_level_too_deep(tmp_path: Path, name: str) -> None:
    last = run(tmp_path)[-1]
    deepen(last, name)
    assert told(last) == [
        (
            f"incomplete-checkpoint: {name} holds no save: its files are one level too deep, in "
            f"{name}/{name}"
        )
    ]
    assert resumed(tmp_path) == "checkpoint_1"
    assert list(find_checkpoints(tmp_path)) == [tmp_path / f"checkpoint_{n}" for n in range(3)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            OPTIMIZER,
            f"incomplete-checkpoint: {OPTIMIZER} holds no save: it is empty",
        ),
        (
            MODEL,
            (
                f"missing-model: {OPTIMIZER} exists, but there are no model weights in this "
                "folder or below it"
            ),
        ),
    ],
)
def test_an_empty_folder(tmp_path: Path, name: str, words: str) -> None:
    last = run(tmp_path)[-1]
    shutil.rmtree(last / name)
    (last / name).mkdir()
    assert told(last) == [words]
    assert not any(said.startswith(OPTIMIZER) for said in check(last).not_checked)
    assert resumed(tmp_path) == "checkpoint_1"


@pytest.mark.parametrize("is_deeper", [False, True])
@pytest.mark.parametrize("name", ["accelerate-zero2", "accelerate-zero3"])
def test_a_folder_of_deepspeed(name: str, is_deeper: bool, tmp_path: Path) -> None:
    for number in range(2):
        shutil.copytree(DEEPSPEED / name / "checkpoint", tmp_path / f"checkpoint_{number}")
    last = tmp_path / "checkpoint_1"
    assert told(last) == []
    deepen(last, "pytorch_model")
    words = "its files are one level too deep, in pytorch_model/pytorch_model"
    if not is_deeper:
        shutil.rmtree(last / "pytorch_model" / "pytorch_model")
        words = "it is empty"
    assert told(last) == [f"incomplete-checkpoint: pytorch_model holds no save: {words}"]
    assert resumed(tmp_path) == "checkpoint_0"
    assert list(find_checkpoints(tmp_path)) == [tmp_path / "checkpoint_0", last]


def test_an_empty_folder_of_a_later_number(tmp_path: Path) -> None:
    """A repair leaves the one of a duplicate, also in a copy."""
    later = OPTIMIZER.replace("0", "1")
    folders = run(tmp_path)
    for folder in folders:
        shutil.copytree(folder / MODEL, folder / MODEL.replace("0", "1"))
    assert check(folders[-1]).findings[0].code == "identical-models"
    repair(folders[-1], policy=Policy(keep={Role.MODEL: 1}))
    assert told(folders[-1]) == []
    assert resumed(tmp_path) == "checkpoint_2"
    for folder in folders:
        shutil.copytree(folder / OPTIMIZER, folder / later)
    shutil.rmtree(folders[1] / later)
    (folders[1] / later).mkdir()
    assert (
        f"incomplete-checkpoint: {later} is missing: 2 of 2 neighbouring checkpoints have it"
        in told(folders[1])
    )


def test_a_rank_that_wrote_shards_and_has_no_random_states(tmp_path: Path) -> None:
    root = copy(tmp_path, "fsdp2-clean")
    for rank in range(2):
        (root / f"random_states_{rank}.pkl").write_bytes(RANDOM_STATES)
    assert told(root) == []
    (root / "random_states_1.pkl").unlink()
    assert told(root) == [
        (
            "incomplete-checkpoint: random_states_1.pkl is missing: "
            "pytorch_model_fsdp_0/__1_0.distcp shows that at least 2 processes saved"
        )
    ]
    # On a node with a disk of its own there are neither.
    for name in (MODEL, OPTIMIZER):
        (root / name / "__1_0.distcp").unlink()
    assert not any(said.startswith("incomplete-checkpoint") for said in told(root))
