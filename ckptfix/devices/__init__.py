"""Models split over several devices: safe transfers, dispatch, the probe of P2P copies, and reloads on a device map.

Public names are resolved when they are first used; only those that work with devices import torch then.

>>> from ckptfix.devices import dispatch_model, probe_peer_copies
>>> model = dispatch_model(model, device_map, safe_transfers="auto")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "ProbeReport": "probe.probe_report",
    "ReloadReport": "reload.reload_report",
    "TransferError": "routing",
    "Transfers": "transfers",
    "Verdict": "probe.probe_report",
    "dispatch_model": "dispatching",
    "load_checkpoint_and_dispatch": "dispatching",
    "probe_peer_copies": "probe",
    "remove_safe_transfers": "dispatching",
    "safe_transfers": "transfers",
    "verify_reload": "reload.verifying",
}

__all__ = [
    "ProbeReport",
    "ReloadReport",
    "TransferError",
    "Transfers",
    "Verdict",
    "dispatch_model",
    "load_checkpoint_and_dispatch",
    "probe_peer_copies",
    "remove_safe_transfers",
    "safe_transfers",
    "verify_reload",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
