"""Write one new file: a thread reads, one hashes, and the caller writes, with a few buffers going round.

Nothing waits for the disk that need not: while a buffer is written the next one is hashed and the one after it read.
"""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from ckptfix.checkpoint.pairing import Progress
from ckptfix.operations.migrate.filling import Free, Items, Reader, Shared, Slab, Source
from ckptfix.operations.migrate.hashing import Hasher
from ckptfix.storage.atomic import write_all
from ckptfix.storage.copying import copy_range
from ckptfix.storage.pacing import Pacer
from ckptfix.storage.pieces import OpenFiles, page_buffer
from ckptfix.weights.files.parts import OutputFile

__all__ = ["Source", "Written", "write_file"]

_SLAB = 8 << 20
_SLABS = 4


class Written(NamedTuple):
    """The digest of every tensor in a new file, and the sha256 of the file; empty where they were not asked for."""

    digests: dict[str, str]
    sha256: str


def write_file(
    target: Path,
    file: OutputFile,
    sources: Mapping[str, Source],
    *,
    with_digests: bool,
    with_sha256: bool = False,
    shares: bool = False,
    stop: threading.Event,
    progress: Progress | None = None,
) -> Written:
    """Write a new file and make it durable; return the digests that were asked for.

    ``sources``: by the names in the parts of ``file``. ``shares``: the disk can share blocks between files, and does
    where a tensor lies as it does in its old file. ``progress`` gets bytes written. Raises
    FileExistsError, ChangedError when a source has become shorter, OperationError when a tensor has another size than
    was planned, OSError, ``Stopped`` once ``stop`` is set; an unfinished file then stays.
    """
    free: Free = SimpleQueue()
    for _ in range(min(_SLABS, file.size // _SLAB + 1)):
        free.put(Slab(page_buffer(min(_SLAB, file.size))))
    filled: Items = SimpleQueue()
    ready = filled
    hasher = None
    threads = []
    if with_digests or with_sha256 or file.needs_crc:
        ready = SimpleQueue()
        hasher = Hasher(file, sources, with_digests=with_digests, with_sha256=with_sha256)
        threads.append(threading.Thread(target=_hash, args=(hasher, filled, ready), daemon=True))
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    block = os.fstatvfs(fd).f_bsize if shares else 0
    reader = Reader(file, sources, free, filled, stop, block)
    threads.append(threading.Thread(target=reader.run, daemon=True))
    try:
        for thread in threads:
            thread.start()
        _write(fd, ready, free, progress)
    finally:
        free.put(None)  # whoever waits for a buffer goes home
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        os.close(fd)
    return Written(hasher.digests, hasher.sha256) if hasher is not None else Written({}, "")


def _write(fd: int, ready: Items, free: Free, progress: Progress | None) -> None:
    pacer = Pacer(fd)
    offset = 0
    with OpenFiles() as files:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, Shared):
                path, begin, length = item.piece
                copy_range(files.descriptor(path), begin, fd, offset, length, progress=progress)
                offset += length
                continue
            write_all(fd, item.buffer[: item.filled], offset)
            offset += item.filled
            if progress is not None:
                progress(item.filled)
            item.clear()
            free.put(item)
            pacer.wrote(offset)
    pacer.finish(offset)


def _hash(hasher: Hasher, filled: Items, ready: Items) -> None:
    """Hash what passes by; an error, from here or from the reader, goes to the writer, who raises it."""
    with OpenFiles() as files:
        while isinstance(item := filled.get(), Slab | Shared):
            try:
                if isinstance(item, Shared):
                    _hash_shared(hasher, item, files)
                else:
                    for part, begin, end, done in item.runs:
                        hasher.take(part, item.buffer[begin:end], done)
            except BaseException as error:
                ready.put(error)
                return
            ready.put(item)
    ready.put(item)


def _hash_shared(hasher: Hasher, item: Shared, files: OpenFiles) -> None:
    done = item.done
    for block in files.blocks((item.piece,), page_buffer(1 << 20)):
        hasher.take(item.part, block, done)
        done += len(block)
