"""Whether the other processes come to a save as well.

Accelerate's ``save_state`` into a given folder needs no other process under DistributedDataParallel, and many scripts
call it on the main process alone. A save that waits for all would hang there; so the main process waits for a limited
time, over the key-value store of the process group, and then saves without the others.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from accelerate import Accelerator

from ckptfix.errors import OperationError
from ckptfix.runtime.callers import calling_line


class Company(Enum):
    """TOGETHER: all processes are here. ALONE: the main one is. LATE: the main one has saved without this one."""

    TOGETHER = "together"
    ALONE = "alone"
    LATE = "late"


_TOGETHER, _SAVED, _LEFT = "together", "saved", "left"
"""Outcomes of a meeting: all are here; the main process was alone and is done; somebody waited too long and left."""

_ALONE = "alone"
"""Key of the number of meetings that the main process has ended alone."""


@dataclass(slots=True)
class _Past:
    """What this process remembers of its meetings.

    ``calls``: how often it came to the meeting of a name; the n-th calls of all processes belong together. ``missed``:
    key of the last meeting, when the main process went on from it alone. ``left``: whether this process left its last
    meeting because the main one did not come. ``alone``: number under ``_ALONE`` when it last went from a meeting; a
    higher one means that the main process is not where this one waits.
    """

    calls: Counter[str] = field(default_factory=Counter)
    missed: str = ""
    left: bool = False
    alone: int = 0

    def key(self, name: str) -> str:
        """Return the key of the next meeting of this name."""
        self.calls[name] += 1
        return f"{name}#{self.calls[name]}"


_past = _Past()


@contextmanager
def meeting(accelerator: Accelerator, name: str, patience: float) -> Iterator[Company]:
    """Meet the other processes for one call of a method; the block is what is done then.

    The main process waits ``patience`` seconds for the others, and not at all when they did not come the last time,
    neither in time nor later. The others wait for it as for any collective operation; but when it has meanwhile saved
    something else alone, as long as it would wait, and no longer once that was in vain.

    Raises OperationError in a late process when the main one failed.
    """
    store = _store()
    if accelerator.num_processes == 1 or store is None:
        yield Company.TOGETHER
        return
    key = _past.key(name)
    if not accelerator.is_main_process:
        try:
            company = _follow(store, key, accelerator, patience)
        except torch.distributed.DistError:  # the store is gone, and the main process with it
            company = Company.LATE
        yield company
        return
    limit = 0.0 if _past.missed and not store.check([f"{_past.missed}/all came"]) else patience
    _past.missed = ""
    all_came = _wait(lambda: store.check([f"{key}/all came"]), limit)
    if all_came and _decide(store, key, _TOGETHER) == _TOGETHER:
        yield Company.TOGETHER
        return
    _past.missed = key
    outcome = "it was interrupted"
    try:
        if limit and not all_came:
            _warn(name, patience)
        yield Company.ALONE
        outcome = _SAVED
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
        raise
    finally:
        _decide(store, key, outcome)
        store.add(_ALONE, 1)


def from_main(accelerator: Accelerator, name: str, work: Callable[[], str]) -> str:
    """Let the main process decide on a text. It waits for nobody; the others wait for it.

    Raises OperationError in the others when it failed, or does not come.
    """
    store = _store()
    if accelerator.num_processes == 1 or store is None:
        return work()
    key = _past.key(name)
    if not accelerator.is_main_process:
        try:
            is_decided = _wait(lambda: store.check([key]), _seconds(store))
        except torch.distributed.DistError:  # the store is gone, and the main process with it
            return work()
        if not is_decided:
            raise OperationError(f"{name}: the main process did not say what to load; call it there, too")
        told: str = store.get(key).decode()
        if told.startswith("!"):
            raise OperationError(f"{name} failed on the main process: {told[1:]}")
        return told[1:]
    try:
        decided = work()
    except Exception as error:
        store.set(key, f"!{type(error).__name__}: {error}")
        raise
    store.set(key, f"={decided}")
    return decided


def _follow(store: Any, key: str, accelerator: Accelerator, patience: float) -> Company:
    """Come to a meeting that the main process leads."""
    if store.add(f"{key}/came", 1) == accelerator.num_processes - 1:
        store.set(f"{key}/all came", "yes")
    outcome = _await_outcome(store, key, patience)
    _past.left = outcome == _LEFT
    if outcome == _TOGETHER:
        return Company.TOGETHER
    if outcome in (_SAVED, _LEFT):
        return Company.LATE
    raise OperationError(f"{key.rpartition('#')[0]} failed on the main process: {outcome}")


def _await_outcome(store: Any, key: str, patience: float) -> str:
    """Return how a meeting ended. Where the main process does not come, this one leaves, and saves as unguarded."""
    outcome = f"{key}/outcome"

    def is_decided() -> bool:
        found: bool = store.check([outcome])
        return found

    def is_elsewhere() -> bool:
        number: int = store.add(_ALONE, 0)
        return number > _past.alone

    _wait(lambda: is_decided() or is_elsewhere(), _seconds(store))
    if not is_decided() and is_elsewhere():
        _wait(is_decided, 0.0 if _past.left else patience)
    _past.alone = store.add(_ALONE, 0)
    return store.get(outcome).decode() if is_decided() else _decide(store, key, _LEFT)


def _decide(store: Any, key: str, outcome: str) -> str:
    """Say how a meeting ended, unless somebody has said it before; return what was said."""
    said: str = store.compare_set(f"{key}/outcome", "", outcome).decode()
    return said


def _store() -> Any:
    """Return the key-value store of the process group, None without one (a single process, XLA)."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.PrefixStore("ckptfix", torch.distributed.distributed_c10d._get_default_store())


def _seconds(store: Any) -> float:
    """Return how long a collective operation may take."""
    seconds: float = store.timeout.total_seconds()
    return seconds


def _wait(is_there: Callable[[], bool], seconds: float) -> bool:
    """Return whether something is there within a time; asks ever less often, and lets other threads use the store."""
    start = time.monotonic()
    while not is_there():
        passed = time.monotonic() - start
        if passed >= seconds:
            return False
        time.sleep(min(max(passed / 10, 0.001), 0.2, seconds - passed))
    return True


def _warn(name: str, patience: float) -> None:
    line = calling_line()
    warnings.warn_explicit(
        f"{name} at {line}: not all other processes came within {patience:g} s, so the main process saves without them "
        "and what they alone have (their random number generators). Call it on every process; or leave it so: later "
        "saves do not wait.",
        UserWarning,
        line.path,
        line.number,
    )
