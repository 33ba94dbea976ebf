"""Checkpoints in a store, fetched to this disk before anything of them is loaded, compared, and
once per machine.

Loaders read files, and a load must not begin before all of it is here. The processes of one machine
share a copy: the first one fetches it under a lock, the others wait for that, and the last one
removes it. A kill leaves no lock, only its empty file.
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

from msgspec import Struct

from ckptfix.errors import ChangedError, FormatError, OperationError, UsageError
from ckptfix.storage.atomic import read_file
from ckptfix.storage.files import StorePath
from ckptfix.storage.listings import Listing
from ckptfix.storage.markers import UPLOAD, Uploaded, not_committed, parse_begun, parse_commit
from ckptfix.storage.object_journal import is_replacing
from ckptfix.storage.parallel import Progress
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


class Remote(Struct, frozen=True):
    """A checkpoint, or one file, in a store: its objects, and what the commit marker says of
    them. ``only``: the one file, where the objects are those of its folder.
    """

    store: Store
    objects: Mapping[str, ObjectInfo]
    committed: Mapping[str, Uploaded]
    only: str = ""

    @property
    def nbytes(self) -> int:
        """The size of all objects."""
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
            root = stack.enter_context(copied(_look(str(path).rstrip("/"))))
        except Exception as raised:
            error = raised
        ranks.agree(error, f"fetching {path}")
        yield root
        ranks.wait()  # a copy stays until every process of its machine has read it


def as_listed(place: StorePath) -> Remote:
    """Return all objects of a URL that was opened, of a complete checkpoint or not."""
    files = place.files
    if place.key and place.info is not None:
        return Remote(files.store, {place.key: place.info}, {}, place.key)
    committed: Mapping[str, Uploaded] = {}
    # A damaged marker proves nothing: ``check`` reports it.
    with suppress(FormatError, FileNotFoundError):
        committed = parse_commit(read_file(place / COMMITTED)).objects
    return Remote(files.store, files.objects_below(""), committed)


@contextmanager
def copied(remote: Remote, progress: Progress | None = None) -> Iterator[Path]:
    """Yield the path of a copy on this disk, which goes when no process of the machine uses it.

    Raises OperationError, ChangedError, OSError.
    """
    folder = _own_folder() / remote.identity
    complete, target = folder / _COMPLETE, folder / PurePosixPath(remote.store.url).name
    _sweep(folder)
    with _lock_of(folder) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            while not complete.exists():
                # Nobody waits to be alone: others may use the copy by then, and wait for this
                # process. A change of the lock lets others in between, so each looks again.
                if _is_alone(lock) and not complete.exists():
                    _remove(folder)
                    folder.mkdir(mode=0o700, exist_ok=True)
                    _fetch(remote, target, progress)
                    complete.touch()
                fcntl.flock(lock, fcntl.LOCK_SH)
            yield target / remote.only
        finally:
            if _is_alone(lock):
                _remove(folder)


@contextmanager
def _lock_of(folder: Path) -> Iterator[int]:
    """Yield the open lock file of a copy. It is empty and stays: another process may have opened
    it before it is removed, and then the two would have locks of their own.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(folder.with_suffix(".lock"), flags, 0o600)
    try:
        yield lock
    finally:
        os.close(lock)


def _is_alone(lock: int) -> bool:
    """Return whether nobody else fetches or uses a copy; nobody can begin to then. If somebody
    does, this process has no lock any more.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(folder: Path) -> None:
    with suppress(OSError):
        # First: a process that is killed here must not leave a part as a complete copy.
        (folder / _COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(current: Path) -> None:
    """Remove the copies of other checkpoints that killed processes left: nobody holds their locks
    any more.
    """
    for folder in current.parent.iterdir():
        if folder != current and folder.is_dir():
            with suppress(OSError), _lock_of(folder) as lock:
                if _is_alone(lock):
                    _remove(folder)


def _own_folder() -> Path:
    """Return the folder of this user's copies. A pickle in it would be executed, so nobody else may
    write there.
    """
    folder = staging_folder() / f"ckptfix-copies-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = os.lstat(folder)
    if folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OperationError(
            f"other users may be able to change {folder}, so nothing is loaded from it; next: "
            f"export {STAGING_VARIABLE}=FOLDER, a folder that only you can access"
        )
    return folder


def _look(url: str) -> Remote:
    """Return what a URL holds. Raises UsageError when its records say that it is not complete."""
    store = open_store(url)
    listing = Listing(store.list().items(), len(os.fsencode(store.url)))
    objects = dict(listing)
    if not objects and (one := store.stat("")) is not None:
        return Remote(store, {"": one}, {})
    if not objects:
        raise UsageError(
            f"{store.name()} contains no objects; next: ckptfix check -r {os.path.dirname(url)}"
        )
    for key, misfit in listing.misfits.items():
        # Many tools mark a folder by an object of no bytes.
        if misfit.info.size:
            raise OperationError(
                f"{store.name(key)}: not a valid file name ({misfit.why}); nothing was fetched"
            )
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
    return Remote(store, needed, {} if commit is None else commit.objects)


def _whole(store: Store, key: str, info: ObjectInfo) -> bytes:
    return store.read(key, 0, info.size, etag=info.etag or None)


def _fetch(remote: Remote, target: Path, progress: Progress | None) -> None:
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

    lock = threading.Lock()

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
        if progress is not None:
            with lock:
                progress(length)

    together(ranges, one, _AT_ONCE)
    together(
        [key for key in remote.committed if key in remote.objects],
        lambda key: _compare(remote, key, target),
        4,
    )
    for key, info in remote.objects.items():
        os.utime(target / key if key else target, ns=(info.modified_ns, info.modified_ns))


def _compare(remote: Remote, key: str, target: Path) -> None:
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
