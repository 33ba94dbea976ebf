"""Start of the recorder in a python that a proof runs; ``site`` imports this file before the
script.

The script sees the sys.path and the modules that it sees without the proof, another
``sitecustomize`` included.
"""

import importlib
import os
import sys

_HERE = os.path.realpath(os.path.dirname(__file__))


def _begin() -> None:
    # Both resolved: with ckptfix on a path through a link, this file imported itself without end.
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != _HERE]
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
