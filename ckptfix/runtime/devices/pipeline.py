"""The order of a staged copy: which piece goes when, and who waits for what.

A copy travels in pieces through a few slots of host memory. While one slot is filled from the source device, another
is emptied to the destination. Nothing here knows torch: an ``Engine`` queues the pieces, so that the tests can run this
very code on an engine that carries them out in any order that two queues and their marks allow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

Mark = TypeVar("Mark")


class Queue(Enum):
    """The two in-order queues of a staged copy: the current stream of either device."""

    SOURCE = "source"
    DESTINATION = "destination"


class Waiting(Enum):
    """Who waits for a mark of one queue before the other goes on.

    HOST: the thread that queues; no event crosses from one device to another. DEVICE: the other queue itself, which
    needs such an event to work.
    """

    HOST = "host"
    DEVICE = "device"


@dataclass(slots=True)
class Slot(Generic[Mark]):
    """A piece of host memory, by its number, and when its last content had left it (None: it was never used)."""

    number: int
    drained: Mark | None = None


class Engine(Protocol[Mark]):
    """Carries out the pieces of one copy. Pieces of one queue keep their order; two queues are in no order at all."""

    def to_host(self, slot: int, start: int, stop: int) -> None:
        """Queue on SOURCE: bytes ``start`` to ``stop`` of the source go to a slot."""

    def to_device(self, slot: int, start: int, stop: int) -> None:
        """Queue on DESTINATION: a slot goes to bytes ``start`` to ``stop`` of the destination."""

    def settle(self) -> None:
        """Queue on DESTINATION: what is left to do there once all pieces have arrived, if anything is."""

    def mark(self, queue: Queue) -> Mark:
        """Return a mark that is reached when all that is in the queue so far has been done."""

    def hold(self, queue: Queue, mark: Mark) -> None:
        """Let the queue go on only once the mark is reached."""

    def wait(self, mark: Mark) -> None:
        """Let this thread go on only once the mark is reached."""


def pump(engine: Engine[Mark], slots: Sequence[Slot[Mark]], size: int, piece: int, waiting: Waiting) -> None:
    """Queue a copy of ``size`` bytes in pieces of at most ``piece`` bytes.

    On return all is queued, not done: what comes later on *either* queue finds the copy complete and may overwrite the
    source. torch's own copy orders both current streams in the same way, and programs that wait for the source's stream
    alone rely on it. The slots may be given to the next ``pump`` at once, with any streams.
    """
    for number, start in enumerate(range(0, size, piece)):
        slot = slots[number % len(slots)]
        stop = min(start + piece, size)
        if slot.drained is not None:
            _order(engine, Queue.SOURCE, slot.drained, waiting)
        engine.to_host(slot.number, start, stop)
        _order(engine, Queue.DESTINATION, engine.mark(Queue.SOURCE), waiting)
        engine.to_device(slot.number, start, stop)
        slot.drained = engine.mark(Queue.DESTINATION)
    engine.settle()
    _order(engine, Queue.SOURCE, engine.mark(Queue.DESTINATION), waiting)


def _order(engine: Engine[Mark], queue: Queue, mark: Mark, waiting: Waiting) -> None:
    if waiting is Waiting.HOST:
        engine.wait(mark)
    else:
        engine.hold(queue, mark)
