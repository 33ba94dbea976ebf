"""ckptfix: the fsck of Hugging Face Accelerate checkpoints.

>>> from ckptfix import check, repair, undo
>>> report = check("./checkpoint_dir")        # reads headers and samples, changes nothing
>>> receipt = repair("./checkpoint_dir")      # journaled in ./checkpoint_dir/.ckptfix
>>> undo("./checkpoint_dir")                  # every byte back

and, for training code, ``Accelerator``, ``patch_accelerate``, ``load_state_tolerant``, ``load_checkpoint_tolerant`` and
``latest_checkpoint``; for models split over several devices, ``dispatch_model``, ``safe_transfers``,
``probe_peer_copies`` and ``verify_reload``.

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
    from ckptfix.operations.diff import DiffReport, diff
    from ckptfix.operations.findings import Finding, Severity
    from ckptfix.operations.migrate import MigrateReceipt, migrate
    from ckptfix.operations.policy import Keys, Policy
    from ckptfix.operations.repair import Receipt, repair
    from ckptfix.operations.salvage import SalvageReceipt, salvage
    from ckptfix.operations.sealing.report import VerifyReport
    from ckptfix.operations.sealing.seal import SealReceipt, seal
    from ckptfix.operations.sealing.verify import verify
    from ckptfix.operations.undo import UndoReceipt, undo
    from ckptfix.runtime.accelerator import Accelerator, patch_accelerate, unpatch_accelerate
    from ckptfix.runtime.devices.dispatching import (
        dispatch_model,
        load_checkpoint_and_dispatch,
        remove_safe_transfers,
    )
    from ckptfix.runtime.devices.probe import ProbeReport, Verdict, probe_peer_copies
    from ckptfix.runtime.devices.reload import ReloadReport, verify_reload
    from ckptfix.runtime.devices.routing import TransferError
    from ckptfix.runtime.devices.transfers import Transfers, safe_transfers
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
    "salvage": "operations.salvage",
    "SalvageReceipt": "operations.salvage",
    "diff": "operations.diff",
    "DiffReport": "operations.diff",
    "check": "operations.check",
    "CheckReport": "operations.check",
    "repair": "operations.repair",
    "Receipt": "operations.repair",
    "seal": "operations.sealing.seal",
    "SealReceipt": "operations.sealing.seal",
    "verify": "operations.sealing.verify",
    "VerifyReport": "operations.sealing.report",
    "undo": "operations.undo",
    "UndoReceipt": "operations.undo",
    "migrate": "operations.migrate",
    "MigrateReceipt": "operations.migrate",
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
    "dispatch_model": "runtime.devices.dispatching",
    "load_checkpoint_and_dispatch": "runtime.devices.dispatching",
    "remove_safe_transfers": "runtime.devices.dispatching",
    "safe_transfers": "runtime.devices.transfers",
    "TransferError": "runtime.devices.routing",
    "Transfers": "runtime.devices.transfers",
    "probe_peer_copies": "runtime.devices.probe",
    "ProbeReport": "runtime.devices.probe",
    "Verdict": "runtime.devices.probe",
    "verify_reload": "runtime.devices.reload",
    "ReloadReport": "runtime.devices.reload",
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
    "DiffReport",
    "Finding",
    "FormatError",
    "JournalError",
    "Keys",
    "LoadError",
    "LoadPolicy",
    "LoadReport",
    "LockedError",
    "MigrateReceipt",
    "OnReprepare",
    "OperationError",
    "Policy",
    "ProbeReport",
    "Receipt",
    "ReloadReport",
    "RolledBackError",
    "SalvageReceipt",
    "SealReceipt",
    "Severity",
    "TransferError",
    "Transfers",
    "UndoReceipt",
    "UsageError",
    "Verdict",
    "VerifyReport",
    "check",
    "diff",
    "dispatch_model",
    "latest_checkpoint",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_tolerant",
    "load_state_tolerant",
    "migrate",
    "patch_accelerate",
    "probe_peer_copies",
    "remove_safe_transfers",
    "repair",
    "safe_transfers",
    "salvage",
    "seal",
    "undo",
    "unpatch_accelerate",
    "verify",
    "verify_reload",
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
