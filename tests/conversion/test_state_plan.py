"""Complete states in the files of another strategy: every moment, step and hyperparameter by name,
and the rest.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import ckptfix
from ckptfix import Accelerator
from ckptfix.conversion.producing import produce
from ckptfix.diagnosis.findings.base import Severity
from ckptfix.errors import OperationError, UsageError
from ckptfix.storage.paths import MANIFEST
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.tensors.optimizer_opening import open_optimizers
from ckptfix.tensors.stored import Contiguous, StoredTensor
from ckptfix.tensors.zero_partitions import read_model_states
from tests.conversion.state_making import (
    STRATEGIES,
    Trained,
    assert_loads,
    assert_same,
    net,
    of_trainer,
    save_state,
    trained,
)
from tests.tensors.dcp_making import load
from tests.tensors.zero_making import make_zero
from tests.verification.sealed import flip


@pytest.mark.parametrize("before", STRATEGIES)
@pytest.mark.parametrize("after", STRATEGIES)
def test_every_state_is_there_by_name(tmp_path: Path, before: str, after: str) -> None:
    runs = trained(), trained(seed=1)
    source = save_state(tmp_path / "source", before, *runs)
    receipt = ckptfix.migrate(
        source, tmp_path / "new", to=after, state="all", model=lambda: [*runs[0], *runs[1]]
    )
    assert_loads(tmp_path / "new", after, *runs)
    assert receipt.verified
    assert receipt.processes == 2
    of_fsdp1 = (
        ["'optimizer_0', 'optimizer_1': FSDP1 (fsdp_version 1, "]
        if before != after == "fsdp"
        else []
    )
    assert [words[: len(of_fsdp1[0])] for words in receipt.warnings] == of_fsdp1
    assert not receipt.left_out
    assert len(receipt.optimizers) == (0 if before == after else 2)
    for name in (
        "custom_checkpoint_0.pkl",
        "random_states_1.pkl",
        "scheduler.bin",
        "scheduler_1.bin",
    ):
        assert (tmp_path / "new" / name).read_bytes() == (source / name).read_bytes()
    others = {"ddp": ["optimizer.bin"], "fsdp-full": ["optimizer.bin"], "fsdp": ["optimizer_0"]}
    found = {path.name for path in (tmp_path / "new").iterdir()}
    assert found & {"optimizer.bin", "optimizer_0"} == {*others[after]}


@pytest.mark.parametrize("between", ["zero1", "zero2", "zero3", "universal"])
@pytest.mark.parametrize("after", STRATEGIES)
def test_deepspeed_and_back(tmp_path: Path, between: str, after: str) -> None:
    run = trained()
    source = save_state(tmp_path / "source", "fsdp", run)
    first = ckptfix.migrate(source, tmp_path / "between", to=between, state="all", processes=3)
    assert first.verified
    assert first.models[0].files == first.optimizers[0].files
    names = {path.name for path in (tmp_path / "between").iterdir()}
    latest = "latest_universal" if between == "universal" else "latest"
    assert {"pytorch_model", latest, "scheduler.bin", "random_states_1.pkl"} <= names
    assert not {"optimizer_0", "pytorch_model_fsdp_0"} & names
    ckptfix.migrate(tmp_path / "between", tmp_path / "after", to=after, state="all", processes=2)
    assert_loads(tmp_path / "after", after, run)


@pytest.mark.parametrize("after", ["zero1", "zero2", "zero3", "universal"])
def test_a_frozen_parameter_gets_the_dtype_of_training(tmp_path: Path, after: str) -> None:
    model, optimizer = trained()
    optimizer.param_groups[1]["params"] = [
        one for name, one in model.named_parameters() if one.dim() < 2 and name != "1.weight"
    ]
    del optimizer.state[model[1].weight]
    source = save_state(tmp_path / "source", "fsdp-full", (model, optimizer))
    receipt = ckptfix.migrate(
        source, tmp_path / "new", to=after, state="all", dtype="bf16", processes=3
    )
    assert "'1.weight': converted to BF16" in "\n".join(receipt.warnings)
    (opened,) = open_checkpoint(tmp_path / "new").weights
    assert {one.fqn: one.dtype for one in opened.tensors} == {
        name: "BF16" if name == "1.weight" else "F32" for name in model.state_dict()
    }


def frozen_net() -> torch.nn.Module:
    """Return the model with one layer that is not trained, and a buffer whose name tells
    nothing.
    """
    model = net()
    model[2].weight.requires_grad_(False)
    model.register_buffer("offset", torch.ones(6))
    return model


def with_frozen_in_its_group() -> Trained:
    """Return a run as many scripts begin one: the optimizer gets all parameters, frozen ones
    too.
    """
    model = frozen_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("before", STRATEGIES)
@pytest.mark.parametrize("after", ["zero2", "zero3"])
def test_a_frozen_parameter_in_a_param_group_is_in_no_partition(
    tmp_path: Path, before: str, after: str
) -> None:
    """DeepSpeed takes the parameters of a group that are trained: with one more, the load fails."""
    source = save_state(tmp_path / "source", before, with_frozen_in_its_group())
    ckptfix.migrate(source, tmp_path / "new", to=after, state="all", model=frozen_net)
    (state,) = open_optimizers(tmp_path / "new")
    assert "2.weight" not in state.groups[0].names
    assert len(state.groups[0].names) == 7
    assert state.extra["model_states"]["buffer_names"] == ["offset"]
    if before != "ddp":
        receipt = ckptfix.migrate(
            source, tmp_path / "told", to="zero2", state="all", frozen=r"^2\.weight$"
        )
        assert not any("without moments" in one for one in receipt.warnings)
        assert open_optimizers(tmp_path / "told")[0].groups[0].names == state.groups[0].names
        receipt = ckptfix.migrate(source, tmp_path / "untold", to="zero2", state="all")
        (words,) = [one for one in receipt.warnings if "without moments ('2.weight')" in one]
        assert "--frozen REGEX" in words


@pytest.mark.parametrize(
    "options", [{"model": frozen_net}, {"model": net, "frozen": r"^2\.weight$"}]
)
@pytest.mark.parametrize("after", ["fsdp", "fsdp-full"])
def test_a_frozen_parameter_in_a_param_group_gets_no_moments(
    tmp_path: Path, after: str, options: dict[str, Any]
) -> None:
    """Zeros for a frozen model of which small matrices are trained would be twice as large as the
    model.
    """
    model, optimizer = with_frozen_in_its_group()
    source = save_state(tmp_path / "source", "ddp", (model, optimizer))
    receipt = ckptfix.migrate(source, tmp_path / "new", to=after, state="all", **options)
    assert not [words for words in receipt.warnings if "FSDP1" not in words]
    (state,) = open_optimizers(tmp_path / "new")
    assert state.groups[0].names == tuple(name for name, _ in model.named_parameters())
    assert {name for name, held in state.states.items() if held} == {*state.groups[0].names} - {
        "2.weight"
    }


@pytest.mark.parametrize("between", ["zero2", "zero3"])
@pytest.mark.parametrize("after", STRATEGIES)
def test_frozen_parameters_come_back_into_the_groups_that_deepspeed_leaves_them_out_of(
    tmp_path: Path, between: str, after: str
) -> None:
    run = with_frozen_in_its_group()

    def of_run() -> Any:
        model = frozen_net()
        return model, torch.optim.AdamW(model.parameters())

    source = save_state(tmp_path / "source", "ddp", run)
    ckptfix.migrate(source, tmp_path / "between", to=between, state="all", model=frozen_net)
    receipt = ckptfix.migrate(
        tmp_path / "between", tmp_path / "new", to=after, state="all", model=of_run
    )
    assert not [words for words in receipt.warnings if "frozen" in words]
    (state,) = open_optimizers(tmp_path / "new")
    (group,) = state.groups
    if after == "ddp":
        found = torch.load(tmp_path / "new" / "optimizer.bin", weights_only=True)
        assert_same(found, run[1].state_dict())
    else:
        assert group.names == tuple(name for name, _ in run[0].named_parameters())
        assert not state.states.get("2.weight")
    receipt = ckptfix.migrate(
        tmp_path / "between", tmp_path / "other", to=after, state="all", model=frozen_net
    )
    (words,) = [words for words in receipt.warnings if "frozen" in words]
    assert (
        "1 frozen parameter ('2.weight'): DeepSpeed leaves frozen parameters out of its param "
        "groups; " in words
    )


class Scaled(torch.nn.Module):  # type: ignore[misc]
    """A model with a parameter of no dimension, as the temperature of CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.scale * self.inner(x)
        return result


@pytest.mark.parametrize("between", ["zero1", "zero3", "universal"])
@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "ASGD", "alone"])
def test_a_parameter_of_no_dimension_goes_to_deepspeed_and_back(
    tmp_path: Path, between: str, kind: str
) -> None:
    """Its moments look like the numbers that NAdam and ASGD have for a parameter."""
    model = Scaled()
    parameters = [model.scale] if kind == "alone" else list(model.parameters())
    optimizer = getattr(torch.optim, "NAdam" if kind == "alone" else kind)(parameters, lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    source = save_state(tmp_path / "source", "fsdp-full", (model, optimizer))
    if between == "universal" and kind != "AdamW":
        with pytest.raises(
            OperationError,
            match="step is the only such state that a universal checkpoint can store",
        ):
            ckptfix.migrate(source, tmp_path / "between", to=between, state="all")
        return
    ckptfix.migrate(source, tmp_path / "between", to=between, state="all", processes=3)
    ckptfix.migrate(
        tmp_path / "between", tmp_path / "new", to="fsdp-full", state="all", processes=2
    )
    found = torch.load(tmp_path / "new" / "optimizer.bin", weights_only=True)
    assert_same(found["state"], get_optimizer_state_dict(model, optimizer)["state"])
    assert found["state"].keys() == {"scale", "inner.weight", "inner.bias"} or kind == "alone"


@pytest.mark.parametrize("after", ["ddp", "fsdp-full", "zero2"])
@pytest.mark.parametrize(
    ("option", "value", "state"),
    [("momentum_decay", 4e-3, "mu_product"), ("amsgrad", True, "max_exp_avg_sq")],
)
def test_an_optimizer_without_a_state_that_it_needs_is_refused(
    tmp_path: Path, after: str, option: str, value: object, state: str
) -> None:
    """``ds_to_universal.py`` writes ``exp_avg``, ``exp_avg_sq`` and ``step`` of any optimizer, and
    nothing else.
    """
    model, optimizer = trained()
    optimizer.param_groups[1][option] = value
    source = save_state(tmp_path / "source", "fsdp", (model, optimizer))
    words = (
        f"{state} is missing, and an optimizer with {option} cannot .* next: migrate the ZeRO "
        "checkpoint"
    )
    with pytest.raises(OperationError, match=words):
        ckptfix.migrate(source, tmp_path / "new", to=after, state="all")
    assert not (tmp_path / "new").exists()


def test_a_parameter_of_no_dimension_in_bf16_gets_masters_and_moments_in_fp32(
    tmp_path: Path,
) -> None:
    model = Scaled().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3).bfloat16()).square().sum().backward()
    optimizer.step()
    source = save_state(tmp_path / "source", "fsdp-full", (model, optimizer))
    receipt = ckptfix.migrate(source, tmp_path / "new", to="zero2", state="all")
    assert receipt.verified
    (state,) = open_optimizers(tmp_path / "new")
    moment = state.states["scale"]["exp_avg"]
    assert isinstance(moment, StoredTensor)
    assert (moment.dtype, moment.shape, state.masters["scale"].dtype) == ("F32", (), "F32")


@pytest.mark.parametrize("between", ["ddp", "fsdp", "zero1", "zero3", "universal"])
def test_a_param_group_that_was_added_later_keeps_its_own_steps(
    tmp_path: Path, between: str
) -> None:
    model = net()
    last = list(model[3].parameters())
    optimizer = torch.optim.AdamW(
        [one for layer in model[:3] for one in layer.parameters()], lr=0.1
    )
    for number in range(4):
        if number == 2:
            optimizer.add_param_group({"params": last, "lr": 0.3, "weight_decay": 0.0})
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    source = save_state(tmp_path / "source", "fsdp-full", (model, optimizer))
    ckptfix.migrate(source, tmp_path / "between", to=between, state="all", processes=3)
    model_of_run = net if between == "ddp" else None
    ckptfix.migrate(
        tmp_path / "between", tmp_path / "new", to="fsdp-full", state="all", model=model_of_run
    )
    found = torch.load(tmp_path / "new" / "optimizer.bin", weights_only=True)
    assert_same(found, get_optimizer_state_dict(model, optimizer))
    assert {float(one["step"]) for one in found["state"].values()} == {2.0, 4.0}


def test_two_engines_of_deepspeed(tmp_path: Path) -> None:
    runs = trained(), trained(seed=1)
    source = save_state(tmp_path / "source", "fsdp", *runs)
    ckptfix.migrate(source, tmp_path / "between", to="zero2", state="all")
    assert (tmp_path / "between" / "pytorch_model_1").is_dir()
    assert (tmp_path / "between" / "latest").read_text() == "pytorch_model_1", (
        "as after the last save_checkpoint"
    )
    ckptfix.migrate(tmp_path / "between", tmp_path / "after", to="ddp", state="all")
    assert_loads(tmp_path / "after", "ddp", *runs)


def test_deepspeed_has_an_optimizer_for_each_model(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "fsdp-full", trained(), trained(seed=1))
    (source / "optimizer_1.bin").unlink()
    with pytest.raises(
        OperationError, match="2 models and 1 optimizer, but DeepSpeed has one optimizer per model"
    ):
        ckptfix.migrate(source, tmp_path / "new", to="zero2", state="all")


def test_moments_in_bf16_become_fp32_for_deepspeed(tmp_path: Path) -> None:
    model, optimizer = trained()
    model.to(torch.bfloat16)
    for state in optimizer.state.values():
        state |= {key: one.to(torch.bfloat16) for key, one in state.items() if key != "step"}
    source = save_state(tmp_path / "source", "fsdp-full", (model, optimizer))
    receipt = ckptfix.migrate(source, tmp_path / "between", to="zero1", state="all")
    assert "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt" in receipt.models[0].files[0]
    assert "the fp32 masters are made from BF16 weights" in receipt.warnings[0]
    ckptfix.migrate(tmp_path / "between", tmp_path / "after", to="ddp", state="all")
    found = torch.load(tmp_path / "after" / "optimizer.bin", weights_only=True)["state"][0]
    assert_same(found["exp_avg"], optimizer.state[model[0].weight]["exp_avg"].float())
    assert_same(
        load_file(tmp_path / "after" / "model.safetensors")["0.weight"],
        model[0].weight.detach().float(),
    )


@pytest.mark.parametrize("between", ["zero1", "zero3"])
def test_what_is_frozen_is_in_the_dtype_of_training(tmp_path: Path, between: str) -> None:
    model, optimizer = trained()
    model.add_module("frozen", torch.nn.LayerNorm(6).requires_grad_(False))
    source = save_state(tmp_path / "source", "fsdp-full", (model, optimizer))
    ckptfix.migrate(source, tmp_path / "between", to=between, state="all", dtype="bf16")
    assert {
        one.fqn: one.dtype for one in open_checkpoint(tmp_path / "between").weights[0].tensors
    } == {name: "BF16" if name.startswith("frozen") else "F32" for name in model.state_dict()}


@pytest.mark.parametrize("after", ["ddp", "fsdp", "fsdp-full"])
@pytest.mark.parametrize("before", ["ddp", "fsdp", "fsdp-full"])
def test_models_whose_parameters_differ_in_shape_alone(
    tmp_path: Path, before: str, after: str
) -> None:
    def of_width(width: int) -> Trained:
        model = torch.nn.Sequential(torch.nn.Linear(width, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=width / 100)
        model(torch.randn(2, width)).square().sum().backward()
        optimizer.step()
        return model, optimizer

    runs = of_width(4), of_width(5)
    source = save_state(tmp_path / "source", before, *runs)
    ckptfix.migrate(
        source, tmp_path / "new", to=after, state="all", model=lambda: [*runs[0], *runs[1]]
    )
    for index, (model, optimizer) in enumerate(runs):
        end = f"_{index}" if index else ""
        named = get_optimizer_state_dict(model, optimizer)
        if after == "fsdp":
            state = {"optimizer": get_optimizer_state_dict(*of_width(4 + index))}
            load(tmp_path / "new" / f"optimizer_{index}", state)
            assert_same(state["optimizer"]["state"], named["state"])
        else:
            found = torch.load(tmp_path / "new" / f"optimizer{end}.bin", weights_only=True)
            expected = optimizer.state_dict() if after == "ddp" else named
            assert_same(found["state"], expected["state"])


@pytest.mark.parametrize("options", [{"frozen": "^2.weight$"}, {"model": "frozen"}])
def test_frozen_parameters_of_a_named_optimizer_are_not_those_of_deepspeed(
    tmp_path: Path, options: Any
) -> None:
    def frozen() -> torch.nn.Module:
        model = net()
        model[2].weight.requires_grad_(False)
        return model

    source = save_state(tmp_path / "source", "fsdp-full", trained(skipped="2.weight"))
    receipt = ckptfix.migrate(source, tmp_path / "zeros", to="zero2", state="all")
    assert "if the script freezes any of these: --frozen REGEX" in receipt.warnings[0]
    given: dict[str, Any] = {
        key: frozen if key == "model" else value for key, value in options.items()
    }
    ckptfix.migrate(source, tmp_path / "new", to="zero2", state="all", **given)
    (state,) = open_optimizers(tmp_path / "new")
    assert [group.names for group in state.groups] == [
        ("0.weight", "3.weight"),
        ("0.bias", "1.weight", "1.bias", "2.bias", "3.bias"),
    ]


@pytest.mark.parametrize(
    ("frozen", "words"),
    [
        ("norm", "matches no parameter of the model"),
        ("^0", "they have moments in optimizer.bin"),
    ],
)
def test_a_pattern_that_matches_nothing_or_what_was_trained(
    tmp_path: Path, frozen: str, words: str
) -> None:
    source = save_state(tmp_path / "source", "fsdp-full", trained())
    with pytest.raises(UsageError, match=words):
        ckptfix.migrate(source, tmp_path / "new", to="zero2", state="all", frozen=frozen)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("after", ["ddp", "fsdp", "zero2"])
def test_an_optimizer_of_another_run_is_not_what_was_sealed(
    tmp_path: Path, after: str, verify: bool
) -> None:
    source = save_state(tmp_path / "source", "fsdp-full", trained())
    ckptfix.seal(source)
    torch.save(get_optimizer_state_dict(*trained(seed=1)), source / "optimizer.bin")
    with pytest.raises(
        OperationError, match=r"optimizer\.bin does not match its digest in the manifest"
    ):
        ckptfix.migrate(source, tmp_path / "new", to=after, state="all", verify=verify)
    assert not (tmp_path / "new").exists()


def test_a_sealed_folder_of_the_trainer_with_deepspeed(tmp_path: Path) -> None:
    run = trained()
    source = of_trainer(tmp_path / "source", run)
    between = tmp_path / "between"
    ckptfix.migrate(source, between, to="zero2", state="all", model=net)
    rounded = {name: value.bfloat16() for name, value in run[0].state_dict().items()}
    save_file(rounded, between / "model.safetensors", {"format": "pt"})
    ckptfix.seal(between)
    assert ckptfix.migrate(between, tmp_path / "new", to="ddp", state="all").verified
    assert_same(load_file(tmp_path / "new" / "model.safetensors"), run[0].state_dict())


def test_hyperparameters_that_are_tensors_in_a_tuple_or_not_numbers(tmp_path: Path) -> None:
    model, optimizer = trained()
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    optimizer.param_groups[0] |= {"betas": betas, "noise": float("nan")}
    source = save_state(tmp_path / "source", "fsdp-full", (model, optimizer))
    for after in ("zero2", "ddp"):
        receipt = ckptfix.migrate(source, tmp_path / after, to=after, state="all")
        assert receipt.verified
    found = torch.load(tmp_path / "ddp" / "optimizer.bin", weights_only=True)["param_groups"][0]
    assert found["betas"] == betas
    assert found["noise"] != found["noise"]
    with pytest.raises(OperationError, match=r"param_groups\.0\.betas: .*tensors in a tuple"):
        ckptfix.migrate(source, tmp_path / "new", to="fsdp", state="all")


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_the_order_that_names_rest_on_is_said(tmp_path: Path, has_optimizer: bool) -> None:
    run = trained()
    source = save_state(tmp_path / "source", "ddp", run)
    receipt = ckptfix.migrate(
        source,
        tmp_path / "new",
        to="fsdp",
        state="all",
        model=lambda: run if has_optimizer else run[0],
    )
    said = [
        words
        for words in receipt.not_checked
        if "in the model's order, as ckptfix assumed to name them" in words
    ]
    assert len(said) == (not has_optimizer)


@pytest.mark.parametrize("after", ["fsdp", "fsdp-full"])
def test_a_parameter_without_a_gradient_gets_the_states_of_a_first_step(
    tmp_path: Path, after: str
) -> None:
    source = save_state(tmp_path / "source", "ddp", trained(skipped="2.weight"))
    receipt = ckptfix.migrate(source, tmp_path / "new", to=after, state="all", model=net)
    assert "1 parameter without moments ('2.weight')" in receipt.warnings[0]
    if after == "fsdp":
        state = {"optimizer": get_optimizer_state_dict(*trained(seed=5))}
        load(tmp_path / "new" / "optimizer_0", state)
        found = state["optimizer"]["state"]
    else:
        found = torch.load(tmp_path / "new" / "optimizer.bin", weights_only=True)["state"]
    zeros = torch.zeros(6, 6)
    expected = {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros}
    assert_same(found["2.weight"], expected)


def test_it_stays_without_states_where_the_loader_does_not_ask_for_them(tmp_path: Path) -> None:
    run = trained(skipped="2.weight")
    source = save_state(tmp_path / "source", "fsdp-full", run)
    ckptfix.migrate(source, tmp_path / "new", to="ddp", state="all")
    assert_loads(tmp_path / "new", "ddp", run)


def test_the_manifest_of_a_guarded_save_is_of_the_new_files(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "ddp", trained())
    ckptfix.seal(source)
    ckptfix.migrate(source, tmp_path / "new", to="fsdp", state="all", model=net)
    assert ckptfix.verify(tmp_path / "new").status == 0
    assert (
        json.loads((tmp_path / "new" / MANIFEST).read_text())["models"][0]["file"]
        == "pytorch_model_fsdp_0"
    )


@pytest.mark.parametrize("between", ["fsdp", "fsdp-full", "zero2", "zero3"])
def test_checkpoints_of_the_trainer_keep_its_names(tmp_path: Path, between: str) -> None:
    run = trained()
    source = of_trainer(tmp_path / "checkpoint-3", run)
    model = tmp_path / "between" / "model.safetensors"
    ckptfix.migrate(source, tmp_path / "between", to=between, state="all", model=net)
    names = {path.name for path in (tmp_path / "between").iterdir()}
    assert {"trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"} <= names
    own = {"fsdp": "optimizer_0", "fsdp-full": "optimizer.bin"}.get(between, "global_step3")
    assert own in names
    assert not {"optimizer.pt", "model.safetensors"} & names
    if between.startswith("zero"):
        assert (tmp_path / "between" / "latest").read_text() == "global_step3"
        save_file(
            {name: one.bfloat16() for name, one in run[0].state_dict().items()},
            model,
            {"format": "pt"},
        )
    receipt = ckptfix.migrate(
        tmp_path / "between", tmp_path / "new", to="ddp", state="all", processes=1
    )
    assert_same(load_file(tmp_path / "new" / "model.safetensors"), dict(run[0].state_dict()))
    assert_same(
        torch.load(tmp_path / "new" / "optimizer.pt", weights_only=True), run[1].state_dict()
    )
    left = [
        one.what.split("'")[0]
        for one in receipt.left_out
        if "rng" in one.what or "random" in one.what
    ]
    assert left == ["rng_state_0.pth", "rng_state_1.pth", "random states in "]
    assert not receipt.warnings


def test_masters_that_are_rounded_are_said_to_be(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "fsdp", trained())
    ckptfix.migrate(source, tmp_path / "between", to="zero2", state="all", dtype="bf16")
    receipt = ckptfix.migrate(
        tmp_path / "between", tmp_path / "new", to="ddp", state="all", dtype="bf16"
    )
    assert "its fp32 masters are rounded to BF16 because of --dtype" in receipt.warnings[0]
    assert load_file(tmp_path / "new" / "model.safetensors")["0.weight"].dtype is torch.bfloat16
    assert (
        torch.load(tmp_path / "new" / "optimizer.bin")["state"][0]["exp_avg"].dtype is torch.float32
    )


def test_a_dry_run_shows_the_optimizers(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "fsdp", trained())
    receipt = ckptfix.migrate(
        source, tmp_path / "new", to="ddp", state="all", processes=1, dry_run=True
    )
    assert not (tmp_path / "new").exists()
    assert "  optimizer_0: 8 parameters in 2 param groups, 912 B -> optimizer.bin" in str(receipt)
    assert "  to be loaded by 1 process with ddp" in str(receipt)
    document = receipt.as_json()
    assert (document["state"], document["processes"], document["to"]) == ("all", 1, "ddp")
    assert document["optimizers"][0]["parameters"] == 8


def test_without_verification_it_says_so(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "fsdp", trained())
    receipt = ckptfix.migrate(source, tmp_path / "new", to="ddp", state="all", verify=False)
    assert not receipt.verified
    assert "(--no-verify)" in receipt.not_checked[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state["state"]["0.weight"]["exp_avg"].add_(1), "'0.weight/exp_avg' differs from what was read"),
        (lambda state: state["state"]["0.weight"].update(step=torch.tensor(9.0)), "0.weight/step is 9.0 (expected 3"),
        (lambda state: state["param_groups"][1].update(weight_decay=0.5), "'weight_decay' of param group 1 is 0.5"),
        (lambda state: state["param_groups"][0].update(extra=5), "'extra' of param group 0 is 5 (expected None)"),
        (lambda state: state["state"]["2.bias"].pop("exp_avg_sq"), "'2.bias/exp_avg_sq' is missing"),
        (lambda state: state["param_groups"][0]["params"].reverse(), "its param groups list different parameters"),
    ],
)  # fmt: skip
def test_the_proof_finds_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, words: str
) -> None:
    source = save_state(tmp_path / "source", "fsdp", trained())

    def altered(plan: Any, folder: Path, *args: Any, **kwargs: Any) -> Any:
        produced = produce(plan, folder, *args, **kwargs)
        state = torch.load(folder / "optimizer.bin", weights_only=True)
        change(state)
        torch.save(state, folder / "optimizer.bin")
        return produced

    monkeypatch.setattr("ckptfix.conversion.migrate.produce", altered)
    with pytest.raises(OperationError) as caught:
        ckptfix.migrate(source, tmp_path / "new", to="fsdp-full", state="all")
    assert words in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("after", "dtype", "name", "file"),
    [
        ("zero1", None, "0.weight", "mp_rank_00_model_states.pt"),
        ("zero2", "bf16", "3.bias", "mp_rank_00_model_states.pt"),
        ("zero2", None, "2.weight", "mp_rank_00_model_states.pt"),  # frozen
        ("zero3", "bf16", "offset", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("universal", None, "1.weight", "mp_rank_00_model_states.pt"),
        ("universal", None, "offset", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ],
)
def test_the_proof_finds_a_flipped_bit_in_the_module_of_deepspeed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: str,
    dtype: str | None,
    name: str,
    file: str,
) -> None:
    """The module is what runs first; the weights that other readers find are the optimizer's."""
    source = save_state(tmp_path / "source", "fsdp-full", with_frozen_in_its_group())

    def flipped(plan: Any, folder: Path, *args: Any, **kwargs: Any) -> Any:
        produced = produce(plan, folder, *args, **kwargs)
        path = folder / "pytorch_model" / file
        layout = read_model_states(path).module[name].layout
        assert isinstance(layout, Contiguous)
        flip(path, layout.pieces[0].offset + 1)
        return produced

    options: dict[str, Any] = {"to": after, "state": "all", "model": frozen_net, "dtype": dtype}
    ckptfix.migrate(source, tmp_path / "intact", **options)
    monkeypatch.setattr("ckptfix.conversion.migrate.produce", flipped)
    with pytest.raises(OperationError, match=f"'{name}' differs from what was read"):
        ckptfix.migrate(source, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_states_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = trained()
    optimizer.state[model[0].weight]["exp_avg_sq_row"] = torch.ones(6)
    source = save_state(tmp_path / "source", "fsdp-full", (model, optimizer))
    with pytest.raises(
        OperationError, match=r"'exp_avg_sq_row' of '0.weight' has the shape \[6\].*Adafactor"
    ):
        ckptfix.migrate(source, tmp_path / "new", to="fsdp", state="all")
    ckptfix.migrate(source, tmp_path / "same", to="fsdp-full", state="all")


def test_weights_of_another_run_are_not_blamed_on_adafactor(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "fsdp-full", trained())
    weights = torch.load(source / "pytorch_model_fsdp.bin", weights_only=True)
    weights["0.weight"] = torch.ones(7, 3)
    torch.save(weights, source / "pytorch_model_fsdp.bin")
    with pytest.raises(OperationError) as refused:
        ckptfix.migrate(source, tmp_path / "new", to="fsdp", state="all")
    assert "'exp_avg' of '0.weight' has the shape [" in str(refused.value)
    assert "the weights and the optimizer come from two runs" in str(refused.value)
    assert "Adafactor" not in str(refused.value)


def test_moments_of_no_parameter_are_refused_by_name(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "fsdp-full", trained())
    torch.save({"other": torch.ones(2)}, source / "pytorch_model_fsdp.bin")
    with pytest.raises(
        OperationError, match=r"'0.weight' has moments, but no model has a parameter"
    ):
        ckptfix.migrate(source, tmp_path / "new", to="ddp", state="all")


@pytest.mark.parametrize(
    ("before", "after"), [("ddp", "fsdp"), ("fsdp-full", "ddp"), ("fsdp-full", "zero2")]
)
def test_moments_of_no_param_group_are_refused_by_name(
    tmp_path: Path, before: str, after: str
) -> None:
    source = save_state(tmp_path / "source", before, trained())
    state = torch.load(source / "optimizer.bin", weights_only=True)
    lost = state["param_groups"][0]["params"].pop()
    torch.save(state, source / "optimizer.bin")
    shown = f"parameter {lost}" if before == "ddp" else lost
    with pytest.raises(
        OperationError,
        match=f"optimizer.bin: '{shown}': moments without a param group, so no optimizer",
    ):
        ckptfix.migrate(source, tmp_path / "new", to=after, state="all", model=net)
    assert not (tmp_path / "new").exists()


def other_net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Linear(7, 6))


def one_step(model: torch.nn.Module, width: int) -> Trained:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, width)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("after", ["fsdp", "zero2"])
def test_two_models_without_optimizers_name_both(tmp_path: Path, after: str) -> None:
    """Some parameters of both have one shape, so all of them together would leave several
    assignments.
    """
    runs = trained(), one_step(other_net(), 3)
    source = save_state(tmp_path / "source", "ddp", *runs)
    receipt = ckptfix.migrate(
        source, tmp_path / "new", to=after, state="all", model=lambda: (net(), other_net())
    )
    assert "in the model's order" in receipt.not_checked[0]
    ckptfix.migrate(tmp_path / "new", tmp_path / "back", to="fsdp-full", state="all")
    for end, run in zip(("", "_1"), runs, strict=True):
        found = torch.load(tmp_path / "back" / f"optimizer{end}.bin", weights_only=True)
        assert_same(found["state"], get_optimizer_state_dict(*run)["state"])


def test_two_models_that_are_alike_do_not_name_their_optimizers(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "ddp", trained(), trained(seed=1))
    with pytest.raises(
        OperationError, match=r"match models 0, 1 equally well .*the models and their optimizers"
    ):
        ckptfix.migrate(
            source, tmp_path / "new", to="fsdp", state="all", model=lambda: (net(), net())
        )


def test_an_optimizer_of_the_other_model_is_refused_by_name(tmp_path: Path) -> None:
    second = torch.nn.Linear(3, 7)
    optimizer = torch.optim.AdamW(second.parameters())
    second(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    source = save_state(tmp_path / "source", "ddp", trained(), (second, optimizer))
    swapped = {"optimizer.bin": "optimizer_1.bin", "optimizer_1.bin": "optimizer.bin"}
    contents = {name: (source / name).read_bytes() for name in swapped}
    for name, other in swapped.items():
        (source / other).write_bytes(contents[name])
    with pytest.raises(
        OperationError,
        match=r"optimizer\.bin: it has the parameters of model 1, but the loader expects",
    ):
        ckptfix.migrate(
            source,
            tmp_path / "new",
            to="fsdp",
            state="all",
            model=lambda: (net(), torch.nn.Linear(3, 7)),
        )
    assert not (tmp_path / "new").exists()


def shared() -> tuple[torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
    """Return an actor, a critic and the optimizer of both, as PPO has them."""
    actor, critic = torch.nn.Linear(4, 3), torch.nn.Linear(4, 1)
    return actor, critic, torch.optim.Adam([*actor.parameters(), *critic.parameters()])


def stock_save(root: Path, models: Sequence[Any], optimizers: Sequence[Any]) -> Path:
    """Save models and optimizers as stock ``save_state`` does under DDP, after a step."""
    root.mkdir()
    for index, model in enumerate(models):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        end = f"_{index}" if index else ""
        save_file(model.state_dict(), root / f"model{end}.safetensors", {"format": "pt"})
    for index, optimizer in enumerate(optimizers):
        optimizer.step()
        torch.save(optimizer.state_dict(), root / f"optimizer{f'_{index}' if index else ''}.bin")
    torch.save({"step": 1}, root / "random_states_0.pkl")
    return root


def assert_next_step_works(source: Path, message: str, folder: Path) -> None:
    """Assert that a refusal names a next step, and that the step succeeds."""
    assert "next, to migrate only the models: --state weights --to dcp" in message
    assert ckptfix.migrate(source, folder, to="dcp", state="weights").verified


@pytest.mark.parametrize("after", ["fsdp", "fsdp-full", "zero2"])
@pytest.mark.parametrize("is_named", [False, True])
def test_an_optimizer_of_two_models_is_refused_for_its_final_reason(
    tmp_path: Path, after: str, is_named: bool
) -> None:
    """The symptom: it was refused for the lack of a model, and then of the model that was named."""
    *models, optimizer = shared()
    source = stock_save(tmp_path / "source", models, [optimizer])
    options: Any = {"model": shared} if is_named else {}
    with pytest.raises(OperationError, match=r"optimizer\.bin: it has parameters of ") as refused:
        ckptfix.migrate(source, tmp_path / "new", to=after, state="all", **options)
    assert "has one optimizer per model" in str(refused.value)
    assert "--model" not in str(refused.value)
    assert_next_step_works(source, str(refused.value), tmp_path / "models")


def test_an_optimizer_of_two_models_in_a_guarded_save(tmp_path: Path) -> None:
    """The first model could have all these parameters by their shapes."""
    accelerator = Accelerator(cpu=True)
    model, critic = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD([model.weight, critic.bias])
    accelerator.prepare(model, critic, optimizer)
    accelerator.save_state(str(tmp_path / "source"))
    with pytest.raises(OperationError, match=r"it has parameters of models 0, 1, but accelerate"):
        ckptfix.migrate(tmp_path / "source", tmp_path / "new", to="fsdp", state="all")


@pytest.mark.parametrize("after", ["fsdp", "fsdp-full", "zero2"])
def test_two_optimizers_of_one_model_are_refused_without_advice_on_their_order(
    tmp_path: Path, after: str
) -> None:
    """The symptom: advice to prepare models and optimizers in the same order, for one model."""

    def new_run() -> Any:
        model = net()
        parts = [[one for one in model.parameters() if one.dim() == dim] for dim in (2, 1)]
        return model, *map(torch.optim.AdamW, parts)

    model, *optimizers = new_run()
    source = stock_save(tmp_path / "source", [model], optimizers)
    with pytest.raises(
        OperationError, match=r"'optimizer\.bin', 'optimizer_1\.bin': optimizers of one model \(0\)"
    ) as refused:
        ckptfix.migrate(source, tmp_path / "new", to=after, state="all", model=new_run)
    assert "order" not in str(refused.value)
    assert_next_step_works(source, str(refused.value), tmp_path / "models")


def refusal(source: Path, new: Path, **options: Any) -> str:
    """Return why the complete state is not migrated to FSDP."""
    with pytest.raises((OperationError, UsageError)) as refused:
        ckptfix.migrate(source, new, to="fsdp", state="all", **options)
    return str(refused.value)


def test_more_optimizers_than_models_are_refused_before_a_model_is_asked_for(
    tmp_path: Path,
) -> None:
    """The symptom: advice to name the model, then that the names can be assigned in 6 ways."""
    models = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
    halves = [torch.optim.AdamW([one]) for one in models[0].parameters()]
    source = stock_save(tmp_path / "one", models[:1], halves)
    words = refusal(source, tmp_path / "new")
    assert "'optimizer.bin', 'optimizer_1.bin': optimizers of one model (0), but" in words
    assert refusal(source, tmp_path / "new", model=lambda: torch.nn.Linear(4, 3)) == words
    assert_next_step_works(source, words, tmp_path / "models")
    both = [*halves, torch.optim.AdamW(models[1].parameters())]
    source = stock_save(tmp_path / "two", models, both)
    assert ": 3 optimizers of 2 models, but accelerate" in refusal(source, tmp_path / "new")


def test_an_optimizer_of_a_model_that_is_not_there_is_not_one_too_many(tmp_path: Path) -> None:
    models = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
    optimizers = [torch.optim.AdamW(one.parameters()) for one in models]
    source = stock_save(tmp_path / "source", models, optimizers)
    (source / "model_1.safetensors").unlink()
    assert "--model MODULE:FACTORY" in refusal(source, tmp_path / "new")


def test_numbers_need_names(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "ddp", trained())
    with pytest.raises(OperationError, match="--model MODULE:FACTORY"):
        ckptfix.migrate(source, tmp_path / "new", to="fsdp", state="all")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": "ddp"}, "--to ddp needs --state all"),
        ({"to": "dcp", "state": "all"}, "--to dcp needs --state weights"),
        ({"to": "ddp", "state": "some"}, "--state some: expected one of weights, all"),
        ({"to": "ddp", "state": "all", "keys": "bare"}, "--keys is for --state weights"),
        ({"to": "dcp", "processes": 2}, "--processes 2"),
        ({"to": "ddp", "state": "all", "processes": 0}, "--processes 0"),
        ({"to": "dcp", "frozen": "x"}, "--frozen is for --state all"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: Any, words: str) -> None:
    source = save_state(tmp_path / "source", "ddp", trained())
    with pytest.raises(UsageError) as caught:
        ckptfix.migrate(source, tmp_path / "new", **options)
    assert words in str(caught.value)


def test_a_folder_without_an_optimizer(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "ddp", trained())
    (source / "optimizer.bin").unlink()
    for after, to in (("fsdp", "dcp"), ("fsdp-full", "bin"), ("zero2", "safetensors")):
        with pytest.raises(OperationError, match=rf"no optimizer found .*: ckptfix .* --to {to} "):
            ckptfix.migrate(source, tmp_path / "new", to=after, state="all")


def test_a_lone_file(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "ddp", trained())
    with pytest.raises(UsageError, match="--state all needs a folder"):
        ckptfix.migrate(source / "model.safetensors", tmp_path / "new", to="fsdp", state="all")


def test_check_knows_that_migrate_left_the_random_states_out(tmp_path: Path) -> None:
    """No copy brings them back, so that they are no reason for a warning."""
    source = of_trainer(tmp_path / "source", trained(), processes=1)
    torch.save({}, source / "training_args.bin")
    ckptfix.migrate(source, tmp_path / "new", to="ddp", state="all", processes=2)
    report = ckptfix.check(tmp_path / "new")
    (finding,) = [one for one in report.findings if one.code == "incomplete-checkpoint"]
    assert finding.severity is Severity.NOTE
    assert "migrate" in str(finding)
    assert "new random states" in finding.advice
    assert "copy" not in finding.advice
    assert report.status == 0
    # A copy without the receipt has lost them as any other.
    shutil.rmtree(tmp_path / "new" / ".ckptfix")
    assert ckptfix.check(tmp_path / "new").status == 1


def test_processes_that_nothing_shows(tmp_path: Path) -> None:
    source = save_state(tmp_path / "source", "fsdp", trained(), processes=0)
    with pytest.raises(UsageError, match="--processes N"):
        ckptfix.migrate(source, tmp_path / "new", to="ddp", state="all")


@pytest.mark.parametrize(
    "name", ["{}/w", "../../../w", "a/../b", ".", "a//b", "a/", "x" * 300, "nul\0x", "\ud800"]
)
def test_a_parameter_whose_name_no_folder_can_have_does_not_go_into_a_universal_checkpoint(
    tmp_path: Path, name: str
) -> None:
    """The symptom: of a parameter with an absolute path as its name, the files were written
    there.
    """
    name = name.format(tmp_path / "outside")
    source = tmp_path / "source"
    source.mkdir()
    torch.save({name: torch.ones(2), "a": torch.ones(2)}, source / "pytorch_model_fsdp.bin")
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    group = {"lr": 0.1, "params": [name, "a"]}
    torch.save(
        {"state": dict.fromkeys([name, "a"], moments), "param_groups": [group]},
        source / "optimizer.bin",
    )
    with pytest.raises(
        OperationError, match=r"no folder can have this name; next: --to zero1"
    ) as caught:
        ckptfix.migrate(source, tmp_path / "new", to="universal", state="all", processes=2)
    assert "optimizer.bin: " in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    ckptfix.migrate(source, tmp_path / "new", to="zero2", state="all", processes=2)


def of_deepspeed(root: Path, client_state: dict[str, Any]) -> Path:
    """Return a checkpoint of ZeRO-2 whose script gave ``client_state`` to ``save_checkpoint``."""
    source = save_state(root / "fsdp", "fsdp", trained())
    ckptfix.migrate(source, root / "source", to="zero2", state="all")
    states = root / "source" / "pytorch_model" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(states, weights_only=False), **client_state}, states)
    return root / "source"


def test_what_a_script_keeps_in_deepspeeds_files_goes_along_or_is_named(tmp_path: Path) -> None:
    inside = {"epoch": 4, "seen": {"batches": [torch.arange(3)]}, "by place": {(1, 2): 3}}
    source = of_deepspeed(tmp_path, inside)
    ckptfix.migrate(source, tmp_path / "zero1", to="zero1", state="all")
    receipt = ckptfix.migrate(source, tmp_path / "zero3", to="zero3", state="all")
    found = torch.load(
        tmp_path / "zero3" / "pytorch_model" / "zero_pp_rank_1_mp_rank_00_model_states.pt",
        weights_only=False,
    )
    assert_same(
        {key: found[key] for key in ("epoch", "seen")},
        {key: inside[key] for key in ("epoch", "seen")},
    )
    assert "by place" not in found
    (words,) = [one for one in receipt.warnings if "model states" in one]
    assert (
        "'by place' of its model states (a dict with keys that are neither strings nor numbers) is "
        "left" in words
    )
    receipt = ckptfix.migrate(source, tmp_path / "ddp", to="ddp", state="all")
    (words,) = [one for one in receipt.warnings if "client_state" in one]
    assert words.startswith(
        "pytorch_model: the client_state that the script passed to save_checkpoint ('by place', "
        "'epoch', 'seen')"
    )


def test_a_hyperparameter_of_deepspeed_that_is_not_read_is_refused(tmp_path: Path) -> None:
    weights = {"a.weight": torch.ones(3)}
    moments = {
        "a.weight": {
            "step": torch.tensor(3.0),
            "exp_avg": torch.ones(3),
            "exp_avg_sq": torch.ones(3),
        }
    }
    options = [{"lr": 0.1, "by place": {(1, 2): 3}}]
    folder = tmp_path / "source" / "pytorch_model"
    make_zero(folder, [weights], stage=2, ranks=2, moments=moments, options=options)
    for to in ("zero3", "ddp"):
        with pytest.raises(OperationError, match=r"param_groups\.0\.by place: a dict with keys"):
            ckptfix.migrate(tmp_path / "source", tmp_path / "new", to=to, state="all")


@pytest.mark.parametrize("between", ["zero2", "zero3", "universal"])
def test_steps_in_tensors_of_one_dimension(tmp_path: Path, between: str) -> None:
    """As torch 1 counted; the symptom: equal steps of two parameters were refused for the places of
    their bytes.
    """
    source = save_state(tmp_path / "source", "fsdp-full", trained())
    content = torch.load(source / "optimizer.bin", weights_only=True)
    for held in content["state"].values():
        held["step"] = torch.tensor([3.0])
    torch.save(content, source / "optimizer.bin")
    ckptfix.migrate(source, tmp_path / "between", to=between, state="all")
    ckptfix.migrate(tmp_path / "between", tmp_path / "new", to="fsdp-full", state="all")
    found = torch.load(tmp_path / "new" / "optimizer.bin", weights_only=True)
    assert {float(held["step"]) for held in found["state"].values()} == {3.0}


@pytest.mark.parametrize("to", ["zero1", "zero3", "universal"])
def test_deepspeed_has_no_param_group_without_a_trained_parameter(tmp_path: Path, to: str) -> None:
    """The symptom: ZeRO-3 loads no file with such a group, as its own optimizer has none."""
    model, _ = trained()
    first, *others = model.parameters()
    first.requires_grad_(False)
    groups = [{"params": [first]}, {"params": others, "lr": 0.2}, {"params": [], "lr": 0.3}]
    optimizer = torch.optim.AdamW(groups)
    for one in others:
        one.grad = torch.ones_like(one)
    optimizer.step()
    source = save_state(tmp_path / "source", "ddp", (model, optimizer))
    receipt = ckptfix.migrate(
        source, tmp_path / "new", to=to, state="all", model=lambda: (model, optimizer)
    )
    (state,) = open_optimizers(tmp_path / "new")
    assert [group.options["lr"] for group in state.groups] == [0.2]
    assert any(
        "param groups without trained parameters are left out: 0, 2" in one
        for one in receipt.warnings
    )
