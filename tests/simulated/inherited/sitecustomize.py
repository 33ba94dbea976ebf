"""Imported by every Python that starts with this folder on its path: a child of a simulated process
simulates, too.

torch is not imported here, for most children never need it; the devices appear when it is.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as Python would, and makes the devices as soon as it has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_simulate(module: ModuleType) -> None:
            execute(module)
            from tests.simulated.simulator import simulate_as_told

            simulate_as_told(json.loads(os.environ["CKPTFIX_SIMULATED"]))

        spec.loader.exec_module = execute_and_simulate  # type: ignore[method-assign]
        return spec


if "CKPTFIX_SIMULATED" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
