"""Quantized weights for ``from_pretrained`` of transformers: their format against the method that
the config names.

Measured with transformers 5.23.0 and 4.57.3, bitsandbytes 0.50.2. A config with
``quantization_config`` makes a model *pre-quantized*: its layers are replaced before the weights
are loaded, and plain weights are not quantized then:

| method | config names it, weights are plain | weights are in its format, config names nothing |
|---|---|---|
| bitsandbytes, 4 bits | 5.23 loads, and its forward fails; 4.57 fails to load | both fail with ``size mismatch`` |
| bitsandbytes, 8 bits | 5.23 loads, and its forward fails; 4.57 quantizes them | 5.23 takes int8 as it is; 4.57 fails |
| gptq, awq | both look for ``qweight`` alone | both leave the layers random |
| fp8 | 5.23 on a GPU leaves the scales random, on a CPU it loads them | 5.23 takes weights without their scales |
| mxfp4 | 5.23 loads them; 4.57 fails with a KeyError | both leave the experts random |
| compressed-tensors, hqq | not judged | 5.23 leaves the layers random |

A quantized weight without one of its parts (``SCB``, ``absmax``) fails in the load, or in the first
forward. A ``quant_method`` that transformers does not know is skipped, and others have formats that
are not listed here.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ckptfix.checkpoint.load_inputs import Load
from ckptfix.checkpoint.model_configs import CONFIG
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.config_faults import (
    DoubtfulQuantization,
    ForeignQuantization,
    IncompleteQuantization,
    OtherQuantization,
    QuantizationMismatch,
    UnnamedMethod,
)
from ckptfix.formats.tensor import TensorInfo
from ckptfix.wording import count_of

Tensors = Mapping[str, TensorInfo]


class _Format(NamedTuple):
    """The format of a method: the keys by which it is told, and what transformers makes of a
    contradiction.

    ``method``: in words. ``has``: returns whether a key is in the format. ``key``: an example.
    ``of_plain``: of a load of plain weights under a config that names the method, "" where that is
    not judged, ``kind``: the finding. ``of_unnamed``: of a load of weights in this format under a config without any.
    ``parts``: ends of the keys of one weight, none where not all are known.
    """

    method: str
    has: Callable[[str, Tensors], bool]
    key: str
    of_plain: str
    kind: type[QuantizationMismatch]
    of_unnamed: str
    parts: tuple[str, ...] = ()


def _ends(pattern: str) -> Callable[[str, Tensors], bool]:
    ending = re.compile(pattern)
    return lambda key, tensors: ending.search(key) is not None


def _is_packed(key: str, tensors: Tensors) -> bool:
    stem = key.removesuffix("qweight")
    return key.endswith(".qweight") and f"{stem}scales" in tensors


def _is_fp8(key: str, tensors: Tensors) -> bool:
    """Return whether a tensor is a weight in fp8 with its scales. A cast to fp8 alone has none, and
    loads.
    """
    if not tensors[key].dtype.startswith("F8_E"):
        return False
    scales = (f"{key}_scale_inv", f"{key}_scale", f"{key.removesuffix('weight')}scale")
    return any(scale in tensors for scale in scales)


def _is_block(key: str, tensors: Tensors) -> bool:
    return key.endswith("_blocks") and f"{key.removesuffix('_blocks')}_scales" in tensors


def _is_compressed(key: str, tensors: Tensors) -> bool:
    return key.endswith(".weight_packed") and f"{key.removesuffix('_packed')}_scale" in tensors


_STATE = ".weight.quant_state.bitsandbytes__nf4"

_FOUR, _EIGHT, _GPTQ, _AWQ, _FP8, _MXFP4, _COMPRESSED, _HQQ = (
    _Format(
        "bitsandbytes with 4 bits",
        _ends(r"\.quant_state\.bitsandbytes__(nf4|fp4)$"),
        "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4",
        "transformers 5.23 loads the weights but fails in the first forward pass, 4.57 fails to "
        "load them",
        QuantizationMismatch,
        "transformers fails with 'size mismatch'",
        (".weight", ".weight.absmax", ".weight.quant_map", _STATE),
    ),
    _Format(
        "bitsandbytes with 8 bits",
        _ends(r"\.SCB$"),
        "model.layers.0.mlp.up_proj.SCB",
        "transformers 5.23 loads the weights but fails in the first forward pass, 4.57 quantizes "
        "them",
        DoubtfulQuantization,
        "transformers 5.23 silently uses the 8-bit numbers as weights",
        (".weight", ".SCB"),
    ),
    _Format(
        "gptq",
        _is_packed,
        "model.layers.0.mlp.up_proj.qweight",
        "transformers looks only for qweight, qzeros and scales, and leaves these layers without "
        "their weights",
        QuantizationMismatch,
        "transformers leaves these layers random",
    ),
    _Format(
        "awq",
        _is_packed,
        "model.layers.0.mlp.up_proj.qweight",
        "transformers looks only for qweight, qzeros and scales, and leaves these layers without "
        "their weights",
        QuantizationMismatch,
        "transformers leaves these layers random",
    ),
    _Format(
        "fp8",
        _is_fp8,
        "model.layers.0.mlp.up_proj.weight_scale_inv",
        "on a GPU, transformers 5.23 casts the weights to fp8 and leaves their scales random; on a "
        "CPU it loads them",
        DoubtfulQuantization,
        "transformers 5.23 silently uses the weights without their scales",
    ),
    _Format(
        "mxfp4",
        _is_block,
        "model.layers.0.mlp.experts.down_proj_blocks",
        "transformers 5.23 loads the weights, 4.57 fails with a KeyError",
        ForeignQuantization,
        "transformers leaves the experts random",
        ("_blocks", "_scales"),
    ),
    _Format(
        "compressed-tensors",
        _is_compressed,
        "model.layers.0.mlp.up_proj.weight_packed",
        # Its config may name a format in which weights are plain (dense).
        "",
        QuantizationMismatch,
        "transformers leaves these layers random",
    ),
    _Format(
        "hqq or sinq",
        _ends(r"\.W_q$"),
        "model.layers.0.mlp.up_proj.W_q",
        "",
        QuantizationMismatch,
        "transformers leaves these layers random",
    ),
)

_BY_METHOD = {"gptq": _GPTQ, "awq": _AWQ, "fp8": _FP8, "mxfp4": _MXFP4}

_UNNAMED = {
    _FOUR.method: _FOUR,
    _EIGHT.method: _EIGHT,
    "gptq or awq": _GPTQ,
    "fp8": _FP8,
    "mxfp4": _MXFP4,
    _COMPRESSED.method: _COMPRESSED,
    _HQQ.method: _HQQ,
}
"""Format in words -> that format. Keys of gptq and awq do not differ, nor do those of hqq
and sinq.
"""

_OTHER_CONFIGS = ("quantize_config.json", "hf_quant_config.json")
"""Configs that the loaders of AutoGPTQ, vLLM and modelopt read in place of ``quantization_config``.
"""


def judge_quantized(load: Load) -> Iterator[Finding | str]:
    """Yield the verdict on the format of quantized weights. Not judged: code of the model's own,
    unread headers.
    """
    config = load.config
    if not config or config.get("auto_map") or not load.is_whole or not load.tensors:
        return
    settings = _settings(config)
    if settings is None:
        yield from _of_unnamed(load)
    if not isinstance(settings, Mapping):
        return
    method = settings.get("quant_method")
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        known: _Format | None = _FOUR if settings.get("load_in_4bit") else _EIGHT
    elif method is None:
        yield UnnamedMethod(path=load.path.with_name(CONFIG))
        return
    else:
        known = _BY_METHOD.get(method) if isinstance(method, str) else None
    if known is None:
        yield (
            f"{load.path} against quantization_config: ckptfix does not know the method {method!r}"
        )
        return
    quantized = [key for key in load.tensors if _may_be_quantized(key, load.tensors)]
    if (
        known is _FP8
        and quantized
        and all(load.tensors[key].dtype.startswith("F8_E") for key in quantized)
    ):
        effect = (
            "on a GPU, transformers 5.23 leaves their scales random; on a CPU it uses the weights "
            "without them"
        )
    elif quantized:
        yield from _of_another(load, known) or _lacking(load, known)
        return
    else:
        effect = known.of_plain
    yield known.kind(path=load.path, method=known.method, tensors=0, key=known.key, effect=effect)


def _of_another(load: Load, known: _Format) -> list[Finding]:
    """Return the finding about weights that are in the format of another method, and none in this
    one: ``config.json`` of another quantized copy of the model. The script of a save_state may load
    them.
    """
    formats = {
        words: [key for key in load.tensors if each.has(key, load.tensors)]
        for words, each in _UNNAMED.items()
    }
    words = next((words for words, keys in formats.items() if keys), "")
    is_named = any(known.has(key, load.tensors) for key in load.tensors)
    if not words or is_named or load.states_of == "save_state":
        return []
    return [
        OtherQuantization(
            path=load.path,
            method=words,
            tensors=len(formats[words]),
            key=formats[words][0],
            named=known.method,
            effect=(
                "from_pretrained of transformers fails, leaves these layers random, or uses the "
                "quantized numbers as weights"
            ),
        )
    ]


def _lacking(load: Load, known: _Format) -> Iterator[Finding]:
    """Yield the finding about quantized weights without all of their parts."""
    # The parameters alone are what FSDP gathers, and the script of a save_state may load them so.
    if not known.parts or load.states_of == "save_state":
        return
    part_of = re.compile(
        f"(.*)({'|'.join(map(re.escape, sorted(known.parts, key=len, reverse=True)))})"
    )
    parts: dict[str, set[str]] = {}
    for key, tensor in load.tensors.items():
        match = part_of.fullmatch(re.sub("__fp4$", "__nf4", key))
        # Plain weights lie next to quantized ones.
        if match and (match[2] != ".weight" or tensor.dtype in ("I8", "U8")):
            parts.setdefault(match[1], set()).add(match[2])
    missing: dict[str, str] = {}
    for stem, present in parts.items():
        absmax = load.tensors.get(f"{stem}.weight.absmax")
        is_nested = absmax is not None and absmax.dtype == "U8"
        nested = [f".weight.nested_{part}" for part in ("absmax", "quant_map") if is_nested]
        for part in (*(part for part in known.parts if part not in present), *nested):
            # Another dtype for the storage, such as of FSDP.
            if stem + part not in load.tensors:
                missing.setdefault(stem, stem + part)
    if missing:
        yield IncompleteQuantization(
            path=load.path,
            method=known.method,
            tensors=len(missing),
            key=next(iter(missing.values())),
            effect=(
                "transformers fails in the load or the first forward pass, or uses wrong numbers"
            ),
        )


def _settings(config: Mapping[str, Any]) -> Any:
    """Return the settings of a quantization as transformers looks for them, None where a config has
    none.

    Those of another part of a model, or of an older library, count as settings that are not known.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        if part.get("quantization_config") is not None:
            return part["quantization_config"]
    parts = [part for part in config.values() if isinstance(part, Mapping)]
    if "compression_config" in config or any("quantization_config" in part for part in parts):
        return ()
    return None


def _of_unnamed(load: Load) -> Iterator[QuantizationMismatch | str]:
    """Yield the verdict on weights under a config without quantization."""
    formats = {} if any(name in load.configs for name in _OTHER_CONFIGS) else _UNNAMED
    for words, known in formats.items():
        keys = [key for key in load.tensors if known.has(key, load.tensors)]
        if keys:
            # The script of a save_state may quantize its model, and keep a config of its base next
            # to it.
            kind = ForeignQuantization if load.states_of == "save_state" else QuantizationMismatch
            yield kind(
                path=load.path,
                method=words,
                tensors=len(keys),
                key=keys[0],
                effect=known.of_unnamed,
            )
            return
    # A cast to fp8 alone has no scales, and loads.
    doubtful = [
        key
        for key, tensor in load.tensors.items()
        if _may_be_quantized(key, load.tensors) and not tensor.dtype.startswith("F8_E")
    ]
    if doubtful:
        yield (
            f"{load.path} against its quantization: {count_of(len(doubtful), 'tensor')} may be "
            f"quantized, such as {doubtful[0]!r:.200}, and config.json names no method"
        )


_QUANTIZED = re.compile(
    r"\.(qweight|qzeros|SCB|weight_packed|W_q)$|bitsandbytes__|[._](weight_scale|weight_scale_inv|qscale_weight|absmax)$"
    r"|_(blocks|scales)$"
)
_PLAIN = ("F64", "F32", "F16", "BF16", "I64", "BOOL", "C64", "C128")


def _may_be_quantized(key: str, tensors: Tensors) -> bool:
    """Return whether a tensor may be in a format of any method: by its key, or by a dtype that
    plain weights lack.
    """
    return _QUANTIZED.search(key) is not None or tensors[key].dtype not in _PLAIN
