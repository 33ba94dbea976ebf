"""Results of units of work that outlive their process: the next run goes on from them.

A folder holds one file of JSON lines for each process that worked, so that no two write to one
file. A unit goes by its key and by the identity of its files, not by the number of processes. A
line that was cut short or changed is ignored.
"""

import hashlib
import json
import os
import re
import shlex
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from ckptfix.errors import OperationError
from ckptfix.storage.files import AnyPath, StorePath, etag_of, stat_of
from ckptfix.storage.paths import JOURNAL, shell_path
from ckptfix.storage.staged import write_file

FORMAT = 1
_REQUEST = "request.json"
_SUFFIX = ".results.jsonl"
_RESULTS = re.compile(rf".+-[0-9]+-[0-9a-f]{{8}}{re.escape(_SUFFIX)}")
"""Names of the files that ``add`` makes; a user's own results next to them are none."""
_SYNCED_AFTER = 1 << 30
"""Bytes of work after which the results are made durable: a node that loses power repeats at most
this.
"""


class Identity(NamedTuple):
    """A file as a unit of work needs it: another size, time or inode is another file, and another
    unit.

    ``changed_ns``: the time of the last change of any kind, which nobody can set: ``cp -p`` over a
    damaged file leaves the name, the size and the inode, and gives it the time that the file had
    before. Of an object in a store the ETag decides.
    """

    name: str
    size: int
    mtime_ns: int
    inode: int
    changed_ns: int = 0


class Unit(NamedTuple):
    """A piece of work that one process does. ``key``: the same in every process and run. ``size``:
    bytes to be read.

    ``files``: what it reads. ``offset``: where it begins in the first of them; -1 for a file from
    end to end.
    """

    key: str
    size: int
    files: tuple[Identity, ...] = ()
    offset: int = 0


class Units:
    """Maker of units, which are the same in every process; looks at each file once."""

    def __init__(self) -> None:
        self._known: dict[AnyPath, Identity] = {}

    def of(self, value: object, size: int, offset: int = 0) -> Unit:
        """Return the unit of a value made of Structs, tuples, words, numbers and paths."""
        paths: dict[AnyPath, int] = {}
        key = json.dumps(_plain(value, paths), separators=(",", ":"))
        return Unit(key, size, tuple(map(self._identity, paths)), offset)

    def _identity(self, path: AnyPath) -> Identity:
        if path not in self._known:
            try:
                status = stat_of(path)
                size, mtime, inode = status.st_size, status.st_mtime_ns, status.st_ino
                changed = status.st_ctime_ns
            except OSError:
                size, mtime, inode, changed = -1, 0, 0, 0
            if isinstance(path, StorePath):
                inode, changed = int(hashlib.sha256(etag_of(path).encode()).hexdigest()[:12], 16), 0
            self._known[path] = Identity(str(path), size, mtime, inode, changed)
        return self._known[path]


def _plain(value: Any, paths: dict[AnyPath, int]) -> object:
    """Return a value as JSON values, with the number of a path instead of the path."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, StorePath):
        return {"file": paths.setdefault(value, len(paths))}
    if isinstance(value, PurePath):
        return {"file": paths.setdefault(Path(value), len(paths))}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple | list):
        return [_plain(one, paths) for one in value]
    if isinstance(value, Enum):
        return str(value.value)
    return [
        type(value).__name__,
        *(_plain(getattr(value, name), paths) for name in value.__struct_fields__),
    ]


class Request(NamedTuple):
    """The command whose results a folder holds: verb, its parameters, and the working directory for
    the paths in them.

    ``shares``: their number, 0 for processes that gather their results themselves. ``words``: what
    to paste after ``ckptfix VERB`` for these parameters. ``version``: "" for this ckptfix; another
    one may look for other things.
    """

    verb: str
    params: Mapping[str, Any]
    directory: str
    shares: int
    words: Sequence[str] = ()
    version: str = ""

    def is_same(self, other: "Request") -> bool:
        """Return whether results are of the same command, by any number of shares."""
        mine, theirs = (
            json.dumps([*one[:3], one.version], sort_keys=True) for one in (self, other)
        )
        return mine == theirs

    def __str__(self) -> str:
        by = f" by version {self.version} (this is {own_version()})" if self.version else ""
        return f"{self.command} in {self.directory}{by}"

    @property
    def command(self) -> str:
        """The command to paste, in its working directory."""
        return shlex.join(["ckptfix", self.verb, *self.words])


@cache
def own_version() -> str:
    """Return the version of this ckptfix, "unknown" where it was never installed."""
    # It takes long, and most runs do without.
    from importlib.metadata import PackageNotFoundError, version

    try:
        # None where its METADATA may not be read.
        return version("ckptfix") or "unknown"
    except PackageNotFoundError:
        return "unknown"


def default_folder(root: Path) -> Path:
    """Return where a seal of ``root`` keeps its results: in the folder that is ckptfix's own."""
    return root / JOURNAL / "partial"


class PartialResults:
    """The folder with the results of one request. Nothing is made there before the first result."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._unsynced = 0

    def request(self) -> Request | None:
        """Return the command of the results, None without any. Raises OperationError, OSError."""
        try:
            document = json.loads((self.folder / _REQUEST).read_bytes())
            if document["format"] != FORMAT:
                raise OperationError(
                    f"{self.folder}: partial results of another version of ckptfix; "
                    "next: name another folder with --partial"
                )
            request = Request(*(document[key] for key in Request._fields))
            if request.version == own_version():
                request = request._replace(version="")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise OperationError(
                f"{self.folder / _REQUEST} holds no partial results ({error!r}); "
                "next: name another folder with --partial"
            ) from None
        return request

    def begin(self, request: Request) -> None:
        """Note the command. Raises OperationError for results of another one, OSError."""
        old = self.request()
        is_empty = old is not None and old.shares == request.shares == 0 and self.oldest() is None
        if old is not None and not old.is_same(request) and not is_empty:
            raise OperationError(
                f"{self.folder} holds partial results of another command: {old}; name another "
                f"folder with --partial, or remove this one: rm -r {shell_path(self.folder)}"
            )
        if old is not None and old.is_same(request) and old.shares == request.shares:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        document = {
            "format": FORMAT,
            **request._asdict(),
            "version": request.version or own_version(),
        }
        write_file(self.folder / _REQUEST, json.dumps(document, indent=1).encode() + b"\n")

    def known(self, what: str, units: Sequence[Unit]) -> dict[int, Any]:
        """Return the results of these units that any process has left here, by number."""
        results = dict(self._lines())
        names = (_name(what, unit) for unit in units)
        return {number: results[name] for number, name in enumerate(names) if name in results}

    def all(self) -> Iterator[Any]:
        """Yield every result, of whatever work."""
        yield from (result for _, result in self._lines())

    def add(self, what: str, unit: Unit, result: Any) -> None:
        """Add a result, from any thread; a kill after this costs nothing."""
        line = json.dumps([_name(what, unit), result])
        with self._lock:
            if self._fd is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                name = f"{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}{_SUFFIX}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self.folder / name, flags, 0o666)
            data = f"{line}\t{zlib.crc32(line.encode()):08x}\n".encode()
            while data:
                data = data[os.write(self._fd, data) :]
            self._unsynced += unit.size
            if self._unsynced >= _SYNCED_AFTER:
                os.fsync(self._fd)
                self._unsynced = 0

    def close(self) -> None:
        """Make the results of this process durable."""
        with self._lock:
            if self._fd is not None:
                os.fsync(self._fd)
                os.close(self._fd)
                self._fd = None

    def remove(self) -> None:
        """Remove the results: the work is done. Only files of this module are removed."""
        self.close()
        with suppress(OSError):
            for name in os.listdir(self.folder):
                if name == _REQUEST or _RESULTS.fullmatch(name):
                    os.unlink(self.folder / name)
            os.rmdir(self.folder)
            if self.folder.parent.name == JOURNAL:
                os.rmdir(self.folder.parent)

    def oldest(self) -> float | None:
        """Return when the first results were made, in seconds since 1970, None without any."""
        times = []
        with suppress(OSError):
            for name in os.listdir(self.folder):
                if _RESULTS.fullmatch(name):
                    times.append(os.stat(self.folder / name).st_mtime)
        return min(times, default=None)

    def _lines(self) -> Iterator[tuple[str, Any]]:
        try:
            names = sorted(os.listdir(self.folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            if not _RESULTS.fullmatch(name):
                continue
            with open(self.folder / name, "rb") as file:
                for line in file:
                    # Cut short when its process was killed, zeros after a loss of power, or a
                    # flipped bit.
                    data, _, crc = line.rpartition(b"\t")
                    if crc == f"{zlib.crc32(data):08x}\n".encode():
                        unit, result = json.loads(data)[:2]
                        yield unit, result


def _name(what: str, unit: Unit) -> str:
    """Return the name of a unit in the files of results."""
    files = [tuple(one) for one in unit.files]
    return hashlib.sha256(json.dumps([what, unit.key, files]).encode()).hexdigest()[:32]
