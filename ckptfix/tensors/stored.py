"""Stored tensors: the layouts of their bytes, the models they make up, and their digests.

A layout is one run, strides, or tiles in several files. Each layout yields the bytes in the order
of safetensors: row-major, little-endian, without a gap. Elements that lie apart are gathered one
window of the file at a time. Nothing is mapped: resident memory stays at what is requested here,
and a file that is truncated meanwhile, or a failing disk, raises an error instead of killing the
process.

The digest of a tensor stays the same through a rename, other shards, a tie, or another format.
``formats.tensor.TensorInfo`` is the same tensor as one file describes it: a header is parsed
without the path of its file, and a scan makes 100,000 of them in a second, so it has offsets where
a ``StoredTensor`` has a layout.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from math import prod
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.storage.files import AnyPath, StorePath
from ckptfix.storage.reading import OpenFiles, Piece
from ckptfix.wording import Brief


class Layout(Protocol):
    """The positions of a tensor's bytes."""

    def blocks(self, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes in order, in views that hold until the next one; each but the last has
        whole elements.

        ``buffer``: memory to use, at least 64 KiB and a multiple of 16 bytes. Raises ChangedError
        when a file has become shorter, OSError.
        """


class Contiguous(Struct, frozen=True):
    """Pieces of files whose bytes, one after the other, are the tensor."""

    pieces: tuple[Piece, ...]

    def blocks(self, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes, as ``Layout`` says."""
        return files.blocks(self.pieces, buffer)


class Strided(Struct, frozen=True, kw_only=True):
    """Elements of one storage that lie apart: a transposed matrix, every second row, an expanded
    row.

    ``storage``: all of the storage. ``first`` and ``stride`` count elements of ``width`` bytes.
    """

    storage: Piece
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    width: int

    @property
    def nbytes(self) -> int:
        """The size of the tensor; more than its storage has where elements repeat, as ``expand``
        makes them.
        """
        return prod(self.shape) * self.width

    def blocks(self, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes, as ``Layout`` says."""
        return gathered(self, files, buffer)


class Tile(Struct, frozen=True):
    """A rectangular part of a tensor: its first index and its length in every dimension, and its
    own bytes.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    layout: Contiguous | Strided


class Tiled(Struct, frozen=True, kw_only=True):
    """Tiles that cover a tensor once, cut in other dimensions than the first. ``width``: bytes of
    an element.
    """

    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]
    width: int

    def blocks(self, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes, as ``Layout`` says; takes as much memory again."""
        return assembled(self, files, buffer)


_WINDOW = 1 << 20
"""Bytes of a file that are held at a time."""

_GAP = 16 << 10
"""Bytes that are read although they are not needed: a separate read behind them takes as long."""

_SMALLEST_BOX, _LARGEST_BOX = 8 << 20, 64 << 20
_PASSES = 8


def box_bytes(layout: Strided) -> int:
    """Return the number of bytes of a tensor to gather at a time: every box may have to go through
    the complete file.

    64 MiB only where the tensor itself has eight times as many.
    """
    return max(_SMALLEST_BOX, min(_LARGEST_BOX, layout.nbytes // _PASSES))


def element_dtype(width: int) -> str:
    """Return the dtype of elements that are only moved: numpy moves whole words fastest."""
    return f"u{width}" if width in (1, 2, 4, 8) else f"V{width}"


def read_box(layout: Strided, begin: tuple[int, ...], out: Any, files: OpenFiles) -> None:
    """Fill ``out``, an array of ``element_dtype`` in any order of memory, with the elements from an
    index on.

    Raises ChangedError when the file has become shorter, OSError.
    """
    import numpy

    place = layout.first + sum(
        index * step for index, step in zip(begin, layout.stride, strict=True) if index
    )
    steps = [  # a file can claim any stride where none is ever taken
        step * layout.width if length > 1 else 0
        for step, length in zip(layout.stride, out.shape, strict=True)
    ]
    order = sorted(range(len(steps)), key=lambda axis: -steps[axis])
    window: Any = numpy.empty(min(_WINDOW, layout.storage.length), numpy.uint8)
    source = _Source(layout, files, window)
    source.fill(
        out.transpose(order),
        tuple(steps[axis] for axis in order),
        layout.storage.offset + place * layout.width,
    )


class _Source:
    """One storage, and the window that is moved over it."""

    def __init__(self, layout: Strided, files: OpenFiles, window: Any) -> None:
        self._path, self._width = layout.storage.path, layout.width
        self._dtype = element_dtype(layout.width)
        self._files = files
        self._fd = None if isinstance(self._path, StorePath) else files.descriptor(self._path)
        self._window = window
        self._view = memoryview(window)

    def fill(self, out: Any, steps: tuple[int, ...], place: int) -> None:
        """Fill an array whose steps, in bytes, get smaller from axis to axis. ``place``: of its
        first element.
        """
        import numpy

        axis, span = len(steps), self._width
        while axis and steps[axis - 1] <= span + _GAP:
            longer = span + (out.shape[axis - 1] - 1) * steps[axis - 1]
            if longer > len(self._window):
                break
            axis, span = axis - 1, longer
        if not axis:
            self._read(0, span, place)
            out[...] = self._array(out.shape, steps)
            return
        # What lies behind ``axis`` is one stretch of the file; several of them go into the window
        # at a time.
        axis -= 1
        step, inner = steps[axis], steps[axis + 1 :]
        is_dense = step <= span + _GAP
        many = 1 + (len(self._window) - span) // (step if is_dense else span)
        for outer in numpy.ndindex(out.shape[:axis]):
            row = out[outer]
            start = place + sum(index * one for index, one in zip(outer, steps, strict=False))
            for first in range(0, len(row), many):
                part = row[first : first + many]
                if is_dense:
                    self._read(0, span + (len(part) - 1) * step, start + first * step)
                else:
                    self._read_apart(len(part), span, start + first * step, step)
                part[...] = self._array(part.shape, (step if is_dense else span, *inner))

    def _array(self, shape: tuple[int, ...], steps: tuple[int, ...]) -> Any:
        import numpy

        return numpy.ndarray(shape, self._dtype, buffer=self._window, strides=steps)

    def _read_apart(self, count: int, span: int, place: int, step: int) -> None:
        """Read stretches that lie apart in the file, one behind the other in the window."""
        fd, view, preadv = self._fd, self._view, os.preadv
        if fd is None:
            for begin in range(0, count * span, span):
                self._files.fill(view[begin : begin + span], self._path, place)
                place += step
            return
        for begin in range(0, count * span, span):
            if preadv(fd, [view[begin : begin + span]], place) != span:
                self._read(begin, span, place)
            place += step

    def _read(self, begin: int, length: int, place: int) -> None:
        """Read into the window. The cache keeps what is read: another box may need the same
        pages.
        """
        got = (
            os.preadv(self._fd, [self._view[begin : begin + length]], place)
            if self._fd is not None
            else 0
        )
        if got < length:  # at the end of the file, where this raises, or interrupted
            self._files.fill(self._view[begin + got : begin + length], self._path, place + got)


def gathered(layout: Strided, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the elements of a strided tensor in row-major order, as many at a time as ``buffer``
    has.
    """
    import numpy

    if 0 in layout.shape:
        return
    most = len(buffer) // layout.width * layout.width
    many = min(max(box_bytes(layout), most) // layout.width, prod(layout.shape))
    room: Any = numpy.empty(many, element_dtype(layout.width))
    for begin, lengths in _boxes(layout.shape, many):
        box = room[: prod(lengths)]
        read_box(layout, begin, box.reshape(lengths), files)
        data = memoryview(box.view(numpy.uint8))
        for done in range(0, len(data), most):
            yield data[done : done + most]


def assembled(layout: Tiled, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
    """Yield a tensor that is cut into tiles in row-major order, as much at a time as ``buffer``
    has.
    """
    import numpy

    if 0 in layout.shape:
        return
    tiles = [tile for tile in layout.tiles if 0 not in tile.lengths]
    begins = numpy.array([tile.offsets for tile in tiles], numpy.int64)
    ends = begins + numpy.array([tile.lengths for tile in tiles], numpy.int64)
    for begin, lengths in _boxes(layout.shape, len(buffer) // layout.width):
        box: Any = numpy.empty(lengths, element_dtype(layout.width))
        end = numpy.add(begin, lengths)
        for number in numpy.flatnonzero(((begins < end) & (begin < ends)).all(axis=1)):
            _place(box, begin, tiles[number], layout.width, files)
        yield memoryview(box.reshape(-1).view(numpy.uint8))


def _boxes(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a tensor into boxes of at most ``most`` elements that follow each other in memory: first
    indexes, lengths.
    """
    import numpy

    axis, inner = len(shape), 1
    while axis and inner * shape[axis - 1] <= most:
        axis -= 1
        inner *= shape[axis]
    if not axis:
        yield (0,) * len(shape), shape
        return
    axis -= 1
    many = most // inner
    for outer in numpy.ndindex(shape[:axis]):
        for first in range(0, shape[axis], many):
            lengths = (*(1 for _ in outer), min(many, shape[axis] - first), *shape[axis + 1 :])
            yield (*outer, first, *(0 for _ in shape[axis + 1 :])), lengths


def _place(box: Any, begin: tuple[int, ...], tile: Tile, width: int, files: OpenFiles) -> None:
    """Put the part of a tile into a box that lies in it. ``begin``: the first index of the box."""
    import numpy

    low = [max(pair) for pair in zip(begin, tile.offsets, strict=True)]
    ends = (
        (first + length, start + many)
        for first, length, start, many in zip(
            begin, box.shape, tile.offsets, tile.lengths, strict=True
        )
    )
    lengths = [min(pair) - start for pair, start in zip(ends, low, strict=True)]
    place, inside = (
        tuple(
            slice(start - first, start - first + length)
            for start, first, length in zip(low, firsts, lengths, strict=True)
        )
        for firsts in (begin, tile.offsets)
    )
    if isinstance(tile.layout, Strided):
        read_box(tile.layout, tuple(part.start for part in inside), box[place], files)
        return
    skip = (
        # The box is cut along one dimension and has all of those behind it: its part of a tile is
        # one run.
        0
    )
    for part, length in zip(inside, tile.lengths, strict=True):
        skip = skip * length + part.start
    data = memoryview(bytearray(prod(lengths) * width))
    _read(tile.layout, skip * width, data, files)
    box[place] = numpy.frombuffer(data, element_dtype(width)).reshape(lengths)


def _read(run: Contiguous, skip: int, view: memoryview, files: OpenFiles) -> None:
    """Fill ``view`` with the bytes of a tile from ``skip`` on."""
    for path, offset, length in run.pieces:
        take = max(0, min(length - skip, len(view)))
        if take:
            files.fill(view[:take], path, offset + skip)
            view = view[take:]
        skip = max(0, skip - length)


class Format(Enum):
    """The format in which the weights of a model are stored. The value is the word of ``--to``, and
    for reports.
    """

    SAFETENSORS = "safetensors"
    TORCH = "bin"
    DCP = "dcp"
    DEEPSPEED = "deepspeed"


class StoredTensor(NamedTuple):
    """One tensor: its name, its dtype in safetensors' nouns, its shape, and the layout of its
    bytes.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def blocks(self, files: OpenFiles, buffer: memoryview) -> Iterator[memoryview]:
        """Yield its bytes in row-major order, as ``Layout.blocks`` does."""
        return self.layout.blocks(files, buffer)


class Weights(Brief, Struct, frozen=True, kw_only=True):
    """The weights of one model.

    ``label``: its name in messages: a file, an index, a folder, or ``ckpt.pt['model']``. ``index``:
    its position among the models of a ``save_state`` folder. ``home``: the sub-folder that it lies
    in, such as ``unet`` of a script's hook. ``files``: its files, relative to the checkpoint, an
    index included. ``tensors``: in the order of their files; a tie is in it once. ``ties``: other
    name -> name in ``tensors``. ``opaque``: names whose values cannot be read as tensors without
    executing, such as an extra state. ``unread``: those of them that are tensors of a kind that
    only torch itself can store -> the kind in words: "a quantized tensor (torch.qint8)".
    ``nested``: those of them that contain tensors, such as an optimizer next to tensors. ``left``:
    other contents of its file that belong to no model of the checkpoint, such as an optimizer in a
    training dict. ``path``: the keys that lead to it in its file. ``versions``: module -> version,
    of the ``_metadata`` of a torch file. ``checksums``: stretch of a file -> the CRC-32 that the
    file has for it. ``metadata``: the words in the header of safetensors files, without the ties.
    ``disputed``: those that shards do not agree on, which ``metadata`` leaves out. ``index_words``:
    the other content of an index. ``views``: tensors that share a storage of a torch file with
    tensors unlike them. ``names_in_order``: names in the order of the state dict that was saved,
    where the files record it apart from the bytes; some may be ties or no tensors.
    """

    label: str
    format: Format
    index: int = 0
    files: tuple[PurePosixPath, ...] = ()
    tensors: tuple[StoredTensor, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    opaque: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    nested: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    versions: Mapping[str, int] = field(default_factory=dict)
    checksums: Mapping[Piece, int] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    disputed: tuple[str, ...] = ()
    index_words: Mapping[str, Any] = field(default_factory=dict)
    views: tuple[str, ...] = ()
    names_in_order: tuple[str, ...] = ()
    home: PurePosixPath = field(default_factory=PurePosixPath)

    @property
    def position(self) -> tuple[PurePosixPath, int]:
        """The position at which a loader finds it: its folder, and its index among the models
        there.
        """
        return self.home, self.index

    def below(self, where: PurePosixPath) -> "Weights":
        """Return the same weights as a checkpoint has them in whose sub-folder ``where`` they
        lie.
        """
        is_folder = self.format in (Format.DCP, Format.DEEPSPEED) and any(
            len(file.parts) == 1 for file in self.files
        )
        return replace(
            self,
            label=str((where.parent if is_folder else where) / self.label),
            files=tuple(where / file for file in self.files),
            home=where / self.home,
        )

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes, each tie once."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def named(self) -> dict[str, StoredTensor]:
        """Return every tensor by every name it has, those of ties too."""
        found = {tensor.fqn: tensor for tensor in self.tensors}
        return found | {name: found[kept]._replace(fqn=name) for name, kept in self.ties.items()}


class StoredCheckpoint(Struct, frozen=True, kw_only=True):
    """The content of a path: the weights of its models in the order of their positions.

    ``root``: the folder; for a lone file the folder it lies in. ``only``: the name of the lone
    file. ``rivals``: files, relative to the root, that hold weights and none of these: of one of
    the models in a second format, or of an earlier save with other shards.
    """

    root: AnyPath
    only: str | None = None
    weights: tuple[Weights, ...] = ()
    rivals: tuple[PurePosixPath, ...] = ()
    is_save_state: bool = False


BLOCK = 1 << 20
"""Bytes that are read and hashed at a time: hashlib lets other threads run meanwhile."""


def digest_head(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the beginning of the input to a tensor's digest, before its bytes."""
    return json.dumps([dtype, list(shape)]).encode() + b"\n"


def tensor_digest(tensor: StoredTensor, files: OpenFiles, buffer: memoryview) -> str:
    """Return the sha256 over dtype, shape and bytes. Raises as ``StoredTensor.blocks`` does."""
    digest = hashlib.sha256(digest_head(tensor.dtype, tensor.shape))
    for block in tensor.blocks(files, buffer):
        digest.update(block)
    return digest.hexdigest()
