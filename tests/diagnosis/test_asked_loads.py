"""``check --load`` against real loads: the command over a folder of models, and loads that nobody
can answer for.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from ckptfix import check
from ckptfix.checkpoint.architectures import Architecture
from ckptfix.cli import run
from ckptfix.devices.reload import oracle
from ckptfix.devices.reload.oracle import ask
from ckptfix.diagnosis.loads import loaders
from ckptfix.diagnosis.loads.outcome import LoadOutcome
from ckptfix.hardware import Child
from ckptfix.storage.stores import open_store
from tests.benchmarks.loads import (
    DAMAGES,
    OF_DIFFUSERS,
    Subject,
    agrees,
    asked,
    damaged,
    diffusers,
    load_of,
    of_architecture,
    of_diffusers,
    of_peft,
    of_transformers,
)
from tests.diagnosis.builders import edit_json, small_unet
from tests.tiny_adapters import (
    NAME,
    bert,
    llama,
    mixtral,
    peft,
    renamed,
    tied_llama,
    with_name,
    write,
)
from tests.tiny_models import reconfigure, tiny

pytestmark = pytest.mark.filterwarnings("ignore")

MAKERS: dict[str, Callable[[], Subject]] = {
    "tied": lambda: of_transformers("tied", tied_llama()),
    "bert": lambda: of_transformers("bert", bert()),
    "experts": lambda: of_transformers("experts", mixtral()),
    "lora": lambda: of_peft("LoRA"),
    "vae": lambda: of_diffusers("AutoencoderKL"),
}
SAMPLE = [
    *(("tied", damage) for damage in DAMAGES),
    *((name, damage) for name in ("lora", "vae") for damage in DAMAGES if damage != "a tie broken"),
    ("bert", "healthy"),
    ("experts", "healthy"),
    ("experts", "a key dropped"),
]


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """Ask one process in all checks: the import of torch, transformers and diffusers takes 10 s.

    The tests that start ckptfix as a command have a process for each.
    """
    started: dict[object, Child] = {}

    class Kept(Child):
        def close(self) -> None:
            """Leave the process to the next check."""

    def child(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Child:
        names = environment.keys() - {"PYTEST_CURRENT_TEST"}
        key = tuple((name, environment[name]) for name in sorted(names))
        return started.setdefault(key, Kept(command, seconds, environment))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loaders, "Child", child)
        yield
    for each in started.values():
        Child.close(each)


@pytest.mark.slow
def test_the_command_says_what_the_library_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = {}
    for name, damage in SAMPLE:
        subject, folder = MAKERS[name](), tmp_path / f"{name} {damage}" / "model"
        tensors = damaged(subject, damage, folder)
        assert tensors is not None
        expected[str(folder)] = subject.real(folder), tensors
    assert run(["check", "--load", "-r", "--json", str(tmp_path)]) == 1
    document = json.loads(capsys.readouterr().out)
    reports = {report["path"]: report for report in document["checkpoints"]}
    for path, (real, tensors) in expected.items():
        (answer,) = reports[path]["load"]
        outcome = LoadOutcome(
            **{key: value for key, value in answer.items() if key not in ("status", "mismatched")}
        )
        assert {each["key"] for each in answer["mismatched"]} == real.mismatched or real.refused, (
            path
        )
        assert agrees(
            outcome._replace(mismatched=()), real._replace(mismatched=frozenset()), tensors
        ) or (real.refused)
        assert answer["status"] == real.is_damaged(tensors) == reports[path]["status"], path
        assert answer["library"].split()[1][0].isdigit()


def llama_config(tmp_path: Path, **changes: Any) -> LoadOutcome:
    """Ask about a load with changed settings; None removes one."""
    of_transformers("llama", llama()).save(tmp_path)
    removed = [key for key, value in changes.items() if value is None]
    edit_json(tmp_path / "config.json", *removed, **changes)
    return ask(asked(load_of(tmp_path)))


ODD_CONFIGS: dict[str, tuple[dict[str, Any], str | None]] = {
    "remote code": ({"auto_map": {"AutoModel": "modeling.Model"}}, "never run"),
    "another class": ({"architectures": ["pipeline"]}, "has no model class pipeline"),
    "an abstract class": ({"architectures": ["PreTrainedModel"]}, "has no model class"),
    "no text": ({"architectures": [[1]]}, "config.json names no model class (architectures)"),
    "a library that is missing": ({"quantization_config": {"quant_method": "hqq"}}, "ImportError"),
    "another file": ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
    "text for a number": ({"vocab_size": "8"}, None),
    "a division by zero": ({"num_attention_heads": 0}, None),
    "an unknown type": ({"model_type": "odd"}, None),
    "a type without such a model": ({"model_type": "vit"}, None),
}
"""Changed settings -> why nobody answers for the load, None where the library refuses it."""


@pytest.mark.parametrize("name", ODD_CONFIGS)
def test_a_config_that_is_refused_or_that_nobody_answers_for(name: str, tmp_path: Path) -> None:
    changes, words = ODD_CONFIGS[name]
    outcome = llama_config(tmp_path, **changes)
    assert outcome.status == (1 if words is None else 3)
    assert outcome.refused if words is None else words in outcome.unchecked


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "llama"])
def test_the_type_in_the_config_counts(kind: str, tmp_path: Path) -> None:
    """An AutoModel takes the class by ``model_type``, whatever ``architectures`` names."""
    outcome = llama_config(tmp_path, model_type=kind)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert outcome.loads == type(model).__name__
    assert set(outcome.missing) == info["missing_keys"]
    assert set(outcome.unexpected) == info["unexpected_keys"]
    assert outcome.status == (kind == "gpt2")
    assert bool(outcome.unknown) == (kind != "llama")


ATTENTIONS: dict[str, tuple[object, int]] = {
    "no such name": ("nosuch", 1),
    "a name behind a prefix": ("paged|nosuch", 1),
    "a name of the main model": ({"": "nosuch"}, 1),
    "a number": (5, 1),
    "a package that is missing": ("flash_attention_2", 3),
    "kernels of a hub": ("somebody/kernels", 3),
    "one of torch": ("sdpa", 0),
    "another one of torch": ("flex_attention", 0),
    "the slow one": ("eager", 0),
    "a name of a part that is not there": ({"text_config": "nosuch"}, 0),
}


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *(("attn_implementation", name) for name in ATTENTIONS),
        *(("_attn_implementation", name) for name in ("no such name", "one of torch")),
    ],
)
def test_an_attention_in_the_config(key: str, name: str, tmp_path: Path) -> None:
    """Without the package the load by a script fails, and with it nothing is known here."""
    asked_for, status = ATTENTIONS[name]
    outcome = llama_config(tmp_path, **{key: asked_for})
    assert (outcome.status, outcome.unknown) == (status, ())
    if not status:
        assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        return
    with pytest.raises((ValueError, ImportError, AttributeError)) as caught:
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    says = outcome.refused or outcome.unchecked
    assert says.startswith(f"{caught.type.__name__}: {str(caught.value)[:40]}")
    assert outcome.headline in ("transformers 5.23.0 fails to load it", "load not checked")


@pytest.mark.parametrize("value", ["flash_attention_2", "somebody/kernels"])
def test_an_attention_whose_package_is_here(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs a device, or runs code of kernels, so the process asks for ``eager``."""
    monkeypatch.setattr(oracle, "find_spec", lambda name: name == "kernels" or None)
    outcome = llama_config(tmp_path, attn_implementation=value)
    assert outcome.status == 0
    assert f"whether the config's attention {value!r} can be loaded here" in outcome.unknown[0]
    assert llama_config(tmp_path / "odd", attn_implementation="nosuch").status == 1


def test_an_attention_in_the_config_of_a_base(tmp_path: Path) -> None:
    assert of_base(tmp_path, str(tmp_path / "base")).status == 0
    edit_json(tmp_path / "base" / "config.json", attn_implementation="nosuch")
    outcome = ask(asked(load_of(tmp_path / "model")))
    assert outcome.status == 1
    assert "nosuch" in outcome.refused


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "nosuch"}, {"dtype": None, "torch_dtype": "nosuch"}, {"dtype": 5},
        {"experts_implementation": "nosuch"}, {"base_model_tp_plan": "nosuch"},
        {"output_attentions": True, "attn_implementation": "sdpa"},
    ],
)  # fmt: skip
def test_other_settings_that_the_library_refuses(changes: dict[str, Any], tmp_path: Path) -> None:
    outcome = llama_config(tmp_path, **changes)
    with pytest.raises(Exception, match=r"\w") as caught:
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert outcome.status == 1
    assert outcome.refused.startswith(f"{caught.type.__name__}: ")


@pytest.mark.parametrize("changes", [{"tp_plan": "nosuch"}, {"tp_size": 2}, {"device_map": "auto"}])
def test_settings_of_a_call_are_not_those_of_a_config(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    assert llama_config(tmp_path, **changes).status == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_weights_under_a_key_are_no_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their shapes alone fit: from_pretrained fails with an AttributeError."""
    model = tied_llama()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    torch.save({"model": model.state_dict()}, tmp_path / "pytorch_model.bin")
    assert run(["check", "--load", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    words = "pytorch_model.bin: it holds a dict with a state dict under 'model'"
    assert f"the load fails: {words}" in out
    assert "stays random" not in out


def test_a_class_for_the_type_of_another_config(tmp_path: Path) -> None:
    subject = of_architecture("sam3_video", transformers.Sam3TrackerModel)
    assert subject is not None
    subject.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "sam3_tracker_video"
    outcome = ask(asked(load_of(tmp_path)))
    assert (outcome.loads, outcome.status, outcome.unknown) == ("Sam3TrackerModel", 0, ())


def test_numbers_of_four_and_eight_bits(tmp_path: Path) -> None:
    subject = of_transformers("llama", llama())
    subject.save(tmp_path)
    scales = {
        "scale": torch.ones(4, 4).to(torch.float8_e8m0fnu),
        "pairs": torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), **scales}, path, {"format": "pt"})
    outcome = ask(asked(load_of(tmp_path)))
    assert (outcome.status, outcome.unchecked, outcome.unexpected) == (0, "", ("pairs", "scale"))
    assert subject.real(tmp_path).unexpected == {"pairs", "scale"}
    # A parameter of the model, in its shape.
    pairs = torch.zeros(llama().lm_head.weight.shape, dtype=torch.uint8).view(
        torch.float4_e2m1fn_x2
    )
    save_file({**load_file(path), "lm_head.weight": pairs}, path, {"format": "pt"})
    assert ask(asked(load_of(tmp_path))).mismatched == ()


def of_base(tmp_path: Path, base: object) -> LoadOutcome:
    of_peft("LoRA").save(tmp_path / "model")
    edit_json(tmp_path / "model" / "adapter_config.json", base_model_name_or_path=base)
    return ask(asked(load_of(tmp_path / "model")))


def test_the_base_of_an_adapter(tmp_path: Path) -> None:
    for number, base in enumerate(("somebody/unknown", "../nowhere", None, [1], "")):
        outcome = of_base(tmp_path / str(number), base)
        assert outcome.status == 3
        assert (
            "is neither a local folder nor" in outcome.unchecked
            or "names no base" in outcome.unchecked
        )
    assert of_base(tmp_path / "here", str(tmp_path / "here" / "base")).live == 8


def test_a_base_with_code_of_its_own(tmp_path: Path) -> None:
    assert of_base(tmp_path, str(tmp_path / "base")).status == 0
    edit_json(tmp_path / "base" / "config.json", auto_map={"AutoModel": "x.Y"})
    outcome = ask(asked(load_of(tmp_path / "model")))
    assert outcome.status == 3
    assert "never run" in outcome.unchecked


def adapted(
    root: Path,
    settings: Any,
    make: Callable[[], Any] = llama,
    change: Callable[[Any], Any] = lambda model: model,
) -> Path:
    """Save an adapter of a base that is next to it, and that a script changed before."""
    make().save_pretrained(root / "base")
    base = change(type(make()).from_pretrained(root / "base"))
    peft.get_peft_model(base, settings).save_pretrained(str(root / "model"))
    return root / "model"


def resized(model: Any) -> Any:
    model.resize_token_embeddings(12)
    return model


def of_five(model: Any) -> Any:
    model.config.num_labels = 5
    return type(model)(model.config)


CAUSAL = partial(peft.LoraConfig, task_type="CAUSAL_LM", target_modules=["q_proj"])
LABELS = partial(peft.LoraConfig, task_type="SEQ_CLS", target_modules=["query"])
CHANGED = {
    "heads of more rows": (llama, CAUSAL(modules_to_save=["embed_tokens", "lm_head"]), resized),
    "adapted rows": (llama, CAUSAL(target_modules=["embed_tokens"]), resized),
    "new tokens": (llama, CAUSAL(trainable_token_indices=[9]), resized),
    "labels": (bert, LABELS(), of_five),
}


@pytest.mark.parametrize("name", CHANGED)
def test_an_adapter_of_a_base_that_the_script_changes(name: str, tmp_path: Path) -> None:
    make, settings, change = CHANGED[name]
    outcome = ask(asked(load_of(adapted(tmp_path, settings, make, change))))
    # PEFT saves no head next to an embedding that is adapted: its new rows are gone.
    count = 2 if name == "adapted rows" else 1
    assert (outcome.status, len(outcome.unknown)) == (0, count), outcome
    assert "whether the script" in outcome.unknown[0]


def test_an_adapter_of_more_rows_without_its_head(tmp_path: Path) -> None:
    """The new rows of the head differ between two loads, and PEFT says nothing."""
    settings = CAUSAL(modules_to_save=["embed_tokens", "lm_head"])
    root = adapted(tmp_path, settings, llama, resized)
    tensors = load_file(root / "adapter_model.safetensors")
    save_file(
        {key: tensor for key, tensor in tensors.items() if "lm_head" not in key},
        root / "adapter_model.safetensors",
    )
    config = json.loads((root / "adapter_config.json").read_text())
    (root / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": None}))
    outcome = ask(asked(load_of(root)))
    assert any("whether the adapter lost lm_head" in words for words in outcome.unknown)


SIZES = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
}  # fmt: skip
IMAGES = SIZES | {"image_size": 8, "patch_size": 4}
WITHOUT_EMBEDDINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "patches": (lambda: transformers.ViTModel(transformers.ViTConfig(**IMAGES)), "q_proj"),
    "text and images": (
        lambda: transformers.CLIPModel(
            transformers.CLIPConfig(text_config=SIZES | {"vocab_size": 8}, vision_config=IMAGES)
        ),
        "q_proj",
    ),
    "sound": (
        lambda: transformers.Wav2Vec2Model(
            transformers.Wav2Vec2Config(
                **SIZES, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3),
                num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
            )
        ),
        "q_proj",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_EMBEDDINGS)
def test_a_base_without_an_embedding_of_tokens(name: str, tmp_path: Path) -> None:
    """``get_input_embeddings`` returned another layer or raised, and healthy adapters were called
    broken.
    """
    make, target = WITHOUT_EMBEDDINGS[name]
    folder = adapted(tmp_path, peft.LoraConfig(target_modules=[target]), make)
    outcome = ask(asked(load_of(folder)))
    assert (outcome.status, outcome.live, outcome.refused) == (0, outcome.tensors, ""), outcome
    write(folder, renamed(lambda key: f"x.{key}")(load_file(folder / NAME)))
    assert ask(asked(load_of(folder))).status == 1


def test_a_head_that_the_script_puts_on_a_base_without_one(tmp_path: Path) -> None:
    """As in PEFT's example of image classification: its config has no task, and the class in
    ``auto_mapping``.
    """
    transformers.ViTModel(transformers.ViTConfig(**IMAGES)).save_pretrained(tmp_path / "base")
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path / "base", num_labels=5)
    settings = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["classifier"])
    peft.get_peft_model(model, settings).save_pretrained(str(tmp_path / "model"))
    outcome = ask(asked(load_of(tmp_path / "model")))
    assert (outcome.status, outcome.live, outcome.loads) == (
        0,
        4,
        "ViTForImageClassification",
    ), outcome
    assert "num_labels=5" in outcome.unknown[0]


@pytest.mark.parametrize("damage", ["healthy", "a key renamed"])
@pytest.mark.parametrize("name", ["Lily", "RandLora"])
def test_an_adapter_whose_tensors_are_copied_or_shared(
    name: str, damage: str, tmp_path: Path
) -> None:
    subject = of_peft(name)
    tensors = damaged(subject, damage, tmp_path / "model")
    assert tensors is not None
    outcome = ask(asked(load_of(tmp_path / "model")))
    assert outcome.live == len(tensors) - (damage != "healthy"), outcome
    assert outcome.status == (damage != "healthy"), outcome
    assert agrees(outcome, subject.real(tmp_path / "model"), tensors)


SHARED: dict[str, tuple[Any, str]] = {
    "VBLoRA": (
        peft.VBLoRAConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj"], r=2, num_vectors=8, vector_length=4, topk=1
        ),
        "vblora_vector_bank",
    ),
    "multitask prompts": (
        peft.MultitaskPromptTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=3, num_tasks=2, num_ranks=1
        ),
        "prefix_task_cols",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_lost_parameters_that_peft_does_not_warn_of(name: str, tmp_path: Path) -> None:
    """Those that all layers share, and those of prompt learning: "nothing stays random"."""
    settings, lost = SHARED[name]
    folder = adapted(tmp_path, settings)
    assert ask(asked(load_of(folder))).missing == ()
    tensors = load_file(folder / NAME)
    (key,) = [key for key in tensors if lost in key]
    del tensors[key]
    write(folder, tensors)
    outcome = ask(asked(load_of(folder)))
    assert (outcome.status, outcome.missing) == (1, (key,)), outcome


@pytest.mark.parametrize(
    "settings",
    [
        CAUSAL(monteclora_config=peft.tuners.lora.config.MontecloraConfig()),
        peft.ShiraConfig(target_modules=["q_proj"], r=2),
    ],
    ids=["MonteCLoRA", "SHiRA"],
)
def test_adapters_that_peft_makes_on_a_device_alone(settings: Any, tmp_path: Path) -> None:
    outcome = ask(asked(load_of(adapted(tmp_path, settings))))
    assert (outcome.status, outcome.refused) == (3, ""), outcome


SETTINGS_LOST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "biases": ({"lora_bias": True}, {"lora_bias": False}),
    "rows of tokens": ({"trainable_token_indices": [3]}, {"trainable_token_indices": None}),
}


@pytest.mark.parametrize("name", SETTINGS_LOST)
def test_tensors_of_an_adapter_whose_config_lost_their_setting(name: str, tmp_path: Path) -> None:
    """PEFT leaves them out without a word, next to live ones of the same layers."""
    settings, lost = SETTINGS_LOST[name]
    folder = adapted(tmp_path, CAUSAL(**settings))
    outcome = ask(asked(load_of(folder)))
    assert (outcome.status, outcome.live) == (0, outcome.tensors), outcome
    edit_json(folder / "adapter_config.json", **lost)
    outcome = ask(asked(load_of(folder)))
    assert (outcome.status, outcome.live, outcome.unexpected) == (1, 4, ()), outcome
    assert len(outcome.dead) == outcome.tensors - 4


@pytest.mark.parametrize("name", SETTINGS_LOST)
def test_tensors_of_a_second_adapter(name: str, tmp_path: Path) -> None:
    """A file of ``model.state_dict()``, or of two adapters: the second is not the one that is
    loaded.
    """
    folder = adapted(tmp_path, CAUSAL(**SETTINGS_LOST[name][0]))
    tensors = load_file(folder / NAME)

    def second(key: str) -> str:
        parameter, _, kind = key.rpartition(".")
        return f"{parameter}.second.{kind}" if kind in ("weight", "bias") else f"{key}.second"

    write(folder, tensors | {second(key): tensor for key, tensor in tensors.items()})
    outcome = ask(asked(load_of(folder)))
    assert (outcome.status, outcome.live, outcome.dead) == (0, len(tensors), ()), outcome
    assert len(outcome.unexpected) == len(tensors)
    assert "random" not in "".join(map(str, outcome.lines()))


def test_a_base_of_fewer_layers(tmp_path: Path) -> None:
    """PEFT drops the tensors of the other layers without a word."""
    assert of_base(tmp_path, str(tmp_path / "base")).status == 0
    edit_json(tmp_path / "base" / "config.json", "layer_types", num_hidden_layers=1)
    outcome = ask(asked(load_of(tmp_path / "model")))
    assert (outcome.status, outcome.live, len(outcome.dead), outcome.missing) == (1, 4, 4, ())


@pytest.mark.parametrize("make", [llama, "AutoencoderKL"])
def test_shards(make: Any, tmp_path: Path) -> None:
    model = diffusers.AutoencoderKL(**OF_DIFFUSERS[make]) if isinstance(make, str) else make()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    outcome = ask(asked(load_of(tmp_path)))
    assert (outcome.status, outcome.unexpected, outcome.unchecked) == (0, (), ""), outcome


def test_shards_that_diffusers_loads_only_with_an_option(tmp_path: Path) -> None:
    """``from_pretrained`` failed, and the answer was that nothing stays random."""
    model = diffusers.AutoencoderKL(**OF_DIFFUSERS["AutoencoderKL"])
    model.save_pretrained(tmp_path, max_shard_size="4KB", safe_serialization=False)
    with pytest.raises(OSError, match=r"no file named diffusion_pytorch_model\.bin"):
        type(model).from_pretrained(tmp_path)
    type(model).from_pretrained(tmp_path, use_safetensors=False)
    report = check(tmp_path, load=True)
    assert report.status == 1
    (outcome,) = report.load
    assert (outcome.status, outcome.missing, outcome.unexpected) == (1, (), ())
    assert outcome.refused.startswith("without use_safetensors=False, from_pretrained finds no")
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    type(model).from_pretrained(tmp_path)
    (outcome,) = check(tmp_path, load=True).load
    assert outcome.status == 0


@pytest.mark.parametrize("make", [llama, "AutoencoderKL"])
def test_a_shard_that_the_index_does_not_list_is_not_read(make: Any, tmp_path: Path) -> None:
    """The keys of the shard stayed random, and the outcome was that nothing does."""
    model = diffusers.AutoencoderKL(**OF_DIFFUSERS[make]) if isinstance(make, str) else make()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    (path,) = tmp_path.glob("*.index.json")
    index = json.loads(path.read_text())
    last = sorted(index["weight_map"].values())[-1]
    keys = {key for key, name in index["weight_map"].items() if name == last}
    for key in keys:
        del index["weight_map"][key]
    path.write_text(json.dumps(index))
    _, real = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert {*real["missing_keys"]} == keys
    (outcome,) = check(tmp_path, load=True).load
    assert (outcome.status, {*outcome.missing}) == (1, keys)


@pytest.mark.parametrize(
    ("text", "words"), [(None, "is missing"), ('{"weight_map": {', "cannot be read")]
)
def test_shards_whose_index_nobody_can_follow(text: str | None, words: str, tmp_path: Path) -> None:
    """``from_pretrained`` fails with an OSError or a JSONDecodeError, whatever the shards hold."""
    llama().save_pretrained(tmp_path, max_shard_size="4KB")
    index = tmp_path / "model.safetensors.index.json"
    index.unlink()
    if text is not None:
        index.write_text(text)
    with pytest.raises((OSError, ValueError)):
        LlamaForCausalLM.from_pretrained(tmp_path)
    (outcome,) = check(tmp_path, load=True).load
    assert (outcome.status, outcome.refused) == (1, f"{index.name} {words}")
    assert [str(text) for text in outcome.lines()][:2] == [
        f"  load: transformers, {index.name}: 21 tensors",
        f"    the load fails: {index.name} {words}",
    ]


def test_a_config_that_rounds_the_weights(tmp_path: Path) -> None:
    """transformers 5 loads in the dtype of the config, and says nothing."""
    of_transformers("llama", llama()).save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for dtype, rounded in (("float32", ""), ("bfloat16", "float32 to bfloat16")):
        reconfigure(tmp_path, dtype=dtype)
        outcome = ask(asked(load_of(tmp_path)))
        assert (outcome.status, outcome.rounded) == (0, rounded)
        assert (rounded in "".join(map(str, outcome.lines()))) is True
        model = LlamaForCausalLM.from_pretrained(tmp_path)
        assert str(model.dtype) == f"torch.{dtype}"
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_a_config_that_the_library_cannot_read(tmp_path: Path) -> None:
    """A byte order mark: the load fails, and the outcome was that nothing stays random."""
    llama().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    with pytest.raises(OSError, match="not a valid JSON file"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    (outcome,) = check(tmp_path, load=True).load
    assert (outcome.status, outcome.refused) == (1, "config.json: not JSON")


def test_an_error_of_a_library_names_no_temporary_folder(tmp_path: Path) -> None:
    """check --load printed "Unrecognized model in /tmp/ckptfix-mcs5r842/ckptfix-bknxbjdw"."""
    llama_config(tmp_path, model_type=None)
    (outcome,) = check(tmp_path, load=True).load
    assert "Unrecognized model in this folder. Should have a `model_type`" in outcome.refused


@pytest.mark.parametrize(
    ("bias", "code"), [("some", "mismatched-adapter"), ("none", "dead-adapter")]
)
def test_a_failed_load_refers_to_the_finding_about_the_adapter(
    bias: str, code: str, tmp_path: Path
) -> None:
    """The finding had another advice than the load: to repair keys, or to copy the files again."""
    of_peft("LoRA").save(tmp_path)
    edit_json(tmp_path / "adapter_config.json", bias=bias)
    if code == "dead-adapter":
        tensors = load_file(tmp_path / NAME)
        write(tmp_path, {key.removeprefix("base_model.model."): t for key, t in tensors.items()})
    report = check(tmp_path, load=True)
    assert [finding.code for finding in report.findings] == [code]
    (outcome,) = report.load
    assert outcome.status == 1
    assert [str(line) for line in outcome.lines()][-1] == f"    help: {code} above says what to do"


@pytest.mark.slow
def test_a_missing_index_next_to_weights_that_are_loaded(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    LlamaForCausalLM.from_pretrained(tmp_path)
    (outcome,) = check(tmp_path, load=True).load
    assert (outcome.path, outcome.status) == ("pytorch_model.bin", 0)


def test_one_parameter_under_two_keys(tmp_path: Path) -> None:
    """Only the bytes show if both are equal, as the config says."""
    model = tied_llama()
    model.config.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["LlamaForCausalLM"])
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    outcome = ask(asked(load_of(tmp_path)))
    assert outcome.status == 0
    words = "whether the tied weights lm_head.weight and model.embed_tokens.weight are equal"
    assert words in outcome.unknown[0]


@pytest.mark.slow
def test_a_load_from_python(tmp_path: Path) -> None:
    """The findings from headers stay where the library agrees, and the answer is asked for by
    name.
    """
    subject = of_peft("LoRA")
    damaged(subject, "a prefix", tmp_path / "model")
    report = check(tmp_path / "model", load=True)
    assert [finding.code for finding in report.findings] == ["dead-adapter"]
    (outcome,) = report.load
    assert (outcome.live, len(outcome.dead), report.status) == (0, 8, 1)
    assert "0 of 8 tensors of the adapter in use" in str(report)
    assert not check(tmp_path / "model").load
    # Of a store only the headers are read, and the base is the one of this machine.
    url = f"memory://{os.urandom(6).hex()}/model"
    store = open_store(url)
    for path in (tmp_path / "model").iterdir():
        store.put(path.name, path.read_bytes())
    (of_store,) = check(url, load=True).load
    assert of_store == outcome


@pytest.mark.slow
def test_code_in_the_folder_never_runs(tmp_path: Path) -> None:
    """``-m`` puts the current folder before the libraries."""
    folder = tmp_path / "model"
    of_transformers("llama", llama()).save(folder)
    (folder / "transformers.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    ended = subprocess.run(
        [sys.executable, "-m", "ckptfix", "check", "--load", str(folder)], cwd=folder,
        env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert not (tmp_path / "ran").exists()
    assert (ended.returncode, "nothing stays random" in ended.stdout) == (0, True), (
        ended.stdout + ended.stderr
    )


@pytest.mark.parametrize(("path", "left_out"), [("", "."), ("{}/model", "model")])
def test_the_process_of_a_load_imports_nothing_from_the_folder(
    path: str, left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty part of PYTHONPATH is the current folder, which may have a ``transformers.py`` and
    no config.
    """
    of_transformers("llama", llama()).save(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path.format(tmp_path), *sys.path])
    imports = loaders._path_of_imports()
    assert os.path.realpath(tmp_path / left_out) not in imports
    assert {*map(os.path.realpath, sys.path[1:])} - {os.getcwd()} <= {*imports}


@pytest.mark.slow
def test_a_base_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script gives it from its own current folder, not from the one of the process that is
    asked.
    """
    monkeypatch.chdir(tmp_path)
    of_base(tmp_path, "./base")
    (outcome,) = check(tmp_path / "model", load=True).load
    assert (outcome.live, outcome.status) == (8, 0), outcome


def test_checkpoints_that_no_library_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``-r`` lists every model there is; what ``load_state`` reads is not among them, and is no
    problem. Where that is all there is, nothing was done of what was asked for.
    """
    for step in (10, 20):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file(
            {"weight": torch.full((2, 2), float(step))},
            folder / "model.safetensors",
            {"format": "pt"},
        )
    assert run(["check", "--load", str(folder)]) == 3
    capsys.readouterr()
    assert run(["check", "--load", "-r", "-0", str(tmp_path)]) == 3
    printed = capsys.readouterr()
    assert (printed.out, "--load tested nothing" in printed.err) == ("", True)
    assert run(["check", "--load", "-r", "--json", str(tmp_path)]) == 3
    assert "--load tested nothing" in json.loads(capsys.readouterr().out)["error"]
    assert run(["check", "--load", "-r", str(tmp_path)]) == 3
    text = capsys.readouterr().out
    assert "found problems" not in text
    assert "load by a library" in text
    assert run(["check", "-r", str(tmp_path)]) == 0


def test_a_config_without_architectures_is_named(tmp_path: Path) -> None:
    of_transformers("llama", llama()).save(tmp_path)
    edit_json(tmp_path / "config.json", "architectures")
    (outcome,) = check(tmp_path, load=True).load
    assert (outcome.status, "architectures" in outcome.unchecked) == (3, True)


@pytest.mark.slow
def test_findings_that_the_library_contradicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT 0.21 loads keys with the name ``default``, which others do not: the library wins, and
    both are printed.
    """
    of_peft("LoRA").save(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / NAME)
    write(tmp_path / "model", renamed(with_name("default"))(tensors))
    assert run(["check", str(tmp_path / "model")]) == 1
    assert run(["check", "--load", str(tmp_path / "model")]) == 0
    text = capsys.readouterr().out
    assert "8 of 8 tensors of the adapter in use" in text
    assert "the headers alone suggest: " in text
    assert "[dead-adapter]" in text


@pytest.mark.slow
def test_a_head_that_the_library_ties(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that the load ignores is nothing about a head that the file lacks."""
    of_transformers("t5", tiny("T5ForConditionalGeneration")).save(tmp_path)
    save_file(
        {**load_file(tmp_path / "model.safetensors"), "other": torch.ones(1)},
        tmp_path / "model.safetensors",
    )
    reconfigure(tmp_path, tie_word_embeddings=False)
    monkeypatch.setattr(Architecture, "is_tied", lambda *arguments: False)
    assert run(["check", str(tmp_path)]) == 1
    assert run(["check", "--load", str(tmp_path)]) == 0
    assert "[missing-head]; trust the result of transformers" in capsys.readouterr().out


@pytest.mark.slow
def test_folders_without_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = {
        "no JSON": "{", "a list": "[1]", "nested": "[" * 100_000,
        "long": '{"a": "' + "x" * (1 << 21) + '"}', "no class": "{}", "nothing": None, "greedy": "",
    }  # fmt: skip
    for name, text in configs.items():
        of_transformers("llama", llama()).save(tmp_path / name)
        path = tmp_path / name / "config.json"
        own = json.loads(path.read_text())
        path.unlink()
        if text is not None:
            path.write_text(text or json.dumps(own | {"num_labels": 10**8}))
    assert run(["check", "--load", "--json", *(str(tmp_path / name) for name in configs)]) == 3
    for report in json.loads(capsys.readouterr().out)["checkpoints"]:
        (outcome,) = report["load"]
        assert outcome["status"] == report["status"] == 3
        words = (
            "more memory than 2.0 GiB" if report["path"].endswith("greedy") else "from_pretrained"
        )
        assert words in outcome["unchecked"]


@pytest.mark.slow
def test_a_pipeline_is_asked_for_each_component(tmp_path: Path) -> None:
    damaged(of_diffusers("AutoencoderKL"), "healthy", tmp_path / "vae")
    damaged(of_diffusers("UNet2DConditionModel"), "a prefix", tmp_path / "unet")
    index = {
        "_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.42.1",
        "vae": ["diffusers", "AutoencoderKL"], "unet": ["diffusers", "UNet2DConditionModel"],
    }  # fmt: skip
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    report = check(tmp_path, load=True)
    statuses = {outcome.path.partition("/")[0]: outcome.status for outcome in report.all_load}
    # The class takes more components than the folder lists.
    assert statuses == {"model_index.json": 1, "vae": 0, "unet": 1}
    assert report.status == 1
    assert "206 tensors random after a load" in str(report)


def _index(**changed: object) -> Callable[[Path], None]:
    return lambda root: edit_json(root / "model_index.json", **changed)


def _without(path: str, *leftovers: str) -> Callable[[Path], None]:
    """Return a change that removes a file of a pipeline, and leaves others in its folder."""

    def change(root: Path) -> None:
        (root / path).unlink()
        for name in leftovers:
            (root / path).with_name(name).write_bytes(b"{")

    return change


def _zeroed(root: Path) -> None:
    (root / SCHEDULER).write_bytes(bytes(90))


def _without_folder(root: Path) -> None:
    shutil.rmtree(root / "scheduler")


SCHEDULER = "scheduler/scheduler_config.json"
NO_SCHEDULER = "scheduler/ has no scheduler_config.json, which DDPMScheduler loads"
UNET_WEIGHTS = "diffusion_pytorch_model.safetensors"

PIPELINES: dict[str, tuple[Callable[[Path], None], str]] = {
    "healthy": (lambda root: None, ""),
    "an empty folder of the scheduler": (_without(SCHEDULER), NO_SCHEDULER),
    "a copy by rsync that was cut": (
        _without(SCHEDULER, ".scheduler_config.json.Xy12ab"), NO_SCHEDULER,
    ),
    "no folder of the scheduler": (_without_folder, NO_SCHEDULER),
    "a scheduler that is not JSON": (_zeroed, f"{SCHEDULER}: "),
    "no weights of the unet": (
        _without(f"unet/{UNET_WEIGHTS}", f".{UNET_WEIGHTS}.Xy12ab"),
        f"unet/ has no {UNET_WEIGHTS} or diffusion_pytorch_model.bin, which UNet2DModel loads",
    ),
    "no config of the unet": (
        _without("unet/config.json"), "unet/ has no config.json, which UNet2DModel loads",
    ),
    "an extra component, which is ignored": (_index(vae=["diffusers", "AutoencoderKL"]), ""),
    "no unet": (_index(unet=[None, None]), "model_index.json does not list 'unet'"),
    "an unknown pipeline": (_index(_class_name="DDPMPipelin"), " has no class DDPMPipelin"),
    "an unknown class": (
        _index(unet=["diffusers", "UNet2DModle"]),
        "unet: ValueError: `diffusers` has no class `UNet2DModle`",
    ),
    "an unknown library": (_index(unet=["difusers", "UNet2DModel"]), "unet: ValueError: "),
    "a class of another kind": (
        _index(_class_name="StableDiffusionPipeline"),
        "model_index.json does not list 'text_encoder', 'tokenizer', 'vae'",
    ),
}  # fmt: skip


def ddpm(root: Path, **options: Any) -> Path:
    pipeline = diffusers.DDPMPipeline(
        small_unet(in_channels=1, out_channels=1), diffusers.DDPMScheduler()
    )
    pipeline.save_pretrained(root, **options)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("damage", PIPELINES)
def test_a_pipeline_is_asked_for_its_class_and_components(tmp_path: Path, damage: str) -> None:
    root = ddpm(tmp_path / "pipeline")
    change, words = PIPELINES[damage]
    change(root)
    report = check(root, load=True)
    (outcome,) = report.load
    assert words in outcome.refused, outcome
    assert outcome.status == bool(words)
    assert outcome.components is None or not outcome.unchecked
    if words:
        # Without its config the model itself is not checked.
        assert report.status == (3 if words.startswith("unet/ has no config") else 1)
        with pytest.raises((ValueError, AttributeError, OSError)):
            diffusers.DiffusionPipeline.from_pretrained(root)
    else:
        diffusers.DiffusionPipeline.from_pretrained(root)
        assert "2 components, none is missing" in str(report)
        assert not any("model_index.json names" in words for words in report.not_checked)


PREPROCESSOR = "preprocessor_config.json"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "names", "words"), [
    ("CLIPTokenizer", ["tokenizer.json"], None),
    ("CLIPTokenizer", ["vocab.json", "merges.txt"], None),
    ("CLIPTokenizer", ["vocab.json", ".merges.txt.Xy12ab"], ""),
    ("CLIPTokenizer", ["tokenizer_config.json", "vocab.json.part"],
     "vocab.json and merges.txt or tokenizer.json"),
    ("ByT5Tokenizer", ["tokenizer_config.json"], ""),
    ("CLIPImageProcessor", [PREPROCESSOR], None),
    ("CLIPImageProcessor", [f".{PREPROCESSOR}.Xy12ab"], f"{PREPROCESSOR} or processor_config.json"),
    ("CLIPTextModel", ["config.json", "model.safetensors.index.json"], None),
    ("CLIPTextModel", ["config.json", "model.fp16.safetensors"], ""),
    ("CLIPTextModel", ["model.safetensors"], "config.json"),
    ("CLIPTextModel", ["config.json"], "model.safetensors or pytorch_model.bin"),
])  # fmt: skip
def test_files_of_a_component_of_transformers(
    tmp_path: Path, kind: str, names: list[str], words: str | None
) -> None:
    """``words``: the files that it lacks, None for none, "" where ckptfix does not know."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    index = {"_class_name": "StableDiffusionPipeline", "tokenizer": ["transformers", kind]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    damaged(of_diffusers("UNet2DConditionModel"), "healthy", tmp_path / "unet")
    outcome = check(tmp_path, load=True).load[0]
    assert (f"tokenizer/ has no {words}, which {kind} loads" in outcome.refused) is bool(words)
    assert ("tokenizer/ has no" in outcome.refused) is bool(words)
    unknown = f"whether tokenizer/ has the files that {kind} loads"
    assert outcome.unknown == (() if words or words is None else (unknown,))


@pytest.mark.slow
def test_a_pipeline_of_another_variant_is_not_said_to_have_all(tmp_path: Path) -> None:
    report = check(ddpm(tmp_path / "pipeline", variant="fp16"), load=True)
    assert "none is missing" not in str(report)
    unknown = "whether unet/ has the files that UNet2DModel loads"
    assert any(words == f"model_index.json: {unknown}" for words in report.not_checked)


@pytest.mark.slow
def test_a_library_with_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    """The load ended with OSError: File name too long."""
    damaged(of_diffusers("UNet2DConditionModel"), "healthy", tmp_path / "unet")
    index = {"_class_name": "DDPMPipeline", "unet": ["y" * 5000, "Model"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert check(tmp_path, load=True).load[0].status == 1


@pytest.mark.slow
def test_code_of_a_pipeline_is_not_run(tmp_path: Path) -> None:
    damaged(of_diffusers("UNet2DConditionModel"), "healthy", tmp_path / "unet")
    (tmp_path / "unet" / "mine.py").write_text("raise SystemExit('it ran')")
    index = {"_class_name": "DDPMPipeline", "unet": ["mine", "Model"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    outcome = check(tmp_path, load=True).load[0]
    assert (outcome.status, outcome.unchecked) == (
        3,
        "unet/mine.py is custom code, which ckptfix never runs",
    )


@pytest.mark.slow
def test_the_states_next_to_models_that_hooks_saved_are_no_load(tmp_path: Path) -> None:
    """As diffusers' scripts save: the answer of the model is that of the checkpoint."""
    source = Path(__file__).parents[2] / "fixtures/accelerate-1.15.0/clean-safetensors/checkpoint"
    for name in ("optimizer.bin", "random_states_0.pkl"):
        shutil.copy(source / name, tmp_path)
    damaged(of_diffusers("AutoencoderKL"), "healthy", tmp_path / "vae")
    report = check(tmp_path, load=True)
    assert [(outcome.path, outcome.status) for outcome in report.all_load] == [
        ("vae/diffusion_pytorch_model.safetensors", 0)
    ]


OLDEST = Path(__file__).parents[2] / ".venv/transformers-4.44"


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.exists(), reason="needs the oldest transformers: see README.md")
def test_the_oldest_transformers_answers_too(tmp_path: Path) -> None:
    intact, lacking = tmp_path / "intact", tmp_path / "lacking"
    llama().save_pretrained(intact)
    shutil.copytree(intact, lacking)
    tensors = load_file(lacking / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, lacking / "model.safetensors", {"format": "pt"})
    done = subprocess.run(
        [sys.executable, "-m", "ckptfix", "check", "--load", "--json", intact, lacking],
        env={**os.environ, "PYTHONPATH": f"{OLDEST}{os.pathsep}{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
    )
    loads = [checkpoint["load"] for checkpoint in json.loads(done.stdout)["checkpoints"]]
    outcomes = [outcome for (outcome,) in loads]
    assert all(outcome["library"].startswith("transformers 4.44") for outcome in outcomes)
    assert [outcome["missing"] for outcome in outcomes] == [[], ["model.norm.weight"]]
    assert done.returncode == 1


def test_a_peft_that_reports_no_missing_keys_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of_peft("LoRA").save(tmp_path / "model")
    monkeypatch.setattr(peft, "__version__", "0.14.0")
    answer = ask(asked(load_of(tmp_path / "model")))
    assert answer.unchecked == "peft 0.14.0 is too old (expected 0.15 or newer)"
