"""What files of the kernel say of a machine made of files."""

from pathlib import Path

import pytest

from ckptfix.environment.facts.machine import Bus, PciGpu, Way, parse_bus, read_machine


@pytest.mark.parametrize(
    ("words", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 24 19:31:43 UTC 2024",
            "535.161.08",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build", "570.86.15"),
        ("something else", ""),
    ],
)
def test_the_driver_by_its_own_words(tmp_path: Path, words: str, version: str) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(f"{words}\nGCC version: gcc version 12.3.0\n")
    assert read_machine(Bus(), tmp_path).driver == version


def test_the_rest_of_a_machine(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("root=/dev/sda intel_iommu=on iommu=pt quiet\n")
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nflags\t\t: fpu vme hypervisor lahf_lm\n")
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia/version").write_text("560.35.03\n")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    machine = read_machine(Bus(), tmp_path)
    assert machine.boot_options("intel_iommu", "iommu") == ("intel_iommu=on", "iommu=pt")
    assert (machine.is_virtual, machine.driver, machine.device_nodes) == (True, "560.35.03", 2)


def test_an_empty_machine_is_no_error(tmp_path: Path) -> None:
    machine = read_machine(Bus(), tmp_path)
    assert (machine.driver, machine.command_line, machine.is_virtual, machine.device_nodes) == (
        "",
        "",
        False,
        0,
    )


def test_the_bus_as_it_is_handed_over() -> None:
    assert parse_bus({}) == Bus()
    said = {
        "gpus": [{"address": "0000:01:00.0", "vendor": "AMD", "name": "", "iommu": "DMA-FQ"}],
        "redirecting": ["0000:00:01.0"],
        "hidden": [],
        "between": [["0000:01:00.0", "0000:02:00.0", "PHB", "the CPU"]],
    }
    found = parse_bus(said)
    assert found.gpus == (PciGpu(address="0000:01:00.0", vendor="AMD", iommu="DMA-FQ"),)
    assert found.gpus[0].is_translated
    assert str(found.gpus[0]) == "AMD GPU at 0000:01:00.0"
    ends = frozenset(("0000:01:00.0", "0000:02:00.0"))
    assert found.ways == (Way(ends=ends, name="PHB", meaning="the CPU"),)
