"""The order in which a probe does its work within its budget, and the verdict on each pair that
follows.

Every device is proven first, then all pairs get a first look, and then they are finished, some at a
time: where the time is too short for all, some are settled, and the next probe goes on where this
one ended. Pairs that have no device in common make their large copies at once. What needs several
pairs comes then; the full plan keeps a fifth of the time for it, and what is left of that goes to
pairs again. Large copies are then made once more, with other bits, until half of the time is spent.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations
from random import Random
from typing import Protocol

from msgspec import Struct, field

from ckptfix.devices.probe.cases import Plan, Section
from ckptfix.devices.probe.probe_report import SAMPLED, Kind, PairReport, ProbeReport, Verdict
from ckptfix.devices.probe.task import BAD_ENDINGS, Ending, Failure, Task, TaskResult, Work
from ckptfix.devices.torch_devices import Machine
from ckptfix.errors import OperationError
from ckptfix.hardware import Pair

_TELLING = 4 * 4096
"""Bytes from which the kind of damage is certain: in fewer, two lost pages are one."""

KILLED = "SIGKILL"
"""The signal with which the kernel ends a process when the host has no memory left: no evidence
against a pair.
"""


class PairRecord(Struct, kw_only=True):
    """One pair. ``done``: cases of each section that were done, by this probe or by ``earlier``
    ones.

    ``doubt``: why nothing can be proven. ``tried``: the trials of this probe, by ``Case.kind``.
    """

    pair: Pair
    earlier: PairReport | None = None
    trials: int = 0
    tried: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)
    ended: Verdict | None = None
    kind: str = ""
    why: str = ""
    doubt: str = ""
    unpoisoned: int = 0

    @property
    def open(self) -> bool:
        """True if more copies over this pair would tell more."""
        return not self.failures and self.ended is None and not self.doubt

    def __post_init__(self) -> None:
        if self.earlier is not None:
            self.done.update(self.earlier.done)

    def left(self, section: Section) -> bool:
        """Return whether cases of a section are left to do."""
        return self.done.get(section.name, 0) < len(section.cases)

    def finished(self, plan: Plan) -> bool:
        """Return whether nothing of a plan is left to do."""
        return not any(self.left(section) for section in plan.sections)

    def is_enough(self, plan: Plan) -> bool:
        """Return whether the pair is proven if nothing speaks against it.

        A pair that was finished before, and is asked for again, was in doubt: without a copy more
        it still is.
        """
        return self.trials > 0 and self.finished(plan)

    def add(self, outcome: TaskResult, section: Section) -> None:
        """Take in what became of one section."""
        self.add_failures(outcome)
        self.tried.update(outcome.tried)
        self.unpoisoned += outcome.unpoisoned
        if outcome.unusable < 0:
            done = len(section.cases) if outcome.ending is Ending.DONE else outcome.done
            self.done[section.name] = max(self.done.get(section.name, 0), done)
        match outcome.ending:
            case Ending.NO_MEMORY:
                self.doubt = f"no memory for {outcome.stage or 'the copies'}: {outcome.message}"
            case Ending.RAISED | Ending.DIED | Ending.HUNG:
                self._ended_badly(outcome)

    def add_failures(self, outcome: TaskResult) -> None:
        """Take in the copies that this pair made in a task, and those of them that were wrong."""
        self.trials += outcome.trials
        self.failures += [failure for failure in outcome.failures if failure.pair == self.pair]

    def _ended_badly(self, outcome: TaskResult) -> None:
        if not outcome.stage or KILLED in outcome.message:
            self.doubt = f"{outcome.stage or 'between two copies'}: {outcome.message}"
            return
        self.why = f"{outcome.stage}: {outcome.message}"
        if outcome.ending is Ending.HUNG:
            self.ended, self.kind = Verdict.HANG, "hang"
        else:
            kind = Kind.ERROR if outcome.ending is Ending.RAISED else Kind.CRASH
            self.ended, self.kind = Verdict.WRONG, kind.value

    def report(
        self,
        *,
        plan: Plan,
        seed: int,
        peer_access: bool | None,
        unusable: str,
        blind: bool,
        began: float = 0.0,
        measured: float = 0.0,
    ) -> PairReport:
        """Return the verdict. ``unusable``: what is wrong with a device of the pair; the rest: see
        ``PairReport``.
        """
        verdict, kind, offset, detail = self._verdict(plan, unusable)
        proving = verdict in (Verdict.HEALTHY, Verdict.INCONCLUSIVE) and not blind
        before = dict(self.earlier.tried) if self.earlier is not None and proving else {}
        return PairReport(
            pair=self.pair,
            verdict=verdict,
            kind=kind,
            first_offset=offset,
            trials=self._all_trials if proving else self.trials,
            failures=len(self.failures) + (self.ended is not None),
            seed=seed,
            detail=detail,
            peer_access=peer_access,
            plan=plan.name,
            blind=blind,
            done=dict(self.done) if proving and plan.name != SAMPLED else {},
            tried={**before, str(seed): dict(self.tried)} if proving and self.tried else before,
            began=began,
            measured=measured if self.trials or self.earlier is None else self.earlier.measured,
        )

    @property
    def _all_trials(self) -> int:
        return self.trials + (self.earlier.trials if self.earlier is not None else 0)

    def _verdict(self, plan: Plan, unusable: str) -> tuple[Verdict, str, int | None, str]:
        if unusable:
            return Verdict.UNUSABLE, "", None, unusable
        if self.ended is not None:
            return self.ended, self.kind, None, self.why
        if self.failures:
            shown = self._most_telling()
            detail = f"{len(self.failures)} of {self.trials} copies wrong, such as {shown.case}"
            return Verdict.WRONG, shown.kind, shown.first_offset, detail
        if self.doubt:
            return Verdict.INCONCLUSIVE, "", None, self.doubt
        if not self.is_enough(plan):
            return (
                Verdict.INCONCLUSIVE,
                "",
                None,
                (
                    f"only {self._all_trials} copies before time ran out, all correct; the next "
                    "probe continues from there"
                ),
            )
        return Verdict.HEALTHY, "", None, f"{self._all_trials} copies, all correct"

    def _most_telling(self) -> Failure:
        """Return the first failure of the kind that most failures are of, small payloads left
        aside.
        """
        told = [failure for failure in self.failures if failure.size >= _TELLING] or self.failures
        kind, _ = Counter(failure.kind for failure in told).most_common(1)[0]
        return next(failure for failure in told if failure.kind == kind)


_FOR_MORE = 0.5
"""The share of the time after which large copies are not repeated: nobody waits long for a healthy
answer.
"""

_WHERE_IT_WORKS = (
    ". If only one process can use the device, measure in that process: "
    "probe_peer_copies(in_process=True), or before it starts: ckptfix doctor --peer-copies"
)


class Bench(Protocol):
    """A place where tasks are done: a worker, or this process. ``starting``: seconds that starting
    took so far.
    """

    starting: float

    def machine(self) -> Machine:
        """Return the devices. Raises OperationError when that cannot be found out."""

    def run(self, task: Task, seconds: float) -> TaskResult:
        """Do a task. Raises OperationError when nothing can be done any more."""

    def close(self) -> None:
        """End what was started."""


class Measurements(Struct, kw_only=True):
    """Results of a probe before they become verdicts.

    ``unusable``: what is wrong, by device. ``triples``: the number of all chains. ``proven``:
    devices whose exchange with the host was proven by this probe.
    """

    records: dict[Pair, PairRecord]
    unusable: dict[int, str] = field(default_factory=dict)
    proven: set[int] = field(default_factory=set)
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

    def __init__(
        self,
        bench: Bench,
        pairs: Sequence[Pair],
        plan: Plan,
        *,
        budget: float,
        seed: int,
        known: ProbeReport | None = None,
    ) -> None:
        """``known``: what earlier probes did of this plan; it is not done again."""
        before = {} if known is None else known.pairs
        self._proven = frozenset() if known is None else frozenset(known.hosts)
        records = [PairRecord(pair=pair, earlier=before.get(pair)) for pair in pairs]
        records.sort(key=lambda record: (-sum(record.done.values()), record.pair))
        self.found = Measurements(records={record.pair: record for record in records})
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

    def run(self) -> Measurements:
        """Do what the budget allows."""
        try:
            for index in sorted(
                {index for pair in self.found.records for index in pair} - self._proven
            ):
                self._host(index)
            self._sections(slice(0, 1), 1.0, together=False)
            self._sections(slice(1, None), self._plan.single)
            self._together()
            self._chains()
            self._sections(slice(1, None), 1.0)
            self._again()
        except OperationError as error:
            return self.stopped(str(error))
        return self.found

    def stopped(self, reason: str) -> Measurements:
        """Return what is known when nothing more can be done."""
        self.found.stopped = reason
        for record in self.found.records.values():
            if record.open and not record.is_enough(self._plan):
                record.doubt = reason
        return self.found

    def _left(self, share: float = 1.0) -> float:
        return self._budget * share - self.spent

    def _ask(
        self,
        work: Work,
        pairs: tuple[Pair, ...],
        *,
        section: int = 0,
        start: int = 0,
        again: int = 0,
        share: float = 1.0,
    ) -> TaskResult:
        task = Task(
            work=work,
            pairs=pairs,
            plan=self._plan.name,
            seed=self._seed,
            section=section,
            start=start,
            again=again,
        )
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
            self.found.proven.add(index)
            return
        where = f"device {index}: {outcome.stage or 'starting'}: {outcome.message}"
        if (
            outcome.ending is not Ending.NO_MEMORY
            and outcome.trials
            and KILLED not in outcome.message
        ):
            self.found.unusable[index] = where
            return
        # It never worked, which may be this moment's fault: another process has it for itself, or
        # it starts slowly.
        advice = "" if outcome.ending is Ending.NO_MEMORY else _WHERE_IT_WORKS
        for pair, record in self.found.records.items():
            if index in pair:
                record.doubt = where + advice

    def _sections(self, which: slice, share: float, *, together: bool = True) -> None:
        numbers = range(len(self._plan.sections))[which]
        for wave in _waves(tuple(self.found.records), together=together):
            for number in numbers:
                section = self._plan.sections[number]
                waiting = [pair for pair in wave if self.found.records[pair].left(section)]
                for start in sorted(
                    {self.found.records[pair].done.get(section.name, 0) for pair in waiting}
                ):
                    alike = [
                        pair
                        for pair in waiting
                        if self.found.open(pair)
                        and self.found.records[pair].done.get(section.name, 0) == start
                    ]
                    self._section(number, alike, start, share)

    def _section(
        self, number: int, pairs: Sequence[Pair], start: int, share: float, again: int = 0
    ) -> None:
        """Have a section done by all of these pairs at once where it is one of large copies, else
        one by one.
        """
        section = self._plan.sections[number]
        groups = (
            [tuple(pairs)] if section.is_large and len(pairs) > 1 else [(pair,) for pair in pairs]
        )
        for group in groups:
            if self._left(share) <= 0:
                return
            outcome = self._ask(
                Work.SECTION, group, section=number, start=start, again=again, share=share
            )
            if len(group) == 1 or (
                outcome.ending in (Ending.DONE, Ending.OUT_OF_TIME) and outcome.unusable < 0
            ):
                for pair in group:
                    self.found.records[pair].add(outcome, section)
                continue
            # One pair of the group is to blame: asked alone, each answers for itself. What was
            # wrong already stays so.
            for pair in group:
                self.found.records[pair].add_failures(outcome)
            for pair in group:
                if self.found.open(pair):
                    self._section(number, (pair,), start, share, again)
            if outcome.ending in BAD_ENDINGS and all(self.found.open(pair) for pair in group):
                for pair in group:  # nobody is to blame, or there was no time to find out
                    self.found.records[
                        pair
                    ].doubt = f"{outcome.stage or 'several pairs'}: {outcome.message}"

    def _again(self) -> None:
        large = [number for number, section in enumerate(self._plan.sections) if section.is_large]
        finished = [
            pair for pair, record in self.found.records.items() if record.finished(self._plan)
        ]
        for again in range(1, self._plan.again + 1):
            for wave in _waves(finished):
                for number in large:
                    if self._left(_FOR_MORE) > 0:
                        self._section(
                            number,
                            [pair for pair in wave if self.found.open(pair)],
                            0,
                            _FOR_MORE,
                            again,
                        )

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

    def _take_in(self, outcome: TaskResult, pairs: tuple[Pair, ...]) -> None:
        """Note what copies that depend on each other showed: a failure names its pair, a bad end
        does not.
        """
        if outcome.ending is Ending.NO_MEMORY:
            self.found.left_out[
                f"{outcome.stage or 'several pairs at once'}: {outcome.message}"
            ] = None
            return
        for pair in pairs:
            record = self.found.records[pair]
            record.add_failures(outcome)
            if outcome.ending is not Ending.DONE:
                record.doubt = f"{outcome.stage or 'several pairs'}: {outcome.message}"


def _waves(pairs: Sequence[Pair], *, together: bool = True) -> Iterator[tuple[Pair, ...]]:
    """Yield all pairs, in groups in which no two have a device in common; one by one if not
    ``together``.
    """
    waiting = list(pairs)
    while waiting:
        wave: list[Pair] = []
        for pair in waiting:
            if not any(index in other for other in wave for index in pair):
                wave.append(pair)
            if not together:
                break
        waiting = [pair for pair in waiting if pair not in wave]
        yield tuple(wave)


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
