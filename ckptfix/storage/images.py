"""Images of prefixes: temporary folders with the names, sizes and times of the objects of a store, and no bytes.

All that lists and looks up files works on an image as on any folder. ``storage.reading`` reads the bytes from the
store, through a cache of blocks. Nothing else may open, change or remove a file of an image: a guard of the interpreter
refuses it, as a hole would read as zeros, and a change would change nothing in the store.
"""

import errno
import os
import re
import shutil
import sys
import tempfile
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptfix.dataclass import dataclass
from ckptfix.errors import ChangedError, OperationError, StoreError, UsageError
from ckptfix.storage import reading, staged
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import JOURNAL
from ckptfix.storage.reading import FileReader, Unheld
from ckptfix.storage.stores import ObjectInfo, ObjectRange, Store, open_store, together
from ckptfix.wording import count_of, escape, human_size, list_names, show_as

_BLOCK = 16 << 10
"""Bytes that the cache holds as one: samples of tensors are single pages, far from each other."""

_HEAD = 64 << 10
"""Bytes that are read of every file before it is asked for: the header of most safetensors files."""

_TAIL = 64 << 10
"""Bytes that are read of the end: the directory of a zip file. A safetensors file has none."""

_FEWEST, _MOST = 256 << 10, 16 << 20
"""Bytes that are read at once on demand: first the fewest, and twice as many each time that reads follow each other."""

_RANGE = 4 << 20
"""Bytes of one request; longer reads are several at once."""

_KEPT = 256 << 20
_AHEAD = 1024
"""Files of a folder whose ends are read together."""

_FOLDER = rf"{re.escape(staged.WRITING)}[^/]*\+stores"
"""The folders of all processes that have images, as a pattern."""

_LONGEST_NAME, _LONGEST_PATH = 255, 3500


@dataclass(kw_only=True)
class Image:
    """The image of one prefix. ``root``: its folder; ``place``: what a URL was opened for, the root or one file.

    ``failures``: of the store, while it was read. ``aliases``: names that show the object of another key; ``stores``:
    the store of each such key that is in another one.
    """

    store: Store
    root: Path
    place: Path
    objects: Mapping[str, ObjectInfo]
    unheld: tuple[Unheld, ...]
    failures: list[Exception] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    stores: dict[str, tuple[Store, str]] = field(default_factory=dict)
    _sorted: tuple[Mapping[str, ObjectInfo], dict[str, list[str]]] = field(default_factory=lambda: ({}, {}))

    def read_many(self, ranges: Sequence[ObjectRange]) -> list[bytes]:
        """Return the bytes of ranges. A failure is kept: whoever catches it must not report success."""
        try:
            return self.try_many(ranges)
        except Exception as error:
            self.failures.append(error)
            raise

    def try_many(self, ranges: Sequence[ObjectRange]) -> list[bytes]:
        """Return the bytes of ranges that perhaps nobody asks for."""
        if any(one.key in self.stores for one in ranges):
            return self._read_elsewhere(ranges)
        return self.store.read_many(ranges)

    def _read_elsewhere(self, ranges: Sequence[ObjectRange]) -> list[bytes]:
        found: list[bytes] = [b""] * len(ranges)

        def take(number: int) -> None:
            one = ranges[number]
            store, key = self.stores.get(one.key, (self.store, one.key))
            found[number] = store.read(key, one.offset, one.length, etag=one.etag or None)

        together(range(len(ranges)), take)
        return found

    def keys_in(self, folder: str) -> Sequence[str]:
        """Return the keys right in a folder."""
        objects, found = self._sorted
        if objects is not self.objects:  # a repair shows others for a while
            objects, found = self.objects, {}
            for key in objects:
                found.setdefault(key.rpartition("/")[0], []).append(key)
            self._sorted = objects, found
        return found.get(folder, ())

    def key_of(self, path: str) -> str:
        """Return the key of the object at a path of the image."""
        return os.path.relpath(path, self.root)


class _Depth(threading.local):
    """Number of ``changing`` blocks that this thread is in."""

    value = 0


class _Session:
    """The images of this process, in one folder.

    Its path never changes, and what lies below it is guarded until the process ends: a thread that still holds a path
    of an image that another one has removed must not read a hole.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.folder = ""
        self.images: dict[str, Image] = {}
        self.changing = _Depth()
        self._count = 0

    def new_top(self) -> Path:
        """Make a folder for an image."""
        with self.lock, changing():
            if not self.folder:
                parent = Path(os.path.realpath(tempfile.gettempdir()))
                with suppress(OSError):
                    staged.sweep(parent)
                folder = str(parent / staged.temporary_name(Path("stores")))
                show_as(rf"{re.escape(str(parent))}/{_FOLDER}/\d+/([a-z][a-z0-9+.-]*):(?:/|$)", r"\1://")
                self.folder = folder
                sys.addaudithook(_guard)
                reading.look_elsewhere(_files)
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            self._count += 1
            top = Path(self.folder, str(self._count))
            top.mkdir(mode=0o700)
            return top


_session = _Session()


def image_of(url: str, *, complete: bool = True) -> Path:
    """Open a URL: list what is there, and return the path of its image, a folder or a file.

    ``complete``: refuse a prefix with an object whose key no folder can hold; otherwise ``unheld`` returns it. Raises
    UsageError when nothing is there, StoreError.
    """
    store = open_store(url)
    rest = url.partition("://")[2].rstrip("/")
    if any(part in ("", ".", "..") for part in rest.split("/")):
        raise UsageError(
            f"{escape(url)}: no folder has such a name; next: copy the objects to a path without it"
        )
    listed = store.list()
    only = ""
    if not listed and "/" in rest:
        above, _, only = url.rstrip("/").rpartition("/")
        folder = open_store(above)
        listed = _listed_for_one(folder)
        if only not in listed:
            raise UsageError(
                f"{escape(url)} does not exist: the store has no object of this name, and none below it"
            )
        store = folder
    elif not listed:
        raise UsageError(f"{escape(url)} is empty: the store has no object there")
    top = _session.new_top()
    scheme, _, rest = store.url.partition("://")
    try:
        image = _made(store, listed, top / f"{scheme}:" / rest, only)
    except BaseException:
        _remove(str(top))
        raise
    with _session.lock:
        _session.images[str(top)] = image
    solid = [one for one in image.unheld if one.size]
    if complete and solid:
        release(image.place)
        raise StoreError(
            f"{escape(url)}: {count_of(len(solid), 'object')} with a key that no folder can hold "
            f"({list_names(one.key for one in solid)}: {solid[0].why}), so not all would be read; "
            "next: give them other keys, or delete them"
        )
    return image.place


def _listed_for_one(folder: Store) -> dict[str, ObjectInfo]:
    """Return the objects right in a folder, next to the one that was asked for, and those of its journal."""
    return folder.children()[0] | folder.list(JOURNAL)


def _made(store: Store, listed: Mapping[str, ObjectInfo], root: Path, only: str) -> Image:
    """Make the files of an image."""
    folders: dict[str, None] = {}
    for key in listed:
        parts = key.split("/")[:-1]
        folders.update(dict.fromkeys("/".join(parts[:number]) for number in range(1, len(parts) + 1)))
    held: dict[str, ObjectInfo] = {}
    unheld: list[Unheld] = []
    with changing():
        root.mkdir(parents=True)
        for key, info in listed.items():
            why, home = _why_not(key, folders, len(os.fsencode(root)))
            (root / home).mkdir(parents=True, exist_ok=True)
            if why:
                unheld.append(Unheld(key, info.size, root / home, why))
                continue
            held[key] = info
            path = root / key
            with path.open("xb") as file:
                file.truncate(info.size)
            os.utime(path, ns=(info.modified_ns, info.modified_ns))
    return Image(
        store=store,
        root=root,
        place=root / only if only else root,
        objects=MappingProxyType(held),
        unheld=tuple(unheld),
    )


def _why_not(key: str, folders: Mapping[str, object], before: int) -> tuple[str, str]:
    """Return why no folder can hold a key, "" where one can, and the last folder of it that can exist."""
    home: list[str] = []
    parts = key.split("/")
    for number, part in enumerate(parts):
        why = ""
        if part == "":
            why = "it ends in a slash" if number == len(parts) - 1 else "a name in it is empty"
        elif part in (".", ".."):
            why = f"{part!r} in it means another folder"
        elif "\0" in part:
            why = "it has a NUL byte"
        else:
            try:
                size = len(os.fsencode(part))
            except UnicodeEncodeError:
                return "a name in it is not valid text", "/".join(home)
            if size > _LONGEST_NAME:
                why = f"a name in it has {size} bytes, a file's at most {_LONGEST_NAME}"
        if why:
            return why, "/".join(home)
        if number < len(parts) - 1:
            home.append(part)
    if before + len(os.fsencode(key)) > _LONGEST_PATH:
        return f"it has {len(os.fsencode(key))} bytes, too many for a path", ""
    if key in folders:
        return "other keys have it as their folder", "/".join(home)
    return "", "/".join(home)


def info_at(path: str | os.PathLike[str]) -> ObjectInfo | None:
    """Return the facts about the object at a path of an image, as it was listed; None for any other path."""
    full = os.path.abspath(path)
    image = _image_at(full)
    return image.objects.get(image.key_of(full)) if image is not None else None


def count_failures(path: str | Path) -> int:
    """Return the number of failures of the store so far."""
    image = _image_at(os.path.abspath(path))
    return len(image.failures) if image is not None else 0


def objects_at(folder: Path) -> dict[str, ObjectInfo]:
    """Return the objects in or below a folder of an image, as they were listed, by their keys relative to it."""
    full = os.path.abspath(folder)
    image = _image_at(full)
    if image is None:
        return {}
    start = "" if full == str(image.root) else f"{image.key_of(full)}/"
    return {key[len(start) :]: info for key, info in image.objects.items() if key.startswith(start)}


class Shown(NamedTuple):
    """Object that a name of an image shows for a while. ``moved``: the name that has shown its bytes, None for none."""

    key: str
    info: ObjectInfo
    moved: str | None = None


@contextmanager
def showing(folder: Path, names: Mapping[str, Shown | None], *, store: Store | None = None) -> Iterator[None]:
    """Let names of an image show other objects, or nothing, until the end of the block.

    Names and keys are relative to the folder, and keys to ``store`` where it is given. A moved name keeps its file, as
    a rename in a folder does.
    """
    full = os.path.abspath(folder)
    image = _image_at(full)
    assert image is not None
    start = "" if full == str(image.root) else f"{image.key_of(full)}/"
    before = image.objects, dict(image.aliases)
    aside = image.root.parent / f"{image.root.name}.aside"
    held: dict[str, Path] = {}
    made: dict[Path, Path | None] = {}
    try:
        with changing():
            aside.mkdir()
            moved = {one.moved for one in names.values() if one is not None and one.moved is not None}
            for number, name in enumerate({*names, *moved}):
                if (image.root / f"{start}{name}").exists():
                    held[name] = aside / str(number)
                    os.rename(image.root / f"{start}{name}", held[name])
            objects = dict(image.objects)
            for name, one in names.items():
                objects.pop(f"{start}{name}", None)
                if one is None:
                    continue
                path = image.root / f"{start}{name}"
                path.parent.mkdir(parents=True, exist_ok=True)
                made[path] = held[one.moved] if one.moved is not None else None
                if one.moved is not None:
                    os.rename(held[one.moved], path)
                else:
                    with path.open("xb") as file:
                        file.truncate(one.info.size)
                    os.utime(path, ns=(one.info.modified_ns, one.info.modified_ns))
                key = f"{start}{one.key}" if store is None else f"{store.url}/{one.key}"
                if store is not None:
                    image.stores[key] = store, one.key
                objects[key] = one.info
                image.aliases[f"{start}{name}"] = key
            image.objects = MappingProxyType(objects)
        yield
    finally:
        with changing():
            for path, back in made.items():
                if back is None:
                    path.unlink(missing_ok=True)
                elif not back.exists():
                    os.rename(path, back)
            for name, path in held.items():
                os.rename(path, image.root / f"{start}{name}")
            aside.rmdir()
        image.objects, image.aliases = before
        image.stores.clear()
        _cache.forget(_top_of(full) or "")


def refresh(folder: Path) -> None:
    """List the prefix of an image anew, after the store was changed. Raises StoreError."""
    full = os.path.abspath(folder)
    image, top = _image_at(full), _top_of(full)
    if image is None or top is None:
        return
    only = image.place.name if image.place != image.root else ""
    listed = _listed_for_one(image.store) if only else image.store.list()
    with _session.lock, changing():
        _cache.forget(top)
        shutil.rmtree(image.root)
        _session.images[top] = _made(image.store, listed, image.root, only)


def raise_failure(path: str | Path, *, since: int = 0) -> None:
    """Raise the first failure of the store after the first ``since`` ones.

    It may be one that another thread met, which reads another checkpoint of the same prefix at the same time.
    """
    image = _image_at(os.path.abspath(path))
    if image is not None and len(image.failures) > since:
        raise image.failures[since]


def release(path: Path) -> None:
    """Remove the image that a path lies in."""
    full = os.path.abspath(path)
    with _session.lock:
        top = _top_of(full)
        if top is None or _session.images.pop(top, None) is None:
            return
        _cache.forget(top)
        _remove(top)


def _remove(top: str) -> None:
    """Remove the folder of an image, and the last one with the folder that all are in."""
    with _session.lock, changing():
        shutil.rmtree(top, ignore_errors=True)
        with suppress(OSError):  # another image is there
            os.rmdir(_session.folder)


def nbytes_at(path: Path) -> int:
    """Return the size of all objects of an image at or below a path."""
    image = _image_at(os.path.abspath(path))
    return sum(image.objects[key].size for key in _keys_at(image, path)) if image is not None else 0


def _keys_at(image: Image, path: Path) -> list[str]:
    prefix = image.key_of(os.path.abspath(path))
    return [key for key in image.objects if prefix == "." or key == prefix or key.startswith(f"{prefix}/")]


@contextmanager
def materialised(path: Path, *, progress: Progress | None = None) -> Iterator[Path]:
    """Download all files of an image at or below a path, and yield the path of the copies, which go at the end.

    For libraries that open files by themselves. Raises OperationError where there is no room for them.
    """
    image = _image_at(os.path.abspath(path))
    if image is None:
        yield path
        return
    prefix = image.key_of(os.path.abspath(path))
    keys = _keys_at(image, path)
    total = sum(image.objects[key].size for key in keys)
    parent = Path(tempfile.gettempdir())
    free = shutil.disk_usage(parent).free
    if total > free:
        raise OperationError(
            f"{path}: {human_size(total)} must be downloaded, {human_size(free)} are free in {parent}; "
            "next: export TMPDIR=FOLDER_ON_A_LARGER_DISK"
        )
    # Under a name that the next run knows: a process that is killed must not leave terabytes there.
    folder = parent / staged.temporary_name(Path("copies"))
    folder.mkdir(mode=0o700)
    try:
        root = folder / image.root.name
        show_as(re.escape(str(root)), image.store.url)
        for key in keys:
            (root / key).parent.mkdir(parents=True, exist_ok=True)
            download(image, key, root / key, progress)
        yield root if prefix == "." else root / prefix
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        staged.release(folder)


def download(image: Image, key: str, target: Path, progress: Progress | None) -> None:
    """Write the bytes of an object to a new file. Raises ChangedError when it is another one than was listed."""
    info = image.objects[key]
    lock = threading.Lock()
    with target.open("xb") as file:
        file.truncate(info.size)

        def take(offset: int) -> None:
            data = image.store.read(key, offset, min(_RANGE, info.size - offset), etag=info.etag or None)
            os.pwrite(file.fileno(), data, offset)
            if progress is not None:
                with lock:
                    progress(len(data))

        together(range(0, info.size, _RANGE), take, 16)
    os.utime(target, ns=(info.modified_ns, info.modified_ns))


# The guard: nobody reads a hole or changes an image by mistake.

_GUARDED = {
    "open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate",
    "os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr", "shutil.copyfile", "shutil.copymode",
    "shutil.copystat", "shutil.copytree", "shutil.move", "shutil.rmtree", "shutil.chown",
}  # fmt: skip


def _guard(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _GUARDED or not _session.folder or _session.changing.value:
        return
    for one in arguments[:2]:
        if isinstance(one, str | bytes | os.PathLike):
            path = os.fsdecode(one)
            if path.startswith(_session.folder):
                what = "read" if event == "open" and _only_reads(arguments) else "change"
                refused = OperationError(
                    f"{path}: this command would {what} the file by itself, and can only do that to a file on this "
                    "machine; nothing was changed; next: download the checkpoint first"
                )
                if (image := _image_at(os.path.abspath(path))) is not None:
                    image.failures.append(refused)
                raise refused


def _only_reads(arguments: Sequence[Any]) -> bool:
    flags = arguments[2] if len(arguments) > 2 else 0
    return isinstance(flags, int) and flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_CREAT


@contextmanager
def changing() -> Iterator[None]:
    """Let this thread change images: only ``storage`` itself does."""
    _session.changing.value += 1
    try:
        yield
    finally:
        _session.changing.value -= 1


# Reading.


@dataclass(frozen=True, slots=True)
class ObjectReader(FileReader):
    """An object, or a window of one. It has no descriptor."""

    image: Image | None = None
    top: str = ""
    key: str = ""

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``offset``, as ``FileReader.read`` does."""
        self._ensure_inside(offset, length)
        return self._bytes(self.start + offset, length)

    def fill(self, view: memoryview, offset: int) -> None:
        """Read bytes from ``offset`` on until ``view`` is full. Any thread may."""
        view[:] = self.read(offset, len(view))

    def window(self, offset: int, length: int) -> "ObjectReader":
        """Return a reader of ``length`` bytes from ``offset``."""
        self._ensure_inside(offset, length)
        return ObjectReader(-1, length, self.start + offset, self.image, self.top, self.key)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read ranges that will be asked for, all at once."""
        self._fetch(
            [(self.start + offset) // _BLOCK, -(-(self.start + offset + length) // _BLOCK)]
            for offset, length in ranges
            if length
        )

    def spares(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Return whether ranges should not be read one by one; otherwise all of them are read at once here."""
        assert self.image is not None
        _look_ahead(self.image, self.top, self.key)
        missing = [
            (offset, length)
            for offset, length in ranges
            if (self.top, self.key, (self.start + offset) // _BLOCK) not in _cache
            or (self.top, self.key, (self.start + offset + length - 1) // _BLOCK) not in _cache
        ]
        if missing and (count := reading.spared()) is not None:
            count.headers += len(missing)
            return True
        self.expect(missing[: _KEPT // _BLOCK // 4])
        return False

    @contextmanager
    def reopened(self) -> Iterator[FileReader]:
        """Yield this reader: threads do not disturb each other."""
        yield self

    def is_cached(self, offset: int) -> bool:
        """Return False: a store is slower than any disk."""
        return False

    @property
    def _info(self) -> ObjectInfo:
        assert self.image is not None
        return self.image.objects[self.key]

    def _bytes(self, offset: int, length: int) -> bytes:
        if not length:
            return b""
        assert self.image is not None
        if length >= _RANGE:
            return self._direct(offset, length)
        _look_ahead(self.image, self.top, self.key)
        first, end = offset // _BLOCK, -(-(offset + length) // _BLOCK)
        missing = [number for number in range(first, end) if (self.top, self.key, number) not in _cache]
        if missing:
            wanted = _cache.window(self.top, self.key, missing[0])
            last = min(max(end, missing[0] + wanted // _BLOCK), -(-self._info.size // _BLOCK))
            self._fetch([[missing[0], last]])
            _cache.grow(self.top, self.key, last, wanted)
        parts = []
        for number in range(first, end):
            part = _cache.get(self.top, self.key, number)
            if part is None:  # other threads have filled the cache meanwhile
                return self._direct(offset, length)
            parts.append(part)
        begin = offset - first * _BLOCK
        return b"".join(parts)[begin : begin + length]

    def _direct(self, offset: int, length: int) -> bytes:
        assert self.image is not None
        info = self._info
        ranges = [
            ObjectRange(self.key, begin, min(_RANGE, offset + length - begin), info.etag)
            for begin in range(offset, offset + length, _RANGE)
        ]
        return b"".join(self.image.read_many(ranges))

    def _fetch(self, spans: Iterable[Sequence[int]]) -> None:
        """Put blocks into the cache: spans of their numbers, each a request unless it is long."""
        assert self.image is not None
        blocks = [(self.key, first, end) for first, end in spans]
        _fetch_spans(self.image, self.top, blocks, self.image.read_many)


def _fetch_spans(
    image: Image, top: str, spans: Iterable[tuple[str, int, int]],
    read_many: Callable[[Sequence[ObjectRange]], Sequence[bytes]],
) -> None:  # fmt: skip
    ranges = []
    for key, first, end in spans:
        info = image.objects[key]
        last = min(end * _BLOCK, info.size)
        begin = first * _BLOCK
        while begin < last:
            take = min(_RANGE, last - begin)
            if any(
                (top, key, number) not in _cache
                for number in range(begin // _BLOCK, -(-(begin + take) // _BLOCK))
            ):
                ranges.append(ObjectRange(key, begin, take, info.etag))
            begin += take
    for one, data in zip(ranges, read_many(ranges), strict=True):
        for begin in range(0, len(data), _BLOCK):
            _cache.put(top, one.key, (one.offset + begin) // _BLOCK, data[begin : begin + _BLOCK])


class _Cache:
    """Blocks of objects, those used last; and how much is read at once where reads follow each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, str, int], bytes] = OrderedDict()
        self._nbytes = 0
        self._windows: dict[tuple[str, str, int], int] = {}
        self.ahead: defaultdict[str, set[str]] = defaultdict(set)

    def __contains__(self, block: tuple[str, str, int]) -> bool:
        return block in self._blocks

    def get(self, top: str, key: str, number: int) -> bytes | None:
        """Return a block, None when it is not there any more."""
        with self._lock:
            data = self._blocks.get((top, key, number))
            if data is not None:
                self._blocks.move_to_end((top, key, number))
            return data

    def put(self, top: str, key: str, number: int, data: bytes) -> None:
        """Keep a block, and let go of those that were used longest ago."""
        with self._lock:
            old = self._blocks.pop((top, key, number), b"")
            self._blocks[top, key, number] = data
            self._nbytes += len(data) - len(old)
            while self._nbytes > _KEPT:
                self._nbytes -= len(self._blocks.popitem(last=False)[1])

    def window(self, top: str, key: str, number: int) -> int:
        """Return how many bytes to read at once from a block on."""
        with self._lock:
            return self._windows.pop((top, key, number), _FEWEST)

    def grow(self, top: str, key: str, number: int, window: int) -> None:
        """Note that the reads of a window went up to a block: what follows there reads twice as much."""
        with self._lock:
            self._windows[top, key, number] = min(2 * window, _MOST)

    def forget(self, top: str) -> None:
        """Let go of all blocks of an image."""
        with self._lock:
            for block in [block for block in self._blocks if block[0] == top]:
                self._nbytes -= len(self._blocks.pop(block))
            self._windows = {place: size for place, size in self._windows.items() if place[0] != top}
            self.ahead.pop(top, None)


_cache = _Cache()


def _look_ahead(image: Image, top: str, key: str) -> None:
    """Read the ends of the files of a folder when the first of them is read; of one file where that is asked for."""
    seen = _cache.ahead[top]
    if key in seen:
        return
    with _session.lock:
        if key in seen:
            return
        folder = key.rpartition("/")[0]
        if image.place != image.root:
            keys = [key]
        else:
            keys = [one for one in image.keys_in(folder) if one not in seen]
            begin = keys.index(key)
            keys = keys[begin : begin + _AHEAD]
        try:
            _fetch_spans(image, top, [span for one in keys for span in _ends(image, one)], image.try_many)
            seen.update(keys)
        except (StoreError, ChangedError):
            # One of them fails that perhaps nobody asks for: a log of somebody else's next to the checkpoint.
            _fetch_spans(image, top, _ends(image, key), image.read_many)
            seen.add(key)


def _ends(image: Image, key: str) -> list[tuple[str, int, int]]:
    """Return the blocks at both ends of a file, at its beginning alone where it has no directory at its end."""
    size = image.objects[key].size
    blocks = -(-size // _BLOCK)
    head = min(_HEAD // _BLOCK, blocks)
    tail = max(head, (size - _TAIL) // _BLOCK) if not key.endswith(".safetensors") else blocks
    if tail <= head:
        return [(key, 0, blocks if tail < blocks else head)]
    return [(key, 0, head), (key, tail, blocks)]


class _Files:
    """The images of this process, as ``storage.reading`` asks for them."""

    def open(self, path: Path) -> ObjectReader | None:
        """Return the reader of a file of an image, None for any other path. Raises OSError as ``open`` does."""
        text = os.fspath(path)
        if not _session.folder or not text.startswith(_session.folder):
            return None
        full = os.path.abspath(text)
        top = _top_of(full)
        image = _session.images.get(top) if top is not None else None
        if top is None:
            return None
        if image is None:
            raise OperationError(f"{path}: this URL is not open any more")
        key = image.key_of(full)
        key = image.aliases.get(key, key)
        info = image.objects.get(key)
        if info is None:
            if os.path.isdir(full):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), full)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), full)
        return ObjectReader(-1, info.size, 0, image, top, key)

    def store(self, folder: Path) -> Store | None:
        """Return the store whose prefix a folder is the image of, None for any other folder."""
        image = _image_at(os.path.abspath(folder))
        if image is None:
            return None
        key = image.key_of(os.path.abspath(folder))
        return image.store if key == "." else open_store(f"{image.store.url}/{key}")

    def unheld(self, folder: Path) -> tuple[Unheld, ...]:
        """Return the objects in or below a folder of an image whose keys no folder can hold."""
        image = _image_at(os.path.abspath(folder))
        if image is None:
            return ()
        return tuple(one for one in image.unheld if one.home.is_relative_to(folder))


_files = _Files()


def _top_of(full: str) -> str | None:
    if not _session.folder or not full.startswith(f"{_session.folder}/"):
        return None
    number = full[len(_session.folder) + 1 :].partition("/")[0]
    return f"{_session.folder}/{number}"


def _image_at(full: str) -> Image | None:
    top = _top_of(full)
    image = _session.images.get(top) if top is not None else None
    if image is None or not (full == str(image.root) or full.startswith(f"{image.root}/")):
        return None
    return image
