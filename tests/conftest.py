"""pytest looks for hooks and fixtures of all tests here; the simulated devices' are written beside the simulator."""

from tests.simulated.hooks import (
    each_accelerate,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_protocol,
    simulator,
)

__all__ = [
    "each_accelerate",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_protocol",
    "simulator",
]
