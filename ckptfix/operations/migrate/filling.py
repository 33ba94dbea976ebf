"""Fill buffers with the bytes of a new file, part after part."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from ckptfix.checkpoint.pairing import Progress
from ckptfix.errors import OperationError
from ckptfix.storage.pieces import OpenFiles, Piece, page_buffer
from ckptfix.weights.files.parts import Computed, Data, Literal, NewTensor, OutputFile
from ckptfix.weights.layouts import Contiguous
from ckptfix.weights.stored import StoredTensor

_SCRATCH = 256 << 10
"""Bytes that are converted at a time: what is made of them stays in a core's cache (1 MiB takes 5 times as long)."""

_WORTH_SHARING = 1 << 20


class Convert(Protocol):
    """Takes bytes of whole elements, gives those of as many of another dtype, and counts what became infinite."""

    overflowed: int

    def __call__(self, block: memoryview, /) -> memoryview:
        """Return the converted bytes, in memory of their own."""


class Source(NamedTuple):
    """A tensor of the new file, where its bytes come from, and what is to be done with them (None: nothing).

    ``crc``: the CRC-32 that its old file has for exactly these bytes, None when it has none.
    """

    new: NewTensor
    stored: StoredTensor
    convert: Convert | None = None
    crc: int | None = None

    @property
    def piece(self) -> Piece | None:
        """The one stretch of a file that the new tensor is byte for byte, None when it is not that."""
        layout = self.stored.layout
        if self.convert is None and isinstance(layout, Contiguous) and len(layout.pieces) == 1:
            return layout.pieces[0]
        return None


class Run(NamedTuple):
    """A stretch of a slab that belongs to one part of the file; ``done``: bytes of the part before it."""

    part: int
    begin: int
    end: int
    done: int


@dataclass(slots=True)
class Slab:
    """One buffer, and what is in it."""

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
    """Another thread has failed, or the user has had enough: there is nobody to read for."""


def stopping(stop: threading.Event, progress: Progress | None = None) -> Progress:
    """Return a function that passes numbers of bytes on, and raises ``Stopped`` once ``stop`` is set."""

    def report(count: int) -> None:
        if stop.is_set():
            raise Stopped
        if progress is not None:
            progress(count)

    return report


Item = Slab | Shared | BaseException | None
"""What goes from thread to thread: bytes, the error of the one before, or None for the end."""

Free = SimpleQueue["Slab | None"]
Items = SimpleQueue[Item]


class Reader:
    """Fills slabs with the bytes of a file, part after part; room for what must be computed is left empty.

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
                if self._can_share(offset, length):
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
        """Return what is left of the slab at hand, or a new one."""
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
        """Whether most of a piece lies in whole blocks, and at the same place in them as in the new file."""
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
