"""Models that save hooks put into sub-folders of ``save_state``, as diffusers' scripts have
``unet`` and ``unet_ema``.

Only the load hook of the script reads them, with ``from_pretrained``. The optimizer shows which
weights were trained.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from msgspec.structs import replace

from ckptfix.checkpoint.filenames import LORA
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder
from ckptfix.checkpoint.model_configs import is_of_average, may_hold_weights
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.base import Finding, Severity
from ckptfix.diagnosis.optimizer_states import Weights, diagnose_optimizers, weights_of
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, Shape
from ckptfix.diagnosis.siblings import without_average
from ckptfix.wording import count_of


class HookModel(NamedTuple):
    """A sub-folder with weights. ``path``: relative to the checkpoint. ``findings``: about the
    folder alone.
    """

    path: PurePosixPath
    folder: CheckpointFolder
    findings: Sequence[Finding] = ()


def diagnose_hook_models(case: Case, models: Sequence[HookModel]) -> Iterator[Finding | str]:
    """Compare the models in sub-folders of ``save_state`` with its optimizers; yield in words the
    comparisons that were not made.
    """
    folder, known = case.folder, case.findings
    if not folder.is_save_state or case.is_file:
        return
    loaded = [str(one.path) for one in folder.components if one.name.stem == LORA]
    loaded += [f"{model.path}/" for model in models]
    if loaded:
        yield (
            f"{', '.join(loaded)} against the load hooks of the script (keys, dtypes, EMA counters)"
        )
    if not models:
        return
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
    optimizers, has_deepspeed = case.optimizers, bool(case.deepspeed)
    of_optimizers = list(
        diagnose_optimizers(joined, case.sharded, damaged, optimizers, has_deepspeed=has_deepspeed)
    )
    yield from (told for told in of_optimizers if told not in known)
    if optimizers and all(isinstance(told, str) for told in of_optimizers):
        weights = weights_of(joined, case.sharded, damaged, has_deepspeed=has_deepspeed)
        yield from _unclear_fit(optimizers, weights, trained)


def _averages(models: Sequence[HookModel]) -> list[HookModel]:
    """Return the averages of weights, which no optimizer trains: by their names, or else by the
    configs.

    ``train_amused.py`` calls them ``ema_model``, next to ``transformer``.
    """
    named = [model for model in models if without_average(model.path.name) != model.path.name]
    averages = named or [model for model in models if is_of_average(model.folder.root)]
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
