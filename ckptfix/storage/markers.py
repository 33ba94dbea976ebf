"""The two records of an upload: ``upload.json``, written first, and the commit marker
``committed.json``, written last.

No store has a rename, and neither has a mount of one. So a checkpoint that ckptfix writes there
counts when its commit marker is there, as Orbax has it with ``commit_success.txt``. The record that
is written first tells an upload that was cut short from a folder that somebody copied with other
tools, which has neither. Both carry the number of their upload: the marker of an older one commits
nothing. They lie in ``.ckptfix/``, which no loader looks at.
"""

import json
import os
import time
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from msgspec import Struct, convert, to_builtins

from ckptfix.errors import FormatError
from ckptfix.storage.files import AnyPath
from ckptfix.storage.paths import COMMITTED, JOURNAL, ensure_listed
from ckptfix.storage.reading import open_reader
from ckptfix.wording import count_of, human_size

UPLOAD = f"{JOURNAL}/upload.json"
"""Path of the record of the upload that began last, relative to the checkpoint. It stays when the
upload has ended.
"""

NEEDED = f"{JOURNAL}/needed-while"
"""Path of the file in a staging folder that names the sign of ``staged.keep_while``, relative to
the folder.
"""

DESTINATION = f"{JOURNAL}/upload-to"
"""Path of the file in a complete staging folder that names its place in a store, relative to the
folder.
"""

NEVER_UPLOADED = (UPLOAD, COMMITTED, NEEDED, DESTINATION, f"{JOURNAL}/lock")
"""Files of a folder on a disk that are about the folder itself. A lock of a killed run would be one
in the store.
"""

_VERSION = 1
_LONGEST = 256 << 20
"""Longest record that is read, in bytes; an object takes about 200."""


class Uploaded(NamedTuple):
    """An object as it was uploaded; its sha256, and the store's ETag ("" on a mount)."""

    size: int
    sha256: str
    etag: str = ""


class _Stored(Struct, frozen=True):
    def to_bytes(self) -> bytes:
        """Return the record as it is stored."""
        record = {"version": _VERSION, **to_builtins(self)}
        return (json.dumps(record, indent=1) + "\n").encode()


class Begun(_Stored, frozen=True):
    """The record of an upload that has begun, and the sizes of its files."""

    upload: str
    started: float
    host: str
    pid: int
    files: Mapping[str, int]

    @property
    def sizes(self) -> Mapping[str, int]:
        """The bytes of every file."""
        return self.files


class Commit(_Stored, frozen=True):
    """The commit marker of an upload, with every object that it wrote."""

    upload: str
    ended: float
    objects: Mapping[str, Uploaded]

    @property
    def sizes(self) -> Mapping[str, int]:
        """The bytes of every object."""
        return {name: uploaded.size for name, uploaded in self.objects.items()}


_Record = TypeVar("_Record", Begun, Commit)


def begun_now(upload: str, files: Mapping[str, int]) -> Begun:
    """Return the record of an upload that this process begins."""
    return Begun(upload, time.time(), os.uname().nodename, os.getpid(), dict(files))


def parse_begun(data: bytes) -> Begun:
    """Return the record of an upload that has begun. Raises FormatError."""
    return _parsed(data, Begun, "the upload record")


def parse_commit(data: bytes) -> Commit:
    """Return a commit marker. Raises FormatError."""
    return _parsed(data, Commit, "the commit marker")


def read_commit(folder: AnyPath) -> Commit | None:
    """Return the commit marker of a folder, None without one. Raises FormatError, OSError."""
    data = _read(folder / COMMITTED)
    return None if data is None else parse_commit(data)


def read_begun(folder: AnyPath) -> Begun | None:
    """Return the record of the last upload, None without. Raises FormatError, OSError."""
    data = _read(folder / UPLOAD)
    return None if data is None else parse_begun(data)


def upload_problem(folder: AnyPath) -> str | None:
    """Return why the upload of a folder is not complete; None for a committed one, and for one that
    was not uploaded.

    Raises FormatError for a record that cannot be understood, OSError.
    """
    begun = read_begun(folder)
    if begun is None:
        return None
    commit = read_commit(folder)
    if commit is not None and commit.upload == begun.upload:
        return None
    return not_committed(
        begun, {name: size for name in begun.files if (size := _size(folder / name)) is not None}
    )


def not_committed(begun: Begun, sizes: Mapping[str, int]) -> str:
    """Return the words about an upload without its marker, by the sizes that are there."""
    there = {name: size for name, size in begun.files.items() if sizes.get(name) == size}
    arrived = f"{len(there)} of {count_of(len(begun.files), 'file')}"
    total = f"{human_size(sum(there.values()))} of {human_size(sum(begun.files.values()))}"
    return (
        f"no commit marker ({COMMITTED}): the upload was interrupted, or process {begun.pid} on "
        f"{begun.host} has not finished it yet; {arrived} arrived, {total}"
    )


def _size(path: AnyPath) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _parsed(data: bytes, kind: type[_Record], what: str) -> _Record:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"an upload record is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.get("version") != _VERSION:
        raise FormatError(f"an upload record has another version (expected {_VERSION})")
    try:
        record = convert(fields, kind)
        for name, size in record.sizes.items():
            ensure_listed(name, size)
    # Not ValidationError alone: half of a surrogate pair in the place of a number is another one.
    except ValueError as error:
        raise FormatError(f"{what} is malformed: {error}") from None
    return record


def _read(path: AnyPath) -> bytes | None:
    try:
        with open_reader(path) as reader:
            if reader.size > _LONGEST:
                raise FormatError(f"{path} is larger than {human_size(_LONGEST)}")
            return reader.read(0, reader.size)
    except (FileNotFoundError, NotADirectoryError):
        return None
