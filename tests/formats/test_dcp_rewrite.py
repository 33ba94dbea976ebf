"""Names and places changed in real metadata: torch unpickles exactly what was meant, and nothing
else changes.
"""

import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ckptfix.errors import FormatError, TruncatedError, UnsupportedFormat
from ckptfix.formats.dcp_items import listed_names, read_item, renamed_item
from ckptfix.formats.dcp_metadata import DcpMetadata, parse_dcp_metadata
from ckptfix.formats.dcp_rewrite import ItemLocation, Steps, paths_of, rewrite_metadata
from ckptfix.formats.dcp_stream import StoredItem
from ckptfix.formats.pickle_rewrite import number_behind, rewrite
from ckptfix.formats.pickle_stream import parse
from ckptfix.formats.pickle_tree import Text, pairs
from ckptfix.storage.reading import open_reader
from tests.tensors.dcp_making import save

ITEM = "optimizer.param_groups.0.params"


def saved(folder: Path) -> Metadata:
    """Save a model and an optimizer together, and return what torch says of them."""
    names = [f"module.module.{number}.weight" for number in range(3)]
    state = {
        "model": {name: torch.full((2, 3), float(number)) for number, name in enumerate(names)},
        "optimizer": {
            "state": {name: {"momentum": torch.ones(2, 3)} for name in names},
            "param_groups": [{"params": names, "lr": 0.1}],
        },
    }
    save(folder, state)
    content: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return content


def read(folder: Path) -> DcpMetadata:
    return parse_dcp_metadata((folder / ".metadata").read_bytes())


def stripped(path: Steps) -> Steps:
    return tuple(
        step.removeprefix("module.module.") if isinstance(step, str) else step for step in path
    )


def seen(content: Metadata, rename: Any = lambda name: name) -> dict[str, Any]:
    """Return what torch's metadata says, as plain values, under other names."""
    planned: Any = content.planner_data
    stored: Any = content.storage_data
    return {
        "state": [
            (rename(name), str(value)) for name, value in content.state_dict_metadata.items()
        ],
        "planned": [
            (rename(name), tuple(rename(str(step)) for step in path))
            for name, path in planned.items()
        ],
        "stored": [
            (rename(key.fqn), key.offset, key.index, str(value)) for key, value in stored.items()
        ],
        "rest": (str(content.storage_meta), content.version),
    }


def test_torch_unpickles_the_new_names_and_nothing_else_new(tmp_path: Path) -> None:
    before = saved(tmp_path)
    metadata = read(tmp_path)
    new = rewrite_metadata(
        metadata, {fqn: stripped(path) for fqn, path in paths_of(metadata).items()}, {}
    )
    after = pickle.loads(new.data)
    assert seen(after) == seen(before, lambda name: name.replace("module.module.", ""))
    assert new.names["model.module.module.0.weight"] == "model.0.weight"
    assert new.names[ITEM] == ITEM
    assert len(new.data) < len(metadata.tree.data)
    assert rewrite_metadata(metadata, {}, {}).data == metadata.tree.data


@pytest.mark.parametrize("offset", [0, 255, 256, 70_000, 1 << 31, 1 << 40])
def test_an_item_gets_another_place(tmp_path: Path, offset: int) -> None:
    before = saved(tmp_path)
    place = ItemLocation(PurePosixPath("__ckptfix_0.distcp"), offset, offset + 7)
    new = rewrite_metadata(read(tmp_path), {}, {ITEM: place})
    stored: Any = before.storage_data
    info = stored[MetadataIndex(ITEM)]
    info.relative_path, info.offset, info.length = str(place.path), place.offset, place.length
    assert seen(pickle.loads(new.data)) == seen(before)


@given(st.integers(0, 2**62), st.integers(0, 2**62), st.sampled_from([2, 3, 4, 5]))
def test_a_number_behind_its_key(old: int, new: int, protocol: int) -> None:
    value = {"offset": old, "long": "x" * 70_000, "length": 7, "again": ["length", "offset"]}
    tree = parse(pickle.dumps(value, protocol))
    (site,) = [
        key.site for key, _ in pairs(tree.root) if type(key) is Text and key.value == "offset"
    ]
    again = pickle.loads(
        rewrite(tree, {}, {number_behind(tree, site): new}, is_right=lambda _: True)
    )
    assert again == value | {"offset": new}


def test_no_number_behind_a_key() -> None:
    tree = parse(pickle.dumps({"offset": "text"}, 4))
    (site,) = [key.site for key, _ in pairs(tree.root)]
    with pytest.raises(UnsupportedFormat, match="no number"):
        number_behind(tree, site)


def test_two_names_that_would_become_one(tmp_path: Path) -> None:
    saved(tmp_path)
    metadata = read(tmp_path)
    paths = {f"model.module.module.{number}.weight": ("model", "w") for number in range(2)}
    with pytest.raises(UnsupportedFormat, match=r"would both become 'model\.w'"):
        rewrite_metadata(metadata, paths, {})


def test_an_item_that_is_nowhere(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(FormatError, match="no location for 'other'"):
        rewrite_metadata(read(tmp_path), {}, {"other": ItemLocation(PurePosixPath("x"), 0, 1)})


def stored_item(folder: Path) -> StoredItem:
    return read(folder).stored[ITEM, None]


def test_the_names_in_an_item(tmp_path: Path) -> None:
    saved(tmp_path)
    item = stored_item(tmp_path)
    with open_reader(tmp_path / item.path) as reader:
        names = listed_names(read_item(reader, item))
        assert names is not None
        assert [text.value for text in names] == [
            f"module.module.{number}.weight" for number in range(3)
        ]
        new = renamed_item(reader, item, {names[1].site: "other"})
        assert listed_names(read_item(reader, item)) == names
    assert torch.load(io.BytesIO(new), weights_only=True) == [
        "module.module.0.weight",
        "other",
        "module.module.2.weight",
    ]


def test_an_item_that_cannot_be_read(tmp_path: Path) -> None:
    saved(tmp_path)
    item = stored_item(tmp_path)
    with open_reader(tmp_path / item.path) as reader:
        with pytest.raises(UnsupportedFormat, match="zstd"):
            read_item(reader, item._replace(transforms=("zstd",)))
        with pytest.raises(UnsupportedFormat, match=f"it has {1 << 40} bytes, over the limit of "):
            read_item(reader, item._replace(length=1 << 40))
        with pytest.raises(FormatError, match="are needed"):
            read_item(reader, item._replace(offset=reader.size))
        with pytest.raises((FormatError, TruncatedError)):
            read_item(reader, item._replace(length=item.length - 100))


def test_an_item_of_other_values_lists_no_names(tmp_path: Path) -> None:
    save(tmp_path, {"a": ["x", 5], "b": {"c": "d"}, "w": torch.ones(2)})
    metadata = read(tmp_path)
    for one in metadata.items:
        item = metadata.stored[one.fqn, None]
        with open_reader(tmp_path / item.path) as reader:
            assert listed_names(read_item(reader, item)) is None
