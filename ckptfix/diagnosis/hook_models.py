"""Models that save hooks put into sub-folders of ``save_state``, as diffusers' scripts have
``unet`` and ``unet_ema``.

Only the load hook of the script reads them, with ``from_pretrained``: a key too few or too many
stops it (diffusers 0.42). The optimizer shows which weights were trained, the checkpoints next to
this one which keys a model has: they follow from its config.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath

from msgspec.structs import replace

from ckptfix.checkpoint.filenames import LORA
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder, Component, scan_folder
from ckptfix.checkpoint.model_configs import (
    CONFIG,
    ConfigOfModel,
    config_of_model,
    may_hold_weights,
)
from ckptfix.checkpoint.neighbours import Neighbour, Neighbours, are_on_both_sides, next_to_it
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.samples import Piece, are_equal, samples_of, weights_in
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.exchanged import rounded
from ckptfix.diagnosis.findings.base import Finding, Severity
from ckptfix.diagnosis.findings.inconsistent import UnsavedParameters
from ckptfix.diagnosis.findings.misplaced import (
    ChangedEntry,
    CopiedAverage,
    MisplacedEntry,
    UndecidedEntry,
)
from ckptfix.diagnosis.optimizer_states import Weights, diagnose_optimizers, weights_of
from ckptfix.diagnosis.other_configs import other_configs
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, Shape
from ckptfix.diagnosis.siblings import without_average
from ckptfix.errors import CkptfixError
from ckptfix.formats.tensor import TensorInfo
from ckptfix.lazy import once
from ckptfix.storage.files import AnyPath, store_of
from ckptfix.wording import count_of

_OF_LORA = "the load hook fails, or starts with new weights for the keys that it does not find"


class HookModel:
    """A sub-folder with weights. ``path``: relative to the checkpoint. ``findings``: about the
    folder alone.
    """

    def __init__(
        self, path: PurePosixPath, folder: CheckpointFolder, findings: Sequence[Finding] = ()
    ) -> None:
        self.path = path
        self.folder = folder
        self.findings = findings

    @once
    def keys(self) -> dict[str, Shape]:
        """The keys of its weights with their shapes, none where a file of a library cannot be
        read.
        """
        return {tensor.fqn: tensor.shape for tensor in self._tensors}

    @once
    def dtypes(self) -> dict[str, str]:
        """The same keys with their dtypes."""
        return {tensor.fqn: tensor.dtype for tensor in self._tensors}

    @property
    def _tensors(self) -> list[TensorInfo]:
        files = list(filter(_is_of_library, self.folder.components))
        is_whole = all(one.problem is None for one in files)
        return [tensor for one in files for tensor in one.tensors] if is_whole else []

    @property
    def is_lora(self) -> bool:
        """True for LoRA in the folder of ``save_state`` itself."""
        return not self.path.parts

    @property
    def weights(self) -> PurePosixPath:
        """The first file of its weights."""
        return self.path / next(filter(_is_of_library, self.folder.components)).path

    @once
    def config(self) -> ConfigOfModel | None:
        """Its config as far as keys follow from it."""
        return config_of_model(self.folder.root)


def _is_of_library(component: Component) -> bool:
    return component.name.is_of_library and component.role is not Role.WEIGHTS_INDEX


def diagnose_hook_models(case: Case, models: Sequence[HookModel]) -> Iterator[Finding | str]:
    """Compare the models in sub-folders of ``save_state`` with its optimizers, and with the
    checkpoints next to it; yield in words the comparisons that were not made.

    LoRA next to its states is compared with the checkpoints alone.
    """
    folder, neighbours, known = case.folder, case.neighbours, case.findings
    if not folder.is_save_state or case.is_file:
        return
    if not case.is_recorded:
        yield from _unlike_neighbours(_lora_of(folder), neighbours, is_doubted=False)
    if not models:
        return
    for model in models:
        yield from other_configs(model.folder, neighbours, model.path)
    averages = _averages(models)
    trained = [model for model in models if model not in averages]
    damaged = frozenset(finding.path for finding in known if finding.severity is Severity.ERROR)
    damaged |= {
        model.path / finding.path
        for model in trained
        for finding in model.findings
        if finding.severity is Severity.ERROR
    }
    joined = _joined(folder, models, trained)
    optimizers, has_deepspeed = case.every_optimizer, bool(case.deepspeed)
    of_optimizers = list(
        diagnose_optimizers(joined, case.sharded, damaged, optimizers, has_deepspeed=has_deepspeed)
    )
    yield from (told for told in of_optimizers if told not in known)
    if optimizers and all(isinstance(told, str) for told in of_optimizers):
        weights = weights_of(joined, case.sharded, damaged, has_deepspeed=has_deepspeed)
        yield from _unclear_fit(optimizers, weights, trained)
    if not case.is_recorded:
        yield from _without_counters(models, neighbours)
        is_doubted = any(isinstance(told, UnsavedParameters) for told in of_optimizers)
        of_keys = [
            *_unlike_averages(models, averages, is_doubted=is_doubted),
            *_unlike_neighbours(models, neighbours, is_doubted=is_doubted),
        ]
        yield from {finding.path: finding for finding in of_keys}.values()
        yield from _copied_averages(models, averages, neighbours)


def _lora_of(folder: CheckpointFolder) -> Iterator[HookModel]:
    """Yield the LoRA that a hook saved next to the states of ``save_state``: it has no folder and
    no config.
    """
    for component in folder.components:
        if component.name.stem == LORA:
            yield HookModel(PurePosixPath(), replace(folder, components=(component,)))


def _averages(models: Sequence[HookModel]) -> list[HookModel]:
    """Return the averages of weights, which no optimizer trains: by their names, or else by the
    configs.

    ``train_amused.py`` calls them ``ema_model``, next to ``transformer``.
    """
    named = [model for model in models if without_average(model.path.name) != model.path.name]
    averages = named or [
        model for model in models if (config := model.config) and config.is_of_average
    ]
    return averages if len(averages) < len(models) else []


def _joined(
    folder: CheckpointFolder, models: Sequence[HookModel], trained: Iterable[HookModel]
) -> CheckpointFolder:
    """Return a folder with the weights of the models in its sub-folders as its own, by their paths
    from it.
    """
    components, strays = [*folder.components], [*folder.strays]
    subfolders = dict(folder.subfolders)
    for model in trained:
        components += (replace(one, path=model.path / one.path) for one in model.folder.components)
        strays += (model.path / path for path in model.folder.strays)
        subfolders |= {model.path / path: kind for path, kind in model.folder.subfolders.items()}
    seen = {path for model in models for path in (model.path, *model.path.parents)}
    unread = {
        path: kind
        for path, kind in subfolders.items()
        if path not in seen
        and (
            kind != PLAIN_FOLDER
            or (folder.root / path).is_symlink()
            or may_hold_weights(folder.root / path)
        )
    }
    return replace(folder, components=tuple(components), strays=tuple(strays), subfolders=unread)


def _unclear_fit(
    optimizers: Iterable[SavedOptimizer], weights: Weights, trained: Sequence[HookModel]
) -> Iterator[str]:
    """Yield in words that weights without moments may be fewer than were saved: frozen ones, or
    averages.
    """
    if not weights.is_complete:
        return
    moments: Counter[Shape] = Counter()
    for saved in optimizers:
        for shapes in saved.shapes.values():
            moments.update(shapes)
    frozen = (weights.counts - moments).total()
    if moments and frozen:
        yield (
            f"whether {', '.join(f'{model.path}/' for model in trained)} lost frozen weights: the "
            f"optimizers have no moments for {frozen} of {count_of(weights.tensors, 'tensor')}"
        )


def _without_counters(
    models: Sequence[HookModel], neighbours: Neighbours
) -> Iterator[MisplacedEntry]:
    """Yield the averages of weights whose config lacks what ``EMAModel.save_pretrained`` writes.

    The config of their model has it instead, or the checkpoints next to this one have it. A run
    that began with an exported average has it in both.
    """
    by_path = {model.path: model for model in models}
    for path, model in by_path.items():
        config = model.config
        base = path.parent / without_average(path.name)
        if base == path or config is None or config.is_of_average:
            continue
        config_of_base = by_path[base].config if base in by_path else None
        if config_of_base is not None and config_of_base.is_of_average:
            yield _of_counters(
                path,
                place=str(base / CONFIG),
                remedy=(
                    f"swap the names of {base}/ and {path}/, or of their {CONFIG} if only "
                    "these were swapped"
                ),
                exchanged_with=str(base / CONFIG),
            )
            continue
        near = list(_configs_near(path, neighbours))
        if near and all(config.is_of_average for config in near):
            yield _of_counters(path, place=next_to_it(len(near)))


def _of_counters(
    path: PurePosixPath, *, place: str, remedy: str = "", exchanged_with: str = ""
) -> MisplacedEntry:
    return MisplacedEntry(
        path=path / CONFIG,
        holds="no EMA counters",
        expected=f"decay and optimization_step, as in {place}",
        effect="EMAModel.from_pretrained restarts its step count without an error",
        remedy=remedy,
        exchanged_with=exchanged_with,
    )


def _configs_near(path: PurePosixPath, neighbours: Neighbours) -> Iterator[ConfigOfModel]:
    """Yield the config of a model in each of the nearest saves that has one."""
    for neighbour in neighbours.nearest():
        with suppress(CkptfixError, OSError), neighbour.opened() as root:
            if (config := config_of_model(root / path)) is not None:
                yield config


def _unlike_neighbours(
    models: Iterable[HookModel], neighbours: Neighbours, *, is_doubted: bool
) -> Iterator[MisplacedEntry]:
    """Yield the models with other keys or shapes than in all of the nearest saves, though their
    configs are equal.

    So are those of a lower precision.

    Of two checkpoints either may be the changed one, unless the optimizer contradicts this one
    (``is_doubted``), or it alone has one word before all of its keys: that is a note about the later
    one. At an end of the run the script may have changed the model: one that adds a module to
    ``unet`` for its second phase leaves the config as it is. That is a note, too.
    """
    for model in models:
        own = model.keys
        near: list[tuple[Neighbour, HookModel]] = []
        for neighbour, there in _models_near(model, neighbours) if own else ():
            near.append((neighbour, there))
            if (there.keys, there.dtypes) == (own, model.dtypes):
                break
        if not near:
            continue
        nearest, expected = near[0][0], near[0][1].keys
        if own == expected:
            yield from rounded(
                model.weights,
                model.dtypes,
                [(neighbour.is_earlier, there.dtypes) for neighbour, there in near],
                nearest.name if nearest.is_of_same_run else "",
            )
        if own == expected or any(there.keys != expected for _, there in near):
            continue
        is_between = are_on_both_sides(neighbour.is_earlier for neighbour, _ in near)
        # A newer diffusers has other keys for LoRA, from one save of a run on.
        is_prefixed = not model.is_lora and _is_prefixed(own, expected)
        is_other = not model.is_lora and (is_prefixed or own.keys().isdisjoint(expected))
        if len(near) > 1 or is_doubted or is_prefixed:
            is_wrong = is_between or is_doubted or is_other
            yield _of_keys(model, own, expected, next_to_it(len(near)), is_wrong=is_wrong)
        elif nearest.is_earlier:
            holds, wanted = _difference(own, expected)
            yield UndecidedEntry.of(model.weights, holds, wanted, nearest.name)


def _models_near(model: HookModel, neighbours: Neighbours) -> Iterator[tuple[Neighbour, HookModel]]:
    """Yield each of the nearest saves that has the model with the same config, and its model."""
    config = None if model.is_lora else model.config
    for neighbour in neighbours.nearest() if config is not None or model.is_lora else ():
        with suppress(CkptfixError, OSError), neighbour.opened() as root:
            there = root / model.path
            # In a store a header costs as many requests as a whole check of a small folder.
            if store_of(root) is not None and _has_sizes(there, model.folder):
                yield neighbour, model
                continue
            config_there = config_of_model(there) if config is not None else None
            if config is not None and (
                config_there is None or config_there.architecture != config.architecture
            ):
                continue
            scan = scan_folder(there, wanted=lambda name: name.stem == LORA or not model.is_lora)
            if (model_there := HookModel(model.path, scan)).keys:
                yield neighbour, model_there


def _has_sizes(there: AnyPath, folder: CheckpointFolder) -> bool:
    """Return whether a folder has the files of weights of another one, in their sizes. Raises
    OSError.
    """
    return all((there / one.path).stat().st_size == one.size for one in folder.components)


def _unlike_averages(
    models: Sequence[HookModel], averages: Iterable[HookModel], *, is_doubted: bool
) -> Iterator[MisplacedEntry]:
    """Yield the averages, or their models, that have other keys or shapes than the other of the
    two.

    ``is_doubted``: the optimizer contradicts the models.
    """
    for average, model in _with_models(models, averages):
        config, config_of_base = average.config, model.config
        if (
            config is None
            or config_of_base is None
            or config.architecture != config_of_base.architecture
        ):
            continue
        keys, expected = average.keys, model.keys
        if not keys or not expected or keys == expected:
            continue
        if is_doubted or keys.items() > expected.items() or _is_prefixed(expected, keys):
            yield _of_keys(model, expected, keys, f"{average.path}/")
        else:
            yield _of_keys(average, keys, expected, f"{model.path}/")


def _copied_averages(
    models: Sequence[HookModel], averages: Iterable[HookModel], neighbours: Neighbours
) -> Iterator[CopiedAverage]:
    """Yield the averages with the weights of their model, which differ in all of the nearest saves.

    An average begins as a copy, so that nothing is told of the first save.
    """
    for average, model in _with_models(models, averages):
        places = samples_of(weights_in(average.folder, ()) or ())
        if not places or not _is_copy(average.folder.root, model.folder.root, places):
            continue
        before, after = neighbours.saves()
        near = [*before, *after]
        copies = 0
        for neighbour in near:
            with suppress(CkptfixError), neighbour.opened() as root:
                copies += _is_copy(root / average.path, root / model.path, places)
        if before and len(near) > 1 and not copies:
            yield CopiedAverage(
                path=average.weights,
                holds=f"the weights of {model.path}/",
                expected=f"an average that differs from them, as in {next_to_it(len(near))}",
                effect="the load succeeds, but the run continues with one of the two lost",
            )


def _is_copy(average: AnyPath, model: AnyPath, places: Sequence[Piece]) -> bool:
    with suppress(OSError):
        return are_equal(average, model, places)
    return False


def _with_models(
    models: Iterable[HookModel], averages: Iterable[HookModel]
) -> Iterator[tuple[HookModel, HookModel]]:
    """Yield the averages of which the folder has the model, too, each with it."""
    by_path = {model.path: model for model in models}
    for average in averages:
        model = by_path.get(average.path.parent / without_average(average.path.name))
        if model is not None and model is not average:
            yield average, model


def _is_prefixed(own: Iterable[str], expected: Iterable[str]) -> bool:
    """Return whether one word is before all keys, and not before those that are expected."""
    first, expected_first = ({key.partition(".")[0] for key in keys} for keys in (own, expected))
    return len(first) == 1 < len(expected_first)


def _of_keys(
    model: HookModel,
    own: Mapping[str, Shape],
    expected: Mapping[str, Shape],
    place: str,
    *,
    is_wrong: bool = True,
) -> MisplacedEntry:
    holds, wanted = _difference(own, expected)
    return (MisplacedEntry if is_wrong else ChangedEntry)(
        path=model.weights,
        holds=holds,
        expected=f"{wanted}, as in {place}",
        effect=_OF_LORA if model.is_lora else "from_pretrained fails in the load hook",
    )


def _difference(own: Mapping[str, Shape], expected: Mapping[str, Shape]) -> tuple[str, str]:
    """Return in words what a model has, and what it should have."""
    strange = len(own.items() - expected.items())
    words = f", {strange} of them with different keys or shapes" if strange else ""
    return f"{count_of(len(own), 'tensor')}{words}", count_of(len(expected), "tensor")
