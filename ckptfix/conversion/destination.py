"""Destination of a migration: a new path, an empty folder, or a folder that an earlier migration
wrote.

A migration leaves a receipt in the folder that it writes: every file with its size and its time.
``--overwrite`` replaces a folder when its files match the receipt exactly. A newer or changed file
is the user's own, and neither the source nor a folder that the source lies in is ever replaced.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptfix.conversion.migration_plan import MigrationPlan, Options
from ckptfix.conversion.sources import files_read
from ckptfix.conversion.target_names import SUFFIXES, json_object
from ckptfix.errors import ChangedError, UsageError
from ckptfix.storage.atomic import create_file, sync_folder
from ckptfix.storage.files import AnyPath, StorePath, lies_in, real_path
from ckptfix.storage.lock import LOCK
from ckptfix.storage.paths import (
    JOURNAL,
    MANIFEST,
    RECEIPT,
    ensure_folder,
    listed_files,
    shell_path,
)
from ckptfix.wording import list_names

_VERSION = 1
_REWRITTEN = (RECEIPT, MANIFEST, f"{JOURNAL}/{LOCK}")
"""Files in ckptfix's own folder that it may rewrite, as ``seal`` does: their size and time prove
nothing.
"""


def check_paths(path: AnyPath, output: Path, options: Options) -> None:
    """Raise UsageError when nothing can be written at ``output``, by what exists there now;
    OSError.
    """
    source, target = real_path(path), Path(os.path.realpath(output))
    if output.name == "..":
        raise UsageError(f"{output}: the path ends in '..'; name the folder itself")
    ensure_folder(output.absolute().parent)
    if source == target or (_is_in(source, target) and _is_in(target, source)):
        raise UsageError(f"{output} is the source of the migration; choose another path")
    if _is_in(target, source):
        raise UsageError(
            f"{output} is inside the source of the migration, {path}; choose another path"
        )
    if not os.path.lexists(output) or _is_empty_folder(output):
        return
    if _is_in(source, target):
        raise UsageError(
            f"{path}, the source of the migration, is inside {output}; choose another path"
        )
    if options.overwrite:
        files_replaced(output)
        if Path.cwd().is_relative_to(target) or os.path.ismount(target):
            raise UsageError(
                f"{output} cannot be replaced: it is a mount point, or it contains the current "
                "folder"
            )
        return
    words = "choose another path"
    if output.is_dir() and not path.is_dir():
        suffix = next(iter(SUFFIXES.get(options.to, ())), "")
        words = f"it is a folder, so choose a path in it, such as {output / (path.stem + suffix)}"
    with suppress(UsageError):
        files_replaced(output)
        words += ", or replace it with --overwrite"
    raise UsageError(f"{output} exists; {words}")


def ensure_apart(plan: MigrationPlan) -> None:
    """Raise UsageError when the new checkpoint would change the source, or replace a file that the
    source leads to.

    Links are followed: a folder or a file that a link of the source leads to belongs to it. So does
    the model that an adapter needs.
    """
    output, root, only = plan.output.absolute(), plan.source.root, plan.source.only
    place = Path(os.path.realpath(output.parent)) / output.name
    names = [*files_read(plan), *(listed_files(root) if only is None else ())]
    if only is None:
        for folder in {os.path.dirname(name) for name in names}:
            if _is_in(place, real_path(root / folder)):
                raise UsageError(
                    f"{output} is inside {root / folder}, which is part of the source; choose "
                    "another path"
                )
    if not os.path.lexists(place):
        return
    if plan.is_file:
        raise UsageError(
            f"{output} is a folder (expected a path for a new file); choose another path"
        )
    homes = {real_path(root / name).parent: name for name in names}
    for home, name in homes.items():
        if _is_in(home, place):
            raise UsageError(
                f"{output} cannot be replaced: {root / name}, a file of the source, resolves to a "
                "path inside it; choose another path"
            )
    for base in _base_models(root):
        if _is_in(base, place):
            raise UsageError(
                f"{output} cannot be replaced: it contains the base model that adapter_config.json "
                f"in {root} refers to; choose another path"
            )


def files_replaced(output: Path) -> tuple[str, ...]:
    """Return the files that a new checkpoint would replace at ``output``, sorted: all are from an
    earlier migration.

    Raises UsageError when there is anything else, with what to remove; OSError for a folder that
    cannot be listed.
    """
    if not os.path.lexists(output):
        return ()
    if output.is_symlink() or not output.is_dir():
        kind = "a symbolic link" if output.is_symlink() else "not a folder"
        raise _refused(output, f"is {kind}", f"rm {shell_path(output)}")
    remove = f"rm -r {shell_path(output)}"
    if not os.listdir(output):
        return ()
    written = _read_receipt(output)
    if written is None:
        raise _refused(output, f"has no {RECEIPT}: ckptfix migrate did not write it", remove)
    found = sorted(_files_in(output))
    foreign = [
        name
        for name, state in found
        if state is None or (name not in _REWRITTEN and written.get(name) != state)
    ]
    if foreign:
        what = (
            "has files that were added or changed after ckptfix migrate wrote it: "
            f"{list_names(foreign)}"
        )
        raise _refused(output, what, remove)
    return tuple(name for name, _ in found if name != RECEIPT)


def ensure_unchanged(plan: MigrationPlan, folder: Path | None = None) -> None:
    """Raise ChangedError when files were added to the folder to be replaced, or removed, since it
    was planned.

    ``folder``: where it is now, if not at the output.
    """
    try:
        is_same = files_replaced(folder or plan.output) == plan.removed
    except UsageError:
        is_same = False
    if not is_same:
        raise ChangedError(f"{plan.output} changed during the migration; nothing was written there")


def write_receipt(folder: Path, plan: MigrationPlan) -> None:
    """Write the list of its files into a complete new folder, durably, so that a later migration
    may replace it.
    """
    document = {
        "version": _VERSION,
        "to": plan.options.target,
        "files": dict(_files_in(folder)),
        "left_out": [part.what for part in plan.left_out],
        "may_lack_keys": plan.may_lack_keys,
    }
    (folder / JOURNAL).mkdir(exist_ok=True)
    create_file(folder / RECEIPT, (json.dumps(document, indent=1) + "\n").encode())
    sync_folder(folder / JOURNAL)
    sync_folder(folder)


def _read_receipt(folder: Path) -> dict[str, Any] | None:
    """Return file -> [size, time] of a receipt; None without a receipt that can be understood."""
    path = folder / RECEIPT
    if path.is_symlink() or not path.is_file():
        return None
    _, document = json_object(path) or (b"", {})
    files = document.get("files")
    return files if document.get("version") == _VERSION and isinstance(files, dict) else None


def _files_in(folder: Path) -> Iterator[tuple[str, list[int] | None]]:
    """Yield every file with its size and time; None for one that is not a regular file.

    Raises OSError for a folder that cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=fail):
        for name in (*names, *(one for one in folders if os.path.islink(os.path.join(root, one)))):
            path = os.path.join(root, name)
            status = os.lstat(path)
            is_regular = stat.S_ISREG(status.st_mode)
            yield (
                os.path.relpath(path, folder),
                ([status.st_size, status.st_mtime_ns] if is_regular else None),
            )


def _refused(output: Path, why: str, remove: str) -> UsageError:
    return UsageError(
        f"{output} {why}; --overwrite replaces only a folder that ckptfix migrate wrote; choose "
        f"another path, or remove it yourself: {remove}"
    )


def _base_models(root: AnyPath) -> Iterator[Path]:
    """Yield the possible paths of the base model of an adapter, by its ``adapter_config.json``.

    peft passes the name to ``from_pretrained``, which tries it as a path from the working
    directory; the name may also be relative to the adapter's folder.
    """
    values: dict[str, Any] = {}
    with suppress(OSError):
        _, values = json_object(root / "adapter_config.json") or (b"", values)
    name = values.get("base_model_name_or_path")
    if isinstance(name, str) and name:
        with suppress(ValueError):  # a NUL byte, or half of a surrogate pair, which no path holds
            folders = (Path.cwd(), *((root,) if isinstance(root, Path) else ()))
            yield from [Path(os.path.realpath(folder / name)) for folder in folders]


def _is_in(path: AnyPath, folder: AnyPath) -> bool:
    """Return whether a path is the other one or lies below it, also under another name by a
    mount.
    """
    if isinstance(path, StorePath) or isinstance(folder, StorePath):
        return lies_in(path, folder)
    if path.is_relative_to(folder):
        return True
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    for parent in (path, *path.parents) if stat.S_ISDIR(status.st_mode) else ():
        with suppress(OSError):
            if os.path.samestat(os.stat(parent), status):
                return True
    return False


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not os.listdir(path)
