"""Which old checkpoints go after a save: never the last whole one, and never one that is not ours."""

import os
import shutil
from pathlib import Path

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.latest import candidates, outside_checkpoints
from ckptfix.checkpoint.manifest import MANIFEST, read_manifest
from ckptfix.checkpoint.staged import own_name, release, sweep
from ckptfix.errors import FormatError
from ckptfix.runtime.saving.replacing import role_of


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
        trash = name = own_name(path)
        try:
            os.rename(path, trash)
        except OSError:  # another disk, or a parent that we may not write to
            (path / MANIFEST).unlink(missing_ok=True)
            for states in path.glob("random_states_*.pkl"):
                states.unlink()  # from here on nothing takes it for whole
            trash = path
        shutil.rmtree(trash)
        release(name)
        removed.append(path)
    return removed


def _was_saved(path: Path) -> bool:
    """Whether ``save_state`` wrote anything of a folder: one that only has its name is not ours to remove."""
    roles = {role_of(name) for name in os.listdir(path)}
    return (
        _has_manifest_of_save(path)
        or Role.RNG_STATE in roles
        or (Role.MODEL in roles and Role.OPTIMIZER in roles)
    )


def _has_manifest_of_save(path: Path) -> bool:
    """Whether a save left its manifest: ``ckptfix seal`` writes one into folders of anybody's."""
    try:
        manifest = read_manifest(path)
    except (FormatError, OSError):
        return True
    return manifest is not None and manifest.is_of_a_save
