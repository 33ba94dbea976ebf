"""Reading objects of a store as files are read: by ranges, through a cache of blocks.

The ends of the files of a folder are read together when the first of them is read, before they are
asked for.
"""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

from ckptfix.dataclass import dataclass
from ckptfix.errors import ChangedError, StoreError
from ckptfix.storage import reading
from ckptfix.storage.listings import Listing
from ckptfix.storage.parallel import waiting
from ckptfix.storage.reading import FileReader, Unheld
from ckptfix.storage.stores import ObjectInfo, ObjectRange, Store, together

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

More than four images share four times the most: blocks that wait for their reader must not drive
out each other.
"""

RANGE = 4 << 20
"""Bytes of one request; longer reads are several at once."""

_KEPT = 256 << 20
_AHEAD = 1024
"""Files of a folder whose ends are read together."""


@dataclass(kw_only=True)
class Image:
    """The image of one prefix. ``root``: its folder; ``place``: what a URL was opened for, the root
    or one file.

    ``failures``: of the store, while it was read. ``aliases``: names that show the object of
    another key; ``stores``: the store of each such key that is in another one. ``origin``: the
    folder of a listing of which it was made. ``tops``: of a listing, folders for images of its
    parts that are free now; those above the parts stay there. ``lock``: held while the ends of
    files are read.
    """

    store: Store
    root: Path
    place: Path
    objects: Mapping[str, ObjectInfo]
    unheld: tuple[Unheld, ...]
    failures: list[Exception] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    stores: dict[str, tuple[Store, str]] = field(default_factory=dict)
    origin: Path | None = None
    tops: list[Path] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)
    _sorted: tuple[Mapping[str, ObjectInfo], dict[str, list[str]]] = field(
        default_factory=lambda: ({}, {})
    )

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
        """Return the key of the object at an absolute path of the image, "" of its root."""
        return path[len(str(self.root)) + 1 :]


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
        return ObjectReader(
            -1, length, self.path, self.start + offset, self.image, self.top, self.key
        )

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
        assert self.image is not None
        _look_ahead(self.image, self.top, self.key)
        missing = [
            (offset, length)
            for offset, length in ranges
            if (self.top, self.key, (self.start + offset) // _BLOCK) not in cache
            or (self.top, self.key, (self.start + offset + length - 1) // _BLOCK) not in cache
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
        if length >= RANGE:
            return self._direct(offset, length)
        _look_ahead(self.image, self.top, self.key)
        first, end = offset // _BLOCK, -(-(offset + length) // _BLOCK)
        missing = [
            number for number in range(first, end) if (self.top, self.key, number) not in cache
        ]
        if missing:
            wanted = cache.window(self.top, self.key, missing[0])
            last = min(max(end, missing[0] + wanted // _BLOCK), -(-self._info.size // _BLOCK))
            self._fetch([[missing[0], last]])
            cache.grow(self.top, self.key, last, wanted)
        parts = []
        for number in range(first, end):
            part = cache.get(self.top, self.key, number)
            if part is None:  # other threads have filled the cache meanwhile
                return self._direct(offset, length)
            parts.append(part)
        begin = offset - first * _BLOCK
        return b"".join(parts)[begin : begin + length]

    def _direct(self, offset: int, length: int) -> bytes:
        assert self.image is not None
        info = self._info
        ranges = [
            ObjectRange(self.key, begin, min(RANGE, offset + length - begin), info.etag)
            for begin in range(offset, offset + length, RANGE)
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
            take = min(RANGE, last - begin)
            if any(
                (top, key, number) not in cache
                for number in range(begin // _BLOCK, -(-(begin + take) // _BLOCK))
            ):
                ranges.append(ObjectRange(key, begin, take, info.etag))
            begin += take
    for one, data in zip(ranges, read_many(ranges), strict=True):
        for begin in range(0, len(data), _BLOCK):
            cache.put(top, one.key, (one.offset + begin) // _BLOCK, data[begin : begin + _BLOCK])


class _Cache:
    """Blocks of objects, those used last; and how much is read at once where reads follow each
    other.
    """

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
        """Note that the reads of a window went up to a block: what follows there reads twice as
        much.
        """
        with self._lock:
            most = max(4 * _MOST // max(4, len(self.ahead)), RANGE)
            self._windows[top, key, number] = min(2 * window, most)

    def forget(self, top: str) -> None:
        """Let go of all blocks of an image."""
        with self._lock:
            for block in [block for block in self._blocks if block[0] == top]:
                self._nbytes -= len(self._blocks.pop(block))
            self._windows = {
                place: size for place, size in self._windows.items() if place[0] != top
            }
            self.ahead.pop(top, None)


cache = _Cache()


def _look_ahead(image: Image, top: str, key: str) -> None:
    """Read the ends of the files of a folder when the first of them is read; of one file where that
    is asked for.
    """
    seen = cache.ahead[top]
    if key in seen:
        return
    with image.lock:
        if key in seen:
            return
        folder = key.rpartition("/")[0]
        if image.place != image.root or isinstance(image.objects, Listing):
            keys = [key]
        else:
            keys = [one for one in image.keys_in(folder) if one not in seen]
            begin = keys.index(key)
            keys = keys[begin : begin + _AHEAD]
        try:
            _fetch_spans(
                image, top, [span for one in keys for span in _ends(image, one)], image.try_many
            )
            seen.update(keys)
        except (StoreError, ChangedError):
            # One of them fails that perhaps nobody asks for: a log of somebody else's next to the
            # checkpoint.
            _fetch_spans(image, top, _ends(image, key), image.read_many)
            seen.add(key)


def _ends(image: Image, key: str) -> list[tuple[str, int, int]]:
    """Return the blocks at both ends of a file, at its beginning alone where it has no directory at
    its end.
    """
    size = image.objects[key].size
    blocks = -(-size // _BLOCK)
    head = min(_HEAD // _BLOCK, blocks)
    tail = max(head, (size - _TAIL) // _BLOCK) if not key.endswith(".safetensors") else blocks
    if tail <= head:
        return [(key, 0, blocks if tail < blocks else head)]
    return [(key, 0, head), (key, tail, blocks)]
