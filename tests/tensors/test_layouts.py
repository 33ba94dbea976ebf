"""Elements that lie apart put in order: strides that a file may claim, and tiles piece by piece."""

import itertools
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest

from ckptfix.errors import ChangedError
from ckptfix.storage.reading import OpenFiles, Piece
from ckptfix.tensors.stored import Contiguous, Strided, Tile, Tiled, assembled, gathered


def cut(path: Path, shape: "tuple[int, ...]", cuts: "list[list[int]]") -> "tuple[Tiled, bytes]":
    """Return a tensor in tiles, and its bytes in order."""
    whole = numpy.random.default_rng(1).integers(0, 255, (*shape, 4), dtype=numpy.uint8)
    tiles, data = [], b""
    for box in itertools.product(*[itertools.pairwise(places) for places in cuts]):
        part = whole[tuple(slice(*one) for one in box)].tobytes()
        half = len(part) // 2
        where = Contiguous(
            (Piece(path, len(data), half), Piece(path, len(data) + half, len(part) - half))
        )
        tiles.append(
            Tile(tuple(one[0] for one in box), tuple(one[1] - one[0] for one in box), where)
        )
        data += part
    path.write_bytes(data)
    return Tiled(shape=shape, tiles=tuple(tiles), width=4), whole.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_tiles_in_buffers_of_any_size(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    shape = tuple(chance.choice([1, 2, 3, 7, 40]) for _ in range(chance.randint(1, 4)))
    cuts = [
        sorted({0, length, *(chance.randrange(length + 1) for _ in range(2))}) for length in shape
    ]
    tiled, expected = cut(tmp_path / "x", shape, cuts)
    for size in (16, 400, 1 << 16):
        with OpenFiles() as files:
            blocks = [
                bytes(block) for block in assembled(tiled, files, memoryview(bytearray(size)))
            ]
        assert b"".join(blocks) == expected
        assert max(map(len, blocks)) <= size


def test_a_row_that_is_longer_than_the_buffer_takes_no_more_memory(tmp_path: Path) -> None:
    shape = (2, 1 << 21)  # rows of 8 MiB
    tiled, expected = cut(tmp_path / "x", shape, [[0, 2], [0, 1000, 1 << 20, 1 << 21]])
    with OpenFiles() as files:
        tracemalloc.start()
        at = 0
        for block in assembled(tiled, files, memoryview(bytearray(1 << 16))):
            assert block == expected[at : at + len(block)]
            at += len(block)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert at == len(expected)
    assert peak < 1 << 20


def test_a_stride_that_no_step_takes_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(32)))
    layout = Strided(
        storage=Piece(tmp_path / "x", 0, 32),
        first=0,
        shape=(2, 1, 3),
        stride=(1, 1 << 62, 2),
        width=4,
    )
    with OpenFiles() as files:
        blocks = [bytes(block) for block in gathered(layout, files, memoryview(bytearray(1 << 16)))]
    numbers: Any = numpy.arange(32, dtype=numpy.uint8).reshape(8, 4)
    assert b"".join(blocks) == numbers[[0, 2, 4, 1, 3, 5]].tobytes()


@pytest.mark.parametrize("seed", range(40))
def test_any_strides_give_what_numpy_gives(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, gaps and boxes of a few bytes: every way of reading is taken."""
    chance = random.Random(seed)
    monkeypatch.setattr("ckptfix.tensors.stored._WINDOW", chance.choice([16, 48, 400, 1 << 20]))
    monkeypatch.setattr("ckptfix.tensors.stored._GAP", chance.choice([0, 16, 200]))
    monkeypatch.setattr("ckptfix.tensors.stored._SMALLEST_BOX", chance.choice([32, 1000, 1 << 20]))
    width = chance.choice([1, 2, 4, 8, 16])
    shape = tuple(chance.choice([1, 2, 3, 7, 20]) for _ in range(chance.randint(0, 4)))
    stride = tuple(chance.choice([0, 1, 2, 5, 40, 111]) for _ in shape)
    first = chance.choice([0, 3])
    count = first + sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) + 1
    data = random.Random(1).randbytes(7 + count * width)
    (tmp_path / "x").write_bytes(data)
    layout = Strided(
        storage=Piece(tmp_path / "x", 7, count * width),
        first=first,
        shape=shape,
        stride=stride,
        width=width,
    )
    every: Any = numpy.frombuffer(data, f"V{width}", offset=7)
    steps = [step * width for step in stride]
    expected = numpy.lib.stride_tricks.as_strided(every[first:], shape, steps).tobytes()
    for size in (16, 1 << 16):
        with OpenFiles() as files:
            blocks = [
                bytes(block) for block in gathered(layout, files, memoryview(bytearray(size)))
            ]
        assert b"".join(blocks) == expected
        assert max(map(len, blocks)) <= size


def test_a_storage_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(1 << 20))
    for stride in (2, 1 << 14):
        layout = Strided(
            storage=Piece(tmp_path / "x", 0, 1 << 22),
            first=0,
            shape=(64,),
            stride=(stride,),
            width=4,
        )
        if stride == 2:
            layout = Strided(
                storage=layout.storage, first=1 << 18, shape=(64,), stride=(stride,), width=4
            )
        with OpenFiles() as files, pytest.raises(ChangedError, match="changed while it was read"):
            list(gathered(layout, files, memoryview(bytearray(1 << 16))))


@pytest.mark.slow
def test_a_column_of_a_large_storage_takes_little_memory(tmp_path: Path) -> None:
    """In a process of its own, as the peak of this one is past. The storage is a hole: no disk is
    used.
    """
    rows, row = 1 << 17, 4096
    with (tmp_path / "x").open("wb") as file:
        file.truncate(rows * row)
    script = f"""
import re
from pathlib import Path
from ckptfix.errors import ChangedError
from ckptfix.storage.reading import OpenFiles, Piece
from ckptfix.tensors.stored import gathered
from ckptfix.tensors.stored import Strided
storage = Piece(Path({str(tmp_path / "x")!r}), 0, {rows * row})
peak = lambda: int(re.search(r"VmHWM:\\s*([0-9]+)", Path("/proc/self/status").read_text())[1])
before = peak()
for shape, stride in ((({rows},), ({row // 4},)), (({row // 4}, {rows}), (1, {row // 4}))):
    layout = Strided(storage=storage, first=0, shape=shape, stride=stride, width=4)
    with OpenFiles() as files:
        for number, block in enumerate(gathered(layout, files, memoryview(bytearray(1 << 18)))):
            if number > 300:
                break
print(peak() - before)
"""
    grown = int(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
    )
    assert grown < 150 << 10  # KiB; mapped, the whole 512 MiB would be resident
