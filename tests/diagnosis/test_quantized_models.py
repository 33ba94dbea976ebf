"""Quantized weights against the config: what transformers makes of each contradiction, and healthy
folders of each.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from ckptfix import check
from tests.repairs.builders import RANDOM_STATES
from tests.tiny_models import load, reconfigure, tensors_of, tiny, write

pytestmark = pytest.mark.filterwarnings("ignore")

Tensors = dict[str, torch.Tensor]
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [8, 8],
    "modules_to_not_convert": ["lm_head"],
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
BITS = {
    bits: {
        "quant_method": "bitsandbytes",
        "load_in_4bit": bits == 4,
        "load_in_8bit": bits == 8,
        "bnb_4bit_quant_type": "nf4",
    }
    for bits in (4, 8)
}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 16}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}


def projections(change: Callable[[str, torch.Tensor], Tensors]) -> Callable[[Tensors], Tensors]:
    """Return what changes the weights of the projections, and leaves all others."""

    def changed(tensors: Tensors) -> Tensors:
        new: Tensors = {}
        for key, each in tensors.items():
            new |= change(key, each) if "_proj.weight" in key else {key: each}
        return new

    return changed


def in_fp8(key: str, weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows // 8, 8, columns // 8, 8)
    scales = blocks.abs().amax((1, 3)) / 448
    data = (blocks / scales[:, None, :, None]).reshape(rows, columns)
    return {key: data.to(torch.float8_e4m3fn), f"{key}_scale_inv": scales}


def packed(key: str, weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    stem = key.removesuffix("weight")
    return {
        f"{stem}qweight": torch.ones(columns // 8, rows, dtype=torch.int32),
        f"{stem}qzeros": torch.ones(columns // 16, rows // 8, dtype=torch.int32),
        f"{stem}scales": torch.ones(columns // 16, rows, dtype=torch.float16),
    }


def in_4_bits(key: str, weight: torch.Tensor) -> Tensors:
    return {
        key: torch.ones(weight.numel() // 2, 1, dtype=torch.uint8),
        f"{key}.absmax": torch.ones(weight.numel() // 64 or 1),
        f"{key}.quant_map": torch.ones(16),
        f"{key}.quant_state.bitsandbytes__nf4": torch.ones(79, dtype=torch.uint8),
    }


def in_8_bits(key: str, weight: torch.Tensor) -> Tensors:
    stem = key.removesuffix("weight")
    return {
        key: (weight * 100).round().to(torch.int8),
        f"{stem}SCB": torch.ones(len(weight)),
        f"{stem}weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def compressed(key: str, weight: torch.Tensor) -> Tensors:
    return {
        f"{key}_packed": torch.ones(len(weight), weight.shape[1] // 8, dtype=torch.int32),
        f"{key}_scale": torch.ones(len(weight), 1),
        f"{key}_shape": torch.tensor(weight.shape),
    }


def in_hqq(key: str, weight: torch.Tensor) -> Tensors:
    stem = key.removesuffix("weight")
    return {
        f"{stem}W_q": torch.ones(weight.numel() // 128, 64, dtype=torch.uint8),
        f"{stem}scale": torch.ones(weight.numel() // 64, 1),
        f"{stem}zero": torch.ones(weight.numel() // 64, 1),
    }


def in_mxfp4(tensors: Tensors) -> Tensors:
    new: Tensors = {}
    for key, each in tensors.items():
        if "experts" in key and key.endswith("_proj"):
            experts, rows, columns = each.shape
            new[f"{key}_blocks"] = torch.ones(experts, columns, rows // 32, 16, dtype=torch.uint8)
            new[f"{key}_scales"] = torch.full(
                (experts, columns, rows // 32), 122, dtype=torch.uint8
            )
        else:
            new[key] = each
    return new


FORMATS: dict[str, tuple[Mapping[str, Any], Callable[[Tensors], Tensors]]] = {
    "fp8": (FP8, projections(in_fp8)),
    "mxfp4": (MXFP4, in_mxfp4),
    "bnb 4": (BITS[4], projections(in_4_bits)),
    "bnb 8": (BITS[8], projections(in_8_bits)),
    "gptq": (GPTQ, projections(packed)),
    "awq": (AWQ, projections(packed)),
    "compressed-tensors": ({"quant_method": "compressed-tensors"}, projections(compressed)),
    "hqq": ({"quant_method": "hqq"}, projections(in_hqq)),
}


def model(root: Path, name: str, *, configured: bool, quantized: bool) -> Path:
    """Write a tiny model, in a format or plain, whose config names the method or none."""
    config, change = FORMATS[name]
    if name == "mxfp4":
        small = tiny("GptOssForCausalLM", hidden_size=32, intermediate_size=32, layer_types=None)
    else:
        small = tiny("LlamaForCausalLM")
    small.to(torch.bfloat16).save_pretrained(root)
    if quantized:
        write(root, change(tensors_of(root)))
    if configured:
        reconfigure(root, quantization_config=config)
    return root


def verdicts(root: Path) -> list[tuple[str, str]]:
    """Return severity and message of each finding."""
    findings = check(root).all_findings
    assert {finding.code for finding in findings} <= {"quantization-mismatch"}
    return [(finding.severity.value, str(finding)) for finding in findings]


@pytest.mark.parametrize("name", FORMATS)
def test_a_config_that_names_the_format_of_the_weights_is_healthy(
    name: str, tmp_path: Path
) -> None:
    root = model(tmp_path, name, configured=True, quantized=True)
    assert verdicts(root) == []
    if name in ("fp8", "mxfp4"):
        assert load(root) == "complete"


UNNAMED = {
    "fp8": ("0 random, 14 unused", "uses the weights without their scales"),
    "mxfp4": ("4 random, 8 unused", "leaves the experts random"),
    "bnb 4": ("RuntimeError", "fails with 'size mismatch'"),
    "bnb 8": ("0 random, 28 unused", "uses the 8-bit numbers as weights"),
    "gptq": ("14 random, 42 unused", "leaves these layers random"),
    "awq": ("14 random, 42 unused", "leaves these layers random"),
    "compressed-tensors": ("14 random, 42 unused", "leaves these layers random"),
    "hqq": ("14 random, 42 unused", "leaves these layers random"),
}


@pytest.mark.parametrize("name", UNNAMED)
def test_quantized_weights_under_a_config_that_names_no_method(name: str, tmp_path: Path) -> None:
    root = model(tmp_path, name, configured=False, quantized=True)
    outcome, words = UNNAMED[name]
    assert load(root) == outcome
    ((severity, message),) = verdicts(root)
    assert severity == "error"
    assert words in message
    # A script that quantizes its model may keep the config of its base next to a save_state.
    (root / "random_states_0.pkl").write_bytes(RANDOM_STATES)
    assert [severity for severity, _ in verdicts(root)] == ["note"]


@pytest.mark.parametrize("config", ["", "quantize_config.json"])
@pytest.mark.parametrize("end", [".weight._data", ".weight"])
def test_what_may_be_quantized_by_another_method_is_not_checked(
    end: str, config: str, tmp_path: Path
) -> None:
    """Such as by quanto and EETQ; a mere cast to fp8 loads."""
    root = model(tmp_path, "gptq", configured=False, quantized=False)
    if config:
        (root / config).write_text("{}")
    key = "model.layers.0.mlp.up_proj.weight"
    for dtype in (torch.float8_e4m3fn, torch.int8):
        tensors = tensors_of(root)
        tensors[key.removesuffix(".weight") + end] = tensors[key].to(dtype)
        write(root, tensors)
        words = "'model.layers.0.mlp.up_proj" + end + "', and config.json names no method"
        is_listed = any(said.endswith(words) for said in check(root).not_checked)
        assert is_listed == (dtype is torch.int8)


PLAIN = {
    "fp8": ("warning", "complete"),
    "mxfp4": ("note", "complete"),
    "bnb 4": ("error", ""),
    "bnb 8": ("warning", ""),
    "gptq": ("error", "ImportError"),
    "awq": ("error", "ImportError"),
}


@pytest.mark.parametrize("weights", FORMATS)
def test_weights_in_the_format_of_another_method_than_that_of_the_config(
    weights: str, tmp_path: Path
) -> None:
    """Keys of gptq and awq do not differ. The reader of fp8 alone needs no other library."""
    alike = {"gptq", "awq"}
    for name in PLAIN:
        settings, _ = FORMATS[name]
        if name == weights or {name, weights} <= alike or "mxfp4" in (name, weights):
            continue
        root = model(tmp_path / name, weights, configured=False, quantized=True)
        reconfigure(root, quantization_config=settings)
        ((severity, message),) = verdicts(root)
        assert severity == "error"
        assert "but config.json specifies " in message
        if name == "fp8":
            assert load(root) != "complete"


@pytest.mark.parametrize("name", PLAIN)
def test_plain_weights_under_a_config_that_names_a_method(name: str, tmp_path: Path) -> None:
    root = model(tmp_path, name, configured=True, quantized=False)
    severity, outcome = PLAIN[name]
    assert [severity for severity, _ in verdicts(root)] == [severity]
    if outcome:
        assert load(root) == outcome


LOST: dict[str, tuple[str, str, str]] = {
    "no scales": (
        "bnb 8",
        ".SCB",
        "14 weights in the format of bitsandbytes with 8 bits are incomplete",
    ),
    "one scale is gone": (
        "bnb 8",
        "0.self_attn.q_proj.SCB",
        "1 weight in the format of bitsandbytes with 8 bits is incomplete",
    ),
    "a scale without its weight": ("bnb 8", "0.self_attn.q_proj.weight", "q_proj.weight'"),
    "no scales of 4 bits": (
        "bnb 4",
        ".absmax",
        "14 weights in the format of bitsandbytes with 4 bits are incomplete",
    ),
    "no map": (
        "bnb 4",
        "0.self_attn.q_proj.weight.quant_map",
        "1 weight in the format of bitsandbytes with 4 bits is incomplete",
    ),
    "no state": (
        "bnb 4",
        "0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4",
        "bitsandbytes__nf4'",
    ),
    "blocks alone": (
        "mxfp4",
        "0.mlp.experts.down_proj_scales",
        "1 weight in the format of mxfp4 is incomplete",
    ),
    "scales alone": ("mxfp4", "0.mlp.experts.down_proj_blocks", "down_proj_blocks'"),
}


@pytest.mark.parametrize("what", LOST)
def test_a_quantized_weight_without_one_of_its_parts(what: str, tmp_path: Path) -> None:
    name, end, words = LOST[what]
    root = model(tmp_path, name, configured=True, quantized=True)
    write(root, {key: each for key, each in tensors_of(root).items() if not key.endswith(end)})
    if name == "mxfp4":
        assert load(root) == "RuntimeError"
    ((severity, message),) = verdicts(root)
    assert severity == "error"
    assert words in message
    # FSDP gathers parameters alone, and the script may load these.
    (root / "random_states_0.pkl").write_bytes(RANDOM_STATES)
    assert verdicts(root) == []


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_bitsandbytes_needs_every_part(
    bits: int, storage: str, is_nested: bool, tmp_path: Path
) -> None:
    """Without nested_absmax alone it loads, and answers otherwise."""
    pytest.importorskip("bitsandbytes")
    options = transformers.BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_storage=storage,
        bnb_4bit_use_double_quant=is_nested,
    )
    llama = transformers.LlamaForCausalLM
    plain = model(tmp_path / "plain", f"bnb {bits}", configured=False, quantized=False)
    root, ids = tmp_path / "quantized", torch.arange(8)[None]
    llama.from_pretrained(plain, quantization_config=options, device_map="cpu").save_pretrained(
        root
    )
    before, tensors = llama.from_pretrained(root)(ids).logits, tensors_of(root)
    assert verdicts(root) == []
    for key in [key for key in tensors if "0.self_attn.q_proj." in key]:
        write(root, {each: tensor for each, tensor in tensors.items() if each != key})
        try:
            is_same = torch.equal(llama.from_pretrained(root)(ids).logits, before)
        except (RuntimeError, AttributeError, ValueError):
            is_same = False
        assert bool(verdicts(root)) is not is_same, key


def test_fp8_without_any_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = model(tmp_path, "fp8", configured=True, quantized=True)
    write(
        root,
        {key: each for key, each in tensors_of(root).items() if not key.endswith("_scale_inv")},
    )
    ((severity, message),) = verdicts(root)
    assert severity == "warning"
    assert "leaves their scales random" in message
    monkeypatch.setattr(
        FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **options: None
    )
    assert load(root) == "14 random, 0 unused"


def test_on_a_gpu_plain_weights_under_fp8_have_no_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU the quantizer asks for a load in full precision, so that plain weights load."""
    monkeypatch.setattr(
        FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **options: None
    )
    assert load(model(tmp_path, "fp8", configured=True, quantized=False)) == "14 random, 0 unused"


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_itself(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    plain = model(tmp_path / "plain", f"bnb {bits}", configured=False, quantized=False)
    options = transformers.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    llama = transformers.LlamaForCausalLM
    quantized = llama.from_pretrained(plain, quantization_config=options, device_map="cpu")
    root = tmp_path / "quantized"
    quantized.save_pretrained(root)
    ids = torch.arange(8)[None]
    llama.from_pretrained(root)(ids)
    assert verdicts(root) == verdicts(plain) == []
    config = json.loads((root / "config.json").read_text())["quantization_config"]
    shutil.copytree(plain, tmp_path / "contradiction")
    reconfigure(tmp_path / "contradiction", quantization_config=config)
    with pytest.raises((AssertionError, AttributeError)):
        llama.from_pretrained(tmp_path / "contradiction")(ids)
    assert verdicts(tmp_path / "contradiction")
    reconfigure(root, quantization_config=None)
    assert load(root) == ("RuntimeError" if bits == 4 else "0 random, 28 unused")
    assert [severity for severity, _ in verdicts(root)] == ["error"]


NOT_JUDGED: dict[str, Callable[[Path], object]] = {
    "a method of another format": lambda root: reconfigure(
        root, quantization_config={"quant_method": "aqlm", "nbits_per_codebook": 16}
    ),
    "code of its own": lambda root: reconfigure(root, auto_map={"AutoModel": "modeling.Model"}),
    "a part of the model": lambda root: reconfigure(
        root, text_config={"quantization_config": {"quant_method": "gptq"}}
    ),
    "another part": lambda root: reconfigure(root, vision_config={"quantization_config": FP8}),
    "an older setting": lambda root: reconfigure(root, compression_config={}),
    "the config of AutoGPTQ": (
        lambda root: (root / "quantize_config.json").write_text('{"bits": 4}')
    ),
    "that of modelopt": (
        lambda root: (root / "hf_quant_config.json").write_text('{"producer": {}}')
    ),
    "a list": lambda root: reconfigure(root, quantization_config=[1]),
    "a text": lambda root: reconfigure(root, quantization_config="gptq"),
    "a number as a method": lambda root: reconfigure(
        root, quantization_config={"quant_method": [4]}
    ),
}


@pytest.mark.parametrize("what", NOT_JUDGED)
def test_what_is_not_judged(what: str, tmp_path: Path) -> None:
    root = model(tmp_path, "gptq", configured=False, quantized=True)
    NOT_JUDGED[what](root)
    assert verdicts(root) == []


def test_an_unknown_method_is_said_not_to_be_checked(tmp_path: Path) -> None:
    root = model(tmp_path, "gptq", configured=False, quantized=False)
    reconfigure(root, quantization_config={"quant_method": "aqlm"})
    told = check(root).not_checked
    assert any("ckptfix does not know the method 'aqlm'" in words for words in told)


def test_a_quantization_without_a_method(tmp_path: Path) -> None:
    root = model(tmp_path, "gptq", configured=False, quantized=False)
    reconfigure(root, quantization_config={})
    assert load(root) == "ValueError"
    ((severity, message),) = verdicts(root)
    assert (severity, message.partition(",")[0]) == (
        "error",
        "config.json: quantization_config has no quant_method",
    )


def test_a_cast_to_fp8_alone_is_healthy(tmp_path: Path) -> None:
    root = model(tmp_path, "fp8", configured=False, quantized=False)
    cast = {
        key: each.to(torch.float8_e4m3fn)
        for key, each in tensors_of(root).items()
        if "_proj" in key
    }
    write(root, tensors_of(root) | cast)
    assert load(root) == "complete"
    assert verdicts(root) == []
