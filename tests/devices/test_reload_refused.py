"""Checkpoints of which ``from_pretrained`` raises, warns or says nothing: the verdict is its own,
in words that help.

Every case is loaded by ``from_pretrained`` itself, too, so that an expectation is never of a
transformers of the past.
"""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix.devices.reload import pretrained
from ckptfix.devices.reload.reload_report import Outcome, ReloadReport, Subject
from ckptfix.devices.reload.verifying import verify_reload
from ckptfix.devices.torch_devices import device_count
from tests.devices.test_reload import outcomes, text_of
from tests.devices.test_reload_transformers import edit_config, saved
from tests.simulated.models import VOCABULARY, WIDTH, gpt2, mixtral, qwen2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        device_count() > 0, reason="these say what a machine without accelerator proves"
    ),
]
State = dict[str, torch.Tensor]
EXPERTS = "model.layers.0.block_sparse_moe.experts"


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    return BertForSequenceClassification(config).eval()


def llava() -> Any:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    torch.manual_seed(0)
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, pad_token_id=0, **sizes)
    vision = CLIPVisionConfig(image_size=28, patch_size=14, **sizes)
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_index=96)
    ).eval()


def change(folder: Path, made: Callable[[State], Mapping[str, torch.Tensor]]) -> None:
    path = str(folder / "model.safetensors")
    state = {name: value.contiguous() for name, value in made(load_file(path)).items()}
    save_file(state, path, metadata={"format": "pt"})


def without(part: str) -> Callable[[State], State]:
    return lambda state: {name: value for name, value in state.items() if part not in name}


def failed(report: ReloadReport) -> str:
    return "\n".join(proof.text for proof in report.proofs if proof.outcome is Outcome.FAILED)


def refuses(folder: Path, kind: Any) -> str:
    """Return what ``from_pretrained`` raises, of the configuration first, as AutoModel does; "" for
    nothing.
    """
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        kind.from_pretrained(str(folder))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Refused(NamedTuple):
    """A checkpoint that from_pretrained refuses: its model, what is done to it, and words of the
    failing lines.
    """

    make: Callable[[], Any]
    entries: dict[str, Any]
    change: Callable[[State], State] | None
    says: tuple[str, ...]


REFUSED = {
    "unknown model type": Refused(
        qwen2, {"model_type": "of-nobody"}, None, ("model type `of-nobody`",)
    ),
    "unknown model type and class": Refused(
        qwen2,
        {"model_type": "of-nobody", "architectures": ["Nobody"]},
        None,
        ("model type `of-nobody`",),
    ),
    "no model type": Refused(qwen2, {"model_type": None}, None, ("Unrecognized model",)),
    "heads in words": Refused(
        qwen2, {"num_attention_heads": "four"}, None, ("expected int, got str",)
    ),
    "seven heads": Refused(
        qwen2,
        {"num_attention_heads": 7},
        None,
        (
            "'model.layers.0.self_attn.k_proj.bias' has shape [16] in the file, [8] in the model",
            "more shapes differ",
        ),
    ),
    "an activation of nobody": Refused(
        qwen2, {"hidden_act": "of-nobody"}, None, ("KeyError: 'of-nobody'",)
    ),
    "a dtype of nobody": Refused(qwen2, {"dtype": "float31"}, None, ("float31",)),
    "fewer layers than their types": Refused(
        qwen2, {"num_hidden_layers": 1}, None, ("layer_types",)
    ),
    "another vocabulary": Refused(
        qwen2,
        {"vocab_size": 101},
        None,
        (
            "has shape [97, 32] in the file, [101, 32] in the model",
            "shape mismatch with config.json in 2 tensors",
        ),
    ),
    "a tensor of another shape": Refused(
        qwen2,
        {},
        lambda state: {**state, "model.norm.weight": torch.ones(3)},
        ("'model.norm.weight' has shape [3] in the file, [32] in the model",),
    ),
    "an expert missing": Refused(
        mixtral,
        {},
        without(f"{EXPERTS}.1."),
        (
            "has shape [3, 32, 48] when merged from the file, [4, 32, 48]",
            f"the file lacks '{EXPERTS}.1.w1.weight'",
        ),
    ),
    "a weight of an expert missing": Refused(
        mixtral,
        {},
        without(f"{EXPERTS}.1.w1"),
        (
            "'model.layers.0.mlp.experts.gate_up_proj' do not fit together",
            f"the file lacks '{EXPERTS}.1.w1.weight'",
        ),
    ),
    "an expert of another shape": Refused(
        mixtral,
        {},
        lambda state: {**state, f"{EXPERTS}.1.w1.weight": torch.ones(5, 5)},
        ("but got [48, 32] at entry 0 and [5, 5] at entry 1",),
    ),
    "more experts than in the file": Refused(
        mixtral,
        {"num_local_experts": 8},
        None,
        ("has shape [4, 32, 48] when merged from the file, [8, 32, 48]",),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_from_pretrained_refuses_is_a_failure(tmp_path: Path, name: str) -> None:
    case = REFUSED[name]
    model = case.make()
    folder = saved(tmp_path / "model", model)
    edit_config(folder, **case.entries)
    if case.change is not None:
        change(folder, case.change)
    assert refuses(folder, type(model))
    report = verify_reload(folder)
    assert report.status == 1, str(report)
    for words in (*case.says, "from_pretrained refuses"):
        assert words in failed(report), str(report)
    assert outcomes(report, Subject.FILE_BYTES) == [Outcome.PROVEN], (
        "the file itself is not accused"
    )
    assert "renamed or merged" not in str(report)
    assert not any("\n" in proof.text for proof in report.proofs)


@pytest.mark.parametrize("text", ["", "{nope", "[1]", '{"a": '])
def test_a_config_that_is_not_json_is_a_failure(tmp_path: Path, text: str) -> None:
    folder = saved(tmp_path / "model", qwen2())
    (folder / "config.json").write_text(text)
    from transformers import Qwen2ForCausalLM

    assert refuses(folder, Qwen2ForCausalLM)
    report = verify_reload(folder)
    assert report.status == 1
    assert f"from_pretrained refuses {folder}: config.json" in text_of(
        report, Subject.LOADING, Outcome.FAILED
    )


@pytest.mark.parametrize(
    ("text", "status"),
    [("[1]", 1), ('{"max_new_tokens": -1}', 1), ("{nope", 0), ('{"max_new_tokens": 3}', 0)],
)
def test_a_generation_config_counts_as_it_does_for_from_pretrained(
    tmp_path: Path, text: str, status: int
) -> None:
    from transformers import Qwen2ForCausalLM

    folder = saved(tmp_path / "model", qwen2())
    (folder / "generation_config.json").write_text(text)
    assert bool(refuses(folder, Qwen2ForCausalLM)) == bool(status)
    report = verify_reload(folder)
    assert report.status == status, str(report)
    assert ("generation_config.json: " in failed(report)) == bool(status)


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "model_1.safetensors", "model.bin", "student.pth"]
)
def test_weights_under_a_name_that_from_pretrained_does_not_look_for_are_a_failure(
    tmp_path: Path, name: str
) -> None:
    from transformers import Qwen2ForCausalLM

    folder = saved(tmp_path / "model", qwen2())
    own = folder / "model.safetensors"
    if name.endswith("safetensors"):
        own.rename(folder / name)
    else:
        torch.save(load_file(own), folder / name)
        own.unlink()
    assert "no file named model.safetensors" in refuses(folder, Qwen2ForCausalLM)
    report = verify_reload(folder)
    assert report.status == 1, str(report)
    assert f"from_pretrained refuses {folder}: it looks only for model.safetensors" in failed(
        report
    )
    assert f"so it ignores {name}; rename it" in failed(report)
    assert outcomes(report, Subject.OUTPUTS) == [Outcome.PROVEN], (
        "the model itself is exercised all the same"
    )
    assert verify_reload(folder / name).status == 0, "one file by its path: its name is no promise"


@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_weights_of_a_variant_are_found_with_that_variant_alone(
    tmp_path: Path, size: str, variant: str | None
) -> None:
    from transformers import Qwen2ForCausalLM

    model = qwen2()
    folder = tmp_path / "model"
    model.save_pretrained(folder, variant=variant, max_shard_size=size)
    assert bool(refuses(folder, Qwen2ForCausalLM)) == (variant is not None)
    assert Qwen2ForCausalLM.from_pretrained(str(folder), variant=variant)
    report = verify_reload(folder)
    assert report.status == 0, str(report)
    assert ("must pass variant='fp16'" in str(report)) == (variant is not None)


def test_a_config_of_a_model_that_no_memory_holds_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model", qwen2())
    (folder / "config.json").write_text(
        '{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}'
    )
    monkeypatch.setattr(pretrained, "free_memory", lambda: {"cpu": 1 << 30})
    report = verify_reload(folder)
    assert report.status == 1
    assert "a model of at least" in failed(report)
    monkeypatch.setattr(pretrained, "free_memory", lambda: {"cpu": 1 << 10})
    saved(folder, qwen2())
    report = verify_reload(folder)
    assert report.status == 0, "it is this host that is too small"
    assert "1.0 KiB of free memory" in text_of(report, Subject.OUTPUTS, Outcome.NOT_EXERCISED)


@pytest.mark.parametrize(
    ("make", "entries", "changed", "says"),
    [
        (
            qwen2,
            {},
            without("layers.0.self_attn.q_proj.weight"),
            (
                "missing: 'model.layers.0.self_attn.q_proj.weight'; from_pretrained fills the gap "
                "with random values"
            ),
        ),
        (
            qwen2,
            {},
            lambda state: {**state, "model.extra.weight": torch.ones(3)},
            "1 unexpected key: 'model.extra.weight'; from_pretrained ignores them",
        ),
        (
            qwen2,
            {},
            lambda state: {f"module.{name}": value for name, value in state.items()},
            "begins with 'module.', but no key of the model does",
        ),
        (
            mixtral,
            {},
            lambda state: {
                name: value.double() if "experts" in name else value
                for name, value in state.items()
            },
            (
                "'model.layers.0.block_sparse_moe.experts.0.w1.weight' is float64 in the file, "
                "float32 in the model"
            ),
        ),
        (
            mixtral,
            {},
            lambda state: {
                name.replace(f"{EXPERTS}.3.", f"{EXPERTS}.4."): value
                for name, value in state.items()
            },
            ("from_pretrained silently closes the gap, so later tensors move up; the file lacks"),
        ),
        (
            bert,
            {},
            lambda state: {**state, "bert.embeddings.LayerNorm.gamma": torch.full((WIDTH,), 2.0)},
            "both map to 'bert.embeddings.LayerNorm.weight': from_pretrained silently drops one of them",
        ),
    ],
    ids=[
        "missing",
        "unexpected",
        "prefix",
        "float64 experts",
        "a gap in the experts",
        "two for one place",
    ],
)
def test_what_from_pretrained_takes_and_changes_is_a_failure_that_says_what_happened(
    tmp_path: Path, make: Any, entries: dict[str, Any], changed: Any, says: str
) -> None:
    model = make()
    folder = saved(tmp_path / "model", model)
    edit_config(folder, **entries)
    change(folder, changed)
    assert not refuses(folder, type(model)), "it loads, and is another model"
    report = verify_reload(folder)
    assert report.status == 1, str(report)
    assert says in failed(report), str(report)


@pytest.mark.parametrize(
    ("make", "entries", "changed"),
    [
        (gpt2, {}, lambda state: {**state, "lm_head.weight": torch.randn(VOCABULARY, WIDTH)}),
        (qwen2, {"tie_word_embeddings": True}, None),
    ],
)
def test_a_tie_that_the_file_breaks_is_a_failure(
    tmp_path: Path,
    make: Any,
    entries: dict[str, Any],
    changed: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make()
    folder = saved(tmp_path / "model", model)
    edit_config(folder, **entries)
    if changed is not None:
        change(folder, changed)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        assert not refuses(folder, type(model))
    finally:
        logger.removeHandler(caplog.handler)
    assert "NOT tie them" in caplog.text
    report = verify_reload(folder)
    assert report.status == 1
    says = text_of(report, Subject.TIES, Outcome.FAILED)
    assert "'lm_head.weight' are one tensor in" in says
    assert '"tie_word_embeddings": false' in says


def test_a_tie_whose_two_copies_are_equal_is_proven(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", gpt2())
    change(
        folder, lambda state: {**state, "lm_head.weight": state["transformer.wte.weight"].clone()}
    )
    report = verify_reload(folder)
    assert report.status == 0, str(report)
    assert outcomes(report, Subject.TIES) == [Outcome.PROVEN]


def test_merged_experts_are_said_to_be_merged_and_are_no_failure(tmp_path: Path) -> None:
    report = verify_reload(saved(tmp_path / "model", mixtral()))
    assert report.status == 0, str(report)
    says = text_of(report, Subject.PLACEMENT, Outcome.NOT_EXERCISED)
    assert "the loader merges or splits 24 tensors of the file" in says
    assert "into 4 tensors of the model" in says


def test_tensors_that_were_only_renamed_are_proven_byte_by_byte(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", bert())
    change(
        folder,
        lambda state: {
            name.replace("LayerNorm.weight", "LayerNorm.gamma"): state[name] for name in state
        },
    )
    report = verify_reload(folder)
    assert report.status == 0, str(report)
    assert not [
        proof for proof in report.proofs if "merged" in proof.text or "renamed" in proof.text
    ]
    assert f"{len(load_file(str(folder / 'model.safetensors')))} tensors" in text_of(
        report, Subject.PLACEMENT, Outcome.PROVEN
    )


def test_what_a_class_ignores_by_design_is_said_and_no_failure(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", bert())
    change(folder, lambda state: {**state, "bert.embeddings.position_ids": torch.arange(512)[None]})
    report = verify_reload(folder)
    assert report.status == 0, str(report)
    assert "from_pretrained ignores the values without a warning" in text_of(
        report, Subject.PLACEMENT, Outcome.NOT_EXERCISED
    )


def test_a_tower_without_inputs_and_what_every_build_leaves_out_are_listed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", llava())
    edit_config(folder, attn_implementation="x/kernels")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "x"}))
    report = verify_reload(folder)
    assert report.status == 0, str(report)
    says = text_of(report, Subject.BEYOND, Outcome.NOT_EXERCISED)
    assert "no input reached: 'model.multi_modal_projector', 'model.vision_tower'" in says
    assert "attn_implementation='eager'; config.json asks for 'x/kernels'" in says
    assert "fills the model on the CPU and then dispatches it" in says
    assert "adapter_config.json" in says


def test_a_model_that_uses_all_of_its_weights_has_no_unreached_part(tmp_path: Path) -> None:
    for make in (qwen2, gpt2, mixtral):
        report = verify_reload(saved(tmp_path / make.__name__, make()))
        assert "no input reached" not in str(report)


def test_an_offload_that_computes_something_else_accuses_only_a_map_that_has_it(
    tmp_path: Path,
) -> None:
    """A module that reads another's weight in its forward pass gets what lies on the meta device,
    or worse.
    """
    from transformers import MobileBertConfig, MobileBertForMaskedLM

    torch.manual_seed(0)
    config = MobileBertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, embedding_size=16, num_hidden_layers=1,
        num_attention_heads=4, intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    folder = saved(tmp_path / "model", MobileBertForMaskedLM(config).eval())
    report = verify_reload(folder)
    assert report.status == 0, str(report)
    assert verify_reload(folder, device_map={"": "cpu"}).status == 0
    asked = verify_reload(folder, device_map={"": "disk"})
    same = "split over disk == cpu alone"
    assert asked.status == int(same not in str(asked)), str(asked)
