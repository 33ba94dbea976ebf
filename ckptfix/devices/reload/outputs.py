"""Outputs and tensors compared bit by bit or by size, and errors of code that is not ours in one
line.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from math import inf, isfinite
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from msgspec import Struct
from torch import nn

from ckptfix.devices.torch_reading import same_bits
from ckptfix.wording import count_of, shortened

_DEPTH = 8
"""Levels of containers in which tensors are looked for; a cache of keys and values has four."""

_NO_RESULTS = (nn.Module, ModuleType, FunctionType)
"""Their attributes are weights and globals, which no forward pass computed."""


class Deviation(Struct, frozen=True, kw_only=True):
    """Distance of two outputs: the largest difference, the largest value, and the dtype where it
    was found.

    ``difference`` is infinite where a shape, a name, a NaN, an Inf or a whole number differs.
    """

    difference: float = 0.0
    scale: float = 0.0
    epsilon: float = 0.0

    @property
    def relative(self) -> float:
        """The difference as a part of the largest value."""
        return self.difference / self.scale if self.scale else (inf if self.difference else 0.0)

    @property
    def limit(self) -> float:
        """The largest ``relative`` that other kernels explain: the square root of the dtype's
        machine epsilon.

        float32 3.5e-4, float16 3.1e-2, bfloat16 8.8e-2: half of the digits are lost to another
        order of sums.
        """
        return float(self.epsilon**0.5)

    @property
    def is_within(self) -> bool:
        """True if the difference is what other kernels make."""
        return self.relative <= self.limit

    def __str__(self) -> str:
        if not isfinite(self.difference):
            return "a shape, NaN, Inf or integer differs"
        return (
            f"max |difference| {self.difference:.3g} for values up to {self.scale:.3g}: "
            f"relative {self.relative:.2g}, limit {self.limit:.2g}"
        )


def output_tensors(output: Any) -> dict[str, torch.Tensor]:
    """Return every tensor in an output by its place, on the host, as plain tensors: sparse ones are
    their parts.
    """
    found: dict[str, torch.Tensor] = {}
    for place, value in tensors_in(output):
        for name, part in _plain(value.detach()):
            found[f"{place}{name}"] = part.to("cpu", copy=True).resolve_conj().resolve_neg()
    return found


def is_empty(output: Mapping[str, torch.Tensor]) -> bool:
    """Return whether an output has no element that could differ: two of them are equal, and prove
    nothing.
    """
    return not any(value.numel() for value in output.values())


def tensors_in(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in mappings, sequences, dataclasses and the attributes of other objects,
    each by its place.
    """
    seen: dict[int, Any] = {}  # with the values: an id is another's when its value is gone

    def walk(value: Any, place: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield place, value
        elif depth < _DEPTH and id(value) not in seen:
            seen[id(value)] = value
            for name, part in _parts(value):
                yield from walk(part, f"{place}{name}", depth + 1)

    return walk(output, "output", 0)


def equal_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two outputs are equal in every bit, NaNs included."""
    return one.keys() == other.keys() and all(same_bits(one[place], other[place]) for place in one)


def deviation(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> Deviation:
    """Return how far two outputs lie apart: of the tensor in which it is farthest beyond its
    limit.
    """
    if one.keys() != other.keys():
        return Deviation(difference=inf)
    worst = Deviation()
    for place, left in one.items():
        right = other[place]
        if same_bits(left, right):
            continue
        found = _apart(left, right)
        if found.relative - found.limit > worst.relative - worst.limit or worst.epsilon == 0.0:
            worst = found
    return worst


def _apart(left: torch.Tensor, right: torch.Tensor) -> Deviation:
    if left.is_complex() and left.dtype == right.dtype:
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    if left.shape != right.shape or left.dtype != right.dtype or not left.dtype.is_floating_point:
        return Deviation(difference=inf)
    wide, other = left.to(torch.float64), right.to(torch.float64)
    finite = wide.isfinite() & other.isfinite()
    # NaN where the other holds Inf, or Inf of the other sign, is another result: no kernel explains
    # it.
    is_same = (wide == other) | (wide.isnan() & other.isnan())
    if not bool((finite | is_same).all()):
        return Deviation(difference=inf)
    difference = (wide - other)[finite].abs()
    return Deviation(
        difference=float(difference.max()) if difference.numel() else 0.0,
        scale=(
            max(float(one[finite].abs().max()) for one in (wide, other))
            if difference.numel()
            else 0.0
        ),
        epsilon=float(torch.finfo(left.dtype).eps),
    )


def holds_nan(output: Any) -> bool:
    """Return whether any tensor in an output holds NaN, on whatever device it is."""
    for _, value in tensors_in(output):
        for _, part in _plain(value.detach()):
            numbers = _numbers(part)
            if numbers is not None and not numbers.is_meta and bool(numbers.isnan().any()):
                return True
    return False


def nonfinite_places(
    output: Mapping[str, torch.Tensor], mark: Callable[[torch.Tensor], torch.Tensor]
) -> str:
    """Return in words where ``mark`` (torch.isnan or torch.isinf) finds numbers in an output, ""
    for nowhere.
    """
    places = []
    for place, value in output.items():
        numbers = _numbers(value)
        marked = mark(numbers).reshape(-1) if numbers is not None else torch.zeros(0)
        if count := int(marked.sum()):
            first = int(marked.nonzero()[0])
            places.append(
                f"{count} of {count_of(len(marked), 'number')} in {place}, the first at index "
                f"{first}"
            )
    more = f"; and {count_of(len(places) - 2, 'more tensor')}" if len(places) > 2 else ""
    return "; ".join(places[:2]) + more


def _numbers(value: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor whose dtype has NaN, in one that torch can search; None for whole numbers."""
    if not (value.is_floating_point() or value.is_complex()):
        return None
    return value.to(torch.float32) if value.element_size() == 1 else value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{one.name}", getattr(value, one.name)) for one in fields(value))
    elif not isinstance(value, _NO_RESULTS) and not isinstance(value, type):
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _plain(value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors of which one of another layout is made."""
    if value.is_nested:
        yield from ((f"[{index}]", part) for index, part in enumerate(value.unbind()))
    elif value.layout is torch.sparse_coo:
        yield from ((".indices", value._indices()), (".values", value._values()))
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (
            (".rows", value.crow_indices()),
            (".columns", value.col_indices()),
            (".values", value.values()),
        )
    elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (
            (".columns", value.ccol_indices()),
            (".rows", value.row_indices()),
            (".values", value.values()),
        )
    elif value.is_quantized:
        yield ".integers", value.int_repr()
    else:
        yield "", value


ANYTHING = (Exception, SystemExit)
"""``sys.exit`` in a script that is imported as a module would end the verification with the
script's own status.
"""


_LONGEST = 400


def in_words(error: BaseException) -> str:
    """Return an error's class and message in one line, of a long message the beginning."""
    return f"{type(error).__name__}: {one_line(str(error))}"


def one_line(text: str) -> str:
    """Return a text without its line breaks, of a long one the beginning."""
    return shortened(" ".join(text.split()), _LONGEST)


CHUNK = 64 << 20
"""Bytes compared at a time."""

Bytes = Any
"""A one-dimensional numpy array of uint8."""


class Mismatch(NamedTuple):
    """The first byte that differs: its offset in the tensor, what is there and what should be;
    None: other lengths.
    """

    offset: int
    have: int | None
    want: int | None

    def __str__(self) -> str:
        if self.have is None or self.want is None:
            return f"it ends at byte {self.offset}"
        return f"byte {self.offset} is {self.have:#04x}, should be {self.want:#04x}"


def host_bytes(tensor: torch.Tensor, chunk: int = CHUNK) -> Iterator[Bytes]:
    """Yield the bytes of a tensor's elements in order, read back to the host, at most ``chunk`` at
    a time.
    """
    raw = _flat(tensor).view(torch.uint8)
    for begin in range(0, len(raw), chunk):
        yield raw[begin : begin + chunk].cpu().numpy()


def first_mismatch(tensor: torch.Tensor, expected: Iterable[Bytes]) -> Mismatch | None:
    """Return the first byte in which a tensor differs from ``expected``, None when it is equal in
    every byte.
    """
    raw = _flat(tensor).view(torch.uint8)
    position = 0
    for want in expected:
        got = raw[position : position + len(want)].cpu().numpy()
        if not numpy.array_equal(got, want):
            shared = min(len(got), len(want))
            different = numpy.flatnonzero(got[:shared] != want[:shared])
            if not len(different):
                return Mismatch(position + shared, None, None)
            first = int(different[0])
            return Mismatch(position + first, int(got[first]), int(want[first]))
        position += len(want)
    return Mismatch(position, None, None) if position != len(raw) else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
