"""One model planned onto a device map, dispatched, run, and returned to the CPU.

It is the same model each time, so its weights are in host memory once, whatever is tried with it.
"""

import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import cpu_offload, disk_offload, dispatch_model, infer_auto_device_map
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import (
    find_tied_parameters,
    get_balanced_memory,
    retie_parameters,
    send_to_device,
)
from msgspec import Struct

from ckptfix.devices.reload.device_maps import (
    CPU,
    DISK,
    MOST,
    Device,
    DeviceMap,
    Spread,
    device_of,
    free_memory,
    split_ties,
)
from ckptfix.devices.reload.filling import tensors_of
from ckptfix.devices.reload.outputs import ANYTHING, in_words, output_tensors
from ckptfix.devices.reload.reload_report import Accelerators, Outcome, Proof, Proofs, Subject
from ckptfix.devices.reload.stored_weights import Weights
from ckptfix.devices.reload.user_model import SEED, Built, Inputs, fresh
from ckptfix.devices.torch_devices import device_count, device_type
from ckptfix.wording import count_of, list_names

Outputs = Mapping[str, torch.Tensor]


class ModelLost(Exception):
    """The model cannot be read back: after a device-side assertion, say, every call on its device
    fails.
    """


def map_model(
    model: Any, no_split: Sequence[str], spread: Spread, limits: Mapping[Device, int]
) -> dict[str, Device]:
    """Return the map that accelerate makes for a model, as ``from_pretrained(device_map=...)`` gets
    it. ``no_split``: names of classes that stay whole.
    """
    order = sorted(limits, key=lambda device: (isinstance(device, str), device))
    memory: Any = {device: limits[device] for device in order}
    whole = list(no_split)
    with quiet_accelerate():
        if spread is not Spread.SEQUENTIAL:
            low = spread is Spread.LOW_0
            memory = get_balanced_memory(model, memory, no_split_module_classes=whole, low_zero=low)
        made = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole)
    return {
        str(name): device if isinstance(device, int) else str(device)
        for name, device in made.items()
    }


class Trial(Struct, frozen=True, kw_only=True):
    """A map to try. ``places``: the devices that something of the model is really on, as
    ``places_of`` gives them.

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
        """The device of inputs and outputs: the first accelerator, else the CPU."""
        return min(self.accelerators, default=CPU)

    def __str__(self) -> str:
        order = sorted(self.places, key=lambda place: (isinstance(place, str), place))
        return ", ".join(map(str, order))


def places_of(model: Any, device_map: DeviceMap) -> frozenset[Device]:
    """Return the devices that a map gives to tensors of a model, or to its modules without any:
    those run there.
    """
    names = list(tensors_of(model))
    owners = {name.rpartition(".")[0] for name in names}
    owners |= {
        ".".join(name.split(".")[:depth]) for name in names for depth in range(name.count(".") + 1)
    }
    bare = [name for name, _ in model.named_modules() if name in device_map and name not in owners]
    found = [device_of(name, device_map) for name in names] + [device_map[name] for name in bare]
    return frozenset(place for place in found if place is not None)


@contextmanager
def dispatched(built: Built, trial: Trial, folder: Path) -> Iterator[None]:
    """Have the model on a device map inside the block, on the CPU after it. ``folder``: for what
    goes to the disk.
    """
    with _restored(built), quiet_accelerate():
        preload = None if trial.is_asked else _taken_whole(built)
        if trial.places == {DISK}:
            where = torch.device(CPU)
            disk_offload(
                built.model, str(folder), execution_device=where, preload_module_classes=preload
            )
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

    ``whole``: all of it; otherwise each block's weights are brought there from host memory when
    they are needed, so that a model of any size fits.
    """
    with _restored(built), quiet_accelerate():
        if whole or where.type == CPU:
            built.model.to(where)
        else:
            cpu_offload(
                built.model, execution_device=where, preload_module_classes=_taken_whole(built)
            )
        yield


def _taken_whole(built: Built) -> list[str]:
    """Return the classes whose weights come as one: some use a part's weight without calling the
    part.
    """
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
        # Accelerate's hooks raise whatever a wrong weight makes torch raise.
        except ANYTHING as error:
            raise ModelLost(in_words(error)) from error
        retie_parameters(built.model, ties)


def run(model: Any, inputs: Inputs, where: torch.device) -> Outputs:
    """Run one forward pass with inputs on a device, and return its tensors on the host.

    Random numbers begin at the same seed each time; the process's own generators stay as they were.
    """
    args, kwargs = send_to_device(fresh(inputs), where)
    with _seeded(), torch.no_grad():
        return output_tensors(model(*args, **kwargs))


@contextmanager
def _seeded() -> Iterator[None]:
    name = device_type()
    module = torch.get_device_module(name) if name is not None else None
    keeps_state = (
        hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state") and name != "mps"
    )
    devices: Sequence[int] = range(device_count()) if keeps_state else ()
    with torch.random.fork_rng(list(devices), device_type=name if devices and name else "cuda"):
        torch.manual_seed(SEED)
        yield


@contextmanager
def quiet_accelerate() -> Iterator[None]:
    """Keep accelerate's advice about offloaded parameters and strange names to itself: the report
    says both.
    """
    logger = logging.getLogger("accelerate")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The following device_map keys do not match")
            yield
    finally:
        logger.setLevel(level)


class MapPlan(Struct, frozen=True, kw_only=True):
    """A device map for one model. ``devices``: tensor name -> device, for what the map covers.

    ``is_sound``: it covers every tensor and splits no tied weights. ``absent``: devices that this
    machine lacks.
    """

    source: str
    device_map: DeviceMap
    devices: Mapping[str, Device]
    proofs: tuple[Proof, ...]
    is_sound: bool
    absent: tuple[int, ...]


class MapRequest(Struct, frozen=True, kw_only=True):
    """A request of the user: a map or a way to make one, its name, and limits in bytes (None: what
    is free).
    """

    given: Spread | DeviceMap
    source: str
    limits: Mapping[Device, int] | None

    def limits_on(self, machine: Accelerators) -> Mapping[Device, int]:
        """Return device -> bytes that may lie on it."""
        if self.limits is not None:
            return self.limits
        return free_memory() if machine.count else {CPU: MOST}


def plan_for_weights(weights: Weights, request: MapRequest, machine: Accelerators) -> MapPlan:
    """Plan without a model class: modules are made of the names, and numbered ones stay whole."""
    model = _module_of(weights)
    modules = [name for name, _ in model.named_modules()]
    tied = [name for group in weights.ties for name in group]
    names, why = [*weights.tensors], "a module without tensors, or misspelled"
    said = _strange(request.given, [*names, *tied, *modules], "the files", why)
    made = " from the names in the files, without splitting numbered modules"
    return _plan(model, (_Numbered.__name__,), made, names, weights.ties, request, machine, said)


def plan_for_model(built: Built, request: MapRequest, machine: Accelerators) -> MapPlan:
    """Plan for a model; blocks that it names stay whole."""
    model, names = built.model, list(tensors_of(built.model))
    modules = [name for name, _ in model.named_modules()]
    kind = type(model).__name__
    said = _strange(request.given, [*names, *modules], kind, "misspelled")
    made = f", without splitting {', '.join(built.no_split)}" if built.no_split else ""
    ties = find_tied_parameters(model)
    return _plan(model, built.no_split, made, names, ties, request, machine, said)


class _Numbered(torch.nn.Module):  # type: ignore[misc]  # torch is not followed, so its classes are Any
    """A module that has a number for a name, as the blocks of a list have."""


def _module_of(weights: Weights) -> torch.nn.Module:
    """Return modules on the meta device, nested as the names of the files are, with parameters of
    their sizes.
    """
    root = torch.nn.Module()
    parameters = {
        name: torch.nn.Parameter(
            torch.empty(stored.nbytes, dtype=torch.uint8, device="meta"), requires_grad=False
        )
        for name, stored in weights.tensors.items()
    }
    for group in weights.ties:
        parameters |= dict.fromkeys(group, parameters[group[0]])
    # the header of a safetensors file has "layers.10" before "layers.2"
    for *around, last in sorted((name.split(".") for name in parameters), key=_by_number):
        module = root
        for part in around:
            if part not in module._modules:
                # add_module refuses the names of its own methods, as in "type.weight"
                module._modules[part] = _Numbered() if part.isdecimal() else torch.nn.Module()
            module = module._modules[part]
        module._parameters[last] = parameters[".".join((*around, last))]
    return root


def _by_number(parts: Sequence[str]) -> list[tuple[int, str]]:
    return [(len(part) if part.isdecimal() else 0, part) for part in parts]


def _plan(
    model: Any,
    no_split: Sequence[str],
    made: str,
    names: Sequence[str],
    ties: Sequence[Sequence[str]],
    request: MapRequest,
    machine: Accelerators,
    said: Sequence[Proof],
) -> MapPlan:
    """Plan the user's map, or the one that accelerate makes."""
    if not isinstance(request.given, Spread):
        device_map, source = dict(request.given), request.source
    else:
        source = f"{request.source}, inferred by accelerate{made}"
        limits = request.limits_on(machine)
        try:
            device_map = (
                {"": CPU}
                if limits == {CPU: MOST}
                else map_model(model, no_split, request.given, limits)
            )
        except ANYTHING as error:  # accelerate walks through the user's own modules
            text = f"accelerate cannot infer a map for {type(model).__name__}: {in_words(error)}"
            failed = Proof(subject=Subject.DEVICE_MAP, outcome=Outcome.FAILED, text=text)
            return MapPlan(
                source=source, device_map={}, devices={}, proofs=(failed,), is_sound=False,
                absent=(),
            )  # fmt: skip
    return _judged(source, device_map, names, ties, machine, places_of(model, device_map), said)


def _strange(
    given: Spread | DeviceMap, names: Sequence[str], where: str, why: str
) -> tuple[Proof, ...]:
    """Return a line for the names of the user's map that match nothing: accelerate accepts them
    silently.
    """
    if isinstance(given, Spread):
        return ()
    parts = {""} | {
        ".".join(steps[:depth])
        for name in names
        for steps in (name.split("."),)
        for depth in range(1, len(steps) + 1)
    }
    unknown = [name for name in given if name not in parts]
    if not unknown:
        return ()
    text = (
        f"{count_of(len(unknown), 'name')} in the map without effect: {list_names(unknown)}: "
        f"not in {where} ({why})"
    )
    is_transfer = any(isinstance(given[name], int) for name in unknown)
    line = Proof(
        subject=Subject.DEVICE_MAP,
        outcome=Outcome.NOT_EXERCISED,
        text=text,
        is_transfer=is_transfer,
    )
    return (line,)


def _judged(
    source: str,
    device_map: dict[str, Device],
    names: Sequence[str],
    ties: Sequence[Sequence[str]],
    machine: Accelerators,
    places: Collection[Device],
    said: Sequence[Proof],
) -> MapPlan:
    devices = {name: place for name in names if (place := device_of(name, device_map)) is not None}
    uncovered = [name for name in names if name not in devices]
    broken = split_ties(ties, device_map)
    proofs = Proofs(said)
    if not names:
        text = "the device map: there are no tensors to place"
        proofs.add(Subject.DEVICE_MAP, Outcome.NOT_EXERCISED, text, is_transfer=True)
    elif uncovered:
        text = (
            f"the map assigns no device to {count_of(len(uncovered), 'tensor')}: "
            f"{list_names(uncovered)}"
        )
        proofs.add(Subject.DEVICE_MAP, Outcome.FAILED, text)
    else:
        text = f"the map covers every tensor: {count_of(len(names), 'name')}"
        proofs.add(Subject.DEVICE_MAP, Outcome.PROVEN, text)
    for (one, here), (other, there) in broken:
        text = (
            f"the map splits tied weights: {one!r} is on {here} and {other!r} on {there}, but "
            f"both are the same tensor; put both on {here}"
        )
        proofs.add(Subject.TIES, Outcome.FAILED, text)
    if ties and not broken:
        text = f"tied weights stay on one device: {count_of(len(ties), 'group')} of keys"
        proofs.add(Subject.TIES, Outcome.PROVEN, text)
    absent = tuple(
        sorted(place for place in places if isinstance(place, int) and place >= machine.count)
    )
    for place in absent:
        text = (
            f"this machine has no device {place}, which the map uses: "
            f"{_tensors_on(place, devices)} not placed"
        )
        proofs.add(Subject.PLACEMENT, Outcome.NOT_EXERCISED, text, is_transfer=True)
    return MapPlan(
        source=source,
        device_map=device_map,
        devices=devices,
        proofs=tuple(proofs),
        is_sound=not uncovered and not broken,
        absent=absent,
    )


def _tensors_on(place: Device, devices: Mapping[str, Device]) -> str:
    return count_of(sum(1 for device in devices.values() if device == place), "tensor")
