"""``diff``: two checkpoints of any formats compared tensor by tensor.

``compare`` does the work, ``diff_report`` is the answer.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.folder_names import parse_deepspeed_folder_name
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, is_pretrained, read_config
from ckptfix.checkpoint.roles import Role
from ckptfix.errors import UsageError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.storage.executor import THREADS, Executor
from ckptfix.storage.files import Openable, lexists, names_in
from ckptfix.storage.opened import takes_urls
from ckptfix.storage.parallel import Progress
from ckptfix.storage.paths import command, shell_path
from ckptfix.tensors.numbers import has_numbers
from ckptfix.tensors.opening import other_files
from ckptfix.tensors.stored import StoredCheckpoint, Weights
from ckptfix.verification.compare import compare
from ckptfix.verification.diff_report import DiffReport, ModelDiff
from ckptfix.verification.matching import crossed, crossing, uncrossed
from ckptfix.verification.optimizer_pairs import Side, left_of, open_side
from ckptfix.wording import count_of, list_names


@takes_urls("a", "b")
def diff(
    a: Openable,
    b: Openable,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    model: str | Callable[[], object] | None = None,
    progress: Progress | None = None,
    executor: Executor = THREADS,
) -> DiffReport:
    """Compare the weights of two checkpoints, tensor by tensor, and their optimizers, parameter by
    parameter.

    ``rtol``, ``atol``: an element of A and one of B count as equal where ``|a - b| <= atol + rtol *
    |a|``; when either is given, two dtypes count as equal, too. ``model``: "module:factory", or the
    function, that makes the models of the run, for optimizers that number their parameters where
    the other side names them. ``progress`` gets the bytes read, of both sides together, from any
    thread. ``executor``: shares the work.

    Raises UsageError when nothing can be compared, OperationError when a checkpoint cannot be read,
    OSError.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{name} is {value}: expected a finite tolerance of 0 or greater")
    tolerance = None if rtol is None and atol is None else (rtol or 0.0, atol or 0.0)
    with paused_gc():
        sides = open_side(a, lone_shard=True), open_side(b, lone_shard=True)
        left, right = sides[0].checkpoint, sides[1].checkpoint
        found = compare(
            *sides, model=model, tolerance=tolerance, progress=progress, executor=executor
        )
    optimizers = [one.pair for one in found.optimizers]
    if not optimizers:
        _ensure_tensors(left, right)
    models = tuple(one.diff for one in found.models)
    compared = (
        {file for pair in optimizers for file in pair.a.files},
        {file for pair in optimizers for file in pair.b.files},
    )
    others = [
        [path for path in other_files(side) if path not in of_optimizers]
        for side, of_optimizers in zip((left, right), compared, strict=True)
    ]
    return DiffReport(
        a=str(a),
        b=str(b),
        models=models,
        optimizers=tuple(one.diff for one in found.optimizers),
        tolerance=tolerance,
        one_sided=tuple(_one_sided(*sides)),
        crossed=crossing(list(crossed(found.pairs))),
        are_pretrained=left.root != right.root
        and is_pretrained(left.root)
        and is_pretrained(right.root),
        is_partial=not found.is_complete
        or any(weights.opaque for one in (left, right) for weights in one.weights),
        not_compared=(
            *found.not_paired,
            *_settings(left, right, others),
            *_other_weights(left, right, others),
            *_not_compared("A", left, right, others[0], compared[0]),
            *_not_compared("B", right, left, others[1], compared[1]),
            *(
                f"positions of models: {one.label} in A was compared with {other.label} in B, "
                "because their keys match or no other was left"
                for one, other in uncrossed(found.pairs)
            ),
            *_opaque(found.pairs),
            *(words for pair in optimizers for words in pair.notes),
            *_too_small(models),
        ),
    )


def _ensure_tensors(*checkpoints: StoredCheckpoint) -> None:
    """Raise UsageError when neither side has a tensor: "equal" would be said of nothing."""
    if any(weights.tensors for one in checkpoints for weights in one.weights):
        return
    opaque = [name for one in checkpoints for weights in one.weights for name in weights.opaque]
    held = (
        f"; these values are not plain tensors: {list_names(dict.fromkeys(opaque))}"
        if opaque
        else ""
    )
    where = " and ".join(str(one.root / (one.only or "")) for one in checkpoints)
    raise UsageError(f"{where} have no tensors to compare{held}")


def _one_sided(left: Side, right: Side) -> Iterator[str]:
    """Yield in words the states of a run that only one of two folders of ``save_state`` has: the
    other misses them.

    Random states differ in number after a change of the processes. DeepSpeed keeps all states in
    its own folder, and ``migrate`` leaves out its optimizer. Raises OSError.
    """
    sides = (left.checkpoint, right.checkpoint)
    if any(side.only is not None for side in sides):
        return
    names = [names_in(side.root) for side in sides]
    parsed = [
        [file for name in side if (file := parse_file_name(name)) is not None] for side in names
    ]
    if not all(any(file.is_of_save_state for file in side) for side in parsed):
        return
    if any(parse_deepspeed_folder_name(name) is not None for side in names for name in side):
        return
    states = [{str(file) for file in side if file.role in _OF_A_RUN} for side in parsed]
    labels = [
        {optimizer.index: optimizer.label for optimizer in side.optimizers}
        for side in (left, right)
    ]
    if left.unread or right.unread:
        labels = [{}, {}]
    for letter, own, absent in (("A", 0, 1), ("B", 1, 0)):
        optimizers = [
            labels[own][index] for index in sorted(labels[own].keys() - labels[absent].keys())
        ]
        # A single optimizer is compared with a single one, whatever their numbers.
        if len(labels[own]) == len(labels[absent]) == 1:
            optimizers = []
        if files := [*optimizers, *sorted(states[own] - states[absent])]:
            yield f"states only in {letter}: {list_names(files)}"


_OF_A_RUN = (Role.SCHEDULER, Role.GRAD_SCALER, Role.SAMPLER, Role.DATALOADER, Role.CUSTOM)


_OF_A_SAVE = {
    "_diffusers_version", "_name_or_path", "base_model_name_or_path", "dtype", "peft_version",
    "torch_dtype", "transformers_version",
}  # fmt: skip
"""Settings of configs that say how a model was saved, and not what it computes."""


def _settings(
    a: StoredCheckpoint, b: StoredCheckpoint, others: Sequence[Sequence[PurePosixPath]]
) -> Iterator[str]:
    """Yield in words the settings that differ between configs: equal tensors then compute other
    numbers.
    """
    for path in sorted({*others[0]}.intersection(others[1])):
        if path.name not in (CONFIG, ADAPTER):
            continue
        one, other = (read_config(side.root / path.parent, path.name) for side in (a, b))
        differing = [
            f"{_plain(key)} is {_plain(one.get(key))} in A, {_plain(other.get(key))} in B"
            for key in dict.fromkeys((*one, *other))
            if key not in _OF_A_SAVE and _unordered(one.get(key)) != _unordered(other.get(key))
        ]
        if differing:
            more = [f"and {len(differing) - 3} more"] if len(differing) > 3 else []
            words = "; ".join((*differing[:3], *more))
            yield f"outputs of the models, although {path} differs: {words}"


def _unordered(value: object) -> object:
    """Return a value for a comparison: PEFT writes sets of names as lists in any order."""
    is_of_names = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return sorted(value) if isinstance(value, list) and is_of_names else value


def _plain(value: object) -> str:
    text = json.dumps(value)
    return text.strip('"') if len(text) <= _LONGEST_SETTING else f"{text[:_LONGEST_SETTING]}..."


_LONGEST_SETTING = 40


def _other_weights(
    a: StoredCheckpoint, b: StoredCheckpoint, others: Sequence[Sequence[PurePosixPath]]
) -> Iterator[str]:
    """Yield what holds other weights next to a model, such as an adapter or a variant, and how to
    compare them.
    """
    homes = {one.home for checkpoint in (a, b) for one in checkpoint.weights}
    for path in sorted({*others[0]}.intersection(others[1])):
        name = parse_file_name(path.name)
        if path.parent in homes and name is not None and name.is_of_library and name.shard is None:
            words = f"{command('diff', a.root, str(path))} {shell_path(b.root / path)}"
            yield (
                f"weights in {path}: another model in its folder is loaded first; to compare them: "
                f"{words}"
            )


def _not_compared(
    side: str,
    checkpoint: StoredCheckpoint,
    opposite: StoredCheckpoint,
    others: Sequence[PurePosixPath],
    of_optimizers: Collection[PurePosixPath],
) -> Iterator[str]:
    """Yield in words what of one side was left out as a whole. ``others``: files that hold none of
    what was compared; those that the ``opposite`` folder lacks are named apart. ``of_optimizers``:
    files of those that were compared.
    """
    is_folder = opposite.only is None
    absent = {path for path in others if is_folder and not lexists(opposite.root / path)}
    for where, is_absent in ((f"in {side}", False), (f"only in {side}", True)):
        if files := [str(path) for path in others if (path in absent) is is_absent]:
            yield f"{count_of(len(files), 'other file')} {where}: {list_names(files)}"
    for weights in {one.files: one for one in checkpoint.weights}.values():
        if left := left_of(weights, of_optimizers):
            label = weights.label.partition("[")[0] if weights.path else weights.label
            yield f"other entries of {label} in {side}: {list_names(left)}"


def _opaque(pairs: Iterable[tuple[Weights | None, Weights | None]]) -> Iterator[str]:
    """Yield in words which values of the models cannot be compared, as only executing the pickle
    would show them.
    """
    for pair in pairs:
        for side, weights in zip("AB", pair, strict=True):
            if weights is not None and weights.opaque:
                yield (
                    f"values in {weights.label} in {side} that are not plain tensors: "
                    f"{list_names(weights.opaque)}"
                )


def _too_small(models: Sequence[ModelDiff]) -> Iterator[str]:
    """Yield in words which tensors were compared by bytes alone."""
    for model in models:
        names = [
            one.name
            for one in model.tensors
            if one.dtype_a
            and one.dtype_b
            and not (has_numbers(one.dtype_a) and has_numbers(one.dtype_b))
        ]
        if names:
            why = "only bytes were compared"
            yield f"values of dtypes smaller than a byte ({why}): {list_names(names)}"
