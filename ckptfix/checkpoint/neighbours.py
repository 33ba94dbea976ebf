"""The other checkpoints of a run, next to one of them on this machine or in a store."""

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptfix.checkpoint.filenames import is_one_of_several, parse_file_name, split_number
from ckptfix.errors import CkptfixError
from ckptfix.storage.reading import listed_names, names_in, origin_of, store_of, subfolders


def neighbours(home: Path) -> Generator[tuple[str, bool, Path], None, None]:
    """Yield up to four other checkpoints of a run: the two next to this one, the first and the last.

    Each has its name, whether it is an earlier one, and its folder, which for a store exists until the next one.
    """
    home = Path(os.path.abspath(origin_of(home)))
    before, after = _run_around(home)
    numbers = [*before, *after]
    for entry in dict.fromkeys((*before[-1:], *after[:1], *numbers[:1], *numbers[-1:])):
        _, name = entry
        is_earlier = entry in before and is_one_of_several(name)
        with suppress(CkptfixError), folder_next_to(home, name) as folder:
            yield name, is_earlier, folder


_NEAREST = 2
"""Checkpoints on either side of one whose names are read."""


def names_of_neighbours(home: Path) -> Iterator[frozenset[str]]:
    """Yield the names of all files of each save of ``save_state`` near a checkpoint of a run; none that is unreadable.

    ``home``: as of ``neighbours``.
    """
    home = Path(os.path.abspath(origin_of(home)))
    before, after = _run_around(home)
    with suppress(CkptfixError, OSError):
        for _, name in (*before[-_NEAREST:], *after[:_NEAREST]):
            names = frozenset(names_next_to(home, name))
            parsed = map(parse_file_name, names)
            if any(meaning is not None and meaning.is_of_save_state for meaning in parsed):
                yield names


def _run_around(home: Path) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Return number and name of the checkpoints of a run before one of them, and of those after it.

    None where it is not of a run, or the folder above it may not be listed by whoever may read it.
    """
    named = split_number(home.name)
    if named is None:
        return [], []
    stem, own = named
    try:
        names = [name for name in folders_next_to(home) if name != home.name]
    except (CkptfixError, OSError):
        return [], []
    numbered = ((split_number(name), name) for name in names)
    run = sorted((parts[1], name) for parts, name in numbered if parts is not None and parts[0] == stem)
    before = [entry for entry in run if entry[0] < own]
    return before, run[len(before) :]


@contextmanager
def folder_next_to(home: Path, name: str) -> Iterator[Path]:
    """Yield the folder of this name next to another one. That of a store exists until the end of the block.

    Raises CkptfixError.
    """
    if store_of(home) is None:
        yield home.parent / name
        return
    from ckptfix.storage.images import image_of, made, release

    above = _url_above(home)
    if above is None:
        with made(home.parent / name) as folder:
            yield folder
        return
    image = image_of(f"{above}/{name}", complete=False)
    try:
        yield image
    finally:
        release(image)


def folders_next_to(folder: Path) -> list[str]:
    """Return the names of the folders in the one that holds this folder, also for the image of a prefix.

    Raises OSError, CkptfixError.
    """
    above = _url_above(folder)
    if above is None:
        return subfolders(folder.parent)
    from ckptfix.storage.images import prefixes_in

    return prefixes_in(above)


def names_next_to(folder: Path, name: str) -> list[str]:
    """Return the names in a folder next to this folder, as of ``folders_next_to``. Raises OSError, CkptfixError."""
    above = _url_above(folder)
    if above is None:
        return names_in(folder.parent / name)
    from ckptfix.storage.images import names_right_below

    return names_right_below(f"{above}/{name}")


def _url_above(folder: Path) -> str | None:
    """Return the URL above the image of one prefix. A folder of a listing has its neighbours there: None."""
    store = store_of(folder)
    if store is None or (store_of(folder.parent) is not None and listed_names(folder) is not None):
        return None
    return store.url.rpartition("/")[0]
