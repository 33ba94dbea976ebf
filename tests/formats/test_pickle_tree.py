"""Two trees side by side: time that grows with the bytes, and what equal means."""

import struct
import time

import pytest

from ckptfix.formats.pickle_stream import parse
from ckptfix.formats.pickle_tree import same_tree

N = 20_000
LONG = b"X" + struct.pack("<I", 60_000) + b"a" * 60_000
BOMBS = {
    "one tuple of constants": b"(" + b"K\1" * N + b"tq\1" + b"0](" + b"h\1" * N + b"e.",
    "one tuple of lists": b"(" + b"]" * N + b"tq\1" + b"0](" + b"h\1" * N + b"e.",
    "one tuple of names": b"(" + b"X\1\0\0\0a" * N + b"tq\1" + b"0](" + b"h\1" * N + b"e.",
    "one long string": LONG + b"q\1" + b"0](" + b"h\1" * (5 * N) + b"e.",
    "one long bytes": b"B" + struct.pack("<I", 600_000) + bytes(600_000) + b"q\1" + b"0](" + b"h\1" * (5 * N) + b"e.",
    "one string too long for a name": b"X" + struct.pack("<I", 600_000) + bytes(600_000)
    + b"q\1" + b"0](" + b"h\1" * N + b"e.",
    "many tuples in all pairs": b"".join(
        b"(" + b"K\1" * 150 + b"tq" + bytes([index]) + b"0" for index in range(150)
    ) + b"](" + b"".join(b"h" + bytes([index % 150]) for index in range(5 * N)) + b"e.",
}  # fmt: skip


@pytest.mark.parametrize("what", BOMBS)
def test_what_is_shared_a_thousand_times_is_compared_once(what: str) -> None:
    data = b"\x80\x03" + BOMBS[what]
    one, other = parse(data), parse(data)
    begin = time.process_time()
    assert same_tree(one, other, {})
    assert time.process_time() - begin < 20


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"(" + b"K\1" * 100 + b"t", b"(" + b"K\1" * 99 + b"\x88t"),
        (b"(" + b"K\1" * 100 + b"t", b"(" + b"K\1" * 99 + b"]t"),
        (b"(" + b"K\1" * 100 + b"t", b"(" + b"K\1" * 99 + b")t"),
        (b"(" + b"G" + bytes(8) + b"K\1" * 100 + b"t", b"(" + b"G\x80" + bytes(7) + b"K\1" * 100 + b"t"),
        (b"(" + b"X\1\0\0\0a" * 100 + b"t", b"(" + b"X\1\0\0\0a" * 99 + b"X\1\0\0\0bt"),
        (b"X\x70\0\0\0" + b"a" * 112, b"X\x70\0\0\0" + b"a" * 111 + b"b"),
        (b"X" + struct.pack("<I", 70_000) + b"a" * 70_000, b"X" + struct.pack("<I", 70_000) + b"a" * 69_999 + b"b"),
        (b"cpkg\nNet\n", b"cpkg\nNet\n}(X\1\0\0\0aK\1ub"),
        (b"cpkg\nNet\n}(X\1\0\0\0aK\2ub", b"cpkg\nNet\n}(X\1\0\0\0aK\1ub"),
    ],
)  # fmt: skip
def test_what_differs(one: bytes, other: bytes) -> None:
    for left, right in ((one, other), (other, one)):
        assert not same_tree(
            parse(b"\x80\x03" + left + b"."), parse(b"\x80\x03" + right + b"."), {}
        )
        assert same_tree(parse(b"\x80\x03" + left + b"."), parse(b"\x80\x03" + left + b"."), {})


def test_sharing_constants_says_nothing() -> None:
    shared = b"(" + b"(" + b"K\1" * 100 + b"tq\1h\1t."
    twice = b"(" + b"(" + b"K\1" * 100 + b"t(" + b"K\1" * 100 + b"tt."
    assert same_tree(parse(b"\x80\x02" + shared), parse(b"\x80\x02" + twice), {})
