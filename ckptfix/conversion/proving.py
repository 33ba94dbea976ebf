"""Proof that new files hold the bytes that were read from the source, by reading every byte of them
back.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

from ckptfix.conversion.migration_plan import MigrationPlan, PlannedModel
from ckptfix.conversion.streaming import Source
from ckptfix.errors import OperationError
from ckptfix.storage.comparing import Run, first_difference
from ckptfix.storage.executor import THREADS, Executor, each
from ckptfix.storage.files import AnyPath, stat_of
from ckptfix.storage.parallel import Progress
from ckptfix.storage.reading import OpenFiles, open_reader
from ckptfix.tensors.hashing import TensorJob, hash_all
from ckptfix.tensors.optimizer_opening import open_optimizers
from ckptfix.tensors.optimizers import STEP, OptimizerState, number_in
from ckptfix.tensors.stored import Format, StoredTensor, Weights
from ckptfix.tensors.zero_partitions import read_model_states
from ckptfix.wording import count_of


def prove_files(plan: MigrationPlan, folder: AnyPath) -> None:
    """Compare names and sizes of the new files with the planned ones. Raises OperationError.

    Shards are read without their index, which no tensor is in: nobody else would miss it.
    """
    if plan.is_file:
        return
    for file in chain.from_iterable(planned.files for planned in plan.planned):
        try:
            size: int | None = stat_of(folder / file.path).st_size
        except FileNotFoundError:
            size = None
        if size != file.size:
            there = "is missing" if size is None else f"has {count_of(size, 'byte')}"
            raise _differs(f"{plan.output}: {file.path}", f"it {there} (expected {file.size})")


def prove_model(
    where: str,
    found: Weights,
    *,
    sources: Mapping[str, Source],
    ties: Mapping[str, str],
    digests: Mapping[str, str],
    progress: Progress | None,
    executor: Executor = THREADS,
) -> dict[StoredTensor, str]:
    """Compare a model in its new files with the written one: keys, dtypes, shapes, ties and bytes.

    ``where``: the name of the model in an error. ``digests``: of each tensor, taken while the
    source was read. Returns the digests of the new tensors, without names. Raises OperationError
    about the first tensor that differs.
    """
    planned = {name: source.tensor for name, source in sources.items()}
    planned |= {name: planned[kept] for name, kept in ties.items()}
    if found.format is not Format.DCP and dict(found.ties) != dict(ties):
        raise _differs(where, "the tied tensors differ from those of the source")
    known = {name: digests[ties.get(name, name)] for name in planned}
    return _prove_tensors(where, planned, found.named(), known, {}, progress, executor)


def prove_modules(
    where: str,
    folder: AnyPath,
    planned: PlannedModel,
    digests: Mapping[str, str],
    proven: Mapping[StoredTensor, str],
    progress: Progress | None,
    executor: Executor,
) -> None:
    """Compare the module in each of DeepSpeed's files of model states with the written one: it is
    what runs first.

    The weights that are found in a checkpoint are the fp32 ones of the optimizer, so this copy of
    them is not among those that ``prove_model`` reads. ``digests``, ``proven``: as for
    ``prove_states``. Raises as it does.
    """
    for path, keys in planned.modules.items():
        wanted = {name: planned.data[key].tensor for name, key in keys.items()}
        known = {name: digests[key] for name, key in keys.items()}
        module = read_model_states(folder / path).module
        _prove_tensors(
            f"{where}: the module in {path.name}", wanted, module, known, proven, progress, executor
        )


def _prove_tensors(
    where: str,
    wanted: Mapping[str, StoredTensor],
    there: Mapping[str, StoredTensor],
    digests: Mapping[str, str],
    proven: Mapping[StoredTensor, str],
    progress: Progress | None,
    executor: Executor,
) -> dict[StoredTensor, str]:
    """Compare tensors that were found with the wanted ones, by name: dtype, shape, bytes. Each is
    read once.

    ``digests``: of the wanted ones. ``proven``: of those that were read already. Returns the
    digests of those that are there, without names. Raises OperationError about the first tensor
    that differs.
    """
    for name in (*wanted, *there):
        if _kind(wanted.get(name)) != _kind(there.get(name)):
            expected, actual = (_kind(tensors.get(name)) for tensors in (wanted, there))
            raise _differs(
                where, f"{name!r} is {actual or 'missing'} (expected {expected or 'no tensor'})"
            )
    nameless = {name: tensor._replace(fqn="") for name, tensor in there.items()}
    unread: dict[StoredTensor, str] = {}
    for name, tensor in nameless.items():
        if tensor not in proven:
            unread.setdefault(tensor, name)
    jobs = [TensorJob(one) for one in unread]
    read = hash_all(jobs, keep_cached=False, progress=progress, executor=executor)
    found = {tensor: proven[tensor] for tensor in nameless.values() if tensor in proven}
    for (tensor, name), one in zip(unread.items(), read, strict=True):
        if one.problem:
            raise _differs(where, f"{name!r} cannot be read back: {one.problem}")
        found[tensor] = one.digest
    for name, tensor in nameless.items():
        if found[tensor] != digests[name]:
            raise _differs(where, f"{name!r} differs from what was read from the source")
    return found


def prove_states(
    plan: MigrationPlan,
    folder: AnyPath,
    digests: Sequence[Mapping[str, str]],
    proven: Mapping[StoredTensor, str],
    progress: Progress | None,
    executor: Executor,
) -> None:
    """Compare the optimizers in ``folder`` with the planned ones: parameters, moments, masters,
    steps, hyperparameters.

    ``digests``: of each optimizer, name of ``state_tensors`` -> digest, taken while the source was
    read. ``proven``: of new tensors that were read already, as masters are that are the weights.
    Raises OperationError about the first value that differs.
    """
    if not plan.states:
        return
    found = {one.index: one for one in open_optimizers(folder)}
    for planned, known in zip(plan.states, digests, strict=False):
        where = f"{plan.output}: {planned.label}"
        state = found.get(planned.state.index)
        if state is None:
            raise _differs(where, "no loader finds it in the new files")
        if planned.state.is_named and not state.is_named:
            names = [name for group in planned.state.groups for name in group.names]
            state = state.named({str(number): name for number, name in enumerate(names)})
        _compare_groups(where, planned.state, state)
        _compare_numbers(where, _steps(planned.state), _steps(state))
        _prove_tensors(
            where,
            state_tensors(planned.state),
            state_tensors(state),
            known,
            proven,
            progress,
            executor,
        )


def _kind(tensor: StoredTensor | None) -> tuple[str, tuple[int, ...]] | None:
    return None if tensor is None else (tensor.dtype, tensor.shape)


def state_tensors(state: OptimizerState) -> dict[str, StoredTensor]:
    """Return the tensors of an optimizer, but its steps, by the keys that its writers give them."""
    states = {
        f"{name}/{key}": value
        for name, values in state.states.items()
        for key, value in values.items()
        if isinstance(value, StoredTensor) and key != STEP
    }
    return states | {f"{name}/fp32": tensor for name, tensor in state.masters.items()}


def _steps(state: OptimizerState) -> dict[str, Any]:
    """Return the numbers of an optimizer: plain values, and steps, which strategies keep in
    different kinds.
    """
    with OpenFiles() as files:
        return {
            f"{name}/{key}": _read(value, files)
            for name, values in state.states.items()
            for key, value in values.items()
            if key == STEP or not isinstance(value, StoredTensor)
        }


def _read(value: Any, files: OpenFiles) -> Any:
    """Return a value with the numbers in its tensors instead of these."""
    if isinstance(value, StoredTensor):
        return number_in(value, files)
    if isinstance(value, dict):
        return {key: _read(one, files) for key, one in value.items()}
    return (
        type(value)(_read(one, files) for one in value) if type(value) in (list, tuple) else value
    )


def _are_equal(one: Any, other: Any) -> bool:
    return bool(one == other) or repr(one) == repr(other)  # a NaN is not equal to itself


def _compare_numbers(where: str, wanted: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    for name in (*wanted, *there):
        if not _are_equal(wanted.get(name), there.get(name)):
            raise _differs(where, f"{name} is {there.get(name)!r} (expected {wanted.get(name)!r})")


def _compare_groups(where: str, wanted: OptimizerState, there: OptimizerState) -> None:
    if [group.names for group in wanted.groups] != [group.names for group in there.groups]:
        raise _differs(where, "its param groups list different parameters than in the source")
    with OpenFiles() as files:
        for number, (one, other) in enumerate(zip(wanted.groups, there.groups, strict=True)):
            for key in (*one.options, *other.options):
                pair = [_read(options.get(key), files) for options in (one.options, other.options)]
                if not _are_equal(*pair):
                    raise _differs(
                        where,
                        f"{key!r} of param group {number} is {pair[1]!r} (expected {pair[0]!r})",
                    )


def prove_copies(
    root: AnyPath,
    folder: AnyPath,
    paths: Sequence[PurePosixPath],
    progress: Progress | None,
    executor: Executor,
) -> None:
    """Compare copied files with their sources. Raises as ``prove_copy``
    does.
    """

    def work(number: int, progress: Progress | None) -> None:
        prove_copy(root / paths[number], folder / paths[number], progress)

    # The copy is a part of the unit: a run that copies once more has to prove that, too.
    units = [(root / path, folder / path, 2 * stat_of(root / path).st_size) for path in paths]
    each(executor, "copies", units, work, progress)


def prove_copy(source: AnyPath, copy: AnyPath, progress: Progress | None) -> None:
    """Compare a copy with its source, byte for byte. Raises OperationError when they differ,
    OSError.
    """
    with open_reader(source) as one, open_reader(copy) as other:
        if one.size != other.size:
            raise OperationError(
                f"{source} changed while it was copied (source: {one.size} bytes, copy: "
                f"{other.size} bytes)"
            )
        runs = [Run(0, 0, one.size)] if one.size else []
        found = first_difference(one, other, runs, progress=progress)
    if found is not None:
        raise OperationError(
            f"{source} differs from its copy from byte {found.offset_a} on: the source changed, or "
            "a disk is failing; nothing was written"
        )


def _differs(where: str, what: str) -> OperationError:
    return OperationError(
        f"{where}: {what}: the source changed, or a disk is failing; nothing was written there"
    )
