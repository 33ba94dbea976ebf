"""The side that asks: starts the worker, hands it tasks, and ends it when it hangs.

A worker that hung, died or met an error is not asked again: its devices may be lost to it. The next task gets a new
worker.
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
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from ckptfix.errors import OperationError
from ckptfix.runtime.devices.probe.identity import Machine
from ckptfix.runtime.devices.probe.task import BAD_ENDINGS, Ending, Outcome, Task

STARTING = 180.0
"""Seconds that a worker may take to import torch and to initialise the devices: some file systems are slow."""

_BEGIN = (
    "import sys; sys.path[:] = sys.argv[1:]; from ckptfix.runtime.devices.probe.worker import main; main()"
)
# With the caller's own path: `-m` would put the current folder first, and a checkpoint may hold a torch.py.

_SHOWS_LESS = ("CUDA_LAUNCH_BLOCKING",)
"""Variables that make copies wait for each other, and so hide a late arrival."""


def worker_command() -> tuple[str, ...]:
    """Return the command that starts a worker with the modules of this process."""
    return (sys.executable, "-c", _BEGIN, *sys.path)


class Watched:
    """Does tasks in a worker. ``patience``: seconds of silence in a copy after which it counts as hanging.

    Between copies the host makes and compares bits, which on a busy machine takes long: there the patience is fourfold.
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
        """Start a worker and return the devices that it sees. Raises OperationError when it does not start."""
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
        threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True).start()
        try:
            ready = self._answers.get(timeout=STARTING)
        except queue.Empty:
            self.close()
            raise OperationError(f"the probe's worker was not ready after {STARTING:.0f} s") from None
        finally:
            self.starting += time.monotonic() - began
        if ready is None or "ready" not in ready:
            how = self._how_it_ended()
            self.close()
            raise OperationError(f"the probe's worker ended before it was ready: {how}")
        return Machine.from_json(ready["ready"])

    def run(self, task: Task, seconds: float) -> Outcome:
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

    def _outcome(self) -> Outcome:
        stage = ""
        trials = 0
        while True:
            try:
                patience = self._patience * (1 if stage else 4)
                answer = self._answers.get(timeout=patience)
            except queue.Empty:
                return Outcome(
                    ending=Ending.HUNG, trials=trials, stage=stage, message=f"no end after {patience:.1f} s"
                )
            if answer is None:
                return Outcome(ending=Ending.DIED, trials=trials, stage=stage, message=self._how_it_ended())
            if "outcome" in answer:
                return Outcome.from_json(answer["outcome"])
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
        """End the worker. One that the kernel cannot end, because a driver holds it, is left behind."""
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
