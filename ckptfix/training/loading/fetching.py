"""Checkpoints in a store, fetched to this disk before anything of them is loaded, compared, and
once per machine.

Loaders read files, and a load must not begin before all of it is here. The processes of one machine
share a copy: the first one fetches it under a lock, the others wait for that, and the last one
removes it. A kill leaves no lock.
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

from msgspec import Struct

from ckptfix.errors import ChangedError, OperationError, UsageError
from ckptfix.storage.markers import UPLOAD, Uploaded, not_committed, parse_begun, parse_commit
from ckptfix.storage.object_journal import is_replacing
from ckptfix.storage.paths import COMMITTED, JOURNAL, shell_path
from ckptfix.storage.staged import STAGING_VARIABLE, staging_folder
from ckptfix.storage.stores import ObjectInfo, Store, is_url, open_store, together
from ckptfix.training.ranks import Ranks
from ckptfix.wording import human_size

_RANGE = 16 << 20
_AT_ONCE = 16
"""Ranges that are fetched at once: 256 MiB are in memory at most."""

_COMPLETE = "complete"

_OF_A_CHANGE = re.compile(rf"{re.escape(JOURNAL)}/(?:\d+\.objects|new-[^/]*)/")
"""Folders that a repair keeps for its undo, or a killed upload left: as large as a checkpoint,
never loaded.
"""

_log = logging.getLogger("ckptfix")


class _Remote(Struct, frozen=True):
    """A checkpoint, or one file, in a store: its objects, and what the commit marker says of
    them.
    """

    store: Store
    objects: Mapping[str, ObjectInfo]
    committed: Mapping[str, Uploaded]

    @property
    def nbytes(self) -> int:
        return sum(info.size for info in self.objects.values())

    @property
    def identity(self) -> str:
        """A name for these objects in these states: no two different ones ever share a copy."""
        states = [(key, info.size, info.etag) for key, info in sorted(self.objects.items())]
        return hashlib.sha256(repr((self.store.url, states)).encode()).hexdigest()[:24]


@contextmanager
def fetched(path: str | os.PathLike[str], ranks: Ranks | None = None) -> Iterator[Path]:
    """Yield a path on this disk: the one that is given, or a copy of what a URL holds, which is
    removed at the end.

    ``ranks``: the processes that load together: where one of them cannot fetch it, all raise.
    Raises UsageError where the URL holds no complete checkpoint, OperationError when it cannot be
    fetched.
    """
    if not is_url(path):
        yield Path(path).expanduser()
        return
    ranks = ranks or Ranks(None)
    with ExitStack() as stack:
        root, error = Path(), None
        try:
            root = stack.enter_context(_fetched(str(path)))
        except Exception as raised:
            error = raised
        ranks.agree(error, f"fetching {path}")
        yield root
        ranks.wait()  # a copy stays until every process of its machine has read it


@contextmanager
def _fetched(path: str) -> Iterator[Path]:
    remote = _look(path.rstrip("/"))
    folder = _own_folder() / remote.identity
    _sweep(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / PurePosixPath(remote.store.url).name
    done = False
    while not done:
        with _locked(folder) as lock:
            if not lock.is_current():
                continue  # another process removed the copy while this one waited
            if not (folder / _COMPLETE).exists():
                lock.take(fcntl.LOCK_EX)
                if lock.is_current() and not (folder / _COMPLETE).exists():
                    _fetch(remote, target)
                    (folder / _COMPLETE).touch()
                continue
            done = True
            try:
                yield target
            finally:
                if lock.is_last():
                    shutil.rmtree(folder, ignore_errors=True)


class _Lock:
    """The lock of a copy: one process fetches, all use it together, the last one removes it."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    def take(self, kind: int) -> None:
        """Wait until this process has the lock alone, or together with others."""
        fcntl.flock(self._fd, kind)

    def is_current(self) -> bool:
        """Return whether the lock is still that of the folder."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        return False

    def is_last(self) -> bool:
        """Return whether nobody else uses the copy; nobody can begin to then."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


@contextmanager
def _locked(folder: Path) -> Iterator[_Lock]:
    """Yield the lock of a copy, which this process has together with others: they wait for each
    other afterwards.
    """
    path = folder / "lock"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:  # removed just now: the caller looks, and tries again
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        lock = _Lock(path, fd)
        lock.take(fcntl.LOCK_SH)
        yield lock
    finally:
        os.close(fd)


def _sweep(current: Path) -> None:
    """Remove the copies of other checkpoints that killed processes left: nobody holds their locks
    any more.
    """
    for folder in current.parent.iterdir():
        with suppress(OSError):
            if folder == current:
                continue
            fd = os.open(
                folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            try:
                lock = _Lock(folder / "lock", fd)
                if lock.is_last() and lock.is_current():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)


def _own_folder() -> Path:
    """Return the folder of this user's copies. A pickle in it would be executed, so nobody else may
    write there.
    """
    folder = staging_folder() / f"ckptfix-loads-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = os.lstat(folder)
    if folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OperationError(
            f"other users may be able to change {folder}, so nothing is loaded from it; next: "
            f"export {STAGING_VARIABLE}=FOLDER, a folder that only you can access"
        )
    return folder


def _look(url: str) -> _Remote:
    """Return what a URL holds. Raises UsageError when its records say that it is not complete."""
    store = open_store(url)
    objects = store.list()
    if not objects and (one := store.stat("")) is not None:
        return _Remote(store, {"": one}, {})
    if not objects:
        raise UsageError(
            f"{store.name()} contains no objects; next: ckptfix check -r {os.path.dirname(url)}"
        )
    for key in objects:
        parts = key.split("/")
        if (
            not set(parts).isdisjoint({"", ".", ".."})
            or "\0" in key
            or max(map(len, map(os.fsencode, parts))) > 255
        ):
            raise OperationError(f"{store.name(key)}: not a valid file name; nothing was fetched")
    commit = None
    if COMMITTED in objects:
        commit = parse_commit(_whole(store, COMMITTED, objects[COMMITTED]))
    if UPLOAD in objects:
        begun = parse_begun(_whole(store, UPLOAD, objects[UPLOAD]))
        if commit is None or commit.upload != begun.upload:
            sizes = {key: info.size for key, info in objects.items()}
            raise UsageError(
                f"{store.name()} is not a complete checkpoint: {not_committed(begun, sizes)}; "
                f"next: ckptfix.latest_checkpoint({os.path.dirname(url)!r})"
            )
    if is_replacing(store, objects):
        raise UsageError(
            f"{store.name()}: a repair was interrupted or is still running, so only some "
            f"objects are changed; next: ckptfix repair {shell_path(url)}"
        )
    needed = {key: info for key, info in objects.items() if not _OF_A_CHANGE.match(key)}
    return _Remote(store, needed, {} if commit is None else commit.objects)


def _whole(store: Store, key: str, info: ObjectInfo) -> bytes:
    return store.read(key, 0, info.size, etag=info.etag or None)


def _fetch(remote: _Remote, target: Path) -> None:
    """Fetch all objects into a folder, or the one object into a file. Raises OperationError,
    ChangedError, OSError.
    """
    store, free = remote.store, shutil.disk_usage(target.parent).free
    if remote.nbytes > free:
        raise OperationError(
            f"{store.name()}: not enough space in {target.parent} "
            f"({human_size(remote.nbytes)} needed, {human_size(free)} free); next: export "
            f"{STAGING_VARIABLE}=FOLDER, a folder on a larger disk, and load again"
        )
    _log.info("%s: fetching %s to %s", store.name(), human_size(remote.nbytes), target)
    ranges: list[tuple[str, int, int]] = []
    for key, info in remote.objects.items():
        path = target / key if key else target
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(info.size)
        ranges += (
            (key, begin, min(_RANGE, info.size - begin)) for begin in range(0, info.size, _RANGE)
        )

    def one(part: tuple[str, int, int]) -> None:
        key, begin, length = part
        data = store.read(key, begin, length, etag=remote.objects[key].etag or None)
        fd = os.open(target / key if key else target, os.O_WRONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < length:
                done += os.pwrite(fd, memoryview(data)[done:], begin + done)
        finally:
            os.close(fd)

    together(ranges, one, _AT_ONCE)
    together(
        [key for key in remote.committed if key in remote.objects],
        lambda key: _compare(remote, key, target),
        4,
    )


def _compare(remote: _Remote, key: str, target: Path) -> None:
    """Raise ChangedError when a file that nobody changed since its upload, by its ETag, has other
    bytes than then.
    """
    sent = remote.committed[key]
    if (remote.objects[key].size, remote.objects[key].etag) != (sent.size, sent.etag):
        return  # repaired or sealed since
    digest = hashlib.sha256()
    with (target / key).open("rb") as file:
        while block := file.read(_RANGE):
            digest.update(block)
    if digest.hexdigest() != sent.sha256:
        raise ChangedError(
            f"{remote.store.name(key)}: the download differs from the upload (expected sha256 "
            f"{sent.sha256}, found {digest.hexdigest()}); next: load again; if it fails "
            "again, load an older checkpoint"
        )
