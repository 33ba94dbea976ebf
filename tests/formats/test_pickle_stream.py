"""The symbolic machine: all opcodes, no execution, no blow-up, nothing but FormatError."""

import gc
import os
import pickle
import struct
import time
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.errors import FormatError, TruncatedError, UnsupportedFormat
from ckptfix.formats.pickle_stream import parse
from ckptfix.formats.pickle_tree import Kind, Node, Text, attribute, child, is_dict_like, pairs

CONSTANTS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300) | st.binary(max_size=300)
)
VALUES = st.recursive(
    CONSTANTS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=5)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(st.integers(), max_size=4)
        | st.frozensets(st.text(max_size=4), max_size=4)
        | st.binary(max_size=9).map(bytearray)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=20,
)
PROTOCOLS = st.integers(0, 5)


def plain(value: Any) -> Any:
    """Turn a small tree back into Python values."""
    if type(value) is Text:
        return value.value
    if type(value) is tuple:
        return tuple(plain(item) for item in value)
    if type(value) is not Node:
        return value
    items = [plain(item) for item in value.items or ()]
    if value.kind is Kind.LIST:
        return items
    if is_dict_like(value):
        return {plain(key): plain(item) for key, item in pairs(value)}
    if value.kind is Kind.BYTEARRAY:
        return bytearray(value.head)
    if value.kind in (Kind.SET, Kind.FROZENSET):
        return set(items)
    name = value.head.head[1]
    arguments = [plain(item) for item in value.args]
    if name == "encode":
        return arguments[0].encode(arguments[1])
    makers = {"set": set, "frozenset": set, "bytearray": bytearray, "bytes": bytes}
    return makers[name](*arguments)


def agree(left: Any, right: Any) -> bool:
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right) or (left != left and right != right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(agree, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(map(agree, left.values(), right.values()))
    return bool(left == right)


@given(VALUES, PROTOCOLS)
def test_the_tree_says_what_was_pickled(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    tree = parse(data + b"behind")
    assert agree(value, plain(tree.root))
    assert (tree.end, tree.data) == (len(data), data)
    assert tree.protocol == (protocol if protocol >= 2 else 0)


@given(st.binary(max_size=60) | st.lists(st.sampled_from([bytes([c]) for c in range(256)])).map(b"".join))
def test_any_bytes_parse_or_raise_format_error(data: bytes) -> None:
    with suppress(FormatError):
        parse(data)


@settings(max_examples=40)
@given(VALUES, PROTOCOLS, st.data())
def test_a_broken_pickle_parses_or_raises_format_error(
    value: Any, protocol: int, draw: st.DataObject
) -> None:
    data = pickle.dumps(value, protocol)
    for length in range(len(data)):
        with pytest.raises(TruncatedError):
            parse(data[:length])
    place = draw.draw(st.integers(0, len(data) - 1))
    with suppress(FormatError):
        parse(data[:place] + bytes([draw.draw(st.integers(0, 255))]) + data[place + 1 :])


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_executed_and_every_global_is_listed(protocol: int) -> None:
    tree = parse(pickle.dumps({"a": Hostile(), "b": OrderedDict()}, protocol))
    assert set(tree.globals) == {("posix", "abort"), ("collections", "OrderedDict")}
    assert all(0 < offset < tree.end for offset in tree.globals.values())


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"(S'ls'\nios\nsystem\n.", ("os", "system")),
        (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93.", ("os", "system")),
        (b"\x80\x04\x8c\x02osN\x93.", ("?", "?")),
        (b"\x80\x02\x82\x07.", ("?", "?")),
        (b"\x80\x02\x83\x07\x00.", ("?", "?")),
        (b"\x80\x02\x84\x07\x00\x00\x00.", ("?", "?")),
    ],
)
def test_globals_of_rarer_opcodes(data: bytes, expected: tuple[str, str]) -> None:
    assert list(parse(data).globals) == [expected]


def test_opcodes_that_weights_only_refuses() -> None:
    assert parse(pickle.dumps({"a": [1, (2,), 3.5, "x", 1 << 80, None, True]}, 2)).refused_opcodes == ()
    assert set(parse(pickle.dumps({"a": 1}, 4)).refused_opcodes) >= {"FRAME", "MEMOIZE", "SHORT_BINUNICODE"}


def test_weights_only_opcodes_are_those_of_the_installed_torch() -> None:
    import inspect
    import pickletools
    import re

    import torch._weights_only_unpickler as unpickler

    from ckptfix.formats.pickle_opcodes import WEIGHTS_ONLY_OPCODES

    source = inspect.getsource(unpickler.Unpickler.load)
    names = set(re.findall(r"\b([A-Z][A-Z0-9_]+)\[0\]", source))
    assert {ord(op.code) for op in pickletools.opcodes if op.name in names} == WEIGHTS_ONLY_OPCODES


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"I01\n.", True), (b"I00\n.", False), (b"I-7\n.", -7), (b"L12345678901234567890L\n.", 12345678901234567890),
        (b"F1.5\n.", 1.5), (b"J\xff\xff\xff\xff.", -1), (b"J\x00\x00\x00\x80.", -(2**31)), (b"\x8b\x01\0\0\0\xff.", -1),
        (b"(I1\nI2\nt.", (1, 2)), (b"(I1\n0I2\n.", 2), (b"(1I2\n.", 2), (b"I1\np3\n0g3\n.", 1), (b"I1\n2\x86.", (1, 1)),
        (b"B\x02\0\0\0ab.", b"ab"), (b"]\x94h\x00.", None), (b"\x8e\x01\0\0\0\0\0\0\0a.", b"a"),
    ],
)  # fmt: skip
def test_single_opcodes(data: bytes, value: object) -> None:
    root = parse(data).root
    assert value is None or (root == value and type(root) is type(value))


@pytest.mark.parametrize(
    "data",
    [b"S'it\\'s'\n.", b"S\"x\"\n.", b"T\x01\0\0\0x.", b"U\x01x.", b"V\\u0078\n.", b"X\x01\0\0\0x.", b"\x8c\x01x.",
     b"\x8d\x01\0\0\0\0\0\0\0x."],
)  # fmt: skip
def test_every_string_opcode_is_a_text_with_its_site(data: bytes) -> None:
    root = parse(b"\x80\x04" + data).root
    assert root == Text("it's" if b"it" in data else "x", 2, 2)


@pytest.mark.parametrize(
    "data",
    [b".", b"t.", b"h\x07.", b"u.", b"}(K\x01u.", b"0.", b"2.", b"R.", b"s.", b"}K\x01s.", b"\x86.", b"K\x01\x86.",
     b"S'x\n.", b"Iabc\n.", b"g9\n.", b"gx\n.", b"T\xff\xff\xff\xff.", b"\x8b\xff\xff\xff\xff.", b"X\x01\0\0\0\xff.",
     b"\x80\x06N.", b"K\x01K\x02a.", b"NNb.", b"\0.", b"\xff.", b"(.", b"o.", b"(o.", b"cx\ny", b"P\xff\n.",
     b"q\x01.", b"K\x01(K\x02K\x03e.", b"I" + b"1" * 5000 + b"\n.", b"\x95\xff\xff\xff\xff\xff\xff\xff\xffN.",
     b"\x8d" + b"\xff" * 8 + b".", b"\x8e" + b"\xff" * 8 + b".", b"\x96" + b"\xff" * 8 + b".", b"X\xff\xff\xff\xff."],
)  # fmt: skip
def test_malformed_streams(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse(data)


def test_deep_nesting_does_not_recurse() -> None:
    depth = 300_000
    for data in (
        b"]" * depth + b"a" * (depth - 1) + b".",
        b"N" + b"\x85" * depth + b".",
        b"(" * depth + b"t" * depth + b".",
    ):
        root = parse(data).root
        assert len(repr(root)) if type(root) is Node else type(root) is tuple


def test_a_memo_bomb_costs_what_it_weighs() -> None:
    layer = b"(" + b"h\x00" * 40 + b"l" + b"q\x00"
    begin = time.perf_counter()
    tree = parse(b"]q\x00" + layer * 1000 + b".")
    assert time.perf_counter() - begin < 2
    assert len(tree.root.items) == 40


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.formats.pickle_stream.MAX_OPCODES", 100)
    monkeypatch.setattr("ckptfix.formats.pickle_opcodes.MAX_CONTAINERS", 10)
    with pytest.raises(UnsupportedFormat, match="opcodes"):
        parse(b"N" * 101 + b".")
    with pytest.raises(UnsupportedFormat, match="lists and dicts"):
        parse(b"]" * 11 + b".")


def test_gc_is_paused_only_while_parsing() -> None:
    assert gc.isenabled()
    with pytest.raises(FormatError):
        parse(b"")
    assert gc.isenabled()


def test_leftovers_are_noticed() -> None:
    assert parse(b"NN.").leftover
    assert not parse(b"N.").leftover


def test_start_and_end() -> None:
    data = b"junk" + pickle.dumps("x", 2) + b"more"
    tree = parse(data, 4)
    assert tree.end == len(data) - 4
    assert tree.root.site == 2


def test_children_and_attributes() -> None:
    value = OrderedDict(a=1)
    value._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    root = parse(pickle.dumps(value, 2)).root
    assert child(root, "a") == 1
    assert child(root, "b") is None
    assert is_dict_like(attribute(root, "_metadata"))
    assert attribute(root, "other") is None


@pytest.mark.parametrize("index", [0, 300, 20_000, 10**9])
def test_long_streams_with_any_memo_index(index: int) -> None:
    put, get = struct.pack("<cI", b"r", index), struct.pack("<cI", b"j", index)
    data = b"\x80\x02(X\x01\0\0\0a" + put + b"B" + struct.pack("<I", 90_000) + bytes(90_000) + get + b"t."
    root = parse(data).root
    assert [root[0].value, root[2].value, root[2].source] == ["a", "a", 3]
    with pytest.raises(FormatError, match="never written"):
        parse(data.replace(get, struct.pack("<cI", b"j", index + 1)))
    with pytest.raises(FormatError, match="never written"):
        parse(data.replace(get, b"g-1\n"))
    assert parse(data.replace(put, b"\x94")).root[0].value == "a" if index == 0 else True
