"""Whole folders of ``accelerator.save_state`` with DeepSpeed: two real ones, of two processes,
ZeRO-2 and ZeRO-3.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptfix import OperationError, check, diff, migrate, seal
from ckptfix.tensors.opening import open_checkpoint
from ckptfix.verification.verify import verify
from fixtures.digests import tensor_digests
from fixtures.make_deepspeed import Model
from fixtures.models import SampleCounter
from tests.conversion.making import FORMATS, digests_at, names_below, ties_at
from tests.tensors.zero_making import make_zero

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "deepspeed-0.18.2"
SAVED = ["accelerate-zero2", "accelerate-zero3"]
CARRIED = {
    "random_states_0.pkl",
    "random_states_1.pkl",
    "scheduler.bin",
    "custom_checkpoint_0.pkl",
}
MODEL = {
    "safetensors": {"model.safetensors"},
    "bin": {"pytorch_model.bin"},
    "dcp": {"pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp"},
}


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of the folder that the test names, with the script that DeepSpeed leaves
    in it.
    """
    root = Path(shutil.copytree(FIXTURES / request.param / "checkpoint", tmp_path / request.param))
    (root / "zero_to_fp32.py").write_text("import deepspeed\n")
    (root / "zero_to_torch.py").write_text("import zero_to_fp32\n")  # of DeepSpeed 0.19.8
    return root


def recorded(root: Path, which: str) -> dict[str, str]:
    run: dict[str, dict[str, str]] = json.loads((FIXTURES / root.name / "run.json").read_text())
    return run[which]


def loaded(root: Path, to: str) -> dict[str, torch.Tensor]:
    """Return the weights of a migrated folder as stock loaders read them."""
    if to == "safetensors":
        found: dict[str, torch.Tensor] = load_file(root / "model.safetensors")
        return found | {"head.weight": found["embed.weight"]}  # tied, and so written once
    if to == "bin":
        state: dict[str, torch.Tensor] = torch.load(root / "pytorch_model.bin", weights_only=True)
        return state
    dcp_to_torch_save(root / "pytorch_model_fsdp_0", root.parent / "stock.bin")
    nested: Any = torch.load(root.parent / "stock.bin", weights_only=True)["model"]
    return dict(nested)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("saved", SAVED, indirect=True)
def test_the_fp32_weights_of_the_run_and_all_else(saved: Path, tmp_path: Path, to: str) -> None:
    receipt = migrate(saved, tmp_path / "b", to=to)
    assert receipt.verified
    assert names_below(tmp_path / "b") == CARRIED | MODEL[to]
    for name in CARRIED:
        assert (tmp_path / "b" / name).read_bytes() == (saved / name).read_bytes()
    left = {one.what: one.reason for one in receipt.left_out}
    scripts = left["zero_to_fp32.py"], left["zero_to_torch.py"]
    assert {left["latest"], *scripts} == {"it belongs to the DeepSpeed folder, which is converted"}
    assert any("'optimizer_state_dict'" in what for what in left)
    assert digests_at(tmp_path / "b") == digests_at(saved)
    assert ties_at(tmp_path / "b") == {frozenset({"embed.weight", "head.weight"})}
    assert tensor_digests(loaded(tmp_path / "b", to)) == recorded(saved, "fp32")
    codes = [finding.code for finding in check(tmp_path / "b").findings]
    assert codes == ["incomplete-checkpoint"], (
        "the optimizer was left out, and load_state fails where one is prepared"
    )


@pytest.mark.parametrize("to", FORMATS)
def test_the_dtype_of_training(tmp_path: Path, to: str) -> None:
    """ZeRO-2 stored both; ZeRO-3 only fp32, which rounds to the same."""
    for name, dtype in (("accelerate-zero2", "original"), ("accelerate-zero3", "bf16")):
        source = FIXTURES / name / "checkpoint"
        migrate(source, tmp_path / name, to=to, dtype=dtype)
        (weights,) = open_checkpoint(tmp_path / name).weights
        assert {tensor.dtype for tensor in weights.tensors} == {"BF16", "I64"}
        if to == "bin":
            found = torch.load(tmp_path / name / "pytorch_model.bin", weights_only=True)
            run = json.loads((FIXTURES / name / "run.json").read_text())
            assert tensor_digests(found) == run["original"]
    with pytest.raises(
        OperationError, match=r"ZeRO-3 stores the weights in fp32 only.*--dtype bf16"
    ):
        migrate(
            FIXTURES / "accelerate-zero3" / "checkpoint", tmp_path / "x", to=to, dtype="original"
        )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("saved", SAVED, indirect=True)
def test_stock_accelerate_goes_on_from_a_migrated_folder(saved: Path, tmp_path: Path) -> None:
    migrate(saved, tmp_path / "b", to="safetensors")
    accelerator = Accelerator(cpu=True)
    model, counter = accelerator.prepare(Model()), SampleCounter()
    accelerator.register_for_checkpointing(counter)
    accelerator.load_state(str(tmp_path / "b"))
    assert counter.samples == 8
    wanted = recorded(saved, "fp32")
    for name in ("embed.weight", "head.weight", "block.up.bias", "block.norm.weight", "scale"):
        assert tensor_digests({name: model.state_dict()[name]})[name] == wanted[name]


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("saved", SAVED, indirect=True)
def test_verify_and_diff_find_no_difference(saved: Path, tmp_path: Path, to: str) -> None:
    assert seal(saved).written
    assert verify(saved, data=True).status == 0
    migrate(saved, tmp_path / "b", to=to)
    report = verify(tmp_path / "b")
    assert (report.status, report.sealed) == (0, True)
    for one, other in ((saved, tmp_path / "b"), (tmp_path / "b", saved)):
        assert diff(one, other).status == 0
    (saved / "scheduler.bin").unlink()
    lacking = diff(saved, tmp_path / "b").not_compared
    assert "1 other file only in B: 'scheduler.bin'" in lacking


def test_diff_of_two_runs(tmp_path: Path) -> None:
    one, other = (FIXTURES / name / "checkpoint" for name in SAVED)
    same = diff(one, one)
    assert same.status == 0
    assert diff(one, other).status == (digests_at(one) != digests_at(other))
    migrate(one, tmp_path / "b", to="bin", dtype="original")
    assert diff(one, tmp_path / "b").status == 1, "fp32 weights are not those of training"


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_flipped_bit_of_the_weights_is_refused(
    tmp_path: Path, stage: int, dtype: str | None
) -> None:
    """The record of a partition holds the ends of two parameters, or a part of one."""
    state = {f"p{number}.weight": torch.full((50, 7), 1.0 + number) for number in range(4)}
    frozen = {"base.weight": torch.full((31,), 9.5)}
    make_zero(tmp_path / "a", [state], stage=stage, ranks=3, frozen=frozen)
    migrate(tmp_path / "a", tmp_path / "sound", to="bin", dtype=dtype)
    for value in (1.0, 2.0, 4.0, 9.5):
        pattern = torch.full((8,), value).numpy().tobytes()
        for path in sorted((tmp_path / "a").iterdir()):
            data = path.read_bytes()
            at = data.find(pattern)
            if at < 0:
                continue
            path.write_bytes(data[: at + 5] + bytes([data[at + 5] ^ 4]) + data[at + 6 :])
            with pytest.raises(
                OperationError, match=rf"{path.name}.*CRC-32 mismatch .*\(expected [0-9a-f]{{8}}, "
            ):
                migrate(tmp_path / "a", tmp_path / "b", to="bin", dtype=dtype)
            path.write_bytes(data)
    assert not (tmp_path / "b").exists()


def test_what_is_not_read_may_be_damaged(tmp_path: Path) -> None:
    """Of ZeRO-2 the copy in the dtype of training is not read, unless it is asked for."""
    make_zero(tmp_path / "a", [{"p.weight": torch.full((50, 7), 1.0)}], stage=2, ranks=2)
    path = tmp_path / "a" / "mp_rank_00_model_states.pt"
    data = path.read_bytes()
    at = data.find(torch.full((8,), 1.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    path.write_bytes(data[: at + 5] + bytes([data[at + 5] ^ 4]) + data[at + 6 :])
    migrate(tmp_path / "a", tmp_path / "fp32", to="bin")
    with pytest.raises(OperationError, match="CRC-32 mismatch"):
        migrate(tmp_path / "a", tmp_path / "b", to="bin", dtype="original")


def test_a_whole_model_beside_comes_first_and_nothing_points_at_what_is_left(
    tmp_path: Path,
) -> None:
    """As transformers' Trainer saves it: with the weights gathered, and the states of DeepSpeed for
    going on.
    """
    source = tmp_path / "checkpoint-2"
    shutil.copytree(FIXTURES / "zero3" / "checkpoint" / "pytorch_model", source / "global_step2")
    state = {"w": torch.ones(3)}
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    for name, text in (
        ("latest", "global_step2"),
        ("zero_to_fp32.py", ""),
        ("trainer_state.json", '{"global_step": 2}'),
    ):
        (source / name).write_text(text)
    receipt = migrate(source, tmp_path / "b", to="bin")
    assert names_below(tmp_path / "b") == {"pytorch_model.bin", "trainer_state.json"}
    left = {one.what for one in receipt.left_out}
    assert {
        "latest",
        "zero_to_fp32.py",
        "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    } <= left
    assert check(source).status == 0


@pytest.mark.parametrize(
    ("weights", "config", "words"),
    [
        ("adapter_model", "adapter_config.json", "{}"),
        ("diffusion_pytorch_model", "config.json", '{"_diffusers_version": "0.42.1"}'),
    ],
)
def test_weights_of_a_library_beside_keep_their_name(
    tmp_path: Path, weights: str, config: str, words: str
) -> None:
    """As the Trainer saves a PEFT model under DeepSpeed: the name of the adapter's weights is
    taken.
    """
    source = tmp_path / "checkpoint-2"
    shutil.copytree(FIXTURES / "zero3" / "checkpoint" / "pytorch_model", source / "global_step2")
    save_file({"w": torch.ones(3)}, source / f"{weights}.safetensors", metadata={"format": "pt"})
    (source / config).write_text(words)
    (source / "latest").write_text("global_step2")
    migrate(source, tmp_path / "b", to="safetensors")
    assert names_below(tmp_path / "b") == {f"{weights}.safetensors", config, "model.safetensors"}
    assert (tmp_path / "b" / f"{weights}.safetensors").read_bytes() == (
        source / f"{weights}.safetensors"
    ).read_bytes()
