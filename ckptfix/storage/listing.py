"""Every file below a folder, those behind links to folders too: weights are read through such links."""

import os
from collections import deque
from pathlib import Path
from typing import NamedTuple

from ckptfix.storage.paths import JOURNAL


class Listing(NamedTuple):
    """``files``: all that is no folder, as ``listed_files`` gives it.

    ``journals``: what ckptfix keeps in the folders below, of checkpoints of their own, in order.
    """

    files: dict[str, str | None]
    journals: tuple[str, ...]


def listed_files(root: Path) -> dict[str, str | None]:
    """Return all that is no folder below a folder, by its relative path, in order, but for what ckptfix keeps.

    The value says why something cannot be looked into: a folder that cannot be listed, and a link to one that was
    listed by another path, or that the checkpoint lies in; None for all else. Each folder is listed once, its own
    place before a link to it. Raises OSError when the folder itself cannot be listed.
    """
    return list_folder(root).files


def list_folder(root: Path) -> Listing:
    """Return what is below a folder. Raises OSError when the folder itself cannot be listed."""
    journals: list[str] = []
    found: dict[str, str | None] = {}
    seen: dict[tuple[int, int], str] = {}
    above = {_identity(str(parent)) for parent in Path(os.path.realpath(root)).parents}
    waiting, links = deque([""]), deque[str]()
    while waiting or links:
        is_link = not waiting
        where = links.popleft() if is_link else waiting.popleft()
        full = os.path.join(root, where)
        try:
            identity = _identity(full)
            if identity in above:
                found[where] = "is a link to a folder that this one lies in"
                continue
            if identity in seen:
                found[where] = f"is a link to {seen[identity] or 'the checkpoint itself'}"
                continue
            seen[identity] = where
            with os.scandir(full) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            if not where:
                raise
            found[where] = f"cannot be listed: {error.strerror}"
            continue
        for entry in entries:
            path = os.path.join(where, entry.name)
            if not os.path.isdir(entry.path):
                found[path] = None
            elif entry.name != JOURNAL:
                (links if entry.is_symlink() else waiting).append(path)
            elif where:
                journals.append(path)
    return Listing(dict(sorted(found.items())), tuple(sorted(journals)))


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
