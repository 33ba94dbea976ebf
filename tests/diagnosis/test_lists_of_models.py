"""Lists of models, of diffusers and of sentence-transformers: a broken list, and models without a
config or weights.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, BertModel

from ckptfix import check
from tests.commanding import Said, said
from tests.diagnosis.test_lost_weights import BERT, made, without

__all__ = ["made", "said"]

diffusers: Any = pytest.importorskip("diffusers")
peft: Any = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

Change = Callable[[Path], object]

NO_CONFIG = (
    "unet/ has no config.json: model_index.json lists it as UNet2DModel, so the pipeline cannot be "
    "loaded"
)


def cut(name: str) -> Change:
    return lambda root: os.truncate(root / name, (root / name).stat().st_size // 2)


NOT_LOADED = "so DiffusionPipeline.from_pretrained fails"


@pytest.mark.parametrize("name", ["lone", "pipeline"])
@pytest.mark.parametrize(("change", "words"), [
    (cut("model_index.json"), f"model_index.json: not JSON, {NOT_LOADED}"),
    (lambda root: (root / "model_index.json").write_text(""),
     f"model_index.json: empty, {NOT_LOADED}"),
    (without("unet/config.json"), NO_CONFIG),
])  # fmt: skip
def test_a_pipeline_that_cannot_be_loaded(
    made: Path, tmp_path: Path, said: Said, name: str, change: Change, words: str
) -> None:
    """A check of it was wrong usage, and ``check -r`` found no error."""
    folder = Path(shutil.copytree(made / name, tmp_path / name))
    change(folder)
    with pytest.raises((OSError, ValueError)):
        diffusers.DiffusionPipeline.from_pretrained(folder)
    assert [str(finding) for finding in check(folder).all_findings] == [words]
    for arguments in (("check", folder), ("check", "-r", tmp_path)):
        status, out, _ = said(*arguments)
        assert (status, words in out) == (1, True)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_a_model_of_diffusers_behind_a_wrapper(
    made: Path, tmp_path: Path, said: Said, prefix: str
) -> None:
    """It was a note: status 0."""
    folder = Path(shutil.copytree(made / "lone" / "unet", tmp_path / "unet"))
    weights = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    save_file(
        {prefix + key: each for key, each in tensors.items()}, weights, metadata={"format": "pt"}
    )

    def is_loaded() -> bool:
        state = diffusers.UNet2DModel.from_pretrained(folder, low_cpu_mem_usage=False).state_dict()
        return all(torch.equal(state[key], each) for key, each in tensors.items())

    assert not is_loaded()
    pairs = [(finding.code, finding.severity.value) for finding in check(folder).findings]
    assert pairs == [("wrapper-prefix", "warning")]
    assert said("repair", "--keys", "bare", folder)[0] == 0
    assert (check(folder).findings, is_loaded()) == ((), True)


def test_a_repair_of_a_pipeline_without_a_model_names_the_check(
    made: Path, tmp_path: Path, said: Said
) -> None:
    """It named the command that was typed."""
    folder = Path(shutil.copytree(made / "pipeline", tmp_path / "pipeline"))
    without("unet/diffusion_pytorch_model.safetensors")(folder)
    status, _, told = said("repair", folder)
    words = f"{folder} has no checkpoint files; to see what it lacks: ckptfix check {folder}"
    assert (status, told) == (2, f"ckptfix: {words}\n")


def test_a_broken_list_without_weights_is_no_checkpoint(
    made: Path, tmp_path: Path, said: Said
) -> None:
    (tmp_path / "model_index.json").write_text("{")
    shutil.copytree(made / "lone" / "scheduler", tmp_path / "scheduler")
    assert said("check", tmp_path)[0] == said("check", "-r", tmp_path)[0] == 2


def test_an_adapter_without_its_config(
    made: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = Path(shutil.copytree(made / "lora", tmp_path / "lora"))
    assert said("check", folder)[0] == 0
    without("adapter_config.json")(folder)
    with pytest.raises(ValueError, match="adapter_config"):
        peft.PeftModel.from_pretrained(AutoModel.from_pretrained(made / "bert"), str(folder))
    (finding,) = check(folder).findings
    assert (
        str(finding)
        == "adapter_config.json is missing: PEFT needs it to load adapter_model.safetensors"
    )
    assert (
        finding.advice
        == "PeftModel.from_pretrained fails without it; copy it again from the adapter's source"
    )
    assert said("check", folder)[0] == said("check", "-r", folder)[0] == 1


def sentences(root: Path, *, first: str = "", base: str = "sentence_transformers.models.") -> Path:
    """Write a model as sentence-transformers does, 2 to 6. ``first``: the folder of its first
    module.
    """
    BertModel(BertConfig(**BERT)).save_pretrained(root / first)
    (root / first / "tokenizer.json").write_text("{}")
    (root / first / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    (root / "config_sentence_transformers.json").write_text("{}")
    for name, values in (
        ("1_Pooling", {"word_embedding_dimension": 8}),
        ("2_Dense", {"in_features": 8, "out_features": 4}),
    ):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(values))
    weights = {"linear.weight": torch.ones(4, 8), "linear.bias": torch.ones(4)}
    save_file(weights, root / "2_Dense" / "model.safetensors", metadata={"format": "pt"})
    modules = {
        first: "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize",
    }  # fmt: skip
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": base + kind}
        for number, (path, kind) in enumerate(modules.items())
    ]
    (root / "modules.json").write_text(json.dumps(listed))
    return root


LAYOUTS = {
    "": "sentence_transformers.models.",
    "0_Transformer": "sentence_transformers.base.modules.transformer.",
}


@pytest.mark.parametrize("first", LAYOUTS)
def test_a_model_of_sentence_transformers(first: str, tmp_path: Path, said: Said) -> None:
    """Its ``3_Normalize`` has no files, so that no archive has the folder."""
    sentences(tmp_path, first=first, base=LAYOUTS[first])
    assert check(tmp_path).all_findings == ()
    assert said("check", tmp_path)[0] == said("check", "-r", tmp_path)[0] == 0


@pytest.mark.parametrize("first", LAYOUTS)
def test_a_model_of_sentence_transformers_with_other_weights(first: str, tmp_path: Path) -> None:
    """The backends ``onnx`` and ``openvino`` load their own."""
    sentences(tmp_path, first=first, base=LAYOUTS[first])
    without("model.safetensors")(tmp_path / first)
    (tmp_path / first / "onnx").mkdir()
    (tmp_path / first / "onnx" / "model.onnx").write_bytes(b"\x08\x07\x12\x07pytorch" + bytes(90))
    assert check(tmp_path).all_findings == ()


FIRST, FAILS = "0_Transformer", "so the model cannot be loaded"


@pytest.mark.parametrize(("first", "change", "words"), [
    ("", without("model.safetensors"),
     "this folder has no weights: modules.json lists a Transformer, which cannot be loaded "
     "(expected model.safetensors or pytorch_model.bin)"),
    (FIRST, without(f"{FIRST}/model.safetensors"),
     f"{FIRST}/ has no weights: modules.json lists it as Transformer, {FAILS}"),
    ("", without("2_Dense/model.safetensors"),
     f"2_Dense/ has no weights: modules.json lists it as Dense, {FAILS}"),
    ("", without("2_Dense"), f"2_Dense/ is missing: modules.json lists it as Dense, {FAILS}"),
    (FIRST, without("1_Pooling"),
     f"1_Pooling/ is missing: modules.json lists it as Pooling, {FAILS}"),
    ("", cut("modules.json"), "modules.json: not JSON, so SentenceTransformer fails"),
])  # fmt: skip
def test_a_model_of_sentence_transformers_that_lacks_a_part(
    first: str, change: Change, words: str, tmp_path: Path, said: Said
) -> None:
    """``check -r`` found no error; a check was wrong usage where the folder itself had no
    weights.
    """
    sentences(tmp_path, first=first, base=LAYOUTS[first])
    change(tmp_path)
    assert [str(finding) for finding in check(tmp_path).all_findings] == [words]
    for arguments in (("check", tmp_path), ("check", "-r", tmp_path)):
        status, out, _ = said(*arguments)
        assert (status, words in out) == (1, True)


@pytest.mark.parametrize("path", ["../bert", "/etc", "..", "a\nb", "\0"])
def test_a_hostile_list_of_modules(path: str, tmp_path: Path) -> None:
    sentences(tmp_path)
    listed = json.loads((tmp_path / "modules.json").read_text())
    kind = "sentence_transformers.models.Dense"
    (tmp_path / "modules.json").write_text(
        json.dumps([*listed, {"path": path, "type": kind}, 1, {}, [[]]])
    )
    assert check(tmp_path).all_findings == ()


def test_a_list_of_modules_of_another_program(made: Path, tmp_path: Path, said: Said) -> None:
    shutil.copytree(made / "bert", tmp_path / "run")
    (tmp_path / "modules.json").write_text('{"modules": ')
    assert said("check", tmp_path)[0] == 2
    assert said("check", "-r", tmp_path)[0] == 0
