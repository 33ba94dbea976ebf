"""New checkpoints of DeepSpeed: what ZeRO-1, 2 and 3 cut for any number of ranks, and universal
ones.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptfix.errors import OperationError
from ckptfix.tensors.joined import Inline
from ckptfix.tensors.new_files import NewStates
from ckptfix.tensors.new_torch_files import torch_files
from ckptfix.tensors.new_zero import zero_files
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.optimizer_opening import open_optimizers
from ckptfix.tensors.optimizers import OptimizerState, ParamGroup, Strategy
from ckptfix.tensors.stored import StoredTensor, Weights
from ckptfix.tensors.zero_shares import sub_groups
from tests.deepspeed_library import NO_DEEPSPEED, ROOT, has_deepspeed, variables
from tests.sampling import examples
from tests.tensors import zero_making
from tests.tensors.test_deepspeed import FIXTURES, loaded, shapes, trained
from tests.tensors.test_new_optimizers import stored
from tests.tensors.test_zero_states import ensure_same, moments_of, tensors
from tests.tensors.writing import new_tensors, write_states, write_tensors

TAG = PurePosixPath("pytorch_model")
ZERO = [Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3]
ALL = [*ZERO, Strategy.UNIVERSAL]
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1, "foreach": None}


def weights_of(folder: Path, named: Mapping[str, torch.Tensor]) -> Weights:
    """Return the weights of a model that is saved as ``save_state`` of DDP saves it."""
    new, ties = new_tensors(named)
    write_tensors(folder, torch_files("pytorch_model", new, ties), dict(named))
    return open_checkpoint(folder).weights[0]


def optimizer_of(
    groups: list[list[str]],
    moments: Mapping[str, Mapping[str, Any]],
    options: list[dict[str, Any]] | None = None,
) -> OptimizerState:
    options = options or [{**OPTIONS, "lr": 0.1 * number} for number, _ in enumerate(groups)]
    return OptimizerState(
        label="optimizer.bin",
        strategy=Strategy.DDP,
        groups=tuple(
            ParamGroup(names=tuple(names), options=own)
            for names, own in zip(groups, options, strict=True)
        ),
        states={
            name: {key: stored(value) for key, value in one.items()}
            for name, one in moments.items()
            if one
        },
    )


class Made:
    """A model in bf16 or fp32 with two param groups, a frozen parameter, a tie and buffers."""

    def __init__(
        self, root: Path, dtype: torch.dtype = torch.float32, *, last: tuple[int, ...] = ()
    ) -> None:
        torch.manual_seed(7)
        first, second = trained((5, 3), (4, 4), first="a"), trained((7,), last, first="b")
        self.groups = [list(first), list(second)]
        self.trained = {name: tensor.to(dtype) for name, tensor in (first | second).items()}
        self.moments = moments_of(self.trained, 3.0)
        self.frozen = {"still.weight": torch.randn(9).to(dtype)}
        self.buffers = {
            "norm.running_mean": torch.randn(3),
            "norm.num_batches_tracked": torch.tensor(7),
        }
        self.named = self.trained | self.frozen | self.buffers
        self.named = {"a_tie.weight": self.named["a0.weight"], **self.named}
        self.weights = weights_of(root, self.named)
        self.state = optimizer_of(self.groups, self.moments)


def new_files(made: Made, strategy: Strategy, processes: int, **options: Any) -> NewStates:
    return zero_files(strategy, TAG, made.weights, made.state, processes=processes, **options)


def ensure_weights(root: Path, expected: Mapping[str, torch.Tensor]) -> Weights:
    (weights,) = open_checkpoint(root).weights
    found = {name: loaded(tensor) for name, tensor in weights.named().items()}
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    return weights


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_strategy_and_number_of_ranks(
    tmp_path: Path, strategy: Strategy, processes: int
) -> None:
    made = Made(tmp_path / "old")
    write_states(tmp_path / "new", new_files(made, strategy, processes))
    weights = ensure_weights(tmp_path / "new", made.named)
    assert set(weights.ties) == {"a_tie.weight"}
    (state,) = open_optimizers(tmp_path / "new")
    assert state.strategy is strategy
    assert state.world_size == processes
    assert [list(group.names) for group in state.groups] == made.groups
    assert [group.options for group in state.groups] == [
        group.options for group in made.state.groups
    ]
    ensure_same(state, made.moments)
    masters = tensors(state.masters)
    assert all(torch.equal(masters[name], tensor) for name, tensor in made.trained.items())
    assert state.extra["model_states"]["global_steps"] == 3
    assert "clip_grad" not in state.extra  # DeepSpeed would take it for the new run's
    latest = "latest_universal" if strategy is Strategy.UNIVERSAL else "latest"
    assert (tmp_path / "new" / latest).read_text() == "pytorch_model"


@pytest.mark.parametrize("strategy", ALL)
def test_weights_in_bf16_get_masters_in_fp32(tmp_path: Path, strategy: Strategy) -> None:
    made = Made(tmp_path / "old", torch.bfloat16)
    write_states(tmp_path / "new", new_files(made, strategy, 2))
    (state,) = open_optimizers(tmp_path / "new")
    assert state.extra["model_states"]["dtype"] == "BF16"
    masters = tensors(state.masters)
    assert all(torch.equal(masters[name], tensor.float()) for name, tensor in made.trained.items())
    ensure_same(state, made.moments)
    if strategy is not Strategy.UNIVERSAL:
        names = {path.name for path in (tmp_path / "new" / TAG).glob("*optim_states.pt")}
        assert names == {f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)}
    fp32 = {name: tensor.float() for name, tensor in made.trained.items()}
    ensure_weights(tmp_path / "new", made.named | fp32 | {"a_tie.weight": fp32["a0.weight"]})


@pytest.mark.parametrize("strategy", ALL)
def test_a_module_in_bf16_over_weights_in_fp32(tmp_path: Path, strategy: Strategy) -> None:
    made = Made(tmp_path / "old")
    write_states(tmp_path / "new", new_files(made, strategy, 2, dtype="BF16"))
    (state,) = open_optimizers(tmp_path / "new")
    masters = tensors(state.masters)
    assert all(torch.equal(masters[name], tensor) for name, tensor in made.trained.items())
    rounded = {name: tensor.bfloat16() for name, tensor in made.frozen.items()}
    ensure_weights(tmp_path / "new", made.named | rounded)
    if strategy is not Strategy.ZERO3:
        states = torch.load(
            tmp_path / "new" / TAG / "mp_rank_00_model_states.pt", weights_only=False
        )
        module = states["module"]
        assert torch.equal(module["a0.weight"], made.trained["a0.weight"].bfloat16())
        assert module["a_tie.weight"].data_ptr() == module["a0.weight"].data_ptr()
        assert torch.equal(module["norm.running_mean"], made.buffers["norm.running_mean"])


@pytest.mark.parametrize(
    "name", ["zero1-bf16", "zero2-round-robin", "accelerate-zero3", "zero3-groups"]
)
@pytest.mark.parametrize("strategy", ALL)
def test_real_checkpoints_for_other_ranks(tmp_path: Path, name: str, strategy: Strategy) -> None:
    """From 2 or 3 ranks to 4, and back to as many as there were: every bit is the same."""
    root = FIXTURES / name / "checkpoint"
    (weights,), (state,) = open_checkpoint(root).weights, open_optimizers(root)
    expected = {fqn: loaded(tensor) for fqn, tensor in weights.named().items()}
    before = {fqn: tensors(values) for fqn, values in state.states.items()}
    for processes in (4, state.world_size or 0):
        folder = tmp_path / str(processes)
        write_states(folder, zero_files(strategy, TAG, weights, state, processes=processes))
        weights = ensure_weights(folder, expected)
        (state,) = open_optimizers(folder)
        ensure_same(state, before)
        assert state.world_size == processes
        assert state.extra["model_states"]["dtype"] == "BF16"
        assert state.extra["model_states"]["global_steps"] == 2
        assert state.extra["model_states"].get("epoch") == (None if name.startswith("acc") else 3)
        assert [group.options["weight_decay"] for group in state.groups] == [0.1, 0.01]
        assert state.groups[1].names[0] == "scale"


@settings(deadline=None, max_examples=examples(40))
@given(
    groups=st.lists(st.lists(shapes, min_size=1, max_size=4), min_size=1, max_size=3),
    strategy=st.sampled_from(ALL),
    processes=st.integers(1, 5),
)
def test_any_parameters(
    groups: list[list[tuple[int, ...]]],
    strategy: Strategy,
    processes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made = [trained(*group, first=f"g{number}.p") for number, group in enumerate(groups)]
    moments = {name: one for group in made for name, one in moments_of(group, 5.0).items()}
    root = tmp_path_factory.mktemp("zero")
    named = {name: tensor for group in made for name, tensor in group.items()}
    weights = weights_of(root / "old", named)
    state = optimizer_of([list(group) for group in made], moments)
    write_states(root / "new", zero_files(strategy, TAG, weights, state, processes=processes))
    ensure_weights(root / "new", named)
    (found,) = open_optimizers(root / "new")
    ensure_same(found, moments)
    assert [list(group.names) for group in found.groups] == [list(group) for group in made]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_same_values_as_in_files_of_deepspeed(tmp_path: Path, stage: int) -> None:
    """Partitions, paddings, slices and shapes, as the script that lays them out on its own has
    them.
    """
    made = Made(tmp_path / "old")
    groups = [{name: made.trained[name] for name in group} for group in made.groups]
    options = [dict(group.options) for group in made.state.groups]
    zero_making.make_zero(
        tmp_path / "made" / TAG,
        groups,
        stage=stage,
        ranks=3,
        moments=made.moments,
        options=options,
        buffers=made.buffers,
        frozen=made.frozen,
    )
    write_states(tmp_path / "new", new_files(made, ZERO[stage - 1], 3))
    for path in sorted((tmp_path / "made" / TAG).glob("zero_pp_rank_*_optim_states.pt")):
        wanted = torch.load(path, weights_only=True)["optimizer_state_dict"]
        found = torch.load(
            tmp_path / "new" / TAG / path.name, weights_only=False, pickle_module=_NoDeepSpeed
        )["optimizer_state_dict"]
        key = "base_optimizer_state" if stage == 1 else "optimizer_state_dict"
        flats = "single_partition_of_fp32_groups" if stage == 1 else "fp32_flat_groups"
        assert found[key]["param_groups"] == wanted[key]["param_groups"]
        assert found["partition_count"] == wanted["partition_count"]
        for one, other in zip(found[flats], wanted[flats], strict=True):
            lean = other if stage == 1 else other.clone()
            lean[lean == 77] = 0  # what the script pads with
            assert torch.equal(one, lean)
        for number, states in wanted[key]["state"].items():
            for name, tensor in states.items():
                other = tensor.clone()
                other[other == 77] = 0
                assert torch.equal(found[key]["state"][number][name], other), (number, name)


class _NoDeepSpeed:
    """Pickle module for torch.load to which every class of DeepSpeed is one that takes anything."""

    import pickle as _pickle

    class Unpickler(_pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.startswith("deepspeed."):
                return type(name, (), {"__init__": lambda self, *arguments: None})
            return super().find_class(module, name)

    load = _pickle.load


def test_sub_groups_are_those_of_deepspeed() -> None:
    named = {f"p{number}": (number + 1,) for number in range(9)}
    groups, _ = zero_making.sub_groups(
        [{name: torch.zeros(shape) for name, shape in named.items()}], 2, 6
    )
    assert [list(one) for one in sub_groups(named, 2, 6)] == [list(one) for one in groups]
    assert len(groups) == 4
    assert sub_groups(named, 2) == [named]


def test_parameters_without_moments(tmp_path: Path) -> None:
    made = Made(tmp_path / "old")
    held = {name: value for name, value in made.state.states.items() if name != "b0.weight"}
    made.state = replace(made.state, states=held)
    new = new_files(made, Strategy.ZERO2, 2)
    assert any(
        "1 parameter without moments ('b0.weight'): ZeRO stores" in note for note in new.notes
    )
    write_states(tmp_path / "zeros", new)
    (state,) = open_optimizers(tmp_path / "zeros")
    found = tensors(state.states["b0.weight"])
    assert not found["exp_avg"].any()
    assert found["step"] == 3
    new = new_files(made, Strategy.ZERO2, 2, frozen={"b0.weight"})
    assert new.notes == ()
    write_states(tmp_path / "frozen", new)
    (state,) = open_optimizers(tmp_path / "frozen")
    assert [list(group.names) for group in state.groups] == [made.groups[0], ["b1.weight"]]
    ensure_weights(tmp_path / "frozen", made.named)


def test_tensors_that_may_be_buffers_are_named_for_zero3(tmp_path: Path) -> None:
    """ZeRO-3 keeps frozen parameters cut and buffers whole, and refuses either in the place of the
    other.
    """
    made = Made(tmp_path / "old")
    (words,) = new_files(made, Strategy.ZERO3, 2).notes
    assert "'still.weight': in no param group, so treated as frozen parameters" in words
    assert new_files(made, Strategy.ZERO3, 2, frozen={"still.weight"}).notes == ()
    new = new_files(made, Strategy.ZERO3, 2, buffers=[*made.buffers, "still.weight"])
    assert new.notes == ()
    write_states(tmp_path / "new", new)
    states = torch.load(
        tmp_path / "new" / TAG / "zero_pp_rank_1_mp_rank_00_model_states.pt", weights_only=False
    )
    assert torch.equal(states["module"]["still.weight"], made.frozen["still.weight"])
    assert states["module"]["a0.weight"].shape == (0,)
    assert list(states["frozen_param_fragments"]) == []


def test_groups_that_differ_are_not_for_zero3_out_of_a_universal_checkpoint(
    tmp_path: Path,
) -> None:
    """Its loader takes the hyperparameters of group 0 for all, and one step tensor; without the
    entry it stops.
    """
    made = Made(tmp_path / "old")
    new = new_files(made, Strategy.UNIVERSAL, 2)
    assert any(
        "lr differs between param groups, but ZeRO-3 would use the value of group 0 for all: the"
        in note
        for note in new.notes
    )
    write_states(tmp_path / "new", new)
    shared = _global_state(tmp_path / "new")
    assert "optimizer_state_dict" not in shared
    made.state = optimizer_of(made.groups, made.moments, [OPTIONS, OPTIONS])
    new = new_files(made, Strategy.UNIVERSAL, 2)
    assert any("all sub-groups of ZeRO-3 would share one step tensor" in note for note in new.notes)
    write_states(tmp_path / "equal", new)
    assert "optimizer_state_dict" not in _global_state(tmp_path / "equal")
    counted = {
        name: {**one, "step": 3} for name, one in made.moments.items()
    }  # as DeepSpeed's own optimizers do
    made.state = optimizer_of(made.groups, counted, [OPTIONS, OPTIONS])
    ensure_for_zero3(tmp_path / "counted", new_files(made, Strategy.UNIVERSAL, 2), [[0], [1]])
    made.state = optimizer_of([[*made.groups[0], *made.groups[1]]], made.moments, [OPTIONS])
    ensure_for_zero3(tmp_path / "one", new_files(made, Strategy.UNIVERSAL, 2), [[0]])


def ensure_for_zero3(root: Path, new: NewStates, members: list[list[int]]) -> None:
    assert not any("ZeRO-3" in note for note in new.notes)
    write_states(root, new)
    shared = _global_state(root)
    assert shared["optimizer_state_dict"]["state"][0]["step"] == 3
    assert [group["params"] for group in shared["param_groups"]] == members


def _global_state(root: Path) -> dict[str, Any]:
    path = root / TAG / "zero" / "optimizer_state.pt"
    found: dict[str, Any] = torch.load(path, weights_only=False, pickle_module=_NoDeepSpeed)
    return found


def test_what_a_universal_checkpoint_does_not_bring_back_is_said(tmp_path: Path) -> None:
    new = new_files(Made(tmp_path / "old"), Strategy.UNIVERSAL, 2)
    assert any(
        "no buffers or frozen parameters" in note and "still.weight" in note for note in new.notes
    )


def with_state(made: Made, name: str, **values: Any) -> None:
    states = {fqn: dict(state) for fqn, state in made.state.states.items()}
    states[name].update(values)
    made.state = replace(made.state, states=states)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"step": stored(torch.tensor(9.0))},
        r"param group 0: step is 3\.0 for a0\.weight and 9\.0 for a1\.weight",
    ),
    (
        {"exp_avg": stored(torch.ones(4))},
        r"a1\.weight\.exp_avg: its shape differs from that of its parameter \(expected \[4, 4\], found \[4\]\)",
    ),
    (
        {"exp_avg": StoredTensor("", "U8", (4, 4), Inline(bytes(16)))},
        r"a1\.weight\.exp_avg: its dtype is U8, but ZeRO keeps states in fp32",
    ),
    (
        {"row": stored(torch.ones(4, 4))},
        r"a0\.weight\.row: missing from the optimizer, and its initial value is not zero",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
@pytest.mark.parametrize("strategy", [Strategy.ZERO2, Strategy.ZERO3, Strategy.UNIVERSAL])
def test_what_zero_cannot_hold_is_refused(
    tmp_path: Path, values: dict[str, Any], message: str, strategy: Strategy
) -> None:
    made = Made(tmp_path / "old")
    with_state(made, "a1.weight", **values)
    with pytest.raises(OperationError, match=message):
        new_files(made, strategy, 2)


def test_a_param_group_without_trained_parameters(tmp_path: Path) -> None:
    made = Made(tmp_path / "old")
    frozen = set(made.groups[1])
    made.state = replace(
        made.state,
        states={name: one for name, one in made.state.states.items() if name not in frozen},
    )
    with pytest.raises(
        OperationError,
        match=r"param group 1 has no trained parameters.*; next: remove the group",
    ):
        new_files(made, Strategy.ZERO2, 2, frozen=frozen)
    write_states(tmp_path / "new", new_files(made, Strategy.ZERO3, 2, frozen=frozen))
    (state,) = open_optimizers(tmp_path / "new")
    assert [list(group.names) for group in state.groups] == [made.groups[0], []]
    assert state.groups[1].options["lr"] == 0.1


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    made = Made(tmp_path / "old")
    made.state = optimizer_of([*made.groups, ["other.weight"]], made.moments)
    with pytest.raises(
        OperationError, match=r"'other\.weight': in the optimizer but not in the model; next: "
    ):
        new_files(made, Strategy.ZERO2, 2)


@pytest.mark.slow
@pytest.mark.skipif(not has_deepspeed(), reason=NO_DEEPSPEED)
@pytest.mark.parametrize("processes", [2, 3])
def test_the_scripts_of_deepspeed_read_the_files(tmp_path: Path, processes: int) -> None:
    """``zero_to_fp32.py`` finds the weights, ``ds_to_universal.py`` the moments, and fp16 gets a
    loss scaler.
    """
    made = Made(tmp_path / "old", last=(1,))  # ds_to_universal.py fails for a scalar
    for strategy in ZERO:
        write_states(tmp_path / strategy.value, new_files(made, strategy, processes, dtype="F16"))
    command = [sys.executable, "-m", "tests.tensors.zero_scripts", str(tmp_path)]
    subprocess.run(command, check=True, env=variables(), cwd=ROOT, timeout=300, capture_output=True)
    for strategy in ZERO:
        found = torch.load(tmp_path / f"{strategy.value}.fp32", weights_only=True)
        frozen = {name: tensor.half().float() for name, tensor in made.frozen.items()}
        for name, tensor in (made.named | frozen).items():
            if strategy is Strategy.ZERO1 and name in frozen:
                continue  # the script looks for them from ZeRO-2 on
            assert torch.equal(found[name].float(), tensor.float()), (strategy, name)
    for name in ("zero2", "zero3"):
        (state,) = open_optimizers(tmp_path / f"{name}-universal")
        ensure_same(state, made.moments)
        masters = tensors(state.masters)
        assert all(torch.equal(masters[fqn], tensor) for fqn, tensor in made.trained.items())
        assert [list(group.names) for group in state.groups] == made.groups
    objects = json.loads((tmp_path / "objects.json").read_text())
    assert objects["stage"] == "<ZeroStageEnum.weights: 3>"
    assert objects["class"]
    assert {key: objects["new"].get(key) for key in objects["saved"]} == objects["saved"]
