"""Fixtures of tests that train."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Forget accelerate's state, which is one for the whole process."""

    def forget() -> None:
        if "accelerate" in sys.modules:
            from tests.training.loading_runs import reset

            reset()

    forget()
    yield
    forget()


@pytest.fixture
def guarded() -> Iterator[None]:
    """Guard every Accelerator and Trainer of a test."""
    from ckptfix.training.accelerator import patch_accelerate, unpatch_accelerate

    patch_accelerate()
    yield
    unpatch_accelerate()
