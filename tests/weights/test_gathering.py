"""Elements that lie apart put in order: strides that a file may claim, and tiles piece by piece."""

import itertools
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest

from ckptfix.storage.pieces import OpenFiles, Piece
from ckptfix.weights.elements.gathering import assembled, gathered
from ckptfix.weights.layouts import Contiguous, Strided, Tile, Tiled


def cut(path: Path, shape: "tuple[int, ...]", cuts: "list[list[int]]") -> "tuple[Tiled, bytes]":
    """Return a tensor in tiles, and its bytes in order."""
    whole = numpy.random.default_rng(1).integers(0, 255, (*shape, 4), dtype=numpy.uint8)
    tiles, data = [], b""
    for box in itertools.product(*[itertools.pairwise(places) for places in cuts]):
        part = whole[tuple(slice(*one) for one in box)].tobytes()
        where = Contiguous((Piece(path, len(data), len(part)),))
        tiles.append(Tile(tuple(one[0] for one in box), tuple(one[1] - one[0] for one in box), where))
        data += part
    path.write_bytes(data)
    return Tiled(shape=shape, tiles=tuple(tiles), width=4), whole.tobytes()


@pytest.mark.parametrize("seed", range(12))
def test_tiles_in_buffers_of_any_size(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    shape = tuple(chance.choice([1, 2, 3, 7, 40]) for _ in range(chance.randint(1, 4)))
    cuts = [sorted({0, length, *(chance.randrange(length + 1) for _ in range(2))}) for length in shape]
    tiled, expected = cut(tmp_path / "x", shape, cuts)
    for size in (16, 400, 1 << 16):
        with OpenFiles() as files:
            blocks = [bytes(block) for block in assembled(tiled, files, memoryview(bytearray(size)))]
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
        storage=Piece(tmp_path / "x", 0, 32), first=0, shape=(2, 1, 3), stride=(1, 1 << 62, 2), width=4
    )
    blocks = gathered(layout, memoryview(bytearray(1 << 16)))
    numbers: Any = numpy.arange(32, dtype=numpy.uint8).reshape(8, 4)
    assert b"".join(map(bytes, blocks)) == numbers[[0, 2, 4, 1, 3, 5]].tobytes()
