"""Weights that ZeRO-3 left as placeholders of shape [0], and healthy modules with tensors without
elements.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, load_checkpoint_in_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.ao.quantization import PerChannelMinMaxObserver

from ckptfix import check, latest_checkpoint
from tests.deepspeed_library import NO_DEEPSPEED, has_deepspeed, variables
from tests.diagnosis.test_misnamed import Small
from tests.tiny_models import load, tensors_of, tiny, write

State = dict[str, Any]


def save(state: State, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({key: value.contiguous() for key, value in state.items()}, path, {"format": "pt"})
    else:
        torch.save(state, path)
    return path


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def attention() -> nn.Module:
    return nn.MultiheadAttention(4, 2)


def without_biases() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 2, bias=False))


def partitioned(model: nn.Module, threshold: int) -> State:
    """Return the state dict of a rank under ZeRO-3: parameters of fewer elements stay as they
    are.
    """
    state = dict(model.state_dict())
    parameters = {key for key, _ in model.named_parameters()}
    return {
        key: torch.empty(0) if key in parameters and value.numel() >= threshold else value
        for key, value in state.items()
    }


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("make", "threshold"),
    [(net, 0), (net, 3), (net, 10), (attention, 13), (without_biases, 0), (without_biases, 10)],
)
def test_placeholders_are_an_error(
    tmp_path: Path, make: Callable[[], nn.Module], threshold: int, name: str
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    save(dict(make().state_dict()), whole / name)
    save(partitioned(make(), threshold), cut / name)
    load_checkpoint_in_model(make(), str(whole))
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_checkpoint_in_model(make(), str(cut))
    assert check(whole).status == 0
    (finding,) = check(cut).findings
    assert (finding.severity.value, finding.code) == ("error", "wrong-state")
    assert "empty tensors, like those that ZeRO-3 leaves on each rank, for " in str(finding)
    assert "zero_to_fp32.py" in finding.advice
    assert "stage3_gather_16bit_weights_on_model_save" in finding.advice


def test_a_shard_of_placeholders_is_an_error(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    Accelerator(cpu=True).save_model(model, str(tmp_path), max_shard_size="1KB")
    load_checkpoint_in_model(model, str(tmp_path), strict=True)
    assert check(tmp_path).status == 0
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    save({key: value.new_zeros(0) for key, value in load_file(shard).items()}, shard)
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_checkpoint_in_model(model, str(tmp_path), strict=True)
    (finding,) = check(tmp_path).findings
    assert (finding.code, str(finding.path)) == ("wrong-state", shard.name)


def test_the_size_in_the_index_shows_a_single_placeholder(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)])
    Accelerator(cpu=True).save_model(model, str(tmp_path), max_shard_size="1KB")
    assert check(tmp_path).status == 0
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    (key,) = load_file(shard)
    save({key: torch.empty(0)}, shard)
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_checkpoint_in_model(model, str(tmp_path), strict=True)
    (finding,) = check(tmp_path).findings
    assert (finding.code, str(finding.path)) == ("wrong-state", shard.name)


def test_from_pretrained_refuses_placeholders(tmp_path: Path) -> None:
    tiny("GPT2LMHeadModel").save_pretrained(tmp_path)
    assert check(tmp_path).status == 0
    state = tensors_of(tmp_path)
    write(
        tmp_path,
        {key: torch.empty(0) if value.dim() == 2 else value for key, value in state.items()},
    )
    assert load(tmp_path) == "RuntimeError"
    assert {(one.severity.value, one.code) for one in check(tmp_path).findings} == {
        ("error", "wrong-state")
    }


# Healthy modules with tensors without elements.


class Quantized(nn.Module):  # type: ignore[misc]
    """A module that keeps its weight in another form, as quantized ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(3))
        self.register_buffer("qweight", torch.ones(3, 2, dtype=torch.int8))


class Normalizer(nn.Module):  # type: ignore[misc]
    """Statistics of no features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.empty(0))
        self.register_buffer("std", torch.empty(0))


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "observers": lambda: nn.Sequential(
        nn.Linear(4, 2), PerChannelMinMaxObserver(), PerChannelMinMaxObserver()
    ),
    "observers alone": lambda: nn.Sequential(
        PerChannelMinMaxObserver(), PerChannelMinMaxObserver()
    ),
    "a batch norm of nothing": lambda: nn.Sequential(nn.BatchNorm1d(0), nn.BatchNorm1d(0)),
    "layer norms of nothing": lambda: nn.Sequential(
        nn.Linear(4, 2), nn.LayerNorm(0), nn.LayerNorm(0)
    ),
    "a layer norm of nothing": lambda: nn.LayerNorm(0),
    "linear layers of nothing": lambda: nn.Sequential(
        nn.Linear(0, 3), nn.Linear(3, 0), nn.Embedding(0, 3)
    ),
    "quantized": lambda: nn.Sequential(Quantized(), Quantized()),
    "a normalizer": Normalizer,
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_tensors_without_elements_are_clean(tmp_path: Path, kind: str) -> None:
    model = HEALTHY[kind]()
    save(dict(model.state_dict()), tmp_path / "pytorch_model.bin")
    model.load_state_dict(torch.load(tmp_path / "pytorch_model.bin", weights_only=True))
    assert check(tmp_path).findings == ()


# Next to states of a run, under names of scripts, and next to DeepSpeed's own folder.


def saved(root: Path, state: State | None = None) -> Accelerator:
    script = Small(net())
    script.saved(root)
    if state is not None:
        save(state, root / "model.safetensors")
    return script.accelerator


def test_latest_checkpoint_passes_over_placeholders(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint_1")
    accelerator = saved(tmp_path / "checkpoint_2", partitioned(net(), 10))
    with pytest.raises(RuntimeError, match="size mismatch"):
        accelerator.load_state(str(tmp_path / "checkpoint_2"))
    (finding,) = check(tmp_path / "checkpoint_2").findings
    assert finding.code == "wrong-state"
    with pytest.warns(
        UserWarning, match=r"model\.safetensors holds empty tensors, .* for 2 of 6 keys"
    ):
        assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint_1"


@pytest.mark.parametrize("name", ["best.pt", "final.safetensors"])
def test_files_of_scripts_are_a_warning(tmp_path: Path, name: str) -> None:
    save(dict(net().state_dict()), tmp_path / "whole" / name)
    assert check(tmp_path / "whole").findings == ()
    save(partitioned(net(), 10), tmp_path / "cut" / name)
    (finding,) = check(tmp_path / "cut").findings
    assert (finding.severity.value, finding.code) == ("warning", "unknown-state")


def test_a_state_dict_inside_a_file_of_a_script(tmp_path: Path) -> None:
    path = save({"epoch": 1, "model": partitioned(net(), 10)}, tmp_path / "best.pt")
    (finding,) = check(path).findings
    assert str(finding).startswith("best.pt: model: it holds ")


def test_the_folder_of_deepspeed_is_named(tmp_path: Path) -> None:
    final = save(partitioned(net(), 10), tmp_path / "final" / "pytorch_model.bin").parent
    (finding,) = check(final).findings
    assert "look for a global_step folder of DeepSpeed" in finding.advice
    for step in (9, 10):
        state = tmp_path / f"checkpoint-{step}" / f"global_step{step}"
        state.mkdir(parents=True)
        (state / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    (finding,) = check(final).findings
    assert (
        "merge the states in ../checkpoint-10/global_step10/ with DeepSpeed's zero_to_fp32.py"
        in finding.advice
    )
    shutil.move(tmp_path / "checkpoint-10" / "global_step10", final / "global_step10")
    (final / "latest").write_text("global_step10")
    of_file = [one for one in check(final).findings if one.path.name == "pytorch_model.bin"]
    assert [(one.severity.value, one.code) for one in of_file] == [("note", "unknown-state")]
    assert "a resume with DeepSpeed reads global_step10/" in of_file[0].advice


_TRAIN = """
import sys, torch
from pathlib import Path
import deepspeed
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
from tests.diagnosis.test_placeholders import net, save
deepspeed.init_distributed("gloo")
for threshold in (0, 10):
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = net()
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    save(engine.module.state_dict(), Path(sys.argv[1], str(threshold), "pytorch_model.bin"))
"""


@pytest.mark.slow
@pytest.mark.skipif(not has_deepspeed(), reason=NO_DEEPSPEED)
def test_what_deepspeed_leaves_in_a_state_dict(tmp_path: Path) -> None:
    rank = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29647",
    }
    subprocess.run(
        [sys.executable, "-c", _TRAIN, str(tmp_path)],
        check=True,
        env={**variables(), **rank},
        timeout=300,
    )
    for root in tmp_path.iterdir():
        with pytest.raises(RuntimeError, match="size mismatch"):
            load_checkpoint_in_model(net(), str(root))
        assert [one.code for one in check(root).findings] == ["wrong-state"]
