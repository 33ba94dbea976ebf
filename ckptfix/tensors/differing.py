"""The distance between the numbers of two tensors, block by block: on raw bytes, in float64, with little memory."""

import ctypes
import math
from dataclasses import dataclass, fields
from typing import Any

import numpy

from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.tensors.converting import converter

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_INTEGERS = {
    "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
}  # fmt: skip
_COMPLEX = {"C64": "<c8", "C128": "<c16"}
_DOT = 8192
"""Elements of a scalar product: from 10,000 on OpenBLAS starts threads, and waits for them 100 times as long."""

_SQUARES = (1e-140, 1e140)  # squares of numbers between these, and sums of them, neither vanish nor overflow

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int

ELEMENTS = 1 << 15
"""Elements that are best compared at a time: as float64 they fit the cores' caches."""

Tolerance = tuple[float, float]
"""Relative and absolute: an element differs when ``|a - b| > absolute + relative * |a|``."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Facts about the elements seen so far.

    ``differing``: those whose bytes differ; of two dtypes, whose values do, NaN being equal to NaN. ``beyond``: those
    of them outside the tolerance, or all without one. ``apart``: those of them that are NaN or infinite on a side; all
    figures below leave these out. ``largest``: the largest distance. ``distance``: the 2-norm of the differences;
    ``norm``: that of the first tensor.
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
        """Add what is known of further elements."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(more, field.name)
            if field.name == "largest":
                self.largest = max(mine, theirs)
            elif isinstance(mine, float):
                setattr(self, field.name, math.hypot(mine, theirs))  # which never overflows on the way
            else:
                setattr(self, field.name, mine + theirs)


def has_numbers(dtype: str) -> bool:
    """Return whether the elements of a dtype are whole bytes, so that they can be compared here."""
    return DTYPE_BITS[dtype] % 8 == 0


def same_bytes(one: memoryview, other: memoryview) -> bool:
    """Return whether two blocks of one length are equal; other threads run meanwhile."""
    order: int = _memcmp(_address(one), _address(other), len(one))
    return order == 0


def tally(
    one: memoryview, other: memoryview, dtypes: tuple[str, str], tolerance: Tolerance | None = None
) -> Tally:
    """Compare two blocks of as many elements, of dtypes that have numbers; ``ELEMENTS`` at a time is fastest.

    Two dtypes are compared in float64, or complex128; two integer types exactly, unless one is U64.
    """
    same = dtypes[0] == dtypes[1]
    with numpy.errstate(all="ignore"):
        if same and same_bytes(one, other):
            return _of_equals(one, dtypes[0])
        a, b = _numbers(one, dtypes[0]), _numbers(other, dtypes[1])
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
    numbers = _numbers(block, dtype)
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
        beyond=differing if tolerance is None else _count(apart > tolerance[1] + tolerance[0] * sizes),
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


def _numbers(block: memoryview, dtype: str) -> Any:
    """Return the elements as float64, complex128, or, integers of up to 64 bits, as int64 or uint64."""
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
