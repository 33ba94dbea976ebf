"""Work that several processes share: each does some of the units, and all of them go on with the same results.

The processes of a team run the same verb on the same folder. Planning is cheap, so each of them plans everything alone
and calls ``share`` with the same units. The results are gathered, and every process goes on as a single one would; the
leader alone writes and prints.

Torch's store comes from ``training.rendezvous``; nothing here knows a network. It is a store and no collective
operation: a process that waits for a key can stop when another one has failed, and 1,024 processes need one connection
each, not one to each other.
"""

import hashlib
import heapq
import json
import os
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from ckptfix.errors import CkptfixError, OperationError, TeamError
from ckptfix.storage.parallel import Progress, Share, share_cores
from ckptfix.storage.partial_results import PartialResults, Unit, Units
from ckptfix.wording import count_of, human_size, moment

# Shares of units: the same on every process, as each of them plans for all.

_OVERHEAD = 1 << 16
"""Bytes that could be read in the time that a unit takes besides: without it 100,000 empty tensors weigh nothing."""

_BALANCED = 1.02
"""A plan is good enough when the largest share is at most this times the mean."""

_PARTS = 50
"""Parts of a mean share: files are cut into stretches no longer than one of them, where complete files do not fit."""


def plan_shares(units: Sequence[Unit], count: int) -> list[list[int]]:
    """Return which units each of ``count`` processes does: the largest go first, to the least loaded process.

    All units of a file go together where that is balanced, because a second read of a byte then finds it in the page
    cache; otherwise neighbours stay together.
    """
    files: dict[object, list[int]] = {}
    for number, unit in enumerate(units):
        files.setdefault(unit.files[0][:1] + unit.files[0][3:] if unit.files else number, []).append(number)
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
    heavy = [(-sum(weights[number] for number in part), place) for place, part in enumerate(stretches)]
    least = [(0, rank) for rank in range(count)]
    shares: list[list[int]] = [[] for _ in range(count)]
    for weight, place in sorted(heavy):
        load, rank = least[0]
        shares[rank] += stretches[place]
        heapq.heapreplace(least, (load - weight, rank))
    return max(load for load, _ in least), [sorted(numbers) for numbers in shares]


# The work itself.

Done = Callable[..., None]
"""Called with the number of a unit and its result, JSON values; ``is_final=False`` when another run may fare better."""

Do = Callable[[Sequence[int], Done, Progress], None]
"""Does the units of these numbers. It calls its ``Progress`` with bytes: that raises once another one has failed."""

Assume = Callable[[int], Any]
"""Returns a result that leads on, for a unit of another share whose result is not known."""


class Stopped(Exception):
    """Another process has failed. Not a CkptfixError: nothing on the way may take it for a file that is unreadable."""


class Team(Protocol):
    """The processes that share the work of a verb, as the verb sees them."""

    leads: bool
    """True for the process that writes and prints."""

    here: int
    """Number of the processes on this machine."""

    def share(
        self, what: str, units: Sequence[Unit], do: Do, assume: Assume | None, progress: Progress | None
    ) -> list[Any]:
        """Return the results of all units, in their order; this process does its share of them.

        ``assume``: None for units that follow from the results of others, which a lone share of them does not know.
        """

    def told(self, make: Callable[[], Any]) -> Any:
        """Return what the leader's ``make`` returns, JSON values, on every process."""

    def agree(self, error: BaseException | None) -> None:
        """Find out whether all ended alike; raises TeamError where not, or the leader's own error on the leader."""


_current: Team | None = None


def current() -> Team | None:
    """Return the team that this process works in, None when it works alone."""
    return _current


def leads() -> bool:
    """Return whether this process writes and prints: always, but for the followers of a team."""
    return _current is None or _current.leads


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
    """Let all processes of a team end this block alike: an error that one of them alone has ends all of them."""
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


def each(
    what: str,
    files: Sequence[tuple[Path, object, int]],
    work: Callable[[int, Progress | None], Any],
    progress: Progress | None,
) -> list[Any]:
    """Return the results, JSON values, of ``work`` on each number; a team shares them.

    ``files``: for each number the file that is read, what of it, and how many bytes that is.
    """
    if _current is None:
        return [work(number, progress) for number in range(len(files))]
    units = Units()

    def do(numbers: Sequence[int], done: Done, progress: Progress) -> None:
        with alone():
            for number in numbers:
                done(number, work(number, progress))

    every = [units.of((path, part), size) for path, part, size in files]
    return _current.share(what, every, do, lambda number: [], progress)


class Store(Protocol):
    """The keys and values that all processes of a team see, as torch's stores have them; no call waits for a key."""

    def set(self, key: str, value: bytes, /) -> object:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, 0 at first, and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all of these keys are there."""


class _InOrder(ABC):
    """Processes that bring the units into one order first: a list that came out of a set has another one in each."""

    def share(
        self, what: str, units: Sequence[Unit], do: Do, assume: Assume | None, progress: Progress | None
    ) -> list[Any]:
        """Return the results of all units, as ``Team`` says."""
        order = sorted(range(len(units)), key=lambda number: (units[number].key, units[number].files))

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
        self, what: str, units: Sequence[Unit], do: Do, assume: Assume | None, progress: Progress | None
    ) -> list[Any]:
        """Return the results of units that are in order."""


TIMEOUT = 60.0
"""Seconds without a sign of life after which a process counts as lost; the variable below sets another number."""

VARIABLE = "CKPTFIX_TEAM_TIMEOUT"
_LOOKS = 0.3
"""Seconds between two looks whether another process has failed."""

_LONGEST_VALUE = 4 << 20
"""Bytes: torch's store takes at most 8 MiB at a time."""

_LINGERS = 10.0
"""Seconds that the leader waits for the others at the end: it may be the one that runs the store."""


class JoinedTeam(_InOrder):
    """Processes that see one store: those of torchrun, accelerate launch or Slurm."""

    def __init__(
        self,
        rank: int,
        count: int,
        store: Store,
        *,
        here: int = 1,
        partial: PartialResults | None = None,
        timeout: float = TIMEOUT,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        """Take one place in it. ``say`` prints a message, on the leader alone."""
        self.rank, self.count, self.here = rank, count, here
        self.leads = rank == 0
        self.partial = partial
        self._store, self._timeout, self._say = store, timeout, say
        self._name = f"rank {rank} (process {os.getpid()} on {os.uname().nodename})"
        self._step = 0
        self._part = 0
        self._over = threading.Event()
        self._lost = ""
        self._failed: dict[int, str] = {}
        self._watch = threading.Thread(target=self._look, daemon=True)
        store.set(f"ckptfix/name/{rank}", self._name.encode())
        self._watch.start()

    def _share(
        self, what: str, units: Sequence[Unit], do: Do, assume: Assume | None, progress: Progress | None
    ) -> list[Any]:
        """Return the results of all units, as ``Team`` says. Raises TeamError when another process has failed."""
        step = self._next()
        known = self._same(step, what, units)
        results: dict[int, Any] = dict(known)
        left = [number for number in range(len(units)) if number not in known]
        mine = [
            left[place] for place in plan_shares([units[number] for number in left], self.count)[self.rank]
        ]
        found: dict[int, Any] = {}

        def done(number: int, result: Any, *, is_final: bool = True) -> None:
            if self.partial is not None:
                self.partial.add(what, units[number], result, is_final=is_final)
            found[number] = result

        try:
            do(mine, done, self._watching(progress))
        except Stopped:
            raise self._ended() from None
        for got in self._gathered(step, found):
            results.update((int(number), result) for number, result in got.items())
        missing = [number for number in range(len(units)) if number not in results]
        if missing:
            raise OperationError(
                f"{count_of(len(missing), 'unit')} of {len(units)} has no result; this is a fault of ckptfix"
            )
        return [results[number] for number in range(len(units))]

    def told(self, make: Callable[[], Any]) -> Any:
        """Return what the leader decides, as ``Team`` says."""
        key = f"ckptfix/{self._next()}/told"
        if self.leads:
            self._put(key, make())
        return self._got(key)

    def agree(self, error: BaseException | None) -> None:
        """Find out whether all ended alike, as ``Team`` says."""
        part = self._part
        if error is not None:
            text = (
                "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
            )
            kind = "" if isinstance(error, CkptfixError | OSError) else f"{type(error).__name__}: "
            outcome = {"error": f"{kind}{text}", "name": self._name}
            with suppress(Exception):
                self._put(f"ckptfix/end/{part}/{self.rank}", outcome)
                if not isinstance(error, TeamError):  # that of another one, which told the others itself
                    self._store.set(f"ckptfix/stop/{part}", str(self.rank).encode())
            if isinstance(error, KeyboardInterrupt | TeamError):
                return
        else:
            self._put(f"ckptfix/end/{part}/{self.rank}", {"error": None, "name": self._name})
        others = [self._got(f"ckptfix/end/{part}/{rank}", is_end=True) for rank in range(self.count)]
        if len({one["error"] for one in others}) == 1:
            self._part += 1
            return
        if error is not None and self.leads:
            return  # its own error says best what is wrong
        raise TeamError(_words_of(others))

    def finish(self, status: int) -> int:
        """Return the leader's exit status on every process, once the leader has printed everything."""
        if self.leads:
            self._put("ckptfix/status", status)
            end = time.monotonic() + _LINGERS
            with suppress(Exception):  # who has gone needs nothing more
                while self._store.add("ckptfix/left", 0) < self.count - 1 and time.monotonic() < end:
                    time.sleep(0.01)
        else:
            status = int(self._got("ckptfix/status", is_end=True))
            with suppress(Exception):
                self._store.add("ckptfix/left", 1)
        self._over.set()
        return status

    def _next(self) -> int:
        self._step += 1
        return self._step

    def _same(self, step: int, what: str, units: Sequence[Unit]) -> dict[int, Any]:
        """Return the results that an earlier run left, by the leader's word. Raises TeamError for another folder."""
        plan = json.dumps([what, [(one.key, one.size, [file[:3] for file in one.files]) for one in units]])
        mine = {"plan": hashlib.sha256(plan.encode()).hexdigest(), "name": self._name}
        key = f"ckptfix/{step}/plan"
        if self.leads:
            known = self.partial.known(what, units) if self.partial is not None else {}
            final = {number: one.result for number, one in known.items() if one.is_final}
            if final and self.partial is not None:
                self._say(_resuming(units, final.keys(), self.partial))
            self._put(key, {**mine, "files": _files(units), "known": final})
        theirs = self._got(key)
        if theirs["plan"] != mine["plan"]:
            raise OperationError(_differs(theirs, {**mine, "files": _files(units)}))
        return {int(number): result for number, result in theirs["known"].items()}

    def _gathered(self, step: int, found: dict[int, Any]) -> Iterator[dict[str, Any]]:
        self._put(f"ckptfix/{step}/results/{self.rank}", found)
        self._store.add(f"ckptfix/{step}/ready", 1)
        self._wait(lambda: self._store.add(f"ckptfix/{step}/ready", 0) == self.count)
        for rank in range(self.count):
            yield self._got(f"ckptfix/{step}/results/{rank}")

    def _put(self, key: str, value: Any) -> None:
        """Set a JSON value of any length; its last part makes it visible."""
        data = zlib.compress(json.dumps(value).encode(), 1)
        parts = [data[begin : begin + _LONGEST_VALUE] for begin in range(0, len(data), _LONGEST_VALUE)]
        for number, part in enumerate(parts):
            self._store.set(f"{key}/{number}", part)
        self._store.set(key, str(len(parts)).encode())

    def _got(self, key: str, *, is_end: bool = False) -> Any:
        """Wait for a JSON value, and return it."""
        self._wait(lambda: self._store.check([key]), is_end=is_end)
        parts = int(self._store.get(key))
        return json.loads(
            zlib.decompress(b"".join(self._store.get(f"{key}/{number}") for number in range(parts)))
        )

    def _wait(self, is_there: Callable[[], bool], *, is_end: bool = False) -> None:
        """Wait until something is there. ``is_end``: for the ends of the others, the failed ones, too."""
        pause, longest = 0.001, 0.02 + self.count / 2000  # 1,024 processes ask a store 2,000 times a second
        while True:
            try:
                if is_there():
                    return
            except Exception as error:
                raise TeamError(_lost_store(error)) from error
            if self._lost or (self._part in self._failed and not is_end):
                raise self._ended()
            time.sleep(pause)
            pause = min(1.5 * pause, longest)

    def _watching(self, progress: Progress | None) -> Progress:
        def advance(count: int) -> None:
            if self._lost or self._part in self._failed:
                raise Stopped
            if progress is not None:
                progress(count)

        return advance

    def _look(self) -> None:
        """Look for failures of others, and show that this process lives; in a thread of its own."""
        alive: dict[int, tuple[bytes, float]] = {}
        turn = 0
        while not self._over.wait(_LOOKS):
            turn += 1
            try:
                part = self._part
                if part not in self._failed and self._store.check([f"ckptfix/stop/{part}"]):
                    self._failed[part] = self._store.get(f"ckptfix/stop/{part}").decode()
                if turn % 5 == 0:
                    self._store.set(f"ckptfix/alive/{self.rank}", str(turn).encode())
                if self.leads and turn % 10 == 0:
                    self._ensure_alive(alive)
            except Exception as error:
                if not self._over.is_set():
                    self._lost = _lost_store(error)
                return

    def _ensure_alive(self, alive: dict[int, tuple[bytes, float]]) -> None:
        now = time.monotonic()
        for rank in range(self.count):
            key = f"ckptfix/alive/{rank}"
            sign = self._store.get(key) if self._store.check([key]) else b""
            if alive.setdefault(rank, (sign, now))[0] != sign:
                alive[rank] = (sign, now)
            elif now - alive[rank][1] > self._timeout:
                name = f"ckptfix/name/{rank}"
                who = self._store.get(name).decode() if self._store.check([name]) else f"rank {rank}"
                outcome = {"error": f"no sign of life for {self._timeout:g} s", "name": who}
                self._put(f"ckptfix/end/{self._part}/{rank}", outcome)
                self._store.set(f"ckptfix/stop/{self._part}", str(rank).encode())
                return

    def _ended(self) -> TeamError:
        """Return the error of the process that failed."""
        if self._lost:
            return TeamError(self._lost)
        key = f"ckptfix/end/{self._part}/{self._failed[self._part]}"
        try:
            parts = int(self._store.get(key))
            data = b"".join(self._store.get(f"{key}/{number}") for number in range(parts))
            return TeamError(_words_of([json.loads(zlib.decompress(data))]))
        except Exception as error:
            return TeamError(_lost_store(error))


def _lost_store(error: Exception) -> str:
    why = (str(error) or type(error).__name__).splitlines()[0]
    return f"the connection to the other processes is lost, one of them or its node has died: {why}"


def _words_of(outcomes: Sequence[dict[str, Any]]) -> str:
    failed = [one for one in outcomes if one["error"] is not None]
    more = f" (and {count_of(len(failed) - 1, 'more process')})" if len(failed) > 1 else ""
    return f"{failed[0]['name']} failed, so all of them stop{more}: {failed[0]['error']}"


def _resuming(units: Sequence[Unit], known: Any, partial: PartialResults) -> str:
    size = human_size(sum(units[number].size for number in known))
    since = partial.oldest()
    when = f", the oldest before {time.strftime('%Y-%m-%d %H:%M', time.localtime(since))}" if since else ""
    number = f"{len(known)} of {count_of(len(units), 'unit')} ({size})"
    return f"resuming: {number} read by an earlier run{when}: {partial.folder}"


def _files(units: Sequence[Unit]) -> dict[str, list[int]]:
    return {file.name: [file.size, file.mtime_ns] for unit in units for file in unit.files}


def _differs(leader: dict[str, Any], mine: dict[str, Any]) -> str:
    """Return in words the first file in which two processes differ."""
    where = f"{mine['name']} sees another folder than {leader['name']}"
    remedy = "mount one folder on all nodes, or start each node alone with --shard I/N"
    for name in sorted({*leader["files"], *mine["files"]}):
        here, there = mine["files"].get(name), leader["files"].get(name)
        if here != there:
            words = [
                "missing" if one is None else f"{one[0]} bytes of {moment(one[1])}" for one in (here, there)
            ]
            return f"{where}: {name} is {words[0]} (expected {words[1]}); {remedy}"
    return f"{where}: the tensors in its files differ; {remedy}"


class LoneShare(_InOrder):
    """One share of a job array: a process that sees no other, and leaves its results for ``merge``."""

    leads = False
    here = 1

    def __init__(self, share: Share, partial: PartialResults) -> None:
        self._mine, self._partial = share, partial
        self.units = self.resumed = self.nbytes = 0
        self.unread = 0

    def _share(
        self, what: str, units: Sequence[Unit], do: Do, assume: Assume | None, progress: Progress | None
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

        do([number for number in mine if number not in found], done, progress or (lambda count: None))
        return [found[number] if number in found else assume(number) for number in range(len(units))]

    def told(self, make: Callable[[], Any]) -> Any:
        """Refuse: nobody can be told anything."""
        raise OperationError("a share of a job array cannot do this")

    def agree(self, error: BaseException | None) -> None:
        """Do nothing: there are no others."""


class Merger(_InOrder):
    """The process that puts the shares of a job array together: it reads nothing that a share should have read."""

    leads = True
    here = 1

    def __init__(self, partial: PartialResults, count: int, command_of: Callable[[Share], str]) -> None:
        self._partial, self._count, self._command_of = partial, count, command_of

    def _share(
        self, what: str, units: Sequence[Unit], do: Do, assume: Assume | None, progress: Progress | None
    ) -> list[Any]:
        """Return the results of all shares. Raises OperationError that names those that are missing."""
        if assume is None:
            found: dict[int, Any] = {}

            def done(number: int, result: Any, *, is_final: bool = True) -> None:
                found[number] = result

            do(range(len(units)), done, progress or (lambda count: None))
            return [found[number] for number in range(len(units))]
        known = self._partial.known(what, units)
        if len(known) == len(units):
            return [known[number].result for number in range(len(units))]
        shares = plan_shares(units, self._count)
        lacking = {
            index: missing
            for index, numbers in enumerate(shares)
            if (missing := sum(number not in known for number in numbers))
        }
        shown = [
            f"{index}/{self._count} ({lacking[index]} of {count_of(len(shares[index]), 'unit')})"
            for index in lacking
        ]
        names = ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
        raise OperationError(
            f"{self._partial.folder}: results are missing: {names}; a file that changed since makes them missing, too; "
            f"next: {self._command_of(Share(min(lacking), self._count))}"
        )

    def told(self, make: Callable[[], Any]) -> Any:
        """Return what ``make`` does."""
        return make()

    def agree(self, error: BaseException | None) -> None:
        """Do nothing: there are no others."""


class LoneWorker(_InOrder):
    """A single process that keeps partial results, for a run that may be interrupted."""

    leads = True
    here = 1

    def __init__(self, partial: PartialResults, say: Callable[[str], None]) -> None:
        self.partial, self._say = partial, say

    def _share(
        self, what: str, units: Sequence[Unit], do: Do, assume: Assume | None, progress: Progress | None
    ) -> list[Any]:
        """Do what no earlier run has done."""
        known = self.partial.known(what, units)
        found = {number: one.result for number, one in known.items() if one.is_final}
        if found:
            self._say(_resuming(units, found.keys(), self.partial))

        def done(number: int, result: Any, *, is_final: bool = True) -> None:
            self.partial.add(what, units[number], result, is_final=is_final)
            found[number] = result

        left = [number for number in range(len(units)) if number not in found]
        do(left, done, progress or (lambda count: None))
        return [found[number] for number in range(len(units))]

    def told(self, make: Callable[[], Any]) -> Any:
        """Return what ``make`` does."""
        return make()

    def agree(self, error: BaseException | None) -> None:
        """Do nothing: there are no others."""
