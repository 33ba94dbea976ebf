"""The GPUs on the PCI bus of machines made of files; what ``nvidia-smi`` says of their links, in its own words."""

import os
from pathlib import Path

import pytest

from ckptfix.devices.probe.hints import graphics, linked

HOST = "sys/devices/pci0000:00"
SWITCH = f"{HOST}/0000:00:01.0/0000:01:00.0"


def bridge(control: int | None) -> bytes:
    """The configuration space of a bridge: an AER capability, then ACS where a control register is given."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | (0x148 if control is not None else 0) << 20).to_bytes(
        4, "little"
    )
    if control is not None:
        space[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
        space[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(space)


def add(root: Path, place: str, vendor: str, kind: str, space: bytes = b"", **files: str) -> None:
    folder = root / place
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"vendor": vendor, "class": kind, **files}.items():
        (folder / name).write_text(f"{text}\n")
    (folder / "config").write_bytes(space)
    link = root / "sys/bus/pci/devices" / folder.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(folder, link.parent))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two GPUs behind one switch, a third on a port of its own, and what is no GPU for training."""
    add(tmp_path, f"{HOST}/0000:00:01.0", "0x8086", "0x060400", bridge(0x1D))
    add(tmp_path, SWITCH, "0x10b5", "0x060400", bridge(None))
    for slot, bus in (("0000:02:08.0", "03"), ("0000:02:10.0", "04")):
        add(tmp_path, f"{SWITCH}/{slot}", "0x10b5", "0x060400", bridge(0x01))
        add(tmp_path, f"{SWITCH}/{slot}/0000:{bus}:00.0", "0x10de", "0x030000", numa_node="0")
    add(tmp_path, f"{HOST}/0000:00:03.0", "0x8086", "0x060400", bridge(None)[:64])
    add(tmp_path, f"{HOST}/0000:00:03.0/0000:05:00.0", "0x1002", "0x038000", numa_node="-1")
    add(tmp_path, f"{HOST}/0000:00:1f.3", "0x10de", "0x040300")  # the sound of a GPU
    add(tmp_path, f"{HOST}/0000:00:02.0", "0x1a03", "0x030000")  # the picture of a server
    add(tmp_path, f"{HOST}/0000:00:08.0", "0x1002", "0x030000")  # the picture of a CPU
    (tmp_path / "sys/kernel/iommu_groups/7").mkdir(parents=True)
    (tmp_path / "sys/kernel/iommu_groups/7/type").write_text("DMA-FQ\n")
    (tmp_path / HOST / "0000:00:03.0/0000:05:00.0/iommu_group").symlink_to(
        tmp_path / "sys/kernel/iommu_groups/7"
    )
    (tmp_path / "proc/driver/nvidia/gpus/0000:03:00.0").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/gpus/0000:03:00.0/information").write_text(
        "Model: \t\t NVIDIA L4\nIRQ: 1\n"
    )
    return tmp_path


def test_gpus_and_no_others(root: Path) -> None:
    found = graphics(root)
    assert [tuple(gpu.values()) for gpu in found["gpus"]] == [
        ("0000:03:00.0", "NVIDIA", "NVIDIA L4", ""),
        ("0000:04:00.0", "NVIDIA", "", ""),
        ("0000:05:00.0", "AMD", "", "DMA-FQ"),
    ]


def test_what_lies_between_and_who_redirects(root: Path) -> None:
    found = graphics(root)
    assert [entry[:3] for entry in found["between"]] == [
        ["0000:03:00.0", "0000:04:00.0", "PIX"],
        ["0000:03:00.0", "0000:05:00.0", "PHB"],
        ["0000:04:00.0", "0000:05:00.0", "PHB"],
    ]
    assert found["redirecting"] == ["0000:00:01.0"]
    assert found["hidden"] == ["0000:05:00.0"], (
        "the port above it shows its first 64 bytes only, as to a user"
    )


def test_a_machine_without_a_bus(tmp_path: Path) -> None:
    assert graphics(tmp_path) == {"gpus": [], "redirecting": [], "hidden": [], "between": []}


TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV12\tSYS\tPIX\t0-31\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tSYS\tSYS\t0-31\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t\n\n"
    "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
)
NUMBERS = "0, 00000000:01:00.0\n1, 00000000:41:00.0\n2, 00000000:C1:00.0\n"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the PATH for a made ``nvidia-smi``."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "nvidia-smi"


def command(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_nvlink_by_addresses(smi: Path, tmp_path: Path) -> None:
    (tmp_path / "topology").write_text(TOPOLOGY)
    (tmp_path / "numbers").write_text(NUMBERS)
    command(smi, f'case "$1" in topo) cat {tmp_path}/topology;; *) cat {tmp_path}/numbers;; esac')
    assert linked() == [["0000:01:00.0", "0000:41:00.0"]]


@pytest.mark.parametrize("text", ["exit 9", "kill -SEGV $$", "echo NVIDIA-SMI has failed >&2; exit 255"])
def test_a_broken_nvidia_smi_is_no_answer(smi: Path, text: str) -> None:
    command(smi, text)
    assert linked() is None


def test_an_nvidia_smi_that_hangs_is_no_answer(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(smi, "sleep 600")
    monkeypatch.setattr("ckptfix.devices.probe.hints._SMI_PATIENCE", 0.3)
    assert linked() is None


def test_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert linked() is None
