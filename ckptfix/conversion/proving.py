"""Proof that new files hold the bytes that were read from the source, by reading every byte of them back."""

from collections.abc import Mapping
from pathlib import Path

from ckptfix.conversion.streaming import Source
from ckptfix.errors import OperationError
from ckptfix.storage.comparing import Run, first_difference
from ckptfix.storage.parallel import Progress
from ckptfix.storage.reading import open_reader
from ckptfix.tensors.hashing import TensorJob, hash_all
from ckptfix.tensors.stored import Format, Weights


def prove_model(
    where: str,
    found: Weights,
    *,
    sources: Mapping[str, Source],
    ties: Mapping[str, str],
    digests: Mapping[str, str],
    progress: Progress | None,
) -> None:
    """Compare a model in its new files with the written one: keys, dtypes, shapes, ties and bytes.

    ``where``: the name of the model in an error. ``digests``: of each tensor, taken while the source was
    read. Raises OperationError about the first tensor that differs.
    """
    planned = {name: (source.new.dtype, source.new.shape) for name, source in sources.items()}
    planned |= {name: planned[kept] for name, kept in ties.items()}
    there = {name: (tensor.dtype, tensor.shape) for name, tensor in found.named().items()}
    for name in (*planned, *there):
        if planned.get(name) != there.get(name):
            raise _differs(where, f"{name!r} is {there.get(name)} (expected {planned.get(name)})")
    if found.format is not Format.DCP and dict(found.ties) != dict(ties):
        raise _differs(where, "the tied tensors differ from those of the source")
    read = hash_all([TensorJob(one) for one in found.tensors], keep_cached=False, progress=progress)
    for tensor, one in zip(found.tensors, read, strict=True):
        if one.problem:
            raise _differs(where, f"{tensor.fqn!r} cannot be read back: {one.problem}")
        if one.digest != digests[ties.get(tensor.fqn, tensor.fqn)]:
            raise _differs(where, f"{tensor.fqn!r} has other bytes than were read from the source")


def prove_copy(source: Path, copy: Path, progress: Progress | None) -> None:
    """Compare a copy with its source, byte for byte. Raises OperationError when they differ, OSError."""
    with open_reader(source) as one, open_reader(copy) as other:
        if one.size != other.size:
            raise OperationError(
                f"{source} has {one.size} bytes, its copy {other.size}: it changed while it was copied"
            )
        runs = [Run(0, 0, one.size)] if one.size else []
        found = first_difference(one.fd, other.fd, runs, progress=progress)
    if found is not None:
        raise OperationError(
            f"{source} differs from its copy from byte {found.offset_a} on: it changed, or a disk is failing; "
            "nothing was written"
        )


def _differs(where: str, what: str) -> OperationError:
    return OperationError(
        f"{where}: {what}: the source changed, or a disk is failing; nothing was written there"
    )
