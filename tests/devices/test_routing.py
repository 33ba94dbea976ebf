"""Counting copies while the collector runs finalizers that copy, too. No device is needed."""

import gc
import threading
from collections.abc import Iterator

import pytest

from ckptfix.devices.routing import Count, Counts


@pytest.fixture
def everywhere() -> Iterator[None]:
    """Let the collector run wherever it may."""
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


def test_a_finalizer_that_copies_in_the_middle_of_counting_is_counted(everywhere: None) -> None:
    """It waited for ever for the lock that this very thread held."""
    counts = Counts()
    finalized: list[int] = []

    def finalize(phase: str, info: object) -> None:
        if phase == "start":
            finalized.append(1)
            counts.add((1, 0), 8, staged=False)
            counts.all()

    def count() -> None:
        for number in range(2000):
            counts.add((0, number % 7 + 1), 4, staged=True)
            if number % 100 == 0:
                counts.all()

    gc.callbacks.append(finalize)
    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    thread.join(60)
    stuck = thread.is_alive()
    gc.callbacks.remove(finalize)
    assert not stuck, "it waits for itself"
    found = counts.all()
    assert finalized
    assert found[1, 0] == Count(direct=len(finalized), direct_bytes=8 * len(finalized))
    assert sum(found[0, to].staged for to in range(1, 8)) == 2000
    assert sum(found[0, to].staged_bytes for to in range(1, 8)) == 8000


def test_threads_that_count_at_once_lose_nothing() -> None:
    counts = Counts()

    def count() -> None:
        for _ in range(5000):
            counts.add((0, 1), 3, staged=False)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.all() == {(0, 1): Count(direct=20000, direct_bytes=60000)}
