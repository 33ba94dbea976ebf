"""Files of a folder that ``torch.load`` refuses or loads without a check, and device maps that fail
or mislead.

Pickles are read by their opcodes alone. A device map needs no GPU to be checked; whether its
devices exist is checked only where there are any.
"""

from collections.abc import Iterator
from itertools import groupby

from ckptfix.diagnosis.findings.damaged import UnloadablePickle, UnsafePickle
from ckptfix.environment.advice import ERROR, NOTE, WARNING, Said, say, topic
from ckptfix.environment.facts import Facts
from ckptfix.environment.facts.weights import HEAD, DeviceMap, Folder, Tie, embeds
from ckptfix.storage.paths import shell_path
from ckptfix.wording import collapse_layers, count_of, list_names

# torch.load's default; accelerate passes weights_only=True itself for all but custom objects.
_SINCE = (2, 6)
_TRUE = ("1", "y", "yes", "true")


@topic(UnloadablePickle.code, UnloadablePickle.meaning, UnloadablePickle.severity, NOTE)
def unloadable(facts: Facts) -> Iterator[Said]:
    """The same line for the files of all ranks is said once."""
    if facts.folder is None:
        return
    torch = facts.software.version("torch")
    older = bool(torch) and torch < _SINCE
    found = [item for item in facts.folder.refused if isinstance(item, UnloadablePickle)]
    for advice, same in groupby(
        found, key=lambda item: item.advice_at(facts.folder.path if facts.folder else "")
    ):
        files = list(same)
        yield say(
            (
                str(files[0])
                if len(files) == 1
                else f"{files[0]}; the same applies to {count_of(len(files) - 1, 'more file')}"
            ),
            severity=NOTE if older else None,
            evidence=(
                *(
                    f"{item.path}: {', '.join((*item.globals, *item.opcodes)) or 'a plain pickle'}"
                    for item in files
                ),
                (
                    f"torch {facts.software.packages['torch'].version if torch else '?'}: "
                    f"weights_only {'is not yet the default' if older else 'is the default'}"
                ),
            ),
            fix=advice,
        )


@topic(UnsafePickle.code, UnsafePickle.meaning, UnsafePickle.severity)
def unsafe(facts: Facts) -> Iterator[Said]:
    """Never to be allowed."""
    for item in facts.folder.refused if facts.folder is not None else ():
        if isinstance(item, UnsafePickle):
            yield say(
                str(item),
                evidence=(f"{item.path}: {', '.join(item.globals)}",),
                fix=(
                    "do not load it; for details: ckptfix check "
                    f"{shell_path(facts.folder.path if facts.folder else '')}"
                ),
            )


@topic(
    "weights-only-forced",
    "an environment variable turns `weights_only` on or off for every `torch.load` of the process",
    WARNING,
)
def forced(facts: Facts) -> Iterator[Said]:
    """Read by ``torch/serialization.py`` (2.6 to 2.13); FORCE_WEIGHTS_ONLY goes before what a
    caller says.
    """
    for name, effect in (
        (
            "TORCH_FORCE_WEIGHTS_ONLY_LOAD",
            "accelerate cannot load custom objects that contain a class",
        ),
        (
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
            "every torch.load without an explicit weights_only runs whatever code the file names",
        ),
    ):
        if facts.variables.get(name, "").lower() in _TRUE:
            yield say(
                f"{name}={facts.variables[name]}: {effect}",
                evidence=(f"{name}={facts.variables[name]} in the environment",),
                fix=(
                    f"unset {name}, and allow individual classes: "
                    "torch.serialization.add_safe_globals([...])"
                ),
            )


@topic(
    "device-map-splits-tie",
    "the device map puts tied weights on different devices: the forward pass fails, or the "
    "weights are no longer tied",
    ERROR,
    WARNING,
)
def splits_tie(facts: Facts) -> Iterator[Said]:
    """Ties come from the files: one storage, an alias in the header, or a head that is nowhere."""
    if facts.device_map is None or facts.folder is None:
        return
    for tie in (*facts.folder.ties, *_guessed(facts.folder, facts.device_map)):
        devices = {name: facts.device_map.device_of(name) for name in tie.names}
        if len({device for device in devices.values() if device is not None}) > 1:
            split = ", ".join(
                f"{name} on {device}" for name, device in devices.items() if device is not None
            )
            yield say(
                f"the device map splits tied weights: {split}",
                severity=ERROR if tie.is_proven else WARNING,
                evidence=(facts.device_map.source, tie.proof),
                fix=f"put them all on the device of {tie.names[0]}",
            )


def _guessed(folder: Folder, device_map: DeviceMap) -> Iterator[Tie]:
    """Yield the tie that a missing embedding betrays: the files hold a head alone, and the map
    names the embedding.
    """
    is_head_alone = HEAD in folder.names and not any(embeds(name) for name in folder.names)
    for name in device_map.entries if is_head_alone else ():
        if embeds(f"{name}.weight"):
            proof = f"no file contains {name}.weight, so it is taken from {HEAD}"
            yield Tie(names=(HEAD, f"{name}.weight"), proof=proof, is_proven=False)


@topic("device-map-incomplete", "the device map has no device for some tensors: ValueError", ERROR)
def incomplete(facts: Facts) -> Iterator[Said]:
    """accelerate's ``check_device_map`` raises."""
    if facts.device_map is None or facts.folder is None:
        return
    lost = [name for name in facts.folder.names if facts.device_map.device_of(name) is None]
    if lost:
        yield say(
            f"the device map has no device for {count_of(len(lost), 'tensor')}: {list_names(lost)}",
            evidence=(
                facts.device_map.source,
                f"keys read from {facts.folder.path}: {facts.folder.model}",
            ),
            fix="add their modules, or let Accelerate make the map: device_map='auto'",
        )


@topic(
    "device-map-unknown-module",
    "the device map names modules that have no tensor in the checkpoint",
    NOTE,
)
def unknown_module(facts: Facts) -> Iterator[Said]:
    """Modules with buffers alone (rotary embeddings) are in no file, so this is a note."""
    if facts.device_map is None or facts.folder is None or not facts.folder.names:
        return
    tied = {name for tie in facts.folder.ties for name in tie.names}
    names = [*facts.folder.names, *tied]
    owners = {""} | {
        ".".join(name.split(".")[:depth])
        for name in names
        for depth in range(1, name.count(".") + 2)
    }
    strange = [name for name in facts.device_map.entries if name not in owners]
    if strange:
        yield say(
            f"the device map names {count_of(len(strange), 'module')} without any tensor in "
            f"{facts.folder.path}",
            evidence=(facts.device_map.source, *collapse_layers(strange)),
            fix="compare them with the model's modules: a misspelled name has no effect",
        )


@topic("device-map-missing-device", "the device map names a device that torch does not see", ERROR)
def missing_device(facts: Facts) -> Iterator[Said]:
    """Only where torch sees a device: elsewhere the map may be right for another machine."""
    if facts.device_map is None or not facts.torch.count:
        return
    absent = [
        device
        for device in facts.device_map.devices()
        if isinstance(device, int) and device >= facts.torch.count
    ]
    if absent:
        yield say(
            f"the device map names device {', '.join(str(device) for device in absent)}, "
            f"but torch sees {count_of(facts.torch.count, 'device')}, numbered from 0",
            evidence=(facts.device_map.source,),
            fix="change the map, or make the devices visible",
        )


@topic(
    "device-map-offloads",
    "part of the model is offloaded: `load_state` leaves it unchanged and only warns",
    NOTE,
)
def offloads(facts: Facts) -> Iterator[Said]:
    """Yield advice on modules on "cpu" next to an accelerator, or on "disk": both are offloaded to
    meta.
    """
    if facts.device_map is None:
        return
    devices = facts.device_map.devices()
    away = [device for device in devices if device in ("cpu", "disk")]
    if (away and any(isinstance(device, int) for device in devices)) or "disk" in away:
        modules = [name for name, device in facts.device_map.entries.items() if device in away]
        yield say(
            f"{count_of(len(modules), 'module')} offloaded to {' and '.join(map(str, away))}",
            evidence=(facts.device_map.source, *collapse_layers(modules)),
            fix=(
                "load before dispatching (load_checkpoint_and_dispatch), or use ckptfix's "
                "load_state_tolerant, which also loads offloaded weights"
            ),
        )
