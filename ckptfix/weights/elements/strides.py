"""Read a box of a tensor whose elements lie apart in its storage, a window of the file at a time.

Nothing is mapped: resident memory stays what is asked for here, and a file that is cut short meanwhile, or a disk that
fails, is an error and not the end of the process.
"""

import os
from math import prod
from typing import Any

import numpy

from ckptfix.storage.pieces import OpenFiles
from ckptfix.weights.layouts import Strided

_WINDOW = 1 << 20
"""Bytes of a file that are held at a time."""

_GAP = 16 << 10
"""Bytes that are read along where nobody needs them: a read of its own behind them takes as long."""

_SMALLEST_BOX, _LARGEST_BOX = 8 << 20, 64 << 20
_PASSES = 8


def box_bytes(layout: Strided) -> int:
    """Return how many bytes of a tensor are best gathered at a time: every box may have to go through the whole file.

    64 MiB only where the tensor itself has eight times as many.
    """
    nbytes = prod(layout.shape) * layout.width
    return max(_SMALLEST_BOX, min(_LARGEST_BOX, nbytes // _PASSES))


def element_dtype(width: int) -> str:
    """Return the dtype of elements that are only moved: numpy moves whole words fastest."""
    return f"u{width}" if width in (1, 2, 4, 8) else f"V{width}"


def read_box(layout: Strided, begin: tuple[int, ...], out: Any, files: OpenFiles) -> None:
    """Fill ``out``, an array of ``element_dtype`` in any order of memory, with the elements from an index on.

    Raises ChangedError when the file has become shorter, OSError.
    """
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
        self._files, self._fd = files, files.descriptor(layout.storage.path)
        self._window = window
        self._view = memoryview(window)

    def fill(self, out: Any, steps: tuple[int, ...], place: int) -> None:
        """Fill an array whose steps, in bytes, get smaller from axis to axis. ``place``: of its first element."""
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
        # What lies behind ``axis`` is one stretch of the file; several of them go into the window at a time.
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
        return numpy.ndarray(shape, self._dtype, buffer=self._window, strides=steps)

    def _read_apart(self, count: int, span: int, place: int, step: int) -> None:
        """Read stretches that lie apart in the file, one behind the other in the window."""
        fd, view, preadv = self._fd, self._view, os.preadv
        for begin in range(0, count * span, span):
            if preadv(fd, [view[begin : begin + span]], place) != span:
                self._read(begin, span, place)
            place += step

    def _read(self, begin: int, length: int, place: int) -> None:
        """Read into the window. The cache keeps what is read: another box may need the same pages."""
        got = os.preadv(self._fd, [self._view[begin : begin + length]], place)
        if got < length:  # at the end of the file, where this raises, or interrupted
            self._files.fill(self._view[begin + got : begin + length], self._path, place + got)
