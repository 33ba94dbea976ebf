"""Optimizer states of DeepSpeed by fqn: of real checkpoints of every ZeRO stage, and of made ones
of any shape.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.checkpoint.deepspeed_files import OtherKindError
from ckptfix.errors import OperationError
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.optimizer_opening import open_optimizers
from ckptfix.tensors.optimizers import OptimizerState, Strategy
from ckptfix.tensors.stored import StoredTensor
from fixtures.make_deepspeed import SCENARIOS
from tests.sampling import examples
from tests.tensors.test_deepspeed import FIXTURES, loaded, shapes, trained
from tests.tensors.zero_making import make_zero

TAG = PurePosixPath("pytorch_model")
WITH_STATES = [name for name in SCENARIOS if name not in ("zero0", "zero1-no-masters")]
ORDER = [["embed.weight", "block.up.weight", "block.down.weight"]]
ORDER += [["scale", "block.up.bias", "block.norm.weight", "block.norm.bias", "block.down.bias"]]


def opened(root: Path) -> OptimizerState:
    (state,) = open_optimizers(root)
    return state


def tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: loaded(value) for name, value in values.items() if isinstance(value, StoredTensor)
    }


def moments_of(names: dict[str, torch.Tensor], step: float) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {
            "step": torch.tensor(step),
            "exp_avg": torch.randn(tensor.shape),
            "exp_avg_sq": torch.rand(tensor.shape),
        }
        for name, tensor in names.items()
    }


def ensure_same(state: OptimizerState, moments: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    assert set(state.states) == set(moments)
    for name, wanted in moments.items():
        found = tensors(state.states[name])
        assert set(found) == set(wanted), name
        for key, tensor in wanted.items():
            assert torch.equal(found[key], tensor), f"{name}.{key}"


@pytest.mark.parametrize("name", WITH_STATES)
def test_the_optimizers_of_real_runs(name: str) -> None:
    root = FIXTURES / name / "checkpoint"
    state = opened(root)
    stage = SCENARIOS[name].config["zero_optimization"]["stage"]
    assert state.strategy is [Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3][stage - 1]
    assert state.world_size == SCENARIOS[name].processes
    assert [list(group.names) for group in state.groups] == ORDER
    assert [group.options["weight_decay"] for group in state.groups] == [0.1, 0.01]
    assert state.groups[0].options["betas"] == (0.9, 0.999)
    assert all("params" not in group.options for group in state.groups)
    weights = open_checkpoint(root).weights[0].named()
    for fqn in state.shapes:
        assert torch.equal(loaded(state.masters[fqn]), loaded(weights[fqn])), fqn
        found = tensors(state.states[fqn])
        assert {key: tensor.shape for key, tensor in found.items()} == {
            "step": torch.Size(()),
            "exp_avg": weights[fqn].shape,
            "exp_avg_sq": weights[fqn].shape,
        }
        assert found["step"] == 2
        assert (found["exp_avg_sq"] >= 0).all(), fqn
        # After two steps of Adam: m = .1 g1 * .9 + .1 g2, v = .001 g1^2 * .999 + .001 g2^2, so m^2
        # <= 19 v: a moment in another's place, or shifted by an element, breaks this as soon as one
        # gradient is near zero.
        assert (found["exp_avg"].square() <= 19.1 * found["exp_avg_sq"] + 1e-20).all(), fqn
    assert state.extra["dynamic_loss_scale"] is False
    assert state.extra["model_states"]["global_steps"] == 2
    assert state.extra["model_states"]["buffer_names"] == [
        "block.norm.num_batches_tracked",
        "block.norm.running_mean",
        "block.norm.running_var",
    ]


def test_the_parameters_of_round_robin_are_in_the_order_of_the_optimizer() -> None:
    """Their partitions are not: the second and the third of group 0 would change places for three
    ranks or two.
    """
    dealt = opened(FIXTURES / "zero2-round-robin" / "checkpoint")
    assert list(dealt.shapes)[3:] != ORDER[1]
    assert list(dealt.groups[1].names) == ORDER[1]


def test_an_optimizer_without_zero_is_not_passed_over() -> None:
    with pytest.raises(
        OperationError,
        match=r"without ZeRO, DeepSpeed keeps the optimizer in the model states.*; next: ",
    ):
        open_optimizers(FIXTURES / "zero0" / "checkpoint")


def test_a_save_without_any_optimizer(tmp_path: Path) -> None:
    assert open_optimizers(FIXTURES / "zero1-no-masters" / "checkpoint") == ()
    make_zero(tmp_path, [trained((5, 3))], stage=1, ranks=1)
    next(iter(tmp_path.glob("*_optim_states.pt"))).unlink()
    assert open_optimizers(tmp_path) == ()


@settings(deadline=None, max_examples=examples(50))
@given(
    groups=st.lists(st.lists(shapes, min_size=1, max_size=4), min_size=1, max_size=3),
    stage=st.sampled_from([1, 2, 3]),
    ranks=st.integers(1, 5),
    sub_group=st.integers(1, 30),
)
def test_any_moments_on_any_number_of_ranks(
    groups: list[list[tuple[int, ...]]],
    stage: int,
    ranks: int,
    sub_group: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made = [trained(*group, first=f"g{number}.p") for number, group in enumerate(groups)]
    for number, group in enumerate(made):
        if stage < 3 and sum(tensor.numel() for tensor in group.values()) < 2 * ranks * ranks:
            group[f"g{number}.filling"] = torch.randn(2 * ranks * ranks)
    moments = {name: one for group in made for name, one in moments_of(group, 5.0).items()}
    options = [
        {"lr": 0.1 * number, "betas": (0.9, 0.99), "foreach": None} for number in range(len(made))
    ]
    root = tmp_path_factory.mktemp("zero")
    make_zero(
        root, made, stage=stage, ranks=ranks, sub_group=sub_group, moments=moments, options=options
    )
    state = opened(root)
    assert [list(group.names) for group in state.groups] == [list(group) for group in made]
    assert [group.options for group in state.groups] == options
    ensure_same(state, moments)
    whole = {name: tensor for group in made for name, tensor in group.items()}
    found = tensors(state.masters)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    assert state.shapes == {name: tuple(tensor.shape) for name, tensor in whole.items()}


def changed_states(folder: Path, stage: int, change: Any) -> None:
    """Make a checkpoint of two ranks, and change the optimizer of the second."""
    parameters = trained((5, 3), (7,))
    make_zero(folder, [parameters], stage=stage, ranks=2, moments=moments_of(parameters, 3.0))
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    states = torch.load(path, weights_only=True)
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    change(states["optimizer_state_dict"][key])
    torch.save(states, path)


def _shorter(base: dict[str, Any]) -> None:
    base["state"][0]["exp_avg"] = base["state"][0]["exp_avg"][:-4].clone()


def _later(base: dict[str, Any]) -> None:
    base["state"][0]["step"] += 1


def _without(base: dict[str, Any]) -> None:
    del base["state"][0]["exp_avg_sq"]


def _strided(base: dict[str, Any]) -> None:
    base["state"][0]["exp_avg"] = torch.zeros(2 * len(base["state"][0]["exp_avg"]))[::2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_shorter, r"'exp_avg'.*have \d+ elements|partitions have \d+ elements"),
        (_later, "the partitions of 'step' of .* differ between ranks"),
        (_without, "its states of flat parameter 0 differ from those of rank 0"),
        (_strided, "are not contiguous"),
    ],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_disagree(tmp_path: Path, change: Any, message: str, stage: int) -> None:
    changed_states(tmp_path, stage, change)
    with pytest.raises(OperationError, match=f"{message}.*; next: "):
        opened(tmp_path)


def test_steps_that_the_group_counts(tmp_path: Path) -> None:
    """Older versions of DeepSpeed's FusedAdam have no step for a parameter."""
    parameters = trained((5, 3), (7,))
    moments = {
        name: {"exp_avg": one["exp_avg"]} for name, one in moments_of(parameters, 1.0).items()
    }
    make_zero(
        tmp_path, [parameters], stage=2, ranks=2, moments=moments, options=[{"lr": 0.1, "step": 6}]
    )
    state = opened(tmp_path)
    assert {values["step"] for values in state.states.values()} == {6}


def test_experts_that_are_cut_among_other_ranks_are_refused(tmp_path: Path) -> None:
    parameters = trained((5, 3))
    make_zero(tmp_path, [parameters], stage=3, ranks=1, moments=moments_of(parameters, 1.0))
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    states = torch.load(path, weights_only=True)
    states["optimizer_state_dict"]["ds_zero_partition_groups"] = [{"partition_count": 1}]
    torch.save(states, path)
    with pytest.raises(OperationError, match="MoE experts are partitioned across different ranks"):
        opened(tmp_path)


def test_an_optimizer_on_nvme_is_refused_by_name(tmp_path: Path) -> None:
    root = Path(shutil.copytree(FIXTURES / "zero3" / "checkpoint", tmp_path / "checkpoint"))
    (root / TAG / "offloaded_tensors" / "rank00").mkdir(parents=True)
    for read in (opened, open_checkpoint):
        with pytest.raises(
            OtherKindError, match=r"offloaded to NVMe, .* \(offloaded_tensors/\); next: "
        ):
            read(root)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    root = Path(shutil.copytree(FIXTURES / "zero2" / "checkpoint", tmp_path / "checkpoint"))
    (root / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(
        OperationError,
        match=r"1 file of .* \(expected 2, one per rank\); first missing rank: 1; next: ",
    ):
        opened(root)


def test_states_that_were_never_written(tmp_path: Path) -> None:
    """Before the first step an optimizer has none."""
    parameters = trained((5, 3), (7,))
    make_zero(tmp_path, [parameters], stage=2, ranks=2, moments={name: {} for name in parameters})
    state = opened(tmp_path)
    assert state.states == {}
    assert set(state.masters) == set(parameters)


# Universal checkpoints


def make_universal(
    root: Path, source: Path, moments: Mapping[str, Mapping[str, torch.Tensor]], *, is_flat: bool
) -> None:
    """Make the universal checkpoint that ``ds_to_universal.py`` makes of a folder of
    ``make_zero``.
    """
    root.mkdir()
    for path in source.glob("*_model_states.pt"):
        shutil.copy(path, root)
    state = opened(source)
    for name, master in state.masters.items():
        (root / "zero" / name).mkdir(parents=True)
        for key, tensor in {"fp32": loaded(master), **moments[name]}.items():
            saved: Any = tensor.reshape(-1) if is_flat else {"param": tensor, "cat_dim": 0}
            if key == "step" and is_flat:
                continue
            torch.save(tensor if key == "step" else saved, root / "zero" / name / f"{key}.pt")
    first = torch.load(next(iter(sorted(source.glob("*_optim_states.pt")))), weights_only=True)[
        "optimizer_state_dict"
    ]
    base = first["optimizer_state_dict" if is_flat else "base_optimizer_state"]
    shared: dict[str, Any] = {"param_groups": base["param_groups"], "overflow": False}
    torch.save(
        shared | ({"optimizer_state_dict": base} if is_flat else {}),
        root / "zero" / "optimizer_state.pt",
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_universal_checkpoints(tmp_path: Path, stage: int) -> None:
    groups = [trained((5, 3), (7,), first="a"), trained((), (2, 2), (3,), first="b")]
    moments = {name: one for group in groups for name, one in moments_of(group, 4.0).items()}
    options = [{"lr": 0.1}, {"lr": 0.2}]
    frozen = {"still.weight": torch.randn(9)}
    buffers = {"mean": torch.randn(3)}
    made: dict[str, Any] = {
        "frozen": frozen,
        "buffers": buffers,
        "sub_group": 4,
        "options": options,
    }
    make_zero(tmp_path / "source", groups, stage=stage, ranks=2, moments=moments, **made)
    make_universal(tmp_path / "universal", tmp_path / "source", moments, is_flat=stage == 3)
    state = opened(tmp_path / "universal")
    assert state.strategy is Strategy.UNIVERSAL
    assert [list(group.names) for group in state.groups] == [list(group) for group in groups]
    assert [group.options for group in state.groups] == options
    ensure_same(state, moments)
    (weights,) = open_checkpoint(tmp_path / "universal").weights
    found = {name: loaded(tensor) for name, tensor in weights.named().items()}
    whole = {name: tensor for group in groups for name, tensor in group.items()} | frozen | buffers
    assert set(found) == set(whole)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    assert PurePosixPath("zero/a0.weight/fp32.pt") in weights.files
    shutil.rmtree(tmp_path / "universal" / "zero" / "a1.weight")
    for read in (opened, open_checkpoint):
        with pytest.raises(
            OperationError, match=r"a1\.weight.*: missing, although the model states list"
        ):
            read(tmp_path / "universal")


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd"])
def test_a_universal_checkpoint_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    parameters = {name: torch.ones(3)}
    make_zero(
        tmp_path / "source", [parameters], stage=3, ranks=1, moments=moments_of(parameters, 1.0)
    )
    (tmp_path / "universal" / "zero").mkdir(parents=True)
    shutil.copy(
        tmp_path / "source" / "zero_pp_rank_0_mp_rank_00_model_states.pt", tmp_path / "universal"
    )
    with pytest.raises(OperationError, match="is not a valid parameter name; next: "):
        open_checkpoint(tmp_path / "universal")


def test_a_tensor_of_another_size(tmp_path: Path) -> None:
    parameters = trained((5, 3))
    moments = moments_of(parameters, 1.0)
    make_zero(tmp_path / "source", [parameters], stage=2, ranks=1, moments=moments)
    make_universal(tmp_path / "universal", tmp_path / "source", moments, is_flat=False)
    torch.save(
        {"param": torch.ones(16)}, tmp_path / "universal" / "zero" / "p0.weight" / "exp_avg.pt"
    )
    assert open_checkpoint(tmp_path / "universal").weights
    with pytest.raises(
        OperationError, match=r"'p0\.weight\.exp_avg' has shape \[16\], .* \[5, 3\]"
    ):
        opened(tmp_path / "universal")
