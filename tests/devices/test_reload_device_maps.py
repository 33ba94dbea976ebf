"""Device maps: what the user may write, and what is made from names and sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.devices.reload.device_maps import (
    Device,
    Spread,
    block_of,
    device_of,
    natural_order,
    read_device_map,
    read_max_memory,
    split_ties,
    spread_blocks,
)
from ckptfix.errors import UsageError

GIB = 1 << 30


def test_a_map_is_a_word_a_mapping_or_a_file(tmp_path: Path) -> None:
    assert read_device_map("balanced_low_0") is Spread.LOW_0
    written = {"a": 0, "b": "1", "c": "cuda:2", "d": "cpu", "": "disk"}
    read: dict[str, Device] = {"a": 0, "b": 1, "c": 2, "d": "cpu", "": "disk"}
    assert read_device_map(written) == read
    path = tmp_path / "map.json"
    path.write_text(json.dumps(written))
    assert read_device_map(str(path)) == read
    assert read_device_map(path) == read


@pytest.mark.parametrize("text", ["", "automatic", "no-such.json", '{"a": 0}'])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="neither a JSON file nor one of auto, balanced"):
        read_device_map(text)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        "nonsense",
        "[" * 5000,
        '{"a": -1}',
        '{"a": "gpu zero"}',
        '{"a": true}',
        '{"a": "cpu:0"}',
    ],
)
def test_files_that_hold_no_map_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "map.json"
    path.write_text(content)
    with pytest.raises(UsageError):
        read_device_map(path)


def test_memory_is_a_mapping_or_its_text() -> None:
    assert read_max_memory(None) is None
    assert read_max_memory('{"0": "4GiB", "cpu": "8GiB"}') == {0: 4 * GIB, "cpu": 8 * GIB}
    assert read_max_memory({0: 7, "cpu": "1KB"}) == {0: 7, "cpu": 1000}


@pytest.mark.parametrize(
    "text", ["4GiB", "[]", "{}", '{"0": "much"}', '{"0": -1}', '{"x": 1}', '{"0": null}', "{"]
)
def test_other_memory_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="max_memory"):
        read_max_memory(text)


@pytest.mark.parametrize(
    ("fqn", "block"),
    [
        ("model.layers.0.mlp.up.weight", "model.layers.0"),
        ("model.layers.12.experts.3.weight", "model.layers.12"),
        ("0.weight", "0"),
        ("lm_head.weight", "lm_head"),
        ("model.norm.weight", "model.norm"),
        ("weight", "weight"),
    ],
)
def test_blocks_end_at_the_first_number(fqn: str, block: str) -> None:
    assert block_of(fqn) == block


def test_numbers_are_ordered_as_numbers() -> None:
    assert natural_order(["h.10.w", "h.9.w", "h.w", "a"]) == ["a", "h.9.w", "h.10.w", "h.w"]


def test_the_longest_name_decides() -> None:
    device_map: dict[str, Device] = {"": "cpu", "layers": 0, "layers.1": 1, "layers.1.weight": 2}
    assert device_of("layers.0.weight", device_map) == 0
    assert device_of("layers.1.bias", device_map) == 1
    assert device_of("layers.1.weight", device_map) == 2
    assert device_of("layers1.weight", device_map) == "cpu"
    assert device_of("layers1.weight", {"layers": 0}) is None


def test_split_ties_are_named_with_their_devices() -> None:
    ties = [("embed.weight", "head.weight"), ("a", "b", "c")]
    device_map: dict[str, Device] = {"embed": 0, "head": 1, "": 2}
    assert split_ties(ties, device_map) == [(("embed.weight", 0), ("head.weight", 1))]
    assert split_ties(ties, {"": 2}) == []


EVEN = {f"layers.{number}": 10 for number in range(6)}


@pytest.mark.parametrize(
    ("spread", "limits", "expected"),
    [
        (Spread.AUTO, {0: 100, 1: 100, 2: 100, "cpu": 100}, [0, 0, 1, 1, 2, 2]),
        (Spread.SEQUENTIAL, {0: 40, 1: 100, "cpu": 100}, [0, 0, 0, 0, 1, 1]),
        (Spread.LOW_0, {0: 100, 1: 100, 2: 100, "cpu": 100}, [1, 1, 1, 2, 2, 2]),
        (Spread.LOW_0, {0: 100, 1: 20, 2: 20, "cpu": 100}, [1, 1, 2, 2, 0, 0]),
        (Spread.BALANCED, {0: 10, 1: 20, "cpu": 20}, [0, 1, 1, "cpu", "cpu", "disk"]),
        (Spread.AUTO, {"cpu": 100}, ["cpu"] * 6),
        (Spread.AUTO, {"cpu": 15}, ["cpu"] + ["disk"] * 5),
        (Spread.AUTO, {0: 0, 1: 100}, [1] * 6),
    ],
)
def test_blocks_are_spread(spread: Spread, limits: Any, expected: list[Device]) -> None:
    assert list(spread_blocks(EVEN, limits, spread).values()) == expected


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=30),
    st.dictionaries(st.sampled_from([0, 1, 2, 3, "cpu"]), st.integers(0, 300), min_size=1),
    st.sampled_from(list(Spread)),
)
def test_maps_are_contiguous_and_keep_to_their_limits(
    sizes: list[int], limits: dict[Device, int], spread: Spread
) -> None:
    blocks = {f"layers.{number}": size for number, size in enumerate(sizes)}
    mapped = spread_blocks(blocks, limits, spread)
    assert list(mapped) == list(blocks)
    runs = [
        place
        for number, place in enumerate(mapped.values())
        if number == 0 or place != list(mapped.values())[number - 1]
    ]
    assert len(runs) == len(set(runs)), "a device gets one run of blocks"
    for place, limit in limits.items():
        assert sum(blocks[name] for name, where in mapped.items() if where == place) <= limit
