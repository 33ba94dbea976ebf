"""New files of torch.save: what torch, zipfile, unzip and we ourselves make of them."""

import json
import shutil
import subprocess
import zipfile
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config as serialization_config

from ckptfix.errors import UnsupportedFormat
from ckptfix.formats.tensor import DTYPE_BITS
from ckptfix.formats.torch_tensors import TORCH_DTYPES
from ckptfix.tensors.new_files import NewTensor
from ckptfix.tensors.new_torch_files import DTYPE_NAMES, torch_file, torch_files
from ckptfix.tensors.opening import open_checkpoint
from tests.sampling import examples
from tests.tensors.writing import digests, new_tensors, raw, torch_digest, write_tensors

TORCH = [getattr(torch, name) for name in TORCH_DTYPES]


def tensor_of(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bytes; of bool, of zeros and ones."""
    made = torch.zeros(shape, dtype=dtype)
    flat = made.view(torch.uint8) if made.dim() else made.reshape(1).view(torch.uint8)
    flat.copy_(
        torch.randint(
            0,
            2 if dtype is torch.bool else 256,
            flat.shape,
            generator=torch.Generator().manual_seed(seed),
        )
    )
    return made


def written(root: Path, tensors: dict[str, torch.Tensor], **options: Any) -> list[Path]:
    """Write a state dict as ``torch_files`` lays it out; return the paths."""
    new, ties = new_tensors(tensors)
    files = torch_files("pytorch_model", new, ties, **options)
    write_tensors(root, files, tensors)
    for file in files:
        assert (root / file.path).stat().st_size == file.size
    return [root / file.path for file in files]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(
        one[key].dtype == other[key].dtype
        and one[key].shape == other[key].shape
        and one[key].stride() == other[key].stride()
        and raw(one[key]) == raw(other[key])
        for key in one
    )


def every_kind() -> dict[str, torch.Tensor]:
    tensors = {str(dtype): tensor_of(dtype, 3, 5) for dtype in TORCH}
    tensors |= {f"{dtype} scalar": tensor_of(dtype) for dtype in TORCH}
    tensors |= {
        "empty": torch.zeros(3, 0, 2),
        "five dimensions": tensor_of(torch.float32, 1, 2, 3, 2, 5),
        "a byte more": tensor_of(torch.uint8, 65537),
        "": tensor_of(torch.int8, 2),
        "\0 and \ud800": tensor_of(torch.int16, 2),
        "kernel.中.🙂": tensor_of(torch.int64, 2),
        "long." * 100: tensor_of(torch.int32, 2),
    }
    return tensors


def test_the_records_are_those_that_torch_writes(tmp_path: Path) -> None:
    """All but the pickle, which names the same tensors without the pickler's own memo, and the id,
    which nobody compares.
    """
    tensors = OrderedDict(every_kind())
    tensors["tie"] = tensors["five dimensions"].detach()
    (path,) = written(tmp_path, tensors)
    torch.save(tensors, tmp_path / "pytorch_model.stock")
    with zipfile.ZipFile(path) as ours, zipfile.ZipFile(tmp_path / "pytorch_model.stock") as theirs:
        assert ours.namelist() == theirs.namelist()
        for mine, stock in zip(ours.infolist(), theirs.infolist(), strict=True):
            assert (mine.flag_bits, mine.compress_type) == (stock.flag_bits, stock.compress_type)
            if not mine.filename.endswith(("data.pkl", "serialization_id")):
                assert (mine.CRC, ours.read(mine)) == (stock.CRC, theirs.read(stock))
    assert same(torch.load(path, weights_only=True), tensors)


def test_metadata_has_the_versions_of_modules(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    state = model.state_dict()
    versions = {name: one["version"] for name, one in state._metadata.items()}
    (path,) = written(tmp_path, state, versions=versions)
    loaded = torch.load(path, weights_only=True)
    assert loaded._metadata == state._metadata
    assert (
        open_checkpoint(path).weights[0].versions == versions == {"": 1, "0": 1, "1": 1, "1.0": 2}
    )


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_all_kinds(tmp_path: Path, mmap: bool) -> None:
    tensors = every_kind()
    (path,) = written(tmp_path, tensors)
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    assert type(loaded) is OrderedDict
    assert same(loaded, tensors)
    # torch then computes where each storage is, from the order of the pickle, instead of asking the
    # directory.
    with serialization_config.patch({"load.calculate_storage_offsets": True}):
        assert same(torch.load(path, weights_only=True, mmap=mmap), tensors)


def test_other_readers_find_no_fault(tmp_path: Path) -> None:
    (path,) = written(tmp_path, every_kind())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-tqq", path], check=True)


def test_a_tie_is_one_storage_again(tmp_path: Path) -> None:
    one = tensor_of(torch.float16, 4, 3)
    tensors = {
        "head": one,
        "between": tensor_of(torch.float16, 2),
        "embed": one.detach(),
        "third": one.detach(),
    }
    (path,) = written(tmp_path, tensors)
    loaded = torch.load(path, weights_only=True)
    assert (
        len({loaded[name].untyped_storage().data_ptr() for name in ("head", "embed", "third")}) == 1
    )
    assert same(loaded, {name: tensors[name] for name in ("head", "between", "embed", "third")})
    weights = open_checkpoint(path).weights[0]
    assert weights.ties == {"embed": "head", "third": "head"}
    assert path.stat().st_size < 3000


def test_shards_have_an_index_and_each_tie_with_its_storage(tmp_path: Path) -> None:
    tensors = {f"{number}.weight": tensor_of(torch.float32, 8, seed=number) for number in range(5)}
    tensors["tie"] = tensors["0.weight"].detach()
    paths = written(tmp_path, tensors, most=64, versions={"": 1, "0": 3})
    assert [path.name for path in paths] == [
        *(f"pytorch_model-{number:05}-of-00003.bin" for number in (1, 2, 3)),
        "pytorch_model.bin.index.json",
    ]
    index = json.loads(paths[-1].read_text())
    assert index["metadata"]["total_size"] == 5 * 32
    held = {name: path.name for path in paths[:-1] for name in torch.load(path, weights_only=True)}
    assert index["weight_map"] == held
    assert held["tie"] == held["0.weight"] == paths[0].name
    weights = open_checkpoint(tmp_path).weights[0]
    assert digests(weights) == {name: torch_digest(tensor) for name, tensor in tensors.items()}
    assert (weights.ties, weights.versions) == ({"tie": "0.weight"}, {"": 1, "0": 3})
    with zipfile.ZipFile(paths[0]) as archive:
        assert archive.namelist()[0] == "pytorch_model-00001-of-00003/data.pkl"


def test_no_tensors_at_all(tmp_path: Path) -> None:
    (path,) = written(tmp_path, {})
    assert torch.load(path, weights_only=True) == {}


@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BITS) - set(DTYPE_NAMES)))
def test_a_dtype_that_torch_has_not_is_refused(dtype: str) -> None:
    with pytest.raises(UnsupportedFormat, match=f"'w' has dtype {dtype}"):
        torch_files("model", [NewTensor("w", dtype, (8,), DTYPE_BITS[dtype])], {})


def test_a_pickle_that_could_not_be_read_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.tensors.new_torch_files.MAX_PICKLE", 1000)
    tensors = [NewTensor(f"{number}.weight", "F32", (1,), 4) for number in range(20)]
    with pytest.raises(
        UnsupportedFormat, match=r"\d+ bytes, but at most 1000 can be read back; use shards"
    ):
        torch_files("model", tensors, {})
    assert len(torch_files("model", tensors, {}, most=16)) == 5 + 1


names = st.text(st.characters(), max_size=20) | st.text("ab.\0\ud800", max_size=300)
shapes = st.lists(st.integers(0, 4), max_size=5).map(tuple)


@settings(deadline=None, max_examples=examples(60))
@given(
    kinds=st.dictionaries(
        names, st.tuples(st.sampled_from(TORCH), shapes, st.integers(0, 99)), max_size=12
    ),
    tied=st.dictionaries(names, st.integers(0, 11), max_size=3),
    most=st.none() | st.integers(1, 400),
)
def test_any_tensors_come_back_the_same(
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...], int]],
    tied: dict[str, int],
    most: int | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tensors = {
        name: tensor_of(dtype, *shape, seed=seed) for name, (dtype, shape, seed) in kinds.items()
    }
    kept = [name for name, tensor in tensors.items() if tensor.numel()]
    for other, number in tied.items():
        if other not in tensors and kept:
            tensors[other] = tensors[kept[number % len(kept)]].detach()
    root = tmp_path_factory.mktemp("any")
    paths = written(root, tensors, most=most)
    expected = {name: torch_digest(tensor) for name, tensor in tensors.items()}
    loaded: dict[str, torch.Tensor] = {}
    for path in paths:
        if path.suffix == ".bin":
            loaded |= torch.load(path, weights_only=True)
    assert {name: torch_digest(tensor) for name, tensor in loaded.items()} == expected
    if tensors:
        weights = open_checkpoint(root).weights[0]
        assert digests(weights) == expected
        assert set(weights.ties) == set(new_tensors(tensors)[1])


def test_the_state_of_an_optimizer(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    optimizer = torch.optim.AdamW([{"params": [parameter], "weight_decay": 0.1}], lr=1e-2)
    parameter.grad = torch.ones(2, 3)
    optimizer.step()
    state = optimizer.state_dict()
    tensors = {f"0.{name}": value for name, value in state["state"][0].items()}
    new, _ = new_tensors(tensors)
    file = torch_file(
        PurePosixPath("optimizer.bin"),
        {"state": {0: {one.fqn[2:]: one for one in new}}, "param_groups": state["param_groups"]},
    )
    write_tensors(tmp_path, (file,), tensors)
    found = torch.load(tmp_path / "optimizer.bin", weights_only=True)
    assert found["param_groups"] == state["param_groups"]
    assert same(found["state"][0], state["state"][0])
