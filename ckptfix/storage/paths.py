"""Paths as the user names them and as a shell takes them, and the reasons why one cannot be read.

A transaction stays inside its folder, outside every journal, and follows no symbolic link. The
manifest lies next to the transactions of the journal; it is about the checkpoint, and changes with
it.
"""

import errno
import os
import pwd
import re
import shlex
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple, overload

from ckptfix.errors import OperationError, UsageError
from ckptfix.storage.files import AnyPath, Openable, StorePath, is_url, objects_of, stat_of
from ckptfix.wording import escape

JOURNAL = ".ckptfix"
"""The folder of the journal; inside the checkpoint, never next to it: Accelerate reads every name
in the parent folder as a number.
"""

MANIFEST = f"{JOURNAL}/manifest.json"
"""Path of the manifest of a checkpoint (``checkpoint.manifest``), relative to it."""

COMMITTED = f"{JOURNAL}/committed.json"
"""Path of the commit marker of an upload (``markers``), relative to the checkpoint."""

RECEIPT = f"{JOURNAL}/migrated.json"
"""Path of the file by which a folder that ``migrate`` wrote is known (``conversion.destination``),
relative to it.
"""

SIGNED = ("model.sig", "tensors.sig")
"""Names of the signed statements that ``seal`` writes: of the files, and of the tensors."""

UNSIGNED = ("model.oms.json", "tensors.oms.json")
"""Names of the same without a signature."""

OF_FILES = (SIGNED[0], UNSIGNED[0])
"""Names of the statements about files, which are about no others."""

_LOST_SLASH = re.compile(r"(s3a?|gc?s|az|abfss?|hf|file):/+(.*)", re.DOTALL)
"""A URL that lost a slash: when it was typed, or when something took it for a path."""

_LONGEST = (1 << 63) - 1
"""Most bytes of a file."""

_KINDS = {
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


@overload
def existing(path: str | os.PathLike[str]) -> Path: ...
@overload
def existing(path: Openable) -> AnyPath: ...
def existing(path: Openable) -> AnyPath:
    """Return the path of a folder or a regular file, or of a link to one.

    Raises UsageError when it is empty, when nothing exists there, and for devices, pipes and
    sockets; OSError when that cannot be found out.
    """
    if isinstance(path, StorePath):
        if not path.exists():
            raise UsageError(f"{path} does not exist")
        return path
    given = Path(path)
    if not os.fspath(path):
        raise UsageError("the path is empty: name a checkpoint; is a shell variable unset?")
    try:
        mode = os.stat(given).st_mode
    except (
        FileNotFoundError,
        NotADirectoryError,
        ValueError,
    ):  # ValueError: a NUL byte, which no file's name holds
        if given.is_symlink():
            target = os.readlink(given)
            raise UsageError(f"{given} is a broken link: {target} does not exist") from None
        slip = _LOST_SLASH.match(os.fspath(path))
        meant = f"; did you mean {slip[1]}://{slip[2]}?" if slip is not None else ""
        raise UsageError(f"{given} does not exist{meant}") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"{given} does not exist: {error.strerror}") from None
        raise
    if kind := _KINDS.get(stat.S_IFMT(mode)):
        raise UsageError(f"{given} is {kind}: expected a folder or a regular file")
    return given


def ensure_folder(path: Path) -> None:
    """Raise UsageError unless a path is a folder or leads to one; a link that leads to itself is
    named, and a missing folder gets the command that makes it.
    """
    try:
        is_folder = stat.S_ISDIR(stat_of(path).st_mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(cause(path, error)) from None
        if error.errno == errno.ENOENT and not os.path.islink(path):
            make = f"next: mkdir -p {shell_path(path)}"
            raise UsageError(f"{path} does not exist; {make}") from None
        is_folder = False
    if not is_folder:
        raise UsageError(f"{path} is not a folder")


def check_path(path: PurePosixPath) -> None:
    """Raise OperationError for a path out of the folder, in a journal, or not valid."""
    if str(path) in (MANIFEST, COMMITTED):
        return
    inside = path.parts and not path.is_absolute() and ".." not in path.parts
    # casefold: there are file systems on which .CKPTFIX is the same folder
    if not inside or any(part.casefold() == JOURNAL for part in path.parts):
        raise OperationError(f"{path}: an edit must stay inside the folder and outside {JOURNAL}/")
    try:
        sound = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        sound = False
    if not sound:
        raise OperationError(f"{str(path)!r}: not a valid file name")


def is_inside(name: str) -> bool:
    """Return whether a relative name is a valid name of a file below the folder."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


def ensure_listed(name: str, size: int) -> None:
    """Raise ValueError for a file that no folder can hold: a record from elsewhere lists any."""
    if not 0 <= size <= _LONGEST or not is_inside(name):
        raise ValueError(f"invalid file {name!r} of {size!r:.40} bytes")


def locate(root: Path, path: PurePosixPath) -> Path:
    """Return the full path of a file of the folder. Raises OperationError below a symbolic link."""
    full = root / path
    for parent in path.parents:
        if parent.parts and os.path.islink(root / parent):
            raise OperationError(
                f"{full}: is below the symbolic link {parent}; name the real folder"
            )
    return full


def command(verb: str, root: AnyPath | str, target: str = "", *options: str) -> str:
    """Return the command that runs ``ckptfix VERB`` on the folder, or on a file in it."""
    where: AnyPath | str = root
    if not isinstance(root, str) or not is_url(root):
        where = (Path(root) if isinstance(root, str) else root) / target
    elif target:
        where = f"{root.rstrip('/')}/{target}"
    return f"{shlex.join(['ckptfix', verb, *options])} {shell_path(where)}"


def shell_path(path: AnyPath | str) -> str:
    """Return a path quoted for a shell, so that no command takes it for an option.

    Control characters, and bytes that are not UTF-8, are written as bash and zsh read them:
    ``$'a\\377'``.
    """
    text = str(path)
    text = f"./{text}" if text.startswith("-") else text
    if escape(text) == text:
        return shlex.quote(text)
    return f"$'{''.join(map(_quoted, text))}'"


def _quoted(character: str) -> str:
    """Return a character between ``$'`` and ``'``; three octal digits, as one may follow."""
    if character in "'\\":
        return f"\\{character}"
    if escape(character) == character:
        return character
    try:
        data = os.fsencode(character)
    except UnicodeEncodeError:  # half of a surrogate pair, which no file's name holds
        data = character.encode("utf-8", "surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in data)


def forget(root: AnyPath) -> str:
    """Return the advice that always works: delete the journal, but not the manifest."""
    return f"to keep the files as they are now: rm -r {shell_path(root / JOURNAL)}/[0-9]*"


_REFUSED = "cannot be read"


def leads_nowhere(path: AnyPath) -> str:
    """Return why a name is not a file: a broken link, a folder; "" for a file or no name."""
    try:
        return "a folder" if stat.S_ISDIR(stat_of(path).st_mode) else ""
    except FileNotFoundError:
        with suppress(OSError):
            if isinstance(path, StorePath):
                return ""
            return f"a broken link: {os.readlink(path)} does not exist"
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "a symbolic link that leads to itself"
    return ""


def unreadable(path: AnyPath, error: OSError) -> str:
    """Return why ``path`` cannot be read, and the command that permits it."""
    if not isinstance(error, PermissionError) or isinstance(path, StorePath):
        return f"{_REFUSED}: {cause(path, error)}"
    blocked, status = _blocked(path)
    if status is None:
        return f"{_REFUSED}: {cause(path, error)}"
    mode = stat.S_IMODE(status.st_mode)
    is_folder = stat.S_ISDIR(status.st_mode)
    where = "" if blocked == path else f" by the folder {blocked}"
    why = ""
    if path.suffix == ".safetensors" and blocked == path and not mode & 0o077:
        why = "; safetensors makes its files readable only by their owner"
    wanted = "a+rx" if is_folder else "a+r"
    # An ACL, SELinux, or a file server.
    if mode & 0o005 == 0o005 or (mode & 0o004 and not is_folder):
        command = f"sudo chown {_name(os.geteuid())} {shell_path(blocked)}"
    else:
        root = "" if status.st_uid == os.geteuid() else "sudo "
        command = f"{root}chmod {wanted} {shell_path(blocked)}"
    owner = f"owner {_name(status.st_uid)}, mode {mode:04o}"
    return (
        f"{_REFUSED}: permission denied{where} ({owner}; you are {_name(os.geteuid())}{why}); "
        f"next: {command}"
    )


def refusal(problem: str) -> str:
    """Return a problem of reading as a predicate, as ``unreadable`` returns it."""
    return problem if problem.startswith(_REFUSED) else f"{_REFUSED}: {problem}"


def described(error: Exception) -> str:
    """Return the text of an error, and for denied permission the command to fix it."""
    if isinstance(error, PermissionError) and error.filename is not None:
        path = Path(os.fsdecode(error.filename))
        if not _is_absent(path) and not os.access(path, os.R_OK, effective_ids=True):
            return f"{path}: {unreadable(path, error)}"
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes):
        name = os.fsdecode(error.filename)
        path = Path(name)
        to = (
            f" -> {os.fsdecode(error.filename2)}"
            if isinstance(error.filename2, str | bytes)
            else ""
        )
        return f"{name if is_url(name) else path}{to}: {cause(path, error)}"
    return str(error)


def cause(path: AnyPath, error: OSError) -> str:
    """Return why an operation on ``path`` failed, with the link that leads to itself."""
    if error.errno != errno.ELOOP or isinstance(path, StorePath):
        return error.strerror or str(error)
    link = next((one for one in (*reversed(path.parents), path) if _loops(one)), path)
    return f"{link} is a symbolic link that leads to itself; next: ls -l {shell_path(link)}"


def _loops(path: Path) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def _is_absent(path: Path) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def refused_files(paths: Iterable[AnyPath]) -> Iterator[str]:
    """Yield in words each file or folder that may not be read, and the command to fix it."""
    for path in paths:
        if isinstance(path, StorePath):
            continue
        if os.path.exists(path) and not os.access(path, os.R_OK, effective_ids=True):
            yield (
                f"{path}: "
                f"{unreadable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))}"
            )


def _blocked(path: Path) -> tuple[Path, os.stat_result | None]:
    """Return the path that denies access, the path itself or a folder above it, and its status."""
    full = Path(os.path.abspath(path))
    status: os.stat_result | None = None
    for one, above in zip(
        (*reversed(full.parents), full), (full, *reversed(full.parents)), strict=True
    ):
        try:
            found = os.stat(one)
        except OSError:
            return above, status
        status = found
    return path, status


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class Listing(NamedTuple):
    """Result of ``list_folder``. ``files``: everything but folders, as ``listed_files`` returns it.

    ``journals``: journals of checkpoints in sub-folders, in order.
    """

    files: dict[str, str | None]
    journals: tuple[str, ...]


def listed_files(root: AnyPath) -> dict[str, str | None]:
    """Return everything but folders below a folder, by relative path, in order, without ckptfix's
    own files.

    The value is the reason why a path cannot be read: a folder that cannot be listed, and a link to
    one that was listed by another path, or that contains the checkpoint; None for all others. Each
    folder is listed once, its own place before a link to it. Raises OSError when the folder itself
    cannot be listed.
    """
    return list_folder(root).files


def list_folder(root: AnyPath) -> Listing:
    """Return the listing of a folder. Raises OSError when the folder itself cannot be listed."""
    if isinstance(root, StorePath):
        return _listed_in_store(root)
    journals: list[str] = []
    found: dict[str, str | None] = {}
    seen: dict[tuple[int, int], str] = {}
    above = {_identity(str(parent)) for parent in Path(os.path.realpath(root)).parents}
    waiting, links = deque([""]), deque[str]()
    while waiting or links:
        is_link = not waiting
        where = links.popleft() if is_link else waiting.popleft()
        full = os.path.join(root, where)
        try:
            identity = _identity(full)
            if identity in above:
                found[where] = "is a link to a folder that contains it"
                continue
            if identity in seen:
                found[where] = f"is a link to {seen[identity] or 'the checkpoint itself'}"
                continue
            seen[identity] = where
            with os.scandir(full) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            if not where:
                raise
            found[where] = f"cannot be listed: {error.strerror}"
            continue
        for entry in entries:
            path = os.path.join(where, entry.name)
            if not os.path.isdir(entry.path):
                found[path] = None
            elif entry.name != JOURNAL:
                (links if entry.is_symlink() else waiting).append(path)
            elif where:
                journals.append(path)
    return Listing(dict(sorted(found.items())), tuple(sorted(journals)))


def _listed_in_store(root: StorePath) -> Listing:
    files: dict[str, str | None] = {}
    journals: set[str] = set()
    for name in sorted(objects_of(root) or {}):
        *folders, _ = name.split("/")
        if JOURNAL not in folders:
            files[name] = None
        elif depth := folders.index(JOURNAL):
            journals.add("/".join(folders[: depth + 1]))
    return Listing(files, tuple(sorted(journals)))


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
