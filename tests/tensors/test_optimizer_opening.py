"""Optimizers read without torch: every state, group and number as the run that saved them had it in
memory.
"""

import copy
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import _nested_dict as nested_dict
from torch.distributed.checkpoint._traverse import traverse_state_dict_v_2_3
from torch.distributed.tensor import DTensor, Shard

from ckptfix.checkpoint.dcp import optimizers_in
from ckptfix.conversion.migrate import migrate
from ckptfix.diagnosis.check import check
from ckptfix.errors import OperationError
from ckptfix.formats.dcp_rewrite import paths_of
from ckptfix.storage.reading import OpenFiles
from ckptfix.tensors.dcp_tensors import read_metadata_of
from ckptfix.tensors.hashing import first_place
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.optimizer_opening import open_optimizers
from ckptfix.tensors.optimizers import STEP, OptimizerState, Strategy
from ckptfix.tensors.stored import StoredTensor, Tiled
from ckptfix.verification.diff import diff
from tests.tensors.dcp_making import save
from tests.tensors.optimizer_ranks import (
    Net,
    groups,
    in_memory,
    on_meshes,
    save_all,
    save_fsdp1,
    save_meshes,
    train,
)
from tests.training.ranks import run_ranks

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8}


def read(value: Any) -> Any:
    """Return a value as torch has it."""
    if not isinstance(value, StoredTensor):
        return value
    with OpenFiles() as files:
        data = b"".join(map(bytes, value.blocks(files, memoryview(bytearray(1 << 16)))))
    if not data:
        return torch.zeros(value.shape, dtype=DTYPES[value.dtype])
    return torch.frombuffer(bytearray(data), dtype=DTYPES[value.dtype]).reshape(value.shape)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        is_equal = isinstance(found, torch.Tensor) and torch.equal(found, expected)
        return is_equal and found.dtype == expected.dtype and found.shape == expected.shape
    return type(found) is type(expected) and bool(found == expected)


def ensure_same(
    found: OptimizerState, expected: dict[str, Any], *, step: type = torch.Tensor
) -> None:
    """Fail unless an optimizer is what the run had in memory."""
    assert found.states.keys() == expected["states"].keys()
    for name, state in expected["states"].items():
        assert found.states[name].keys() == state.keys()
        for key, value in state.items():
            assert same(read(found.states[name][key]), value), (name, key)
    assert [group.names for group in found.groups] == [
        tuple(group["params"]) for group in expected["groups"]
    ]
    for group, own in zip(found.groups, expected["groups"], strict=True):
        options = {key: value for key, value in own.items() if key != "params"}
        assert {key: read(value) for key, value in group.options.items()} == options
    assert not found.unfit
    assert not found.extra


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    assert run_ranks(2, lambda rank: save_all(root)) == [0, 0]
    return root


def expected_of(saved: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(saved / f"{name}.expected", weights_only=True)
    return found


def make_ddp(folder: Path, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Save as accelerate does without FSDP; return what was saved."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01, **options)
    prepared = accelerator.prepare(model, optimizer)
    train(*prepared)
    accelerator.save_state(str(folder))
    return model, optimizer


def numbered(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the name of each number, and the states in memory."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    ids = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {str(number): names[one] for number, one in enumerate(ids)}, in_memory(model, optimizer)


@pytest.mark.parametrize(
    "options", [{}, {"capturable": False, "amsgrad": True}], ids=["plain", "amsgrad"]
)
def test_ddp(tmp_path: Path, options: dict[str, Any]) -> None:
    names, expected = numbered(*make_ddp(tmp_path, **options))
    (found,) = open_optimizers(tmp_path)
    assert (found.strategy, found.is_named, found.label, found.index) == (
        Strategy.DDP,
        False,
        "optimizer.bin",
        0,
    )
    assert list(map(str, found.files)) == ["optimizer.bin"]
    assert len(found.checksums) == sum(len(state) for state in found.states.values())
    ensure_same(found.named(names), expected)


def test_optimizers_at_several_positions_and_of_the_trainer(tmp_path: Path) -> None:
    state = torch.optim.SGD([torch.zeros(2)], lr=0.1).state_dict()
    for name in ("optimizer.bin", "optimizer_2.bin", "optimizer_1.bin"):
        torch.save(state, tmp_path / name)
    assert [one.label for one in open_optimizers(tmp_path)] == [
        "optimizer.bin",
        "optimizer_1.bin",
        "optimizer_2.bin",
    ]
    (tmp_path / "trainer").mkdir()
    torch.save(state, tmp_path / "trainer/optimizer.pt")
    (found,) = open_optimizers(tmp_path / "trainer")
    assert (found.label, found.states, found.groups[0].names) == ("optimizer.pt", {}, ("0",))
    assert open_optimizers(tmp_path / "trainer/optimizer.pt") == (found,)
    torch.save(state, tmp_path / "trainer/optimizer.bin")
    (found,) = open_optimizers(tmp_path / "trainer")
    assert found.label == "optimizer.bin", "load_state looks for it"


@pytest.mark.parametrize(
    ("name", "strategy", "label"),
    [
        ("full", Strategy.FSDP_FULL, "optimizer.bin"),
        ("sharded", Strategy.FSDP, "optimizer_0"),
        ("tiled", Strategy.FSDP, "optimizer_0"),
        ("flattened", Strategy.FSDP, "optimizer_0"),
    ],
)
def test_fsdp(saved: Path, name: str, strategy: Strategy, label: str) -> None:
    found = open_optimizers(saved / name)[0]
    assert (found.strategy, found.is_named, found.label) == (strategy, True, label)
    ensure_same(found, expected_of(saved, name))


def test_tiles_are_read_as_tiles(saved: Path) -> None:
    (found,) = open_optimizers(saved / "tiled")
    layouts = [
        value.layout
        for state in found.states.values()
        for value in state.values()
        if isinstance(value, StoredTensor)
    ]
    assert any(isinstance(layout, Tiled) for layout in layouts)


def test_other_optimizers_in_dcp_folders(saved: Path) -> None:
    _, momentum, plain = open_optimizers(saved / "sharded")
    assert (momentum.label, momentum.index, plain.index) == ("optimizer_1", 1, 2)
    assert {key for state in momentum.states.values() for key in state} == {"momentum_buffer"}
    assert momentum.groups[0].names == plain.groups[0].names == ("middle.weight", "middle.bias")
    assert momentum.groups[0].options["momentum"] == 0.9
    assert all(not state for state in plain.states.values())


def test_one_folder_with_a_model_and_an_optimizer(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    train(model, optimizer)
    state = optimizer.state_dict()
    save(
        tmp_path / "all",
        {"model": model.state_dict(), "trainer": {"optimizer": state, "steps": 3}},
    )
    (found,) = open_optimizers(tmp_path / "all")
    assert (found.label, found.is_named, found.extra) == ("all", False, {})
    names, expected = numbered(model, optimizer)
    ensure_same(found.named(names), expected)


def test_states_that_fit_no_other_strategy(tmp_path: Path) -> None:
    """What is in a dict or list of a state is read, and said; what is not read is said, too."""
    matrix = torch.eye(2)
    state = {
        "state": {
            0: {"step": 3, "shampoo": {"left": matrix, "parts": [matrix, 2.5]}, "kind": torch.float16, "none": None,
                "sparse": matrix.to_sparse(), "empty": []},
            "global": {"count": 4},
        },
        "param_groups": [{"params": [0], "lr": 0.1, "hook": print, "dtype": torch.float16, "seen": deque([1])}],
        "version": 7,
    }  # fmt: skip
    torch.save(state, tmp_path / "optimizer.bin")
    (found,) = open_optimizers(tmp_path)
    assert list(found.states["0"]) == [
        "step",
        "shampoo.left",
        "shampoo.parts.0",
        "shampoo.parts.1",
        "none",
    ]
    assert torch.equal(read(found.states["0"]["shampoo.parts.0"]), matrix)
    assert found.unfit == {
        "param_groups.0.seen": "an object of collections.deque",
        "0.shampoo": "a dict or list of 2 values",
        "0.shampoo.parts": "a dict or list of 2 values",
        "0.kind": "neither a tensor nor a number",
        "0.sparse": "a sparse tensor",
        "0.empty": "a dict or list of 0 values",
        "state.global": "not the state of a parameter",
    }
    assert found.extra == {"version": 7, "state.global": {"count": 4}}
    assert found.groups[0].options["lr"] == 0.1
    assert str(found.groups[0].options["hook"]) == "Global(module='__builtin__', name='print')"


def test_flat_parameters_are_refused(tmp_path: Path) -> None:
    state = {
        "state": {},
        "param_groups": [{"params": ["block._fsdp_wrapped_module._flat_param"], "lr": 0.1}],
    }
    torch.save(state, tmp_path / "optimizer.bin")
    with pytest.raises(
        OperationError, match=r"an FSDP1 flat parameter.*SHARDED_STATE_DICT'; next: "
    ):
        open_optimizers(tmp_path)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([1], "it is not an optimizer state dict"),
        ({"state": {}, "param_groups": [3]}, "param group 0 is not a dict of hyperparameters"),
        ({"state": {}, "param_groups": [{"params": [1.5]}]}, "are neither numbers nor names"),
        ({"state": {}, "param_groups": [{"params": [1, "a"]}]}, "mix numbers and names"),
    ],
)
def test_what_no_optimizer_saves(tmp_path: Path, state: Any, words: str) -> None:
    torch.save(state, tmp_path / "optimizer.bin")
    with pytest.raises(OperationError, match=words):
        open_optimizers(tmp_path)


def test_a_damaged_optimizer_is_an_error(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "full", tmp_path / "cut")
    data = (tmp_path / "cut/optimizer.bin").read_bytes()
    (tmp_path / "cut/optimizer.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(OperationError, match=r"optimizer\.bin: .*next: ckptfix check"):
        open_optimizers(tmp_path / "cut")
    shutil.copytree(saved / "sharded", tmp_path / "lost")
    (tmp_path / "lost/optimizer_0/__1_0.distcp").unlink()
    with pytest.raises(OperationError, match=r"__1_0\.distcp is missing"):
        open_optimizers(tmp_path / "lost")
    (tmp_path / "lost/optimizer_0/.metadata").unlink()
    with pytest.raises(OperationError, match="the save was interrupted"):
        open_optimizers(tmp_path / "lost")


def test_references_without_end_are_refused(tmp_path: Path) -> None:
    """A pickle of 400 bytes that would be read as a list of a billion values."""
    value: Any = [0] * 10
    for _ in range(20):
        value = [value] * 8
    torch.save(
        {"state": {}, "param_groups": [{"params": [], "x": value}]}, tmp_path / "optimizer.bin"
    )
    with pytest.raises(OperationError, match="over and over"):
        open_optimizers(tmp_path)
    loop: list[Any] = []
    loop.append(loop)
    torch.save(
        {"state": {0: {"x": loop}}, "param_groups": [{"params": [0]}]}, tmp_path / "optimizer.bin"
    )
    (found,) = open_optimizers(tmp_path)
    assert found.states == {"0": {}}


RANKS = ["ranks", "tiled-ranks", "copies-ranks"]


@pytest.mark.parametrize("name", RANKS)
def test_files_that_each_rank_saved_alone(saved: Path, name: str) -> None:
    (found,) = open_optimizers(saved / name)
    assert (found.strategy, found.label, found.world_size) == (
        Strategy.FSDP,
        "optimizer_0_rank*.bin",
        2,
    )
    assert list(map(str, found.files)) == ["optimizer_0_rank0.bin", "optimizer_0_rank1.bin"]
    ensure_same(found, expected_of(saved, name))


@pytest.mark.parametrize("name", RANKS)
def test_models_that_each_rank_saved_alone(saved: Path, name: str) -> None:
    (weights,) = open_checkpoint(saved / name).weights
    expected = expected_of(saved, name)["weights"]
    found = {name: read(tensor) for name, tensor in weights.named().items()}
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in expected)
    assert weights.ties == {"head.weight": "embed.weight"}
    if name == "copies-ranks":  # either copy will do, and one file is read
        assert {first_place(tensor.layout)[0].name for tensor in weights.tensors} == {
            "pytorch_model_fsdp_0_rank0.bin"
        }
    assert (weights.label, weights.opaque) == ("pytorch_model_fsdp_0_rank*.bin", ())


def test_sharded_tensors_of_fsdp1(tmp_path: Path) -> None:
    assert run_ranks(2, lambda rank: save_fsdp1(tmp_path)) == [0, 0]
    (weights,) = open_checkpoint(tmp_path / "sharded").weights
    expected = torch.load(tmp_path / "expected", weights_only=True)
    assert all(
        same(read(tensor), expected["weights"][name]) for name, tensor in weights.named().items()
    )
    assert weights.named().keys() == expected["weights"].keys()
    (found,) = open_optimizers(tmp_path / "sharded")
    assert found.world_size == 2
    assert found.states.keys() == expected["states"].keys()
    for name, state in expected["states"].items():
        for key, value in state.items():
            assert same(read(found.states[name][key]), value), (name, key)
    with pytest.raises(OperationError, match="'_flat_param' is an FSDP1 flat parameter"):
        open_checkpoint(tmp_path / "local")


def test_shards_on_meshes_of_two_dimensions(tmp_path: Path) -> None:
    assert run_ranks(4, lambda rank: save_meshes(tmp_path)) == [0, 0, 0, 0]
    (weights,) = open_checkpoint(tmp_path).weights
    expected = on_meshes()
    assert all(same(read(tensor), expected[name]) for name, tensor in weights.named().items())
    assert weights.named().keys() == expected.keys() - {"partial"}
    assert weights.unread == {
        "partial": (
            "a tensor that is split in a way that ckptfix does not read (Partial), as in tensor "
            "parallelism"
        )
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_named(saved: Path, tmp_path: Path, rank: int) -> None:
    shutil.copytree(saved / "ranks", tmp_path, dirs_exist_ok=True)
    for kind, opened in (
        ("optimizer_0", open_optimizers),
        ("pytorch_model_fsdp_0", open_checkpoint),
    ):
        (tmp_path / f"{kind}_rank{rank}.bin").unlink()
        with pytest.raises(
            OperationError,
            match=rf"{kind}_rank{rank}\.bin, the file of rank {rank}, is missing: 2 ranks",
        ):
            opened(tmp_path)


@pytest.mark.parametrize("name", RANKS)
def test_files_of_ranks_are_healthy(saved: Path, name: str) -> None:
    assert [str(one) for one in check(saved / name).all_findings] == []


@pytest.mark.parametrize("kind", ["optimizer_0", "pytorch_model_fsdp_0"])
def test_check_names_a_missing_rank(saved: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(saved / "ranks", tmp_path, dirs_exist_ok=True)
    (tmp_path / f"{kind}_rank1.bin").unlink()
    (found,) = check(tmp_path).all_findings
    assert (found.code, str(found.path)) == ("missing-rank", f"{kind}_rank1.bin")
    assert "is missing: 2 ranks saved the checkpoint" in str(found)
    (tmp_path / f"{kind}_rank0.bin").write_bytes(b"")
    assert "missing-rank" not in {one.code for one in check(tmp_path).all_findings}, (
        "rank 0 is damaged itself"
    )


def test_other_verbs_know_files_of_ranks(saved: Path, tmp_path: Path) -> None:
    """The model of all ranks becomes the one that load_state looks for."""
    assert diff(saved / "ranks", saved / "sharded").verdict.startswith("equal")
    migrate(saved / "ranks", tmp_path / "new", to="safetensors")
    assert (tmp_path / "new/model.safetensors").exists()
    migrate(saved / "ranks", tmp_path / "dcp", to="dcp")
    assert (tmp_path / "dcp/pytorch_model_fsdp_0/.metadata").exists()


@pytest.mark.parametrize("name", ["ranks", "tiled-ranks", "copies-ranks", "tiled"])
def test_files_of_ranks_become_those_of_one_process(saved: Path, tmp_path: Path, name: str) -> None:
    migrate(saved / name, tmp_path / "zero", to="zero3", state="all", processes=3)
    migrate(tmp_path / "zero", tmp_path / "new", to="fsdp-full", state="all", processes=1)
    expected = expected_of(saved, name)
    found = torch.load(tmp_path / "new" / "optimizer.bin", weights_only=True)
    assert found["state"].keys() == expected["states"].keys()
    for parameter, state in expected["states"].items():
        assert all(same(found["state"][parameter][key], value) for key, value in state.items()), (
            parameter
        )
    assert found["param_groups"] == expected["groups"]


def named_state() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an optimizer's state dict with fqns, and what is in it as ``in_memory`` has it."""
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    train(model, optimizer)
    seen = in_memory(model, optimizer)
    return {"state": seen["states"], "param_groups": copy.deepcopy(seen["groups"])}, seen


def test_param_groups_in_one_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.4 the planner left a list of dicts without tensors whole."""
    monkeypatch.setattr(nested_dict, "traverse_state_dict", traverse_state_dict_v_2_3)
    state, seen = named_state()
    save(tmp_path / "optimizer_0", {"optimizer": state})
    names = {item.fqn for item in read_metadata_of(tmp_path / "optimizer_0").items}
    assert "optimizer.param_groups" in names, "as torch 2.3 saved it"
    (found,) = open_optimizers(tmp_path)
    ensure_same(found, seen)


def test_an_optimizer_at_the_root_of_a_dcp_folder(tmp_path: Path) -> None:
    state, seen = named_state()
    save(tmp_path / "optimizer_3", state)
    (found,) = open_optimizers(tmp_path)
    assert (found.label, found.index) == ("optimizer_3", 3)
    ensure_same(found, seen)


def plain_state() -> dict[str, Any]:
    return {
        "state": {"a.w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}},
        "param_groups": [{"lr": 0.1, "params": ["a.w"]}],
    }


MODEL = {"model": {"a.w": torch.ones(2)}}
ONE = ("optimizer",)


@pytest.mark.parametrize(
    ("content", "found", "opened"),
    [
        pytest.param({"optimizer": plain_state() | {"loss_scale": 8.0}}, [ONE], [["a.w"]], id="more-keys"),
        pytest.param({"optimizer": {"state": plain_state()["state"]}}, [ONE], [], id="moments-alone"),
        pytest.param(
            {"optimizer": {"state": plain_state()["state"], "scaler": torch.ones(1)}}, [], [],
            id="moments-with-more-keys",
        ),
        pytest.param(
            {"optimizer": plain_state() | {"param_groups": {"fast": {"lr": torch.ones(1)}}}}, [],
            [], id="groups-by-name",
        ),
        pytest.param({"sampler": {"param_groups": {"fast": torch.ones(1)}}}, [], [], id="no-list-of-groups"),
        pytest.param(
            {"optimizer": {"state": {}, "param_groups": plain_state()["param_groups"]}}, [ONE],
            [["a.w"]], id="no-moments",
        ),
        pytest.param(
            {"optimizer": plain_state() | {"base": plain_state()}}, [ONE, ("optimizer", "base")],
            [["a.w"], ["a.w"]], id="one-in-the-other",
        ),
        pytest.param(
            {"a": {"b": {"c": {"d": {"e": plain_state()}}}}}, [tuple("abcde")], [["a.w"]],
            id="deep",
        ),
        pytest.param(
            {"optimizer": plain_state() | {"state": {"param_groups": {"exp_avg": torch.ones(2)}}}},
            [ONE], [["a.w"]], id="a-parameter-called-param_groups",
        ),
    ],
)  # fmt: skip
def test_check_and_migrate_find_the_same_optimizers_in_a_dcp_folder(
    tmp_path: Path, content: Any, found: list[tuple[str, ...]], opened: list[list[str]]
) -> None:
    """Moments without param groups are renamed with their model, but no loader takes them for an
    optimizer.
    """
    save(tmp_path / "all", MODEL | content)
    assert sorted(optimizers_in(paths_of(read_metadata_of(tmp_path / "all")).values())) == found
    states = open_optimizers(tmp_path / "all")
    assert [[name for group in state.groups for name in group.names] for state in states] == opened
    assert all(STEP not in state.extra and not state.unfit for state in states)
    assert check(tmp_path / "all").status == 0


class OldMesh:
    """A device mesh as torch up to 2.8 pickled it, and as 2.9 and 2.10 did."""

    def __init__(self, rank: int, *, with_layout: bool) -> None:
        self._coordinate_on_dim = [rank]
        if with_layout:
            self._layout = OldLayout()
            self._rank_map = torch.arange(2)
        else:
            self.mesh = torch.arange(2)


class OldLayout:
    def __init__(self) -> None:
        self.shape, self.stride = (2,), (1,)


class OldSpec:
    def __init__(self, mesh: OldMesh, placements: tuple[Any, ...]) -> None:
        self.mesh, self.placements = mesh, placements


class OldTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor that pickles as a DTensor of an older torch does."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = (
            DTensor,
            self.dtype,
            self.whole,
            (1,),
            0,
            torch.strided,
            torch.device("cpu"),
            False,
        )
        state = (None, {"_local_tensor": self.as_subclass(torch.Tensor), "_spec": self.spec})
        return torch._tensor._rebuild_from_type_v2, (
            torch._utils._rebuild_wrapper_subclass,
            DTensor,
            made,
            state,
        )


@pytest.mark.parametrize("with_layout", [False, True])
def test_meshes_of_older_torch(tmp_path: Path, with_layout: bool) -> None:
    whole = torch.arange(5.0)
    for rank in (0, 1):
        part = whole[3 * rank : 3 * rank + 3].clone().as_subclass(OldTensor)
        part.whole, part.spec = (
            whole.shape,
            OldSpec(OldMesh(rank, with_layout=with_layout), (Shard(0),)),
        )
        torch.save({"w": part}, tmp_path / f"pytorch_model_fsdp_0_rank{rank}.bin")
    (weights,) = open_checkpoint(tmp_path).weights
    assert torch.equal(read(weights.tensors[0]), whole)
    (tmp_path / "pytorch_model_fsdp_0_rank1.bin").unlink()
    with pytest.raises(OperationError, match="rank 1"):
        open_checkpoint(tmp_path)
