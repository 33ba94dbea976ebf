"""Several processes of one run, forked from the test: what torchrun does, without a second of imports each."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def meeting_point() -> Iterator[dict[str, str]]:
    """Yield the variables by which the processes of a run find each other: in a store of this process, as torchrun's.

    The port is this process's from the start. A port that is looked up, and opened by rank 0 much later, is another
    process's by then now and then: gloo takes thousands of them in a run of all tests.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _forget_the_run_of_the_test() -> None:
    """Let this process find its own rank: an earlier test of the same process may have made a run of one."""
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def run_ranks(count: int, work: Callable[[int], None], *, patience: float = 60.0) -> list[int]:
    """Run ``work(rank)`` in ``count`` processes of one gloo group; return their wait statuses.

    When one is killed, the others get two seconds to notice; who still waits then is killed as torchrun would.
    """
    with meeting_point() as variables:
        return _run_ranks(count, work, variables, patience)


def _run_ranks(
    count: int, work: Callable[[int], None], variables: dict[str, str], patience: float
) -> list[int]:
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ |= {
                    **variables,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(count),
                    "LOCAL_WORLD_SIZE": str(count),
                    "ACCELERATE_USE_CPU": "true",
                    "OMP_NUM_THREADS": "1",
                }
                _forget_the_run_of_the_test()
                work(rank)
                code = 0
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + patience
    while len(statuses) < count:
        for pid in pids:
            if pid not in statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[pid] = status
                    if status:
                        deadline = min(deadline, time.monotonic() + 2)
        if time.monotonic() > deadline:
            for pid in set(pids) - set(statuses):
                os.kill(pid, 9)
        time.sleep(0.01)
    return [statuses[pid] for pid in pids]
