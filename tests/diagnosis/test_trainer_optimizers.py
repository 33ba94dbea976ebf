"""Optimizers of the Trainer against the weights next to them: real runs stay clean, foreign
optimizers are reported.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix import check
from ckptfix.diagnosis.optimizer_states import _CONVERTED

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def run(output: Path, model: Any, **arguments: Any) -> Path:
    """Train two steps and return the checkpoint, or resume from one and train on."""
    from transformers import Trainer, TrainingArguments

    resumed, make_optimizer = arguments.pop("resumed", None), arguments.pop("make_optimizer", None)
    data = [{"input_ids": torch.arange(6) + i, "labels": torch.arange(6)} for i in range(8)]
    options = TrainingArguments(
        str(output), save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, **{"max_steps": 2, **arguments},
    )  # fmt: skip
    optimizers = (make_optimizer(model), None) if make_optimizer is not None else (None, None)
    Trainer(model, options, train_dataset=data, optimizers=optimizers).train(
        resume_from_checkpoint=resumed
    )
    return output / "checkpoint-2"


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **{"intermediate_size": 32, **options}))


def mixtral(**options: Any) -> Any:
    """Return a model whose experts are one parameter in memory, and several tensors in its file."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**SIZES, "intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 3}
    return MixtralForCausalLM(MixtralConfig(**{**sizes, **options}))


def nomic_bert() -> Any:
    """Return a model whose queries, keys and values are three parameters in memory, and one tensor
    in its file.
    """
    from transformers import AutoConfig, AutoModelForMaskedLM

    sizes = {**SIZES, "intermediate_size": 32, "max_position_embeddings": 32}
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model("nomic_bert", **sizes))


def frozen(model: Any, part: str) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part not in name)
    return model


def lora(**options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    known = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return get_peft_model(llama(), LoraConfig(**{**known, **options}))


def prefix() -> Any:
    from peft import PrefixTuningConfig, get_peft_model

    return get_peft_model(llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def of_every_parameter(model: Any) -> torch.optim.Optimizer:
    """Return an optimizer that lists frozen parameters, too, as GaLore and LOMO do."""
    return torch.optim.AdamW(model.parameters(), lr=0.1)


class WithValueHead(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.pretrained_model = llama()
        self.v_head = torch.nn.Linear(16, 1)

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        output = self.pretrained_model(input_ids, labels=labels, output_hidden_states=True)
        return {"loss": output.loss + self.v_head(output.hidden_states[-1]).mean()}


HEALTHY: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "model": (llama, {}),
    "tied": (lambda: llama(tie_word_embeddings=True), {}),
    "frozen": (lambda: frozen(llama(), "layers.0"), {}),
    "experts": (mixtral, {}),
    "frozen experts": (lambda: frozen(mixtral(), "embed"), {}),
    "split queries": (nomic_bert, {}),
    "lora": (lora, {}),
    "lora and a module": (lambda: lora(modules_to_save=["lm_head"]), {}),
    "dora": (lambda: lora(use_dora=True), {}),
    "lora in an optimizer of the whole model": (lora, {"make_optimizer": of_every_parameter}),
    "prefix": (prefix, {}),
    "value head": (WithValueHead, {}),
    "adafactor": (llama, {"optim": "adafactor"}),
    "sgd": (llama, {"optim": "sgd"}),
}


_CONVERTED_WEIGHTS = (
    "transformers saves some weights of this model in different shapes; only element counts were "
    "compared"
)
_SKIPPED = {
    "experts": _CONVERTED_WEIGHTS,
    "frozen experts": _CONVERTED_WEIGHTS,
    "split queries": _CONVERTED_WEIGHTS,
    "prefix": "the folder may not have all of its weights",
    "adafactor": "its class may keep different shapes; only parameter counts were compared",
}
"""Runs whose optimizer is not fully compared -> why."""


@pytest.mark.parametrize("name", HEALTHY)
def test_optimizers_of_the_trainer_are_healthy(tmp_path: Path, name: str) -> None:
    make, arguments = HEALTHY[name]
    report = check(run(tmp_path, make(), **arguments))
    assert [finding.code for finding in report.findings if finding.severity.value != "note"] == []
    skipped = [
        words for words in report.not_checked if words.startswith("whether optimizer.pt fits")
    ]
    assert [words.partition(": ")[2] for words in skipped] == (
        [_SKIPPED[name]] if name in _SKIPPED else []
    )


def told(root: Path) -> list[str]:
    return [
        str(finding) for finding in check(root).findings if finding.code == "unsaved-parameters"
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of a llama.

    The Trainer's default is a fused optimizer, which checks no shape and writes beyond the moments.
    """
    return run(tmp_path_factory.mktemp("saved"), llama(), optim="adamw_torch")


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run/checkpoint-2"))


def test_an_optimizer_of_a_wider_model_is_reported(root: Path, tmp_path: Path) -> None:
    wide = run(tmp_path / "b", llama(intermediate_size=48), optim="adamw_torch")
    shutil.copyfile(wide / "optimizer.pt", root / "optimizer.pt")
    with pytest.raises(RuntimeError):
        run(tmp_path / "c", llama(), resumed=str(root), max_steps=4, optim="adamw_torch")
    assert told(root) == [
        "optimizer.pt: does not match the weights (expected parameters for 21 weight tensors of "
        "shapes [16], [16, 16], [16, 32] and 2 more; found 21 parameters of shapes [16], [16, "
        "16], [16, 48] and 2 more)"
    ]


def test_an_optimizer_with_as_many_elements_in_other_shapes_is_reported(
    root: Path, tmp_path: Path
) -> None:
    saved = torch.load(root / "optimizer.pt", weights_only=True)
    for state in saved["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            if state[name].shape == (16, 16):
                state[name] = state[name].reshape(8, 32)
    torch.save(saved, root / "optimizer.pt")
    with pytest.raises(RuntimeError):
        run(tmp_path / "c", llama(), resumed=str(root), max_steps=4, optim="adamw_torch")
    assert told(root) == [
        "optimizer.pt: does not match the weights (expected parameters for 21 weight tensors of "
        "shapes [16], [16, 16], [16, 32] and 2 more; found 21 parameters of shapes [8, 32], "
        "[16], [16, 32] and 2 more)"
    ]


def test_an_optimizer_of_wider_experts_is_reported(tmp_path: Path) -> None:
    root = run(tmp_path / "a", mixtral(), optim="adamw_torch")
    wide = run(tmp_path / "b", mixtral(intermediate_size=48), optim="adamw_torch")
    shutil.copyfile(wide / "optimizer.pt", root / "optimizer.pt")
    with pytest.raises(RuntimeError):
        run(tmp_path / "c", mixtral(), resumed=str(root), max_steps=4, optim="adamw_torch")
    assert len(told(root)) == 1


def test_every_conversion_of_shapes_in_transformers_is_known() -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import PermuteForRope, WeightConverter

    sources: dict[str, str] = {}
    for model, conversions in conversion_mapping._build_checkpoint_conversion_mapping().items():
        for conversion in conversions:
            if isinstance(conversion, WeightConverter) and any(
                not isinstance(step, PermuteForRope) for step in conversion.operations
            ):
                sources[model] = sources.get(model, "") + " ".join(conversion.source_patterns)
    plain = {model: re.sub(r"[\\^$]", "", patterns) for model, patterns in sources.items()}
    assert len(plain) > 50
    assert [
        model for model, keys in plain.items() if not any(part in keys for part in _CONVERTED)
    ] == []


def test_an_adapter_of_another_rank_than_the_moments_is_reported(tmp_path: Path) -> None:
    root = run(tmp_path / "a", lora(), optim="adamw_torch")
    lora(r=8).save_pretrained(root)
    with pytest.raises(RuntimeError):
        run(tmp_path / "c", lora(r=8), resumed=str(root), max_steps=4, optim="adamw_torch")
    assert told(root) == [
        "optimizer.pt: does not match the weights (expected parameters for 8 weight tensors of "
        "shapes [8, 16], [16, 8]; found 8 parameters of shapes [4, 16], [16, 4])"
    ]


def test_a_lost_weight_is_reported_that_the_trainer_starts_anew_without_an_error(
    root: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(root / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, root / "model.safetensors", {"format": "pt"})
    run(tmp_path / "c", llama(), resumed=str(root), max_steps=4, optim="adamw_torch")
    assert told(root) == ["optimizer.pt: 21 parameters, but the checkpoint has 20 weight tensors"]
