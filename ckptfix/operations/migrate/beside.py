"""What lies in a folder beside the weights: what is carried over, and what is not, and why."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.errors import OperationError
from ckptfix.operations.migrate.naming import is_lone
from ckptfix.storage.listing import list_folder
from ckptfix.storage.lock import LOCK
from ckptfix.storage.paths import JOURNAL
from ckptfix.weights.deepspeed_files import BESIDE, is_deepspeed_file
from ckptfix.weights.stored import Format, StoredCheckpoint

_SHARDED = re.compile(r"pytorch_model_fsdp_[0-9]+")
"""Where FSDP keeps a model; what is left in one is of a model that is converted from elsewhere."""

_NOWHERE = {
    errno.ENOENT: "a symbolic link to nothing",
    errno.ENOTDIR: "a symbolic link to nothing",
    errno.ELOOP: "a symbolic link in a circle",
}


class LeftOut(NamedTuple):
    """What is in the source and will not be in the new checkpoint, and why."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """``carried``: files to copy; ``empty``: folders to make; relative to the source's folder."""

    carried: tuple[PurePosixPath, ...] = ()
    empty: tuple[PurePosixPath, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def look_beside(source: StoredCheckpoint, new: frozenset[PurePosixPath]) -> Beside:
    """Return what becomes of all that holds no weights of the source. ``new``: the files that are written.

    Folders behind links are carried as folders; what ckptfix keeps in a folder below goes with it where every file of
    that folder is carried. Raises OperationError for a folder that cannot be listed: what it
    holds would be lost without a word.
    """
    if source.only is not None:
        return Beside()
    used = {str(file) for one in source.weights for file in one.files}
    listing = list_folder(source.root)
    listed = {PurePosixPath(name): why for name, why in listing.files.items() if name not in used}
    if is_lone(source):
        reason = "no weights of a model, and only those are migrated here"
        return Beside(left_out=tuple(LeftOut(str(path), reason) for path in (*listed, *listing.journals)))
    homes = {folder for one in source.weights for folder in (one.home, *one.home.parents)}
    folders = frozenset(parent for one in new for parent in one.parents) - {PurePosixPath("."), *homes}
    taken = partial(_taken, source=source, rivals=frozenset(source.rivals), new=new, folders=folders)
    carried: list[PurePosixPath] = []
    left: list[LeftOut] = []
    for path, unlisted in listed.items():
        why = taken(path) or unlisted or _not_a_file(source.root / path)
        if why is None:
            carried.append(path)
        elif unlisted and why is unlisted and not (source.root / path).is_symlink():
            raise OperationError(
                f"{source.root / path} {unlisted}, so what is in it would be lost; nothing was written; allow it, or "
                "move it away"
            )
        else:
            left.append(LeftOut(str(path), why))
    changed = {
        parent for name in {*listing.files} - set(map(str, carried)) for parent in PurePosixPath(name).parents
    }
    for journal in map(PurePosixPath, listing.journals):
        files = _journal_files(source.root, journal)
        if files is not None and journal.parent not in changed and taken(journal) is None:
            carried += files
        else:
            why = "it lists the files of its folder, which are not copied as they are"
            left.append(LeftOut(str(journal), why if files is not None else "there is more in it than files"))
    empty = [path for path in _empty_folders(source.root) if taken(path) is None]
    return Beside(carried=tuple(carried), empty=tuple(empty), left_out=tuple(left))


def _taken(
    path: PurePosixPath,
    *,
    source: StoredCheckpoint,
    rivals: frozenset[PurePosixPath],
    new: frozenset[PurePosixPath],
    folders: frozenset[PurePosixPath],
) -> str | None:
    """Return why something has no place in the new checkpoint, None when it has."""
    if path in rivals or _SHARDED.fullmatch(path.parts[0]):
        return "weights of a model that is converted from other files"
    if path in new or path in folders or not new.isdisjoint(path.parents):
        return "a new file takes its place"
    if folders.intersection(path.parents):
        return "a new folder takes its place"
    if path in BESIDE and any(one.format is Format.DEEPSPEED for one in source.weights):
        return "it is for the DeepSpeed folder that is converted"
    if path in BESIDE and any(is_deepspeed_file(one.name) for one in rivals):
        return "it is for the DeepSpeed folder, which is not copied"
    return None


def _not_a_file(path: Path) -> str | None:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if error.errno not in _NOWHERE:
            raise
        return _NOWHERE[error.errno]
    return None if stat.S_ISREG(mode) else "not a regular file"


def _journal_files(root: Path, journal: PurePosixPath) -> list[PurePosixPath] | None:
    """Return the files of what ckptfix keeps in a folder below, but for a lock; None when it made not all of them.

    With them ``undo`` and ``verify`` work in a copy of that folder. Raises OSError for what cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    if (root / journal).is_symlink():
        return None
    found = []
    for where, folders, names in os.walk(root / journal, onerror=fail):
        if any(os.path.islink(os.path.join(where, name)) for name in folders):
            return None
        paths = [PurePosixPath(os.path.relpath(os.path.join(where, name), root)) for name in sorted(names)]
        if not all(stat.S_ISREG(os.lstat(root / path).st_mode) for path in paths):
            return None
        found += [path for path in paths if path != journal / LOCK]
    return found


def _empty_folders(root: Path) -> Iterator[PurePosixPath]:
    for where, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name != JOURNAL)
        if not folders and not names and (path := PurePosixPath(os.path.relpath(where, root))).parts:
            yield path
