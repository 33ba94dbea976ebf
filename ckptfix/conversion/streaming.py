"""New files written by several threads, each byte once through the cache of a core: read, hashed,
written.

A file is cut into jobs of some megabytes, as all offsets are known before. A thread takes the next
job, of whichever file, and writes it to its place through a buffer that it keeps: many small files
take no more threads and memory than a large one.
"""

import hashlib
import os
import stat
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ckptfix.conversion.checksums import Checksums, Digests, Mark, combined
from ckptfix.errors import ChangedError, OperationError
from ckptfix.storage.atomic import sync_file, write_all
from ckptfix.storage.copying import Pacer, copy_range
from ckptfix.storage.files import AnyPath, StorePath, on_disk
from ckptfix.storage.parallel import Control, Progress, processors, run_all
from ckptfix.storage.reading import OpenFiles, Piece, page_buffer
from ckptfix.storage.recipes import Literal
from ckptfix.tensors.joined import Converted, Joined, Stretch
from ckptfix.tensors.new_files import Computed, Data, NewTensor, OutputFile
from ckptfix.tensors.stored import Contiguous, Layout, StoredTensor, digest_head

_BUFFER = 1 << 20
_SCRATCH = 256 << 10
"""Bytes that are converted at a time: the result stays in a core's cache (1 MiB takes 5 times as
long).
"""

_ALONE = 256 << 10
"""Bytes that are read to the beginning of the buffer, where the kernel copies twice as fast."""

_JOB = 16 << 20
_FAR_BUFFER = _COPIED_AT_ONCE = 8 << 20
"""Bytes that are read at once where the source is not on this machine: several requests under way
together.
"""

_WORTH_SHARING = 1 << 20


class Convert(Protocol):
    """Conversion of the bytes of complete elements to another dtype, which counts the values that
    became infinite.
    """

    overflowed: int

    def __call__(self, block: memoryview, /) -> memoryview:
        """Return the converted bytes, in memory of their own."""


class Source(NamedTuple):
    """A tensor of the new file: where its bytes come from, and their conversion (None: no
    conversion).
    """

    new: NewTensor
    stored: StoredTensor
    convert: Convert | None = None

    @property
    def tensor(self) -> StoredTensor:
        """The new tensor where its bytes are now, without a name."""
        new = self.stored._replace(fqn="", dtype=self.new.dtype, shape=self.new.shape)
        if self.convert is None:
            return new
        return new._replace(layout=Converted(self.stored.layout, self.stored.dtype, self.new.dtype))

    @property
    def piece(self) -> Piece | None:
        """The contiguous piece of a file that equals the new tensor byte for byte, None if there is
        none.
        """
        layout = self.stored.layout
        if self.convert is None and isinstance(layout, Contiguous) and len(layout.pieces) == 1:
            return layout.pieces[0]
        return None


class NewFile:
    """A new file while threads write it. ``sources``: by the names in the parts of ``file``.

    ``with_sha256``: hash the complete file, too, for which one thread writes it all. ``shares``:
    the disk can share blocks between files, which is used where a tensor has the same alignment as
    in its old file. ``mode``: its permissions. ``when_done``: called by the thread that completes
    it. ``marks``, ``pieces``: of what has passed.
    """

    def __init__(
        self,
        path: Path,
        file: OutputFile,
        sources: Mapping[str, Source],
        digests: Digests,
        checksums: Checksums,
        *,
        with_sha256: bool = False,
        shares: bool = False,
        mode: int = 0o600,
        when_done: Callable[["NewFile"], object] | None = None,
    ) -> None:
        self.path, self.parts, self.sources = path, file.parts, sources
        self.digests, self.checksums = digests, checksums
        self.needs_crc = file.needs_crc
        self.crcs: dict[str, int] = {}
        self.marks: list[Mark] = []
        self.pieces: list[tuple[Piece, int]] = []
        self.block = 0
        self.fd: int | None = None
        self.sha256 = ""
        self._shares, self._mode, self._when_done = shares, mode, when_done
        self.whole = hashlib.sha256() if with_sha256 else None
        self._put_off: list[tuple[int, Computed]] = []
        self._left = 0
        self._lock = threading.Lock()

    def jobs(self) -> list["Job"]:
        """Return the jobs of the file, which any threads may do in any order."""
        jobs: list[Job] = []
        first = begin = end = 0
        for number, part in enumerate(self.parts):
            if end - begin >= _JOB and self.whole is None and not isinstance(part, Computed):
                jobs.append(Job(self, first, number, begin, end))
                first, begin = number, end
            end += part.length
        jobs.append(Job(self, first, len(self.parts), begin, end))
        self._left = len(jobs)
        return jobs

    def begin(self, pacer: Pacer) -> int:
        """Create the file, unless another thread did, and return its descriptor."""
        with self._lock:
            if self.fd is None:
                self.fd = pacer.create(self.path)
                self.block = os.fstatvfs(self.fd).f_bsize if self._shares else 0
            return self.fd

    def put_off(self, offset: int, part: Computed) -> None:
        """Leave a part to the thread that completes the file, as other threads have the CRC-32 that
        it needs.
        """
        self._put_off.append((offset, part))

    def made(self, part: Computed) -> bytes:
        """Return the bytes of a computed part. Raises OperationError when they have another length
        than planned.
        """
        data = part.make(self.crcs)
        if len(data) != part.length:
            raise OperationError(
                f"wrong size of a computed part (expected {part.length} bytes, found {len(data)})"
            )
        return data

    def taken(self) -> Iterator[tuple[str, Source]]:
        """Yield the sources whose bytes it takes, by their keys."""
        yield from (
            (part.fqn, self.sources[part.fqn]) for part in self.parts if isinstance(part, Data)
        )

    def passed(self, mark: Mark, digest: str) -> None:
        """Note the digest of a wanted tensor that lies in this file."""
        self.digests.passed(mark, digest)
        self.marks.append(mark)

    def piece_passed(self, piece: Piece, crc: int, fqn: str) -> None:
        """Note the CRC-32 of a piece of the source. Raises OperationError for a record that has
        another one.
        """
        self.checksums.passed(piece, crc, fqn)
        self.pieces.append((piece, crc))

    def job_done(self, pacer: Pacer, control: Control) -> None:
        """Note that a job is done; complete the file after the last one."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        assert self.fd is not None
        for offset, part in self._put_off:
            write_all(self.fd, self.made(part), offset)
            control.advance(part.length)
        if self.whole is not None:
            self.sha256 = self.whole.hexdigest()
        os.fchmod(self.fd, self._mode)
        if self._when_done is not None:
            self._when_done(self)
        pacer.ended(self.fd)


class Job(NamedTuple):
    """The parts ``first`` to ``last`` of a file, which are its bytes ``begin`` to ``end``."""

    file: NewFile
    first: int
    last: int
    begin: int
    end: int


class Writer:
    """A thread's means of writing: a buffer, and the files that it reads. Use as a context manager.

    Raises ChangedError when a source has become shorter, OperationError when a tensor has another
    size than was planned or does not match its CRC-32, OSError, ``Stopped``.
    """

    def __init__(self, pacer: Pacer, control: Control) -> None:
        self.control = control
        self._pacer = pacer
        self._files = OpenFiles()
        self._buffer, self._scratch = page_buffer(_BUFFER), page_buffer(_SCRATCH)

    def __enter__(self) -> "Writer":
        self._files.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def write(self, job: Job) -> None:
        """Do a job of a new file."""
        self._file, self._fd = job.file, job.file.begin(self._pacer)
        self._filled = 0
        self._position = self._paced = job.begin
        for number in range(job.first, job.last):
            part = self._file.parts[number]
            if isinstance(part, Data):
                self._tensor(part)
            elif isinstance(part, Literal):
                self._copy(memoryview(part.data))
            elif part.of is None and job.first:
                self._flush()
                self._file.put_off(self._position, part)
                self._position += part.length
            else:
                self._copy(memoryview(self._file.made(part)))
        self._flush()
        self._pacer.wrote(self._fd, self._paced, self._position)
        self._file.job_done(self._pacer, self.control)

    def _tensor(self, part: Data) -> None:
        source = self._file.sources[part.fqn]
        self._hashing = _Hashing(part, source, self._file)
        if source.convert is not None:
            for block in source.stored.blocks(self._files, self._scratch):
                self._through(source.convert(block))
        else:
            self._layout(source.stored.layout)
        self._hashing.finish()

    def _layout(self, layout: Layout) -> None:
        if isinstance(layout, Contiguous):
            for piece in layout.pieces:
                self._piece(piece)
        elif isinstance(layout, Joined):
            for part in layout.parts:
                if isinstance(part, Stretch) and (run := part.run) is not None:
                    self._layout(run)
                else:
                    for block in Joined((part,)).blocks(self._files, self._scratch):
                        self._through(block)
        else:
            for block in layout.blocks(self._files, self._scratch):
                self._through(block)

    def _piece(self, piece: Piece) -> None:
        """Read a piece of a file straight into the buffer, or share its blocks."""
        path, offset, length = piece
        if self._can_share(piece):
            self._share(piece)
            return
        if length >= _ALONE:
            self._flush()
        if length > len(self._buffer) and isinstance(path, StorePath):
            self._buffer = page_buffer(_FAR_BUFFER)
        record = self._hashing.begins(piece)
        done = 0
        while done < length:
            room = self._room()[: length - done]
            self._files.fill(room, path, offset + done)
            self._hashing.take(room)
            self._took(len(room))
            done += len(room)
        if record:
            self._hashing.ends(piece)

    def _through(self, data: memoryview) -> None:
        """Write bytes of a tensor that are in memory of another."""
        self._hashing.take(data)
        self._copy(data)

    def _copy(self, data: memoryview) -> None:
        while data:
            room = self._room()[: len(data)]
            room[:] = data[: len(room)]
            data = data[len(room) :]
            self._took(len(room))

    def _room(self) -> memoryview:
        return self._buffer[self._filled :]

    def _took(self, count: int) -> None:
        self._filled += count
        if self._filled == len(self._buffer):
            self._flush()

    def _flush(self) -> None:
        """Write what is in the buffer."""
        if not self._filled:
            return
        data = self._buffer[: self._filled]
        write_all(self._fd, data, self._position)
        if self._file.whole is not None:
            self._file.whole.update(data)
        self._wrote(self._filled)
        self.control.go_on(self._filled)
        self._filled = 0

    def _wrote(self, count: int) -> None:
        self._position += count
        if self._position - self._paced >= _JOB:
            self._pacer.wrote(self._fd, self._paced, self._position)
            self._paced = self._position

    def _can_share(self, piece: Piece) -> bool:
        """Return whether most of a piece lies in complete blocks, at the same offset in a block as
        in the new file.
        """
        block = self._file.block
        in_phase = block and (piece.offset - self._position - self._filled) % block == 0
        is_worth_it = bool(in_phase) and piece.length >= _WORTH_SHARING
        return is_worth_it and not isinstance(piece.path, StorePath)

    def _share(self, piece: Piece) -> None:
        self._flush()
        source = self._files.descriptor(on_disk(piece.path))
        copy_range(
            source,
            piece.offset,
            self._fd,
            self._position,
            piece.length,
            progress=self.control.go_on,
        )
        record = self._hashing.begins(piece)
        if record or self._hashing.is_needed or self._file.whole is not None:
            for block in self._files.blocks((piece,), self._buffer):
                self._hashing.take(block)
                if self._file.whole is not None:
                    self._file.whole.update(block)
            if record:
                self._hashing.ends(piece)
        else:
            self._hashing.skip(piece.length)
        self._wrote(piece.length)


class _Hashing:
    """The CRC-32 of a tensor while its bytes pass, and what is wanted of its pieces."""

    def __init__(self, part: Data, source: Source, file: NewFile) -> None:
        self._part, self._source, self._file = part, source, file
        self._done = 0
        # Of all before the run, and of the run since then.
        self._crc = self._run = self._run_from = 0
        self._with_crc = file.needs_crc
        self._coming = file.digests.marks(source.tensor)
        self._active: list[tuple[Mark, Any]] = []
        self.is_needed = self._with_crc or bool(self._coming)

    def begins(self, piece: Piece) -> bool:
        """Return whether the CRC-32 of the piece that comes next is of use. Then ``ends`` must be
        called behind it.
        """
        if self._file.checksums.record(piece) is None:
            return False
        self._cut()
        self._with_crc = True
        return True

    def ends(self, piece: Piece) -> None:
        """Note the CRC-32 of a piece. Raises OperationError where it is a record that has another
        one.
        """
        name = self._source.stored.fqn if self._source.piece == piece else ""
        self._file.piece_passed(piece, self._run, name)
        self._cut()
        self._with_crc = self._file.needs_crc

    def take(self, data: memoryview) -> None:
        """Hash the next bytes. Raises OperationError when they are more than planned."""
        begin, end = self._done, self._done + len(data)
        if end > self._part.length:
            raise self._unplanned(end)
        self._done = end
        if self._with_crc:
            self._run = zlib.crc32(data, self._run)
        while self._coming and self._coming[0].begin < end:
            mark = self._coming.pop(0)
            head = digest_head(mark.tensor.dtype, mark.tensor.shape)
            self._active.append((mark, hashlib.sha256(head)))
        for mark, digest in self._active:
            digest.update(data[max(mark.begin - begin, 0) : mark.end - begin])
            if mark.end <= end:
                self._file.passed(mark, digest.hexdigest())
        self._active = [one for one in self._active if one[0].end > end]

    def skip(self, count: int) -> None:
        """Count bytes that pass unread."""
        self._done += count

    def finish(self) -> None:
        """Note the CRC-32 of the tensor. Raises OperationError for less than was planned."""
        if self._done != self._part.length:
            raise self._unplanned(self._done)
        self._cut()
        if self._file.needs_crc and self._part.length:
            self._file.crcs[self._part.fqn] = self._crc

    def _cut(self) -> None:
        """End a run, and begin the next one."""
        length = self._done - self._run_from
        if length and self._file.needs_crc:
            self._crc = combined(self._crc, self._run, length) if self._run_from else self._run
        self._run, self._run_from = 0, self._done

    def _unplanned(self, count: int) -> OperationError:
        return OperationError(
            f"the tensor {self._part.fqn!r} has the wrong size (expected {self._part.length} "
            f"bytes, found {count})"
        )


def writing_threads() -> int:
    """Return the number of threads that write: two at least, as each of them waits for the disk at
    times.
    """
    return max(2, processors())


def write_file(
    target: Path,
    file: OutputFile,
    sources: Mapping[str, Source],
    *,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Write a new file and make it durable; return the digest of each of its tensors.

    ``sources``: by the names in the parts of ``file``. ``progress`` gets bytes written. Raises
    FileExistsError, and as ``Writer`` does; an unfinished file then stays.
    """
    digests = Digests(one.tensor for one in sources.values())
    with Pacer() as pacer:
        jobs = NewFile(target, file, sources, digests, Checksums({})).jobs()

        @contextmanager
        def worker(control: Control) -> Iterator[Callable[[Job], None]]:
            with Writer(pacer, control) as writer:
                yield writer.write

        run_all(jobs, worker, threads=min(len(jobs), writing_threads()), progress=progress)
        pacer.finish()
    return digests.of({name: one.tensor for name, one in sources.items()})


def copy_file(source: AnyPath, target: Path, progress: Progress | None) -> None:
    """Copy one file durably, with its permissions and its time; a symbolic link becomes the file
    behind it.

    Raises FileExistsError, ChangedError when the source is not a regular file, OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(source, StorePath):
        _copy_object(source, target, progress)
        return
    read = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(read)
        if not stat.S_ISREG(status.st_mode):
            raise ChangedError(f"{source} is no longer a regular file")
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


def _copy_object(source: StorePath, target: Path, progress: Progress | None) -> None:
    reader, status = source.files.reader(source), source.stat()
    with open(target, "xb") as file:
        for offset in range(0, reader.size, _COPIED_AT_ONCE):
            file.write(reader.read(offset, min(_COPIED_AT_ONCE, reader.size - offset)))
            if progress is not None:
                progress(min(_COPIED_AT_ONCE, reader.size - offset))
        file.flush()
        os.fchmod(file.fileno(), status.st_mode & 0o777)
        os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
        sync_file(file.fileno())
