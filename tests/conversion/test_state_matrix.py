"""Cells of the table of training states, proven by stock loaders: a sample of them, and all with
``--exhaustive``.
"""

import copy
import os
import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix import migrate
from tests import sampling
from tests.conversion import trainer_jobs
from tests.conversion.state_matrix import (
    PROCESSES,
    Cell,
    Ranks,
    can_hold,
    can_load,
    cells_of,
    judged,
    prove,
)
from tests.conversion.state_training import (
    ALTERATIONS,
    CASES,
    FACTORIES,
    LOADERS,
    SOURCES,
    differences,
)
from tests.deepspeed_library import NO_DEEPSPEED, has_deepspeed


def sample() -> list[Cell]:
    """Return the cells of this run's share: a case or two, and three sources, each for 1 and for 2
    processes.
    """
    if sampling.is_exhaustive():
        return cells_of(CASES, SOURCES, LOADERS, (2,), PROCESSES)
    share = int(os.environ.get(sampling.SHARE, "0"))
    chance = random.Random(share)
    cases = CASES[share :: sampling.PARTS]
    found = []
    for number in range(3):
        case = cases[number % len(cases)]
        loaders = [one for one in LOADERS if can_load(case, one)]
        source, target = (
            chance.choice([one for one in SOURCES if can_hold(case, one)]),
            chance.choice(loaders),
        )
        found += cells_of([case], [source], [target], (2,), (1, 2))
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as found:
        yield found


@pytest.mark.slow
@pytest.mark.skipif(not has_deepspeed(), reason=NO_DEEPSPEED)
def test_stock_loaders_find_the_state_of_the_source(ranks: Ranks, tmp_path: Path) -> None:
    cells = sample()
    proofs = list(prove(ranks, tmp_path, cells))
    assert {proof.cell for proof in proofs} == set(cells)
    assert [f"{proof.cell}: {proof}" for proof in proofs if not proof.is_proven] == []


@pytest.mark.slow
@pytest.mark.skipif(not has_deepspeed(), reason=NO_DEEPSPEED)
def test_the_trainer_goes_on_from_the_state_of_the_source(ranks: Ranks, tmp_path: Path) -> None:
    """In one process; bitwise, as nothing is summed over processes."""
    sources = ["ddp", "zero2", "zero3"] if sampling.is_exhaustive() else ["ddp", "zero2"]
    made: list[dict[str, Any]] = [
        {"do": "make-trainer", "strategy": one, "case": "bert-fp32", "folder": str(tmp_path)}
        for one in sources
    ]
    jobs: list[dict[str, Any]] = []
    for source, target in product(sources, trainer_jobs.STRATEGIES):
        if source == target or (not sampling.is_exhaustive() and target == "zero1"):
            continue
        jobs.append(
            {
                "do": "prove-trainer",
                "strategy": target,
                "case": "bert-fp32",
                "checkpoint": str(tmp_path / f"{source}-to-{target}"),
                "folder": str(tmp_path / "resumed"),
                "expected": str(tmp_path / f"{source}.expected"),
                "altered": ["zeroed"],
            }
        )
    assert [one.get("error") for one in ranks.run(1, made)] == [None] * len(made)
    for job in jobs:
        saved = tmp_path / Path(job["expected"]).stem / trainer_jobs.SAVED
        migrate(
            saved,
            job["checkpoint"],
            to=job["strategy"],
            state="all",
            processes=1,
            model=FACTORIES["bert"],
        )
    for found in ranks.run(1, jobs):
        assert "error" not in found, found["error"]
        assert found["differs"] == [], found["job"]
        assert found["losses"] == found["source"], found["job"]
        assert found["altered"]["zeroed"] != found["source"], found["job"]


CELL = Cell("llama-fp32", "ddp", "zero2", 2, 1)
RESULT: dict[str, Any] = {
    "seconds": 1.0,
    "differs": [],
    "planted": [],
    "trained": [],
    "losses": [[4.0], [3.5], [3.25]],
    "control": [[4.0], [3.5], [3.25]],
    "source": [[4.0], [3.5], [3.25 + 1e-7]],
    "altered": {
        how: {"differs": ["a moment"], "trained": ["a weight"], "losses": [[4.0], [3.5], [3.0]]}
        for how in ALTERATIONS
    },
}


def test_a_cell_without_a_difference_is_proven() -> None:
    proof = judged(CELL, RESULT)
    assert proof.is_proven
    assert str(proof).startswith(
        "memory bitwise; losses bitwise; source trained on 3.1e-08; noticed: zeroed"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one.update(error="KeyError: 'x'"), "KeyError"),
        (
            lambda one: one["differs"].append("0 states w exp_avg: 1 of 4"),
            "memory: 1 differ, first 0 states w",
        ),
        (lambda one: one["planted"].append("0 weights w"), "control: 1 differ"),
        (lambda one: one["trained"].append("0 weights w"), "after the steps 1 differ"),
        (lambda one: one["losses"][2].__setitem__(0, 3.26), "differ from the control by"),
        (lambda one: one["source"][2].__setitem__(0, 3.26), "the source that trained on"),
        (lambda one: one["altered"]["swapped"]["differs"].clear(), "swapped: the memory is that"),
        (lambda one: one["altered"]["zeroed"]["trained"].clear(), "zeroed: the run trains on"),
    ],
)
def test_what_disproves_a_cell(change: Callable[[dict[str, Any]], object], words: str) -> None:
    result = copy.deepcopy(RESULT)
    change(result)
    proof = judged(CELL, result)
    assert not proof.is_proven
    assert words in str(proof)


def memory() -> list[dict[str, Any]]:
    return [
        {
            "weights": {"w": torch.ones(3)},
            "states": {"w": {"exp_avg": torch.zeros(3), "step": 3.0}},
            "options": {"w": {"lr": 0.1, "initial_lr": 0.2, "betas": (0.9, 0.99)}},
            "scheduler": {"last_epoch": 3},
            "scale": (1024.0, 1),
        }
    ]


def test_equal_memories_do_not_differ() -> None:
    other = memory()
    del other[0]["options"]["w"]["initial_lr"]
    assert differences(memory(), other) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one["weights"]["w"].mul_(1 + 1e-7), "0 weights w : 3 of 3 elements"),
        (lambda one: one["states"]["w"]["exp_avg"].neg_(), "0 states w exp_avg: 3 of 3 elements"),
        (lambda one: one["states"]["w"].update(step=4.0), "0 states w step: 3.0 != 4.0"),
        (
            lambda one: one["states"]["w"].update(step=torch.tensor(3.0)),
            "0 states w step: 3.0 != tensor",
        ),
        (lambda one: one["states"].clear(), "0 states: other fqns: ['w']"),
        (
            lambda one: one["states"]["w"].update(exp_avg_sq=torch.zeros(3)),
            "0 states w exp_avg_sq: None != ",
        ),
        (lambda one: one["options"]["w"].update(betas=(0.9, 0.999)), "0 options w betas: "),
        (lambda one: one["scheduler"].update(last_epoch=6), "0 scheduler: "),
        (lambda one: one.update(scale=(1024.0, 2)), "0 scale: (1024.0, 1) != (1024.0, 2)"),
    ],
)
def test_any_bit_of_a_memory_counts(change: Callable[[dict[str, Any]], object], words: str) -> None:
    other = memory()
    change(other[0])
    (line,) = differences(memory(), other)
    assert line.startswith(words)
