"""Param groups without trained parameters, which DeepSpeed leaves out and other loaders look for.

ZeRO-3 drops such groups from its own optimizer, and ZeRO-1 and 2 do not start with them. Torch
loads no state dict with fewer groups than its optimizer has.
"""

from collections.abc import Collection, Sequence
from typing import Any

from msgspec.structs import replace

from ckptfix.tensors.optimizers import OptimizerState, ParamGroup
from ckptfix.tensors.parameter_names import RunGroup
from ckptfix.wording import count_of, list_names

_RATE, _FIRST_RATE = "lr", "initial_lr"
_NAMES = "param_names"


def without_untrained_groups(
    state: OptimizerState, frozen: Collection[str], rates: Sequence[float]
) -> tuple[OptimizerState, tuple[str, ...]]:
    """Return an optimizer with the param groups that DeepSpeed has, those with a trained parameter,
    and warnings about the others.

    ``rates``: the learning rate that a scheduler last gave to each group, empty where none did.
    """
    kept = tuple(group for group in state.groups if set(group.names).difference(frozen))
    empty = [str(number) for number, group in enumerate(state.groups) if group not in kept]
    if not kept or not empty:
        return state, ()
    words = (
        f"{state.label}: param groups without trained parameters are left out: "
        f"{', '.join(empty)}; ZeRO-3 leaves them out too, and ZeRO-1 and ZeRO-2 do not start "
        "with them; next: remove them from the script"
    )
    # Older versions of torch give the first rates to the groups that remain, without an error.
    if len(rates) == len(state.groups):
        words += (
            ", and start its scheduler anew at this step: the saved one has learning rates for "
            f"{count_of(len(rates), 'param group')}"
        )
    return replace(state, groups=kept), (words,)


def with_untrained_groups(
    state: OptimizerState, groups: Sequence[RunGroup], rates: Sequence[float]
) -> tuple[OptimizerState, tuple[str, ...]]:
    """Return an optimizer with the param groups of the run that DeepSpeed left out, without
    parameters yet, and warnings about these groups.

    ``groups``: of the run's optimizer, whose hyperparameters the groups get. ``rates``: the
    learning rate that a scheduler last gave to each of the run's groups, empty where none did. An
    optimizer that has other groups missing is returned unchanged.
    """
    missing = [number for number, group in enumerate(groups) if not group.is_trained]
    if not missing or not state.groups or len(state.groups) + len(missing) != len(groups):
        return state, ()
    is_scheduled = len(rates) == len(groups)
    like = state.groups[0].options
    saved = iter(state.groups)
    restored: list[ParamGroup] = []
    lacking: set[str] = set()
    for number, group in enumerate(groups):
        if group.is_trained:
            restored.append(next(saved))
            continue
        options: dict[str, Any] = dict(group.options)
        # A scheduler begins with the learning rate that the script gave to the group.
        if _FIRST_RATE in like and _RATE in options:
            options.setdefault(_FIRST_RATE, options[_RATE])
        if is_scheduled:
            options[_RATE] = rates[number]
        if _NAMES in like:
            options.setdefault(_NAMES, [parameter.name for parameter in group.parameters])
        # OneCycleLR reads max_lr of every group, and fails without.
        lacking |= like.keys() - options.keys()
        restored.append(ParamGroup(names=(), options={**like, **options}))
    words = (
        f"{state.label}: param groups without trained parameters are restored: "
        f"{', '.join(map(str, missing))}; DeepSpeed leaves them out, so their hyperparameters are "
        "those of the optimizer from --model"
    )
    if is_scheduled:
        words += ", and their learning rates those of the scheduler"
    if lacking:
        words += (
            f"; that optimizer lacks {list_names(sorted(lacking))}, taken from the first trained "
            "group; next, if a scheduler adds these: create the scheduler in the factory, too"
        )
    return replace(state, groups=tuple(restored)), (words,)
