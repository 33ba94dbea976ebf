"""What the files of a migrated checkpoint are called: as accelerate 1.15 and ``from_pretrained`` look for them.

``load_state`` reads ``model.safetensors`` and ``model_<i>.safetensors``, else ``pytorch_model.bin`` and
``pytorch_model_<i>.bin`` (``accelerate/checkpointing.py``), one file a model; for FSDP ``pytorch_model_fsdp_<i>/``.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.filenames import FileName, parse_file_name
from ckptfix.errors import UsageError
from ckptfix.weights.stored import Format, StoredCheckpoint, Weights

SUFFIXES = {
    Format.SAFETENSORS: (".safetensors",),
    Format.TORCH: (".bin", ".pt", ".pth", ".ckpt", ".th"),
    Format.DCP: (),
}
"""What a file of a format may end in; the first is the default. DCP has folders."""

_STEMS = {
    Format.SAFETENSORS: "model",
    Format.TORCH: "pytorch_model",
    Format.DCP: "pytorch_model_fsdp",
}
_LOADED = re.compile(r"(model(_[0-9]+)?\.safetensors|pytorch_model(_fsdp)?(_[0-9]+)?\.bin)(\.index\.json)?")
_FOLDERS = (Format.DCP, Format.DEEPSPEED)
_ADAPTERS = {"adapter_model": "PEFT", "pytorch_lora_weights": "diffusers"}
"""What libraries call an adapter -> the library, which looks for one file and no shards."""


def is_lone(source: StoredCheckpoint) -> bool:
    """Whether a path is the weights themselves, a file or a folder in a format of folders, and not what they lie in."""
    if source.only is not None:
        return True
    return any(_fills(one, source.root) for one in source.weights)


def _fills(weights: Weights, root: Path) -> bool:
    """Whether a folder is one checkpoint of DCP or DeepSpeed, and not one in which such a folder lies."""
    if weights.format is Format.DCP:
        return any(len(path.parts) == 1 for path in weights.files)
    return weights.format is Format.DEEPSPEED and not (root / weights.label).is_dir()


def becomes_file(source: StoredCheckpoint, output: Path, to: Format) -> bool:
    """Whether the new checkpoint is one file. Raises UsageError when its name does not fit the format or the source."""
    every = {suffix: target for target, suffixes in SUFFIXES.items() for suffix in suffixes}
    if output.suffix not in every:
        return False
    if every[output.suffix] is not to:
        wanted = (
            f"; name a file that ends in {SUFFIXES[to][0]}, or a folder"
            if SUFFIXES[to]
            else "; name a folder"
        )
        raise UsageError(f"{output} ends in {output.suffix}, which is not of the format {to.value!r}{wanted}")
    if not is_lone(source):
        raise UsageError(
            f"{source.root} is a folder, so {output} becomes one, too: name it without {output.suffix}"
        )
    if len(source.weights) > 1:
        raise UsageError(
            f"{source.root / (source.only or '')} holds {len(source.weights)} models, {output} would hold one; name a "
            "folder"
        )
    return True


def stems(
    source: StoredCheckpoint,
    to: Format,
    output: Path,
    known: Mapping[PurePosixPath, str | None],
    *,
    is_file: bool,
) -> list[str]:
    """Return for each model what its files begin with; for DCP its folder, "." when that is the whole.

    ``known``: folder -> what its library calls weights, by its config, as a DCP folder has Accelerate's name.
    Raises UsageError when two models would get the same name.
    """
    if is_file:
        return [output.stem]
    lone = is_lone(source)
    if lone and to is Format.DCP and len(source.weights) == 1:
        return ["."]
    found = []
    for number, one in enumerate(source.weights):
        name = _name_of(one)
        if lone and not (name is not None and name.is_of_library):
            found.append(_numbered(to, number))
        elif to is not Format.DCP and one.format in _FOLDERS and not one.index and (stem := known[one.home]):
            found.append(stem)
        elif to is Format.DCP or _is_loaded(one):  # a folder of DCP is known by its name alone
            found.append(_numbered(to, one.index))
        else:
            found.append(_own_stem(one, source.weights, to))
    places = [(one.home, stem) for one, stem in zip(source.weights, found, strict=True)]
    for number, (_, stem) in enumerate(places):
        if places[number] in places[:number]:
            first, second = source.weights[places.index(places[number])].label, source.weights[number].label
            raise UsageError(
                f"{first} and {second} would both become {stem}; give one of them instead of the folder"
            )
    return found


def _is_loaded(weights: Weights) -> bool:
    """Whether ``load_state`` or ``from_pretrained`` finds a model by the name that it has."""
    label = weights.label.removeprefix(f"{weights.home}/")
    return weights.format in _FOLDERS or _LOADED.fullmatch(label) is not None


def why_one_file(source: StoredCheckpoint, weights: Weights) -> str:
    """Return why a model cannot be in shards, as its loader reads one file; "" where it can."""
    name = _name_of(weights)
    model = name.model if name is not None and name.is_of_library else None
    if model is not None and model.stem in _ADAPTERS:
        return f"{weights.label} is an adapter, and {_ADAPTERS[model.stem]} reads one file an adapter"
    if source.is_save_state and not weights.home.parts and (model is None or _is_loaded(weights)):
        return f"{source.root} is a folder of save_state, and load_state reads one file a model"
    return ""


def _name_of(weights: Weights) -> FileName | None:
    """Return what the name of a model says: of its index, else of its file."""
    is_index = weights.label.endswith(".json")
    return parse_file_name(PurePosixPath(weights.label).name if is_index else weights.files[0].name)


def _numbered(to: Format, index: int) -> str:
    return _STEMS[to] if index == 0 and to is not Format.DCP else f"{_STEMS[to]}_{index}"


def _own_stem(weights: Weights, all_weights: Sequence[Weights], to: Format) -> str:
    """Return the name of an adapter, a variant or a script's own file, without what says its format.

    ``from_pretrained(variant="fp16")`` looks for ``model.fp16.safetensors`` and ``pytorch_model.fp16.bin``.
    """
    path = weights.files[0]
    name = _name_of(weights)
    if name is not None and name.is_of_library and (model := name.model) is not None:
        stem = _STEMS[to] if model.stem == _STEMS[Format.SAFETENSORS] else model.stem
        return f"{stem}.{model.variant}" if model.variant else stem
    stem = name.stem if name is not None else path.name
    if sum(1 for other in all_weights if other.files == weights.files) > 1:  # several in one training dict
        stem += "." + ".".join(re.findall(r"[\w-]+", weights.label.removeprefix(str(path))))
    return stem
