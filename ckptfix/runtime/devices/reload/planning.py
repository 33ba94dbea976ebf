"""Where every tensor of a checkpoint goes: the map made or given, and whether it covers all and splits no tie."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from accelerate.utils import find_tied_parameters

from ckptfix.runtime.devices.reload.building import Built
from ckptfix.runtime.devices.reload.dispatching import map_model, places_of
from ckptfix.runtime.devices.reload.filling import tensors_of
from ckptfix.runtime.devices.reload.machine import free_memory
from ckptfix.runtime.devices.reload.mapping import (
    CPU,
    MOST,
    Device,
    DeviceMap,
    Spread,
    block_of,
    device_of,
    natural_order,
    split_ties,
    spread_blocks,
)
from ckptfix.runtime.devices.reload.raising import ANYTHING, in_words
from ckptfix.runtime.devices.reload.report import Machine, Outcome, Proof, Subject
from ckptfix.runtime.devices.reload.stored import Weights
from ckptfix.wording import count_of, list_names


@dataclass(frozen=True, slots=True, kw_only=True)
class MapPlan:
    """A device map for one model. ``devices``: tensor name -> device, for what the map covers.

    ``is_sound``: it covers every tensor and splits no tied weights. ``absent``: devices that this machine lacks.
    """

    source: str
    device_map: DeviceMap
    devices: Mapping[str, Device]
    proofs: tuple[Proof, ...]
    is_sound: bool
    absent: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asked for: a map or a way to make one, what names it, and limits in bytes; None: what is free."""

    given: Spread | DeviceMap
    source: str
    limits: Mapping[Device, int] | None

    def limits_on(self, machine: Machine) -> Mapping[Device, int]:
        """Return device -> bytes that may lie on it."""
        if self.limits is not None:
            return self.limits
        return free_memory() if machine.count else {CPU: MOST}


def plan_for_weights(weights: Weights, wish: Wish, machine: Machine) -> MapPlan:
    """Plan without a model class: blocks and sizes come from the files' headers."""
    source, ties = wish.source, weights.ties
    names = list(weights.tensors)
    if isinstance(wish.given, Spread):
        source = f"{source}, blocks from the files' headers"
        device_map = _from_headers(weights, wish.given, wish.limits_on(machine))
    else:
        device_map = dict(wish.given)
    places = {place for name in names if (place := device_of(name, device_map)) is not None}
    tied = [name for group in ties for name in group]
    said = _strange(
        device_map, [*names, *tied], "the files", "a module that owns no tensor, or a misspelt name"
    )
    return _judged(source, device_map, names, ties, machine, places, said)


def plan_for_model(built: Built, wish: Wish, machine: Machine) -> MapPlan:
    """Plan for a model: accelerate makes the map, blocks that the model names stay whole."""
    source, model = wish.source, built.model
    names = list(tensors_of(model))
    ties = find_tied_parameters(model)
    if not isinstance(wish.given, Spread):
        device_map = dict(wish.given)
        modules = [name for name, _ in model.named_modules()]
        said = _strange(device_map, [*names, *modules], type(model).__name__, "misspelt")
        return _judged(source, device_map, names, ties, machine, places_of(model, device_map), said)
    whole = f", {', '.join(built.no_split)} kept in one piece" if built.no_split else ""
    source = f"{source}, made by accelerate{whole}"
    limits = wish.limits_on(machine)
    try:
        device_map = {"": CPU} if limits == {CPU: MOST} else map_model(built, wish.given, limits)
    except ANYTHING as error:  # accelerate walks through the user's own modules
        text = f"accelerate makes no map for {type(model).__name__}: {in_words(error)}"
        failed = Proof(subject=Subject.DEVICE_MAP, outcome=Outcome.FAILED, text=text)
        return MapPlan(source=source, device_map={}, devices={}, proofs=(failed,), is_sound=False, absent=())
    return _judged(source, device_map, names, ties, machine, places_of(model, device_map), ())


def _strange(device_map: DeviceMap, names: Sequence[str], where: str, why: str) -> tuple[Proof, ...]:
    """Return a line for the names of a map that stand for nothing: accelerate takes them without a word."""
    parts = {""} | {
        ".".join(steps[:depth])
        for name in names
        for steps in (name.split("."),)
        for depth in range(1, len(steps) + 1)
    }
    unknown = [name for name in device_map if name not in parts]
    if not unknown:
        return ()
    text = f"{count_of(len(unknown), 'name')} of the map not in {where}: {list_names(unknown)}: {why}, moves nothing"
    is_transfer = any(isinstance(device_map[name], int) for name in unknown)
    line = Proof(
        subject=Subject.DEVICE_MAP, outcome=Outcome.NOT_EXERCISED, text=text, is_transfer=is_transfer
    )
    return (line,)


def _from_headers(weights: Weights, spread: Spread, limits: Mapping[Device, int]) -> dict[str, Device]:
    first = {name: group[0] for group in weights.ties for name in group if group[0] in weights.tensors}
    sizes: dict[str, int] = {}
    for name in natural_order(weights.tensors):
        is_tied_to_other = first.get(name, name) != name
        block = block_of(name)
        sizes[block] = sizes.get(block, 0) + (0 if is_tied_to_other else weights.tensors[name].nbytes)
    mapped = spread_blocks(sizes, limits, spread)
    placed = dict(mapped)
    for name, kept in first.items():
        if name in weights.tensors and mapped[block_of(kept)] != mapped[block_of(name)]:
            placed[name] = mapped[block_of(kept)]
    return placed


def _judged(
    source: str, device_map: dict[str, Device], names: Sequence[str], ties: Sequence[Sequence[str]], machine: Machine,
    places: Collection[Device], said: Sequence[Proof],
) -> MapPlan:  # fmt: skip
    devices = {name: place for name in names if (place := device_of(name, device_map)) is not None}
    uncovered = [name for name in names if name not in devices]
    broken = split_ties(ties, device_map)
    proofs = list(said)
    if not names:
        text = "the device map: there is no tensor that it could place"
        proofs.append(
            Proof(subject=Subject.DEVICE_MAP, outcome=Outcome.NOT_EXERCISED, text=text, is_transfer=True)
        )
    elif uncovered:
        text = f"the map gives no device to {count_of(len(uncovered), 'tensor')}: {list_names(uncovered)}"
        proofs.append(Proof(subject=Subject.DEVICE_MAP, outcome=Outcome.FAILED, text=text))
    else:
        text = f"the map covers every tensor: {count_of(len(names), 'name')}"
        proofs.append(Proof(subject=Subject.DEVICE_MAP, outcome=Outcome.PROVEN, text=text))
    for (one, here), (other, there) in broken:
        text = (
            f"the map splits tied weights: {one!r} is on {here}, {other!r} on {there}, and both are one tensor; "
            f"put both on {here}"
        )
        proofs.append(Proof(subject=Subject.TIES, outcome=Outcome.FAILED, text=text))
    if ties and not broken:
        text = f"tied weights stay on one device: {count_of(len(ties), 'group')} of names"
        proofs.append(Proof(subject=Subject.TIES, outcome=Outcome.PROVEN, text=text))
    absent = tuple(sorted(place for place in places if isinstance(place, int) and place >= machine.count))
    for place in absent:
        text = f"device {place} of the map is not on this machine: {_tensors_on(place, devices)} not placed"
        proofs.append(
            Proof(subject=Subject.PLACEMENT, outcome=Outcome.NOT_EXERCISED, text=text, is_transfer=True)
        )
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
