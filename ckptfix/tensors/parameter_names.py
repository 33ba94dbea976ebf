"""Names of the parameters that an optimizer numbers: every assignment that agrees with order and
shapes is counted.

PyTorch numbers parameters through the param groups, and saves no names. Each group is a selection
of the model's parameters in the model's order, and moments have the shape of their parameter. Where
exactly one assignment agrees with that, it is the one of the run that saved, as the run's own
assignment always agrees. Any other number is refused.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.errors import OperationError, UsageError
from ckptfix.tensors.new_files import safetensors_place
from ckptfix.tensors.optimizers import OptimizerState, StateValue
from ckptfix.tensors.stored import Format, StoredTensor, Weights
from ckptfix.wording import Brief, count_of, list_names

Shape = tuple[int, ...]

BUDGET = 4_000_000
"""Numbers in all states of a count: at most some seconds, and less than 100 MiB."""

_OVERHEAD = 16
"""Cost of a state without positions, in memory and in time, counted in positions."""

_LARGEST = 1_000_000
"""Number of assignments up to which a message has it exactly."""

SHAPED = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "exp_inf",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "sum",
    "prev",
    "ax",
    "state1",
    "state2",
)
"""States that optimizers of torch, bitsandbytes and Lion keep in the shape of the parameter."""


class Parameter(NamedTuple):
    """A parameter of a model, in the model's order.

    ``trainable``: it requires gradients; None when not known. ``model``: the position of its model
    in the checkpoint.
    """

    name: str
    shape: Shape
    trainable: bool | None = None
    model: int = 0


class SpreadOptimizer(OperationError):
    """An optimizer with parameters of several models. ``problem``: the message without its second
    half, the limit of ckptfix.
    """

    def __init__(self, state: OptimizerState, models: Sequence[int] = ()) -> None:
        named = f"models {', '.join(map(str, models))}" if models else "several models"
        self.problem = f"{state.label}: it has parameters of {named}"
        super().__init__(
            f"{self.problem}; ckptfix can only name the parameters of an optimizer of one model"
        )


class RunGroup(Brief, Struct, frozen=True, kw_only=True):
    """A param group of an optimizer that the run's factory returned.

    ``options``: its hyperparameters that are plain values, or tuples or lists of these; others,
    such as a learning rate in a tensor, are left out.
    """

    parameters: tuple[Parameter, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        """True where a parameter of the group is trained, or may be."""
        return any(parameter.trainable is not False for parameter in self.parameters)


class Assignments(Brief, Struct, frozen=True, kw_only=True):
    """The assignments of numbers to parameters that agree with order and shapes.

    ``count``: None where counting was given up. ``places``: of the only one: group by group, the
    position of each number's parameter. ``doubtful``: positions of the parameters that are not the
    same in all assignments.
    """

    count: int | None
    places: tuple[tuple[int, ...], ...] = ()
    doubtful: tuple[int, ...] = ()


def name_parameters(
    state: OptimizerState,
    parameters: Sequence[Parameter],
    frozen: re.Pattern[str] | None = None,
    *,
    is_of_one_model: bool = False,
) -> OptimizerState:
    """Return an optimizer's state under the names of the model's parameters.

    ``parameters``: of all models in their order, tied ones once. ``frozen``: matches the names of
    parameters that the optimizer does not have, or has without moments. ``is_of_one_model``: no
    assignment has parameters of several.

    Raises OperationError unless exactly one assignment agrees with order and shapes, with the
    option that decides; UsageError when ``frozen`` matches no name.
    """
    if state.is_named:
        return state
    left = [one for one in parameters if frozen is None or not frozen.search(one.name)]
    if frozen is not None and len(left) == len(parameters):
        raise UsageError(f"--frozen {frozen.pattern!r} matches no parameter of the model")
    numbers = [number for group in state.groups for number in group.names]
    if len(set(numbers)) < len(numbers):
        twice = next(number for number, count in Counter(numbers).items() if count > 1)
        raise OperationError(f"{state.label}: parameter {twice} is in two param groups")
    shapes = [
        [shape_of(state.states.get(number, {})) for number in group.names] for group in state.groups
    ]
    fitting = _fitting(shapes, left, by_model=is_of_one_model)
    # The optimizer lists frozen parameters, too, without moments.
    if not fitting and frozen is not None:
        left = [
            one._replace(trainable=False) if frozen.search(one.name) else one for one in parameters
        ]
        fitting = _fitting(shapes, left, by_model=is_of_one_model)
    if len(fitting) > 1:
        models = ", ".join(str(own[0].model) for own, _ in fitting)
        raise OperationError(
            f"{state.label}: its parameters match models {models} equally well in order and "
            "shapes; help: --model MODULE:FACTORY with a factory that returns the models and "
            "their optimizers"
        )
    own, found = fitting[0] if fitting else (left, assignments(shapes, left))
    if found.count != 1:
        raise OperationError(
            f"{state.label}: {_refused(found, shapes, own, is_told=frozen is not None)}"
        )
    return named_as(state, [[own[place] for place in places] for places in found.places])


def _fitting(
    shapes: Sequence[Sequence[Shape | None]], parameters: Sequence[Parameter], *, by_model: bool
) -> list[tuple[Sequence[Parameter], Assignments]]:
    """Return the parameters that an optimizer can be of, all or those of one model, with the
    assignments to them.
    """
    models = dict.fromkeys(one.model for one in parameters) if by_model else ()
    candidates = [[one for one in parameters if one.model == model] for model in models] or [
        [*parameters]
    ]
    counted = [(own, assignments(shapes, own)) for own in candidates]
    return [(own, found) for own, found in counted if found.count != 0]


def named_as(state: OptimizerState, parameters: Sequence[Sequence[Parameter]]) -> OptimizerState:
    """Return a state under the names of these parameters of its groups.

    Raises OperationError unless all are different parameters of one model, with the shapes of the
    moments.
    """
    every = [parameter for group in parameters for parameter in group]
    if list(map(len, parameters)) != [len(group.names) for group in state.groups]:
        groups = [len(group.names) for group in state.groups]
        raise OperationError(
            f"{state.label}: its param groups have {groups} parameters (expected "
            f"{list(map(len, parameters))})"
        )
    if len(models := sorted({parameter.model for parameter in every})) > 1:
        raise SpreadOptimizer(state, models)
    names: dict[str, str] = {}
    for group, own in zip(state.groups, parameters, strict=True):
        for number, parameter in zip(group.names, own, strict=True):
            names[number] = parameter.name
            shape = shape_of(state.states.get(number, {}))
            if shape is not None and shape != parameter.shape:
                raise OperationError(
                    f"{state.label}: the moments of {parameter.name} have shape {list(shape)} "
                    f"(expected {list(parameter.shape)})"
                )
    if len(set(names.values())) < len(names):
        twice = next(name for name, count in Counter(names.values()).items() if count > 1)
        raise OperationError(f"{state.label}: two of its parameters have the name {twice}")
    return replace(state.named(names), model=models[0] if models else state.index)


def names_of_model(weights: Weights) -> tuple[str, ...] | None:
    """Return the names of a model's tensors in the model's order.

    None where they are sorted, as in a safetensors file, and in what ``migrate`` made of one.
    """
    held = {tensor.fqn: tensor for tensor in weights.tensors}
    tensors = [held[name] for name in weights.names_in_order or held if name in held]
    names = [tensor.fqn for tensor in tensors]
    is_sorted = names == sorted(names) or tensors == sorted(tensors, key=safetensors_place)
    return None if weights.format is Format.SAFETENSORS or is_sorted else tuple(names)


def first_out_of_order(state: OptimizerState, names: Sequence[str]) -> tuple[str, str] | None:
    """Return two parameters of a param group that follow each other the other way round in
    ``names``, None without.
    """
    places = {name: place for place, name in enumerate(names)}
    for group in state.groups:
        known = [name for name in group.names if name in places]
        for name, following in pairwise(known):
            if places[following] < places[name]:
                return name, following
    return None


def ordered_as(
    state: OptimizerState, groups: Sequence[RunGroup], ties: Mapping[str, str]
) -> OptimizerState:
    """Return an optimizer with the parameters of each param group as in ``groups``. ``ties``: other
    name -> name.

    Frozen parameters come in, without states: DeepSpeed leaves them out of its param groups. Raises
    OperationError when these groups do not have the same parameters otherwise.
    """
    ordered = []
    for number, group in enumerate(state.groups):
        own = {ties.get(name, name): name for name in group.names}
        here = groups[number].parameters if number < len(groups) else ()
        frozen = {
            ties.get(one.name, one.name) for one in here if one.trainable is False
        } - own.keys()
        wanted = [ties.get(one.name, one.name) for one in here]
        if len(groups) != len(state.groups) or sorted((*own, *frozen)) != sorted(wanted):
            filled = sum(bool(each.names) for each in state.groups)
            raise OperationError(
                f"{state.label}: the parameters of its {count_of(filled, 'param group')} differ "
                f"from those of the optimizer from --model ({count_of(len(groups), 'group')}); "
                "next: create the optimizer in the factory the same way as in the run"
            )
        ordered.append(replace(group, names=tuple(own.get(name, name) for name in wanted)))
    return replace(state, groups=tuple(ordered))


def shape_of(states: Mapping[str, StateValue]) -> Shape | None:
    """Return the shape of the parameter that these states are of, None where they do not show it.

    A parameter that never had a gradient has no states. Some optimizers keep other shapes: factors
    of a matrix, blocks of numbers.
    """
    tensors = {
        name: value.shape for name, value in states.items() if isinstance(value, StoredTensor)
    }
    known = {shape for name, shape in tensors.items() if name in SHAPED}
    found = known or {shape for shape in tensors.values() if shape}
    return found.pop() if len(found) == 1 else None


def assignments(
    groups: Sequence[Sequence[Shape | None]], parameters: Sequence[Parameter], budget: int = BUDGET
) -> Assignments:
    """Count the assignments of the numbers in param groups to parameters.

    ``groups``: the shape of each number's parameter, None where it is not known. A parameter that
    does not require gradients has none of the known shapes: it never got moments. ``budget``: after
    which to give up.
    """
    return _Count(groups, parameters, budget).result()


Positions = tuple[int, ...]
"""The number of parameters of each group that are assigned."""

_SKIPPED = -1


class _Count:
    """One count, from the first parameter of the model to the last.

    A state is how many numbers of each group are assigned; what else happened before makes no
    difference to the rest. In each state the next parameter is that of the next number of some
    group, or the optimizer does not have it. A state is left out as soon as the parameters that
    remain are too few for the numbers that remain, of any shape.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Shape | None]],
        parameters: Sequence[Parameter],
        budget: int,
    ) -> None:
        self._groups, self._parameters, self._budget = groups, parameters, budget
        self._total = sum(map(len, groups))
        supply = Counter(one.shape for one in parameters if one.trainable is not False)
        demand = Counter(shape for group in groups for shape in group if shape is not None)
        self._slack = {shape: count - demand[shape] for shape, count in supply.items()}
        self._is_possible = self._total <= len(parameters) and not demand - supply
        self._where: dict[Shape, list[tuple[int, list[int]]]] = {}
        for number, group in enumerate(groups):
            places: dict[Shape, list[int]] = {}
            for place, shape in enumerate(group):
                if shape is not None:
                    places.setdefault(shape, []).append(place)
            for shape, own in places.items():
                self._where.setdefault(shape, []).append((number, own))

    def result(self) -> Assignments:
        """Count forward, then find backward what the assignments have in common."""
        if not self._is_possible:
            return Assignments(count=0)
        levels = self._forward()
        if levels is None:
            return Assignments(count=None)
        end = tuple(map(len, self._groups))
        count = levels[-1].get(end, 0)
        if not count:
            return Assignments(count=0)
        places = [[0] * len(group) for group in self._groups]
        doubtful = []
        alive = {end}
        seen = self._seen()
        for place in range(len(self._parameters) - 1, -1, -1):
            outcomes: set[tuple[int, int]] = set()
            before: set[Positions] = set()
            for state in levels[place]:
                for group, following in self._steps(place, state, seen[place]):
                    if following in alive:
                        before.add(state)
                        outcomes.add((group, state[group] if group != _SKIPPED else 0))
            alive = before
            if len(outcomes) > 1:
                doubtful.append(place)
            for group, number in outcomes:
                if group != _SKIPPED:
                    places[group][number] = place
        return Assignments(
            count=count,
            places=tuple(map(tuple, places)) if count == 1 else (),
            doubtful=tuple(reversed(doubtful)),
        )

    def _forward(self) -> list[dict[Positions, int]] | None:
        """Return for each number of parameters the states after them, and in how many ways each is
        reached.
        """
        levels: list[dict[Positions, int]] = [{(0,) * len(self._groups): 1}]
        left = self._budget // (len(self._groups) + _OVERHEAD)
        for place, seen in enumerate(self._seen()):
            now: dict[Positions, int] = {}
            for state, ways in levels[-1].items():
                for _, following in self._steps(place, state, seen):
                    now[following] = now.get(following, 0) + ways
                    if len(now) > left:
                        return None
            left -= len(now)
            levels.append(now)
        return levels

    def _seen(self) -> list[int]:
        """Return for each parameter how many trainable ones of its shape precede it."""
        counts: Counter[Shape] = Counter()
        found = []
        for one in self._parameters:
            found.append(counts[one.shape])
            counts[one.shape] += one.trainable is not False
        return found

    def _steps(self, place: int, state: Positions, seen: int) -> Iterator[tuple[int, Positions]]:
        """Yield what can be made of a parameter: the group whose next number it is, and the state
        behind it.
        """
        parameter = self._parameters[place]
        is_trainable = parameter.trainable is not False
        may_lack = self._may_lack(parameter.shape, state, seen) if is_trainable else True
        for group, position in enumerate(state):
            shapes = self._groups[group]
            if position < len(shapes):
                shape = shapes[position]
                if may_lack if shape is None else (is_trainable and shape == parameter.shape):
                    yield group, (*state[:group], position + 1, *state[group + 1 :])
        if may_lack and len(self._parameters) - place > self._total - sum(state):
            yield _SKIPPED, state

    def _may_lack(self, shape: Shape, state: Positions, seen: int) -> bool:
        """Return whether enough parameters of a shape remain when this one is not for a number of
        that shape.
        """
        taken = sum(
            bisect_left(places, state[group]) for group, places in self._where.get(shape, ())
        )
        return seen - taken < self._slack[shape]


def _refused(
    found: Assignments,
    groups: Sequence[Sequence[Shape | None]],
    parameters: Sequence[Parameter],
    *,
    is_told: bool,
) -> str:
    """Return in words why there is not one assignment, and the option that decides."""
    numbers = count_of(sum(map(len, groups)), "parameter")
    if found.count == 0:
        return (
            f"{_impossible(groups, parameters)}; help: name the model of this run with --model "
            "MODULE:FACTORY; the factory returns all its models and their optimizers"
        )
    if found.count is None:
        why = f"its {numbers} can be assigned to names by shape in too many ways to count"
        if alike := _alike(groups):
            why += f": param groups {alike[0]} and {alike[1]} have the same shapes"
    else:
        many = f"more than {_LARGEST:,}" if found.count > _LARGEST else f"{found.count:,}"
        names = list_names([parameters[place].name for place in found.doubtful])
        why = (
            f"its {numbers} can be assigned to names by shape in {many} ways (expected 1); "
            f"interchangeable: {names}"
        )
    return f"{why}; help: {_decides(groups, parameters, is_told=is_told)}"


def _decides(
    groups: Sequence[Sequence[Shape | None]], parameters: Sequence[Parameter], *, is_told: bool
) -> str:
    """Return in words the options that can leave one assignment."""
    more = len(parameters) - sum(map(len, groups))
    optimizer = "--model MODULE:FACTORY with a factory that returns (model, optimizer)"
    if more <= 0:
        return optimizer
    lacking = (
        f"the {'parameter' if more == 1 else count_of(more, 'parameter')} missing from the "
        "optimizer"
    )
    if is_told or any(one.trainable is False for one in parameters):
        return f"--frozen REGEX that matches {lacking}, or {optimizer}"
    return (
        f"--frozen REGEX that matches {lacking}, --model MODULE:FACTORY that freezes them, or "
        f"{optimizer}"
    )


def _impossible(groups: Sequence[Sequence[Shape | None]], parameters: Sequence[Parameter]) -> str:
    """Return in words why no assignment agrees."""
    total = sum(map(len, groups))
    if total > len(parameters):
        return f"it has {count_of(total, 'parameter')}, but the model has {len(parameters)}"
    supply = Counter(one.shape for one in parameters if one.trainable is not False)
    demand = Counter(shape for group in groups for shape in group if shape is not None)
    for shape, count in demand.items():
        if count > supply[shape]:
            return (
                f"{count} of its parameters {'has' if count == 1 else 'have'} moments of shape "
                f"{list(shape)}, but the model trains {supply[shape]} of that shape"
            )
    return "judging by shapes, its parameters are not in the model's order"


def _alike(groups: Sequence[Sequence[Shape | None]]) -> tuple[int, int] | None:
    """Return two groups whose parameters have the same shapes in the same order, None without
    any.
    """
    first: dict[tuple[Shape | None, ...], int] = {}
    for number, group in enumerate(groups):
        other = first.setdefault(tuple(group), number)
        if group and other != number:
            return other, number
    return None
