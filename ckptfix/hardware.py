"""Facts about the devices of this machine that need no torch: the PCI bus, and commands run with a time limit."""

import os
import re
import signal
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from pathlib import Path

# Runs a command with a time limit that holds even for a process that is stuck in a driver.
#
# ``subprocess.run(timeout=...)`` waits for the end of what it killed, and a process in an uninterruptible
# call does not end; a grandchild that keeps a pipe open holds it up, too. Here output goes to files, and
# nothing waits long after a kill.

_AFTER_KILL = 5.0  # seconds
_MAX_OUTPUT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of a command. ``status``: its exit status, negative for a signal, None when it had to be killed.

    ``limit``: the seconds that it had. ``out`` and ``err``: what it wrote, the last MiB of each.
    """

    status: int | None
    limit: float
    out: str
    err: str

    @property
    def problem(self) -> str:
        """Why it is not to be trusted, "" when it ended well."""
        if self.status is None:
            return f"no answer in {self.limit:g} s, so it was killed"
        if self.status < 0:
            with suppress(ValueError):
                return f"it was ended by {signal.Signals(-self.status).name}"
            return f"it was ended by signal {-self.status}"
        if self.status:
            last = next((line for line in reversed(self.err.splitlines()) if line.strip()), "")
            return f"it ended with status {self.status}: {last.strip()[:300]}".removesuffix(": ")
        return ""


def run_limited(command: Sequence[str], seconds: float) -> Ended:
    """Run a command for at most ``seconds``; it, and all that it started, is killed then.

    Raises OSError when it cannot be started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
        finally:
            if status is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_AFTER_KILL)
        return Ended(status=status, limit=seconds, out=_tail(out.fileno()), err=_tail(err.fileno()))


def _tail(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, _MAX_OUTPUT, max(size - _MAX_OUTPUT, 0)).decode("utf-8", "replace")


# What the kernel says of the devices on the PCI bus: IOMMU, access control on the bridges above, distance.
#
# Free of torch. Addresses are sysfs's: ``0000:65:00.0``. Where a file is missing or may not be read, the
# answer is "not known": None, or empty. ``root`` is there for tests.

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

# Linux include/uapi/linux/pci_regs.h: PCI_EXT_CAP_ID_ACS, PCI_ACS_CTRL, PCI_ACS_RR | PCI_ACS_CR.
_FIRST_EXTENDED = 0x100
_ACS, _ACS_CONTROL, _REDIRECTS = 0x0D, 6, 0x04 | 0x08


class Distance(Enum):
    """What lies between two devices, in the words of ``nvidia-smi topo -m``."""

    PIX = "at most one PCIe bridge"
    PXB = "several PCIe bridges, not the host's"
    PHB = "the PCIe host bridge, that is the CPU"
    NODE = "the interconnect of host bridges within a NUMA node"
    SYS = "the interconnect of NUMA nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """One device. ``path``: addresses from the root port down to it; ``bridge``: the host bridge; ``node``: of NUMA."""

    address: str
    bridge: str
    path: tuple[str, ...]
    node: int | None
    iommu: str


def read_device(address: str, root: Path = Path("/sys")) -> PciDevice | None:
    """Return what sysfs says of a device, or None when it has no such device."""
    link = root / "bus/pci/devices" / address
    if not _ADDRESS.fullmatch(address) or not link.exists():
        return None
    parts = link.resolve().parts
    path = tuple(part for part in parts if _ADDRESS.fullmatch(part))
    bridge = next((part for part in parts if re.fullmatch(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", part)), "")
    node = _text(link / "numa_node")
    return PciDevice(
        address=address,
        bridge=bridge,
        path=path,
        node=int(node) if node.isdecimal() else None,
        iommu=_text(link / "iommu_group/type"),
    )


def translates(device: PciDevice) -> bool:
    """Return whether an IOMMU translates the device's addresses. ``iommu=pt`` gives the type ``identity`` instead."""
    return device.iommu.startswith("DMA")


def distance(one: PciDevice, other: PciDevice) -> Distance | None:
    """Return what lies between two devices; None when sysfs does not say."""
    if not one.bridge or not other.bridge:
        return None
    if one.bridge != other.bridge:
        return Distance.NODE if one.node is not None and one.node == other.node else Distance.SYS
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one.path, other.path, strict=False))))
    if not shared:
        return Distance.PHB
    crossed = len(one.path) + len(other.path) - 2 * shared - 2
    return Distance.PIX if crossed <= 2 else Distance.PXB


def redirecting_bridges(device: PciDevice, root: Path = Path("/sys")) -> tuple[str, ...] | None:
    """Return the bridges above a device whose access control sends peer traffic up to the CPU.

    None when the kernel does not show all of their registers, which it does for root only.
    """
    found = []
    for address in device.path[:-1]:
        control = _access_control(root / "bus/pci/devices" / address / "config")
        if control is None:
            return None
        found += [address] if control & _REDIRECTS else []
    return tuple(found)


def _access_control(config: Path) -> int | None:
    """Return the ACS control register of a bridge, 0 when it has none, None when it cannot be read."""
    try:
        registers = config.read_bytes()
    except OSError:
        return None
    if len(registers) <= _FIRST_EXTENDED:
        return None
    at, seen = _FIRST_EXTENDED, set[int]()
    while at and at not in seen and at + 8 <= len(registers):
        seen.add(at)
        (header,) = struct.unpack_from("<I", registers, at)
        if header & 0xFFFF == _ACS:
            return int(struct.unpack_from("<H", registers, at + _ACS_CONTROL)[0])
        at = header >> 20
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
