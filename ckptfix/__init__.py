"""ckptfix: the fsck of Hugging Face Accelerate checkpoints.

>>> from ckptfix import check, repair, undo
>>> report = check("./checkpoint_dir")        # reads headers and samples, changes nothing
>>> receipt = repair("./checkpoint_dir")      # journaled in ./checkpoint_dir/.ckptfix
>>> undo("./checkpoint_dir")                  # every byte back

The verbs are here with their reports, and what training scripts import: ``Accelerator``,
``patch_accelerate``, ``load_state_tolerant``, ``load_checkpoint_tolerant``, ``latest_checkpoint``
and ``LoadPolicy``. ``ckptfix.training`` has the rest for training, ``ckptfix.devices`` all for
models that are split over several devices.

Public names are resolved when they are first used, so that importing the package costs nothing;
those for training import torch and accelerate then, the others never do.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptfix.lazy import lazily, names_in

if TYPE_CHECKING:  # for type checkers; a test compares it with _MODULES
    from ckptfix.conversion.migrate import migrate as migrate
    from ckptfix.conversion.migrate import MigrateReceipt as MigrateReceipt
    from ckptfix.conversion.salvage import salvage as salvage
    from ckptfix.conversion.salvage import SalvageReceipt as SalvageReceipt
    from ckptfix.diagnosis.check import check as check
    from ckptfix.diagnosis.check_report import CheckReport as CheckReport
    from ckptfix.diagnosis.findings.base import Finding as Finding, Severity as Severity
    from ckptfix.diagnosis.policy import Keys as Keys, Policy as Policy
    from ckptfix.environment.doctor import DoctorReport as DoctorReport, doctor as doctor
    from ckptfix.errors import (
        ChangedError as ChangedError,
        CkptfixError as CkptfixError,
        FormatError as FormatError,
        JournalError as JournalError,
        LockedError as LockedError,
        OperationError as OperationError,
        RolledBackError as RolledBackError,
        UsageError as UsageError,
    )
    from ckptfix.repairs.receipt import RepairReceipt as RepairReceipt
    from ckptfix.repairs.repair import (
        RepairPlan as RepairPlan,
        plan_repair as plan_repair,
        repair as repair,
    )
    from ckptfix.repairs.undo import UndoReceipt as UndoReceipt, undo as undo
    from ckptfix.training.accelerator import (
        Accelerator as Accelerator,
        patch_accelerate as patch_accelerate,
    )
    from ckptfix.training.loading.load_report import LoadPolicy as LoadPolicy
    from ckptfix.training.loading.load_state import (
        load_checkpoint_tolerant as load_checkpoint_tolerant,
        load_state_tolerant as load_state_tolerant,
    )
    from ckptfix.training.resuming.guarded_load import latest_checkpoint as latest_checkpoint
    from ckptfix.verification.diff import diff as diff
    from ckptfix.verification.diff_report import DiffReport as DiffReport
    from ckptfix.verification.seal import SealReceipt as SealReceipt, seal as seal
    from ckptfix.verification.signatures import (
        KeySigning as KeySigning,
        SigstoreSigning as SigstoreSigning,
        Trust as Trust,
    )
    from ckptfix.verification.verify import verify as verify
    from ckptfix.verification.verify_report import VerifyReport as VerifyReport

_MODULES = {
    "diagnosis.check": "check",
    "diagnosis.check_report": "CheckReport",
    "diagnosis.policy": "Policy Keys",
    "diagnosis.findings.base": "Finding Severity",
    "repairs.receipt": "RepairReceipt",
    "repairs.repair": "plan_repair RepairPlan repair",
    "repairs.undo": "undo UndoReceipt",
    "verification.seal": "seal SealReceipt",
    "verification.signatures": "KeySigning SigstoreSigning Trust",
    "verification.verify": "verify",
    "verification.verify_report": "VerifyReport",
    "verification.diff": "diff",
    "verification.diff_report": "DiffReport",
    "conversion.migrate": "migrate MigrateReceipt",
    "conversion.salvage": "salvage SalvageReceipt",
    "environment.doctor": "doctor DoctorReport",
    "training.accelerator": "Accelerator patch_accelerate",
    "training.loading.load_state": "load_state_tolerant load_checkpoint_tolerant",
    "training.loading.load_report": "LoadPolicy",
    "training.resuming.guarded_load": "latest_checkpoint",
    "errors": (
        "CkptfixError UsageError FormatError OperationError "
        "LockedError ChangedError JournalError RolledBackError"
    ),
}

_MOVED = {
    "training": "LoadError LoadReport OnReprepare unpatch_accelerate",
    "devices": (
        "ProbeReport ReloadReport TransferError Transfers Verdict dispatch_model "
        "load_checkpoint_and_dispatch probe_peer_copies remove_safe_transfers safe_transfers "
        "verify_reload"
    ),
}
"""Public names of 0.4 that live in a package of their own now. The next release drops them here."""

_RENAMED = {"Receipt": "RepairReceipt"}
"""Public names of 0.4 that are called otherwise now. The next release drops them."""

__all__ = names_in(_MODULES)
_resolve, __dir__ = lazily(__name__, _MODULES)


def __getattr__(name: str) -> Any:
    home = next(
        (f"{__name__}.{room}" for room, names in _MOVED.items() if name in names.split()), __name__
    )
    current = _RENAMED.get(name, name)
    if home == __name__ and current == name:
        return _resolve(name)
    warnings.warn(
        f"ckptfix.{name} has moved; use: from {home} import {current}",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(import_module(home), current)
