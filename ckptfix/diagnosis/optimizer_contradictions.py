"""Contradictions inside one optimizer, by headers and metadata alone: param groups that list a
parameter twice or not at all, and options or states without which torch's load or next step fails.

A parameter without moments may be frozen. States are judged where the hyperparameters are those of
torch's own optimizers; a subclass may do without them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, prod

from msgspec.structs import replace

from ckptfix.diagnosis.findings.inconsistent import (
    AbsentMoments,
    ContradictoryMoments,
    InconsistentGroups,
    LackingGroups,
    LackingMoments,
    MissingMoments,
    OptimizerFinding,
    RoundedMoments,
)
from ckptfix.diagnosis.optimizer_kinds import (
    MOMENTS,
    SEVERAL,
    STATES,
    kind_of,
)
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer, Shape


def without_reduced(saved: SavedOptimizer) -> SavedOptimizer:
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


def contradictions(one: SavedOptimizer) -> Iterator[OptimizerFinding]:
    """Yield what param groups and states of an optimizer contradict each other in, and parameters
    without states.
    """
    counts = Counter(one.parameters)
    groups_of = Counter(name for group in one.groups for name in dict.fromkeys(group))
    shared = tuple(name for name, count in groups_of.items() if count > 1)
    repeated = () if one.is_named else tuple(_repeated(one.groups))
    unlisted = (
        tuple(name for name in one.states if name not in counts)
        if counts and not one.is_named
        else ()
    )
    # FSDP's rekey_optim_state_dict numbers parameters as the module does: group after group may go
    # down, no group does.
    groups = () if one.is_named or shared or unlisted or not one.values else one.groups
    unordered = tuple(
        str(number) for number, group in enumerate(groups) if not _is_ascending(group)
    )
    # torch restores what a class of its own keeps under another string, such as "global".
    strangers = tuple(key for key in one.strangers if key.isdecimal() or not one.states)
    # Several optimizers in one dict number their groups from 0 each, and have moments under strings
    # such as "1.0".
    is_merged = bool(shared and strangers) and not (
        one.states or any(map(str.isdecimal, strangers))
    )
    if (
        (shared and not is_merged)
        or repeated
        or unlisted
        or unordered
        or (strangers and not is_merged)
    ):
        yield InconsistentGroups(
            path=one.path,
            shared=shared,
            unlisted=unlisted,
            repeated=repeated,
            unordered=unordered,
            strangers=strangers,
            is_named=one.is_named,
        )
    unusable = list(_unusable_parts(one))
    lacking = {
        name for finding in unusable if type(finding) is LackingMoments for name in finding.names
    }
    # LBFGS keeps the states of all parameters as those of the first.
    if any(one.states.values()) and "history_size" not in one.options:
        without = tuple(name for name in counts if not one.states.get(name) and name not in lacking)
        without = tuple(name for name in without if (name, "") not in one.unusable)
        if without:
            yield MissingMoments(path=one.path, names=without, parameters=len(counts))
    yield from unusable


def _repeated(groups: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the numbers that a group lists twice, unless torch numbered a parameter that was passed
    twice.

    torch warns of such a group and takes it. Its number is that of the last position, ``[1, 1,
    2]``.
    """
    start = 0
    for group in groups:
        last = {name: str(start + position) for position, name in enumerate(group)}
        yield from (
            name for name, count in Counter(group).items() if count > 1 and name != last[name]
        )
        start += len(group)


def _is_ascending(group: Sequence[str]) -> bool:
    """Return whether the numbers of a group ascend. The last position of a parameter that was
    passed twice counts.
    """
    last_first = [int(name) for name in dict.fromkeys(reversed(group))]
    return last_first == sorted(last_first, reverse=True)


_NOT_NEGATIVE = ("eps", "weight_decay")
"""Options that no schedule changes, and that each class of torch refuses below 0 when it is made
(``Invalid epsilon value``, torch 2.13). A rate can be: a LambdaLR may give any.
"""


def _unusable_parts(saved: SavedOptimizer) -> Iterator[OptimizerFinding]:
    """Yield options and states without which torch's load or next step raises an error, and rounded
    moments.
    """
    present = STATES.intersection(state for states in saved.states.values() for state in states)
    groups: Iterable[tuple[Iterable[str], Mapping[str, object]]] = zip(
        saved.groups, saved.values, strict=False
    )
    if not saved.values:
        # Metadata of DCP has the names of options alone.
        groups = [(saved.parameters, dict.fromkeys(saved.options, ""))]
    optionless: dict[tuple[str, ...], list[int]] = {}
    lacking: dict[str, list[str]] = {}
    absent_everywhere: dict[str, list[str]] = {}
    differing: dict[str, tuple[str, Shape, str, Shape]] = {}
    rounded: dict[str, tuple[str, str]] = {}
    for number, (group, options) in enumerate(groups):
        kind = kind_of(options, present)
        if kind is None and saved.values:
            # States of another optimizer contradict the options of its own group, if one of these
            # shows its class.
            kind = kind_of(options, ())
            kind = kind if kind is not None and kind.signs & set(options) else None
        if kind is None:
            continue
        absent = tuple(
            sorted(
                option
                for option in kind.required
                if (value := options.get(option)) is None
                or (value == SEVERAL and option not in kind.pairs)
                # torch loads a NaN, and every weight is NaN after the next step
                or (isinstance(value, float) and not isfinite(value))
                # No class of torch takes one below 0, and all load it: sqrt(v) - 1 of small
                # moments turns the direction of a step.
                or (option in _NOT_NEGATIVE and isinstance(value, float | int) and value < 0)
            )
        )
        if absent:
            optionless.setdefault(absent, []).append(number)
        # A subclass may do without a state. So a state is missed where another parameter has it, or
        # where the options are exactly those of torch's class, whose load asks for the scalars for
        # every subclass.
        is_exact = kind.has_exact(options) and not kind.is_lenient
        unknown = [
            state for state in (*kind.scalars, *kind.moments_with(options)) if state not in present
        ]
        surely = [
            state
            for state in unknown
            if state in kind.scalars
            or (state in kind.optional and present.issuperset(kind.moments))
        ]
        moments = [state for state in kind.moments_with(options) if state in present]
        needed = [*(state for state in kind.scalars if state in present), *moments]
        for name in group:
            states = saved.states.get(name)
            if (name, "") in saved.unusable and (
                every := [*kind.scalars, *kind.moments_with(options)]
            ):
                lacking[name] = every
            if not states and kind.asks_first and name == next(iter(saved.states), ""):
                lacking[name] = [*kind.scalars]
            if not states:
                continue
            gone = [
                state
                for state in needed
                if (name, state) in saved.unusable or (state not in states and not kind.is_lenient)
            ]
            gone += kind.lacking(states)
            if not kind.is_lenient and kind.states.issuperset(states):
                # Only SGD and SparseAdam make steps with sparse tensors.
                gone += [state for state in moments if (name, state) in saved.sparse]
            # A subclass with states of its own may do without those of torch's class.
            if is_exact and (kind.options or STATES.issuperset(states)):
                gone += surely
                maybe = [state for state in unknown if state in kind.moments]
                if maybe and not gone:
                    absent_everywhere[name] = maybe
            if gone:
                lacking[name] = gone
            shapes = {state: shape for state in moments if (shape := states.get(state)) is not None}
            like, expected = next(iter(shapes.items()), ("", ()))
            differing.update(
                (name, (state, shape, like, expected))
                for state, shape in shapes.items()
                if shape != expected
            )
            differing.update(
                (name, (state, shape, "", ()))
                for state in kind.single
                if (shape := states.get(state)) is not None and prod(shape) != 1
            )
            # Quantized moments of a subclass have scales next to them.
            if name in saved.integers and kind.states.issuperset(states):
                rounded[name] = saved.integers[name]
    for absent, numbers in optionless.items():
        yield LackingGroups(path=saved.path, groups=tuple(numbers), options=absent)
    for finding, parameters in ((LackingMoments, lacking), (AbsentMoments, absent_everywhere)):
        if parameters:
            yield finding(
                path=saved.path,
                names=tuple(parameters),
                parameters=len(set(saved.parameters)),
                states=tuple(
                    dict.fromkeys(state for gone in parameters.values() for state in gone)
                ),
            )
    if differing:
        state, shape, like, expected = next(iter(differing.values()))
        yield ContradictoryMoments(
            path=saved.path,
            parameters=tuple(differing),
            shape=shape,
            expected=expected,
            state=state,
            like=like,
        )
    if rounded:
        state, dtype = next(iter(rounded.values()))
        yield RoundedMoments(path=saved.path, parameters=tuple(rounded), state=state, dtype=dtype)
