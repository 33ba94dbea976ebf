"""The scan of values agrees with torch on every pattern of small dtypes, and finds pages of
zeros.
"""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.formats.torch_tensors import TORCH_DTYPES
from ckptfix.storage.reading import Piece
from ckptfix.tensors.scanning import FLOATS, MOST_RUNS, PAGE, PageSearch, Scan, Scanner
from tests.sampling import examples

SMALL = [
    torch.bfloat16,
    torch.float16,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.float8_e5m2fnuz,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
]
LARGE = [torch.float32, torch.float64, torch.complex64, torch.complex128]


def name_of(dtype: torch.dtype) -> str:
    return TORCH_DTYPES[str(dtype).removeprefix("torch.")]


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def scan(dtype: str, data: bytes, block: int = 1 << 20) -> Scan:
    scanner = Scanner(dtype)
    for begin in range(0, len(data), block):
        scanner.feed(numpy.frombuffer(data[begin : begin + block], numpy.uint8))
    return scanner.result()


def search(pieces: list[Piece], data: bytes, block: int = 1 << 20) -> PageSearch:
    pages = PageSearch(pieces)
    for begin in range(0, len(data), block):
        pages.feed(numpy.frombuffer(data[begin : begin + block], numpy.uint8))
    return pages


def expected(tensor: torch.Tensor) -> tuple[int, int, int | None, int | None, bool]:
    wide = tensor if tensor.dtype in LARGE else tensor.to(torch.float32)
    nan = torch.isnan(wide)
    inf = torch.isinf(wide) & ~nan

    def first(marks: Any) -> int | None:
        found = torch.nonzero(marks.reshape(-1))
        return int(found[0]) if len(found) else None

    return int(nan.sum()), int(inf.sum()), first(nan), first(inf), bool((wide == 0).all())


def found(result: Scan) -> tuple[int, int, int | None, int | None, bool]:
    return result.nan, result.inf, result.first_nan, result.first_inf, result.is_zero


def test_every_float_of_the_table_is_tested() -> None:
    assert {name_of(dtype) for dtype in (*SMALL, *LARGE)} == FLOATS


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_pattern_of_a_small_dtype(dtype: torch.dtype) -> None:
    width = torch.empty(0, dtype=dtype).element_size()
    patterns = numpy.arange(1 << (8 * width), dtype=f"<u{width}")
    values = torch.from_numpy(patterns.view(numpy.uint8).copy()).view(dtype)
    assert found(scan(name_of(dtype), raw(values))) == expected(values)
    # Each alone: the two reductions decide.
    for number in range(0, len(values), 1 if width == 1 else 97):
        alone = values[number : number + 1]
        assert found(scan(name_of(dtype), raw(alone))) == expected(alone), number


@pytest.mark.parametrize("dtype", LARGE, ids=str)
def test_borders_of_a_large_dtype(dtype: torch.dtype) -> None:
    real = torch.float32 if dtype in (torch.float32, torch.complex64) else torch.float64
    info = torch.finfo(real)
    borders = [0.0, -0.0, info.max, info.min, info.tiny, -info.tiny, info.smallest_normal / 4, 1.0]
    wrong = [float("inf"), float("-inf"), float("nan"), -float("nan")]
    for value in (*borders, *wrong):
        for base in (0.0, 1.5, -1.5):
            values = torch.full((3000,), base, dtype=dtype)
            values[1234] = complex(0, value) if dtype.is_complex else value
            for block in (1 << 20, 1600):
                assert found(scan(name_of(dtype), raw(values), block)) == expected(values), (
                    value,
                    base,
                )
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=generator)
    assert found(scan(name_of(dtype), raw(bits), 4096)) == expected(bits.view(dtype))


def test_nothing_is_not_zero() -> None:
    assert scan("F32", b"") == Scan(is_zero=False)


@pytest.mark.parametrize("dtype", ["I8", "U8", "I64", "BOOL", "F4"])
def test_integers_are_zero_or_not_and_never_wrong(dtype: str) -> None:
    assert scan(dtype, bytes(64), 16) == Scan()
    assert scan(dtype, bytes(63) + b"\xff", 16) == Scan(is_zero=False)


@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12 * PAGE), min_size=1, max_size=3),
    starts=st.lists(st.integers(0, PAGE), min_size=3, max_size=3),
    zeros=st.lists(st.tuples(st.integers(0, 20 * PAGE), st.integers(0, 8 * PAGE)), max_size=4),
    block=st.sampled_from([16, 496, PAGE, PAGE + 16, 3 * PAGE, 1 << 20]),
)
def test_zero_pages_are_those_that_a_look_at_every_page_of_every_piece_finds(
    lengths: list[int], starts: list[int], zeros: list[tuple[int, int]], block: int
) -> None:
    data = bytearray(b"\x3f" * sum(lengths))
    for begin, count in zeros:
        data[begin : begin + count] = bytes(len(data[begin : begin + count]))
    pieces, pages, done = [], [], 0
    for number, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        pieces.append(Piece(Path(str(number)), start, length))
        part = data[done : done + length]
        done += length
        pages += [
            (number, begin)
            for begin in range(-start % PAGE, length - PAGE + 1, PAGE)
            if not any(part[begin : begin + PAGE])
        ]
    result = search(pieces, bytes(data), block)
    assert result.pages == len(pages)
    inside = [
        (pieces.index(run.piece), begin)
        for run in result.runs
        for begin in range(run.begin, run.end, PAGE)
    ]
    assert inside == pages
    neighbours = zip(result.runs, result.runs[1:], strict=False)
    assert all(one.piece != two.piece or one.end < two.begin for one, two in neighbours)


def test_runs_are_bounded() -> None:
    data = (bytes(PAGE) + b"\x3f" * PAGE) * (MOST_RUNS + 5)
    result = search([Piece(Path("f"), 0, len(data))], data)
    assert (result.pages, len(result.runs)) == (MOST_RUNS + 5, MOST_RUNS)
