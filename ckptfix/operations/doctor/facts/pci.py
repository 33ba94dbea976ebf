"""The GPUs on the PCI bus and what lies between them: plain values as ``runtime`` hands them over, read once here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
