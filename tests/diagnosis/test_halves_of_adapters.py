"""LoRA adapters of PEFT whose files lost one matrix of each pair, against the loader."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ckptfix import check

peft: Any = pytest.importorskip("peft")

NAME = "adapter_model.safetensors"


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            vocab_size=8,
        )
    )


def saved(root: Path, config: Any) -> dict[str, torch.Tensor]:
    """Save an adapter whose matrices have no zeros."""
    model = peft.get_peft_model(base(), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.ones_(parameter)
    model.save_pretrained(str(root))
    return dict(load_file(root / NAME))


CONFIGS: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": ["q_proj", "v_proj"]},
    "DoRA": {"target_modules": ["q_proj"], "use_dora": True},
    "biases": {"target_modules": ["q_proj"], "lora_bias": True},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "ranks": {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}},
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_is_healthy(kind: str, tmp_path: Path) -> None:
    saved(tmp_path, peft.LoraConfig(**CONFIGS[kind]))
    assert check(tmp_path).findings == ()


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_vera_is_healthy(tmp_path: Path) -> None:
    model = peft.get_peft_model(base(), peft.VeraConfig(target_modules=["q_proj"], r=2))
    model.save_pretrained(str(tmp_path))
    assert check(tmp_path).findings == ()


@pytest.mark.parametrize(("lost", "left"), [("A", "B"), ("B", "A")])
@pytest.mark.parametrize("kind", ["LoRA", "embeddings"])
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_lost_one_matrix_of_each_pair(
    kind: str, lost: str, left: str, tmp_path: Path
) -> None:
    """PEFT loads it with a warning at most, and check was silent."""
    tensors = saved(tmp_path, peft.LoraConfig(**CONFIGS[kind]))
    names = [name for name in tensors if f"_{lost}" in name]
    kept = {name: tensor for name, tensor in tensors.items() if name not in names}
    save_file(kept, tmp_path / NAME, metadata={"format": "pt"})
    loaded = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base(), str(tmp_path)))
    assert not any(torch.equal(loaded[name], tensors[name]) for name in names)
    (finding,) = check(tmp_path).findings
    assert (finding.code, finding.severity.value) == ("unknown-state", "warning")
    assert f"one of two LoRA matrices for {len(names)} modules, such as " in str(finding)
    assert str(finding).endswith(f"_{left} (expected A and B)")
