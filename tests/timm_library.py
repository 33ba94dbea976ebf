"""timm for the tests, in a folder of its own: accelerate imports any timm it finds, and fails
without torchvision.
"""

import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "timm"
"""Where the README's command installs it."""

PRELUDE = f"""
import importlib.abc, importlib.machinery, importlib.util, sys
from unittest.mock import MagicMock
sys.path.insert(0, {str(FOLDER)!r})
class Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):  # timm imports torchvision, a model needs none of it
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return MagicMock(__path__=[], __spec__=spec)
    def exec_module(self, module):
        pass
if importlib.util.find_spec("torchvision") is None:
    sys.meta_path.insert(0, Stub())
"""
"""What a child process runs before it imports timm."""

needs_timm = pytest.mark.skipif(not (FOLDER / "timm").is_dir(), reason="timm is not installed")
