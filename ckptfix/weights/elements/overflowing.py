"""Numbers that a smaller dtype has no place for: they become infinite."""

import numpy

from ckptfix.weights.elements.converting import Convert, converter

_INFINITE = {
    "F64": ("<u8", 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "F32": ("<u4", 0x7FFFFFFF, 0x7F800000),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
    "F8_E5M2": ("u1", 0x7F, 0x7C),
}
"""Dtype -> how to read it, all bits but the sign, and those of infinity; the others have none."""


class Counting:
    """Converts as ``converter`` does; ``overflowed``: how many finite numbers became infinite so far."""

    __slots__ = ("_convert", "_source", "_target", "overflowed")

    def __init__(self, source: str, target: str) -> None:
        self._convert: Convert = converter(source, target)
        self._source, self._target = source, target
        self.overflowed = 0

    def __call__(self, block: memoryview) -> memoryview:
        """Return the bytes of as many numbers of the other dtype."""
        new = self._convert(block)
        if count := _infinite(new, self._target):
            self.overflowed += count - _infinite(block, self._source)
        return new


def _infinite(block: memoryview, dtype: str) -> int:
    if dtype not in _INFINITE:
        return 0
    kind, mask, infinity = _INFINITE[dtype]
    numbers = numpy.frombuffer(block, kind)
    return int(numpy.count_nonzero((numbers & numbers.dtype.type(mask)) == infinity))
