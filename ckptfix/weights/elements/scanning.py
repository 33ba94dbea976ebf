"""Look at the values of a tensor while its bytes pass by: NaN, Inf, all zero.

A block of floats needs two reductions only: read as integers, every finite number is smaller than Inf, and every finite
negative one smaller than -Inf when the sign is read as a digit. What is wrong is counted where those two say that there
is any.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptfix.weights.elements.pages import ZeroRun


class _Bits(NamedTuple):
    """How a dtype is read: bytes of a number, what Inf is (one more than the largest finite), and how many a value has.

    ``has_inf`` off: the pattern ``inf`` is NaN.
    """

    width: int
    inf: int
    parts: int = 1
    has_inf: bool = True


_IEEE = {
    "F16": _Bits(2, 0x7C00),
    "BF16": _Bits(2, 0x7F80),
    "F32": _Bits(4, 0x7F800000),
    "F64": _Bits(8, 0x7FF << 52),
    "C64": _Bits(4, 0x7F800000, 2),
    "C128": _Bits(8, 0x7FF << 52, 2),
    "F8_E5M2": _Bits(1, 0x7C),
    "F8_E4M3": _Bits(1, 0x7F, has_inf=False),
}
_ONE_NAN = {"F8_E5M2FNUZ": 0x80, "F8_E4M3FNUZ": 0x80, "F8_E8M0": 0xFF}
"""Dtypes of one byte with a single NaN, no Inf and no negative zero."""

FLOATS = frozenset((*_IEEE, *_ONE_NAN))
"""The dtypes that have NaN or Inf. Of the others no pattern is wrong, and all zero bits are 0."""


@dataclass(slots=True)
class Scan:
    """What the values of a tensor are. Indexes count elements in row-major order, None when there is no such value.

    ``is_zero``: every value is 0 or -0. ``zero_pages``: how many 4 KiB pages of its files lie inside of one of its
    pieces and hold nothing but zeros; ``zero_runs``: where those are, the first 1000 runs. Both are None where nobody
    could look.
    """

    nan: int = 0
    inf: int = 0
    first_nan: int | None = None
    first_inf: int | None = None
    is_zero: bool = True
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
        """Return what was found so far."""
        if not self._done:
            self._scan.is_zero = False
        return self._scan

    def _ieee(self, data: Any) -> None:
        width, inf, parts, has_inf = self._bits
        sign = 1 << (8 * width - 1)
        signed, unsigned = data.view(f"<i{width}"), data.view(f"<u{width}")
        high, top = int(signed.max()), int(unsigned.max())
        if high > 0 or top > sign:
            self._scan.is_zero = False
        if high < inf and top < inf | sign:
            return
        magnitude = unsigned & (sign - 1)
        wrong = magnitude == inf
        self._count(magnitude > inf if has_inf else wrong, wrong if has_inf else None, width * parts, parts)

    def _one_nan(self, data: Any) -> None:
        if not self._has_zero or data.any():
            self._scan.is_zero = False
        self._count(data == self._nan, None, 1, 1)

    def _whole(self, data: Any) -> None:
        if data.any():
            self._scan.is_zero = False

    def _count(self, nan: Any, inf: Any, width: int, parts: int) -> None:
        """Add the marked numbers of a block; of a complex value either part may be the wrong one."""
        scan, before = self._scan, self._done // width
        if parts > 1:
            nan = nan.reshape(-1, parts).any(axis=1)
            inf = inf.reshape(-1, parts).any(axis=1) & ~nan
        if count := int(nan.sum()):
            scan.nan += count
            scan.first_nan = before + int(nan.argmax()) if scan.first_nan is None else scan.first_nan
        if inf is not None and (count := int(inf.sum())):
            scan.inf += count
            scan.first_inf = before + int(inf.argmax()) if scan.first_inf is None else scan.first_inf
