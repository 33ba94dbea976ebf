"""A repaired copy of a checkpoint below another prefix of its bucket, for checkpoints that a job is
reading.

The store composes every object, also those that stay as they are. The record of the upload is
written first and the commit marker last, so that nobody takes a copy that was cut short for a
checkpoint.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import PurePosixPath
from typing import NamedTuple

from ckptfix.errors import ChangedError, CkptfixError, OperationError, UsageError
from ckptfix.storage.edits import Edit
from ckptfix.storage.files import Prefix, Shown
from ckptfix.storage.markers import UPLOAD, Commit, begun_now
from ckptfix.storage.object_contents import Content, Source, contents_after, joined
from ckptfix.storage.object_drafts import Carriage, carriage_of, like_of, moved_from, pieces_of
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import COMMITTED, JOURNAL, MANIFEST
from ckptfix.storage.recipes import size_of
from ckptfix.storage.stores import (
    ABSENT,
    ObjectInfo,
    Store,
    open_store,
    together,
)
from ckptfix.wording import count_of, escape

_AT_ONCE = 8


class Places(NamedTuple):
    """The bucket, and the prefixes of checkpoint and copy: "", or with a slash at the end."""

    bucket: Store
    source: str
    copy: str


def places_of(source: str, output: str) -> Places:
    """Return the places of a copy. Raises UsageError when the store cannot copy there."""
    output = output.rstrip("/")
    (scheme, bucket, path), (to_scheme, to_bucket, to_path) = map(_parts, (source, output))
    if (scheme, bucket) != (to_scheme, to_bucket):
        raise UsageError(
            f"{escape(output)}: a store can only copy within one bucket (expected "
            f"{scheme}://{bucket}/...); next: name another prefix of {scheme}://{bucket}, or copy "
            "the checkpoint there and repair the copy"
        )
    source_prefix, copy_prefix = (f"{one}/" if one else "" for one in (path, to_path))
    if source_prefix.startswith(copy_prefix) or copy_prefix.startswith(source_prefix):
        raise UsageError(
            f"{escape(output)} overlaps the source; next: name another prefix, such as "
            f"{escape(source)}-repaired"
        )
    return Places(open_store(f"{scheme}://{bucket}"), source_prefix, copy_prefix)


def check_free(output: str) -> None:
    """Raise UsageError when there is any object below the URL of a copy."""
    store = open_store(output.rstrip("/"))
    if there := store.list():
        raise UsageError(
            f"{store.name()} already has {count_of(len(there), 'object')}; next: name an empty prefix"
        )


def copy_repaired(
    files: Prefix,
    output: str,
    edits: Sequence[Edit],
    *,
    indexes: Iterable[PurePosixPath],
    verify: Callable[[], None],
    transfer: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the checkpoint of a prefix below ``output`` as it is after the edits; ``verify`` proves
    the new objects.

    Raises UsageError when objects are there, ChangedError when an object of the source is another
    one than was listed, OperationError when it could not finish. Then no object of the copy is
    left, or no commit marker.
    """
    source = files.url
    places = places_of(source, output)
    infos = files.objects_below("")
    after = contents_after(edits, {key: info.size for key, info in infos.items()}).by_path
    contents = _contents(infos, after)
    if not (places.bucket.abilities.composes or transfer):
        travel = carriage_of(places.bucket, contents.values())
        raise UsageError(
            f"{escape(source)}: this store cannot copy parts of objects, so their bytes must be "
            f"transferred: {travel}; nothing was written; next, to allow this: run the same "
            "command with --transfer"
        )
    check_free(output)
    number = secrets.token_hex(8)
    sizes = {name: size_of(content) for name, content in contents.items()}
    made: dict[str, ObjectInfo] = {}

    def put(name: str, data: bytes) -> None:
        made[name] = places.bucket.put(f"{places.copy}{name}", data, expected=ABSENT)

    def compose(name: str) -> None:
        content = contents[name]
        like = like_of(content) or (name if name in infos else None)
        made[name] = places.bucket.compose(
            f"{places.copy}{name}",
            pieces_of(content, infos, before=places.source) or [b""],
            expected=ABSENT,
            like=None if like is None else f"{places.source}{like}",
        )
        if progress is not None:
            progress(sizes[name])

    late = {str(path) for path in indexes}
    try:
        put(UPLOAD, begun_now(number, sizes).to_bytes())
        together(sorted(contents.keys() - late - {MANIFEST}), compose, _AT_ONCE)
        together(sorted(contents.keys() & late - {MANIFEST}), compose, _AT_ONCE)
        if MANIFEST in contents:
            compose(MANIFEST)
        with _shown(files, output, after, made):
            verify()
        put(COMMITTED, Commit(number, time.time(), {}).to_bytes())
    except BaseException as error:
        words = _deleted(places, made)
        if isinstance(error, ChangedError):
            raise ChangedError(f"{error}; {words}") from error
        if isinstance(error, CkptfixError):
            raise OperationError(f"{error}; {words}") from error
        raise


def carriage_of_copy(
    store: Store, edits: Sequence[Edit], infos: Mapping[str, ObjectInfo]
) -> Carriage:
    """Return the bytes that a copy costs. Raises OperationError for impossible edits."""
    after = contents_after(edits, {key: info.size for key, info in infos.items()}).by_path
    return carriage_of(store, _contents(infos, after).values())


def _contents(
    infos: Mapping[str, ObjectInfo], after: Mapping[PurePosixPath, Content | None]
) -> dict[str, Content]:
    """Return every object of a copy after the edits."""
    contents: dict[str, Content] = {
        key: joined((Source(key, 0, info.size),))
        for key, info in infos.items()
        if key == MANIFEST or not key.startswith(f"{JOURNAL}/")
    }
    for path, content in after.items():
        contents.pop(str(path), None)
        # The copy gets a marker of its own at its end.
        if content is not None and str(path) != COMMITTED:
            contents[str(path)] = content
    return contents


def _shown(
    files: Prefix,
    output: str,
    after: Mapping[PurePosixPath, Content | None],
    made: Mapping[str, ObjectInfo],
) -> AbstractContextManager[None]:
    """Show the new objects at the changed names; others have the bytes of the source."""
    # The records of the source's upload are about other names; the copy gets its own.
    names: dict[str, Shown | None] = {UPLOAD: None, COMMITTED: None}
    infos = files.objects_below("")
    for path, content in after.items():
        name = str(path)
        if content is None:
            names[name] = None
        elif name != COMMITTED:
            names[name] = Shown(name, made[name], moved_from(content, infos))
    return files.showing("", names, store=open_store(output.rstrip("/")))


def _deleted(places: Places, made: Mapping[str, ObjectInfo]) -> str:
    """Delete what was written of a copy, its record last, and say what is left."""
    left = 0
    for name in sorted(made, key=lambda name: name == UPLOAD):
        try:
            places.bucket.delete(f"{places.copy}{name}", expected=made[name].etag)
        except CkptfixError:
            left += 1
    where = f"{places.bucket.name(places.copy)}"
    with suppress(CkptfixError):
        left = len(places.bucket.list(places.copy))
    return (
        f"{where} still has {count_of(left, 'object')} without a commit marker"
        if left
        else f"{where} is empty"
    )


def _parts(url: str) -> tuple[str, str, str]:
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    return scheme, bucket, path.strip("/")
