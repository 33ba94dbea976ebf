"""Optimizers of torch as their param groups show them, and the options and states that each cannot
do without.

Measured with torch 2.13: ``load_state_dict`` takes nearly everything, and the next ``step`` raises
KeyError for a missing option or state. Options that ``__setstate__`` sets when they are missing are
not required. Only options of torch's most used optimizers and of Adafactor in transformers are
known here: a param group with any other belongs to a class that may read other options and keep
other states. A parameter without moments may be frozen.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import isfinite
from typing import NamedTuple

from ckptfix.diagnosis.findings.inconsistent import (
    AbsentMoments,
    LackingGroups,
    LackingMoments,
    MissingMoments,
    OptimizerFinding,
)
from ckptfix.diagnosis.saved_optimizers import COMMON_OPTIONS, SavedOptimizer

MOMENTS = frozenset((
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
    "grad_avg", "sum", "acc_delta", "ax", "prev", "step_size",
))  # fmt: skip
"""States that torch's optimizers keep in the shape of the parameter."""

SCALARS = frozenset(("step", "mu_product", "eta", "mu"))
"""States that are one number, which torch makes a tensor of when it loads them."""


class OptimizerKind(NamedTuple):
    """A class of optimizers. ``signs``: options that only it has.

    ``required``: the options without which a step raises KeyError. ``moments``: its states in the
    shape of the parameter. ``optional``: a moment -> the option that adds it. ``scalars``: its
    other states. ``reads_step``: its updates depend on the step. ``is_lenient``: a step begins a
    missing state anew. ``flags``: other options that each of its param groups has since torch 2.0.
    ``either``: sets of states, one of which each parameter needs. ``options``: all options of a
    class that only these show, without those that schedulers add.
    """

    name: str
    signs: frozenset[str]
    required: frozenset[str]
    moments: tuple[str, ...] = ()
    optional: Mapping[str, str] = {}
    scalars: tuple[str, ...] = ("step",)
    reads_step: bool = True
    is_lenient: bool = False
    flags: frozenset[str] = frozenset(("foreach", "maximize", "differentiable"))
    either: tuple[tuple[str, ...], ...] = ()
    options: frozenset[str] = frozenset()

    @property
    def states(self) -> frozenset[str]:
        """All states that it may keep of a parameter."""
        return frozenset((*self.scalars, *self.moments, *self.optional))

    def has_exact(self, options: Collection[str]) -> bool:
        """Return whether a param group has every option of the class itself, as no clone of older
        versions has.
        """
        return bool(self.options) or self.required | self.flags <= set(options)

    def lacking(self, states: Collection[str]) -> list[str]:
        """Return the states that a parameter with these lacks of ``either``."""
        if not self.either or any(set(names) <= set(states) for names in self.either):
            return []
        nearest = max(self.either, key=lambda names: len(set(names) & set(states)))
        return [name for name in nearest if name not in states]

    def needed_with(self, options: Mapping[str, object]) -> tuple[str, ...]:
        """Return the states of a parameter in a group with these options."""
        optional = (state for state, name in self.optional.items() if _is_on(options.get(name)))
        return (*self.scalars, *self.moments, *optional)


def _is_on(value: object) -> bool:
    """Return whether an option has a value that adds a state: True, or a momentum above 0."""
    return isinstance(value, bool | int | float) and value > 0


_ADAM = frozenset(("lr", "betas", "eps", "weight_decay"))
_ADAM_STATES = ("exp_avg", "exp_avg_sq")

OF_SCHEDULERS = frozenset((
    "params", "param_names", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum",
    "max_momentum", "initial_momentum",
))  # fmt: skip
"""Keys that torch and its schedulers add to the options of a param group. No step of an optimizer
reads them.
"""

_KINDS = (
    OptimizerKind(
        "NAdam",
        frozenset(("momentum_decay",)),
        _ADAM | {"momentum_decay"},
        _ADAM_STATES,
        scalars=("step", "mu_product"),
    ),
    OptimizerKind(
        "Adam or AdamW",
        frozenset(("amsgrad",)),
        _ADAM,
        _ADAM_STATES,
        {"max_exp_avg_sq": "amsgrad"},
        flags=frozenset(
            ("amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused")
        ),
    ),
    OptimizerKind(
        "SGD",
        frozenset(("dampening", "nesterov")),
        frozenset(("lr", "momentum", "dampening", "weight_decay")),
        optional={"momentum_buffer": "momentum"},
        scalars=(),
        is_lenient=True,
    ),
    OptimizerKind(
        "RMSprop",
        frozenset(("centered",)),
        frozenset(("lr", "alpha", "eps", "weight_decay")),
        ("square_avg",),
        {"momentum_buffer": "momentum", "grad_avg": "centered"},
        reads_step=False,
    ),
    OptimizerKind(
        "Adagrad",
        frozenset(("initial_accumulator_value", "lr_decay")),
        frozenset(("lr", "lr_decay", "eps", "weight_decay")),
        ("sum",),
    ),
    OptimizerKind(
        "Adadelta",
        frozenset(("rho",)),
        frozenset(("lr", "rho", "eps", "weight_decay")),
        ("square_avg", "acc_delta"),
        reads_step=False,
    ),
)

_ADAFACTOR = OptimizerKind(
    "Adafactor",
    frozenset(),
    frozenset(),
    optional={"exp_avg": "beta1"},
    reads_step=False,
    either=(("exp_avg_sq_row", "exp_avg_sq_col"), ("exp_avg_sq",)),
    options=frozenset((
        "lr", "eps", "clip_threshold", "decay_rate", "beta1", "weight_decay", "scale_parameter",
        "relative_step", "warmup_init",
    )),
)  # fmt: skip
"""The class of transformers. Its ``lr`` and ``beta1`` may be None."""


def kind_of(options: Collection[str]) -> OptimizerKind | None:
    """Return the class of a param group with these options, None for any that is not known for
    sure.

    ``foreach`` marks torch's own: clones of older versions have the other options, too.
    """
    if set(options) - OF_SCHEDULERS == _ADAFACTOR.options:
        return _ADAFACTOR
    if "foreach" not in options or not set(options) <= COMMON_OPTIONS:
        return None
    kinds = [kind for kind in _KINDS if kind.signs & set(options)]
    return kinds[0] if len(kinds) == 1 else None


def name_of(options: Collection[str], states: Collection[str]) -> str:
    """Return the class of an optimizer with these options and states, "" for one that they do not
    show.
    """
    kept = {*states} - {"step"}
    return next(
        (kind.name for kind in _KINDS if kind.signs <= set(options) and kept <= kind.states), ""
    )


def lacking_parts(saved: SavedOptimizer) -> Iterator[OptimizerFinding]:
    """Yield the options and states that an optimizer lacks, and the parameters without states."""
    of_options, of_states = list(_lacking_options(saved)), list(_lacking_states(saved))
    lacking = {name for finding in of_states for name in finding.names}
    # LBFGS keeps the states of all parameters as those of the first.
    if any(saved.states.values()) and "history_size" not in saved.options:
        listed = dict.fromkeys(saved.parameters)
        without = tuple(
            name for name in listed if not saved.states.get(name) and name not in lacking
        )
        if without:
            yield MissingMoments(
                path=saved.path, key=saved.key, names=without, parameters=len(listed)
            )
    yield from of_options
    yield from of_states


def _lacking_options(saved: SavedOptimizer) -> Iterator[LackingGroups]:
    """Yield the param groups without options that a step reads, or with one that is NaN: torch
    loads it, and every weight is NaN after the next step.
    """
    lacking: dict[tuple[str, ...], list[int]] = {}
    for number, (_, options) in enumerate(_groups(saved)):
        kind = kind_of(options)
        absent = tuple(
            sorted(
                option
                for option in (kind.required if kind is not None else ())
                if (value := options.get(option)) is None
                or (isinstance(value, float) and not isfinite(value))
            )
        )
        if absent:
            lacking.setdefault(absent, []).append(number)
    for absent, numbers in lacking.items():
        yield LackingGroups(path=saved.path, key=saved.key, groups=tuple(numbers), options=absent)


def _lacking_states(saved: SavedOptimizer) -> Iterator[LackingMoments]:
    """Yield the parameters without states that a load or a step reads.

    A subclass may do without a state. So a state is missed where another parameter has it, or where
    the options are exactly those of torch's class, whose load asks for the scalars for every
    subclass.
    """
    present = {state for states in saved.states.values() for state in states}
    lacking: dict[str, list[str]] = {}
    absent_everywhere: dict[str, list[str]] = {}
    for group, options in _groups(saved):
        kind = kind_of(options)
        if kind is None or kind.is_lenient:
            continue
        needed = kind.needed_with(options)
        unknown = [state for state in needed if state not in present]
        surely = [
            state
            for state in unknown
            if state in kind.scalars
            or (state in kind.optional and present.issuperset(kind.moments))
        ]
        maybe = [state for state in unknown if state in kind.moments]
        for name in group:
            states = saved.states.get(name)
            if not states:
                continue
            gone = [state for state in needed if state in present and state not in states]
            gone += kind.lacking(states)
            # A subclass with states of its own may do without those of torch's class.
            if kind.has_exact(options) and (kind.options or kind.states.issuperset(states)):
                gone += surely
                if maybe and not gone:
                    absent_everywhere[name] = maybe
            if gone:
                lacking[name] = gone
    for finding, parameters in ((LackingMoments, lacking), (AbsentMoments, absent_everywhere)):
        if parameters:
            yield finding(
                path=saved.path,
                key=saved.key,
                names=tuple(parameters),
                parameters=len(set(saved.parameters)),
                states=tuple(
                    dict.fromkeys(state for gone in parameters.values() for state in gone)
                ),
            )


def _groups(saved: SavedOptimizer) -> Iterable[tuple[Iterable[str], Mapping[str, object]]]:
    """Return the parameters and the options of each param group. Metadata of DCP has the names of
    options alone.
    """
    if not saved.values:
        return [(saved.parameters, dict.fromkeys(saved.options, ""))]
    return zip(saved.groups, saved.values, strict=True)
