"""Copies between two devices by way of host memory: no byte goes from device to device.

The blocking copy (``tensor.to("cpu")``, then on) is the reference, and the way of small tensors. From 1 MiB on, bytes
go through two pinned slots of 8 MiB for each ordered pair, to the host and from it at the same time, on the *current*
streams of both devices: allocator and user code order everything by those already.
"""

import threading

import torch

from ckptfix.runtime.devices.pairs import Pair
from ckptfix.runtime.devices.pipeline import Queue, Slot, Waiting, pump

PIECE = 8 << 20
"""Bytes of one pinned slot: at 25 GB/s a third of a millisecond, against some 10 us for a wait."""

SLOTS = 2

PIPELINED_FROM = 1 << 20
"""Bytes from which a copy is worth two pinned slots."""


def staged_copy(destination: torch.Tensor, source: torch.Tensor, *, waiting: Waiting = Waiting.HOST) -> None:
    """Do ``destination.copy_(source)`` between two devices by way of the host.

    Shapes broadcast, dtypes are converted and strides are kept as ``copy_`` does. Both are dense tensors of the current
    accelerator, on two devices of it, and nothing is recorded for autograd: call it below autograd.
    """
    if source.nbytes < PIPELINED_FROM or not _has_streams():
        destination.copy_(source.to("cpu"))
        return
    source = source.resolve_conj().resolve_neg()
    if not _is_dense(source):
        source = source.contiguous()
    fits = (
        destination.dtype == source.dtype
        and destination.size() == source.size()
        and destination.stride() == source.stride()
        and not (destination.is_conj() or destination.is_neg())
    )
    target = (
        destination
        if fits
        else torch.empty_strided(
            source.size(), source.stride(), dtype=source.dtype, device=destination.device
        )
    )
    if not _pipelined(_bytes_of(target), _bytes_of(source), waiting):
        target.copy_(source.to("cpu"))
    if target is not destination:
        destination.copy_(target)


def staged_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor.to(device)`` for a tensor of any kind, by way of the host.

    Plain operations, so that autograd takes the way back through the host too, and sparse, nested and quantized
    tensors and subclasses do what their own ``to`` does.
    """
    return tensor.to("cpu").to(device)


def release_slots() -> None:
    """Give the pinned memory back. Copies that are under way keep theirs until they are done.

    The last reference to staging may be given back by a finalizer, in the middle of anything below: no lock is needed
    here, and none is held where something is made.
    """
    _rings.clear()


class _Ring:
    """The pinned slots of one ordered pair, for one copy at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory = torch.empty((SLOTS, PIECE), dtype=torch.uint8, device="cpu", pin_memory=True)
        self.slots = tuple(Slot[torch.Event](number) for number in range(SLOTS))


_rings: dict[Pair, _Ring] = {}


class _Streams:
    """The engine of the real thing: two torch streams, and events on them."""

    def __init__(self, memory: torch.Tensor, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._memory = memory
        self._bytes = {Queue.SOURCE: source, Queue.DESTINATION: destination}
        self._stream = {
            queue: torch.accelerator.current_stream(flat.device) for queue, flat in self._bytes.items()
        }

    def to_host(self, slot: int, start: int, stop: int) -> None:
        piece = self._memory[slot, : stop - start]
        piece.copy_(self._bytes[Queue.SOURCE][start:stop], non_blocking=True)

    def to_device(self, slot: int, start: int, stop: int) -> None:
        piece = self._memory[slot, : stop - start]
        self._bytes[Queue.DESTINATION][start:stop].copy_(piece, non_blocking=True)

    def mark(self, queue: Queue) -> "torch.Event":
        event = torch.Event(self._bytes[queue].device)
        event.record(self._stream[queue])
        return event

    def hold(self, queue: Queue, mark: "torch.Event") -> None:
        self._stream[queue].wait_event(mark)

    def wait(self, mark: "torch.Event") -> None:
        mark.synchronize()


def _pipelined(destination: torch.Tensor, source: torch.Tensor, waiting: Waiting) -> bool:
    """Copy bytes through the slots of their pair; False, and nothing done, when there are none to be had now.

    Another thread may be using them: waiting for it would hang where that thread waits for this one, for instance in
    a finalizer that copies.
    """
    pair = (source.device.index, destination.device.index)
    ring = _ring(pair)
    if ring is None or not ring.lock.acquire(blocking=False):
        return False
    try:
        pump(_Streams(ring.memory, destination, source), ring.slots, source.numel(), PIECE, waiting)
    except BaseException:
        # Pieces may be on their way with no mark behind them: these slots must never be filled again.
        _rings.pop(pair, None)
        raise
    finally:
        ring.lock.release()
    return True


def _ring(pair: Pair) -> _Ring | None:
    ring = _rings.get(pair)
    if ring is not None:
        return ring
    try:
        made = _Ring()
    except RuntimeError:  # no memory that may be pinned; torch's own message is of no use to the caller
        return None
    return _rings.setdefault(pair, made)  # that of another thread, where it was faster


def _has_streams() -> bool:
    return hasattr(torch, "accelerator") and hasattr(torch, "Event")


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor, in its order there: a contiguous vector of uint8 on the same device."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
