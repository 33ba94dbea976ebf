"""The forked ranks of the tests: none hangs for what the test's process did, and none is killed while it computes."""

import time

import torch

from tests.training.ranks import run_ranks


def product() -> None:
    (torch.rand(1000, 1000) @ torch.rand(1000, 1000)).sum().item()


def test_ranks_compute_when_the_test_has_used_several_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        product()
        assert run_ranks(2, lambda rank: product(), patience=20) == [0, 0]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_rank_that_waits_in_vain_is_killed_and_one_that_computes_is_not() -> None:
    def work(rank: int) -> None:
        end = time.process_time() + 1.5
        while rank == 0 and time.process_time() < end:
            pass
        time.sleep(60 if rank == 1 else 0)

    assert run_ranks(2, work, patience=1.0) == [0, 9]


def test_who_survives_another_has_time_to_say_so() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise SystemExit(3)
        time.sleep(60)

    begin = time.monotonic()
    assert run_ranks(2, work)[0] == 9
    assert time.monotonic() - begin < 40
