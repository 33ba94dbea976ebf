"""Device maps: what the user may write, and what is made from names and sizes."""

import json
from pathlib import Path

import pytest

from ckptfix.devices.reload.device_maps import (
    Device,
    Spread,
    device_of,
    read_device_map,
    read_max_memory,
    split_ties,
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
    with pytest.raises(UsageError, match="expected a JSON file or one of auto, balanced"):
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
