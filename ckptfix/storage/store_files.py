"""A prefix of an object store as a folder: its listing, and its objects read by ranges through a
cache of blocks.

The ends of the files of a folder are read together when the first of them is read, before they are
asked for.
"""

import hashlib
import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ckptfix.errors import (
    ChangedError,
    CkptfixError,
    ClosedError,
    StoreError,
    UsageError,
)
from ckptfix.storage.atomic import umask
from ckptfix.storage.files import FileReader, Shown, StorePath, Unheld
from ckptfix.storage.listings import Listing
from ckptfix.storage.parallel import waiting
from ckptfix.storage.paths import JOURNAL
from ckptfix.storage.stores import ObjectInfo, ObjectRange, Store, open_store, together
from ckptfix.wording import count_of, escape, list_names

_BLOCK = 16 << 10
"""Bytes that the cache holds as one: samples of tensors are single pages, far from each other."""

_HEAD = 64 << 10
"""Bytes that are read of every file before it is asked for: the header of most safetensors files.
"""

_TAIL = 64 << 10
"""Bytes that are read of the end: the directory of a zip file. A safetensors file has none."""

_FEWEST, _MOST = 256 << 10, 16 << 20
"""Bytes that are read at once on demand: first the fewest, and twice as many each time that reads
follow each other.

More than four prefixes share four times the most: blocks that wait for their reader must not drive
out each other.
"""

RANGE = 4 << 20
"""Bytes of one request; longer reads are several at once."""

_KEPT = 256 << 20
_AHEAD = 1024
"""Files of a folder whose ends are read together."""


class StoreFiles:
    """The objects of one prefix, as they were listed.

    ``url``: of the prefix. ``lists``: it may hold thousands of checkpoints, and only what is asked
    for is read. ``unheld``: the objects whose keys no folder can hold. ``failures``: of the store,
    while it was read. ``umask``: the permissions that new files here lack.
    """

    def __init__(
        self,
        store: Store,
        listing: Listing,
        *,
        url: str = "",
        only: str = "",
        lists: bool = False,
        is_thrifty: bool = False,
        whole: "StoreFiles | None" = None,
    ) -> None:
        """``only``: the one object that was asked for, so that its neighbours are not read ahead.
        ``whole``: the listing of which this is a part, with one cache.
        """
        self.store, self.listing, self.only, self.lists = store, listing, only, lists
        self.url = url or store.url
        self.is_thrifty, self.spared = is_thrifty, 0
        self.failures: list[Exception] = []
        self.whole = whole
        self.cache: _Cache = whole.cache if whole is not None else _Cache()
        self.lock = threading.Lock()
        self.is_closed = False
        self.umask: int = whole.umask if whole is not None else umask()
        self._shown: dict[str, Shown] = {}
        self._store_of_shown: Store | None = None

    @property
    def unheld(self) -> tuple[Unheld, ...]:
        """The objects whose keys no folder can hold."""
        top = StorePath(self, self.url)
        return tuple(
            Unheld(key, lost.info.size, top / lost.home, lost.why)
            for key, lost in self.listing.misfits.items()
        )

    def info(self, key: str) -> ObjectInfo | None:
        """Return the facts about an object as it was listed, None where there is none."""
        self._ensure_open()
        return self.listing.get(key)

    def has_folder(self, folder: str) -> bool:
        """Return whether objects below a folder were listed."""
        self._ensure_open()
        return self.listing.folders(folder) is not None

    def names(self, folder: str) -> tuple[Iterable[str], Iterable[str]] | None:
        """Return the names of the objects and of the folders in a folder, None where none was
        listed.
        """
        self._ensure_open()
        folders = self.listing.folders(folder)
        return None if folders is None else (self.listing.files(folder), folders)

    def number(self, key: str) -> int:
        """Return what tells an object from all others here, as an inode does: a moved one keeps
        its own.
        """
        shown = self._shown.get(key)
        name = shown.moved if shown is not None and shown.moved is not None else key
        return int.from_bytes(hashlib.sha1(name.encode("utf-8", "replace")).digest()[:7], "big")

    def objects_below(self, folder: str) -> dict[str, ObjectInfo]:
        """Return every object in and below a folder by its key relative to it."""
        return self.listing.below(folder)

    def has_gone(self, folder: str) -> bool:
        """Return whether the store has no object any more in or below a folder. False where that
        cannot be found out.
        """
        try:
            return next(self.store.below(folder).listed(), None) is None
        except CkptfixError:
            return False

    def reader(self, path: StorePath) -> "ObjectReader":
        """Return the reader of an object. Raises OSError as ``open`` does."""
        key = path.key
        info = self.info(key) if key else None
        if info is None:
            number = 21 if path.is_dir() else 2
            raise (IsADirectoryError if number == 21 else FileNotFoundError)(
                number, os.strerror(number), str(path)
            )
        assert key is not None
        return ObjectReader(-1, info.size, path, 0, self, key)

    def below(self, folder: str) -> "StoreFiles":
        """Return the objects in and below a folder alone, with the same cache."""
        part = Listing(
            (self.listing.below(folder) | self.listing.misfits_below(folder)).items(),
            len(os.fsencode(self.url)),
        )
        return StoreFiles(self.store.below(folder), part, is_thrifty=self.is_thrifty, whole=self)

    @contextmanager
    def showing(
        self, folder: str, names: Mapping[str, Shown | None], *, store: Store | None = None
    ) -> Iterator[None]:
        """Let names show other objects, or nothing, until the end of the block.

        Names and keys are relative to the folder, and keys to ``store`` where it is given.
        """
        before = self.listing
        start = f"{folder}/" if folder else ""
        objects = dict(before.items()) | {key: of.info for key, of in before.misfits.items()}
        for name, shown in names.items():
            objects.pop(f"{start}{name}", None)
            if shown is not None:
                key = shown.key if store is not None else f"{start}{shown.key}"
                moved = None if shown.moved is None else f"{start}{shown.moved}"
                info = shown.info
                # As a rename keeps the time of a file: a proof tells by it that nothing changed.
                if moved is not None and (source := before.get(moved)) is not None:
                    info = info._replace(modified_ns=source.modified_ns)
                self._shown[f"{start}{name}"] = Shown(key, info, moved)
                objects[f"{start}{name}"] = info
        self.cache.forget(self)
        self.listing = Listing(objects.items(), len(os.fsencode(self.url)))
        self._store_of_shown = store
        try:
            yield
        finally:
            self.listing, self._store_of_shown = before, None
            self._shown.clear()
            self.cache.forget(self)

    def refresh(self) -> None:
        """List the prefix anew, after the store was changed. Raises StoreError."""
        listed = _listed_for_one(self.store) if self.only else self.store.list()
        self.cache.forget(self)
        self.listing = Listing(listed.items(), len(os.fsencode(self.url)))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise a failure of the store at the end even where it was caught on its way: what was not
        read is not ok.
        """
        before = len(self.failures)
        yield
        self.raise_failure(since=before)

    def raise_failure(self, *, since: int = 0) -> None:
        """Raise the first failure of the store after the first ``since`` ones."""
        if len(self.failures) > since:
            raise self.failures[since]

    def close(self) -> None:
        """Let go of what was read. Nothing can be looked up here any more."""
        self.is_closed = True
        self.cache.forget(self)

    def _ensure_open(self) -> None:
        if self.is_closed:
            raise ClosedError(f"{self.url}: this URL is no longer open")

    def read_many(self, ranges: Sequence[ObjectRange]) -> list[bytes]:
        """Return the bytes of ranges. A failure is kept: whoever catches it must not report
        success.
        """
        try:
            return self.try_many(ranges)
        except Exception as error:
            self.failures.append(error)
            raise

    def try_many(self, ranges: Sequence[ObjectRange]) -> list[bytes]:
        """Return the bytes of ranges that perhaps nobody asks for."""
        with waiting():
            if not any(span.key in self._shown for span in ranges):
                return self.store.read_many(ranges)
            return self._read_shown(ranges)

    def _read_shown(self, ranges: Sequence[ObjectRange]) -> list[bytes]:
        data: list[bytes] = [b""] * len(ranges)

        def take(number: int) -> None:
            span = ranges[number]
            shown = self._shown.get(span.key)
            store = self.store if shown is None else self._store_of_shown or self.store
            key = span.key if shown is None else shown.key
            data[number] = store.read(key, span.offset, span.length, etag=span.etag or None)

        together(range(len(ranges)), take)
        return data


def open_prefix(
    url: str, *, complete: bool = True, lists: bool = False, is_thrifty: bool = False
) -> StorePath:
    """Open a URL: list what is there, and return the path of the folder or of the one object.

    Raises UsageError when nothing is there, StoreError; with ``complete`` also for an object whose
    key no folder can hold.
    """
    store = open_store(url)
    # The listing of a fleet is packed as it comes; that of one checkpoint is small.
    listed = Listing(store.listed() if lists else store.list().items(), len(os.fsencode(store.url)))
    is_there = bool(listed or listed.misfits)
    files = StoreFiles(store, listed, lists=lists) if is_there else _open_object(url, store)
    files.is_thrifty = is_thrifty
    solid = [lost for lost in files.unheld if lost.size]
    if complete and solid:
        raise StoreError(
            f"{escape(url)}: {count_of(len(solid), 'object')} with a key that cannot be a file "
            f"path ({list_names(lost.key for lost in solid)}: {solid[0].why}), so not everything "
            "would be read; next: move these objects to other keys; delete only what nobody needs"
        )
    place = StorePath(files, files.url)
    return place / files.only


def _open_object(url: str, store: Store) -> StoreFiles:
    """Open a single object with the folder that it is in. Raises UsageError where there is none."""
    if "/" not in url.partition("://")[2].rstrip("/"):
        raise UsageError(f"{escape(url)} is empty: the store has no object there")
    above, _, only = url.rstrip("/").rpartition("/")
    folder = open_store(above)
    listed = _listed_for_one(folder)
    if only not in listed:
        raise UsageError(
            f"{escape(url)} does not exist: the store has no object with this name or below it"
        )
    return StoreFiles(folder, Listing(listed.items(), len(os.fsencode(above))), only=only)


def _listed_for_one(folder: Store) -> dict[str, ObjectInfo]:
    """Return the objects right in a folder, next to the one that was asked for, and those of its
    journal.
    """
    return folder.children()[0] | folder.list(JOURNAL)


class ObjectReader(FileReader, frozen=True):
    """An object, or a window of one. It has no descriptor."""

    files: "StoreFiles | None" = None
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
        return ObjectReader(-1, length, self.path, self.start + offset, self.files, self.key)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read ranges that will be asked for, all at once."""
        self._fetch(
            [(self.start + offset) // _BLOCK, -(-(self.start + offset + length) // _BLOCK)]
            for offset, length in ranges
            if length
        )

    def spares(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Return whether ranges should not be read one by one; otherwise all of them are read at
        once here.
        """
        files = self._files
        _look_ahead(files, self.key)
        missing = [
            (offset, length)
            for offset, length in ranges
            if (files, self.key, (self.start + offset) // _BLOCK) not in files.cache
            or (files, self.key, (self.start + offset + length - 1) // _BLOCK) not in files.cache
        ]
        if missing and self.leaves_out(len(missing)):
            return True
        self.expect(missing[: _KEPT // _BLOCK // 4])
        return False

    def leaves_out(self, count: int) -> bool:
        """Return whether as many small reads are left out, and count them."""
        files = self._files
        files.spared += count * files.is_thrifty
        return files.is_thrifty

    @contextmanager
    def reopened(self) -> Iterator[FileReader]:
        """Yield this reader: threads do not disturb each other."""
        yield self

    def is_cached(self, offset: int) -> bool:
        """Return False: a store is slower than any disk."""
        return False

    @property
    def _files(self) -> StoreFiles:
        assert self.files is not None
        return self.files

    @property
    def _info(self) -> ObjectInfo:
        return self._files.listing[self.key]

    def _bytes(self, offset: int, length: int) -> bytes:
        if not length:
            return b""
        if length >= RANGE:
            return self._direct(offset, length)
        files, cache = self._files, self._files.cache
        _look_ahead(files, self.key)
        first, end = offset // _BLOCK, -(-(offset + length) // _BLOCK)
        missing = [number for number in range(first, end) if (files, self.key, number) not in cache]
        if missing:
            wanted = cache.window(files, self.key, missing[0])
            last = min(max(end, missing[0] + wanted // _BLOCK), -(-self._info.size // _BLOCK))
            self._fetch([[missing[0], last]])
            cache.grow(files, self.key, last, wanted)
        parts = []
        for number in range(first, end):
            part = cache.get(files, self.key, number)
            if part is None:  # other threads have filled the cache meanwhile
                return self._direct(offset, length)
            parts.append(part)
        begin = offset - first * _BLOCK
        return b"".join(parts)[begin : begin + length]

    def _direct(self, offset: int, length: int) -> bytes:
        info = self._info
        ranges = [
            ObjectRange(self.key, begin, min(RANGE, offset + length - begin), info.etag)
            for begin in range(offset, offset + length, RANGE)
        ]
        return b"".join(self._files.read_many(ranges))

    def _fetch(self, spans: Iterable[Sequence[int]]) -> None:
        """Put blocks into the cache: spans of their numbers, each a request unless it is long."""
        files = self._files
        _fetch_spans(files, [(self.key, first, end) for first, end in spans], files.read_many)


def _fetch_spans(
    files: StoreFiles, spans: Iterable[tuple[str, int, int]],
    read_many: Callable[[Sequence[ObjectRange]], Sequence[bytes]],
) -> None:  # fmt: skip
    ranges = []
    for key, first, end in spans:
        info = files.listing[key]
        last = min(end * _BLOCK, info.size)
        begin = first * _BLOCK
        while begin < last:
            take = min(RANGE, last - begin)
            if any(
                (files, key, number) not in files.cache
                for number in range(begin // _BLOCK, -(-(begin + take) // _BLOCK))
            ):
                ranges.append(ObjectRange(key, begin, take, info.etag))
            begin += take
    for span, data in zip(ranges, read_many(ranges), strict=True):
        for begin in range(0, len(data), _BLOCK):
            block = data[begin : begin + _BLOCK]
            files.cache.put(files, span.key, (span.offset + begin) // _BLOCK, block)


class _Cache:
    """Blocks of objects, those used last; and how much is read at once where reads follow each
    other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[StoreFiles, str, int], bytes] = OrderedDict()
        self._nbytes = 0
        self._windows: dict[tuple[StoreFiles, str, int], int] = {}
        self.ahead: defaultdict[StoreFiles, set[str]] = defaultdict(set)

    def __contains__(self, block: tuple[StoreFiles, str, int]) -> bool:
        return block in self._blocks

    def get(self, files: StoreFiles, key: str, number: int) -> bytes | None:
        """Return a block, None when it is not there any more."""
        with self._lock:
            data = self._blocks.get((files, key, number))
            if data is not None:
                self._blocks.move_to_end((files, key, number))
            return data

    def put(self, files: StoreFiles, key: str, number: int, data: bytes) -> None:
        """Keep a block, and let go of those that were used longest ago."""
        with self._lock:
            old = self._blocks.pop((files, key, number), b"")
            self._blocks[files, key, number] = data
            self._nbytes += len(data) - len(old)
            while self._nbytes > _KEPT:
                self._nbytes -= len(self._blocks.popitem(last=False)[1])

    def window(self, files: StoreFiles, key: str, number: int) -> int:
        """Return how many bytes to read at once from a block on."""
        with self._lock:
            return self._windows.pop((files, key, number), _FEWEST)

    def grow(self, files: StoreFiles, key: str, number: int, window: int) -> None:
        """Note that the reads of a window went up to a block: what follows there reads twice as
        much.
        """
        with self._lock:
            most = max(4 * _MOST // max(4, len(self.ahead)), RANGE)
            self._windows[files, key, number] = min(2 * window, most)

    def forget(self, files: StoreFiles) -> None:
        """Let go of all blocks of a prefix."""
        with self._lock:
            for block in [block for block in self._blocks if block[0] is files]:
                self._nbytes -= len(self._blocks.pop(block))
            self._windows = {
                place: size for place, size in self._windows.items() if place[0] is not files
            }
            self.ahead.pop(files, None)


def _look_ahead(files: StoreFiles, key: str) -> None:
    """Read the ends of the files of a folder when the first of them is read; of one file where that
    is asked for.
    """
    seen = files.cache.ahead[files]
    if key in seen:
        return
    # A thread that waits for the lock must not hold the turn of the one that has it.
    with waiting(), files.lock:
        if key in seen:
            return
        folder = key.rpartition("/")[0]
        keys = [key]
        if not files.only and not files.lists:
            inside = (f"{folder}/{name}".lstrip("/") for name in files.listing.files(folder))
            keys = [each for each in inside if each not in seen]
            begin = keys.index(key)
            keys = keys[begin : begin + _AHEAD]
        try:
            spans = [span for each in keys for span in _ends(files, each)]
            _fetch_spans(files, spans, files.try_many)
            seen.update(keys)
        except (StoreError, ChangedError):
            # One of them fails that perhaps nobody asks for: a log of somebody else's next to the
            # checkpoint.
            _fetch_spans(files, _ends(files, key), files.read_many)
            seen.add(key)


def _ends(files: StoreFiles, key: str) -> list[tuple[str, int, int]]:
    """Return the blocks at both ends of a file, at its beginning alone where it has no directory at
    its end.
    """
    size = files.listing[key].size
    blocks = -(-size // _BLOCK)
    head = min(_HEAD // _BLOCK, blocks)
    tail = max(head, (size - _TAIL) // _BLOCK) if not key.endswith(".safetensors") else blocks
    if tail <= head:
        return [(key, 0, blocks if tail < blocks else head)]
    return [(key, 0, head), (key, tail, blocks)]
