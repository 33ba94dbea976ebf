"""Runs that are saved, ended and resumed in other processes: they go on bit for bit, or say by name
why not.
"""

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from tests.sampling import is_exhaustive
from tests.training.resume_matrix import ALL, FIRST, MORE, first_difference, run_all, warned

NEEDS_TORCHDATA = {name for name, variant in ALL.items() if "stateful" in variant.resume}
SHARE = 24
"""Ways that a run of the tests tries when it is not exhaustive, drawn by chance."""


def chosen(ways: dict[str, Any]) -> list[str]:
    """Return the ways of this run; those with a stateful loader need torchdata."""
    has_torchdata = importlib.util.find_spec("torchdata") is not None
    names = [name for name in ways if has_torchdata or name not in NEEDS_TORCHDATA]
    return names if is_exhaustive() else sorted(random.sample(names, min(SHARE, len(names))))


def assert_goes_on(folder: Path, names: list[str]) -> None:
    assert run_all(folder, names, resumes=False, stock=False) == [0, 0]
    assert run_all(folder, names, resumes=True, stock=False) == [0, 0]
    wrong = {}
    for name in names:
        for rank in range(2):
            difference, said = first_difference(folder, name, rank), warned(folder, name, rank)
            expected = ALL[name].expect
            if expected:
                is_right = difference and any(expected in words for words in said)
            else:
                is_right = not difference and (ALL[name].is_cautious or not said)
            if not is_right:
                wrong[f"{name}, rank {rank}"] = (difference or "exact", said)
    assert not wrong


@pytest.mark.slow
def test_each_of_the_known_ways_to_resume_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert len(FIRST) == 49
    assert_goes_on(tmp_path, chosen(FIRST))


@pytest.mark.slow
def test_other_ways_to_resume_go_on_bit_for_bit_or_are_warned_of(tmp_path: Path) -> None:
    assert_goes_on(tmp_path, chosen(MORE))
