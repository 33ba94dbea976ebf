"""A folder that is uploaded below a prefix of a store: concurrently, compared, and its commit
marker last.

A new prefix is written directly. Where the names exist already, everything is uploaded below
``.ckptfix/new-NUMBER/`` first, and the old checkpoint stays as it is; then the store copies each
object over its name. In both cases ``upload.json`` is written before the first object changes, and
``committed.json`` after the last one (``storage.markers``). Killed at any request, the prefix holds
the old checkpoint, the new one, or one that says that it is not complete.

On a mount of an object store (``storage.mounts``) files are written in the same way.
"""

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from msgspec import Struct

from ckptfix.errors import ChangedError, FormatError, OperationError, UsageError
from ckptfix.storage.files import store_of
from ckptfix.storage.markers import (
    NEVER_UPLOADED,
    UPLOAD,
    Begun,
    Commit,
    Uploaded,
    begun_now,
    parse_begun,
    parse_commit,
)
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import COMMITTED, JOURNAL, MANIFEST, cause, list_folder, shell_path
from ckptfix.storage.stores import (
    ABSENT,
    ANY,
    Expected,
    ObjectInfo,
    ObjectRange,
    Piece,
    Store,
    is_url,
    open_store,
    together,
)
from ckptfix.wording import count_of, human_size, list_names

_NEW = f"{JOURNAL}/new-"
_AT_ONCE = 8
"""Files that are hashed and uploaded at once; a large one goes up in several parts at once by
itself.
"""

_BLOCK = 8 << 20


class UploadPlan(Struct, frozen=True, kw_only=True):
    """The decisions about an upload, for every process that takes part in it.

    ``upload``: its number. ``files``: everything that it writes but the two records, with the
    sizes. ``is_direct``: objects get their names at once, as nothing complete is there. ``seen``:
    the ETags of the objects that were there. ``stale``: objects of an older checkpoint that go.
    """

    upload: str
    files: Mapping[str, int]
    is_direct: bool
    seen: Mapping[str, str]
    stale: tuple[str, ...]

    def key(self, name: str) -> str:
        """Return the key under which a file is uploaded."""
        return name if self.is_direct else f"{_NEW}{self.upload}/{name}"

    def expected(self, place: Store, key: str) -> str | Expected:
        """Return the state in which a key must be to be written or deleted: what came since is of
        somebody else.

        What lies in the journal is ckptfix's own: a manifest that ``seal`` wrote since is about the
        old checkpoint.
        """
        is_own = not self.is_direct and key.startswith(f"{JOURNAL}/") and not key.startswith(_NEW)
        return self.seen.get(key) or ABSENT if place.abilities.conditions and not is_own else ANY


class MountedFolder(Store):
    """A folder on a mount of an object store: each file is written once, from its beginning, and
    closed.

    There are no ETags, so that what another program writes meanwhile is found by its size alone.
    """

    def _opened(self) -> tuple[None, str]:
        return None, self.url

    def name(self, key: str = "") -> str:
        """Return the path of a file as messages name it."""
        return str(Path(self.url) / key)

    def _list(self, below: str, *, deep: bool) -> Iterator[tuple[str, ObjectInfo | None]]:
        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise error

        for root, _, names in os.walk(self._path(below), onerror=fail):
            for name in names:
                key = os.path.relpath(os.path.join(root, name), self.url)
                if (info := self._stat(key)) is not None:
                    yield key, info

    def _stat(self, key: str) -> ObjectInfo | None:
        try:
            status = os.stat(self._path(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        # To open a pipe waits for a writer.
        if not stat.S_ISREG(status.st_mode):
            return None
        return ObjectInfo(status.st_size, "", status.st_mtime_ns)

    def _read(self, key: str, offset: int, length: int, etag: str) -> bytes:
        with open(self._path(key), "rb") as file:
            return os.pread(file.fileno(), length, offset)

    def _put(self, key: str, data: bytes, expected: str | Expected) -> ObjectInfo:
        return self._save(key, lambda file: file.write(data), expected)

    def _upload(
        self, key: str, path: Path, expected: str | Expected, progress: Progress | None
    ) -> ObjectInfo:
        def fill(file: IO[bytes]) -> None:
            file.writelines(_blocks(path, progress))

        return self._save(key, fill, expected)

    def _compose(
        self,
        key: str,
        pieces: Sequence[Piece],
        expected: str | Expected,
        like: str | None,
        mark: str,
    ) -> ObjectInfo:
        return self._save(key, lambda file: self._bring(pieces, file), expected)

    def _save(
        self, key: str, fill: Callable[[IO[bytes]], object], expected: str | Expected
    ) -> ObjectInfo:
        self._ensure(key, expected)
        place = Path(self._path(key))
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as file:
            fill(file)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        return self._written(key, size)

    def _delete(self, key: str, expected: str | Expected) -> None:
        """Delete a file, and the folders above it that are empty then."""
        with suppress(FileNotFoundError):
            os.unlink(self._path(key))
        with suppress(OSError):
            for parent in Path(self._path(key)).parents:
                os.rmdir(parent)

    def _judge(self, error: Exception) -> Exception | None:
        return error if isinstance(error, OSError) else super()._judge(error)


def place_at(path: Path | str) -> Store:
    """Return the place at a URL, at a path in a store, or at a path on a mount."""
    if is_url(path):
        return open_store(str(path))
    return store_of(Path(path)) or MountedFolder(str(Path(path)))


def put_in_store(place: Store, folder: Path, *, name: str | None, overwrite: bool) -> None:
    """Upload a complete folder, or one file of it, which is complete by itself. Raises
    ChangedError, OperationError.

    Without ``overwrite`` nothing may be there but what an upload left that was cut short.
    """
    if name is not None:
        place.upload(name, folder / name, expected=ABSENT)
        return
    upload_folder(place, folder, stale=objects_replaced(place, overwrite=overwrite))


def objects_replaced(place: Store, *, overwrite: bool) -> list[str]:
    """Return the objects that a new checkpoint replaces at a place: all are of an earlier upload by
    ckptfix.

    What an upload left that was cut short may be replaced without ``overwrite``. Raises UsageError
    for anything else.
    """
    there = place.list()
    begun, commit = _records(place, there)
    is_rest = begun is not None and (commit is None or commit.upload != begun.upload)
    if not there or is_rest:
        return []  # begin_upload knows what the rest is
    if not overwrite:
        raise UsageError(
            f"{place.name()} already has {count_of(len(there), 'object')}; choose another path, or "
            "add --overwrite"
        )
    changed = changed_since(place)
    if changed is not None:
        changed = [name for name in changed if name != MANIFEST]  # seal writes it
    what = (
        "it has no commit marker"
        if changed is None
        else f"changed since the upload: {list_names(changed)}"
    )
    if commit is None or changed:
        raise UsageError(
            f"{place.name()}: --overwrite replaces only an unchanged upload of ckptfix ({what}); "
            "choose another path, or delete it yourself"
        )
    return [*commit.objects, MANIFEST]


def staged_files(folder: Path) -> dict[str, int]:
    """Return every file of a folder with its size, but those about the folder itself; through links
    to folders, too.

    Raises OperationError for what an upload would lack, OSError.
    """

    def fail(error: OSError) -> None:
        raise error

    listing = list_folder(folder)
    found = {}
    for name, why in listing.files.items():
        try:
            status = os.stat(folder / name)
        except OSError as error:
            is_broken = error.errno == errno.ENOENT and os.path.islink(folder / name)
            why = "is a broken link" if is_broken else cause(folder / name, error)
        if why is None and not stat.S_ISREG(status.st_mode):
            why = "is not a file"
        if why is not None:
            raise OperationError(
                f"{folder / name}: {why}, so it cannot be uploaded; nothing was uploaded; next: "
                "replace it with a regular file or folder, or remove it"
            )
        found[name] = status.st_size
    for journal in (JOURNAL, *listing.journals):
        if not os.path.lexists(folder / journal):
            continue
        for root, _, names in os.walk(folder / journal, onerror=fail):
            for name in names:
                path = os.path.join(root, name)
                found[os.path.relpath(path, folder)] = os.stat(path).st_size
    return {name: size for name, size in sorted(found.items()) if name not in NEVER_UPLOADED}


def begin_upload(place: Store, files: Mapping[str, int], stale: Collection[str] = ()) -> UploadPlan:
    """Decide how files are uploaded, and say in the store that it begins. ``stale``: objects that
    go, if there.

    Raises StoreError, ChangedError when somebody else begins at the same time.
    """
    plan = _planned(place, files, stale)
    if plan.is_direct:
        _say_begun(place, plan)
    return plan


def _planned(place: Store, files: Mapping[str, int], stale: Collection[str]) -> UploadPlan:
    there = place.list()
    seen = {name: info.etag for name, info in there.items()}
    begun, commit = _records(place, there)
    is_cut_short = begun is not None and (commit is None or commit.upload != begun.upload)
    names = {
        *files,
        *(name for name in stale if name not in (UPLOAD, COMMITTED) and not name.startswith(_NEW)),
    }
    if is_cut_short and begun is not None:
        names |= begun.files.keys()  # what an upload left that was cut short is of no checkpoint
        # Nor is what it would have deleted: an old model.safetensors next to the new shards would
        # be loaded.
        names |= _as_committed(commit, there)
    return UploadPlan(
        upload=os.urandom(8).hex(),
        files=dict(files),
        is_direct=is_cut_short or not names & there.keys(),
        seen=seen,
        stale=tuple(sorted((names - files.keys()) & there.keys())),
    )


def send(
    place: Store,
    plan: UploadPlan,
    folder: Path,
    names: Collection[str],
    progress: Progress | None = None,
) -> dict[str, Uploaded]:
    """Upload files, any process its own; return what the store has. Raises StoreError, OSError."""
    sent: dict[str, Uploaded] = {}

    def one(name: str) -> None:
        path = folder / name
        before = os.stat(path)
        digest = hashlib.sha256()
        for block in _blocks(path, None):
            digest.update(block)
        key = plan.key(name)
        info = place.upload(key, path, expected=plan.expected(place, key), progress=progress)
        after = os.stat(path)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise ChangedError(
                f"{path} changed while it was uploaded; next: run the same command again"
            )
        if info.size != before.st_size:
            raise OperationError(
                f"{place.name(key)}: wrong size after the upload (expected {before.st_size} bytes, "
                f"found {info.size})"
            )
        sent[name] = Uploaded(info.size, digest.hexdigest(), info.etag)

    together(sorted(names, key=lambda name: -plan.files[name]), one, _AT_ONCE)
    return sent


def finish_upload(place: Store, plan: UploadPlan, sent: Mapping[str, Uploaded]) -> None:
    """Compare what was sent with what is there, give it its names, delete what is stale, and write
    the commit marker.

    Raises StoreError, ChangedError, OperationError: then the marker is not written.
    """
    lacking = plan.files.keys() - sent.keys()
    if lacking:
        raise OperationError(f"{place.name()}: the upload lacks {count_of(len(lacking), 'file')}")
    _compare(place, {plan.key(name): one for name, one in sent.items()})
    if not plan.is_direct:
        _ensure_as_seen(place, plan)
        _say_begun(place, plan)
        sent = _give_names(place, plan, sent)
    for name in plan.stale:
        try:
            place.delete(name, expected=plan.expected(place, name))
        except ChangedError:  # another object than this upload has seen, unless it has gone
            if place.stat(name) is not None:
                raise
    _compare(place, sent)
    begun = _parsed(place, UPLOAD, parse_begun)
    if begun is None or begun.upload != plan.upload:
        raise ChangedError(
            f"{place.name()}: another upload to this place started meanwhile, so this upload is "
            "not committed; next: wait until the other one has ended, then upload again"
        )
    place.put(COMMITTED, Commit(plan.upload, time.time(), sent).to_bytes())
    # What uploads over an older checkpoint left harms nobody.
    with suppress(OperationError, OSError):
        together([name for name in place.list(JOURNAL) if name.startswith(_NEW)], place.delete)


def upload_folder(
    place: Store,
    folder: Path,
    *,
    stale: Collection[str] = (),
    progress: Progress | None = None,
) -> None:
    """Upload a complete folder, its marker last. Raises OperationError."""
    files = staged_files(folder)
    if not place.abilities.in_place:
        _upload_at_once(place, folder, files, stale)
        return
    plan = begin_upload(place, files, stale)
    finish_upload(place, plan, send(place, plan, folder, files, progress))


def _upload_at_once(
    place: Store, folder: Path, files: Mapping[str, int], stale: Collection[str]
) -> None:
    """Upload a complete folder with its records as one commit."""
    plan = _planned(place, files, stale)

    def records(facts: Mapping[str, tuple[ObjectInfo, str]]) -> dict[str, bytes]:
        sent = {
            name: Uploaded(info.size, sha256, info.etag) for name, (info, sha256) in facts.items()
        }
        return {
            UPLOAD: begun_now(plan.upload, files).to_bytes(),
            COMMITTED: Commit(plan.upload, time.time(), sent).to_bytes(),
        }

    place.replace_all(
        f"ckptfix: upload {folder.name}",
        {name: folder / name for name in files},
        plan.stale,
        records,
        plan.seen,
    )


def remove_checkpoint(place: Store) -> None:
    """Delete a checkpoint, its marker first: half of one is never taken for complete."""
    there = place.list()
    if not place.abilities.in_place:
        seen = {name: info.etag for name, info in there.items()}
        place.replace_all("ckptfix: remove a checkpoint", {}, there, lambda facts: {}, seen)
        return
    begun, _ = _records(place, there)
    if begun is None:
        place.put(UPLOAD, begun_now(os.urandom(8).hex(), {}).to_bytes())
    place.delete(COMMITTED)
    together([name for name in there if name not in (COMMITTED, UPLOAD)], place.delete)
    place.delete(UPLOAD)  # until now it said that the checkpoint is not complete


def changed_since(place: Store) -> list[str] | None:
    """Return what came, changed or went since the commit marker; None without one."""
    there = place.list()
    _, commit = _records(place, there)
    if commit is None:
        return None
    same = _as_committed(commit, there)
    every = {
        name for name in there if name not in (UPLOAD, COMMITTED) and not name.startswith(_NEW)
    }
    return sorted((every | commit.objects.keys()) - same)


def _as_committed(commit: Commit | None, there: Mapping[str, ObjectInfo]) -> set[str]:
    """Return the objects of a commit that are still those that were uploaded."""
    return {
        name
        for name, one in (commit.objects.items() if commit is not None else ())
        if name in there and (there[name].size, there[name].etag) == (one.size, one.etag)
    }


def not_uploaded(
    place: Store, folder: Path, error: BaseException, parts: Sequence[str] = ()
) -> str:
    """Return the message about an upload that failed: where the complete folder lies, and how to
    upload it.

    ``parts``: HOST:FOLDER of each disk, where several of them hold a part.
    """
    upload = f"ckptfix upload {shell_path(folder)} {shell_path(place.url)}"
    where = f"the complete checkpoint is in {folder}; next: {upload}"
    if len(parts) > 1:
        where = (
            f"its parts are in {', '.join(parts)}; next: copy them all into {folder}, then: "
            f"{upload}"
        )
    why = str(error) or type(error).__name__
    return (
        f"{place.name()}: the upload stopped, so the checkpoint there is not committed: {why}; "
        f"{where}"
    )


def _say_begun(place: Store, plan: UploadPlan) -> None:
    expected = (plan.seen.get(UPLOAD) or ABSENT) if place.abilities.conditions else ANY
    place.put(UPLOAD, begun_now(plan.upload, plan.files).to_bytes(), expected=expected)


def _give_names(
    place: Store, plan: UploadPlan, sent: Mapping[str, Uploaded]
) -> dict[str, Uploaded]:
    """Have the store copy every new object over its name, and keep it until the end."""
    named: dict[str, Uploaded] = {}

    def one(name: str) -> None:
        new, size = f"{_NEW}{plan.upload}/{name}", sent[name].size
        pieces = [ObjectRange(new, 0, size, sent[name].etag)]
        expected = plan.expected(place, name)
        try:
            info = (
                place.compose(name, pieces, expected=expected)
                if size
                else place.put(name, b"", expected=expected)
            )
        except ChangedError as error:
            raise ChangedError(
                f"{place.name(name)}: another program wrote this object while the objects were "
                "being replaced; it was left alone, but the next upload will replace it: copy it "
                "elsewhere first if anybody needs it"
            ) from error
        named[name] = sent[name]._replace(etag=info.etag)

    together(sorted(sent, key=lambda name: -sent[name].size), one, _AT_ONCE)
    return named


def _ensure_as_seen(place: Store, plan: UploadPlan) -> None:
    """Raise ChangedError when somebody wrote, since the upload began, what it is about to replace
    or delete.

    Until here the old checkpoint is complete. A write after this is refused by the store where it
    knows conditions.
    """
    there = {name: info.etag for name, info in place.list().items()}
    for name in (*plan.files, *plan.stale):
        was, now = plan.seen.get(name), there.get(name)
        if (
            not name.startswith(f"{JOURNAL}/")
            and was != now
            and (now is not None or name in plan.files)
        ):
            did = "deleted" if now is None else "wrote"
            raise ChangedError(
                f"{place.name(name)}: another program {did} this object since the upload began, so "
                "nothing was replaced"
            )


def _compare(place: Store, expected: Mapping[str, Uploaded]) -> None:
    """Raise ChangedError unless every object is as sent; a listing may be late, so ask again."""
    there = place.list()
    for key, one in expected.items():
        found = there.get(key)
        if found is None or (found.size, found.etag) != (one.size, one.etag):
            found = place.stat(key)
        if found is None or (found.size, found.etag) != (one.size, one.etag):
            have = (
                "no object"
                if found is None
                else f"{human_size(found.size)}, ETag {found.etag or 'none'}"
            )
            raise ChangedError(
                f"{place.name(key)}: another program is writing to this place (expected "
                f"{human_size(one.size)}, ETag {one.etag or 'none'}; found {have}); next: wait "
                "until it has ended, then upload again"
            )


def _records(place: Store, there: Mapping[str, ObjectInfo]) -> tuple[Begun | None, Commit | None]:
    begun = _parsed(place, UPLOAD, parse_begun) if UPLOAD in there else None
    return begun, _parsed(place, COMMITTED, parse_commit) if COMMITTED in there else None


def _parsed(place: Store, key: str, parse: Callable[[bytes], Any]) -> Any:
    """Return a record, None without one that can be understood: it commits nothing."""
    info = place.stat(key)
    if info is None:
        return None
    try:
        return parse(place.read(key, 0, info.size, etag=info.etag or None))
    except FormatError:
        return None


def _blocks(path: Path, progress: Progress | None) -> Iterable[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block
            if progress is not None:
                progress(len(block))
