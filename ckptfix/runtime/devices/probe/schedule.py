"""In which order a probe does its work, and when it stops: the budget is kept, and what it left out is known.

Every device is proven first, then all pairs get a first look, and then they are finished one by one: where the time is
too short for all, some are settled, and the next quick probe settles more. The last fifth is for what needs several
pairs; what is left of it goes to pairs again.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from random import Random
from typing import Protocol

from ckptfix.errors import OperationError
from ckptfix.runtime.devices.pairs import Pair
from ckptfix.runtime.devices.probe.cases import Plan
from ckptfix.runtime.devices.probe.identity import Machine
from ckptfix.runtime.devices.probe.record import KILLED, PairRecord
from ckptfix.runtime.devices.probe.task import Ending, Outcome, Task, Work

_FOR_SINGLE_PAIRS = 0.8

_WHERE_IT_WORKS = (
    ". If only one process may use the device, measure in that one: probe_peer_copies(in_process=True), or before it "
    "starts: ckptfix doctor --peer-copies"
)


class Bench(Protocol):
    """Where tasks are done: in a worker, or in this process. ``starting``: seconds that starting took so far."""

    starting: float

    def machine(self) -> Machine:
        """Return the devices. Raises OperationError when that cannot be found out."""

    def run(self, task: Task, seconds: float) -> Outcome:
        """Do a task. Raises OperationError when nothing can be done any more."""

    def close(self) -> None:
        """End what was started."""


@dataclass(slots=True, kw_only=True)
class Found:
    """What a probe knows in the end. ``unusable``: what is wrong, by device. ``triples``: chains there are in all."""

    records: dict[Pair, PairRecord]
    unusable: dict[int, str] = field(default_factory=dict)
    round_trips: dict[int, int] = field(default_factory=dict)
    at_once: int = 0
    chains: int = 0
    triples: int = 0
    left_out: dict[str, None] = field(default_factory=dict)
    stopped: str = ""

    def of_device(self, pair: Pair) -> str:
        """Return what is wrong with a device of a pair; "" when nothing is."""
        return next((self.unusable[index] for index in pair if index in self.unusable), "")

    def open(self, pair: Pair) -> bool:
        """Return whether nothing speaks against a pair so far."""
        return not self.of_device(pair) and self.records[pair].open


class Schedule:
    """One probe over some ordered pairs."""

    def __init__(self, bench: Bench, pairs: Sequence[Pair], plan: Plan, *, budget: float, seed: int) -> None:
        self.found = Found(records={pair: PairRecord(pair=pair) for pair in pairs})
        self._bench = bench
        self._plan = plan
        self._budget = budget
        self._seed = seed
        self._began = time.monotonic()
        self._starting_before = bench.starting

    @property
    def spent(self) -> float:
        """Seconds of measuring; starting a worker does not count."""
        return time.monotonic() - self._began - (self._bench.starting - self._starting_before)

    def run(self) -> Found:
        """Do what the budget allows."""
        try:
            for index in sorted({index for pair in self.found.records for index in pair}):
                self._host(index)
            self._sections(slice(0, 1), 1.0)
            self._sections(slice(1, None), _FOR_SINGLE_PAIRS)
            self._together()
            self._chains()
            self._sections(slice(1, None), 1.0)
        except OperationError as error:
            return self.stopped(str(error))
        return self.found

    def stopped(self, reason: str) -> Found:
        """Return what is known when nothing more can be done."""
        self.found.stopped = reason
        for record in self.found.records.values():
            if record.open and len(record.sections) < len(self._plan.sections):
                record.doubt = reason
        return self.found

    def _left(self, share: float = 1.0) -> float:
        return self._budget * share - self.spent

    def _ask(self, work: Work, pairs: tuple[Pair, ...], *, section: int = 0, share: float = 1.0) -> Outcome:
        task = Task(work=work, pairs=pairs, plan=self._plan.name, seed=self._seed, section=section)
        outcome = self._bench.run(task, max(self._left(share), 0.0))
        if outcome.unusable >= 0:
            self.found.unusable[outcome.unusable] = outcome.message
        self.found.left_out.update(dict.fromkeys(outcome.left_out))
        return outcome

    def _host(self, index: int) -> None:
        if self._left() <= 0:
            return
        outcome = self._ask(Work.HOST, ((index, index),))
        self.found.round_trips[index] = outcome.trials
        if outcome.ending is Ending.DONE:
            return
        where = f"device {index}: {outcome.stage or 'starting'}: {outcome.message}"
        if outcome.ending is not Ending.NO_MEMORY and outcome.trials and KILLED not in outcome.message:
            self.found.unusable[index] = where
            return
        # It never worked, which may be this moment's fault: another process has it for itself, or it starts slowly.
        advice = "" if outcome.ending is Ending.NO_MEMORY else _WHERE_IT_WORKS
        for pair, record in self.found.records.items():
            if index in pair:
                record.doubt = where + advice

    def _sections(self, which: slice, share: float) -> None:
        numbers = range(len(self._plan.sections))[which]
        for pair, record in self.found.records.items():
            for number in numbers:
                if self._left(share) <= 0:
                    return
                if self.found.open(pair) and number not in record.sections:
                    outcome = self._ask(Work.SECTION, (pair,), section=number, share=share)
                    record.add(outcome, number)

    def _together(self) -> None:
        pairs = tuple(pair for pair in self.found.records if self.found.open(pair))
        if len(pairs) < 2 or self._left() <= 0:
            return
        outcome = self._ask(Work.TOGETHER, pairs)
        self._take_in(outcome, pairs)
        self.found.at_once = len(pairs) if outcome.ending is Ending.DONE else 0

    def _chains(self) -> None:
        chains = tuple(_in_covering_order(tuple(self.found.records), self._seed))
        self.found.triples = len(chains)
        for hops in chains:
            if self._left() <= 0:
                return
            if all(self.found.open(pair) for pair in hops):
                outcome = self._ask(Work.CHAIN, hops)
                self._take_in(outcome, hops)
                self.found.chains += outcome.ending is Ending.DONE

    def _take_in(self, outcome: Outcome, pairs: tuple[Pair, ...]) -> None:
        """Note what copies that depend on each other showed: a failure names its pair, a bad end does not."""
        if outcome.ending is Ending.NO_MEMORY:
            self.found.left_out[f"{outcome.stage or 'several pairs at once'}: {outcome.message}"] = None
            return
        for pair in pairs:
            record = self.found.records[pair]
            record.trials += outcome.trials
            record.failures += [failure for failure in outcome.failures if failure.pair == pair]
            if outcome.ending is not Ending.DONE:
                record.doubt = f"{outcome.stage or 'several pairs'}: {outcome.message}"


def _in_covering_order(pairs: tuple[Pair, ...], seed: int) -> Iterator[tuple[Pair, ...]]:
    """Yield every chain a -> b -> c -> a (with two devices, a -> b -> a) of these pairs.

    Those that bring in most pairs not seen in a chain yet come first: time may not do for all.
    """
    indexes = sorted({index for pair in pairs for index in pair})
    rings = permutations(indexes, min(3, len(indexes)))
    chains = [tuple(zip(ring, (*ring[1:], ring[0]), strict=True)) for ring in rings]
    waiting = [chain for chain in chains if set(chain) <= set(pairs)]
    Random(seed).shuffle(waiting)
    uncovered = {pair for chain in waiting for pair in chain}
    while uncovered:
        best = max(waiting, key=lambda chain: len(uncovered.intersection(chain)))
        waiting.remove(best)
        uncovered.difference_update(best)
        yield best
    yield from waiting
