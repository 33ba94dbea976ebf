"""Listings of prefixes: the objects of a store by their folders, packed, as there may be a million
of them.
"""

import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptfix.storage.stores import ObjectInfo

_LONGEST_NAME, _LONGEST_PATH = 255, 3500
_MOST_READ = 64
"""Folders whose objects are kept unpacked."""

_CLASHES = "other keys use it as a folder"


class Misfit(NamedTuple):
    """An object whose key no folder can hold. ``home``: the last folder of it that can exist."""

    info: ObjectInfo
    why: str
    home: str


class Listing(Mapping[str, ObjectInfo]):
    """The objects of a prefix by their keys, but for the ``misfits``.

    Measured with 100,000 folders of three objects each: 56 MiB; a dict of them takes twice as much.
    """

    def __init__(self, objects: Iterable[tuple[str, ObjectInfo]], before: int) -> None:
        """Take the objects as they come. ``before``: the bytes of the path of the prefix."""
        self.misfits: dict[str, Misfit] = {}
        self._read: OrderedDict[str, dict[str, ObjectInfo]] = OrderedDict()
        self._packed: dict[str, bytearray] = {}
        self._folders: dict[str, list[str]] = {"": []}
        self._count = 0
        for key, info in objects:
            why, home = why_unheld(key, (), before)
            if why:
                self.misfits[key] = Misfit(info, why, home)
                self._add(home)
                continue
            folder, _, name = key.rpartition("/")
            self._add(folder)
            packed = f"{name}\0{info.size}\0{info.etag}\0{info.modified_ns}\0"
            self._packed.setdefault(folder, bytearray()).extend(
                packed.encode("utf-8", "surrogateescape")
            )
            self._count += 1
        for folder in self._packed:
            if names := self._folders[folder]:
                there = self._objects(folder)
                for name in there.keys() & set(names):
                    self.misfits[_join(folder, name)] = Misfit(there[name], _CLASHES, folder)
                    self._count -= 1

    def _add(self, folder: str) -> None:
        new = []
        while folder not in self._folders:
            self._folders[folder] = []
            new.append(folder)
            folder = folder.rpartition("/")[0]
        for one in new:
            above, _, name = one.rpartition("/")
            self._folders[above].append(name)

    def _objects(self, folder: str) -> dict[str, ObjectInfo]:
        fields = self._packed.get(folder, b"").decode("utf-8", "surrogateescape").split("\0")
        parts = zip(*(fields[at:-1:4] for at in range(4)), strict=True)
        return {
            name: ObjectInfo(int(size), etag, int(modified)) for name, size, etag, modified in parts
        }

    def folders(self, folder: str) -> Sequence[str] | None:
        """Return the names of the sub-folders of a folder, None where there is no such folder."""
        return self._folders.get(folder)

    def files(self, folder: str) -> Mapping[str, ObjectInfo]:
        """Return the objects right in a folder by their names."""
        read = self._read.get(folder)
        if read is None:
            read = self._objects(folder)
            for name in self._folders.get(folder, ()):
                read.pop(name, None)  # a misfit
            self._read[folder] = read
            while len(self._read) > _MOST_READ:
                self._read.popitem(last=False)
        return read

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
        return (_join(folder, name) for folder in self._packed for name in self.files(folder))

    def __len__(self) -> int:
        return self._count


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def why_unheld(key: str, folders: Collection[str], before: int) -> tuple[str, str]:
    """Return why no folder can hold a key, "" where one can, and the last folder of it that can
    exist.

    ``folders``: those of all keys; ``before``: the bytes of the path before the key.
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
    if key in folders:
        return _CLASHES, "/".join(home)
    return "", "/".join(home)
