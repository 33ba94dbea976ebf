"""Names for folders that are there for a moment only, and which of them a dead save left behind."""

import os
import re
import secrets
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from ckptfix.checkpoint.latest import outside_checkpoints

_PREFIX = ".ckptfix-saving"
_NAME = re.compile(rf"{re.escape(_PREFIX)}\+(.*)\+([0-9]+)\+[0-9a-f]{{16}}\+.*", re.DOTALL)
_DEAD_AFTER = 86400.0
"""Seconds without any change after which a save of another machine is taken for dead: it would write all the time."""


_in_use: set[str] = set()
"""Names that this process has given and not released: a save may go on in another thread."""


def own_name(target: Path) -> Path:
    """Return a name for a folder on its way to or from ``target`` that tells whose it is when it is left over."""
    name = f"{_PREFIX}+{_machine()}+{os.getpid()}+{secrets.token_hex(8)}+{_short(target.name)}"
    _in_use.add(name)
    return outside_checkpoints(target) / name


def is_own_name(name: str) -> bool:
    """Whether a name was given by ``own_name``, here or anywhere."""
    return _NAME.fullmatch(name) is not None


def release(path: Path) -> None:
    """Say that this process is done with a name."""
    _in_use.discard(path.name)


def sweep(parent: Path) -> None:
    """Remove what saves that are no more left in a folder."""
    for name in os.listdir(parent) if parent.is_dir() else ():
        match = _NAME.fullmatch(name)
        if match and not _is_alive(parent / name, match[1], int(match[2])):
            shutil.rmtree(parent / name, ignore_errors=True)


def _short(name: str) -> str:
    """Return the beginning of a name: with ours before it, a long one would be longer than the 255 bytes allowed."""
    return os.fsdecode(os.fsencode(name)[:64])


def _machine() -> str:
    """Return where a process number counts: containers may share the name of a host."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{socket.gethostname()}-{namespace}"


def _is_alive(folder: Path, machine: str, pid: int) -> bool:
    """Whether a save may still be going on."""
    if machine != _machine():
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
