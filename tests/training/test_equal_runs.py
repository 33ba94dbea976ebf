"""A guarded run has the numbers of the stock one, and one that is killed and resumed has those of
the uninterrupted.
"""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sampling import is_exhaustive
from tests.training.equal_runs import LOOPS, TRAINERS

ALWAYS = ("ema", "custom object and hook", "Trainer, _save")
SHARE = 3
"""Loops that a run of the tests draws by chance when it is not exhaustive."""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Outcomes of each loop on one process and on two: one start of Python imports the libraries."""
    every = {**LOOPS, **TRAINERS}
    drawn = random.sample([name for name in every if name not in ALWAYS], SHARE)
    names = list(every) if is_exhaustive() else [*ALWAYS, *drawn]
    runs = str(tmp_path_factory.mktemp("equal") / "runs")
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.equal_runs", runs, "1,2", *names],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=240 * len(names),
    )
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    ran = [(line["name"], line["processes"]) for line in printed]
    assert ran == [(name, count) for name in names for count in (1, 2)], done.stderr[-3000:]
    return [{**line, "stderr": done.stderr[-3000:]} for line in printed]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_guarded_run_has_the_numbers_of_stock_and_resumes_to_them(
    lines: list[dict[str, Any]], processes: int
) -> None:
    for line in (line for line in lines if line["processes"] == processes):
        statuses, differences = line["statuses"], line["differences"]
        assert not any(statuses["through"] + statuses["resumed"]), line
        assert signal.SIGKILL in statuses["killed"], line
        if line["name"] in TRAINERS and not TRAINERS[line["name"]].resumes:
            assert {way.partition(",")[0] for way in differences} == {"resumed"}, line
        else:
            assert not differences, line
