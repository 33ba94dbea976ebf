"""Hints from a file system and tables that were made up for it. No device is needed."""

import os
import struct
import sys
from pathlib import Path

import pytest

from ckptfix.devices.probe import measuring as hinting
from ckptfix.devices.probe.measuring import hints
from ckptfix.hardware import Distance, distance, parse_topology, read_device, redirecting_bridges

TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV4\tSYS\tPHB\t0-15\t0
GPU1\tNV4\t X \tSYS\tPHB\t0-15\t0
GPU2\tSYS\tSYS\t X \tSYS\t16-31\t1
NIC0\tPHB\tPHB\tSYS\t X

Legend:

  X    = Self
"""


class Host:
    """A made-up /sys and /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/bus/pci/devices").mkdir(parents=True)
        (root / "proc/driver/nvidia").mkdir(parents=True)

    def device(self, path: str, *, iommu: str = "", node: int = 0, acs: int | None = None) -> None:
        """Make a device and the bridges above it: "pci0000:00/0000:00:01.0/0000:01:00.0"."""
        folder = self.root / "sys/devices" / path
        folder.mkdir(parents=True)
        parts = path.split("/")
        for depth, address in enumerate(parts[1:], start=2):
            link = self.root / "sys/bus/pci/devices" / address
            target = self.root / "sys/devices" / "/".join(parts[:depth])
            if not link.exists():
                link.symlink_to(target)
            if depth < len(parts) and acs is not None:
                (target / "config").write_bytes(registers(acs))
        (folder / "numa_node").write_text(f"{node}\n")
        if iommu:
            (folder / "iommu_group").mkdir()
            (folder / "iommu_group/type").write_text(iommu + "\n")


def registers(control: int) -> bytes:
    """A bridge's extended configuration space with another capability before ACS."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)
    struct.pack_into("<IHH", space, 0x148, 0x000D | 1 << 16, 0x1F, control)
    return bytes(space)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")  # for an nvidia-smi of the test
    return Host(tmp_path)


ONE, TWO = "0000:01:00.0", "0000:02:00.0"
BOTH = frozenset({(0, 1), (1, 0)})


def test_nothing_known_gives_nothing_and_no_error(host: Host) -> None:
    assert hints((ONE, ""), BOTH, {}, host.root) == ()
    assert hints(("../../etc", "x"), BOTH, {}, host.root) == ()
    assert hints((), BOTH, {}, host.root / "missing") == ()


def test_no_suspect_no_hint(host: Host) -> None:
    host.device(f"pci0000:00/0000:00:01.0/{ONE}", iommu="DMA-FQ")
    assert hints((ONE, TWO), frozenset(), {}, host.root) == ()


@pytest.mark.parametrize(
    ("kind", "told"), [("DMA", True), ("DMA-FQ", True), ("identity", False), ("", False)]
)
def test_an_iommu_is_named_only_where_it_translates(host: Host, kind: str, told: bool) -> None:
    host.device(f"pci0000:00/0000:00:01.0/{ONE}", iommu=kind)
    found = read_device(ONE, host.root)
    assert found is not None
    assert found.is_translated is told
    text = "\n".join(hints((ONE, ""), BOTH, {}, host.root))
    assert (f"devices 0 ({ONE})" in text) is told
    assert ("iommu=pt" in text) is told


@pytest.mark.parametrize(
    ("control", "bridges"), [(0x1D, ("0000:00:01.0",)), (0x04, ("0000:00:01.0",)), (0x11, ())]
)
def test_access_control_that_redirects_is_read_from_the_bridge(
    host: Host, control: int, bridges: tuple[str, ...]
) -> None:
    host.device(f"pci0000:00/0000:00:01.0/{ONE}", acs=control)
    found = read_device(ONE, host.root)
    assert found is not None
    assert redirecting_bridges(found, host.root) == bridges
    text = "\n".join(hints((ONE, ""), BOTH, {}, host.root))
    assert ("ACS) on PCIe bridges 0000:00:01.0" in text) is bool(bridges)


@pytest.mark.parametrize("config", [None, b"\0" * 64, b"\0" * 256])
def test_registers_for_root_only_are_said_to_be_so(host: Host, config: bytes | None) -> None:
    host.device(f"pci0000:00/0000:00:01.0/{ONE}")
    if config is not None:
        (host.root / "sys/devices/pci0000:00/0000:00:01.0/config").write_bytes(config)
    assert any("only root can read" in line for line in hints((ONE, ""), BOTH, {}, host.root))


@pytest.mark.parametrize("head", [0x0001 | 0x100 << 20, 0x0001 | 0xFFC << 20, 0xFFFFFFFF])
def test_registers_that_lead_in_a_circle_or_out_are_left(host: Host, head: int) -> None:
    host.device(f"pci0000:00/0000:00:01.0/{ONE}")
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, head)
    (host.root / "sys/devices/pci0000:00/0000:00:01.0/config").write_bytes(space)
    found = read_device(ONE, host.root)
    assert found is not None
    assert redirecting_bridges(found, host.root) == ()


ROOT = "pci0000:00/0000:00:01.0"
SWITCH = f"{ROOT}/0000:05:00.0/0000:06:00.0"


@pytest.mark.parametrize(
    ("one", "two", "node", "between"),
    [
        (f"{SWITCH}/{ONE}", f"{ROOT}/0000:05:00.0/0000:06:01.0/{TWO}", 0, Distance.PIX),
        (f"{SWITCH}/{ONE}", f"{ROOT}/0000:07:00.0/0000:08:00.0/{TWO}", 0, Distance.PXB),
        (f"{ROOT}/{ONE}", f"pci0000:00/0000:00:02.0/{TWO}", 0, Distance.PHB),
        (f"{ROOT}/{ONE}", f"pci0000:40/0000:40:01.0/{TWO}", 0, Distance.NODE),
        (f"{ROOT}/{ONE}", f"pci0000:40/0000:40:01.0/{TWO}", 1, Distance.SYS),
    ],
    ids=["PIX", "PXB", "PHB", "NODE", "SYS"],
)
def test_distance_is_read_from_the_tree(
    host: Host, one: str, two: str, node: int, between: Distance
) -> None:
    host.device(one)
    host.device(two, node=node)
    ends = (one.rpartition("/")[2], two.rpartition("/")[2])
    first, second = (read_device(address, host.root) for address in ends)
    assert first is not None
    assert second is not None
    assert distance(first, second) is distance(second, first) is between
    text = "\n".join(hints(ends, BOTH, {}, host.root))
    assert (f"({between.name})" in text) is (between in (Distance.PHB, Distance.NODE, Distance.SYS))


def test_driver_virtual_machine_and_missing_peer_access_are_named(host: Host) -> None:
    (host.root / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  565.57.01  Release Build\nGCC "
        "version: x\n"
    )
    (host.root / "proc/cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu vme hypervisor sse\n")
    text = "\n".join(hints(("", ""), BOTH, {(0, 1): False, (1, 0): True}, host.root))
    assert "driver NVIDIA UNIX Open Kernel Module for x86_64 565.57.01" in text
    assert "virtual machine" in text
    assert "no peer access for 0 -> 1:" in text


def test_the_table_of_nvidia_smi_is_read_by_address() -> None:
    links = parse_topology(TOPOLOGY, {"0": ONE, "1": TWO, "2": "0000:41:00.0"})
    assert links[frozenset((ONE, TWO))] == "NV4"
    assert links[frozenset((ONE, "0000:41:00.0"))] == "SYS"
    assert len(links) == 3
    assert parse_topology("", {}) == parse_topology("No devices were found", {"0": ONE}) == {}


def test_nvlink_takes_the_blame_from_the_bus(host: Host) -> None:
    tool = host.root / "nvidia-smi"
    tool.write_text(
        f"#!{sys.executable}\nimport sys\nprint({TOPOLOGY!r} if 'topo' in sys.argv else '0, "
        "00000000:01:00.0\\n1, 00000000:02:00.0')\n"
    )
    tool.chmod(0o755)
    host.device(f"pci0000:00/0000:00:01.0/{ONE}")
    host.device(f"pci0000:00/0000:00:02.0/{TWO}")
    text = "\n".join(hints((ONE, TWO), BOTH, {}, host.root))
    assert "linked by NVLink (NV4)" in text
    assert "PHB" not in text


@pytest.mark.parametrize("script", ["exit 9", "sleep 60", "printf '\\377\\376'"])
def test_a_tool_that_fails_hangs_or_babbles_is_left_alone(
    host: Host, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    tool = host.root / "nvidia-smi"
    tool.write_text(
        f"#!/bin/sh\nexec {script}\n" if script.startswith("sleep") else f"#!/bin/sh\n{script}\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(hinting, "_PATIENCE", 0.3)
    host.device(f"pci0000:00/0000:00:01.0/{ONE}")
    host.device(f"pci0000:00/0000:00:02.0/{TWO}")
    assert "PHB" in "\n".join(hints((ONE, TWO), BOTH, {}, host.root))
