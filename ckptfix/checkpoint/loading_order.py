"""The order in which loaders look for the files of a model, and the indexes that they pass over for a file.

A save deletes the shards of the save before it and leaves their index: ``save_pretrained`` of transformers 5.23 and of
diffusers 0.42 do. transformers then loads the one file, and diffusers fails, because it looks for an index first.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ckptfix.checkpoint.filenames import FileName, ModelName, Role
from ckptfix.checkpoint.folder import CheckpointFolder, Component, is_unreadable
from ckptfix.checkpoint.keys import is_computed
from ckptfix.checkpoint.model_configs import CONFIG
from ckptfix.formats.safetensors_file import WeightsIndex

SAFE, SAFE_INDEX, BIN, BIN_INDEX = ".safetensors", ".safetensors.index", ".bin", ".bin.index"

_STEMS = {
    "model": (SAFE, SAFE_INDEX),
    "pytorch_model": (BIN, BIN_INDEX),
    "diffusion_pytorch_model": (SAFE, SAFE_INDEX, BIN, BIN_INDEX),
    "adapter_model": (SAFE, BIN),
    "pytorch_lora_weights": (SAFE, BIN),
}
"""Stem of a file name -> the kinds of family that a loader looks for under it."""

IN_MODEL = "load_checkpoint_in_model"
FILES_IN_MODEL = ("model.safetensors", "pytorch_model.bin")
"""Files that it takes before an index."""

_LOADERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "model": {
        "load_state": (SAFE, BIN),
        "transformers": (SAFE, SAFE_INDEX, BIN, BIN_INDEX),
        IN_MODEL: (BIN, SAFE),
    },
    "diffusion_pytorch_model": {"diffusers": (SAFE_INDEX, SAFE, BIN, BIN_INDEX)},
    "adapter_model": {"PEFT": (SAFE, BIN)},
    "pytorch_lora_weights": {"diffusers": (SAFE, BIN)},
}
"""Model -> loader -> the kinds of family that it looks for; it takes the first that exists.

accelerate 1.15.0: ``checkpointing.py:load_accelerator_state``; ``utils/modeling.py:load_checkpoint_in_model``, which
takes an index only where neither file exists. transformers 5.23.0: ``_get_resolved_checkpoint_files`` of
``modeling_utils.py``. diffusers 0.42.1: ``models/modeling_utils.py:from_pretrained`` and ``loaders/lora_base.py``.
PEFT 0.21.2: ``utils/save_and_load.py:load_peft_weights``. The Trainer, too, resumes from an index only where neither
file exists (``trainer.py:_load_from_checkpoint``), and transformers 4.44.2 has the order of 5.23.0.
"""

BY_OPTION = {("diffusers", BIN_INDEX)}
"""Kinds that a loader takes only with an option: ``use_safetensors=False``."""

_OF_VARIANTS = ("transformers", "diffusers")
"""Loaders with an option ``variant``."""

_MOST_TIES = 16


def kind_of(name: FileName) -> str | None:
    """Return the kind of family of a file or an index by its name, None for a name that no loader tries."""
    if name.role is Role.WEIGHTS_INDEX:
        kind = SAFE_INDEX if name.suffix.startswith(SAFE) else BIN_INDEX
    elif name.role in (Role.MODEL, Role.UNKNOWN) and name.shard is None:
        kind = name.suffix
    else:
        return None
    return kind if kind in _STEMS.get(name.stem.partition(".")[0], ()) else None


def loaders_of(model: ModelName, position: int) -> dict[str, tuple[str, ...]]:
    """Return loader -> the kinds of family that it looks for, of the loaders that look for this model."""
    return {
        loader: order
        for loader, order in _LOADERS.get(model.stem, {}).items()
        if (not model.variant or loader in _OF_VARIANTS) and (position == 0 or loader == "load_state")
    }


def is_part(lost: Collection[str], keys: Collection[str]) -> bool:
    """Return whether a model that lacks these of its keys is a part of it, such as one shard.

    A fourth of the keys, because versions of a library differ in some: masks of GPT-2 (``attn.bias``) are 12 of 160,
    ``decoder.bias`` of BERT and ``relative_attention_bias`` of T5 are one.
    """
    return 4 * sum(not is_computed(key) for key in lost) >= len(keys)


class Replacement(NamedTuple):
    """The file that holds the model of an index whose shards are gone.

    ``is_complete``: it has every key of the index. ``refused_by``: the loaders that take the index all the same.
    """

    file: Component
    is_complete: bool
    refused_by: tuple[str, ...]


def replacement(folder: CheckpointFolder, index: Component) -> Replacement | None:
    """Return the intact file that a later save wrote in place of an index and its shards, None without one.

    Nor is there one where the file may be a piece of the model.
    """
    kind, model = kind_of(index.name), index.name.model
    if kind is None or model is None or is_unreadable(index):
        return None
    files = {
        kind_of(one.name): one
        for one in folder.components
        if one.name.model == model
        and one.name.index == index.name.index
        and one.role is not Role.WEIGHTS_INDEX
    }
    file = files.get(SAFE) or files.get(BIN)
    if file is None or file.problem is not None or file.whole is None or not file.tensors:
        return None
    listed = index.content.weight_map.keys() if isinstance(index.content, WeightsIndex) else frozenset[str]()
    held = {tensor.fqn for tensor in file.tensors}
    lost = {key for key in listed - held if not is_computed(key)}
    # An index of .bin shards lists each of the tied weights, and a safetensors file holds the first of them.
    may_be_tied = kind == BIN_INDEX and len(lost) <= _MOST_TIES
    if held < listed and is_part(lost, listed) and not may_be_tied:
        return None
    taken = {
        loader: next(
            (one for one in order if (one == kind or one in files) and (loader, one) not in BY_OPTION), None
        )
        for loader, order in loaders_of(model, index.name.index).items()
    }
    refusing = [loader for loader, first in taken.items() if first == kind]
    if folder.is_save_state and not folder.has_file(CONFIG):
        # from_pretrained fails there without the index, too: save_state writes no config.
        refusing = [loader for loader in refusing if loader != "transformers"]
    return Replacement(file, not lost, tuple(refusing))
