"""Flat partitions put together from stretches of tensors, whatever the layout of those is."""

import random
from pathlib import Path

import numpy
import pytest

from ckptfix.storage.reading import OpenFiles, Piece
from ckptfix.tensors.joined import Joined, Stretch, Zeros, joined
from ckptfix.tensors.stored import Contiguous, Layout, Strided, Tile, Tiled

WIDTH = 4


def layouts(path: Path, chance: random.Random) -> list[tuple[Layout, bytes]]:
    """Return tensors of every layout in one file, each with its bytes in order."""
    data = numpy.random.default_rng(chance.randrange(99)).integers(
        0, 255, 24 * 3 * WIDTH, dtype=numpy.uint8
    )
    path.write_bytes(data.tobytes())
    size = 24 * WIDTH
    one, two, three = (
        data[size * number : size * (number + 1)].reshape(4, 6, WIDTH) for number in range(3)
    )
    runs = [Piece(path, 0, 40), Piece(path, 40, size - 40)]
    turned = Strided(
        storage=Piece(path, size, size), first=0, shape=(6, 4), stride=(1, 6), width=WIDTH
    )
    tiles = []
    for first, length in ((0, 2), (2, 4)):
        storage = Strided(
            storage=Piece(path, 2 * size, size),
            first=first,
            shape=(4, length),
            stride=(6, 1),
            width=WIDTH,
        )
        tiles.append(Tile((0, first), (4, length), storage))
    return [
        (Contiguous(tuple(runs)), one.tobytes()),
        (turned, two.transpose(1, 0, 2).tobytes()),
        (Tiled(shape=(4, 6), tiles=tuple(tiles), width=WIDTH), three.tobytes()),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_bytes_are_those_of_the_stretches_in_their_order(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    known = layouts(tmp_path / "x", chance)
    parts: list[Stretch | Zeros] = []
    expected = b""
    for _ in range(chance.randint(0, 8)):
        if chance.random() < 0.25:
            padding = Zeros(chance.randrange(3) * WIDTH)
            parts.append(padding)
            expected += bytes(padding.length)
            continue
        layout, data = chance.choice(known)
        begin, end = sorted(chance.randrange(25) * WIDTH for _ in range(2))
        parts.append(Stretch(layout, begin, end))
        expected += data[begin:end]
    for size in (16, 64, 1 << 12):
        with OpenFiles() as files:
            found = joined(parts).blocks(files, memoryview(bytearray(size)))
            blocks = [bytes(block) for block in found]
        assert b"".join(blocks) == expected
        assert all(len(block) % WIDTH == 0 for block in blocks)


def test_runs_become_one_run(tmp_path: Path) -> None:
    path = tmp_path / "x"
    one = Contiguous((Piece(path, 0, 8), Piece(path, 100, 8)))
    assert joined([Stretch(one, 4, 12), Zeros(0), Stretch(one, 12, 16)]) == Contiguous(
        (Piece(path, 4, 4), Piece(path, 100, 4), Piece(path, 104, 4))
    )
    assert isinstance(joined([Stretch(one, 0, 16), Zeros(4)]), Joined)
