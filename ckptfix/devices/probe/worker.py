"""The process that measures, in which a broken pair may hang or end it; the one that asked goes on
with the others.

It reads one task for each line of its standard input, and answers in lines of JSON: ``{"stage":
words}`` before whatever may hang, ``{"stage": null}`` after it, ``{"result": ...}`` at the end of
the task. It never outlives whoever started it.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from enum import Enum
from typing import Any, TextIO

import torch
from msgspec import Struct, convert, field, to_builtins
from typing_extensions import assert_never

from ckptfix.devices.probe.cases import BATCHES, Route
from ckptfix.devices.probe.trials import (
    ROUNDS,
    Announce,
    Failure,
    Row,
    UnusableDevice,
    all_at_once,
    make_batch,
    seed_of,
    side_streams_exist,
)
from ckptfix.devices.routing import bypassed
from ckptfix.devices.torch_devices import Machine, device_type, this_machine
from ckptfix.hardware import Pair

ENOUGH = 3
"""Failures after which a pair needs no more copies."""


class Work(Enum):
    """A kind of work."""

    HOST = "host"  # a device's own exchange with the host; the pair is (device, device)
    PAIR = "pair"  # the plan over one pair
    TOGETHER = "together"  # both directions of each link at once, then all pairs


class Task(Struct, frozen=True, kw_only=True):
    """A piece of work. ``round``: the number of a repetition with other bits."""

    work: Work
    pairs: tuple[Pair, ...]
    seed: int
    round: int = 0


class Ending(Enum):
    """End of a task. Only after DONE does the absence of failures prove anything."""

    DONE = "done"
    OUT_OF_TIME = "out of time"
    NO_MEMORY = "no memory"
    RAISED = "raised"
    DIED = "died"
    HUNG = "hung"


BAD_ENDINGS = (Ending.RAISED, Ending.DIED, Ending.HUNG)
"""Endings after which the worker may have lost its devices."""


class TaskResult(Struct, kw_only=True):
    """Result of a task.

    ``steps``: batches, round trips or rounds that ended. ``made``: copies that were compared, by
    ``Case.kind``. ``unusable``: the device whose exchange with the host was found wrong, -1 for
    none. ``stage``: the copy that was under way when it ended badly; "" when none was. ``message``:
    why it ended so. ``left_out``: cases that this machine cannot do.
    """

    ending: Ending = Ending.DONE
    steps: int = 0
    made: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    unusable: int = -1
    stage: str = ""
    message: str = ""
    left_out: list[str] = field(default_factory=list)


class Runner:
    """Does tasks in this process, where nothing ends a copy that hangs. ``announce``: see
    ``Announce``.
    """

    starting = 0.0

    def __init__(self, announce: Announce = lambda stage: None) -> None:
        self._report = announce
        self._stage = ""
        self._row: Row | None = None

    def machine(self) -> Machine:
        """Return the devices that this process sees."""
        return this_machine()

    def run(self, task: Task, seconds: float) -> TaskResult:
        """Do a task and return what became of it; whatever it raises is in the result.

        The plan of a pair ends after ``seconds``; other tasks are short and are done as a whole.
        """
        self._stage = ""
        result = TaskResult()
        try:
            with bypassed(counted=False):
                self._do(task, time.monotonic() + seconds, result)
        except UnusableDevice as error:
            result.unusable, result.message = error.index, str(error)
        except Exception as error:
            result.ending = Ending.NO_MEMORY if _no_memory(error) else Ending.RAISED
            first = str(error).strip().partition("\n")[0]
            result.stage, result.message = self._stage, f"{type(error).__name__}: {first}"[:300]
        return result

    def close(self) -> None:
        """Give the memory of large copies back, to others on these devices, too."""
        self._row = None
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

    def _do(self, task: Task, deadline: float, result: TaskResult) -> None:
        row = self._row = self._row or Row(task.seed)
        match task.work:
            case Work.HOST:
                for _ in row.prove_host(task.pairs[0][0], self._announce):
                    result.steps += 1
            case Work.PAIR:
                (pair,) = task.pairs
                made: Counter[str] = Counter()
                for number, batch in enumerate(BATCHES):
                    if len(result.failures) >= ENOUGH:
                        break
                    if time.monotonic() > deadline:
                        result.ending = Ending.OUT_OF_TIME
                        break
                    cases = batch
                    if not side_streams_exist():
                        cases = tuple(
                            case for case in batch if case.route is not Route.SIDE_STREAMS
                        )
                        result.left_out = ["side streams: this torch has no torch.accelerator"]
                    seed = seed_of(task.seed, *pair, task.round, number)
                    result.failures += make_batch(cases, pair, row, seed, self._announce)
                    made.update(case.kind for case in cases)
                    result.made = dict(made)
                    result.steps += 1
            case Work.TOGETHER:
                links = [
                    ((source, to), (to, source))
                    for source, to in task.pairs
                    if source < to and (to, source) in task.pairs
                ]
                for number, pairs in enumerate((*links, *[task.pairs] * ROUNDS)):
                    seed = seed_of(task.seed, "together", task.round, number)
                    result.failures += all_at_once(pairs, row, seed, self._announce)
                    result.steps += 1
            case _:
                assert_never(task.work)


def _no_memory(error: BaseException) -> bool:
    """Return whether an error says that no memory is left, on a device or on the host."""
    said = str(error)
    return (
        "OutOfMemory" in type(error).__name__
        or "out of memory" in said
        or "can't allocate memory" in said
    )


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
            result = runner.run(convert(asked["task"], Task), asked["seconds"])
            send({"result": to_builtins(result)})


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
