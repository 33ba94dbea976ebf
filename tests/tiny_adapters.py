"""Tiny adapters of PEFT on tiny models, and how many of their tensors a load brings to life."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

peft: Any = pytest.importorskip("peft")

NAME = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

Tensors = Mapping[str, torch.Tensor]


def llama(**settings: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=8, **settings))


def tied_llama() -> torch.nn.Module:
    return llama(tie_word_embeddings=True)


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, n_positions=8))


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    return BertForSequenceClassification(
        BertConfig(**sizes, vocab_size=8, max_position_embeddings=8)
    )


def mixtral() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    return MixtralForCausalLM(
        MixtralConfig(**sizes, num_key_value_heads=1, vocab_size=8, num_local_experts=2)
    )


def t5() -> torch.nn.Module:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8, vocab_size=8)
    )


class Convolutions(torch.nn.Module):  # type: ignore[misc]
    """Layers that transformers' language models lack."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.nn.Conv2d(4, 8, 3)
        self.groups = torch.nn.Conv2d(8, 8, 3, groups=2)
        self.attention = torch.nn.MultiheadAttention(8, 2)


def convolutions() -> torch.nn.Module:
    torch.manual_seed(0)
    return Convolutions()


def saved(
    root: Path, config: Any, base: Callable[[], torch.nn.Module] = llama, *, trained: bool = True
) -> dict[str, torch.Tensor]:
    """Save a new adapter, or one in which every trainable number changed, and return its
    tensors.
    """
    model = peft.get_peft_model(base(), config)
    if trained:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_()
    model.save_pretrained(str(root))
    return dict(load_file(root / NAME))


def lora(root: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Save a trained LoRA of two modules in each of two layers."""
    return saved(
        root, peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"]} | settings)
    )


def write(root: Path, tensors: Tensors) -> None:
    """Replace the tensors of an adapter."""
    save_file(
        {key: value.clone().contiguous() for key, value in tensors.items()},
        root / NAME,
        metadata={"format": "pt"},
    )


def renamed(rename: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    """Return a damage that changes each key."""
    return lambda tensors: {rename(key): value for key, value in tensors.items()}


def with_name(name: str) -> Callable[[str], str]:
    """Return what adds the adapter's name to a key, as PEFT has it in memory."""
    return lambda key: f"{key.removesuffix('.weight')}.{name}.weight"


def live(root: Path, tensors: Tensors, base: Callable[[], torch.nn.Module] = llama) -> str:
    """Return how many of these tensors PEFT loads from a folder, or the class of its error."""
    try:
        model = peft.PeftModel.from_pretrained(base(), str(root))
    except (RuntimeError, KeyError, ValueError) as error:
        return type(error).__name__
    loaded = peft.get_peft_model_state_dict(model)
    equal = sum(
        key in loaded and loaded[key].shape == value.shape and torch.equal(loaded[key], value)
        for key, value in tensors.items()
    )
    return f"{equal} of {len(tensors)}"


def copied(root: Path, name: str) -> Path:
    """Return a copy of a folder next to it."""
    shutil.copytree(root, root.parent / name)
    return root.parent / name
