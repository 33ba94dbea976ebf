"""Which paths a transaction may touch: inside its folder, outside every journal, behind no symbolic link.

The manifest lies beside the transactions of the journal; it speaks of the checkpoint, and changes with it.
"""

import os
import shlex
from pathlib import Path, PurePosixPath

from ckptfix.errors import OperationError

JOURNAL = ".ckptfix"
"""Inside the checkpoint, never beside it: Accelerate reads every name in the parent folder as a number."""

MANIFEST = f"{JOURNAL}/manifest.json"
"""Where the manifest of a checkpoint is (``checkpoint.manifest``), relative to it."""


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
    """Return a path as it is to be typed: quoted, and none that a command takes for an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def forget(root: Path) -> str:
    """Return the advice that always works: keep the files as they are, and forget the journal, but not the manifest."""
    return f"to keep the files as they are now: rm -r {shlex.quote(str(root / JOURNAL))}/[0-9]*"
