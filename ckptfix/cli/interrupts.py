"""The state in which an interrupt left a folder: looked up once the cleaning up is done, never guessed."""

import os
from collections.abc import Callable
from pathlib import Path

from ckptfix.diagnosis.target import find_target
from ckptfix.errors import CkptfixError
from ckptfix.storage.paths import MANIFEST, command
from ckptfix.storage.transactions import State, transactions


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
        now = _identity(Path(output))
        if now == before:
            what = f"nothing was written at {output}" if before is None else f"so is {output}"
        elif now is None:
            what = f"the old {output} was moved aside: run the same command again to bring it back"
        else:
            what = f"{output} is complete"
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
