"""The table of transformers' classes: what it says, and that it is what the installed library
says.
"""

import json
from typing import Any

import pytest
import transformers

from ckptfix.checkpoint.architectures import (
    TABLE,
    Architecture,
    Unknown,
    architecture_of,
    knows_defaults,
    pattern_of,
    table_version,
)
from tests import architectures

pytestmark = pytest.mark.filterwarnings("ignore")


def known(name: str, model_type: str, **config: Any) -> Architecture:
    answer = architecture_of({"architectures": [name], "model_type": model_type, **config})
    assert isinstance(answer, Architecture)
    return answer


def sizes(name: str, model_type: str) -> dict[str, str]:
    """Return what follows which attribute, in words."""
    each = known(name, model_type)
    places = {
        **each.numbers,
        **{f"{pattern} {dimension}": size for (pattern, dimension), size in each.rows.items()},
    }
    return {
        place: f"{size.attribute}{size.offset or '':+}" if size.offset else str(size.attribute)
        for place, size in places.items()
    }


@pytest.mark.parametrize(
    ("name", "model_type", "place", "size"),
    [
        ("LlamaForCausalLM", "llama", "model.layers.*", "num_hidden_layers"),
        ("LlamaForCausalLM", "llama", "lm_head.weight 0", "vocab_size"),
        ("GPT2LMHeadModel", "gpt2", "transformer.h.*", "n_layer"),
        ("AlbertForMaskedLM", "albert", "albert.encoder.albert_layer_groups.*", "num_hidden_groups"),
        ("OPTForCausalLM", "opt", "model.decoder.embed_positions.weight 0", "max_position_embeddings+2"),
        (
            "MllamaForConditionalGeneration", "mllama",
            "language_model.model.embed_tokens.weight 0", "text_config.vocab_size+8",
        ),
        ("MllamaForConditionalGeneration", "mllama", "language_model.lm_head.weight 0", "text_config.vocab_size"),
        (
            "MusicgenForConditionalGeneration", "musicgen",
            "decoder.model.decoder.embed_tokens.*.weight 0", "decoder.vocab_size+1",
        ),
        ("T5ForConditionalGeneration", "t5", "decoder.block.*", "num_decoder_layers"),
        ("MixtralForCausalLM", "mixtral", "model.layers.*.mlp.experts.*", ""),
        ("MixtralForCausalLM", "mixtral", "model.layers.*.block_sparse_moe.experts.*", "num_local_experts"),
        ("DeepseekV3ForCausalLM", "deepseek_v3", "model.layers.*.mlp.experts.*", "n_routed_experts"),
        # Another flag or id changes these, too: pad_token_id, remove_last_layer, eval_idx.
        ("FSMTModel", "fsmt", "encoder.embed_positions.weight 0", ""),
        ("FSMTModel", "fsmt", "encoder.embed_tokens.weight 0", "src_vocab_size"),
        ("BridgeTowerModel", "bridgetower", "vision_model.visual.transformer.resblocks.*", ""),
        ("Deimv2Model", "deimv2", "decoder.layers.*", ""),
        ("IdeficsModel", "idefics", "gated_cross_attn_layers.*", ""),
        ("BltModel", "blt", "local_decoder.cross_attn_layers.*", ""),
    ],
)  # fmt: skip
def test_sizes_follow_attributes(name: str, model_type: str, place: str, size: str) -> None:
    assert sizes(name, model_type).get(place, "") == size


def test_ties_and_heads() -> None:
    llama = known("LlamaForCausalLM", "llama")
    assert (llama.head, llama.embedding) == ("lm_head.weight", "model.embed_tokens.weight")
    assert llama.flags == {"": False}
    assert llama.ties == {"": {"lm_head.weight": "model.embed_tokens.weight"}}
    assert llama.is_tied({"tie_word_embeddings": True}, "") is True
    assert llama.is_tied({"transformers_version": table_version()}, "") is False
    assert llama.is_tied({}, "") is None
    assert known("GPT2LMHeadModel", "gpt2").flags == {"": True}
    assert "decoder.embed_tokens.weight" in known("T5ForConditionalGeneration", "t5").ties[""]


@pytest.mark.parametrize(
    ("version", "answer"),
    [(None, False), ("4.57.3", False), ("5.0.0", True), ("5.23.0", True), ("5.23.0.dev0", True), ("5.99.0", False),
     ("6.0", False), ("", False), ("5", False), (5, False), ("٥.1", False)],
)  # fmt: skip
def test_defaults_of_the_version_that_saved(version: object, answer: bool) -> None:
    assert knows_defaults({"transformers_version": version}) is answer


def test_what_the_table_does_not_know() -> None:
    assert isinstance(
        architecture_of({"architectures": ["LlamaForCausalLM"], "model_type": "gpt2"}), Unknown
    )
    assert pattern_of("a.0.b.10.1x.*") == "a.*.b.*.1x.*"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "AlbertForMaskedLM", "T5ForConditionalGeneration", "FSMTModel"]
)
def test_the_table_is_what_the_command_records(name: str) -> None:
    if transformers.__version__ != table_version():
        pytest.skip("the table is of another version")
    cls = getattr(transformers, name)
    record = json.loads(json.dumps(architectures.described(cls)))
    table = architectures.packed({name: record}, table_version())
    assert len(table) < TABLE.stat().st_size
    assert (
        frozenset((*record["keys"], *record.get("inside", ()))) == known(name, record["type"]).keys
    )
    assert record["numbers"].keys() == known(name, record["type"]).numbers.keys()
    rows = {f"{key} {dimension}" for key, dimension in known(name, record["type"]).rows}
    assert record["rows"].keys() == rows
