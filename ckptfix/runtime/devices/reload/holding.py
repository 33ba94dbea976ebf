"""What a dispatched model really holds: every tensor on the device that the map says, with the file's bytes.

Tensors that a loader renamed or merged stand for no single one of the file. They are compared with the loaded model's
own, by a digest: a copy of them would double the memory.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ckptfix.runtime.devices.pairs import device
from ckptfix.runtime.devices.reload.building import Built
from ckptfix.runtime.devices.reload.comparing import CHUNK, Bytes, Mismatch, first_mismatch, host_bytes
from ckptfix.runtime.devices.reload.filling import holds, tensors_of
from ckptfix.runtime.devices.reload.mapping import CPU, DISK, Device, DeviceMap, device_of
from ckptfix.runtime.devices.reload.placing import Hops
from ckptfix.runtime.devices.reload.stored import file_bytes
from ckptfix.runtime.devices.reload.tally import Tally
from ckptfix.runtime.loading.offloaded import EmptySlot, Slot, find_slots


class Held(NamedTuple):
    """A tensor of a model: its name there, and where its value is; None when no hook keeps one."""

    name: str
    value: torch.Tensor | None


Loaded = Mapping[str, bytes]
"""Name in the model -> sha256 of its bytes on the CPU, of the tensors that no name of the file stands for."""


def remember_loaded(built: Built) -> Loaded:
    """Return the digests of a model on the CPU, before it is dispatched."""
    return {
        name: _digest(value)
        for name, value in tensors_of(built.model).items()
        if name not in built.filled.names and not value.is_meta
    }


def prove_held(built: Built, device_map: DeviceMap, tally: Tally, *, main: Device) -> None:
    """Compare every tensor of a dispatched model with its file, where it is; what is offloaded on device ``main``."""
    _prove(built, list(built.filled.names), {}, device_map, tally, main)


def prove_loaded(built: Built, loaded: Loaded, device_map: DeviceMap, tally: Tally, *, main: Device) -> None:
    """Compare the tensors of a dispatched model that have no name in the file with those of the loaded model."""
    _prove(built, list(loaded), loaded, device_map, tally, main)


def _prove(
    built: Built, names: Sequence[str], loaded: Loaded, device_map: DeviceMap, tally: Tally, main: Device
) -> None:
    for held in _held(built, names):
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
        found = _difference(built, held.name, value, loaded)
        if found is None:
            tally.arrived(value.nbytes, converted=held.name in built.filled.converted)
        else:
            tally.differs(held.name, f"on {wanted}: {found}")


def hop_held(built: Built, loaded: Loaded, hops: Hops, main: Device) -> None:
    """Copy every tensor of a dispatched model to another accelerator, and compare it there.

    It begins where it is; what is offloaded begins on ``main``, as in a forward pass. Without an accelerator in the
    map, nothing is copied.
    """
    hops.look_for_dead()
    for held in _held(built, [*built.filled.names, *loaded]):
        value = held.value
        if value is None or (value.device.type == CPU and isinstance(main, str)):
            continue
        try:
            if value.device.type == CPU and isinstance(main, int):
                value = value.to(device(main))
            is_right = _difference(built, held.name, value, loaded) is None
        except RuntimeError:
            is_right = False
        if is_right:
            hops.make(held.name, value, partial(_expected, built, held.name, value, loaded))
        else:
            hops.tally.skip(held.name, "after the runs it is no longer what was placed, or cannot be read")


def _difference(built: Built, name: str, value: torch.Tensor, loaded: Loaded) -> Mismatch | str | None:
    if name in loaded:
        return None if _digest(value) == loaded[name] else "other bytes than in the loaded model"
    return first_mismatch(value, expected_bytes(built, name, value.dtype))


def _expected(built: Built, name: str, value: torch.Tensor, loaded: Loaded) -> Iterator[Bytes]:
    """Yield the bytes of a tensor that has been found to be right where it is."""
    return host_bytes(value) if name in loaded else expected_bytes(built, name, value.dtype)


def _digest(value: torch.Tensor) -> bytes:
    digest = hashlib.sha256()
    for part in host_bytes(value):
        digest.update(part)
    return digest.digest()


def expected_bytes(built: Built, name: str, dtype: torch.dtype) -> Iterator[Bytes]:
    """Yield the bytes that a tensor of the model must have: the file's own, unless the model holds a wider dtype.

    Its loader may have widened it, or its own forward pass: routers of Switch Transformers do that.
    """
    stored = built.weights.tensors[built.filled.names[name]]
    value = built.weights.read(stored.fqn)
    if not stored.has_bytes or (value.dtype != dtype and holds(dtype, value.dtype)):
        return host_bytes(value.to(dtype), CHUNK)
    return file_bytes(stored, CHUNK)


def _held(built: Built, wanted: Sequence[str]) -> Iterator[Held]:
    state = tensors_of(built.model)
    names = [name for name in wanted if name in state]
    meta = [name for name in names if state[name].is_meta]
    slots: Mapping[str, Slot] = find_slots(built.model, meta, torch.device(CPU))[0] if meta else {}
    for name in names:
        if not state[name].is_meta:
            yield Held(name, state[name].detach())
        else:
            slot = slots.get(name)
            is_kept = slot is not None and not isinstance(slot, EmptySlot)
            yield Held(name, slot.read() if is_kept and slot is not None else None)
