"""One probe from beginning to end: the worker started, watched and ended, and its findings summed
up with hints.

A worker that hung, died or met an error gets no more tasks, as its devices may be lost to it: the
next task gets a new worker. A hint is a known cause of wrong copies that is present, never a proof.
An unreadable source gives no hint.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.devices.probe.cases import SAMPLE, Plan, exact_size, plan_for
from ckptfix.devices.probe.probe_report import (
    STRICTEST,
    PairReport,
    ProbeReport,
    Verdict,
    seconds_since_boot,
)
from ckptfix.devices.probe.schedule import Bench, Measurements, Schedule
from ckptfix.devices.probe.task import BAD_ENDINGS, Ending, Task, TaskResult
from ckptfix.devices.probe.worker import InProcess, blinded
from ckptfix.devices.torch_devices import Machine
from ckptfix.errors import OperationError
from ckptfix.hardware import (
    Pair,
    PciDevice,
    distance,
    is_virtual,
    nvlinks,
    read_device,
    read_driver,
    redirecting_bridges,
)
from ckptfix.wording import count_of

if TYPE_CHECKING:
    from ckptfix.hardware import Pair


_PATIENCE = 5.0
"""Seconds for nvidia-smi: whoever waits for a probe does not wait long for hints."""


def hints(
    addresses: Sequence[str],
    suspects: Collection["Pair"],
    peer_access: Mapping["Pair", bool | None],
    root: Path = Path("/"),
) -> tuple[str, ...]:
    """Return hints for pairs whose copies are not proven; none when there are no such pairs.

    ``addresses``: of the devices on the PCI bus by index, "" where not known. ``root``: of the file
    system, for tests.
    """
    if not suspects:
        return ()
    found = {index: read_device(address, root) for index, address in enumerate(addresses)}
    concerned = {index for pair in suspects for index in pair}
    devices = {
        index: device
        for index, device in found.items()
        if device is not None and index in concerned
    }
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
    through = [
        f"{index} ({device.address})" for index, device in devices.items() if device.is_translated
    ]
    if through:
        yield (
            f"an IOMMU translates the addresses of devices {', '.join(through)}: outside virtual "
            "machines, CUDA does not support P2P copies through an IOMMU (CUDA C++ Programming "
            "Guide, IOMMU on Linux). Boot with iommu=pt, or disable the IOMMU in the firmware "
            "(VT-d, AMD-Vi)"
        )


def _access_control(devices: Mapping[int, PciDevice], root: Path) -> Iterator[str]:
    answers = [redirecting_bridges(device, root) for device in devices.values()]
    bridges = sorted({bridge for answer in answers if answer for bridge in answer})
    if bridges:
        yield (
            f"access control (ACS) on PCIe bridges {', '.join(bridges)} routes copies between "
            "devices through the CPU. Disable ACS in the firmware, or with setpci on "
            "these bridges until the next boot"
        )
    elif None in answers:
        yield (
            "only root can read the access control (ACS) of the PCIe bridges: sudo lspci -vvv | "
            "grep ACSCtl"
        )


def _distances(devices: Mapping[int, PciDevice], suspects: Iterable["Pair"]) -> Iterator[str]:
    links = (nvlinks(_PATIENCE) if devices else None) or {}
    for one, other in sorted({(min(pair), max(pair)) for pair in suspects}):
        if one not in devices or other not in devices:
            continue
        link = links.get(frozenset((devices[one].address, devices[other].address)))
        if link is not None:
            yield f"{one} and {other} are linked by NVLink ({link}), not by the PCIe bus"
            continue
        between = distance(devices[one], devices[other])
        if between is not None and between.passes_the_cpu:
            yield (
                f"{one} and {other} are connected through {between.value} ({between.name}): not "
                "all boards support P2P copies over it"
            )


def _without_peer_access(
    suspects: Iterable["Pair"], peer_access: Mapping["Pair", bool | None]
) -> Iterator[str]:
    without = sorted(pair for pair in suspects if peer_access.get(pair) is False)
    if without:
        some = ", ".join(f"{source} -> {destination}" for source, destination in without)
        yield (
            f"the driver offers no peer access for {some}: the driver itself sends these copies "
            "through the host"
        )


def _driver(root: Path) -> Iterator[str]:
    if description := read_driver(root).description:
        yield (
            f"driver {description}: another version may work; wrong P2P copies were reported for "
            "several versions (github.com/NVIDIA/open-gpu-kernel-modules/issues/1257)"
        )


def _virtual(root: Path) -> Iterator[str]:
    if is_virtual(root):
        yield (
            "this is a virtual machine: the IOMMU and the access control of its host are not "
            "visible inside it"
        )


STARTING = 180.0
"""Seconds that a worker may take to import torch and to initialise the devices: some file systems
are slow.
"""

_BEGIN = (
    "import sys; sys.path[:] = sys.argv[1:]; from ckptfix.devices.probe.worker import main; main()"
)
# With the caller's own path: `-m` would put the current folder first, and a checkpoint may hold a
# torch.py.

_SHOWS_LESS = ("CUDA_LAUNCH_BLOCKING",)
"""Variables that make copies wait for each other, and so hide a late arrival."""


def worker_command() -> tuple[str, ...]:
    """Return the command that starts a worker with the modules of this process."""
    return (sys.executable, "-c", _BEGIN, *sys.path)


class Watched:
    """Does tasks in a worker. ``patience``: seconds of silence in a copy after which it counts as
    hanging.

    Between copies the host makes and compares bits, which on a busy machine takes long: there the
    patience is fourfold.
    """

    def __init__(self, patience: float, command: Sequence[str] | None = None) -> None:
        self.starting = 0.0
        """Seconds spent on starting workers so far."""
        self._patience = patience
        self._command = tuple(command) if command is not None else worker_command()
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._errors: IO[bytes] | None = None

    def machine(self) -> Machine:
        """Start a worker and return the devices that it sees. Raises OperationError when it does
        not start.
        """
        began = time.monotonic()
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker; see close
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={key: value for key, value in os.environ.items() if key not in _SHOWS_LESS},
                start_new_session=True,  # Ctrl-C is for us; we end it
            )
        except OSError as error:
            self.close()
            raise OperationError(f"the probe's worker could not be started: {error}") from error
        self._answers = queue.Queue()
        threading.Thread(
            target=_read, args=(self._process.stdout, self._answers), daemon=True
        ).start()
        try:
            ready = self._answers.get(timeout=STARTING)
        except queue.Empty:
            self.close()
            raise OperationError(
                f"the probe's worker was not ready after {STARTING:.0f} s"
            ) from None
        finally:
            self.starting += time.monotonic() - began
        if ready is None or "ready" not in ready:
            how = self._how_it_ended()
            self.close()
            raise OperationError(f"the probe's worker ended before it was ready: {how}")
        return Machine.from_json(ready["ready"])

    def run(self, task: Task, seconds: float) -> TaskResult:
        """Do a task in a worker. Raises OperationError when none can be started."""
        if self._process is None:
            self.machine()
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):  # it is dead already: the answers end, too
            line = json.dumps({"task": task.to_json(), "seconds": seconds}) + "\n"
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        outcome = self._outcome()
        if outcome.ending in BAD_ENDINGS:
            self.close()
        return outcome

    def _outcome(self) -> TaskResult:
        stage = ""
        trials = 0
        while True:
            try:
                patience = self._patience * (1 if stage else 4)
                answer = self._answers.get(timeout=patience)
            except queue.Empty:
                return TaskResult(
                    ending=Ending.HUNG,
                    trials=trials,
                    stage=stage,
                    message=f"did not end within {patience:.1f} s",
                )
            if answer is None:
                return TaskResult(
                    ending=Ending.DIED, trials=trials, stage=stage, message=self._how_it_ended()
                )
            if "outcome" in answer:
                return TaskResult.from_json(answer["outcome"])
            stage = answer["stage"] or ""
            trials += not stage

    def _how_it_ended(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)
        status = self._process.returncode
        if status is not None and status < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}" + self._last_words()

    def _last_words(self) -> str:
        assert self._errors is not None
        with suppress(OSError):
            self._errors.seek(max(0, os.fstat(self._errors.fileno()).st_size - 2000))
            lines = self._errors.read().decode(errors="replace").split("\n")
            said = [line.strip() for line in lines if line.strip()]
            return f" ({said[-1][:300]})" if said else ""
        return ""

    def close(self) -> None:
        """End the worker. One that the kernel cannot end, because a driver holds it, is left
        behind.
        """
        process, self._process = self._process, None
        if self._errors is not None:
            self._errors.close()
        if process is None:
            return
        process.kill()
        if process.stdin is not None:
            with suppress(OSError):  # what it never read
                process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)


def _read(stream: IO[bytes] | None, answers: "queue.Queue[dict[str, Any] | None]") -> None:
    """Put every line of the worker into the queue, and None at its end."""
    assert stream is not None
    with stream:
        for line in stream:
            with suppress(ValueError):  # half a line of one that was killed
                answers.put(json.loads(line))
    answers.put(None)


_SHOWN = 4
_CONFIDENCE = 0.99
_OTHER_WAYS = (
    "NCCL, CUDA IPC, and kernels of other libraries that read the memory of another device"
)


class Run(Struct, frozen=True, kw_only=True):
    """Circumstances of a probe. ``blind``: what in the environment hid faults from it."""

    plan: Plan
    budget: float
    seed: int
    seconds: float
    starting: float
    in_process: bool
    blind: str = ""


def summarise(run: Run, machine: Machine, found: Measurements) -> ProbeReport:
    """Return the report of a probe; hints are for others to add."""
    now = seconds_since_boot()
    pairs = {
        pair: record.report(
            plan=run.plan,
            seed=run.seed,
            peer_access=machine.peer_access.get(pair),
            unusable=found.of_device(pair),
            blind=bool(run.blind),
            began=now - run.seconds - run.starting,
            measured=now,
        )
        for pair, record in found.records.items()
    }
    return ProbeReport(
        pairs=pairs,
        seed=run.seed,
        seconds=run.seconds,
        starting=run.starting,
        devices=machine.names,
        exercised=tuple(_exercised(run, found)),
        not_exercised=tuple(_not_exercised(run, found, pairs)),
        identity=machine.identity,
        hosts={index: now for index in found.proven if index not in found.unusable},
    )


def _exercised(run: Run, found: Measurements) -> Iterator[str]:
    trips = [count for count in found.round_trips.values() if count]
    if trips:
        yield (
            f"round trips from the host to {count_of(len(trips), 'device')} and back, {max(trips)} "
            "each"
        )
    finished = [pair for pair, record in found.records.items() if record.finished(run.plan)]
    if finished:
        yield (
            f"{_pairs(finished)}: {run.plan.copies} copies each ({run.plan.name} plan), up to "
            f"{exact_size(run.plan.largest)}, by memcpy and by copy kernel; destinations were "
            "poisoned first, then compared by a kernel queued after the copy and on the host"
        )
    if found.at_once:
        yield f"{found.at_once} ordered pairs at once, {count_of(run.plan.rounds, 'round')}"
    if found.chains:
        yield (
            f"{count_of(found.chains, 'chain')} through {'two' if found.triples == 2 else 'three'} "
            "devices"
        )


def _not_exercised(
    run: Run, found: Measurements, pairs: Mapping[Pair, PairReport]
) -> Iterator[str]:
    verdicts = {pair: pairs[pair].verdict for pair in pairs}
    if found.stopped:
        yield found.stopped
    out_of_time = f"the budget of {run.budget:g} s was spent"
    for section in run.plan.sections:
        cut = [
            pair
            for pair, record in found.records.items()
            if record.left(section) and verdicts[pair] is Verdict.INCONCLUSIVE and not record.doubt
        ]
        if cut:
            yield f"{section.name} of {_pairs(cut)}: {out_of_time}"
    settled = [
        pair
        for pair, verdict in verdicts.items()
        if verdict not in (Verdict.HEALTHY, Verdict.INCONCLUSIVE)
    ]
    if settled:
        yield f"the rest of the plan for {_pairs(settled)}: the verdict was already clear"
    if not found.at_once and len(found.records) - len(settled) > 1:
        yield "several pairs at once: no time left, or no verdict for them"
    if found.chains < found.triples:
        yield (
            f"{found.triples - found.chains} of {found.triples} chains: no time left, or no "
            "verdict for one of their pairs"
        )
    if run.plan.name != STRICTEST:
        yield "the full plan: ckptfix doctor --peer-copies"
    unpoisoned = sum(record.unpoisoned for record in found.records.values())
    if unpoisoned:
        yield (
            f"poisoning before copies by to() ({count_of(unpoisoned, 'time')}): the allocator "
            "returned a different block"
        )
    if run.in_process:
        yield "copies that hang: in_process=True cannot end them"
    if run.blind:
        yield f"{run.blind}; no pair is remembered as healthy"
    yield from found.left_out
    yield from _rarer_faults(pairs.values())
    yield "faults that occur only with other loads, sizes or temperatures"
    yield _OTHER_WAYS


def _rarer_faults(reports: Iterable[PairReport]) -> Iterator[str]:
    """Yield, for each kind of copy, how rare a fault may be that the healthy pairs' own trials
    would have missed.

    A fault that hits a share p of the copies shows in n of them with the chance 1 - (1 - p) ** n:
    99 % is asked for.
    """
    tried = [report.trials_by_kind() for report in reports if report.verdict is Verdict.HEALTHY]
    for kind in sorted({kind for counts in tried for kind in counts}):
        least = min(counts.get(kind, 0) for counts in tried)
        if least:
            share = 1.0 - (1.0 - _CONFIDENCE) ** (1.0 / least)
            yield (
                f"faults in fewer than {100 * share:.2g} % of {kind} copies: {least} copies per "
                f"healthy pair reveal more frequent faults with {_CONFIDENCE:.0%} probability"
            )
        else:
            yield f"{kind} copies on some of the pairs reported as healthy"


def _pairs(pairs: Iterable[Pair]) -> str:
    some = [f"{source} -> {destination}" for source, destination in pairs]
    more = f" and {len(some) - _SHOWN} more" if len(some) > _SHOWN else ""
    return ", ".join(some[:_SHOWN]) + more


_LEAST_PATIENCE, _MOST_PATIENCE = 5.0, 20.0
"""Seconds of silence after which a copy counts as hanging; within them, a sixth of the budget."""


def measure(
    pairs: Sequence[Pair],
    *,
    budget: float,
    seed: int,
    in_process: bool,
    here: Machine | None = None,
    known: ProbeReport | None = None,
    sample: bool = False,
) -> ProbeReport:
    """Measure these pairs; whatever goes wrong makes them inconclusive.

    ``here``: the machine as this process sees it, whose devices must be those that are measured;
    None for any. ``known``: what earlier probes did, which is not done again. ``sample``: only look
    whether the pairs still are what they were.
    """
    plan = SAMPLE if sample else plan_for(budget)
    patience = min(max(budget / 6, _LEAST_PATIENCE), _MOST_PATIENCE)
    bench: Bench = InProcess() if in_process else Watched(patience)
    try:
        machine, wrong = _machine(bench, pairs, here)
        schedule = Schedule(bench, pairs, plan, budget=budget, seed=seed, known=known)
        found = schedule.stopped(wrong) if wrong else schedule.run()
        run = Run(
            plan=plan,
            budget=budget,
            seed=seed,
            seconds=schedule.spent,
            starting=bench.starting,
            in_process=in_process,
            blind=blinded() if in_process else "",
        )
        report = summarise(run, machine, found)
        return replace(report, hints=hints(machine.pci, report.unproven, machine.peer_access))
    finally:
        bench.close()


def _machine(bench: Bench, pairs: Sequence[Pair], here: Machine | None) -> tuple[Machine, str]:
    """Return the devices that the bench sees, and why it cannot measure these pairs; "" when it
    can.
    """
    try:
        machine = bench.machine()
    except OperationError as error:
        return Machine(), str(error)
    last = max(index for pair in pairs for index in pair)
    if last >= len(machine.names):
        return (
            Machine(),
            (
                f"the probe's worker sees {len(machine.names)} devices, this process sees at least "
                f"{last + 1}"
            ),
        )
    if here is not None and _what_is_compared(machine) != _what_is_compared(here):
        # Device 1 there is another one than device 1 here, if it is only the number of them that
        # tells.
        return (
            Machine(),
            (
                f"the probe's worker sees different devices ({', '.join(machine.names)}), or a "
                f"different driver or allocator, than this process ({', '.join(here.names)}): did "
                "the environment change after this process began to use its devices? To measure in "
                "this process: probe_peer_copies(in_process=True)"
            ),
        )
    return machine, ""


def _what_is_compared(machine: Machine) -> tuple[object, ...]:
    return machine.names, machine.pci, dict(machine.identity)


def nothing_to_measure(devices: int, seed: int) -> ProbeReport:
    """Return the report of a machine with fewer than two devices."""
    seen = "no accelerator" if not devices else "one device"
    return ProbeReport(
        pairs={},
        seed=seed,
        not_exercised=(f"copies between devices: torch sees {seen} on this machine",),
    )
