"""Every task is done once by the pool of threads, and it has ended when it returns, also after an
error.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from ckptfix.errors import UsageError
from ckptfix.storage.parallel import Control, Share, Stopped, in_turn, run_all, waiting


def doing(task: Callable[[Control, int], None]) -> Callable[[Control], object]:
    @contextmanager
    def worker(control: Control) -> Iterator[Callable[[int], None]]:
        yield lambda number: task(control, number)

    return worker


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 100])
def test_every_task_is_done_once_and_bytes_are_counted(threads: int, count: int) -> None:
    done: list[int] = []
    told: list[int] = []

    def task(control: Control, number: int) -> None:
        done.append(number)
        control.advance(3)

    run_all(range(count), doing(task), threads=threads, progress=told.append)  # type: ignore[arg-type]
    assert sorted(done) == list(range(count))
    assert told == [3] * count


@pytest.mark.parametrize("failing", ["task", "worker", "tasks", "progress"])
def test_the_first_error_ends_all(failing: str) -> None:
    before = threading.active_count()
    taken: list[int] = []

    def fail(where: str) -> None:
        if where == failing:
            raise ZeroDivisionError

    def tasks() -> Iterator[int]:
        for number in range(1000):
            if number == 3:
                fail("tasks")
            yield number

    @contextmanager
    def worker(control: Control) -> Iterator[Callable[[int], None]]:
        fail("worker")

        def task(number: int) -> None:
            taken.append(number)
            time.sleep(0.001)
            fail("task")
            control.advance(1)

        yield task

    with pytest.raises(ZeroDivisionError):
        run_all(tasks(), worker, threads=3, progress=lambda _: fail("progress"))
    assert len(taken) < 20
    assert threading.active_count() == before


def test_an_interrupt_ends_long_tasks_of_other_threads() -> None:
    before = threading.active_count()
    main = threading.main_thread()
    others = threading.Event()

    def task(control: Control, number: int) -> None:
        if threading.current_thread() is main:
            assert others.wait(10)
            signal.raise_signal(signal.SIGINT)
        others.set()
        while not control.is_stopping:
            time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        run_all(range(2), doing(task), threads=2)  # type: ignore[arg-type]
    assert threading.active_count() == before


def test_a_share_is_counted_from_0_as_ranks_are() -> None:
    assert Share.parse("0/2") == (0, 2)
    assert str(Share.parse("63/64")) == "63/64"


@pytest.mark.parametrize(
    "text", ["", "1", "/", "1/", "/2", "a/2", "-1/2", "2/2", "0/0", "1.0/2", "1/2/3", "١/2"]
)
def test_anything_else_is_no_share(text: str) -> None:
    with pytest.raises(UsageError, match="--shard"):
        Share.parse(text)


def test_who_goes_on_counts_bytes_until_another_thread_fails() -> None:
    told: list[int] = []
    control = Control(told.append)
    control.go_on(5)
    control.error = ZeroDivisionError()
    with pytest.raises(Stopped):
        control.go_on(7)
    assert told == [5]


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_turn_while_few_tasks_are_taken_ahead(threads: int) -> None:
    taken: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(50):
            taken.append(number)
            yield number

    def work(number: int) -> int:
        time.sleep(0.002 if number % 5 == 0 else 0)  # others overtake it
        return -number

    for number, (task, result) in enumerate(in_turn(tasks(), work, threads=threads)):
        assert (task, result) == (number, -number)
        assert len(taken) <= number + 2 * threads
    assert len(taken) == 50


def test_who_stops_asking_stops_the_threads() -> None:
    done: list[int] = []
    results = in_turn(range(1000), done.append, threads=2)
    assert next(results) == (0, None)
    results.close()  # type: ignore[attr-defined]  # a generator
    count = len(done)
    time.sleep(0.02)
    assert len(done) == count <= 5


def test_an_interrupt_of_who_takes_results_ends_long_tasks() -> None:
    control = Control(None)
    all_work, is_waiting = threading.Barrier(3), threading.Event()
    ended: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(9):
            # With two tasks for each thread, who takes results waits for the first of them.
            if number == 6:
                is_waiting.set()
            yield number

    def work(number: int) -> None:
        if number == 0:
            time.sleep(0.01)
            return
        is_waiting.wait(60)
        if all_work.wait(60) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        for _ in range(20_000):
            try:
                control.go_on(1)
            except Stopped:
                ended.append(number)
                return
            time.sleep(0.001)

    results = in_turn(tasks(), work, threads=3, stop=control.stop)
    assert next(results) == (0, None)
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert sorted(ended) == [1, 2, 3]


@pytest.mark.parametrize("fails", [False, True])
def test_of_those_that_wait_for_a_store_one_computes(fails: bool) -> None:
    lock, computing, waited, most = threading.Lock(), 0, 0, [0, 0]

    def count(of_computing: int, of_waiting: int) -> None:
        nonlocal computing, waited
        with lock:
            computing += of_computing
            waited += of_waiting
            most[:] = max(most[0], computing), max(most[1], waited)

    def work(task: int) -> int:
        count(1, 0)
        time.sleep(0.001)
        count(-1, 1)
        with suppress(ValueError), waiting():
            with waiting():  # one in another lets go once
                time.sleep(0.02)
            if fails:
                raise ValueError
        count(1, -1)
        time.sleep(0.001)
        count(-1, 0)
        return task

    found = list(in_turn(range(64), work, threads=16, of_store=True))
    assert found == [(task, task) for task in range(64)]
    assert most[0] == 1
    assert most[1] > 4


@pytest.mark.parametrize("hashes", [False, True])
def test_threads_begin_once_a_task_lets_others_go_on(
    hashes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that only compute take the interpreter from each other. What is done in ``waiting``
    does not count.
    """
    wall = computed = 0.0
    monkeypatch.setattr("ckptfix.storage.parallel.perf_counter", lambda: wall)
    monkeypatch.setattr("ckptfix.storage.parallel.thread_time", lambda: computed)

    def work(number: int) -> str:
        nonlocal wall, computed
        wall, computed = wall + 1, computed + 0.9
        if number == 4:
            with waiting(), waiting():
                wall, computed = wall + 20, computed + (20 if hashes else 0)
        return threading.current_thread().name

    mine = threading.current_thread().name
    names = [name for _, name in in_turn(range(12), work, threads=3)]
    assert names[:5] == [mine] * 5
    assert mine not in names[5:]
