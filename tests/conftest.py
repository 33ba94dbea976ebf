"""pytest looks for hooks and fixtures of all tests here; the simulated devices' are written beside the simulator."""

import signal

import pytest

from tests.simulated import hooks
from tests.simulated.hooks import each_accelerate, pytest_configure, pytest_runtest_protocol, simulator

__all__ = [
    "each_accelerate",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_protocol",
    "simulator",
]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background has them ignore interrupts, and all that they start, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the storage: its tests fork thousands of times, which is slow once torch has filled this process."""
    hooks.pytest_collection_modifyitems(items)
    items.sort(key=lambda item: not item.nodeid.startswith("tests/storage/"))
