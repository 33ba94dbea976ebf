"""Folders of transformers, PEFT and diffusers whose weights are gone, against the libraries that
load them.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModel, BertConfig, BertModel

from ckptfix import check
from ckptfix.diagnosis.findings.config_faults import MissingModel
from tests.commanding import Said, said
from tests.diagnosis.builders import edit_json, small_unet

__all__ = ["said"]

diffusers: Any = pytest.importorskip("diffusers")
peft: Any = pytest.importorskip("peft")
# Each loader has warnings of its own about what it is going to change.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

WEIGHTS = "diffusion_pytorch_model.safetensors"
Change = Callable[[Path], object]
BERT = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8,
    "vocab_size": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that the libraries saved: ``lone`` with one model, ``pipeline`` with two, ``bert``
    and ``lora``.
    """
    root = tmp_path_factory.mktemp("libraries")
    diffusers.DDPMPipeline(unet=small_unet(), scheduler=diffusers.DDPMScheduler()).save_pretrained(
        root / "lone"
    )
    vqvae = diffusers.VQModel(block_out_channels=(8,), norm_num_groups=4)
    two_models = diffusers.LDMPipeline(
        vqvae=vqvae, unet=small_unet(), scheduler=diffusers.DDPMScheduler()
    )
    two_models.save_pretrained(root / "pipeline")
    bert = BertModel(BertConfig(**BERT))
    bert.save_pretrained(root / "bert")
    peft.get_peft_model(bert, peft.LoraConfig(target_modules=["query"])).save_pretrained(
        root / "lora"
    )
    return root


def without(*names: str) -> Change:
    def change(folder: Path) -> None:
        for name in names:
            if (folder / name).is_dir():
                shutil.rmtree(folder / name)
            else:
                (folder / name).unlink()

    return change


def emptied(folder: Path) -> None:
    without("unet")(folder)
    (folder / "unet").mkdir()


FAILS = "so the pipeline cannot be loaded"
NO_UNET = (
    "unet/ has no weights: config.json describes UNet2DModel, which cannot be loaded (expected "
    "diffusion_pytorch_model.safetensors or diffusion_pytorch_model.bin)"
)


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return what copies a folder of a library."""
    return lambda name: Path(shutil.copytree(made / name, tmp_path / "copy"))


def with_part(folder: Path, part: list[str | None], name: str = "part") -> None:
    """Add a component to the list of a pipeline."""
    edit_json(folder / "model_index.json", **{name: part})


@pytest.mark.parametrize(("name", "change", "words"), [
    ("lone", without(f"unet/{WEIGHTS}"), NO_UNET),
    ("pipeline", without(f"unet/{WEIGHTS}"), NO_UNET),
    ("lone", without("unet"),
     f"unet/ is missing: model_index.json lists it as UNet2DModel, {FAILS}"),
    ("pipeline", emptied, f"unet/ is empty: model_index.json lists it as UNet2DModel, {FAILS}"),
    ("pipeline", without("scheduler"),
     f"scheduler/ is missing: model_index.json lists it as DDPMScheduler, {FAILS}"),
])  # fmt: skip
def test_a_pipeline_that_lacks_a_component(
    copied: Callable[[str], Path], said: Said, name: str, change: Change, words: str
) -> None:
    folder = copied(name)
    change(folder)
    with pytest.raises(OSError, match="no file named"):
        diffusers.DiffusionPipeline.from_pretrained(folder)
    findings = [(finding.code, str(finding)) for finding in check(folder).all_findings]
    assert findings == [("missing-model", words)]
    status, out, _ = said("check", "-r", folder)
    assert (status, f"warning missing-model: {words}" in out) == (1, True)


@pytest.mark.parametrize(
    "leftover", [".scheduler_config.json.Xy12ab", "scheduler_config.json.part", "README.md"]
)
def test_a_component_without_the_config_that_its_class_always_has(
    copied: Callable[[str], Path], leftover: str
) -> None:
    """An interrupted copy leaves its temporary file in the folder, which counted as complete."""
    folder = copied("pipeline")
    config = folder / "scheduler/scheduler_config.json"
    config.rename(config.with_name(leftover))
    with pytest.raises(OSError, match="no file named"):
        diffusers.DiffusionPipeline.from_pretrained(folder)
    words = f"scheduler/ has no {config.name}: model_index.json lists it as DDPMScheduler, {FAILS}"
    assert [str(finding) for finding in check(folder).all_findings] == [words]
    assert check(folder).status == 1


def test_a_model_of_which_unfinished_copies_alone_are_there(copied: Callable[[str], Path]) -> None:
    folder = copied("pipeline")
    for name in ("config.json", WEIGHTS):
        (folder / "unet" / name).rename(folder / "unet" / f".{name}.Xy12ab")
    assert "unet/ has no config.json" in "".join(map(str, check(folder).all_findings))


@pytest.mark.parametrize(
    ("kind", "complete", "lost"),
    [
        ("CLIPImageProcessor", ("preprocessor_config.json",), "preprocessor_config.json"),
        ("CLIPImageProcessorPil", ("processor_config.json",), "preprocessor_config.json"),
        ("VaeImageProcessor", ("config.json",), "preprocessor_config.json"),
        ("CLIPFeatureExtractor", ("preprocessor_config.json",), "preprocessor_config.json"),
        ("CLIPTokenizer", ("vocab.json", "tokenizer_config.json"), "vocabulary"),
    ],
)
def test_components_without_weights(
    copied: Callable[[str], Path], kind: str, complete: tuple[str, ...], lost: str
) -> None:
    folder = copied("pipeline")
    with_part(folder, ["transformers", kind])
    (folder / "part").mkdir()
    for name in complete:
        (folder / "part" / name).write_text("{}")
    assert check(folder).status == 0
    (folder / "part" / complete[0]).rename(folder / "part" / f"{complete[0]}.part")
    assert f"part/ has no {lost}" in "".join(map(str, check(folder).all_findings))


@pytest.mark.parametrize(
    ("library", "kind", "name"),
    [
        ("transformers", "ByT5Tokenizer", "tokenizer_config.json"),
        ("own", "OwnFeatureExtractor", "config.json"),
        ("own", "OwnTokenizer", "tokenizer_config.json"),
    ],
)
def test_components_that_need_no_such_file(
    copied: Callable[[str], Path], library: str, kind: str, name: str
) -> None:
    """A tokenizer of bytes, and classes of the script, which may be models whatever their names."""
    folder = copied("pipeline")
    with_part(folder, [library, kind])
    (folder / "part").mkdir()
    (folder / "part" / name).write_text("{}")
    assert check(folder).status == 0


def test_a_pipeline_that_loads(made: Path, copied: Callable[[str], Path], said: Said) -> None:
    for name in ("lone", "pipeline"):
        diffusers.DiffusionPipeline.from_pretrained(made / name)
        assert check(made / name).status == 0
    assert said("check", "-r", made)[0] == 0
    # A component that a pipeline does without.
    folder = copied("pipeline")
    without("vqvae")(folder)
    with_part(folder, [None, None], "vqvae")
    assert check(folder).all_findings == ()


def test_a_component_that_the_script_passes(copied: Callable[[str], Path]) -> None:
    """The pipeline loads with the component of the script, so the finding says when to ignore
    it.
    """
    folder = copied("pipeline")
    without("unet")(folder)
    diffusers.DiffusionPipeline.from_pretrained(folder, unet=small_unet())
    (finding,) = check(folder).findings
    assert finding.advice == (
        "copy the folder again; if the script passes unet= to from_pretrained, or the pipeline "
        "class works without it, ignore this"
    )


ALONE = {
    "bert": ("model.safetensors", "BertModel", "model.safetensors or pytorch_model.bin"),
    "lora": (
        "adapter_model.safetensors", "a PEFT adapter (LORA)",
        "adapter_model.safetensors or adapter_model.bin",
    ),
    "lone/unet": (
        WEIGHTS, "UNet2DModel",
        "diffusion_pytorch_model.safetensors or diffusion_pytorch_model.bin",
    ),
}  # fmt: skip


def _load(name: str, folder: Path, made: Path) -> object:
    if name == "lora":
        return peft.PeftModel.from_pretrained(AutoModel.from_pretrained(made / "bert"), str(folder))
    return (diffusers.UNet2DModel if name == "lone/unet" else AutoModel).from_pretrained(folder)


@pytest.mark.parametrize("name", ALONE)
def test_a_config_without_its_weights(
    made: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    weights, model, wanted = ALONE[name]
    folder = Path(shutil.copytree(made / name, tmp_path / "model"))
    _load(name, folder, made)
    assert check(folder).status == 0
    (folder / weights).unlink()
    for tokenizer in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / tokenizer).write_text("{}")
    if name != "lora":
        # Without this the folder may be a repository of configs alone.
        (folder / "trainer_state.json").write_text('{"global_step": 2}')
    # PEFT asks the hub for what the folder lacks, and refuses its path as the name of a repository.
    with pytest.raises((OSError, ValueError)):
        _load(name, folder, made)
    report = check(folder)
    (finding,) = report.findings
    assert isinstance(finding, MissingModel)
    assert (
        f"this folder has no weights: {finding.path} describes {model}, which cannot be loaded "
        f"(expected {wanted})" == (str(finding))
    )
    assert said("check", "-r", folder)[0] == 1
    assert said("repair", folder)[0] == 1
    status, _, error = said("salvage", folder, tmp_path / "new")
    assert (status, "nothing to salvage: this folder has no weights" in error) == (3, True)


@pytest.mark.parametrize("name", ["bert", "lone/unet"])
@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_repository_of_a_config_and_a_tokenizer_is_no_checkpoint(
    made: Path, tmp_path: Path, said: Said, name: str, has_tokenizer: bool
) -> None:
    """It has all that its users load, and was called a model that lost its weights."""
    folder = Path(shutil.copytree(made / name, tmp_path / "config"))
    (folder / ALONE[name][0]).unlink()
    if has_tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    if name == "bert":
        AutoModel.from_config(AutoConfig.from_pretrained(folder))
    else:
        diffusers.UNet2DModel.from_config(diffusers.UNet2DModel.load_config(folder))
    for arguments in (("check", folder), ("check", "-r", folder), ("repair", folder)):
        status, _, error = said(*arguments)
        assert (status, "checkpoint" in error) == (2, True)
    shards = {"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    assert said("check", folder)[0] == 1


def test_configs_below_another_folder_are_left_alone(
    made: Path, tmp_path: Path, said: Said
) -> None:
    """Code, data sets and clones of a hub have configs without weights."""
    for name in ("bert", "lora", "pipeline"):
        shutil.copytree(
            made / name, tmp_path / "code" / name, ignore=shutil.ignore_patterns("*.safetensors")
        )
    shutil.copytree(made / "pipeline" / "scheduler", tmp_path / "code" / "scheduler")
    status, _, error = said("check", "-r", tmp_path)
    assert (status, error) == (2, f"ckptfix: no checkpoint found in or below {tmp_path}\n")
    shutil.copytree(made / "bert", tmp_path / "run")
    status, out, _ = said("check", "-r", tmp_path)
    assert (status, out.startswith(f"{tmp_path / 'run'}: no error found")) == (0, True)
    assert said("check", tmp_path / "code" / "scheduler")[0] == 2


def test_a_run_whose_root_has_the_config_of_its_model(
    made: Path, tmp_path: Path, said: Said
) -> None:
    """Scripts keep the config of the model above the checkpoints: the weights are below."""
    shutil.copy(made / "bert" / "config.json", tmp_path / "config.json")
    shutil.copytree(made / "bert", tmp_path / "epoch_1")
    assert said("check", tmp_path)[0] == 2
    assert said("check", "-r", tmp_path)[0] == 0


def test_a_pipeline_below_another_folder_that_lacks_a_part(
    made: Path, tmp_path: Path, said: Said
) -> None:
    folder = Path(shutil.copytree(made / "pipeline", tmp_path / "models" / "pipeline"))
    without(f"unet/{WEIGHTS}")(folder)
    status, out, _ = said("check", "-r", tmp_path)
    assert (status, f"warning missing-model: {NO_UNET}" in out) == (1, True)
    assert "2 checkpoints: 1 with warnings, 1 clean" in out


@pytest.mark.parametrize("name", ["../unet", "/etc", "_unet", "..", "\0", "a\nb"])
def test_a_hostile_list_of_components(copied: Callable[[str], Path], name: str) -> None:
    folder = copied("lone")
    edit_json(
        folder / "model_index.json",
        **{name: ["diffusers", "UNet2DModel"], "x": [1, 2], "y": ["diffusers"], "z": {}},
    )
    assert check(folder).all_findings == ()
    assert os.listdir(folder)
