"""What DCP's loader demands of a folder beyond names and sizes: it and ``check`` refuse each
fault.
"""

import pickle
import pickletools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckptfix.diagnosis.check import check
from ckptfix.storage.files import FileReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE: dict[str, Any] = {
    "model": {"a": torch.arange(8.0), "b": torch.ones(3, dtype=torch.int64)},
    "groups": [{"lr": 0.5}, {"lr": 0.25}],
    "step": 3,
}


def load(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = {}
    reader = dcp.FileSystemReader(folder)
    _load_state_dict(
        state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(STATE, checkpoint_id=tmp_path / "save", no_dist=True)
    assert check(tmp_path / "save").findings == ()
    assert load(tmp_path / "save")["step"] == 3
    return tmp_path / "save"


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new)

    return change


def edited(change: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        metadata = pickle.loads(data)
        change(metadata)
        return pickle.dumps(metadata)

    return edit


def skip_a_group(metadata: Any) -> None:
    for part in (metadata.state_dict_metadata, metadata.planner_data):
        part["groups.7.lr"] = part.pop("groups.1.lr")
    metadata.planner_data["groups.7.lr"] = ("groups", 7, "lr")
    index = next(index for index in metadata.storage_data if index.fqn == "groups.1.lr")
    place = metadata.storage_data.pop(index)
    metadata.storage_data[type(index)("groups.7.lr", index.offset, index.index)] = place


def an_item_in_an_item(metadata: Any) -> None:
    metadata.planner_data["step.more"] = ("step", "more")
    metadata.state_dict_metadata["step.more"] = metadata.state_dict_metadata["step"]
    index = next(index for index in metadata.storage_data if index.fqn == "step")
    metadata.storage_data[type(index)("step.more", index.offset, index.index)] = (
        metadata.storage_data[index]
    )


def with_a_buffer(data: bytes) -> bytes:
    """Let a string be read as a buffer, by the opcode in the place of the MEMOIZE that follows
    it.
    """
    (at,) = [
        at for _, arg, at in pickletools.genops(data) if arg == "storage_data" and at is not None
    ]
    end = at + 2 + len("storage_data")
    return data[:end] + b"\x98" + data[end:]


def with_a_number_in_the_path(data: bytes) -> bytes:
    """Let the last part of the path of the save be a number of the same length."""
    (at,) = [at for _, arg, at in pickletools.genops(data) if arg == "save" and at is not None]
    return data[:at] + b"\x8a\x04" + data[at + 2 :]


def with_an_item_of_an_object(data: bytes) -> bytes:
    """Let the state of the StorageMeta be appended to it: pickle.load finds no method
    ``append``.
    """
    opcodes = list(pickletools.genops(data))
    first = next(number for number, (_, arg, _) in enumerate(opcodes) if arg == "save_id")
    at = next(at for opcode, _, at in opcodes[first:] if opcode.name == "BUILD" and at is not None)
    return data[:at] + b"a" + data[at + 1 :]


def with_entries_appended_to_a_dict(data: bytes) -> bytes:
    """Let the entries of the StorageMeta's state be appended, by one bit of SETITEMS. pickle.load
    finds no method ``append``, and no rule needs these entries.
    """
    opcodes = list(pickletools.genops(data))
    first = next(number for number, (_, arg, _) in enumerate(opcodes) if arg == "save_id")
    at = next(
        at for opcode, _, at in opcodes[first:] if opcode.name == "SETITEMS" and at is not None
    )
    return data[:at] + b"e" + data[at + 1 :]


def with_arguments_that_are_true(data: bytes) -> bytes:
    """Let the arguments of the StorageMeta be True, where an empty tuple was."""
    opcodes = list(pickletools.genops(data))
    first = next(number for number, (_, arg, _) in enumerate(opcodes) if arg == "StorageMeta")
    at = next(
        at for opcode, _, at in opcodes[first:] if opcode.name == "EMPTY_TUPLE" and at is not None
    )
    return data[:at] + b"\x88" + data[at + 1 :]


METADATA: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "an unknown dtype": (replaced(b"\x8c\x05int64", b"\x8c\x05int66"), "unchecked-file"),
    "an unknown class": (replaced(b"_StorageInfo", b"_StorageInfp"), "unchecked-file"),
    "an unknown package": (
        replaced(b"torch.distributed.c", b"torcx.distributed.c"),
        "unchecked-file",
    ),
    "an unknown path": (replaced(b"pathlib", b"pabhlib"), "unchecked-file"),
    "an unknown layout": (replaced(b"torch.strided", b"torch.stridec"), "malformed-file"),
    "a list without an index": (edited(skip_a_group), "malformed-file"),
    "an item in an item": (edited(an_item_in_an_item), "malformed-file"),
    "a number in the path of the save": (with_a_number_in_the_path, "malformed-file"),
    "a buffer": (with_a_buffer, "malformed-file"),
    "an item of an object": (with_an_item_of_an_object, "malformed-file"),
    "entries appended to a dict": (with_entries_appended_to_a_dict, "malformed-file"),
    "arguments that are no tuple": (with_arguments_that_are_true, "malformed-file"),
    "no storage_data": (replaced(b"storage_data", b"storage_dat_"), "malformed-file"),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_the_loader_refuses_is_found(folder: Path, name: str) -> None:
    change, code = METADATA[name]
    path = folder / ".metadata"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointException):
        load(folder)
    assert [one.code for one in check(folder).findings] == [code]


def test_a_frame_that_ends_inside_a_value_is_found(tmp_path: Path) -> None:
    """``pickle.load`` drops the bytes before the end of the frame, where a value longer than its
    read buffer is cut.
    """
    dcp.save(
        {f"layer{number}": torch.ones(2) for number in range(160)},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    path = tmp_path / ".metadata"
    data = path.read_bytes()
    assert data[2:3] == b"\x95"
    assert 16_384 < len(data) < 65_536
    path.write_bytes(
        data[:3] + (len(data) - 11 - len("0.0\x94ub.")).to_bytes(8, "little") + data[11:]
    )
    with pytest.raises(CheckpointException, match="metadata is None"):
        load(tmp_path)
    assert [one.code for one in check(tmp_path).findings] == ["malformed-file"]


def of_item(fqn: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        stored = dcp.FileSystemReader(folder).read_metadata().storage_data
        place = next(place for index, place in stored.items() if index.fqn == fqn)
        path = folder / place.relative_path
        data, begin, end = path.read_bytes(), place.offset, place.offset + place.length
        item = change(data[begin:end])
        assert len(item) == place.length
        path.write_bytes(data[:begin] + item + data[end:])

    return edit


ITEMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a tensor without an end": (
        of_item("model.a", replaced(b"PK\5\6", b"none")),
        "truncated-file",
    ),
    "a number without an end": (of_item("step", replaced(b"PK\5\6", b"none")), "truncated-file"),
    "no version": (
        of_item("model.a", replaced(b"archive/version", b"archive/versiom")),
        "malformed-file",
    ),
    "another shape": (of_item("model.a", replaced(b"K\x08\x85q", b"K\x07\x85q")), "crc-mismatch"),
}


@pytest.mark.parametrize("name", ITEMS)
def test_an_item_that_the_loader_refuses_is_found_without_data(folder: Path, name: str) -> None:
    change, code = ITEMS[name]
    change(folder)
    with pytest.raises(CheckpointException):
        load(folder)
    codes = [one.code for one in check(folder).findings]
    assert codes == ["malformed-file" if code == "truncated-file" else code]


def test_an_id_of_a_save_that_is_no_text_is_found_in_an_item_like_another(tmp_path: Path) -> None:
    """``torch.load`` reads it as UTF-8: it differs between items of one shape, and is looked at all
    the same.
    """
    state = {name: torch.full((16,), 1.0 + place) for place, name in enumerate("ab")}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / "__0_0.distcp"
    data = path.read_bytes()
    # The name is in the local header and in the directory of each item; of the last one the former
    # is the second last.
    named = [match.start() for match in re.finditer(b"archive/.data/serialization_id", data)][-2]
    at = next(place for place in range(named, len(data)) if data[place : place + 40].isdigit())
    path.write_bytes(data[:at] + b"\xcf" + data[at + 1 :])
    with pytest.raises(CheckpointException):
        load(tmp_path)
    assert [one.code for one in check(tmp_path).findings] == ["crc-mismatch"]


def test_chunks_of_one_shape_are_compared_and_not_parsed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptfix.formats import dcp_items

    state = {f"layer{number:02}": torch.full((16,), float(number)) for number in range(20)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    parsed = []
    real = dcp_items._saved_tensor

    def counted(window: FileReader) -> Any:
        parsed.append(window)
        return real(window)

    monkeypatch.setattr(dcp_items, "_saved_tensor", counted)
    assert check(tmp_path).findings == ()
    assert len(parsed) == 1


def moved(fqn: str, **changes: Any) -> Callable[[Any], None]:
    """Return a change of where an item is said to be."""

    def change(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == fqn)
        metadata.storage_data[index] = replace(metadata.storage_data[index], **changes)

    return change


def taken(fqn: str, of: str) -> Callable[[Any], None]:
    """Return a change that sends one item to the bytes of another."""

    def change(metadata: Any) -> None:
        place = next(place for index, place in metadata.storage_data.items() if index.fqn == of)
        moved(fqn, offset=place.offset, length=place.length)(metadata)

    return change


def exchanged(one: str, other: str) -> Callable[[Any], None]:
    """Return a change that exchanges the bytes of two items."""

    def change(metadata: Any) -> None:
        places = {index.fqn: place for index, place in metadata.storage_data.items()}
        for fqn, place in ((one, places[other]), (other, places[one])):
            moved(fqn, offset=place.offset, length=place.length)(metadata)

    return change


def unlisted(metadata: Any) -> None:
    del metadata.state_dict_metadata["model.a"]


PLACES: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "no bytes": (moved("model.a", length=0), "malformed-file", "'model.a'"),
    "no bytes of an object": (moved("step", length=0), "malformed-file", "'step'"),
    "an object for a tensor": (
        exchanged("model.a", "step"),
        "malformed-file",
        "but the metadata lists a tensor",
    ),
    "a tensor for an object": (
        exchanged("step", "model.b"),
        "malformed-file",
        "it is an int, but the metadata lists a tensor; 1 other item too",
    ),
    "an extension": (moved("model.a", transform_descriptors=["zzz"]), "unchecked-file", "'zzz'"),
    "an extension of an object": (
        moved("step", transform_descriptors=["stream.rot13/1"]),
        "unchecked-file",
        "rot13",
    ),
    "a number as an extension": (
        moved("model.a", transform_descriptors=[1]),
        "malformed-file",
        "not names",
    ),
    "a text as extensions": (
        moved("model.a", transform_descriptors="zzz"),
        "malformed-file",
        "not a short list",
    ),
    "bytes of two objects": (taken("step", "groups.0.lr"), "malformed-file", "overlap"),
    "not listed": (unlisted, "incomplete-tensor", "state_dict_metadata does not list it"),
}
"""Name -> a change of the metadata, the code of the finding, and words of it."""


@pytest.mark.parametrize("name", PLACES)
def test_an_item_that_is_not_what_the_metadata_says_is_found(folder: Path, name: str) -> None:
    change, code, words = PLACES[name]
    path = folder / ".metadata"
    path.write_bytes(edited(change)(path.read_bytes()))
    wanted = {
        "model": {key: torch.zeros_like(value) for key, value in STATE["model"].items()},
        "groups": [{"lr": 0.0}, {"lr": 0.0}],
        "step": 0,
    }
    try:
        dcp.load(wanted, checkpoint_id=folder, no_dist=True)
    except CheckpointException:
        pass
    else:
        assert wanted["step"] != STATE["step"]
    (finding,) = check(folder).findings
    assert finding.code == code
    assert words in str(finding)


def test_items_that_zstd_packed_are_named_as_not_checked(folder: Path) -> None:
    path = folder / ".metadata"
    path.write_bytes(
        edited(moved("model.a", transform_descriptors=["stream.zstd/1"]))(path.read_bytes())
    )
    report = check(folder)
    assert report.status == 0
    assert ".metadata: 1 item saved through 'stream.zstd/1'" in report.not_checked


def test_tensors_of_one_safetensors_file_do_not_overlap(tmp_path: Path) -> None:
    state = {"a": torch.arange(4.0), "b": torch.zeros(0), "c": torch.ones(2)}
    writer = dcp.FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert check(tmp_path).findings == ()


def test_equal_and_empty_items_are_no_finding(tmp_path: Path) -> None:
    tensor = torch.ones(4)
    dcp.save(
        {
            "a": tensor,
            "b": tensor,
            "none": torch.zeros(0),
            "scalar": torch.tensor(1.0),
            "texts": ["", []],
        },
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    assert check(tmp_path).findings == ()
    assert load(tmp_path)["scalar"] == 1
