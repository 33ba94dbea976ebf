"""The GPUs on this machine's PCI bus, whether or not torch and a driver know them, and what lies between them.

Free of torch. What is not known of one device is said by the modules of the probe, which know how to ask.
"""

from itertools import combinations
from pathlib import Path
from typing import Any

from ckptfix.runtime.devices.limited import run_limited
from ckptfix.runtime.devices.probe.hints import parse_topology
from ckptfix.runtime.devices.probe.pci import PciDevice, distance, read_device, redirecting_bridges

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
# PCI class codes: VGA, 3D and other display controllers, processing accelerators. AMD's VGA ones may be a CPU's own.
_CLASSES = {"NVIDIA": ("0x0300", "0x0302"), "AMD": ("0x0302", "0x0380", "0x1200")}
_SMI_PATIENCE = 20.0


def graphics(root: Path = Path("/")) -> dict[str, Any]:
    """Return the GPUs on the PCI bus as plain values.

    ``gpus``: address, vendor, model and type of IOMMU group of each. ``redirecting``: bridges above them whose access
    control sends peer traffic up to the CPU; ``hidden``: the GPUs above which only root may read that. ``between``:
    pairs of addresses with the name of what lies between them and its meaning, for pairs where that is known.
    """
    found = [(device, vendor) for device, vendor in _gpus(root / "sys")]
    above = {device.address: redirecting_bridges(device, root / "sys") for device, _ in found}
    ways = (
        (one.address, other.address, distance(one, other)) for (one, _), (other, _) in combinations(found, 2)
    )
    return {
        "gpus": [
            {
                "address": device.address,
                "vendor": vendor,
                "name": _model(root, device.address),
                "iommu": device.iommu,
            }
            for device, vendor in found
        ],
        "redirecting": sorted({bridge for bridges in above.values() for bridge in bridges or ()}),
        "hidden": [address for address, bridges in above.items() if bridges is None],
        "between": [[one, other, way.name, way.value] for one, other, way in ways if way is not None],
    }


def linked() -> list[list[str]] | None:
    """Return the pairs of PCI addresses that NVLink connects, None when ``nvidia-smi`` does not say.

    It numbers devices as the driver does, and torch may number them otherwise: hence addresses.
    """
    try:
        listed = run_limited(
            ("nvidia-smi", "--query-gpu=index,pci.bus_id", "--format=csv,noheader"), _SMI_PATIENCE
        )
        matrix = run_limited(("nvidia-smi", "topo", "-m"), _SMI_PATIENCE)
    except OSError:
        return None
    if listed.problem or matrix.problem:
        return None
    numbers = (line.split(",") for line in listed.out.splitlines() if line.count(",") == 1)
    # The domain has eight digits there, and four in sysfs.
    addresses = {number.strip(): address.strip().lower()[-12:] for number, address in numbers}
    cells = parse_topology(matrix.out, addresses)
    return [
        list(pair)
        for pair in sorted({tuple(sorted(pair)) for pair, cell in cells.items() if cell.startswith("NV")})
    ]


def _gpus(sys: Path) -> list[tuple[PciDevice, str]]:
    folder = sys / "bus/pci/devices"
    try:
        places = sorted(folder.iterdir())
    except OSError:  # no PCI bus, or a sandbox that hides it
        return []
    found = []
    for place in places:
        vendor = _VENDORS.get(_text(place / "vendor"))
        if vendor is not None and _text(place / "class")[:6] in _CLASSES[vendor]:
            device = read_device(place.name, sys)
            found += [(device, vendor)] if device is not None else []
    return found


def _model(root: Path, address: str) -> str:
    """Return what NVIDIA's driver calls a device, "" without it."""
    for line in _text(root / "proc/driver/nvidia/gpus" / address / "information").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model":
            return value.strip()
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
