"""Line of the user's script that called this package, for warnings."""

import contextlib
import os
import sys
import warnings
from importlib.util import find_spec

from msgspec import Struct

_NOT_THE_USER = (
    *(
        os.path.dirname(os.path.abspath(spec.origin)) + os.sep
        for name in ("ckptfix", "accelerate", "torch")
        if (spec := find_spec(name)) is not None and spec.origin is not None
    ),
    contextlib.__file__,
    # The import system's own frames, between a module's code and what imports it.
    "<frozen importlib.",
)


class Line(Struct, frozen=True):
    """A line of a file."""

    path: str
    number: int

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


def calling_line() -> Line:
    """Return the line that called into this package, accelerate or torch.

    The running script is the user's wherever its file is: accelerate's package has scripts, too,
    such as those of ``accelerate.test_utils``.
    """
    frame = sys._getframe(1)
    while (
        frame.f_back is not None
        and frame.f_code.co_filename.startswith(_NOT_THE_USER)
        # __mp_main__ is the script in a process that multiprocessing spawned.
        and frame.f_globals.get("__name__") not in ("__main__", "__mp_main__")
    ):
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno)


def warn_caller(message: str) -> None:
    """Emit a UserWarning at the line of the user's script that called."""
    line = calling_line()
    warnings.warn_explicit(message, UserWarning, line.path, line.number)
