"""Files and folders that are written under a temporary name and swapped in when they are complete.

Every temporary name is ``.ckptfix-PURPOSE+HOST-NAMESPACE+PID+RANDOM+NAME``, so that any process can
check whether the writer still runs. Files of dead writers are removed by the next ``sweep`` of the
folder, by any process.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from ckptfix.errors import ChangedError, OperationError
from ckptfix.storage.atomic import create_file, exchange, read_file, rename_to_free, sync_folder
from ckptfix.storage.files import AnyPath, StorePath, lexists, names_in, store_of, walk
from ckptfix.storage.markers import NEEDED
from ckptfix.storage.mounts import object_mount_of
from ckptfix.storage.paths import JOURNAL
from ckptfix.wording import human_size

if TYPE_CHECKING:
    from ckptfix.storage.stores import Store

SAVING = ".ckptfix-saving+"
"""Prefix of the folders that a guarded save writes; each becomes a checkpoint as it is."""

WRITING = ".ckptfix-writing+"
"""Prefix of all other temporary names."""

_NAME = re.compile(
    r"\.ckptfix-(?:saving|writing)\+(.*)\+([1-9][0-9]{0,8})\+[0-9a-f]{16}\+(?P<target>.*)",
    re.DOTALL,
)

_DEAD_AFTER = 86400.0
"""Seconds without any change after which a writer on another machine counts as dead: a live one
writes all the time.
"""

STAGING_VARIABLE = "CKPTFIX_STAGING"
"""Environment variable with the folder on a disk in which is written what goes to a store."""

_in_use: set[str] = set()
"""Names that this process has made and not released: the writer may be another thread."""


class Owner(NamedTuple):
    """The process that a temporary name belongs to.

    ``is_same_machine``: the process itself was checked; on another machine only the age of the last
    change counts.
    """

    pid: int
    host: str
    is_running: bool
    is_same_machine: bool


def temporary_name(target: Path, purpose: str = WRITING) -> str:
    """Return a new temporary name for ``target``, to be released with ``release``."""
    short = os.fsdecode(os.fsencode(target.name)[:64])  # the full name might exceed 255 bytes
    name = f"{purpose}{this_machine()}+{os.getpid()}+{os.urandom(8).hex()}+{short}"
    _in_use.add(name)
    return name


def release(path: Path) -> None:
    """Forget a temporary name of this process."""
    _in_use.discard(path.name)


def is_temporary(name: str) -> bool:
    """Return whether a name is a temporary one of this scheme, of any process."""
    return _NAME.fullmatch(name) is not None


def target_of(path: AnyPath) -> AnyPath:
    """Return the file or folder that is written under a temporary name; else the path."""
    if isinstance(path, StorePath):
        match = _NAME.fullmatch(path.name)
        return path.with_name(match["target"]) if match is not None and match["target"] else path
    for at, part in enumerate(path.parts):
        if (match := _NAME.fullmatch(part)) is not None and match["target"]:
            return Path(*path.parts[:at], match["target"], *path.parts[at + 1 :])
    return path


def owner_of(path: AnyPath) -> Owner | None:
    """Return the process that made a temporary file or folder, None for any other path."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    machine, pid = match[1], int(match[2])
    is_here = machine == this_machine()
    host = machine.rpartition("-")[0] or machine
    return Owner(pid, host, _is_running(path, pid) if is_here else _changed_lately(path), is_here)


def holds_previous(folder: AnyPath) -> bool:
    """Return whether a staging folder holds the old checkpoint, with no successor."""
    return lexists(folder / _OLD) and _holds_anything(folder / _NEW)


def this_machine() -> str:
    """Return the host, the namespace of process numbers and the boot.

    Containers may share the name of a host, and so may machines, whose first namespace has one
    number everywhere.
    """
    namespace, boot = 0, ""
    with suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{os.uname().nodename}-{namespace}.{boot}"


def outside_checkpoints(path: Path) -> Path:
    """Return the nearest folder above that Accelerate does not read names from."""
    parent = path.parent
    while parent.name == "checkpoints":
        parent = parent.parent
    return parent


def _is_running(path: AnyPath, pid: int) -> bool:
    if pid == os.getpid():
        return path.name in _in_use
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _changed_lately(path: AnyPath) -> bool:
    latest = 0.0
    paths = [path]
    for folder, folders, names in walk(path):
        paths += (folder / name for name in (*folders, *names))
    for each in paths:
        with suppress(OSError):
            latest = max(latest, each.lstat().st_mtime)
    return time.time() - (latest or time.time()) < _DEAD_AFTER


_NEW, _OLD, _OUTPUT = "new", "old", "output"


def keep_while(folder: Path, sign: Path) -> None:
    """Keep a staging folder from sweeps while a file ``sign`` exists in a journal."""
    (folder / JOURNAL).mkdir(exist_ok=True)
    create_file(folder / NEEDED, os.fsencode(os.path.abspath(sign)))
    sync_folder(folder / JOURNAL)
    sync_folder(folder)


def is_needed(folder: AnyPath) -> bool:
    """Return whether a staging folder is kept by its sign, or the sign's folder moved."""
    try:
        sign = Path(os.fsdecode(read_file(folder / NEEDED)))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # nobody knows
        return True
    return os.path.lexists(sign) or not sign.parent.parent.is_dir()


def sweep(parent: Path) -> None:
    """Remove the files of dead writers from a folder; restore an old checkpoint that one of them
    had moved aside.

    Files that cannot be listed or removed stay: a failed sweep must not stop the work that follows.
    """
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(parent)
    for path in (parent / name for name in names if name.startswith(".ckptfix-")):
        with suppress(OSError):
            owner = owner_of(path)
            if owner is not None and not owner.is_running and not is_needed(path):
                _remove(path, _output_of(path))


def _remove(path: Path, output: Path | None) -> None:
    """Remove something temporary; put an old checkpoint in it back at ``output`` first."""
    if holds_previous(path):
        with suppress(OSError):
            if output is not None:
                rename_to_free(path / _OLD, output)
                sync_folder(output.parent)
        if os.path.lexists(path / _OLD):
            return  # its path is occupied again: the old checkpoint stays in here
    with suppress(OSError):
        if not path.is_dir() or path.is_symlink():
            path.unlink()
            return
    from shutil import rmtree  # imports bz2 and lzma, which a check does not need

    rmtree(path, ignore_errors=True)


def _output_of(folder: Path) -> Path | None:
    """Return where the old checkpoint in a folder came from, None when unknown."""
    with suppress(OSError, ValueError):
        # Another user must not decide where files of this one go.
        if os.lstat(folder).st_uid == os.geteuid():
            path = PurePosixPath((folder / _OUTPUT).read_text("utf-8", "surrogateescape"))
            return None if path.is_absolute() or ".." in path.parts else folder.parent / path
    return None


def _holds_anything(folder: AnyPath) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError):
        return bool(names_in(folder))
    return False


@contextmanager
def temporary_file(path: Path, data: bytes) -> Iterator[Path]:
    """Write a file next to ``path`` under a temporary name; at the end it is removed, unless it was
    renamed.

    Files of dead writers are removed there first. Raises OSError.
    """
    sweep(path.parent)
    new = path.with_name(temporary_name(path))
    try:
        create_file(new, data)
        yield new
    finally:
        new.unlink(missing_ok=True)
        release(new)


def write_file(path: Path, data: bytes) -> None:
    """Replace the file at ``path``, durably or not at all. Raises OSError."""
    with temporary_file(path, data) as new:
        os.replace(new, path)
    sync_folder(path.parent)


def ensure_writable(path: Path) -> None:
    """Raise OSError when ``write_file`` could not write next to ``path``."""
    with temporary_file(path, b""):
        pass


def staging_folder() -> Path:
    """Return the folder for what goes to a store: CKPTFIX_STAGING, else TMPDIR."""
    import tempfile  # imports bz2 and lzma, which a check does not need

    return Path(os.path.abspath(os.environ.get(STAGING_VARIABLE) or tempfile.gettempdir()))


class Staging(Struct, frozen=True):
    """A folder of this process. ``new`` in it becomes ``output``, or only the file ``name`` in that
    when it is set.

    ``place``: where the output is uploaded to, if no rename commits it.
    """

    folder: Path
    output: Path
    name: str | None = None
    place: "Store | None" = None

    @property
    def new(self) -> Path:
        """The folder for the new files."""
        return self.folder / _NEW

    @property
    def complete(self) -> Path:
        """The file or folder that becomes the output."""
        return self.new / self.name if self.name is not None else self.new


@contextmanager
def staging_for(
    output: Path,
    *,
    name: str | None = None,
    before: Path | None = None,
    stays: Callable[[], bool] = lambda: False,
) -> Iterator[Staging]:
    """Make a folder to write ``output`` in; it is removed at the end, with everything that is still
    in it.

    It lies next to the output, but never in a folder called ``checkpoints``; of an output in a
    store it lies in ``staging_folder()``. Files of dead writers are removed there first. ``name``:
    the one file in ``new`` that becomes the output. ``before``: the staging folder of an earlier
    run, which this one goes on with. ``stays``: asked at the end, whether the folder stays for the
    next run. Raises OperationError, OSError.
    """
    output = output.absolute()
    place = place_of(output if name is None else output.parent)
    parent = _parent_of(output) if place is None else staging_folder()
    sweep(parent)
    folder = parent / temporary_name(output)
    is_over = True
    try:
        if before is not None:
            os.rename(before, folder)
        else:
            folder.mkdir(mode=0o700)
            (folder / _NEW).mkdir()
        try:
            yield Staging(folder, output, name, place)
        finally:
            is_over = not stays()
    finally:
        try:
            if is_over:
                despite_interrupts(lambda: _remove(folder, output))
        finally:
            release(folder)


def discard(staging: Staging) -> None:
    """Remove a staging folder that outlived the process that made it."""
    despite_interrupts(lambda: _remove(staging.folder, staging.output))


def put_in_place(
    staging: Staging, *, overwrite: bool = False, check: Callable[[Path], object] | None = None
) -> None:
    """Move what is complete to its place, durably; what exists there is removed only after that.

    ``check`` gets what was there when nobody finds it by its name any more; when it raises, that
    comes back.

    Raises ChangedError when something has come there meanwhile that may not be overwritten. Killed
    at any moment, the output is the old one or the new one; only where the file system cannot
    exchange two names there is none for an instant, and the next sweep brings the old one back. In
    a store the commit marker is what is written last.
    """
    output = staging.output
    if staging.place is not None:
        from ckptfix.storage.uploads import put_in_store

        put_in_store(staging.place, staging.new, name=staging.name, overwrite=overwrite)
        return
    try:
        rename_to_free(staging.complete, output)
    except FileExistsError:
        if not overwrite:
            _replace_empty_folder(staging)
        elif exchange(staging.complete, output):
            if check is not None:
                try:
                    check(staging.complete)
                except BaseException:
                    exchange(staging.complete, output)
                    raise
        else:
            inside = os.path.relpath(
                os.path.realpath(output.parent), os.path.realpath(staging.folder.parent)
            )
            where = os.path.join(inside, output.name).encode("utf-8", "surrogateescape")
            create_file(staging.folder / _OUTPUT, where)
            os.rename(output, staging.folder / _OLD)
            sync_folder(staging.folder)
            if check is not None:
                check(staging.folder / _OLD)  # the end of the staging folder puts it back
            rename_to_free(staging.complete, output)
    sync_folder(output.parent)


def _replace_empty_folder(staging: Staging) -> None:
    try:
        # A rename would replace any file.
        if staging.name is not None or staging.output.is_symlink():
            raise NotADirectoryError
        os.rename(
            staging.complete, staging.output
        )  # the kernel refuses to replace a folder that is not empty
    except OSError:
        raise ChangedError(
            f"{staging.output} was created meanwhile; nothing was written there"
        ) from None


def _parent_of(output: Path) -> Path:
    """Return the folder that a staging folder goes into: the nearest above in which Accelerate
    reads no names.

    The name ``checkpoints`` counts for the folder itself and for a link to it. Raises
    OperationError when that is on another disk than the output: nothing could be moved to its place
    in one step.
    """
    real = Path(os.path.realpath(output.parent))
    parent = outside_checkpoints(
        real if output.parent.name == "checkpoints" else real / output.name
    )
    if os.stat(parent).st_dev != os.stat(real).st_dev:
        raise OperationError(
            f"{output}: cannot be written in one step: in {real}, Accelerate would treat temporary "
            f"files as checkpoints, and {parent} is on another disk; nothing was written; choose "
            "another path on either disk, and move the result yourself"
        )
    return parent


def despite_interrupts(clean: Callable[[], object]) -> None:
    """Finish the cleanup even when the user interrupts it; the interrupt is raised after it."""
    try:
        clean()
    except KeyboardInterrupt:
        clean()
        raise


def place_of(output: Path) -> "Store | None":
    """Return the place to upload an output to, None for one on a disk."""
    if store_of(output) is None and object_mount_of(output) is None:
        return None
    from ckptfix.storage.uploads import place_at

    return place_at(output)


def ensure_space(output: Path, needed: int) -> None:
    """Raise OperationError when less than ``needed`` is free where ``output`` is written."""
    folder = output.absolute().parent
    where = folder if place_of(output) is None else staging_folder()
    status = os.statvfs(where)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        sizes = f"needs {human_size(needed)} of free space, but only {human_size(free)} is free"
        if where == folder:
            raise OperationError(
                f"{output}: {sizes} on this disk; next: free up space there, or choose another path"
            )
        raise OperationError(
            f"{output}: {sizes} in {where}, where it is written before the upload; next: export "
            f"{STAGING_VARIABLE}=FOLDER, a folder on a larger disk, and run the same command again"
        )
