"""Known causes of wrong copies between devices that are present on this machine, as sentences. Free of torch.

A hint is a known cause that is present, never a proof. What cannot be read gives no hint, and no error.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ckptfix.hardware import (
    PciDevice,
    distance,
    is_virtual,
    nvlinks,
    read_device,
    read_driver,
    redirecting_bridges,
)

if TYPE_CHECKING:
    from ckptfix.devices.torch_devices import Pair

_PATIENCE = 5.0
"""Seconds for nvidia-smi: whoever waits for a probe does not wait long for hints."""


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
    found = {index: read_device(address, root) for index, address in enumerate(addresses)}
    concerned = {index for pair in suspects for index in pair}
    devices = {index: device for index, device in found.items() if device is not None and index in concerned}
    return tuple(
        chain(
            _iommu(devices),
            _access_control(devices, root),
            _distances(devices, suspects),
            _without_peer_access(suspects, peer_access),
            _driver(root),
            _virtual(root),
        )
    )


def _iommu(devices: Mapping[int, PciDevice]) -> Iterator[str]:
    through = [f"{index} ({device.address})" for index, device in devices.items() if device.is_translated]
    if through:
        yield (
            f"an IOMMU translates the addresses of devices {', '.join(through)}: outside virtual machines CUDA does "
            "not support P2P copies through one (CUDA C++ Programming Guide, IOMMU on Linux). Boot with iommu=pt, or "
            "switch it off in the firmware (VT-d, AMD-Vi)"
        )


def _access_control(devices: Mapping[int, PciDevice], root: Path) -> Iterator[str]:
    answers = [redirecting_bridges(device, root) for device in devices.values()]
    bridges = sorted({bridge for answer in answers if answer for bridge in answer})
    if bridges:
        yield (
            f"access control (ACS) on PCIe bridges {', '.join(bridges)} sends copies between devices up to the CPU. "
            "Switch ACS off in the firmware, or for this boot with setpci on these bridges"
        )
    elif None in answers:
        yield "access control (ACS) of the PCIe bridges can be read by root only: sudo lspci -vvv | grep ACSCtl"


def _distances(devices: Mapping[int, PciDevice], suspects: Iterable["Pair"]) -> Iterator[str]:
    links = (nvlinks(_PATIENCE) if devices else None) or {}
    for one, other in sorted({(min(pair), max(pair)) for pair in suspects}):
        if one not in devices or other not in devices:
            continue
        link = links.get(frozenset((devices[one].address, devices[other].address)))
        if link is not None:
            yield f"{one} and {other} are linked by NVLink ({link}): the PCIe bus is not their way"
            continue
        between = distance(devices[one], devices[other])
        if between is not None and between.passes_the_cpu:
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


def _driver(root: Path) -> Iterator[str]:
    if description := read_driver(root).description:
        yield (
            f"driver {description}: another version may do better; wrong P2P copies were reported of several "
            "(github.com/NVIDIA/open-gpu-kernel-modules/issues/1257)"
        )


def _virtual(root: Path) -> Iterator[str]:
    if is_virtual(root):
        yield "this is a virtual machine: IOMMU and access control of the host below it cannot be seen from here"
