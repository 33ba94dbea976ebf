"""Sources of the names of numbered parameters: the optimizer, the guarded save, the script's model,
its config.

A model is built in a process of its own, as building it takes torch and runs the user's code: this
process stays small, and nothing that such code prints or breaks matters here. Only a factory that
is a function is called in this process.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptfix.checkpoint.keys import common_wrappers, dotted, without_private_wrappers
from ckptfix.checkpoint.run_states import parameter_names
from ckptfix.errors import OperationError, UsageError
from ckptfix.hardware import command_of, run_limited
from ckptfix.storage.files import AnyPath
from ckptfix.tensors.optimizers import OptimizerState
from ckptfix.tensors.parameter_names import (
    Parameter,
    RunGroup,
    Shape,
    SpreadOptimizer,
    name_parameters,
    named_as,
    shape_of,
)
from ckptfix.tensors.stored import Weights
from ckptfix.wording import count_of, list_names

Factory = Callable[[], Any]
"""Returns a model; or a tuple of models, their optimizers and anything else, such as inputs; tuples
in it are looked into.
"""

PATIENCE = 1800.0
"""Seconds for building a model: a factory may read weights from a slow disk."""

_HELP = "help: name the model of this run with --model MODULE:FACTORY"

RecordedName = tuple[int | None, str]
"""The position of a parameter's model, None where it is not recorded, and the parameter's name."""

_PLAIN = (bool, int, float, str, type(None))
"""The types of hyperparameters that a process can answer with; lists and tuples of these, too."""


class ModelsOfRun(Struct, frozen=True, kw_only=True):
    """The models of a run.

    ``parameters``: of each model in its order; one that several models share is that of the first.
    ``optimizers``: the param groups of each optimizer; empty where no optimizer is known.
    ``ties``: model, other name and first name of each parameter that has two. ``source``: of all
    this, in words.
    """

    parameters: tuple[Parameter, ...]
    optimizers: tuple[Sequence[RunGroup], ...] = ()
    ties: tuple[tuple[int, str, str], ...] = ()
    source: str


def name_optimizers(
    root: AnyPath,
    states: Sequence[OptimizerState],
    *,
    weights: Sequence[Weights] = (),
    model: str | Factory | None = None,
    frozen: str | re.Pattern[str] | None = None,
    run: Callable[[], ModelsOfRun] | None = None,
) -> tuple[OptimizerState, ...]:
    """Return the optimizers of a checkpoint under the names of its weights, those that number their
    parameters, too.

    The names come from the guarded save's run state, else from the optimizer itself, else from
    ``model`` ("module: factory", or the function), else from the class that ``config.json`` names.
    The first two are exact; of a model's parameters the assignments are counted
    (``name_parameters``). ``weights``: of the checkpoint; its keys decide which wrappers a name
    has. ``frozen``: matches the names of parameters that no optimizer has. ``run``: ``run_of`` the
    same arguments, for a caller that needs more of it.

    Raises OperationError where nothing names the parameters, or not in one way; UsageError for
    wrong arguments; OSError.
    """
    pattern = frozen_pattern(frozen)
    keys = _Keys(weights)

    built = run or run_of(root, weights, model)
    return tuple(
        state if state.is_named else _named(root, state, keys, built, pattern, len(states))
        for state in states
    )


def run_of(
    root: AnyPath, weights: Sequence[Weights], model: str | Factory | None
) -> Callable[[], ModelsOfRun]:
    """Return a function that builds the models of a run when it is first called, as
    ``name_optimizers`` does.
    """
    return cache(lambda: models_of_run(root, model, _Keys(weights)))


def recorded_names(root: AnyPath, state: OptimizerState) -> Sequence[Sequence[RecordedName]] | None:
    """Return model and name of each parameter of an optimizer by group, None where no file records
    them.

    A guarded save records those of all, torch 2.6 the names that a script made the optimizer with,
    without the model. They are returned only where they fit the numbers of the param groups. Raises
    OSError.
    """
    names: Sequence[Sequence[RecordedName]] | None = None
    if len(state.files) == 1:
        names = parameter_names(root, str(state.files[0]), state.index)
    own = [group.options.get("param_names") for group in state.groups]
    if names is None and own and all(isinstance(group, list | tuple) for group in own):
        names = [[(None, str(name)) for name in group or ()] for group in own]
    if names is None or list(map(len, names)) != [len(group.names) for group in state.groups]:
        return None
    return names


def models_of_run(root: AnyPath, model: str | Factory | None, keys: "_Keys") -> ModelsOfRun:
    """Build the models of a run, without weights where that is possible; return their parameters
    under ``keys``.

    ``model``: None builds the class that ``config.json`` in ``root`` names, if that is
    transformers' own. Raises UsageError for a factory that does not work, OperationError where
    nothing says what the model is.
    """
    if model is not None and not isinstance(model, str):
        shown = getattr(model, "__name__", type(model).__name__)
        return _read(described(model(), shown), f"the factory {shown}", keys)
    with tempfile.TemporaryDirectory(prefix="ckptfix-") as folder:
        answer = Path(folder) / "answer.json"
        answer.write_text(json.dumps({"model": model, "root": str(root.absolute())}))
        command = command_of("ckptfix.devices.reload.skeletons", str(answer))
        ended = run_limited(command, PATIENCE)
        found = json.loads(answer.read_text())
    if "parameters" not in found:
        why = (
            found.get("error")
            or f"the model could not be built: {ended.problem or 'the process ended early'}"
        )
        if model is not None:
            raise UsageError(why)
        raise OperationError(
            f"{root}: its optimizer numbers the parameters, and their names are unknown: {why}; "
            f"{_HELP}"
        )
    return _read(found, f"the factory {model}" if model is not None else "config.json", keys)


def described(made: Any, shown: str) -> dict[str, Any]:
    """Return in plain values what a factory returned. Raises UsageError when no model is in it.
    ``shown``: its name.
    """
    values = list(_values_in(made))
    models = [value for value in values if callable(getattr(value, "named_parameters", None))]
    if not models:
        raise UsageError(f"the factory {shown} returned {in_types(made)}, not a torch.nn.Module")
    places: dict[int, int] = {}
    parameters: list[tuple[Any, ...]] = []
    for number, one in enumerate(models):
        for name, parameter in one.named_parameters():
            if places.setdefault(id(parameter), len(parameters)) == len(parameters):
                parameters.append(
                    (name, list(parameter.shape), bool(parameter.requires_grad), number)
                )
    ties = [
        (number, name, first)
        for number, one in enumerate(models)
        for name, parameter in one.named_parameters(remove_duplicate=False)
        for first, _, _, owner in (parameters[places[id(parameter)]],)
        if owner == number and name != first
    ]
    optimizers = [value.param_groups for value in values if hasattr(value, "param_groups")]
    groups = [[list(map(id, group["params"])) for group in of_one] for of_one in optimizers]
    if any(one not in places for of_one in groups for group in of_one for one in group):
        raise UsageError(
            f"the factory {shown} returned an optimizer with parameters that are not in any of "
            "the returned models"
        )
    return {
        "parameters": parameters,
        "ties": ties,
        "optimizers": [[[places[one] for one in group] for group in of_one] for of_one in groups],
        "options": [[_described_options(group) for group in of_one] for of_one in optimizers],
    }


def _values_in(made: Any) -> Iterator[Any]:
    """Yield what a factory returned, out of tuples in tuples: ``(models, optimizers)``."""
    if not isinstance(made, tuple | list):
        yield made
        return
    for value in made:
        yield from _values_in(value)


def in_types(made: Any) -> str:
    """Return the types of what a factory returned, in words: ``(Net, (Adam, dict))``."""
    if not isinstance(made, tuple | list):
        return type(made).__name__
    return f"({', '.join(map(in_types, made))})"


def _described_options(group: Mapping[str, Any]) -> dict[str, tuple[bool, Any]]:
    """Return the hyperparameters of a param group that are plain, each with whether it is a tuple,
    which JSON does not keep.
    """
    return {
        key: (type(value) is tuple, value)
        for key, value in group.items()
        if key != "params"
        and (
            type(value) in _PLAIN
            or (type(value) in (list, tuple) and all(type(item) in _PLAIN for item in value))
        )
    }


def _options(described_options: Mapping[str, tuple[bool, Any]]) -> dict[str, Any]:
    """Return hyperparameters as ``_described_options`` was given them."""
    return {
        key: tuple(value) if is_tuple else value
        for key, (is_tuple, value) in described_options.items()
    }


def _read(found: Mapping[str, Any], source: str, keys: "_Keys") -> ModelsOfRun:
    parameters = keys.of(
        [
            Parameter(name, tuple(shape), trainable, model)
            for name, shape, trainable, model in found["parameters"]
        ]
    )
    pairs = [[Parameter(name, (), None, model) for name in both] for model, *both in found["ties"]]
    named = [(one[0].model, [name.name for name in keys.of(one)]) for one in pairs]
    return ModelsOfRun(
        parameters=tuple(parameters),
        ties=tuple((model, other, first) for model, (other, first) in named),
        optimizers=tuple(
            [
                RunGroup(
                    parameters=tuple(parameters[place] for place in group),
                    options=_options(options),
                )
                for group, options in zip(places, described_options, strict=True)
            ]
            for places, described_options in zip(found["optimizers"], found["options"], strict=True)
        ),
        source=source,
    )


class _Keys:
    """The keys of the models' weights. A model of a run has wrappers around it that its weights
    lack, or too few.
    """

    def __init__(self, weights: Iterable[Weights]) -> None:
        self._tensors = {one.index: one.named() for one in weights if not one.home.parts}
        self._known = {
            model: {_bare(key, chain): key for key in tensors} | {key: key for key in tensors}
            for model, tensors in self._tensors.items()
            for chain in (_chain(tensors),)
        }

    def of(self, parameters: Sequence[Parameter]) -> list[Parameter]:
        """Return parameters under the keys of their weights; a name without a key stays as it
        is.
        """
        found = list(parameters)
        for model, known in self._known.items():
            own = [(place, one.name) for place, one in enumerate(parameters) if one.model == model]
            chain = _chain(name for _, name in own)
            tries = [
                {place: known.get(_bare(name, chain[:depth]), "") for place, name in own}
                for depth in range(len(chain) + 1)
            ]
            tries.insert(0, {place: known.get(name, "") for place, name in own})
            best = max(tries, key=lambda keys: sum(map(bool, keys.values())))
            for place, key in best.items():
                found[place] = found[place]._replace(name=key or found[place].name)
        return found

    def model_with(self, names: Iterable[str], index: int) -> int:
        """Return the position of the model that most of these names are of.

        ``index``: the answer where no weights are known. Raises OperationError where several models
        have as many.
        """
        if not self._known:
            return index
        wanted = list(names)
        counts = {
            model: sum(
                known.get(one.name) == one.name
                for one in self.of([Parameter(name, (), None, model) for name in wanted])
            )
            for model, known in self._known.items()
        }
        best = [model for model, count in counts.items() if count == max(counts.values())]
        if len(best) > 1:
            raise OperationError(
                f"models {', '.join(map(str, best))} have parameters with the same names"
            )
        return best[0]

    def is_of_several(self, state: OptimizerState) -> bool:
        """Return whether the parameters of an optimizer fit into all models together, but into none
        alone, by their number and shapes.
        """
        wanted = _shapes_in(state)
        held = [
            Counter(tensor.shape for tensor in tensors.values())
            for tensors in self._tensors.values()
        ]
        return not any(_fits(wanted, shapes) for shapes in held) and _fits(
            wanted, sum(held, Counter())
        )

    def shape(self, parameter: Parameter) -> Shape | None:
        """Return the shape of a parameter's weights, None where no weights have its name."""
        tensor = self._tensors.get(parameter.model, {}).get(parameter.name)
        return None if tensor is None else tensor.shape


def too_many(root: AnyPath, states: Sequence[OptimizerState], weights: Sequence[Weights]) -> str:
    """Return in words that there are more optimizers than models, so that some share a model; ""
    where the names show which, or where the parameters do not fit into the models together.

    Those that do not fit may be of a model that was saved elsewhere. Raises OSError.
    """
    held = Counter(tensor.shape for one in weights for tensor in one.named().values())
    if (
        not 0 < len(weights) < len(states)
        or all(one.is_named or recorded_names(root, one) is not None for one in states)
        or not _fits(sum(map(_shapes_in, states), Counter()), held)
    ):
        return ""
    which = (
        f"optimizers of one model ({weights[0].index})"
        if len(weights) == 1
        else f"{len(states)} optimizers of {len(weights)} models"
    )
    return f"{list_names(one.label for one in states)}: {which}"


def _shapes_in(state: OptimizerState) -> Counter[Shape | None]:
    return Counter(
        shape_of(state.states.get(number, {})) for group in state.groups for number in group.names
    )


def _fits(wanted: Mapping[Shape | None, int], held: Mapping[Shape, int]) -> bool:
    """Return whether so many parameters of these shapes are among those of ``held``; a shape of
    None fits any.
    """
    return sum(wanted.values()) <= sum(held.values()) and all(
        count <= held.get(shape, 0) for shape, count in wanted.items() if shape is not None
    )


def _chain(names: Iterable[str]) -> tuple[str, ...]:
    return common_wrappers(map(without_private_wrappers, names))


def _bare(name: str, chain: tuple[str, ...]) -> str:
    return without_private_wrappers(name).removeprefix(dotted(chain))


def frozen_pattern(frozen: str | re.Pattern[str] | None) -> re.Pattern[str] | None:
    """Return the regular expression of names that no optimizer has. Raises UsageError where it is
    not one.
    """
    try:
        return re.compile(frozen) if isinstance(frozen, str) else frozen
    except re.error as error:
        raise UsageError(f"--frozen {frozen!r} is not a regular expression: {error}") from None


def _named(
    root: AnyPath,
    state: OptimizerState,
    keys: "_Keys",
    built: Callable[[], ModelsOfRun],
    frozen: re.Pattern[str] | None,
    count: int,
) -> OptimizerState:
    """Return one optimizer under names. ``count``: of the optimizers that are named; of two models
    each has one.
    """
    recorded = recorded_names(root, state)
    if recorded is not None:
        models = {model for group in recorded for model, _ in group if model is not None}
        if len(models) > 1:
            raise SpreadOptimizer(state, sorted(models))
        with suppress(OperationError):  # the names are of other weights
            return named_as(state, _of_recorded(recorded, state, keys))
    # Before a model is asked for: no model names such an optimizer.
    if keys.is_of_several(state):
        raise SpreadOptimizer(state)
    run = built()
    if not run.optimizers:
        models = {parameter.model for parameter in run.parameters}
        return name_parameters(
            state, run.parameters, frozen, is_of_one_model=1 < count == len(models)
        )
    if state.index >= len(run.optimizers):
        returned = count_of(len(run.optimizers), "optimizer")
        raise UsageError(
            f"{state.label}: {run.source} returned {returned}, but this is optimizer {state.index}"
        )
    return named_as(state, [group.parameters for group in run.optimizers[state.index]])


def _of_recorded(
    recorded: Sequence[Sequence[RecordedName]], state: OptimizerState, keys: _Keys
) -> list[list[Parameter]]:
    """Return recorded names as parameters with the shapes of their weights, without any those of
    their moments.
    """
    names = [name for group in recorded for name in group]
    numbers = [number for group in state.groups for number in group.names]
    unknown = [name for model, name in names if model is None]
    one_model = keys.model_with(unknown, state.index) if unknown else 0
    found = iter(
        keys.of(
            [
                Parameter(name, (), None, one_model if model is None else model)
                for model, name in names
            ]
        )
    )
    of_moments = iter([shape_of(state.states.get(number, {})) or () for number in numbers])
    parameters = []
    for one, shape in zip(found, of_moments, strict=True):
        own = keys.shape(one)
        parameters.append(one._replace(shape=shape if own is None else own))
    rest = iter(parameters)
    return [[next(rest) for _ in group] for group in recorded]
