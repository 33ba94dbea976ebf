"""Staging folders of guarded saves: their names, whether the save still runs, and removing what dead ones left.

A name holds machine and process, so that anybody can ask. Reads no torch: ``check`` names these folders, too.
"""

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptfix.checkpoint.latest import STAGING, outside_checkpoints

_NAME = re.compile(rf"{re.escape(STAGING)}(.*)\+([0-9]+)\+[0-9a-f]{{16}}\+.*", re.DOTALL)
_DEAD_AFTER = 86400.0
"""Seconds without any change after which a save of another machine is taken for dead: it would write all the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A staging folder by its name: the process that made it, its host, and whether that save may still be running.

    ``same_machine``: the process was asked for; on another machine only the age of the last change counts.
    """

    pid: int
    host: str
    is_running: bool
    same_machine: bool


_in_use: set[str] = set()
"""Names that this process has given and not released: a save may go on in another thread."""


def own_name(target: Path) -> Path:
    """Return a name for a folder on its way to or from ``target`` that tells whose it is when it is left over."""
    name = f"{STAGING}{this_machine()}+{os.getpid()}+{os.urandom(8).hex()}+{_short(target.name)}"
    _in_use.add(name)
    return outside_checkpoints(target) / name


def is_own_name(name: str) -> bool:
    """Whether a name was given by ``own_name``, here or anywhere."""
    return _NAME.fullmatch(name) is not None


def read_staged(folder: Path) -> Staged | None:
    """Return whose staging folder this is, None for any other folder."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        return None
    machine, pid = match[1], int(match[2])
    return Staged(
        pid=pid,
        host=machine.rpartition("-")[0] or machine,
        is_running=_is_alive(folder, machine, pid),
        same_machine=machine == this_machine(),
    )


def release(path: Path) -> None:
    """Say that this process is done with a name."""
    _in_use.discard(path.name)


def sweep(parent: Path) -> None:
    """Remove what saves that are no more left in a folder."""
    from shutil import rmtree

    for name in os.listdir(parent) if parent.is_dir() else ():
        staged = read_staged(parent / name)
        if staged is not None and not staged.is_running:
            rmtree(parent / name, ignore_errors=True)


def _short(name: str) -> str:
    """Return the beginning of a name: with ours before it, a long one would be longer than the 255 bytes allowed."""
    return os.fsdecode(os.fsencode(name)[:64])


def this_machine() -> str:
    """Return where a process number counts: containers may share the name of a host."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{os.uname().nodename}-{namespace}"


def _is_alive(folder: Path, machine: str, pid: int) -> bool:
    """Whether a save may still be going on."""
    if machine != this_machine():
        return time.time() - _last_change(folder) < _DEAD_AFTER
    if pid == os.getpid():
        return folder.name in _in_use
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _last_change(folder: Path) -> float:
    latest = 0.0
    for root, _, names in os.walk(folder):
        for path in (root, *(os.path.join(root, name) for name in names)):
            with suppress(OSError):
                latest = max(latest, os.lstat(path).st_mtime)
    return latest or time.time()
