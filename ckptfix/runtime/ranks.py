"""What the processes of a run tell each other, so that all of them succeed or all of them fail."""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from ckptfix.errors import OperationError


def on_main(accelerator: Accelerator, work: Callable[[], Any], what: str) -> Any:
    """Let the main process decide, and return what it decided on every process; when it fails, all raise."""
    value, error = None, None
    if accelerator.is_main_process:
        try:
            value = work()
        except Exception as raised:
            error = raised
    agree(accelerator, error, what)
    return value if accelerator.num_processes == 1 else broadcast_object_list([value])[0]


def agree(accelerator: Accelerator, error: BaseException | None, what: str) -> None:
    """Raise on every process when any of them failed: its own error where there is one, else OperationError.

    Every process must call it, failed or not; it is a collective operation.
    """
    if accelerator.num_processes > 1:
        own = (
            None if error is None else f"process {accelerator.process_index}: {type(error).__name__}: {error}"
        )
        failures = [message for message in gather_object([own]) if message is not None]
        if failures and error is None:
            raise OperationError(f"{what} failed on another process, so nothing was done here: {failures[0]}")
    if error is not None:
        raise error
