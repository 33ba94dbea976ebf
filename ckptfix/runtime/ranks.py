"""What the processes of a run tell each other, so that all of them succeed or all of them fail."""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from ckptfix.errors import OperationError


class Ranks:
    """The processes that do one thing: all of a run together, or this one without the others.

    Together, each method is a collective operation: every process must call it, failed or not.
    """

    def __init__(self, accelerator: Accelerator, *, together: bool = True) -> None:
        """Take all processes of the accelerator's run, or this one."""
        self._accelerator = accelerator
        self._several = together and accelerator.num_processes > 1

    def on_main(self, work: Callable[[], Any], what: str) -> Any:
        """Let the main process decide, and return what it decided on every process; when it fails, all raise."""
        value, error = None, None
        if self._accelerator.is_main_process or not self._several:
            try:
                value = work()
            except Exception as raised:
                error = raised
        self.agree(error, what)
        return broadcast_object_list([value])[0] if self._several else value

    def agree(self, error: BaseException | None, what: str) -> None:
        """Raise on every process when any of them failed: its own error where there is one, else OperationError."""
        if self._several:
            rank = self._accelerator.process_index
            own = None if error is None else f"process {rank}: {type(error).__name__}: {error}"
            failures = [message for message in gather_object([own]) if message is not None]
            if failures and error is None:
                raise OperationError(f"{what} failed on another process, so all of them stop: {failures[0]}")
        if error is not None:
            raise error

    def wait(self) -> None:
        """Return when every process is here."""
        if self._several:
            self._accelerator.wait_for_everyone()
