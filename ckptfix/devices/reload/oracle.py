"""A load as the installed transformers, PEFT or diffusers makes it, on the meta device: no byte of
a tensor is read.

The library gets configs, and tensors without bytes that have the dtypes and shapes of a file's
header. Code of a checkpoint is never run, and nothing is downloaded.
"""

import ast
import json
import os
import re
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.torch_version import TorchVersion

from ckptfix.checkpoint.filenames import parse_file_name, weights_names
from ckptfix.checkpoint.load_inputs import CONFIG_OF_LIBRARY
from ckptfix.checkpoint.model_configs import (
    ADAPTER,
    CONFIG,
    NO_VOCABULARY,
    OF_PROCESSORS,
    OTHER_WEIGHTS,
    PIPELINE,
    read_config,
)
from ckptfix.devices.reload.outputs import ANYTHING, in_words
from ckptfix.diagnosis.loads.loaders import MEMORY, PATIENCE, Asked
from ckptfix.diagnosis.loads.outcome import LoadOutcome, Mismatch
from ckptfix.wording import count_of, human_size, list_names

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "C128": torch.complex128, "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    # torch 2.7 and 2.8
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", None), "F4": getattr(torch, "float4_e2m1fn_x2", None),
}  # fmt: skip

_OF_META = re.compile(r"\bmeta\b|register_meta|data-dependent|FakeTensor", re.IGNORECASE)
"""Errors that a load with bytes does not have."""

NEEDS_MORE = "it needs more memory"


class Unchecked(Exception):
    """Raised where no answer exists; the message says why."""


def ask(asked: Asked) -> LoadOutcome:
    """Return what the installed library makes of a load. Whatever a config holds, nothing is
    raised.
    """
    answer = LoadOutcome(path=asked.path, library=asked.library, tensors=len(asked.tensors))
    try:
        library = _imported(asked.library)
        answer = answer._replace(library=f"{asked.library} {library.__version__}")
        tensors = {key: _meta(key, *about) for key, about in asked.tensors.items()}
        with tempfile.TemporaryDirectory(prefix="ckptfix-") as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, config in asked.configs.items():
                Path(folder, name).write_text(json.dumps(config), encoding="utf-8")
            if PIPELINE in asked.configs:
                return _of_pipeline(library, asked, answer)
            return _LOADS[asked.library](library, asked, tensors, Path(folder), answer)
    except Unchecked as error:
        return answer._replace(unchecked=str(error))
    except ANYTHING as error:  # a config's values are looked at by the library's own code
        if isinstance(error, MemoryError):
            return answer._replace(unchecked=f"{NEEDS_MORE} than {human_size(MEMORY)}")
        if isinstance(error, RecursionError | ImportError | OSError) or _OF_META.search(str(error)):
            return answer._replace(unchecked=in_words(error))
        return answer._replace(refused=in_words(error))


def _imported(library: str) -> Any:
    try:
        return import_module(library)
    except ImportError:
        raise Unchecked(f"{library} is not installed") from None


def _meta(key: str, dtype: str, shape: Iterable[int]) -> torch.Tensor:
    its_own = _DTYPES.get(dtype)
    if its_own is None:
        raise Unchecked(f"torch {torch.__version__} has no dtype {dtype} ({key})")
    sizes = list(shape)
    if dtype == "F4" and sizes:
        # safetensors counts numbers, and torch pairs of them.
        sizes[-1] //= 2
    return torch.empty(sizes, dtype=its_own, device="meta")


def _of_transformers(
    library: Any, asked: Asked, tensors: dict[str, torch.Tensor], folder: Path, answer: LoadOutcome
) -> LoadOutcome:
    config = asked.configs[CONFIG_OF_LIBRARY["transformers"]]
    cls = _class_of_transformers(library, config)
    if ADAPTER in asked.configs:
        raise Unchecked(
            f"{ADAPTER} is in the same folder, and from_pretrained applies that adapter to "
            "the model"
        )
    if config.get("transformers_weights"):
        raise Unchecked("config.json selects the weights file (transformers_weights)")
    named, cls = cls, _taken_by_type(library, cls, config, folder)
    answer = answer._replace(loads=cls.__name__)
    settings = _config_of(cls, folder)
    attention, unknown = _attention_of(settings)
    # With a device map, 4.44 reads the tensors from files, and fails without them. A model made on
    # "meta" is no way out: 4.44 takes all its parameters as tied, and misses none.
    is_mapped = TorchVersion(library.__version__) >= (4, 48)
    model, info = cls.from_pretrained(
        None, config=settings, state_dict=tensors, device_map={"": "meta"} if is_mapped else None,
        ignore_mismatched_sizes=True, output_loading_info=True, local_files_only=True,
        trust_remote_code=False, **attention,
    )  # fmt: skip
    refused = "; ".join(map(str, [*info.get("error_msgs", ()), *info.get("conversion_errors", ())]))
    outcome = answer._replace(
        missing=tuple(sorted(info["missing_keys"])),
        unexpected=tuple(sorted(info["unexpected_keys"])),
        mismatched=_mismatches(info["mismatched_keys"]),
        refused=refused,
        unknown=(*_unknown(model, named, config, tensors), *unknown),
        rounded=_rounded(model, tensors),
    )
    if config.get("quantization_config") and outcome.status:
        raise Unchecked(
            "quantized weights: their layers are built differently on a device than without one"
        )
    return outcome


def _rounded(model: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return in words that the model takes the dtype in its config, as transformers 5 does without
    the argument ``dtype``, and that the file has a wider one.
    """
    floats = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    widest = max(floats, key=lambda dtype: dtype.itemsize, default=model.dtype)
    names = (str(dtype).removeprefix("torch.") for dtype in (widest, model.dtype))
    return " to ".join(names) if model.dtype.itemsize < widest.itemsize else ""


def _ensure_own_code(config: Mapping[str, Any], name: str) -> None:
    if "auto_map" in config:
        raise Unchecked(f"{name} needs code from the folder (auto_map), which ckptfix never runs")


def _class_of_transformers(library: Any, config: Mapping[str, Any]) -> Any:
    _ensure_own_code(config, "config.json")
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str):
        raise Unchecked("config.json names no model class (architectures)")
    cls: Any = getattr(library, name, None)
    if not _is_model(cls, library.PreTrainedModel) or cls.config_class is None:
        raise Unchecked(f"transformers {library.__version__} has no model class {name}")
    return cls


def _taken_by_type(library: Any, cls: Any, config: Mapping[str, Any], folder: Path) -> Any:
    """Return the class that an AutoModel takes, by ``model_type``, where ``cls`` is the one in
    ``architectures``.

    Raises ValueError, as AutoConfig does, where transformers knows no such type.
    """
    from transformers.models.auto import modeling_auto

    # A part of a model, such as BarkFineModel, has a type that AutoConfig does not know.
    # transformers 5.23 saves Sam3TrackerModel with the config of the tracker of videos, of which it
    # is a part.
    own = cls.config_class.model_type
    if config.get("model_type", "") in (own, f"{own}_video"):
        return cls
    settings = library.AutoConfig.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )
    tables = [names for key, names in vars(modeling_auto).items() if key.endswith("MAPPING_NAMES")]
    # AutoModelForMaskGeneration takes Sam3TrackerModel for the type of another config, sam3_video.
    if type(settings) is cls.config_class or any(
        cls.__name__ in _listed(names.get(settings.model_type)) for names in tables
    ):
        return cls
    for names in tables:
        taken = _listed(names.get(settings.model_type))
        if taken and cls.__name__ in _listed(names.get(own)):
            return getattr(library, taken[0])
    raise ValueError(f"model_type {settings.model_type!r} has no model class like {cls.__name__}")


def _listed(names: str | Sequence[str] | None) -> Sequence[str]:
    return (names,) if isinstance(names, str) else names or ()


def _is_model(cls: object, base: type) -> bool:
    return isinstance(cls, type) and issubclass(cls, base)


def _config_of(cls: Any, folder: Path) -> Any:
    """Return the config of a class as its ``from_pretrained`` reads it."""
    return cls.config_class.from_pretrained(str(folder), local_files_only=True)


_KERNELS = ("kernels", "flash_attn", "flash_attn_interface")
"""Packages with kernels for an attention, which need a GPU, and whose code is not run here."""


def _attention_of(settings: Any) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the arguments about attention for a load of a config, and in words what they leave
    unknown.

    A name that the config has is left to the library, which refuses what it does not know, or has
    no package for. Where a package of kernels is installed, ``eager`` is asked for in their place.
    """
    asked = [name for name in _attentions(settings) if name is not None]
    kernels = [name for name in asked if isinstance(name, str) and ("/" in name or "flash" in name)]
    if kernels and any(map(find_spec, _KERNELS)):
        why = f"whether the config's attention {kernels[0]!r} can be loaded here: 'eager' was"
        return {"attn_implementation": "eager"}, (f"{why} requested instead",)
    is_own = any(name != "eager" for name in asked)
    return {} if is_own else {"attn_implementation": "eager"}, ()


def _attentions(settings: Any) -> Iterator[object]:
    """Yield the attention that a config asks for, and those of its parts."""
    yield getattr(settings, "_attn_implementation", None)
    for name in getattr(settings, "sub_configs", ()):
        if (part := getattr(settings, name, None)) is not None:
            yield from _attentions(part)


def _mismatches(mismatched: Iterable[Any]) -> tuple[Mismatch, ...]:
    return tuple(
        Mismatch(str(key), tuple(shape), tuple(expected))
        for key, shape, expected in sorted(mismatched, key=str)
    )


def _unknown(
    model: Any, named: type, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Yield in words what only bytes, a device or the script would show. ``named``: the class in
    ``architectures``.
    """
    if type(model) is not named:
        yield (
            f"whether a script loads {named.__name__}, the class in architectures: an "
            f"AutoModel loads {type(model).__name__}, based on model_type"
        )
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    pairs = [
        f"{target} and {source}"
        for target, source in ties.items()
        if {target, source} <= tensors.keys()
    ]
    if pairs:
        yield f"whether the tied weights {pairs[0]} are equal ({count_of(len(pairs), 'pair')})"
    if any(
        "Converter" in type(rule).__name__
        for rule in getattr(model, "_weight_conversions", None) or ()
    ):
        yield "values of the weights that transformers merges or splits during loading"
    if config.get("quantization_config"):
        yield "whether a load onto the device that the quantization needs gives the same result"


def _of_diffusers(
    library: Any, asked: Asked, tensors: dict[str, torch.Tensor], folder: Path, answer: LoadOutcome
) -> LoadOutcome:
    from diffusers.models import model_loading_utils, modeling_utils

    config = asked.configs[CONFIG_OF_LIBRARY["diffusers"]]
    _ensure_own_code(config, "config.json")
    name = str(config.get("_class_name"))
    cls: Any = getattr(library, name, None)
    if not _is_model(cls, library.ModelMixin):
        raise Unchecked(f"diffusers {library.__version__} has no model class {name}")
    answer = answer._replace(loads=name)
    # It looks for the files itself, and prepares the keys of a single one alone.
    if asked.path.endswith(".json"):
        stem, dot, suffix = asked.path.removesuffix(".index.json").rpartition(".")
        # A shard that had the name of a single file would be loaded as that.
        shard = f"{stem}-00001-of-00001{dot}{suffix}"
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
        Path(folder, asked.path).write_text(json.dumps(index), encoding="utf-8")
        Path(folder, shard).touch()
    else:
        Path(folder, asked.path).touch()
    load = partial(
        cls.from_pretrained, str(folder), device_map={"": "meta"}, ignore_mismatched_sizes=True,
        output_loading_info=True, local_files_only=True,
    )  # fmt: skip
    refused: list[str] = []
    with (
        patch.object(modeling_utils, "load_state_dict", lambda *_, **__: dict(tensors)),
        patch.object(model_loading_utils, "load_state_dict", lambda *_, **__: dict(tensors)),
    ):
        try:
            _, info = load()
        except OSError:
            if not asked.path.endswith(".bin.index.json"):
                raise
            # By default diffusers 0.42 looks for no index of .bin shards.
            _, info = load(use_safetensors=False)
            refused.append("without use_safetensors=False, from_pretrained finds no weights")
    return answer._replace(
        missing=tuple(sorted(info["missing_keys"])),
        unexpected=tuple(sorted(info["unexpected_keys"])),
        mismatched=_mismatches(info["mismatched_keys"]),
        refused="; ".join([*refused, *map(str, info["error_msgs"])]),
        unknown=(),
    )


def _of_pipeline(library: Any, asked: Asked, answer: LoadOutcome) -> LoadOutcome:
    """Ask whether the class of a pipeline takes the components that it lists, and has the files of
    each. None is made: weights are asked about in their own folder.
    """
    from diffusers import pipelines
    from diffusers.pipelines import pipeline_loading_utils as loading

    index = asked.configs[PIPELINE]
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise Unchecked(
            f"the class in {PIPELINE} is code from the folder, which ckptfix never runs"
        )
    cls: Any = getattr(library, name.removeprefix("Flax"), None)
    if cls is None:
        return answer._replace(refused=f"diffusers {library.__version__} has no class {name}")
    if not _is_model(cls, library.DiffusionPipeline):
        raise Unchecked(f"{name} is not a pipeline")
    expected, _ = cls._get_signature_keys(cls)
    listed, _, _ = cls.extract_init_dict(index)
    components = {
        key: value
        for key, value in listed.items()
        if key in expected and isinstance(value, list | tuple) and value[0] is not None
    }
    refused: list[str] = []
    unknown: list[str] = []
    for key, (source, kind) in components.items():
        try:
            class_of_component, _ = loading.get_class_obj_and_candidates(
                source, kind, loading.ALL_IMPORTABLE_CLASSES, pipelines, hasattr(pipelines, source)
            )
        except ANYTHING as error:
            refused.append(f"{key}: {in_words(error)}")
            continue
        try:
            names = frozenset(asked.components[key])
            lacks = tuple(_files_lacking(library, class_of_component, names))
        except ANYTHING:
            # A component may be of any class, and its folder one that may not be listed.
            unknown.append(f"whether {key}/ has the files that {kind} loads")
            continue
        refused += (f"{key}/ has no {words}, which {kind} loads" for words in lacks)
    absent = sorted({*expected} - components.keys() - {*cls._optional_components})
    if absent:
        refused.append(f"{PIPELINE} does not list {list_names(absent)}")
    return answer._replace(
        loads=name,
        components=len(components),
        refused="; ".join(refused),
        unknown=tuple(unknown),
    )


def _files_lacking(library: Any, cls: Any, names: frozenset[str]) -> Iterator[str]:
    """Yield in words the files that a class of a pipeline's component looks for, and that are not
    among ``names``. Raises Unchecked.
    """
    configs: tuple[str, ...]
    if issubclass(cls, library.ConfigMixin):
        configs, weights = (cls.config_name,), "diffusers"
    else:
        transformers = _imported("transformers")
        weights = "transformers"
        if issubclass(cls, transformers.PreTrainedTokenizerBase):
            yield from _vocabulary_lacking(cls, names)
            return
        if issubclass(cls, transformers.PreTrainedModel):
            configs = (CONFIG,)
        elif issubclass(
            cls, (transformers.FeatureExtractionMixin, transformers.ImageProcessingMixin)
        ):
            configs = OF_PROCESSORS
        else:
            raise Unchecked(f"the files of {cls.__name__} are not known")
    if lacks_config := names.isdisjoint(configs):
        yield " or ".join(configs)
    wanted = weights_names(weights)
    if not issubclass(cls, torch.nn.Module) or names.intersection(
        (*wanted, *(f"{name}.index.json" for name in wanted))
    ):
        return
    if not any(map(_may_be_weights, names)):
        yield " or ".join(wanted)
    elif not lacks_config:
        raise Unchecked("only a variant or another format is there")


def _vocabulary_lacking(cls: Any, names: frozenset[str]) -> Iterator[str]:
    """Yield in words the files of a vocabulary where a folder has the settings of a tokenizer
    alone. Raises Unchecked where it has a part of them.
    """
    own: dict[str, str] = dict(cls.vocab_files_names)
    fast = own.pop("tokenizer_file", None)
    if fast in names or (own and names.issuperset(own.values())):
        return
    if names - NO_VOCABULARY or not (own or fast):
        raise Unchecked("a vocabulary under another name")
    yield " or ".join(filter(None, (" and ".join(own.values()), fast)))


def _may_be_weights(name: str) -> bool:
    parsed = parse_file_name(name)
    return parsed.is_of_library if parsed is not None else name.endswith(OTHER_WEIGHTS)


_MISSING = re.compile(
    r"Found missing adapter keys while loading the checkpoint: (\[.*\])\.", re.DOTALL
)
_SIZES = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch.Size\(\[([\d, ]*)\]\) from"
    r" checkpoint, "
    r"the shape in current model is torch.Size\(\[([\d, ]*)\]\)"
)


def _of_peft(
    library: Any, asked: Asked, tensors: dict[str, torch.Tensor], folder: Path, answer: LoadOutcome
) -> LoadOutcome:
    config = asked.configs[CONFIG_OF_LIBRARY["peft"]]
    kind = str(config.get("peft_type"))
    if kind not in library.PeftType.__members__.values():
        raise Unchecked(f"peft {library.__version__} has no adapter of type {kind}")
    if config.get("monteclora_config"):
        raise Unchecked("PEFT creates the MonteCLoRA sampler (monteclora_config) only on a device")
    outcomes: list[LoadOutcome] = []
    for base, unknown in _bases(library, config, tensors, asked.home):
        outcomes.append(_adapted(library, base, tensors, folder, answer)._replace(unknown=unknown))
        if not outcomes[-1].status:
            break
    return min(outcomes, key=lambda outcome: (bool(outcome.refused), -(outcome.live or 0)))


def _bases(
    library: Any, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], start: str
) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield the base of an adapter without bytes, and what is assumed of it: a script may load it
    as either class.

    First the class for the task of the adapter, or the one that PEFT noted without a task, then the
    one that the base's own config names.
    """
    import transformers

    home = _home_of_base(config, start)
    given = read_config(Path(home), "config.json")
    if not given:
        raise Unchecked("config.json of the base model cannot be read")
    _ensure_own_code(given, "config.json of the base model")
    task = str(config.get("task_type"))
    auto = getattr(library.auto, f"AutoPeftModelFor{_TASKS.get(task)}", None)
    if auto is not None:
        with suppress(ValueError):  # the class for the task has no model of this type
            settings = transformers.AutoConfig.from_pretrained(home, local_files_only=True)
            build = auto._target_class.from_config
            yield _base(partial(build, trust_remote_code=False), settings, task, tensors)
    mapping = config.get("auto_mapping")
    noted = mapping.get("base_model_class") if isinstance(mapping, Mapping) else None
    for names in (*([[noted]] if noted else ()), given.get("architectures")):
        cls = _class_of_transformers(transformers, {**given, "architectures": names})
        yield _base(cls._from_config, _config_of(cls, Path(home)), task, tensors)


def _base(
    build: Callable[..., Any], settings: Any, task: str, tensors: Mapping[str, torch.Tensor]
) -> tuple[Any, tuple[str, ...]]:
    """Return a base of the sizes that a script gives it before it adds the adapter, and these sizes
    in words.
    """
    attention, unasked = _attention_of(settings)
    unknown = [*unasked]
    if settings.__dict__.pop("quantization_config", None) is not None:
        unknown.append(
            "whether the base can be quantized here: it was loaded without quantization_config"
        )
    labels = {
        tensor.shape[0]
        for key, tensor in tensors.items()
        if key.endswith(_HEADS) and tensor.dim() == 2
    }
    if len(labels) == 1 and settings.num_labels not in labels:
        (settings.num_labels,) = labels
        unknown.append(
            f"whether the script loads the base with num_labels={settings.num_labels}, as the "
            "adapter requires"
        )
    with torch.device("meta"):
        base = build(settings, **attention)
    embedding = None
    # CLIPModel has two embeddings; for the input of ViT they are convolutions, for that of wav2vec
    # 2.0 nothing.
    with suppress(NotImplementedError, AttributeError):
        embedding = base.get_input_embeddings()
    if not isinstance(embedding, torch.nn.Embedding):
        return base, tuple(unknown)
    name = next((name for name, module in base.named_modules() if module is embedding), "")
    parts = ("", ".base_layer", ".token_adapter.base_layer")
    saved = [tensors.get(f"base_model.model.{name}{part}.weight") for part in parts]
    rows = max(
        [tensor.shape[0] for tensor in saved if tensor is not None and tensor.dim()], default=0
    )
    if rows > embedding.weight.shape[0]:
        with torch.device("meta"):
            base.resize_token_embeddings(rows, mean_resizing=False)
        unknown.append(
            f"whether the script calls resize_token_embeddings({rows}) before it adds the adapter"
        )
        head = base.get_output_embeddings()
        name = next((name for name, module in base.named_modules() if module is head), "")
        is_tied = head is None or head.weight is base.get_input_embeddings().weight
        # PEFT says nothing of them, and two loads differ in these rows.
        if not is_tied and not any(f".{name}." in f".{key}" for key in tensors):
            unknown.append(
                f"whether the adapter lost {name}: the rows of the base beyond its vocabulary stay "
                "random"
            )
    return base, tuple(unknown)


_HEADS = (".score.weight", ".classifier.weight", ".classifier.out_proj.weight")
_TASKS = {
    "SEQ_CLS": "SequenceClassification", "SEQ_2_SEQ_LM": "Seq2SeqLM", "CAUSAL_LM": "CausalLM",
    "TOKEN_CLS": "TokenClassification", "QUESTION_ANS": "QuestionAnswering",
    "FEATURE_EXTRACTION": "FeatureExtraction",
}  # fmt: skip


def _home_of_base(config: Mapping[str, Any], start: str) -> str:
    """Return the folder with the config of the base model: a local one, or in the hub's cache.

    ``start``: the folder from which a relative path begins.
    """
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise Unchecked("adapter_config.json names no base model (base_model_name_or_path)")
    if Path(start, base, "config.json").is_file():
        return str(Path(start, base))
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        path = try_to_load_from_cache(base, "config.json", revision=config.get("revision"))
        if isinstance(path, str):
            return str(Path(path).parent)
    raise Unchecked(f"the base model {base} is neither a local folder nor in the Hub cache")


def _adapted(
    library: Any, base: Any, tensors: dict[str, torch.Tensor], folder: Path, answer: LoadOutcome
) -> LoadOutcome:
    # Older versions do not report which keys are missing.
    if TorchVersion(library.__version__) < (0, 15):
        raise Unchecked(f"peft {library.__version__} is too old (expected 0.15 or newer)")
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
    from peft.utils import save_and_load

    answer = answer._replace(loads=f"{type(base).__name__}")
    Path(folder, "adapter_model.safetensors").touch()
    with (
        patch.object(save_and_load, "safe_load_file", lambda *_, **__: dict(tensors)),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            model = library.PeftModel.from_pretrained(
                base, str(folder), low_cpu_mem_usage=True, autocast_adapter_dtype=False
            )
        except RuntimeError as error:
            if sizes := _SIZES.findall(str(error)):
                return answer._replace(
                    mismatched=_mismatches(
                        (key, _shape(has), _shape(wants)) for key, has, wants in sizes
                    )
                )
            raise
    said = [match[1] for warning in caught if (match := _MISSING.search(str(warning.message)))]
    missing = {key for text in said for key in ast.literal_eval(text)}
    placed = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    named = library.get_peft_model_state_dict(model, save_embedding_layers=False)
    # What PEFT would save under a key it has read from there, if only into a buffer: RandLoRA copies
    # its projections, and the layers of Lily share a matrix that the last of their keys fills.
    live = {key for key, tensor in tensors.items() if _storage(tensor) in placed or key in named}
    # PEFT 0.21.2 leaves parameters that layers share out of its warning (VBLoRA's vector bank,
    # TinyLoRA's vectors), and all of prompt learning.
    read = {_storage(tensor) for tensor in tensors.values()}
    missing |= {
        key for key, tensor in named.items() if key not in tensors and _storage(tensor) not in read
    }
    # Next to its own tensors a file may have those of a second adapter, which PEFT leaves out by
    # right.
    mark = PEFT_TYPE_TO_PREFIX_MAPPING.get(model.active_peft_config.peft_type) or "\0"
    marks = (mark, PEFT_TYPE_TO_PREFIX_MAPPING[library.PeftType.TRAINABLE_TOKENS])
    parameters = {_parameter(key, marks) for key in live}
    unused = sorted(tensors.keys() - live)
    dead = tuple(
        key
        for key in unused
        if (parameter := _parameter(key, marks))
        and (parameter not in parameters or key.removeprefix(parameter) in _WITHOUT_A_NAME)
    )
    return answer._replace(
        missing=tuple(sorted(missing)),
        unexpected=tuple(key for key in unused if key not in dead),
        dead=dead,
        live=len(live),
    )


_WITHOUT_A_NAME = ("", ".weight", ".bias")
"""Ends of a key behind its parameter. Those of a second adapter have its name:
``lora_A.second.weight``.
"""


def _parameter(key: str, marks: Iterable[str]) -> str:
    """Return a key up to the segment with a mark of a tuner, ``layers.0.q_proj.lora_A``, "" for a
    key without.
    """
    for mark in marks:
        before, found, after = key.rpartition(mark)
        if found:
            return f"{before}{found}{after.partition('.')[0]}"
    return ""


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _storage(tensor: torch.Tensor) -> int:
    """Return what identifies a tensor without bytes: a parameter that was made of it has the
    same.
    """
    return int(tensor.untyped_storage()._cdata)


_LOADS: dict[str, Callable[..., LoadOutcome]] = {
    "transformers": _of_transformers, "diffusers": _of_diffusers, "peft": _of_peft,
}  # fmt: skip


def main() -> None:
    """Answer each line of the standard input, a load as JSON, with the line of its outcome."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "wb")
    # What a library prints is no answer.
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        # Nobody waits for a later answer. The parent ends this process before, unless it ended
        # itself.
        signal.alarm(int(PATIENCE) + 10)
        outcome = ask(Asked(**json.loads(line)))
        answers.write(json.dumps(outcome._asdict()).encode() + b"\n")
        answers.flush()
        signal.alarm(0)
        if outcome.unchecked.startswith(NEEDS_MORE):
            # The next question gets a process with memory.
            return
