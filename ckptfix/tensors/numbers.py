"""Numbers in the raw bytes of tensors: converted as ``torch.Tensor.to`` rounds them, and compared.

A conversion rounds to the nearest number, ties to even. Numbers that are too large become infinite
and are counted; NaN stays NaN, with its sign. From float64 torch goes through float32 to the 16-bit
dtypes (c10/util/Half.h, BFloat16.h), and so does this module. The distance between two tensors is
computed block by block, in float64, with little memory.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy
from msgspec import Struct

from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.storage.comparing import memcmp

Convert = Callable[[memoryview], memoryview]
"""Converter from bytes of complete elements to those of as many elements of the other dtype, in
memory of their own.
"""

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
"""8-bit dtypes: bits of the exponent, its bias, and the one pattern that is NaN (None: as IEEE 754
has it).
"""

_INFINITY = 0x7F800000
_HALF = 0x3F000000
_HALF_SMALLEST = 0x38800000
_HALF_TOO_LARGE = 0x47800000
"""The bits of float32: infinite, 0.5, 2**-14 (the smallest normal float16), 65536 (more than
float16 has).
"""

_BFLOAT_NAN = 0x7FC0


def converter(source: str, target: str) -> Convert:
    """Return the converter from ``source`` to ``target``; raises KeyError for an unknown dtype.

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
    """Return float16 for the bits of float32, with integers: numpy's cast takes 10 times as long
    outside its range.
    """
    size = bits & 0x7FFFFFFF
    # A smaller bias, and 13 bits of fraction less.
    rounded = (size + (((size >> 13) & 1) + 0xC8000FFF)) >> 13
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
    """Return the values of all bytes (OCP 8-bit floating point; the FNUZ kinds as in MLIR; E8M0 as
    in OCP microscaling).
    """
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
    """Converts as ``converter`` does; ``overflowed``: how many finite numbers became infinite so
    far.
    """

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


_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_INTEGERS = {
    "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8",
}  # fmt: skip
_COMPLEX = {"C64": "<c8", "C128": "<c16"}
_DOT = 8192
"""Elements of a scalar product: from 10,000 on OpenBLAS starts threads, and waits for them 100
times as long.
"""

# Squares of numbers between these, and sums of them, neither vanish nor overflow.
_SQUARES = (1e-140, 1e140)

ELEMENTS = 1 << 15
"""Number of elements to compare at a time: as float64 they fit the cores' caches."""

Tolerance = tuple[float, float]
"""Relative and absolute: an element differs when ``|a - b| > absolute + relative * |a|``."""


class Tally(Struct, kw_only=True):
    """Facts about the elements seen so far.

    ``differing``: those whose bytes differ; of two dtypes, whose values do, NaN being equal to NaN.
    ``beyond``: those of them outside the tolerance, or all without one. ``apart``: those of them
    that are NaN or infinite on a side; all figures below leave these out. ``largest``: the largest
    distance. ``distance``: the 2-norm of the differences; ``norm``: that of the first tensor.
    """

    elements: int = 0
    differing: int = 0
    beyond: int = 0
    apart: int = 0
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0
    largest: float = 0.0
    distance: float = 0.0
    norm: float = 0.0

    @property
    def relative(self) -> float:
        """The relative norm, ||a - b|| / ||a||; infinite where only ||a|| is 0."""
        if self.distance == 0:
            return 0.0
        if self.norm == 0 or math.isinf(self.distance):
            return math.inf
        return self.distance / self.norm

    def add(self, more: "Tally") -> None:
        """Add the tally of further elements."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(more, name)
            if name == "largest":
                self.largest = max(mine, theirs)
            elif isinstance(mine, float):
                # Which never overflows on the way.
                setattr(self, name, math.hypot(mine, theirs))
            else:
                setattr(self, name, mine + theirs)


def has_numbers(dtype: str) -> bool:
    """Return whether the elements of a dtype fill complete bytes, so that they can be compared
    here.
    """
    return DTYPE_BITS[dtype] % 8 == 0


def same_bytes(one: memoryview, other: memoryview) -> bool:
    """Return whether two blocks of one length are equal; other threads run meanwhile."""
    order: int = memcmp(_address(one), _address(other), len(one))
    return order == 0


def tally(
    one: memoryview, other: memoryview, dtypes: tuple[str, str], tolerance: Tolerance | None = None
) -> Tally:
    """Compare two blocks of as many elements, of dtypes that have numbers; ``ELEMENTS`` at a time
    is fastest.

    Two dtypes are compared in float64, or complex128; two integer types exactly, unless one is U64.
    """
    same = dtypes[0] == dtypes[1]
    with numpy.errstate(all="ignore"):
        if same and same_bytes(one, other):
            return _of_equals(one, dtypes[0])
        a, b = numbers_in(one, dtypes[0]), numbers_in(other, dtypes[1])
        if a.dtype != b.dtype:
            wide = "<c16" if "c" in (a.dtype.kind, b.dtype.kind) else "<f8"
            a, b = a.astype(wide), b.astype(wide)
        if same:
            unequal = _bits(one, dtypes[0]) != _bits(other, dtypes[0])
            if unequal.ndim == 2:  # an element of 16 bytes is two words
                unequal = unequal.any(axis=1)
        else:
            unequal = (a != b) & ~(numpy.isnan(a) & numpy.isnan(b))
        if a.dtype.kind in "iu":
            return _of_integers(a, b, unequal, tolerance)
        return _of_floats(a, b, unequal, tolerance)


def _of_equals(block: memoryview, dtype: str) -> Tally:
    numbers = numbers_in(block, dtype)
    if numbers.dtype.kind in "iu":
        return Tally(elements=len(numbers), norm=_norm(numbers.astype("<f8")))
    norm = _norm(numbers)
    if math.isfinite(norm):
        return Tally(elements=len(numbers), norm=norm)
    nan, inf = _count(numpy.isnan(numbers)), _count(numpy.isinf(numbers))
    norm = _norm(numbers[numpy.isfinite(numbers)])
    return Tally(elements=len(numbers), norm=norm, nan_a=nan, nan_b=nan, inf_a=inf, inf_b=inf)


def _of_integers(a: Any, b: Any, unequal: Any, tolerance: Tolerance | None) -> Tally:
    # The difference of two 64-bit integers can need 65 bits; its size alone fits 64 without a sign.
    apart = (numpy.maximum(a, b).view("<u8") - numpy.minimum(a, b).view("<u8")).astype("<f8")
    sizes = numpy.abs(a.astype("<f8"))
    differing = _count(unequal)
    return Tally(
        elements=len(a),
        differing=differing,
        beyond=(
            differing if tolerance is None else _count(apart > tolerance[1] + tolerance[0] * sizes)
        ),
        largest=float(apart.max(initial=0.0)),
        distance=_norm(apart),
        norm=_norm(sizes),
    )


def _of_floats(a: Any, b: Any, unequal: Any, tolerance: Tolerance | None) -> Tally:
    found = Tally(elements=len(a), differing=_count(unequal))
    difference = a - b
    norm, distance = _norm(a), _norm(difference)
    beyond_apart = 0
    if not (math.isfinite(norm) and math.isfinite(distance)):
        found.nan_a, found.nan_b = _count(numpy.isnan(a)), _count(numpy.isnan(b))
        found.inf_a, found.inf_b = _count(numpy.isinf(a)), _count(numpy.isinf(b))
        finite = numpy.isfinite(a) & numpy.isfinite(b)
        found.apart = _count(unequal & ~finite)
        # With a tolerance NaN is NaN, whatever its other bits are.
        beyond_apart = _count(unequal & ~finite & ~(numpy.isnan(a) & numpy.isnan(b)))
        a, difference, unequal = a[finite], difference[finite], unequal[finite]
        norm, distance = _norm(a), _norm(difference)
    found.norm, found.distance, found.largest = norm, distance, _largest(difference)
    if tolerance is None:
        found.beyond = found.differing
    else:
        limit = tolerance[1] + tolerance[0] * numpy.abs(a)
        found.beyond = beyond_apart + _count(unequal & (numpy.abs(difference) > limit))
    return found


def numbers_in(block: memoryview, dtype: str) -> Any:
    """Return the elements as float64, complex128, or, integers of up to 64 bits, as int64 or
    uint64.
    """
    if dtype in _FLOATS:
        return numpy.frombuffer(block, _FLOATS[dtype]).astype("<f8", copy=False)
    if dtype in _INTEGERS:
        return numpy.frombuffer(block, _INTEGERS[dtype]).astype(
            "<u8" if dtype == "U64" else "<i8", copy=False
        )
    if dtype in _COMPLEX:
        return numpy.frombuffer(block, _COMPLEX[dtype]).astype("<c16", copy=False)
    if dtype == "BOOL":
        return (numpy.frombuffer(block, "u1") != 0).astype("<i8")
    return numpy.frombuffer(converter(dtype, "F64")(block), "<f8")


def _bits(block: memoryview, dtype: str) -> Any:
    width = DTYPE_BITS[dtype] // 8
    return numpy.frombuffer(block, f"<u{min(width, 8)}").reshape((-1, 2) if width == 16 else -1)


def _norm(numbers: Any) -> float:
    """Return the 2-norm; NaN or infinite when a number is."""
    square = _square(numbers)
    if _SQUARES[0] < square < _SQUARES[1]:
        return math.sqrt(square)
    largest = _largest(numbers)
    if largest == 0 or not math.isfinite(largest):
        return largest
    scale = 2.0 ** (math.frexp(largest)[1] - 1)
    return math.sqrt(_square(numbers / scale)) * scale


def _square(numbers: Any) -> float:
    """Return the sum of the squares of float64 or complex128."""
    parts = numbers.view("<f8")
    whole = len(parts) - len(parts) % _DOT
    rows = parts[:whole].reshape(-1, 1, _DOT)
    rest = parts[whole:]
    return float(numpy.matmul(rows, rows.reshape(-1, _DOT, 1)).sum()) + float(numpy.dot(rest, rest))


def _largest(numbers: Any) -> float:
    if not len(numbers):
        return 0.0
    if numbers.dtype.kind == "c":
        return float(numpy.abs(numbers).max())
    return max(float(numbers.max()), -float(numbers.min()))


def _count(flags: Any) -> int:
    return int(numpy.count_nonzero(flags))


def _address(block: memoryview) -> int:
    array = numpy.frombuffer(block, "u1")
    address: int = array.__array_interface__["data"][0]
    return address
