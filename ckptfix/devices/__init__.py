"""Models split over several devices: safe transfers, dispatch, the probe of P2P copies, and reloads
on a device map.

Public names are resolved when they are first used; only those that work with devices import torch
then.

>>> from ckptfix.devices import dispatch_model, probe_peer_copies
>>> model = dispatch_model(model, device_map, safe_transfers="auto")
"""

from typing import TYPE_CHECKING

from ckptfix.lazy import lazily, names_in

if TYPE_CHECKING:
    from ckptfix.devices.dispatching import (
        dispatch_model as dispatch_model,
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
        remove_safe_transfers as remove_safe_transfers,
    )
    from ckptfix.devices.probe import probe_peer_copies as probe_peer_copies
    from ckptfix.devices.probe.probe_report import ProbeReport as ProbeReport, Verdict as Verdict
    from ckptfix.devices.reload.reload_report import ReloadReport as ReloadReport
    from ckptfix.devices.reload.verifying import verify_reload as verify_reload
    from ckptfix.devices.routing import TransferError as TransferError
    from ckptfix.devices.transfers import Transfers as Transfers, safe_transfers as safe_transfers

_MODULES = {
    "dispatching": "dispatch_model load_checkpoint_and_dispatch remove_safe_transfers",
    "transfers": "safe_transfers Transfers",
    "routing": "TransferError",
    "probe": "probe_peer_copies",
    "probe.probe_report": "ProbeReport Verdict",
    "reload.verifying": "verify_reload",
    "reload.reload_report": "ReloadReport",
}

__all__ = names_in(_MODULES)
__getattr__, __dir__ = lazily(__name__, _MODULES)
