"""Fixtures of tests that train."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def guarded() -> Iterator[None]:
    """Guard every Accelerator and Trainer of a test."""
    from ckptfix.training.accelerator import patch_accelerate, unpatch_accelerate

    patch_accelerate()
    yield
    unpatch_accelerate()
