"""Configs of models, as transformers, diffusers, PEFT and sentence-transformers write them, and
whether the weights are there.

A config is any file that somebody named so: what is read of it is bounded, and what is wrong with
it is a sentence.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from msgspec import Struct

from ckptfix.checkpoint.filenames import (
    TRAINER_STATE,
    copied_name,
    downloaded_name,
    parse_file_name,
    weights_names,
)
from ckptfix.checkpoint.folder_names import is_one_of_several
from ckptfix.checkpoint.rank_names import parse_dcp_name
from ckptfix.checkpoint.roles import NOT_STATES, is_of_macos
from ckptfix.storage.files import AnyPath, names_in, walk
from ckptfix.storage.paths import JOURNAL, unreadable
from ckptfix.storage.reading import read_start
from ckptfix.wording import human_size

CONFIG, ADAPTER, GENERATION = "config.json", "adapter_config.json", "generation_config.json"
PIPELINE = "model_index.json"
"""The file in which diffusers lists the components of a pipeline, each in a sub-folder."""
MODULES = "modules.json"
"""The file in which sentence-transformers lists the modules of a model, in sub-folders and the
folder itself.
"""
NO_OBJECT = "not a JSON object"

_OF_SENTENCES = ("config_sentence_transformers.json", "sentence_bert_config.json")
"""Files that sentence-transformers writes next to it, the first since version 2."""
_LONGEST_CONFIG = 1 << 20
_LARGEST_COUNT = 1 << 40
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_VERSIONS = (
    ("transformers", "transformers_version"),
    ("diffusers", "_diffusers_version"),
    ("peft", "peft_version"),
)
"""Library -> the key under which its configs record its version."""
_PREPROCESSING = (
    "tokenizer",
    "preprocessor_config",
    "processor_config",
    "vocab",
    "spiece",
    "special_tokens",
)

OTHER_WEIGHTS = (
    ".bmodel", ".ckpt.index", ".dlc", ".engine", ".ggml", ".gguf", ".h5", ".hdf5", ".keras",
    ".litertlm", ".mlmodel", ".mnn", ".msgpack", ".nemo", ".npy", ".npz", ".om", ".onnx", ".ort",
    ".ot", ".pb", ".pdparams", ".pickle", ".pkl", ".plan", ".pt2", ".pte", ".rknn", ".tar", ".task",
    ".tflite",
)  # fmt: skip
"""Endings of the weights of other libraries, which are not read."""


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Facts that a config records about a model; None, 0 or "" for one that it does not.

    ``model``: its class. ``base``: the model that an adapter is for, ``rank``: of its matrices.
    ``libraries``: name -> version. ``problems``: in words, what is wrong with the config.
    """

    model: str = ""
    layers: int | None = None
    vocabulary: int | None = None
    rank: int | None = None
    base: str = ""
    libraries: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()


def read_model_config(folder: AnyPath, name: str) -> ModelConfig:
    """Return the facts of ``config.json`` or ``adapter_config.json`` in a folder. The file is read
    once.
    """
    try:
        config = _read_object(folder / name)
    except OSError as error:
        return ModelConfig(problems=(f"{name}: {unreadable(folder / name, error)}",))
    except ValueError as error:
        return ModelConfig(problems=(f"{name}: {error}",))
    problems: list[str] = []

    def word(value: object, key: str) -> str:
        if value is None or (isinstance(value, str) and value.isprintable() and len(value) <= 200):
            return str(value or "")
        problems.append(f'{name}: "{key}" is not a valid name')
        return ""

    def count(values: Mapping[str, Any], *keys: str) -> int | None:
        key = next((key for key in keys if values.get(key) is not None), None)
        if key is None:
            return None
        value = values[key]
        if type(value) is int and 0 <= value < _LARGEST_COUNT:
            return value
        problems.append(f'{name}: "{key}" is not a valid count')
        return None

    libraries = tuple(
        (library, version) for library, key in _VERSIONS if (version := word(config.get(key), key))
    )
    if name == ADAPTER:
        kind = word(config.get("peft_type"), "peft_type")
        return ModelConfig(
            model=f"{kind} adapter" if kind else "",
            rank=count(config, "r"),
            base=word(config.get("base_model_name_or_path"), "base_model_name_or_path"),
            libraries=libraries,
            problems=tuple(problems),
        )
    classes = config.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else classes or None
    # Models of images and text have the numbers of their language model in a config of its own.
    inner = config.get("text_config")
    own = {key: value for key, value in config.items() if value is not None}
    values = {**inner, **own} if isinstance(inner, dict) else own
    return ModelConfig(
        model=word(config.get("_class_name"), "_class_name")
        or word(first, "architectures")
        or word(config.get("model_type"), "model_type"),
        layers=count(values, *_LAYERS),
        vocabulary=count(values, "vocab_size"),
        libraries=libraries,
        problems=tuple(problems),
    )


def broken_config(path: AnyPath) -> str:
    """Return why no loader can read a config, "" for one that is read, or that may not be read or
    is too long.
    """
    with suppress(OSError):
        data = read_start(path, _LONGEST_CONFIG) or b""
        if len(data) == _LONGEST_CONFIG:
            return ""
        if data.startswith(b"version https://git-lfs"):
            return "a git-LFS pointer"
        try:
            # json.loads takes UTF-16 and a byte order mark; loaders open a config as UTF-8.
            (_json_in if path.name == MODULES else _object_in)(data.decode())
        except UnicodeDecodeError:
            return "not JSON"
        except ValueError as error:
            return str(error)
    return ""


def is_empty_config(path: AnyPath) -> bool:
    """Return whether a config is an object without a key."""
    with suppress(OSError, ValueError):
        return not _read_object(path)
    return False


def read_config(folder: AnyPath, name: str) -> dict[str, Any]:
    """Return the object in a config; empty where there is none that can be read, which is a finding
    of its own.
    """
    with suppress(OSError, ValueError):
        return _read_object(folder / name)
    return {}


def library_of(config: Mapping[str, Any]) -> str:
    """Return the library whose ``from_pretrained`` a config is for, "" where it does not say."""
    if isinstance(config.get("peft_type"), str):
        return "peft"
    if isinstance(config.get("_class_name"), str):
        return "diffusers"
    return "transformers" if isinstance(config.get("architectures"), list) else ""


def versions_of(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the libraries whose versions a config records, with these."""
    return tuple(
        (library, config[key]) for library, key in _VERSIONS if isinstance(config.get(key), str)
    )


def library_of_names(path: AnyPath) -> str:
    """Return the library that finds the weights next to a config by their name, "" where it does
    not say for sure.

    A script may write a config without a version. One of transformers 5 may name the file with the
    weights itself.
    """
    config = read_config(path.parent, path.name)
    library = library_of(config)
    versions = [name for name, key in _VERSIONS if key in config]
    is_certain = library == "peft" or (
        versions == [library] and "transformers_weights" not in config
    )
    return library if is_certain else ""


def is_of_average(folder: AnyPath) -> bool:
    """Return whether ``EMAModel`` of diffusers wrote the config of a model, with its counters
    (0.42).
    """
    with suppress(OSError, ValueError):
        config = _read_object(folder / CONFIG)
        return bool(versions_of(config)) and "optimization_step" in config
    return False


def is_pretrained(folder: AnyPath) -> bool:
    """Return whether transformers, diffusers or PEFT saved a model in a folder, by its config.

    A ``model_type`` alone proves nothing: configs of scripts have it, too.
    """
    for name in (CONFIG, ADAPTER):
        # Missing, or somebody else's.
        with suppress(OSError, ValueError):
            config = _read_object(folder / name)
            keys = ("architectures", "peft_type", *(key for _, key in _VERSIONS))
            if any(config.get(key) for key in keys):
                return True
    return False


def _read_object(path: AnyPath) -> dict[str, Any]:
    """Return the object in a JSON file. Raises OSError, ValueError: with the reason in words."""
    data = read_start(path, _LONGEST_CONFIG)
    if data is None:
        raise ValueError("not a regular file")
    if len(data) == _LONGEST_CONFIG:
        raise ValueError(f"longer than {human_size(_LONGEST_CONFIG)}, so it was not read")
    return _object_in(data)


def _json_in(text: bytes | str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        raise ValueError("not JSON" if text else "empty") from None


def _object_in(text: bytes | str) -> dict[str, Any]:
    """Return the object that a JSON text holds. Raises ValueError with the reason in words."""
    document = _json_in(text)
    if not isinstance(document, dict):
        raise ValueError(NO_OBJECT)
    return document


class LostModel(NamedTuple):
    """A model that a config records and whose weights are missing.

    ``config``: that file. ``wanted``: the names that the loader of its class looks for.
    ``component``: the sub-folder that ``model_index.json`` or ``modules.json`` lists and that is
    missing, or ``is_empty``, or ``lacks`` something.
    """

    config: PurePosixPath
    model: str
    wanted: str = ""
    component: str = ""
    is_empty: bool = False
    lacks: str = ""

    @property
    def problem(self) -> str:
        """The problem in words. The paths are relative to the checkpoint."""
        if self.component:
            is_there = "is empty" if self.is_empty else "is missing"
            state = f"has no {self.lacks}" if self.lacks else is_there
            return f"{self.component}/ {state}, but {self.config} lists it ({self.model})"
        where = f"{self.config.parent}/" if self.config.parent.parts else "this folder"
        looks = f" (expected {self.wanted})"
        return f"{where} has no weights, but its {self.config.name} is for {self.model}{looks}"


def lost_models(
    root: AnyPath, subfolders: Iterable[PurePosixPath], names: Collection[str]
) -> Iterator[LostModel]:
    """Yield the models of a checkpoint that its sub-folders or its list of them record, without
    their weights.

    ``subfolders``: those that no library uses for states. ``names``: the files of the checkpoint
    itself.
    """
    modules = tuple(_lost_modules(root))
    yield from modules
    told = {lost.component for lost in modules}
    for lost in _configured_models(root, subfolders, names):
        if str(lost.config.parent) not in told and not may_hold_weights(root / lost.config.parent):
            yield lost
    # A component without a folder is loaded from the pipeline's own folder.
    if not {CONFIG, SCHEDULER, OF_PROCESSORS[0]} & set(names):
        for component, (library, model) in pipeline_components(root).items():
            if not _holds_any(root / component):
                is_empty = (root / component).exists()
                yield LostModel(
                    PurePosixPath(PIPELINE), model, component=component, is_empty=is_empty
                )
            elif lacks := _lacks(root / component, library, model):
                yield LostModel(PurePosixPath(PIPELINE), model, component=component, lacks=lacks)


NO_VOCABULARY = frozenset(("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"))
"""Settings of a tokenizer. Their names are the same for all classes, those of a vocabulary are
not.
"""

SCHEDULER = "scheduler_config.json"
OF_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Configs of feature extractors and image processors: transformers 5 looks for both."""

_OF_CLASSES = {
    "Scheduler": (SCHEDULER,),
    "FeatureExtractor": OF_PROCESSORS,
    # VaeImageProcessor is one of diffusers.
    "ImageProcessor": (*OF_PROCESSORS, CONFIG),
}
"""Word in the name of a class without weights -> the configs of which it reads one (diffusers 0.42,
transformers 5.23).
"""


_WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer", "DiaTokenizer")
"""Tokenizers of bytes and characters, whose ``vocab_files_names`` is empty (transformers 5.23)."""


def _lacks(folder: AnyPath, library: str, model: str) -> str:
    """Return what the folder of a component lacks, as its class always has it; "" for nothing.

    Of a model that is its config, next to weights of a library: ``from_pretrained`` looks for both.
    A folder with nothing but unfinished copies lacks it, too. A class of the script may be a model
    whatever its name.
    """
    try:
        names = complete_names(names_in(folder))
    except OSError:
        return ""
    if library in ("transformers", "diffusers"):
        if "Tokenizer" in model and model not in _WITHOUT_VOCABULARY:
            return "" if names - NO_VOCABULARY else "vocabulary"
        for word, configs in _OF_CLASSES.items():
            if word in model:
                return "" if names.intersection(configs) else configs[0]
    parsed = filter(None, map(parse_file_name, names))
    has_weights = any(name.is_of_library and name.model is not None for name in parsed)
    return CONFIG if CONFIG not in names and (has_weights or not names) else ""


def complete_names(names: Iterable[str]) -> frozenset[str]:
    """Return names without the temporary ones of unfinished copies and downloads."""
    return frozenset(name for name in names if not (copied_name(name) or downloaded_name(name)))


class _Module(NamedTuple):
    """A module of sentence-transformers: its class, and the path of its folder, "" for the model's
    own.
    """

    kind: str
    path: str


_OF_TRANSFORMERS = ("Transformer", "CLIPModel", "MLMTransformer")
_WITH_WEIGHTS = (
    *_OF_TRANSFORMERS, "Dense", "LayerNorm", "CNN", "LSTM", "WordEmbeddings", "StaticEmbedding",
    "SparseAutoEncoder", "WeightedLayerPooling",
)  # fmt: skip
"""Modules that fail to load without ``model.safetensors`` or ``pytorch_model.bin``
(sentence-transformers 6.2).

Those of transformers may have weights of ONNX and OpenVINO instead, in sub-folders.
"""

_WITH_FOLDER = (*_WITH_WEIGHTS, "Pooling")
"""Modules that fail without their folder. ``Normalize`` has nothing in it, so that git and archives
leave it out.
"""


def _modules(root: AnyPath) -> tuple[_Module, ...]:
    """Return the modules of a model of sentence-transformers; none for any other folder."""
    try:
        listed = _json_in(read_start(root / MODULES, _LONGEST_CONFIG) or b"")
    except (OSError, ValueError):
        return ()
    return tuple(
        _Module(kind.rpartition(".")[2], path)
        for module in (listed if isinstance(listed, list) else ())
        if isinstance(module, dict)
        and isinstance(kind := module.get("type"), str)
        and isinstance(path := module.get("path"), str)
        and kind.startswith("sentence_transformers.")
        and (not path or (path == Path(path).name and path != ".." and path.isprintable()))
    )


def _lost_modules(root: AnyPath) -> Iterator[LostModel]:
    """Yield the modules that ``modules.json`` lists and that lack their folder or their weights."""
    modules = _modules(root)
    paths = {module.path for module in modules}
    list_, wanted = PurePosixPath(MODULES), " or ".join(weights_names("transformers"))
    for module in modules:
        if module.path and module.kind in _WITH_FOLDER and not _holds_any(root / module.path):
            is_empty = (root / module.path).exists()
            yield LostModel(list_, module.kind, component=module.path, is_empty=is_empty)
        elif module.kind in _WITH_WEIGHTS and not _holds_weights_of(
            root / module.path, module, paths
        ):
            lacks = "weights" if module.path else ""
            yield LostModel(list_, module.kind, wanted=wanted, component=module.path, lacks=lacks)


def _holds_weights_of(folder: AnyPath, module: _Module, others: Collection[str]) -> bool:
    """Return whether the folder of a module holds its weights, or cannot be read. ``others``:
    folders of modules.
    """
    refused: list[OSError] = []
    for where, folders, names in walk(folder, refused.append):
        is_own = where == folder
        folders[:] = [
            name
            for name in folders
            if module.kind in _OF_TRANSFORMERS
            and name != JOURNAL
            and not is_one_of_several(name)
            and not (is_own and not module.path and name in others)
        ]
        if any(map(_may_be_weights, names)):
            return True
    return bool(refused)


def _may_be_weights(name: str) -> bool:
    parsed = parse_file_name(name)
    if parsed is not None:
        return parsed.role in NOT_STATES
    return name.endswith(OTHER_WEIGHTS) and not is_of_macos(name)


def lists_models(root: AnyPath) -> bool:
    """Return whether a folder lists models, each to be checked: a pipeline of diffusers, or
    sentence-transformers.

    Or the list is broken, and below it are weights.
    """
    if pipeline_components(root) or any(module.kind in _WITH_WEIGHTS for module in _modules(root)):
        return True
    return any(broken_lists(root)) and may_hold_weights(root)


_LISTS = {PIPELINE: "DiffusionPipeline.from_pretrained", MODULES: "SentenceTransformer"}
"""List of models -> the load that fails where it is not JSON (diffusers 0.42, sentence-transformers
6.2).
"""


_OF_COMPONENTS = (SCHEDULER, *OF_PROCESSORS, "tokenizer_config.json")


def broken_lists(root: AnyPath) -> Iterator[tuple[str, str]]:
    """Yield each list of models that its library cannot read, and the problem in words.

    Other programs write a ``modules.json``, too. With it go the configs that a pipeline keeps for
    components without weights.
    """
    for name, load in _LISTS.items():
        is_of_library = name == PIPELINE or any((root / file).exists() for file in _OF_SENTENCES)
        if is_of_library and (root / name).exists() and (broken := broken_config(root / name)):
            yield name, f"{broken}, so {load} fails"
    for component in pipeline_components(root):
        for name in _OF_COMPONENTS:
            path = root / component / name
            if path.exists() and (broken := broken_config(path)):
                yield f"{component}/{name}", f"{broken}, so {_LISTS[PIPELINE]} fails"


def components_of_other_classes(root: AnyPath) -> Iterator[str]:
    """Yield in words each component of a pipeline whose own config is of another class than the
    pipeline lists.

    diffusers builds the listed class from that config (``pipeline_loading_utils.py``, 0.42).
    """
    for component, (_, listed) in pipeline_components(root).items():
        own = read_config(root / component, CONFIG).get("_class_name")
        if not isinstance(own, str):
            continue
        # A config that diffusers wrote anew has DiTTransformer2DModel for Transformer2DModel.
        names = own.removeprefix("Flax"), listed.removeprefix("Flax")
        if not names[0].endswith(names[1]) and not names[1].endswith(names[0]):
            yield (
                f"it lists {listed} for {component}/, but {component}/{CONFIG} is for {own}: "
                f"{_LISTS[PIPELINE]} builds {listed}, and fails or leaves weights random"
            )


def lost_model(root: AnyPath) -> LostModel | None:
    """Return the model that the config of a folder itself records, where no weights are in or below
    the folder.

    PEFT writes the config of an adapter together with its weights. ``config.json`` alone, also next
    to a tokenizer, may be all that a repository has: ``from_config`` makes a new model of it. The
    Trainer's state shows that one was saved.
    """
    for name in (ADAPTER, *((CONFIG,) if (root / TRAINER_STATE).exists() else ())):
        lost = _recorded_model(root, PurePosixPath(name), is_alone=True)
        if lost is not None and not may_hold_weights(root):
            return lost
    return None


def pipeline_components(root: AnyPath) -> dict[str, tuple[str, str]]:
    """Return the components of a pipeline of diffusers with their libraries and classes; empty for
    any other folder.

    A component that the pipeline does without is stored as ``[null, null]``. Names are those of
    arguments in Python.
    """
    try:
        index = _read_object(root / PIPELINE)
    except (OSError, ValueError):
        return {}
    return {
        name: (value[0], value[1])
        for name, value in index.items()
        if isinstance(value, list)
        and len(value) == 2
        and all(isinstance(part, str) for part in value)
        and name.isidentifier()
        and not name.startswith("_")
        and value[1].isidentifier()
    }


def _holds_any(folder: AnyPath) -> bool:
    """Return whether something is in a folder, or it may not be listed."""
    try:
        return bool(names_in(folder))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def may_hold_weights(below: AnyPath) -> bool:
    """Return whether a folder or one below it holds a file that may be weights, or cannot be
    read.
    """
    refused: list[OSError] = []
    for _, folders, names in walk(below, refused.append):
        folders[:] = [name for name in folders if name != JOURNAL]
        if any(
            parse_file_name(name)
            or parse_dcp_name(name)
            or (name.endswith(OTHER_WEIGHTS) and not is_of_macos(name))
            for name in names
        ):
            return True
    return bool(refused)


def _configured_models(
    root: AnyPath, subfolders: Iterable[PurePosixPath], names: Iterable[str]
) -> Iterator[LostModel]:
    """Yield the models whose configs a library saves together with weights, each in a sub-folder.

    Configs that are also saved without weights are left out: schedulers and tokenizers (other file
    names), image processors of diffusers, and a config of transformers next to a tokenizer, unless
    a model's ``generation_config.json`` is there.
    """
    parsed = map(parse_file_name, names)
    has_weights = any(name is not None and name.role in NOT_STATES for name in parsed)
    for path in subfolders:
        if is_one_of_several(path.name):
            continue
        for name in (ADAPTER, CONFIG):
            # A lone config may describe the weights in the checkpoint itself. An adapter is a model
            # of its own.
            if name == ADAPTER or not has_weights:
                recorded = _recorded_model(root, path / name)
                if recorded is not None:
                    yield recorded


_WITHOUT_WEIGHTS = ("Processor", "Scheduler", "Tokenizer", "FeatureExtractor")
"""Ends of the names of classes that have a config and no weights."""


def _recorded_model(
    root: AnyPath, path: PurePosixPath, *, is_alone: bool = False
) -> LostModel | None:
    """Return the model whose weights belong next to a config, None where none need to be there.

    ``is_alone``: no weights of a checkpoint are near that the config of a tokenizer can belong to.
    """
    try:
        neighbors = set(names_in((root / path).parent))
        if path.name not in neighbors or not (root / path).is_file():
            return None
        config = _read_object(root / path)
    except (OSError, ValueError):
        return None
    if path.name == ADAPTER:
        kind = config.get("peft_type")
        return _lost(path, f"a PEFT adapter ({kind})", "peft") if isinstance(kind, str) else None
    of_diffusers = config.get("_class_name")
    if isinstance(of_diffusers, str):
        has_weights = not of_diffusers.endswith(_WITHOUT_WEIGHTS)
        return _lost(path, of_diffusers, "diffusers") if has_weights else None
    architectures = config.get("architectures")
    if not (
        isinstance(architectures, list) and architectures and isinstance(architectures[0], str)
    ):
        return None
    is_of_tokenizer = any(name.startswith(_PREPROCESSING) for name in neighbors)
    if is_alone or GENERATION in neighbors or not is_of_tokenizer:
        return _lost(path, architectures[0], "transformers")
    return None


def _lost(config: PurePosixPath, model: str, library: str) -> LostModel:
    return LostModel(config, model, " or ".join(weights_names(library)))
