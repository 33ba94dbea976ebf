"""A guarded run has the numbers of the stock one, and one that is resumed has those of the
uninterrupted.
"""

import json
import random
from typing import Any

import pytest

from tests.sampling import is_exhaustive
from tests.training.equal_runs import TRAINERS
from tests.training.rank_cases import run_python
from tests.training.resume_matrix import DRAWING

ALWAYS = ("ema", "custom object and hook", "Trainer, _save")
SHARE = 3
"""Loops that a run of the tests draws by chance when it is not exhaustive."""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Outcomes of each loop on one process and on two: one start of Python imports the libraries."""
    every = [*DRAWING, *TRAINERS]
    drawn = random.sample([name for name in every if name not in ALWAYS], SHARE)
    names = every if is_exhaustive() else [*ALWAYS, *drawn]
    runs = str(tmp_path_factory.mktemp("equal") / "runs")
    printed = run_python(
        *("-m", "tests.training.equal_runs", runs, "1,2", *names),
        variables={"HF_HUB_OFFLINE": "1"},
        timeout=240 * len(names),
    )
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"')]
    ran = [(line["name"], line["processes"]) for line in lines]
    assert ran == [(name, count) for name in names for count in (1, 2)]
    return lines


@pytest.mark.parametrize("processes", [1, 2])
def test_a_guarded_run_has_the_numbers_of_stock_and_resumes_to_them(
    lines: list[dict[str, Any]], processes: int
) -> None:
    for line in (line for line in lines if line["processes"] == processes):
        assert not any(map(any, line["statuses"])), line
        if line["name"] in TRAINERS and not TRAINERS[line["name"]].resumes:
            ways = {way.partition(",")[0] for way in line["differences"]}
            assert ways == {"resumed"}, line
        else:
            assert not line["differences"], line
