"""What is built from opcodes, against what torch.load returns: the same values, types, order and
sharing.
"""

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.devices.torch_reading import NotPlain, build
from ckptfix.errors import FormatError
from ckptfix.formats.torch_file import TorchFile, read_torch_file
from ckptfix.storage.reading import open_reader
from tests.sampling import examples

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def parsed(path: Path) -> TorchFile:
    with open_reader(path) as reader:
        return read_torch_file(reader)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        layout = one.dtype == other.dtype and one.stride() == other.stride()
        same_place = one.storage_offset() == other.storage_offset()
        gradients = one.requires_grad == other.requires_grad
        return bool(layout and same_place and gradients and torch.equal(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.builds(
        lambda dtype, shape: torch.arange(math.prod(shape)).to(dtype).reshape(shape),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 4), max_size=3),
    ),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3).map(OrderedDict),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=examples(150), deadline=None)
@given(value=plain)
def test_it_is_what_torch_loads(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.mktemp("built") / "state.bin"
    torch.save(value, path)
    read = torch.load(path, weights_only=True)
    assert same(build(path, parsed(path)), read)


def test_an_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    built = build(tmp_path / "optimizer.bin", parsed(tmp_path / "optimizer.bin"))
    assert same(built, torch.load(tmp_path / "optimizer.bin", weights_only=True))
    built["state"][0]["exp_avg"].add_(1)  # its memory is its own: it becomes the optimizer's


def test_what_was_shared_is_shared(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    names = ["a"]
    own: dict[str, Any] = {"names": names}
    own["itself"] = own
    state = {
        "whole": whole,
        "again": whole,
        "part": whole[3:7].view(2, 2),
        "one": names,
        "two": names,
        "own": own,
    }
    torch.save(state, tmp_path / "shared.bin")
    built = build(tmp_path / "shared.bin", parsed(tmp_path / "shared.bin"))
    assert built["again"] is built["whole"]
    built["whole"][3] = 100
    assert built["part"][0, 0] == 100
    assert built["one"] is built["two"] is built["own"]["names"]
    assert built["own"]["itself"] is built["own"]


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.nn.Linear(2, 2).state_dict(),
        {1, 2},
        torch.ones(2, 2).to_sparse(),
        torch.float32,
        [torch.Size([1])],
    ],
    ids=["parameter", "gradient", "metadata", "set", "sparse", "dtype", "size"],
)
def test_torch_reads_all_else(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "other.bin")
    with pytest.raises(NotPlain):
        build(tmp_path / "other.bin", parsed(tmp_path / "other.bin"))


def test_a_legacy_file_is_for_torch(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(NotPlain):
        build(tmp_path / "old.bin", parsed(tmp_path / "old.bin"))


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    path = tmp_path / "short.bin"
    torch.save({"a": torch.ones(100000)}, path)
    file = parsed(path)
    with path.open("r+b") as opened:
        opened.truncate(200_000)
    with pytest.raises(FormatError, match="the file ends at byte 200000"):
        build(path, file)
