"""Floating point numbers converted between dtypes, as ``torch.Tensor.to`` rounds them; overflows are counted.

Works on raw bytes. Numbers go to the nearest, ties to even; what is too large becomes infinite; NaN stays NaN, with its
sign. From float64 torch goes through float32 to the 16-bit dtypes (c10/util/Half.h, BFloat16.h), and so does this.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy

Convert = Callable[[memoryview], memoryview]
"""Takes bytes of whole elements, and gives those of as many elements of the other dtype in memory of their own."""

_NATIVE = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_F32 = numpy.dtype("<f4")
_U16 = numpy.dtype("<u2")
_U32 = numpy.dtype("<u4")

_MINI = {
    "F8_E4M3": (4, 7, 0x7F),
    "F8_E5M2": (5, 15, None),
    "F8_E4M3FNUZ": (4, 8, 0x80),
    "F8_E5M2FNUZ": (5, 16, 0x80),
}
"""8-bit dtypes: bits of the exponent, its bias, and the one pattern that is NaN (None: as IEEE 754 has it)."""

_INFINITY = 0x7F800000
_HALF = 0x3F000000
_HALF_SMALLEST = 0x38800000
_HALF_TOO_LARGE = 0x47800000
"""The bits of float32: infinite, 0.5, 2**-14 (the smallest normal float16), 65536 (more than float16 has)."""

_BFLOAT_NAN = 0x7FC0


def converter(source: str, target: str) -> Convert:
    """Return what converts from ``source`` to ``target``; raises KeyError for a dtype that it does not know.

    ``source``: F64, F32, F16, BF16 or one of the 8-bit dtypes; ``target``: one of the first four.
    """
    if source in _MINI or source == "F8_E8M0":
        return _by_table(_of_bytes(source, target), "u1")
    if {source, target} == {"F16", "BF16"}:
        return _by_table(_of_halves(source, target), "<u2")

    def convert(block: memoryview) -> memoryview:
        return _as_bytes(_from_f32(_to_f32(block, source), target))

    if target == "F64" and source != "BF16":
        return _cast(source, target)
    return convert


def _cast(source: str, target: str) -> Convert:
    def convert(block: memoryview) -> memoryview:
        numbers = numpy.frombuffer(block, _NATIVE[source])
        with numpy.errstate(all="ignore"):
            return _as_bytes(numbers.astype(_NATIVE[target]))

    return convert


def _by_table(table: Any, index: str) -> Convert:
    def convert(block: memoryview) -> memoryview:
        return _as_bytes(table[numpy.frombuffer(block, index)])

    return convert


def _to_f32(block: memoryview, source: str) -> Any:
    """Return numbers as float32: exactly, but for float64, which is rounded."""
    if source == "BF16":
        return (numpy.frombuffer(block, _U16).astype(_U32) << 16).view(_F32)
    with numpy.errstate(all="ignore"):
        return numpy.frombuffer(block, _NATIVE[source]).astype(_F32)


def _from_f32(numbers: Any, target: str) -> Any:
    if target in ("F32", "F64"):
        with numpy.errstate(all="ignore"):
            return numbers.astype(_NATIVE[target], copy=False)
    return _to_half(numbers.view(_U32)) if target == "F16" else _to_bfloat(numbers.view(_U32))


def _to_half(bits: Any) -> Any:
    """Return float16 for the bits of float32, with integers: numpy's cast takes 10 times as long outside its range."""
    size = bits & 0x7FFFFFFF
    rounded = (size + (((size >> 13) & 1) + 0xC8000FFF)) >> 13  # a smaller bias, and 13 bits of fraction less
    small = size < _HALF_SMALLEST
    if small.any():  # added to 0.5, float32 itself rounds to the last place of a subnormal float16
        shifted = size[small].view(_F32) + numpy.float32(0.5)
        rounded[small] = shifted.view(_U32) - _HALF
    large = size >= _HALF_TOO_LARGE
    if large.any():
        rounded[large] = numpy.where(size[large] > _INFINITY, 0x7E00, 0x7C00)
    return (rounded | ((bits >> 16) & 0x8000)).astype(_U16)


def _to_bfloat(bits: Any) -> Any:
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(_U16)
    is_nan = (bits & 0x7FFFFFFF) > _INFINITY
    if is_nan.any():
        rounded[is_nan] = ((bits[is_nan] >> 16) & 0x8000 | _BFLOAT_NAN).astype(_U16)
    return rounded


@lru_cache(maxsize=2)
def _of_halves(source: str, target: str) -> Any:
    """Return the 65,536 numbers of one 16-bit dtype in the other."""
    every: Any = numpy.arange(1 << 16, dtype=_U32).astype(_U16)
    return _from_f32(_to_f32(memoryview(every).cast("B"), source), target).view(_U16)


@lru_cache(maxsize=8)
def _of_bytes(source: str, target: str) -> Any:
    """Return the 256 numbers of an 8-bit dtype in another."""
    numbers = numpy.array([_number(source, byte) for byte in range(256)], dtype="<f8")
    if target in ("F64", "F32"):
        return numbers.astype(_NATIVE[target])
    with numpy.errstate(all="ignore"):
        return _from_f32(numbers.astype(_F32), target)


def _number(dtype: str, byte: int) -> float:
    """Return what a byte means (OCP 8-bit floating point; the FNUZ kinds as in MLIR; E8M0 as in OCP microscaling)."""
    if dtype == "F8_E8M0":
        return numpy.nan if byte == 0xFF else 2.0 ** (byte - 127)
    exponent_bits, bias, nan = _MINI[dtype]
    fraction_bits = 7 - exponent_bits
    sign = -1.0 if byte >> 7 else 1.0
    exponent, fraction = (byte & 0x7F) >> fraction_bits, byte & ((1 << fraction_bits) - 1)
    if byte == nan or (nan == 0x7F and byte & 0x7F == nan):
        return float(numpy.copysign(numpy.nan, sign))
    if nan is None and exponent == (1 << exponent_bits) - 1:
        return float(numpy.copysign(numpy.nan if fraction else numpy.inf, sign))
    if exponent == 0:
        return float(sign * fraction * 2.0 ** (1 - bias - fraction_bits))
    return float(sign * (1 + fraction / (1 << fraction_bits)) * 2.0 ** (exponent - bias))


def _as_bytes(numbers: Any) -> memoryview:
    return memoryview(numbers).cast("B")


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
