"""One model, dispatched and taken back: onto a device map, onto one device from host memory, onto the disk.

It is the same model each time, so its weights are in host memory once, whatever is tried with it.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import cpu_offload, disk_offload, dispatch_model, infer_auto_device_map
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import find_tied_parameters, get_balanced_memory, retie_parameters, send_to_device

from ckptfix.runtime.devices.pairs import device_count, device_type
from ckptfix.runtime.devices.reload.building import Built
from ckptfix.runtime.devices.reload.filling import tensors_of
from ckptfix.runtime.devices.reload.inputs import SEED, Inputs, fresh
from ckptfix.runtime.devices.reload.mapping import CPU, DISK, Device, DeviceMap, Spread, device_of
from ckptfix.runtime.devices.reload.outputs import taken
from ckptfix.runtime.devices.reload.raising import ANYTHING, in_words

Outputs = Mapping[str, torch.Tensor]


class ModelLost(Exception):
    """The model cannot be read back: after a device-side assertion, say, every call on its device fails."""


def map_model(built: Built, spread: Spread, limits: Mapping[Device, int]) -> dict[str, Device]:
    """Return the map that accelerate makes for a model, as ``from_pretrained(device_map=...)`` gets it."""
    order = sorted(limits, key=lambda device: (isinstance(device, str), device))
    memory: Any = {device: limits[device] for device in order}
    whole = list(built.no_split)
    with quiet_accelerate():
        if spread is not Spread.SEQUENTIAL:
            low = spread is Spread.LOW_0
            memory = get_balanced_memory(built.model, memory, no_split_module_classes=whole, low_zero=low)
        made = infer_auto_device_map(built.model, max_memory=memory, no_split_module_classes=whole)
    return {str(name): device if isinstance(device, int) else str(device) for name, device in made.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A map to try. ``places``: the devices that something of the model is really on, as ``places_of`` gives them.

    ``is_asked``: by the user; otherwise it is there to exercise the host's memory and disk.
    """

    device_map: DeviceMap
    places: frozenset[Device]
    is_asked: bool

    @property
    def accelerators(self) -> frozenset[int]:
        """The accelerators among the places."""
        return frozenset(place for place in self.places if isinstance(place, int))

    @property
    def main(self) -> Device:
        """Where inputs go and outputs come from: the first accelerator, else the CPU."""
        return min(self.accelerators, default=CPU)

    def __str__(self) -> str:
        order = sorted(self.places, key=lambda place: (isinstance(place, str), place))
        return ", ".join(map(str, order))


def places_of(model: Any, device_map: DeviceMap) -> frozenset[Device]:
    """Return the devices that a map gives to tensors of a model, or to its modules without any: those run there."""
    names = list(tensors_of(model))
    owners = {name.rpartition(".")[0] for name in names}
    owners |= {".".join(name.split(".")[:depth]) for name in names for depth in range(name.count(".") + 1)}
    bare = [name for name, _ in model.named_modules() if name in device_map and name not in owners]
    found = [device_of(name, device_map) for name in names] + [device_map[name] for name in bare]
    return frozenset(place for place in found if place is not None)


@contextmanager
def dispatched(built: Built, trial: Trial, folder: Path) -> Iterator[None]:
    """Have the model on a device map inside the block, on the CPU after it. ``folder``: for what goes to the disk."""
    with _restored(built), quiet_accelerate():
        preload = None if trial.is_asked else _taken_whole(built)
        if trial.places == {DISK}:
            where = torch.device(CPU)
            disk_offload(built.model, str(folder), execution_device=where, preload_module_classes=preload)
        else:
            dispatch_model(
                built.model,
                dict(trial.device_map),
                main_device=trial.main,
                offload_dir=str(folder) if DISK in trial.device_map.values() else None,
                skip_keys=list(built.skip_keys) or None,
                preload_module_classes=preload,
            )
        yield


@contextmanager
def on_one_device(built: Built, where: torch.device, *, whole: bool) -> Iterator[None]:
    """Have the model on one device inside the block; no copy goes from accelerator to accelerator.

    ``whole``: all of it; otherwise each block's weights are brought there from host memory when they are needed, so
    that a model of any size fits.
    """
    with _restored(built), quiet_accelerate():
        if whole or where.type == CPU:
            built.model.to(where)
        else:
            cpu_offload(built.model, execution_device=where, preload_module_classes=_taken_whole(built))
        yield


def _taken_whole(built: Built) -> list[str]:
    """Return the classes whose weights come as one: some use a part's weight without calling the part."""
    return [*built.no_split, torch.nn.MultiheadAttention.__name__]


@contextmanager
def _restored(built: Built) -> Iterator[None]:
    ties = find_tied_parameters(built.model)
    try:
        yield
    finally:
        try:
            remove_hook_from_module(built.model, recurse=True)
            built.model.to(CPU)
        except ANYTHING as error:  # accelerate's hooks raise whatever a wrong weight makes torch raise
            raise ModelLost(in_words(error)) from error
        retie_parameters(built.model, ties)


def run(model: Any, inputs: Inputs, where: torch.device) -> Outputs:
    """Run one forward pass with inputs on a device, and return its tensors on the host.

    Random numbers begin at the same seed each time; the process's own generators stay as they were.
    """
    args, kwargs = send_to_device(fresh(inputs), where)
    with _seeded(), torch.no_grad():
        return taken(model(*args, **kwargs))


@contextmanager
def _seeded() -> Iterator[None]:
    name = device_type()
    module = torch.get_device_module(name) if name is not None else None
    keeps_state = hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state") and name != "mps"
    devices: Sequence[int] = range(device_count()) if keeps_state else ()
    with torch.random.fork_rng(list(devices), device_type=name if devices and name else "cuda"):
        torch.manual_seed(SEED)
        yield


@contextmanager
def quiet_accelerate() -> Iterator[None]:
    """Keep accelerate's advice about offloaded parameters and strange names to itself: the report says both."""
    logger = logging.getLogger("accelerate")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The following device_map keys do not match")
            yield
    finally:
        logger.setLevel(level)
