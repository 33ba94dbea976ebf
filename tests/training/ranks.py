"""Several processes of one run, forked from the test: what torchrun does, without a second of imports each."""

import os
import socket
import sys
import time
from collections.abc import Callable


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
    port = free_port()
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(count),
                    "LOCAL_WORLD_SIZE": str(count),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
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
