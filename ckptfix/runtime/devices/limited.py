"""Runs a command with a time limit that holds even for a process that is stuck in a driver.

``subprocess.run(timeout=...)`` waits for the end of what it killed, and a process in an uninterruptible call does not
end; a grandchild that keeps a pipe open holds it up, too. Here output goes to files, and nothing waits long after a
kill.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

_AFTER_KILL = 5.0  # seconds
_MAX_OUTPUT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of a command. ``status``: its exit status, negative for a signal, None when it had to be killed.

    ``limit``: the seconds that it had. ``out`` and ``err``: what it wrote, the last MiB of each.
    """

    status: int | None
    limit: float
    out: str
    err: str

    @property
    def problem(self) -> str:
        """Why it is not to be trusted, "" when it ended well."""
        if self.status is None:
            return f"no answer in {self.limit:g} s, so it was killed"
        if self.status < 0:
            with suppress(ValueError):
                return f"it was ended by {signal.Signals(-self.status).name}"
            return f"it was ended by signal {-self.status}"
        if self.status:
            last = next((line for line in reversed(self.err.splitlines()) if line.strip()), "")
            return f"it ended with status {self.status}: {last.strip()[:300]}".removesuffix(": ")
        return ""


def run_limited(command: Sequence[str], seconds: float) -> Ended:
    """Run a command for at most ``seconds``; it, and all that it started, is killed then.

    Raises OSError when it cannot be started.
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
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_AFTER_KILL)
        return Ended(status=status, limit=seconds, out=_tail(out.fileno()), err=_tail(err.fileno()))


def _tail(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, _MAX_OUTPUT, max(size - _MAX_OUTPUT, 0)).decode("utf-8", "replace")
