"""The accelerators of this machine, and how much memory they and the host have free."""

import torch

from ckptfix.runtime.devices.pairs import device_count, device_type
from ckptfix.runtime.devices.reload.mapping import CPU, Device
from ckptfix.runtime.devices.reload.report import Machine


def this_machine() -> Machine:
    """Return what torch finds here. Touches no device's memory."""
    name = device_type()
    if name is None:
        return Machine(accelerator=None)
    module = torch.get_device_module(name)
    ask = getattr(module, "get_device_name", None)
    return Machine(
        accelerator=name,
        names=tuple(str(ask(index)) if ask is not None else name for index in range(device_count())),
    )


def free_memory() -> dict[Device, int]:
    """Return device -> free bytes, as accelerate counts them for its own maps."""
    from accelerate.utils import get_max_memory

    free: dict[Device, int] = {}
    for device, size in get_max_memory().items():
        place: Device = device if isinstance(device, int) or device == CPU else 0  # "mps" is one device
        free[place] = int(size * 0.9) if isinstance(place, int) else int(size)
    return free


def has_room(where: torch.device, nbytes: int) -> bool:
    """Whether an accelerator has room for these bytes and half as much again for what is computed with them."""
    free = free_memory().get(int(where.index or 0), 0)
    return nbytes + nbytes // 2 < free


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device has no room; its class changed between versions of torch."""
    return "out of memory" in str(error).lower()


def answers(where: torch.device) -> bool:
    """Whether a device still computes: after a device-side assertion every call on it fails."""
    try:
        return bool(torch.ones(4, device=where).sum().item() == 4)
    except RuntimeError:
        return False
