"""The process that measures, in which a broken pair may hang or end it; the one that asked goes on
with the others.

It reads one task for each line of its standard input, and answers in lines of JSON: ``{"stage":
words}`` before whatever may hang, ``{"stage": null}`` after it, ``{"outcome": ...}`` at the end of
the task. It never outlives whoever started it. ``InProcess`` does the same tasks in the caller's
own process.
"""

import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, TextIO

import torch
from msgspec import Struct, field
from typing_extensions import assert_never

from ckptfix.devices.probe import payload
from ckptfix.devices.probe.bulk import (
    NoRoom,
    Row,
    all_at_once,
    chain,
    next_batch,
    run_batch,
    run_large,
)
from ckptfix.devices.probe.cases import PLANS, Case, Route, Section
from ckptfix.devices.probe.payload import Memory
from ckptfix.devices.probe.task import Announce, Ending, Failure, Task, TaskResult, Work
from ckptfix.devices.probe.trials import PairTrials, UnusableDevice, prove, side_streams_exist
from ckptfix.devices.routing import bypassed
from ckptfix.devices.torch_devices import Machine, device, device_type, this_machine
from ckptfix.hardware import Pair

ENOUGH = 6
"""Failures after which a pair needs no more copies."""

_KEPT_PAYLOADS = 2
_ALWAYS_TAKEN = "uint8"


def no_memory(error: BaseException) -> bool:
    """Return whether an error says that no memory is left, on a device or on the host."""
    said = str(error)
    return (
        "OutOfMemory" in type(error).__name__
        or "out of memory" in said
        or "can't allocate memory" in said
    )


class Runner:
    """Does tasks. ``announce``: see ``Announce``."""

    def __init__(self, announce: Announce = lambda stage: None) -> None:
        self._report = announce
        self._stage = ""
        self._memory = Memory()
        self._long_row: Row | None = None
        self._earlier: defaultdict[Pair, deque[Any]] = defaultdict(
            lambda: deque(maxlen=_KEPT_PAYLOADS)
        )
        self._supported: dict[tuple[int, str], bool] = {}

    def run(self, task: Task, seconds: float) -> TaskResult:
        """Do a task and return what became of it; whatever it raises is in the outcome.

        A section ends after ``seconds``; other tasks are short and are done as a whole.
        """
        self._stage = ""
        progress = _Progress()
        try:
            with bypassed(counted=False):
                ending = self._done(task, time.monotonic() + seconds, progress)
            return progress.outcome(ending)
        except NoRoom as error:
            return progress.outcome(Ending.NO_MEMORY, stage=error.what, message=str(error))
        except UnusableDevice as error:
            return progress.outcome(Ending.DONE, unusable=error.index, message=str(error))
        except Exception as error:
            ending = Ending.NO_MEMORY if no_memory(error) else Ending.RAISED
            first = str(error).strip().partition("\n")[0]
            return progress.outcome(
                ending, stage=self._stage, message=f"{type(error).__name__}: {first}"[:300]
            )

    def close(self) -> None:
        """Give the memory of large copies back, to others on these devices, too."""
        self._memory.clear()
        self._long_row = None
        accelerator = getattr(torch, "accelerator", None)
        module: Any = (
            accelerator
            if hasattr(accelerator, "empty_cache")
            else torch.get_device_module(device_type())
        )
        with suppress(RuntimeError):  # a device that was lost has nothing to give back
            module.empty_cache()

    def _announce(self, stage: str | None) -> None:
        self._stage = stage or ""
        self._report(stage)

    def _done(self, task: Task, deadline: float, progress: "_Progress") -> Ending:
        plan = PLANS[task.plan]
        match task.work:
            case Work.HOST:
                index = task.pairs[0][0]
                for _ in prove(index, task.seed, self._memory, self._announce):
                    progress.add()
                self._announce("host round trip of a large payload")
                with suppress(NoRoom):  # the copies that need it will say so
                    self._row(task).prove(index)
                self._announce(None)
            case Work.SECTION:
                return self._section(task, deadline, progress)
            case Work.TOGETHER:
                for number in range(plan.rounds):
                    progress.failures += all_at_once(task.pairs, number, task.seed, self._announce)
                    progress.add()
            case Work.CHAIN:
                for size in plan.chained:
                    progress.failures += chain(task.pairs, size, task.seed, self._announce)
                    progress.add()
            case _:
                assert_never(task.work)
        return Ending.DONE

    def _section(self, task: Task, deadline: float, progress: "_Progress") -> Ending:
        section = PLANS[task.plan].sections[task.section]
        progress.done = task.start
        lacking: NoRoom | None = None
        for start, cases in self._steps(section, task.start):
            pairs = [pair for pair in task.pairs if progress.failures_of(pair) < ENOUGH]
            if not pairs:
                break
            if time.monotonic() > deadline:
                return Ending.OUT_OF_TIME
            possible = [case for case in cases if self._is_possible(case, pairs, progress)]
            seeds = [
                payload.seed_of(task.seed, *pair, section.name, start, task.again)
                for pair in task.pairs
            ]
            try:
                failures = (
                    self._copies(section, possible, task, pairs, seeds, progress)
                    if possible
                    else ()
                )
            except NoRoom as error:
                lacking = lacking or error
                continue
            for case in possible:
                progress.add(case.kind)
            progress.failures += failures
            if lacking is None:
                progress.done = start + len(cases)
        if lacking is not None:
            raise lacking
        return Ending.DONE

    def _steps(self, section: Section, start: int) -> Iterator[tuple[int, Sequence[Case]]]:
        """Yield the cases that are made together, and their positions in the section."""
        while start < len(section.cases):
            rest = section.cases[start:]
            cases = next_batch(rest) if section.batched else rest[:1]
            yield start, cases
            start += len(cases)

    def _copies(
        self,
        section: Section,
        cases: Sequence[Case],
        task: Task,
        pairs: Sequence[Pair],
        seeds: Sequence[int],
        progress: "_Progress",
    ) -> tuple[Failure, ...]:
        if section.is_large:
            (case,) = cases
            wanted = [seed for pair, seed in zip(task.pairs, seeds, strict=True) if pair in pairs]
            return run_large(
                case,
                pairs,
                self._row(task),
                wanted,
                self._memory,
                self._announce,
                self._earlier.__getitem__,
            )
        (pair,), (seed,) = pairs, seeds
        if section.batched:
            return run_batch(
                cases,
                pair,
                self._row(task),
                seed,
                self._memory,
                self._announce,
                self._earlier[pair],
                ENOUGH,
            )
        on_pair = PairTrials(pair, self._memory, self._earlier[pair], self._announce)
        failure = on_pair.run(cases[0], seed)
        progress.unpoisoned += on_pair.unpoisoned
        return () if failure is None else (failure,)

    def _is_possible(self, case: Case, pairs: Sequence[Pair], progress: "_Progress") -> bool:
        reasons = [reason for pair in pairs if (reason := self._impossible(case, pair))]
        progress.left_out.update(dict.fromkeys(reasons))
        return not reasons

    def _row(self, task: Task) -> Row:
        if self._long_row is None:
            self._long_row = Row(PLANS[task.plan].largest, task.seed)
        return self._long_row

    def _impossible(self, case: Case, pair: Pair) -> str:
        """Return why a case cannot be done here; "" when it can."""
        if case.route is Route.SIDE_STREAMS and not side_streams_exist():
            return "side streams: this torch has no torch.accelerator"
        for name in {case.dtype, case.source_dtype} - {"", _ALWAYS_TAKEN}:
            for index in pair:
                if not self._takes(index, name):
                    return f"{name}: device {index} does not support it"
        return ""

    def _takes(self, index: int, dtype: str) -> bool:
        """Return whether a device can hold a dtype and copy it with a kernel of its own. Raises
        when it is lost.
        """
        key = (index, dtype)
        if key not in self._supported:
            self._supported[key] = True
            try:
                _copy_on(index, dtype)
            except (RuntimeError, TypeError):
                _copy_on(index, _ALWAYS_TAKEN)  # raises on a device that does nothing any more
                self._supported[key] = False
        return self._supported[key]


def _copy_on(index: int, dtype: str) -> None:
    elements = (
        torch.zeros(32, dtype=torch.uint8, device="cpu")
        .view(payload.dtype_of(dtype))
        .to(device(index))
    )
    elements.new_empty((elements.numel(), 2))[:, 0].copy_(elements)


class _Progress(Struct):
    """Results of a task so far, which outlive the exception that ends it."""

    trials: int = 0
    failures: list[Failure] = field(default_factory=list)
    left_out: dict[str, None] = field(default_factory=dict)
    unpoisoned: int = 0
    done: int = 0
    tried: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str = "") -> None:
        """Count one more trial; ``kind``: that of its case."""
        self.trials += 1
        if kind:
            self.tried[kind] += 1

    def failures_of(self, pair: Pair) -> int:
        """Return how many copies over a pair were wrong."""
        return sum(failure.pair == pair for failure in self.failures)

    def outcome(self, ending: Ending, **more: Any) -> TaskResult:
        """Return what became of the task."""
        return TaskResult(
            ending=ending,
            trials=self.trials,
            failures=tuple(self.failures),
            left_out=tuple(self.left_out),
            unpoisoned=self.unpoisoned,
            done=self.done,
            tried=dict(self.tried),
            **more,
        )


class InProcess:
    """Does tasks in the caller's process. Nothing ends a copy that hangs."""

    starting = 0.0

    def __init__(self) -> None:
        self._runner = Runner()

    def machine(self) -> Machine:
        """Return the devices that this process sees."""
        return this_machine()

    def run(self, task: Task, seconds: float) -> TaskResult:
        """Do a task."""
        return self._runner.run(task, seconds)

    def close(self) -> None:
        """Give memory back."""
        self._runner.close()


def blinded() -> str:
    """Return what in this process's environment hides faults from the probe; "" when nothing
    does.
    """
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return "late arrival: CUDA_LAUNCH_BLOCKING makes every copy wait for the previous one"
    return ""


def main() -> None:
    """Do tasks until the input ends."""
    _end_with_the_parent(os.getppid())
    answers = _own_channel()

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    with suppress(BrokenPipeError):
        send({"ready": this_machine().to_json()})
        runner = Runner(lambda stage: send({"stage": stage}))
        for line in sys.stdin:
            asked = json.loads(line)
            outcome = runner.run(Task.from_json(asked["task"]), asked["seconds"])
            send({"outcome": outcome.to_json()})


def _own_channel() -> TextIO:
    """Return the standard output as a channel of our own; what libraries print goes to the standard
    error.
    """
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _end_with_the_parent(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        # A copy that hangs would keep this process, and the memory of its devices, for ever.
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
