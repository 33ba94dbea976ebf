"""The machine beneath torch: its kernel, driver, and whether it is a virtual one. Files alone are read."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from ckptfix.operations.doctor.facts.pci import Bus


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
