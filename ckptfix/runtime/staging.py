"""Where a save is written before it is whole, and how it becomes the checkpoint in one step.

A folder of ``checkpoints/`` is a checkpoint to Accelerate whatever its name, so the staging folder never lies there.
"""

import json
import os
import re
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ckptfix.checkpoint.filenames import Role, parse_file_name
from ckptfix.checkpoint.folder import JOURNAL_FOLDER
from ckptfix.checkpoint.latest import UNFINISHED, candidates, outside_checkpoints
from ckptfix.checkpoint.manifest import MANIFEST, read_manifest
from ckptfix.errors import FormatError
from ckptfix.storage.atomic import create_file, sync_folder, sync_tree
from ckptfix.storage.renaming import exchange

_PREFIX = ".ckptfix-saving"
_NAME = re.compile(rf"{re.escape(_PREFIX)}\+(.*)\+([0-9]+)\+.*", re.DOTALL)


class How(Enum):
    """NEW: one rename. SWAP: two folders change places. INSIDE: file by file, the manifest gone first and back last."""

    NEW = "new"
    SWAP = "swap"
    INSIDE = "inside"


@dataclass(frozen=True, slots=True)
class Staging:
    """A save on its way: ``folder`` is written, ``target`` is what it becomes."""

    target: Path
    folder: Path
    how: How


def plan_staging(target: Path) -> Staging:
    """Return where a save of ``target`` is staged. Looks only."""
    given, target = Path(os.path.abspath(target)), Path(os.path.realpath(target))
    beside = _own_name(given)
    inside = Staging(target, target / JOURNAL_FOLDER / "saving", How.INSIDE)
    if not _can_rename(beside.parent, target):
        return inside
    names = os.listdir(target) if target.is_dir() else []
    if not names:
        return Staging(target, beside, How.NEW)
    known = _own_files(target)
    return Staging(target, beside, How.SWAP) if known.issuperset(names) else inside


def begin(staging: Staging) -> None:
    """Make an empty staging folder; what interrupted saves left there, or beside it, goes."""
    sweep(staging.folder.parent)
    if os.path.lexists(staging.folder):
        shutil.rmtree(staging.folder)
    staging.folder.mkdir(parents=True)


def sweep(parent: Path) -> None:
    """Remove what processes of this machine that are no more left in a folder."""
    for name in os.listdir(parent) if parent.is_dir() else ():
        match = _NAME.fullmatch(name)
        if match and match[1] == socket.gethostname() and not _is_alive(int(match[2])):
            shutil.rmtree(parent / name, ignore_errors=True)


def abandon(staging: Staging) -> None:
    """Remove what was staged."""
    shutil.rmtree(staging.folder, ignore_errors=True)
    if staging.how is How.INSIDE:
        _remove_if_empty(staging.target / JOURNAL_FOLDER)


def commit(staging: Staging, manifest: bytes) -> None:
    """Make what was staged the checkpoint. Durable when it returns; interrupted, the old or the new one is there.

    INSIDE alone has a time between: the manifest is missing then, and ``latest_checkpoint`` passes the folder over.
    """
    folder, target = staging.folder, staging.target
    _widen_modes(folder)
    sync_tree(folder)
    if (
        staging.how is How.INSIDE or plan_staging(target).how is How.INSIDE
    ):  # files came while we were writing
        _move_in(staging, manifest)
    else:
        _put_in_place(staging, manifest)
    shutil.rmtree(folder, ignore_errors=True)  # after a swap: the old checkpoint


def _put_in_place(staging: Staging, manifest: bytes) -> None:
    folder, target = staging.folder, staging.target
    known = _own_files(target)
    (folder / JOURNAL_FOLDER).mkdir()
    create_file(folder / MANIFEST, manifest)
    sync_folder(folder / JOURNAL_FOLDER)
    sync_folder(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    if staging.how is How.NEW:
        os.rename(folder, target)
    elif exchange(folder, target):
        for name in set(os.listdir(folder)) - known:  # came between our last look and the exchange
            os.rename(folder / name, target / name)
    else:
        shutil.rmtree(folder / JOURNAL_FOLDER)
        _move_in(staging, manifest)
    sync_folder(target.parent)
    if folder.parent != target.parent:
        sync_folder(folder.parent)


def rotate(checkpoints: Path, limit: int) -> list[Path]:
    """Remove the oldest whole checkpoints beyond ``limit``, and broken ones older than those that stay.

    Each is renamed out of ``checkpoints`` first, so that no half-deleted folder is ever taken for a checkpoint.
    """
    sweep(outside_checkpoints(checkpoints / "any"))
    found = candidates(checkpoints)
    whole = [candidate for candidate in found if candidate.problem is None]
    if len(whole) <= max(1, limit):
        return []
    oldest_kept = whole[max(1, limit) - 1].number
    removed = []
    for candidate in found:
        path = candidate.path
        if candidate.number >= oldest_kept or path.is_symlink() or not _was_saved(path):
            continue
        trash = _own_name(path)
        try:
            os.rename(path, trash)
        except OSError:  # another disk, or a parent that we may not write to
            (path / MANIFEST).unlink(missing_ok=True)
            for states in path.glob("random_states_*.pkl"):
                states.unlink()  # from here on nothing takes it for whole
            trash = path
        shutil.rmtree(trash)
        removed.append(path)
    return removed


def _own_name(target: Path) -> Path:
    """Return a name for a folder on its way to or from ``target`` that tells whose it is when it is left over."""
    return outside_checkpoints(target) / f"{_PREFIX}+{socket.gethostname()}+{os.getpid()}+{target.name}"


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # left by an earlier process of this number
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _can_rename(parent: Path, target: Path) -> bool:
    """Whether a folder in ``parent`` can become ``target`` by a rename."""
    existing = next(folder for folder in (target, *target.parents) if folder.is_dir())
    base = next(folder for folder in (parent, *parent.parents) if folder.is_dir())
    return (
        os.access(base, os.W_OK | os.X_OK)
        and os.stat(base).st_dev == os.stat(existing).st_dev
        and not os.path.ismount(target)
        and not Path(os.getcwd()).is_relative_to(target)
    )


def _own_files(target: Path) -> set[str]:
    """Return the names in a folder that our last save there wrote; all else is the user's, whatever its name."""
    try:
        manifest = read_manifest(target)
    except (FormatError, OSError):
        manifest = None
    names = set() if manifest is None else {name.split("/")[0] for name in manifest.files}
    with suppress(OSError, ValueError, TypeError):  # not there: no save was interrupted here
        names.update(str(name) for name in json.loads((target / JOURNAL_FOLDER / UNFINISHED).read_text()))
    return {JOURNAL_FOLDER, *names} if names else set()


def _was_saved(path: Path) -> bool:
    """Whether ``save_state`` wrote anything of a folder: one that only has its name is not ours to remove."""
    parsed = [parse_file_name(name) for name in os.listdir(path)]
    roles = {name.role for name in parsed if name is not None}
    return (
        (path / MANIFEST).exists()
        or Role.RNG_STATE in roles
        or (Role.MODEL in roles and Role.OPTIMIZER in roles)
    )


def _move_in(staging: Staging, manifest: bytes) -> None:
    folder, target = staging.folder, staging.target
    known = _own_files(target) - {JOURNAL_FOLDER}
    new = os.listdir(folder)
    journal = target / JOURNAL_FOLDER
    journal.mkdir(parents=True, exist_ok=True)
    (journal / f"{UNFINISHED}.new").write_text(json.dumps(sorted(known.union(new))))
    os.replace(
        journal / f"{UNFINISHED}.new", journal / UNFINISHED
    )  # what is ours is known without a manifest
    sync_folder(journal)
    (target / MANIFEST).unlink(missing_ok=True)
    sync_folder(journal)
    for name in known.intersection(os.listdir(target)) - set(new):
        _remove(target / name)
    for name in new:
        if (folder / name).is_dir() and (target / name).exists():
            _remove(target / name)
        os.replace(folder / name, target / name)
    sync_folder(target)
    for name in set(os.listdir(journal)) - {UNFINISHED}:
        _remove(journal / name)  # repairs of the files that are gone
    create_file(target / MANIFEST, manifest)
    sync_folder(journal)
    (journal / UNFINISHED).unlink()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not os.listdir(folder):
        folder.rmdir()


def _widen_modes(folder: Path) -> None:
    """Give files the mode that the umask asks for: safetensors 0.8 makes them 0600 whatever it says."""
    probe = folder / ".mode"
    create_file(probe, b"")
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            if path.stat().st_mode & 0o777 == 0o600 != mode:
                path.chmod(mode)
