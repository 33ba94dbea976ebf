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
    named = split_number(home.name)
    if named is None:
        return
    stem, own = named
    try:
        names = folders_next_to(home)
    except (CkptfixError, OSError):
        return  # whoever reads a checkpoint may not be allowed to list the folder above it
    numbers = sorted(
        (parts[1], name)
        for name in names
        if (parts := split_number(name)) is not None and parts[0] == stem and name != home.name
    )
    before = [(number, name) for number, name in numbers if number < own]
    after = numbers[len(before) :]
    for number, name in dict.fromkeys((*before[-1:], *after[:1], *numbers[:1], *numbers[-1:])):
        is_earlier = number < own and is_one_of_several(name)
        with suppress(CkptfixError), folder_next_to(home, name) as folder:
            yield name, is_earlier, folder


_NEAREST = 2
"""Checkpoints on either side of one whose names are read."""


def names_of_neighbours(home: Path) -> Iterator[frozenset[str]]:
    """Yield the names of all files of each save of ``save_state`` near a checkpoint of a run; none that is unreadable.

    ``home``: as of ``neighbours``.
    """
    home = Path(os.path.abspath(origin_of(home)))
    named = split_number(home.name)
    if named is None:
        return
    stem, own = named
    with suppress(CkptfixError, OSError):
        folders = ((split_number(name), name) for name in folders_next_to(home) if name != home.name)
        run = sorted((parts[1], name) for parts, name in folders if parts is not None and parts[0] == stem)
        before = [name for number, name in run if number < own][-_NEAREST:]
        after = [name for number, name in run if number >= own][:_NEAREST]
        for name in (*before, *after):
            names = frozenset(names_next_to(home, name))
            parsed = map(parse_file_name, names)
            if any(meaning is not None and meaning.is_of_save_state for meaning in parsed):
                yield names


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
