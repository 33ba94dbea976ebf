"""New DCP folders: torch and Accelerate read them, bit for bit."""

import pickle
import zipfile
from io import BytesIO
from math import prod
from pathlib import Path, PurePosixPath

import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptfix.errors import UnsupportedFormat
from ckptfix.formats.dcp_items import dcp_problems
from ckptfix.formats.dcp_metadata import parse_dcp_metadata
from ckptfix.formats.dcp_stream import PACKED, Chunk, fields_of, read_stream
from ckptfix.formats.pickle_tree import pairs
from ckptfix.storage.recipes import Literal
from ckptfix.tensors.new_dcp import dcp_files
from ckptfix.tensors.new_files import NewTensor
from ckptfix.tensors.opening import open_checkpoint
from tests.tensors.dcp_making import (
    digest_of,
    digests,
    digests_of,
    every_dtype,
    load,
    new_tensors,
    save,
    write,
)
from tests.tensors.dcp_ranks import load_all, net
from tests.training.ranks import run_ranks

FOLDER = PurePosixPath("pytorch_model_fsdp_0")
TIES = {"tied": "a.module.weight", "also.tied": "none"}


def written(
    root: Path, *, most: int | None = None, prefix: str = "model"
) -> dict[str, torch.Tensor]:
    """Write every kind of tensor and ties; return what must be read, by name."""
    state = every_dtype()
    write(root, dcp_files(FOLDER, new_tensors(state), TIES, most=most, prefix=prefix), state)
    return state | {other: state[kept] for other, kept in TIES.items()}


@pytest.mark.parametrize("most", [None, 1, 100, 8448])
def test_load_fills_a_state_dict(tmp_path: Path, most: int | None) -> None:
    expected = written(tmp_path, most=most)
    target = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
    load(tmp_path / FOLDER, target)
    assert digests_of(target["model"]) == digests_of(expected)
    files = sorted(path.name for path in (tmp_path / FOLDER).iterdir())
    assert files[0] == ".metadata"
    assert (len(files) == 2) == (most is None), "a bound on the size makes several files"


def test_a_state_dict_alone(tmp_path: Path) -> None:
    expected = written(tmp_path, prefix="")
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load(tmp_path / FOLDER, target)
    assert digests_of(target) == digests_of(expected)
    assert digests(open_checkpoint(tmp_path).weights[0]) == digests_of(expected)


def test_dcp_to_torch_save_rebuilds_it(tmp_path: Path) -> None:
    expected = written(tmp_path)
    dcp_to_torch_save(tmp_path / FOLDER, tmp_path / "rebuilt.pt")
    rebuilt = torch.load(tmp_path / "rebuilt.pt")
    assert list(rebuilt) == ["model"]
    assert digests_of(rebuilt["model"]) == digests_of(expected)


def test_accelerate_merges_it(tmp_path: Path) -> None:
    expected = written(tmp_path)
    merge_fsdp_weights(str(tmp_path / FOLDER), str(tmp_path / "merged"), safe_serialization=False)
    merged = torch.load(tmp_path / "merged" / "pytorch_model.bin")
    assert digests_of(merged) == digests_of(expected)


@pytest.mark.slow
def test_two_ranks_load_their_parts(tmp_path: Path) -> None:
    state = net().state_dict()
    write(tmp_path, dcp_files(FOLDER, new_tensors(state), {}, most=30), state)
    assert run_ranks(2, lambda rank: load_all(tmp_path)) == [0, 0]


def test_it_is_read_back_with_its_ties(tmp_path: Path) -> None:
    state = written(tmp_path, most=500)
    (weights,) = open_checkpoint(tmp_path).weights
    assert digests(weights) == digests_of(state)
    assert weights.ties == {"tied": "a.module.weight"}, "only what has bytes can be seen to be one"


def test_an_item_has_the_records_that_torch_writes(tmp_path: Path) -> None:
    state = {
        "x": torch.randn(5, 7),
        "e": torch.zeros(0, 2),
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    save(tmp_path / "torch", {"model": state})
    write(tmp_path, dcp_files(PurePosixPath("ours"), new_tensors(state), {}), state)
    for name in state:
        theirs, ours = (item(tmp_path / folder, f"model.{name}") for folder in ("torch", "ours"))
        with zipfile.ZipFile(BytesIO(theirs)) as one, zipfile.ZipFile(BytesIO(ours)) as other:
            assert other.testzip() is None
            assert one.namelist() == other.namelist()
            for record in one.namelist():
                if not record.endswith(("data.pkl", "serialization_id")):
                    assert one.read(record) == other.read(record), record


def item(folder: Path, fqn: str) -> bytes:
    metadata = parse_dcp_metadata((folder / ".metadata").read_bytes())
    place = next(one for one in metadata.stored.values() if one.fqn == fqn)
    return (folder / place.path).read_bytes()[place.offset : place.offset + place.length]


def test_metadata_says_what_torch_says(tmp_path: Path) -> None:
    state = every_dtype()
    save(tmp_path / "torch", {"model": state})
    write(tmp_path, dcp_files(PurePosixPath("ours"), new_tensors(state), {}), state)
    theirs, ours = (
        pickle.loads((tmp_path / folder / ".metadata").read_bytes()) for folder in ("torch", "ours")
    )
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.version == theirs.version
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert not list(
        dcp_problems(parse_dcp_metadata((tmp_path / "ours" / ".metadata").read_bytes()))
    )


def test_the_metadata_is_read_a_chunk_at_a_time() -> None:
    """As the tree of every opcode it takes 500 MB of memory for 100,000 tensors."""
    shapes = [(), (3,), (2, 300), (1, 2, 70_000, 1)]
    tensors = [
        NewTensor(
            f"layers.{number}.weight", "F32", shapes[number % 4], prod(shapes[number % 4]) * 4
        )
        for number in range(60)
    ]
    (literal,) = dcp_files(PurePosixPath("x"), tensors, {"tie": "layers.1.weight"})[-1].parts
    assert isinstance(literal, Literal)
    root = fields_of(read_stream(literal.data).root)
    values = [value for _, value in pairs(root["storage_data"])]
    assert len(values) == 61
    assert all(value is PACKED for value in values)
    chunks = [
        fields_of(value)["chunks"].items[0] for _, value in pairs(root["state_dict_metadata"])
    ]
    assert all(type(chunk) is Chunk for chunk in chunks)
    names = {one.fqn: one.shape for one in parse_dcp_metadata(literal.data).tensors}
    assert names == {f"model.{one.fqn}": one.shape for one in tensors} | {"model.tie": (3,)}


def test_the_metadata_is_written_last() -> None:
    files = dcp_files(
        FOLDER, [NewTensor("x", "F32", (2,), 8), NewTensor("y", "F32", (2,), 8)], {}, most=8
    )
    assert [str(file.path.name) for file in files] == ["__0_0.distcp", "__0_1.distcp", ".metadata"]
    assert [file.needs_crc for file in files] == [True, True, False]


def test_a_dtype_that_torch_does_not_save_is_refused() -> None:
    with pytest.raises(UnsupportedFormat, match=r"'x' has dtype F4, which torch.save cannot write"):
        dcp_files(FOLDER, [NewTensor("x", "F4", (2,), 1)], {})


def test_nothing_to_write_is_a_folder_of_nothing(tmp_path: Path) -> None:
    write(tmp_path, dcp_files(FOLDER, [], {}), {})
    target: dict[str, dict[str, torch.Tensor]] = {"model": {}}
    load(tmp_path / FOLDER, target)
    assert target == {"model": {}}


def test_the_digest_tells_a_changed_bit() -> None:
    one = torch.zeros(4)
    other = one.clone()
    other[3] = -0.0
    assert digest_of(one) != digest_of(other)
