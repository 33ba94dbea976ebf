"""The weights in a DeepSpeed checkpoint: the fp32 ones that the optimizer keeps, or that a
universal checkpoint has.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from ckptfix.checkpoint.deepspeed_files import AGAIN, deepspeed_paths, list_files
from ckptfix.errors import OperationError
from ckptfix.storage.files import AnyPath
from ckptfix.storage.reading import Piece
from ckptfix.tensors.stored import Contiguous, Format, StoredTensor, Strided, Weights
from ckptfix.tensors.universal import WEIGHT, UniversalFile, universal_files
from ckptfix.tensors.zero_partitions import (
    ModelStates,
    OptimizerStates,
    ensure_one_save,
    read_models,
    read_optimizer_states,
)
from ckptfix.tensors.zero_tensors import from_groups, from_shares, frozen_shares


def deepspeed_weights(
    root: AnyPath, where: PurePosixPath, index: int, *, original: bool = False
) -> Weights:
    """Return the weights of a DeepSpeed checkpoint: the fp32 ones that the optimizer keeps.

    Buffers and frozen parameters are as the model had them. Where the run saved no optimizer, and
    with ``original``, the weights are in the dtype of training. Raises MissingRankError,
    OtherKindError for tensor, pipeline and expert parallel, OperationError when a tensor is
    missing, when the numbers contradict one another, and under ZeRO-3 for ``original``, as only
    fp32 is stored there; OSError.
    """
    files = list_files(root / where)
    optimizers = [
        read_optimizer_states(files.folder / name) for _, name in sorted(files.optimizers.items())
    ]
    models = read_models(files)
    ensure_one_save(files, models, optimizers)
    if files.by_rank and original:
        dtypes = sorted(
            {one.dtype for one in models[0].module.values() if one.dtype.startswith(("F", "BF"))}
        )
        raise OperationError(
            f"{files.folder}: ZeRO-3 stores the weights in fp32 only (training used "
            f"{', '.join(dtypes)}); next: name the dtype, for example --dtype bf16"
        )
    placed: Mapping[str, StoredTensor] = {}
    universal: list[UniversalFile] = []
    if files.is_universal and not original:
        shapes = {name: shape for group in models[0].groups or () for name, shape in group.items()}
        universal = [
            one[WEIGHT] for one in universal_files(root, where, shapes, only=WEIGHT).values()
        ]
        placed = {
            one.value.fqn: one.value for one in universal if isinstance(one.value, StoredTensor)
        }
        placed |= frozen_shares(models) if files.by_rank else {}
    elif files.by_rank:
        placed = from_shares(models, optimizers)
    elif optimizers and not original:
        placed = from_groups(models[0], optimizers)
    tensors, ties = _named(models[0], placed, by_rank=files.by_rank)
    return Weights(
        label=str(where) if where.parts else root.name,
        format=Format.DEEPSPEED,
        index=index,
        files=tuple(deepspeed_paths(root, where)),
        tensors=tensors,
        ties=ties,
        opaque=tuple(name for name in models[0].opaque if name not in ties),
        left=(
            *(["optimizer_state_dict"] if optimizers or files.is_universal else []),
            *models[0].left,
        ),
        versions=models[0].versions,
        checksums=_checksums(tensors, [*models, *optimizers])
        | {piece: crc for one in universal for piece, crc in one.checksums.items()},
    )


def _checksums(
    tensors: Iterable[StoredTensor], states: Sequence[ModelStates | OptimizerStates]
) -> dict[Piece, int]:
    """Return the records that tensors lie in, most of them in a part of one, with their CRC-32."""
    starts = {one.path: sorted(one.checksums) for one in states}
    offsets = {path: [record.offset for record in records] for path, records in starts.items()}
    used: set[Piece] = set()
    for tensor in tensors:
        layout = tensor.layout
        pieces = (layout.storage,) if isinstance(layout, Strided) else ()
        for path, offset, _ in layout.pieces if isinstance(layout, Contiguous) else pieces:
            number = bisect_right(offsets.get(path, []), offset) - 1
            if number >= 0 and offset < sum(starts[path][number][1:]):
                used.add(starts[path][number])
    return {piece: crc for one in states for piece, crc in one.checksums.items() if piece in used}


def _named(
    model: ModelStates, placed: Mapping[str, StoredTensor], *, by_rank: bool
) -> tuple[tuple[StoredTensor, ...], dict[str, str]]:
    """Return the tensors in the order of the module, and the ties: placed tensors, and the module's
    own for the others.
    """
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
                f"{model.path}: the parameter {name!r} is not in any partition: it was frozen and "
                "left out of the save; next: take it from the model that training started from"
            )
        else:
            found[name] = stored
    found.update((name, tensor) for name, tensor in placed.items() if name not in found)
    for name, kept in [(name, kept) for name, kept in ties.items() if kept not in found]:
        if not model.leaves_frozen_out:
            raise OperationError(
                f"{model.path}: {name!r} is tied to {kept!r}, which is missing; {AGAIN}"
            )
        # With exclude_frozen_parameters DeepSpeed takes a tied weight out of the module under its
        # first name alone, and zero_to_fp32 passes over such a tie (0.19; the Trainer saves
        # adapters so).
        del ties[name]
        if not (by_rank and 0 in model.module[name].shape):
            found[name] = model.module[name]
    return tuple(found.values()), ties
