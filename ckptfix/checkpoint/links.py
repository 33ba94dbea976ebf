"""Symbolic links inside of a checkpoint folder: which of its own files they need."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from ckptfix.storage.paths import JOURNAL

_MAX_HOPS = 40
"""How many links Linux follows for one path (path_resolution(7)); more are a loop."""


def links_below(root: Path) -> Mapping[PurePosixPath, frozenset[PurePosixPath]]:
    """Return every symbolic link below a folder, with the places in the folder that it leads to or through.

    The journal is left out, as are folders behind links and those that cannot be listed.
    """
    real = os.path.realpath(root)
    found: dict[PurePosixPath, frozenset[PurePosixPath]] = {}
    for current, folders, files in os.walk(root):
        if JOURNAL in folders:
            folders.remove(JOURNAL)
        for name in (*folders, *files):
            full = os.path.join(current, name)
            if os.path.islink(full):
                path = PurePosixPath(os.path.relpath(full, root))
                found[path] = frozenset(_inside(real, _places(full)))
    return found


def _inside(real: str, places: Iterator[str]) -> Iterator[PurePosixPath]:
    for place in places:
        if place.startswith(real.rstrip("/") + "/"):
            yield PurePosixPath(os.path.relpath(place, real))


def _places(link: str) -> Iterator[str]:
    """Yield the place of each further link on the way, and the end of it."""
    here = link
    for _ in range(_MAX_HOPS):
        try:
            target = os.path.join(os.path.dirname(here), os.readlink(here)).rstrip("/")
        except OSError:
            return  # no link: the end of the way, or nothing is there
        folder, name = os.path.split(target)
        is_step = name in ("", ".", "..")
        here = os.path.realpath(target) if is_step else os.path.join(os.path.realpath(folder), name)
        yield here
