"""Two models of equal shapes, each with its optimizer, as of an ensemble or a GAN: no shape belongs
to one optimizer alone, and an optimizer of an older save was clean.
"""

import os
import shutil
from collections.abc import Callable, Collection
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptfix import check
from ckptfix.cli import run
from tests.diagnosis.test_older_saves import in_names, with_etags_of_bytes
from tests.diagnosis.test_stale_saves import told
from tests.stores.servers import upload_folder

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIMIZERS = ("optimizer.bin", "optimizer_1.bin")

Trained = list[tuple[torch.nn.Module, torch.optim.Optimizer]]


def with_equal_models(
    output: Path,
    *,
    schedules: bool = True,
    kinds: tuple[Any, Any] = (torch.optim.AdamW, torch.optim.AdamW),
    trained: Callable[[int], Collection[int]] = lambda number: (0, 1),
    before_save: Callable[[int, Trained], None] = lambda number, pairs: None,
) -> Path:
    """Save two models of equal shapes after each of six times two steps.

    ``trained``: which of the two make steps before the save of this number.
    """
    torch.manual_seed(0)
    models = [
        torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        for _ in range(2)
    ]
    pairs: Trained = [
        (model, kind(model.parameters(), lr=1e-2))
        for kind, model in zip(kinds, models, strict=True)
    ]
    of_pairs = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100) for _, optimizer in pairs
    ]
    for number in range(6):
        for index in 2 * sorted(trained(number)):
            model, optimizer = pairs[index]
            model(torch.randn(4, 6)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if schedules:
                of_pairs[index].step()
        before_save(number, pairs)
        folder = output / f"checkpoint_{number}"
        folder.mkdir(parents=True)
        for index, (model, optimizer) in enumerate(pairs):
            end = f"_{index}" if index else ""
            save_file(model.state_dict(), folder / f"model{end}.safetensors")
            torch.save(optimizer.state_dict(), folder / f"optimizer{end}.bin")
            if schedules:
                torch.save(of_pairs[index].state_dict(), folder / f"scheduler{end}.bin")
        torch.save({"step": number}, folder / "random_states_0.pkl")
    return output


@pytest.mark.parametrize(
    ("options", "schedules", "name", "source", "target"),
    [
        *(({}, False, OPTIMIZERS[0], *pair) for pair in ((2, 5), (1, 3), (0, 5))),
        ({}, True, OPTIMIZERS[0], 2, 5),
        ({"data": True}, True, OPTIMIZERS[1], 2, 5),
        ({"data": True}, False, OPTIMIZERS[1], 1, 3),
    ],
)
def test_an_optimizer_whose_step_went_back_is_a_warning(
    options: dict[str, Any], schedules: bool, name: str, source: int, target: int, tmp_path: Path
) -> None:
    output = with_equal_models(tmp_path, schedules=schedules)
    shutil.copy(output / f"checkpoint_{source}" / name, output / f"checkpoint_{target}")
    (other,) = {*OPTIMIZERS} - {name}
    ((severity, words),) = told(output / f"checkpoint_{target}", **options)
    assert severity == "warning"
    assert words.startswith(
        f"{name}: optimizer state of checkpoint_{source} (expected new values: step in {other} "
        f"went from {2 * source + 2} to {2 * target + 2} at a learning rate of 0.0"
    )
    assert in_names(output).keys() == {f"checkpoint_{target}"}


@pytest.mark.parametrize(
    ("source", "target", "schedules"), [(5, 1, True), (5, 1, False), (4, 0, False), (5, 3, False)]
)
def test_an_optimizer_of_a_later_save_is_found_by_its_step(
    source: int, target: int, schedules: bool, tmp_path: Path
) -> None:
    output = with_equal_models(tmp_path, schedules=schedules)
    shutil.copy(output / f"checkpoint_{source}" / OPTIMIZERS[0], output / f"checkpoint_{target}")
    ((severity, words),) = told(output / f"checkpoint_{target}")
    assert severity == "warning"
    assert words.startswith(f"optimizer.bin: optimizer state of checkpoint_{source}, a later save")


@pytest.mark.parametrize("target", [3, 5])
def test_both_optimizers_of_an_older_save_are_found(target: int, tmp_path: Path) -> None:
    output = with_equal_models(tmp_path, schedules=False)
    for name in OPTIMIZERS:
        shutil.copy(output / "checkpoint_1" / name, output / f"checkpoint_{target}")
    ((severity, words),) = told(output / f"checkpoint_{target}")
    assert severity == "warning"
    assert "optimizer.bin and optimizer_1.bin: optimizer state of checkpoint_1 " in words


def test_a_store_tells_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = with_equal_models(tmp_path, schedules=False)
    shutil.copy(output / "checkpoint_2" / OPTIMIZERS[0], output / "checkpoint_5")
    url = f"memory://{os.urandom(6).hex()}/run"
    upload_folder(output, url)
    with_etags_of_bytes(url)
    assert run(["check", "-r", url]) == 1
    assert "optimizer.bin: optimizer state of checkpoint_2 (" in capsys.readouterr().out


def test_a_frozen_model_next_to_it_shows_nothing(tmp_path: Path) -> None:
    output = with_equal_models(tmp_path, schedules=False)
    for folder in output.iterdir():
        save_file({"frozen": torch.ones(4, 4)}, folder / "model_2.safetensors")
    shutil.copy(output / "checkpoint_2" / OPTIMIZERS[0], output / "checkpoint_5")
    ((severity, _),) = told(output / "checkpoint_5")
    assert severity == "warning"


@pytest.mark.parametrize("moves_on", [False, True])
def test_a_model_that_goes_back_with_its_optimizer_is_clean(moves_on: bool, tmp_path: Path) -> None:
    """Training the second model may change running averages in the first one."""
    kept: list[dict[str, Any]] = []

    def before_save(number: int, pairs: Trained) -> None:
        model, optimizer = pairs[0]
        if number == 2:
            kept.extend(deepcopy([model.state_dict(), optimizer.state_dict()]))
        elif number == 5:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            if moves_on:
                model.get_parameter("0.bias").data += 1

    output = with_equal_models(tmp_path, schedules=False, before_save=before_save)
    first, last = (output / f"checkpoint_{number}" for number in (2, 5))
    assert (first / OPTIMIZERS[0]).read_bytes() == (last / OPTIMIZERS[0]).read_bytes()
    assert in_names(output) == {}


@pytest.mark.parametrize(
    "trained",
    [
        lambda number: {number % 2} if number else (0, 1),
        lambda number: (0, 1) if number < 2 else (1,),
    ],
    ids=["take turns", "one waits"],
)
def test_optimizers_that_take_turns_or_wait_are_clean(
    trained: Callable[[int], Collection[int]], tmp_path: Path
) -> None:
    assert in_names(with_equal_models(tmp_path, schedules=False, trained=trained)) == {}


def test_optimizers_without_steps_are_clean(tmp_path: Path) -> None:
    """SGD with momentum counts none: momenta alone do not show that it went back."""

    def with_momentum(weights: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(weights, lr=lr, momentum=0.9)

    output = with_equal_models(tmp_path, schedules=False, kinds=(with_momentum, torch.optim.AdamW))
    assert in_names(output) == {}
    shutil.copy(output / "checkpoint_2" / OPTIMIZERS[0], output / "checkpoint_5")
    assert in_names(output) == {}


def test_an_optimizer_that_a_script_makes_anew_is_clean(tmp_path: Path) -> None:
    def anew(number: int, pairs: Trained) -> None:
        if number in (1, 4):
            model, _ = pairs[0]
            pairs[0] = model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    output = with_equal_models(tmp_path, schedules=False, before_save=anew)
    assert in_names(output) == {}


def test_equal_moments_of_rows_that_no_batch_used_are_clean(tmp_path: Path) -> None:
    """The sample of each table is of zeros, and its optimizer was made anew: the step is that of an
    earlier save again.
    """
    torch.manual_seed(0)
    tables = [torch.nn.Parameter(torch.rand(4096, 4)) for _ in range(2)]
    optimizers = [torch.optim.AdamW([table], lr=1e-2, weight_decay=0) for table in tables]
    for number in range(6):
        if number == 4:
            optimizers[0] = torch.optim.AdamW([tables[0]], lr=1e-2, weight_decay=0)
        folder = tmp_path / f"checkpoint_{number}"
        folder.mkdir()
        for index, (table, optimizer) in enumerate(zip(tables, optimizers, strict=True)):
            table[-8:].pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            end = f"_{index}" if index else ""
            save_file({"table": table.detach()}, folder / f"model{end}.safetensors")
            torch.save(optimizer.state_dict(), folder / f"optimizer{end}.bin")
        torch.save({"step": number}, folder / "random_states_0.pkl")
    found = in_names(tmp_path).values()
    assert "warning" not in {severity for findings in found for severity, _ in findings}


def mixed(output: Path) -> dict[str, list[str]]:
    """Return the findings about files of two saves, by checkpoint."""
    found = {
        folder.name: [
            str(finding)
            for finding in check(folder, siblings=output.iterdir()).all_findings
            if finding.code == "mixed-saves"
        ]
        for folder in sorted(output.iterdir())
    }
    return {name: findings for name, findings in found.items() if findings}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("source", "target"), [(4, 5), (1, 2), (3, 2)])
def test_rates_that_no_scheduler_gave_are_found_where_both_schedules_are_equal(
    source: int, target: int, name: str, tmp_path: Path
) -> None:
    """The step of a direct neighbour may be that of an optimizer that waits, with its schedule."""
    output = with_equal_models(tmp_path)
    shutil.copy(output / f"checkpoint_{source}" / name, output / f"checkpoint_{target}")
    found = mixed(output)
    assert found.keys() == {f"checkpoint_{target}"}
    (words,) = found[f"checkpoint_{target}"]
    assert words.startswith(f"{name}: learning rate 0.00")
    assert f", as in {name.replace('optimizer', 'scheduler')})" in words


@pytest.mark.parametrize(
    ("waits", "crossed"), [({5}, False), ({3}, False), ({3, 4, 5}, False), ({3}, True)]
)
def test_an_optimizer_that_waits_with_its_schedule_is_clean(
    waits: set[int], crossed: bool, tmp_path: Path
) -> None:
    """A script may prepare its schedulers in another order than its optimizers."""
    output = with_equal_models(tmp_path, trained=lambda number: (1,) if number in waits else (0, 1))
    for folder in output.iterdir() if crossed else ():
        states = [torch.load(folder / f"scheduler{end}.bin") for end in ("_1", "")]
        for state, end in zip(states, ("", "_1"), strict=True):
            torch.save(state, folder / f"scheduler{end}.bin")
    assert mixed(output) == {}


def test_two_schedulers_of_one_optimizer_are_clean(tmp_path: Path) -> None:
    """No scheduler gave the rate of the second optimizer, which stays."""
    output = with_equal_models(tmp_path)
    for number in range(6):
        folder = output / f"checkpoint_{number}"
        state = torch.load(folder / OPTIMIZERS[1])
        (group,) = state["param_groups"]
        rate = torch.load(folder / "scheduler.bin")["_last_lr"][0]
        group["lr"] = rate if number < 5 else 1e-2
        del group["initial_lr"]
        torch.save(state, folder / OPTIMIZERS[1])
    assert mixed(output) == {}
