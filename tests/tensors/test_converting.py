"""Conversions of floating point numbers, held against torch: every number of 8 and 16 bits, borders
and many others.
"""

import itertools

import pytest
import torch

from ckptfix.tensors.numbers import converter

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MINI = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPES = FLOATS | MINI
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
QUIET = {
    "F64": [0x7FF8 << 48, -0x8 << 48],
    "F32": [0x7FC0 << 16, -0x40 << 16],
    "F16": [0x7E00, -0x200],
    "BF16": [0x7FC0, -0x40],
}
"""NaN without and with a sign, as the signed integers of the same bits."""

PAIRS = [(source, target) for source in DTYPES for target in FLOATS if source != target]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def numbers(dtype: str) -> torch.Tensor:
    """Every number of a small dtype; of a large one borders of all the others, halfway cases, and
    random patterns.
    """
    kind = DTYPES[dtype]
    if kind.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(kind)
    if kind.itemsize == 2:
        return torch.arange(1 << 16).to(torch.int32).to(torch.uint16).view(kind)
    generator = torch.Generator().manual_seed(7)
    random = torch.randint(
        0, 256, (kind.itemsize * 200_000,), dtype=torch.uint8, generator=generator
    )
    exact = torch.cat([numbers(small).to(torch.float64) for small in ("F16", "BF16")])
    halves = (exact[:-1] + exact[1:]) / 2
    spread = (
        torch.randn(100_000, dtype=torch.float64, generator=generator)
        * torch.logspace(-45, 39, 100_000).double()
    )
    near = torch.cat([exact, halves, spread]).to(kind)
    ulps = torch.cat([near.view(BITS[kind.itemsize]) + step for step in (-1, 0, 1)]).view(kind)
    return torch.cat([random.view(kind), ulps])


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: str(name))
def test_as_torch(source: str, target: str) -> None:
    given = numbers(source)
    expected = given.to(DTYPES[target])
    converted = bytearray(converter(source, target)(as_bytes(given)))
    found = torch.frombuffer(converted, dtype=DTYPES[target])
    bits = BITS[found.dtype.itemsize]
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(found), nan), "NaN stays NaN, and nothing else becomes it"
    assert torch.equal(found.view(bits)[~nan], expected.view(bits)[~nan])


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.permutations(("F64", "F32", "F16", "BF16"), 2))
)
def test_the_sign_of_nan_stays(source: str, target: str) -> None:
    given = torch.tensor(QUIET[source], dtype=BITS[DTYPES[source].itemsize]).view(DTYPES[source])
    assert torch.signbit(given).tolist() == [False, True]
    found = torch.frombuffer(
        bytearray(converter(source, target)(as_bytes(given))), dtype=DTYPES[target]
    )
    assert torch.signbit(found).tolist() == [False, True]


def test_what_it_does_not_know_is_an_error() -> None:
    with pytest.raises(KeyError):
        converter("I64", "F32")(memoryview(bytes(8)))
