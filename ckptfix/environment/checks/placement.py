"""Device maps that fail or mislead. Needs no GPU; whether its devices are there is checked only where there are any."""

from collections.abc import Iterator

from ckptfix.diagnosis.findings.base import Severity
from ckptfix.environment.advice import Advice, Topic
from ckptfix.environment.facts import Facts
from ckptfix.environment.facts.weights import HEAD, DeviceMap, Folder, Tie, embeds
from ckptfix.wording import collapse_layers, count_of, list_names

SPLITS_TIE = Topic(
    code="device-map-splits-tie",
    severities=(Severity.ERROR, Severity.WARNING),
    meaning="the device map puts tied weights on different devices: the forward pass fails, or they are no longer tied",
)
INCOMPLETE = Topic(
    code="device-map-incomplete",
    severities=(Severity.ERROR,),
    meaning="the device map has no device for some tensors: ValueError",
)
UNKNOWN_MODULE = Topic(
    code="device-map-unknown-module",
    severities=(Severity.NOTE,),
    meaning="the device map names modules that own no tensor of the checkpoint",
)
MISSING_DEVICE = Topic(
    code="device-map-missing-device",
    severities=(Severity.ERROR,),
    meaning="the device map names a device that torch does not see",
)
OFFLOADS = Topic(
    code="device-map-offloads",
    severities=(Severity.NOTE,),
    meaning="part of the model is offloaded: `load_state` leaves it as it is, with no more than a warning",
)
TOPICS = (SPLITS_TIE, INCOMPLETE, UNKNOWN_MODULE, MISSING_DEVICE, OFFLOADS)


def splits_tie(facts: Facts) -> Iterator[Advice]:
    """Ties come from the files: one storage, an alias in the header, or a head that is nowhere."""
    if facts.device_map is None or facts.folder is None:
        return
    for tie in (*facts.folder.ties, *_guessed(facts.folder, facts.device_map)):
        devices = {name: facts.device_map.device_of(name) for name in tie.names}
        if len({device for device in devices.values() if device is not None}) > 1:
            split = ", ".join(f"{name} on {device}" for name, device in devices.items() if device is not None)
            yield SPLITS_TIE.advice(
                f"the device map splits tied weights: {split}",
                severity=Severity.ERROR if tie.is_proven else Severity.WARNING,
                evidence=(facts.device_map.source, tie.proof),
                fix=f"give them one device, the one of {tie.names[0]}",
            )


def _guessed(folder: Folder, device_map: DeviceMap) -> Iterator[Tie]:
    """Yield the tie that a missing embedding betrays: the files hold a head alone, and the map names the embedding."""
    is_head_alone = HEAD in folder.names and not any(embeds(name) for name in folder.names)
    for name in device_map.entries if is_head_alone else ():
        if embeds(f"{name}.weight"):
            proof = f"{name}.weight is in no file, so it is taken from {HEAD}"
            yield Tie(names=(HEAD, f"{name}.weight"), proof=proof, is_proven=False)


def incomplete(facts: Facts) -> Iterator[Advice]:
    """accelerate's ``check_device_map`` raises."""
    if facts.device_map is None or facts.folder is None:
        return
    lost = [name for name in facts.folder.names if facts.device_map.device_of(name) is None]
    if lost:
        yield INCOMPLETE.advice(
            f"the device map has no device for {count_of(len(lost), 'tensor')}: {list_names(lost)}",
            evidence=(facts.device_map.source, f"names in {facts.folder.path}: {facts.folder.model}"),
            fix="name their modules, or let it be made: device_map='auto'",
        )


def unknown_module(facts: Facts) -> Iterator[Advice]:
    """Modules with buffers alone (rotary embeddings) are in no file, so this is a note."""
    if facts.device_map is None or facts.folder is None or not facts.folder.names:
        return
    tied = {name for tie in facts.folder.ties for name in tie.names}
    names = [*facts.folder.names, *tied]
    owners = {""} | {
        ".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)
    }
    strange = [name for name in facts.device_map.entries if name not in owners]
    if strange:
        yield UNKNOWN_MODULE.advice(
            f"the device map names {count_of(len(strange), 'module')} without a tensor in {facts.folder.path}",
            evidence=(facts.device_map.source, *collapse_layers(strange)),
            fix="compare them with the model's modules: a misspelt name moves nothing",
        )


def missing_device(facts: Facts) -> Iterator[Advice]:
    """Only where torch sees a device: elsewhere the map may be right for another machine."""
    if facts.device_map is None or not facts.torch.count:
        return
    absent = [
        device
        for device in facts.device_map.devices()
        if isinstance(device, int) and device >= facts.torch.count
    ]
    if absent:
        yield MISSING_DEVICE.advice(
            f"the device map names device {', '.join(str(device) for device in absent)}, "
            f"and torch sees {count_of(facts.torch.count, 'device')}, numbered from 0",
            evidence=(facts.device_map.source,),
            fix="change the map, or make the devices visible",
        )


def offloads(facts: Facts) -> Iterator[Advice]:
    """Yield advice on modules on "cpu" next to an accelerator, or on "disk": both are offloaded to meta."""
    if facts.device_map is None:
        return
    devices = facts.device_map.devices()
    away = [device for device in devices if device in ("cpu", "disk")]
    if (away and any(isinstance(device, int) for device in devices)) or "disk" in away:
        modules = [name for name, device in facts.device_map.entries.items() if device in away]
        yield OFFLOADS.advice(
            f"{count_of(len(modules), 'module')} offloaded to {' and '.join(map(str, away))}",
            evidence=(facts.device_map.source, *collapse_layers(modules)),
            fix="load before dispatching: load_checkpoint_and_dispatch; ckptfix's load_state_tolerant fills them, too",
        )


CHECKS = (splits_tie, incomplete, unknown_module, missing_device, offloads)
