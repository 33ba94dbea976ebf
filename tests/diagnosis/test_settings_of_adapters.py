"""The config of another run of the same base next to an adapter: what PEFT refuses or drops is told
from config and tensors alone, and what it takes is silent.
"""

from pathlib import Path
from typing import Any

import pytest

import ckptfix
from ckptfix.diagnosis.findings.base import Severity

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
# PEFT uses what transformers is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore")

LORA = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "r": 4}
IA3 = {"target_modules": ["k_proj", "down_proj"], "task_type": "CAUSAL_LM"}
PROMPT = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}

OF_ANOTHER_RUN: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]], str]] = {
    "more rows": (
        ("Lora", {"trainable_token_indices": [1, 2, 3], **LORA}),
        ("Lora", {"trainable_token_indices": [1, 2], **LORA}),
        "has 3 trained rows (expected 2",
    ),
    "rows without a setting": (
        ("Lora", {"trainable_token_indices": [1, 2, 3], **LORA}),
        ("Lora", LORA),
        "trainable_token_indices in adapter_config.json does not cover",
    ),
    "excluded": (
        ("Lora", LORA),
        ("Lora", {"exclude_modules": ["v_proj"], **LORA}),
        "does not cover 4 of 8 tensors",
    ),
    "another layer": (
        ("Lora", LORA),
        ("Lora", {"layers_to_transform": [1], "layers_pattern": "layers", **LORA}),
        "target_modules and layers_to_transform in adapter_config.json do not cover",
    ),
    "a parameter": (
        ("Lora", LORA),
        (
            "Lora",
            {**LORA, "target_parameters": ["mlp.gate_proj.weight"], "target_modules": ["q_proj"]},
        ),
        "target_modules in adapter_config.json does not cover",
    ),
    "prompts as prefixes": (
        ("PromptTuning", PROMPT),
        ("PrefixTuning", PROMPT),
        "has 16 columns (expected 64, from token_dim and num_layers",
    ),
    "prefixes as prompts": (
        ("PrefixTuning", PROMPT),
        ("PromptTuning", PROMPT),
        "has 64 columns (expected 16, from token_dim in",
    ),
}

HEALTHY: dict[str, tuple[str, dict[str, Any]]] = {
    "rows": ("Lora", {"trainable_token_indices": [1, 2, 3], **LORA}),
    "rows by module": (
        "Lora",
        {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [3]}, **LORA},
    ),
    "excluded": ("Lora", {"exclude_modules": ["layers.0.self_attn.v_proj"], **LORA}),
    "excluded by expression": ("Lora", {"exclude_modules": ".*layers.0.*v_proj", **LORA}),
    "one layer": ("Lora", {"layers_to_transform": 1, "layers_pattern": ["layers"], **LORA}),
    "a parameter": ("Lora", {"target_parameters": ["mlp.gate_proj.weight"], **LORA}),
    "IA3": ("IA3", {"task_type": "CAUSAL_LM"}),
    "IA3 by paths": (
        "IA3",
        {**IA3, "target_modules": ["mlp.down_proj"], "feedforward_modules": ["mlp.down_proj"]},
    ),
    "prefixes": ("PrefixTuning", PROMPT),
    "projected prefixes": (
        "PrefixTuning",
        {"prefix_projection": True, "encoder_hidden_size": 8, **PROMPT},
    ),
    "an encoder of prompts": ("PromptEncoder", {"encoder_hidden_size": 8, **PROMPT}),
}


def saved(folder: Path, kind: str, settings: dict[str, Any]) -> Path:
    """Save an adapter of a new Llama, and return its folder."""
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=32, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    adapted = peft.get_peft_model(model, getattr(peft, f"{kind}Config")(**settings))
    adapted.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", OF_ANOTHER_RUN)
def test_the_config_of_another_run_is_told(tmp_path: Path, name: str) -> None:
    own, others, words = OF_ANOTHER_RUN[name]
    folder = saved(tmp_path / "own", *own)
    config = saved(tmp_path / "others", *others) / "adapter_config.json"
    (folder / config.name).write_bytes(config.read_bytes())
    report = ckptfix.check(folder)
    assert report.status == 1
    (finding,) = (one for one in report.findings if one.severity is not Severity.NOTE)
    assert finding.code == "incomplete-adapter"
    assert words in str(finding)


@pytest.mark.parametrize("name", HEALTHY)
def test_the_own_config_is_silent(tmp_path: Path, name: str) -> None:
    assert ckptfix.check(saved(tmp_path / "own", *HEALTHY[name])).status == 0
