"""PEFT, transformers and diffusers load a migrated checkpoint by the names that they look for, with
the same values.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix.conversion.migrate import migrate
from ckptfix.diagnosis.check import check
from ckptfix.verification.diff import diff

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
    ),
]

STATES = (
    "rng_state.pth",
    "optimizer.pt",
    "scheduler.pt",
    "training_args.bin",
    "trainer_state.json",
)


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
        output_dir=str(root),
        max_steps=2,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
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
    assert same_values(
        model, PeftModel.from_pretrained(tiny_llama(), tmp_path / "bin", is_trainable=True)
    )


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


def unet_class() -> Any:
    """Return the class, which has no types."""
    from diffusers import UNet2DModel

    return UNet2DModel


def tiny_unet() -> Any:
    torch.manual_seed(0)
    return unet_class()(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )


def test_diffusers_loads_what_its_hook_saved_below_a_folder_of_save_state(tmp_path: Path) -> None:
    from accelerate import Accelerator

    unet_type = unet_class()

    accelerator = Accelerator(cpu=True)
    unet = accelerator.prepare(tiny_unet())

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        """Save as the hooks in the training scripts of diffusers do."""
        for model in models:
            model.save_pretrained(f"{folder}/unet")
            weights.pop()

    def load(models: list[Any], folder: str) -> None:
        for _ in range(len(models)):
            models.pop().load_state_dict(
                unet_type.from_pretrained(
                    folder, subfolder="unet", use_safetensors=False
                ).state_dict()
            )

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    source = tmp_path / "checkpoint"
    accelerator.save_state(str(source))
    assert not list(source.glob("*.safetensors"))
    assert [finding for finding in check(source).findings if finding.severity.value != "note"] == []
    assert diff(source, source).status == 0
    before = unet_type.from_pretrained(source / "unet")
    migrate(source, tmp_path / "bin", to="bin")
    migrate(tmp_path / "bin", tmp_path / "safe", to="safetensors", max_shard_size="40KB")
    assert same_values(
        before, unet_type.from_pretrained(tmp_path / "bin" / "unet", use_safetensors=False)
    )
    assert list((tmp_path / "safe" / "unet").glob("*.index.json"))
    assert same_values(before, unet_type.from_pretrained(tmp_path / "safe" / "unet"))
    with torch.no_grad():
        next(unet.parameters()).zero_()
    accelerator.load_state(str(tmp_path / "bin"))
    assert same_values(before, unet)


def test_shards_that_diffusers_loads_only_with_an_option_are_named(tmp_path: Path) -> None:
    """The receipt said "done and verified", and ``from_pretrained`` failed."""
    tiny_unet().save_pretrained(tmp_path / "safe")
    receipt = migrate(tmp_path / "safe", tmp_path / "bin", to="bin", max_shard_size="30KB")
    with pytest.raises(OSError, match="no file named"):
        unet_class().from_pretrained(tmp_path / "bin")
    (warning,) = receipt.warnings
    assert "diffusers loads these shards only with use_safetensors=False" in warning
    receipt = migrate(tmp_path / "safe", tmp_path / "one", to="bin")
    assert receipt.warnings == ()
    unet_class().from_pretrained(tmp_path / "one")


@pytest.mark.parametrize("most", ["10MB", "30KB"])
def test_diffusers_loads_a_variant(tmp_path: Path, most: str) -> None:
    unet_type = unet_class()

    source = tmp_path / "src"
    tiny_unet().half().save_pretrained(source, variant="fp16", max_shard_size=most)
    torch.save({"step": 1}, source / "random_states_0.pkl")
    before = unet_type.from_pretrained(source, variant="fp16")
    migrate(source, tmp_path / "bin", to="bin", max_shard_size=most)
    migrate(tmp_path / "bin", tmp_path / "safe", to="safetensors", max_shard_size=most)
    for name in ("bin", "safe"):
        after = unet_type.from_pretrained(
            tmp_path / name, variant="fp16", use_safetensors=name == "safe"
        )
        assert same_values(before, after)
