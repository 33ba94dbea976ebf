"""Tensors that end in zeros, as the last pages of a file do after a crash."""

from pathlib import Path

from ckptfix.conversion.salvage_sources import TensorLocation, zero_ends


def test_pages_of_zeros_at_the_end_of_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(
        b"h" * 100 + b"\1" * 4000 + bytes(4096) + b"\1" * 50 + bytes(4095) + b"\1" * 10
    )
    places = [
        TensorLocation("ends", 100, 8196),
        TensorLocation("short", 8196, 12341),
        TensorLocation("none", 12341, 12351),
        TensorLocation("empty", 5, 5),
    ]
    assert zero_ends(path, places) == {"ends": 4096}


def test_every_tensor_in_the_zero_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\1" * 1000 + bytes(3000) + bytes(3_000_000))
    places = [
        TensorLocation("cut", 0, 4000),
        TensorLocation("small", 4000, 4004),
        TensorLocation("large", 4004, 3_004_000),
    ]
    assert zero_ends(path, places) == {"cut": 3000, "small": 4, "large": 2_999_996}
    path.write_bytes(b"\1" * 1000 + bytes(3000))
    assert zero_ends(path, [TensorLocation("cut", 0, 4000)]) == {}, (
        "less than a page is no page that was lost"
    )


def test_a_short_last_page_of_zeros(tmp_path: Path) -> None:
    """28 of 961 values were lost with it, and nothing was said to be doubtful."""
    path = tmp_path / "x"
    places = [TensorLocation("cut", 4000, 4208)]
    path.write_bytes(b"\1" * 4096 + bytes(112))
    assert zero_ends(path, places) == {"cut": 112}
    path.write_bytes(b"\1" * 4097 + bytes(111))
    assert zero_ends(path, places) == {}
    path.write_bytes(b"\1" * 4096 + bytes(32))
    assert zero_ends(path, [TensorLocation("bias", 4096, 4128)]) == {}
