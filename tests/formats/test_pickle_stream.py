"""The symbolic machine: all opcodes, no execution, no blow-up, nothing but FormatError."""

import gc
import os
import pickle
import pickletools
import struct
import time
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.errors import FormatError, TruncatedError, UnsupportedFormat
from ckptfix.formats.pickle_opcodes import MAX_TEXT
from ckptfix.formats.pickle_stream import parse
from ckptfix.formats.pickle_tree import Kind, Node, Text, attribute, child, is_dict_like, pairs
from tests.sampling import examples

CONSTANTS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300)
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
        return struct.pack("<d", left) == struct.pack("<d", right) or (
            left != left and right != right
        )
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


@given(
    st.binary(max_size=60)
    | st.lists(st.sampled_from([bytes([c]) for c in range(256)])).map(b"".join)
)
def test_any_bytes_parse_or_raise_format_error(data: bytes) -> None:
    with suppress(FormatError):
        parse(data)


@settings(max_examples=examples(40))
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
    assert (
        parse(pickle.dumps({"a": [1, (2,), 3.5, "x", 1 << 80, None, True]}, 2)).refused_opcodes
        == ()
    )
    assert set(parse(pickle.dumps({"a": 1}, 4)).refused_opcodes) >= {
        "FRAME",
        "MEMOIZE",
        "SHORT_BINUNICODE",
    }


SNIPPETS: dict[str, bytes] = {
    "POP": b"NN0", "DUP": b"N20", "POP_MARK": b"N(1", "REDUCE": b"ccollections\nOrderedDict\n)R",
    "BUILD": b"ccollections\nOrderedDict\n)R}b", "NEWOBJ": b"ccollections\nOrderedDict\n)\x81",
    "NEWOBJ_EX": b"ccollections\nOrderedDict\n)}\x92", "OBJ": b"(ccollections\nOrderedDict\no",
    "INST": b"(icollections\nOrderedDict\n", "GLOBAL": b"ccollections\nOrderedDict\n",
    "STACK_GLOBAL": b"X\x0b\0\0\0collectionsX\x0b\0\0\0OrderedDict\x93", "SETITEM": b"}NNs",
    "SETITEMS": b"}(NNu", "APPEND": b"]Na", "APPENDS": b"](Ne", "ADDITEMS": b"\x8f(N\x90",
    "FROZENSET": b"(N\x91", "LIST": b"(l", "DICT": b"(d", "TUPLE": b"(t", "TUPLE1": b"N\x85",
    "TUPLE2": b"NN\x86", "TUPLE3": b"NNN\x87", "MARK": b"(t", "PUT": b"Np0\n", "BINPUT": b"Nq\0",
    "LONG_BINPUT": b"Nr\0\0\0\0", "GET": b"Nq\0g0\n", "BINGET": b"Nq\0h\0",
    "LONG_BINGET": b"Nq\0j\0\0\0\0", "MEMOIZE": b"N\x94", "FRAME": b"\x95" + bytes(8) + b"N",
    "PROTO": b"\x80\x02N", "INT": b"I1\n", "LONG": b"L1L\n", "BININT": b"J\0\0\0\0",
    "LONG1": b"\x8a\1\1", "LONG4": b"\x8b\1\0\0\0\1", "FLOAT": b"F1.5\n",
    "BINFLOAT": b"G" + bytes(8), "STRING": b"S'a'\n", "UNICODE": b"Va\n",
    "BINUNICODE8": b"\x8d\1" + bytes(7) + b"a", "BINBYTES8": b"\x8e\1" + bytes(7) + b"a",
    "BYTEARRAY8": b"\x96\1" + bytes(7) + b"a", "SHORT_BINSTRING": b"U\1a",
    "SHORT_BINBYTES": b"C\1a", "SHORT_BINUNICODE": b"\x8c\1a", "BINSTRING": b"T\1\0\0\0a",
    "BINBYTES": b"B\1\0\0\0a", "BINUNICODE": b"X\1\0\0\0a", "BININT1": b"K\1", "BININT2": b"M\1\0",
    "BINPERSID": b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0aX\3\0\0\0cpuK\1tQ",
}  # fmt: skip
"""For each opcode something that it does not fail on."""

TARGETS: dict[str, Any] = {
    "APPENDS on collections.deque": deque([1, 2]),
    "SETITEMS on collections.defaultdict": defaultdict(deque, a=deque(), b=deque()),
    "SETITEM on collections.defaultdict": defaultdict(deque, a=deque()),
    "": Counter("aab"),
}


def loads_with_weights_only(data: bytes, folder: Path) -> bool:
    import torch

    path = folder / "model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", data)
        archive.writestr("model/data/a", bytes(4))
        archive.writestr("model/version", b"3\n")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.serialization.safe_globals([deque, defaultdict]):
                torch.load(path, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


@pytest.mark.parametrize("name", [opcode.name for opcode in pickletools.opcodes])
def test_refused_opcodes_are_what_torch_load_refuses(tmp_path: Path, name: str) -> None:
    opcode = next(opcode for opcode in pickletools.opcodes if opcode.name == name)
    if name in ("STOP", "PERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"):
        return  # every stream ends in STOP; the others need something outside the stream
    data = b"\x80\x02" + SNIPPETS.get(name, opcode.code.encode("latin-1")) + b"."
    refused = parse(data).refused_opcodes
    assert (name in refused) == (refused != ())
    assert loads_with_weights_only(data, tmp_path) == (refused == ())


@pytest.mark.parametrize("reason", TARGETS)
def test_refused_targets_are_what_torch_load_refuses(tmp_path: Path, reason: str) -> None:
    data = pickle.dumps(TARGETS[reason], 2)
    assert parse(data).refused_opcodes == ((reason,) if reason else ())
    assert loads_with_weights_only(data, tmp_path) == (not reason)


@pytest.mark.parametrize("data", [b"}}b.", b"]}b.", b"ctorch\nSize\n}b."])
def test_a_state_for_what_has_none_is_refused(tmp_path: Path, data: bytes) -> None:
    (reason,) = parse(b"\x80\x02" + data).refused_opcodes
    assert reason.startswith("BUILD on ")
    assert not loads_with_weights_only(b"\x80\x02" + data, tmp_path)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value", [{"a": [1, (2.5,), "x"], "b": {1, 2}}, OrderedDict(a=1), b"bytes", 1 << 40]
)
def test_refusal_of_whole_pickles(tmp_path: Path, value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert loads_with_weights_only(data, tmp_path) == (parse(data).refused_opcodes == ())


def test_a_long_string_is_kept_as_its_bytes_and_still_checked() -> None:
    text = ("ä" * (MAX_TEXT // 2) + "\ud800" + "b" * 9).encode("utf-8", "surrogatepass")
    for data in (
        b"\x80\x02X" + struct.pack("<I", len(text)) + text + b"q\0.",
        b"\x80\x04\x8d" + struct.pack("<Q", len(text)) + text + b".",
    ):
        tree = parse(data)
        assert (tree.root.kind, bytes(tree.root.head)) == (Kind.LONG_TEXT, text)
        assert tree.texts == ()
        with pytest.raises(FormatError, match="cannot be read"):
            parse(data.replace(text, text[:-5] + b"\xff" * 5))
        with pytest.raises(TruncatedError):
            parse(data[:-3])


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.formats.pickle_stream._BATCH", 10)
    monkeypatch.setattr("ckptfix.formats.pickle_stream.MAX_OPCODES", 100)
    assert parse(b"\x80\x04" + b"N" * 90 + b".").leftover
    for part in (b"X\0\0\0\0", b"Nr\0\0\0\1", b"\x95" + bytes(8)):
        with pytest.raises(UnsupportedFormat, match="opcodes"):
            parse(b"\x80\x04" + b"".join(part + b"" for _ in range(60)) + b"N" * 20 + b".")


def test_names_of_globals_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FormatError, match="names a global with 2001 characters"):
        parse(b"c" + b"x" * 2000 + b"\ny\n.")
    monkeypatch.setattr("ckptfix.formats.pickle_opcodes.MAX_GLOBALS", 10)
    with pytest.raises(FormatError, match="more than 10 globals"):
        parse(b"".join(b"cx\ny%d\n" % number for number in range(11)) + b".")
    assert len(parse(b"cx\ny\n" * 20 + b".").globals) == 1


def test_lines_are_bounded() -> None:
    with pytest.raises(UnsupportedFormat, match="line of"):
        parse(b"V" + b"x" * ((1 << 20) + 1) + b"\n.")


def test_an_error_does_not_repeat_the_file() -> None:
    with pytest.raises(FormatError) as caught:
        parse(b"F" + b"x" * 10_000 + b"\n.")
    assert len(str(caught.value)) < 250


def test_memo_numbers_that_would_collide_in_a_dict() -> None:
    with pytest.raises(FormatError, match="no pickler"):
        parse(b"Np4294967296\n.")
    assert parse(b"Np4294967295\ng4294967295\n.").root is None


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
        (b"I01\n.", True), (b"I00\n.", False), (b"I-7\n.", -7),
        (b"L12345678901234567890L\n.", 12345678901234567890), (b"F1.5\n.", 1.5),
        (b"J\xff\xff\xff\xff.", -1), (b"J\x00\x00\x00\x80.", -(2**31)),
        (b"\x8b\x01\0\0\0\xff.", -1), (b"(I1\nI2\nt.", (1, 2)), (b"(I1\n0I2\n.", 2),
        (b"(1I2\n.", 2), (b"I1\np3\n0g3\n.", 1), (b"I1\n2\x86.", (1, 1)),
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
    begin = time.process_time()
    tree = parse(b"]q\x00" + layer * 1000 + b".")
    assert time.process_time() - begin < 20
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
    data = (
        b"\x80\x02(X\x01\0\0\0a"
        + put
        + b"B"
        + struct.pack("<I", 90_000)
        + bytes(90_000)
        + get
        + b"t."
    )
    root = parse(data).root
    assert [root[0].value, root[2].value, root[2].source] == ["a", "a", 3]
    with pytest.raises(FormatError, match="never written"):
        parse(data.replace(get, struct.pack("<cI", b"j", index + 1)))
    with pytest.raises(FormatError, match="never written"):
        parse(data.replace(get, b"g-1\n"))
    assert parse(data.replace(put, b"\x94")).root[0].value == "a" if index == 0 else True
