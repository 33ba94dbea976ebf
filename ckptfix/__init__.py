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
    from ckptfix.conversion.migrate import migrate
    from ckptfix.conversion.migrate_receipt import MigrateReceipt
    from ckptfix.conversion.salvage import salvage
    from ckptfix.conversion.salvage_receipt import SalvageReceipt
    from ckptfix.devices.dispatching import (
        dispatch_model,
        load_checkpoint_and_dispatch,
        remove_safe_transfers,
    )
    from ckptfix.devices.probe import probe_peer_copies
    from ckptfix.devices.probe.probe_report import ProbeReport, Verdict
    from ckptfix.devices.reload.reload_report import ReloadReport
    from ckptfix.devices.reload.verifying import verify_reload
    from ckptfix.devices.routing import TransferError
    from ckptfix.devices.transfers import Transfers, safe_transfers
    from ckptfix.diagnosis.check import CheckReport, check
    from ckptfix.diagnosis.findings.base import Finding, Severity
    from ckptfix.diagnosis.policy import Keys, Policy
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
    from ckptfix.repairs.repair import Receipt as Receipt
    from ckptfix.repairs.repair import RepairPlan, RepairReceipt, plan_repair, repair
    from ckptfix.repairs.undo import UndoReceipt, undo
    from ckptfix.training.accelerator import Accelerator, patch_accelerate, unpatch_accelerate
    from ckptfix.training.guard import OnReprepare
    from ckptfix.training.loading.load_report import LoadError, LoadPolicy, LoadReport
    from ckptfix.training.loading.load_state import load_checkpoint_tolerant, load_state_tolerant
    from ckptfix.training.resuming import latest_checkpoint
    from ckptfix.verification.diff import diff
    from ckptfix.verification.diff_report import DiffReport
    from ckptfix.verification.seal import SealReceipt, seal
    from ckptfix.verification.verify import verify
    from ckptfix.verification.verify_report import VerifyReport

_HOMES = {
    "salvage": "conversion.salvage",
    "SalvageReceipt": "conversion.salvage_receipt",
    "diff": "verification.diff",
    "DiffReport": "verification.diff_report",
    "check": "diagnosis.check",
    "CheckReport": "diagnosis.check",
    "repair": "repairs.repair",
    "plan_repair": "repairs.repair",
    "RepairPlan": "repairs.repair",
    "RepairReceipt": "repairs.repair",
    "Receipt": "repairs.repair",
    "seal": "verification.seal",
    "SealReceipt": "verification.seal",
    "verify": "verification.verify",
    "VerifyReport": "verification.verify_report",
    "undo": "repairs.undo",
    "UndoReceipt": "repairs.undo",
    "migrate": "conversion.migrate",
    "MigrateReceipt": "conversion.migrate_receipt",
    "Keys": "diagnosis.policy",
    "Policy": "diagnosis.policy",
    "Accelerator": "training.accelerator",
    "patch_accelerate": "training.accelerator",
    "unpatch_accelerate": "training.accelerator",
    "load_state_tolerant": "training.loading.load_state",
    "load_checkpoint_tolerant": "training.loading.load_state",
    "LoadError": "training.loading.load_report",
    "LoadPolicy": "training.loading.load_report",
    "LoadReport": "training.loading.load_report",
    "OnReprepare": "training.guard",
    "latest_checkpoint": "training.resuming",
    "dispatch_model": "devices.dispatching",
    "load_checkpoint_and_dispatch": "devices.dispatching",
    "remove_safe_transfers": "devices.dispatching",
    "safe_transfers": "devices.transfers",
    "TransferError": "devices.routing",
    "Transfers": "devices.transfers",
    "probe_peer_copies": "devices.probe",
    "ProbeReport": "devices.probe.probe_report",
    "Verdict": "devices.probe.probe_report",
    "verify_reload": "devices.reload.verifying",
    "ReloadReport": "devices.reload.reload_report",
    "Finding": "diagnosis.findings.base",
    "Severity": "diagnosis.findings.base",
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
    "ReloadReport",
    "RepairPlan",
    "RepairReceipt",
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
    "plan_repair",
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
