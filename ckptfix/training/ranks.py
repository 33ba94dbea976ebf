"""Agreement of the processes of a run, so that all of them succeed or all of them fail."""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list, gather_object

from ckptfix.errors import OperationError, RemoteOSError

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Runs with models sharded over ranks: accelerate's own save_state and load_state are collective operations there."""


def cannot_agree(accelerator: Accelerator) -> bool:
    """Return whether the processes cannot agree on anything here: accelerate gathers no objects under XLA."""
    return accelerator.distributed_type is DistributedType.XLA and accelerator.num_processes > 1


class Ranks:
    """The processes of a run. Each method is a collective operation: every process must call it, failed or not."""

    def __init__(self, accelerator: Accelerator | None, *, together: bool = True) -> None:
        """Take all processes of the accelerator's run; this one alone without it, or when they do not act together."""
        self._accelerator = accelerator
        self._several = together and accelerator is not None and accelerator.num_processes > 1
        self.rank: int = 0 if accelerator is None else accelerator.process_index
        self._is_main = not self._several or self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in their order."""
        found: list[Any] = gather_object([value]) if self._several else [value]
        return found

    def on_main(self, work: Callable[[], Any], what: str) -> Any:
        """Let the main process decide, and return what it decided on every process; when it fails, all raise."""
        value, error = None, None
        if self._is_main:
            try:
                value = work()
            except Exception as raised:
                error = raised
        self.agree(error, what)
        return broadcast_object_list([value])[0] if self._several else value

    def agree(self, error: BaseException | None, what: str) -> None:
        """Raise on every process when any of them failed: its own error where there is one, else OperationError."""
        own = None
        if error is not None:
            text = f"process {self.rank}: {type(error).__name__}: {error}"
            own = (text, isinstance(error, OSError))
        failures = [failure for failure in self.gather(own) if failure is not None] if self._several else []
        if error is not None:
            raise error
        if failures:
            text, is_os_error = failures[0]
            kind = RemoteOSError if is_os_error else OperationError
            raise kind(f"{what} failed on another process, so all of them stop: {text}")

    def wait(self) -> None:
        """Return when every process is here."""
        if self._several and self._accelerator is not None:
            self._accelerator.wait_for_everyone()
