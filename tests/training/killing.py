"""Kill a child process at its n-th step on the file system, seen through audit events and named
functions.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

PATIENCE = 1200
"""Seconds after which a child is ended: one that hangs must fail its test, and not hold up all."""

_EVENTS = {
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.truncate",
    "os.chmod",
    "os.listdir",
}


class Steps:
    """Counts steps below ``root`` and kills the process at one of them. Steps before ``armed`` do
    not count.
    """

    def __init__(self, root: str, kill_at: int | None) -> None:
        self.root = root
        self.kill_at = kill_at
        self.count = 0
        self.armed = False
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.armed and event in _EVENTS and str(arguments[0]).startswith(self.root):
            self.step()

    def step(self) -> None:
        """One step: the process ends here when it is the one."""
        if not self.armed:
            return
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is a step before and after what it does: for writers that raise no
        event.
        """

        def stepping(*args: Any, **kwargs: Any) -> Any:
            self.step()
            result = function(*args, **kwargs)
            self.step()
            return result

        return stepping


def arm(steps: Steps) -> None:
    """Count from now on, in the writers of torch and safetensors, too."""
    import accelerate.utils.other as accelerate_files

    for module, name in ((torch, "save"), (accelerate_files, "safe_save_file")):
        setattr(module, name, steps.around(getattr(module, name)))
    steps.armed = True


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process and return its wait status: 0 when it ended well."""
    pid = os.fork()
    if pid == 0:
        # Else a full collection walks through all that the test's process has imported.
        gc.freeze()
        # OpenMP's threads are not forked: where the test's process had some, the first layer norm
        # here waited for them for ever, and with it all tests.
        torch.set_num_threads(1)
        signal.alarm(PATIENCE)
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(pid, 0)[1]
