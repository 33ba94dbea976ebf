"""The processes that torchrun, accelerate launch or Slurm started, joined by torch's store.

Only the store is used, no process group: nothing is sent but keys and values, which are JSON and
never unpickled.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from ckptfix.errors import TeamError, UsageError
from ckptfix.storage.joined_team import Store


class Launched(NamedTuple):
    """The place of this process among those that a launcher started. ``here``: how many are on this
    machine.
    """

    rank: int
    total: int
    here: int
    address: str
    port: int


_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun and accelerate launch set for each process."""

_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_NODELIST")
"""Variables that srun sets for each task of a step. A batch script, which is one process, lacks the
second one.
"""

SWITCH = "CKPTFIX_TEAM"
"""Variable of the environment: 1 where the launcher starts a script that starts ckptfix, 0 for a
process alone.
"""


def launched(variables: Mapping[str, str]) -> Launched | None:
    """Return the place of this process; None where it is alone, or a child of a process that a
    launcher started.

    A training script that calls ckptfix hands its own variables on: the others would never come.
    """
    switch = variables.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        raise UsageError(f"{SWITCH}={switch}: expected 1 or 0")
    found = _of_torch(variables) or _of_slurm(variables)
    if switch == "0" or found is None or found.total < 2:
        return None
    return found if switch == "1" or not _is_inherited(variables) else None


def left_alone(variables: Mapping[str, str]) -> Launched | None:
    """Return the place that this process has in its variables, and left to its parent; None for any
    other process.
    """
    found = _of_torch(variables) or _of_slurm(variables)
    is_asked = variables.get(SWITCH, "") != ""
    return (
        found if found and found.total > 1 and not is_asked and _is_inherited(variables) else None
    )


def join(place: Launched, timeout: float) -> Store:
    """Connect to the store that all of them see. Raises TeamError when that takes longer than
    ``timeout`` seconds.
    """
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # a process that has gone is said in our words alone
    from torch.distributed import rendezvous

    where = f"{place.address}:{place.port}"
    url = f"tcp://{place.address}:{place.port}?rank={place.rank}&world_size={place.total}"
    try:
        store, _, _ = next(rendezvous(url, timeout=timedelta(seconds=timeout)))
    except Exception as error:
        raise TeamError(
            f"{place.total} processes were started, and they did not meet at {where} within "
            f"{timeout:g} s: {str(error).splitlines()[0]}; next: let every node reach that "
            "address (MASTER_ADDR, MASTER_PORT), or give each node a share of the work, without "
            f"a network: --shard I/N; or, for one process: {SWITCH}=0"
        ) from error
    return store  # type: ignore[no-any-return]  # torch's stores have what Store lists


def _of_torch(variables: Mapping[str, str]) -> Launched | None:
    if any(name not in variables for name in _TORCH):
        return None
    with suppress(ValueError):
        rank, count, port = (int(variables[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        here = int(variables.get("LOCAL_WORLD_SIZE", "1"))
        return Launched(rank, count, here, variables["MASTER_ADDR"], port)
    return None


def _of_slurm(variables: Mapping[str, str]) -> Launched | None:
    if any(name not in variables for name in _SLURM):
        return None
    with suppress(ValueError):
        rank, count, job = (int(variables[name]) for name in _SLURM[:3])
        here = int(re.match(r"\d*", variables.get("SLURM_STEP_TASKS_PER_NODE", "1"))[0] or 1)  # type: ignore[index]
        address = variables.get("MASTER_ADDR") or first_node(variables["SLURM_STEP_NODELIST"])
        # Steps of one job and jobs on one node must not meet each other.
        step = int(variables.get("SLURM_STEP_ID", "0"))
        port = int(variables.get("MASTER_PORT") or 20000 + (job * 16 + step) % 40000)
        return Launched(rank, count, here, address, port)
    return None


def first_node(nodes: str) -> str:
    """Return the first name of a list as Slurm writes it: ``gpu[07-09,12],login`` is ``gpu07``."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    assert match is not None  # it matches the empty text, too
    return "".join(part or "" for part in match.groups())


def _is_inherited(variables: Mapping[str, str]) -> bool:
    """Return whether the parent process has the same place: then a launcher started that one, and
    not this one.
    """
    names = (*_TORCH, "TORCHELASTIC_RUN_ID", *_SLURM[:2])
    mine = {f"{name}={variables[name]}".encode() for name in names if name in variables}
    try:
        parents = set(Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0"))
    except OSError:  # of another user, such as Slurm's own step daemon
        return False
    return mine <= parents
