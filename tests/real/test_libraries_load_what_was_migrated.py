"""PEFT, transformers and diffusers load a migrated checkpoint by the names that they look for, with the same values."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix.operations.check import check
from ckptfix.operations.diff import diff
from ckptfix.operations.migrate import migrate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

STATES = ("rng_state.pth", "optimizer.pt", "scheduler.pt", "training_args.bin", "trainer_state.json")


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def same_values(one: Any, other: Any) -> bool:
    """Whether two models have equal parameters and buffers, and at least one."""
    a, b = one.state_dict(), other.state_dict()
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def trained_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``checkpoint-2`` of a Trainer that trained a LoRA, as TRL's trainers leave it, too."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    root = tmp_path_factory.mktemp("peft")
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), lora)
    tokens = torch.arange(4)
    arguments = TrainingArguments(
        output_dir=str(root), max_steps=2, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    examples = [{"input_ids": tokens + number, "labels": tokens} for number in range(8)]
    Trainer(model=model, args=arguments, train_dataset=examples).train()
    return root / "checkpoint-2"


def test_peft_loads_the_adapter_of_a_trainers_checkpoint_in_every_format(
    trained_adapter: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    assert diff(trained_adapter, trained_adapter).status == 0
    before = PeftModel.from_pretrained(tiny_llama(), trained_adapter)
    assert any(value.any() for name, value in before.state_dict().items() if "lora_B" in name)
    assert migrate(trained_adapter, tmp_path / "bin", to="bin").left_out == ()
    migrate(tmp_path / "bin", tmp_path / "safe", to="safetensors")
    for name, file in (("bin", "adapter_model.bin"), ("safe", "adapter_model.safetensors")):
        assert (tmp_path / name / file).exists()
        assert same_values(before, PeftModel.from_pretrained(tiny_llama(), tmp_path / name))
        for state in STATES:
            assert (tmp_path / name / state).read_bytes() == (trained_adapter / state).read_bytes()


def test_peft_loads_the_adapter_that_a_hook_put_into_a_folder_of_save_state(
    trained_adapter: Path, tmp_path: Path
) -> None:
    from accelerate import Accelerator
    from peft import PeftModel

    adapter = PeftModel.from_pretrained(tiny_llama(), trained_adapter, is_trainable=True)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(adapter)

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        for one in models:
            one.save_pretrained(folder)
        weights.clear()

    accelerator.register_save_state_pre_hook(save)
    source = tmp_path / "checkpoint"
    accelerator.save_state(str(source))
    assert not (source / "model.safetensors").exists()
    assert [finding for finding in check(source).findings if finding.severity.value != "note"] == []
    migrate(source, tmp_path / "bin", to="bin")
    assert same_values(model, PeftModel.from_pretrained(tiny_llama(), tmp_path / "bin", is_trainable=True))


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_transformers_loads_the_shards_of_a_variant(tmp_path: Path, variant: str | None) -> None:
    from transformers import LlamaForCausalLM

    source = tmp_path / "src"
    tiny_llama().half().save_pretrained(source, variant=variant, max_shard_size="3KB")
    torch.save({"step": 1}, source / "rng_state.pth")
    before = LlamaForCausalLM.from_pretrained(source, variant=variant)
    migrate(source, tmp_path / "bin", to="bin", max_shard_size="4KB")
    migrate(tmp_path / "bin", tmp_path / "safe", to="safetensors", max_shard_size="5KB")
    assert len(list((tmp_path / "safe").glob("*-of-*.safetensors"))) > 1
    for name in ("bin", "safe"):
        after = LlamaForCausalLM.from_pretrained(
            tmp_path / name, variant=variant, use_safetensors=name == "safe"
        )
        assert same_values(before, after)
