"""Paths: what a user named, how a shell takes them, and which of them a transaction may touch.

A transaction stays inside its folder, outside every journal, and follows no symbolic link. The manifest lies next to
the transactions of the journal; it is about the checkpoint, and changes with it.
"""

import os
import shlex
import stat
from pathlib import Path, PurePosixPath

from ckptfix.errors import OperationError, UsageError
from ckptfix.wording import escape

JOURNAL = ".ckptfix"
"""Inside the checkpoint, never beside it: Accelerate reads every name in the parent folder as a number."""

MANIFEST = f"{JOURNAL}/manifest.json"
"""Where the manifest of a checkpoint is (``checkpoint.manifest``), relative to it."""


_KINDS = {
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def existing(path: str | os.PathLike[str]) -> Path:
    """Return the path of a folder or a regular file, or of a link to one.

    Raises UsageError when it is empty, when nothing exists there, and for devices, pipes and sockets; OSError when that
    cannot be found out.
    """
    given = Path(path)
    if not os.fspath(path):
        raise UsageError("the path is empty: name a checkpoint; is a variable of the shell unset?")
    try:
        mode = os.stat(given).st_mode
    except (
        FileNotFoundError,
        NotADirectoryError,
        ValueError,
    ):  # ValueError: a NUL byte, which no file's name holds
        if given.is_symlink():
            target = os.readlink(given)
            raise UsageError(f"{given} is a broken link: {target} is not there") from None
        raise UsageError(f"{given} does not exist") from None
    if kind := _KINDS.get(stat.S_IFMT(mode)):
        raise UsageError(f"{given} is {kind}: expected a folder or a regular file")
    return given


def check_path(path: PurePosixPath) -> None:
    """Raise OperationError for a path that leaves the folder, reaches into a journal, or is no name at all."""
    if str(path) == MANIFEST:
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
        raise OperationError(f"{str(path)!r}: no file can have this name")


def locate(root: Path, path: PurePosixPath) -> Path:
    """Return the full path of a file of the folder. Raises OperationError below a symbolic link."""
    full = root / path
    for parent in path.parents:
        if parent.parts and os.path.islink(root / parent):
            raise OperationError(f"{full}: lies behind the symbolic link {parent}; name the real folder")
    return full


def command(verb: str, root: Path, target: str = "", *options: str) -> str:
    """Return what to type to run ``ckptfix VERB`` on the folder, or on the file ``target`` in it."""
    return f"{shlex.join(['ckptfix', verb, *options])} {shell_path(root / target)}"


def shell_path(path: Path | str) -> str:
    """Return a path as a shell takes it: quoted, and not one that a command takes for an option.

    Control characters, and bytes that are not UTF-8, are written as bash and zsh read them: ``$'a\\377'``.
    """
    text = str(path)
    text = f"./{text}" if text.startswith("-") else text
    if escape(text) == text:
        return shlex.quote(text)
    return f"$'{''.join(map(_quoted, text))}'"


def _quoted(character: str) -> str:
    """Return a character as it is between ``$'`` and ``'``; always three octal digits, as another may follow."""
    if character in "'\\":
        return f"\\{character}"
    if escape(character) == character:
        return character
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))


def forget(root: Path) -> str:
    """Return the advice that always works: keep the files as they are, and forget the journal, but not the manifest."""
    return f"to keep the files as they are now: rm -r {shell_path(root / JOURNAL)}/[0-9]*"
