"""Files described by where their bytes come from, so that the journal need not hold gigabytes to
undo an edit.

Digests of those bytes make an undo restore these bytes or nothing. A file of gigabytes is hashed in
parts of 64 MiB: the digest of its ranges is the sha256 over the sha256 of the parts, in the order
in which the recipe needs them.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.errors import ChangedError
from ckptfix.storage.atomic import write_all
from ckptfix.storage.comparing import (
    SEGMENT,
    Digests,
    Run,
    first_difference,
    same_bytes_without_reading,
)
from ckptfix.storage.copying import copy_range
from ckptfix.storage.files import AnyPath, stat_of
from ckptfix.storage.parallel import Control, Progress, processors, run_all
from ckptfix.storage.paths import locate
from ckptfix.storage.reading import OpenFiles, Piece, open_reader, page_buffer
from ckptfix.wording import Brief


class Literal(Brief, Struct, frozen=True):
    """Bytes that the recipe itself holds."""

    data: bytes

    @property
    def length(self) -> int:
        """The number of bytes."""
        return len(self.data)


class Range(Struct, frozen=True):
    """``length`` bytes from ``offset`` of the file ``path``, which is relative to the folder."""

    path: PurePosixPath
    offset: int
    length: int


RecipePart = Literal | Range


class Recipe(Struct, frozen=True, kw_only=True):
    """A file: its pieces one after the other, its mode bits, and its owner (-1: whoever makes it).

    ``digests``: for each file that ranges name, the digest of the bytes in those ranges
    (``recipe_digests``); empty in journals of 0.4.0 and before, which had none.
    """

    pieces: tuple[RecipePart, ...]
    mode: int = 0o644
    uid: int = -1
    gid: int = -1
    digests: tuple[tuple[PurePosixPath, str], ...] = ()

    @property
    def size(self) -> int:
        """The size in bytes of the file that it makes."""
        return sum(piece.length for piece in self.pieces)

    @staticmethod
    def like(path: AnyPath, pieces: tuple[RecipePart, ...]) -> "Recipe":
        """Return a recipe with mode and owner of the file at ``path``. Raises OSError."""
        status = stat_of(path)
        return Recipe(
            pieces=pieces, mode=stat.S_IMODE(status.st_mode), uid=status.st_uid, gid=status.st_gid
        )


class Kept(Struct, frozen=True):
    """The previous file itself, be it a symbolic link, stays in the journal until the undo."""


class Absent(Struct, frozen=True):
    """Absence of a previous file."""


KEPT = Kept()
ABSENT = Absent()


# The thousands of small pieces of a zip file are gathered, so that they cost one write per MiB, not
# one each.
_GATHER = 1 << 20
_SMALL = 1 << 16


def build(
    recipe: Recipe, root: Path, target: Path, *, progress: Callable[[int], None] | None = None
) -> None:
    """Write the new file ``target`` from ``recipe``, whose ranges name files below ``root``, and
    sync it.

    It gets the recipe's mode, and its owner where that is permitted. Raises FileExistsError, or
    ChangedError when a source ends before a range of it does, OperationError when it lies behind a
    link to a folder.
    """
    # The file itself may be a link (a cache keeps its blobs so), the folders on the way to it may not.
    sources = {piece.path for piece in recipe.pieces if not isinstance(piece, Literal)}
    places = {path: locate(root, path) for path in sources}
    # 0600 until it is complete: a file that only its owner may read must not be open to others
    # meanwhile.
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    gathered, written = bytearray(), 0

    def flush() -> None:
        nonlocal written
        write_all(fd, bytes(gathered), written)
        written += len(gathered)
        gathered.clear()

    try:
        with OpenFiles() as files:
            for piece in recipe.pieces:
                if isinstance(piece, Literal):
                    gathered += piece.data
                else:
                    source = files.descriptor(places[piece.path])
                    if piece.length <= _SMALL:
                        data = os.pread(source, piece.length, piece.offset)
                        if len(data) != piece.length:
                            end = piece.offset + piece.length
                            raise ChangedError(f"{piece.path}: ends before byte {end}")
                        gathered += data
                    else:
                        flush()
                        copy_range(
                            source, piece.offset, fd, written, piece.length, progress=progress
                        )
                        written += piece.length
                if len(gathered) >= _GATHER:
                    flush()
        flush()
        status = os.fstat(fd)
        if (recipe.uid, recipe.gid) not in ((-1, -1), (status.st_uid, status.st_gid)):
            with suppress(PermissionError):
                os.fchown(fd, recipe.uid, recipe.gid)
        os.fchmod(fd, recipe.mode)  # after chown, which clears set-uid bits
        os.fsync(fd)
    finally:
        os.close(fd)


Bytes = tuple[Piece | bytes, ...]
"""Stretches of files and literal bytes, one after the other."""


class Stretch(Protocol):
    """``length`` bytes from ``offset`` of a file or an object: a NamedTuple."""

    @property
    def offset(self) -> int:
        """Its first byte."""

    @property
    def length(self) -> int:
        """Its number of bytes."""

    @property
    def _replace(self) -> Callable[..., Any]: ...


def size_of(pieces: Iterable[bytes | Stretch]) -> int:
    """Return the number of bytes of stretches and literal bytes."""
    return sum(len(piece) if isinstance(piece, bytes) else piece.length for piece in pieces)


_BLOCK = 1 << 20
_WORTH_THREADS = 8 << 20


class Part(NamedTuple):
    """A range of the file ``source``, at ``position`` in the file that a recipe makes."""

    source: PurePosixPath
    offset: int
    position: int
    length: int


def parts_of(recipe: Recipe) -> tuple[Part, ...]:
    """Return the parts that a recipe reads, sorted by file, then in its order."""
    parts: list[Part] = []
    position = 0
    for piece in recipe.pieces:
        if isinstance(piece, Range):
            for start in range(0, max(1, piece.length), SEGMENT):
                length = min(SEGMENT, piece.length - start)
                parts.append(Part(piece.path, piece.offset + start, position + start, length))
        position += piece.length
    return tuple(sorted(parts, key=lambda part: part.source))


def with_digests(recipe: Recipe, made: Path, known: Mapping[PurePosixPath, Digests]) -> Recipe:
    """Return the recipe with the digests of its parts of other files.

    ``made``: a file equal to the recipe's output; files in ``known`` are not read again. Raises
    OSError, ChangedError when ``made`` is too short.
    """
    parts = parts_of(recipe)
    nothing: Digests = {}
    found = [known.get(part.source, nothing).get((part.offset, part.length)) for part in parts]
    unread = [number for number, digest in enumerate(found) if digest is None]
    read = hash_parts(
        [(Piece(made, parts[number].position, parts[number].length),) for number in unread]
    )
    for number, digest in zip(unread, read, strict=True):
        found[number] = digest
    return replace(recipe, digests=_joined(parts, [digest or b"" for digest in found]))


def differing(recipe: Recipe, bytes_of: Callable[[Part], Bytes]) -> Iterator[PurePosixPath]:
    """Yield the files whose ranges have changed since the digests were taken.

    ``bytes_of``: the current location of a part's bytes. Raises OSError, ChangedError when a file
    is too short.
    """
    if not recipe.digests:
        return
    parts = parts_of(recipe)
    now = dict(_joined(parts, hash_parts([bytes_of(part) for part in parts])))
    yield from (path for path, digest in recipe.digests if now.get(path) != digest)


def is_made(
    recipe: Recipe, made: Path, bytes_of: Callable[[Part], Bytes], progress: Progress | None = None
) -> bool:
    """Return whether the file ``made`` has the bytes that the recipe makes now.

    ``bytes_of``: as of ``differing``. Raises OSError, ChangedError when a file is too short.
    """
    literals: list[tuple[int, bytes]] = []
    runs: dict[AnyPath, list[Run]] = {}
    position = 0
    for piece in recipe.pieces:
        if isinstance(piece, Literal):
            literals.append((position, piece.data))
        position += piece.length
    for part in parts_of(recipe):
        position = part.position
        for place in bytes_of(part):
            if isinstance(place, bytes):
                literals.append((position, place))
                position += len(place)
            else:
                runs.setdefault(place.path, []).append(Run(position, place.offset, place.length))
                position += place.length
    with open_reader(made) as reader:
        if reader.size != recipe.size or any(
            reader.read(at, len(data)) != data for at, data in literals
        ):
            return False
        for path, shared in runs.items():
            with open_reader(path) as source:
                if not same_bytes_without_reading(reader, source, shared) and first_difference(
                    reader, source, shared, progress=progress
                ):
                    return False
    return True


def _joined(
    parts: Sequence[Part], digests: Sequence[bytes]
) -> tuple[tuple[PurePosixPath, str], ...]:
    both = zip(parts, digests, strict=True)
    return tuple(
        (source, hashlib.sha256(b"".join(digest for _, digest in same)).hexdigest())
        for source, same in groupby(both, key=lambda one: one[0].source)
    )


def hash_parts(parts: Sequence[Bytes]) -> list[bytes]:
    """Return the sha256 of each part, hashed by several threads where they are long."""
    is_long = sum(map(size_of, parts)) >= _WORTH_THREADS
    threads = min(processors(), len(parts)) if is_long else 1
    # Neighbours go to one thread, whose reads go on where they ended.
    share = max(1, len(parts) // (threads * 4)) if threads > 1 else len(parts)
    digests = [b""] * len(parts)

    @contextmanager
    def worker(_: Control) -> Iterator[Callable[[int], None]]:
        buffer = page_buffer(_BLOCK)
        with OpenFiles() as files:

            def hash_share(start: int) -> None:
                for number in range(start, min(start + share, len(parts))):
                    digest = hashlib.sha256()
                    for block in _blocks(parts[number], files, buffer):
                        digest.update(block)
                    digests[number] = digest.digest()

            yield hash_share

    run_all(range(0, len(parts), share or 1), worker, threads=threads)
    return digests


def read_bytes(part: Bytes) -> bytes:
    """Return a short stretch as bytes. Raises OSError, ChangedError when a file is too short."""
    buffer = page_buffer(min(_BLOCK, size_of(part)))
    with OpenFiles() as files:
        return b"".join(map(bytes, _blocks(part, files, buffer)))


def _blocks(part: Bytes, files: OpenFiles, buffer: memoryview) -> Iterator[bytes | memoryview]:
    for piece in part:
        yield from (piece,) if isinstance(piece, bytes) else files.blocks((piece,), buffer)
