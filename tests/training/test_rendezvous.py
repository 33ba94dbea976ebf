"""The place of a process is read from what launchers set, and processes exchange bytes over Gloo."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ckptfix.errors import UsageError
from ckptfix.training.rendezvous import join, launched

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6"}
OF_NODE = {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        (TORCH, (1, 4, 0, 1, "node1", 29500)),
        ({**TORCH, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 4, 1, 2, "node1", 29500)),
        ({**TORCH, "WORLD_SIZE": "1", "RANK": "0"}, None),
        ({**TORCH, "CKPTFIX_TEAM": "0"}, None),
        ({**SLURM, **OF_NODE}, (3, 6, 1, 2, "", 0)),
        ({**SLURM, **OF_NODE, **MEETING}, (3, 6, 1, 2, "node1", 29500)),
        ({**SLURM, "MASTER_ADDR": "node1"}, (3, 6, 0, 1, "", 0)),
        # A batch script is one process, though Slurm sets the other two.
        ({name: SLURM[name] for name in ("SLURM_PROCID", "SLURM_NTASKS")}, None),
        # So is the shell of salloc.
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
    ],
)
def test_the_place_of_a_process(
    variables: Mapping[str, str], place: tuple[int, int, int, int, str, int] | None
) -> None:
    found = launched(variables)
    assert (found and found[:6]) == place
    assert found is None or found.share in ("$RANK/$WORLD_SIZE", "$SLURM_PROCID/$SLURM_NTASKS")


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan", "inf"])
def test_a_timeout_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    monkeypatch.setenv("CKPTFIX_TEAM_TIMEOUT", seconds)
    place = launched(TORCH)
    assert place is not None
    with pytest.raises(UsageError, match=r"CKPTFIX_TEAM_TIMEOUT=.* a number of seconds above 0"):
        join(place, "")


_PROCESS = """
import json, os, sys
from ckptfix.training.rendezvous import join, launched
rank = int(os.environ["RANK"])
cores = len(os.sched_getaffinity(0))
exchange = join(launched(os.environ), "")
long = exchange(7, bytes([rank]) * (5_000_001 + rank))
one = exchange(8 + rank, b"word" if rank else b"")
alone = exchange(9, b"", 0.1) if rank else None
print(json.dumps([
    [[kind, len(data), data[0]] for kind, data in long],
    [[kind, data.decode()] for kind, data in one],
    alone,
    cores, len(os.sched_getaffinity(0)),
]))
sys.stdout.flush()
sys.stdin.read()
os._exit(0)
"""


_MEETING = """
import os, sys, time
from ckptfix.training import rendezvous
rendezvous._MEETING = float(sys.argv[1])
exchange = rendezvous.join(rendezvous.launched(os.environ), "")
time.sleep(5 * int(os.environ["RANK"]))
print([kind for kind, _ in exchange(7, b"")])
sys.stdout.flush()
exchange(8, b"")
os._exit(0)
"""


def started(code: str, *arguments: str, interface: str = "lo") -> list["subprocess.Popen[str]"]:
    """Start two processes, the second one on ``interface``."""
    port = str(random.randrange(30000, 60000))
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, "CKPTFIX_TEAM": "1", "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": interface if rank else "lo",
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
        )
        for rank in range(2)
    ]  # fmt: skip


def ends_of(processes: list["subprocess.Popen[str]"]) -> list[tuple[int, str, str]]:
    """Return status, output and errors of each process; none is left to run."""
    try:
        texts = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


@pytest.mark.slow
def test_processes_that_cannot_connect_do_not_wait_for_a_day() -> None:
    """Both reach the store, and the second one then has no interface to be reached at."""
    said = "TeamError: 2 processes were started, but they could not connect at 127.0.0.1:"
    for status, _, err in ends_of(started(_MEETING, "6", interface="none0")):
        assert status == 1
        assert said in err


@pytest.mark.slow
def test_an_interrupt_ends_a_process_that_waits_for_a_connection() -> None:
    first, second = processes = started(_MEETING, "3600", interface="none0")
    try:
        assert second.wait(90) == 1
        first.send_signal(signal.SIGINT)
        first.wait(60)
    finally:
        (status, _, err), _ = ends_of(processes)
    assert status not in (0, -signal.SIGKILL)
    assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.slow
def test_processes_that_have_met_wait_longer_for_each_other() -> None:
    for status, out, err in ends_of(started(_MEETING, "3")):
        assert (status, out) == (0, "[7, 7]\n"), err


@pytest.mark.slow
def test_processes_exchange_bytes_and_one_may_go_alone() -> None:
    processes = started(_PROCESS)
    answers = []
    for process in processes:
        assert process.stdout is not None
        answers.append(json.loads(process.stdout.readline()))
    ends_of(processes)
    for long, one, alone, before, cores in answers:
        assert long == [[7, 5_000_001, 0], [7, 5_000_002, 1]]
        assert one == [[8, ""], [9, "word"]]
        assert alone is None
        is_bound = before < (os.cpu_count() or 1)
        assert cores == before if is_bound else cores in (before // 2, before - before // 2, before)
