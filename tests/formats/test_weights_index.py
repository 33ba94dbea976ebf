"""The index of a sharded model: parsed strictly, written as transformers and accelerate write
it.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats.safetensors_file import format_index, is_plain_name, parse_index

SHARD = "model-00001-of-00002.safetensors"


def index(weight_map: object, **more: object) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map, **more}).encode()


def test_what_is_read() -> None:
    parsed = parse_index(index({"a": SHARD}, other=[1]))
    assert parsed.weight_map == {"a": SHARD}
    assert parsed.document["other"] == [1]


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "../../x",
        "/x",
        "a/b",
        "a/",
        "a\\b",
        "..\\x",
        "a\0b",
        1,
        None,
        [],
        True,
    ],
)
def test_what_is_no_file_name_of_this_folder_is_refused(name: object) -> None:
    with pytest.raises(FormatError, match="weight_map"):
        parse_index(index({"a": SHARD, "b": name}))


@pytest.mark.parametrize("name", ["x", "...", ".hidden", "a b", "größe.bin", "a..b", "x\n"])
def test_a_plain_name(name: str) -> None:
    assert is_plain_name(name)
    assert parse_index(index({"a": name})).weight_map == {"a": name}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b"{}",
        b'{"weight_map": null}',
        b'{"weight_map": []}',
        b'{"weight_map": {"\xff": "x"}}',
        b'{"weight_map": {}} x',
        b'{"weight_map":' + b'{"a":' * 200_000,
        b'{"weight_map":' + b"[" * 200_000,
        b'{"weight_map": {}, "n": ' + b"9" * 100_000 + b"}",
    ],
    ids=lambda data: data[:24].decode(errors="replace") or "empty",
)
def test_what_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"index|key"):
        parse_index(data)


def test_the_last_of_two_equal_keys_counts() -> None:
    parsed = parse_index(b'{"weight_map": {}, "weight_map": {"a": "x", "b": "z", "a": "y"}}')
    assert parsed.weight_map == {"a": "y", "b": "z"}
    assert set(parsed.repeated) == {"a", "weight_map"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
MAPS = st.dictionaries(st.text(max_size=6), st.sampled_from([SHARD, "b.bin"]), max_size=4)


@given(weight_map=MAPS, new=MAPS, total=st.integers(0, 2**62), metadata=JSON, more=JSON)
def test_writing_replaces_the_map_and_the_size_alone(
    weight_map: dict[str, str], new: dict[str, str], total: int, metadata: Any, more: Any
) -> None:
    old = parse_index(
        json.dumps({"weight_map": weight_map, "metadata": metadata, "more": more}).encode()
    )
    written = format_index(old, new, total)
    assert parse_index(written).weight_map == new
    document = json.loads(written)
    kept = metadata if isinstance(metadata, dict) else {}
    assert document == {"weight_map": new, "metadata": {**kept, "total_size": total}, "more": more}
    assert old.weight_map == weight_map, "the parsed index changed"
    assert format_index(parse_index(written), new, total) == written


def test_the_layout_is_that_of_save_model() -> None:
    written = format_index(None, {"b": SHARD, "a": SHARD}, 8)
    document = {"metadata": {"total_size": 8}, "weight_map": {"b": SHARD, "a": SHARD}}
    assert written.decode() == json.dumps(document, indent=2, sort_keys=True) + "\n"


def test_what_json_cannot_write_back_and_millions_of_values() -> None:
    with pytest.raises(FormatError, match="larger than any float"):
        parse_index(b'{"metadata":{"x":1e999},"weight_map":{}}')
    with pytest.raises(UnsupportedFormat, match="more than 4000000 values"):
        parse_index(b'{"metadata":[' + b"{}," * 4_000_000 + b'1],"weight_map":{}}')
