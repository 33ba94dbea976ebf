"""Machines made of files: GPUs on the PCI bus, driver, NVLink as ``nvidia-smi`` has it; commands
with a time limit.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptfix.hardware import (
    Bus,
    Child,
    ChildEnded,
    Distance,
    nvlinks,
    read_bus,
    read_machine,
    run_limited,
)

HOST = "sys/devices/pci0000:00"
SWITCH = f"{HOST}/0000:00:01.0/0000:01:00.0"


def bridge(control: int | None) -> bytes:
    """The configuration space of a bridge: an AER capability, then ACS where a control register is
    given.
    """
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
    gpus = read_bus(root).gpus
    assert [(gpu.address, gpu.vendor, gpu.name, gpu.iommu) for gpu in gpus] == [
        ("0000:03:00.0", "NVIDIA", "NVIDIA L4", ""),
        ("0000:04:00.0", "NVIDIA", "", ""),
        ("0000:05:00.0", "AMD", "", "DMA-FQ"),
    ]
    assert [gpu.is_translated for gpu in gpus] == [False, False, True]
    assert [str(gpu) for gpu in gpus[::2]] == [
        "NVIDIA L4 at 0000:03:00.0",
        "AMD GPU at 0000:05:00.0",
    ]


def test_what_lies_between_and_who_redirects(root: Path) -> None:
    found = read_bus(root)
    assert found.distances == {
        frozenset(("0000:03:00.0", "0000:04:00.0")): Distance.PIX,
        frozenset(("0000:03:00.0", "0000:05:00.0")): Distance.PHB,
        frozenset(("0000:04:00.0", "0000:05:00.0")): Distance.PHB,
    }
    assert found.redirecting == ("0000:00:01.0",)
    assert found.hidden == ("0000:05:00.0",), (
        "the port above it shows its first 64 bytes only, as to a user"
    )


def test_a_machine_without_a_bus(tmp_path: Path) -> None:
    assert read_bus(tmp_path) == Bus()


TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X "
    "\tNV12\tSYS\tPIX\t0-31\t0\t\tN/A\nGPU1\tNV12\t X "
    "\tSYS\tSYS\t0-31\t0\t\tN/A\nGPU2\tSYS\tSYS\t X \tSYS\t32-63\t1\t\tN/A\nNIC0\tPIX\tSYS\tSYS\t "
    "X \t\t\t\t\n\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the "
    "SMP interconnect\n"
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
    assert nvlinks() == {frozenset(("0000:01:00.0", "0000:41:00.0")): "NV12"}
    (tmp_path / "numbers").write_text("0, 00010000:01:00.0\n1, 0000ABCD:41:00.0\n")
    assert nvlinks() == {frozenset(("10000:01:00.0", "abcd:41:00.0")): "NV12"}, (
        "as sysfs writes domains"
    )


@pytest.mark.parametrize(
    "text", ["exit 9", "kill -SEGV $$", "echo NVIDIA-SMI has failed >&2; exit 255"]
)
def test_a_broken_nvidia_smi_is_no_answer(smi: Path, text: str) -> None:
    command(smi, text)
    assert nvlinks() is None


def test_an_nvidia_smi_that_hangs_is_no_answer(smi: Path) -> None:
    command(smi, "sleep 600")
    assert nvlinks(0.3) is None


def test_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvlinks() is None


@pytest.mark.parametrize(
    ("words", "version"),
    [
        (
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 24 19:31:43 "
                "UTC 2024"
            ),
            "535.161.08",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build",
            "570.86.15",
        ),
        ("something else", ""),
    ],
)
def test_the_driver_by_its_own_words(tmp_path: Path, words: str, version: str) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        f"{words}\nGCC version: gcc version 12.3.0\n"
    )
    assert read_machine(tmp_path).driver == version


def test_the_rest_of_a_machine(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("root=/dev/sda intel_iommu=on iommu=pt quiet\n")
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nflags\t\t: fpu vme hypervisor lahf_lm\n")
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia/version").write_text("560.35.03\n")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    machine = read_machine(tmp_path)
    assert machine.boot_options("intel_iommu", "iommu") == ("intel_iommu=on", "iommu=pt")
    assert (machine.is_virtual, machine.driver, machine.device_nodes) == (True, "560.35.03", 2)


def test_an_empty_machine_is_no_error(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert (machine.driver, machine.command_line, machine.is_virtual, machine.device_nodes) == (
        "",
        "",
        False,
        0,
    )


@pytest.mark.slow
def test_a_limit_holds_for_a_process_that_ignores_it(tmp_path: Path) -> None:
    command = f"trap '' TERM INT; echo begun; sleep 60 & sleep 60; touch {tmp_path}/late"
    ended = run_limited(("sh", "-c", command), 3.0)
    assert (ended.status, ended.out, ended.problem) == (
        None,
        "begun\n",
        "no answer in 3 s, so it was killed",
    )
    assert not (tmp_path / "late").exists(), "nobody ended it"


@pytest.mark.slow
def test_all_that_a_command_started_is_killed(tmp_path: Path) -> None:
    run_limited(("sh", "-c", f"sleep 600 & echo $! > {tmp_path}/child; wait"), 1.0)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.05)
    assert not _runs(child)


@pytest.mark.slow
def test_a_grandchild_that_keeps_the_output_open_holds_nothing_up(tmp_path: Path) -> None:
    program = (
        f"import subprocess; subprocess.Popen(['sh', '-c', 'sleep 30; touch {tmp_path}/late']); "
        "print(1)"
    )
    ended = run_limited((sys.executable, "-c", program), 600.0)
    assert (ended.status, ended.out, ended.problem) == (0, "1\n", "")
    assert not (tmp_path / "late").exists(), "it waited for the grandchild"


@pytest.mark.slow
def test_long_output_is_cut_from_the_front() -> None:
    ended = run_limited((sys.executable, "-c", "print('x' * 3_000_000 + 'end')"), 60.0)
    assert len(ended.out) == 1 << 20
    assert ended.out.endswith("end\n")


@pytest.mark.slow
def test_a_command_that_is_not_there() -> None:
    with pytest.raises(OSError, match="no-such-command"):
        run_limited(("no-such-command",), 1.0)


def _runs(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


ANSWERS = """
import os, sys, time
count = 0
for line in sys.stdin:
    count += 1
    word = line.strip()
    if word == "die" or (word == "die later" and count > 1):
        os._exit(7)
    if word == "abort":
        sys.stderr.write("out of memory\\n")
        sys.exit(5)
    if word == "sleep":
        time.sleep(60)
    print(f"{count} {word}", flush=True)
"""


def test_a_child_answers_and_is_started_again() -> None:
    child = Child((sys.executable, "-c", ANSWERS), 2.0, os.environ)
    assert child.ask(b"one") == b"1 one\n"
    assert child.ask(b"two") == b"2 two\n"
    # What the questions before have cost it may be why: a new one answers.
    assert child.ask(b"die later") == b"1 die later\n"
    for word, why in (
        ("die", "status 7"),
        ("abort", "out of memory"),
        ("sleep", "no answer in 2 s"),
    ):
        with pytest.raises(ChildEnded, match=why):
            child.ask(word.encode())
    assert child.ask(b"three") == b"1 three\n"
    child.close()
    child.close()


PARENT = """
import os, sys
from ckptfix.hardware import Child
busy = '''
import os, sys
from ckptfix.hardware import end_with_parent
end_with_parent()
sys.stdin.readline()
print(os.getpid(), os.getcwd(), os.environ["TMPDIR"], flush=True)
sys.stdin.readline()
while True:
    pass
'''
child = Child((sys.executable, "-c", busy), 60.0, os.environ)
print(child.ask(b"where").decode(), flush=True)
child.ask(b"spin")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_with_its_parent(number: signal.Signals) -> None:
    """It computes on with no limit of time otherwise, and its folder stays."""
    with subprocess.Popen(
        (sys.executable, "-c", PARENT), stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child, folder, temporary = parent.stdout.readline().split()
        assert folder == temporary != os.getcwd()
        parent.send_signal(number)
    end = time.monotonic() + 20
    while _runs(int(child)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _runs(int(child))
    assert not Path(folder).exists()


def test_the_folder_of_a_child_that_was_late() -> None:
    script = "import os, sys, time; print(os.getcwd(), flush=True); time.sleep(60)"
    child = Child((sys.executable, "-c", script), 2.0, os.environ)
    folder = child.ask(b"where").decode().strip()
    assert Path(folder).is_dir()
    with pytest.raises(ChildEnded):
        child.ask(b"again")
    assert not Path(folder).exists()
    child.close()
