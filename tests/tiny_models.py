"""Tiny models of transformers' classes, from their default configs with small sizes, and what a load makes of them."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

NAME = "model.safetensors"

Tensors = Mapping[str, torch.Tensor]

_SMALL = {
    2: (
        "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers num_blocks "
        "num_decoder_layers depth num_attention_heads n_head n_heads num_heads encoder_attention_heads num_kv_heads "
        "decoder_attention_heads num_key_value_heads num_local_experts num_experts n_routed_experts moe_num_experts "
        "attention_heads num_experts_per_tok moe_topk top_k vision_layers num_channels_ n_group "
    ),
    8: "head_dim kv_channels d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim kv_lora_rank q_lora_rank patch_size",
    16: (
        "hidden_size d_model n_embd dim d_ff intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim "
        "moe_intermediate_size "
        "word_embed_proj_dim embedding_size projection_dim image_size n_inner ffn_hidden_size "
        "shared_expert_intermediate_size "
        "hidden_dim embed_dim feed_forward_hidden_size encoder_hidden_size decoder_hidden_size"
    ),
    64: "vocab_size max_position_embeddings n_positions n_ctx max_source_positions max_target_positions",
}  # fmt: skip
_SIZES = {name: size for size, names in _SMALL.items() for name in names.split()}

_LARGEST = 3_000_000
"""Parameters of a tiny model."""


def tiny_config(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of a config with small sizes."""
    settings: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            settings[name] = {**tiny_config(value), "model_type": value.model_type}
        elif name in _SIZES and type(value) is int:
            settings[name] = min(value, _SIZES[name])
        elif name.endswith("_token_id") and type(value) is int:
            settings[name] = min(value, 1)
        elif name in ("first_k_dense_replace", "n_group", "topk_group") and value:
            settings[name] = 1
    return settings


def tiny(name: str, **settings: Any) -> Any:
    """Return a small model of a class. Raises what its class raises for such sizes, ValueError for a large one."""
    cls = getattr(transformers, name)
    config = cls.config_class(**{**tiny_config(cls.config_class()), **settings})
    with torch.device("meta"):
        size = sum(each.numel() for each in cls(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    return cls(config)


def tensors_of(root: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in the one file of a folder."""
    return dict(load_file(root / NAME))


def write(root: Path, tensors: Tensors) -> None:
    """Replace the tensors of a folder."""
    save_file(
        {key: each.clone().contiguous() for key, each in tensors.items()}, root / NAME, {"format": "pt"}
    )


def reconfigure(root: Path, **settings: Any) -> None:
    """Change the config in a folder; a name with ``__`` is of a config in it."""
    path = root / "config.json"
    config = json.loads(path.read_text())
    for name, value in settings.items():
        *parts, last = name.split("__")
        part = config
        for each in parts:
            part = part[each]
        part[last] = value
    path.write_text(json.dumps(config))


def load(root: Path) -> str:
    """Return what transformers makes of a folder: ``complete``, or how many weights stay random, or its error."""
    (name,) = json.loads((root / "config.json").read_text())["architectures"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, info = getattr(transformers, name).from_pretrained(root, output_loading_info=True)
    except Exception as error:
        return type(error).__name__
    missing, unexpected = len(info["missing_keys"]), len(info["unexpected_keys"])
    return f"{missing} random, {unexpected} unused" if missing or unexpected else "complete"
