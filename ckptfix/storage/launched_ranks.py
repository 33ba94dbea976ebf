"""The ranks of torchrun, accelerate launch or srun, which share the work of one verb.

Every rank plans everything, does its share, and gets the results of all. Failures belong to the
launcher: a rank that fails prints its error and ends, and the launcher ends the others. All ranks
meet before anything is written, so nothing is where one of them is dead or stopped.

The exchange comes from ``training.rendezvous``; nothing here knows a network.
"""

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from ckptfix.errors import CkptfixError, OperationError, TeamError
from ckptfix.storage.executor import Assume, Executor, Sharing, plan_shares, resuming
from ckptfix.storage.mounts import local_devices
from ckptfix.storage.paths import JOURNAL, MANIFEST
from ckptfix.storage.results import PartialResults, Unit
from ckptfix.storage.staged import sweep
from ckptfix.wording import count_of, moment

_PATIENCE = 5.0
"""Seconds after which a rank that failed goes alone. Ranks that refuse the same folder alike come
in that time, and rank 0 prints the error for all; the others may read for hours.
"""

_FAILED = 0
_STATUS = "status"


class Exchange(Protocol):
    """A collective operation, as ``training.rendezvous`` has it."""

    def __call__(
        self, kind: int, data: bytes, patience: float | None = None
    ) -> list[tuple[int, bytes]] | None:
        """Return the kind and the bytes of every rank, None where ``patience`` is over."""


class LaunchedRanks(Sharing):
    """The ranks that a launcher started, as one of them sees them.

    ``is_lost``: the others do not know how this rank ended.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        exchange: Exchange,
        *,
        partial: PartialResults | None = None,
        say: Callable[[str], None] = lambda words: None,
        shout: Callable[[TeamError], None] = lambda error: None,
        remedy: str = "",
    ) -> None:
        """Meet the other ranks.

        ``say`` prints a message, on rank 0; ``shout`` an error that no other rank knows, on this
        one. ``remedy``: the next step after a failure, where its message has none.
        """
        self.rank, self.count = rank, count
        self.leads = rank == 0
        self.partial = partial
        self._exchange, self._say, self._shout = exchange, say, shout
        self._remedy = remedy
        self.is_lost = False
        self.has_ended = False
        own = f"rank {rank} (process {os.getpid()} on {os.uname().nodename})"
        self._names: list[str] = [own] * count
        self._names = self._meet("names", own)

    def _plan(
        self, what: str, units: Sequence[Unit], assume: Assume | None
    ) -> tuple[dict[int, Any], Sequence[int]]:
        # Inodes and the times of the last change differ between nodes of some file systems.
        files = [[file[:3] for file in unit.files] for unit in units]
        plan = json.dumps([what, [(unit.key, unit.size) for unit in units], files])

        def resumed() -> dict[int, Any]:
            known = self.partial.known(what, units) if self.partial is not None else {}
            if known and self.partial is not None:
                self._say(resuming(units, known, self.partial))
            return known

        known = {int(number): result for number, result in self._led(plan, resumed).items()}
        left = [number for number in range(len(units)) if number not in known]
        shares = plan_shares([units[number] for number in left], self.count)
        return known, [left[place] for place in shares[self.rank]]

    def _gathered(self, what: str, found: dict[int, Any]) -> dict[int, Any]:
        results: dict[int, Any] = {}
        for answer in self._meet(f"results of {what}", found):
            results.update((int(number), result) for number, result in answer.items())
        return results

    def told(self, make: Callable[[], Any]) -> Any:
        """Return what the leader decides, as ``Executor`` says."""
        return self._led("told", make)

    def ensure_same(self, mine: Callable[[], Any], differs: Callable[[str, Any], str]) -> None:
        """Compare JSON values with the leader's, as ``Executor`` says."""
        own = mine()
        leader = self.told(lambda: own)
        if leader != own and (words := differs(self._names[0], leader)):
            raise OperationError(f"{self._names[self.rank]} {words}")

    def agree(self, error: BaseException | None) -> None:
        """Find out whether all ended alike, as ``Executor`` says."""
        if self.has_ended:
            return
        if error is None:
            self._meet("ended")
            return
        if isinstance(error, KeyboardInterrupt):
            self.has_ended = self.is_lost = True
            return
        words = str(error) or type(error).__name__
        is_fault = not isinstance(error, CkptfixError | OSError)
        if is_fault:
            words = f"{type(error).__name__}: {words}"
        try:
            answers = self._swapped(_FAILED, _packed(words), _PATIENCE)
        except TeamError:  # the error of this rank is the one to print
            answers = []
        if answers and {data for _, data in answers} == {_packed(words)}:
            return
        self.has_ended = True
        if not self.leads:
            failed = self._failed({self.rank: words})
            failed.__cause__ = error
            if self.is_lost or is_fault:
                self._shout(failed)
            raise failed

    def finish(self, status: int) -> int:
        """Return the leader's exit status on every rank, once the leader has printed everything.

        A launcher ends all ranks when the first one ends with an error.
        """
        return status if self.is_lost else int(self._led(_STATUS, lambda: status))

    def _led(self, what: str, make: Callable[[], Any]) -> Any:
        return self._meet(what, make() if self.leads else None)[0]

    def _meet(self, what: str, value: Any = None) -> list[Any]:
        """Return the values of all ranks. Raises TeamError where one of them has failed, or does
        something else, or where the ranks have ended apart before.
        """
        if self.is_lost or (self.has_ended and what != _STATUS):
            raise TeamError(f"{self._names[self.rank]}: the ranks no longer work together")
        kind = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big")
        try:
            answers = self._swapped(kind, b"" if value is None else _packed(value))
        except TeamError as error:
            if not self.leads:
                self._shout(error)
            raise
        kinds = [kind for kind, _ in answers]
        if kinds == [kind] * self.count:
            return [_unpacked(data) if data else None for _, data in answers]
        self.has_ended = True
        failed = {
            rank: _unpacked(data) for rank, (kind, data) in enumerate(answers) if kind == _FAILED
        }
        if failed:
            raise self._failed(failed)
        other = next(rank for rank in range(self.count) if kinds[rank] != kinds[0])
        raise TeamError(
            f"{self._names[other]} sees a different folder than {self._names[0]}: the tensors in "
            f"its files differ; {_REMEDY}"
        )

    def _swapped(
        self, kind: int, data: bytes, patience: float | None = None
    ) -> list[tuple[int, bytes]]:
        """Return what all ranks give, nothing where the patience was over."""
        try:
            answers = self._exchange(kind, data, patience)
        except BaseException as error:
            self.has_ended = self.is_lost = True
            if isinstance(error, TeamError):
                raise self._advised(str(error)) from error
            raise
        self.is_lost = answers is None
        return answers or []

    def _failed(self, failed: Mapping[int, str]) -> TeamError:
        (rank, words), *more = failed.items()
        also = f" (and {count_of(len(more), 'more process')})" if more else ""
        return self._advised(f"{self._names[rank]} failed{also}, so all ranks stop: {words}")

    def _advised(self, words: str) -> TeamError:
        is_advised = "; next: " in words or not self._remedy
        return TeamError(words if is_advised else f"{words}; next: {self._remedy}")


def _packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode(), 1)


def _unpacked(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


_REMEDY = (
    "next: mount the same folder on all nodes; or run each node separately, with --shard I/N or "
    "CKPTFIX_TEAM=0"
)


def ensure_same_files(executor: Executor, paths: Iterable[Path]) -> None:
    """Find out whether all processes see the same files at some paths: names, sizes and times.

    On disks of a single machine the inodes count, too: rsync gives a copy the same times. Raises
    OperationError on a process that sees others: a node with a disk of its own, or an old copy.
    """
    mine: dict[str, list[int]] = {}

    def listed() -> dict[str, list[int]]:
        mine.update({name: [*file] for path in paths for name, file in _listing(path)})
        return mine

    executor.ensure_same(listed, lambda leader, theirs: _differs(leader, theirs, mine))


@contextmanager
def in_folder_of_leader(executor: Executor, folder: Path, remedy: str) -> Iterator[None]:
    """Let a process that does not lead write in a folder that the leader makes for all, and removes
    at the end.

    A leader that failed alone may have removed it while this process wrote, so what is there again
    is removed here. Raises OperationError where this process does not see the folder.
    """
    try:
        with executor.as_one():
            if not folder.is_dir():
                raise OperationError(
                    f"{folder}: {os.uname().nodename} cannot see this folder, which rank 0 created "
                    f"for all ranks; {remedy}"
                )
            yield
    except TeamError:
        sweep(folder.parent)
        raise


def ensure_same_names(executor: Executor, names: Sequence[str]) -> None:
    """Raise OperationError where processes go through different checkpoints."""

    def differs(leader: str, theirs: Sequence[str]) -> str:
        pairs = zip_longest(names, theirs)
        here, there = next((here, there) for here, there in pairs if here != there)
        actual, expected = here or "none", there or "none"
        return (
            f"finds different checkpoints than {leader}: {actual} (expected {expected}); {_REMEDY}"
        )

    executor.ensure_same(lambda: [*names], differs)


def _listing(path: Path) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield name, size, time and inode of every file of a checkpoint.

    The inode is 0 on a file system that machines can share, whose numbers may differ on each of
    them.
    """
    local, files = local_devices(), [str(path)]
    for root, folders, names in os.walk(path):
        # The leader may be at work in it; what counts for all is the manifest.
        if JOURNAL in folders:
            folders.remove(JOURNAL)
            names.append(MANIFEST)
        files += (os.path.join(root, name) for name in names)
    for file in files:
        with suppress(OSError):
            status = os.stat(file)
            if not stat.S_ISDIR(status.st_mode):
                inode = status.st_ino if status.st_dev in local else 0
                yield file, (status.st_size, status.st_mtime_ns, inode)


def _differs(
    leader: str, theirs: Mapping[str, Sequence[int]], mine: Mapping[str, Sequence[int]]
) -> str:
    """Return in words the first file in which two processes differ, "" where they differ in none;
    the name of this one goes before them.
    """
    copied = ""
    for name in sorted({*theirs, *mine}):
        here, there = mine.get(name), theirs.get(name)
        if here is None or there is None or here[:2] != there[:2]:
            found, expected = (
                "no file" if file is None else f"{file[0]} bytes, modified at {moment(file[1])}"
                for file in (here, there)
            )
            words = f"{name}: expected {expected}; found {found}"
            break
        if here[2] and there[2] and here[2] != there[2]:
            copied = copied or name
    else:
        words = f"{copied} is a different file with the same size and time, on another disk"
        if not copied:
            return ""
    return f"sees a different folder than {leader}: {words}; {_REMEDY}"
