"""The end of a verb that did not finish: what is said, and with which exit status."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ckptfix.errors import CkptfixError, UsageError
from ckptfix.storage.atomic import DISK_FULL
from ckptfix.storage.permission import described

INTERRUPTED = 130


class Interrupted(Exception):
    """An interrupt of the user; the message names the state in which it left the folder."""


FAILURES = (Interrupted, CkptfixError, OSError, MemoryError)
"""All that ends the work on one path. The next path follows, but not after an interrupt."""


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
