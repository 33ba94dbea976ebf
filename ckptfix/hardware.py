"""Devices of this machine as its kernel and drivers report them, without torch; commands with a
time limit.

Addresses are sysfs's: ``0000:65:00.0``. Where a file is missing or may not be read, the answer is
"not known": None, or empty. ``root`` is the root of the file system, another one for tests.
"""

import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import combinations, takewhile
from pathlib import Path
from threading import Event, Lock, Thread, Timer
from typing import IO

from msgspec import Struct, field

Pair = tuple[int, int]
"""(index of the source device, index of the destination device) of the current accelerator."""

_ROOT = Path("/")
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
# PCI class codes: VGA, 3D and other display controllers, processing accelerators. AMD's VGA ones
# may be a CPU's own.
_GPU_CLASSES = {"NVIDIA": ("0x0300", "0x0302"), "AMD": ("0x0302", "0x0380", "0x1200")}

# Linux include/uapi/linux/pci_regs.h: PCI_EXT_CAP_ID_ACS, PCI_ACS_CTRL, PCI_ACS_RR | PCI_ACS_CR.
_FIRST_EXTENDED = 0x100
_ACS, _ACS_CONTROL, _REDIRECTS = 0x0D, 6, 0x04 | 0x08

_SMI_PATIENCE = 20.0
"""Seconds for nvidia-smi, which is slow without persistence mode and hangs when the driver does."""

_AFTER_KILL = 5.0  # seconds
_AT_END = 0.2  # seconds
_MAX_OUTPUT = 1 << 20


class Distance(Enum):
    """The connection between two devices, in the words of ``nvidia-smi topo -m``."""

    PIX = "at most one PCIe bridge"
    PXB = "several PCIe bridges, but no host bridge"
    PHB = "the PCIe host bridge, which is the CPU"
    NODE = "the interconnect between host bridges within a NUMA node"
    SYS = "the interconnect between NUMA nodes"

    @property
    def passes_the_cpu(self) -> bool:
        """True if P2P copies over it go through the CPU: they break there most."""
        return self in (Distance.PHB, Distance.NODE, Distance.SYS)


class PciDevice(Struct, frozen=True, kw_only=True):
    """A device on the PCI bus.

    ``path``: addresses from the root port down to it; ``bridge``: the host bridge; ``node``: of
    NUMA. ``iommu``: the type of its IOMMU group. ``vendor`` and ``name``: of a GPU; the name is ""
    without NVIDIA's driver.
    """

    address: str
    bridge: str = ""
    path: tuple[str, ...] = ()
    node: int | None = None
    iommu: str = ""
    vendor: str = ""
    name: str = ""

    @property
    def is_translated(self) -> bool:
        """True if an IOMMU translates the device's addresses; with ``iommu=pt`` the type is
        ``identity`` instead.
        """
        return self.iommu.startswith("DMA")

    def __str__(self) -> str:
        return f"{self.name or self.vendor + ' GPU'} at {self.address}"


class Bus(Struct, frozen=True, kw_only=True):
    """The GPUs on the PCI bus of this machine, known to torch and a driver or not.

    ``redirecting``: bridges whose access control (ACS) sends peer traffic up to the CPU.
    ``hidden``: addresses of GPUs above which only root may read that. ``distances``: by the two
    addresses. ``linked``: pairs of addresses that NVLink connects, None when nobody could say.
    """

    gpus: tuple[PciDevice, ...] = ()
    redirecting: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    distances: Mapping[frozenset[str], Distance] = field(default_factory=dict)
    linked: frozenset[frozenset[str]] | None = None


class Machine(Struct, frozen=True, kw_only=True):
    """A machine beneath torch, by its kernel's files.

    ``command_line``: what the kernel was booted with. ``driver``: the version of NVIDIA's kernel
    module, "" without it. ``device_nodes``: how many ``/dev/nvidia<N>`` there are. ``is_virtual``:
    a hypervisor runs it, so the settings of the host's IOMMU and bridges do not show.
    """

    bus: Bus = field(default_factory=Bus)
    command_line: str = ""
    driver: str = ""
    device_nodes: int = 0
    is_virtual: bool = False

    def boot_options(self, *names: str) -> tuple[str, ...]:
        """Return the options of the kernel's command line with one of these names, verbatim."""
        return tuple(word for word in self.command_line.split() if word.partition("=")[0] in names)


def read_machine(root: Path = _ROOT) -> Machine:
    """Return what the kernel says of this machine and of the GPUs on its bus."""
    return Machine(
        bus=read_bus(root),
        command_line=read_text(root / "proc/cmdline"),
        driver=read_driver(root),
        device_nodes=sum(
            1 for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", path.name)
        ),
        is_virtual=is_virtual(root),
    )


def is_virtual(root: Path = _ROOT) -> bool:
    """Return whether a hypervisor runs this machine."""
    return bool(
        re.search(r"^flags\s*:.*\bhypervisor\b", read_text(root / "proc/cpuinfo"), re.MULTILINE)
    )


def read_driver(root: Path = _ROOT) -> str:
    """Return the version of NVIDIA's kernel module; "" without it."""
    version = read_text(root / "sys/module/nvidia/version")
    if not version:
        said = read_text(root / "proc/driver/nvidia/version")
        found = re.search(r"Kernel Module\D*?(?:for \S+)?\s+([0-9]+(?:\.[0-9]+)+)", said)
        version = found[1] if found else ""
    return version


def read_bus(root: Path = _ROOT) -> Bus:
    """Return the GPUs on the PCI bus and what lies between them."""
    try:
        entries = sorted((root / "sys/bus/pci/devices").iterdir())
    except OSError:  # no PCI bus, or a sandbox that hides it
        return Bus()
    found = [read_device(entry.name, root) for entry in entries if _is_gpu(entry)]
    gpus = tuple(device for device in found if device is not None)
    above = {gpu.address: redirecting_bridges(gpu, root) for gpu in gpus}
    between = {
        frozenset((one.address, two.address)): distance(one, two)
        for one, two in combinations(gpus, 2)
    }
    links = nvlinks() if len(gpus) > 1 else None
    return Bus(
        gpus=gpus,
        redirecting=tuple(
            sorted({bridge for bridges in above.values() for bridge in bridges or ()})
        ),
        hidden=tuple(address for address, bridges in above.items() if bridges is None),
        distances={ends: found for ends, found in between.items() if found is not None},
        linked=None if links is None else frozenset(links),
    )


def read_device(address: str, root: Path = _ROOT) -> PciDevice | None:
    """Return what sysfs says of a device, or None when it has no such device."""
    link = root / "sys/bus/pci/devices" / address
    if not _ADDRESS.fullmatch(address) or not link.exists():
        return None
    parts = link.resolve().parts
    node = read_text(link / "numa_node")
    model = re.search(
        r"^Model:(.*)",
        read_text(root / "proc/driver/nvidia/gpus" / address / "information"),
        re.MULTILINE,
    )
    return PciDevice(
        address=address,
        bridge=next(
            (part for part in parts if re.fullmatch(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", part)), ""
        ),
        path=tuple(part for part in parts if _ADDRESS.fullmatch(part)),
        node=int(node) if node.isdecimal() else None,
        iommu=read_text(link / "iommu_group/type"),
        vendor=_VENDORS.get(read_text(link / "vendor"), ""),
        name=model[1].strip() if model else "",
    )


def _is_gpu(entry: Path) -> bool:
    vendor = _VENDORS.get(read_text(entry / "vendor"))
    return vendor is not None and read_text(entry / "class")[:6] in _GPU_CLASSES[vendor]


def distance(one: PciDevice, other: PciDevice) -> Distance | None:
    """Return what lies between two devices; None when sysfs does not say."""
    if not one.bridge or not other.bridge:
        return None
    if one.bridge != other.bridge:
        return Distance.NODE if one.node is not None and one.node == other.node else Distance.SYS
    shared = len(
        list(takewhile(lambda pair: pair[0] == pair[1], zip(one.path, other.path, strict=False)))
    )
    if not shared:
        return Distance.PHB
    crossed = len(one.path) + len(other.path) - 2 * shared - 2
    return Distance.PIX if crossed <= 2 else Distance.PXB


def redirecting_bridges(device: PciDevice, root: Path = _ROOT) -> tuple[str, ...] | None:
    """Return the bridges above a device whose access control sends peer traffic up to the CPU.

    None when the kernel does not show all of their registers, which it does for root only.
    """
    found = []
    for address in device.path[:-1]:
        control = _access_control(root / "sys/bus/pci/devices" / address / "config")
        if control is None:
            return None
        found += [address] if control & _REDIRECTS else []
    return tuple(found)


def _access_control(config: Path) -> int | None:
    """Return the ACS control register of a bridge, 0 when it has none, None when it cannot be
    read.
    """
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


def nvlinks(patience: float = _SMI_PATIENCE) -> dict[frozenset[str], str] | None:
    """Return the pairs of PCI addresses that NVLink connects, with its kind ("NV4"); None when
    nobody can say.

    ``nvidia-smi`` numbers devices as the driver does, and torch may number them otherwise: hence
    addresses.
    """
    try:
        listed = run_limited(
            ("nvidia-smi", "--query-gpu=index,pci.bus_id", "--format=csv,noheader"), patience
        )
        matrix = run_limited(("nvidia-smi", "topo", "-m"), patience)
    except OSError:
        return None
    if listed.problem or matrix.problem:
        return None
    # The domain has eight digits there, and as few as four in sysfs.
    addresses = re.findall(
        r"^(\d+), 0*([0-9A-Fa-f]{4,}:[0-9A-Fa-f:.]+)\s*$", listed.out, re.MULTILINE
    )
    cells = parse_topology(matrix.out, {index: address.lower() for index, address in addresses})
    return {ends: cell for ends, cell in cells.items() if cell.startswith("NV")}


def parse_topology(text: str, addresses: Mapping[str, str]) -> dict[frozenset[str], str]:
    """Return the cells of the matrix that ``nvidia-smi topo -m`` prints, by the addresses of two
    GPU numbers.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    columns = next((line for line in lines if line[:1] == ["GPU0"] and "X" not in line), [])
    cells = {}
    for row in lines:
        if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row:
            for column, cell in zip(columns, row[1:], strict=False):
                ends = [addresses.get(name.removeprefix("GPU")) for name in (row[0], column)]
                if column.startswith("GPU") and cell != "X" and None not in ends:
                    cells[frozenset(map(str, ends))] = cell
    return cells


def read_text(path: Path) -> str:
    """Return the text of a small file of the kernel, "" when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def command_of(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that calls ``main`` of a module in another process.

    It imports what this process would: ``-m`` puts the current folder first, and a checkpoint may
    hold a torch.py.
    """
    end = len(arguments) + 1
    begin = (
        f"import sys; sys.path[:] = sys.argv[{end}:]; from {module} import main; "
        f"main(*sys.argv[1:{end}])"
    )
    return (sys.executable, "-c", begin, *arguments, *sys.path)


class Ended(Struct, frozen=True, kw_only=True):
    """A command that ended. ``status``: its exit status, negative for a signal, None when it had to
    be killed.

    ``limit``: the seconds that it had. ``out`` and ``err``: what it wrote, the last MiB of each.
    """

    status: int | None
    limit: float
    out: str
    err: str

    @property
    def problem(self) -> str:
        """The reason not to trust its output, "" when it ended well."""
        if self.status is None:
            return f"no answer in {self.limit:g} s, so it was killed"
        if self.status < 0:
            with suppress(ValueError):
                return f"it was killed by {signal.Signals(-self.status).name}"
            return f"it was killed by signal {-self.status}"
        if self.status:
            last = next((line for line in reversed(self.err.splitlines()) if line.strip()), "")
            return f"it exited with status {self.status}: {last.strip()[:300]}".removesuffix(": ")
        return ""


def run_limited(command: Sequence[str], seconds: float) -> Ended:
    """Run a command for at most ``seconds``; then kill it, and all that it started.

    ``subprocess.run(timeout=...)`` waits for the end of what it killed: a process that is stuck in
    a driver does not end, and a grandchild can keep a pipe open. Here output goes to files, and
    nothing waits long after a kill. Raises OSError when it cannot be started.
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
                _kill(process)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_AFTER_KILL)
        return Ended(status=status, limit=seconds, out=_tail(out.fileno()), err=_tail(err.fileno()))


class ChildEnded(Exception):
    """A child gave no answer; the message says why. ``is_late``: it was killed."""

    def __init__(self, why: str, *, is_late: bool) -> None:
        super().__init__(why)
        self.is_late = is_late


class Child:
    """A process of our own that answers lines with lines, for as long as questions come.

    It starts with the first one: the import of torch and transformers takes 5 s, an answer 0.1 s.
    Several threads may ask; each waits for those before it. A process that does not answer in time
    is killed, and the next question starts another one. ``seconds``: for an answer.

    The current folder of the process, and its folder for temporary files, is one of its own. It is
    removed with the process: by this class, or by ``end_with_parent`` in the process.
    """

    def __init__(
        self, command: Sequence[str], seconds: float, environment: Mapping[str, str]
    ) -> None:
        self._command, self._seconds, self._environment = command, seconds, environment
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._folder = ""

    def ask(self, question: bytes) -> bytes:
        """Return the line that answers a line. Raises ChildEnded where none comes, OSError where no
        process starts.
        """
        with self._lock:
            has_answered = self._process is not None
            try:
                return self._ask(question)
            except ChildEnded as error:
                # What it kept of the questions before may have taken its memory.
                if not has_answered or error.is_late:
                    raise
                return self._ask(question)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end(is_late=True)

    def _ask(self, question: bytes) -> bytes:
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            self._folder = tempfile.mkdtemp(prefix="ckptfix-")
            try:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=self._errors, cwd=self._folder,
                    env={**self._environment, "TMPDIR": self._folder}, start_new_session=True,
                )  # fmt: skip
            except OSError:
                shutil.rmtree(self._folder, ignore_errors=True)
                raise
        process, late = self._process, Event()

        def stop() -> None:
            late.set()
            _kill(process)

        timer = Timer(self._seconds, stop)
        timer.start()
        answer = b""
        ended: Ended | None = None
        try:
            with suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.write(question + b"\n")
                process.stdin.flush()
            assert process.stdout is not None
            answer = process.stdout.readline()
        finally:
            timer.cancel()
            if not answer.endswith(b"\n"):
                ended = self._end(is_late=late.is_set())
        if ended is not None:
            raise ChildEnded(ended.problem or "it exited early", is_late=late.is_set())
        return answer

    def _end(self, *, is_late: bool = False) -> Ended | None:
        """End the process, and return how it ended where it had done so before. ``is_late``: it was
        killed.
        """
        process, errors = self._process, self._errors
        self._process = self._errors = None
        if process is None or errors is None:
            return None
        # One that closed its pipe is about to end: its own status says why.
        with suppress(subprocess.TimeoutExpired):
            process.wait(0 if is_late else _AT_END)
        _kill(process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_AFTER_KILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        said = _tail(errors.fileno())
        for pipe in (process.stdin, process.stdout, errors):
            with suppress(OSError):  # what was not written when it ended
                if pipe is not None:
                    pipe.close()
        status = None if is_late else process.returncode
        return Ended(status=status, limit=self._seconds, out="", err=said)


def end_with_parent() -> None:
    """End this process, the one of a ``Child``, when its parent ends, and remove its folder. Call
    it before all else.

    The parent holds the other end of the standard input. PR_SET_PDEATHSIG tells of the end of a
    thread of the parent, and a check of several checkpoints asks in threads that end before it.
    """
    folder, parent, hang_up = os.getcwd(), os.getppid(), select.poll()
    hang_up.register(0, 0)

    def wait() -> None:
        while os.getppid() == parent and not hang_up.poll(1000):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _tail(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, _MAX_OUTPUT, max(size - _MAX_OUTPUT, 0)).decode("utf-8", "replace")
