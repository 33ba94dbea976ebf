"""Values that are made when they are first used."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from ckptfix.lazy import once


class Kept:
    """An instance whose value is computed while those of others are."""

    def __init__(self, barrier: Barrier) -> None:
        self.barrier = barrier
        self.computed = 0

    @once
    def value(self) -> int:
        """The number of times that it was computed."""
        self.barrier.wait(timeout=30)
        self.computed += 1
        return self.computed


def test_instances_do_not_wait_for_each_other() -> None:
    """With functools.cached_property of Python 3.11 a check of several folders in a store hung."""
    barrier = Barrier(3)
    instances = [Kept(barrier) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(lambda kept: kept.value, instances)] == [1, 1, 1]
    assert [kept.value for kept in instances] == [1, 1, 1]
    assert Kept.value.__doc__ == "The number of times that it was computed."
