"""The weights in a DeepSpeed checkpoint: a folder with the states of all ranks of a run.

Facts from DeepSpeed 0.18 (``runtime/engine.py`` for the names of files, ``utils/zero_to_fp32.py`` for what is in them).
The fp32 weights are in the optimizer states, cut into a partition for each rank (``zero_partitions``); buffers and what
is frozen are in the model states, under ZeRO-1 and 2 beside a whole copy of the weights in the dtype of training.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.errors import OperationError
from ckptfix.weights.stored import Format, StoredTensor, Weights
from ckptfix.weights.zero_partitions import from_groups, from_shares
from ckptfix.weights.zero_states import ModelStates, OptimizerStates, read_model_states, read_optimizer_states

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_?optim_states\.pt")
_LAYER = re.compile(r"layer_\d+-model.*\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank.*\.pt|expp_rank_.*\.pt")
_ACCELERATE = re.compile(r"pytorch_model(?:_([1-9][0-9]{0,8}))?")
_LATEST = "latest"
_MAX_LATEST = 4096
_AGAIN = "next: copy all files of one save here again, or use another checkpoint"


def deepspeed_folders(folder: CheckpointFolder) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield position and path of each DeepSpeed checkpoint in a scanned folder, or of the folder itself as ``.``.

    In it they are where accelerate puts them (``pytorch_model/``, ``pytorch_model_1/``), else where the file ``latest``
    of DeepSpeed says.
    """
    if _is_deepspeed(folder.root):
        yield 0, PurePosixPath(".")
        return
    found = False
    for name in folder.subfolders:
        match = _ACCELERATE.fullmatch(str(name))
        if match and _is_deepspeed(folder.root / name):
            found = True
            yield int(match[1] or 0), name
    if not found:
        tag = _latest(folder)
        if tag is not None and _is_deepspeed(folder.root / tag):
            yield 0, tag


def _is_deepspeed(path: Path) -> bool:
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return any(is_deepspeed_file(name) for name in names)


def is_deepspeed_file(name: str) -> bool:
    """Whether DeepSpeed calls a file so that holds model states, optimizer states or a layer of a pipeline."""
    return any(kind.fullmatch(name) for kind in (_MODEL, _OPTIMIZER, _LAYER))


def deepspeed_paths(root: Path, where: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield the files of a DeepSpeed checkpoint."""
    yield from (where / name for name in sorted(os.listdir(root / where)) if is_deepspeed_file(name))


def _latest(folder: CheckpointFolder) -> PurePosixPath | None:
    """Return the sub-folder that the file ``latest`` names."""
    try:
        with open(folder.root / _LATEST, "rb", opener=_open) as file:
            tag = PurePosixPath(file.read(_MAX_LATEST).decode().strip())
    except (OSError, UnicodeDecodeError):
        return None
    return tag if tag in folder.subfolders else None  # a plain name, so nothing outside


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """The files of one checkpoint, rank -> name. ``by_rank``: every rank has model states of its own (ZeRO-3)."""

    folder: Path
    by_rank: bool
    models: Mapping[int, str]
    optimizers: Mapping[int, str]


def deepspeed_weights(root: Path, where: PurePosixPath, index: int, *, original: bool = False) -> Weights:
    """Return the weights of a DeepSpeed checkpoint: the fp32 ones that the optimizer keeps.

    Buffers and frozen parameters are as the model had them. Where no rank saved an optimizer, and with ``original``,
    the weights are in the dtype of training. Raises OperationError when a rank or a tensor is missing, when the numbers
    contradict one another, for tensor, pipeline and expert parallel and universal checkpoints, and under ZeRO-3 for
    ``original``, as only fp32 is stored there; OSError.
    """
    files = _listed(root / where)
    optimizers = [read_optimizer_states(files.folder / name) for _, name in sorted(files.optimizers.items())]
    names = [name for _, name in sorted(files.models.items())]
    models = [read_model_states(files.folder / names[0])]
    if models[0].frozen:  # else the others repeat the first
        models += [read_model_states(files.folder / name) for name in names[1:]]
    _check(files, models, optimizers)
    placed: Mapping[str, StoredTensor] = {}
    if files.by_rank and original:
        dtypes = sorted({one.dtype for one in models[0].module.values() if one.dtype.startswith(("F", "BF"))})
        raise OperationError(
            f"{files.folder}: ZeRO-3 stores its weights in fp32 alone (the training had them in {', '.join(dtypes)}); "
            "next: name the dtype, as in --dtype bf16"
        )
    if files.by_rank:
        placed = from_shares(models, optimizers)
    elif optimizers and not original:
        placed = from_groups(models[0], optimizers)
    tensors, ties = _named(models[0], placed, by_rank=files.by_rank)
    return Weights(
        label=str(where) if where.parts else root.name,
        format=Format.DEEPSPEED,
        index=index,
        files=tuple(where / name for name in sorted({*files.models.values(), *files.optimizers.values()})),
        tensors=tensors,
        ties=ties,
        opaque=tuple(name for name in models[0].opaque if name not in ties),
        left=(*(["optimizer_state_dict"] if optimizers else []), *models[0].left),
        versions=models[0].versions,
    )


def _listed(folder: Path) -> _Files:
    """Return the files of a checkpoint by their names. Raises OperationError for kinds that are not read."""
    whole: dict[int, str] = {}
    models: dict[int, str] = {}
    optimizers: dict[int, str] = {}
    parallel: set[int] = set()
    names = sorted(os.listdir(folder))
    for name in names:
        if match := _MODEL.fullmatch(name):
            rank, part, into = match[1], match[2], whole if match[1] is None else models
        elif match := _OPTIMIZER.fullmatch(name):
            rank, part, into = match[1], match[2], optimizers
        else:
            continue
        parallel.add(int(part))
        number = int(rank or 0)
        if int(part) == 0 and into.setdefault(number, name) != name:
            raise _refused(
                folder, f"{into[number]} and {name} are both of rank {number}: two saves are mixed"
            )
    layers = sum(_LAYER.fullmatch(name) is not None for name in names)
    experts = sum(_EXPERT.fullmatch(name) is not None for name in names)
    if layers:
        raise _refused(folder, f"the model is cut into {layers} files of layers, for pipeline parallelism")
    if experts:
        raise _refused(
            folder, f"{experts} files hold experts of a mixture, which only their ranks can put together"
        )
    if parallel - {0}:
        raise _refused(folder, f"the model is cut into {max(parallel) + 1} parts, for tensor parallelism")
    if (folder / "zero").is_dir():
        raise _refused(folder, "it is a universal checkpoint, which has a folder for each parameter")
    if whole and models:
        raise _refused(
            folder, f"{whole[0]} is of ZeRO-1 or 2, {models[min(models)]} of ZeRO-3: two saves are mixed"
        )
    if not whole and not models:
        raise OperationError(
            f"{folder}: {len(optimizers)} files of optimizers and none of model states; {_AGAIN}"
        )
    return _Files(folder=folder, by_rank=bool(models), models=whole or models, optimizers=optimizers)


def _refused(folder: Path, why: str) -> OperationError:
    return OperationError(
        f"{folder}: {why}; next: write its weights with the script that saved it, and give me those"
    )


def _check(files: _Files, models: Sequence[ModelStates], optimizers: Sequence[OptimizerStates]) -> None:
    """Raise OperationError unless there is a file of every rank, of one kind."""
    if (models[0].parallel or 1) > 1:
        raise _refused(
            files.folder, f"the model is cut into {models[0].parallel} parts, for tensor parallelism"
        )
    said = [one.ranks for one in optimizers if one.ranks is not None]
    expected = max(said) if said else models[0].ranks
    kinds = [("optimizer states", files.optimizers)] if optimizers or files.by_rank else []
    kinds += [("model states", files.models)] if files.by_rank else []
    for kind, ranks in kinds:
        have = len(ranks)
        if have != (expected or have) or (ranks and max(ranks) != have - 1):
            missing = next((rank for rank in range(have + 1) if rank not in ranks), have)
            raise OperationError(
                f"{files.folder}: files of {kind} of {have} ranks, {expected or max(ranks) + 1} saved it; the first "
                f"rank without one is {missing}; {_AGAIN}"
            )
    for one in optimizers:
        if one.by_parameter != files.by_rank:
            mode, other = ("ZeRO-3", "ZeRO-1 or 2") if one.by_parameter else ("ZeRO-1 or 2", "ZeRO-3")
            raise OperationError(
                f"{one.path}: it is of {mode}, and {models[0].path.name} of {other}: two saves are mixed; {_AGAIN}"
            )


def _named(
    model: ModelStates, placed: Mapping[str, StoredTensor], *, by_rank: bool
) -> tuple[tuple[StoredTensor, ...], dict[str, str]]:
    """Return the tensors in the order of the module, and the ties: what is placed, and else what the module has."""
    found: dict[str, StoredTensor] = {}
    ties: dict[str, str] = {}
    for name, stored in model.module.items():
        tied = model.shared.get(name) or model.ties.get(name)
        if name in placed:
            found[name] = placed[name]
        elif tied is not None and tied != name:
            ties[name] = tied
        elif by_rank and 0 in stored.shape and name not in model.buffers:
            raise OperationError(
                f"{model.path}: the parameter {name!r} is in no partition: it was frozen, and left out of the save; "
                "next: take it from the model that the training began with"
            )
        else:
            found[name] = stored
    found.update((name, tensor) for name, tensor in placed.items() if name not in found)
    for name, kept in ties.items():
        if kept not in found:
            raise OperationError(f"{model.path}: {name!r} is tied to {kept!r}, which is not there; {_AGAIN}")
    return tuple(found.values()), ties
