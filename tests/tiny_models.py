"""Tiny models of transformers' classes, from their default configs with small sizes, and what a
load makes of them.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

NAME = "model.safetensors"

Tensors = Mapping[str, torch.Tensor]

_SIZES = {
    16: (
        "hidden_size d_model n_embd embed_dim dim hidden_dim d_hidden n_embed embedding_size "
        "encoder_hidden_size decoder_hidden_size projection_dim d_embed word_embed_proj_dim "
        "conv_dim decoder_hidden_dim mask_feature_size feature_size fpn_hidden_size "
        "projection_hidden_size out_hidden_size input_size audio_embed_dim vision_embed_dim "
        "text_hidden_size rnn_hidden_size lru_width vq_embed_dim codebook_dim pooler_hidden_size "
        "backbone_hidden_size encoder_hidden_dim bottleneck_features embed_channels "
        "cross_attention_hidden_size d_latent output_size xvector_output_dim classifier_proj_size "
        "hidden_channels base_channels"
    ),
    32: (
        "intermediate_size ffn_dim d_ff d_inner n_inner encoder_ffn_dim decoder_ffn_dim mlp_dim "
        "dim_feedforward moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size "
        "expert_ffn_hidden_size hidden_mlp_dim encoder_dim_feedforward decoder_dim_feedforward "
        "moe_shared_expert_intermediate_size expert_intermediate_size mlp_hidden_size"
    ),
    2: (
        "num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers "
        "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
        "num_heads num_decoder_layers num_encoder_layers decoder_num_heads num_attention_layers "
        "num_encoder_attention_heads num_decoder_attention_heads num_key_value_heads num_experts "
        "num_local_experts n_routed_experts num_experts_per_tok encoder_num_layers depth "
        "num_blocks predictor_num_hidden_layers predictor_num_attention_heads decoder_n_heads "
        "encoder_num_attention_heads decoder_num_attention_heads encoder_num_hidden_layers "
        "decoder_num_hidden_layers num_global_layers num_memory_blocks speech_encoder_layers "
        "speech_decoder_layers moe_num_experts"
    ),
    8: (
        "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim kv_lora_rank q_lora_rank d_kv "
        "attention_head_dim index_head_dim linear_key_head_dim linear_value_head_dim "
        "global_head_dim"
    ),
    64: (
        "vocab_size max_position_embeddings n_positions max_source_positions max_target_positions "
        "n_ctx max_2d_position_embeddings codebook_size max_seq_len max_sequence_length "
        "text_vocab_size audio_vocab_size entity_vocab_size decoder_vocab_size"
    ),
}
"""Largest value -> the usual names of sizes in a config that get it."""
_LIMITS = {name: limit for limit, names in _SIZES.items() for name in names.split()}

_LARGEST = 3_000_000
"""Parameters of a tiny model."""


def small(config: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a config of transformers with small sizes, also in the configs in it."""
    made: dict[Any, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            made[key] = small(value)
        elif type(value) is int and value > _LIMITS.get(key, value):
            made[key] = _LIMITS[key]
        elif str(key).endswith("_token_id") and isinstance(value, list):
            made[key] = [3]
        elif str(key).endswith("_token_id") and type(value) is int and value > 60:
            made[key] = 3
        elif key in ("layer_types", "mlp_layer_types", "kv_source_layers") and isinstance(
            value, list
        ):
            made[key] = value[:2]
        else:
            made[key] = value
    return made


def tiny(name: str, **settings: Any) -> Any:
    """Return a small model of a class. Raises what its class raises for such sizes, ValueError for
    a large one.
    """
    cls = getattr(transformers, name)
    config = cls.config_class.from_dict({**small(cls.config_class().to_dict()), **settings})
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
        {key: each.clone().contiguous() for key, each in tensors.items()},
        root / NAME,
        {"format": "pt"},
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
    """Return what transformers makes of a folder: ``complete``, or how many weights stay random, or
    its error.
    """
    (name,) = json.loads((root / "config.json").read_text())["architectures"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, info = getattr(transformers, name).from_pretrained(root, output_loading_info=True)
    except Exception as error:
        return type(error).__name__
    missing, unexpected = len(info["missing_keys"]), len(info["unexpected_keys"])
    return f"{missing} random, {unexpected} unused" if missing or unexpected else "complete"
