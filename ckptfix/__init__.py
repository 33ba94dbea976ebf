"""ckptfix: the fsck of Hugging Face Accelerate checkpoints.

>>> from ckptfix import check, repair, undo
>>> report = check("./checkpoint_dir")        # reads headers and samples, changes nothing
>>> receipt = repair("./checkpoint_dir")      # journaled in ./checkpoint_dir/.ckptfix
>>> undo("./checkpoint_dir")                  # every byte back

and, for training code, ``Accelerator``, ``patch_accelerate``, ``load_state_tolerant``, ``load_checkpoint_tolerant`` and
``latest_checkpoint``.

Public names are resolved when they are first used, so that importing the package costs nothing; those for training
import torch and accelerate then, the others never do.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptfix.errors import (
        ChangedError,
        CkptfixError,
        FormatError,
        JournalError,
        LockedError,
        OperationError,
        RolledBackError,
        UsageError,
    )
    from ckptfix.operations.check import CheckReport, check
    from ckptfix.operations.findings import Finding, Severity
    from ckptfix.operations.policy import Keys, Policy
    from ckptfix.operations.repair import Receipt, repair
    from ckptfix.operations.undo import UndoReceipt, undo
    from ckptfix.runtime.accelerator import Accelerator, patch_accelerate, unpatch_accelerate
    from ckptfix.runtime.guard import OnReprepare
    from ckptfix.runtime.loading import (
        LoadError,
        LoadPolicy,
        LoadReport,
        load_checkpoint_tolerant,
        load_state_tolerant,
    )
    from ckptfix.runtime.saving.resuming import latest_checkpoint

_HOMES = {
    "check": "operations.check",
    "CheckReport": "operations.check",
    "repair": "operations.repair",
    "Receipt": "operations.repair",
    "undo": "operations.undo",
    "UndoReceipt": "operations.undo",
    "Keys": "operations.policy",
    "Policy": "operations.policy",
    "Accelerator": "runtime.accelerator",
    "patch_accelerate": "runtime.accelerator",
    "unpatch_accelerate": "runtime.accelerator",
    "load_state_tolerant": "runtime.loading",
    "load_checkpoint_tolerant": "runtime.loading",
    "LoadError": "runtime.loading",
    "LoadPolicy": "runtime.loading",
    "LoadReport": "runtime.loading",
    "OnReprepare": "runtime.guard",
    "latest_checkpoint": "runtime.saving.resuming",
    "Finding": "operations.findings",
    "Severity": "operations.findings",
    "ChangedError": "errors",
    "CkptfixError": "errors",
    "FormatError": "errors",
    "JournalError": "errors",
    "LockedError": "errors",
    "OperationError": "errors",
    "RolledBackError": "errors",
    "UsageError": "errors",
}

__all__ = [
    "Accelerator",
    "ChangedError",
    "CheckReport",
    "CkptfixError",
    "Finding",
    "FormatError",
    "JournalError",
    "Keys",
    "LoadError",
    "LoadPolicy",
    "LoadReport",
    "LockedError",
    "OnReprepare",
    "OperationError",
    "Policy",
    "Receipt",
    "RolledBackError",
    "Severity",
    "UndoReceipt",
    "UsageError",
    "check",
    "latest_checkpoint",
    "load_checkpoint_tolerant",
    "load_state_tolerant",
    "patch_accelerate",
    "repair",
    "undo",
    "unpatch_accelerate",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
