"""How a verb ends that did not finish: what is said, with which exit status, and what an interrupt left behind."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ckptfix.errors import CkptfixError, UsageError
from ckptfix.operations.target import find_target
from ckptfix.storage.atomic import DISK_FULL
from ckptfix.storage.journal import State, transactions
from ckptfix.storage.paths import MANIFEST, command
from ckptfix.storage.permission import described

INTERRUPTED = 130


class Interrupted(Exception):
    """An interrupt of the user; the message names the state in which it left the folder."""


FAILURES = (Interrupted, CkptfixError, OSError, MemoryError)
"""All that ends the work on one path, and not the work on the next ones; but for the first."""


class Ending(NamedTuple):
    """What is said of a failure, and the exit status that goes with it."""

    message: str
    status: int


def ending_of(error: Exception) -> Ending:
    """Return how a verb ends with one of ``FAILURES``."""
    if isinstance(error, Interrupted):
        return Ending(str(error), INTERRUPTED)
    if isinstance(error, CkptfixError):
        return Ending(str(error), 2 if isinstance(error, UsageError) else 3)
    if isinstance(error, MemoryError):
        return Ending("out of memory; nothing was changed", 3)
    is_full = isinstance(error, OSError) and error.errno in DISK_FULL
    return Ending(
        f"{described(error)}{'; next: make room on that disk, and run it again' if is_full else ''}", 3
    )


@contextmanager
def interruptible(describe: Callable[[], str]) -> Iterator[None]:
    """Turn an interrupt into ``Interrupted``, with the state that ``describe`` finds once the cleaning up is done."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: {describe()}") from None


def state_after_repair(path: str) -> Callable[[], str]:
    """Return what describes the state of a folder after a repair was interrupted that begins now."""
    before = _repairs(path)

    def describe() -> str:
        if _is_pending(path):
            return f"run {command('repair', Path(path))} again to roll back"
        if _repairs(path) > before:
            return f"{path} is fully repaired; to undo: {command('undo', Path(path))}"
        return f"{path} is unchanged"

    return describe


def state_after_undo(path: str) -> Callable[[], str]:
    """Return what describes the state of a folder after an undo was interrupted that begins now."""
    before = _repairs(path)

    def describe() -> str:
        if _is_pending(path):
            return f"run {command('undo', Path(path))} again to finish"
        return f"the repair of {path} is undone" if _repairs(path) < before else f"{path} is unchanged"

    return describe


def state_after_seal(path: str) -> Callable[[], str]:
    """Return what describes the state of a folder after a seal was interrupted that begins now."""
    before = _identity(Path(path, MANIFEST))

    def describe() -> str:
        if _is_pending(path):
            return f"run {command('undo', Path(path))} to roll back"
        is_old = _identity(Path(path, MANIFEST)) == before
        return (
            f"{path} is unchanged" if is_old else f"{path} is sealed; next: {command('verify', Path(path))}"
        )

    return describe


def state_after_writing(source: str, output: str) -> Callable[[], str]:
    """Return what describes the state after an interrupt of a verb that begins now and writes a new ``output``."""
    before = _identity(Path(output))

    def describe() -> str:
        if _identity(Path(output)) != before:
            return f"{source} is unchanged, and {output} is complete"
        what = f"nothing was written at {output}" if before is None else f"so is {output}"
        return f"{source} is unchanged, and {what}"

    return describe


def _repairs(path: str) -> int:
    """Return how many repairs can be undone; 0 where that cannot be known, as of a path that does not exist."""
    try:
        return sum(one.state is State.DONE for one in transactions(find_target(path).root))
    except (CkptfixError, OSError):
        return 0


def _is_pending(path: str) -> bool:
    try:
        return any(one.state is State.PENDING for one in transactions(find_target(path).root))
    except (CkptfixError, OSError):
        return False


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
