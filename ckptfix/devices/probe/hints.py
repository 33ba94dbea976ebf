"""Places to look when copies between devices are wrong: sentences from what the machine reports about itself."""

import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.hardware import (
    Distance,
    PciDevice,
    distance,
    read_device,
    redirecting_bridges,
    run_limited,
    translates,
)

if TYPE_CHECKING:
    from ckptfix.devices.pairs import Pair


# Where to look when copies between devices are wrong: sentences from what the machine tells about itself.
#
# Free of torch. A hint is a known cause that is present, never a proof. What cannot be read gives no hint,
# and no error.

_PATIENCE = 5.0
"""Seconds for nvidia-smi, which hangs when the driver does."""

_FAR = (Distance.PHB, Distance.NODE, Distance.SYS)


def hints(
    addresses: Sequence[str],
    suspects: Collection["Pair"],
    peer_access: Mapping["Pair", bool | None],
    root: Path = Path("/"),
) -> tuple[str, ...]:
    """Return hints for pairs whose copies are not proven; none when there are no such pairs.

    ``addresses``: of the devices on the PCI bus by index, "" where not known. ``root``: of the file system, for tests.
    """
    if not suspects:
        return ()
    sys = root / "sys"
    found = {index: read_device(address, sys) for index, address in enumerate(addresses)}
    concerned = {index for pair in suspects for index in pair}
    devices = {index: device for index, device in found.items() if device is not None and index in concerned}
    return tuple(
        chain(
            _iommu(devices),
            _access_control(devices, sys),
            _distances(devices, suspects),
            _without_peer_access(suspects, peer_access),
            _driver(root / "proc/driver/nvidia/version"),
            _virtual(root / "proc/cpuinfo"),
        )
    )


def _iommu(devices: Mapping[int, PciDevice]) -> Iterator[str]:
    through = [f"{index} ({device.address})" for index, device in devices.items() if translates(device)]
    if through:
        yield (
            f"an IOMMU translates the addresses of devices {', '.join(through)}: outside virtual machines CUDA does "
            "not support P2P copies through one (CUDA C++ Programming Guide, IOMMU on Linux). Boot with iommu=pt, or "
            "switch it off in the firmware (VT-d, AMD-Vi)"
        )


def _access_control(devices: Mapping[int, PciDevice], sys: Path) -> Iterator[str]:
    answers = [redirecting_bridges(device, sys) for device in devices.values()]
    bridges = sorted({bridge for answer in answers if answer for bridge in answer})
    if bridges:
        yield (
            f"access control (ACS) on PCIe bridges {', '.join(bridges)} sends copies between devices up to the CPU. "
            "Switch ACS off in the firmware, or for this boot with setpci on these bridges"
        )
    elif None in answers:
        yield "access control (ACS) of the PCIe bridges can be read by root only: sudo lspci -vvv | grep ACSCtl"


def _distances(devices: Mapping[int, PciDevice], suspects: Iterable["Pair"]) -> Iterator[str]:
    links = _links() if devices else {}
    for one, other in sorted({(min(pair), max(pair)) for pair in suspects}):
        if one not in devices or other not in devices:
            continue
        ends = (devices[one].address, devices[other].address)
        told = links.get(ends) or links.get(ends[::-1])
        if told is not None and told.startswith("NV"):
            yield f"{one} and {other} are linked by NVLink ({told}): the PCIe bus is not their way"
            continue
        between = distance(devices[one], devices[other])
        if between in _FAR:
            yield (
                f"between {one} and {other} lies {between.value} ({between.name}): P2P copies over it are not "
                "supported by all boards"
            )


def _without_peer_access(
    suspects: Iterable["Pair"], peer_access: Mapping["Pair", bool | None]
) -> Iterator[str]:
    without = sorted(pair for pair in suspects if peer_access.get(pair) is False)
    if without:
        some = ", ".join(f"{source} -> {destination}" for source, destination in without)
        yield f"the driver offers no peer access for {some}: it carries these copies through the host itself"


def _driver(version: Path) -> Iterator[str]:
    try:
        said = re.search(r"NVRM version:\s*([\x20-\x7e]+?)\s{2,}(\d[\d.]*)", version.read_text())
    except (OSError, UnicodeDecodeError):
        return
    if said is not None:
        yield (
            f"driver {said[1]} {said[2]}: another version may do better; wrong P2P copies were reported of several "
            "(github.com/NVIDIA/open-gpu-kernel-modules/issues/1257)"
        )


def _virtual(cpuinfo: Path) -> Iterator[str]:
    try:
        flags = re.search(r"^flags\s*:.*\bhypervisor\b", cpuinfo.read_text(), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return
    if flags is not None:
        yield "this is a virtual machine: IOMMU and access control of the host below it cannot be seen from here"


def _links() -> dict[tuple[str, str], str]:
    """Return what ``nvidia-smi topo -m`` says lies between two PCI addresses; empty where it is not there."""
    listed = _nvidia_smi("--query-gpu=index,pci.bus_id", "--format=csv,noheader")
    addresses = dict(re.findall(r"^(\d+), 0*([0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+)$", listed, re.MULTILINE))
    return parse_topology(
        _nvidia_smi("topo", "-m"), {index: text.lower() for index, text in addresses.items()}
    )


def parse_topology(text: str, addresses: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """Return the cells of the matrix that ``nvidia-smi topo -m`` prints, by the addresses of GPU numbers."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    columns = next((line for line in lines if line[:1] == ["GPU0"] and "X" not in line), [])
    links = {}
    for row in lines:
        if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row:
            for column, cell in zip(columns, row[1:], strict=False):
                ends = (addresses.get(row[0][3:]), addresses.get(column[3:]))
                if column.startswith("GPU") and None not in ends and cell != "X":
                    links[str(ends[0]), str(ends[1])] = cell
    return links


def _nvidia_smi(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = run_limited([program, *arguments], _PATIENCE)
    except OSError:
        return ""
    return done.out if done.status == 0 else ""


# The GPUs on this machine's PCI bus, whether or not torch and a driver know them, and what lies between
# them.
#
# Free of torch. What is not known of one device is said by the modules of the probe, which know how to ask.

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
