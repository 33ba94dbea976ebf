"""Paths of checkpoints: on this machine, or below a prefix of an object store by the same
operations.

``open_files`` lists a prefix once, and every ``StorePath`` below it is looked up in that listing.
No function of the operating system takes a ``StorePath``: it would look for a file of that name on
this machine. Nothing of object stores is imported before the first URL comes.
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path, PurePosixPath
from posixpath import relpath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from ckptfix.errors import FileChangedError, FormatError, OperationError, UsageError
from ckptfix.wording import escape, human_size

if TYPE_CHECKING:
    from ckptfix.storage.stores import ObjectInfo, ObjectRange, Store


class FileReader(Struct, frozen=True):
    """An open file, or a window of one: its descriptor, its size in bytes when it was opened, and
    where it starts.

    ``path``: names it in the error about a file that changed.
    """

    fd: int
    size: int
    path: "AnyPath"
    start: int = 0

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``offset``.

        Raises FormatError when the range is not inside the file, FileChangedError when the file
        became shorter.
        """
        self._ensure_inside(offset, length)
        data = os.pread(self.fd, length, self.start + offset)
        # One read returns at most 2 GiB, and less on some network file systems.
        while len(data) < length:
            more = os.pread(self.fd, length - len(data), self.start + offset + len(data))
            if not more:
                raise FileChangedError(self.path)
            data += more
        return data

    def fill(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` from ``offset`` on, in any thread. Raises as ``read`` does."""
        self._ensure_inside(offset, len(view))
        done = 0
        while done < len(view):
            got = os.preadv(self.fd, [view[done:]], self.start + offset + done)
            if not got:
                raise FileChangedError(self.path)
            done += got

    def window(self, offset: int, length: int) -> "FileReader":
        """Return a reader of ``length`` bytes from ``offset``, in which offsets count from there.

        Raises FormatError when the range is not inside the file.
        """
        self._ensure_inside(offset, length)
        return FileReader(self.fd, length, self.path, self.start + offset)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begin to read ranges that will be asked for, all at once."""
        for offset, length in ranges:
            os.posix_fadvise(self.fd, self.start + offset, length, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def reopened(self) -> Iterator["FileReader"]:
        """Yield a reader of the same file with a readahead of its own.

        Readahead is kept per open file: threads that read from one descriptor at several places
        switch it off for each other. Measured cold on 2 files of 2 GiB: 3.0 GB/s with one
        descriptor, 3.3 to 3.5 with one a thread.
        """
        try:
            own = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no /proc, or the file is gone from its folder
            own = os.dup(self.fd)
        try:
            os.posix_fadvise(own, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            yield FileReader(own, self.size, self.path, self.start)
        finally:
            os.close(own)

    def is_cached(self, offset: int) -> bool:
        """Return whether the byte at ``offset`` is in memory already."""
        try:
            return os.preadv(self.fd, [bytearray(1)], self.start + offset, os.RWF_NOWAIT) == 1
        except OSError:  # not in memory, or a file system that does not report it
            return False

    def spares(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Return whether ranges should not be read one by one: never, as they cost microseconds.

        Of an object in a store each costs a request: it returns True in a block of ``sparing``, and
        else reads them all at once.
        """
        return False

    def leaves_out(self, count: int) -> bool:
        """Return whether as many small reads are left out: never. Of an object in a store each
        costs a request: they are, in a block of ``sparing``.
        """
        return False

    def _ensure_inside(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise FormatError(
                f"bytes {offset} to {offset + length} are needed, but the file has {self.size} "
                "bytes"
            )


class Prefix(Protocol):
    """The objects below a URL, as they were listed (``storage.store_files``).

    ``lists``: they may be thousands of checkpoints, and only what is asked for is read.
    ``is_thrifty``: small reads that cost a request each are left out, and counted in ``spared``.
    ``failures``: of the store, while it was read. ``umask``: the permissions that new files here
    lack.
    """

    store: "Store"
    url: str
    lists: bool
    is_thrifty: bool
    spared: int
    failures: list[Exception]
    umask: int
    is_closed: bool

    @property
    def whole(self) -> "Prefix | None":
        """The listing of which they are a part."""

    @property
    def unheld(self) -> "tuple[Unheld, ...]":
        """The objects whose keys no folder can hold."""

    def info(self, key: str) -> "ObjectInfo | None":
        """Return the facts about an object as it was listed, None where there is none."""

    def has_folder(self, folder: str) -> bool:
        """Return whether objects below a folder were listed."""

    def names(self, folder: str) -> tuple[Iterable[str], Iterable[str]] | None:
        """Return the names of the objects and of the folders in a folder, None without any."""

    def number(self, key: str) -> int:
        """Return what tells an object from all others, as an inode does; a moved one keeps it."""

    def objects_below(self, folder: str) -> "dict[str, ObjectInfo]":
        """Return every object in and below a folder by its key relative to it."""

    def has_gone(self, folder: str) -> bool:
        """Return whether the store says now that no object is in or below a folder."""

    def reader(self, path: "StorePath") -> FileReader:
        """Return the reader of an object. Raises OSError as ``open`` does."""

    def read_many(self, ranges: "Sequence[ObjectRange]") -> list[bytes]:
        """Return the bytes of ranges. A failure is kept for ``raise_failure``."""

    def below(self, folder: str) -> "Prefix":
        """Return the objects in and below a folder alone, with the same cache."""

    def showing(
        self, folder: str, names: "Mapping[str, Shown | None]", *, store: "Store | None" = None
    ) -> AbstractContextManager[None]:
        """Let names show other objects, or nothing, until the end of the block."""

    def refresh(self) -> None:
        """List the prefix anew, after the store was changed. Raises StoreError."""

    def watched(self) -> AbstractContextManager[None]:
        """Raise at the end of the block also what was caught on its way."""

    def raise_failure(self, *, since: int = 0) -> None:
        """Raise the first failure of the store after the first ``since`` ones."""

    def close(self) -> None:
        """Let go of what was read. Nothing can be looked up here any more."""


class Shown(NamedTuple):
    """Object that a name shows instead of its own. ``moved``: the name that has shown its bytes,
    None for none.
    """

    key: str
    info: "ObjectInfo"
    moved: str | None = None


class StorePath:
    """A folder or an object below a prefix that was listed, with the methods of ``pathlib.Path``
    that read.

    ``files``: the prefix. ``url``: of this path, without a slash at its end.
    """

    __slots__ = ("files", "url")

    def __init__(self, files: Prefix, url: str) -> None:
        self.files, self.url = files, url

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"StorePath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __lt__(self, other: object) -> bool:
        return self.url < other.url if isinstance(other, StorePath) else NotImplemented

    def __truediv__(self, below: str | PurePosixPath) -> "StorePath":
        path = self
        for name in str(below).split("/"):
            # The system finds nothing behind a folder that is not there.
            if name == ".." and path.is_dir():
                path = path.parent
            elif name not in ("", "."):
                path = StorePath(self.files, f"{path.url}/{name}")
        return path

    if not TYPE_CHECKING:  # for a type checker no function that takes files takes one of a store

        def __fspath__(self) -> str:
            """Raise OperationError: what opens files by itself cannot read one in a store."""
            error = OperationError(
                f"{self}: this command can only open files on this machine; nothing was changed; "
                "next: download the checkpoint first"
            )
            # Whoever catches it must not report success.
            self.files.failures.append(error)
            raise error

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The name without its ending."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> "StorePath":
        """The folder above; of a bucket itself the bucket."""
        scheme, _, rest = self.url.partition("://")
        above = rest.rpartition("/")[0]
        files = self.files.whole or self.files if self.key == "" else self.files
        return StorePath(files, f"{scheme}://{above}") if above else self

    @property
    def parents(self) -> tuple["StorePath", ...]:
        """The folders above, the nearest first."""
        above: list[StorePath] = []
        path = self
        while (parent := path.parent) != path:
            above.append(parent)
            path = parent
        return tuple(above)

    @property
    def key(self) -> str | None:
        """The key relative to the listed prefix, "" for itself, None for a path outside."""
        if self.url == self.files.url:
            return ""
        start = f"{self.files.url}/"
        return self.url[len(start) :] if self.url.startswith(start) else None

    def is_relative_to(self, other: "StorePath") -> bool:
        """Return whether this path is another one, or lies below it."""
        return self.url == other.url or self.url.startswith(f"{other.url}/")

    def relative_to(self, other: "StorePath") -> PurePosixPath:
        """Return the path from a folder above. Raises ValueError where it lies elsewhere."""
        if not self.is_relative_to(other):
            raise ValueError(f"{self} is not below {other}")
        return PurePosixPath(self.url[len(other.url) + 1 :])

    def with_name(self, name: str) -> "StorePath":
        """Return the path of another name in the same folder."""
        return self.parent / name

    def absolute(self) -> "StorePath":
        """Return this path."""
        return self

    def resolve(self) -> "StorePath":
        """Return this path: a store has no links."""
        return self

    def exists(self) -> bool:
        """Return whether an object, or a folder of some, was listed."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Return whether an object was listed."""
        return self.info is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether objects below were listed."""
        return self.key is not None and self.files.has_folder(self.key)

    def is_symlink(self) -> bool:
        """Return False: a store has no links."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return size and time of an object as the status of a file; of a folder its mode alone.

        Raises FileNotFoundError.
        """
        if (info := self.info) is not None:
            assert self.key is not None
            mode = stat.S_IFREG | 0o666 & ~self.files.umask
            status = (mode, self.files.number(self.key), 0, 1, 0, 0, info.size)
            seconds, nanoseconds = info.modified_ns // 10**9, info.modified_ns
            return os.stat_result(
                (*status, seconds, seconds, seconds),
                {"st_atime_ns": nanoseconds, "st_mtime_ns": nanoseconds, "st_ctime_ns": nanoseconds,
                 "st_mtime": nanoseconds / 1e9},
            )  # fmt: skip
        if not self.is_dir():
            raise FileNotFoundError(2, os.strerror(2), str(self))
        number = self.files.number(self.key or "")
        mode = stat.S_IFDIR | 0o777 & ~self.files.umask
        return os.stat_result((mode, number, 0, 2, 0, 0, 0, 0, 0, 0))

    lstat = stat

    def iterdir(self) -> Iterator["StorePath"]:
        """Yield the paths in this folder. Raises FileNotFoundError."""
        return (self / name for name in names_in(self))

    @property
    def info(self) -> "ObjectInfo | None":
        """The facts about the object as it was listed, None where there is none of this name."""
        return self.files.info(self.key) if self.key else None


AnyPath: TypeAlias = Path | StorePath
"""A path on this machine or in a store."""

Openable: TypeAlias = str | os.PathLike[str] | StorePath
"""Name of a checkpoint: a path, a URL, or a path that is open already."""


class Unheld(NamedTuple):
    """An object of a store whose key no folder can hold. ``home``: the folder that it would be in
    or below.
    """

    key: str
    size: int
    home: StorePath
    why: str

    def __str__(self) -> str:
        if self.size:
            return (
                f"an object of {human_size(self.size)} whose key cannot be a file path: {self.why}"
            )
        return f"an empty object, which some programs use to mark a folder: {self.why}"


def is_url(path: object) -> bool:
    """Return whether a path can be a URL; no checkpoint on this machine is named so."""
    scheme, mark, _ = path.partition("://") if isinstance(path, str) else ("", "", "")
    return bool(mark) and "/" not in scheme


def local_path(path: Any) -> Any:
    """Return the path that a ``file://`` URL names, else what was given. Raises UsageError."""
    if not isinstance(path, str) or not path.startswith("file://"):
        return path
    place = path.removeprefix("file://").removeprefix("localhost")
    if not place.startswith("/"):  # never the current folder, or one below it
        raise UsageError(
            f"{escape(path)} is not a file URL of this machine (expected file:///PATH)"
        )
    return place


@contextmanager
def sparing(path: AnyPath, *, is_thrifty: bool = True) -> Iterator[None]:
    """Leave out (or do) small reads that cost a request each, in this block."""
    if not isinstance(path, StorePath):
        yield
        return
    before, path.files.is_thrifty = path.files.is_thrifty, is_thrifty
    try:
        yield
    finally:
        path.files.is_thrifty = before


def spared_below(path: AnyPath) -> int:
    """Return how many small reads were left out so far."""
    return path.files.spared if isinstance(path, StorePath) else 0


def store_of(folder: AnyPath) -> "Store | None":
    """Return the store whose prefix a folder is, None for a folder on this machine."""
    if not isinstance(folder, StorePath):
        return None
    return folder.files.store.below(folder.key) if folder.key else folder.files.store


def etag_of(path: AnyPath) -> str:
    """Return the ETag of an object, "" of a file on this machine."""
    info = path.info if isinstance(path, StorePath) else None
    return info.etag if info is not None else ""


def unheld_below(folder: AnyPath) -> tuple[Unheld, ...]:
    """Return the objects of a store in or below a folder whose keys no folder can hold."""
    if not isinstance(folder, StorePath):
        return ()
    return tuple(lost for lost in folder.files.unheld if lost.home.is_relative_to(folder))


def is_of_listing(path: AnyPath) -> bool:
    """Return whether a path is in a listing of many checkpoints, so that each read is a request."""
    return isinstance(path, StorePath) and path.files.lists


def objects_of(folder: AnyPath) -> "Mapping[str, ObjectInfo] | None":
    """Return every object in and below a folder by its key relative to it; None on this machine."""
    if not isinstance(folder, StorePath):
        return None
    return folder.files.objects_below(folder.key) if folder.key is not None else {}


def has_gone(folder: AnyPath) -> bool:
    """Return whether nothing is there any more at a path, as the disk or the store says now."""
    if not isinstance(folder, StorePath):
        return not os.path.lexists(folder)
    return folder.files.has_gone(folder.key) if folder.key is not None else False


def is_dir(path: AnyPath) -> bool:
    """Return whether a path is a folder or leads to one; False where that cannot be found out."""
    return path.is_dir() if isinstance(path, StorePath) else os.path.isdir(path)


def is_file(path: AnyPath) -> bool:
    """Return whether a path is a file or leads to one; False where that cannot be found out."""
    return path.is_file() if isinstance(path, StorePath) else os.path.isfile(path)


def is_symlink(path: AnyPath) -> bool:
    """Return whether a path is a symbolic link."""
    return not isinstance(path, StorePath) and os.path.islink(path)


def exists(path: AnyPath) -> bool:
    """Return whether there is a file or folder; False for a broken link."""
    return path.exists() if isinstance(path, StorePath) else os.path.exists(path)


def lexists(path: AnyPath) -> bool:
    """Return whether a name exists, also that of a broken link."""
    return path.exists() if isinstance(path, StorePath) else os.path.lexists(path)


def on_disk(path: AnyPath) -> Path:
    """Return a path on this machine. Raises OperationError for one in a store: download it first."""
    return Path(os.fspath(path))  # type: ignore[arg-type]


def stat_of(path: AnyPath) -> os.stat_result:
    """Return the status of what a path leads to. Raises OSError."""
    return path.stat() if isinstance(path, StorePath) else os.stat(path)


def absolute(path: AnyPath) -> AnyPath:
    """Return a path from the root on, without ``..`` in it."""
    return path if isinstance(path, StorePath) else Path(os.path.abspath(path))


def real_path(path: AnyPath) -> AnyPath:
    """Return a path without symbolic links in it."""
    return path if isinstance(path, StorePath) else Path(os.path.realpath(path))


def relative(path: AnyPath, top: AnyPath) -> PurePosixPath:
    """Return the path from a folder to what lies in it."""
    if isinstance(path, StorePath):
        assert isinstance(top, StorePath)
        lies_in = path.is_relative_to(top)
        return path.relative_to(top) if lies_in else PurePosixPath(relpath(path.url, top.url))
    assert not isinstance(top, StorePath)
    return PurePosixPath(os.path.relpath(path, top))


def lies_in(path: AnyPath, top: AnyPath) -> bool:
    """Return whether a path is another one, or lies below it, by their names."""
    if isinstance(path, StorePath) or isinstance(top, StorePath):
        both = isinstance(path, StorePath) and isinstance(top, StorePath)
        return both and path.is_relative_to(top)  # type: ignore[arg-type]
    return path.is_relative_to(top)


def same_place(path: AnyPath, other: AnyPath) -> bool:
    """Return whether two paths lead to one folder or file. Raises OSError."""
    if isinstance(path, StorePath) or isinstance(other, StorePath):
        return path == other
    return os.path.samefile(path, other)


def is_listed(path: AnyPath) -> bool:
    """Return whether no other listing is needed to know a path: False next to the prefix."""
    return not isinstance(path, StorePath) or path.key is not None


class Entry(Protocol):
    """A name in a folder, as ``os.DirEntry``."""

    @property
    def name(self) -> str:
        """The name."""

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a folder, or with ``follow_symlinks`` leads to one."""

    def is_symlink(self) -> bool:
        """Return whether it is a symbolic link."""

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return its status."""


class _StoreEntry(NamedTuple):
    """An entry of a listing, which alone knows the folders next to an opened prefix."""

    name: str
    path: StorePath
    is_folder: bool

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self.is_folder

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self.path.stat()


def folder_entries(folder: AnyPath) -> AbstractContextManager[Iterable[Entry]]:
    """Return the entries of a folder, as ``os.scandir``. Raises OSError."""
    if not isinstance(folder, StorePath):
        return os.scandir(folder)
    files, folders = _names(folder)
    return nullcontext(
        (
            *(_StoreEntry(name, folder / name, False) for name in files),
            *(_StoreEntry(name, folder / name, True) for name in folders),
        )
    )


def names_in(folder: AnyPath) -> list[str]:
    """Return the names in a folder. Raises OSError, StoreError."""
    if isinstance(folder, StorePath):
        files, folders = _names(folder)
        return [*files, *folders]
    return os.listdir(folder)


def folders_in(folder: AnyPath) -> list[str]:
    """Return the names of the folders in a folder, without links. Raises OSError, StoreError."""
    if isinstance(folder, StorePath):
        if folder.key is None:
            from ckptfix.storage.stores import open_store

            return [*open_store(folder.url).folders()]
        return [*_names(folder)[1]]
    with os.scandir(folder) as listing:
        return [entry.name for entry in listing if entry.is_dir(follow_symlinks=False)]


def folders_next_to(path: AnyPath) -> list[str]:
    """Return the names of the folders in the folder of a path. Raises as ``folders_in``."""
    return [] if path.parent == path else folders_in(path.parent)


def walk(
    top: AnyPath, onerror: Callable[[OSError], None] | None = None
) -> Iterator[tuple[AnyPath, list[str], list[str]]]:
    """Yield each folder at and below one with the names of its folders and of its files, as
    ``os.walk`` does.

    A folder whose name is taken out of the list is not walked through.
    """
    if not isinstance(top, StorePath):
        for where, folders, names in os.walk(top, onerror=onerror):
            yield Path(where), folders, names
        return
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        if folder.is_dir():
            files, inside = (list(names) for names in _names(folder))
            yield folder, inside, files
            waiting += [folder / name for name in reversed(inside)]


def _names(folder: StorePath) -> tuple[Iterable[str], Iterable[str]]:
    if folder.key is None:
        from ckptfix.storage.stores import open_store

        return open_store(folder.url).children()
    names = folder.files.names(folder.key)
    if names is None:
        raise FileNotFoundError(2, os.strerror(2), str(folder))
    return names
