"""The team of processes that see one store: those of torchrun, accelerate launch or Slurm.

Torch's store comes from ``training.rendezvous``; nothing here knows a network. It is a store and no
collective operation: a process that waits for a key can stop when another one has failed, and 1,024
processes need one connection each, not one to each other.
"""

import hashlib
import json
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from ckptfix.errors import CkptfixError, OperationError, TeamError
from ckptfix.storage import teams
from ckptfix.storage.mounts import local_devices
from ckptfix.storage.parallel import Progress, Stopped
from ckptfix.storage.partial_results import PartialResults, Unit
from ckptfix.storage.paths import JOURNAL, MANIFEST
from ckptfix.storage.teams import Assume, Do, InOrder, plan_shares, resuming
from ckptfix.wording import count_of, moment


class Store(Protocol):
    """The keys and values that all processes of a team see, as torch's stores have them; no call
    waits for a key.
    """

    def set(self, key: str, value: bytes, /) -> object:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, 0 at first, and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all of these keys are there."""


TIMEOUT = 60.0
"""Seconds without a sign of life after which a process counts as lost; the variable below sets
another number.
"""

TIMEOUT_VARIABLE = "CKPTFIX_TEAM_TIMEOUT"
_LOOKS = 0.3
"""Seconds between two looks whether another process has failed."""

_LONGEST_VALUE = 4 << 20
"""Bytes: torch's store takes at most 8 MiB at a time."""

_LINGERS = 10.0
"""Seconds that the leader waits for the others at the end: it may be the one that runs the store.
"""

_STALLED = 300.0
"""Seconds without a byte after which a process is named. Nothing is ended then: a server of files
may come back.
"""


_FIRST = "rank 0"


class _PatientStore:
    """A store whose calls end: a process that is stopped keeps its connections open, and answers
    nothing.

    Each call raises TimeoutError after ``timeout`` seconds, counted in tenths: a process that was
    stopped itself, as Slurm suspends a job, lost one of them alone.
    """

    def __init__(self, store: Store, timeout: float) -> None:
        self._store, self._timeout = store, timeout
        self._calls: SimpleQueue[tuple[Callable[[], Any], list[Any], threading.Event]] = (
            SimpleQueue()
        )
        self._is_lost = False
        threading.Thread(target=self._work, daemon=True).start()

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        return bytes(self._ask(lambda: self._store.get(key)))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return it."""
        return int(self._ask(lambda: self._store.add(key, amount)))

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these keys are there."""
        return bool(self._ask(lambda: self._store.check(keys)))

    def _ask(self, call: Callable[[], Any]) -> Any:
        answer: list[Any] = []
        done = threading.Event()
        self._calls.put((call, answer, done))
        if self._is_lost or not any(done.wait(self._timeout / 10) for _ in range(10)):
            self._is_lost = True  # no later call waits as long again
            raise TimeoutError(f"no answer for {self._timeout:g} s")
        result, error = answer
        if error is not None:
            raise error
        return result

    def _work(self) -> None:
        while True:
            call, answer, done = self._calls.get()
            try:
                answer += [call(), None]
            except Exception as error:
                answer += [None, error]
            done.set()


class JoinedTeam(InOrder):
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
        self._store, self._timeout, self._say = _PatientStore(store, timeout), timeout, say
        self._name = f"rank {rank} (process {os.getpid()} on {os.uname().nodename})"
        self._first = self._name if self.leads else _FIRST
        self._step = 0
        self._part = 0
        self._is_busy = False
        self._bytes = 0
        self._over = threading.Event()
        self._lost = ""
        self._failed: dict[int, str] = {}
        self._passed: dict[int, str] = {}
        self._silent: set[int] = set()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._store.set(f"ckptfix/name/{rank}", self._name.encode())
        self._watch.start()

    def _share(
        self,
        what: str,
        units: Sequence[Unit],
        do: Do,
        assume: Assume | None,
        progress: Progress | None,
    ) -> list[Any]:
        """Return the results of all units, as ``Team`` says. Raises TeamError when another process
        has failed.
        """
        step = self._next()
        known = self._same(step, what, units)
        results: dict[int, Any] = dict(known)
        left = [number for number in range(len(units)) if number not in known]
        mine = [
            left[place]
            for place in plan_shares([units[number] for number in left], self.count)[self.rank]
        ]
        found: dict[int, Any] = {}

        def done(number: int, result: Any, *, is_final: bool = True) -> None:
            if self.partial is not None:
                self.partial.add(what, units[number], result, is_final=is_final)
            found[number] = result

        self._is_busy = True
        try:
            do(mine, done, self._watching(progress))
        except Stopped:
            raise self._ended() from None
        finally:
            self._is_busy = False
        for got in self._gathered(step, found):
            results.update((int(number), result) for number, result in got.items())
        missing = [number for number in range(len(units)) if number not in results]
        if missing:
            raise OperationError(
                f"{count_of(len(missing), 'unit')} of {len(units)} has no result; this is a fault "
                "of ckptfix"
            )
        return [results[number] for number in range(len(units))]

    def told(self, make: Callable[[], Any]) -> Any:
        """Return what the leader decides, as ``Team`` says."""
        key = f"ckptfix/{self._next()}/told"
        if self.leads:
            self._put(key, make())
        return self._got(key)

    def ensure_same(self, mine: Any, differs: Callable[[str, Any], str | None]) -> None:
        """Compare JSON values with the leader's. Raises OperationError on a process that has
        others.

        ``differs``: gets the leader's name and values, and returns the difference in words that
        follow this one's name; None where it does not matter.
        """
        leader = self.told(lambda: {"name": self._name, "values": mine})
        self._first = leader["name"]
        words = differs(leader["name"], leader["values"]) if leader["values"] != mine else None
        if words is not None:
            raise OperationError(f"{self._name} {words}")

    def agree(self, error: BaseException | None) -> None:
        """Find out whether all ended alike, as ``Team`` says."""
        part = self._part
        if error is not None:
            text = (
                "interrupted"
                if isinstance(error, KeyboardInterrupt)
                else str(error) or type(error).__name__
            )
            kind = "" if isinstance(error, CkptfixError | OSError) else f"{type(error).__name__}: "
            outcome = {"error": f"{kind}{text}", "name": self._name}
            with suppress(Exception):
                self._put(f"ckptfix/end/{part}/{self.rank}", outcome)
                # That of another one, which told the others itself.
                if not isinstance(error, TeamError):
                    self._store.set(f"ckptfix/stop/{part}", str(self.rank).encode())
            if isinstance(error, KeyboardInterrupt | TeamError):
                return
        else:
            self._put(f"ckptfix/end/{part}/{self.rank}", {"error": None, "name": self._name})
            self._store.set(f"ckptfix/passed/{part}", self._name.encode())
        others = [
            self._got(f"ckptfix/end/{part}/{rank}", is_end=True) for rank in range(self.count)
        ]
        if len({one["error"] for one in others}) == 1:
            self._part += 1
            return
        if error is not None and self.leads:
            return  # its own error says best what is wrong
        raise TeamError(_words_of(others))

    def finish(self, status: int) -> int:
        """Return the leader's exit status on every process, once the leader has printed
        everything.
        """
        if self.leads:
            self._put("ckptfix/status", status)
            end = time.monotonic() + _LINGERS
            with suppress(Exception):  # who has gone needs nothing more
                others = self.count - 1
                while (
                    self._store.add("ckptfix/left", 0) < others - len(self._silent)
                    and time.monotonic() < end
                ):
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
        """Return the results that an earlier run left, by the leader's word. Raises TeamError for
        another folder.
        """
        plan = json.dumps(
            [what, [(one.key, one.size, [file[:3] for file in one.files]) for one in units]]
        )
        mine = {"plan": hashlib.sha256(plan.encode()).hexdigest(), "name": self._name}
        key = f"ckptfix/{step}/plan"
        if self.leads:
            known = self.partial.known(what, units) if self.partial is not None else {}
            final = {number: one.result for number, one in known.items() if one.is_final}
            if final and self.partial is not None:
                self._say(resuming(units, final.keys(), self.partial))
            self._put(key, {**mine, "files": _files(units), "known": final})
        theirs = self._got(key)
        if theirs["plan"] != mine["plan"]:
            differs = _differs(theirs["name"], theirs["files"], _files(units))
            other = (
                f"sees another folder than {theirs['name']}: the tensors in its files differ; "
                f"{_REMEDY}"
            )
            raise OperationError(f"{self._name} {differs or other}")
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
        parts = [
            data[begin : begin + _LONGEST_VALUE] for begin in range(0, len(data), _LONGEST_VALUE)
        ]
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
        """Wait until something is there. ``is_end``: for the ends of the others, the failed ones,
        too.
        """
        # 1,024 processes ask a store 2,000 times a second.
        pause, longest = 0.001, 0.02 + self.count / 2000
        while True:
            # Before the look at what is there.
            passed = "" if is_end else self._passed.get(self._part, "")
            try:
                if is_there():
                    return
            except Exception as error:
                raise TeamError(self._lost_store(error)) from error
            if self._lost or (self._part in self._failed and not is_end):
                raise self._ended()
            if (
                passed
                # It went through all steps of this part, and put there what is missing: it had
                # other steps.
            ):
                raise OperationError(
                    f"{self._name} sees another folder than {passed}, which has ended without it; "
                    f"{_REMEDY}"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, longest)

    def _watching(self, progress: Progress | None) -> Progress:
        def advance(count: int) -> None:
            self._bytes += count
            if self._lost or self._part in self._failed:
                raise Stopped
            if progress is not None:
                progress(count)

        return advance

    def _look(self) -> None:
        """Look for failures of others, and show that this process lives; in a thread of its own."""
        signs = _Signs()
        clock, looked = 0.0, time.monotonic()
        turn = 0
        pause = min(_LOOKS, self._timeout / 40)
        while not self._over.wait(pause):
            turn += 1
            # Time in which this process was stopped itself, as Slurm suspends a job, is no silence
            # of the others.
            clock += min(time.monotonic() - looked, max(4 * pause, self._timeout / 10))
            looked = time.monotonic()
            try:
                part = self._part
                if part not in self._failed and self._store.check([f"ckptfix/stop/{part}"]):
                    self._failed[part] = self._store.get(f"ckptfix/stop/{part}").decode()
                if part not in self._passed and self._store.check([f"ckptfix/passed/{part}"]):
                    self._passed[part] = self._store.get(f"ckptfix/passed/{part}").decode()
                if self._first == _FIRST:
                    self._first = self._name_of(0)
                if turn % 5 == 0:
                    sign = [turn, self._is_busy, self._bytes]
                    self._store.set(f"ckptfix/alive/{self.rank}", json.dumps(sign).encode())
                if turn % 10 == 0:
                    self._ensure_alive(signs, clock)
            except Exception as error:
                if not self._over.is_set():
                    self._lost = self._lost or self._lost_store(error)
                return
            if self._lost:
                return

    def _ensure_alive(self, signs: "_Signs", clock: float) -> None:
        """Find out who has gone silent: the leader looks at all others, and each of them at the
        leader.
        """
        for rank in range(self.count) if self.leads else (0,):
            key = f"ckptfix/alive/{rank}"
            signs.take(rank, self._store.get(key) if self._store.check([key]) else b"", clock)
            if rank != self.rank and signs.silence(rank, clock) > self._timeout:
                outcome = {
                    "error": f"no sign of life for {self._timeout:g} s",
                    "name": self._name_of(rank),
                }
                if not self.leads:
                    self._lost = _words_of([outcome])
                    return
                self._silent.add(rank)
                self._put(f"ckptfix/end/{self._part}/{rank}", outcome)
                self._store.set(f"ckptfix/stop/{self._part}", str(rank).encode())
                return
            if self.leads and signs.is_stalled(rank, clock):
                self._say(
                    f"{self._name_of(rank)} has read nothing for "
                    f"{signs.stall(rank, clock) / 60:.0f} minutes, and all wait for it: its disk "
                    "may hang; next: look at that node, or end all and run the same command "
                    "again"
                )

    def _name_of(self, rank: int) -> str:
        name = f"ckptfix/name/{rank}"
        return self._store.get(name).decode() if self._store.check([name]) else f"rank {rank}"

    def _lost_store(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return (
                f"{self._first}, or the launcher on its node, is stopped or lost, so all of them "
                f"stop: {error}"
            )
        why = (str(error) or type(error).__name__).splitlines()[0]
        return (
            "the connection to the other processes is lost, one of them or its node has died: "
            f"{why}"
        )

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
            return TeamError(self._lost_store(error))


class _Signs:
    """Signs of life of processes, each with the time on the clock of the one that looks at which it
    last changed.
    """

    def __init__(self) -> None:
        self._signs: dict[int, tuple[bytes, float]] = {}
        self._work: dict[int, tuple[object, float]] = {}
        self._said: dict[int, float] = {}

    def take(self, rank: int, sign: bytes, clock: float) -> None:
        """Note the sign of a process."""
        if self._signs.setdefault(rank, (sign, clock))[0] != sign:
            self._signs[rank] = (sign, clock)
        is_busy, count = json.loads(sign)[1:] if sign else (False, 0)
        work = count if is_busy else None
        if work is None or self._work.setdefault(rank, (work, clock))[0] != work:
            self._work[rank] = (work, clock)
            self._said.pop(rank, None)

    def silence(self, rank: int, clock: float) -> float:
        """Return the seconds since the sign of a process last changed."""
        return clock - self._signs[rank][1]

    def stall(self, rank: int, clock: float) -> float:
        """Return the seconds in which a process that is at work has read no byte."""
        return clock - self._work[rank][1]

    def is_stalled(self, rank: int, clock: float) -> bool:
        """Return whether it is time to say that a process reads nothing: after five minutes, ten,
        twenty.
        """
        if self.stall(rank, clock) < self._said.get(rank, _STALLED):
            return False
        self._said[rank] = 2 * self.stall(rank, clock)
        return True


def _words_of(outcomes: Sequence[dict[str, Any]]) -> str:
    failed = [one for one in outcomes if one["error"] is not None]
    more = f" (and {count_of(len(failed) - 1, 'more process')})" if len(failed) > 1 else ""
    return f"{failed[0]['name']} failed, so all of them stop{more}: {failed[0]['error']}"


_REMEDY = (
    "next: mount one folder on all nodes; or start each node alone, with --shard I/N or with "
    "CKPTFIX_TEAM=0"
)


def ensure_same_files(paths: Iterable[Path]) -> None:
    """Find out whether all processes of a team see the same files at some paths: names, sizes and
    times.

    On disks of a single machine the inodes count, too: rsync gives a copy the same times. Raises
    OperationError on a process that sees others: a node with a disk of its own, or an old copy.
    """
    team = teams.current()
    if isinstance(team, JoinedTeam):
        mine = {name: [*file] for path in paths for name, file in _listing(path)}
        team.ensure_same(mine, lambda leader, theirs: _differs(leader, theirs, mine))


def ensure_seen(folder: Path, remedy: str) -> None:
    """Raise OperationError where this process does not see a folder that the leader has made for
    all of them.
    """
    if not folder.is_dir():
        raise OperationError(
            f"{folder}: {os.uname().nodename} does not see this folder, which rank 0 has made for "
            f"all; {remedy}"
        )


def ensure_same_names(names: Sequence[str]) -> None:
    """Find out whether all processes of a team go through the same checkpoints. Raises
    OperationError where not.
    """
    team = teams.current()
    if isinstance(team, JoinedTeam):
        mine = [*names]

        def differs(leader: str, theirs: Sequence[str]) -> str:
            for here, there in zip_longest(mine, theirs):
                if here != there:
                    return (
                        f"finds other checkpoints than {leader}: {here} (expected {there}); "
                        f"{_REMEDY}"
                    )
            raise AssertionError("they are equal")

        team.ensure_same(mine, differs)


def _listing(path: Path) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield name, size, time and inode of every file of a checkpoint.

    The inode is 0 on a file system that machines can share, whose numbers may differ on each of
    them.
    """
    local = local_devices()
    below = (os.path.join(root, name) for root, name in _walk(path))
    for file in (str(path), *below):
        with suppress(OSError):
            status = os.stat(file)
            if not stat.S_ISDIR(status.st_mode):
                inode = status.st_ino if status.st_dev in local else 0
                yield file, (status.st_size, status.st_mtime_ns, inode)


def _walk(path: Path) -> Iterator[tuple[str, str]]:
    for root, folders, names in os.walk(path):
        # The leader may be at work in it; what counts for all is the manifest.
        if JOURNAL in folders:
            folders.remove(JOURNAL)
            yield root, MANIFEST
        yield from ((root, name) for name in names)


def _files(units: Sequence[Unit]) -> dict[str, list[int]]:
    return {file.name: [file.size, file.mtime_ns] for unit in units for file in unit.files}


def _differs(
    leader: str, theirs: Mapping[str, Sequence[int]], mine: Mapping[str, Sequence[int]]
) -> str | None:
    """Return in words the first file in which two processes differ; the name of this one goes
    before them.
    """
    where = f"sees another folder than {leader}"
    copied = ""
    for name in sorted({*theirs, *mine}):
        here, there = mine.get(name), theirs.get(name)
        if here is None or there is None or here[:2] != there[:2]:
            words = [
                "missing" if one is None else f"{one[0]} bytes of {moment(one[1])}"
                for one in (here, there)
            ]
            return f"{where}: {name} is {words[0]} (expected {words[1]}); {_REMEDY}"
        if all((*here[2:], *there[2:])) and here[2:] != there[2:]:
            copied = copied or name
    if copied:
        return (
            f"{where}: {copied} is another file of the same size and time, on a disk of its own; "
            f"{_REMEDY}"
        )
    return None
