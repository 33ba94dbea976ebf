"""Every pair of formats, there and back: the same names, the same ties, the same bytes."""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from safetensors.torch import load_file

from ckptfix import OperationError, UsageError, migrate
from ckptfix.conversion import producing, streaming
from tests.conversion.making import (
    COMMON,
    FORMATS,
    SUFFIXES,
    StateDict,
    digests_at,
    random_tensor,
    state_dicts,
    ties_at,
    write_safetensors,
)
from tests.sampling import examples

PAIRS = list(itertools.product(FORMATS, FORMATS))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda name: name)
@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(state=state_dicts())
def test_there_and_back_is_identity(
    tmp_path_factory: pytest.TempPathFactory, first: str, second: str, state: StateDict
) -> None:
    # Hypothesis takes strings from the code, too; a source of flattened parameters is refused.
    assume(not any("_flat_param" in key for key in state))
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as name:
        folder = Path(name)
        torch.save(state, folder / "source.bin")
        expected, ties = digests_at(folder / "source.bin"), ties_at(folder / "source.bin")
        assert expected.keys() == state.keys()
        before = folder / "source.bin"
        for number, to in enumerate((first, second, "bin")):
            after = folder / f"{number}{SUFFIXES[to]}"
            receipt = migrate(before, after, to=to)
            assert receipt.verified
            assert digests_at(after) == expected
            assert ties_at(after) == ties
            before = after
        loaded = torch.load(before, weights_only=True)
        for key, tensor in state.items():
            assert loaded[key].shape == tensor.shape
            assert loaded[key].dtype == tensor.dtype
            assert torch.equal(_bytes(loaded[key]), _bytes(tensor))
        for names in ties:
            assert len({loaded[key].untyped_storage().data_ptr() for key in names}) == 1


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", COMMON, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype, to: str) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"w": random_tensor(dtype, (3, 5))})
    migrate(tmp_path / "a.safetensors", tmp_path / f"b{SUFFIXES[to]}", to=to)
    assert digests_at(tmp_path / f"b{SUFFIXES[to]}") == digests_at(tmp_path / "a.safetensors")


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
def test_where_blocks_can_be_shared(
    tmp_path: Path, kind: str, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of one layout lie in phase; a disk that then cannot share after all copies."""
    state = {"a": torch.randn(700, 1024), "b": torch.randn(3), "c": torch.randn(600, 1024)}
    torch.save(state, tmp_path / "a.bin")
    suffix = SUFFIXES[kind]
    migrate(tmp_path / "a.bin", tmp_path / f"b{suffix}", to=kind)
    monkeypatch.setattr(producing, "supports_reflink", lambda folder: True)
    shared: list[int] = []
    from ckptfix.storage.copying import copy_range as real

    def look(source: int, begin: int, target: int, end: int, length: int, **more: Any) -> None:
        shared.append(length)
        real(source, begin, target, end, length, **more)

    monkeypatch.setattr(streaming, "copy_range", look)
    counts: list[int] = []
    migrate(
        tmp_path / f"b{suffix}",
        tmp_path / f"c{suffix}",
        to=kind,
        verify=verify,
        progress=counts.append,
    )
    assert len(shared) == 2
    assert digests_at(tmp_path / f"c{suffix}") == digests_at(tmp_path / "a.bin")
    assert sum(counts) >= sum(tensor.nbytes for tensor in state.values()) * (2 if verify else 1)


def test_torch_loads_what_is_written(tmp_path: Path) -> None:
    state = {"a.w": torch.randn(7, 3), "b": torch.tensor(3), "c": torch.zeros(2, 0)}
    write_safetensors(tmp_path / "a.safetensors", state)
    migrate(tmp_path / "a.safetensors", tmp_path / "a.bin", to="bin")
    loaded = torch.load(tmp_path / "a.bin", weights_only=True, mmap=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    migrate(tmp_path / "a.bin", tmp_path / "b.safetensors", to="safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_stock_dcp_loads_what_is_written(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    state = {"a.w": torch.randn(7, 3), "b": torch.tensor(3)}
    write_safetensors(tmp_path / "a.safetensors", state)
    migrate(tmp_path / "a.safetensors", tmp_path / "dcp", to="dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "stock.bin")
    loaded = torch.load(tmp_path / "stock.bin", weights_only=True)["model"]
    flat = {".".join(key) if isinstance(key, tuple) else key: value for key, value in _flat(loaded)}
    assert all(torch.equal(flat[name], tensor) for name, tensor in state.items())


def _flat(tree: object, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        return [(path, tree)]
    assert isinstance(tree, dict)
    return [pair for key, value in tree.items() for pair in _flat(value, (*path, key))]


@pytest.mark.parametrize(
    ("word", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("float32", torch.float32),
        ("fp64", torch.float64),
    ],
)
def test_only_floating_point_tensors_are_converted(
    tmp_path: Path, word: str, dtype: torch.dtype
) -> None:
    floats = {
        "big": torch.randn(3000, 101),
        "half": torch.randn(5).half(),
        "fp8": torch.randn(6).to(torch.float8_e4m3fn),
        "double": torch.randn(2, 3, dtype=torch.float64).T,
        "empty": torch.zeros(0, 4),
    }
    others = {
        "int": torch.arange(5),
        "bool": torch.tensor(True),
        "complex": torch.randn(2, dtype=torch.complex64),
    }
    torch.save({**floats, **others, "tied": floats["big"]}, tmp_path / "a.bin")
    migrate(tmp_path / "a.bin", tmp_path / "b.safetensors", to="safetensors", dtype=word)
    loaded = load_file(tmp_path / "b.safetensors")
    assert "tied" not in loaded
    for name, tensor in floats.items():
        assert loaded[name].dtype == dtype
        assert torch.equal(loaded[name], tensor.to(dtype))
    for name, tensor in others.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (None, ["module.module.a", "module.module.b"]),
        ("auto", ["module.a", "module.b"]),
        ("bare", ["a", "b"]),
        ("ddp", ["module.a", "module.b"]),
    ],
)
def test_names(tmp_path: Path, keys: str | None, names: list[str]) -> None:
    weight = torch.randn(3)
    torch.save({"module.module.a": weight, "module.module.b": weight}, tmp_path / "a.bin")
    migrate(
        tmp_path / "a.bin",
        tmp_path / "b.safetensors",
        to="safetensors",
        keys=keys,
        allow_damage=keys is None,
    )
    assert sorted(digests_at(tmp_path / "b.safetensors")) == names
    assert ties_at(tmp_path / "b.safetensors") == {frozenset(names)}


def test_versions_of_modules_follow_the_names(tmp_path: Path) -> None:
    inner = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    wrapped = torch.nn.Module()
    wrapped.module = inner
    torch.save(wrapped.state_dict(), tmp_path / "a.bin")
    migrate(tmp_path / "a.bin", tmp_path / "b.bin", to="bin", keys="bare")
    loaded = torch.load(tmp_path / "b.bin", weights_only=True)
    assert loaded._metadata["0"]["version"] == inner.state_dict()._metadata["0"]["version"] == 2
    inner.load_state_dict(loaded)


def test_names_that_would_become_one_are_refused(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "a.safetensors",
        {"_orig_mod.x.w": torch.zeros(1), "x._orig_mod.w": torch.ones(1)},
    )
    with pytest.raises(
        UsageError, match=r"'_orig_mod\.x\.w' and 'x\._orig_mod\.w' would both become 'x\.w'"
    ):
        migrate(tmp_path / "a.safetensors", tmp_path / "b.bin", to="bin", keys="bare")
    assert not (tmp_path / "b.bin").exists()


def test_what_safetensors_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(
        {"w": torch.zeros(2), "c": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "a.bin"
    )
    with pytest.raises(OperationError, match=r"a\.bin: 'c' has dtype C128"):
        migrate(tmp_path / "a.bin", tmp_path / "b.safetensors", to="safetensors")


@pytest.mark.parametrize("to", FORMATS)
def test_objects_beside_the_tensors_are_refused_or_left_out(tmp_path: Path, to: str) -> None:
    torch.save(
        {"w": torch.zeros(2), "b": torch.zeros(1), "x._extra_state": {"scale": [1.0]}},
        tmp_path / "a.bin",
    )
    target = tmp_path / f"b{SUFFIXES[to]}"
    with pytest.raises(OperationError, match=r"'x\._extra_state'.*--drop-opaque"):
        migrate(tmp_path / "a.bin", target, to=to)
    receipt = migrate(tmp_path / "a.bin", target, to=to, drop_opaque=True)
    assert [one.what for one in receipt.left_out] == ["a.bin: 'x._extra_state'"]
    assert digests_at(target).keys() == {"w", "b"}


def test_nested_names_are_not_collapsed_where_nothing_decides_it(tmp_path: Path) -> None:
    """One process wraps nothing: both ``module`` are the script's own."""
    source = tmp_path / "checkpoint"
    source.mkdir()
    write_safetensors(
        source / "model.safetensors",
        {"module.module.a": torch.ones(1), "module.module.b": torch.ones(2)},
    )
    torch.save({"step": 1}, source / "random_states_0.pkl")
    with pytest.raises(UsageError, match="--keys bare"):
        migrate(source, tmp_path / "new", to="bin", keys="auto")
    assert not (tmp_path / "new").exists()
    migrate(source, tmp_path / "new", to="bin", keys="ddp")
    assert sorted(digests_at(tmp_path / "new")) == ["module.a", "module.b"]
