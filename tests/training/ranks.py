"""Several processes of one run, forked from the test: what torchrun does, without a second of
imports each.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

import torch
from torch.distributed import TCPStore

_DIGITS = 5
"""Length of the number of a port, as the ranks are told it."""

_LONGEST = 20
"""Times its patience that a run may take, however busy its processes are."""


@contextmanager
def meeting_point() -> Iterator[dict[str, str]]:
    """Yield the variables by which the processes of a run find each other: in a store of this
    process, as torchrun's.

    The port is this process's from the start. A port that is looked up, and opened by rank 0 much
    later, is another process's by then now and then: gloo takes thousands of them in a run of all
    tests.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield _variables(store.port)


def _variables(port: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _forget_the_test() -> None:
    """Let this process find its own rank, and compute in one thread, whatever the process it was
    forked from has done.

    An earlier test may have made a run of one. And OpenMP's threads are not forked: where the
    test's process has used several, even for one large product, the first large one in a rank would
    wait for them for ever.
    """
    torch.set_num_threads(1)
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def run_ranks(
    count: int, work: Callable[[int], None], *, patience: float = 60.0, notice: float = 2.0
) -> list[int]:
    """Run ``work(rank)`` in ``count`` processes of one gloo group; return their wait statuses.

    ``notice``: seconds that the others have to notice that one was killed; who still waits then is
    killed as torchrun would. ``patience``: seconds in which none of them computes (20 times that in
    all), after which all are killed.
    """
    _import_once()
    ports, told = os.pipe()
    pids = [_fork(rank, count, work, (ports, told)) for rank in range(count)]
    with meeting_point() as variables:
        os.write(told, variables["MASTER_PORT"].rjust(_DIGITS).encode() * count)
        os.close(ports)
        os.close(told)
        return _statuses(pids, patience, notice)


def _import_once() -> None:
    """Import what the first optimizer of a process imports: 1.5 s that each rank would take for
    itself.
    """
    import_module("torch._dynamo")


def _fork(rank: int, count: int, work: Callable[[int], None], pipe: tuple[int, int]) -> int:
    """Fork a rank, which reads the port of the store from a pipe before it works; return its
    process id.

    The store must not be there yet. Its thread looks up the name of each rank that connects, and
    then holds a lock of libc. A rank that was forked at that moment had the lock without its
    holder, and waited for it for ever.
    """
    pid = os.fork()
    if pid:
        return pid
    # Each full collection, and each search among all objects, would walk through a million of the
    # test's process and copy their pages: 0.5 s.
    gc.freeze()
    code = 1
    try:
        ports, told = pipe
        os.close(told)
        port = int(os.read(ports, _DIGITS))
        os.environ |= {
            **_variables(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
        }
        _forget_the_test()
        work(rank)
        code = 0
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _statuses(pids: list[int], patience: float, notice: float) -> list[int]:
    statuses: dict[int, int] = {}
    idle = _Idle(pids)
    end = time.monotonic() + _LONGEST * patience
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[pid] = status
                    if status:
                        patience = min(patience, idle.seconds() + notice)
        if idle.seconds() > patience or time.monotonic() > end:
            for pid in set(pids) - set(statuses):
                os.kill(pid, 9)
        time.sleep(0.01)
    return [statuses[pid] for pid in pids]


class _Idle:
    """Seconds that processes have waited for each other.

    Time in which they computed does not count, nor in which one could: on a busy machine a process
    waits long for a processor or for a disk. One that looks for others again and again computes
    less than ``_BUSY`` of the time.
    """

    _BUSY = 0.02
    _INTERVAL = 0.25

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._seconds = 0.0
        self._looked_at, self._computed = time.monotonic(), 0.0

    def seconds(self) -> float:
        now = time.monotonic()
        passed = now - self._looked_at
        if passed >= self._INTERVAL:
            states, seconds = zip(*map(_state_and_seconds, self._pids), strict=True)
            computed = sum(seconds)
            if computed - self._computed < self._BUSY * passed and not {"R", "D"} & set(states):
                self._seconds += passed
            self._looked_at, self._computed = now, computed
        return self._seconds


def _state_and_seconds(pid: int) -> tuple[str, float]:
    """Return the state of a process and the seconds of a processor that it has used, 0 when it has
    ended.

    R: it runs, or waits for a processor. D: it waits for a disk.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
