"""Listings of prefixes: the objects of a store by their folders."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptfix.storage.stores import ObjectInfo

_LONGEST_NAME, _LONGEST_PATH = 255, 3500


class Misfit(NamedTuple):
    """An object whose key no folder can hold. ``home``: the last folder of it that can exist."""

    info: ObjectInfo
    why: str
    home: str


class Listing(Mapping[str, ObjectInfo]):
    """The objects of a prefix by their keys, but for the ``misfits``."""

    def __init__(self, objects: Iterable[tuple[str, ObjectInfo]], before: int) -> None:
        """Take the objects as they come. ``before``: the bytes of the path of the prefix."""
        self.misfits: dict[str, Misfit] = {}
        self._objects: dict[str, dict[str, ObjectInfo]] = {}
        self._folders: dict[str, list[str]] = {"": []}
        for key, info in objects:
            why, home = _why_unheld(key, before)
            if why:
                self.misfits[key] = Misfit(info, why, home)
                self._add(home)
                continue
            folder, _, name = key.rpartition("/")
            self._add(folder)
            # Thousands of checkpoints have the same few names.
            self._objects.setdefault(folder, {})[sys.intern(name)] = info
        for folder, there in self._objects.items():
            for name in there.keys() & set(self._folders[folder]):
                why = "other keys use it as a folder"
                self.misfits[_join(folder, name)] = Misfit(there.pop(name), why, folder)

    def _add(self, folder: str) -> None:
        new = []
        while folder not in self._folders:
            self._folders[folder] = []
            new.append(folder)
            folder = folder.rpartition("/")[0]
        for added in new:
            above, _, name = added.rpartition("/")
            self._folders[above].append(name)

    def folders(self, folder: str) -> Sequence[str] | None:
        """Return the names of the sub-folders of a folder, None where there is no such folder."""
        return self._folders.get(folder)

    def files(self, folder: str) -> Mapping[str, ObjectInfo]:
        """Return the objects right in a folder by their names."""
        return self._objects.get(folder, {})

    def below(self, folder: str) -> dict[str, ObjectInfo]:
        """Return the objects in and below a folder by their keys relative to it."""
        start = _join(folder, "")
        found: dict[str, ObjectInfo] = {}
        waiting = [folder]
        while waiting:
            one = waiting.pop()
            inside = _join(one, "").removeprefix(start)
            found |= {f"{inside}{name}": info for name, info in self.files(one).items()}
            waiting += [_join(one, name) for name in reversed(self._folders.get(one, ()))]
        return found

    def misfits_below(self, folder: str) -> dict[str, ObjectInfo]:
        """Return the misfits in and below a folder by their keys relative to it."""
        start = _join(folder, "")
        return {
            key.removeprefix(start): one.info
            for key, one in self.misfits.items()
            if key.startswith(start)
        }

    def __getitem__(self, key: str) -> ObjectInfo:
        folder, _, name = key.rpartition("/")
        return self.files(folder)[name]

    def __iter__(self) -> Iterator[str]:
        return (_join(folder, name) for folder, names in self._objects.items() for name in names)

    def __len__(self) -> int:
        return sum(map(len, self._objects.values()))


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _why_unheld(key: str, before: int) -> tuple[str, str]:
    """Return why no folder can hold a key, "" where one can, and the last folder of it that can
    exist. ``before``: the bytes of the path before the key.
    """
    home: list[str] = []
    parts = key.split("/")
    for number, part in enumerate(parts):
        why = ""
        if part == "":
            why = "it ends in a slash" if number == len(parts) - 1 else "it contains an empty name"
        elif part in (".", ".."):
            why = f"it contains {part!r}, which leads to another folder"
        elif "\0" in part:
            why = "it has a NUL byte"
        else:
            try:
                size = len(os.fsencode(part))
            except UnicodeEncodeError:
                return "it contains a name that is not valid text", "/".join(home)
            if size > _LONGEST_NAME:
                why = (
                    f"it contains a name of {size} bytes (a file name can have at most "
                    f"{_LONGEST_NAME})"
                )
        if why:
            return why, "/".join(home)
        if number < len(parts) - 1:
            home.append(part)
    if before + len(os.fsencode(key)) > _LONGEST_PATH:
        return f"it has {len(os.fsencode(key))} bytes, too many for a path", ""
    return "", "/".join(home)
