"""One new file written in a stream: a thread reads, one hashes, and the caller writes.

A few buffers circulate: while one is written, the next one is hashed and the one after it is read.
"""

import hashlib
import os
import stat
import threading
import zlib
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from ckptfix.dataclass import dataclass
from ckptfix.errors import ChangedError, OperationError
from ckptfix.storage.atomic import sync_file, write_all
from ckptfix.storage.copying import Pacer, copy_range
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import command
from ckptfix.storage.reading import FileReader, OpenFiles, Piece, opened_elsewhere, page_buffer
from ckptfix.storage.recipes import Literal
from ckptfix.tensors.new_files import Computed, Data, NewTensor, OutputFile
from ckptfix.tensors.stored import Contiguous, StoredTensor, digest_head

_SCRATCH = 256 << 10
"""Bytes that are converted at a time: the result stays in a core's cache (1 MiB takes 5 times as long)."""

_WORTH_SHARING = 1 << 20


class Convert(Protocol):
    """Conversion of the bytes of complete elements to another dtype, which counts the values that became infinite."""

    overflowed: int

    def __call__(self, block: memoryview, /) -> memoryview:
        """Return the converted bytes, in memory of their own."""


class Source(NamedTuple):
    """A tensor of the new file: where its bytes come from, and their conversion (None: no conversion).

    ``crc``: the CRC-32 that its old file has for exactly these bytes, None when it has none.
    """

    new: NewTensor
    stored: StoredTensor
    convert: Convert | None = None
    crc: int | None = None

    @property
    def piece(self) -> Piece | None:
        """The contiguous piece of a file that equals the new tensor byte for byte, None if there is none."""
        layout = self.stored.layout
        if self.convert is None and isinstance(layout, Contiguous) and len(layout.pieces) == 1:
            return layout.pieces[0]
        return None


class Run(NamedTuple):
    """A range of a slab that belongs to one part of the file; ``done``: bytes of the part before it."""

    part: int
    begin: int
    end: int
    done: int


@dataclass(slots=True)
class Slab:
    """One buffer and its contents."""

    buffer: memoryview
    filled: int = 0
    runs: list[Run] = field(default_factory=list)

    def clear(self) -> None:
        """Make it empty again."""
        self.filled = 0
        self.runs.clear()


class Shared(NamedTuple):
    """Bytes of another file whose blocks the new file can share, instead of a slab."""

    piece: Piece
    part: int
    done: int


class Stopped(Exception):
    """Signal that another thread failed or the user interrupted, so that reading on is useless."""


def stopping(stop: threading.Event, progress: Progress | None = None) -> Progress:
    """Return a function that passes numbers of bytes on, and raises ``Stopped`` once ``stop`` is set."""

    def report(count: int) -> None:
        if stop.is_set():
            raise Stopped
        if progress is not None:
            progress(count)

    return report


Item = Slab | Shared | BaseException | None
"""An item that goes from thread to thread: bytes, the error of the one before, or None for the end."""

Free = SimpleQueue["Slab | None"]
Items = SimpleQueue[Item]


class Reader:
    """Reader that fills slabs with the bytes of a file, part after part; room for computed parts is left empty.

    ``block``: the size of the blocks that files can share on this disk, 0 when they cannot.
    """

    def __init__(
        self,
        file: OutputFile,
        sources: Mapping[str, Source],
        free: "Free",
        filled: "Items",
        stop: threading.Event,
        block: int = 0,
    ) -> None:
        self._file, self._sources = file, sources
        self._free, self._filled, self._stop = free, filled, stop
        self._slab: Slab | None = None
        self._block = block
        self._part = self._done = self._position = 0

    def run(self) -> None:
        """Read to the end, or to the first error, which the writer raises."""
        try:
            self._read()
        except BaseException as error:
            self._filled.put(error)
        else:
            self._filled.put(None)

    def _read(self) -> None:
        scratch = page_buffer(_SCRATCH)
        with OpenFiles() as files:
            for number, part in enumerate(self._file.parts):
                self._part, self._done = number, 0
                match part:
                    case Literal(data):
                        self._copy(memoryview(data))
                    case Computed(length, _):
                        while self._done < length:
                            self._took(min(len(self._room()), length - self._done))
                    case Data(fqn, length):
                        self._tensor(self._sources[fqn], files, scratch)
                        if self._done != length:
                            raise OperationError(
                                f"the tensor {fqn!r} has {self._done} bytes, {length} were planned"
                            )
        self._flush()

    def _tensor(self, source: Source, files: OpenFiles, scratch: memoryview) -> None:
        layout = source.stored.layout
        if source.convert is None and isinstance(layout, Contiguous):
            for path, offset, length in layout.pieces:  # straight into the slab
                if self._can_share(offset, length) and files.holds_descriptor(path):
                    self._share(Piece(path, offset, length))
                    continue
                read = 0
                while read < length:
                    room = self._room()[: length - read]
                    files.fill(room, path, offset + read)
                    read += len(room)
                    self._took(len(room))
            return
        for block in source.stored.blocks(files, scratch):
            self._copy(block if source.convert is None else source.convert(block))

    def _copy(self, data: memoryview) -> None:
        while data:
            room = self._room()[: len(data)]
            room[:] = data[: len(room)]
            data = data[len(room) :]
            self._took(len(room))

    def _room(self) -> memoryview:
        """Return the rest of the current slab, or a new one."""
        if self._slab is None:
            self._slab = self._free.get()
            if self._slab is None or self._stop.is_set():
                raise Stopped
        return self._slab.buffer[self._slab.filled :]

    def _took(self, count: int) -> None:
        slab = self._slab
        assert slab is not None
        slab.runs.append(Run(self._part, slab.filled, slab.filled + count, self._done))
        slab.filled += count
        self._done += count
        self._position += count
        if slab.filled == len(slab.buffer):
            self._flush()

    def _can_share(self, offset: int, length: int) -> bool:
        """Return whether most of a piece lies in complete blocks, at the same offset in a block as in the new file."""
        return bool(self._block) and length >= _WORTH_SHARING and (offset - self._position) % self._block == 0

    def _share(self, piece: Piece) -> None:
        if self._stop.is_set():
            raise Stopped
        self._flush()
        self._filled.put(Shared(piece, self._part, self._done))
        self._done += piece.length
        self._position += piece.length

    def _flush(self) -> None:
        if self._slab is not None and self._slab.filled:
            self._filled.put(self._slab)
            self._slab = None


class Hasher:
    """Hasher of the bytes of a file from beginning to end, which also fills in the computed parts.

    ``digests``: tensor name -> digest, of those whose bytes have all passed. ``sources``: by the names in the
    parts. ``with_sha256``: also hash the complete file. A CRC-32 that a source has is always compared.
    """

    def __init__(
        self, file: OutputFile, sources: Mapping[str, Source], *, with_digests: bool, with_sha256: bool
    ) -> None:
        self.digests: dict[str, str] = {}
        if with_digests:  # tensors without elements have no bytes in a file
            empty = {name: one.new for name, one in sources.items() if one.new.nbytes == 0}
            heads = {name: digest_head(one.dtype, one.shape) for name, one in empty.items()}
            self.digests |= {name: hashlib.sha256(head).hexdigest() for name, head in heads.items()}
        self._parts = file.parts
        self._needs_crc = file.needs_crc
        self._sources = sources
        self._with_digests = with_digests
        self._crcs: dict[str, int] = {}
        self._crc = 0
        self._digest: Any = None
        self._made = b""
        self._whole = hashlib.sha256() if with_sha256 else None

    def take(self, number: int, view: memoryview, done: int) -> None:
        """Hash bytes of part ``number``, after ``done`` earlier ones; write those of a computed part.

        Raises OperationError when a computed part has another length than planned, or the source is damaged.
        """
        part = self._parts[number]
        if isinstance(part, Data):
            self._take_tensor(part, view, done)
        elif isinstance(part, Computed):
            if done == 0:
                self._made = part.make(self._crcs)
                if len(self._made) != part.length:
                    raise OperationError(f"{part.length} bytes were planned, {len(self._made)} were made")
            view[:] = self._made[done : done + len(view)]
        if self._whole is not None:
            self._whole.update(view)

    @property
    def sha256(self) -> str:
        """The sha256 of the bytes so far, "" if not requested."""
        return self._whole.hexdigest() if self._whole is not None else ""

    def _take_tensor(self, part: Data, view: memoryview, done: int) -> None:
        is_last = done + len(view) == part.length
        source = self._sources[part.fqn]
        if self._needs_crc or source.crc is not None:
            self._crc = zlib.crc32(view, self._crc if done else 0)
            if is_last:
                self._crcs[part.fqn] = self._crc
                check_crc(source, self._crc)
        if not self._with_digests:
            return
        if done == 0:
            self._digest = hashlib.sha256(digest_head(source.new.dtype, source.new.shape))
        self._digest.update(view)
        if is_last:
            self.digests[part.fqn] = self._digest.hexdigest()


def check_crc(source: Source, found: int) -> None:
    """Raise OperationError when the bytes of a tensor do not match the CRC-32 in its old file."""
    if source.crc is not None and source.crc != found and (piece := source.piece) is not None:
        raise damaged(piece, found, source.crc, source.stored.fqn)


def damaged(piece: Piece, found: int, written: int, fqn: str = "") -> OperationError:
    """Return the error about a piece of a file that does not match its recorded CRC-32."""
    what = repr(fqn) if fqn else f"the record at byte {piece.offset}"
    return OperationError(
        f"{piece.path}: {what} has the CRC-32 {found:08x}, {written:08x} was written: the file is damaged; next, to "
        f"recover what is intact: {command('salvage', piece.path)} NEW_FOLDER"
    )


_SLAB = 8 << 20
_SLABS = 4


class Written(NamedTuple):
    """The digest of every tensor in a new file, and the sha256 of the file; empty if not requested."""

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
    """Write a new file and make it durable; return the requested digests.

    ``sources``: by the names in the parts of ``file``. ``shares``: the disk can share blocks between files,
    which is used where a tensor has the same alignment as in its old file. ``progress`` gets bytes written.
    Raises FileExistsError, ChangedError when a source has become shorter, OperationError when a tensor has
    another size than was planned, OSError, ``Stopped`` once ``stop`` is set; an unfinished file then stays.
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
        free.put(None)  # ends the threads that wait for a buffer
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        os.close(fd)
    return Written(hasher.digests, hasher.sha256) if hasher is not None else Written({}, "")


def copy_file(source: Path, target: Path, progress: Progress | None) -> None:
    """Copy one file durably, with its permissions and its time; a symbolic link becomes the file behind it.

    Raises FileExistsError, ChangedError when the source is not a regular file, OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if (reader := opened_elsewhere(source)) is not None:
        _copy_reader(reader, source, target, progress)
        return
    read = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(read)
        if not stat.S_ISREG(status.st_mode):
            raise ChangedError(f"{source} is not a regular file any more")
        written = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            copy_range(read, 0, written, 0, status.st_size, progress=progress)
            os.fchmod(written, status.st_mode & 0o777)
            os.utime(written, ns=(status.st_atime_ns, status.st_mtime_ns))
            sync_file(written)
        finally:
            os.close(written)
    finally:
        os.close(read)


def _copy_reader(reader: FileReader, source: Path, target: Path, progress: Progress | None) -> None:
    """Copy a file whose bytes are not on this machine."""
    status = os.stat(source)
    with open(target, "xb") as file:
        for offset in range(0, reader.size, _SLAB):
            file.write(reader.read(offset, min(_SLAB, reader.size - offset)))
            if progress is not None:
                progress(min(_SLAB, reader.size - offset))
        file.flush()
        os.fchmod(file.fileno(), status.st_mode & 0o777)
        os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
        sync_file(file.fileno())


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
    """Hash the bytes that pass; an error, from here or from the reader, goes to the writer, which raises it."""
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
