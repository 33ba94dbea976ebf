"""Copies between two devices by way of host memory: no byte goes from device to device.

The blocking copy (``tensor.to("cpu")``, then on) is the reference, and the way of small tensors.
From 1 MiB on, a copy travels in pieces through two pinned slots of 8 MiB for each ordered pair:
while one is filled from the source device, the other is emptied to the destination, on the
*current* streams of both devices, by which allocator and user code order everything already. Where
another thread uses these slots, or no memory can be pinned, the same pieces go one by one: a copy
never needs host memory for a whole tensor.

Values are converted on the source device, whatever the size, as torch's own copy between devices
does it: CPU and device convert NaN and values out of range differently.

The order of the pieces (``pump``) knows nothing of torch: an ``Engine`` queues them, so that the
tests can run this very code on an engine that carries them out in any order that two queues and
their marks allow.
"""

import threading
from collections.abc import Callable
from enum import Enum
from typing import Protocol, TypeVar

import torch

from ckptfix.hardware import Pair

Mark = TypeVar("Mark")


class Queue(Enum):
    """The two in-order queues of a staged copy: the current stream of either device."""

    SOURCE = "source"
    DESTINATION = "destination"


class Engine(Protocol[Mark]):
    """Carries out the pieces of one copy, through numbered slots of host memory. Pieces of one queue
    keep their order; two queues are in no order at all.
    """

    def to_host(self, slot: int, start: int, stop: int) -> None:
        """Queue on SOURCE: bytes ``start`` to ``stop`` of the source go to a slot."""

    def to_device(self, slot: int, start: int, stop: int) -> None:
        """Queue on DESTINATION: a slot goes to bytes ``start`` to ``stop`` of the destination."""

    def settle(self) -> None:
        """Queue on DESTINATION: what is left to do there once all pieces have arrived, if anything
        is.
        """

    def mark(self, queue: Queue) -> Mark:
        """Return a mark that is reached when all that is in the queue so far has been done."""

    def wait(self, mark: Mark) -> None:
        """Let this thread go on only once the mark is reached."""


PIECE = 8 << 20
"""Bytes of one pinned slot: at 25 GB/s a third of a millisecond, against some 10 us for a wait."""

SLOTS = 2


def pump(engine: Engine[Mark], size: int, piece: int = PIECE) -> None:
    """Make a copy of ``size`` bytes in pieces of at most ``piece`` bytes.

    This thread waits between the two queues: no event crosses from one device to another, which may
    be as broken as the copies. On return the copy is done. torch's own copy orders both current
    streams, and programs that wait for the source's stream alone rely on that.
    """
    drained: list[Mark | None] = [None] * SLOTS
    for number, start in enumerate(range(0, size, piece)):
        slot = number % SLOTS
        stop = min(start + piece, size)
        if (mark := drained[slot]) is not None:
            engine.wait(mark)
        engine.to_host(slot, start, stop)
        engine.wait(engine.mark(Queue.SOURCE))
        engine.to_device(slot, start, stop)
        drained[slot] = engine.mark(Queue.DESTINATION)
    engine.settle()
    engine.wait(engine.mark(Queue.DESTINATION))


PIPELINED_FROM = 1 << 20
"""Bytes from which a copy is worth two pinned slots."""


Settle = Callable[[], object] | None
"""Queues what is left to do on the destination's device once all bytes have arrived; None: nothing
is.
"""


def staged_copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Do ``destination.copy_(source)`` between two devices by way of the host.

    Shapes broadcast, dtypes are converted and strides are kept as ``copy_`` does. Both are dense
    tensors of the current accelerator, on two devices of it, and nothing is recorded for autograd:
    call it below autograd. What comes later on the current stream of either device finds the copy
    complete.
    """
    span = _span(source)
    repeats = span < source.numel()
    # An expanded tensor's memory goes once, and the destination's device repeats it: a mask of 1
    # MiB may show 4 GiB.
    sent = _sendable(source.as_strided((span,), (1,)) if repeats else source, destination.dtype)
    fits = (
        not repeats
        and destination.size() == sent.size()
        and destination.stride() == sent.stride()
        and not (destination.is_conj() or destination.is_neg())
    )
    if fits:
        _carry(destination, sent, None)
        return
    target = torch.empty_strided(
        sent.size(), sent.stride(), dtype=destination.dtype, device=destination.device
    )
    arrived = target.as_strided(source.size(), source.stride()) if repeats else target
    _carry(target, sent, lambda: destination.copy_(arrived))


def release_slots() -> None:
    """Give the pinned memory back. Copies that are under way keep theirs until they are done.

    The last reference to staging may be given back by a finalizer, in the middle of anything below:
    no lock is needed here, and none is held where something is made.
    """
    _rings.clear()


class _Ring:
    """The pinned slots of one ordered pair, for one copy at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory = torch.empty((SLOTS, PIECE), dtype=torch.uint8, device="cpu", pin_memory=True)


_rings: dict[Pair, _Ring] = {}


class _Streams:
    """The engine of the real thing: two torch streams, and events on them."""

    def __init__(
        self,
        memory: torch.Tensor,
        destination: torch.Tensor,
        source: torch.Tensor,
        settle: Settle = None,
    ) -> None:
        self._memory = memory
        self._settle = settle
        self._bytes = {Queue.SOURCE: source, Queue.DESTINATION: destination}
        self._stream = {
            queue: torch.accelerator.current_stream(flat.device)
            for queue, flat in self._bytes.items()
        }

    def to_host(self, slot: int, start: int, stop: int) -> None:
        piece = self._memory[slot, : stop - start]
        piece.copy_(self._bytes[Queue.SOURCE][start:stop], non_blocking=True)

    def to_device(self, slot: int, start: int, stop: int) -> None:
        piece = self._memory[slot, : stop - start]
        self._bytes[Queue.DESTINATION][start:stop].copy_(piece, non_blocking=True)

    def settle(self) -> None:
        if self._settle is not None:
            self._settle()

    def mark(self, queue: Queue) -> "torch.Event":
        event = torch.Event(self._bytes[queue].device)
        event.record(self._stream[queue])
        return event

    def wait(self, mark: "torch.Event") -> None:
        mark.synchronize()


def _carry(target: torch.Tensor, sent: torch.Tensor, settle: Settle) -> None:
    """Copy between two dense tensors of the same dtype, sizes and strides; ``settle`` is queued
    behind the copy.
    """
    if sent.nbytes < PIPELINED_FROM:
        target.copy_(sent.to("cpu"))
    elif _has_streams() and _pipelined(_bytes_of(target), _bytes_of(sent), settle):
        return
    else:
        _piece_by_piece(_bytes_of(target), _bytes_of(sent))
    if settle is not None:
        settle()
        _wait_for(target.device)


def _pipelined(target: torch.Tensor, sent: torch.Tensor, settle: Settle) -> bool:
    """Copy bytes through the slots of their pair; False, and nothing done, when there are none to
    be had now.

    Another thread may be using them: waiting for it would hang where that thread waits for this
    one, for instance in a finalizer that copies.
    """
    pair = (sent.device.index, target.device.index)
    ring = _ring(pair)
    if ring is None or not ring.lock.acquire(blocking=False):
        return False
    try:
        pump(_Streams(ring.memory, target, sent, settle), sent.numel())
    except BaseException:
        # Pieces may be on their way with no mark behind them: these slots must never be filled
        # again.
        _rings.pop(pair, None)
        raise
    finally:
        ring.lock.release()
    return True


def _piece_by_piece(target: torch.Tensor, sent: torch.Tensor) -> None:
    """Copy bytes in blocking pieces, through memory of the host that is not pinned."""
    for there, piece in zip(target.split(PIECE), sent.split(PIECE), strict=True):
        there.copy_(piece.to("cpu"))


def _wait_for(device: torch.device) -> None:
    """Let this thread go on once the current stream of a device is done: blocking copies promise
    it.
    """
    if _has_streams():
        torch.accelerator.current_stream(device).synchronize()
    else:
        torch.get_device_module(device).synchronize(device)


def _ring(pair: Pair) -> _Ring | None:
    ring = _rings.get(pair)
    if ring is not None:
        return ring
    try:
        made = _Ring()
    # No memory that may be pinned; torch's own message is of no use to the caller.
    except RuntimeError:
        return None
    return _rings.setdefault(pair, made)  # that of another thread, where it was faster


def _has_streams() -> bool:
    return hasattr(torch, "accelerator") and hasattr(torch, "Event")


def _span(tensor: torch.Tensor) -> int:
    """Return how many elements lie between the first and the last one in memory, with both."""
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    reach: int = sum((length - 1) * stride for length, stride in steps)
    return 1 + reach if tensor.numel() else 0


def _sendable(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a dense tensor of this dtype with the same values, made on its own device where it has
    to be made.
    """
    plain = tensor.resolve_conj().resolve_neg().to(dtype)
    return plain if _is_dense(plain) else plain.contiguous()


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor, in its order there: a contiguous vector of uint8 on the
    same device.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
