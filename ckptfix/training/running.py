"""Runs a script as ``python SCRIPT`` does, with every Accelerator of it guarded.

Nothing heavy is imported here: the guard comes on when the script itself imports accelerate, so
that what the script sets before (``HF_HOME``, ``CUDA_VISIBLE_DEVICES``, ...) counts as it does
without ``ckptfix run``.
"""

import builtins
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from ckptfix.devices.patching import when_imported

_replaced: list[ModuleType] = []  # the __main__ of before: its functions are still running


def run_script(script: str, arguments: Sequence[str], guard: Callable[[], None]) -> None:
    """Run a script as ``__main__``, and call ``guard`` as soon as the script has imported
    accelerate.

    What it raises, and the status it exits with, go through untouched; a traceback begins with the
    script's own frame.
    """

    when_imported("accelerate", guard)
    sys.argv[:] = [script, *arguments]
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = str(Path(script).resolve().parent)
    loader = _ScriptLoader("__main__", os.path.abspath(script))
    spec = importlib.util.spec_from_file_location("__main__", loader.path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # As for a script: processes that multiprocessing spawns look for the file when there is no
    # __spec__. Python gives a script the module of the builtins, and any other code their dict.
    vars(module).update(__spec__=None, __cached__=None, __package__=None, __builtins__=builtins)
    _replaced.append(sys.modules["__main__"])
    sys.modules["__main__"] = module
    try:
        loader.exec_module(module)
    except SystemExit:
        raise
    except BaseException:
        hook = sys.excepthook  # perhaps the script's own

        def show(
            kind: type[BaseException], raised: BaseException, trace: TracebackType | None
        ) -> None:
            sys.excepthook = hook
            raised.__traceback__ = _from_script(trace, module)
            hook(kind, raised, raised.__traceback__)

        sys.excepthook = show
        raise


def _from_script(trace: TracebackType | None, module: ModuleType) -> TracebackType | None:
    """Return a traceback from the script's own first frame on, as under python; None for a script
    without syntax.
    """
    while trace is not None and trace.tb_frame.f_globals is not vars(module):
        trace = trace.tb_next
    return trace


def as_given(in_code: str, typed: str) -> str:
    """Return what the user can change: something in the code, or what was typed where ``ckptfix
    run`` runs it.
    """
    return typed if _replaced else in_code


class _ScriptLoader(SourceFileLoader):
    """Leaves no compiled copy next to the script, and uses none: neither does python."""

    def path_stats(self, path: Any) -> Any:
        raise OSError
