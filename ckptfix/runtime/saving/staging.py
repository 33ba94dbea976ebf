"""Where a save is written before it is whole, and how it becomes the checkpoint in one step.

A folder of ``checkpoints/`` is a checkpoint to Accelerate whatever its name, so the staging folder never lies there.
"""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ckptfix.checkpoint.latest import UNFINISHED
from ckptfix.checkpoint.manifest import MANIFEST, read_manifest
from ckptfix.errors import FormatError
from ckptfix.runtime.saving.leftovers import own_name, sweep
from ckptfix.storage.atomic import create_file, sync_folder, sync_tree
from ckptfix.storage.paths import JOURNAL
from ckptfix.storage.renaming import exchange


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
    beside = own_name(given)
    inside = Staging(target, target / JOURNAL / beside.name, How.INSIDE)
    if not _can_rename(beside.parent, target):
        return inside
    names = os.listdir(target) if target.is_dir() else []
    if not names:
        return Staging(target, beside, How.NEW)
    known = _own_files(target)
    return Staging(target, beside, How.SWAP) if known.issuperset(names) else inside


def begin(staging: Staging) -> bool:
    """Make an empty staging folder; what dead saves left beside it goes. False: another process has made it.

    Its name is of this save alone, so a folder of that name is on the same disk and not left over.
    """
    parent = staging.folder.parent
    sweep(parent)
    parent.mkdir(parents=True, exist_ok=True)
    try:
        staging.folder.mkdir()
    except FileExistsError:
        return False
    return True


def abandon(staging: Staging) -> None:
    """Remove what was staged."""
    shutil.rmtree(staging.folder, ignore_errors=True)
    if staging.how is How.INSIDE:
        _remove_if_empty(staging.target / JOURNAL)


def commit(staging: Staging, manifest: bytes) -> None:
    """Make what was staged the checkpoint. Durable when it returns; interrupted, the old or the new one is there.

    INSIDE alone has a time between: the manifest is missing then, and ``latest_checkpoint`` passes the folder over.
    """
    folder, target = staging.folder, staging.target
    _widen_modes(folder)
    sync_tree(folder)
    # Looked at again: files may have come while we were writing, and this may be another disk than the main process's.
    how = How.INSIDE if staging.how is How.INSIDE else plan_staging(target).how
    if how is How.INSIDE:
        _move_in(staging, manifest)
    else:
        _put_in_place(staging, how, manifest)
    shutil.rmtree(folder, ignore_errors=True)  # after a swap: the old checkpoint


def _put_in_place(staging: Staging, how: How, manifest: bytes) -> None:
    folder, target = staging.folder, staging.target
    known = _own_files(target)
    (folder / JOURNAL).mkdir()
    create_file(folder / MANIFEST, manifest)
    sync_folder(folder / JOURNAL)
    sync_folder(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    if how is How.NEW:
        os.rename(folder, target)
    elif exchange(folder, target):
        for name in set(os.listdir(folder)) - known:  # came between our last look and the exchange
            os.rename(folder / name, target / name)
    else:
        shutil.rmtree(folder / JOURNAL)
        _move_in(staging, manifest)
    sync_folder(target.parent)
    if folder.parent != target.parent:
        sync_folder(folder.parent)


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
    if manifest is not None:  # a process that came too late to the save adds its own
        names.update(f"random_states_{rank}.pkl" for rank in range(manifest.world_size))
    with suppress(OSError, ValueError, TypeError):  # not there: no save was interrupted here
        names.update(str(name) for name in json.loads((target / JOURNAL / UNFINISHED).read_text()))
    return {JOURNAL, *names} if names else set()


def _move_in(staging: Staging, manifest: bytes) -> None:
    folder, target = staging.folder, staging.target
    known = _own_files(target) - {JOURNAL}
    new = os.listdir(folder)
    journal = target / JOURNAL
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
