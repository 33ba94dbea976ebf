"""Weights in DCP folders: every tensor as torch saved it, and an error for every byte that is not
there.
"""

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from ckptfix.errors import FormatError, OperationError
from ckptfix.formats.dcp_items import ItemReader
from ckptfix.formats.dcp_metadata import parse_dcp_metadata
from ckptfix.storage.files import FileReader
from ckptfix.storage.reading import open_reader
from ckptfix.tensors.opening import open_checkpoint, other_files
from ckptfix.tensors.stored import Contiguous, Format, Strided, Tiled, Weights
from tests.tensors.dcp_making import digests, digests_of, every_dtype, save
from tests.tensors.dcp_ranks import net, save_all, whole
from tests.training.ranks import run_ranks

FOLDER = "pytorch_model_fsdp_0"


def opened(root: Path) -> Weights:
    (weights,) = open_checkpoint(root).weights
    assert weights.format is Format.DCP
    return weights


def edit(folder: Path, change: Callable[[Metadata], object]) -> None:
    """Change the metadata of a folder as torch's own classes."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "options",
    [{}, {"single_file_per_rank": False}, {"thread_count": 3}],
    ids=["one", "each", "threads"],
)
def test_every_kind_of_tensor(tmp_path: Path, options: dict[str, Any]) -> None:
    state = every_dtype()
    save(tmp_path / FOLDER, {"model": state}, **options)
    weights = opened(tmp_path)
    assert digests(weights) == digests_of(state)
    assert (weights.label, weights.index, weights.left, weights.opaque) == (FOLDER, 0, (), ())
    assert {str(path) for path in weights.files} == {
        str(path.relative_to(tmp_path)) for path in (tmp_path / FOLDER).iterdir()
    }


def test_positions_and_what_is_no_model(tmp_path: Path) -> None:
    for number in (0, 2):
        save(
            tmp_path / f"pytorch_model_fsdp_{number}",
            {"model": {"w": torch.full((2,), float(number))}},
        )
    save(tmp_path / "optimizer_0", {"optimizer": {"state": {"w": {"exp_avg": torch.ones(2)}}}})
    found = open_checkpoint(tmp_path)
    assert [(one.index, one.label) for one in found.weights] == [
        (0, "pytorch_model_fsdp_0"),
        (2, "pytorch_model_fsdp_2"),
    ]
    assert other_files(found) == (
        PurePosixPath("optimizer_0/.metadata"),
        PurePosixPath("optimizer_0/__0_0.distcp"),
    )


def test_a_second_format_of_one_model_is_a_rival(tmp_path: Path) -> None:
    save(tmp_path / FOLDER, {"model": {"w": torch.zeros(2)}})
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    found = open_checkpoint(tmp_path)
    assert [one.format for one in found.weights] == [Format.TORCH]
    assert [str(path) for path in found.rivals] == [
        f"{FOLDER}/.metadata",
        f"{FOLDER}/__0_0.distcp",
    ]
    assert set(other_files(found)) == set(found.rivals)


def optimizer() -> dict[str, Any]:
    return {
        "state": {"fc.weight": {"step": torch.tensor(1.0)}},
        "param_groups": [{"params": ["fc.weight"], "lr": 1}],
    }


MODEL = {"fc.weight": torch.ones(2, 2), "model.fc.bias": torch.zeros(2)}


@pytest.mark.parametrize(
    ("state", "names", "label", "left"),
    [
        (MODEL, ["fc.weight", "model.fc.bias"], "folder", ()),
        ({"model": MODEL}, ["fc.weight", "model.fc.bias"], "folder", ()),
        ({"model": MODEL, "optimizer": optimizer(), "step": 3}, ["fc.weight", "model.fc.bias"],
         "folder['model']", ("optimizer", "step")),
        ({"app": {"model": MODEL, "optim": optimizer()}}, ["fc.weight", "model.fc.bias"],
         "folder['app']['model']", ("app",)),
        ({"net": MODEL, "optim": optimizer()}, ["fc.weight", "model.fc.bias"], "folder['net']", ("optim",)),
        ({"net": MODEL, "teacher": MODEL}, ["net.fc.weight", "net.model.fc.bias", "teacher.fc.weight",
         "teacher.model.fc.bias"], "folder", ()),
        ({"model.fc.weight": torch.ones(1), "model.fc.bias": torch.ones(1)}, ["model.fc.weight", "model.fc.bias"],
         "folder", ()),
    ],
)  # fmt: skip
def test_names_by_the_paths_of_the_planner(
    tmp_path: Path, state: Any, names: list[str], label: str, left: tuple[str, ...]
) -> None:
    save(tmp_path / "folder", state)
    weights = opened(tmp_path / "folder")
    assert sorted(tensor.fqn for tensor in weights.tensors) == sorted(names)
    assert (weights.label, weights.left) == (label, left)


def test_names_without_paths(tmp_path: Path) -> None:
    save(tmp_path, MODEL)
    edit(tmp_path, lambda metadata: setattr(metadata, "planner_data", None))
    assert digests(opened(tmp_path)) == digests_of(MODEL)


def test_objects_are_opaque(tmp_path: Path) -> None:
    save(
        tmp_path,
        {"model": {"w": torch.ones(1), "_extra_state": {"amax": 3}, "x._extra_state": b"b"}},
    )
    weights = opened(tmp_path)
    assert weights.opaque == ("_extra_state.amax", "x._extra_state")
    assert [tensor.fqn for tensor in weights.tensors] == ["w"]


def test_an_optimizer_alone_has_no_weights(tmp_path: Path) -> None:
    save(tmp_path / "optimizer_0", {"optimizer": optimizer()})
    with pytest.raises(
        OperationError, match="has no model weights, only optimizer; next: ckptfix check"
    ):
        open_checkpoint(tmp_path / "optimizer_0")


def test_strides_and_parts_of_a_storage(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "t": base.t(),
        "part": base[1:3],
        "column": base[:, 2],
        "spread": torch.ones(3, 1).expand(3, 4),
    }
    save(tmp_path, {"model": state})
    weights = opened(tmp_path)
    assert digests(weights) == digests_of(state)
    assert isinstance(weights.named()["t"].layout, Strided)


def test_two_names_of_one_place_are_a_tie(tmp_path: Path) -> None:
    weight = torch.randn(3, 3)
    save(tmp_path, {"model": {"a": weight, "b": weight, "c": weight}})

    def tie(metadata: Metadata) -> None:
        place = metadata.storage_data[MetadataIndex("model.a", (0, 0))]
        metadata.storage_data[MetadataIndex("model.b", (0, 0))] = place

    assert opened(tmp_path).ties == {}, "torch saves a tied tensor twice"
    edit(tmp_path, tie)
    weights = opened(tmp_path)
    assert weights.ties == {"b": "a"}
    assert digests(weights) == digests_of({"a": weight, "b": weight, "c": weight})


@pytest.mark.slow
def test_what_two_ranks_save(tmp_path: Path) -> None:
    assert run_ranks(2, lambda rank: save_all(tmp_path)) == [0, 0]
    expected = digests_of(net().state_dict())
    for name in ("fsdp1", "fsdp2", "each"):
        weights = opened(tmp_path / name)
        assert digests(weights) == expected, name
        assert all(isinstance(tensor.layout, Contiguous) for tensor in weights.tensors)
        assert sum(path.suffix == ".distcp" for path in weights.files) == (
            15 if name == "each" else 2
        )
    weights = opened(tmp_path / "tiles")
    for size in (1 << 16, 48):  # all at once, and one step of the first dimension at a time
        assert digests(weights, size) == digests_of(whole())
    kinds: dict[str, object] = {tensor.fqn: type(tensor.layout) for tensor in weights.tensors}
    assert kinds == {
        "columns": Tiled,
        "rows": Contiguous,
        "replicated": Contiguous,
        "transposed": Tiled,
        "transposed.inside": Tiled,
        "inner": Contiguous,
        "middle": Tiled,
    }
    missing = tmp_path / "fsdp2" / FOLDER / "__1_0.distcp"
    missing.unlink()
    with pytest.raises(
        OperationError, match=r"__1_0\.distcp is missing, with 5 chunks of the model: '"
    ):
        open_checkpoint(tmp_path / "fsdp2")


def test_safetensors_inside(tmp_path: Path) -> None:
    state = {
        "w": torch.randn(3, 4),
        "s": torch.tensor(2.0),
        "h": torch.ones(2, dtype=torch.bfloat16),
    }
    save(
        tmp_path, {"model": state, "step": 7}, serialization_format=SerializationFormat.SAFETENSORS
    )
    assert digests(opened(tmp_path)) == digests_of(state)


def test_compressed_items_are_refused(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"w": torch.ones(3)}})

    def compress(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.transform_descriptors = ["zstd"]

    edit(tmp_path, compress)
    with pytest.raises(
        OperationError, match=r"extensions that ckptfix does not read \(zstd\); load it with torch"
    ):
        open_checkpoint(tmp_path)


def test_conjugated_numbers_are_refused(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"w": torch.tensor([1 + 2j]).conj()}})
    with pytest.raises(OperationError, match=r"'model\.w'.*neither conjugated nor negated"):
        open_checkpoint(tmp_path)


def test_an_interrupted_save_is_told(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    save(folder, {"model": {"w": torch.ones(3)}})
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    words = ".metadata, which is written last, is {} (found 1 .distcp file): {}"
    with pytest.raises(OperationError) as error:
        open_checkpoint(tmp_path)
    assert words.format("unfinished", "the save was interrupted; next: use an") in str(error.value)
    (folder / ".metadata.tmp").unlink()
    with pytest.raises(OperationError) as error:
        open_checkpoint(folder)
    assert words.format("missing", "a copy left it out, or the save was interrupted") in str(
        error.value
    )
    (folder / "__0.metadata").write_bytes(b"")
    with pytest.raises(OperationError, match="each rank has its own metadata"):
        open_checkpoint(folder)


def test_a_short_file_is_told_with_both_numbers(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"a": torch.ones(3), "w": torch.ones(3)}})
    data = tmp_path / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(OperationError) as error:
        open_checkpoint(tmp_path)
    assert (
        "'model.w' at [0] (1577 bytes from byte 1577): it ends at byte 3154, but the file has only "
        "3054 bytes; next: ckptfix check" in str(error.value)
    )


def test_a_chunk_that_is_stored_nowhere_is_told(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"w": torch.ones(3)}, "step": 3})
    edit(tmp_path, lambda metadata: metadata.storage_data.pop(MetadataIndex("step")))
    opened(tmp_path)  # what is no model's is not looked into
    edit(tmp_path, lambda metadata: metadata.storage_data.pop(MetadataIndex("model.w", (0,))))
    with pytest.raises(
        OperationError, match=r"'model\.w': 1 of its 1 chunks is not stored in any file"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("other", ["short", "ints"])
def test_an_item_of_another_tensor_is_told(tmp_path: Path, other: str) -> None:
    state = {"w": torch.ones(3), "short": torch.ones(2), "ints": torch.ones(3, dtype=torch.int32)}
    save(tmp_path, {"model": state})

    def mix(metadata: Metadata) -> None:
        place = metadata.storage_data[MetadataIndex(f"model.{other}", (0,))]
        metadata.storage_data[MetadataIndex("model.w", (0,))] = place

    edit(tmp_path, mix)
    with pytest.raises(
        OperationError, match=r"the chunk of 'model\.w' at byte .* \(expected F32 \[3\], found"
    ):
        open_checkpoint(tmp_path)


def test_broken_metadata_is_told_with_its_path(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"w": torch.ones(3)}})
    (tmp_path / ".metadata").write_bytes(b"\x80\x04N.")
    with pytest.raises(
        OperationError, match=r"\.metadata: a pickle, but not from torch\.distributed\.checkpoint"
    ):
        open_checkpoint(tmp_path)
    (tmp_path / ".metadata").unlink()
    (tmp_path / ".metadata").mkdir()
    with pytest.raises(OperationError, match=r"\.metadata: cannot be read: Is a directory"):
        open_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file of 100 items of one shape, and one that is transposed."""
    root = tmp_path_factory.mktemp("alike")
    torch.manual_seed(0)
    state = {f"w{number:03}": torch.randn(4, 4) for number in range(100)}
    save(root, {"model": state | {"x": torch.randn(4, 4).t()}})
    yield root
    shutil.rmtree(root)


def test_few_reads_for_many_items(alike: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    read = FileReader.read

    def counting(self: FileReader, offset: int, length: int) -> bytes:
        nonlocal reads
        reads += 1
        return read(self, offset, length)

    monkeypatch.setattr(FileReader, "read", counting)
    weights = opened(alike)
    assert len(weights.tensors) == 101
    assert reads < 4 * 101
    assert isinstance(weights.named()["x"].layout, Strided), (
        "of the same length, and yet not the same"
    )


def test_what_is_known_of_one_item_changes_nothing_for_another(alike: Path, tmp_path: Path) -> None:
    metadata = parse_dcp_metadata((alike / ".metadata").read_bytes())
    one, other = (metadata.stored[f"model.w{number:03}", (0, 0)] for number in (0, 1))
    data = (alike / one.path).read_bytes()[: other.offset + other.length]

    def outcome(path: Path, *first: Any) -> object:
        with open_reader(path) as reader:
            items = ItemReader(reader, {})
            for item in first:
                items.tensor(item, (4, 4))
            try:
                return items.tensor(other, (4, 4))
            except FormatError as error:
                return str(error)

    differ = 0
    whole_item = outcome(alike / one.path)
    for position in range(other.offset, other.offset + other.length, 3):
        changed = bytearray(data)
        changed[position] ^= 0x41
        (tmp_path / "changed").write_bytes(changed)
        alone = outcome(tmp_path / "changed")
        assert outcome(tmp_path / "changed", one) == alone, position - other.offset
        differ += alone != whole_item
    assert differ > 100, "most changed bytes of the archive's structure are seen"


def test_chunks_in_the_same_bytes(tmp_path: Path) -> None:
    """A small file whose chunks all lie in one item would become any number of bytes."""

    def repeat(metadata: Metadata) -> None:
        (info,) = metadata.storage_data.values()
        tensor: Any = metadata.state_dict_metadata["model.w"]
        tensor.size = torch.Size([2, 192])
        tensor.chunks = [
            ChunkStorageMetadata(torch.Size([0, at]), torch.Size([2, 64])) for at in (0, 64, 128)
        ]
        metadata.storage_data = {
            MetadataIndex("model.w", one.offsets, None): info for one in tensor.chunks
        }

    save(tmp_path, {"model": {"w": torch.zeros(2, 64)}})
    edit(tmp_path, repeat)
    with pytest.raises(
        OperationError, match=r"'model\.w' at \[0, 0\] and \[0, 64\] share bytes of the file"
    ):
        open_checkpoint(tmp_path)
