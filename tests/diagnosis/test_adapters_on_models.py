"""An adapter next to the model that it was merged with: ``from_pretrained`` of transformers puts
the adapter on the model in the same folder.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix import check
from ckptfix.verification.verify import verify
from tests.tiny_adapters import llama, lora

transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """A model that was merged with its adapter, in the folder of that adapter."""
    root = tmp_path / "merged"
    lora(root)
    model = peft.PeftModel.from_pretrained(llama(), str(root))
    model.merge_and_unload().save_pretrained(root)
    return root


def test_the_config_of_an_adapter_without_its_weights_is_told(merged: Path) -> None:
    (merged / WEIGHTS).unlink()
    with pytest.raises(OSError, match=WEIGHTS):
        transformers.AutoModelForCausalLM.from_pretrained(merged)
    report = check(merged)
    assert [str(finding) for finding in report.findings] == [
        f"{WEIGHTS} is missing: adapter_config.json describes an adapter"
    ]
    assert "move adapter_config.json out of the folder" in report.findings[0].advice
    (merged / "adapter_config.json").unlink()
    transformers.AutoModelForCausalLM.from_pretrained(merged)
    assert check(merged).status == 0


def test_an_adapter_on_a_merged_model_is_not_judged_and_its_values_are_read(merged: Path) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(merged)
    assert any("lora_" in name for name, _ in loaded.named_parameters())
    report = check(merged)
    assert report.status == 0
    assert any("from_pretrained adds that adapter" in words for words in report.not_checked)
    tensors = load_file(merged / WEIGHTS)
    assert verify(merged, data=True).status == 0
    next(iter(tensors.values())).view(-1)[0] = torch.nan
    save_file(tensors, merged / WEIGHTS, {"format": "pt"})
    assert verify(merged, data=True).status == 1
