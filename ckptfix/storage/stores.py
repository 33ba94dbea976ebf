"""Objects in a store: one prefix of a bucket, listed, read by ranges and written whole, by the
library of its scheme.

fsspec lists and reads every store; a store whose own requests are needed (``s3``, ``azure``,
``hub``) has a module. A request that fails for a reason that passes is sent again; any other
failure becomes an error that leads on.
"""

import asyncio
import hashlib
import os
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from datetime import datetime, timezone
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Final, NamedTuple, TypeVar

from msgspec import Meta

from ckptfix.errors import ChangedError, FileChangedError, StoreError, UsageError
from ckptfix.storage.parallel import Control, Progress, run_all
from ckptfix.wording import escape, human_size

_T = TypeVar("_T")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")


class Library(NamedTuple):
    """Library of a scheme: the module that must be there, the extra of this package that installs
    it, and the class of the store; "" for one of which fsspec alone is asked.
    """

    module: str
    extra: str
    store: str = ""


_S3 = Library("s3fs", "s3", "ckptfix.storage.s3.S3Store")
_GS = Library("gcsfs", "gs")
_AZURE = Library("adlfs", "az", "ckptfix.storage.azure.AzureStore")
LIBRARIES: Mapping[str, Library] = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _GS,
    "gcs": _GS,
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "hf": Library("huggingface_hub", "hf", "ckptfix.storage.hub.HubStore"),
    "memory": Library("fsspec", "s3"),
}

CONCURRENT = 64
"""Requests under way at once: with 30 ms each, 200 headers take 0.12 s."""

_BLOCK = 8 << 20


class Expected(Enum):
    """State in which a key must be before it is written: without an object, or any."""

    ABSENT = "absent"
    ANY = "any"


ABSENT: Final = Expected.ABSENT
ANY: Final = Expected.ANY


Whole = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A number of bytes, of nanoseconds or of a transaction, as the records in a store have it."""


class ObjectInfo(NamedTuple):
    """Facts about an object. ``etag``: changes with its bytes; "" where a store has none."""

    size: Whole
    etag: str
    modified_ns: Whole


class ObjectRange(NamedTuple):
    """``length`` bytes from ``offset`` of ``key`` in the state ``etag``; "": in any state."""

    key: str
    offset: int
    length: int
    etag: str


Piece = bytes | ObjectRange
"""A piece of a new object: new bytes, or bytes of an existing object of the same bucket."""


Names = list[str]
Contents = list[bytes]


class Abilities(NamedTuple):
    """Abilities of a store beyond reading and writing whole objects.

    ``composes``: it copies parts of objects into new ones by itself. ``conditions``: it refuses a
    write onto another object than the expected one. ``in_place``: objects of a checkpoint can be
    replaced one by one; the hub makes a commit of each. The sizes are in bytes: of the smallest
    part but the last, and of the largest copied one.
    """

    composes: bool = False
    conditions: bool = False
    in_place: bool = True
    least_part: int = 0
    most_copied: int = 0
    most_parts: int = 0


class Patience(NamedTuple):
    """Limits of retries. Waits in seconds grow twofold, in part by chance."""

    attempts: int = 8
    first_wait: float = 0.5
    longest_wait: float = 10.0
    connect: float = 10.0
    answer: float = 60.0


PATIENCE = Patience()


class Traffic:
    """Requests, with those sent again, and bytes of objects that went up and down."""

    def __init__(self, total: "Traffic | None" = None) -> None:
        self._lock = threading.Lock()
        self._total = total
        self.requests = self.up = self.down = 0

    def add(self, *, up: int = 0, down: int = 0, requests: int = 1) -> None:
        """Count a request, from any thread."""
        with self._lock:
            self.requests += requests
            self.up += up
            self.down += down
        if self._total is not None:
            self._total.add(up=up, down=down, requests=requests)


TRAFFIC = Traffic()
"""Traffic of all stores of this process."""


class Temporary(Exception):
    """A failure that passes by itself, so that the request is sent again."""


class Refused(Exception):
    """A write whose condition does not hold: another object exists than the expected one."""


def is_url(path: object) -> bool:
    """Return whether a path is a URL, such as ``s3://bucket/run``."""
    return isinstance(path, str) and _SCHEME.match(path) is not None


def open_store(url: str) -> "Store":
    """Return the store of a URL. No request is sent yet.

    Raises UsageError for a scheme that is not known, and for a URL that no folder can be named
    like; names the extra to install where its library is missing.
    """
    match = _SCHEME.match(url)
    if match is None or match[1] not in LIBRARIES:
        known = ", ".join(f"{scheme}://" for scheme in LIBRARIES)
        raise UsageError(f"{escape(url)} is not a URL of an object store: expected one of {known}")
    scheme, rest = match[1], url[match.end() :]
    authority = rest.partition("/")[0]
    if ":" in authority.partition("@")[0] and "@" in authority:
        raise UsageError(
            f"{scheme}://...@{authority.rpartition('@')[2]}: a URL must not contain a password, "
            "because shells and logs keep it; next: export it as the store's library reads it "
            "(ckptfix help stores)"
        )
    if scheme != "memory" and not authority:
        raise UsageError(f"{escape(url)} has no bucket (expected {scheme}://BUCKET/PATH)")
    if any(part in ("", ".", "..") for part in rest.rstrip("/").split("/")) and rest:
        raise UsageError(
            f"{escape(url)}: a path in a store cannot contain '//', '.' or '..'; next: correct "
            "the path, or, if objects have such keys, copy them to other keys"
        )
    # Half of a surrogate pair, or a byte that is not UTF-8: a request cannot hold it.
    if any("\ud800" <= character <= "\udfff" for character in rest):
        raise UsageError(f"{escape(url)}: a URL must be valid Unicode; next: correct this name")
    library = LIBRARIES[scheme]
    try:
        import_module(library.module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library.module:
            raise
        raise UsageError(
            f"{escape(url)} needs the library {library.module}; next: pip install "
            f"'ckptfix[{library.extra}]'"
        ) from None
    module, _, name = library.store.rpartition(".")
    kind: type[Store] = getattr(import_module(module), name) if module else Store
    return kind(url.rstrip("/"))


class Store:
    """One prefix of a store. Keys are relative to it; "" is the prefix itself, as the URL of a
    single object has it.

    Any thread may use it. Every method raises StoreError when the store does not answer or refuses,
    with the next step in its message.
    """

    abilities: ClassVar[Abilities] = Abilities()

    def __init__(self, url: str) -> None:
        self.url = url
        self.traffic = Traffic(TRAFFIC)
        self._files, self._base = self._opened()

    def _opened(self) -> tuple[Any, str]:
        """Return the file system of fsspec, and the path of the prefix in it."""
        import fsspec

        scheme = self.url.partition("://")[0]
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            files = fsspec.filesystem(scheme, **options)
        except Exception as error:
            raise StoreError(
                f"{self.name()}: {_one_line(error)}; next: ckptfix help stores"
            ) from error
        base = files._strip_protocol(self.url)
        return files, base.strip("/") if scheme != "memory" else base.rstrip("/")

    def below(self, key: str) -> "Store":
        """Return a folder of this prefix, with the same connections."""
        if not key:
            return self
        store = copy(self)
        store.url, store._base = f"{self.url}/{key}", self._path(key)
        return store

    def name(self, key: str = "") -> str:
        """Return the URL of an object as messages name it."""
        return escape(f"{self.url}/{key}" if key else self.url)

    def removal(self, below: str = "") -> str:
        """Return the command or the words that delete every object in a folder."""
        return f"delete every object below {self.name(below.rstrip('/'))}/"

    # Requests of a store: a subclass replaces them.

    def _list(self, below: str, *, deep: bool) -> Iterator[tuple[str, ObjectInfo | None]]:
        """Yield the keys below "" or a folder with a slash; unless ``deep``, folders with None."""
        self.traffic.add()
        where = self._path(below.rstrip("/"))
        try:
            found = (
                self._files.find(where, detail=True)
                if deep
                else {one["name"]: one for one in self._files.ls(where, detail=True)}
            )
        except FileNotFoundError:
            return
        before = f"{self._base}/"
        for path, info in found.items():
            key = path.removeprefix(before)
            if not key or key == path:
                continue  # the object of that name itself
            yield (key, _info(info)) if info["type"] == "file" else (f"{key.rstrip('/')}/", None)

    def _stat(self, key: str) -> ObjectInfo | None:
        self.traffic.add()
        try:
            info = self._files.info(self._path(key))
        except FileNotFoundError:
            return None
        return _info(info) if info["type"] == "file" else None

    def _read(self, key: str, offset: int, length: int, etag: str) -> bytes:
        """Return a range. Raises Refused for another ETag, FileNotFoundError."""
        data: bytes = self._files.cat_file(self._path(key), start=offset, end=offset + length)
        self.traffic.add(down=len(data))
        # This library takes no condition: what is there after the read was there during it.
        if etag:
            now = self._stat(key)
            if now is None or now.etag != etag:
                raise Refused
        return data

    def _put(self, key: str, data: bytes, expected: str | Expected) -> ObjectInfo:
        path, mode = self._path(key), "create" if expected is ABSENT else "overwrite"
        try:
            self._ensure(key, expected)
            self.traffic.add(up=len(data))
            # "create": of two at the same time one fails.
            self._files.pipe_file(path, data, mode=mode)
        except (Refused, FileExistsError):
            # Else an earlier attempt arrived, whose answer was lost.
            now = self._stat(key)
            if now is None or now.size != len(data) or self._files.cat_file(path) != data:
                raise Refused from None
        return self._written(key, len(data))

    def _upload(
        self, key: str, path: Path, expected: str | Expected, progress: Progress | None
    ) -> ObjectInfo:
        size = path.stat().st_size
        try:
            self._ensure(key, expected)
            self.traffic.add(up=size)
            self._files.put_file(str(path), self._path(key))
        except Refused:
            # Else an earlier attempt arrived, whose answer was lost.
            now = self._stat(key)
            if now is None or now.size != size or not self._has_bytes_of(path, key, now):
                raise
        if progress:
            progress(size)
        return self._written(key, size)

    def _has_bytes_of(self, path: Path, key: str, now: ObjectInfo) -> bool:
        with path.open("rb") as file:
            return all(
                self._read(key, begin, min(_BLOCK, now.size - begin), now.etag) == file.read(_BLOCK)
                for begin in range(0, now.size, _BLOCK)
            )

    def _upload_whole(
        self, key: str, file: IO[bytes], expected: str | Expected, progress: Progress | None
    ) -> ObjectInfo:
        """Write a small file in one request."""
        data = file.read()
        info = self._put(key, data, expected)
        if progress:
            progress(len(data))
        return info

    def _compose(
        self,
        key: str,
        pieces: Sequence[Piece],
        expected: str | Expected,
        like: str | None,
        mark: str,
    ) -> ObjectInfo:
        """Write an object whose bytes come and go through this machine."""
        with tempfile.NamedTemporaryFile(prefix="ckptfix-") as file:
            self._bring(pieces, file)
            file.flush()
            return self._upload(key, Path(file.name), expected, None)

    def _bring(self, pieces: Sequence[Piece], file: IO[bytes]) -> None:
        """Write the bytes of pieces to a file of this machine."""
        for piece in pieces:
            if isinstance(piece, bytes):
                file.write(piece)
                continue
            for begin in range(0, piece.length, _BLOCK):
                take = min(_BLOCK, piece.length - begin)
                file.write(
                    self.read(piece.key, piece.offset + begin, take, etag=piece.etag or None)
                )

    def replace_all(
        self,
        title: str,
        files: Mapping[str, Path],
        gone: Iterable[str],
        records: Callable[[Mapping[str, tuple[ObjectInfo, str]]], Mapping[str, bytes]],
        seen: Mapping[str, str],
    ) -> None:
        """Add and delete many objects at once, where nothing is changed in place (``hub``)."""
        raise NotImplementedError

    def _mark(self, key: str) -> str:
        return ""

    def _abandoned(self, below: str) -> int:
        """Remove the parts of unfinished uploads; return the number of uploads."""
        return 0

    def _delete(self, key: str, expected: str | Expected) -> None:
        self._ensure(key, expected)
        self.traffic.add()
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}" if key and self._base else key or self._base

    def _ensure(self, key: str, expected: str | Expected) -> None:
        """Raise Refused for another state, where a store or a write has no conditions."""
        if expected is ANY:
            return
        now = self._stat(key)
        if (now is not None) if expected is ABSENT else (now is None or now.etag != expected):
            raise Refused

    def _written(self, key: str, size: int, etag: str = "") -> ObjectInfo:
        """Return what is there after a write. ``etag``: what the store answered, "" where that was
        lost.

        Raises Refused when another program wrote since, StoreError when not every byte is there.
        """
        # Tried again by itself: what was written must not be written again for its sake.
        now = self.stat(key)
        if etag and (now is None or now.etag != etag):
            raise Refused
        if now is None or now.size != size:
            found = "no object" if now is None else f"{now.size} bytes"
            raise StoreError(
                f"{self.name(key)}: the store accepted {size} bytes but now has {found}: the "
                "object is not complete; next: run the same command again"
            )
        return now

    def _judge(self, error: Exception) -> Exception | None:
        """Return the failure that an error of the library means: Temporary, Refused,
        FileNotFoundError or a final one.

        None for an error that this store does not know.
        """
        if isinstance(error, PermissionError):
            return StoreError(_one_line(error))
        if isinstance(
            error, FileNotFoundError | Temporary | Refused | UsageError | StoreError | ChangedError
        ):
            return error
        if isinstance(error, TimeoutError | ConnectionError | asyncio.TimeoutError):
            return Temporary(_one_line(error))
        status = getattr(error, "status", None) or getattr(error, "code", None)
        if status in (408, 429, 500, 502, 503, 504, "408", "429", "500", "502", "503", "504"):
            return Temporary(_one_line(error))
        if type(error).__module__.partition(".")[0] in (
            "aiohttp",
            "httpx",
            "httpx2",
            "httpcore",
            "httpcore2",
            "requests",
            "urllib3",
        ):
            return Temporary(_one_line(error))
        return None

    # What everybody calls.

    def list(self, below: str = "") -> dict[str, ObjectInfo]:
        """Return every object below a folder of the prefix, however deep, by its key."""
        listed = self._persist(below, lambda: list(self._list(_folder(below), deep=True)))
        return {key: info for key, info in listed if info is not None}

    def listed(self) -> Iterator[tuple[str, ObjectInfo]]:
        """Yield every object as ``list`` returns it, page by page where possible."""
        yield from self.list().items()

    def children(self, below: str = "") -> tuple[dict[str, ObjectInfo], Names]:
        """Return the objects right in a folder, and the keys of its sub-folders."""
        listed = self._persist(below, lambda: list(self._list(_folder(below), deep=False)))
        files = {key: info for key, info in listed if info is not None}
        return files, sorted({key.rstrip("/") for key, info in listed if info is None})

    def folders(self, below: str = "") -> Names:
        """Return the keys of the sub-folders of a folder, without slashes."""
        return self.children(below)[1]

    def stat(self, key: str) -> ObjectInfo | None:
        """Return the facts about an object, None where none is."""
        return self._persist(key, lambda: self._stat(key))

    def read(self, key: str, offset: int, length: int, *, etag: str | None = None) -> bytes:
        """Return exactly ``length`` bytes. Raises ChangedError for another object, or none."""
        if not length:
            return b""

        def work() -> bytes:
            data = self._read(key, offset, length, etag or "")
            if len(data) != length:
                raise Temporary(f"{len(data)} of {length} bytes arrived")
            return data

        try:
            return self._persist(key, work, has_condition=True)
        except FileNotFoundError:
            raise FileChangedError(
                self.name(key), f"expected ETag {etag}, found no object" if etag else ""
            ) from None
        except Refused:
            raise FileChangedError(self.name(key), self._states(key, etag or "")[1]) from None

    def read_many(self, ranges: Sequence[ObjectRange]) -> Contents:
        """Return the bytes of ranges, ``CONCURRENT`` at once. Raises as ``read`` does."""
        found: Contents = [b""] * len(ranges)

        def take(number: int) -> None:
            one = ranges[number]
            found[number] = self.read(one.key, one.offset, one.length, etag=one.etag or None)

        together(range(len(ranges)), take)
        return found

    def put(self, key: str, data: bytes, *, expected: str | Expected = ANY) -> ObjectInfo:
        """Write an object or nothing. Raises ChangedError where another than ``expected`` is."""
        return self._write(key, expected, lambda: self._put(key, data, expected))

    def upload(
        self,
        key: str,
        path: Path,
        *,
        expected: str | Expected = ANY,
        progress: Progress | None = None,
    ) -> ObjectInfo:
        """Write a file as an object or nothing, and compare the size. Raises as ``put``.

        An object with the same bytes is this one, where the store cannot mark its own.
        """
        return self._write(key, expected, lambda: self._upload(key, path, expected, progress))

    def compose(
        self,
        key: str,
        pieces: Sequence[Piece],
        *,
        expected: str | Expected = ANY,
        like: str | None = None,
        mark: str = "",
    ) -> ObjectInfo:
        """Write an object of new bytes and ranges of others, complete or not at all. Raises as
        ``put`` does.

        Where the store can (``abilities.composes``) it copies the ranges by itself. ``like``: an
        object whose storage class, metadata, tags and encryption the new one gets. ``mark``: what
        ``mark()`` returns of the new object, in a store that composes. Raises ChangedError when a
        range is of another object.
        """
        return self._write(key, expected, lambda: self._compose(key, pieces, expected, like, mark))

    def keeps_conditions(self, key: str) -> bool:
        """Return whether the store refuses a write whose condition fails. ``key``: a free one."""
        return self.abilities.conditions

    def mark(self, key: str) -> str:
        """Return the mark of an object that was composed with one, "" for any other."""
        return self._persist(key, lambda: self._mark(key))

    def abandoned(self, below: str) -> int:
        """Remove what uploads below a prefix left that were killed: parts, which no listing shows
        and somebody pays.

        Return the number of these uploads. Nobody else may write there.
        """
        return self._persist(below, lambda: self._abandoned(below))

    def delete(self, key: str, *, expected: str | Expected = ANY) -> None:
        """Delete an object, if any. Raises ChangedError where another than ``expected`` is."""
        self._write(key, expected, lambda: self._delete(key, expected))

    def _write(self, key: str, expected: str | Expected, work: Callable[[], _T]) -> _T:
        try:
            return self._persist(key, work, has_condition=True)
        except (Refused, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and error.filename is not None:
                raise  # a file of this machine
            # S3 answers a condition on an object that has gone with 404.
            raise self._changed(key, expected, "meanwhile") from None

    def _changed(self, key: str, expected: str | Expected, when: str) -> ChangedError:
        did, states = self._states(key, expected)
        return ChangedError(
            f"{self.name(key)}: another program {did} this object {when} ({states}); "
            "next: wait until it has finished, then run the same command again"
        )

    def _states(self, key: str, expected: str | Expected) -> tuple[str, str]:
        """Return in words what happened to an object: the verb, and both states."""
        now = None
        with suppress(StoreError):
            now = self.stat(key)
        plain = {ABSENT: "no object", ANY: "the object that was just written"}
        what = plain[expected] if isinstance(expected, Expected) else f"ETag {expected}"
        found = "none" if now is None else f"ETag {now.etag}, {human_size(now.size)}"
        return "deleted" if now is None else "wrote", f"expected {what}, found {found}"

    def _persist(self, key: str, work: Callable[[], _T], *, has_condition: bool = False) -> _T:
        """Do a request, again and again while it fails for reasons that pass.

        ``has_condition``: the caller explains that it does not hold (Refused), or that there is no
        such object.
        """
        patience, began = PATIENCE, time.monotonic()
        for attempt in range(patience.attempts):
            try:
                return work()
            except Exception as error:
                judged = self._judge(error)
                if judged is None:
                    raise StoreError(
                        f"{self.name(key)}: {_one_line(error)}; next: ckptfix help stores"
                    ) from error
                if isinstance(judged, StoreError) and not isinstance(error, StoreError):
                    raise StoreError(f"{self.name(key)}: {judged}") from error
                if not has_condition and isinstance(judged, Refused | FileNotFoundError):
                    raise StoreError(
                        f"{self.name(key)}: the store refused the request ({_one_line(error)}); "
                        "next: ckptfix help stores"
                    ) from error
                if judged is error and not isinstance(error, Temporary):
                    raise
                if not isinstance(judged, Temporary):
                    raise judged from error
                if attempt + 1 == patience.attempts:
                    seconds = time.monotonic() - began
                    raise StoreError(
                        f"{self.name(key)}: the store failed to answer {patience.attempts} times "
                        f"in {seconds:.0f} s ({judged}), so the work could not finish; next: run "
                        "the same command again later"
                    ) from error
            wait = min(patience.first_wait * 2**attempt, patience.longest_wait)
            time.sleep(wait * random.uniform(0.5, 1))
        raise AssertionError("the last attempt returns or raises")


def part_of_file(file: IO[bytes], path: Path, offset: int, length: int) -> bytes:
    """Return a part of a file that is uploaded. Raises ChangedError where the file ends before."""
    data = os.pread(file.fileno(), length, offset)
    if len(data) != length:
        raise ChangedError(f"{path}: it became shorter while it was uploaded")
    return data


def together(
    tasks: Sequence[_T] | range, do: Callable[[Any], object], most: int = CONCURRENT
) -> None:
    """Do every task in one of at most ``most`` threads; the first error ends all, and is raised."""

    @contextmanager
    def worker(control: Control) -> Iterator[Callable[[Any], object]]:
        yield do

    run_all(tasks, worker, threads=max(1, min(most, len(tasks))))


def seconds_to_read(length: int) -> float:
    """Return a minute, and 4 s a MiB: what only trickles is as good as cut."""
    return PATIENCE.answer + length / (256 << 10)


def quoted(etag: str) -> str:
    """Return an ETag as a header of a request has it."""
    return f'"{etag}"'


def md5(data: bytes | memoryview) -> str:
    """Return the MD5 of bytes as S3 shows it in an ETag."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _folder(below: str) -> str:
    return f"{below.rstrip('/')}/" if below else ""


def _info(info: Mapping[str, Any]) -> ObjectInfo:
    """Return the facts that the listing of any library of fsspec holds."""
    names = ("ETag", "etag", "generation", "sha256", "blob_id", "created")
    etag = next((str(info[name]) for name in names if info.get(name)), "")
    if not any(info.get(name) for name in names[:-1]) and info.get("created"):
        etag = str(nanoseconds(info["created"]))  # of memory://, which writes the time in two ways
    times = ("LastModified", "last_modified", "mtime", "updated", "created")
    return ObjectInfo(
        info["size"],
        etag.strip('"'),
        nanoseconds(next((info[name] for name in times if info.get(name)), 0)),
    )


def nanoseconds(moment: Any) -> int:
    """Return a time as nanoseconds since 1970: of a datetime, seconds, or the text of ISO 8601."""
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment.replace("Z", "+00:00"))
        except ValueError:
            return 0
    if isinstance(moment, datetime):
        moment = (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    return int(moment * 1_000_000_000)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return escape(text) or type(error).__name__
