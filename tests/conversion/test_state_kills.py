"""A migration of a complete state that is killed, or meets a full disk: the new folder is complete
or absent.
"""

import os
import random
import shutil
from pathlib import Path

import pytest

import ckptfix
from tests import sampling
from tests.conversion.making import names_below
from tests.conversion.state_making import assert_loads, save_state, trained
from tests.storage.crash import Fault, Outcome, points, strike

KILLS = 64
"""Seeded moments for each strategy; an ordinary run strikes an eighth of them."""


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names_below(folder)}


@pytest.mark.slow
@pytest.mark.parametrize("after", ["ddp", "fsdp", "zero3"])
def test_it_is_complete_or_absent_wherever_it_is_struck(tmp_path: Path, after: str) -> None:
    run = trained()
    work = tmp_path / "work"
    work.mkdir()
    source, target = save_state(work / "a", "fsdp-full", run), work / "b"

    def action() -> None:
        ckptfix.migrate(source, target, to=after, state="all")

    before = contents(source)
    count = len(points(action))
    complete = contents(target)
    shutil.rmtree(target)
    chance = random.Random(after)
    faults = (Fault.KILL_BEFORE, Fault.KILL_AFTER, Fault.TORN, Fault.ENOSPC)
    cases = [(chance.randrange(count), chance.choice(faults)) for _ in range(KILLS)]
    seen = set()
    for at, fault in [*sampling.sampled(cases), (0, Fault.KILL_BEFORE)]:
        outcome, error = strike(action, at, fault)
        seen.add(outcome)
        assert error in ("", "OSError", "OperationError"), (at, fault)
        assert contents(source) == before, (at, fault)
        if target.exists():
            assert contents(target) == complete, (at, fault)
            shutil.rmtree(target)
        action()
        assert contents(target) == complete, (at, fault)
        assert sorted(os.listdir(work)) == [
            "a",
            "b",
        ], "what a dead run left goes with the next one"
        shutil.rmtree(target)
    assert Outcome.KILLED in seen
    action()
    if after != "zero3":
        assert_loads(target, after, run)
