"""Where a migration is written before it is whole, and how it takes its place in one step.

The staging folder lies beside the new checkpoint, never inside ``checkpoints/``, where Accelerate reads every name. It
is locked while its run lives, so that the next run of the same DST knows what a dead one left behind.
"""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckptfix.errors import ChangedError, OperationError
from ckptfix.storage.atomic import exchange, rename_to_free, sync_folder

_NEW, _OLD = "new", "old"


@dataclass(frozen=True, slots=True)
class Staging:
    """``folder`` is this run's own; ``new`` in it becomes ``output``, or, when ``is_file``, the one file in it does."""

    folder: Path
    output: Path
    is_file: bool

    @property
    def new(self) -> Path:
        """The folder that the new files are written into."""
        return self.folder / _NEW

    @property
    def whole(self) -> Path:
        """What will be at the output."""
        return self.new / self.output.name if self.is_file else self.new


@contextmanager
def staging_for(output: Path, *, is_file: bool) -> Iterator[Staging]:
    """Make a staging folder for ``output``; on the way out it goes, with all that is still in it.

    What dead runs of the same output left behind goes first; an old checkpoint that one of them had moved aside comes
    back. Raises OSError when the folder cannot be made.
    """
    output = output.absolute()
    _sweep(output)
    folder, lock = _make(output)
    try:
        (folder / _NEW).mkdir()
        yield Staging(folder, output, is_file)
    finally:
        despite_interrupts(lambda: _clear(folder, output))
        if lock is not None:
            os.close(lock)


def despite_interrupts(clean: Callable[[], object]) -> None:
    """Clean up to the end, also when the user interrupts that, too; the interrupt is raised after it."""
    try:
        clean()
    except KeyboardInterrupt:
        clean()
        raise


def put_in_place(staging: Staging, *, overwrite: bool) -> None:
    """Move the new checkpoint to its place, durably; what stands there goes only after that.

    Raises ChangedError when something has come there meanwhile that may not be overwritten. Killed at any moment, the
    output is the old one or the new one; only where the file system cannot exchange two names there is none for an
    instant, and the next run brings the old one back.
    """
    parent = staging.output.parent
    try:
        rename_to_free(staging.whole, staging.output)
    except FileExistsError:
        if not overwrite:
            _replace_empty_folder(staging)
        elif not exchange(staging.whole, staging.output):
            os.rename(staging.output, staging.folder / _OLD)
            sync_folder(staging.folder)
            rename_to_free(staging.whole, staging.output)
    sync_folder(parent)


def _replace_empty_folder(staging: Staging) -> None:
    try:
        if staging.is_file or staging.output.is_symlink():  # a file would take the place of any file
            raise NotADirectoryError
        os.rename(staging.whole, staging.output)  # of a folder onto one that is not empty the kernel refuses
    except OSError:
        raise ChangedError(
            f"{staging.output} has come into being meanwhile; nothing was written there"
        ) from None


def _pattern(output: Path) -> str:
    """Return what the names of all staging folders of one output begin with; a long name would not fit as it is."""
    short = os.fsdecode(os.fsencode(output.name)[:64])
    real = Path(os.path.realpath(output.parent)) / output.name
    key = hashlib.sha256(os.fsencode(real)).hexdigest()[:16]
    return f".{short}.ckptfix-migrating-{key}-"


def _place(output: Path) -> Path:
    """Return the folder that the staging folder goes into: the nearest above in which Accelerate reads no names.

    That a folder is called ``checkpoints`` counts whether it is its own name or that of a link to it. Raises
    OperationError when that is on another disk than the output: nothing could be moved to its place in one step.
    """
    parent = Path(os.path.realpath(output.parent))
    place = parent.parent if output.parent.name == "checkpoints" else parent
    while place.name == "checkpoints":
        place = place.parent
    if os.stat(place).st_dev != os.stat(parent).st_dev:
        raise OperationError(
            f"{output}: what is written first cannot lie in {parent}, where Accelerate takes every name for a "
            f"checkpoint, and {place} is on another disk, from which it cannot be moved in one step; nothing was "
            "written; migrate to another place on either disk, and move it yourself"
        )
    return place


def _make(output: Path) -> tuple[Path, int | None]:
    """Return a new locked folder and its lock, None where the file system has no locks."""
    for number in range(1000):
        folder = _place(output) / f"{_pattern(output)}{os.getpid()}-{number}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        lock = _locked(folder)
        if lock is None or _is_at(lock, folder):
            return folder, lock
        os.close(lock)  # a run that began just now took it for left over
    raise OperationError(f"{output}: no staging folder could be made next to it")


def _sweep(output: Path) -> None:
    """Remove what dead runs left; what cannot be locked belongs to one that lives, or is not known to be dead."""
    parent = _place(output)
    name = re.compile(re.escape(_pattern(output)) + "[0-9]+-[0-9]+")
    for found in os.listdir(parent) if parent.is_dir() else ():
        folder = parent / found
        if name.fullmatch(found) and (lock := _locked(folder)) is not None:
            try:
                _clear(folder, output)
            finally:
                os.close(lock)


def _clear(folder: Path, output: Path) -> None:
    """Remove a staging folder; an old checkpoint that was moved aside and has no successor goes back first."""
    if os.path.lexists(folder / _OLD) and _holds_anything(folder / _NEW):
        with suppress(FileExistsError):
            rename_to_free(folder / _OLD, output)
            sync_folder(output.parent)
        if os.path.lexists(folder / _OLD):
            return  # somebody put something else there: the old checkpoint stays where it is
    shutil.rmtree(folder, ignore_errors=True)


def _holds_anything(folder: Path) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError):
        return bool(os.listdir(folder))
    return False


def _locked(folder: Path) -> int | None:
    """Return a descriptor that holds the lock of a folder, None when another process does or there are no locks."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _is_at(fd: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    return False
