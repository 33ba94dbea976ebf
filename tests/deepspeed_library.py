"""DeepSpeed for the tests, in a folder of its own: accelerate and transformers import any DeepSpeed
that they find.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = Path(sys.prefix) / "deepspeed"
"""Where the README's command installs it."""

WITHOUT_COMPILER = 'sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None'
"""What a process runs after ``import deepspeed``: the operator for shared memory is compiled at its
first use.
"""


def has_deepspeed() -> bool:
    return (FOLDER / "deepspeed").is_dir() or find_spec("deepspeed") is not None


NO_DEEPSPEED = "deepspeed is not installed: see the README's command that runs the tests"
"""Why a test is skipped."""


def variables() -> dict[str, str]:
    """Return the environment of a process that may import DeepSpeed, and runs on the CPU."""
    # DeepSpeed looks for the tools that it builds with (ninja) on the path.
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{FOLDER}",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
