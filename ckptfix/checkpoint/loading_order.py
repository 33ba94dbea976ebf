"""The order in which loaders look for the files of a model, and which of those in a folder each of
them takes.

A save deletes the shards of the save before it and leaves their index: ``save_pretrained`` of
transformers 5.23 and of diffusers 0.42 do. transformers then loads the one file, and diffusers
fails, because it looks for an index first.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ckptfix.checkpoint.filenames import TRAINER_STATE, FileName, ModelName, parse_file_name
from ckptfix.checkpoint.keys import is_computed
from ckptfix.checkpoint.roles import Role

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
"""The loader that takes the only index of a folder, of any model, where no file holds the first
model.
"""
_IN_ONE_FILE = ModelName("model")

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

accelerate 1.15.0: ``checkpointing.py:load_accelerator_state``;
``utils/modeling.py:load_checkpoint_in_model``, which takes an index only where neither file exists.
transformers 5.23.0: ``_get_resolved_checkpoint_files`` of ``modeling_utils.py``. diffusers 0.42.1:
``models/modeling_utils.py:from_pretrained`` and ``loaders/lora_base.py``. PEFT 0.21.2:
``utils/save_and_load.py:load_peft_weights``. transformers 4.44.2 has the order of 5.23.0.
"""

RESUME = "the Trainer"
"""The loader that resumes from a folder with a ``trainer_state.json``."""
_RESUMED = (SAFE, BIN, SAFE_INDEX, BIN_INDEX)
"""The kinds that it looks for under the names of transformers: an index only where neither file
exists (5.23.0, ``trainer.py:_load_from_checkpoint``).
"""

BY_OPTION = {("diffusers", BIN_INDEX)}
"""Kinds that a loader takes only with an option: ``use_safetensors=False``."""

_OF_VARIANTS = ("transformers", "diffusers")
"""Loaders with an option ``variant``."""


def kind_of(name: FileName) -> str | None:
    """Return the kind of family of a file or an index by its name, None for a name that no loader
    tries.
    """
    if name.role is Role.WEIGHTS_INDEX:
        kind = SAFE_INDEX if name.suffix.startswith(SAFE) else BIN_INDEX
    elif name.role in (Role.MODEL, Role.UNKNOWN) and name.shard is None:
        kind = name.suffix
    else:
        return None
    return kind if kind in _STEMS.get(name.stem.partition(".")[0], ()) else None


def loaders_of(model: ModelName, position: int) -> dict[str, tuple[str, ...]]:
    """Return loader -> the kinds of family that it looks for, of the loaders that look for this
    model.
    """
    return {
        loader: order
        for loader, order in _LOADERS.get(model.stem, {}).items()
        if (not model.variant or loader in _OF_VARIANTS)
        and (position == 0 or loader == "load_state")
    }


class ModelNames(NamedTuple):
    """The names of files in a folder for which loaders look, parsed once: a folder may have
    thousands of models.

    ``kinds``: model and position -> kind of family -> name. ``indexes``: of all models.
    ``is_of_trainer``: the Trainer saved the folder.
    """

    kinds: Mapping[tuple[ModelName, int], Mapping[str, str]]
    indexes: frozenset[str]
    is_of_trainer: bool


def model_names(names: Iterable[str]) -> ModelNames:
    """Return the names for which loaders look, of all files in a folder."""
    kinds: dict[tuple[ModelName, int], dict[str, str]] = {}
    indexes = set()
    is_of_trainer = False
    for name in names:
        is_of_trainer |= name == TRAINER_STATE
        parsed = parse_file_name(name)
        kind = kind_of(parsed) if parsed is not None else None
        if parsed is not None and parsed.model is not None and kind is not None:
            kinds.setdefault((parsed.model, parsed.index), {})[kind] = name
        if name.endswith(".index.json"):
            indexes.add(name)
    return ModelNames(kinds, frozenset(indexes), is_of_trainer)


class Loads(NamedTuple):
    """The file or index of a model that each loader takes, by the names of the files in a folder.

    ``taken``: loader -> that name; a loader that takes none is left out. ``by_option``: those that
    a loader takes only with an option. ``refused_by``: loaders that refuse the folder, because it
    has two indexes.
    """

    taken: Mapping[str, str]
    by_option: Mapping[str, str]
    refused_by: tuple[str, ...]


def loads(
    names: ModelNames, model: ModelName, position: int = 0, *, added: str = "", removed: str = ""
) -> Loads:
    """Return what each loader takes of a model in a folder with files of these names, damaged or
    not.

    ``load_checkpoint_in_model`` may take the index of another model. ``added``, ``removed``: the
    name of an index of this model with which, or without which, the folder is judged.
    """
    kinds = {
        kind: name
        for kind, name in names.kinds.get((model, position), {}).items()
        if name != removed
    }
    if (
        added
        and (parsed := parse_file_name(added)) is not None
        and (kind := kind_of(parsed)) is not None
    ):
        kinds[kind] = added
    taken: dict[str, str] = {}
    by_option: dict[str, str] = {}
    orders = loaders_of(model, position)
    if names.is_of_trainer and not model.variant and "transformers" in orders:
        orders[RESUME] = _RESUMED
    for loader, order in orders.items():
        for kind in order:
            if kind in kinds:
                (by_option if (loader, kind) in BY_OPTION else taken).setdefault(
                    loader, kinds[kind]
                )
    refused_by: tuple[str, ...] = ()
    if not names.kinds.get((_IN_ONE_FILE, 0), {}).keys() & {SAFE, BIN}:
        changed = {name for name in (added,) if name.endswith(".index.json")} - names.indexes
        count = len(names.indexes) + len(changed) - (removed in names.indexes)
        if count == 1:
            taken[IN_MODEL] = min((names.indexes | changed) - {removed})
        elif count:
            refused_by = (IN_MODEL,)
    return Loads(taken, by_option, refused_by)


def needs_option(name: str) -> bool:
    """Return whether a loader takes a file of this name only with an option.

    By default diffusers 0.42 looks for an index of safetensors shards, and for one file of either
    format.
    """
    parsed = parse_file_name(name)
    return (
        parsed is not None
        and parsed.model is not None
        and any(
            (loader, kind_of(parsed)) in BY_OPTION
            for loader in loaders_of(parsed.model, parsed.index)
        )
    )


def first_loader(model: ModelName, position: int = 0) -> str | None:
    """Return the loader of a model that looks for most kinds of files, None for a model for which
    no loader looks.
    """
    orders = loaders_of(model, position)
    return max(orders, key=lambda loader: len(orders[loader]), default=None)


def is_part(lost: Collection[str], keys: Collection[str]) -> bool:
    """Return whether a model that lacks these of its keys is a part of it, such as one shard.

    A fourth of the keys, because versions of a library differ in some: masks of GPT-2
    (``attn.bias``) are 12 of 160, ``decoder.bias`` of BERT and ``relative_attention_bias`` of T5
    are one.
    """
    return 4 * sum(not is_computed(key) for key in lost) >= len(keys)
