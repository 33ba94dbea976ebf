"""Configs of models in sub-folders, as hooks of diffusers and PEFT write them, and whether their weights are there."""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.filenames import NOT_STATES, is_one_of_several, parse_dcp_name, parse_file_name
from ckptfix.checkpoint.folder import PLAIN_FOLDER
from ckptfix.storage.paths import JOURNAL
from ckptfix.storage.reading import read_start

CONFIG, ADAPTER, _GENERATION = "config.json", "adapter_config.json", "generation_config.json"
_LONGEST_CONFIG = 1 << 20
_PREPROCESSING = ("tokenizer", "preprocessor_config", "processor_config", "vocab", "spiece", "special_tokens")

OTHER_WEIGHTS = (".gguf", ".h5", ".msgpack", ".npy", ".npz", ".onnx", ".pickle", ".pkl", ".pt2", ".tar")
"""Endings of the weights of other libraries, which are not read."""


def without_weights(
    root: Path, subfolders: Mapping[PurePosixPath, str], names: Collection[str]
) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield each config of a model in a sub-folder of a checkpoint that lacks the weights, and the model's class.

    ``subfolders``: folder -> its kind. ``names``: the files of the checkpoint itself.
    """
    for config, model in _configured_models(root, subfolders, names):
        if not may_hold_weights(root / config.parent):
            yield config, model


def may_hold_weights(below: Path) -> bool:
    """Return whether a folder or one below it holds a file that may be weights, or cannot be read."""
    refused: list[OSError] = []
    for _, folders, names in os.walk(below, onerror=refused.append):
        folders[:] = [name for name in folders if name != JOURNAL]
        if any(
            parse_file_name(name) or parse_dcp_name(name) or name.endswith(OTHER_WEIGHTS) for name in names
        ):
            return True
    return bool(refused)


def _configured_models(
    root: Path, subfolders: Mapping[PurePosixPath, str], names: Iterable[str]
) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield the configs in sub-folders that a library saves together with weights, each with the class of its model.

    Configs that are also saved without weights are left out: schedulers and tokenizers (other file names),
    image processors of diffusers, and a config of transformers next to a tokenizer, unless a model's
    ``generation_config.json`` is there.
    """
    parsed = map(parse_file_name, names)
    has_weights = any(name is not None and name.role in NOT_STATES for name in parsed)
    for path, kind in subfolders.items():
        if kind != PLAIN_FOLDER or is_one_of_several(path.name):
            continue
        for name in (ADAPTER, CONFIG):
            # A lone config may describe the weights in the checkpoint itself. An adapter is a model of its own.
            model = _class_of(root / path, name) if name == ADAPTER or not has_weights else ""
            if model:
                yield path / name, model


def _class_of(folder: Path, name: str) -> str:
    """Return the class of the model whose weights belong next to a config, "" where none need to be there."""
    try:
        neighbors = set(os.listdir(folder))
        if name not in neighbors or not (folder / name).is_file():
            return ""
        config = json.loads(read_start(folder / name, _LONGEST_CONFIG) or b"")
    except (OSError, ValueError, RecursionError):
        return ""
    if not isinstance(config, dict):
        return ""
    if name == ADAPTER:
        kind = config.get("peft_type")
        return f"a PEFT adapter ({kind})" if isinstance(kind, str) else ""
    of_diffusers = config.get("_class_name")
    if isinstance(of_diffusers, str):
        return "" if of_diffusers.endswith("Processor") else of_diffusers
    architectures = config.get("architectures")
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        return ""
    is_of_tokenizer = any(one.startswith(_PREPROCESSING) for one in neighbors)
    return architectures[0] if _GENERATION in neighbors or not is_of_tokenizer else ""
