"""The pool of threads for reading, hashing and comparing files in pieces, and shares of work for
several processes.
"""

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from time import perf_counter, thread_time
from typing import NamedTuple, TypeVar

from ckptfix.errors import UsageError

Progress = Callable[[int], None]
"""Called with a number of bytes since the last call, never by two threads at once."""

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_MOST_THREADS = 8
_END = object()


class Stopped(BaseException):
    """Signal that another thread or process failed or the user interrupted, so that going on is
    useless.

    A BaseException, like KeyboardInterrupt: code that explains every ``Exception`` of a file or a
    store would hide the reason for the stop.
    """


class Control:
    """Connection of the threads of one run: it counts bytes, and stops long tasks early."""

    def __init__(self, progress: Progress | None) -> None:
        """Use a callback for bytes."""
        self._progress = progress
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    @property
    def is_stopping(self) -> bool:
        """True when a thread has failed or the user has interrupted: nobody wants the rest of this
        run.
        """
        return self.error is not None

    def stop(self) -> None:
        """Let every thread stop that counts bytes with ``go_on``."""
        self.error = self.error or Stopped()

    def advance(self, count: int) -> None:
        """Count bytes, from any thread."""
        if self._progress is not None:
            with self._lock:
                self._progress(count)

    def go_on(self, count: int = 0) -> None:
        """Count bytes as ``advance`` does. Raises Stopped when nobody wants the rest."""
        if self.is_stopping:
            raise Stopped
        self.advance(count)


def run_all(
    tasks: Iterable[_Task],
    worker: Callable[[Control], AbstractContextManager[Callable[[_Task], object]]],
    *,
    threads: int,
    progress: Progress | None = None,
) -> None:
    """Run every task in one of several threads, this one included; tasks begin in their order.

    ``worker`` is called in each thread and yields a function for one task, with files and buffers
    of its own. The first error ends all, and is raised. No thread works any more when this returns
    or raises: nobody reads from a descriptor that the caller is about to close.
    """
    control, lock, waiting = Control(progress), threading.Lock(), iter(tasks)

    def work() -> None:
        try:
            with worker(control) as do:
                while not control.is_stopping:
                    with lock:
                        task = next(waiting, _END)
                    if task is _END:
                        return
                    do(task)  # type: ignore[arg-type]  # not _END
        except BaseException as error:
            control.error = control.error or error

    others = [threading.Thread(target=work, daemon=True) for _ in range(threads - 1)]
    try:
        for thread in others:
            thread.start()
        work()
        for thread in others:
            thread.join()
    except BaseException as error:  # an interrupt while this thread waited
        control.error = control.error or error
        for thread in others:
            with suppress(RuntimeError):  # not started
                thread.join()
    if control.error is not None:
        raise control.error


class _Turn(threading.local):
    """The turn of a thread. ``held``: the lock that it holds while it computes; None where nobody
    waits for it.

    ``apart``: seconds of the processor that it used in ``waiting``.
    """

    held: "threading.Lock | None" = None
    apart = 0.0


_turn = _Turn()


@contextmanager
def waiting() -> Iterator[None]:
    """Let another thread of ``in_turn`` compute while this one waits, or works without the
    interpreter.

    It must not hold a lock that others ask for.
    """
    held, before = _turn.held, thread_time() - _turn.apart
    _turn.held = None
    if held is not None:
        held.release()
    try:
        yield
    finally:
        if held is not None:
            held.acquire()
        _turn.held = held
        _turn.apart = thread_time() - before


def in_turn(
    tasks: Iterable[_Task],
    work: Callable[[_Task], _Result],
    *,
    threads: int,
    stop: Callable[[], None] = lambda: None,
    of_store: bool = False,
) -> Iterator[tuple[_Task, _Result]]:
    """Yield each task with its result, in the order of the tasks, while several threads work ahead.

    ``work`` must not raise. Tasks are taken as they are needed, and at most two for each thread
    wait to be yielded. ``stop`` ends what threads are still at, which nobody wants any more: an
    interrupt must not wait for it. ``of_store``: one computes, the others are ``waiting``. Measured
    on 1,000 checkpoints 30 ms away: 16 threads that take the interpreter from each other need 5.1
    s, with turns 3.3 s.
    """
    tasks = iter(tasks)
    if threads < 2 or not of_store:
        # As long as the last tasks waited for no disk, threads would only take the interpreter from
        # each other.
        computed = passed = 0.0
        for task in tasks:
            began, before = perf_counter(), thread_time() - _turn.apart
            done = work(task)
            computed = 0.9 * computed + thread_time() - _turn.apart - before
            passed = 0.9 * passed + perf_counter() - began
            yield task, done
            if computed < passed / 2 and threads > 1:
                break
        else:
            return
    from concurrent.futures import Future, ThreadPoolExecutor  # a lone checkpoint does without

    turn = threading.Lock()

    def work_in_turn(task: _Task) -> _Result:
        with turn:
            _turn.held = turn
            return work(task)

    ahead: deque[tuple[_Task, Future[_Result]]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for task in tasks:
            ahead.append((task, pool.submit(work_in_turn if of_store else work, task)))
            if len(ahead) >= 2 * threads:
                first, result = ahead.popleft()
                yield first, result.result()
        while ahead:
            first, result = ahead.popleft()
            yield first, result.result()
    finally:
        # First, or a thread that was stopped would begin a task that waits.
        pool.shutdown(wait=False, cancel_futures=True)
        stop()
        pool.shutdown()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processors() -> int:
    """Return the number of threads that can compute at once, 8 at most."""
    return min(cores(), _MOST_THREADS)


def reading_threads(*, is_cached: bool) -> int:
    """Return the best number of reading threads: one per processor for cached files, four at least
    that wait for a disk.

    Measured on two processors with 2 files of 4 GiB, as a share of the fastest plain read: cached,
    2 threads 0.73-0.88 and 4 threads 0.70; not cached, 2 threads 0.78 and 4 threads 0.93.
    """
    return max(2 if is_cached else 4, processors())


class Share(NamedTuple):
    """One share of some work: ``number`` counts from 0, as the ranks of torch and the tasks of a
    job array do.
    """

    number: int
    total: int

    @classmethod
    def parse(cls, text: str, option: str = "--shard") -> "Share":
        """Return the share that ``I/N`` names. Raises UsageError for anything else."""
        number, slash, total = text.partition("/")
        if not slash or not all(one.isascii() and one.isdigit() for one in (number, total)):
            raise UsageError(f"{option} {text}: expected I/N, such as 0/4")
        share = cls(int(number), int(total))
        if share.number >= share.total:
            expected = (
                f"0/{share.total} to {share.total - 1}/{share.total}"
                if share.total
                else "at least 1 share"
            )
            raise UsageError(f"{option} {text}: shares are counted from 0 (expected {expected})")
        return share

    def holds(self, name: str) -> bool:
        """Return whether something is in this share, by its name alone: the same today and on every
        machine.
        """
        if self.total == 1:
            return True
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") % self.total == self.number

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"
