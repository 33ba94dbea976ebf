"""Records of a save for its manifest, and state dicts whose tensors can be written apart."""

import functools
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from msgspec.structs import replace

from ckptfix.checkpoint.filenames import model_file, parse_file_name
from ckptfix.checkpoint.manifest import RANGE, Manifest, ManifestEntry, key_fingerprint
from ckptfix.checkpoint.roles import Role
from ckptfix.formats.torch_tensors import TORCH_DTYPES
from ckptfix.training.prepared import innermost
from ckptfix.training.saving.saved_digests import SavedDigests
from ckptfix.training.saving.staged_saves import files_in

StateDict = dict[str, Any]

_PACKAGES = ("ckptfix", "accelerate", "torch", "safetensors")
_TRAINERS = "transformers"

_version = functools.cache(importlib.metadata.version)
"""Version of an installed package. Reading its metadata takes 2 ms, and a save of a tiny model in
all takes 20 ms.
"""


def separate_views(state: StateDict) -> None:
    """Give every tensor that shares its storage with a different view a storage of its own, in
    place.

    Tensors that agree in offset, shape and stride are one tensor under two names and stay so.
    Accelerate takes any two tensors in one storage for duplicates and drops all but the first
    (accelerate#3101, #3812).
    """
    by_storage: dict[tuple[torch.device, int], list[str]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
            by_storage.setdefault((value.device, value.untyped_storage().data_ptr()), []).append(
                name
            )
    for (_, pointer), names in by_storage.items():
        views = {_view(state[name]) for name in names}
        if pointer == 0 or len(views) == 1:
            continue
        copies: dict[object, torch.Tensor] = {}
        for name in names:
            state[name] = copies.setdefault(_view(state[name]), state[name].detach().clone())


def aliases_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return (name -> first name) of tensors that are the same view of the same storage."""
    first: dict[object, str] = {}
    found = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
            if value.untyped_storage().data_ptr() == 0:
                continue  # a tensor without storage shares none
            key = (value.device, value.untyped_storage().data_ptr(), _view(value))
            if first.setdefault(key, name) != name:
                found[name] = first[key]
    return found


def model_entries(
    models: Sequence[Any], weights: Sequence[Mapping[str, Any]], *, safetensors: bool,
    digests: SavedDigests | None
) -> tuple[ManifestEntry, ...]:  # fmt: skip
    """Return the manifest's entries for the models; ``weights`` is empty where accelerate shards
    them itself.

    ``digests``: begins to hash their tensors.

    A hook that took some of the weights leaves unknown which model each of the others is of.
    """
    entries = []
    numbered = len(weights) in (0, len(models))
    for index, model in enumerate(models):
        state = weights[index] if index < len(weights) else {}
        file_name = model_file(".safetensors" if safetensors else ".bin", index)
        aliases = aliases_of(state) if safetensors else {}
        written = {
            name: value
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name not in aliases
        }
        if digests is not None:
            digests.hash_tensors(index, written)
        entries.append(
            ManifestEntry(
                index=index,
                file=str(file_name),
                type=_type(innermost(model)) if numbered else "",
                keys=(
                    key_fingerprint(
                        (name, _dtype(value), tuple(value.shape)) for name, value in written.items()
                    )
                    if state
                    else ""
                ),
                aliases=aliases,
            )
        )
    return tuple(entries)


def make_manifest(
    accelerator: Accelerator,
    folder: Path,
    models: tuple[ManifestEntry, ...],
    sha256: Mapping[str, str] = MappingProxyType({}),
) -> Manifest:
    """Return the manifest of what lies in a staging folder.

    ``sha256``: file -> its digest, or those of its ranges as one text; none where the save takes
    none.
    """
    files = {
        name: os.stat(path).st_size
        for name in sorted(files_in(folder))
        if os.path.isfile(path := os.path.join(folder, name))
    }
    # A hook that writes some models itself shifts the numbers of the others: then they say nothing
    # of whose they are.
    linked = len(models) == len(accelerator._models) and all(
        entry.file in files for entry in models
    )
    packages = (*_PACKAGES, _TRAINERS) if _TRAINERS in sys.modules else _PACKAGES
    known = {name: sha256[name] for name in files if name in sha256}
    ranges = {name: tuple(digest.split("-")) for name, digest in known.items() if "-" in digest}
    return Manifest(
        versions={package: _version(package) for package in packages}
        | {"python": platform.python_version()},
        world_size=accelerator.num_processes,
        step=accelerator.step,
        models=models,
        optimizers=_optimizers(accelerator, files, linked=linked),
        schedulers=_schedulers(accelerator, files),
        dataloaders=_entries(files, Role.SAMPLER, accelerator._dataloaders),
        custom=_entries(files, Role.CUSTOM, accelerator._custom_objects),
        files=files,
        sha256={name: digest for name, digest in known.items() if name not in ranges},
        digests_of_save=bool(known),
        range_size=RANGE if ranges else 0,
        ranges=ranges,
    )


def with_files(manifest: bytes, files: Mapping[str, int]) -> bytes:
    """Return a manifest that lists these files: those of all disks of a save, where each has its
    own part.
    """
    document = json.loads(manifest)
    document["files"] = {**document["files"], **dict(sorted(files.items()))}
    return (json.dumps(document, indent=1, ensure_ascii=True) + "\n").encode()


def held_models(optimizers: Sequence[Any], models: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return for each optimizer the positions of the models that have parameters in it."""
    owners: dict[int, set[int]] = {}
    for index, model in enumerate(models):
        for parameter in model.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    return [
        tuple(
            sorted(
                {index for parameter in _parameters(one) for index in owners.get(id(parameter), ())}
            )
        )
        for one in optimizers
    ]


def driven_optimizer(scheduler: Any, optimizers: Sequence[Any]) -> int | None:
    """Return the position of the optimizer that a scheduler drives, None when it is none of
    these.
    """
    driven = getattr(innermost(scheduler), "optimizer", None)
    if driven is None:
        return None
    inside = innermost(driven)
    return next((index for index, one in enumerate(optimizers) if innermost(one) is inside), None)


def parameter_shapes(optimizer: Any) -> str:
    """Return a fingerprint of the shapes of an optimizer's parameters, "" for one that is not of
    torch's kind.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return ""
    shapes = ((f"{group}.{number}", "", tuple(parameter.shape))
              for group, options in enumerate(optimizer.param_groups)
              for number, parameter in enumerate(options["params"]))  # fmt: skip
    return key_fingerprint(shapes)


def _optimizers(
    accelerator: Accelerator, files: Mapping[str, int], *, linked: bool
) -> tuple[ManifestEntry, ...]:
    optimizers = accelerator._optimizers
    entries = _entries(files, Role.OPTIMIZER, map(innermost, optimizers))
    models = held_models(optimizers, accelerator._models if linked else ())
    return tuple(
        replace(entry, keys=parameter_shapes(optimizer), models=held)
        for entry, optimizer, held in zip(entries, optimizers, models, strict=True)
    )


def _schedulers(accelerator: Accelerator, files: Mapping[str, int]) -> tuple[ManifestEntry, ...]:
    schedulers = accelerator._schedulers
    entries = _entries(files, Role.SCHEDULER, map(innermost, schedulers))
    return tuple(
        replace(entry, optimizer=driven_optimizer(scheduler, accelerator._optimizers))
        for entry, scheduler in zip(entries, schedulers, strict=True)
    )


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group.get("params", ())


def _entries(
    files: Mapping[str, int], role: Role, objects: Iterable[object]
) -> tuple[ManifestEntry, ...]:
    by_index = {
        parsed.index: name
        for name in files
        if (parsed := parse_file_name(name)) is not None and parsed.role is role
    }
    return tuple(
        ManifestEntry(index=index, file=by_index.get(index, ""), type=_type(thing))
        for index, thing in enumerate(objects)
    )


def _view(tensor: torch.Tensor) -> object:
    return tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _dtype(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return TORCH_DTYPES.get(name, name)


def _type(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
