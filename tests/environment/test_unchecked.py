"""What was not looked at is listed, whatever it is."""

import pytest
from msgspec.structs import replace

from ckptfix.environment.doctor import unchecked
from ckptfix.environment.facts import Facts
from ckptfix.environment.facts.installed import Command
from ckptfix.environment.facts.launch import AccelerateConfig
from ckptfix.environment.facts.weights import DeviceMap, Folder
from tests.environment.building import (
    bus,
    config,
    facts,
    launch,
    script,
    software,
    with_machine,
    with_software,
    with_torch,
)

MAP = DeviceMap(source="map.json", entries={"": 0})
FULL = facts(
    2,
    script=script("import argparse"),
    launch=launch("accelerate launch train.py"),
    folder=Folder(path="ckpt"),
    device_map=MAP,
)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (facts(), "the training script (--script SCRIPT)"),
        (facts(), "the command that starts training"),
        (facts(), "checkpoint files that weights_only refuses"),
        (facts(), "device maps (--device-map FILE)"),
        (facts(), "copies between devices: torch sees 0 devices"),
        (facts(1), "copies between devices: torch sees 1 device"),
        (with_torch(facts(2), verdicts=None), "whether copies between devices are correct"),
        (facts(2), "copies between devices in this run"),
        (with_torch(facts(2), problem="killed"), "devices: killed"),
        (facts(device_map=MAP), "map.json: tied weights and keys"),
        (facts(device_map=MAP), "map.json: whether its devices exist"),
        (
            with_machine(facts(2), bus=replace(bus(), hidden=("0000:01:00.0",))),
            "ACS above 0000:01:00.0: only root",
        ),
        (with_machine(facts(2), is_virtual=True), "IOMMU and ACS of the host"),
        (facts(2), "direct links between GPUs (NVLink)"),
        (
            facts(config=replace(config(), problem="ScannerError")),
            "the number of processes that start",
        ),
        (
            facts(config=AccelerateConfig(path="/no", asked=True)),
            "the number of processes that start",
        ),
        (
            with_software(facts(), command=Command(path="/a/accelerate")),
            "the Python that /a/accelerate starts",
        ),
        (
            with_software(facts(), accelerate=replace(software().accelerate, names=frozenset())),
            "names and options of accelerate",
        ),
        (facts(script=script("a = 1")), "effects of the script's imports"),
        (facts(script=script("import tyro")), "the script's own options"),
        (facts(launch=launch("torchrun train.py")), "options of torchrun"),
        (facts(folder=Folder(path="ckpt", unread=("a.bin: truncated",))), "a.bin: truncated"),
    ],
)
def test_it_is_listed(given: Facts, words: str) -> None:
    assert [text for text in unchecked(given) if text.startswith(words)]
    assert not [text for text in unchecked(FULL) if text.startswith(words)] or words in {
        "copies between devices in this run",
        "direct links between GPUs (NVLink)",
        "effects of the script's imports",
    }
