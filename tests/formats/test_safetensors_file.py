"""The safetensors header: what is read, what is refused, what a rename writes. The reference parser
is the judge.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors import deserialize as _deserialize
from safetensors import safe_open as _safe_open
from safetensors.torch import load

from ckptfix.errors import FormatError, TruncatedError, UnsupportedFormat
from ckptfix.formats.safetensors_file import (
    MAX_HEADER,
    SafetensorsFile,
    looks_like_safetensors,
    pad_header,
    read_safetensors,
    rename_header,
    same_phase_length,
)
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.storage.reading import open_reader
from tests.sampling import examples

deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = _deserialize
safe_open: Callable[[Path, str], Any] = _safe_open
Read = Callable[[bytes], SafetensorsFile]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    path: Path = tmp_path_factory.mktemp("safetensors") / "x.safetensors"

    def reading(data: bytes) -> SafetensorsFile:
        path.write_bytes(data)
        with open_reader(path) as reader:
            return read_safetensors(reader)

    return reading


def made(header: object, data: bytes = b"", *, pad: int = 0) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * pad
    return struct.pack("<Q", len(raw)) + raw + data


def entry(
    begin: object, end: object, dtype: object = "U8", shape: object = None
) -> dict[str, object]:
    if shape is None and isinstance(begin, int) and isinstance(end, int):
        shape = [end - begin]
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_what_is_read(read: Read) -> None:
    header = {
        "b": entry(2, 6, "F32", []),
        "__metadata__": {"format": "pt"},
        "a": entry(0, 2),
        "c": entry(6, 6),
    }
    file = read(made(header, b"abcdef", pad=3))
    start = 8 + len(json.dumps(header)) + 3
    assert [(t.fqn, t.dtype, t.shape, t.data_offsets) for t in file.tensors] == [
        ("a", "U8", (2,), (start, start + 2)),  # in the order of their bytes
        ("b", "F32", (), (start + 2, start + 6)),
        ("c", "U8", (0,), (start + 6, start + 6)),
    ]
    assert (file.data_start, file.data_end, file.size, file.trailing) == (
        start,
        start + 6,
        start + 6,
        0,
    )
    assert file.metadata == {"format": "pt"}
    assert list(file.header) == list(header)


def test_trailing_bytes_are_counted(read: Read) -> None:
    assert read(made({"a": entry(0, 2)}, b"ab!!!")).trailing == 3


@pytest.mark.parametrize(
    ("data", "have", "need"),
    [
        (b"", 0, 8),
        (b"\x02\0\0\0\0\0\0", 7, 8),
        (b"\x10\0\0\0\0\0\0\0{}", 10, 24),
        (made({"a": entry(0, 5)}, b"abc"), 8 + len(json.dumps({"a": entry(0, 5)})) + 3, None),
    ],
)
def test_a_file_that_ends_too_early_says_both_numbers(
    read: Read, data: bytes, have: int, need: int | None
) -> None:
    with pytest.raises(TruncatedError) as caught:
        read(data)
    assert caught.value.have == have == len(data)
    assert caught.value.need == (have + 2 if need is None else need)


@pytest.mark.parametrize("claim", [MAX_HEADER + 1, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_format_allows_is_not_read(read: Read, claim: int) -> None:
    with pytest.raises(FormatError, match=str(claim)):
        read(struct.pack("<Q", claim) + b"{}")


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS.keys() - {"C128"}))
def test_every_dtype(read: Read, dtype: str) -> None:
    size = DTYPE_BITS[dtype]  # 8 elements of n bits take n bytes
    data = made({"a": entry(0, size, dtype, [2, 4])}, bytes(size))
    assert read(data).tensors[0].dtype == dict(deserialize(data))["a"]["dtype"] == dtype
    with pytest.raises(FormatError, match="by its dtype and shape"):
        read(made({"a": entry(0, size, dtype, [2, 5])}, bytes(size)))


def texts(fields: str, *, front: str = "") -> bytes:
    raw = f'{front}{{"__metadata__":{{"format":"pt"}},"a":{{{fields}}}}}'.encode()
    return made(raw, bytes(8))


_PLAIN = '"dtype":"F32","shape":[2],"data_offsets":[0,8]'
_LIKE_THE_REFERENCE = {
    "white space in front": (texts(_PLAIN, front=" \n\t\r"), ""),
    "another byte in front": (texts(_PLAIN, front="\f"), "does not begin"),
    "a mark of UTF-8 in front": (texts(_PLAIN, front="\ufeff"), "does not begin"),
    "-0 as an offset": (
        texts('"dtype":"F32","shape":[2],"data_offsets":[-0,8]'),
        "data_offsets of 'a' are invalid: -0.0",
    ),
    "-0 as a size": (
        made(b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'),
        "the shape of 'a' has an invalid size: -0.0",
    ),
    "-0 in a key": (made({"layer-0": entry(0, 1)}, b"a"), ""),
    "-0 in a field": (texts(f'"x":[-0],{_PLAIN}'), ""),
    "complex numbers of 128 bits": (made({"a": entry(0, 16, "C128", [1])}, bytes(16)), "'C128'"),
    "125 levels in a field": (texts(f'"x":{"[" * 125}{"]" * 125},{_PLAIN}'), ""),
    "126 levels in a field": (texts(f'"x":{"[" * 126}{"]" * 126},{_PLAIN}'), "nested too deeply"),
    "126 levels of objects": (
        texts('"x":' + '{"k":' * 126 + "1" + "}" * 126 + f",{_PLAIN}"),
        "nested too deeply",
    ),
    "125 levels of objects": (texts('"x":' + '{"k":' * 125 + "1" + "}" * 125 + f",{_PLAIN}"), ""),
    "a byte of two tensors": (
        made({"a": entry(0, 4), "b": entry(3, 6)}, bytes(6)),
        "the bytes of 'b' overlap the data before",
    ),
    "a byte of no tensor": (
        made({"a": entry(0, 3), "b": entry(4, 6)}, bytes(6)),
        "the bytes of 'b' leave a gap",
    ),
    "an integer of 308 digits": (texts(f'"x":{"9" * 308},{_PLAIN}'), ""),
    "an integer of 310 digits": (texts(f'"x":[-{"9" * 310}],{_PLAIN}'), "larger than any float"),
}
"""Header -> the words of the refusal, "" where the reference parser reads it."""


@pytest.mark.parametrize("name", _LIKE_THE_REFERENCE)
def test_the_reference_decides(read: Read, name: str) -> None:
    data, refusal = _LIKE_THE_REFERENCE[name]
    if not refusal:
        assert [t.fqn for t in read(data).tensors] == list(dict(deserialize(data)))
        return
    with pytest.raises(SafetensorError):
        deserialize(data)
    with pytest.raises(FormatError, match=refusal):
        read(data)


ODD: st.SearchStrategy[Any] = st.sampled_from(
    [0, 1, 2, 4, 8, -1, 2**64, 1.0, True, None, "0", [], {}]
)
NUMBERS = st.integers(0, 8) | ODD
DTYPES: st.SearchStrategy[Any] = st.sampled_from(
    ["U8", "F32", "BF16", "F4", "u8", "", 8, None, [], {}]
)
ENTRIES = st.one_of(
    st.builds(
        lambda begin, size, dtype: entry(begin, begin + size, dtype, [size]),
        st.integers(0, 4),
        st.integers(0, 4),
        st.just("U8"),
    ),
    st.builds(entry, NUMBERS, NUMBERS, DTYPES, st.lists(NUMBERS, max_size=3)),
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": DTYPES,
            "shape": st.one_of(
                st.lists(NUMBERS, max_size=2), st.sampled_from(["", "ab", {}, 4, None])
            ),
            "data_offsets": st.one_of(
                st.lists(NUMBERS, max_size=3), st.sampled_from(["ab", {}, 4, None])
            ),
            "more": st.just(1),
        },
    ),
    ODD,
)
METADATA = (
    st.dictionaries(st.sampled_from(["format", "x"]), st.sampled_from(["pt", 1, None]), max_size=2)
    | ODD
)
HEADERS = st.dictionaries(
    st.sampled_from(["a", "b", "module.c", "\ud800", "\x00"]), ENTRIES, max_size=3
)


@pytest.mark.parametrize(
    ("shape", "is_read"),
    [([0, 1 << 64], False), ([1 << 62, 8, 0], False), ([0, 1 << 62], True)],
)
def test_sizes_beyond_64_bits_are_refused_as_the_reference_does(
    read: Read, shape: list[int], is_read: bool
) -> None:
    data = made({"a": entry(0, 0, "U8", shape)})
    if is_read:
        assert read(data).tensors[0].shape == tuple(shape)
        assert dict(deserialize(data))["a"]["shape"] == shape
        return
    with pytest.raises(FormatError, match="the shape of 'a'"):
        read(data)
    with pytest.raises(SafetensorError):
        deserialize(data)


@pytest.mark.parametrize("size", [1 << 63, (1 << 64) - 1])
def test_a_size_that_torch_cannot_hold_is_refused(read: Read, tmp_path: Path, size: int) -> None:
    data = made({"a": entry(0, 0, "U8", [0, size])})
    (tmp_path / "x.safetensors").write_bytes(data)
    assert dict(deserialize(data))["a"]["shape"] == [0, size]
    with pytest.raises(TypeError), safe_open(tmp_path / "x.safetensors", "pt") as file:
        file.get_tensor("a")
    with pytest.raises(FormatError, match="the shape of 'a' has an invalid size"):
        read(data)
    data = made({"a": entry(0, 0, "U8", [0, (1 << 63) - 1])})
    (tmp_path / "x.safetensors").write_bytes(data)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.get_tensor("a").shape == read(data).tensors[0].shape


@pytest.mark.parametrize(
    ("shape", "is_read"),
    [
        ([0, 1 << 62, 3], False),
        ([0, 1 << 32, 1 << 32], False),
        ([0, 5, 1 << 62], False),
        ([1 << 62, 3, 0], True),
        ([0, (1 << 63) - 1, 1], True),
        ([3, 0, 1 << 62], True),
    ],
)
def test_a_stride_that_torch_cannot_count_is_refused(
    read: Read, shape: list[int], is_read: bool
) -> None:
    data = made({"a": entry(0, 0, "F32", shape)})
    if is_read:
        assert load(data)["a"].shape == read(data).tensors[0].shape
        return
    with pytest.raises(RuntimeError, match="Stride calculation overflowed"):
        load(data)
    with pytest.raises(FormatError, match="the shape of 'a' needs a stride"):
        read(data)


@pytest.mark.slow
@settings(max_examples=examples(1000), deadline=None)
@given(
    header=HEADERS,
    metadata=st.none() | st.fixed_dictionaries({"__metadata__": METADATA}),
    size=st.integers(0, 12),
)
def test_what_the_reference_refuses_is_refused(
    read: Read, header: dict[str, Any], metadata: dict[str, Any] | None, size: int
) -> None:
    data = made({**(metadata or {}), **header}, bytes(size))
    try:
        file = read(data)
    except FormatError:
        return
    # What we accept and call whole, the reference must accept, and find the same in it.
    exact = data[: file.data_end]
    reference = dict(deserialize(exact))
    assert {t.fqn: (t.dtype, list(t.shape)) for t in file.tensors} == {
        name: (found["dtype"], found["shape"]) for name, found in reference.items()
    }


@settings(max_examples=examples(300), deadline=None)
@given(sizes=st.lists(st.integers(0, 4), max_size=4), order=st.randoms(), pad=st.integers(0, 9))
def test_what_the_reference_accepts_is_accepted(
    read: Read, sizes: list[int], order: Any, pad: int
) -> None:
    entries = []
    position = 0
    for number, size in enumerate(sizes):
        entries.append((f"t{number}", entry(position, position + size)))
        position += size
    order.shuffle(entries)
    data = made(dict(entries), bytes(position), pad=pad)
    deserialize(data)
    assert len(read(data).tensors) == len(sizes)


@pytest.mark.parametrize("name", ["\\ud800", "a\\udfff", "\\ude00b\\ud83d"])
def test_half_of_a_surrogate_pair_is_no_name(read: Read, name: str) -> None:
    """JSON can say it and UTF-8 cannot, so such a name could never be written again; the reference
    refuses it, too.
    """
    data = made(
        json.dumps({"NAME": entry(0, 1), "x": entry(1, 2)}).replace("NAME", name).encode(), b"ab"
    )
    with pytest.raises(SafetensorError):
        deserialize(data)
    with pytest.raises(FormatError):
        read(data)


def test_a_whole_surrogate_pair_is_a_name(read: Read) -> None:
    assert read(made({"\U0001f642": entry(0, 1)}, b"a")).tensors[0].fqn == "\U0001f642"


def test_a_duplicate_key_is_refused_even_if_the_reference_takes_the_last(read: Read) -> None:
    one = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    with pytest.raises(FormatError, match="'a' more than once"):
        read(made(f"{{{one},{one}}}".encode(), b"x"))


def test_a_rename_keeps_order_metadata_offsets_and_unknown_fields(read: Read) -> None:
    header = {
        "__metadata__": {"format": "pt", "note": "module.b", "module.tied": "module.a"},
        "module.b": entry(1, 2),
        "module.a": {**entry(0, 1), "later": "field"},
        "größe": entry(2, 2),
    }
    file = read(made(header, b"ab", pad=40))
    new = json.loads(rename_header(file, lambda fqn: fqn.removeprefix("module.")))
    assert new == {
        "__metadata__": {"format": "pt", "note": "b", "tied": "a"},
        "b": header["module.b"],
        "a": header["module.a"],
        "größe": header["größe"],
    }
    assert list(new) == ["__metadata__", "b", "a", "größe"]


def test_metadata_that_is_no_alias_stays(read: Read) -> None:
    header = {
        "__metadata__": {"module.a": "module.a", "text": "module.x"},
        "module.a": entry(0, 1),
    }
    new = json.loads(
        rename_header(read(made(header, b"a")), lambda fqn: fqn.removeprefix("module."))
    )
    assert new["__metadata__"] == {"module.a": "module.a", "text": "module.x"}


@pytest.mark.parametrize("metadata", [None, {}, {"x": "y"}, {"format": "np"}])
def test_format_is_added_only_where_it_lacks(read: Read, metadata: dict[str, str] | None) -> None:
    header = {**({} if metadata is None else {"__metadata__": metadata}), "a": entry(0, 1)}
    file = read(made(header, b"a"))
    added = json.loads(rename_header(file, str, add_format=True))
    assert added["__metadata__"] == {"format": "pt", **(metadata or {})}
    plain = json.loads(rename_header(file, str))
    assert plain == header


@pytest.mark.parametrize("new", ["same", "__metadata__"])
def test_a_rename_that_would_lose_a_tensor_is_refused(read: Read, new: str) -> None:
    file = read(made({"a": entry(0, 1), "b": entry(1, 2)}, b"ab"))
    with pytest.raises(FormatError, match="would"):
        rename_header(file, lambda fqn: new)


def test_padding() -> None:
    assert pad_header(b"{}", 8) == b"{}      "
    assert pad_header(b"{}", 2) == b"{}"
    with pytest.raises(FormatError, match="room for 1"):
        pad_header(b"{}", 1)


@given(st.integers(0, 9000), st.integers(0, 9000), st.sampled_from([1, 8, 4096]))
def test_a_new_length_keeps_the_phase(new: int, old: int, block: int) -> None:
    length = same_phase_length(b"x" * new, old, block)
    assert (length - old) % block == 0
    assert new <= length < new + block


def test_looks_like() -> None:
    assert looks_like_safetensors(made({}))
    assert looks_like_safetensors(made({"a": entry(0, 1)}, b"a")[:16])
    assert not looks_like_safetensors(b"")
    assert not looks_like_safetensors(b"PK\x03\x04" + bytes(20))
    assert not looks_like_safetensors(struct.pack("<Q", MAX_HEADER + 1) + b"{}")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_a_number_that_cannot_be_written_back_is_refused(read: Read, number: str) -> None:
    header = f'{{"a":{{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":{number}}}}}'
    with pytest.raises(FormatError, match=r"larger than any float|not JSON"):
        read(struct.pack("<Q", len(header)) + header.encode())


@pytest.mark.parametrize("value", [b"{},", b"[],", b"1,"])
def test_a_header_of_millions_of_values_is_not_parsed(read: Read, value: bytes) -> None:
    header = b'{"a":[' + value * 4_000_000 + b"1]}"
    with pytest.raises(UnsupportedFormat, match="more than 4000000 values"):
        read(struct.pack("<Q", len(header)) + header)
