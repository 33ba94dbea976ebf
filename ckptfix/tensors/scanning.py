"""Values of tensors, looked at while they are hashed: NaN, Inf, all zero, and pages of zeros.

A block of floats needs two reductions only: read as integers, every finite number is smaller than
Inf, and every finite negative one smaller than -Inf when the sign is read as a digit. Bad values
are counted where those two say that there are any. Values are looked at in their order, pages of
zeros in the order of the files.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy
from msgspec import Struct

from ckptfix.storage.reading import OpenFiles, Piece
from ckptfix.tensors.stored import Contiguous, Layout, StoredTensor, Strided, Tiled

PAGE = 4096
"""Bytes that a file system writes, and loses, together."""

MOST_RUNS = 1000
"""Runs of zero pages that are remembered; more are counted only."""


class ZeroRun(NamedTuple):
    """Pages of zeros that follow each other in a piece of a file, from ``begin`` to ``end`` in
    bytes of the piece.
    """

    piece: Piece
    begin: int
    end: int


class PageSearch:
    """Counter of zero pages in the bytes of pieces, one after the other, in blocks of any length.
    ``pages``: number of pages of their files that lie inside a piece and are zero; ``runs``: the
    first 1000 runs of them.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pages = 0
        self.runs: list[ZeroRun] = []
        self._pieces = pieces
        self._number = 0
        self._done = 0
        self._is_open = False

    def feed(self, data: Any) -> None:
        """Look at the next bytes, an array of them."""
        while len(data) and self._number < len(self._pieces):
            left = self._pieces[self._number].length - self._done
            self._look(data[:left])
            data = data[left:]
            if self._done == self._pieces[self._number].length:
                self._number, self._done, self._is_open = self._number + 1, 0, False

    def _look(self, data: Any) -> None:
        """Find the pages of zeros that end in this part of a piece; one that is under way goes on
        in the next.
        """
        begin = self._done
        self._done += len(data)
        phase = (self._pieces[self._number].offset + begin) % PAGE
        skip = -phase % PAGE
        if phase:
            head = data[:skip]
            self._is_open = self._is_open and not head.any()
            if len(head) < skip:
                return
            if self._is_open:
                self._add(begin + skip - PAGE)
        pages = data[skip : skip + (len(data) - skip) // PAGE * PAGE].reshape(-1, PAGE)
        # Three bytes of a page say no at once for all but one in 16 million of random ones.
        likely = numpy.flatnonzero((pages[:, 0] | pages[:, PAGE // 2] | pages[:, -1]) == 0)
        for number in likely:
            if not pages[number].any():
                self._add(begin + skip + int(number) * PAGE)
        rest = data[skip + pages.size :]
        self._is_open = len(rest) > 0 and not rest.any()

    def _add(self, begin: int) -> None:
        self.pages += 1
        piece, last = self._pieces[self._number], self.runs[-1] if self.runs else None
        if last is not None and last.end == begin and last.piece is piece:
            self.runs[-1] = ZeroRun(piece, last.begin, begin + PAGE)
        elif len(self.runs) < MOST_RUNS:
            self.runs.append(ZeroRun(piece, begin, begin + PAGE))


class _Bits(NamedTuple):
    """The bits of a dtype: bytes of a number, Inf (one more than the largest finite), and the
    numbers of a value.

    ``has_inf`` off: the pattern ``inf`` is NaN. ``large``: the first number above 1e20, 0 in a
    dtype without such.
    """

    width: int
    inf: int
    parts: int = 1
    has_inf: bool = True
    large: int = 0


_IEEE = {
    "F16": _Bits(2, 0x7C00),
    "BF16": _Bits(2, 0x7F80, large=0x60AE),
    "F32": _Bits(4, 0x7F800000, large=0x60AD78EC),
    "F64": _Bits(8, 0x7FF << 52, large=0x4415AF1D78B58C40),
    "C64": _Bits(4, 0x7F800000, 2, large=0x60AD78EC),
    "C128": _Bits(8, 0x7FF << 52, 2, large=0x4415AF1D78B58C40),
    "F8_E5M2": _Bits(1, 0x7C),
    "F8_E4M3": _Bits(1, 0x7F, has_inf=False),
}
_ONE_NAN = {"F8_E5M2FNUZ": 0x80, "F8_E4M3FNUZ": 0x80, "F8_E8M0": 0xFF}
"""Dtypes of one byte with a single NaN, no Inf and no negative zero."""

FLOATS = frozenset((*_IEEE, *_ONE_NAN))
"""The dtypes that have NaN or Inf. Of the others no pattern is wrong, and all zero bits are 0."""


class Scan(Struct):
    """The values of a tensor in brief. Indexes count elements in row-major order, None when there
    is no such value.

    ``large``: the number of finite ones from 1e20 on, ``largest`` and ``least_large``: the extremes
    of their patterns. ``is_zero``: every value is 0 or -0. ``is_negative``: some number of an IEEE
    format is below 0. ``zero_pages``: number of 4 KiB pages of
    its files that lie inside one of its pieces and are all zeros; ``zero_runs``: the first 1000
    runs of them. Both are None where they cannot be counted.
    """

    nan: int = 0
    inf: int = 0
    first_nan: int | None = None
    first_inf: int | None = None
    large: int = 0
    largest: int = 0
    least_large: int = 0
    is_zero: bool = True
    is_negative: bool = False
    zero_pages: int | None = None
    zero_runs: tuple[ZeroRun, ...] | None = None


class Scanner:
    """Takes the blocks of one tensor, in order."""

    def __init__(self, dtype: str) -> None:
        self._scan = Scan()
        self._look: Callable[[Any], None]
        if dtype in _IEEE:
            self._bits = _IEEE[dtype]
            self._look = self._ieee
        elif dtype in _ONE_NAN:
            self._nan = _ONE_NAN[dtype]
            self._has_zero = dtype != "F8_E8M0"  # its smallest number is 2**-127
            self._look = self._one_nan
        else:
            self._look = self._whole
        self._done = 0

    def feed(self, data: Any) -> None:
        """Look at the next bytes, an array of them: whole elements."""
        self._look(data)
        self._done += len(data)

    def result(self) -> Scan:
        """Return the result so far."""
        if not self._done:
            self._scan.is_zero = False
        return self._scan

    def _ieee(self, data: Any) -> None:
        width, inf, parts, has_inf, large = self._bits
        sign = 1 << (8 * width - 1)
        signed, unsigned = data.view(f"<i{width}"), data.view(f"<u{width}")
        high, top = int(signed.max()), int(unsigned.max())
        if high > 0 or top > sign:
            self._scan.is_zero = False
            self._scan.is_negative |= top > sign
        odd = large or inf
        if high < odd and top < odd | sign:
            return
        magnitude = unsigned & (sign - 1)
        if large:
            self._count_large(magnitude[(magnitude >= large) & (magnitude < inf)])
        if high < inf and top < inf | sign:
            return
        wrong = magnitude == inf
        self._count(
            magnitude > inf if has_inf else wrong, wrong if has_inf else None, width * parts, parts
        )

    def _count_large(self, patterns: Any) -> None:
        scan = self._scan
        if len(patterns):
            least = int(patterns.min())
            scan.least_large = min(scan.least_large, least) if scan.large else least
            scan.largest = max(scan.largest, int(patterns.max()))
            scan.large += len(patterns)

    def _one_nan(self, data: Any) -> None:
        if not self._has_zero or data.any():
            self._scan.is_zero = False
        self._count(data == self._nan, None, 1, 1)

    def _whole(self, data: Any) -> None:
        if data.any():
            self._scan.is_zero = False

    def _count(self, nan: Any, inf: Any, width: int, parts: int) -> None:
        """Add the marked numbers of a block; of a complex value either part may be the wrong
        one.
        """
        scan, before = self._scan, self._done // width
        if parts > 1:
            nan = nan.reshape(-1, parts).any(axis=1)
            inf = inf.reshape(-1, parts).any(axis=1) & ~nan
        if count := int(nan.sum()):
            scan.nan += count
            scan.first_nan = (
                before + int(nan.argmax()) if scan.first_nan is None else scan.first_nan
            )
        if inf is not None and (count := int(inf.sum())):
            scan.inf += count
            scan.first_inf = (
                before + int(inf.argmax()) if scan.first_inf is None else scan.first_inf
            )


_MOST_SPREAD = 2
"""Most times the bytes of a tensor that its stretch of a storage may have to be read for pages of
zeros.
"""


class Look:
    """Scan of the blocks of a tensor; pieces that do not lie in the order of its elements are read
    again after that.
    """

    def __init__(self, tensor: StoredTensor) -> None:
        self._values = Scanner(tensor.dtype)
        pieces = pieces_of(tensor.layout, tensor.nbytes)
        self._again = () if isinstance(tensor.layout, Contiguous) else pieces or ()
        self._pages = None if pieces is None else PageSearch(pieces)

    def feed(self, block: memoryview) -> None:
        """Look at the next bytes: whole elements."""
        data = numpy.frombuffer(block, numpy.uint8)
        self._values.feed(data)
        if self._pages is not None and not self._again:
            self._pages.feed(data)

    def reread(self, files: OpenFiles, buffer: memoryview) -> Iterator[None]:
        """Read the remaining pieces, a step for each block. Raises as ``OpenFiles.blocks`` does."""
        for block in files.blocks(self._again, buffer):
            assert self._pages is not None
            self._pages.feed(numpy.frombuffer(block, numpy.uint8))
            yield

    def result(self) -> Scan:
        """Return the result."""
        found = self._values.result()
        if self._pages is not None:
            found.zero_pages, found.zero_runs = self._pages.pages, tuple(self._pages.runs)
        return found


def pieces_of(layout: Layout, nbytes: int) -> tuple[Piece, ...] | None:
    """Return the stretches of files that hold a tensor of so many bytes; None when they hold far
    more than that.
    """
    if isinstance(layout, Contiguous):
        return _joined(layout.pieces)
    if isinstance(layout, Strided):
        if 0 in layout.shape:
            return ()
        steps = zip(layout.shape, layout.stride, strict=True)
        last = layout.first + sum((count - 1) * step for count, step in steps)
        length = (last + 1 - layout.first) * layout.width
        if length > _MOST_SPREAD * nbytes:
            return None
        return (
            Piece(layout.storage.path, layout.storage.offset + layout.first * layout.width, length),
        )
    if isinstance(layout, Tiled):
        width = layout.width
        parts = [pieces_of(tile.layout, prod(tile.lengths) * width) for tile in layout.tiles]
        if any(part is None for part in parts):
            return None
        return _joined(tuple(piece for part in parts for piece in part or ()))
    return None


def _joined(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Return pieces, those as one that follow each other in a file, and none that is empty."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and (last.path, last.offset + last.length) == (
            piece.path,
            piece.offset,
        ):
            found[-1] = last._replace(length=last.length + piece.length)
        elif piece.length:
            found.append(piece)
    return tuple(found)
