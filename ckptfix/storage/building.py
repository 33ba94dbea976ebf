"""Make a file from its recipe."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from ckptfix.errors import ChangedError
from ckptfix.storage.atomic import write_all
from ckptfix.storage.copying import copy_range
from ckptfix.storage.paths import locate
from ckptfix.storage.recipes import Literal, Recipe

# The thousands of small pieces of a zip file are gathered, so that they cost one write per MiB and not one each.
_GATHER = 1 << 20
_SMALL = 1 << 16


def build(recipe: Recipe, root: Path, target: Path, *, progress: Callable[[int], None] | None = None) -> None:
    """Write the new file ``target`` from ``recipe``, whose ranges name files below ``root``, and sync it.

    It gets the recipe's mode, and its owner where that is permitted. Raises FileExistsError, or ChangedError when
    a source ends before a range of it does, OperationError when it lies behind a link to a folder.
    """
    # 0600 until it is complete: a file that only its owner may read must not be open to others meanwhile.
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with _sources(root) as source_of:
            _write(recipe, fd, source_of, progress)
        status = os.fstat(fd)
        if (recipe.uid, recipe.gid) not in ((-1, -1), (status.st_uid, status.st_gid)):
            with suppress(PermissionError):
                os.fchown(fd, recipe.uid, recipe.gid)
        os.fchmod(fd, recipe.mode)  # after chown, which clears set-uid bits
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _sources(root: Path) -> Iterator[Callable[[PurePosixPath], int]]:
    opened: dict[PurePosixPath, int] = {}

    def source_of(path: PurePosixPath) -> int:
        if path not in opened:
            # The file itself may be a link (a cache keeps its blobs so), the folders on the way to it may not.
            opened[path] = os.open(locate(root, path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        return opened[path]

    try:
        yield source_of
    finally:
        for fd in opened.values():
            os.close(fd)


def _write(
    recipe: Recipe, fd: int, source_of: Callable[[PurePosixPath], int], progress: Callable[[int], None] | None
) -> None:
    gathered = bytearray()
    written = 0  # bytes on their way to the disk before those gathered
    for piece in recipe.pieces:
        if isinstance(piece, Literal):
            gathered += piece.data
        elif piece.length <= _SMALL:
            data = os.pread(source_of(piece.path), piece.length, piece.offset)
            if len(data) != piece.length:
                raise ChangedError(f"{piece.path}: ends before byte {piece.offset + piece.length}")
            gathered += data
        else:
            write_all(fd, memoryview(bytes(gathered)), written)
            written += len(gathered)
            gathered.clear()
            copy_range(source_of(piece.path), piece.offset, fd, written, piece.length, progress=progress)
            written += piece.length
        if len(gathered) >= _GATHER:
            write_all(fd, memoryview(bytes(gathered)), written)
            written += len(gathered)
            gathered.clear()
    write_all(fd, memoryview(bytes(gathered)), written)
