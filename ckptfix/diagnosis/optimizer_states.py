"""Optimizers that do not agree with themselves or with the weights, by headers and metadata alone.

Optimizers differ in what they keep, so little of it is an error. A parameter without moments may be frozen. Moments of
another shape than the parameter may be factors or blocks of it: shapes are judged where the hyperparameters are those
of torch's own optimizers. Weights that the optimizer has and the checkpoint lacks may be kept elsewhere: they are
judged in folders of ``save_state`` in which nothing else may hold weights.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import PurePosixPath
from typing import Any

from ckptfix.checkpoint.dcp import FLATTENED, DcpFolder, optimizers_in
from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder, Component
from ckptfix.checkpoint.keys import WRAPPERS, is_flat_name
from ckptfix.checkpoint.manifest import REPORT
from ckptfix.checkpoint.model_configs import OTHER_WEIGHTS
from ckptfix.checkpoint.run_states import parameter_names
from ckptfix.dataclass import dataclass
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.inconsistent import (
    InconsistentGroups,
    MismatchedMoments,
    MissingMoments,
    UnsavedParameters,
)
from ckptfix.errors import FormatError
from ckptfix.formats.dcp_metadata import flattened_parts, model_names
from ckptfix.formats.dcp_rewrite import paths_of
from ckptfix.formats.pickle_tree import Node, Text, child, is_dict_like, items_of, pairs
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_pickle import is_optimizer
from ckptfix.formats.torch_tensors import is_tensor, read_tensor, storages
from ckptfix.tensors.parameter_names import SHAPED

Shape = tuple[int, ...]

_OPTIONS = frozenset((
    "lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach",
    "capturable", "differentiable", "fused", "decoupled_weight_decay", "momentum", "dampening", "nesterov",
    "base_momentum", "max_momentum", "alpha", "centered", "lr_decay", "initial_accumulator_value", "rho",
    "momentum_decay", "params", "param_names",
))  # fmt: skip
"""Hyperparameters of torch's optimizers whose moments have the shape of their parameter, and of its schedulers.

A param group with others belongs to an optimizer that may keep other shapes: Adafactor, GaLore, Shampoo, 8 bit.
"""

_WEIGHTS = (Role.MODEL, Role.WEIGHTS_INDEX, Role.UNKNOWN, Role.CUSTOM)
"""Roles of files that may hold weights: a script can register any module as a custom object."""

_STATE, _GROUPS = "state", "param_groups"
_LAST_STEP = 1 << 53
"""A larger number in a pickle is not a step, and Python refuses to print one of more than 4300 digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOptimizer:
    """An optimizer as its headers show it. ``path``: of its file or folder.

    ``groups``: the parameters of each param group; numbers as text, or keys. ``options``: the keys of the groups.
    ``states``: parameter -> state -> shape, None for another value than a plain tensor. ``step``: the last one, None
    where it is kept in tensors, as torch does since 1.12. ``is_named``: by keys. ``index``: its position.
    """

    path: PurePosixPath
    index: int
    is_named: bool
    options: frozenset[str]
    groups: tuple[tuple[str, ...], ...] = field(repr=False)
    states: Mapping[str, Mapping[str, Shape | None]] = field(repr=False)
    step: int | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether its hyperparameters are those of torch's own optimizers."""
        return self.options <= _OPTIONS

    @property
    def parameters(self) -> list[str]:
        """The parameters of all param groups."""
        return [name for group in self.groups for name in group]


def diagnose_optimizers(
    folder: CheckpointFolder,
    sharded: Sequence[DcpFolder],
    damaged: frozenset[PurePosixPath],
    saved: Sequence[SavedOptimizer],
    *,
    has_deepspeed: bool,
) -> Iterator[Finding]:
    """Yield what is wrong with the ``saved`` optimizers of a folder. ``damaged``: files with another finding."""
    known = {one.path for one in folder.components if one.path in damaged}
    known |= {one.path for one in sharded if damaged.intersection((one.metadata_path, *one.named))}
    optimizers = [one for one in saved if one.path not in known]
    if not optimizers:
        return
    weights = _Weights(folder, sharded, damaged, has_deepspeed=has_deepspeed)
    for one in optimizers:
        yield from contradictions(one)
        yield from _of_shapes(one, weights, _named(folder, one))
        yield from _of_weights(one, weights)


def saved_optimizers(folder: CheckpointFolder, sharded: Sequence[DcpFolder]) -> Iterator[SavedOptimizer]:
    """Yield the optimizers of a scanned folder whose headers or metadata can be read."""
    for component in folder.components:
        is_one = component.role is Role.OPTIMIZER and component.name.rank is None
        if is_one and isinstance(component.content, TorchFile):
            found = _of_file(component, component.content)
            if found is not None:
                yield found
    for state in sharded:
        if state.metadata is not None:
            yield from optimizers_of(state)


def _of_file(component: Component, file: TorchFile) -> SavedOptimizer | None:
    """Return the optimizer in a file, None for anything else."""
    root = file.tree.root
    if type(root) is not Node or not is_optimizer(root):
        return None
    groups: list[tuple[str, ...]] = []
    options: set[str] = set()
    steps: list[int] = []
    states: dict[str, dict[str, Shape | None]] = {}
    left = len(file.tree.data)  # a few bytes can refer to one long list again and again
    try:
        for group in items_of(child(root, _GROUPS)):
            members = [_name(one) for one in items_of(child(group, "params"))]
            keys = [key.value for key, _ in pairs(group) if type(key) is Text]
            left -= len(members) + len(keys)
            if None in members or left < 0:
                return None
            groups.append(tuple(name for name in members if name is not None))
            options.update(keys)
        known = storages(file.tree)
        for key, state in pairs(child(root, _STATE)):
            name = _name(key)
            if name is not None and is_dict_like(state):
                step = child(state, "step")
                if type(step) is int and 0 <= step <= _LAST_STEP:
                    steps.append(step)
                states[name] = {
                    word.value: _shape(word, value, known)
                    for word, value in pairs(state)
                    if type(word) is Text and value is not None
                }
                left -= len(states[name])
                if left < 0:
                    return None
    except FormatError:
        return None  # another finding is about it
    return SavedOptimizer(
        path=component.path,
        index=component.name.index,
        is_named=any(not name.isdecimal() for group in groups for name in group),
        options=frozenset(options),
        groups=tuple(groups),
        states=states,
        step=max(steps, default=None),
    )


def _name(value: Any) -> str | None:
    if type(value) is Text:
        return value.value
    return str(value) if type(value) is int and 0 <= value < 1 << 31 else None


def _shape(key: Text, value: Any, known: Mapping[str, Any]) -> Shape | None:
    found = read_tensor(key, value, known) if type(value) is Node and is_tensor(value) else None
    return None if found is None else found.shape


def optimizers_of(state: DcpFolder) -> Iterator[SavedOptimizer]:
    """Yield the optimizers in a DCP folder whose metadata names their parameters."""
    assert state.metadata is not None
    paths = paths_of(state.metadata)
    shapes = {one.fqn: one.shape for one in state.metadata.tensors}
    found = {tuple(map(str, prefix)): _Parts() for prefix in optimizers_in(paths.values())}
    flattened = {scope.path: frozenset(scope.names) for scope in state.scopes if scope.kind == FLATTENED}
    for scope in state.scopes:
        depth = _depth(scope.path, found) if scope.kind == "params" else None
        if depth is not None:
            found[scope.path[:depth]].groups.append(scope.names)
    in_keys = {where: _Parts([tuple(names)]) for where, names in flattened.items()}
    for fqn, steps in paths.items() if found or in_keys else ():
        path = tuple(map(str, steps))
        if (depth := _depth(path, found)) is not None:
            parts, kind = found[path[:depth]], path[depth]
            if kind == _STATE and len(path) == depth + 3:
                parts.states.setdefault(path[-2], {})[path[-1]] = shapes.get(fqn)
            elif kind == _GROUPS:
                parts.options.add(path[depth + 2] if len(path) > depth + 2 else "")
        elif path and path[:-1] in in_keys and (cut := flattened_parts(path[-1], flattened[path[:-1]])):
            begin, name, end = cut
            parts = in_keys[path[:-1]]
            if begin == f"{_STATE}.":
                parts.states.setdefault(name, {})[end[1:]] = shapes.get(fqn)
            else:
                parts.options.add(end[1:])
    for parts in (*found.values(), *in_keys.values()):
        yield SavedOptimizer(
            path=state.path,
            index=state.name.index if state.name is not None else 0,
            is_named=not all(map(str.isdecimal, parts.states)),
            options=frozenset(parts.options),
            groups=tuple(parts.groups),
            states=parts.states,
        )


class _Parts:
    """The parts of one optimizer in a DCP folder, as far as they were met."""

    def __init__(self, groups: Iterable[tuple[str, ...]] = ()) -> None:
        self.groups = list(groups)
        self.states: dict[str, dict[str, Shape | None]] = {}
        self.options: set[str] = set()


def _depth(path: tuple[str, ...], found: Mapping[tuple[str, ...], _Parts]) -> int | None:
    """Return the number of steps of a path that lead to one of these optimizers, None where none do.

    An optimizer can lie in the state dict of another one, which wraps it: the inner one's parts are its own.
    """
    return next((depth for depth in reversed(range(len(path))) if path[:depth] in found), None)


class _Weights:
    """All weights of a checkpoint. ``is_complete``: nothing else in the folder may hold some."""

    def __init__(
        self,
        folder: CheckpointFolder,
        sharded: Sequence[DcpFolder],
        damaged: frozenset[PurePosixPath],
        *,
        has_deepspeed: bool,
    ) -> None:
        own = [one for one in folder.components if one.role in _WEIGHTS]
        models = [state for state in sharded if state.model is not None]
        self.shapes: dict[str, set[Shape]] = {}
        in_folders = [named for state in models for named in _of_model(state)]
        for name, shape in (
            *((tensor.fqn, tensor.shape) for one in own for tensor in one.tensors),
            *in_folders,
        ):
            self.shapes.setdefault(bare(name), set()).add(shape)
        # A model that is stored in two formats counts once: the message compares numbers of parameters.
        families: dict[tuple[object, int], Counter[tuple[str, str]]] = {}
        for one in own:
            model = one.name.model or one.path
            families.setdefault((model, one.name.index), Counter())[one.name.stem, one.name.suffix] += len(
                one.tensors
            )
        self.tensors = len(in_folders) + sum(max(sizes.values()) for sizes in families.values())
        self.every = frozenset(shape for found in self.shapes.values() for shape in found)
        dcp = {state.path for state in sharded}
        self.is_complete = (
            folder.only is None
            and folder.is_save_state
            and bool(models or any(one.role is Role.MODEL for one in own))
            and not has_deepspeed
            and not damaged
            and all(one.problem is None and not _is_opaque(one) for one in own)
            and all(one.name.rank is None for one in own)
            and all(kind != PLAIN_FOLDER or path in dcp for path, kind in folder.subfolders.items())
            and not any(path.name.endswith((*OTHER_WEIGHTS, REPORT)) for path in folder.strays)
        )


def _of_model(state: DcpFolder) -> Iterator[tuple[str, Shape]]:
    found = model_names(state.metadata) if state.metadata is not None else None
    shapes = {tensor.fqn: tensor.shape for tensor in state.tensors}
    for fqn, name in (found.names if found is not None else {}).items():
        if fqn in shapes:
            yield name, shapes[fqn]


def _is_opaque(component: Component) -> bool:
    """Return whether a model's file has values that may be weights and cannot be read, such as quantized tensors."""
    dicts = component.content.state_dicts if isinstance(component.content, TorchFile) else ()
    return any(not key.endswith("_extra_state") for one in dicts for key in one.opaque_keys)


def bare(name: str) -> str:
    """Return a key without its wrappers: private ones anywhere, those of ``prepare`` at its front.

    A user's own ``module`` at the front goes with them, in the weights as in the optimizer.
    """
    *path, last = name.split(".")
    kept = [segment for segment in path if segment not in WRAPPERS or segment == "module"]
    while kept and kept[0] == "module":
        del kept[0]
    return ".".join((*kept, last))


def _named(folder: CheckpointFolder, one: SavedOptimizer) -> Mapping[str, str]:
    """Return the keys of an optimizer's parameters: its own, or those that a guarded save recorded for its numbers."""
    if one.is_named:
        return {name: name for name in one.states}
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


def contradictions(one: SavedOptimizer) -> Iterator[Finding]:
    """Yield what param groups and states of an optimizer contradict each other in, and parameters without states."""
    counts = Counter(one.parameters)
    shared = tuple(name for name, count in counts.items() if count > 1)
    unlisted = tuple(name for name in one.states if name not in counts) if counts and not one.is_named else ()
    if shared or unlisted:
        yield InconsistentGroups(path=one.path, shared=shared, unlisted=unlisted)
    if any(one.states.values()):
        without = tuple(name for name in counts if not one.states.get(name))
        if without:
            yield MissingMoments(path=one.path, names=without, parameters=len(counts))


def _of_shapes(one: SavedOptimizer, weights: _Weights, names: Mapping[str, str]) -> Iterator[Finding]:
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
        yield MismatchedMoments(path=one.path, parameters=tuple(wrong), shape=shape, expected=expected_shape)


def _of_weights(one: SavedOptimizer, weights: _Weights) -> Iterator[Finding]:
    """Yield the parameters that no weights of a ``save_state`` folder belong to."""
    if not weights.is_complete:
        return
    every = dict.fromkeys([*one.parameters, *one.states])
    if one.is_named:
        lost = tuple(name for name in every if bare(name) not in weights.shapes and not is_flat_name(name))
        if lost and 2 * len(lost) <= len(every):
            yield UnsavedParameters(path=one.path, parameters=len(every), tensors=weights.tensors, names=lost)
        if 2 * len(lost) <= len(every):
            return
        # Most names are unknown: those of adapters, which are saved under others, or of another model. Shapes decide.
    moments = {
        shape
        for name, states in one.states.items()
        for state, shape in states.items()
        if state in SHAPED and shape is not None and not is_flat_name(name)
    }
    lost_shapes = tuple(sorted(moments - weights.every)) if one.is_plain else ()
    count = len(every) if one.is_named else len(set(one.parameters))
    if lost_shapes or (count > weights.tensors and not one.is_named):
        # A module that was not prepared comes on top of the parameters of the weights: each weight has its moments.
        # Scalars are left out, as buffers of BatchNorm.
        yield UnsavedParameters(
            path=one.path,
            parameters=count,
            tensors=weights.tensors,
            shapes=lost_shapes,
            moments=tuple(sorted(moments)),
            weights=tuple(sorted(weights.every)),
            is_foreign=not (moments and weights.every - {()} <= moments),
        )
