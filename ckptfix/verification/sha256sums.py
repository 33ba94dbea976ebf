"""Lists of checksums as ``sha256sum`` writes them: its own lines, those of ``--tag``, and those of
``--zero``.
"""

import codecs
import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptfix.checkpoint.manifest import MAX_MANIFEST
from ckptfix.errors import OperationError
from ckptfix.storage.files import AnyPath, absolute, folder_entries, is_file, is_listed, relative
from ckptfix.storage.paths import existing
from ckptfix.storage.reading import open_reader
from ckptfix.wording import count_of

_NAMES = re.compile(r"(sha256sums?|checksums?)(\.txt|\.sha256)?", re.IGNORECASE)
_TAG = re.compile(rb"SHA256 ?\((.*)\)[ \t]*=[ \t]*([0-9a-fA-F]{64})", re.DOTALL)
_LINE = re.compile(rb"([0-9a-fA-F]{64})[ \t][ *](.+)", re.DOTALL)
_ESCAPES = {b"\\\\": b"\\", b"\\n": b"\n", b"\\r": b"\r"}
_ESCAPE = re.compile(rb"\\.?", re.DOTALL)


class Sums(NamedTuple):
    """The checksums of a list. ``digests``: path as it is written -> sha256. ``unread``: how many
    lines are none.
    """

    digests: dict[str, str]
    unread: int


class Listed(NamedTuple):
    """The checksums of a list that are about one checkpoint.

    ``digests``: path relative to the checkpoint -> sha256. ``outside``: how many others it has.
    ``unread``: lines that are not checksums.
    """

    digests: dict[str, str]
    outside: int
    unread: int

    def not_checked(self, name: str) -> Iterator[str]:
        """Yield in words what of the list was not compared."""
        if self.outside:
            yield f"{count_of(self.outside, 'checksum')} in {name} for files outside the checkpoint"
        if self.unread:
            yield f"{count_of(self.unread, 'line')} in {name} without a sha256 and a file name"


def find_sums(root: AnyPath, needed: Iterable[str]) -> AnyPath | None:
    """Return the list in a folder, or next to it, that has a checksum of all files that need one;
    None without one.

    A list without the files of weights would verify a checkpoint without a look at any weight.
    """
    above = root.parent if root.name not in ("", "..") else absolute(root).parent
    for folder in (root, above):
        try:
            if not is_listed(folder):
                continue
            with folder_entries(folder) as listing:
                names = sorted(entry.name for entry in listing if _NAMES.fullmatch(entry.name))
        except OSError:
            continue
        for name in names:
            path = folder / name
            if is_file(path):
                listed = read_sums(path, root).digests
                if listed and listed.keys() >= {*needed} - {str(relative(path, root))}:
                    return path
    return None


def read_sums(path: AnyPath, root: AnyPath) -> Listed:
    """Return the checksums in a file that are about the checkpoint at ``root``.

    Paths count from the folder of the list where that is the checkpoint or a folder above it, as
    ``sha256sum`` is run there, else from the checkpoint. Raises OperationError for a list that
    contradicts itself, OSError.
    """
    listed = existing(path)
    with open_reader(listed) as reader:
        if reader.size > MAX_MANIFEST:
            raise OperationError(f"{path} is too large: {reader.size} bytes (limit {MAX_MANIFEST})")
        data = reader.read(0, reader.size)
    sums = parse_sums(data, str(path))
    home = os.path.normpath(str(absolute(root)))
    own = os.path.normpath(str(absolute(listed)))
    place = os.path.dirname(own)
    base = place if os.path.join(home, "").startswith(os.path.join(place, "")) else home
    found: dict[str, str] = {}
    outside = 0
    for name, digest in sums.digests.items():
        full = os.path.normpath(os.path.join(base, name))
        if not full.startswith(os.path.join(home, "")):
            outside += 1
        # `sha256sum * > SHA256SUMS` lists the list while it is empty.
        elif full != own:
            inside = os.path.relpath(full, home)
            if found.setdefault(inside, digest) != digest:
                raise _contradiction(str(path), inside)
    return Listed(found, outside, sums.unread)


def parse_sums(data: bytes, where: str) -> Sums:
    """Return the checksums in the bytes of a list. Raises OperationError for two of one path that
    differ.
    """
    # As editors on Windows put it before the first line.
    data = data.removeprefix(codecs.BOM_UTF8)
    is_zero = b"\0" in data
    digests: dict[str, str] = {}
    unread = 0
    for line in data.split(b"\0" if is_zero else b"\n"):
        if not is_zero:
            line = line.removesuffix(b"\r")
        if not line or line.startswith(b"#"):
            continue
        entry = _entry(line, is_zero=is_zero)
        if entry is None:
            unread += 1
        elif digests.setdefault(entry[0], entry[1]) != entry[1]:
            raise _contradiction(where, entry[0])
    return Sums(digests, unread)


def _contradiction(where: str, name: str) -> OperationError:
    return OperationError(
        f"{where}: refused, and nothing was compared: {name!r} is listed with two checksums"
    )


def _entry(line: bytes, *, is_zero: bool) -> tuple[str, str] | None:
    """Return the path and the checksum of a line, None for no such line; as ``sha256sum --check``
    reads it.
    """
    line = line.lstrip(b" \t")
    is_escaped = not is_zero and line.startswith(b"\\")
    if is_escaped:
        line = line[1:]
    if tag := _TAG.fullmatch(line):
        name, digest = tag[1], tag[2]
    elif plain := _LINE.fullmatch(line):
        digest, name = plain[1], plain[2]
    else:
        return None
    unescaped = _unescaped(name) if is_escaped else name
    return (os.fsdecode(unescaped), digest.decode().lower()) if unescaped else None


def _unescaped(name: bytes) -> bytes | None:
    """Return a name without its escapes, None where a backslash is not one."""
    if any(one not in _ESCAPES for one in _ESCAPE.findall(name)):
        return None
    return _ESCAPE.sub(lambda match: _ESCAPES[match[0]], name)
