"""Optimizers of torch as their param groups show them, and the options and states that each cannot
do without.

Measured with torch 2.13: ``load_state_dict`` takes nearly everything, and the next ``step`` raises
KeyError for a missing option or state, AttributeError for a state that is not a tensor. Options
that ``__setstate__`` sets when they are missing are not required. Only options of torch's own
optimizers and of Adafactor in transformers are known here: a param group with any other belongs to
a class that may read other options and keep other states.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

COMMON_OPTIONS = frozenset((
    "lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "betas", "eps", "weight_decay", "amsgrad",
    "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay",
    "momentum", "dampening", "nesterov", "base_momentum", "max_momentum", "alpha", "centered",
    "lr_decay", "initial_accumulator_value", "rho", "momentum_decay", "lambd", "t0", "etas",
    "step_sizes", "params", "param_names",
))  # fmt: skip
"""Hyperparameters of torch's optimizers whose moments have the shape of their parameter, and of its
schedulers.

A param group with others belongs to an optimizer that may keep other shapes: Adafactor, GaLore,
Shampoo, 8 bit.
"""


PAIRS = frozenset(("betas", "etas", "step_sizes"))
"""Options of two numbers."""

SEVERAL = "several"
"""The value of an option that is a list, a dict or a tensor of several numbers."""


class OptimizerKind(NamedTuple):
    """An optimizer of torch's.

    ``signs``: options and states that only it has. ``required``: the options without which a step
    raises KeyError. ``moments``: its states in the shape of the parameter. ``optional``: a moment
    -> the option that adds it. ``scalars``: its other states. ``single``: those of them that a step
    reads as one number. ``is_lenient``: a step begins a missing state anew. ``asks_first``: its
    load reads the step of the first parameter. ``pairs``: options of several numbers; a step takes
    one number for any other. ``flags``: other options that each of its param groups has since torch
    2.0. ``name``: of its class, and ``named_by``: an option that no other class has; "" where no
    option shows the class. ``either``: sets of states, one of which each parameter needs.
    ``together``: states of which a parameter has all or none. ``options``: all options of a class
    that only these show, without those that schedulers add.
    """

    signs: frozenset[str]
    required: frozenset[str]
    moments: tuple[str, ...] = ()
    optional: Mapping[str, str] = {}
    scalars: tuple[str, ...] = ("step",)
    single: tuple[str, ...] = ("step",)
    is_lenient: bool = False
    asks_first: bool = False
    pairs: frozenset[str] = PAIRS
    flags: frozenset[str] = frozenset(("foreach", "maximize", "differentiable"))
    name: str = ""
    named_by: str = ""
    either: tuple[tuple[str, ...], ...] = ()
    together: tuple[str, ...] = ()
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
        """Return the states that a parameter with these lacks of ``either`` and ``together``."""
        lacking = []
        if self.either and not any(set(names) <= set(states) for names in self.either):
            nearest = max(self.either, key=lambda names: len(set(names) & set(states)))
            lacking += [name for name in nearest if name not in states]
        if set(self.together) & set(states):
            lacking += [name for name in self.together if name not in states]
        return lacking

    def moments_with(self, options: Mapping[str, object]) -> tuple[str, ...]:
        """Return the moments of a parameter in a group with these options."""
        return (
            *self.moments,
            *(state for state, name in self.optional.items() if _is_on(options.get(name))),
        )


def _is_on(value: object) -> bool:
    """Return whether an option has a value that adds a state: True, or a momentum above 0."""
    return isinstance(value, bool | int | float) and value > 0


_ADAM = frozenset(("lr", "betas", "eps", "weight_decay"))
_ADAM_STATES = ("exp_avg", "exp_avg_sq")

_RADAM = OptimizerKind(frozenset(("decoupled_weight_decay",)), _ADAM, _ADAM_STATES)
"""RAdam, whose only sign is an option that Adam and NAdam have, too."""

_ADAMAX = OptimizerKind(frozenset(("exp_inf",)), _ADAM, ("exp_avg", "exp_inf"))
"""Adamax, whose options are those that nearly all others have: its only sign is a state."""

_OF_ADAMAX = _ADAM | _ADAMAX.flags | {"capturable"}

_OF_SCHEDULERS = frozenset((
    "params", "param_names", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum",
    "max_momentum",
))  # fmt: skip
"""Keys that torch and its schedulers add to the options of a param group."""

_KINDS = (
    OptimizerKind(
        frozenset(("momentum_decay", "mu_product")),
        _ADAM | {"momentum_decay"},
        _ADAM_STATES,
        scalars=("step", "mu_product"),
        single=("step", "mu_product"),
        name="NAdam",
        named_by="momentum_decay",
    ),
    OptimizerKind(
        frozenset(("amsgrad",)),
        _ADAM,
        _ADAM_STATES,
        {"max_exp_avg_sq": "amsgrad"},
        flags=frozenset(
            ("amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused")
        ),
        name="Adam or AdamW",
        named_by="amsgrad",
    ),
    _ADAMAX,
    OptimizerKind(
        frozenset(("dampening", "nesterov")),
        frozenset(("lr", "momentum", "dampening", "weight_decay")),
        optional={"momentum_buffer": "momentum"},
        scalars=(),
        single=(),
        is_lenient=True,
        name="SGD",
        named_by="dampening",
    ),
    OptimizerKind(
        frozenset(("centered",)),
        frozenset(("lr", "alpha", "eps", "weight_decay")),
        ("square_avg",),
        {"momentum_buffer": "momentum", "grad_avg": "centered"},
        single=(),
        name="RMSprop",
        named_by="centered",
    ),
    OptimizerKind(
        frozenset(("initial_accumulator_value", "lr_decay")),
        frozenset(("lr", "lr_decay", "eps", "weight_decay")),
        ("sum",),
        asks_first=True,
        name="Adagrad",
        named_by="initial_accumulator_value",
    ),
    OptimizerKind(
        frozenset(("rho", "acc_delta")),
        frozenset(("lr", "rho", "eps", "weight_decay")),
        ("square_avg", "acc_delta"),
        single=(),
        name="Adadelta",
        named_by="rho",
    ),
    OptimizerKind(
        frozenset(("lambd", "t0")),
        frozenset(("lr", "lambd", "alpha", "t0", "weight_decay")),
        ("ax",),
        scalars=("step", "eta", "mu"),
        single=("step", "eta", "mu"),
    ),
    OptimizerKind(
        frozenset(("etas", "step_sizes")),
        frozenset(("etas", "step_sizes")),
        ("prev", "step_size"),
        single=(),
    ),
    OptimizerKind(
        frozenset(("beta2_decay", "row_var", "col_var")),
        frozenset(("lr", "beta2_decay", "eps", "d", "weight_decay", "maximize")),
        pairs=frozenset(("eps",)),
        flags=frozenset(("foreach",)),
        either=(("row_var", "col_var"), ("variance",)),
    ),
)

_BY_OPTIONS = (
    # SparseAdam.
    OptimizerKind(
        frozenset(),
        frozenset(("lr", "betas", "eps")),
        _ADAM_STATES,
        options=frozenset(("lr", "betas", "eps", "maximize")),
    ),
    # LBFGS. Its step begins anew without ``n_iter``, and reads all of these after a first one.
    OptimizerKind(
        frozenset(),
        frozenset(("lr", "history_size")),
        scalars=(),
        single=(),
        together=("d", "t", "old_dirs", "old_stps", "ro", "prev_flat_grad"),
        options=frozenset((
            "lr", "max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size",
            "line_search_fn",
        )),
    ),
    # Adafactor of transformers. Its ``lr`` and ``beta1`` may be None.
    OptimizerKind(
        frozenset(),
        frozenset(),
        optional={"exp_avg": "beta1"},
        single=(),
        either=(("exp_avg_sq_row", "exp_avg_sq_col"), ("exp_avg_sq",)),
        options=frozenset((
            "lr", "eps", "clip_threshold", "decay_rate", "beta1", "weight_decay", "scale_parameter",
            "relative_step", "warmup_init",
        )),
    ),
)  # fmt: skip
"""Optimizers that have all options of their class and no other."""

MOMENTS = frozenset(
    state for kind in (*_KINDS, _RADAM) for state in (*kind.moments, *kind.optional)
)
"""States that torch's optimizers keep in the shape of the parameter."""

SCALARS = frozenset(state for kind in (*_KINDS, _RADAM) for state in kind.scalars)
"""States that are one number, which torch makes a tensor of when it loads them."""

STATES = MOMENTS.union(
    *(kind.scalars for kind in _KINDS),
    *(kind.signs for kind in _KINDS),
    *(names for kind in (*_KINDS, *_BY_OPTIONS) for names in kind.either),
)
"""States that torch's optimizers keep, and the options that tell them apart."""


def kind_of(options: Collection[str], states: Collection[str]) -> OptimizerKind | None:
    """Return the optimizer with these options and states of parameters, None for any that is not
    known for sure.

    ``foreach`` marks torch's own: clones of older versions have the other options, too.
    """
    own = set(options) - _OF_SCHEDULERS
    if "foreach" not in options:
        return next((kind for kind in _BY_OPTIONS if own == kind.options), None)
    evidence = {*options, *states}
    kinds = [kind for kind in _KINDS if kind.signs & evidence]
    if not kinds and _RADAM.signs & evidence:
        kinds = [_RADAM]
    # Classes of their own with these options keep other states as well.
    if not kinds and own == _OF_ADAMAX and {"step", "exp_avg"}.issuperset(states):
        kinds = [_ADAMAX]
    if len(kinds) != 1 or not COMMON_OPTIONS | kinds[0].required | kinds[0].signs >= set(options):
        return None
    return kinds[0]


def name_of(options: Collection[str], states: Collection[str]) -> str:
    """Return the class of an optimizer with these options and states, "" for one that they do not
    show.
    """
    kept = {*states, "step"}
    return next(
        (
            kind.name
            for kind in _KINDS
            if kind.name and kind.named_by in options and kept <= kind.states | {"step"}
        ),
        "",
    )
