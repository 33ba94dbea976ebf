"""Sub-folders that hold models of a checkpoint: as hooks of ``save_state`` write them, and pipelines of diffusers."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.filenames import NOT_STATES, Role, parse_file_name, parse_folder_name
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder
from ckptfix.weights.deepspeed_files import deepspeed_folders

_DEEPEST = 2
_NUMBERED = re.compile(r"(checkpoint|step|epoch)[-_]?[0-9]+")
"""How scripts call the checkpoints in a folder of such."""

_PIPELINE = "model_index.json"
_CONFIG, _ADAPTER, _GENERATION = "config.json", "adapter_config.json", "generation_config.json"
_LONGEST_CONFIG = 1 << 20
_CONFIGS = frozenset({_CONFIG, _ADAPTER})
_PREPROCESSING = ("tokenizer", "preprocessor_config", "processor_config", "vocab", "spiece", "special_tokens")
_TRAINER_STATE = "trainer_state.json"


def model_folders(folder: CheckpointFolder, *, has_weights: bool, depth: int = 0) -> Iterator[PurePosixPath]:
    """Yield the sub-folders whose weights belong to the checkpoint in a scanned folder.

    The folder must be known for a checkpoint, as a folder of checkpoints is none. ``has_weights``: its own weights are
    in it; below are then only models that a library finds by their names and a config. ``depth``: how far below the
    checkpoint it lies itself. Links and checkpoints of their own are left out.
    """
    if depth >= _DEEPEST or not (depth or _is_checkpoint(folder)):
        return
    taken = {where for _, where in deepspeed_folders(folder)}
    for path, kind in folder.subfolders.items():
        full = folder.root / path
        if kind != PLAIN_FOLDER or path in taken or _NUMBERED.fullmatch(path.name) or full.is_symlink():
            continue
        try:
            names = os.listdir(full)
        except OSError:
            continue
        if _is_own_checkpoint(names) or (has_weights and not _is_of_library(names)):
            continue
        yield path


def configured_models(folder: CheckpointFolder) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield the configs in sub-folders that a library saves together with weights, each with the class of its model.

    Left out is what is also saved without weights: schedulers and tokenizers (other file names), image processors of
    diffusers, and a config of transformers next to a tokenizer, unless a model's ``generation_config.json`` is there.
    """
    if not _is_checkpoint(folder):
        return
    has_weights = any(component.role in NOT_STATES for component in folder.components)
    for path, kind in folder.subfolders.items():
        if kind != PLAIN_FOLDER or _NUMBERED.fullmatch(path.name):
            continue
        for name in (_ADAPTER, _CONFIG):
            # A lone config may describe the weights in the checkpoint itself. An adapter is a model of its own.
            model = _class_of(folder.root / path, name) if name == _ADAPTER or not has_weights else ""
            if model:
                yield path / name, model


def _class_of(folder: Path, name: str) -> str:
    """Return the class of the model whose weights belong next to a config, "" where none need to be there."""
    try:
        beside = set(os.listdir(folder))
        if name not in beside or not (folder / name).is_file():
            return ""
        with (folder / name).open("rb") as file:
            config = json.loads(file.read(_LONGEST_CONFIG))
    except (OSError, ValueError, RecursionError):
        return ""
    if not isinstance(config, dict):
        return ""
    if name == _ADAPTER:
        kind = config.get("peft_type")
        return f"a PEFT adapter ({kind})" if isinstance(kind, str) else ""
    of_diffusers = config.get("_class_name")
    if isinstance(of_diffusers, str):
        return "" if of_diffusers.endswith("Processor") else of_diffusers
    architectures = config.get("architectures")
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        return ""
    is_of_tokenizer = any(one.startswith(_PREPROCESSING) for one in beside)
    return architectures[0] if _GENERATION in beside or not is_of_tokenizer else ""


def _is_checkpoint(folder: CheckpointFolder) -> bool:
    """Whether a folder holds a state, weights of a library or the list of a pipeline's models."""
    names = (component.name for component in folder.components)
    return (
        any(name.role not in NOT_STATES or name.is_of_library for name in names)
        or any(path.name == _PIPELINE for path in folder.strays)
        or any(_is_model_folder(path.name) for path in folder.subfolders)
    )


def _is_own_checkpoint(names: list[str]) -> bool:
    parsed = map(parse_file_name, names)
    return _TRAINER_STATE in names or any(name is not None and name.role not in NOT_STATES for name in parsed)


def _is_of_library(names: list[str]) -> bool:
    return not _CONFIGS.isdisjoint(names) and any(map(_is_model, names))


def _is_model(name: str) -> bool:
    file = parse_file_name(name)
    return (file is not None and file.is_of_library) or _is_model_folder(name)


def _is_model_folder(name: str) -> bool:
    folder = parse_folder_name(name)
    return folder is not None and folder.role is Role.MODEL
