"""The folder of one transaction, and what is said of a file that it does not explain.

Edit number 3 has ``3.new`` (the new file until its rename), ``3.kept`` (a previous file kept until the undo),
``3.trash`` (one that goes at the commit, its recipe staying) and ``3.tail``; while it is undone also ``3.part`` and
``3.copy``. All of it is for the owner's eyes only: it holds bytes of files that others may not be allowed to read.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ckptfix.errors import JournalError
from ckptfix.storage.atomic import create_file, sync_folder
from ckptfix.storage.fingerprints import Fingerprint, moment
from ckptfix.storage.paths import command, forget, locate
from ckptfix.storage.recipes import Kept, Recipe


@dataclass(frozen=True, slots=True)
class Workspace:
    """A checkpoint folder, and the folder of one transaction in its journal."""

    root: Path
    folder: Path

    def at(self, path: PurePosixPath) -> Path:
        """Return the full path of a file of the checkpoint. Raises OperationError below a symbolic link."""
        return locate(self.root, path)

    def new(self, index: int) -> Path:
        """Where the new file of a Replace waits."""
        return self.folder / f"{index}.new"

    def old(self, index: int, previous: Recipe | Kept) -> Path:
        """Where the previous file of a Replace or Remove goes."""
        return self.folder / f"{index}.{'kept' if isinstance(previous, Kept) else 'trash'}"

    def tail(self, index: int) -> Path:
        """Where the bytes go that a Truncate cuts off."""
        return self.folder / f"{index}.tail"

    def copy(self, index: int) -> Path:
        """Where a file is copied that got a second name, before the copy is changed in its place."""
        return self.folder / f"{index}.copy"

    @property
    def was_committed(self) -> bool:
        """True when every edit was done: this is an undo, not the roll-back of a run cut short."""
        return os.path.lexists(self.folder / "after.json")

    @property
    def any_time(self) -> bool:
        """True when files may have other modification times than the journal says (``undo --force``)."""
        return os.path.lexists(self.folder / "any-time")

    def accept_any_time(self, accept: bool = True) -> None:
        """Make durable that modification times prove nothing: an interrupted ``undo --force`` goes on as one."""
        if accept and not self.any_time:
            create_file(self.folder / "any-time", b"", mode=0o600)
            sync_folder(self.folder)
        elif not accept:
            with suppress(FileNotFoundError):
                os.unlink(self.folder / "any-time")

    def is_the(self, found: Fingerprint | None, expected: Fingerprint | None) -> bool:
        """True when ``found`` is the file that the journal means: the same time, size and ends."""
        if found is None or expected is None or not found.same_content(expected):
            return False
        return self.any_time or found.mtime_ns == expected.mtime_ns

    def unexplained(self, path: Path, why: str) -> JournalError:
        """Return the error for a file that no interruption explains."""
        return JournalError(
            f"{path}: {why}. Something else changed it after ckptfix did, so it was left alone; bring back the "
            f"version that ckptfix left, then: {command('undo', self.root)}; or {forget(self.root)} (its *.kept and "
            f"*.trash are previous files)"
        )

    def not_the(self, path: Path, found: Fingerprint | None, expected: Fingerprint | None) -> JournalError:
        """Return the error for a file at ``path`` that ``is_the`` refused."""
        if found is None or expected is None:
            return self.unexplained(path, "is not there")
        if not found.same_content(expected):
            return self.unexplained(
                path, f"has {found.size} bytes and is not the file of {expected.size} bytes that it was"
            )
        times = f"its time is {moment(found.mtime_ns)}, was {moment(expected.mtime_ns)}"
        again = command("undo", self.root, "", "--force")
        return self.unexplained(path, f"was written to: {times} (if it is only the time: {again})")


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file of the checkpoint that is to be changed in place; a symbolic link is an OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)
