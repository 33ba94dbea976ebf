"""Digests of the bytes that a recipe takes from other files, so that an undo restores those bytes or nothing.

A file of gigabytes is hashed in parts of 64 MiB, by several threads: the digest of its ranges is the sha256 over the
sha256 of the parts, in the order in which the recipe needs them.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.storage.comparing import SEGMENT, Digests
from ckptfix.storage.pieces import OpenFiles, Piece, page_buffer
from ckptfix.storage.recipes import Range, Recipe

Bytes = tuple[Piece | bytes, ...]
"""Some bytes: stretches of files and literal bytes, one after the other."""

_BLOCK = 1 << 20
_MOST_THREADS = 8
_WORTH_THREADS = 8 << 20


class Part(NamedTuple):
    """``length`` bytes from ``offset`` of the file ``source``; in the file that the recipe makes at ``position``."""

    source: PurePosixPath
    offset: int
    position: int
    length: int


def parts_of(recipe: Recipe) -> tuple[Part, ...]:
    """Return what a recipe takes from other files, sorted by file; of one file in the order of the recipe."""
    return tuple(sorted(_parts(recipe), key=lambda part: part.source))


def _parts(recipe: Recipe) -> Iterator[Part]:
    position = 0
    for piece in recipe.pieces:
        if isinstance(piece, Range):
            for start in range(0, max(1, piece.length), SEGMENT):
                length = min(SEGMENT, piece.length - start)
                yield Part(piece.path, piece.offset + start, position + start, length)
        position += piece.length


def with_digests(recipe: Recipe, made: Path, known: Mapping[PurePosixPath, Digests]) -> Recipe:
    """Return the recipe with the digests of what it takes from other files.

    ``made``: a file that is what the recipe makes; what ``known`` has of a file is not read again. Raises OSError,
    ChangedError when ``made`` is too short.
    """
    parts = parts_of(recipe)
    nothing: Digests = {}
    found = [known.get(part.source, nothing).get((part.offset, part.length)) for part in parts]
    unread = [number for number, digest in enumerate(found) if digest is None]
    read = hash_parts([(Piece(made, parts[number].position, parts[number].length),) for number in unread])
    for number, digest in zip(unread, read, strict=True):
        found[number] = digest
    return replace(recipe, digests=_joined(parts, [digest or b"" for digest in found]))


def differing(recipe: Recipe, bytes_of: Callable[[Part], Bytes]) -> Iterator[PurePosixPath]:
    """Yield the files of which the ranges have other bytes than when the digests were taken.

    ``bytes_of``: where the bytes of a part are now. Raises OSError, ChangedError when a file is too short.
    """
    if not recipe.digests:
        return
    parts = parts_of(recipe)
    now = dict(_joined(parts, hash_parts([bytes_of(part) for part in parts])))
    yield from (path for path, digest in recipe.digests if now.get(path) != digest)


def _joined(parts: Sequence[Part], digests: Sequence[bytes]) -> tuple[tuple[PurePosixPath, str], ...]:
    both = zip(parts, digests, strict=True)
    return tuple(
        (source, hashlib.sha256(b"".join(digest for _, digest in same)).hexdigest())
        for source, same in groupby(both, key=lambda one: one[0].source)
    )


def hash_parts(parts: Sequence[Bytes]) -> list[bytes]:
    """Return the sha256 of each part, hashed by several threads where they are long."""
    sizes = [sum(len(one) if isinstance(one, bytes) else one.length for one in part) for part in parts]
    if len(parts) < 2 or sum(sizes) < _WORTH_THREADS:
        return list(_hashed(parts))
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS, len(parts))
    share = max(
        1, len(parts) // (threads * 4)
    )  # neighbours go to one thread, whose reads go on where they ended
    shares = [parts[start : start + share] for start in range(0, len(parts), share)]
    from concurrent.futures import ThreadPoolExecutor  # its import takes a tenth of a small check

    with ThreadPoolExecutor(threads, thread_name_prefix="ckptfix-hash") as pool:
        return [digest for hashed in pool.map(lambda some: list(_hashed(some)), shares) for digest in hashed]


def _hashed(parts: Sequence[Bytes]) -> Iterator[bytes]:
    buffer = page_buffer(_BLOCK)
    with OpenFiles() as files:
        for part in parts:
            digest = hashlib.sha256()
            for one in part:
                if isinstance(one, bytes):
                    digest.update(one)
                else:
                    for block in files.blocks((one,), buffer):
                        digest.update(block)
            yield digest.digest()
