"""Weights of zeros: what libraries build so is no damage before a step, and what was lost still is
after it.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from ckptfix import Severity, verify
from tests.timm_library import PRELUDE, needs_timm

TIMM = (
    PRELUDE
    + """
from safetensors.torch import save_file
from timm.models.resnet import BasicBlock, ResNet
model = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=2, channels=(8, 8, 8, 8))
save_file(model.state_dict(), sys.argv[1], {"format": "pt"})
"""
)


def gemma() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(  # type: ignore[no-any-return, unused-ignore]
        Gemma3TextConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        )
    )  # fmt: skip


def vits() -> nn.Module:
    from transformers import VitsConfig, VitsModel

    return VitsModel(  # type: ignore[no-any-return, unused-ignore]
        VitsConfig(
            vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32,
            flow_size=16, spectrogram_bins=9, upsample_initial_channel=16, upsample_rates=[2, 2],
            upsample_kernel_sizes=[4, 4], resblock_kernel_sizes=[3],
            resblock_dilation_sizes=[[1, 3]], prior_encoder_num_flows=2,
            prior_encoder_num_wavenet_layers=1, posterior_encoder_num_wavenet_layers=1,
            duration_predictor_filter_channels=16, wavenet_dilation_rate=1,
        )
    )  # fmt: skip


def controlnet() -> nn.Module:
    from diffusers import ControlNetModel

    return ControlNetModel(  # type: ignore[no-any-return, no-untyped-call, unused-ignore]
        block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, cross_attention_dim=8, attention_head_dim=2,
        conditioning_embedding_out_channels=(4, 4), down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    )  # fmt: skip


def warned(folder: Path) -> list[str]:
    report = verify(folder, data=True)
    found = [one.fqn for one in report.values if one.severity is not Severity.NOTE]
    assert report.status == bool(found)
    assert {one.code for one in report.values} <= {"all-zero"}
    return found


def blank(file: Path, *names: str) -> None:
    """Set tensors to zero, as a write that was lost does."""
    state = load_file(file)
    save_file(
        {
            name: torch.zeros_like(value) if name in names else value
            for name, value in state.items()
        },
        file,
        {"format": "pt"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("build", [gemma, vits, controlnet])
def test_a_model_that_was_just_built_is_healthy(
    tmp_path: Path, build: Callable[[], nn.Module]
) -> None:
    model = build()
    assert any(
        not bool(value.any()) for name, value in model.state_dict().items() if "bias" not in name
    )
    model.save_pretrained(tmp_path / "pretrained")
    assert warned(tmp_path / "pretrained") == []
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(str(tmp_path / "c"))  # before the first step
    assert warned(tmp_path / "c") == []


@pytest.mark.slow
@needs_timm
def test_a_resnet_of_timm_is_healthy(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", TIMM, str(tmp_path / "model.safetensors")], check=True)
    state = load_file(tmp_path / "model.safetensors")
    assert not state["layer1.0.bn2.weight"].any()
    assert warned(tmp_path) == []


class Blocks(nn.Module):  # type: ignore[misc]
    """Layers, a norm in each, a head that begins with zeros, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mlp": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}) for _ in range(5)
        )
        self.head = nn.Linear(4, 4)
        nn.init.zeros_(self.head.weight)


def saved(
    folder: Path, *, steps: int, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> Path:
    torch.manual_seed(0)
    model = Blocks()
    accelerator = Accelerator(cpu=True)
    model, optim = accelerator.prepare(model, optimizer(model.parameters(), lr=0.1))
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optim.step()
    accelerator.save_state(str(folder))
    return folder / "model.safetensors"


def test_after_a_step_no_weight_is_zero(tmp_path: Path) -> None:
    assert warned(saved(tmp_path / "built", steps=0).parent) == []
    file = saved(tmp_path / "trained", steps=1)
    assert warned(file.parent) == []
    blank(file, "head.weight")
    (found,) = verify(file.parent, data=True).values
    assert (found.severity, found.fqn) == (Severity.WARNING, "head.weight")
    assert found.text.endswith("is zero in every element, although the optimizer took steps")
    blank(file, "head.bias", "layers.0.norm.bias")
    assert warned(file.parent) == ["head.weight"]
    (file.parent / "optimizer.bin").write_bytes(b"lost")
    assert warned(file.parent) == ["head.weight"]  # no proof that nothing was trained
    (file.parent / "optimizer.bin").unlink()
    assert warned(file.parent) == []
    (file.parent / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    assert warned(file.parent) == ["head.weight"]


@pytest.mark.parametrize("name", ["layers.3.mlp.weight", "layers.1.norm.weight"])
def test_a_layer_that_lacks_what_others_have_needs_no_proof_of_steps(
    tmp_path: Path, name: str
) -> None:
    file = saved(tmp_path / "c", steps=0)
    blank(file, name)
    notes = verify(file.parent, data=True).values
    (found,) = [one for one in notes if one.severity is not Severity.NOTE]
    assert found.fqn == name
    assert found.text.endswith("is zero in every element, unlike in 4 other layers")
    blank(file, *(f"layers.{number}.mlp.weight" for number in range(5)), "head.weight")
    # All layers alike: so it was built.
    assert warned(file.parent) == ([name] if "norm" in name else [])


def test_a_part_of_a_sequence_is_no_counterpart_of_another(tmp_path: Path) -> None:
    state = {f"net.{number}.weight": torch.ones(4, 4) * (number != 4) for number in range(5)}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    assert warned(tmp_path) == []


def test_parameters_that_were_flattened_are_more_than_a_norm(tmp_path: Path) -> None:
    torch.save(
        {"_fsdp_wrapped_module._flat_param": torch.zeros(64)}, tmp_path / "pytorch_model.bin"
    )
    torch.save(
        {"state": {0: {"exp_avg": torch.ones(64)}}, "param_groups": []}, tmp_path / "optimizer.bin"
    )
    assert [one.severity for one in verify(tmp_path, data=True).values] == [Severity.WARNING]
