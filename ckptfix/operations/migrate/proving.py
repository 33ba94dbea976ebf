"""Prove that a new checkpoint holds what the old one did: by opening it as any checkpoint, and reading every byte."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckptfix.checkpoint.pairing import Progress
from ckptfix.errors import CkptfixError, OperationError
from ckptfix.operations.migrate.planning import MigrationPlan, PlannedModel
from ckptfix.operations.migrate.producing import Produced, one_at_a_time
from ckptfix.storage.comparing import Run, first_difference
from ckptfix.storage.pieces import OpenFiles, page_buffer
from ckptfix.weights.digests import BLOCK, tensor_digest
from ckptfix.weights.opening import open_checkpoint
from ckptfix.weights.stored import Format, StoredTensor, Weights

_MOST_THREADS = 8


def open_new(plan: MigrationPlan, whole: Path) -> tuple[Weights, ...]:
    """Return the models of the new checkpoint as ``open_checkpoint`` finds them, in the order of the plan.

    Raises OperationError when a model is not found in the files that were written for it.
    """
    try:
        found = {frozenset(map(str, one.files)): one for one in open_checkpoint(whole).weights}
    except CkptfixError as error:
        words = str(error).replace(str(whole), str(plan.output))
        raise OperationError(
            f"{plan.output}: what was written could not be opened, nothing is there: {words}"
        ) from error
    new = []
    for model in plan.models:
        written = frozenset(str(file.path) for file in model.files)
        if written not in found:
            raise OperationError(
                f"{plan.output}: {model.label} became {sorted(written)[0]}, but other files would be loaded; nothing "
                "was written there"
            )
        new.append(found[written])
    return tuple(new)


def prove(
    plan: MigrationPlan, new: tuple[Weights, ...], folder: Path, produced: Produced, progress: Progress | None
) -> None:
    """Compare every tensor of the new checkpoint with what was read from the old one, and every copied file.

    Raises OperationError naming the first that differs; OSError.
    """
    for model, weights, digests in zip(plan.models, new, produced.digests, strict=True):
        _same_names(plan, model, weights)
        _same_digests(plan, model, weights, digests, progress)
    for path in plan.carried:
        _same_file(plan.source.root / path, folder / path, progress)


def _same_names(plan: MigrationPlan, model: PlannedModel, found: Weights) -> None:
    planned = {name: (source.new.dtype, source.new.shape) for name, source in model.sources.items()}
    planned |= {name: planned[kept] for name, kept in model.weights.ties.items()}
    there = {name: (tensor.dtype, tensor.shape) for name, tensor in found.named().items()}
    for name in (*planned, *there):
        if planned.get(name) != there.get(name):
            raise _differs(plan, model, f"{name!r} is {there.get(name)}, {planned.get(name)} was written")
    if plan.options.to is not Format.DCP and dict(found.ties) != dict(model.weights.ties):
        raise _differs(plan, model, "other tensors are tied than before")


def _same_digests(
    plan: MigrationPlan,
    model: PlannedModel,
    found: Weights,
    digests: Mapping[str, str],
    progress: Progress | None,
) -> None:
    stop = threading.Event()
    ties = model.weights.ties

    def work(tensors: Sequence[StoredTensor]) -> None:
        buffer = page_buffer(BLOCK)
        with OpenFiles(keep_cached=False) as files:
            for tensor in tensors:
                if stop.is_set():
                    return
                if tensor_digest(tensor, files, buffer) != digests[ties.get(tensor.fqn, tensor.fqn)]:
                    raise _differs(
                        plan, model, f"{tensor.fqn!r} has other bytes than were read from the source"
                    )
                if report is not None:
                    report(tensor.nbytes)

    report = one_at_a_time(progress)
    count = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    with ThreadPoolExecutor(count) as pool:
        jobs = [pool.submit(work, share) for share in _shares(found.tensors, count)]
        try:
            for job in jobs:
                job.result()
        finally:
            stop.set()


def _shares(tensors: Sequence[StoredTensor], count: int) -> Iterator[Sequence[StoredTensor]]:
    """Yield stretches of about the same size: what one thread reads ahead, no other reads too."""
    total = sum(tensor.nbytes for tensor in tensors)
    begin = done = 0
    for number, tensor in enumerate(tensors, 1):
        done += tensor.nbytes
        if done * count >= total or number == len(tensors):
            yield tensors[begin:number]
            begin, total, count, done = number, total - done, max(1, count - 1), 0


def _same_file(source: Path, copy: Path, progress: Progress | None) -> None:
    one, other = os.open(source, os.O_RDONLY | os.O_CLOEXEC), os.open(copy, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sizes = os.fstat(one).st_size, os.fstat(other).st_size
        if sizes[0] != sizes[1]:
            raise OperationError(
                f"{source} has {sizes[0]} bytes, its copy {sizes[1]}: it changed while it was copied"
            )
        found = first_difference(one, other, [Run(0, 0, sizes[0])], progress=progress) if sizes[0] else None
        if found is not None:
            raise OperationError(
                f"{source} differs from its copy from byte {found.offset_a} on; nothing was written"
            )
    finally:
        os.close(one)
        os.close(other)


def _differs(plan: MigrationPlan, model: PlannedModel, what: str) -> OperationError:
    return OperationError(
        f"{plan.output}: {model.label}: {what}: the source changed, or the disk is failing; nothing was written there"
    )
