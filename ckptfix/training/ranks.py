"""The processes of a run: they agree on success, and find each other before a save."""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list, gather_object, reduce

from ckptfix.errors import OperationError, RemoteOSError, UsageError
from ckptfix.training.running import as_given
from ckptfix.wording import count_of

# Agreement of the processes of a run, so that all of them succeed or all of them fail.

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Runs with models sharded over ranks: accelerate's own save_state and load_state are collective
operations there.
"""


def cannot_agree(accelerator: Accelerator) -> bool:
    """Return whether the processes cannot agree on anything here: accelerate gathers no objects
    under XLA.
    """
    return accelerator.distributed_type is DistributedType.XLA and accelerator.num_processes > 1


class Ranks:
    """The processes of a run. Each method is a collective operation: every process must call it,
    failed or not.
    """

    def __init__(self, accelerator: Accelerator | None, *, together: bool = True) -> None:
        """Take all processes of the accelerator's run; this one alone without it, or when they do
        not act together.
        """
        self._accelerator = accelerator
        self._several = together and accelerator is not None and accelerator.num_processes > 1
        self.rank: int = 0 if accelerator is None else accelerator.process_index
        self._is_main = not self._several or self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in their order."""
        found: list[Any] = gather_object([value]) if self._several else [value]
        return found

    def on_main(self, work: Callable[[], Any], what: str) -> Any:
        """Let the main process decide, and return what it decided on every process; when it fails,
        all raise.
        """
        value, error = None, None
        if self._is_main:
            try:
                value = work()
            except Exception as raised:
                error = raised
        failure = self._described(error)
        if self._several:
            value, failure = broadcast_object_list([(value, failure)])[0]
        _raise(error, failure, what)
        return value

    def agree(self, error: BaseException | None, what: str) -> None:
        """Raise on every process when any of them failed: its own error where there is one, else
        OperationError.
        """
        failure = self._described(error)
        if self._several and self._accelerator is not None:
            # One number first: a gather of objects is two operations and five times as slow, and a
            # save agrees often.
            device = self._accelerator.device
            if reduce(torch.tensor([float(error is not None)], device=device), "sum").item():
                failure = next(one for one in self.gather(failure) if one is not None)
        _raise(error, failure, what)

    def _described(self, error: BaseException | None) -> tuple[str, bool] | None:
        """Return an error in words for the other processes, and whether it is one of the system."""
        if error is None:
            return None
        return f"process {self.rank}: {type(error).__name__}: {error}", isinstance(error, OSError)

    def wait(self) -> None:
        """Return when every process is here."""
        if self._several and self._accelerator is not None:
            self._accelerator.wait_for_everyone()


def _raise(error: BaseException | None, failure: tuple[str, bool] | None, what: str) -> None:
    """Raise this process's own error, or that another process failed."""
    if error is not None:
        raise error
    if failure is not None:
        text, is_os_error = failure
        kind = RemoteOSError if is_os_error else OperationError
        raise kind(f"{what} failed on another process, so all processes stop: {text}")


# Processes that save as one find each other before any of them does anything, and none waits for ever.
#
# They meet in the store of torch's process group, not in a collective operation: where a script saves on
# the main process alone, the others are in a step of the training by then, and two different collectives
# would be taken for one.

PATIENCE = 30.0
"""Seconds after which a process that waits says for whom."""

TIMEOUT = 540.0
"""Seconds after which it ends with an error. torch ends NCCL's operations after 600: this error
comes before that.
"""

VARIABLE = "CKPTFIX_SAVE_TIMEOUT"

_SHORTEST, _LONGEST = 0.0003, 0.05  # seconds between two looks

_log = logging.getLogger("ckptfix")
_number = 0  # of the next meeting
_VERDICT, _ALL = "verdict", b"all"


def timeout_of(given: float | None) -> float:
    """Return the seconds to wait: those given, else those of the environment, else ``TIMEOUT``."""
    text: object = given if given is not None else os.environ.get(VARIABLE) or TIMEOUT
    what = "save_timeout" if given is not None else VARIABLE
    try:
        seconds = float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"{what}={text}: expected a number of seconds above 0 (inf waits forever)")
    return seconds


def meet(
    rank: int,
    processes: int,
    word: str,
    timeout: float,
    *,
    can_save_alone: bool,
    what: str = "save_state",
) -> list[str]:
    """Return what every process says, by rank, once all are here.

    ``what``: the name of the call, for messages.

    Raises OperationError after ``timeout`` seconds, naming who did not come. Either all are said to
    be here or the meeting is given up, whichever is written first; who comes late passes over what
    was given up. ``can_save_alone``: whether a save that waits for nobody is an alternative here.
    """
    global _number
    begin = time.monotonic()
    pause, is_said, verdict = _SHORTEST, False, b""
    while verdict != _ALL:
        store = torch.distributed.PrefixStore(f"ckptfix/save/{_number}", _store())
        if store.check([_VERDICT]):
            # Given up before this process came: on to the next meeting.
            verdict = store.get(_VERDICT)
        else:
            store.set(str(rank), word)
            verdict = b""
            if store.add("here", 1) == processes:
                verdict = store.compare_set(_VERDICT, "", _ALL.decode())
        while not verdict:
            waited = time.monotonic() - begin
            if store.check([_VERDICT]):
                verdict = store.get(_VERDICT)
            elif waited >= timeout:
                verdict = store.compare_set(_VERDICT, "", f"given up by {rank}")
            else:
                if waited >= PATIENCE and not is_said:
                    is_said = True
                    text = _why(what, PATIENCE, _missing(store, processes), can_save_alone)
                    _log.warning("%s; this save fails after %g s", text, timeout)
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST)
        _number += 1
        if verdict != _ALL and time.monotonic() - begin >= timeout:
            raise OperationError(
                f"{_why(what, timeout, _missing(store, processes), can_save_alone)}; nothing was "
                "written"
            )
    words = [store.get(str(other)).decode() for other in range(processes)]
    before = torch.distributed.PrefixStore(f"ckptfix/save/{_number - 2}", _store())
    with suppress(RuntimeError):  # a store that cannot delete
        before.delete_key(str(rank))  # who came to this meeting has read the one before
    return words


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def _missing(store: Any, processes: int) -> list[int]:
    return [rank for rank in range(processes) if not store.check([str(rank)])]


def _why(what: str, seconds: float, missing: list[int], can_save_alone: bool) -> str:
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    who = (
        f"{count_of(len(missing), 'process')} (rank{'s' if len(missing) > 1 else ''} {shown})"
        if missing
        else "the other processes"
    )
    alone = as_given("pass save_together=False", "leave out --save-together")
    remedy = (
        f"; if only the main process saves, {alone}, so it does not wait" if can_save_alone else ""
    )
    return f"{what} has waited {seconds:g} s for {who}: every process must call it{remedy}"
