"""Optimizers that do not agree with themselves or with the weights, by headers and metadata alone.

Optimizers differ in what they keep, so little of it is an error. A parameter without moments may be
frozen. Moments of another shape than the parameter may be factors or blocks of it: shapes are
judged where the hyperparameters are those of torch's own optimizers. Weights that the optimizer has
and the checkpoint lacks may be kept elsewhere: they are judged in folders of ``save_state`` in
which nothing else may hold weights.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import PurePosixPath
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.dcp import DcpFolder
from ckptfix.checkpoint.entries import shapes_of
from ckptfix.checkpoint.filenames import LORA, TRAINER_STATE
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder, Component
from ckptfix.checkpoint.keys import common_wrappers, is_flat_name
from ckptfix.checkpoint.manifest import REPORT
from ckptfix.checkpoint.model_configs import OTHER_WEIGHTS
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.run_states import parameter_names
from ckptfix.checkpoint.second_prepare import BUFFERS
from ckptfix.checkpoint.state_contents import may_hide_weights
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.inconsistent import (
    MismatchedMoments,
    OptimizerFinding,
    UnsavedFrozen,
    UnsavedParameters,
)
from ckptfix.diagnosis.optimizer_kinds import MOMENTS, lacking_parts
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, Shape, bare
from ckptfix.formats.dcp_metadata import model_names
from ckptfix.formats.torch_file import TorchFile
from ckptfix.tensors.parameter_names import SHAPED
from ckptfix.wording import count_of

_WEIGHTS = (Role.MODEL, Role.WEIGHTS_INDEX, Role.UNKNOWN, Role.CUSTOM)
"""Roles of files that may hold weights: a script can register any module as a custom object."""

_ADAPTER = "adapter_model"
"""Beginning of the names of PEFT's weights."""

_CONVERTED = (
    "experts.", "moe.", "qkv", "in_proj", "att_proj", "up_gate", "gate_up", "weights_in", "w12",
    "w13", "_conv1d", "shard_",
)  # fmt: skip
"""Parts of keys in files of models of which transformers 5 joins tensors into one parameter, or
splits one.
"""
_FIRST_HALVES = (".lora_A.", ".lora.down.")
"""Parts of keys of matrices whose first dimension is the rank of LoRA: those of PEFT, and former
ones of diffusers.
"""
_NOT_AVERAGED = (*BUFFERS, "n_averaged")
"""Keys that an average may lack, and the counter of torch's AveragedModel."""
_OF_TRAINER = "optimizer.pt"
"""The optimizer of the Trainer, but with FSDP and DeepSpeed."""


class ModelTensor(NamedTuple):
    """A tensor of a model."""

    key: str
    shape: Shape


class Weights(Struct, frozen=True, kw_only=True):
    """The weights that optimizers are compared with. ``is_complete``: nothing else in the folder
    may hold some.

    ``shapes``: bare key -> shapes. ``counts``: how often a shape occurs. ``every``: all shapes.
    ``tensors``: their number. ``is_of_trainer``: in a folder of the Trainer. ``are_converted``:
    parameters may have other shapes, with as many elements. ``are_adapter``: those of PEFT, without
    the frozen model, which an optimizer may list. ``empty``: the first file of a model without a
    tensor, "" where each has some. ``ranks``: of the matrices in diffusers' files of LoRA.
    """

    shapes: Mapping[str, set[Shape]]
    counts: Counter[Shape]
    every: frozenset[Shape]
    tensors: int
    is_complete: bool
    is_of_trainer: bool = False
    are_converted: bool = False
    are_adapter: bool = False
    empty: str = ""
    ranks: frozenset[int] = frozenset()

    def why_not_compared(self, saved: SavedOptimizer) -> str:
        """Return why an optimizer is not fully compared with these weights, "" where it is."""
        if not self.is_complete or (str(saved.path) == _OF_TRAINER) is not self.is_of_trainer:
            return "the folder may not have all of its weights"
        if self.are_converted:
            return (
                "transformers saves some weights of this model in different shapes; only element "
                "counts were compared"
            )
        parameters = len(set(saved.parameters))
        if self.are_adapter and not saved.states and parameters != self.tensors:
            # SGD keeps none. A script may give it the frozen model, too; the Trainer does not.
            return (
                f"the optimizer has {count_of(parameters, 'parameter')} and no moments, but the "
                f"adapter has {count_of(self.tensors, 'tensor')}"
            )
        if not (saved.is_plain or saved.is_named):
            return "its class may keep different shapes; only parameter counts were compared"
        return ""


def diagnose_optimizers(
    folder: CheckpointFolder,
    sharded: Sequence[DcpFolder],
    damaged: frozenset[PurePosixPath],
    saved: Sequence[SavedOptimizer],
    *,
    has_deepspeed: bool,
) -> Iterator[Finding | str]:
    """Yield what is wrong with the ``saved`` optimizers of a folder, and in words the comparisons
    that were not made.

    ``damaged``: files whose headers do not show what they were saved with.
    """
    known = {one.path for one in folder.components if one.path in damaged}
    known |= {one.path for one in sharded if damaged.intersection((one.metadata_path, *one.named))}
    optimizers = [one for one in saved if one.path not in known]
    if not optimizers:
        return
    is_healthy = True
    weights = weights_of(folder, sharded, damaged, has_deepspeed=has_deepspeed)
    averages = _unlike_their_model(folder)
    components = tuple(one for one in folder.components if one.path not in averages)
    weights_of_models = (
        weights_of(
            replace(folder, components=components), sharded, damaged, has_deepspeed=has_deepspeed
        )
        if averages and len(optimizers) <= sum(one.role is Role.MODEL for one in components)
        else None
    )
    for optimizer in optimizers:
        findings = list(judge(optimizer, weights, _named(folder, optimizer)))
        if (
            not findings
            and weights_of_models is not None
            and _fits_any(optimizer, averages.values())
        ):
            findings = list(judge(optimizer, weights_of_models, _named(folder, optimizer)))
        yield from findings
        is_healthy = is_healthy and not findings
        strange = _kept_elsewhere(optimizer, weights)
        if strange and not findings:
            yield (
                f"whether the checkpoint has all weights of {optimizer.path}: "
                f"{len(strange)} of its parameters cannot be "
                f"{'a LoRA matrix' if len(strange) == 1 else 'LoRA matrices'}; some scripts save "
                "such weights, for example embeddings, elsewhere"
            )
        why = weights.why_not_compared(_without_reduced(optimizer)) if not findings else ""
        if why and weights.tensors and not damaged:
            name = optimizer.path if optimizer.path.parts else "the optimizer in this folder"
            yield f"whether {name} fits the weights: {why}"
    parameters = sum(len(set(optimizer.parameters)) for optimizer in optimizers)
    if weights.empty and 0 < weights.tensors < parameters and weights.is_complete and is_healthy:
        # Two optimizers of one model look the same, next to a loss without parameters.
        yield (
            f"whether {weights.empty} lost its tensors: it has none, like a module without "
            f"parameters; the optimizers have {parameters} parameters, the other models have "
            f"{count_of(weights.tensors, 'tensor')}"
        )


def _without_reduced(saved: SavedOptimizer) -> SavedOptimizer:
    """Return an optimizer without the shapes of moments that its class keeps smaller than its
    parameters.

    Adam-mini is a subclass of AdamW with a second moment for each row. Damage does not reduce every
    parameter alike.
    """
    forms: dict[str, list[bool]] = {}
    for states in saved.states.values():
        moments = {
            state: shape
            for state, shape in states.items()
            if state in MOMENTS and shape is not None
        }
        full = max(moments.values(), key=prod, default=())
        for state, shape in moments.items() if len(full) > 1 else ():
            is_reduced = len(shape) <= len(full) and all(
                size in (1, whole) for size, whole in zip(shape, full, strict=False)
            )
            forms.setdefault(state, []).append(is_reduced and shape != full)
    reduced = {
        state for state, are_reduced in forms.items() if len(are_reduced) > 1 and all(are_reduced)
    }
    if not reduced:
        return saved
    kept = {
        name: {state: None if state in reduced else shape for state, shape in states.items()}
        for name, states in saved.states.items()
    }
    return replace(saved, states=kept)


def judge(
    saved: SavedOptimizer, weights: Weights, names: Mapping[str, str]
) -> Iterator[OptimizerFinding]:
    """Yield what is wrong with an optimizer in itself, and against the weights. ``names``:
    parameter -> key.
    """
    saved = _without_reduced(saved)
    findings = [*lacking_parts(saved), *_of_shapes(saved, weights, names)]
    # Moments that are known to be wrong would be reported again, as those of parameters without
    # weights.
    if saved.is_named or not any(isinstance(finding, MismatchedMoments) for finding in findings):
        findings += _of_weights(saved, weights)
    yield from findings


def weights_of(
    folder: CheckpointFolder,
    sharded: Sequence[DcpFolder],
    damaged: frozenset[PurePosixPath],
    *,
    has_deepspeed: bool,
) -> Weights:
    """Return all weights of a checkpoint. Those of models in sub-folders are among the components
    of ``folder``.
    """
    # A rank's part of a tensor has not the shape of the parameter.
    own = [one for one in folder.components if one.role in _WEIGHTS and not one.name.is_of_parts]
    models = [state for state in sharded if state.model is not None]
    shapes: dict[str, set[Shape]] = {}
    in_folders = [tensor for state in models for tensor in _of_model(state)]
    stored = [*in_folders, *(tensor for one in own for tensor in _of_file(one))]
    for tensor in stored:
        shapes.setdefault(bare(tensor.key), set()).add(tensor.shape)
    # A model that is stored in two formats counts once: the message compares numbers of parameters.
    families: dict[tuple[object, ...], dict[tuple[str, str], list[ModelTensor]]] = {}
    for one in own:
        family = (one.path.parent, one.name.model or one.path, one.name.index)
        formats = families.setdefault(family, {})
        formats.setdefault((one.name.stem, one.name.suffix), []).extend(_of_file(one))
    is_of_trainer = folder.has_file(TRAINER_STATE) and not folder.is_save_state
    counts = Counter(tensor.shape for tensor in in_folders)
    for formats in families.values():
        largest: Counter[Shape] = Counter()
        for in_format in formats.values():
            largest |= Counter(tensor.shape for tensor in in_format)
        counts += largest
    dcp = {state.path for state in sharded}
    files = [one for one in own if one.role is Role.MODEL or _is_of_hook(one)]
    is_of_library = is_of_trainer or any(map(_is_of_transformers, own))
    return Weights(
        shapes=shapes,
        counts=counts,
        empty=next((str(one.path) for one in files if _holds_nothing(one)), ""),
        every=frozenset(shape for of_name in shapes.values() for shape in of_name),
        tensors=len(in_folders)
        + sum(max(map(len, formats.values())) for formats in families.values()),
        is_of_trainer=is_of_trainer,
        are_converted=is_of_library and any(map(_is_converted, own)),
        ranks=frozenset(
            tensor.shape[0]
            for one in filter(_is_lora, own)
            for tensor in one.tensors
            if tensor.shape and any(part in tensor.fqn for part in _FIRST_HALVES)
        ),
        are_adapter=(is_of_trainer and any(map(_is_adapter, own))) or any(map(_is_lora, own)),
        is_complete=(
            folder.only is None
            and (folder.is_save_state or (is_of_trainer and all(map(_is_as_trained, own))))
            and bool(models or files or any(map(_is_adapter, own)))
            and not has_deepspeed
            and not damaged
            and all(one.problem is None for one in own)
            and not any(
                isinstance(one.content, TorchFile) and may_hide_weights(one.content) for one in own
            )
            and all(one.name.rank is None for one in own)
            and all(kind != PLAIN_FOLDER or path in dcp for path, kind in folder.subfolders.items())
            and not any(path.name.endswith((*OTHER_WEIGHTS, REPORT)) for path in folder.strays)
        ),
    )


def _unlike_their_model(folder: CheckpointFolder) -> dict[PurePosixPath, Counter[Shape]]:
    """Return the averages in custom objects that have the keys of a model, and are like none: path
    -> shapes.

    An EMA of diffusers or of a script has the shapes of its model, which otherwise may be that of
    another run. A module that a script registers has its keys at the top, and may be trained
    itself.
    """
    models = [
        {
            bare(tensor.fqn): tensor.shape
            for tensor in one.tensors
            if not tensor.fqn.endswith(_NOT_AVERAGED)
        }
        for one in folder.components
        if one.role is Role.MODEL
    ]
    averages: dict[PurePosixPath, Counter[Shape]] = {}
    for component in folder.components:
        for scope in component.scopes if component.role is Role.CUSTOM else ():
            tensors = {
                key: shape
                for key, shape in shapes_of(component, scope.path).items()
                if shape is not None and not key.endswith(_NOT_AVERAGED)
            }
            shapes = {bare(key): shape for key, shape in tensors.items()}
            # A model that lost a tensor has fewer keys than its average. But a script may also keep
            # the parameters of its optimizer in one dict, "params", with some that are in no model,
            # such as a logit_scale.
            is_average = bool(common_wrappers(tensors)) or _is_named_average(scope.path)
            alike = [
                model
                for model in models
                if model.keys() == shapes.keys()
                or (is_average and model.keys() <= shapes.keys() and 2 * len(model) > len(shapes))
            ]
            if (scope.path or common_wrappers(tensors)) and alike and shapes not in alike:
                averages[component.path] = Counter(shapes.values())
    return averages


_AVERAGE = re.compile(
    r"(?:^|[^a-z])(?:ema|swa|avg)(?:[^a-z]|$)|averag|shadow|polyak", re.IGNORECASE
)


def _is_named_average(keys: Iterable[str]) -> bool:
    """Return whether the keys that lead to a state dict say that it is an average, as ``shadow``
    and ``ema_model``.
    """
    return any(_AVERAGE.search(key) for key in keys)


def _fits_any(saved: SavedOptimizer, averages: Iterable[Counter[Shape]]) -> bool:
    """Return whether the moments of an optimizer are those of the parameters of an average."""
    moments = Counter(shape for shapes in saved.shapes.values() for shape in shapes)
    return bool(moments) and any(moments <= average for average in averages)


def _holds_nothing(component: Component) -> bool:
    """Return whether a file was read and holds no tensor, as ``save_state`` leaves it for a module
    without any.
    """
    return component.problem is None and component.name.shard is None and not component.tensors


def _of_model(state: DcpFolder) -> Iterator[ModelTensor]:
    found = model_names(state.metadata) if state.metadata is not None else None
    tensors = {tensor.fqn: tensor for tensor in state.tensors}
    for fqn, name in (found.names if found is not None else {}).items():
        if fqn in tensors:
            yield ModelTensor(name, tensors[fqn].shape)


def _of_file(component: Component) -> Iterator[ModelTensor]:
    for tensor in component.tensors:
        yield ModelTensor(tensor.fqn, tensor.shape)


def _is_as_trained(component: Component) -> bool:
    """Return whether a file of the Trainer has the weights that were trained.

    PEFT saves what the encoder of prompts computes. Of adapters only LoRA is known.
    """
    return not _is_adapter(component) or any(".lora_" in tensor.fqn for tensor in component.tensors)


def _is_converted(component: Component) -> bool:
    """Return whether the tensors of a file may have other shapes than the parameters of its
    model.
    """
    return not _is_adapter(component) and any(
        part in tensor.fqn for tensor in component.tensors for part in _CONVERTED
    )


def _is_adapter(component: Component) -> bool:
    """Return whether a file has the weights of an adapter, which PEFT's own loader reads."""
    return bool(component.tensors) and component.name.stem.startswith(_ADAPTER)


def _is_lora(component: Component) -> bool:
    """Return whether a file has the name that diffusers gives to LoRA weights, which hooks of its
    scripts save.
    """
    return component.name.stem == LORA


def _is_of_hook(component: Component) -> bool:
    """Return whether a file has the name of a model's weights in a sub-folder, or of LoRA
    weights.
    """
    is_below = component.name.is_of_library and len(component.path.parts) > 1
    return component.role is not Role.WEIGHTS_INDEX and (is_below or _is_lora(component))


def _is_of_transformers(component: Component) -> bool:
    """Return whether transformers or a script saved a file in a sub-folder: diffusers has another
    name.
    """
    return len(component.path.parts) > 1 and component.name.stem in ("model", "pytorch_model")


def _named(folder: CheckpointFolder, one: SavedOptimizer) -> Mapping[str, str]:
    """Return the keys of an optimizer's parameters: its own, or those that torch or a guarded save
    recorded.
    """
    if one.is_named:
        return {name: name for name in one.states}
    if one.names:
        return one.names
    if len(one.path.parts) != 1 or folder.only is not None:
        return {}
    try:
        recorded = parameter_names(folder.root, str(one.path), one.index)
    except OSError:
        return {}
    if recorded is None or list(map(len, recorded)) != list(map(len, one.groups)):
        return {}
    names = [name for group in recorded for _, name in group]
    return dict(zip(one.parameters, names, strict=True))


def _of_shapes(
    one: SavedOptimizer, weights: Weights, names: Mapping[str, str]
) -> Iterator[OptimizerFinding]:
    """Yield the moments of an optimizer of torch's that have another shape than their weights."""
    wrong: dict[str, tuple[Shape, Shape]] = {}
    for number, states in one.states.items() if one.is_plain else ():
        name = names.get(number)
        if name is None or is_flat_name(name):
            continue
        expected = weights.shapes.get(bare(name), set())
        for state, shape in states.items():
            if state in SHAPED and shape is not None and expected and shape not in expected:
                wrong[name] = shape, min(expected)
    if wrong:
        shape, expected_shape = next(iter(wrong.values()))
        yield MismatchedMoments(
            path=one.path, parameters=tuple(wrong), shape=shape, expected=expected_shape
        )


def _kept_elsewhere(saved: SavedOptimizer, weights: Weights) -> frozenset[str]:
    """Return the parameters that are trained next to those of LoRA, none where they are most of the
    optimizer.

    ``train_dreambooth_lora_sdxl_advanced.py`` of diffusers trains embeddings, and saves them
    outside the checkpoint.
    """
    strange = set()
    for name, shapes in saved.shapes.items() if weights.ranks else ():
        if any(
            weights.every.isdisjoint([shape]) and weights.ranks.isdisjoint(shape)
            for shape in shapes
        ):
            strange.add(name)
    return frozenset(strange) if 2 * len(strange) <= len(saved.states) else frozenset()


def _of_weights(one: SavedOptimizer, weights: Weights) -> Iterator[OptimizerFinding]:
    """Yield the parameters that no weights of a ``save_state`` folder or of the Trainer belong
    to.
    """
    is_of_trainer = str(one.path) == _OF_TRAINER
    if strange := _kept_elsewhere(one, weights):
        groups = tuple(tuple(name for name in group if name not in strange) for group in one.groups)
        states = {name: states for name, states in one.states.items() if name not in strange}
        one = replace(one, groups=groups, states=states)
    if not weights.is_complete or is_of_trainer is not weights.is_of_trainer:
        return
    every = dict.fromkeys([*one.parameters, *one.states])
    if one.is_named and not weights.are_converted:
        lost = tuple(
            name for name in every if bare(name) not in weights.shapes and not is_flat_name(name)
        )
        if lost and 2 * len(lost) <= len(every):
            yield UnsavedParameters(
                path=one.path,
                parameters=len(every),
                tensors=weights.tensors,
                names=lost,
                is_of_trainer=is_of_trainer,
            )
        if 2 * len(lost) <= len(every):
            return
        # Most names are unknown: those of adapters, which are saved under others, or of another
        # model. Shapes decide.
    moments = Counter(
        shape for name, shapes in one.shapes.items() if not is_flat_name(name) for shape in shapes
    )
    lost_shapes = tuple(sorted(moments.keys() - weights.every)) if one.is_plain else ()
    numbers = [sum(map(prod, shapes.elements())) for shapes in (moments, weights.counts)]
    if weights.are_converted and numbers[0] <= numbers[1]:
        return  # conversions keep the number of elements; frozen parameters have no moments
    listed = every if one.is_named else dict.fromkeys(one.parameters)
    count = sum(1 for name in listed if one.states.get(name) or not weights.are_adapter)
    surplus: tuple[tuple[Shape, int, int], ...] = ()
    if one.is_plain and not lost_shapes and count <= weights.tensors:
        # Parameters that share their memory have one tensor in safetensors. Moments of another run
        # also leave weights without moments, which have as many dimensions where a layer was
        # resized.
        dimensions = {len(shape) for shape in weights.counts - moments}
        surplus = tuple(
            (shape, moments[shape], weights.counts[shape])
            for shape in sorted(moments - weights.counts)
            if len(shape) in dimensions
        )
    trained = sum(1 for name in listed if one.states.get(name))
    has_frozen = 0 < trained <= weights.tensors and not (one.is_plain and moments - weights.counts)
    if (
        has_frozen
        and not lost_shapes
        and not surplus
        and count > weights.tensors
        and not one.is_named
    ):
        # The state dict of a model may leave a frozen part out, as the VGG of a loss.
        yield UnsavedFrozen(
            path=one.path,
            parameters=count,
            tensors=weights.tensors,
            without_moments=count - trained,
        )
    elif lost_shapes or surplus or (count > weights.tensors and not one.is_named):
        # A module that was not prepared comes on top of the parameters of the weights: each weight
        # has its moments. Scalars are left out, as buffers of BatchNorm.
        yield UnsavedParameters(
            path=one.path,
            parameters=count,
            tensors=weights.tensors,
            shapes=lost_shapes,
            moments=tuple(sorted(moments)),
            weights=tuple(sorted(weights.every)),
            is_foreign=not (moments and weights.every - {()} <= moments.keys()),
            surplus=surplus,
            is_of_trainer=is_of_trainer,
            empty=weights.empty,
        )
