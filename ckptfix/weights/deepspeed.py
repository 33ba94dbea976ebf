"""The weights in a DeepSpeed checkpoint: a folder with the states of all ranks of a run.

Facts from DeepSpeed 0.18 (``utils/zero_to_fp32.py``). The fp32 weights are in the optimizer states, cut into a
partition for each rank (``zero_partitions``); buffers and what is frozen are in the model states, under ZeRO-1 and 2
beside a whole copy of the weights in the dtype of training. ``deepspeed_files`` knows which files there are.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from ckptfix.errors import OperationError
from ckptfix.storage.pieces import Piece
from ckptfix.weights.deepspeed_files import AGAIN, DeepSpeedFiles, list_files, other_kind
from ckptfix.weights.layouts import Contiguous, Strided
from ckptfix.weights.stored import Format, StoredTensor, Weights
from ckptfix.weights.zero_partitions import from_groups, from_shares
from ckptfix.weights.zero_states import ModelStates, OptimizerStates, read_model_states, read_optimizer_states


def deepspeed_weights(root: Path, where: PurePosixPath, index: int, *, original: bool = False) -> Weights:
    """Return the weights of a DeepSpeed checkpoint: the fp32 ones that the optimizer keeps.

    Buffers and frozen parameters are as the model had them. Where no rank saved an optimizer, and with ``original``,
    the weights are in the dtype of training. Raises MissingRankError, OtherKindError for tensor, pipeline and expert
    parallel and universal checkpoints, OperationError when a tensor is missing, when the numbers contradict one
    another, and under ZeRO-3 for ``original``, as only fp32 is stored there; OSError.
    """
    files = list_files(root / where)
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
        checksums=_checksums(tensors, [*models, *optimizers]),
    )


def _checksums(
    tensors: Iterable[StoredTensor], states: Iterable[ModelStates | OptimizerStates]
) -> dict[Piece, int]:
    """Return the records that tensors lie in, most of them in a part of one, with their CRC-32."""
    starts = {one.path: sorted(one.checksums) for one in states}
    offsets = {path: [record.offset for record in records] for path, records in starts.items()}
    used: set[Piece] = set()
    for tensor in tensors:
        layout = tensor.layout
        pieces = (layout.storage,) if isinstance(layout, Strided) else ()
        for path, offset, _ in layout.pieces if isinstance(layout, Contiguous) else pieces:
            number = bisect_right(offsets[path], offset) - 1
            if number >= 0 and offset < sum(starts[path][number][1:]):
                used.add(starts[path][number])
    return {piece: crc for one in states for piece, crc in one.checksums.items() if piece in used}


def _check(
    files: DeepSpeedFiles, models: Sequence[ModelStates], optimizers: Sequence[OptimizerStates]
) -> None:
    """Raise OperationError unless there is a file of every rank, of one kind."""
    if (models[0].parallel or 1) > 1:
        raise other_kind(
            files.folder, f"the model is cut into {models[0].parallel} parts, for tensor parallelism"
        )
    said = [one.ranks for one in optimizers if one.ranks is not None]
    files.ensure_ranks(max(said) if said else models[0].ranks)
    for one in optimizers:
        if one.by_parameter != files.by_rank:
            mode, other = ("ZeRO-3", "ZeRO-1 or 2") if one.by_parameter else ("ZeRO-1 or 2", "ZeRO-3")
            raise OperationError(
                f"{one.path}: it is of {mode}, and {models[0].path.name} of {other}: two saves are mixed; {AGAIN}"
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
            raise OperationError(f"{model.path}: {name!r} is tied to {kept!r}, which is not there; {AGAIN}")
    return tuple(found.values()), ties
