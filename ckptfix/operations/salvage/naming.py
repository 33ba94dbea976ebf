"""What a new file of weights is called: as stock loaders look for it, where they looked for the old one.

``load_state`` and ``from_pretrained`` look for ``model.safetensors`` and ``pytorch_model.bin``, ``load_state`` of FSDP
with full state dicts for ``pytorch_model_fsdp.bin`` alone (accelerate 1.15, ``checkpointing.py``, ``fsdp_utils.py``).
"""

import re
from collections.abc import Collection
from typing import NamedTuple

_TORCH = re.compile(r"pytorch_model((?:_[0-9]+)?|\.[\w-]+)")
_FULL = re.compile(r"pytorch_model_fsdp(?:_[0-9]+)?")
_FOLDER = re.compile(r"pytorch_model_fsdp_([0-9]+)")


class Stems(NamedTuple):
    """What the new file is called without its suffix, as safetensors and as a file of torch. ``is_torch``: the latter.

    It is a file of torch, too, where safetensors lacks a dtype.
    """

    safetensors: str
    torch: str
    is_torch: bool = False


def stems_of(stem: str, taken: Collection[str], *, is_folder: bool = False) -> Stems:
    """Return what the weights of a file ``stem`` become, or those of a DCP folder of this name.

    ``taken``: names of files that stand there already, or will. A user's own name stays; where the name that loaders
    look for is taken, too.
    """
    if is_folder and (match := _FOLDER.fullmatch(stem)):
        number = f"_{int(match[1])}" if int(match[1]) else ""
        return Stems(
            _free(f"model{number}", ".safetensors", taken, stem),
            _free(f"pytorch_model{number}", ".bin", taken, stem),
        )
    match = _TORCH.fullmatch(stem)
    wanted = f"model{match[1]}" if match and not is_folder else stem
    return Stems(
        _free(wanted, ".safetensors", taken, stem),
        _free(stem, ".bin", taken, stem),
        is_torch=not is_folder and _FULL.fullmatch(stem) is not None,
    )


def _free(wanted: str, suffix: str, taken: Collection[str], own: str) -> str:
    """Return the first of the name that is wanted and the own one that is free, else a new one."""
    for stem in (wanted, own):
        if not _names(stem, suffix) & set(taken):
            return stem
    while _names(own, suffix) & set(taken):
        own += "-salvaged"
    return own


def _names(stem: str, suffix: str) -> set[str]:
    """Return the names that mean one model: its file, and the index of its shards, which loaders take instead."""
    return {f"{stem}{suffix}", f"{stem}{suffix}.index.json"}
