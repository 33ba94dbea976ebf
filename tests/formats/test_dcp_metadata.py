"""The metadata of torch.distributed.checkpoint: what torch says, every name's sites, and hostile
bytes.
"""

import pickle
from contextlib import suppress
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OlderProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptfix.errors import FormatError, TruncatedError, UnsupportedFormat
from ckptfix.formats import dcp_metadata
from ckptfix.formats.dcp_items import coverage_problem, dcp_problems
from ckptfix.formats.dcp_metadata import (
    DcpBytes,
    DcpMetadata,
    DcpTensor,
    parse_dcp_metadata,
    read_dcp_metadata,
)
from ckptfix.formats.dcp_stream import Chunk, StoredItem
from ckptfix.formats.pickle_rewrite import rewrite
from ckptfix.storage.reading import open_reader
from tests.tensors.dcp_making import every_dtype, save

Box = tuple[tuple[int, ...], tuple[int, ...]]


def made(
    shape: tuple[int, ...] = (4, 3),
    chunks: list[Box] | None = None,
    *,
    path: str = "__0_0.distcp",
    **place: Any,
) -> Metadata:
    """Return the metadata of one tensor ``model.w``, as torch's classes make it."""
    chunks = [((0,) * len(shape), shape)] if chunks is None else chunks
    listed = [ChunkStorageMetadata(torch.Size(begin), torch.Size(size)) for begin, size in chunks]
    numbers = {"offset": 0, "length": 100} | place
    return Metadata(
        {
            "model.w": TensorStorageMetadata(
                TensorProperties(torch.float32), torch.Size(shape), listed
            )
        },
        {"model.w": ("model", "w")},
        {MetadataIndex("model.w", begin, 0): _StorageInfo(path, **numbers) for begin, _ in chunks},
        StorageMeta("folder", "save", "load"),
        "1.0.0",
    )


def parsed(metadata: Any, protocol: int = 4) -> DcpMetadata:
    return parse_dcp_metadata(pickle.dumps(metadata, protocol))


def agree(ours: DcpMetadata, theirs: Metadata) -> None:
    """Assert that a parsed file says what torch unpickles."""
    seen: dict[str, Any] = {
        one.fqn: (
            getattr(torch, one.torch_dtype),
            one.shape,
            [(chunk.offsets, chunk.lengths) for chunk in one.chunks],
        )
        for one in ours.tensors
    } | {item.fqn: None for item in ours.items}
    assert seen == {
        name: (
            (
                one.properties.dtype,
                tuple(one.size),
                [(tuple(c.offsets), tuple(c.sizes)) for c in one.chunks],
            )
            if isinstance(one, TensorStorageMetadata)
            else None
        )
        for name, one in theirs.state_dict_metadata.items()
    }
    assert {one.fqn: one.path for one in ours.planned or ()} == theirs.planner_data
    assert {
        (item.fqn, item.offsets, item.hint): (str(item.path), item.offset, item.length)
        for item in ours.stored.values()
    } == {
        (key.fqn, None if key.offset is None else tuple(key.offset), key.index): (
            info.relative_path,
            info.offset,
            info.length,
        )
        for key, info in theirs.storage_data.items()
    }


def real(folder: Path) -> bytes:
    state = {
        "model": every_dtype() | {"_extra_state": {"x": 1}, "listed": [torch.ones(2), 5]},
        "optimizer": {
            "state": {"w": {"step": torch.tensor(3.0)}},
            "param_groups": [{"params": ["w"], "lr": 0.1}],
        },
    }
    save(folder, state)
    return (folder / ".metadata").read_bytes()


def test_a_real_one_says_what_torch_reads(tmp_path: Path) -> None:
    data = real(tmp_path)
    with open_reader(tmp_path / ".metadata") as reader:
        ours = read_dcp_metadata(reader)
    agree(ours, pickle.loads(data))
    assert ours.version == "1.0.0"
    assert ours.save_id is not None
    assert len(ours.save_id) == 36
    assert ours.files == (PurePosixPath("__0_0.distcp"),)
    assert not list(dcp_problems(ours))
    assert next(one.path for one in ours.planned or () if one.fqn == "model.listed.1") == (
        "model",
        "listed",
        1,
    )


def test_every_name_can_be_rewritten_where_it_is(tmp_path: Path) -> None:
    data = real(tmp_path)
    ours = parse_dcp_metadata(data)
    named: list[DcpTensor | DcpBytes | StoredItem] = [
        *ours.tensors,
        *ours.items,
        *ours.stored.values(),
    ]
    new = {one.site: one.fqn.replace("a.module.", "a.") for one in named}
    for one in ours.planned or ():
        new[one.site] = one.fqn.replace("a.module.", "a.")
        for step, site in zip(one.path, one.sites, strict=True):
            if site is not None:
                new[site] = str(step).replace("a.module.", "a.")
    written = rewrite(ours.tree, new, is_right=lambda _: True)
    renamed = pickle.loads(written)
    old = pickle.loads(data)
    assert b"a.module." in data
    assert b"a.module." not in written
    assert "model.a.weight" in renamed.state_dict_metadata
    assert renamed.planner_data["model.a.weight"] == ("model", "a.weight")
    key = MetadataIndex("model.a.module.weight", (0, 0))
    assert renamed.storage_data[MetadataIndex("model.a.weight", (0, 0))] == old.storage_data[key]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_as_older_versions_of_torch_left_it(protocol: int) -> None:
    metadata = made()
    del metadata.__dict__["version"]
    del metadata.__dict__["storage_meta"]
    for place in metadata.storage_data.values():
        del place.__dict__["transform_descriptors"]
    (one,) = metadata.state_dict_metadata.values()
    assert isinstance(one, TensorStorageMetadata)
    one.properties = OlderProperties(torch.float32)
    ours = parsed(metadata, protocol)
    agree(ours, metadata)
    assert (ours.version, ours.save_id) == (None, None)
    assert next(iter(ours.stored.values())).transforms == ()


def test_transforms_are_told() -> None:
    ours = parsed(made(transform_descriptors=["zstd", "other"]))
    assert next(iter(ours.stored.values())).transforms == ("zstd", "other")


def test_a_planner_without_paths() -> None:
    metadata = made()
    metadata.planner_data = None
    assert parsed(metadata).planned is None


@pytest.mark.parametrize(
    "path", ["../x.distcp", "/x.distcp", "a/../../x", "", ".", "a\0b", "\ud800"]
)
def test_a_path_that_leaves_the_folder_is_refused(path: str) -> None:
    with pytest.raises(FormatError, match="which is not a path inside the folder"):
        parsed(made(path=path))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (made((4, 3), [((2, 0), (3, 3))]), r"\[2, 0\] \(size \[3, 3\]\) does not fit in the tensor's shape \[4, 3\]"),
        (made((4, 3), [((0,), (4,))]), "a chunk of 'model.w' has 1 dimensions, but the tensor has 2"),
        (made(offset=-1), "'model.w' has an invalid location: 100 bytes at offset -1"),
        (made(length=1 << 70), "'model.w' has an invalid location: 1180591620717411303424 bytes at offset 0"),
        (made(length=True), "'model.w' has an invalid location: True bytes"),
        ({"model.w": 1}, "its root is not a Metadata"),
        (Metadata({"w": 3}, {}, {}), r"'w' is an int \(expected a tensor or bytes"),
        (Metadata({}, {}, None), r"storage_data is None \(expected a dict, as torch's planner and writer write"),
        (Metadata({}, {"a.w": ("a", "v")}, {}), "planner_data gives 'a.w' the path 'a.v', but torch loads the item by"),
        (Metadata({}, {"w": {1: 2}}, {}), "planner_data has an invalid path for 'w': a dict"),
        (Metadata({}, {"w": (1.5,)}, {}), "planner_data has an invalid path for 'w': a tuple"),
        (Metadata({}, {}, {"w": _StorageInfo("x", 0, 1)}), "storage_data maps a string to torch.distributed"),
        (Metadata({3: BytesStorageMetadata()}, {}, {}), "a key of state_dict_metadata is an int"),
    ],
)  # fmt: skip
def test_what_torch_does_not_write_is_refused(metadata: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parsed(metadata)


def test_a_name_that_is_there_twice_is_refused() -> None:
    data = pickle.dumps(
        Metadata({"w.1": BytesStorageMetadata(), "w.2": BytesStorageMetadata()}, {}, {})
    )
    with pytest.raises(FormatError, match=r"the metadata lists 'w\.1' twice"):
        parse_dcp_metadata(data.replace(b"w.2", b"w.1"))


def test_one_list_for_many_tensors_takes_no_time() -> None:
    many = [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))] * 2000
    one = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([1]), many)
    metadata = made()
    metadata.state_dict_metadata = {
        str(number): TensorStorageMetadata(one.properties, one.size, many) for number in range(2000)
    }
    with pytest.raises(FormatError, match="refers to the same lists over and over"):
        parsed(metadata)


def test_a_long_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(made()))
    monkeypatch.setattr(dcp_metadata, "MAX_METADATA", 100)
    with (
        open_reader(tmp_path / ".metadata") as reader,
        pytest.raises(UnsupportedFormat, match="over the limit of 100"),
    ):
        read_dcp_metadata(reader)


def test_a_file_that_is_cut_is_told_anywhere() -> None:
    data = pickle.dumps(made(), 4)
    for end in range(len(data)):
        with pytest.raises(FormatError):
            parse_dcp_metadata(data[:end])
    with pytest.raises(TruncatedError):
        parse_dcp_metadata(data[:-1])


@pytest.mark.slow
def test_changed_bytes_are_refused_or_read() -> None:
    data = pickle.dumps(made((4, 3), [((0, 0), (4, 1)), ((0, 1), (4, 2))]), 4)
    for position, value in product(range(len(data)), (0, 0x28, 0x2E, 0x52, 0xFF)):
        changed = bytearray(data)
        changed[position] = value
        with suppress(FormatError):
            list(dcp_problems(parse_dcp_metadata(bytes(changed))))


def tensor(shape: tuple[int, ...], chunks: list[Box]) -> DcpTensor:
    return DcpTensor("w", "F32", "float32", shape, tuple(Chunk(*box) for box in chunks), 0)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        # Found by the fuzzer: the MEMOIZE behind [] of StorageMeta.modules became a NEWOBJ_EX.
        (b"N\x8c\x07modules]\x92", "arguments that are not a tuple"),
        (b"N)}\x92", "something that is not a class"),
        (b"N)\x81", "something that is not a class"),
        (b"])R", "something that is not a class"),
        (b"K\x01K\x02R", "arguments that are not a tuple"),
    ],
)
def test_an_object_of_no_class_is_refused(code: bytes, message: str) -> None:
    pickled = pickle.dumps(Metadata({}, planner_data=["here"]), protocol=4)
    at = pickled.index(b"\x8c\x04here")
    body = pickled[:at] + code + pickled[at + len(b"\x8c\x04here") :]
    # A frame has the length of what follows it.
    length = int.from_bytes(body[3:11], "little") + len(code) - len(b"\x8c\x04here")
    body = body[:3] + length.to_bytes(8, "little") + body[11:]
    with pytest.raises((pickle.UnpicklingError, TypeError)):
        pickle.loads(body)
    with pytest.raises(FormatError, match=message):
        parse_dcp_metadata(body)


@pytest.mark.parametrize(
    ("shape", "chunks", "problem"),
    [
        ((), [((), ())], None),
        ((), [], "1 of its 1 elements is not in any chunk"),
        ((), [((), ()), ((), ())], r"its chunks at \[\] \(size \[\]\) and at \[\] \(size \[\]\) overlap"),
        ((0, 3), [((0, 0), (0, 3))], None),
        ((0, 3), [], None),
        ((5,), [((0,), (3,)), ((3,), (2,)), ((5,), (0,)), ((5,), (0,))], None),
        ((5,), [((3,), (2,))], "3 of its 5 elements are not in any chunk: indices 0 to 2 of 5 along dimension 0"),
        ((5, 2), [((0, 0), (1, 2)), ((3, 0), (2, 2))], "4 of its 10 elements .* chunk: indices 1 to 2 of 5 along"),
        ((5, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))], "2 of its 10 elements are not in any chunk: index 4 of 5 along"),
        ((5,), [((0,), (4,)), ((3,), (2,))], r"its chunks at \[0\] \(size \[4\]\) and at \[3\] \(size \[2\]\) overlap"),
        ((2, 2), [((0, 0), (1, 1)), ((1, 1), (1, 1))], "2 of its 4 elements are not in any chunk$"),
        ((2, 2), [((0, 0), (2, 1)), ((0, 0), (1, 2))], "overlap"),
    ],
)  # fmt: skip
def test_gaps_and_overlaps(shape: tuple[int, ...], chunks: list[Box], problem: str | None) -> None:
    found = coverage_problem(tensor(shape, chunks))
    if problem is None:
        assert found is None
    else:
        with pytest.raises(AssertionError, match=problem):
            raise AssertionError(found)


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a tensor of up to three dimensions and a grid of chunks that cover it, in any order."""
    axes = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), max_size=3))
    spans = [[(sum(axis[:number]), length) for number, length in enumerate(axis)] for axis in axes]
    boxes: list[Box] = [
        (tuple(one[0] for one in box), tuple(one[1] for one in box)) for box in product(*spans)
    ]
    return tuple(map(sum, axes)), draw(st.permutations(boxes))


@given(grids(), st.data())
def test_a_grid_covers_and_less_or_more_does_not(
    grid: tuple[tuple[int, ...], list[Box]], data: Any
) -> None:
    shape, chunks = grid
    assert coverage_problem(tensor(shape, chunks)) is None
    one = data.draw(st.sampled_from(chunks))
    missing = coverage_problem(tensor(shape, [box for box in chunks if box != one]))
    assert missing is not None
    assert "not in any chunk" in missing
    twice = coverage_problem(tensor(shape, [*chunks, one]))
    assert twice is not None
    assert "overlap" in twice


def test_what_is_stored_nowhere_is_told() -> None:
    metadata = made((4, 3), [((0, 0), (2, 3)), ((2, 0), (2, 3))])
    del metadata.storage_data[MetadataIndex("model.w", (2, 0))]
    metadata.state_dict_metadata["step"] = BytesStorageMetadata()
    found = [(problem.fqn, problem.message) for problem in dcp_problems(parsed(metadata))]
    assert found == [
        ("model.w", "1 of its 2 chunks is not stored in any file, starting with the one at [2, 0]"),
        ("step", "it is not stored in any file"),
    ]


def test_many_overlapping_chunks_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.formats.dcp_items.MAX_COMPARISONS", 1000)
    spread = [((0, number), (100, 1)) for number in range(50)] + [
        ((number, 50), (1, 50)) for number in range(100)
    ]
    found = coverage_problem(tensor((100, 100), [*spread]))
    assert (
        found
        == "its 150 chunks were not compared with each other: torch never lays them out this way"
    )
