"""A save of all processes at once: written to one staging folder, made durable, renamed, and then
others are removed.

An error on one process ends the save on all of them, and nothing of it stays behind.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ckptfix.errors import OperationError
from ckptfix.storage.markers import Uploaded
from ckptfix.storage.paths import MANIFEST
from ckptfix.storage.uploads import (
    UploadPlan,
    begin_upload,
    finish_upload,
    not_uploaded,
    send,
    staged_files,
)
from ckptfix.training.guard import guard_of
from ckptfix.training.ranks import Ranks, meet, timeout_of
from ckptfix.training.saving.save_manifest import with_files
from ckptfix.training.saving.staged_saves import (
    How,
    StagedSave,
    abandon,
    begin,
    commit,
    complete,
    uploaded,
)

_log = logging.getLogger("ckptfix")

Describe = Callable[[], bytes | Callable[[], bytes] | None]
"""Returns the manifest of a staged save, as ``commit`` takes it; None where nothing was written on
this disk.
"""


class _Disk(NamedTuple):
    """The part of a save that one process answers for on its disk: nothing, unless it made the
    staging folder there.
    """

    host: str
    folder: str
    files: Mapping[str, int]


class JointSave:
    """One save. Every process makes one, with the same ``what``, the name of the call in messages.

    Each calls ``meet``, writes its files in a block of ``staged``, and calls ``put_in_place``.
    ``undo`` is called on every process when the save has failed.
    """

    def __init__(self, accelerator: Any, what: str, *, undo: Callable[[], object]) -> None:
        self._accelerator = accelerator
        self._what = what
        self._undo = undo
        self._ranks = Ranks(accelerator)
        self._is_on_nodes = False
        self._staging: StagedSave
        self._owns = False

    def meet(self, word: str, *, can_save_alone: bool = False) -> list[str]:
        """Return what each process says, by rank, once all are here. ``can_save_alone``: as in
        ``ranks.meet``.
        """
        accelerator = self._accelerator
        if accelerator.num_processes == 1:
            return [word]
        words = meet(
            accelerator.process_index,
            accelerator.num_processes,
            f"{int(accelerator.is_local_main_process)}{word}",
            timeout_of(guard_of(accelerator).settings.save_timeout),
            can_save_alone=can_save_alone,
            what=self._what,
        )
        self._is_on_nodes = sum(word.startswith("1") for word in words) > 1
        return [word[1:] for word in words]

    @contextmanager
    def staged(self, plan: Callable[[], StagedSave]) -> Iterator[StagedSave]:
        """Yield the staging folder of a save that the main process plans, for the files of this
        process. All have met before.
        """
        self._begin(plan)
        with self._on_all():
            yield self._staging

    def put_in_place(self, describe: Describe, rotate: Callable[[], object]) -> None:
        """Commit on every disk what is staged there.

        On each of them one process calls ``describe``, which completes the staging folder, and
        ``rotate``, when the new checkpoint is in its place.
        """
        is_main = self._accelerator.is_main_process
        if self._staging.how is How.UPLOAD:
            self._upload(describe)
            with self._on_all():
                if is_main:
                    rotate()
            return
        with self._on_all():
            if is_main:
                self._commit(describe)
                if not self._is_on_nodes:
                    rotate()
        if self._is_on_nodes:  # another disk gets the checkpoint once the main one has it
            with self._on_all():
                if self._owns and not is_main:
                    self._commit(describe)
                if self._owns:
                    rotate()

    def _begin(self, plan: Callable[[], StagedSave]) -> None:
        """Plan the save, make the staging folder, and find out who answers for a disk.

        The main process does for that of the target, the first process of another node for its own,
        if it has one: on one disk the folder is there by then, and nobody else can make it.
        """
        accelerator = self._accelerator

        def make() -> StagedSave:
            self._staging = plan()
            self._owns = begin(self._staging)
            return self._staging

        with self._abandoned():
            self._staging = self._ranks.on_main(make, self._what)
        if self._is_on_nodes:
            with self._on_all():
                if accelerator.is_local_main_process and not accelerator.is_main_process:
                    self._owns = begin(self._staging)

    def _upload(self, describe: Describe) -> None:
        """Upload what is staged on every disk, at once, and commit it when all of it is there.

        Once all is staged nothing of it is removed before the commit: an upload that fails costs no
        save.
        """
        staging, ranks = self._staging, self._ranks
        manifest: bytes | None = None
        files: dict[str, int] = {}
        with self._on_all():
            described = describe() if self._owns else None
            manifest = described() if callable(described) else described
            if manifest is not None:
                files = staged_files(staging.folder)
        disks = [
            _Disk(*disk) for disk in ranks.gather((os.uname().nodename, str(staging.folder), files))
        ]
        every = {name: size for disk in reversed(disks) for name, size in disk.files.items()}
        with self._on_all():
            if manifest is not None:
                manifest = with_files(manifest, every)
                complete(staging, manifest)
        with self._abandoned():
            plan = ranks.on_main(lambda: self._planned(every, manifest, disks), self._what)
        mine = files.keys() - {name for disk in disks[: ranks.rank] for name in disk.files}
        if self._accelerator.is_main_process:
            mine |= {MANIFEST}
        sent: dict[str, Uploaded] = {}
        with self._on_all(), self._uploading(disks):
            if manifest is not None:
                sent = send(staging.place, plan, staging.folder, mine)
        parts = ranks.gather(sent)
        with self._on_all(), self._uploading(disks):
            if self._accelerator.is_main_process:
                finish_upload(
                    staging.place,
                    plan,
                    {name: one for part in parts for name, one in part.items()},
                )
        if self._owns:
            uploaded(staging)

    def _planned(
        self, every: Mapping[str, int], manifest: bytes | None, disks: "Sequence[_Disk]"
    ) -> UploadPlan:
        files = dict(every) | ({} if manifest is None else {MANIFEST: len(manifest)})
        with self._uploading(disks):
            return begin_upload(self._staging.place, files, self._staging.stale())

    @contextmanager
    def _uploading(self, disks: "Sequence[_Disk]") -> Iterator[None]:
        """Say with every error, and where a user interrupts, where the save lies and how to upload
        it.
        """
        staging = self._staging
        parts = [f"{disk.host}:{disk.folder}" for disk in disks if disk.files]
        main = Path(next((disk.folder for disk in disks if disk.files), str(staging.folder)))
        try:
            yield
        except (OperationError, OSError) as error:
            if str(staging.folder) in str(error):
                raise
            raise OperationError(not_uploaded(staging.place, main, error, parts)) from error
        except KeyboardInterrupt as error:
            _log.warning("%s", not_uploaded(staging.place, main, error, parts))
            raise

    def _commit(self, describe: Describe) -> None:
        manifest = describe()
        if manifest is not None:
            commit(self._staging, manifest)
        else:
            abandon(self._staging)

    @contextmanager
    def _on_all(self) -> Iterator[None]:
        """Run a part of the save on every process; when one fails, all raise, and nothing stays
        behind.

        One that is interrupted waits for nobody: the others may be gone as well.
        """
        error: Exception | None = None
        with self._abandoned():
            try:
                yield
            except Exception as raised:
                error = raised
            self._ranks.agree(error, self._what)

    @contextmanager
    def _abandoned(self) -> Iterator[None]:
        """Leave nothing behind where a part of the save fails."""
        try:
            yield
        except BaseException:
            self._undo()
            if self._owns:
                abandon(self._staging)
            raise
