"""Figures against torch for every dtype, and where floating point makes them hard."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.formats.torch_tensors import TORCH_DTYPES
from ckptfix.tensors.numbers import ELEMENTS, Tally, has_numbers, same_bytes, tally

FLOATS = [
    "F64",
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "F8_E8M0",
]
INTEGERS = ["I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"]
DTYPES = {noun: getattr(torch, name) for name, noun in TORCH_DTYPES.items()}


def raw(tensor: Any) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def of(values: "list[Any]", dtype: str) -> memoryview:
    return raw(torch.tensor(values, dtype=DTYPES[dtype]))


def as_double(tensor: Any) -> Any:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "BOOL", "C64", "C128"])
def test_every_dtype_as_torch_has_it(dtype: str) -> None:
    torch.manual_seed(1)
    if dtype in ("C64", "C128"):
        a, b = (torch.randn(20_001, dtype=DTYPES[dtype]) for _ in range(2))
    elif dtype in FLOATS:
        a, b = (torch.randn(20_001).abs().add(0.01).to(DTYPES[dtype]) for _ in range(2))
    else:
        a, b = (
            torch.randint(0, 2 if dtype == "BOOL" else 100, (20_001,)).to(DTYPES[dtype])
            for _ in range(2)
        )
    b.view(torch.uint8)[: b.element_size() * 10_000] = a.view(torch.uint8)[
        : a.element_size() * 10_000
    ]
    found = tally(raw(a), raw(b), (dtype, dtype))
    wide_a, wide_b = as_double(a), as_double(b)
    assert found.elements == 20_001
    unequal = a.view(torch.uint8).reshape(20_001, -1) != b.view(torch.uint8).reshape(20_001, -1)
    assert found.differing == found.beyond == int(unequal.any(dim=1).sum()) > 0
    assert found.largest == pytest.approx(float((wide_a - wide_b).abs().max()), rel=1e-14)
    assert found.distance == pytest.approx(
        float(torch.linalg.vector_norm(wide_a - wide_b)), rel=1e-12
    )
    assert found.norm == pytest.approx(float(torch.linalg.vector_norm(wide_a)), rel=1e-12)
    assert found.relative == pytest.approx(found.distance / found.norm)
    assert found.apart == found.nan_a == found.inf_b == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pattern_of_the_small_floats(dtype: str) -> None:
    width = DTYPES[dtype].itemsize
    if width == 1:
        patterns = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(DTYPES[dtype])
    else:
        patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
        patterns = patterns.view(DTYPES[dtype]) if width == 2 else patterns.to(DTYPES[dtype])
    zero = torch.zeros(patterns.numel(), dtype=torch.float64)
    found = tally(raw(patterns), raw(zero), (dtype, "F64"))
    wide = patterns.to(torch.float64)
    finite = wide[wide.isfinite()]
    assert found.nan_a == int(wide.isnan().sum())
    assert found.inf_a == int(wide.isinf().sum())
    assert found.apart == found.nan_a + found.inf_a
    assert found.differing == int((wide != 0).sum())
    assert found.largest == float(finite.abs().max())
    assert found.norm == pytest.approx(float(torch.linalg.vector_norm(finite)))


def test_equal_bytes_are_equal_nan_included() -> None:
    block = of([math.nan, 1.0, math.inf, 2.0], "F32")
    found = tally(block, block, ("F32", "F32"))
    assert (found.differing, found.apart, found.nan_a, found.inf_b) == (0, 0, 1, 1)
    assert found.norm == pytest.approx(math.sqrt(5))
    assert found.relative == 0


def test_nan_and_infinity_are_counted_and_left_out() -> None:
    a = of([math.nan, 1.0, math.inf, 3.0, -math.inf, math.nan], "F32")
    b = of([math.nan, math.nan, 2.0, 4.0, math.inf, 5.0], "F32")
    found = tally(a, b, ("F32", "F32"))
    assert (found.differing, found.apart, found.nan_a, found.nan_b, found.inf_a, found.inf_b) == (
        5,
        4,
        2,
        2,
        2,
        1,
    )
    assert (found.largest, found.distance, found.norm) == (1.0, 1.0, 3.0)


def test_nan_with_other_bits_differs_until_a_tolerance_is_given() -> None:
    a = raw(torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32))
    b = raw(torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32))
    assert tally(a, b, ("F32", "F32")).beyond == 1
    assert tally(a, b, ("F32", "F32"), (0.0, 0.0)).beyond == 0
    assert tally(a, of([math.nan, 1.0], "F16"), ("F32", "F16")).differing == 0


def test_minus_zero_has_other_bytes_and_the_same_value() -> None:
    found = tally(of([0.0], "F32"), of([-0.0], "F32"), ("F32", "F32"), (0.0, 0.0))
    assert (found.differing, found.beyond, found.largest) == (1, 0, 0.0)


def test_two_dtypes_are_compared_by_value() -> None:
    found = tally(of([1.0, 2.5, 3.0], "F32"), of([1.0, 2.5, 3.25], "BF16"), ("F32", "BF16"))
    assert (found.differing, found.largest) == (1, 0.25)
    assert tally(of([1, 0], "BOOL"), of([1, 7], "I64"), ("BOOL", "I64")).largest == 7
    assert tally(of([1, 2], "U64"), of([1, -2], "I8"), ("U64", "I8")).largest == 4
    assert tally(of([1.0], "F64"), of([1 + 2j], "C64"), ("F64", "C64")).largest == 2


def test_64_bit_integers_are_subtracted_exactly() -> None:
    low, high = -(1 << 63), (1 << 63) - 1
    assert tally(of([high], "I64"), of([high - 1], "I64"), ("I64", "I64")).largest == 1
    assert tally(of([low], "I64"), of([high], "I64"), ("I64", "I64")).largest == float(
        (1 << 64) - 1
    )
    top = raw(torch.tensor([-1, 5]).view(torch.uint64))
    assert tally(top, raw(torch.tensor([-3, 5]).view(torch.uint64)), ("U64", "U64")).largest == 2


@pytest.mark.parametrize("scale", [1e-300, 5e-324, 1e-160, 1e200, 1e308])
def test_squares_neither_vanish_nor_overflow(scale: float) -> None:
    found = tally(of([scale, scale], "F64"), of([scale, 0.0], "F64"), ("F64", "F64"))
    assert found.norm == pytest.approx(scale * math.sqrt(2), rel=1e-12) or scale == 5e-324
    assert found.distance == scale
    assert 0.5 <= found.relative <= 1


def test_a_difference_too_large_for_a_number_is_infinite() -> None:
    found = tally(of([1.7e308], "F64"), of([-1.7e308], "F64"), ("F64", "F64"))
    assert found.largest == found.relative == math.inf
    assert found.apart == 0


def test_tolerance_is_relative_to_the_first() -> None:
    a, b = of([100.0, 1.0, 0.0], "F32"), of([101.0, 1.5, 0.25], "F32")
    assert tally(a, b, ("F32", "F32"), (0.01, 0.0)).beyond == 2
    assert tally(a, b, ("F32", "F32"), (0.01, 0.25)).beyond == 1
    assert tally(a, b, ("F32", "F32"), (0.0, 1.0)).beyond == 0
    assert tally(of([10, 5], "I32"), of([11, 9], "I32"), ("I32", "I32"), (0.1, 0.0)).beyond == 1


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), st.data())
def test_blocks_add_up(values: "list[float]", data: Any) -> None:
    others = data.draw(
        st.lists(st.sampled_from([*values, 0.5]), min_size=len(values), max_size=len(values))
    )
    cut = data.draw(st.integers(0, len(values)))
    whole = tally(of(values, "F32"), of(others, "F32"), ("F32", "F32"))
    parts = Tally()
    for one, other in ((values[:cut], others[:cut]), (values[cut:], others[cut:])):
        parts.add(tally(of(one, "F32"), of(other, "F32"), ("F32", "F32")))
    assert (parts.elements, parts.differing, parts.largest) == (
        whole.elements,
        whole.differing,
        whole.largest,
    )
    assert parts.distance == pytest.approx(whole.distance, rel=1e-12)
    assert parts.norm == pytest.approx(whole.norm, rel=1e-12)


def test_more_than_one_round_of_elements() -> None:
    a = torch.ones(2 * ELEMENTS + 7)
    b = a.clone()
    b[-1] = 3
    assert tally(raw(a), raw(b), ("F32", "F32")).distance == 2
    assert not same_bytes(raw(a), raw(b))


def test_no_numbers_below_a_byte() -> None:
    assert not has_numbers("F4")
    assert has_numbers("F8_E8M0")


def test_empty_blocks() -> None:
    assert tally(memoryview(b""), memoryview(b""), ("F32", "F64")) == Tally()
    assert Tally().relative == 0
    assert Tally(distance=1.0).relative == math.inf
