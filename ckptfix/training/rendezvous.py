"""The processes that torchrun, accelerate launch or srun started, joined by torch.distributed.

They exchange bytes in uint8 tensors over Gloo, so nothing that another process sends is unpickled.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from ckptfix.errors import TeamError, UsageError
from ckptfix.storage.launched_ranks import Exchange


class Launched(NamedTuple):
    """The place of this process among those that a launcher started.

    ``local``, ``here``: its number on this machine, and how many are there. ``address``: where they
    meet, "" where nobody set it. ``share``: the variables that ``--shard`` takes.
    """

    rank: int
    total: int
    local: int
    here: int
    address: str
    port: int
    share: str


_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun and accelerate launch set for each process."""

_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
"""Variables that srun sets for each task of a step. A batch script is one process and lacks the
second one. In the shell of salloc it is 1, and SLURM_NTASKS is that of the job.
"""

SWITCH = "CKPTFIX_TEAM"
"""Variable of the environment: 1 where the launcher starts a script that starts ckptfix, 0 for a
process alone.
"""

_TIMEOUT = "CKPTFIX_TEAM_TIMEOUT"
"""Variable with the seconds that the fastest process waits for the slowest one: a day by default.

Gloo's own 30 minutes would end an intact seal of 10 TB, because they count while the others read.
"""

_MEETING = 600.0
"""Seconds in which all processes must have started, and then as many to connect to each other.

A pod of Kubeflow has RANK and WORLD_SIZE in its environment, and a command typed there would
otherwise wait for a day.
"""


def launched(variables: Mapping[str, str]) -> Launched | None:
    """Return the place of this process; None where it is alone, or a child of a process that a
    launcher started.

    A training script that calls ckptfix hands its own variables on: the others would never come.
    """
    switch = variables.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        raise UsageError(f"{SWITCH}={switch}: expected 1 or 0")
    place = _place(variables)
    if switch == "0" or place is None:
        return None
    return place if switch == "1" or not _is_inherited(variables) else None


def left_alone(variables: Mapping[str, str]) -> Launched | None:
    """Return the place that this process has in its variables, and left to its parent; None for any
    other process.
    """
    is_asked = variables.get(SWITCH, "") != ""
    return _place(variables) if not is_asked and _is_inherited(variables) else None


def _place(variables: Mapping[str, str]) -> Launched | None:
    place = _of_torch(variables) or _of_slurm(variables)
    return place if place is not None and place.total > 1 else None


def _of_torch(variables: Mapping[str, str]) -> Launched | None:
    if any(name not in variables for name in _TORCH):
        return None
    with suppress(ValueError):
        rank, count, port = (int(variables[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        here, local = (int(variables.get(f"LOCAL_{name}", "0")) for name in ("WORLD_SIZE", "RANK"))
        address = variables["MASTER_ADDR"]
        return Launched(rank, count, local, here or 1, address, port, "$RANK/$WORLD_SIZE")
    return None


def _of_slurm(variables: Mapping[str, str]) -> Launched | None:
    if any(name not in variables for name in _SLURM):
        return None
    with suppress(ValueError):
        rank, count = (int(variables[name]) for name in _SLURM)
        # "2(x3)": two tasks on each of three nodes.
        here = int(variables.get("SLURM_STEP_TASKS_PER_NODE", "1").split("(")[0].split(",")[0])
        local = int(variables.get("SLURM_LOCALID", "0"))
        address, port = (variables.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        is_set = bool(address and port)
        return Launched(
            rank, count, local, here, address if is_set else "", int(port) if is_set else 0,
            "$SLURM_PROCID/$SLURM_NTASKS",
        )  # fmt: skip
    return None


def _is_inherited(variables: Mapping[str, str]) -> bool:
    """Return whether the parent process has the same place: then a launcher started that one, and
    not this one.
    """
    names = (*_TORCH, "TORCHELASTIC_RUN_ID", *_SLURM)
    mine = {f"{name}={variables[name]}".encode() for name in names if name in variables}
    try:
        parents = set(Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0"))
    except OSError:  # of another user, such as Slurm's own step daemon
        return False
    return mine <= parents


def join(place: Launched, remedy: str) -> Exchange:
    """Meet the other processes. Raises UsageError with a next step where they cannot, TeamError
    where they do not all come in time.
    """
    if find_spec("torch") is None:
        raise UsageError(
            f"{place.total} processes were started, but torch, through which they share "
            f"results, is not installed; next: {remedy}"
        )
    if not place.address:
        raise UsageError(
            f"srun started {place.total} tasks, but MASTER_ADDR and MASTER_PORT are not set, "
            f"so they cannot connect; next: set both, or {remedy}"
        )
    timeout = _timeout(os.environ)
    _bind(place)
    # torch's own words about a process that has gone, a stack of C++, would come before ours.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from torch.distributed import init_process_group, rendezvous

    meeting = min(timeout, _MEETING)
    where = f"{place.address}:{place.port}"
    url = f"tcp://{where}?rank={place.rank}&world_size={place.total}"

    def connect() -> None:
        store, _, _ = next(rendezvous(url, timeout=timedelta(seconds=meeting)))
        init_process_group(
            "gloo", store=store, rank=place.rank, world_size=place.total,
            timeout=timedelta(seconds=meeting),
        )  # fmt: skip
        _let_wait(timeout)

    try:
        _interruptibly(connect)
    except Exception as error:
        raise TeamError(
            f"{place.total} processes were started, but they could not connect at {where} "
            f"within {meeting:g} s: {str(error).splitlines()[0]}; next: make that address "
            "(MASTER_ADDR, MASTER_PORT) reachable from every node, or run one share on each "
            f"node without a network: --shard I/N; or, for one process: {SWITCH}=0"
        ) from error
    return _Group(place.rank, place.total, timeout).exchange


def _interruptibly(work: Callable[[], None]) -> None:
    """Do work in a thread that an interrupt leaves behind: torch meets the others in C++, where
    Python hears no Ctrl-C.
    """
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = Thread(target=attempt, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
    for error in errors:
        raise error


def _let_wait(timeout: float) -> None:
    """Let the collective operations wait longer than the processes did to connect."""
    from torch.distributed import distributed_c10d, group

    if hasattr(group.WORLD, "set_timeout"):
        group.WORLD.set_timeout(timedelta(seconds=timeout))
    else:  # older versions of torch
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))


def _timeout(variables: Mapping[str, str]) -> float:
    text = variables.get(_TIMEOUT) or "86400"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 2e6:  # Gloo counts milliseconds in 32 bits
        raise UsageError(f"{_TIMEOUT}={text}: expected a number of seconds above 0")
    return seconds


def _bind(place: Launched) -> None:
    """Leave the other cores of this machine to its other processes: so many threads run then.

    Slurm binds each task to cores of its own, other launchers bind none.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == os.cpu_count():
        with suppress(OSError):  # a container may forbid it
            os.sched_setaffinity(0, cores[place.local :: place.here] or cores)


class _Group:
    """The processes that have met."""

    def __init__(self, rank: int, total: int, timeout: float) -> None:
        self._rank, self._total, self._timeout = rank, total, timeout

    def exchange(
        self, kind: int, data: bytes, patience: float | None = None
    ) -> list[tuple[int, bytes]] | None:
        """Return what each process gives, by rank; a process that gives no bytes costs no message.

        ``patience``: seconds after which this process goes without the others; it gets None then,
        and cannot exchange anything any more. Raises TeamError where another process has ended.
        """
        import torch
        from torch.distributed import all_gather, broadcast

        mine = torch.tensor([kind, len(data)])
        headers = [torch.empty_like(mine) for _ in range(self._total)]
        if not self._wait(lambda: [all_gather(headers, mine, async_op=True)], patience):
            return None
        kinds, lengths = zip(*(header.tolist() for header in headers), strict=True)
        bodies = [torch.empty(length, dtype=torch.uint8) for length in lengths]
        if data:
            bodies[self._rank] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        # All at once: one after the other, 1,024 ranks would wait 1,024 times.
        self._wait(
            lambda: [
                broadcast(body, src=rank, async_op=True)
                for rank, body in enumerate(bodies)
                if lengths[rank]
            ]
        )
        return [(kind, body.numpy().tobytes()) for kind, body in zip(kinds, bodies, strict=True)]

    def _wait(self, begin: Callable[[], list[Any]], patience: float | None = None) -> bool:
        """Wait until collective operations have ended; return False where patience has.

        Gloo's own ``wait`` holds the main thread, and Ctrl-C would come after a day.
        """
        end = float("inf") if patience is None else time.monotonic() + patience
        pause = 0.001
        try:
            for work in begin():
                while not work.is_completed():
                    if time.monotonic() > end:
                        return False
                    time.sleep(pause)
                    pause = min(1.5 * pause, 0.05)
                work.wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            if "imed out" in reason:
                raise TeamError(
                    f"another process did not respond for {self._timeout:g} s ({_TIMEOUT})"
                ) from error
            raise TeamError(
                "another process, or its node, stopped before it was done; see its output or "
                "the launcher's for the reason"
            ) from error
        return True
