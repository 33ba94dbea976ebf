"""The shipped pipeline on one device alone: from the device to itself, each half on a stream of its
own.
"""

import torch

from ckptfix.devices import staged_copies
from ckptfix.devices.staged_copies import PIECE, SLOTS, Queue, pump


class _SideStream(staged_copies._Streams):
    """The source's pieces go on a side stream, as those of another device would."""

    def __init__(
        self,
        memory: torch.Tensor,
        destination: torch.Tensor,
        source: torch.Tensor,
        side: torch.Stream,
    ) -> None:
        super().__init__(memory, destination, source)
        self._stream[Queue.SOURCE] = side

    def to_host(self, slot: int, start: int, stop: int) -> None:
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self._stream[Queue.SOURCE])
        try:
            super().to_host(slot, start, stop)
        finally:
            torch.accelerator.set_stream(before)


class RoundTrip:
    """Copies of one device's bytes to the host and back."""

    def __init__(self, where: torch.device) -> None:
        self._memory = torch.empty((SLOTS, PIECE), dtype=torch.uint8, pin_memory=True)
        self.side = torch.Stream(where)
        """The stream of the copy's source."""

    def copy(
        self,
        destination: torch.Tensor,
        source: torch.Tensor,
        *,
        join: bool = True,
    ) -> None:
        """Queue it behind what the current stream holds, and before what comes later there.

        ``join=False``: only the pipeline itself orders what comes later.
        """
        current = torch.accelerator.current_stream(source.device)
        self.side.wait_stream(current)
        engine = _SideStream(self._memory, destination, source, self.side)
        pump(engine, source.numel())
        if join:
            current.wait_stream(self.side)
