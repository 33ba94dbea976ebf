"""Ties and heads against the config: what transformers makes of a contradiction, and healthy models
of many classes.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import Accelerator

from ckptfix import check
from tests.repairs.builders import RANDOM_STATES
from tests.sampling import sampled
from tests.tiny_models import load, reconfigure, tensors_of, tiny, write

pytestmark = pytest.mark.filterwarnings("ignore")

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CODES = {"untied-weights", "missing-head"}


def llama(root: Path, *, tied: bool, **settings: object) -> dict[str, torch.Tensor]:
    tiny("LlamaForCausalLM", tie_word_embeddings=tied, **settings).save_pretrained(root)
    return tensors_of(root)


def headless(root: Path) -> dict[str, torch.Tensor]:
    """Save a model whose head nothing ties, without its head; return the tensors."""
    tensors = llama(root, tied=False)
    assert verdicts(root) == []
    del tensors[HEAD]
    write(root, tensors)
    return tensors


def verdicts(root: Path, *, data: bool = False) -> list[tuple[str, str]]:
    findings = check(root, data=data).all_findings
    return [(finding.severity.value, finding.code) for finding in findings if finding.code in CODES]


def loaded(root: Path) -> dict[str, torch.Tensor]:
    model = transformers.LlamaForCausalLM.from_pretrained(root)
    return {
        HEAD: model.lm_head.weight.detach(),
        EMBEDDING: model.model.embed_tokens.weight.detach(),
    }


@pytest.mark.parametrize("is_said", [True, False])
def test_two_weights_that_differ_and_are_tied(is_said: bool, tmp_path: Path) -> None:
    name = "LlamaForCausalLM" if is_said else "GemmaForCausalLM"
    tiny(name, tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    assert HEAD not in tensors
    assert verdicts(tmp_path) == []
    write(tmp_path, {**tensors, HEAD: tensors[EMBEDDING]})
    assert verdicts(tmp_path) == verdicts(tmp_path, data=True) == []
    write(tmp_path, {**tensors, HEAD: tensors[EMBEDDING] + 1})
    if is_said:
        pair = loaded(tmp_path)
        assert torch.equal(pair[HEAD], pair[EMBEDDING] + 1)
    assert verdicts(tmp_path) == [("warning", "untied-weights")]
    (finding,) = (each for each in check(tmp_path).findings if each.code == "untied-weights")
    assert str(finding).startswith(
        f"model.safetensors: {HEAD!r} and {EMBEDDING!r} differ, but tie_word_embeddings ties them"
    )
    reconfigure(tmp_path, tie_word_embeddings=False)
    assert verdicts(tmp_path) == []


def test_a_difference_beyond_the_samples_needs_data(tmp_path: Path) -> None:
    tensors = llama(tmp_path, tied=True, vocab_size=512)
    head = tensors[EMBEDDING].clone()
    head[-1, -1] += 1
    write(tmp_path, {**tensors, HEAD: head})
    assert head.nbytes > 1 << 12
    assert verdicts(tmp_path) == []
    assert verdicts(tmp_path, data=True) == [("warning", "untied-weights")]


def test_a_tie_in_torch_files_is_one_storage(tmp_path: Path) -> None:
    tensors = llama(tmp_path, tied=True)
    (tmp_path / "model.safetensors").unlink()
    torch.save({**tensors, HEAD: tensors[EMBEDDING]}, tmp_path / "pytorch_model.bin")
    assert verdicts(tmp_path) == []
    torch.save({**tensors, HEAD: tensors[EMBEDDING] * 2}, tmp_path / "pytorch_model.bin")
    assert verdicts(tmp_path) == [("warning", "untied-weights")]


def test_a_head_that_nothing_ties_and_nobody_saved(tmp_path: Path) -> None:
    headless(tmp_path)
    assert load(tmp_path) == "1 random, 0 unused"
    assert verdicts(tmp_path) == [("error", "missing-head")]
    (tmp_path / "random_states_0.pkl").write_bytes(RANDOM_STATES)
    assert verdicts(tmp_path) == [("warning", "missing-head")]
    (tmp_path / "random_states_0.pkl").unlink()
    reconfigure(tmp_path, tie_word_embeddings=True)
    assert load(tmp_path) == "complete"
    assert verdicts(tmp_path) == []


def test_weights_of_another_class_under_the_architectures_that_they_began_as(
    tmp_path: Path,
) -> None:
    """``config.save_pretrained`` leaves them as they were loaded; the model is healthy."""
    llama(tmp_path / "base", tied=False)
    model = transformers.LlamaForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=3
    )
    Accelerator(cpu=True).save_model(model, tmp_path / "own")
    model.config.save_pretrained(tmp_path / "own")
    _, told = transformers.LlamaForSequenceClassification.from_pretrained(
        tmp_path / "own", output_loading_info=True
    )
    assert not any(told.values())
    assert verdicts(tmp_path / "own") == [("note", "missing-head")]
    assert "'score.weight'" in str(check(tmp_path / "own").findings[0])


@pytest.mark.parametrize(
    "name",
    [f"foo.{HEAD}", "lm_head.modules_to_save.default.weight"],
)
def test_a_head_under_a_name_that_no_load_finds(name: str, tmp_path: Path) -> None:
    tensors = llama(tmp_path, tied=False, num_hidden_layers=6)
    tensors[name] = tensors.pop(HEAD)
    write(tmp_path, tensors)
    assert load(tmp_path) == "1 random, 1 unused"
    assert verdicts(tmp_path) == [("error", "missing-head")]


@pytest.mark.parametrize("wrapper", ["module.", "base_model."])
def test_a_head_behind_a_wrapper_is_no_missing_one(wrapper: str, tmp_path: Path) -> None:
    """``dead-weights`` tells it, and a repair renames it."""
    tensors = llama(tmp_path, tied=False, num_hidden_layers=6)
    tensors[f"{wrapper}{HEAD}"] = tensors.pop(HEAD)
    write(tmp_path, tensors)
    assert [finding.code for finding in check(tmp_path).findings] == ["dead-weights"]


def test_a_value_head_stands_next_to_the_head_that_is_lost(tmp_path: Path) -> None:
    write(tmp_path, {**headless(tmp_path), "v_head.summary.weight": torch.ones(1, 16)})
    assert verdicts(tmp_path) == [("error", "missing-head")]


def test_a_save_state_of_a_head_that_peft_wraps(tmp_path: Path) -> None:
    tensors = llama(tmp_path, tied=False)
    head = tensors.pop(HEAD)
    names = ("original_module", "modules_to_save.default")
    wrapped = {f"lm_head.{name}.weight": head for name in names}
    write(tmp_path, {**tensors, **{key: each.clone() for key, each in wrapped.items()}})
    (tmp_path / "random_states_0.pkl").write_bytes(RANDOM_STATES)
    assert verdicts(tmp_path) == []


def test_a_setting_that_is_left_out_is_the_default_of_its_version_alone(tmp_path: Path) -> None:
    headless(tmp_path)
    path = tmp_path / "config.json"
    text = path.read_text()
    assert '"tie_word_embeddings": false' in text
    path.write_text(text.replace('"tie_word_embeddings"', '"other"'))
    assert verdicts(tmp_path) == [("error", "missing-head")]
    reconfigure(tmp_path, transformers_version="4.40.0")
    assert verdicts(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Glm4vForConditionalGeneration", {"text_config__tie_word_embeddings": True}),
        ("MT5ForConditionalGeneration", {}),
        ("PaddleOCRVLForConditionalGeneration", {}),
        ("T5ForConditionalGeneration", {}),
        ("UdopForConditionalGeneration", {}),
    ],
)
def test_a_setting_that_the_class_overrides(
    name: str, settings: Mapping[str, bool], tmp_path: Path
) -> None:
    """T5 ties always; GLM-4V ties where the config of its text says so."""
    tiny(name, tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in tensors_of(tmp_path)
    reconfigure(tmp_path, tie_word_embeddings=False, **settings)
    assert load(tmp_path) == "complete"
    assert verdicts(tmp_path) == []


def test_a_head_that_another_version_ties_by_default(tmp_path: Path) -> None:
    """Transformers 4.44.2 ties it and writes no tie_word_embeddings, 5.23.0 ties it never."""
    tiny("BigBirdPegasusForCausalLM").save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    del tensors[HEAD]
    write(tmp_path, tensors)
    assert load(tmp_path) == "1 random, 0 unused"
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"tie_word_embeddings"', '"other"'))
    assert verdicts(tmp_path) == [("error", "missing-head")]
    reconfigure(tmp_path, transformers_version="4.44.2")
    assert verdicts(tmp_path) == []
    reconfigure(tmp_path, tie_word_embeddings=False)
    assert verdicts(tmp_path) == [("error", "missing-head")]


@pytest.mark.parametrize("value", [None, "false", 0, [False], {"a": 1}])
def test_a_setting_that_is_none(value: object, tmp_path: Path) -> None:
    headless(tmp_path)
    reconfigure(tmp_path, tie_word_embeddings=value)
    assert verdicts(tmp_path) == []


def test_a_base_model_under_the_name_of_the_class_with_the_head(tmp_path: Path) -> None:
    """As of an embedding model: ``AutoModel`` loads it, and needs no head."""
    tensors = headless(tmp_path)
    write(tmp_path, {key.removeprefix("model."): each for key, each in tensors.items()})
    assert load(tmp_path) == "1 random, 0 unused"
    transformers.LlamaModel.from_pretrained(tmp_path)
    assert verdicts(tmp_path) == [("note", "missing-head")]


IN_MEMORY = (
    "CohereAsrForConditionalGeneration",
    "GPTNeoXForCausalLM",
    "Inkling2ForCausalLM",
    "LlavaForConditionalGeneration",
    "MistralLarge4ForConditionalGeneration",
    "MixtralForCausalLM",
    "MllamaForConditionalGeneration",
    "UltrabertForMaskedLM",
)


@pytest.mark.parametrize("name", IN_MEMORY)
def test_a_head_under_its_name_in_memory_is_there(name: str, tmp_path: Path) -> None:
    """Such as accelerate's save_model writes it: a load takes both names."""
    model = tiny(name)
    model.config.architectures = [name]
    model.config.save_pretrained(tmp_path)
    write(tmp_path, model.state_dict())
    assert load(tmp_path) == "complete"
    assert check(tmp_path).findings == ()


def test_a_text_model_of_other_names_in_a_model_of_images_does_not_lack_its_head(
    tmp_path: Path,
) -> None:
    """The head is there, so that neither the weights nor the setting of the tie are to be
    changed.
    """
    tiny("LlavaForConditionalGeneration").save_pretrained(tmp_path)
    tensors = {
        key.replace("language_model.model.", "model.").replace("language_model.", ""): each
        for key, each in tensors_of(tmp_path).items()
    }
    write(tmp_path, tensors)
    assert load(tmp_path) == "20 random, 20 unused"
    assert verdicts(tmp_path) == []
    assert any("ckptfix check --load" in words for words in check(tmp_path).not_checked)


def test_a_head_behind_a_prefix_or_quantized_is_there(tmp_path: Path) -> None:
    tensors = llama(tmp_path, tied=False)
    write(tmp_path, {f"module.{key}": each for key, each in tensors.items()})
    assert verdicts(tmp_path) == []
    head = tensors.pop(HEAD)
    write(tmp_path, {**tensors, "lm_head.qweight": head.to(torch.int32), "lm_head.scales": head[0]})
    assert verdicts(tmp_path) == []


CLASSES = (
    "AlbertForMaskedLM BartForConditionalGeneration BertForMaskedLM BertForPreTraining "
    "BloomForCausalLM CohereForCausalLM DebertaV2ForMaskedLM DistilBertForMaskedLM "
    "ElectraForMaskedLM FalconForCausalLM FunnelForMaskedLM Gemma2ForCausalLM GPT2LMHeadModel "
    "GPT2DoubleHeadsModel GPTNeoXForCausalLM GptOssForCausalLM LlamaModel "
    "LlamaForSequenceClassification MarianMTModel MBartForConditionalGeneration "
    "MistralForCausalLM MixtralForCausalLM MPNetForMaskedLM MT5ForConditionalGeneration "
    "OPTForCausalLM PegasusForConditionalGeneration PhiForCausalLM Qwen2ForCausalLM "
    "Qwen3MoeForCausalLM RobertaForMaskedLM T5ForConditionalGeneration "
    "UMT5ForConditionalGeneration XGLMForCausalLM XLMRobertaForMaskedLM MambaForCausalLM "
    "Step3p7ForConditionalGeneration"
)


@pytest.mark.parametrize("tied", [True, False, None])
@pytest.mark.parametrize("name", sampled(CLASSES.split()))
def test_what_save_pretrained_writes_is_healthy(
    name: str, tied: bool | None, tmp_path: Path
) -> None:
    settings = {} if tied is None else {"tie_word_embeddings": tied}
    model = tiny(name, **settings)
    model.save_pretrained(tmp_path)
    assert load(tmp_path) == "complete"
    assert verdicts(tmp_path) == []
    # As older versions wrote it, and torch does: each tie under all of its keys.
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert verdicts(tmp_path) == []
