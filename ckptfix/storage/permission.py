"""Why a file or folder may not be read, and what to type so that it may: a file of mode 0600 is not damaged."""

import errno
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptfix.storage.paths import shell_path


def unreadable(path: Path, error: OSError) -> str:
    """Return in words why ``path`` cannot be read; of a refusal the owner, the mode and the command that ends it."""
    if not isinstance(error, PermissionError):
        return f"cannot be read: {cause(path, error)}"
    blocked, status = _blocked(path)
    if status is None:
        return f"cannot be read: {cause(path, error)}"
    mode = stat.S_IMODE(status.st_mode)
    is_folder = stat.S_ISDIR(status.st_mode)
    where = "" if blocked == path else f" by the folder {blocked}"
    why = ""
    if path.suffix == ".safetensors" and blocked == path and not mode & 0o077:
        why = "; safetensors writes its files for their owner alone"
    wanted = "a+rx" if is_folder else "a+r"
    if mode & 0o005 == 0o005 or (mode & 0o004 and not is_folder):  # an ACL, SELinux, or a file server
        command = f"sudo chown {_name(os.geteuid())} {shell_path(blocked)}"
    else:
        root = "" if status.st_uid == os.geteuid() else "sudo "
        command = f"{root}chmod {wanted} {shell_path(blocked)}"
    owner = f"owner {_name(status.st_uid)}, mode {mode:04o}"
    return f"cannot be read: permission denied{where} ({owner}; you are {_name(os.geteuid())}{why}); next: {command}"


def described(error: Exception) -> str:
    """Return what an error says, and where a file or folder may not be read, what ends that."""
    if isinstance(error, PermissionError) and error.filename is not None:
        path = Path(os.fsdecode(error.filename))
        if not _is_absent(path) and not os.access(path, os.R_OK, effective_ids=True):
            return f"{path}: {unreadable(path, error)}"
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes):
        path = Path(os.fsdecode(error.filename))
        to = f" -> {os.fsdecode(error.filename2)}" if isinstance(error.filename2, str | bytes) else ""
        return f"{path}{to}: {cause(path, error)}"
    return str(error)


def cause(path: Path, error: OSError) -> str:
    """Return in words why an operation on ``path`` failed: without a number, and with the link that leads to itself."""
    if error.errno != errno.ELOOP:
        return error.strerror or str(error)
    link = next((one for one in (*reversed(path.parents), path) if _loops(one)), path)
    return f"{link} is a symbolic link that leads to itself; next: ls -l {shell_path(link)}"


def _loops(path: Path) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def _is_absent(path: Path) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def refused_files(paths: Iterable[Path]) -> Iterator[str]:
    """Yield in words which of these files and folders may not be read, and what ends that."""
    for path in paths:
        if os.path.exists(path) and not os.access(path, os.R_OK, effective_ids=True):
            yield f"{path}: {unreadable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))}"


def _blocked(path: Path) -> tuple[Path, os.stat_result | None]:
    """Return what refuses, the path itself or a folder on the way to it, and its status."""
    full = Path(os.path.abspath(path))
    status: os.stat_result | None = None
    for one, above in zip((*reversed(full.parents), full), (full, *reversed(full.parents)), strict=True):
        try:
            found = os.stat(one)
        except OSError:
            return above, status
        status = found
    return path, status


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
