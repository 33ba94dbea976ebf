"""Images of prefixes: temporary folders with the names, sizes and times of the objects of a store,
and no bytes.

All that lists and looks up files works on an image as on any folder. ``storage.reading`` reads the
bytes from the store, through a cache of blocks. Nothing else may open, change or remove a file of
an image: a guard of the interpreter refuses it, as a hole would read as zeros, and a change would
change nothing in the store.
"""

import errno
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptfix.errors import OperationError, StoreError, UsageError
from ckptfix.storage import reading, staged
from ckptfix.storage.listings import Listing, why_unheld
from ckptfix.storage.object_reading import RANGE, Image, ObjectReader, cache
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import JOURNAL
from ckptfix.storage.reading import Names, Unheld
from ckptfix.storage.stores import ObjectInfo, Store, open_store, together
from ckptfix.wording import count_of, escape, human_size, list_names, show_as

_FOLDER = rf"{re.escape(staged.WRITING)}[^/]*\+stores"
"""The folders of all processes that have images, as a pattern."""


_MEMORY = "/dev/shm"
"""A file system in memory. Measured on ext4: a folder takes 3 ms to be made and removed again,
there 10 us.
"""


def _temporary() -> str:
    """Return the folder for images, which have no bytes: TMPDIR, or one in memory where that is not
    set.
    """
    if not os.environ.get("TMPDIR") and os.access(_MEMORY, os.W_OK | os.X_OK):
        return _MEMORY
    return tempfile.gettempdir()


class _Depth(threading.local):
    """Number of ``changing`` blocks that this thread is in."""

    value = 0


class _Session:
    """The images of this process, in one folder.

    Its path never changes, and what lies below it is guarded until the process ends: a thread that
    still holds a path of an image that another one has removed must not read a hole.
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
                parent = Path(os.path.realpath(_temporary()))
                for one in {
                    parent,
                    Path(tempfile.gettempdir()),
                }:  # downloads are in the second one
                    with suppress(OSError):
                        staged.sweep(one)
                folder = str(parent / staged.temporary_name(Path("stores")))
                show_as(
                    rf"{re.escape(str(parent))}/{_FOLDER}/\d+/([a-z][a-z0-9+.-]*):(?:/|$)",
                    r"\1://",
                )
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

    ``complete``: refuse a prefix with an object whose key no folder can hold; otherwise ``unheld``
    returns it. Raises UsageError when nothing is there, StoreError.
    """
    store = open_store(url)
    listed = store.list()
    only = ""
    if not listed and "/" in url.partition("://")[2].rstrip("/"):
        above, _, only = url.rstrip("/").rpartition("/")
        folder = open_store(above)
        listed = _listed_for_one(folder)
        if only not in listed:
            raise UsageError(
                f"{escape(url)} does not exist: the store has no object of this name, and none "
                "below it"
            )
        store = folder
    elif not listed:
        raise UsageError(f"{escape(url)} is empty: the store has no object there")
    image = _new_image(store, listed, only)
    solid = [one for one in image.unheld if one.size]
    if complete and solid:
        release(image.place)
        raise StoreError(
            f"{escape(url)}: {count_of(len(solid), 'object')} with a key that no folder can hold "
            f"({list_names(one.key for one in solid)}: {solid[0].why}), so not all would be read; "
            "next: give them other keys; delete only what nobody needs"
        )
    return image.place


def listing_of(url: str) -> Path:
    """Open a URL as ``image_of`` does, but make no folder: ``made`` makes that of one checkpoint in
    it.

    A single object has an image all the same. Raises UsageError when nothing is there, StoreError.
    """
    store = open_store(url)
    with _new_top() as top:
        root = _root(top, store)
        listing = Listing(store.listed(), len(os.fsencode(root)))
        if listing or listing.misfits:
            unheld = (
                Unheld(key, one.info.size, root / one.home, one.why)
                for key, one in listing.misfits.items()
            )
            _session.images[str(top)] = Image(
                store=store, root=root, place=root, objects=listing, unheld=tuple(unheld)
            )
            return root
    return image_of(url, complete=False)


def prefixes_in(url: str) -> list[str]:
    """Return the names of the prefixes right below a URL, by one listing. Raises UsageError,
    StoreError.
    """
    return list(open_store(url).folders())


def names_right_below(url: str) -> list[str]:
    """Return the names of the objects and prefixes right below a URL, by one listing. Raises
    UsageError, StoreError.
    """
    objects, prefixes = open_store(url).children()
    return [*objects, *prefixes]


@contextmanager
def made(path: Path) -> Iterator[Path]:
    """Make the folder of a part of a listing, and yield its path; it is removed at the end. Any
    other path as it is.
    """
    full = os.path.abspath(path)
    image = _image_at(full)
    if image is None or not isinstance(image.objects, Listing):
        yield path
        return
    key, objects = image.key_of(full), image.objects
    store, listed = image.store.below(key), objects.below(key) | objects.misfits_below(key)
    with image.lock:
        top = image.tops.pop() if image.tops else _session.new_top()
    try:
        part = _made(store, listed, _root(top, store), "")
    except BaseException:
        _remove(str(top))
        raise
    part.origin = Path(full)
    _session.images[str(top)] = part
    try:
        yield part.root
    finally:
        del _session.images[str(top)]
        cache.forget(str(top))
        with changing():
            shutil.rmtree(part.root)
            # The next part may be a folder above: runs/two after runs/two/more/checkpoint_1 was
            # "File exists".
            for above in takewhile(lambda above: above != top, part.root.parents):
                above.rmdir()
        with image.lock:
            image.tops.append(top)


@contextmanager
def _new_top() -> Iterator[Path]:
    """Make a folder for an image. It goes at once unless there is an image in it then."""
    top = _session.new_top()
    try:
        yield top
    finally:
        if str(top) not in _session.images:
            _remove(str(top))


def _root(top: Path, store: Store) -> Path:
    scheme, _, rest = store.url.partition("://")
    return top / f"{scheme}:" / rest


def _new_image(store: Store, listed: Mapping[str, ObjectInfo], only: str) -> Image:
    with _new_top() as top:
        image = _made(store, listed, _root(top, store), only)
        with _session.lock:
            _session.images[str(top)] = image
    return image


def _listed_for_one(folder: Store) -> dict[str, ObjectInfo]:
    """Return the objects right in a folder, next to the one that was asked for, and those of its
    journal.
    """
    return folder.children()[0] | folder.list(JOURNAL)


def _made(store: Store, listed: Mapping[str, ObjectInfo], root: Path, only: str) -> Image:
    """Make the files of an image."""
    folders: dict[str, None] = {}
    for key in listed:
        parts = key.split("/")[:-1]
        folders.update(
            dict.fromkeys("/".join(parts[:number]) for number in range(1, len(parts) + 1))
        )
    held: dict[str, ObjectInfo] = {}
    unheld: list[Unheld] = []
    with changing():
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir()
        for key, info in listed.items():
            why, home = why_unheld(key, folders, len(os.fsencode(root)))
            (root / home).mkdir(parents=True, exist_ok=True)
            if why:
                unheld.append(Unheld(key, info.size, root / home, why))
                continue
            held[key] = info
            _make_file(root / key, info)
    return Image(
        store=store,
        root=root,
        place=root / only if only else root,
        objects=MappingProxyType(held),
        unheld=tuple(unheld),
    )


def _make_file(path: Path, info: ObjectInfo) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, info.size)
        os.utime(fd, ns=(info.modified_ns, info.modified_ns))
    finally:
        os.close(fd)


def info_at(path: str | os.PathLike[str]) -> ObjectInfo | None:
    """Return the facts about the object at a path of an image, as it was listed; None for any other
    path.
    """
    full = os.path.abspath(path)
    image = _image_at(full)
    return image.objects.get(image.key_of(full)) if image is not None else None


def count_failures(path: str | Path) -> int:
    """Return the number of failures of the store so far."""
    image = _image_at(os.path.abspath(path))
    return len(image.failures) if image is not None else 0


def states_at(folder: Path) -> dict[str, ObjectInfo] | None:
    """Return every object in or below a folder of a listing, None for any other folder."""
    full = os.path.abspath(folder)
    image = _image_at(full)
    if image is None or not isinstance(image.objects, Listing):
        return None
    return image.objects.below(image.key_of(full))


def has_gone(folder: Path) -> bool:
    """Return whether the store has no object any more in or below a folder of a listing. Raises
    StoreError.
    """
    full = os.path.abspath(folder)
    image = _image_at(full)
    if image is None or not isinstance(image.objects, Listing):
        return False
    return next(image.store.below(image.key_of(full)).listed(), None) is None


def objects_at(folder: Path) -> dict[str, ObjectInfo]:
    """Return the objects in or below a folder of an image, as they were listed, by their keys
    relative to it.
    """
    full = os.path.abspath(folder)
    image = _image_at(full)
    if image is None:
        return {}
    start = f"{image.key_of(full)}/".lstrip("/")
    return {key[len(start) :]: info for key, info in image.objects.items() if key.startswith(start)}


class Shown(NamedTuple):
    """Object that a name of an image shows for a while. ``moved``: the name that has shown its
    bytes, None for none.
    """

    key: str
    info: ObjectInfo
    moved: str | None = None


@contextmanager
def showing(
    folder: Path, names: Mapping[str, Shown | None], *, store: Store | None = None
) -> Iterator[None]:
    """Let names of an image show other objects, or nothing, until the end of the block.

    Names and keys are relative to the folder, and keys to ``store`` where it is given. A moved name
    keeps its file, as a rename in a folder does.
    """
    full = os.path.abspath(folder)
    image = _image_at(full)
    assert image is not None
    start = f"{image.key_of(full)}/".lstrip("/")
    before = image.objects, dict(image.aliases)
    aside = image.root.parent / f"{image.root.name}.aside"
    held: dict[str, Path] = {}
    made: dict[Path, Path | None] = {}
    try:
        with changing():
            aside.mkdir()
            moved = {
                one.moved for one in names.values() if one is not None and one.moved is not None
            }
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
                    _make_file(path, one.info)
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
        cache.forget(_top_of(full) or "")


def refresh(folder: Path) -> None:
    """List the prefix of an image anew, after the store was changed. Raises StoreError."""
    full = os.path.abspath(folder)
    image, top = _image_at(full), _top_of(full)
    if image is None or top is None:
        return
    only = image.place.name if image.place != image.root else ""
    listed = _listed_for_one(image.store) if only else image.store.list()
    with _session.lock, changing():
        cache.forget(top)
        shutil.rmtree(image.root)
        _session.images[top] = _made(image.store, listed, image.root, only)


def raise_failure(path: str | Path, *, since: int = 0) -> None:
    """Raise the first failure of the store after the first ``since`` ones.

    It may be one that another thread met, which reads another checkpoint of the same prefix at the
    same time.
    """
    image = _image_at(os.path.abspath(path))
    if image is not None and len(image.failures) > since:
        raise image.failures[since]


def release(path: Path) -> None:
    """Remove the image that a path lies in."""
    full = os.path.abspath(path)
    with _session.lock:
        top = _top_of(full)
        image = _session.images.pop(top, None) if top is not None else None
        if top is None or image is None:
            return
        cache.forget(top)
        for one in (*image.tops, top):
            _remove(str(one))


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
    return [
        key for key in image.objects if not prefix or key == prefix or key.startswith(f"{prefix}/")
    ]


@contextmanager
def materialised(path: Path, *, progress: Progress | None = None) -> Iterator[Path]:
    """Download all files of an image at or below a path, and yield the path of the copies, which go
    at the end.

    For libraries that open files by themselves. Raises OperationError where there is no room for
    them.
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
            f"{path}: {human_size(total)} must be downloaded, {human_size(free)} are free in "
            f"{parent}; next: export TMPDIR=FOLDER_ON_A_LARGER_DISK"
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
        yield root / prefix
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        staged.release(folder)


def download(image: Image, key: str, target: Path, progress: Progress | None) -> None:
    """Write the bytes of an object to a new file. Raises ChangedError when it is another one than
    was listed.
    """
    info = image.objects[key]
    lock = threading.Lock()
    with target.open("xb") as file:
        file.truncate(info.size)

        def take(offset: int) -> None:
            data = image.store.read(
                key, offset, min(RANGE, info.size - offset), etag=info.etag or None
            )
            os.pwrite(file.fileno(), data, offset)
            if progress is not None:
                with lock:
                    progress(len(data))

        together(range(0, info.size, RANGE), take, 16)
    os.utime(target, ns=(info.modified_ns, info.modified_ns))


# The guard: nobody reads a hole or changes an image by mistake.

_GUARDED = {
    "open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink",
    "os.truncate", "os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr",
    "shutil.copyfile", "shutil.copymode", "shutil.copystat", "shutil.copytree", "shutil.move",
    "shutil.rmtree", "shutil.chown",
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
                    f"{path}: this command would {what} the file by itself, and can only do that "
                    "to a file on this machine; nothing was changed; next: download the "
                    "checkpoint first"
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


class _Files:
    """The images of this process, as ``storage.reading`` asks for them."""

    def open(self, path: Path) -> ObjectReader | None:
        """Return the reader of a file of an image, None for any other path. Raises OSError as
        ``open`` does.
        """
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
        if not full.startswith(f"{image.root}/") and full != str(
            image.root
        ):  # of an earlier image with this top
            raise OperationError(f"{path}: this URL is not open any more")
        key = image.key_of(full)
        key = image.aliases.get(key, key)
        info = image.objects.get(key)
        if info is None:
            if os.path.isdir(full):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), full)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), full)
        return ObjectReader(-1, info.size, Path(path), 0, image, top, key)

    def store(self, folder: Path) -> Store | None:
        """Return the store whose prefix a folder is the image of, None for any other folder."""
        image = _image_at(os.path.abspath(folder))
        if image is None:
            return None
        key = image.key_of(os.path.abspath(folder))
        return open_store(f"{image.store.url}/{key}") if key else image.store

    def names(self, folder: Path) -> Names | None:
        """Return the names in a folder of a listing, None for any other folder. Raises
        FileNotFoundError.
        """
        full = os.path.abspath(folder)
        image = _image_at(full)
        if image is None or not isinstance(image.objects, Listing):
            return None
        key = image.key_of(full)
        folders = image.objects.folders(key)
        if folders is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), full)
        return Names([*image.objects.files(key)], [*folders])

    def origin(self, folder: Path) -> Path | None:
        """Return the folder of a listing of which a folder was made, None for any other one."""
        full = os.path.abspath(folder)
        image = _image_at(full)
        if image is None or image.origin is None:
            return None
        return image.origin / image.key_of(full)

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
