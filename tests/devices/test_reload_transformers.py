"""Folders of ``save_pretrained``: the class comes from ``config.json``, its code from transformers
alone.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix.devices.reload.reload_report import Outcome, Subject
from ckptfix.devices.reload.verifying import verify_reload
from ckptfix.devices.torch_devices import device_count
from tests.devices.test_reload import outcomes, text_of
from tests.simulated.models import gpt2, qwen2, t5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        device_count() > 0, reason="these say what a machine without accelerator proves"
    ),
]


def saved(folder: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def edit_config(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **entries}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("make", [qwen2, gpt2, t5])
@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_a_model_and_its_shards_are_proven(tmp_path: Path, make: Any, size: str) -> None:
    folder = saved(tmp_path / "model", make(), max_shard_size=size)
    report = verify_reload(folder)
    assert report.status == 0, str(report)
    assert report.model.endswith("from config.json")
    for subject in (Subject.NAMES, Subject.OUTPUTS, Subject.FILE_BYTES, Subject.DISK_OFFLOAD):
        assert outcomes(report, subject) == [Outcome.PROVEN]
    assert outcomes(report, Subject.PLACEMENT) == [Outcome.PROVEN] * 2
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (size == "20KB")
    if make is not qwen2:
        assert outcomes(report, Subject.TIES) == [Outcome.PROVEN]


def test_a_map_that_splits_the_tie_names_both_names_and_devices(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", gpt2())
    report = verify_reload(folder, device_map={"transformer": 0, "lm_head": 1})
    says = text_of(report, Subject.TIES, Outcome.FAILED)
    assert "'lm_head.weight' is on 1 and 'transformer.wte.weight' on 0" in says


def test_torch_files_are_read_without_unpickling(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", gpt2())
    state = load_file(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    report = verify_reload(folder)
    assert report.status == 0
    assert outcomes(report, Subject.OUTPUTS) == [Outcome.PROVEN]


def test_weights_that_the_model_widens_when_it_runs_are_still_the_files(tmp_path: Path) -> None:
    """Routers of Switch Transformers turn their bfloat16 weights into float32 in the first forward
    pass.
    """
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=97, d_model=16, d_kv=4, d_ff=32, num_heads=4, num_layers=2, num_decoder_layers=2,
        num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = SwitchTransformersForConditionalGeneration(config).to(torch.bfloat16)
    report = verify_reload(saved(tmp_path / "model", model))
    assert report.status == 0, str(report)
    assert outcomes(report, Subject.OUTPUTS)[:1] == [Outcome.PROVEN]


def test_a_base_models_file_is_not_the_model_with_a_head(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", qwen2())
    path = folder / "model.safetensors"
    state = {
        name: value for name, value in load_file(str(path)).items() if name != "lm_head.weight"
    }
    save_file(state, str(path), metadata={"format": "pt"})
    report = verify_reload(folder)
    assert report.status == 1
    assert "missing: 'lm_head.weight'" in text_of(report, Subject.NAMES, Outcome.FAILED)


def test_a_shape_that_differs_from_the_config_fails(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", qwen2())
    edit_config(folder, vocab_size=101)
    report = verify_reload(folder)
    assert report.status == 1
    assert "has shape [97, 32] in the file, [101, 32] in the model" in text_of(
        report, Subject.NAMES, Outcome.FAILED
    )


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"architectures": ["os.system"]}, "not a model class of transformers"),
        ({"architectures": ["AutoConfig"]}, "not a model class of transformers"),
        ({"architectures": None}, "does not name exactly one architecture"),
        ({"architectures": [1]}, "does not name exactly one architecture"),
        (
            {"architectures": None, "transformers_version": None, "model_type": "mine"},
            "no transformers class",
        ),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized"),
        (
            {"model_type": "of-nobody", "auto_map": {"AutoConfig": "evil.C"}},
            "code from the folder (auto_map)",
        ),
    ],
)
def test_configs_that_name_no_known_class_leave_the_weights_proven(
    tmp_path: Path, entries: dict[str, Any], says: str
) -> None:
    folder = saved(tmp_path / "model", qwen2())
    edit_config(folder, **entries)
    report = verify_reload(folder)
    assert report.status == 0, str(report)
    assert says in text_of(report, Subject.OUTPUTS, Outcome.NOT_EXERCISED)
    assert "--model module:factory" in text_of(report, Subject.OUTPUTS, Outcome.NOT_EXERCISED)
    assert outcomes(report, Subject.FILE_BYTES) == [Outcome.PROVEN]
    assert report.model == ""


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", qwen2())
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    code = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
    edit_config(folder, auto_map=code, model_type="unknown-here", architectures=["C"])
    assert verify_reload(folder).model == ""
    edit_config(folder, auto_map=code, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    assert verify_reload(folder).model == "Qwen2ForCausalLM from config.json"
    assert not (tmp_path / "ran").exists()


def test_a_config_cannot_point_to_other_weights(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", qwen2())
    other = saved(tmp_path / "other", gpt2())
    edit_config(
        folder,
        transformers_weights=str(other / "model.safetensors"),
        attn_implementation="x/kernels",
    )
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(other)}))
    report = verify_reload(folder)
    assert report.status == 0, str(report)
    assert outcomes(report, Subject.OUTPUTS) == [Outcome.PROVEN]
