"""Shares of long sweeps: a run strikes every eighth point of a kill test, `--exhaustive` strikes
all of them.

The header of a run names its share, and `--eighth N` runs it again. The shares 0 to 7 together are
every point.
"""

import os
import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

SHARE = "CKPTFIX_TESTS_SHARE"
"""Environment variable with the share of this run, for the processes that pytest starts: "0" to
"7", or "all".
"""

PARTS = 8
FEW = 12
"""Shorter sweeps are not worth a share: they are always complete."""

Case = TypeVar("Case")


def choose_share(*, exhaustive: bool, eighth: int | None) -> str:
    """Choose the share of this run and of all processes that it starts; one chosen before in this
    run stays.
    """
    if exhaustive or eighth is not None:
        os.environ[SHARE] = "all" if exhaustive else str(eighth)
    return os.environ.setdefault(SHARE, str(random.randrange(PARTS)))


def is_exhaustive() -> bool:
    """Return whether this run was asked for every point and every example."""
    return os.environ.get(SHARE) == "all"


def sampled(cases: Iterable[Case]) -> Sequence[Case]:
    """Return the cases of this run's share, in their order."""
    every = list(cases)
    if is_exhaustive() or len(every) <= FEW:
        return every
    return every[int(os.environ.get(SHARE, "0")) % PARTS :: PARTS]


def one_of(cases: Iterable[Case]) -> Sequence[Case]:
    """Return the one of at most eight costly cases that this run's share has; an exhaustive run has
    all.
    """
    every = list(cases)
    assert len(every) <= PARTS, "the shares together would not have every case"
    return every if is_exhaustive() else [every[int(os.environ.get(SHARE, "0")) % len(every)]]


def is_sampled(number: int) -> bool:
    """Return whether this run's share has this point of a sweep whose length is only known at its
    end.
    """
    return (
        is_exhaustive() or number < FEW or number % PARTS == int(os.environ.get(SHARE, "0")) % PARTS
    )


def examples(number: int) -> int:
    """Return how many examples hypothesis makes: a quarter, at least 20, unless this run is
    exhaustive.
    """
    return number if is_exhaustive() else min(number, max(20, number // 4))
