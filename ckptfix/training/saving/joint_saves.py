"""A save of all processes at once: written to one staging folder, made durable, renamed, and then others are removed.

An error on one process ends the save on all of them, and nothing of it stays behind.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptfix.training.ranks import Ranks
from ckptfix.training.saving.staged_saves import StagedSave, abandon, begin, commit


class JointSave:
    """One save. Every process makes one, with the same ``what``, the name of the call in messages.

    ``write`` writes the files of this process. On each disk one process then calls ``describe``, which completes the
    staging folder and returns its manifest, as ``commit`` takes it (None: nothing was written on this disk), and
    ``rotate``, when the new checkpoint is in its place. ``undo`` is called on every process when the save has failed.
    """

    def __init__(
        self,
        accelerator: Any,
        what: str,
        *,
        write: Callable[[StagedSave], object],
        describe: Callable[[StagedSave], bytes | Callable[[], bytes] | None],
        rotate: Callable[[StagedSave], object],
        undo: Callable[[], object],
    ) -> None:
        self._accelerator = accelerator
        self._what = what
        self._write = write
        self._describe = describe
        self._rotate = rotate
        self._undo = undo
        self._ranks = Ranks(accelerator)
        self._staging: StagedSave
        self._owns = False

    def run(self, plan: Callable[[], StagedSave]) -> Path:
        """Save on every process, and return the target, which the main process plans."""
        self._staging = self._ranks.on_main(plan, self._what)
        self._begin()
        with self._on_all():
            self._write(self._staging)
        is_main = self._accelerator.is_main_process
        with self._on_all():
            if is_main:
                self._commit()
        with self._on_all():
            if self._owns and not is_main:
                self._commit()
            if self._owns:
                self._rotate(self._staging)
        self._ranks.wait()
        return self._staging.target

    def _begin(self) -> None:
        """Make the staging folder, and find out who answers for a disk.

        The main process does for that of the target, the first process of another node for its own, if it has one: on
        one disk the folder is there by then, and nobody else can make it.
        """
        accelerator = self._accelerator
        with self._on_all():
            if accelerator.is_main_process:
                self._owns = begin(self._staging)
        with self._on_all():
            if accelerator.is_local_main_process and not accelerator.is_main_process:
                self._owns = begin(self._staging)

    def _commit(self) -> None:
        manifest = self._describe(self._staging)
        if manifest is not None:
            commit(self._staging, manifest)
        else:
            abandon(self._staging)

    @contextmanager
    def _on_all(self) -> Iterator[None]:
        """Run a part of the save on every process; when one fails, all raise, and nothing stays behind."""
        error: BaseException | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        except BaseException:  # interrupted: the others may be gone as well, so nobody is waited for
            self._abandon()
            raise
        try:
            self._ranks.agree(error, self._what)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        self._undo()
        if self._owns:
            abandon(self._staging)
