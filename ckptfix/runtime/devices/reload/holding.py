"""What a dispatched model really holds: every tensor on the device that the map says, with the file's bytes."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch

from ckptfix.runtime.devices.pairs import device
from ckptfix.runtime.devices.reload.building import Built
from ckptfix.runtime.devices.reload.comparing import CHUNK, Bytes, first_mismatch, host_bytes
from ckptfix.runtime.devices.reload.filling import tensors_of
from ckptfix.runtime.devices.reload.mapping import CPU, DISK, Device, DeviceMap, device_of
from ckptfix.runtime.devices.reload.placing import Hops
from ckptfix.runtime.devices.reload.stored import file_bytes
from ckptfix.runtime.devices.reload.tally import Tally
from ckptfix.runtime.loading.offloaded import EmptySlot, Slot, find_slots


class Held(NamedTuple):
    """A tensor of a model: its name there, and where its value is; None when no hook keeps one."""

    name: str
    value: torch.Tensor | None


def prove_held(built: Built, device_map: DeviceMap, tally: Tally, *, main: Device) -> None:
    """Compare every tensor of a dispatched model with its file, where it is; what is offloaded on device ``main``."""
    for held in _held(built):
        wanted = device_of(held.name, device_map)
        value = held.value
        if value is None:
            tally.differs(held.name, f"it should be on {wanted}, and is nowhere")
            continue
        if isinstance(wanted, int) and (value.device.type == CPU or value.device.index != wanted):
            tally.differs(held.name, f"it should be on device {wanted}, and is on {value.device}")
            continue
        if wanted in (CPU, DISK) and isinstance(main, int):
            value = value.to(device(main))
        found = first_mismatch(value, expected_bytes(built, held.name, value.dtype))
        if found is None:
            tally.arrived(value.nbytes)
        else:
            tally.differs(held.name, f"on {wanted}: {found}")


def hop_held(built: Built, hops: Hops) -> None:
    """Copy every tensor that a dispatched model has on an accelerator to another one, and compare it there."""
    hops.look_for_dead()
    for held in _held(built):
        value = held.value
        if value is None or value.device.type == CPU:
            continue
        expected = partial(expected_bytes, built, held.name, value.dtype)
        try:
            is_right = first_mismatch(value, expected()) is None
        except RuntimeError:
            is_right = False
        if is_right:
            hops.make(held.name, value, expected)
        else:
            hops.tally.skip(held.name, "after the runs it is no longer what was placed, or cannot be read")


def expected_bytes(built: Built, name: str, dtype: torch.dtype) -> Iterator[Bytes]:
    """Yield the bytes that a tensor of the model must have: the file's own, unless the model holds a wider dtype."""
    stored = built.weights.tensors[built.filled.names[name]]
    if name in built.filled.converted or not stored.has_bytes:
        return host_bytes(built.weights.read(stored.fqn).to(dtype), CHUNK)
    return file_bytes(built.weights.root, stored, CHUNK)


def _held(built: Built) -> Iterator[Held]:
    state = tensors_of(built.model)
    names = [name for name in built.filled.names if name in state]
    meta = [name for name in names if state[name].is_meta]
    slots: Mapping[str, Slot] = find_slots(built.model, meta, torch.device(CPU))[0] if meta else {}
    for name in names:
        if not state[name].is_meta:
            yield Held(name, state[name].detach())
        else:
            slot = slots.get(name)
            is_kept = slot is not None and not isinstance(slot, EmptySlot)
            yield Held(name, slot.read() if is_kept and slot is not None else None)
