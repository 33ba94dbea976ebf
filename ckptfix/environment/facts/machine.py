"""The machine: kernel, driver, GPUs on the PCI bus, and what torch reports of its devices."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What torch says of itself and of its devices, as ``runtime`` hands it over: plain values, checked once
# here.

Pair = tuple[int, int]
"""(index of the source device, index of the destination device)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device as torch numbers it. ``pci``: its address, "" when torch does not say. ``memory``: bytes, 0 unknown."""

    index: int
    name: str = ""
    pci: str = ""
    memory: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairVerdict:
    """What the probe said of the copies of one ordered pair: its verdict and kind of damage, in the probe's words."""

    pair: Pair
    verdict: str
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """What torch said in a process of its own.

    ``problem``: why it did not say all, "" when it did; ``stage``: what it was doing then ("import", "devices", ...).
    ``builds``: what it was built for ("cuda 12.8", "hip 6.2", "xpu"), () for a CPU build. ``kind``: the type of the
    accelerator, "" without one. ``linked``: pairs of PCI addresses with a direct link (NVLink), None when nobody could
    say. ``verdicts``: what the probe found on this very hardware before, None when it has not been run.
    """

    version: str = ""
    builds: tuple[str, ...] = ()
    kind: str = ""
    devices: tuple[Device, ...] = ()
    warnings: tuple[str, ...] = ()
    stage: str = ""
    problem: str = ""
    linked: frozenset[frozenset[str]] | None = None
    verdicts: tuple[PairVerdict, ...] | None = None

    @property
    def count(self) -> int:
        """How many devices torch can use."""
        return len(self.devices)


def parse_torch(said: Mapping[str, Any]) -> Torch:
    """Return what the process said as a value; what is missing or of another type is left at its default."""
    links, verdicts = said.get("links"), said.get("verdicts")
    return Torch(
        version=str(said.get("version", "")),
        builds=tuple(str(build) for build in _list(said.get("builds"))),
        kind=str(said.get("kind") or ""),
        devices=tuple(_device(item) for item in _list(said.get("devices")) if isinstance(item, Mapping)),
        warnings=tuple(str(text) for text in _list(said.get("warnings"))),
        stage=str(said.get("stage", "")),
        problem=str(said.get("problem", "")),
        linked=None if links is None else frozenset(frozenset(map(str, pair)) for pair in _list(links)),
        verdicts=None if verdicts is None else tuple(_verdict(item) for item in _list(verdicts)),
    )


def _device(item: Mapping[str, Any]) -> Device:
    memory = item.get("memory")
    return Device(
        index=int(item["index"]),
        name=str(item.get("name", "")),
        pci=str(item.get("pci", "")),
        memory=memory if isinstance(memory, int) else 0,
    )


def _verdict(item: Mapping[str, Any]) -> PairVerdict:
    source, destination = item["pair"]
    return PairVerdict(
        pair=(int(source), int(destination)), verdict=str(item["verdict"]), kind=str(item.get("kind") or "")
    )


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


# The GPUs on the PCI bus and what lies between them: plain values as ``runtime`` hands them over, read once
# here.


@dataclass(frozen=True, slots=True, kw_only=True)
class PciGpu:
    """A GPU on the PCI bus. ``name``: its model, "" without a driver. ``iommu``: the type of its IOMMU group, or ""."""

    address: str
    vendor: str
    name: str = ""
    iommu: str = ""

    @property
    def is_translated(self) -> bool:
        """Whether the IOMMU translates what this device reads and writes; with ``iommu=pt`` the type is "identity"."""
        return self.iommu.startswith("DMA")

    def __str__(self) -> str:
        return f"{self.name or self.vendor + ' GPU'} at {self.address}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What lies between two GPUs. ``name``: as ``nvidia-smi topo`` calls it (PIX, PXB, PHB, NODE, SYS)."""

    ends: frozenset[str]
    name: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bus:
    """The GPUs of this machine.

    ``redirecting``: bridges whose access control (ACS) sends peer traffic up to the CPU. ``hidden``: GPUs above which
    only root may read that.
    """

    gpus: tuple[PciGpu, ...] = ()
    redirecting: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    ways: tuple[Way, ...] = ()


def parse_bus(said: Mapping[str, Any]) -> Bus:
    """Return what was handed over as a value."""
    return Bus(
        gpus=tuple(
            PciGpu(address=item["address"], vendor=item["vendor"], name=item["name"], iommu=item["iommu"])
            for item in said.get("gpus", ())
        ),
        redirecting=tuple(said.get("redirecting", ())),
        hidden=tuple(said.get("hidden", ())),
        ways=tuple(
            Way(ends=frozenset((one, other)), name=name, meaning=meaning)
            for one, other, name, meaning in said.get("between", ())
        ),
    )


# The machine beneath torch: its kernel, driver, and whether it is a virtual one. Files alone are read.


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the kernel says. ``command_line``: what it was booted with. ``driver``: NVIDIA's kernel module, "" without.

    ``device_nodes``: how many ``/dev/nvidia<N>`` there are. ``is_virtual``: a hypervisor runs it, so the settings of
    the host's IOMMU and bridges do not show.
    """

    bus: Bus = field(default_factory=Bus)
    command_line: str = ""
    driver: str = ""
    device_nodes: int = 0
    is_virtual: bool = False

    def boot_options(self, *names: str) -> tuple[str, ...]:
        """Return the options of the kernel's command line with one of these names, as they stand there."""
        return tuple(word for word in self.command_line.split() if word.partition("=")[0] in names)


def read_machine(bus: Bus, root: Path = Path("/")) -> Machine:
    """Return what the kernel says of this machine, with the GPUs that are on its bus."""
    return Machine(
        bus=bus,
        command_line=_text(root / "proc" / "cmdline"),
        driver=_driver(root),
        device_nodes=sum(
            1 for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", path.name)
        ),
        is_virtual=bool(
            re.search(r"^flags\s*:.*\bhypervisor\b", _text(root / "proc" / "cpuinfo"), re.MULTILINE)
        ),
    )


def _driver(root: Path) -> str:
    version = _text(root / "sys" / "module" / "nvidia" / "version")
    if version:
        return version
    match = re.search(
        r"Kernel Module\D*?(?:for \S+)?\s+([0-9]+(?:\.[0-9]+)+)",
        _text(root / "proc" / "driver" / "nvidia" / "version"),
    )
    return match[1] if match else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
