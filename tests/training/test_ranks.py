"""The forked ranks of the tests: none hangs for what the test's process did, and none is killed
while it computes.
"""

import os
import time

import pytest
import torch

from tests.training.killing import in_child
from tests.training.ranks import run_ranks


def product() -> None:
    (torch.rand(1000, 1000) @ torch.rand(1000, 1000)).sum().item()


def test_ranks_compute_when_the_test_has_used_several_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        product()
        assert run_ranks(2, lambda rank: product(), patience=20) == [0, 0]
        assert in_child(product) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_ranks_are_forked_before_the_thread_of_their_store_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds a lock of libc while it looks up a name: a rank forked then waited for that lock for
    ever.
    """
    fork, threads = os.fork, set(os.listdir("/proc/self/task"))
    started: list[set[str]] = []

    def look() -> int:
        started.append(set(os.listdir("/proc/self/task")) - threads)
        return fork()

    def meet(rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        # One that ends before another has connected to it fails that one.
        torch.distributed.barrier()

    monkeypatch.setattr(os, "fork", look)
    assert run_ranks(3, meet) == [0, 0, 0]
    assert started == [set(), set(), set()]


def test_a_rank_that_waits_in_vain_is_killed_and_one_that_computes_is_not() -> None:
    def work(rank: int) -> None:
        end = time.process_time() + 1.5
        while rank == 0 and time.process_time() < end:
            pass
        time.sleep(600 if rank == 1 else 0)

    assert run_ranks(2, work, patience=3.0) == [0, 9]


def test_who_survives_another_has_time_to_say_so() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise SystemExit(3)
        time.sleep(60)

    assert run_ranks(2, work, patience=600)[0] == 9, "it slept to the end"
