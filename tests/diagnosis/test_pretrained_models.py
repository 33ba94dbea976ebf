"""Folders for ``from_pretrained``, healthy and damaged: ``check`` against what transformers makes
of them.
"""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
)
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ckptfix import check, repair
from ckptfix.checkpoint import architectures
from ckptfix.diagnosis.loads.pretrained_models import _FEW, _REMOVED_BY_LOADS
from tests.diagnosis.test_trainer_neighbours import Begin
from tests.diagnosis.test_trainer_states import trainer_in
from tests.sampling import is_exhaustive, sampled
from tests.tiny_models import NAME, Tensors, load, reconfigure, small, tensors_of, tiny, write

pytestmark = pytest.mark.filterwarnings("ignore")

CLASSES = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM",
    "MixtralForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM",
    "BloomForCausalLM", "FalconForCausalLM", "PhiForCausalLM", "Gemma2ForCausalLM",
    "DeepseekV3ForCausalLM", "MambaForCausalLM", "AlbertForMaskedLM", "BertForMaskedLM",
    "RobertaForSequenceClassification", "DistilBertForMaskedLM", "DebertaV2ForMaskedLM",
    "ElectraForPreTraining", "T5ForConditionalGeneration", "BartForConditionalGeneration",
    "WhisperForConditionalGeneration", "CLIPModel", "ViTForImageClassification",
    "MllamaForConditionalGeneration", "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
)  # fmt: skip

PREFIXES = ("module.", "_orig_mod.", "base_model.model.", "module._orig_mod.")

CODES = {"dead-weights", "mismatched-config"}


def saved(root: Path, name: str = "LlamaForCausalLM", **settings: Any) -> dict[str, torch.Tensor]:
    tiny(name, **settings).save_pretrained(root)
    return tensors_of(root)


def told(root: Path) -> list[tuple[str, str]]:
    return [
        (finding.code, finding.severity.value)
        for finding in check(root).findings
        if finding.code in CODES
    ]


def unchecked(root: Path) -> list[str]:
    return [words for words in check(root).not_checked if "config.json against" in words]


@pytest.mark.parametrize("name", sampled(CLASSES))
def test_each_class_as_it_is_saved_and_behind_a_prefix(name: str, tmp_path: Path) -> None:
    tensors = saved(tmp_path, name)
    assert load(tmp_path) == "complete"
    assert check(tmp_path).findings == ()
    assert unchecked(tmp_path) == []
    write(tmp_path, {f"module.{key}": each for key, each in tensors.items()})
    assert load(tmp_path) != "complete"
    assert told(tmp_path) == [("dead-weights", "error")]


@pytest.mark.parametrize(
    ("prefix", "form"),
    [*((prefix, "one file") for prefix in PREFIXES), ("module.", "shards"), ("module.", "torch")],
)
def test_prefixes_in_every_form(prefix: str, form: str, tmp_path: Path) -> None:
    tensors = {f"{prefix}{key}": each for key, each in saved(tmp_path).items()}
    write(tmp_path, tensors)
    if form == "torch":
        (tmp_path / NAME).unlink()
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    elif form == "shards":
        in_shards(tmp_path, tensors)
    assert load(tmp_path) == "21 random, 21 unused"
    assert told(tmp_path) == [("dead-weights", "error")]


def in_shards(root: Path, tensors: Tensors) -> None:
    (root / NAME).unlink()
    weight_map: dict[str, str] = {}
    for number, keys in enumerate((list(tensors)[:9], list(tensors)[9:]), start=1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({key: tensors[key].clone() for key in keys}, root / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(keys, shard)
    size = sum(each.nbytes for each in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (root / f"{NAME}.index.json").write_text(json.dumps(index))


def without(*parts: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {
        key: each for key, each in tensors.items() if not any(part in key for part in parts)
    }


ERROR, WARNING = ("mismatched-config", "error"), ("mismatched-config", "warning")

DAMAGES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str, list[tuple[str, str]]]] = {
    "more layers in the config": ("LlamaForCausalLM", {"num_hidden_layers": 4}, (), "18 random, 0 unused", [ERROR]),
    "fewer layers in the config": ("LlamaForCausalLM", {"num_hidden_layers": 1}, (), "0 random, 9 unused", [WARNING]),
    "no last layer": ("LlamaForCausalLM", {}, ("layers.1.",), "9 random, 0 unused", [ERROR]),
    "no first layer": ("LlamaForCausalLM", {}, ("layers.0.",), "9 random, 0 unused", [ERROR]),
    "another vocabulary": ("LlamaForCausalLM", {"vocab_size": 70}, (), "RuntimeError", [ERROR]),
    "another name of the attribute": ("GPT2LMHeadModel", {"n_layer": 3}, (), "12 random, 0 unused", [ERROR]),
    "fewer positions": ("GPT2LMHeadModel", {"n_positions": 32}, (), "RuntimeError", [ERROR]),
    "another hidden size": ("BertForMaskedLM", {"hidden_size": 24}, (), "RuntimeError", [ERROR]),
    "the hidden size of a former config": ("GPT2LMHeadModel", {"n_embd": 24}, (), "RuntimeError", [ERROR]),
    "a hidden size that another tensor has": ("LlamaForCausalLM", {"hidden_size": 32}, (), "RuntimeError", [ERROR]),
    "another size of the embedding": ("ElectraForPreTraining", {"embedding_size": 32}, (), "RuntimeError", [ERROR]),
    "a setting of another class": ("LlamaForCausalLM", {"d_model": 24}, (), "complete", []),
    "no experts": ("MixtralForCausalLM", {}, ("experts.1.",), "RuntimeError", [ERROR]),
    "an untied head": ("LlamaForCausalLM", {}, (), "RuntimeError", [ERROR]),
    "more experts": ("MixtralForCausalLM", {"num_local_experts": 4}, (), "RuntimeError", [ERROR, ERROR]),
    "layers of a decoder": (
        "T5ForConditionalGeneration", {"num_decoder_layers": 3}, (), "13 random, 0 unused", [ERROR],
    ),
    "layers of images": (
        "CLIPModel", {"vision_config__num_hidden_layers": 3}, (), "16 random, 0 unused", [ERROR],
    ),
    "groups of ALBERT": ("AlbertForMaskedLM", {"num_hidden_groups": 2}, (), "16 random, 0 unused", [ERROR]),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_sizes_and_numbers(name: str, tmp_path: Path) -> None:
    cls, config, lost, truth, findings = DAMAGES[name]
    tensors = saved(tmp_path, cls)
    reconfigure(tmp_path, **config)
    if name == "an untied head":
        tensors["lm_head.weight"] = torch.ones(70, 16)
    write(tmp_path, without(*lost)(tensors))
    assert load(tmp_path) == truth
    assert told(tmp_path) == findings


@pytest.mark.parametrize("name", ["DeepseekV4ForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_layer_types_of_another_length(name: str, more: int, tmp_path: Path) -> None:
    saved(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    types = config.get("layer_types", ["full_attention"] * 2)
    reconfigure(tmp_path, layer_types=[types[0]] * (2 + more))
    is_loaded = load(tmp_path) == "complete"
    assert is_loaded == (not more or (more > 0 and name.startswith("Deep")))
    assert told(tmp_path) == ([] if is_loaded else [ERROR])


def test_the_advice_for_removed_layers_leads_to_a_load(tmp_path: Path) -> None:
    write(tmp_path, without("layers.1.")(saved(tmp_path, "Qwen2ForCausalLM")))
    (finding,) = check(tmp_path).findings
    assert "correct num_hidden_layers and layer_types (one item per layer)" in finding.advice
    reconfigure(tmp_path, num_hidden_layers=1)
    assert load(tmp_path).endswith("Error")
    assert told(tmp_path) == [ERROR]
    reconfigure(tmp_path, layer_types=["full_attention"])
    assert load(tmp_path) == "complete"
    assert check(tmp_path).findings == ()


def test_weights_in_a_file_that_the_config_names(tmp_path: Path) -> None:
    write(tmp_path, without("layers.1.")(saved(tmp_path)))
    reconfigure(tmp_path, transformers_weights="other.safetensors")
    assert load(tmp_path) == "FileNotFoundError"
    assert told(tmp_path) == []
    assert any("transformers_weights" in words for words in unchecked(tmp_path))


QWEN = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "vocab_size": 64}  # fmt: skip

HEALTHY: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "one group of ALBERT for all layers": ("AlbertForMaskedLM", {}, {"num_hidden_layers": 12}, ()),
    "a tied head": ("LlamaForCausalLM", {"tie_word_embeddings": True}, {}, ()),
    "biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, {}, ()),
    "a vocabulary of two attributes": (
        "T5ForConditionalGeneration",
        {"num_decoder_layers": 1},
        {},
        (),
    ),
    "an attribute that the config leaves out": (
        "GPT2LMHeadModel",
        {"n_positions": 1024},
        {},
        ("n_positions",),
    ),
    "an attribute that follows another": (
        "T5ForConditionalGeneration",
        {"num_layers": 3, "num_decoder_layers": 3},
        {},
        ("num_decoder_layers",),
    ),
    "a sub-config of another class": (
        "LlavaForConditionalGeneration",
        {"text_config": {**QWEN, "model_type": "qwen2"}},
        {},
        (),
    ),
    "an older version": ("LlamaForCausalLM", {}, {"transformers_version": "4.31.0"}, ()),
    "factorized embeddings": ("AlbertForMaskedLM", {"embedding_size": 8}, {}, ()),
    "embeddings of a size of their own": ("DebertaV2ForMaskedLM", {"embedding_size": 8}, {}, ()),
    "projected embeddings": ("OPTForCausalLM", {"word_embed_proj_dim": 8}, {}, ()),
    "embeddings of the default size": (
        "ElectraForPreTraining",
        {"embedding_size": 128},
        {},
        ("embedding_size",),
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_twins(name: str, tmp_path: Path) -> None:
    cls, settings, changed, left_out = HEALTHY[name]
    saved(tmp_path, cls, **settings)
    reconfigure(tmp_path, **changed)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: each for key, each in config.items() if key not in left_out}))
    assert load(tmp_path) == "complete"
    assert told(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "settings", "compared"),
    [
        ("LlamaForCausalLM", {}, "embedding rows and embedding columns"),
        ("CLIPModel", {}, "experts and embedding rows"),
        ("ElectraForPreTraining", {"embedding_size": None}, "experts and embedding rows"),
        ("LlamaForCausalLM", {"quantization_config": {}}, "layers and experts"),
    ],
)
def test_sizes_that_are_said_to_be_compared(
    name: str, settings: dict[str, Any], compared: str, tmp_path: Path
) -> None:
    """The line named the hidden size of every model."""
    saved(tmp_path, name)
    reconfigure(tmp_path, **settings)
    (words,) = (words for words in check(tmp_path).not_checked if "against its class" in words)
    assert f"{compared} (keys, shapes, settings)" in words


def test_two_configs_of_the_text(tmp_path: Path) -> None:
    """The first folders of CLIP have both, and transformers takes text_config_dict."""
    saved(tmp_path, "CLIPModel")
    config = json.loads((tmp_path / "config.json").read_text())
    reconfigure(tmp_path, text_config_dict=config["text_config"], text_config__num_hidden_layers=12)
    assert load(tmp_path) == "complete"
    assert told(tmp_path) == []


def test_resized_embeddings(tmp_path: Path) -> None:
    for name in ("LlamaForCausalLM", "MllamaForConditionalGeneration"):
        model = tiny(name)
        model.resize_token_embeddings(71, pad_to_multiple_of=16)
        model.save_pretrained(tmp_path / name)
        is_loaded = load(tmp_path / name) == "complete"
        assert (told(tmp_path / name) == []) == is_loaded, name


def test_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    """DeepSeek's checkpoints have one layer more than the config says."""
    tensors = saved(tmp_path, "DeepseekV3ForCausalLM")
    beyond = {
        key.replace("layers.1.", "layers.2."): each
        for key, each in tensors.items()
        if "layers.1." in key
    }
    write(tmp_path, {**tensors, **beyond, "model.layers.2.eh_proj.weight": torch.ones(16, 32)})
    assert load(tmp_path).startswith("0 random")
    assert told(tmp_path) == []


def test_layers_and_experts_beyond_those_of_the_config(tmp_path: Path) -> None:
    """40,000 of them took 20 s: each layer was compared with all keys."""
    saved(tmp_path, "Qwen3MoeForCausalLM")
    surplus = {
        f"model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight": torch.ones(1)
        for layer in range(200)
        for expert in range(100)
    }
    write(tmp_path, {**tensors_of(tmp_path), **surplus})
    begin = time.process_time()
    assert WARNING in told(tmp_path)
    assert time.process_time() - begin < 10


def test_a_model_of_the_trainer_and_one_next_to_save_state(tmp_path: Path) -> None:
    tensors = {f"module.{key}": each for key, each in saved(tmp_path).items()}
    write(tmp_path, tensors)
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"global_step": 1, "epoch": 1.0, "log_history": []}))
    assert told(tmp_path) == [("dead-weights", "error")]
    state.unlink()
    torch.save({"step": 0, "random_state": (3, (1, 2), None)}, tmp_path / "random_states_0.pkl")
    assert told(tmp_path) == [("dead-weights", "note")]


@pytest.mark.parametrize("config", [{"num_hidden_layers": 3}, {"vocab_size": 70}])
def test_a_model_that_the_script_changed_next_to_its_states(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """A resume loads into the model of the script, such as one without its last layers."""
    saved(tmp_path)
    reconfigure(tmp_path, **config)
    assert told(tmp_path) == [ERROR]
    for name, content in (
        ("trainer_state.json", {"global_step": 1, "epoch": 1.0, "log_history": []}),
        ("random_states_0.pkl", {"step": 0, "random_state": (3, (1, 2), None)}),
    ):
        if name.endswith("json"):
            (tmp_path / name).write_text(json.dumps(content))
        else:
            torch.save(content, tmp_path / name)
        assert told(tmp_path) == [("mismatched-config", "note")]
        (tmp_path / name).unlink()


UNKNOWN: dict[str, dict[str, Any]] = {
    "code of its own": {"auto_map": {"AutoModel": "modeling.Mine"}},
    "a class of nobody": {"architectures": ["MineForCausalLM"]},
    "another model type": {"model_type": "mine"},
    "no class": {"architectures": []},
    "two classes": {"architectures": ["LlamaForCausalLM", "LlamaModel"]},
    "a number": {"architectures": [1]},
    "no name": {"architectures": ["\x1b[31m"]},
    "a long name": {"architectures": ["A" * 1000]},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_the_table_does_not_know_is_not_checked(name: str, tmp_path: Path) -> None:
    write(tmp_path, {f"module.{key}": each for key, each in saved(tmp_path).items()})
    reconfigure(tmp_path, **UNKNOWN[name])
    assert told(tmp_path) == []
    (words,) = unchecked(tmp_path)
    assert "ckptfix check --load" in words


@pytest.mark.parametrize("value", ["4", -1, None, 1 << 60, [], 1.5, True])
def test_configs_with_odd_values(value: Any, tmp_path: Path) -> None:
    saved(tmp_path)
    reconfigure(tmp_path, vocab_size=value, num_hidden_layers=value, tie_word_embeddings=value)
    assert told(tmp_path) == []


def test_weights_of_a_quantized_model(tmp_path: Path) -> None:
    """Methods such as GPTQ pack rows, and add tensors to a module."""
    tensors = saved(tmp_path)
    packed = {
        key.replace("q_proj.weight", "q_proj.qweight"): (
            each[: len(each) // 2] if "q_proj" in key else each
        )
        for key, each in tensors.items()
    }
    write(tmp_path, {**packed, "model.layers.0.self_attn.q_proj.scales": torch.ones(2)})
    reconfigure(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4}, vocab_size=70)
    assert told(tmp_path) == []


def test_one_of_two_families_is_compared(tmp_path: Path) -> None:
    """transformers takes the safetensors file."""
    tensors = saved(tmp_path)
    torch.save(
        {f"module.{key}": each for key, each in tensors.items()}, tmp_path / "pytorch_model.bin"
    )
    assert load(tmp_path) == "complete"
    assert told(tmp_path) == []


def test_prefixes_with_other_keys(tmp_path: Path) -> None:
    """A head of the script's own is no class's, and all weights stay random."""
    tensors = {f"module.{key}": each for key, each in saved(tmp_path).items()}
    write(tmp_path, {**tensors, "module.v_head.weight": torch.ones(1, 16)})
    assert load(tmp_path) == "21 random, 22 unused"
    assert told(tmp_path) == [("dead-weights", "error")]
    write(tmp_path, {**tensors, **{f"module.mine.{number}": torch.ones(1) for number in range(5)}})
    assert load(tmp_path) == "21 random, 26 unused"
    assert told(tmp_path) == [("dead-weights", "error")]
    buffers = {
        f"module.model.layers.{number}.self_attn.rotary_emb.inv_freq": torch.ones(4)
        for number in (0, 1)
    }
    write(tmp_path, {**tensors, **buffers, "module.v_head.weight": torch.ones(1, 16)})
    assert told(tmp_path) == [("dead-weights", "error")]
    twice = {f"{'module.' if 'layers' in key else ''}{key}": each for key, each in tensors.items()}
    write(tmp_path, twice)
    assert told(tmp_path) == [("dead-weights", "error")]


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod."])
def test_a_model_of_prompt_learning_has_no_tuner_in_its_keys(wrapper: str, tmp_path: Path) -> None:
    """A repair took ``base_model.model.`` off the layers and left ``base_model.lm_head.weight``."""
    tensors = saved(tmp_path, num_hidden_layers=6)
    wrapped = {f"{wrapper}base_model.{key}": each for key, each in tensors.items()}
    extra = {f"{wrapper}prompt_encoder.default.embedding.weight": torch.ones(4, 16)}
    write(tmp_path, {**wrapped, **extra})
    assert told(tmp_path) == [("dead-weights", "error")]
    assert repair(tmp_path).status == 0
    assert load(tmp_path) == "0 random, 1 unused"
    assert set(tensors) < set(tensors_of(tmp_path))


def in_peft(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return what a PeftModel has around a model: every linear layer is a base layer with two
    matrices.
    """
    wrapped = {f"base_model.model.{key}": each for key, each in tensors.items()}
    for key in [key for key in wrapped if key.endswith("_proj.weight")]:
        module = key.removesuffix(".weight")
        wrapped[f"{module}.base_layer.weight"] = wrapped.pop(key)
        wrapped |= {f"{module}.lora_{part}.default.weight": torch.ones(4, 4) for part in "AB"}
    return wrapped


FOREIGN: dict[str, Callable[[Tensors], dict[str, torch.Tensor]]] = {
    "a LightningModule": lambda tensors: {f"net.{key}": each for key, each in tensors.items()},
    "a wrapper with a head of its own": lambda tensors: {
        **{f"net.{key}": each for key, each in tensors.items() if key != "lm_head.weight"},
        "lm_head.weight": tensors["lm_head.weight"],
        "loss.weight": torch.ones(4),
    },
    "a PeftModel": in_peft,
    "another class": lambda tensors: {
        f"blocks.{at}.w": each for at, each in enumerate(tensors.values())
    },
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_without_a_key_of_their_class(name: str, tmp_path: Path) -> None:
    write(tmp_path, FOREIGN[name](saved(tmp_path)))
    assert load(tmp_path).startswith(("21 random", "20 random"))
    (finding,) = check(tmp_path).findings
    assert (finding.code, finding.severity.value, finding.action.value) == (
        "dead-weights",
        "error",
        "tell",
    )
    torch.save({"step": 0, "random_state": (3, (1, 2), None)}, tmp_path / "random_states_0.pkl")
    assert told(tmp_path) == [("dead-weights", "note")]


def injected(model: Any) -> Any:
    """Return a model with LoRA inside: it stays of its class, and saves the keys that it has."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[1])
    return peft.inject_adapter_in_model(config, model)


DEEPER: dict[str, tuple[str, Callable[[str], bool], str]] = {
    "a PeftModel": ("base_model.model.", lambda key: True, "21 random, 23 unused"),
    "one without its adapter": ("base_model.model.", lambda key: "lora_" not in key, "21 random, 21 unused"),
    "a model with LoRA": ("", lambda key: True, "1 random, 3 unused"),
    "the same without its adapter": ("", lambda key: "lora_" not in key, "1 random, 1 unused"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEPER)
def test_weights_of_modules_that_peft_adapted(name: str, tmp_path: Path) -> None:
    """A repair took ``base_model.model.`` away, and said that it is verified: base_layer stayed."""
    prefix, is_kept, lost = DEEPER[name]
    saved(tmp_path)
    tensors = injected(tiny("LlamaForCausalLM")).state_dict()
    write(tmp_path, {prefix + key: each for key, each in tensors.items() if is_kept(key)})
    assert load(tmp_path) == lost
    (finding,) = check(tmp_path).findings
    assert (finding.code, finding.severity.value) == ("dead-weights", "error")
    assert f"from_pretrained ignores {21 if prefix else 1} of " in str(finding)
    assert "expected keys like 'model.layers.1.self_attn.q_proj.weight'" in str(finding)
    assert repair(tmp_path).steps == ()
    adapted = injected(tiny("LlamaForCausalLM"))
    if not prefix:
        assert not adapted.load_state_dict(tensors_of(tmp_path), strict=False).unexpected_keys


def test_a_trainer_of_a_model_with_an_injected_adapter(tmp_path: Path) -> None:
    def begins_with(checkpoint: Path | None) -> Tensors:
        trainer, begin = trainer_in(tmp_path), Begin()
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["query"]), trainer.model)
        trainer.add_callback(begin)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        return begin.weights

    begins_with(None)
    root = tmp_path / "checkpoint-4"
    begun = begins_with(root)
    assert all(torch.equal(begun[key], each) for key, each in tensors_of(root).items())
    assert load(root) == "2 random, 4 unused"
    assert told(root) == [("dead-weights", "note")]


@pytest.mark.parametrize(
    "name", ["MixtralForCausalLM", "LlavaForConditionalGeneration", "CLIPTextModel"]
)
def test_a_wrapper_around_a_class_whose_keys_a_load_renames(name: str, tmp_path: Path) -> None:
    write(tmp_path, {f"net.{key}": each for key, each in saved(tmp_path, name).items()})
    random, _, unused = load(tmp_path).partition(" random, ")
    assert unused == f"{random} unused"
    assert told(tmp_path) == [("dead-weights", "error")]


def test_keys_that_a_load_renames_are_not_told(tmp_path: Path) -> None:
    """Before transformers 5 the files of CLIPTextModel had ``text_model.`` before every key."""
    tensors = saved(tmp_path, "CLIPTextModel")
    write(tmp_path, {f"text_model.{key}": each for key, each in tensors.items()})
    assert load(tmp_path) == "complete"
    assert told(tmp_path) == []
    assert any("may rename" in words for words in unchecked(tmp_path))


def test_a_composite_of_other_models_is_not_told(tmp_path: Path) -> None:
    """The table has EncoderDecoderModel of two BERT."""
    encoder, decoder = (
        tiny("GPT2LMHeadModel").transformer,
        tiny("GPT2LMHeadModel", add_cross_attention=True),
    )
    transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder).save_pretrained(tmp_path)
    assert load(tmp_path) == "complete"
    assert told(tmp_path) == []
    assert any("may rename" in words for words in unchecked(tmp_path))


def test_all_types_whose_keys_a_load_renames_are_known() -> None:
    """A file in which transformers renames every key has none of the table."""
    types = {model_type for block in architectures._index()["blocks"] for model_type in block[2:]}
    for model_type in types:
        start, size = next(
            block[:2] for block in architectures._index()["blocks"] if model_type in block[2:]
        )
        for name, record in architectures._block(start, size)[model_type].items():
            is_converted = any(map(get_checkpoint_conversion_mapping, (name, model_type)))
            is_known = "inside" in record or model_type in architectures.RENAMED
            assert is_known or not is_converted, (model_type, name)


def on_meta(name: str) -> Any:
    """Return a model without values: a tiny one, or of the default sizes where those do not fit
    together.
    """
    cls = getattr(transformers, name)
    with torch.device("meta"):
        try:
            return cls(cls.config_class.from_dict(small(cls.config_class().to_dict())))
        except Exception:
            return cls(cls.config_class())


@pytest.mark.slow
def test_all_first_segments_that_a_load_removes_are_known() -> None:
    """A wrapper of such a name is none: the load finds more keys behind it than a class has by
    accident.
    """
    removed: dict[str, str] = {}
    for block in sampled(architectures._index()["blocks"]):
        for model_type in block[2:]:
            for name, record in architectures._block(*block[:2])[model_type].items():
                if "inside" not in record and model_type not in architectures.RENAMED:
                    continue
                known = architectures.architecture_of(
                    {"architectures": [name], "model_type": model_type}
                )
                assert isinstance(known, architectures.Architecture)
                model = on_meta(name)
                mapping, state = get_model_conversion_mapping(model), model.state_dict()
                renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
                converters = [each for each in mapping if isinstance(each, WeightConverter)]
                sources = " ".join(source for each in mapping for source in each.source_patterns)
                for first in {
                    *re.findall(r"[a-z]\w+", sources.replace("\\", " ")),
                    *_REMOVED_BY_LOADS,
                }:
                    keys = [f"{first}.{key}".replace("*", "0") for key in record["keys"]]
                    found = sum(
                        rename_source_key(
                            key, renamings, converters, model.base_model_prefix, state
                        )[0]
                        in state
                        for key in keys
                        if not known.fits(key)
                    )
                    if _FEW * found > len(keys):
                        removed[first] = name
    assert removed.keys() <= _REMOVED_BY_LOADS, removed
    assert not is_exhaustive() or removed.keys() == _REMOVED_BY_LOADS


def test_an_attribute_that_nobody_knows_is_not_checked(tmp_path: Path) -> None:
    saved(tmp_path, "CLIPModel")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["text_config"]["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_version": "4.40.0"}))
    assert told(tmp_path) == []
    (words,) = unchecked(tmp_path)
    assert "text_config.num_hidden_layers" in words
