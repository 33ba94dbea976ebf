"""Checkpoints that are written to an object store: by ``upload``, and by ``migrate`` and
``salvage`` with a URL.

All are complete on this machine first; the commit marker is the last object.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import asdict

from ckptfix.checkpoint.folder import scan_folder
from ckptfix.checkpoint.manifest import missing_files, read_manifest
from ckptfix.diagnosis.resumable import mixed
from ckptfix.diagnosis.target import ensure_checkpoint
from ckptfix.errors import FormatError, OperationError, TeamError, UsageError
from ckptfix.reports import Serialized
from ckptfix.storage.executor import THREADS, Done, Executor
from ckptfix.storage.files import is_url, local_path
from ckptfix.storage.journal import State, transactions
from ckptfix.storage.launched_ranks import in_folder_of_leader
from ckptfix.storage.markers import DESTINATION, Uploaded
from ckptfix.storage.mounts import object_mount_of
from ckptfix.storage.opened import errors_with_place, with_place
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import command, existing, list_folder, shell_path
from ckptfix.storage.results import Units
from ckptfix.storage.staged import (
    STAGING_VARIABLE,
    is_temporary,
    release,
    staging_folder,
    sweep,
    temporary_name,
)
from ckptfix.wording import Line, Printable, count_of, escape, human_size, line

if TYPE_CHECKING:
    from ckptfix.storage.stores import Store

_R = TypeVar("_R")


class UploadReceipt(Printable, Serialized, Struct, frozen=True, kw_only=True):
    """Receipt of ``upload``. ``is_left_over``: the folder was the rest of a save, and can be
    removed now.
    """

    json_keys: ClassVar = "path url files bytes=nbytes"

    path: Path
    url: str
    files: int
    nbytes: int
    is_left_over: bool = False

    @property
    def status(self) -> int:
        """Exit status: always 0, as a failed upload raises."""
        return 0

    def lines(self) -> Iterator[Line]:
        """Yield what was uploaded, and the next command."""
        what = f"{count_of(self.files, 'file')}, {human_size(self.nbytes)}"
        yield line(f"uploaded {self.path} to {self.url} and committed it: {what}", colour="green")
        if self.is_left_over:
            yield line(f"the rest of the save is no longer needed: rm -r {shell_path(self.path)}")
        yield line(f"next: ckptfix check {shell_path(self.url)}")


def upload(
    path: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> UploadReceipt:
    """Copy a complete checkpoint folder below a URL, and write its commit marker when all of it is
    there.

    It finishes a save of ``Accelerator`` whose upload failed, from the folder that the error named.
    What an upload that was cut short left there is replaced; anything else only with ``overwrite``,
    and stays complete until the new checkpoint is uploaded.

    Raises UsageError for a folder that is not complete and for a place that is taken,
    OperationError when the upload stopped: then nothing new is committed.
    """
    from ckptfix.storage.uploads import (
        not_uploaded,
        objects_replaced,
        place_at,
        staged_files,
        upload_folder,
    )

    if is_url(path):
        raise _turned_round(str(path), url)
    folder = existing(path)
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; to upload it: name its folder")
    url = local_path(url)
    if not is_url(url) and object_mount_of(url) is None:
        raise UsageError(
            f"{os.fspath(url)} is neither a URL, such as s3://BUCKET/RUN/checkpoint_7, nor a path "
            "on a mounted object store"
        )
    ensure_checkpoint(scan_folder(folder))
    if (why := _incomplete(folder)) is not None:
        raise UsageError(f"{why}; nothing was uploaded; next: {command('check', folder)}")
    place = place_at(str(url).rstrip("/") if is_url(url) else Path(url))
    files = staged_files(folder)
    stale = objects_replaced(place, overwrite=overwrite)
    try:
        upload_folder(place, folder, stale=stale, progress=progress)
    except (OperationError, OSError) as error:
        raise OperationError(not_uploaded(place, folder, error)) from error
    is_left_over = is_temporary(folder.name)
    if is_left_over:
        # The next save on this machine removes the folder.
        (folder / DESTINATION).unlink(missing_ok=True)
    return UploadReceipt(
        path=folder,
        url=place.url,
        files=len(files),
        nbytes=sum(files.values()),
        is_left_over=is_left_over,
    )


def _turned_round(url: str, path: str | os.PathLike[str]) -> UsageError:
    """Return the error for a URL where the folder should be: perhaps the two changed places."""
    if not is_url(path) and os.path.isdir(path):
        return UsageError(
            f"{escape(url)} is a URL: expected the folder first, then the URL; next: ckptfix "
            f"upload {shell_path(Path(path))} {shell_path(url)}"
        )
    return UsageError(
        f"{escape(url)} is a URL: expected a folder on this machine; next, to download a "
        "checkpoint: use the store's own tool, such as aws s3 cp --recursive URL FOLDER; ckptfix "
        f"can also check it in place: ckptfix check {shell_path(url)}"
    )


class NewPlace(NamedTuple):
    """The place of a new checkpoint. ``path``: where it is written on this machine. ``name``: what
    the user called it.
    """

    path: Path
    name: str

    def told(self, result: _R) -> _R:
        """Return a result that names the place as the user does."""
        if self.name == str(self.path):
            return result
        named: _R = with_place(result, self.path, self.name)
        return named


@contextmanager
def open_output(
    given: str | os.PathLike[str], *, overwrite: bool = False, executor: Executor = THREADS
) -> Iterator[NewPlace]:
    """Yield the place of a new checkpoint. For a URL that is on this machine; what is complete
    there at the end of the block is uploaded.

    ``overwrite``: replace what ckptfix uploaded there and nobody changed since. Raises UsageError,
    and at the end OperationError where the upload stopped: then nothing is committed.
    """
    given = local_path(given)
    if not is_url(given):
        yield NewPlace(Path(given), os.fspath(given))
        return
    url = os.fspath(given).rstrip("/")
    with _uploaded(url, overwrite, executor) as local, errors_with_place(local, url):
        yield NewPlace(local, url)


@contextmanager
def _uploaded(url: str, overwrite: bool, executor: Executor) -> Iterator[Path]:
    """Yield a path on this machine; what is there at the end is uploaded, and removed here."""
    from ckptfix.storage.stores import ABSENT, open_store
    from ckptfix.storage.uploads import objects_replaced

    above, _, name = url.rpartition("/")
    place = open_store(url)
    replaced = partial(objects_replaced, place, overwrite=overwrite)
    with _folder_for(name, replaced, executor) as (folder, stale):
        local = folder / name
        yield local
        try:
            if local.is_dir():
                _upload(place, local, stale, executor)
            elif local.exists() and executor.leads:
                open_store(above).upload(name, local, expected=ABSENT)
        except TeamError:
            raise
        except (OperationError, OSError) as error:
            raise OperationError(
                f"{place.name()}: the upload stopped, so the checkpoint there is not committed: "
                f"{error}; next: run the same command again"
            ) from error


@contextmanager
def _folder_for(
    name: str, find_stale: Callable[[], list[str]], executor: Executor
) -> Iterator[tuple[Path, list[str]]]:
    """Yield a new folder on this machine for what is uploaded, and the objects that go; in a team,
    those of the leader.

    Raises OperationError in a process that does not see the leader's folder.
    """
    if not executor.leads:
        folder, stale = executor.told(list)
        remedy = f"next: export {STAGING_VARIABLE}=FOLDER, a folder that all nodes see"
        with in_folder_of_leader(executor, Path(folder), remedy):
            yield Path(folder), stale
        return
    stale = find_stale()
    parent = staging_folder()
    sweep(parent)
    path = parent / temporary_name(Path(name))
    try:
        path.mkdir(mode=0o700)
        executor.told(lambda: [str(path), stale])
        # No other reads there when the folder is removed, unless this one has failed alone.
        with executor.as_one():
            yield path, stale
    finally:
        shutil.rmtree(path, ignore_errors=True)
        release(path)


def _upload(place: "Store", folder: Path, stale: list[str], executor: Executor) -> None:
    """Upload a complete folder, its commit marker last; the processes of a team share the files."""
    from ckptfix.storage.uploads import (
        UploadPlan,
        begin_upload,
        finish_upload,
        send,
        staged_files,
        upload_folder,
    )

    if not executor.has_units:
        upload_folder(place, folder, stale=stale)
        return
    plan = UploadPlan(
        **executor.told(lambda: asdict(begin_upload(place, staged_files(folder), stale)))
    )
    names = list(plan.files)

    def share(numbers: Sequence[int], done: Done, progress: Progress) -> None:
        sent = send(place, plan, folder, [names[number] for number in numbers], progress)
        for number in numbers:
            done(number, sent[names[number]])

    units = Units()
    every = [units.of((folder / name, plan.upload), size) for name, size in plan.files.items()]
    results = executor.map("uploads", every, share, lambda number: None, None)
    if executor.leads:
        finish_upload(
            place, plan, {name: Uploaded(*one) for name, one in zip(names, results, strict=True)}
        )


def _incomplete(folder: Path) -> str | None:
    """Return why a folder is not to be uploaded: a save or a repair that was cut short. None for
    all else.
    """
    if (why := mixed(folder)) is not None:
        return why
    homes = [folder, *((folder / journal).parent for journal in list_folder(folder).journals)]
    for home in homes:
        if any(one.state is State.PENDING for one in transactions(home)):
            return f"{home}: a repair was interrupted and left the files partly changed"
    try:
        manifest = read_manifest(folder)
    except FormatError as error:
        return str(error)
    missing = (
        missing_files(folder, manifest) if manifest is not None and manifest.is_of_a_save else []
    )
    return f"{folder} is not complete: {'; '.join(missing[:3])}" if missing else None
