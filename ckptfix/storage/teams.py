"""Work that several processes share: each does some of the units, and all of them go on with the
same results.

The processes of a team run the same verb on the same folder. Planning is cheap, so each of them
plans everything alone and calls ``share`` with the same units. The results are gathered, and every
process goes on as a single one would; the leader alone writes and prints.

``launched_ranks`` has the processes that see each other; the others here work one by one.
"""

import heapq
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from ckptfix.errors import OperationError
from ckptfix.storage.files import AnyPath
from ckptfix.storage.parallel import Progress, Share, share_cores
from ckptfix.storage.partial_results import PartialResults, Unit, Units
from ckptfix.wording import count_of, human_size

# Shares of units: the same on every process, as each of them plans for all.

_OVERHEAD = 1 << 16
"""Bytes that could be read in the time that a unit takes besides: without it 100,000 empty tensors
weigh nothing.
"""

_BALANCED = 1.02
"""A plan is good enough when the largest share is at most this times the mean."""

_PARTS = 50
"""Parts of a mean share: files are cut into stretches no longer than one of them, where complete
files do not fit.
"""


def plan_shares(units: Sequence[Unit], count: int) -> list[list[int]]:
    """Return which units each of ``count`` processes does: the largest go first, to the least
    loaded process.

    All units of a file go together where that is balanced, because a second read of a byte then
    finds it in the page cache; otherwise neighbours stay together.
    """
    files: dict[object, list[int]] = {}
    for number, unit in enumerate(units):
        files.setdefault(
            unit.files[0][:1] + unit.files[0][3:] if unit.files else number, []
        ).append(number)
    for numbers in files.values():
        numbers.sort(key=lambda number: units[number].offset)
    weights = [unit.size + _OVERHEAD for unit in units]
    mean = sum(weights) / count
    best: list[list[int]] = []
    lowest = float("inf")
    for longest in (None, mean / _PARTS):
        stretches = [part for numbers in files.values() for part in _cut(numbers, weights, longest)]
        highest, shares = _largest_first(stretches, weights, count)
        if highest < lowest:
            lowest, best = highest, shares
        if highest <= _BALANCED * mean:
            break
    return best


def _cut(numbers: list[int], weights: Sequence[int], longest: float | None) -> Iterator[list[int]]:
    """Yield stretches of neighbours, none heavier than ``longest`` unless a single unit is."""
    if longest is None:
        yield numbers
        return
    part: list[int] = []
    weight = 0
    for number in numbers:
        if part and weight + weights[number] > longest:
            yield part
            part, weight = [], 0
        part.append(number)
        weight += weights[number]
    yield part


def _largest_first(
    stretches: list[list[int]], weights: Sequence[int], count: int
) -> tuple[float, list[list[int]]]:
    heavy = [
        (-sum(weights[number] for number in part), place) for place, part in enumerate(stretches)
    ]
    least = [(0, rank) for rank in range(count)]
    shares: list[list[int]] = [[] for _ in range(count)]
    for weight, place in sorted(heavy):
        load, rank = least[0]
        shares[rank] += stretches[place]
        heapq.heapreplace(least, (load - weight, rank))
    return max(load for load, _ in least), [sorted(numbers) for numbers in shares]


# The work itself.

Done = Callable[..., None]
"""Called with the number of a unit and its result, JSON values; ``is_final=False`` when another run
may fare better.
"""

Do = Callable[[Sequence[int], Done, Progress], None]
"""Does the units of these numbers. It calls its ``Progress`` with bytes, which raises Stopped once
another fails.
"""

Assume = Callable[[int], Any]
"""Returns a result that leads on, for a unit of another share whose result is not known."""


class Team(Protocol):
    """The processes that share the work of a verb, as the verb sees them."""

    leads: bool
    """True for the process that writes and prints."""

    here: int
    """Number of the processes on this machine."""

    partial: PartialResults | None
    """The results that outlive this run, for the next one."""

    def share(
        self,
        what: str,
        units: Sequence[Unit],
        do: Do,
        assume: Assume | None,
        progress: Progress | None,
    ) -> list[Any]:
        """Return the results of all units, in their order; this process does its share of them.

        ``assume``: None for units that follow from the results of others, which a lone share of
        them does not know.
        """

    def told(self, make: Callable[[], Any]) -> Any:
        """Return what the leader's ``make`` returns, JSON values, on every process."""

    def agree(self, error: BaseException | None) -> None:
        """Find out whether all ended alike; raises TeamError where not, or the leader's own error
        on the leader.
        """


_current: Team | None = None


def current() -> Team | None:
    """Return the team that this process works in, None when it works alone."""
    return _current


def leads() -> bool:
    """Return whether this process writes and prints: always, but for the followers of a team."""
    return _current is None or _current.leads


def knows_all() -> bool:
    """Return whether this process learns what the others have found: a share without a network does
    not.
    """
    return not isinstance(_current, LoneShare | Finisher)


def is_share() -> bool:
    """Return whether this process does one share, and leaves the end of the work to another run."""
    return isinstance(_current, LoneShare)


@contextmanager
def working_in(team: Team) -> Iterator[None]:
    """Let everything inside this block work in a team."""
    global _current
    _current = team
    share_cores(team.here)
    try:
        yield
    finally:
        _current = None
        share_cores(1)


@contextmanager
def as_one() -> Iterator[None]:
    """Let all processes of a team end this block alike: an error that one of them alone has ends
    all of them.
    """
    team = _current
    if team is None:
        yield
        return
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        team.agree(error)
        raise
    team.agree(None)


@contextmanager
def alone() -> Iterator[None]:
    """Let what is inside this block be done by this process: it is a unit of work already."""
    global _current
    team, _current = _current, None
    try:
        yield
    finally:
        _current = team


@contextmanager
def by_itself() -> Iterator[None]:
    """Let a share, and the process that finishes their work, do all that is inside this block, as a
    single process does.
    """
    with nullcontext() if knows_all() else alone():
        yield


def each(
    what: str,
    files: Sequence[tuple[AnyPath, object, int]],
    work: Callable[[int, Progress | None], Any],
    progress: Progress | None,
    *,
    is_final: Callable[[Any], bool] = lambda result: True,
) -> list[Any]:
    """Return the results, JSON values, of ``work`` on each number; a team shares them.

    ``files``: for each number the file that is read, what of it, and how many bytes that is.
    ``is_final``: returns whether another run would have the same result.
    """
    if _current is None:
        return [work(number, progress) for number in range(len(files))]
    units = Units()

    def do(numbers: Sequence[int], done: Done, progress: Progress) -> None:
        with alone():
            for number in numbers:
                result = work(number, progress)
                done(number, result, is_final=is_final(result))

    every = [units.of((path, part), size) for path, part, size in files]
    return _current.share(what, every, do, lambda number: [], progress)


class InOrder(ABC):
    """Processes that bring the units into one order first: a list that came out of a set has
    another one in each.
    """

    def share(
        self,
        what: str,
        units: Sequence[Unit],
        do: Do,
        assume: Assume | None,
        progress: Progress | None,
    ) -> list[Any]:
        """Return the results of all units, as ``Team`` says."""
        order = sorted(
            range(len(units)), key=lambda number: (units[number].key, units[number].files)
        )

        def do_in_order(numbers: Sequence[int], done: Done, progress: Progress) -> None:
            places = {order[place]: place for place in numbers}
            do(
                list(places),
                lambda number, *result, **words: done(places[number], *result, **words),
                progress,
            )

        sorted_units = [units[number] for number in order]
        assumed = None if assume is None else lambda place: assume(order[place])
        found = self._share(what, sorted_units, do_in_order, assumed, progress)
        results = dict(zip(order, found, strict=True))
        return [results[number] for number in range(len(units))]

    @abstractmethod
    def _share(
        self,
        what: str,
        units: Sequence[Unit],
        do: Do,
        assume: Assume | None,
        progress: Progress | None,
    ) -> list[Any]:
        """Return the results of units that are in order."""


def resuming(units: Sequence[Unit], known: Any, partial: PartialResults) -> str:
    """Return in words how much of the work an earlier run has done, and when."""
    size = human_size(sum(units[number].size for number in known))
    since = partial.oldest()
    when = (
        f", the oldest before {time.strftime('%Y-%m-%d %H:%M', time.localtime(since))}"
        if since
        else ""
    )
    number = f"{len(known)} of {count_of(len(units), 'unit')} ({size})"
    return f"resuming: {number} done by an earlier run{when}: {partial.folder}"


class LoneShare(InOrder):
    """One share of a job array: a process that sees no other, and leaves its results for the one
    that finishes their work.
    """

    leads = False
    here = 1

    def __init__(self, share: Share, partial: PartialResults) -> None:
        self.partial: PartialResults | None = partial
        self._mine, self._partial = share, partial
        self.units = self.resumed = self.nbytes = 0
        self.unread = 0

    def _share(
        self,
        what: str,
        units: Sequence[Unit],
        do: Do,
        assume: Assume | None,
        progress: Progress | None,
    ) -> list[Any]:
        """Do this share of the units; of the others, return what ``assume`` does."""
        if assume is None:
            return [None] * len(units)
        mine = plan_shares(units, self._mine.total)[self._mine.number]
        known = self._partial.known(what, [units[number] for number in mine])
        found = {mine[place]: one.result for place, one in known.items() if one.is_final}
        self.units += len(mine)
        self.resumed += len(found)
        self.nbytes += sum(units[number].size for number in mine)

        def done(number: int, result: Any, *, is_final: bool = True) -> None:
            self._partial.add(what, units[number], result, is_final=is_final)
            self.unread += not is_final
            found[number] = result

        do(
            [number for number in mine if number not in found],
            done,
            progress or (lambda count: None),
        )
        return [
            found[number] if number in found else assume(number) for number in range(len(units))
        ]

    def told(self, make: Callable[[], Any]) -> Any:
        """Refuse: nobody can be told anything."""
        raise OperationError("a share of a job array cannot do this")

    def agree(self, error: BaseException | None) -> None:
        """Do nothing: there are no others."""


class LoneWorker(InOrder):
    """A single process that keeps partial results, for a run that may be interrupted."""

    leads = True
    here = 1

    def __init__(self, partial: PartialResults, say: Callable[[str], None]) -> None:
        self.partial: PartialResults | None = partial
        self._results, self._say = partial, say

    def _share(
        self,
        what: str,
        units: Sequence[Unit],
        do: Do,
        assume: Assume | None,
        progress: Progress | None,
    ) -> list[Any]:
        """Do what no earlier run has done."""
        known = self._results.known(what, units)
        found = {number: one.result for number, one in known.items() if one.is_final}
        if assume is not None:
            self._tell(units, found.keys())

        def done(number: int, result: Any, *, is_final: bool = True) -> None:
            self._results.add(what, units[number], result, is_final=is_final)
            found[number] = result

        left = [number for number in range(len(units)) if number not in found]
        do(left, done, progress or (lambda count: None))
        return [found[number] for number in range(len(units))]

    def _tell(self, units: Sequence[Unit], known: Collection[int]) -> None:
        """Say how much an earlier run has done."""
        if known:
            self._say(resuming(units, known, self._results))

    def told(self, make: Callable[[], Any]) -> Any:
        """Return what ``make`` does."""
        return make()

    def agree(self, error: BaseException | None) -> None:
        """Do nothing: there are no others."""


class Finisher(LoneWorker):
    """The process that ends the work of a job array: it does what no share has done, and says which
    ones are missing.
    """

    def __init__(self, partial: PartialResults, count: int, say: Callable[[str], None]) -> None:
        super().__init__(partial, say)
        self._count = count
        self._told: set[int] = set()

    def _tell(self, units: Sequence[Unit], known: Collection[int]) -> None:
        """Say which shares are missing, each once."""
        for number, share in enumerate(plan_shares(units, self._count)):
            if number not in self._told and any(unit not in known for unit in share):
                self._told.add(number)
                self._say(
                    f"{self._results.folder}: results of share {number}/{self._count} are missing, "
                    "so this process does its work"
                )
