"""Common folders of the hub and of training scripts, by the names of their files: none of them is
damaged.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckptfix.errors import UsageError
from tests.diagnosis.builders import problems

TENSORS = {"pooler.dense.weight": torch.ones(3, 2), "pooler.dense.bias": torch.zeros(3)}
BERT = {"architectures": ["BertModel"], "model_type": "bert", "transformers_version": "5.23.0"}
UNET = {"_class_name": "UNet2DModel", "_diffusers_version": "0.42.0"}
LORA = {"peft_type": "LORA", "base_model_name_or_path": "base", "r": 2}
STEP = {"global_step": 2, "train_batch_size": 2, "stateful_callbacks": {"TrainerControl": {}}}
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
INDEX = {
    "metadata": {"total_size": 36},
    "weight_map": {"pooler.dense.weight": SHARDS[0], "pooler.dense.bias": SHARDS[1]},
}

Content = Mapping[str, Any] | bytes | str | None
"""An object of JSON, bytes or text; None for weights, by the suffix of the name."""

SAVE_STATE = Path("fixtures/accelerate-1.15.0/clean-single-process/checkpoint")
SAVED = ("optimizer.bin", "random_states_0.pkl")

HDF, ONNX = b"\x89HDF\r\n\x1a\n" + bytes(90), b"\x08\x07\x12\x07pytorch" + bytes(90)
GGUF = b"GGUF" + bytes(90)
MODEL: dict[str, Content] = {"config.json": BERT, "model.safetensors": None}
IN_SHARDS: dict[str, Content] = {
    "config.json": BERT, "model.safetensors.index.json": INDEX, **dict.fromkeys(SHARDS),
}  # fmt: skip
ADAPTER: dict[str, Content] = {"adapter_config.json": LORA, "adapter_model.safetensors": None}
CONTROLNET: dict[str, Content] = {
    "config.json": UNET, "diffusion_pytorch_model.safetensors": None,
}  # fmt: skip


def below(folder: str, files: Mapping[str, Content]) -> dict[str, Content]:
    return {f"{folder}/{name}": content for name, content in files.items()}


FOLDERS: dict[str, dict[str, Content]] = {
    "transformers": {**MODEL, "tokenizer.json": {}},
    "transformers, in shards": IN_SHARDS,
    "weights of every framework": {
        **MODEL, "pytorch_model.bin": None, "tf_model.h5": HDF,
        "flax_model.msgpack": b"\x81\xa5layer" + bytes(90),
        "rust_model.ot": b"PK\x03\x04" + bytes(90),
    },
    "weights of TensorFlow alone": {"config.json": BERT, "tf_model.h5": HDF},
    "a variant": {"config.json": BERT, "model.fp16.safetensors": None},
    "sentence-transformers": {
        **MODEL, "modules.json": "[]", "config_sentence_transformers.json": {},
        "sentence_bert_config.json": {},
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
        "2_Dense/config.json": {"in_features": 2}, "2_Dense/model.safetensors": None,
        "onnx/model.onnx": ONNX,
        "openvino/openvino_model.bin": np.arange(99, dtype=np.uint8).tobytes(),
    },
    "GGUF next to safetensors": {**MODEL, "model-Q4_K_M.gguf": GGUF},
    "GGUF alone": {"config.json": BERT, "model-Q8_0.gguf": GGUF},
    "ONNX of transformers.js": {
        "config.json": BERT, "onnx/model.onnx": ONNX, "onnx/model_quantized.onnx": ONNX,
    },
    "OpenVINO": {
        "config.json": BERT, "openvino_model.xml": "<net/>",
        "openvino_model.bin": np.arange(1, 99, dtype=np.uint8).tobytes(),
    },
    "GPTQ": {
        "config.json": BERT, "quantize_config.json": {}, "gptq_model-4bit-128g.safetensors": None,
    },
    "exllama": {"config.json": BERT, "output.safetensors": None},
    "MLX": {"config.json": BERT, "weights.00.safetensors": None, "weights.01.safetensors": None},
    "vLLM's sharded state": {
        "config.json": BERT,
        **{f"model-rank-{rank}-part-0.safetensors": None for rank in range(2)},
    },
    "Mistral": {"params.json": {}, "consolidated.safetensors": None, "tekken.json": {}},
    "Mistral, for transformers too": {
        **IN_SHARDS, "params.json": {}, "consolidated.safetensors": None,
    },
    "Llama with original weights": {
        **MODEL, "original/consolidated.00.pth": None, "original/params.json": {},
        "original/tokenizer.model": "bytes",
    },
    "a reward model of TRL": {**MODEL, "value_head.safetensors": None},
    "an adapter": ADAPTER,
    "several adapters": {**below("default", ADAPTER), **below("second", ADAPTER)},
    "an adapter with a value head": {
        **ADAPTER, "v_head.bin": None, **below("reference", ADAPTER),
    },
    "a LoRA of kohya": {"my_style.safetensors": None, "my_style-000002.safetensors": None},
    "a LoRA of diffusers": {"pytorch_lora_weights.safetensors": None, "README.md": "x"},
    "timm": {"config.json": {"architecture": "resnet10t"}, "model.safetensors": None},
    "timm, older": {"config.json": {"architecture": "resnet10t"}, "pytorch_model.bin": None},
    "open_clip": {"open_clip_config.json": {}, "open_clip_model.safetensors": None},
    "a pipeline of diffusers": {
        "model_index.json": {
            "_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DModel"],
            "text_encoder": ["transformers", "BertModel"],
            "scheduler": ["diffusers", "DDPMScheduler"], "safety_checker": [None, None],
        },
        **below("unet", CONTROLNET), "unet/diffusion_pytorch_model.fp16.safetensors": None,
        **below("text_encoder", MODEL),
        "scheduler/scheduler_config.json": {"_class_name": "DDPMScheduler"},
        "v1-5-pruned.ckpt": None,
    },
    "ControlNet": CONTROLNET,
    "a checkpoint of ControlNet's training": {
        "random_states_0.pkl": None, **below("controlnet", CONTROLNET),
    },
    "DreamBooth with LoRA": {
        "pytorch_lora_weights.safetensors": None,
        "checkpoint-500/pytorch_lora_weights.safetensors": None,
        "checkpoint-500/random_states_0.pkl": None,
    },
    "textual inversion": {
        "learned_embeds.safetensors": None, "learned_embeds-steps-500.safetensors": None,
    },
    "a subclass of the Trainer": {
        "trainer_state.json": STEP, "policy.bin": None, "model_ema.safetensors": None,
    },
    "tokens next to a model": {
        **MODEL, "train.bin": np.arange(1, 999, dtype=np.uint16).tobytes(),
    },
    "two configs": {
        "config_encoder.json": BERT, "config_decoder.json": BERT, "model.safetensors": None,
    },
    "a config and a tokenizer": {
        "config.json": BERT, "tokenizer.json": {}, "tokenizer_config.json": {},
    },
}  # fmt: skip


def write(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.write_text(json.dumps(content))
    elif path.suffix == ".safetensors":
        key = {SHARDS[0]: "pooler.dense.weight", SHARDS[1]: "pooler.dense.bias"}.get(path.name)
        tensors = {key: TENSORS[key]} if key else TENSORS
        save_file(tensors, path, metadata={"format": "pt"})
    elif path.name in SAVED:
        shutil.copy(SAVE_STATE / path.name, path)
    else:
        torch.save(TENSORS, path)


@pytest.mark.parametrize("case", FOLDERS)
def test_a_common_folder_has_neither_an_error_nor_a_warning(tmp_path: Path, case: str) -> None:
    root = tmp_path / "model"
    for name, content in FOLDERS[case].items():
        write(root / name, content)
    with suppress(UsageError):  # a folder without a file that is read
        assert problems(root) == []
