"""``.metadata`` in few objects says what the tree of every opcode says, or is read as that tree."""

import pickle
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptfix.errors import FormatError, UnsupportedFormat
from ckptfix.formats import dcp_metadata, dcp_stream
from ckptfix.formats.dcp_metadata import DcpMetadata, parse_dcp_metadata
from ckptfix.formats.dcp_rewrite import paths_of, rewrite_metadata
from ckptfix.formats.dcp_stream import MATCHED, PACKED, Chunk, ChunkIndex, read_stream
from ckptfix.formats.pickle_opcodes import MISSING
from ckptfix.formats.pickle_stream import parse, run
from ckptfix.formats.pickle_tree import attribute, pairs
from tests.sampling import examples

FIXTURES = sorted(Path(__file__).parents[2].glob("fixtures/dcp-*/*/checkpoint/*/.metadata"))


def saved(
    shapes: Iterable[tuple[int, ...]],
    ranks: int,
    *,
    shared: bool = False,
    names: tuple[str, ...] = (),
) -> Metadata:
    """Return a metadata as a save of several ranks makes it: what each rank tells was pickled
    alone, and read again.
    """
    tensors: dict[str, Any] = {}
    planned: dict[str, Any] = {}
    told: list[dict[Any, Any]] = [{} for _ in range(ranks)]
    for number, shape in enumerate(shapes):
        fqn = names[number] if names else f"model.module.layer{number}.weight"
        rows = shape[0] if shape else 1
        chunks = []
        for rank in range(ranks if shape else 1):
            offsets = (
                torch.Size([rank * rows, *[0] * (len(shape) - 1)]) if shape else torch.Size([])
            )
            sizes = torch.Size(shape)
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            begin = (number << 33) if number % 3 == 2 else number * 300
            index = MetadataIndex(fqn, offsets if shared else torch.Size(list(offsets)), rank)
            told[rank][index] = _StorageInfo(f"__{rank}_0.distcp", begin, 300)
        whole = torch.Size([rows * ranks, *shape[1:]]) if shape else torch.Size([])
        tensors[fqn] = TensorStorageMetadata(TensorProperties(torch.float32), whole, chunks)
        planned[fqn] = tuple(fqn.split(".", 1))
    storage: dict[Any, Any] = {}
    for part in told:
        storage.update(part if shared else pickle.loads(pickle.dumps(part)))
    tensors["model.step"] = BytesStorageMetadata()
    storage[MetadataIndex("model.step")] = _StorageInfo("__0_0.distcp", 0, 10)
    return Metadata(tensors, planned, storage)


def same(one: DcpMetadata, other: DcpMetadata) -> None:
    assert (one.tensors, one.items, one.planned) == (other.tensors, other.items, other.planned)
    assert list(one.stored.items()) == list(other.stored.items())
    assert (one.version, one.save_id) == (other.version, other.save_id)
    assert one.tree.globals == other.tree.globals
    assert one.tree.frames == other.tree.frames
    assert list(one.tree.texts) == sorted(
        set(one.tree.texts) & set(other.tree.texts), key=lambda text: text.site
    )


def packed(metadata: DcpMetadata) -> int:
    return sum(value is PACKED for _, value in pairs(attribute(metadata.tree.root, "storage_data")))


def both(data: bytes) -> DcpMetadata:
    fast = parse_dcp_metadata(data)
    same(fast, dcp_metadata._metadata(parse(data)))
    return fast


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: f"{path.parts[-4]}-{path.parts[-2]}")
def test_real_saves(path: Path) -> None:
    found = both(path.read_bytes())
    tensors = sum(item.offsets is not None for item in found.stored.values())
    assert packed(found) == tensors, "an item of bytes keeps its nodes, in which it can be moved"


SHAPES = st.lists(
    st.one_of(st.just(()), st.lists(st.integers(0, 70_000), min_size=1, max_size=6).map(tuple)),
    max_size=6,
)


@settings(max_examples=examples(60), deadline=None)
@given(SHAPES, st.integers(1, 4), st.booleans(), st.sampled_from([4, 5]))
def test_whatever_is_saved(
    shapes: list[tuple[int, ...]], ranks: int, shared: bool, protocol: int
) -> None:
    both(pickle.dumps(saved(shapes, ranks, shared=shared), protocol))


def test_frames_cut_it_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickler begins a frame after 64 KiB, wherever that is; an instance can be cut in it."""
    monkeypatch.setattr("ckptfix.formats.dcp_metadata._RETOLD", 0)
    kinds: set[type] = set()
    for size in range(200, 260, 7):
        monkeypatch.setattr("pickle._Framer._FRAME_SIZE_TARGET", size)
        data = pickle._dumps(saved([(3, 5)] * 40, 4), 4)  # type: ignore[attr-defined]
        found = both(data)
        assert len(found.tree.frames) > 50
        assert packed(found) > 100
        kinds |= {type(key) for key, _ in pairs(attribute(found.tree.root, "storage_data"))}
    assert ChunkIndex in kinds


@pytest.mark.parametrize("protocol", [2, 3])
def test_older_protocols(protocol: int) -> None:
    assert packed(both(pickle.dumps(saved([(3, 5)] * 9, 2), protocol))) == 0


def renamed(data: bytes) -> bytes:
    metadata = parse_dcp_metadata(data)
    new: dict[str, tuple[str | int, ...]] = {
        fqn: tuple(str(step).replace("module.", "", 1) for step in path)
        for fqn, path in paths_of(metadata).items()
        if "module." in fqn
    }
    return rewrite_metadata(metadata, new, {}).data


@pytest.mark.parametrize("shared", [True, False])
def test_a_rename_is_the_same_as_torch_s_own(shared: bool) -> None:
    found = pickle.loads(renamed(pickle.dumps(saved([(3, 5), (), (7,)], 3, shared=shared), 4)))
    names = tuple(f"model.layer{number}.weight" for number in range(3))
    want = saved([(3, 5), (), (7,)], 3, names=names)
    assert found.state_dict_metadata == want.state_dict_metadata
    assert found.planner_data == want.planner_data
    assert list(found.storage_data.items()) == list(want.storage_data.items())


def test_a_name_that_is_one_object_with_a_key_of_torch_s() -> None:
    """A parameter called "offset": pickle writes the string once, for the name and for the
    attribute.
    """
    shapes = [(3,), (4,), (5,)]
    metadata = saved(shapes, 3, shared=True, names=("offset", "sizes", "weight"))
    metadata.planner_data = {name: (name,) for name in ("offset", "sizes", "weight")}
    read = parse_dcp_metadata(pickle.dumps(metadata, 4))
    new = {name: (f"module.{name}",) for name in ("offset", "sizes", "weight")}
    found = pickle.loads(rewrite_metadata(read, new, {}).data)
    assert set(found.state_dict_metadata) == {
        "module.offset",
        "module.sizes",
        "module.weight",
        "model.step",
    }
    assert {key.fqn for key in found.storage_data} == set(found.state_dict_metadata)
    assert found.state_dict_metadata["module.sizes"] == metadata.state_dict_metadata["sizes"]


def edited(edit: Callable[[bytes], bytes]) -> bytes:
    data = pickle.dumps(saved([(3, 5)] * 4, 4), 4)
    assert edit(data) != data
    return edit(data)


def test_a_part_of_a_chunk_that_is_used_again() -> None:
    """The dict of a chunk's attributes: no torch does that, and every object is kept then."""
    data = pickle.dumps(saved([(3, 5)] * 9, 2), 4)
    machine = dcp_stream._Machine(data)
    run(machine)
    again = machine.memo.index(MISSING)
    hostile = data[:-1] + b"h" + bytes([again]) + b"0."  # and popped again
    assert packed(both(data)) > 0
    assert packed(both(hostile)) == 0


def test_an_instance_that_is_begun_and_never_ended() -> None:
    """SETITEMS became TUPLE, by one bit: nothing half made is left in the tree."""
    data = edited(lambda data: data.replace(b"ub", b"tb"))
    assert parse_says(data) == parse_says(data, slowly=True)


def parse_says(data: bytes, *, slowly: bool = False) -> Any:
    try:
        found = dcp_metadata._metadata(parse(data)) if slowly else parse_dcp_metadata(data)
    except FormatError as error:
        return type(error), str(error)
    return found.tensors, found.items, found.planned, list(found.stored.items())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"__1_0.distcp", b"../../../abc"),  # leaves the folder
        (b"K\x03K\x05\x86", b"K\x04K\x05\x86"),  # a chunk beyond its tensor
        (b"relative_path", b"relative_bath"),
        (b"offsets", b"offsetz"),
        (b"__1_0.distcp", b"__1_0.\xff\xfe\xfdtcp"),
        (b"layer3", b"layer2"),  # twice
        (b"ChunkStorageMetadata", b"ChunkStorageMetadatb"),
    ],
)
def test_what_is_wrong_is_said_in_the_same_words(old: bytes, new: bytes) -> None:
    data = edited(lambda data: data.replace(old, new))
    assert isinstance(parse_says(data)[1], str)
    assert parse_says(data) == parse_says(data, slowly=True)


def test_changed_and_cut_bytes() -> None:
    """Whatever stands there, the two ways agree, and neither crashes."""
    data = pickle.dumps(saved([(3, 5), (), (9,)], 3), 4)
    source = random.Random(1)
    for _ in range(600):
        changed = bytearray(data)
        for _ in range(source.choice((1, 1, 2, 5))):
            changed[source.randrange(2, len(data))] = source.randrange(256)
        if source.random() < 0.1:
            del changed[source.randrange(len(data)) :]
        assert parse_says(bytes(changed)) == parse_says(bytes(changed), slowly=True)


def test_more_chunks_than_opcodes_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on opcodes is for objects that stay: of a chunk little does."""
    data = pickle.dumps(saved([(3, 5)] * 50, 40), 4)
    monkeypatch.setattr("ckptfix.formats.pickle_stream.MAX_OPCODES", 20_000)
    assert len(parse_dcp_metadata(data).stored) == 2001
    with pytest.raises(UnsupportedFormat, match="more than 20000 opcodes"):
        dcp_metadata._metadata(parse(data))
    monkeypatch.setattr(dcp_stream, "MAX_PLACES", 1000)
    with pytest.raises(UnsupportedFormat, match="more than 1000 chunks"):
        parse_dcp_metadata(data)


def test_what_is_matched_is_of_few_types() -> None:
    tree = read_stream(pickle.dumps(saved([(3, 5)] * 3, 2), 4))
    kinds = {type(key) for key, _ in pairs(attribute(tree.root, "storage_data"))}
    assert kinds & MATCHED
    assert Chunk((0, 0), (3, 5)) == ((0, 0), (3, 5))
