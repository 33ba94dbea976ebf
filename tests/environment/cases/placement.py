"""Device maps."""

from msgspec.structs import replace

from ckptfix.environment.facts.weights import DeviceMap, Folder, Tie
from tests.environment.building import facts
from tests.environment.cases.case import ERROR, NOTE, WARNING, Case

TIED = Folder(
    path="ckpt",
    names=("embed.weight", "layers.0.weight", "head.weight"),
    model="model.safetensors",
    ties=(
        Tie(
            names=("embed.weight", "head.weight"),
            proof="model.safetensors lists them as aliases of one tensor",
        ),
    ),
)

GUESSED = replace(TIED, ties=(replace(TIED.ties[0], is_proven=False),))


def _map(**entries: int | str) -> DeviceMap:
    return DeviceMap(source="map.json", entries=entries)


PLACEMENT = (
    Case(
        "device-map-splits-tie",
        "proven",
        facts(folder=TIED, device_map=_map(embed=0, layers=0, head=1)),
        ERROR,
    ),
    Case(
        "device-map-splits-tie",
        "guessed",
        facts(folder=GUESSED, device_map=_map(embed=0, layers=0, head=1)),
        WARNING,
    ),
    Case(
        "device-map-splits-tie",
        "two spellings of one device",
        facts(folder=TIED, device_map=_map(embed=1, layers=0, head="cuda:1")),
        None,
    ),
    Case("device-map-splits-tie", "no map", facts(folder=TIED), None),
    Case("device-map-splits-tie", "no folder", facts(device_map=_map(embed=0, head=1)), None),
    Case("device-map-incomplete", "no map", facts(folder=TIED), None),
    Case("device-map-unknown-module", "no map", facts(folder=TIED), None),
    Case(
        "device-map-unknown-module",
        "no names",
        facts(folder=Folder(path="ckpt"), device_map=_map(layer=0)),
        None,
    ),
    Case("device-map-missing-device", "2 of 2", facts(2, device_map=_map(embed=2)), ERROR),
    Case(
        "device-map-incomplete",
        "lacks one",
        facts(folder=TIED, device_map=_map(embed=0, head=0)),
        ERROR,
    ),
    Case(
        "device-map-incomplete",
        "whole",
        facts(folder=TIED, device_map=DeviceMap(source="m", entries={"": 0})),
        None,
    ),
    Case(
        "device-map-unknown-module", "misspelt", facts(folder=TIED, device_map=_map(layer=0)), NOTE
    ),
    Case(
        "device-map-unknown-module",
        "known",
        facts(folder=TIED, device_map=_map(layers=0, embed=0)),
        None,
    ),
    Case(
        "device-map-missing-device",
        "3 of 2",
        facts(2, folder=TIED, device_map=_map(embed=3)),
        ERROR,
    ),
    Case(
        "device-map-missing-device", "there", facts(2, folder=TIED, device_map=_map(embed=1)), None
    ),
    Case(
        "device-map-missing-device",
        "no GPU here",
        facts(folder=TIED, device_map=_map(embed=3)),
        None,
    ),
    Case("device-map-offloads", "cpu", facts(2, device_map=_map(embed=0, layers="cpu")), NOTE),
    Case("device-map-offloads", "disk", facts(2, device_map=_map(layers="disk")), NOTE),
    Case(
        "device-map-offloads",
        "a CPU machine",
        facts(device_map=_map(embed="cpu", layers="cpu")),
        None,
    ),
)
