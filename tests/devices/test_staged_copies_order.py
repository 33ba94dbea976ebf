"""The order of a staged copy, on an engine that carries its pieces out in any order that is legal.

The code under test is the shipped ``pump``. The engine's two queues keep their own order and wait
where they are told to; beyond that, what runs next is drawn by lot, as two devices are free to do.
A wait that is missing then shows as wrong bytes. No device, real or simulated, is part of it.
"""

import ast
import inspect
import random
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from ckptfix.devices import staged_copies
from ckptfix.devices.staged_copies import SLOTS, Queue, pump

SCHEDULES = 1500
PIECE = 8
SIZE = 29
"""Bytes of a copy: four pieces, the last one shorter."""

Pump = Callable[..., None]


class Mark:
    """Reached or not."""

    def __init__(self) -> None:
        self.reached = False


Entry = Callable[[], None] | Mark
"""What stands in a queue: an action, or a mark to wait for."""


class Machine:
    """Two devices with two queues each, and a lot that says which queue does its next entry."""

    def __init__(self, seed: int) -> None:
        self.lot = random.Random(seed)
        self.speed = self.lot.choice((0.1, 0.5, 0.8))
        """How likely the devices do another entry before the host queues its next."""
        self.queues: dict[tuple[Queue, int], list[Entry]] = {
            (queue, stream): [] for queue in Queue for stream in range(2)
        }

    def put(self, queue: Queue, stream: int, entry: Entry) -> None:
        """Queue it; the devices may go on meanwhile."""
        self.queues[queue, stream].append(entry)
        while self.lot.random() < self.speed and self.step():
            pass

    def step(self) -> bool:
        """Do one entry of a queue that can go on; False when none can."""
        ready = [
            entries
            for entries in self.queues.values()
            if entries and not (isinstance(entries[0], Mark) and not entries[0].reached)
        ]
        if not ready:
            return False
        entry = self.lot.choice(ready).pop(0)
        if not isinstance(entry, Mark):
            entry()
        return True

    def run_until(self, mark: Mark) -> None:
        while not mark.reached:
            assert self.step(), "the queues wait for each other"

    def drain(self) -> None:
        while self.step():
            pass


class Shuffled:
    """The engine of one copy on such a machine."""

    def __init__(
        self, machine: Machine, memory: list[bytearray], destination: bytearray, source: bytearray
    ) -> None:
        self.machine, self.memory, self.destination, self.source = (
            machine,
            memory,
            destination,
            source,
        )
        self.target = bytearray(len(destination))
        """Where the pieces arrive: the destination has it once it is settled, as with one that is
        not dense.
        """
        self.streams = {queue: machine.lot.randrange(2) for queue in Queue}
        """Which one is the current stream of each device, for this copy."""

    def put(self, queue: Queue, entry: Entry) -> None:
        self.machine.put(queue, self.streams[queue], entry)

    def to_host(self, slot: int, start: int, stop: int) -> None:
        def act() -> None:
            self.memory[slot][: stop - start] = self.source[start:stop]

        self.put(Queue.SOURCE, act)

    def to_device(self, slot: int, start: int, stop: int) -> None:
        def act() -> None:
            self.target[start:stop] = self.memory[slot][: stop - start]

        self.put(Queue.DESTINATION, act)

    def settle(self) -> None:
        def act() -> None:
            self.destination[:] = self.target

        self.put(Queue.DESTINATION, act)

    def mark(self, queue: Queue) -> Mark:
        mark = Mark()

        def reach() -> None:
            mark.reached = True

        self.put(queue, reach)
        return mark

    def wait(self, mark: Mark) -> None:
        self.machine.run_until(mark)


def overwrite(memory: bytearray, content: bytes) -> None:
    memory[:] = content


def keep(found: dict[tuple[int, Queue], bytes], copy: tuple[int, Queue], memory: bytearray) -> None:
    found[copy] = bytes(memory)


def arrives(
    seed: int,
    shipped: Pump = pump,
    engine: type[Shuffled] = Shuffled,
    consumers: tuple[Queue, ...] = tuple(Queue),
) -> bool:
    """Make three copies that share two slots, each behind its producer and before its consumers;
    are all right?

    Each is made on any of the streams. ``consumers``: the queues on which the destination is read
    next; torch's own copy orders both. The source is overwritten as soon as its own stream allows,
    the destination by its own stream once all consumers have read it.
    """
    machine = Machine(seed)
    memory = [bytearray(b"\xff" * PIECE) for _ in range(SLOTS)]
    found: dict[tuple[int, Queue], bytes] = {}
    expected = [bytes((100 * copy + index) % 251 for index in range(SIZE)) for copy in range(3)]
    for copy, wanted in enumerate(expected):
        source, destination = bytearray(SIZE), bytearray(SIZE)
        one = engine(machine, memory, destination, source)
        one.put(Queue.SOURCE, partial(overwrite, source, wanted))
        shipped(one, SIZE, PIECE)
        read = []
        for queue in consumers:
            one.put(queue, partial(keep, found, (copy, queue), destination))
            read.append(Shuffled.mark(one, queue))
        one.put(Queue.SOURCE, partial(overwrite, source, b"\xee" * SIZE))
        for mark in read:
            one.put(Queue.DESTINATION, mark)
        one.put(Queue.DESTINATION, partial(overwrite, destination, b"\xdd" * SIZE))
    machine.drain()
    return found == {
        (copy, queue): wanted for copy, wanted in enumerate(expected) for queue in consumers
    }


def broken(
    shipped: Pump = pump,
    engine: type[Shuffled] = Shuffled,
    consumers: tuple[Queue, ...] = tuple(Queue),
) -> int:
    """Return in how many schedules a copy arrives wrong, or not at all."""

    def survives(seed: int) -> bool:
        try:
            return arrives(seed, shipped, engine, consumers)
        except (AssertionError, AttributeError, NameError, IndexError):
            return False

    return sum(not survives(seed) for seed in range(SCHEDULES))


def test_every_schedule_delivers() -> None:
    assert all(arrives(seed) for seed in range(SCHEDULES))


def test_the_queues_do_run_in_many_orders() -> None:
    orders = set()
    for seed in range(200):
        told: list[tuple[str, int]] = []

        class Told(Shuffled):
            def to_host(self, slot: int, start: int, stop: int, told: list[Any] = told) -> None:
                self.put(Queue.SOURCE, lambda: told.append(("to host", start)))

            def to_device(self, slot: int, start: int, stop: int, told: list[Any] = told) -> None:
                self.put(Queue.DESTINATION, lambda: told.append(("to device", start)))

        arrives(seed, engine=Told)
        orders.add(tuple(told))
    assert len(orders) > 10


class WithoutDataWait(Shuffled):
    """Lets pieces leave a slot before they are in it."""

    def mark(self, queue: Queue) -> Mark:
        mark = super().mark(queue)
        mark.reached = mark.reached or queue is Queue.SOURCE
        return mark


class WithoutSlotWait(Shuffled):
    """Lets pieces into a slot before the former ones have left it."""

    def mark(self, queue: Queue) -> Mark:
        mark = super().mark(queue)
        mark.reached = mark.reached or queue is Queue.DESTINATION
        return mark


class WithoutLastWait(Shuffled):
    """Lets the source's stream go on before the last piece is where it belongs: 0.4.0 did."""

    settled = False

    def settle(self) -> None:
        super().settle()
        self.settled = True

    def mark(self, queue: Queue) -> Mark:
        mark = super().mark(queue)
        mark.reached = mark.reached or self.settled
        return mark


class Backwards(Shuffled):
    """Marks the other queue."""

    def mark(self, queue: Queue) -> Mark:
        return super().mark(Queue.SOURCE if queue is Queue.DESTINATION else Queue.DESTINATION)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [WithoutDataWait, WithoutSlotWait, WithoutLastWait, Backwards])
def test_an_engine_that_waits_for_too_little_is_caught(engine: type[Shuffled]) -> None:
    assert broken(engine=engine) > SCHEDULES // 20


@pytest.mark.slow
def test_a_consumer_on_the_sources_stream_misses_the_last_wait() -> None:
    assert broken(engine=WithoutLastWait, consumers=(Queue.SOURCE,)) > SCHEDULES // 20


def mutants() -> Iterator[tuple[str, Pump]]:
    """Yield the shipped code less one statement, each in turn, and with its details changed."""
    source = textwrap.dedent(inspect.getsource(pump))
    tree = ast.parse(source)
    places = [
        (node, name, number)
        for node in ast.walk(tree)
        for name in ("body", "orelse")
        for number, statement in enumerate(getattr(node, name, ()))
        if isinstance(statement, ast.Expr | ast.Assign | ast.If) and not _is_text(statement)
    ]
    for node, name, number in places:
        block = getattr(node, name)
        statement = block[number]
        block[number] = ast.copy_location(ast.Pass(), statement)
        yield f"without: {ast.unparse(statement).splitlines()[0]}", _compiled(tree)
        block[number] = statement
    for before, after in (
        ("number % SLOTS", "0 * number"),
        ("engine.mark(Queue.SOURCE)", "engine.mark(Queue.DESTINATION)"),
        ("= engine.mark(Queue.DESTINATION)", "= engine.mark(Queue.SOURCE)"),
        ("wait(engine.mark(Queue.DESTINATION))", "wait(engine.mark(Queue.SOURCE))"),
        (
            "engine.settle()\n    engine.wait(engine.mark(Queue.DESTINATION))",
            "engine.wait(engine.mark(Queue.DESTINATION))\n    engine.settle()",
        ),
        ("range(0, size, piece)", "range(0, size - piece, piece)"),
        ("start + piece", "start + piece - 1"),
    ):
        assert before in source
        yield f"{after} for {before}", _compiled(ast.parse(source.replace(before, after)))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _compiled(tree: ast.Module) -> Pump:
    names = dict(vars(staged_copies))
    exec(compile(ast.fix_missing_locations(tree), "mutant", "exec"), names)
    made: Pump = names["pump"]
    return made


HARMLESS = {"0 * number for number % SLOTS"}
"""One slot alone is slow, and right."""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "mutant"), [pytest.param(*one, id=one[0]) for one in mutants()])
def test_every_mutant_fails(what: str, mutant: Pump) -> None:
    worst = broken(mutant)
    assert (worst == 0) == (what in HARMLESS), f"wrong in {worst} of {SCHEDULES} schedules"
