"""The executor: who does the work of a verb, a value that the verb is given.

Planning is cheap, so each of several processes plans everything alone and calls ``map`` with the
same units. Every process goes on with the results of all units, as a single one would; the leader
alone writes and prints. ``launched_ranks`` has the processes that see each other.
"""

import heapq
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ckptfix.storage.files import AnyPath
from ckptfix.storage.parallel import Progress, Share
from ckptfix.storage.results import PartialResults, Unit, Units
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
"""Does the units of these numbers, and calls its ``Progress`` with bytes."""

Assume = Callable[[int], Any]
"""Returns a result that leads on, for a unit of another share whose result is not known."""


class Executor:
    """The threads of this process, which do all work; subclasses share it or remember its results.

    ``leads``: this process writes and prints. ``knows_all``: it learns the results of all units.
    ``is_share``: another run ends the work. ``has_units``: units must be named and their results
    packed as JSON values; threads do without. ``has_ended``: a process has failed alone, or is
    gone; the others stop, and this one must not begin anything that they share.
    """

    leads = True
    knows_all = True
    is_share = False
    has_units = False
    has_ended = False
    partial: PartialResults | None = None

    @property
    def complete(self) -> "Executor":
        """The executor of work whose results every process needs: a share does all of it."""
        return self if self.knows_all else THREADS

    def map(
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
        results: dict[int, Any] = {}

        def done(number: int, result: Any, *, is_final: bool = True) -> None:
            results[number] = result

        do(range(len(units)), done, progress or (lambda count: None))
        return [results[number] for number in range(len(units))]

    def told(self, make: Callable[[], Any]) -> Any:
        """Return what the leader's ``make`` returns, JSON values, on every process."""
        return make()

    def ensure_same(self, mine: Callable[[], Any], differs: Callable[[str, Any], str]) -> None:
        """Compare JSON values with the leader's. Raises OperationError on a process that has
        others.

        ``differs``: gets the leader's name and values, and returns the difference in words that
        follow this one's name; "" where it does not matter.
        """

    def agree(self, error: BaseException | None) -> None:
        """Find out whether all processes ended alike; raises TeamError where not, or the leader's
        own error on the leader.
        """

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Let all processes end this block alike: an error that one of them alone has ends all."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            self.agree(error)
            raise
        self.agree(None)


THREADS = Executor()


def each(
    executor: Executor,
    what: str,
    files: Sequence[tuple[AnyPath, object, int]],
    work: Callable[[int, Progress | None], Any],
    progress: Progress | None,
    *,
    is_final: Callable[[Any], bool] = lambda result: True,
) -> list[Any]:
    """Return the results, JSON values, of ``work`` on each number.

    ``files``: for each number the file that is read, what of it, and how many bytes that is.
    ``is_final``: returns whether another run would have the same result.
    """
    if not executor.has_units:
        return [work(number, progress) for number in range(len(files))]
    units = Units()

    def do(numbers: Sequence[int], done: Done, progress: Progress) -> None:
        for number in numbers:
            result = work(number, progress)
            done(number, result, is_final=is_final(result))

    every = [units.of((path, part), size) for path, part, size in files]
    return executor.map(what, every, do, lambda number: [], progress)


class Sharing(Executor, ABC):
    """An executor of units, whose results other processes or later runs have, too.

    ``unread``: how many units could not be read.
    """

    has_units = True
    unread = 0

    def map(
        self,
        what: str,
        units: Sequence[Unit],
        do: Do,
        assume: Assume | None,
        progress: Progress | None,
    ) -> list[Any]:
        """Return the results of all units, as ``Executor`` says."""
        if self.is_share and assume is None:
            return [None] * len(units)
        # A list that came out of a set has another order in each process.
        order = sorted(
            range(len(units)), key=lambda number: (units[number].key, units[number].files)
        )
        units = [units[number] for number in order]
        known, mine = self._plan(what, units, assume)
        places = {order[place]: place for place in mine}
        found: dict[int, Any] = {}

        def done(number: int, result: Any, *, is_final: bool = True) -> None:
            self.unread += not is_final
            if self.partial is not None and is_final:
                self.partial.add(what, units[places[number]], result)
            found[places[number]] = result

        do(list(places), done, progress or (lambda count: None))
        results = known | self._gathered(what, found)
        if self.is_share and assume is not None:
            for place, number in enumerate(order):
                results.setdefault(place, assume(number))
        by_number = {number: results[place] for place, number in enumerate(order)}
        return [by_number[number] for number in range(len(units))]

    @abstractmethod
    def _plan(
        self, what: str, units: Sequence[Unit], assume: Assume | None
    ) -> tuple[dict[int, Any], Sequence[int]]:
        """Return the known results, and the numbers of the units that this process does."""

    def _gathered(self, what: str, found: dict[int, Any]) -> dict[int, Any]:
        """Return the results of all processes."""
        return found


def resuming(units: Sequence[Unit], known: Collection[int], partial: PartialResults) -> str:
    """Return in words how much of the work an earlier run has done, and when."""
    size = human_size(sum(units[number].size for number in known))
    since = partial.oldest()
    when = (
        f", the oldest finished before {time.strftime('%Y-%m-%d %H:%M', time.localtime(since))}"
        if since
        else ""
    )
    number = f"{len(known)} of {count_of(len(units), 'unit')} ({size})"
    return f"resuming: {number} done by an earlier run{when}: {partial.folder}"


class Sharded(Sharing):
    """One share of a job array, which leaves its results for the run that ends the work."""

    leads = False
    knows_all = False
    is_share = True

    def __init__(self, share: Share, partial: PartialResults) -> None:
        self.partial: PartialResults = partial
        self._share = share
        self.units = self.resumed = self.nbytes = 0

    def _plan(
        self, what: str, units: Sequence[Unit], assume: Assume | None
    ) -> tuple[dict[int, Any], Sequence[int]]:
        mine = plan_shares(units, self._share.total)[self._share.number]
        known = self.partial.known(what, [units[number] for number in mine])
        self.units += len(mine)
        self.resumed += len(known)
        self.nbytes += sum(units[number].size for number in mine)
        return (
            {mine[place]: result for place, result in known.items()},
            [number for place, number in enumerate(mine) if place not in known],
        )


class Remembering(Sharing):
    """A single process that goes on from the results of an earlier run, or of shares.

    ``shares``: their number. It does what no share has done, and says which ones are missing.
    """

    def __init__(
        self, partial: PartialResults, say: Callable[[str], None], shares: int = 0
    ) -> None:
        self.partial: PartialResults = partial
        self.knows_all = not shares
        self._say, self._missing = say, set(range(shares))
        self._shares = shares

    def _plan(
        self, what: str, units: Sequence[Unit], assume: Assume | None
    ) -> tuple[dict[int, Any], Sequence[int]]:
        known = self.partial.known(what, units)
        if assume is not None and self._shares:
            for number, share in enumerate(plan_shares(units, self._shares)):
                if number in self._missing and any(unit not in known for unit in share):
                    self._missing.discard(number)
                    self._say(
                        f"{self.partial.folder}: results of share {number}/{self._shares} are "
                        "missing, so this process does that share too"
                    )
        elif assume is not None and known:
            self._say(resuming(units, known, self.partial))
        return known, [number for number in range(len(units)) if number not in known]
