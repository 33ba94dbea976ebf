"""Kill, tear or fail an action at each call that changes something, in a child process per point.

``points(action)`` lists the calls an action makes; ``strike(action, at, fault)`` runs it with one
fault. The action is any callable; what it does to the disk before it dies stays. The calls are
those of ``os``, and renameat2; ``ioctl`` and ``open()`` are not seen: the strace test shows that
the storage layer changes nothing through them.
"""

import errno
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from ckptfix.storage import atomic

WRITES = ("write", "pwrite", "writev", "pwritev")
CALLS = (
    *WRITES,
    *(
        "open",
        "fsync",
        "fdatasync",
        "sync",
        "rename",
        "replace",
        "renames",
        "link",
        "symlink",
        "unlink",
        "remove",
    ),
    *(
        "mkdir",
        "makedirs",
        "rmdir",
        "removedirs",
        "ftruncate",
        "truncate",
        "posix_fallocate",
        "copy_file_range",
    ),
    *(
        "sendfile",
        "splice",
        "chmod",
        "fchmod",
        "lchmod",
        "chown",
        "fchown",
        "lchown",
        "utime",
        "mkfifo",
        "mknod",
    ),
    *("setxattr", "removexattr"),
)
_CHANGES_BY_OPEN = os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)


class Fault(Enum):
    """What happens at the chosen call."""

    KILL_BEFORE = "killed before"
    KILL_AFTER = "killed after"
    TORN = "killed after writing half"
    ENOSPC = errno.ENOSPC
    EIO = errno.EIO


class Outcome(Enum):
    """How an action ended."""

    FINISHED = "finished"
    KILLED = "killed"
    RAISED = "raised"


@contextmanager
def intercepted(
    at_call: Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Route every changing call of ``os`` through ``at_call(name, real, args, kwargs)``."""
    real = {name: getattr(os, name) for name in CALLS if hasattr(os, name)}
    renameat2 = atomic.renameat2

    def wrapper(name: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not (args[1] & _CHANGES_BY_OPEN):
                return real[name](*args, **kwargs)
            return at_call(name, real[name], args, kwargs)

        return wrapped

    for name in real:
        setattr(os, name, wrapper(name))
    atomic.renameat2 = lambda *args: at_call("rename", renameat2, args, {})
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)
        atomic.renameat2 = renameat2


def in_child(action: Callable[[], None]) -> tuple[Outcome, str]:
    """Run the action in a fork; return how it ended, and the name of what it raised (''
    otherwise).
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            action()
            answer = (Outcome.FINISHED, "")
        except BaseException as error:
            answer = (Outcome.RAISED, type(error).__name__)
            if os.environ.get("CRASH_TRACE"):
                traceback.print_exc()
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return Outcome.KILLED, ""
    outcome, name = pickle.loads(data)
    return outcome, name


def points(action: Callable[[], None]) -> tuple[str, ...]:
    """Run the action here to its end, and return the names of its changing calls in order."""
    names: list[str] = []

    def note(
        name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        names.append(name)
        return real(*args, **kwargs)

    with intercepted(note):
        action()
    return tuple(names)


def strike(action: Callable[[], None], at: int, fault: Fault) -> tuple[Outcome, str]:
    """Run the action in a child with ``fault`` at its call number ``at`` (from 0)."""
    count = -1

    def at_call(
        name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        nonlocal count
        count += 1
        if count != at:
            return real(*args, **kwargs)
        if isinstance(fault.value, int):
            raise OSError(fault.value, os.strerror(fault.value))
        try:
            if fault is Fault.TORN and name in WRITES and len(args[1]) > 1:
                real(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
            elif fault is Fault.KILL_AFTER:
                real(*args, **kwargs)
        finally:  # also when the call fails, as mkdir does where a folder may exist
            os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        with intercepted(at_call):
            action()

    return in_child(run)
