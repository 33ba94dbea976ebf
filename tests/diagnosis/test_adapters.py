"""Adapters of PEFT against the load: what PEFT brings to life of each damaged one, and healthy ones
of every kind.
"""

import json
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BartConfig, BartForSequenceClassification

from ckptfix import check
from ckptfix.cli import run
from ckptfix.diagnosis.findings.base import Resume
from tests.benchmarks.loads import OF_PEFT
from tests.diagnosis.builders import edit_json, verdict
from tests.repairs.builders import RANDOM_STATES
from tests.tiny_adapters import (
    CONFIG,
    NAME,
    Tensors,
    bert,
    convolutions,
    gpt2,
    live,
    llama,
    lora,
    mixtral,
    peft,
    renamed,
    saved,
    t5,
    tied_llama,
    with_name,
    write,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        key: each for key, each in tensors.items() if not any(part in key for part in parts)
    }


def narrowed(tensors: Tensors) -> Tensors:
    return {key: each[:2] if "lora_A" in key else each[:, :2] for key, each in tensors.items()}


def empty_tensors(tensors: Tensors) -> Tensors:
    return {key: torch.zeros(0) for key in tensors}


def in_first_layer(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return renamed(lambda key: change(key) if ".layers.0." in key else key)


def behind(prefix: str) -> Callable[[Tensors], Tensors]:
    return renamed(lambda key: prefix + key)


def instead(prefix: str) -> Callable[[Tensors], Tensors]:
    return renamed(lambda key: prefix + key.removeprefix("base_model.model."))


def several(tensors: Tensors) -> Tensors:
    return {
        with_name(name)(key): each for key, each in tensors.items() for name in ("draft", "main")
    }


def and_another(tensors: Tensors) -> Tensors:
    return {**tensors, **renamed(with_name("main"))(tensors)}


DEAD = ("dead-adapter", "error")
INCOMPLETE = ("incomplete-adapter", "error")

DAMAGES: dict[str, tuple[Callable[[Tensors], Tensors], str, tuple[str, str]]] = {
    "behind _orig_mod": (behind("_orig_mod."), "0 of 8", DEAD),
    "behind module": (behind("module."), "0 of 8", DEAD),
    "behind _forward_module": (behind("_forward_module."), "0 of 8", DEAD),
    "behind both": (behind("_orig_mod.module."), "0 of 8", DEAD),
    "behind module twice": (behind("module.module."), "0 of 8", DEAD),
    "in part behind module": (in_first_layer(lambda key: f"module.{key}"), "4 of 8", DEAD),
    "with a name": (renamed(with_name("default_0")), "0 of 8", DEAD),
    "with a name behind module": (
        renamed(lambda key: f"module.{with_name('x')(key)}"), "0 of 8", DEAD,
    ),
    "with two names": (several, "0 of 8", DEAD),
    # PEFT before 0.21 and transformers load none of these.
    "with the name default": (
        renamed(with_name("default")), "8 of 8", ("dead-adapter", "warning"),
    ),
    "in part with a name": (in_first_layer(with_name("x")), "4 of 8", ("dead-adapter", "warning")),
    "next to another adapter": (and_another, "8 of 8", ("dead-adapter", "note")),
    # transformers loads both, and a script that adapts an adapted model the second.
    "without the prefix": (instead(""), "0 of 8", ("dead-adapter", "note")),
    "with the prefix twice": (behind("base_model.model."), "0 of 8", ("dead-adapter", "note")),
    # No base has such keys.
    "with DDP around the base model": (instead("base_model.module.model."), "0 of 8", DEAD),
    "with a compiled base model": (instead("base_model._orig_mod.model."), "0 of 8", DEAD),
    "with module before the base": (
        instead("base_model.model.module."), "0 of 8", ("dead-adapter", "note"),
    ),
    "without base_model": (instead("model."), "0 of 8", ("dead-adapter", "note")),
    "with another name": (instead("_base_model.model."), "0 of 8", ("dead-adapter", "note")),
    "empty": (lambda tensors: {}, "0 of 8", INCOMPLETE),
    "of ZeRO-3": (empty_tensors, "RuntimeError", INCOMPLETE),
    "of another rank": (narrowed, "RuntimeError", ("mismatched-adapter", "error")),
    "without B": (without("lora_B"), "4 of 8", INCOMPLETE),
    "without A": (without("lora_A"), "4 of 8", INCOMPLETE),
    "without one B": (without("0.self_attn.q_proj.lora_B"), "7 of 8", INCOMPLETE),
    # A base without this module is as healthy.
    "without a target": (without("v_proj"), "4 of 8", ("incomplete-adapter", "note")),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_adapter(name: str, tmp_path: Path) -> None:
    damage, expected, finding = DAMAGES[name]
    tensors = lora(tmp_path)
    write(tmp_path, damage(tensors))
    assert live(tmp_path, tensors) == expected
    assert verdict(tmp_path) == [finding]
    assert run(["check", str(tmp_path)]) == (finding[1] != "note")


@pytest.mark.parametrize(
    "name", ["behind _orig_mod", "with a name", "of another rank", "without B"]
)
def test_a_damaged_adapter_in_a_file_of_torch(name: str, tmp_path: Path) -> None:
    damage, expected, finding = DAMAGES[name]
    tensors = lora(tmp_path)
    (tmp_path / NAME).unlink()
    torch.save(
        {key: each.clone() for key, each in damage(tensors).items()},
        tmp_path / "adapter_model.bin",
    )
    assert live(tmp_path, tensors) == expected
    assert verdict(tmp_path) == [finding]


TWO = ["q_proj", "v_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]

LORA = partial(peft.LoraConfig, target_modules=TWO)
OF_CONVOLUTIONS = partial(peft.LoraConfig, r=4)
HEADS = ["lm_head", "embed_tokens"]
PROMPTS: dict[str, Any] = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}

HEALTHY: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], Any]]] = {
    "LoRA": (llama, LORA),
    "DoRA": (llama, partial(LORA, use_dora=True)),
    "rsLoRA": (llama, partial(LORA, use_rslora=True)),
    "biases": (llama, partial(LORA, lora_bias=True)),
    "embeddings": (llama, partial(LORA, target_modules=["embed_tokens", "q_proj"], use_dora=True)),
    "ranks": (llama, partial(LORA, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 4})),
    "ranks by a regex": (
        llama, partial(LORA, rank_pattern={r"^model\.layers\.\d+\.self_attn\.q_proj": 2}),
    ),
    "ranks by two repetitions": (llama, partial(LORA, rank_pattern={r".*(0|1)\..*q_proj": 2})),
    "Conv1D": (gpt2, partial(LORA, target_modules=["c_attn"], fan_in_fan_out=True)),
    "a regex": (llama, partial(LORA, target_modules=r".*\.q_proj")),
    "all-linear": (llama, partial(LORA, target_modules="all-linear")),
    "one layer": (llama, partial(LORA, layers_to_transform=[1])),
    "an excluded module": (llama, partial(LORA, exclude_modules=["v_proj"])),
    "heads": (llama, partial(LORA, modules_to_save=HEADS)),
    "tied heads": (tied_llama, partial(LORA, modules_to_save=HEADS)),
    "one tied head": (
        tied_llama, partial(LORA, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    ),
    "one of two classifiers": (
        bert, partial(LORA, target_modules=["query"], task_type="SEQ_CLS"),
    ),
    "biases of the model": (bert, partial(LORA, target_modules=["query"], bias="all")),
    "tokens": (llama, partial(LORA, trainable_token_indices=[0, 1])),
    "experts": (mixtral, partial(LORA, target_modules=["q_proj"], target_parameters=EXPERTS)),
    "experts alone": (mixtral, partial(LORA, target_modules=[], target_parameters=EXPERTS[1:])),
    "experts by old names": (mixtral, partial(LORA, target_modules=["w1", "w2", "w3", "q_proj"])),
    "convolutions": (convolutions, partial(OF_CONVOLUTIONS, target_modules=["plain"])),
    "a convolution in groups": (convolutions, partial(OF_CONVOLUTIONS, target_modules=["groups"])),
    "attention of torch": (convolutions, partial(OF_CONVOLUTIONS, target_modules=["attention"])),
    "biases of convolutions": (convolutions, partial(
        OF_CONVOLUTIONS, target_modules=["plain", "groups", "attention"], lora_bias=True
    )),
    "DoRA of convolutions": (
        convolutions, partial(OF_CONVOLUTIONS, target_modules=["plain"], use_dora=True),
    ),
    "PiSSA": (llama, partial(LORA, init_lora_weights="pissa")),
    "replicated layers": (llama, partial(LORA, layer_replication=[(0, 2), (1, 2)])),
    "LoHa": (llama, partial(peft.LoHaConfig, r=4, target_modules=TWO)),
    "LoKr": (llama, partial(peft.LoKrConfig, r=1, target_modules=TWO, decompose_both=True)),
    "IA3": (llama, partial(
        peft.IA3Config, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    )),
    "AdaLoRA": (llama, partial(
        peft.AdaLoraConfig, init_r=4, target_r=2, total_step=100, target_modules=TWO
    )),
    "VeRA": (llama, partial(peft.VeraConfig, r=4, target_modules=TWO)),
    "prompts": (llama, partial(peft.PromptTuningConfig, **PROMPTS)),
    "prompts of two models": (
        t5, partial(peft.PromptTuningConfig, num_virtual_tokens=3, task_type="SEQ_2_SEQ_LM"),
    ),
    "prefixes": (llama, partial(peft.PrefixTuningConfig, **PROMPTS)),
    "an encoder of prompts": (
        llama, partial(peft.PromptEncoderConfig, **PROMPTS, encoder_hidden_size=8),
    ),
    "another type": (llama, partial(peft.OFTConfig, oft_block_size=4, target_modules=TWO)),
    "another type of vectors": (llama, partial(
        peft.VBLoRAConfig, r=4, vector_length=4, num_vectors=8, target_modules=TWO
    )),
    "another type of prompts": (llama, partial(
        peft.CPTConfig, cpt_token_ids=[1], cpt_mask=[1], cpt_tokens_type_mask=[1],
        task_type="CAUSAL_LM",
    )),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "part", "expected"),
    [
        ("DoRA", "lora_magnitude_vector", "8 of 12"),
        ("DoRA", "0.self_attn.q_proj.lora_magnitude_vector", "11 of 12"),
        ("embeddings", "embed_tokens.lora_magnitude_vector", "9 of 10"),
        ("biases", "lora_B.bias", "8 of 12"),
        ("biases", "0.self_attn.q_proj.lora_B.bias", "11 of 12"),
    ],
)
def test_a_part_of_each_module_is_gone(name: str, part: str, expected: str, tmp_path: Path) -> None:
    base, config = HEALTHY[name]
    tensors = saved(tmp_path, config(), base)
    write(tmp_path, without(part)(tensors))
    assert live(tmp_path, tensors, base) == expected
    assert verdict(tmp_path) == [INCOMPLETE]


@pytest.mark.parametrize(
    ("name", "part"),
    [("LoHa", "hada_w2"), ("LoKr", "lokr_w1"), ("AdaLoRA", "lora_E"), ("VeRA", "vera_A")],
)
def test_of_a_rare_type_only_the_keys_are_judged(name: str, part: str, tmp_path: Path) -> None:
    base, config = HEALTHY[name]
    tensors = saved(tmp_path, config(), base)
    write(tmp_path, without(part)(tensors))
    report = check(tmp_path)
    assert report.findings == ()
    assert f"{NAME}: ranks and missing tensors of an adapter of type {name.upper()}" in (
        report.not_checked
    )
    assert any("ckptfix check --load asks PEFT" in words for words in report.not_checked)
    write(tmp_path, behind("module.")(tensors))
    assert verdict(tmp_path) == [DEAD]


def kohya(key: str) -> str:
    module, part, _ = key.removeprefix("base_model.model.").rsplit(".", 2)
    return f"lora_te_{module.replace('.', '_')}.{'lora_up' if part == 'lora_B' else 'lora_down'}.weight"


def in_memory(key: str) -> str:
    return key.replace("lm_head.", "lm_head.modules_to_save.")


CONFIGS: dict[str, tuple[str, dict[str, Any], Callable[[str], str], str, str]] = {
    "kohya's keys": ("LoRA", {}, kohya, "0 of 8", "error"),
    "other targets": ("LoRA", {"target_modules": ["up_proj", "down_proj"]}, str, "0 of 8", "error"),
    "another regex": ("a regex", {"target_modules": r".*\.up_proj"}, str, "0 of 4", "error"),
    "a smaller regex": (
        "a regex", {"target_modules": r".*0\.self_attn\.q_proj"}, str, "2 of 4", "warning",
    ),
    "fewer targets": ("LoRA", {"target_modules": ["q_proj"]}, str, "4 of 8", "warning"),
    "fewer targets of IA3": (
        "IA3", {"target_modules": ["k_proj"], "feedforward_modules": []}, str, "2 of 4", "warning",
    ),
    "one of two layers": ("LoRA", {"layers_to_transform": [1]}, str, "4 of 8", "warning"),
    "the other layer": ("one layer", {"layers_to_transform": 0}, str, "0 of 4", "error"),
    "no DoRA": ("DoRA", {"use_dora": False}, str, "8 of 12", "warning"),
    "no biases": ("biases", {"lora_bias": False}, str, "8 of 12", "warning"),
    "rows of tokens": ("LoRA", {"trainable_token_indices": [1]}, str, "KeyError", "error"),
    "the names in memory": ("heads", {}, in_memory, "KeyError", "warning"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_keys_for_which_the_config_has_no_place(name: str, tmp_path: Path) -> None:
    kind, changes, rename, expected, severity = CONFIGS[name]
    base, config = HEALTHY[kind]
    tensors = saved(tmp_path, config(), base)
    edit_json(tmp_path / CONFIG, **changes)
    write(tmp_path, renamed(rename)(tensors))
    assert live(tmp_path, tensors, base) == expected
    assert verdict(tmp_path)[0] == ("incomplete-adapter", severity)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_adapter(name: str, tmp_path: Path) -> None:
    base, config = HEALTHY[name]
    tensors = saved(tmp_path, config(), base)
    assert live(tmp_path, tensors, base) == f"{len(tensors)} of {len(tensors)}"
    assert verdict(tmp_path) == []


OTHER_TYPES = [
    *(
        ("LoRA", config)
        for config in (
            "LoHa", "LoKr", "IA3", "AdaLoRA", "VeRA", "OFT", "BOFT", "HRA", "FourierFT", "VBLoRA",
            "Lily", "RandLora", "norms", "prompts", "prefixes",
        )
    ),
    ("IA3", "LoRA"), ("AdaLoRA", "LoRA"), ("prompts", "LoRA"), ("prompts", "a regex"),
    ("LoHa", "all-linear"), ("VeRA", "LoKr"), ("norms", "Lily"),
]  # fmt: skip


@pytest.mark.parametrize(("weights", "config"), OTHER_TYPES)
def test_a_config_of_another_type(weights: str, config: str, tmp_path: Path) -> None:
    (base, of_weights), (_, of_config) = OF_PEFT[weights], OF_PEFT[config]
    tensors = saved(tmp_path, of_weights(), base)
    assert verdict(tmp_path) == []
    saved(tmp_path / "other", of_config(), base)
    (tmp_path / "other" / CONFIG).replace(tmp_path / CONFIG)
    shutil.rmtree(tmp_path / "other")
    assert live(tmp_path, tensors, base) in (f"0 of {len(tensors)}", "KeyError", "ValueError")
    assert verdict(tmp_path) == [INCOMPLETE]


def test_an_adapter_of_the_trainer_under_the_name_of_a_model(tmp_path: Path) -> None:
    """The stock Trainer resumed with new weights, without an error, and the folder was clean."""
    base, config = HEALTHY["LoRA"]
    saved(tmp_path, config(), base)
    (tmp_path / NAME).rename(tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1}')
    (words,) = [str(one) for one in check(tmp_path).findings if one.code == "incomplete-checkpoint"]
    assert "the keys in model.safetensors are those of an adapter" in words
    assert check(tmp_path).status == 1


@pytest.mark.parametrize("name", ["LoRA", "embeddings", "experts", "IA3", "PiSSA"])
def test_an_adapter_before_its_first_step(name: str, tmp_path: Path) -> None:
    base, config = HEALTHY[name]
    saved(tmp_path, config(), base, trained=False)
    assert verdict(tmp_path) == (
        [] if name in ("IA3", "PiSSA") else [("untrained-adapter", "note")]
    )


def test_an_adapter_with_the_name_of_its_parameters(tmp_path: Path) -> None:
    model = peft.get_peft_model(llama(), LORA(), adapter_name="lora")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(str(tmp_path))
    assert verdict(tmp_path / "lora") == []


def test_an_adapter_that_transformers_saves(tmp_path: Path) -> None:
    model: Any = llama()
    model.add_adapter(LORA(init_lora_weights=False, modules_to_save=["lm_head"]), "main")
    model.save_pretrained(tmp_path)
    assert verdict(tmp_path) == []


def test_the_state_dict_of_a_compiled_model(tmp_path: Path) -> None:
    """PEFT 0.21 looks for its own keys in the state dict that it is given, finds none, and saves an
    empty file.
    """
    model: Any = torch.compile(peft.get_peft_model(llama(), peft.LoraConfig(target_modules=TWO)))
    model.save_pretrained(str(tmp_path), state_dict=model.state_dict())
    assert load_file(tmp_path / NAME) == {}
    (finding,) = check(tmp_path).findings
    assert (finding.code, finding.severity.value) == INCOMPLETE
    assert "state_dict of a compiled model" in finding.advice


@pytest.mark.parametrize("kind", ["kasa", "blocks", "experts", "compressed"])
def test_a_variant_of_lora_is_healthy(kind: str, tmp_path: Path) -> None:
    """They have further parameters, or matrices of fewer columns."""
    configs = peft.tuners.lora.config
    settings = {
        "kasa": {"kasa_config": configs.KasaConfig()},
        "blocks": {"use_bdlora": configs.BdLoraConfig(["q_proj"], ["v_proj"], nblocks=2)},
        "experts": {"monteclora_config": configs.MontecloraConfig()},
        "compressed": {"velora_config": configs.VeloraConfig()},
    }
    lora(tmp_path, **settings[kind])
    assert verdict(tmp_path) == []


@pytest.mark.parametrize(
    "key", ["module.base_model", "base_model.module", "base_model._orig_mod.x"]
)
def test_odd_keys_with_wrappers_are_judged(key: str, tmp_path: Path) -> None:
    tensors = lora(tmp_path)
    write(tmp_path, {**tensors, key: torch.ones(1)})
    assert check(tmp_path).status in (0, 1)


def test_an_adapter_next_to_one_that_no_load_reads(tmp_path: Path) -> None:
    """An older save left ``adapter_model.bin``, which PEFT reads only without the other file."""
    tensors = lora(tmp_path)
    torch.save(
        {f"module.{key}": each for key, each in tensors.items()}, tmp_path / "adapter_model.bin"
    )
    assert live(tmp_path, tensors) == "8 of 8"
    assert "dead-adapter" not in {code for code, _ in verdict(tmp_path)}


def test_ranks_by_a_path_for_each_of_many_modules(tmp_path: Path) -> None:
    """EVA writes such patterns: compared one by one, 4,000 modules took a minute."""
    names = [f"layers.{number}.q" for number in range(4000)]
    write(tmp_path, pairs(names, torch.ones(2, 2)))
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q"]}
    ranks = dict.fromkeys(names, 2)
    (tmp_path / CONFIG).write_text(json.dumps(config | {"rank_pattern": ranks}))
    begin = time.process_time()
    assert verdict(tmp_path) == []
    assert time.process_time() - begin < 10
    del ranks[names[0]]
    edit_json(tmp_path / CONFIG, rank_pattern=ranks)
    assert verdict(tmp_path) == [("mismatched-adapter", "error")]


def pairs(modules: Iterable[str], *matrices: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return A and B of modules; both are equal where one matrix is given."""
    return {
        f"base_model.model.{module}.lora_{half}.weight": matrix
        for module in modules
        for half, matrix in zip("AB", 2 * matrices, strict=False)
    }


def test_long_settings_of_a_small_adapter(tmp_path: Path) -> None:
    """100 patterns for 1,000 long paths took 12 s, and 20,000 targets 15 s."""
    paths = [f"{'a.' * 138}{number:06}.q" for number in range(1000)]
    write(tmp_path, pairs(paths, torch.ones(1, 1)))
    config = {
        "peft_type": "LORA",
        "r": 1,
        "target_modules": ["q", *(f"l{number}" for number in range(20_000))],
        "rank_pattern": {f"a.*b{number}": 2 for number in range(100)},
    }
    (tmp_path / CONFIG).write_text(json.dumps(config))
    begin = time.process_time()
    report = check(tmp_path)
    assert time.process_time() - begin < 10
    assert any(
        "because rank_pattern in adapter_config.json is too complex" in words
        for words in report.not_checked
    )


def test_a_module_of_modules_to_save_was_lost(tmp_path: Path) -> None:
    tensors = lora(tmp_path, modules_to_save=["lm_head"])
    write(tmp_path, without("lm_head")(tensors))
    assert live(tmp_path, tensors) == "KeyError"
    assert verdict(tmp_path) == [("incomplete-adapter", "warning")]


def test_modules_that_only_other_models_have(tmp_path: Path) -> None:
    """PEFT takes lists for several models: such a folder is healthy."""
    tensors = lora(
        tmp_path, target_modules=["q_proj", "c_attn"], modules_to_save=["lm_head", "embed_out"]
    )
    assert live(tmp_path, tensors) == f"{len(tensors)} of {len(tensors)}"
    assert verdict(tmp_path) == [("incomplete-adapter", "note"), ("incomplete-adapter", "note")]


def test_heads_that_peft_adds_for_a_classification_and_bart_lacks(tmp_path: Path) -> None:
    names = ("layers", "attention_heads", "ffn_dim")
    sizes = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in names}
    settings = BartConfig(vocab_size=8, d_model=8, **sizes)
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=TWO)
    tensors = saved(tmp_path, config, lambda: BartForSequenceClassification(settings))
    base = BartForSequenceClassification(settings)
    assert live(tmp_path, tensors, lambda: base) == f"{len(tensors)} of {len(tensors)}"
    assert verdict(tmp_path) == [("incomplete-adapter", "note")]


@pytest.mark.parametrize("key", ["prompt_embeddings", "module.prompt_embeddings"])
def test_prompts_under_another_key_or_of_another_number(key: str, tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    tensors = saved(tmp_path, config)
    wrapped = key != "prompt_embeddings"
    (prompts,) = tensors.values()
    write(tmp_path, {key: prompts if wrapped else prompts[:2]})
    assert live(tmp_path, tensors) == ("KeyError" if wrapped else "RuntimeError")
    assert verdict(tmp_path) == [DEAD if wrapped else ("mismatched-adapter", "error")]


def without_numbers(tensors: Tensors) -> Tensors:
    """Make zeros of B, some of them negative."""
    return {key: each * -0.0 if "lora_B" in key else each for key, each in tensors.items()}


def at_step(root: Path, steps: int) -> None:
    state = {"epoch": 1.0, "global_step": steps, "max_steps": 500, "log_history": []}
    (root / "trainer_state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("steps", "severity"), [(None, "note"), (1, "note"), (16, "note"), (400, "warning")]
)
def test_every_lora_b_is_zero(steps: int | None, severity: str, tmp_path: Path) -> None:
    """A warm-up begins at a learning rate of 0, and fp16 skips its first steps."""
    write(tmp_path, without_numbers(lora(tmp_path)))
    if steps is not None:
        at_step(tmp_path, steps)
    assert [pair for pair in verdict(tmp_path) if pair[0] == "untrained-adapter"] == [
        ("untrained-adapter", severity)
    ]


@pytest.mark.parametrize(("rate", "severity"), [(0.0, "note"), (1e-3, "warning")])
def test_every_lora_b_is_zero_after_steps_at_a_rate_of_zero(
    rate: float, severity: str, tmp_path: Path
) -> None:
    """A run whose learning rate was 0 trained nothing. A schedule that ends at 0 began
    elsewhere.
    """
    tensors = lora(tmp_path)
    zeros = {key: torch.zeros_like(each) for key, each in tensors.items() if "lora_B" in key}
    write(tmp_path, tensors | zeros)
    at_step(tmp_path, 30)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=rate)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 30)
    for _ in range(30):
        weight.sum().backward()
        optimizer.step()
        decay.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert optimizer.param_groups[0]["lr"] == 0
    assert [pair for pair in verdict(tmp_path) if pair[0] == "untrained-adapter"] == [
        ("untrained-adapter", severity)
    ]


def test_another_adapter_was_trained(tmp_path: Path) -> None:
    """A Trainer that trains one of two leaves that of the root as PEFT made it."""
    model = peft.get_peft_model(llama(), LORA())
    model.add_adapter("task", LORA())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".task." in name:
                parameter.normal_()
    model.save_pretrained(str(tmp_path))
    at_step(tmp_path, 400)
    assert (tmp_path / "task" / CONFIG).exists()
    assert verdict(tmp_path) == [("untrained-adapter", "note")]


def test_one_lora_b_is_not_zero(tmp_path: Path) -> None:
    tensors = lora(tmp_path)
    last = [key for key in tensors if "lora_B" in key][-1]
    write(tmp_path, {**without_numbers(tensors), last: tensors[last]})
    assert verdict(tmp_path) == []


def test_a_number_behind_the_first_page(tmp_path: Path) -> None:
    matrix = torch.zeros(2048, 4)
    matrix[-1, -1] = 1.0
    write(tmp_path, pairs(["q_proj"], torch.ones(4, 8), matrix))
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    (finding,) = check(tmp_path).findings
    assert "in its first bytes" in str(finding)
    assert check(tmp_path, data=True).findings == ()


@pytest.mark.parametrize("place", ["global_step5", "pytorch_model"])
@pytest.mark.parametrize("damage", ["empty", "of ZeRO-3"])
def test_the_weights_are_in_a_folder_of_deepspeed(place: str, damage: str, tmp_path: Path) -> None:
    tensors = lora(tmp_path)
    write(tmp_path, DAMAGES[damage][0](tensors))
    (tmp_path / place).mkdir()
    for name in (
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ):
        torch.save({"module": {}}, tmp_path / place / name)
    (tmp_path / "latest").write_text(place)
    finding = next(each for each in check(tmp_path).findings if each.code == "incomplete-adapter")
    # The run is healthy: a resume with DeepSpeed reads its folder.
    assert (finding.severity.value, finding.resume) == ("note", Resume.SUCCEEDS)
    assert f"{place}/" in str(finding)
    assert "zero_to_fp32.py" in finding.advice


NOT_AN_OBJECT = "rank_pattern in adapter_config.json is not an object"
NO_PATTERN = "rank_pattern in adapter_config.json is too complex, or not a valid pattern"
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "a rank as text": ({"r": "4"}, "because r in adapter_config.json is not an integer"),
    "a rank of lists": ({"rank_pattern": [1, 2]}, NOT_AN_OBJECT),
    "a rank of a text": ({"rank_pattern": {"q_proj": "4"}}, ""),
    "a regex that is none": ({"rank_pattern": {"(": 4}}, NO_PATTERN),
    "a regex of years": ({"rank_pattern": {"(.+)+x": 4}}, NO_PATTERN),
    **{
        f"a regex of years, {pattern}": ({"rank_pattern": {pattern: 4}}, NO_PATTERN)
        for pattern in ("(a|a)*", "(a|a){40}", "((a|a))+", "(a|a)" * 40, "a|(a|(a|a))", "(a+)b*")
    },
    "targets of numbers": ({"target_modules": [1, None]}, ""),
    "targets of an object": ({"target_modules": {"q_proj": 1}}, "only the base model shows"),
    "heads of numbers": ({"modules_to_save": [3]}, ""),
    "a type nobody knows": ({"peft_type": "TELEPATHY"}, "of an adapter of type TELEPATHY"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_config_is_not_judged(name: str, tmp_path: Path) -> None:
    changes, unchecked = ODD[name]
    lora(tmp_path)
    edit_json(tmp_path / CONFIG, **changes)
    report = check(tmp_path)
    assert report.findings == ()
    assert any(unchecked in words for words in report.not_checked)


@pytest.mark.parametrize(
    "content", ["", "[]", "[" * 100_000, "null", '{"r": 4}', '{"peft_type": 1}']
)
def test_a_config_that_is_none(content: str, tmp_path: Path) -> None:
    lora(tmp_path)
    (tmp_path / CONFIG).write_text(content)
    assert {finding.code for finding in check(tmp_path).findings} <= {"incomplete-checkpoint"}


WITHOUT_CONFIG = [
    "in a folder of save_state", "of a variant", "with a config that is none", "alone",
]  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_CONFIG)
@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_one_matrix_of_each_pair_without_a_config(name: str, half: str, tmp_path: Path) -> None:
    """A load hook, or a script, loads such a file, and PEFT makes the other matrix anew: check was
    silent.
    """
    tensors = lora(tmp_path)
    others = {("incomplete-checkpoint", "warning")}
    if name == "of a variant":
        (tmp_path / NAME).rename(tmp_path / "adapter_model.fp16.safetensors")
        others = set()
    elif name == "with a config that is none":
        (tmp_path / CONFIG).write_text("{")
    else:
        (tmp_path / CONFIG).unlink()
    if name == "in a folder of save_state":
        (tmp_path / "random_states_0.pkl").write_bytes(RANDOM_STATES)
        others = set()
    assert {*verdict(tmp_path)} == others
    file = next(tmp_path.glob("adapter_model*"))
    write(tmp_path, without(half)(tensors))
    (tmp_path / NAME).rename(file)
    assert {*verdict(tmp_path)} == {*others, ("incomplete-adapter", "warning")}
    assert f"4 modules without {half}, such as model.layers.0." in str(check(tmp_path).findings)


def test_a_variant_next_to_the_adapter(tmp_path: Path) -> None:
    tensors = lora(tmp_path)
    write(tmp_path, without("lora_B")(tensors))
    (tmp_path / NAME).rename(tmp_path / "adapter_model.fp16.safetensors")
    write(tmp_path, tensors)
    assert verdict(tmp_path) == [("incomplete-adapter", "warning")]


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.q_proj",
        r"layers\.\d+",
        r".*\.(q|v)_proj",
        r"layers\.(0|1)\.(self_attn|mlp)\.(q|k|v)_proj",
    ],
)
def test_ranks_by_a_regex_of_a_user(pattern: str, tmp_path: Path) -> None:
    tensors = lora(tmp_path, rank_pattern={pattern: 2})
    assert live(tmp_path, tensors) == "8 of 8"
    assert verdict(tmp_path) == []
    assert not any("rank_pattern" in words for words in check(tmp_path).not_checked)


def test_a_key_of_many_dots_needs_little_memory(tmp_path: Path) -> None:
    """All ends of one such key took 615 MiB."""
    write(tmp_path, pairs(["a." * 20_000 + "a"], torch.ones(8, 4), torch.ones(4, 8)))
    config = {"peft_type": "LORA", "r": 8, "target_modules": ["q"]}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    tracemalloc.start()
    try:
        assert verdict(tmp_path) == [("incomplete-adapter", "note")]
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("bias", ["none", "all", "lora_only", "lora", "ALL", None, True])
def test_a_bias_that_peft_refuses(bias: object, tmp_path: Path) -> None:
    """It was clean, and PeftModel.from_pretrained failed."""
    lora(tmp_path)
    edit_json(tmp_path / CONFIG, bias=bias)
    try:
        peft.PeftModel.from_pretrained(llama(), str(tmp_path))
    except (AttributeError, NotImplementedError):
        (finding,) = check(tmp_path).findings
        assert (finding.code, finding.severity.value) == ("mismatched-adapter", "error")
        assert f"bias is {json.dumps(bias)} in adapter_config.json" in str(finding)
        assert finding.resume is Resume.SUCCEEDS
    else:
        assert verdict(tmp_path) == []
