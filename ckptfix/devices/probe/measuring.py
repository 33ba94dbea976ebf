"""One probe from beginning to end: its order within the budget, the worker that does it, and the
verdicts.

Every device is proven first, then each pair makes the plan, and then all make copies at once. A
worker that hung, died or met an error gets no more tasks, as its devices may be lost to it: that
settles its pair, and the next task gets a new worker.
"""

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from msgspec import Struct, convert, field, to_builtins

from ckptfix.devices.probe.cases import LARGEST_COPY, PLAN, exact_size
from ckptfix.devices.probe.probe_report import (
    PairReport,
    ProbeReport,
    Verdict,
    seconds_since_boot,
)
from ckptfix.devices.probe.trials import ROUNDS, Failure, Kind
from ckptfix.devices.probe.worker import (
    BAD_ENDINGS,
    Ending,
    Runner,
    Task,
    TaskResult,
    Work,
)
from ckptfix.devices.torch_devices import Machine
from ckptfix.errors import OperationError
from ckptfix.hardware import Pair, command_of
from ckptfix.wording import count_of, first_few

_FOR_MORE = 0.5
"""The share of the budget after which nothing is repeated: nobody waits long for a healthy
answer.
"""

_LEAST_PATIENCE, _MOST_PATIENCE = 5.0, 20.0
"""Seconds of silence after which a copy counts as hanging; within them, a sixth of the budget."""

_SHOWN = 4
_CONFIDENCE = 0.99
_KILLED = "SIGKILL"
# The kernel ends a process with it when the host has no memory left: no evidence against a pair.

_WHERE_IT_WORKS = (
    ". If only one process can use the device, measure in that process: "
    "probe_peer_copies(in_process=True), or before it starts: ckptfix doctor --peer-copies"
)


class _Record(Struct, kw_only=True):
    """One pair. ``complete``: the whole plan was made. ``why``: the verdict that a bad end gave, or
    why nothing can be proven (``doubt``).
    """

    made: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    complete: bool = False
    ended: Verdict | None = None
    kind: str = ""
    why: str = ""
    doubt: str = ""

    @property
    def open(self) -> bool:
        """True if more copies over this pair would tell more."""
        return not self.failures and self.ended is None and not self.doubt

    def add(self, result: TaskResult) -> None:
        """Take in what became of the plan."""
        self.made.update(result.made)
        self.failures += result.failures
        self.complete |= result.ending is Ending.DONE and result.unusable < 0
        if result.ending is Ending.NO_MEMORY and not self.complete:
            self.doubt = _no_memory(result)
        elif result.ending in BAD_ENDINGS:
            if not result.stage or _KILLED in result.message:
                self.doubt = f"{result.stage or 'between two copies'}: {result.message}"
                return
            self.why = f"{result.stage}: {result.message}"
            if result.ending is Ending.HUNG:
                self.ended, self.kind = Verdict.HANG, "hang"
            else:
                kind = Kind.ERROR if result.ending is Ending.RAISED else Kind.CRASH
                self.ended, self.kind = Verdict.WRONG, kind.value

    def verdict(self, unusable: str, budget: float) -> tuple[Verdict, str, int | None, str]:
        """Return the verdict, the kind of damage, its offset, and what the verdict rests on."""
        made = sum(self.made.values())
        if unusable:
            return Verdict.UNUSABLE, "", None, unusable
        if self.ended is not None:
            return self.ended, self.kind, None, self.why
        if self.failures:
            worst = max(self.failures, key=lambda failure: failure.wrong_bytes)
            detail = f"{len(self.failures)} of {made} copies wrong, such as {worst.case}"
            return Verdict.WRONG, worst.kind.value, worst.first_offset, detail
        if self.doubt:
            return Verdict.INCONCLUSIVE, "", None, self.doubt
        if not self.complete:
            detail = f"only {made} of {len(PLAN)} copies within the budget of {budget:g} s"
            return Verdict.INCONCLUSIVE, "", None, f"{detail}, all correct" if made else detail
        return Verdict.HEALTHY, "", None, f"{made} copies, all correct"


class Probe:
    """One probe over some ordered pairs."""

    def __init__(
        self, bench: "Bench", pairs: Sequence[Pair], *, budget: float, seed: int, times: int
    ) -> None:
        self.records = {pair: _Record() for pair in pairs}
        self.unusable: dict[int, str] = {}
        self.round_trips: dict[int, int] = {}
        self.proven: set[int] = set()
        self.at_once = 0
        self.left_out: dict[str, None] = {}
        self.stopped = ""
        self._bench = bench
        self._budget = budget
        self._seed = seed
        self._times = times
        self._began = time.monotonic()
        self._starting_before = bench.starting

    @property
    def spent(self) -> float:
        """Seconds of measuring; starting a worker does not count."""
        return time.monotonic() - self._began - (self._bench.starting - self._starting_before)

    def run(self) -> None:
        """Do what the budget allows. Copies of all pairs at once, which take a moment, are made
        whenever two pairs were completed.
        """
        try:
            for index in sorted({index for pair in self.records for index in pair}):
                if self.spent < self._budget:
                    self._host(index)
            self._plans(0, self._budget)
            self._together()
            for number in range(1, self._times):
                self._plans(number, _FOR_MORE * self._budget)
        except OperationError as error:
            self.stop(str(error))

    def stop(self, reason: str) -> None:
        """Note why nothing more can be done."""
        self.stopped = reason
        for record in self.records.values():
            if record.open and not record.complete:
                record.doubt = reason

    def of_device(self, pair: Pair) -> str:
        """Return what is wrong with a device of a pair; "" when nothing is."""
        return next((self.unusable[index] for index in pair if index in self.unusable), "")

    def _ask(self, work: Work, pairs: tuple[Pair, ...], *, until: float, number: int) -> TaskResult:
        task = Task(work=work, pairs=pairs, seed=self._seed, round=number)
        result = self._bench.run(task, max(until - self.spent, 0.0))
        if result.unusable >= 0:
            self.unusable[result.unusable] = result.message
        self.left_out.update(dict.fromkeys(result.left_out))
        return result

    def _host(self, index: int) -> None:
        result = self._ask(Work.HOST, ((index, index),), until=self._budget, number=0)
        self.round_trips[index] = result.steps
        if result.ending is Ending.DONE:
            self.proven.add(index)
            return
        if result.ending is Ending.NO_MEMORY:
            where = _no_memory(result)
        else:
            where = f"device {index}: {result.stage or 'starting'}: {result.message}"
            if result.steps and _KILLED not in result.message:
                self.unusable[index] = where
                return
            # It never worked, which may be this moment's fault: another process has it for itself,
            # or it starts slowly.
            where += _WHERE_IT_WORKS
        for pair, record in self.records.items():
            if index in pair:
                record.doubt = record.doubt or where

    def _plans(self, number: int, until: float) -> None:
        for pair, record in self.records.items():
            if self.spent >= until:
                return
            is_due = record.complete if number else True
            if is_due and record.open and not self.of_device(pair):
                record.add(self._ask(Work.PAIR, (pair,), until=until, number=number))

    def _together(self) -> None:
        pairs = tuple(
            pair
            for pair, record in self.records.items()
            if record.open and record.complete and not self.of_device(pair)
        )
        if len(pairs) < 2:
            return
        result = self._ask(Work.TOGETHER, pairs, until=self._budget, number=0)
        if result.ending is Ending.NO_MEMORY:
            self.left_out[f"{result.stage or 'several pairs at once'}: {result.message}"] = None
            return
        for failure in result.failures:
            self.records[failure.pair].failures.append(failure)
        if result.ending is Ending.DONE:
            self.at_once = len(pairs)
            return
        for pair in pairs:  # a bad end names no pair
            self.records[pair].doubt = f"{result.stage or 'several pairs'}: {result.message}"


STARTING = 180.0
"""Seconds that a worker may take to import torch and to initialise the devices: some file systems
are slow.
"""

_SHOWS_LESS = "CUDA_LAUNCH_BLOCKING"
"""The variable that makes copies wait for each other, and so hides a late arrival."""


def worker_command() -> tuple[str, ...]:
    """Return the command that starts a worker with the modules of this process."""
    return command_of("ckptfix.devices.probe.worker")


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
                env={key: value for key, value in os.environ.items() if key != _SHOWS_LESS},
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
            line = json.dumps({"task": to_builtins(task), "seconds": seconds}) + "\n"
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        result = self._result()
        if result.ending in BAD_ENDINGS:
            self.close()
        return result

    def _result(self) -> TaskResult:
        stage = ""
        steps = 0
        while True:
            try:
                patience = self._patience * (1 if stage else 4)
                answer = self._answers.get(timeout=patience)
            except queue.Empty:
                return TaskResult(
                    ending=Ending.HUNG,
                    steps=steps,
                    stage=stage,
                    message=f"did not end within {patience:.1f} s",
                )
            if answer is None:
                return TaskResult(
                    ending=Ending.DIED, steps=steps, stage=stage, message=self._how_it_ended()
                )
            if "result" in answer:
                return convert(answer["result"], TaskResult)
            stage = answer["stage"] or ""
            steps += not stage

    def _how_it_ended(self) -> str:
        assert self._process is not None
        assert self._errors is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)
        status = self._process.returncode
        if status is not None and status < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-status).name}"
        last = ""
        with suppress(OSError):
            self._errors.seek(max(0, os.fstat(self._errors.fileno()).st_size - 2000))
            lines = self._errors.read().decode(errors="replace").strip().split("\n")
            last = f" ({lines[-1].strip()[:300]})" if lines[-1] else ""
        return f"exit status {status}{last}"

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


def _no_memory(result: TaskResult) -> str:
    return (
        f"no memory for {result.stage or 'the copies'}: {result.message}. To measure before a model "
        "fills the devices: ckptfix doctor --peer-copies"
    )


Bench = Watched | Runner
"""Does tasks: a worker, or this process."""


def measure(
    pairs: Sequence[Pair],
    *,
    budget: float,
    seed: int,
    in_process: bool,
    here: Machine | None = None,
    times: int = 1,
) -> ProbeReport:
    """Measure these pairs; whatever goes wrong makes them inconclusive.

    ``here``: the machine as this process sees it, whose devices must be those that are measured;
    None for any. ``times``: how often the plan is made, with other bits each time; repeats end at
    half of the budget.
    """
    patience = min(max(budget / 6, _LEAST_PATIENCE), _MOST_PATIENCE)
    bench: Bench = Runner() if in_process else Watched(patience)
    began = seconds_since_boot()
    try:
        machine, wrong = _machine(bench, pairs, here)
        if in_process and os.environ.get(_SHOWS_LESS, "0") not in ("", "0"):
            wrong = f"{_SHOWS_LESS} makes every copy wait for the previous one, and hides late ones"
        probe = Probe(bench, pairs, budget=budget, seed=seed, times=times)
        if wrong:
            probe.stop(wrong)
        else:
            probe.run()
    finally:
        bench.close()
    now = seconds_since_boot()
    reports = {}
    for pair, record in probe.records.items():
        verdict, kind, offset, detail = record.verdict(probe.of_device(pair), budget)
        reports[pair] = PairReport(
            pair=pair,
            verdict=verdict,
            kind=kind,
            first_offset=offset,
            trials=sum(record.made.values()),
            failures=len(record.failures) + (record.ended is not None),
            seed=seed,
            detail=detail,
            peer_access=machine.peer_access.get(pair),
            made=dict(record.made),
            began=began,
            measured=now,
        )
    is_proven = all(report.verdict is Verdict.HEALTHY for report in reports.values())
    return ProbeReport(
        pairs=reports,
        seed=seed,
        seconds=probe.spent,
        starting=bench.starting,
        devices=machine.names,
        exercised=tuple(_exercised(probe)),
        not_exercised=tuple(_not_exercised(probe, reports, budget, in_process)),
        hints=() if is_proven else ("known causes that this machine has: ckptfix doctor",),
        identity=machine.identity,
        hosts=dict.fromkeys(sorted(probe.proven - set(probe.unusable)), now),
    )


def _machine(bench: "Bench", pairs: Sequence[Pair], here: Machine | None) -> tuple[Machine, str]:
    """Return the devices that the bench sees, and why it cannot measure these pairs; "" when it
    can.
    """
    try:
        machine = bench.machine()
    except OperationError as error:
        return Machine(), str(error)
    last = max(index for pair in pairs for index in pair)
    if last >= len(machine.names):
        sees = f"the probe's worker sees {len(machine.names)} devices"
        return Machine(), f"{sees}, this process sees at least {last + 1}"
    seen, expected = (
        (known.names, known.pci, dict(known.identity)) for known in (machine, here or machine)
    )
    if seen != expected:
        assert here is not None
        # Device 1 there is another one than device 1 here, if it is only the number of them that
        # tells.
        return Machine(), (
            f"the probe's worker sees different devices ({', '.join(machine.names)}), or a "
            f"different driver or allocator, than this process ({', '.join(here.names)}): did "
            "the environment change after this process began to use its devices? To measure in "
            "this process: probe_peer_copies(in_process=True)"
        )
    return machine, ""


def nothing_to_measure(devices: int, seed: int) -> ProbeReport:
    """Return the report of a machine with fewer than two devices."""
    seen = "no accelerator" if not devices else "one device"
    return ProbeReport(
        pairs={},
        seed=seed,
        not_exercised=(f"copies between devices: torch sees {seen} on this machine",),
    )


def _exercised(probe: Probe) -> Iterator[str]:
    trips = [count for count in probe.round_trips.values() if count]
    if trips:
        yield (
            f"round trips from the host to {count_of(len(trips), 'device')} and back, {max(trips)} "
            "each"
        )
    complete = [pair for pair, record in probe.records.items() if record.complete]
    if complete:
        yield (
            f"{_pairs(complete)}: {len(PLAN)} copies each, up to {exact_size(LARGEST_COPY)}, by "
            "memcpy and by copy kernel; destinations were poisoned first, then compared by a "
            "kernel queued after the copy and on the host"
        )
    if probe.at_once:
        yield (
            f"both directions of each link at once; {probe.at_once} ordered pairs at once, "
            f"{count_of(ROUNDS, 'round')}"
        )


def _not_exercised(
    probe: Probe, reports: Mapping[Pair, PairReport], budget: float, in_process: bool
) -> Iterator[str]:
    if probe.stopped:
        yield probe.stopped
    cut = [
        pair
        for pair, record in probe.records.items()
        if reports[pair].verdict is Verdict.INCONCLUSIVE and not record.doubt
    ]
    if cut:
        yield f"the rest of the plan for {_pairs(cut)}: the budget of {budget:g} s was spent"
    settled = [
        pair
        for pair, report in reports.items()
        if report.verdict not in (Verdict.HEALTHY, Verdict.INCONCLUSIVE)
    ]
    if settled:
        yield f"the rest of the plan for {_pairs(settled)}: the verdict was already clear"
    if not probe.at_once and len(reports) - len(settled) > 1:
        yield "several pairs at once: fewer than two were proven before, or there was no verdict"
    if in_process:
        yield "copies that hang: in_process=True cannot end them"
    yield from probe.left_out
    # How rare a fault may be that the healthy pairs' own copies would have missed: see REPEATS.
    made = [report.made for report in reports.values() if report.verdict is Verdict.HEALTHY]
    for kind in sorted({kind for counts in made for kind in counts}):
        least = min(counts[kind] for counts in made)
        share = 1.0 - (1.0 - _CONFIDENCE) ** (1.0 / least)
        yield (
            f"faults in fewer than {100 * share:.2g} % of {kind} copies: {least} copies per "
            f"healthy pair reveal more frequent faults with {_CONFIDENCE:.0%} probability"
        )
    yield "faults that occur only with other loads, sizes or temperatures"
    yield "NCCL, CUDA IPC, and kernels of other libraries that read the memory of another device"


def _pairs(pairs: Iterable[Pair]) -> str:
    return first_few([f"{source} -> {destination}" for source, destination in pairs], _SHOWN)
