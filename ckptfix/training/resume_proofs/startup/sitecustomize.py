"""Start of the recorder in a python that a proof runs; ``site`` imports this file before the
script.

The script sees the sys.path and the modules that it sees without the proof, another
``sitecustomize`` included.
"""

import importlib
import sys
from pathlib import Path

_HERE = str(Path(__file__).resolve().parent)


def _begin() -> None:
    sys.path[:] = [one for one in sys.path if one != _HERE]
    hidden = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError:
        if hidden is not None:
            sys.modules["sitecustomize"] = hidden
    from ckptfix.devices.patching import when_imported
    from ckptfix.training.resume_proofs.recorded_runs import settings_of_process

    settings = settings_of_process()
    if settings is not None:

        def record() -> None:
            from ckptfix.training.resume_proofs.recorder import record_process

            record_process(settings)

        when_imported("accelerate", record)


_begin()
