"""Moments of optimizers by the names of their parameters.

An optimizer's file numbers parameters in the order in which the run that saved gave them to it. A
``set`` of them has another order in each process, and a layer that is new in the middle of a model
shifts all numbers behind it. So moments go by name: ``param_names`` of the file, or the names that
a guarded save records. Where the checkpoint has neither, they go by position, and those of a model
that is loaded in part start empty.

Param groups are never exchanged: a scheduler has its rates in the order of the groups.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from ckptfix.checkpoint.entries import Entry
from ckptfix.checkpoint.keys import KeyMap, common_wrappers, without_private_wrappers
from ckptfix.checkpoint.run_states import parameter_names
from ckptfix.training.loading.assignment import Placement
from ckptfix.training.loading.checking import SHAPED, class_problem, options_problem
from ckptfix.training.loading.targets import ModelTarget, Target
from ckptfix.wording import count_of, list_names, series

Named = Sequence[tuple[int, Any]]
"""Models of this run that are loaded, each with the position of its entry in the checkpoint."""

Number = tuple[int, int]
"""Group and position in the group of a parameter."""

Name = tuple[int | None, str]
"""The position of a model in the checkpoint, None where the file does not tell it, and a key of
it.
"""


class CarriedMoments(Struct, frozen=True, kw_only=True):
    """A state for an optimizer's ``load_state_dict``, with the moments that belong to loaded
    parameters.

    ``count``: how many parameters get moments. ``fresh``: parameters whose moments start empty.
    ``unused``: saved parameters whose moments nobody gets.
    """

    state: Any
    count: int
    fresh: tuple[str, ...]
    unused: tuple[str, ...]
    reason: str


def first_step(states: Any) -> Any:
    """Return the step of the first parameter in an optimizer's states, None without one;
    optimizers of others keep what they like.
    """
    first = next(iter(states.values()), None) if isinstance(states, Mapping) else None
    return first.get("step") if isinstance(first, Mapping) else None


def as_number(value: Any) -> float | None:
    """Return a number, or the one of a tensor, None for anything else."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, int | float) else None


def own_names(named: Named) -> dict[int, list[Name]]:
    """Return the names of the parameters of models, by identity: a tied one has several."""
    own: dict[int, list[Name]] = {}
    for position, model in named:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            own.setdefault(id(parameter), []).append((position, name))
    return own


def in_own_order(
    state: Any,
    names: Mapping[Number, Name],
    optimizer: torch.optim.Optimizer,
    own: Mapping[int, list[Name]],
) -> tuple[Any, str]:
    """Return a state with the parameters in the order of this run, where names tell it; and why it
    does not suit this run, "" where it may. ``names``, ``own``: as of ``saved_names`` and
    ``own_names``.
    """
    groups = state["param_groups"]
    sizes, own_sizes = (
        [len(group["params"]) for group in each] for each in (groups, optimizer.param_groups)
    )
    if sizes != own_sizes or not names:
        return state, ""
    pairs = _pairs(names, optimizer, own)
    moved = [(mine, source) for mine, source in pairs.items() if mine != source]
    if not moved:
        return state, ""
    for (group, _), source in moved:
        if group != source[0]:
            return state, (
                f"param group {group}: {names[source][1]!r} is in param group {source[0]} of the "
                "checkpoint; next: give the optimizer its param groups as in the run that saved it"
            )
    if len(pairs) < sum(sizes):
        return state, (
            f"param group {moved[0][0][0]}: {names[moved[0][1]][1]!r} has another position in the "
            "checkpoint, and this run does not have all of its names"
        )
    ordered = []
    for number, group in enumerate(groups):
        places = [pairs[number, place][1] for place in range(sizes[number])]
        lists = {
            key: [group[key][place] for place in places]
            for key in ("params", "param_names")
            if len(group.get(key) or ()) == len(places)
        }
        ordered.append({**group, **lists})
    return {**state, "param_groups": ordered}, ""


def with_own_options(state: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return a state whose param groups have the options of this run that the file lacks, such as
    those that a new scheduler needs: ``load_state_dict`` would remove them.
    """
    pairs = zip(state["param_groups"], optimizer.param_groups, strict=True)
    groups = [
        theirs | {key: ours[key] for key in ours if key not in theirs and key != "param_names"}
        for theirs, ours in pairs
    ]
    return {**state, "param_groups": groups}


def carry(
    root: Path, state: Any, entry: Entry, target: Target, models: Placement, held: Sequence[int]
) -> CarriedMoments | str:
    """Return what an optimizer gets of a state that was saved for other parameters, or why nothing.

    ``held``: the targets of ``models`` whose parameters the optimizer has. Raises OSError.
    """
    if reason := class_problem(state, entry, target):
        return reason
    optimizer = target.inner
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        return f"{target.what} does not keep its moments by parameter, so none can be loaded"
    saved = saved_names(root, entry, state["param_groups"])
    own: dict[int, list[Name]] = {}
    loaded: set[int] = set()
    for number in held:
        model, fit = models.targets[number], models.fits[number]
        assert isinstance(model, ModelTarget)
        filled = set(fit.names.values())
        for name, parameter in model.thing.named_parameters(remove_duplicate=False):
            if name in model.state:
                position = models.entries[models.pairs[number]].index
                own.setdefault(id(parameter), []).append((position, name))
                loaded |= {id(parameter)} if name in filled else set()
    return _carried(state, optimizer, own, loaded, saved)


def saved_names(
    root: Path, entry: Entry, groups: Sequence[Mapping[str, Any]]
) -> dict[Number, Name]:
    """Return the names of saved parameters, by the guarded save or by ``param_names``; {} without
    either. Raises OSError.

    A script may give ``param_names`` that begin anew in each group: weight, bias, weight, bias.
    """
    sizes = [len(group["params"]) for group in groups]
    is_one_file = len(entry.files) == 1
    recorded = parameter_names(root, entry.files[0], entry.index) if is_one_file else None
    given = [[(None, str(name)) for name in group.get("param_names") or ()] for group in groups]
    candidates: tuple[Sequence[Sequence[Name]], ...] = (recorded or (), given)
    named = next((each for each in candidates if list(map(len, each)) == sizes), None)
    if named is None:
        return {}
    return {
        (number, place): name
        for number, names in enumerate(named)
        for place, name in enumerate(names)
    }


def _pairs(
    saved: Mapping[Number, Name], optimizer: torch.optim.Optimizer, own: Mapping[int, list[Name]]
) -> dict[Number, Number]:
    """Return own parameter -> saved one of the same name; wrappers do not count, and a name that
    two have is none.
    """
    tells_models = any(model is not None for model, _ in saved.values())
    mine: list[tuple[Name, Number]] = []
    given: list[tuple[Name, Number]] = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            mine += (
                ((model if tells_models else None, name), (number, place))
                for model, name in own.get(id(parameter), ())
            )
        if not tells_models:
            names = group.get("param_names") or ()
            given += (((None, str(name)), (number, place)) for place, name in enumerate(names))
    claims: dict[Name, set[Number]] = {}
    for name, target in (*_bare(given), *_bare(mine)):
        claims.setdefault(name, set()).add(target)
    sources: dict[Name, list[Number]] = {}
    for name, source in _bare((name, number) for number, name in saved.items()):
        sources.setdefault(name, []).append(source)
    found: dict[Number, set[Number]] = {}
    for name, numbers in sources.items():
        if len(numbers) == len(claims.get(name, ())) == 1:
            found.setdefault(next(iter(claims[name])), set()).add(numbers[0])
    return {target: numbers.pop() for target, numbers in found.items() if len(numbers) == 1}


def _bare(named: Iterable[tuple[Name, Number]]) -> Iterator[tuple[Name, Number]]:
    """Yield parameters under their names without wrappers."""
    inside = [(model, without_private_wrappers(name), number) for (model, name), number in named]
    strip = KeyMap(remove=common_wrappers(name for _, name, _ in inside))
    for model, name, number in inside:
        yield (model, strip(name)), number


def _carried(
    state: Any,
    optimizer: torch.optim.Optimizer,
    own: Mapping[int, list[Name]],
    loaded: set[int],
    names: Mapping[Number, Name],
) -> CarriedMoments | str:
    """Return the state in the numbers of this run, with the moments of loaded parameters.

    ``own``, ``loaded``: the names of this run's parameters by identity, and those that are loaded.
    """
    pairs = _pairs(names, optimizer, own)
    saved, moments = state["param_groups"], state["state"]
    keys = {
        (g, place): key
        for g, group in enumerate(saved)
        for place, key in enumerate(group["params"])
    }
    known = set(keys.values())
    found: dict[Any, Any] = {key: value for key, value in moments.items() if key not in known}
    groups: list[dict[str, Any]] = []
    fresh: list[str] = []
    unsure: list[str] = []
    taken = set()
    total = 0
    is_alike = len(saved) == len(optimizer.param_groups)
    divided = _divided(
        (mine, source)
        for mine, source in pairs.items()
        if id(optimizer.param_groups[mine[0]]["params"][mine[1]]) in loaded
    )
    kept: list[int] = []
    for g, group in enumerate(optimizer.param_groups):
        sources = set()
        for place, parameter in enumerate(group["params"]):
            is_loaded, source = id(parameter) in loaded, pairs.get((g, place))
            _, name = own.get(id(parameter), [(None, f"parameter {place} of group {g}")])[0]
            value = moments.get(keys[source]) if source is not None else None
            if is_loaded and source is not None:
                sources.add(source[0])
                if value and _shape_of(value) in (None, tuple(parameter.shape)):
                    found[total + place] = value
                    taken.add(source)
                elif value:
                    unsure.append(name)
            else:
                (unsure if is_loaded else fresh).append(name)
            if total + place not in found and isinstance(optimizer, torch.optim.Adagrad):
                # It makes its state when it is made.
                found[total + place] = dict(optimizer.state[parameter])
        # With as many groups in the file, options go by position. With others they count where one
        # group of the file became this one, and no second one.
        if is_alike and sources - {g}:
            return (
                f"param group {g} has parameters of param group {min(sources - {g})} of the "
                "checkpoint; next: give the optimizer its param groups as in the run that saved it"
            )
        theirs = g if is_alike else next(iter(sources)) if len(sources) == 1 else None
        theirs = None if theirs in divided else theirs
        for origin in sorted(sources if theirs is None else {theirs}):
            if reason := options_problem(saved[origin], optimizer):
                return f"param group {origin}: {reason}"
        kept += [g] if theirs is None and sources else []
        options = dict(group if theirs is None else saved[theirs])
        options["params"] = list(range(total, total + len(group["params"])))
        options.pop("param_names", None)
        if "param_names" in group:
            options["param_names"] = group["param_names"]
        groups.append(options)
        total += len(group["params"])
    unused = tuple(
        names[number][1] if names else f"parameter {number[1]} of group {number[0]}"
        for number, key in keys.items()
        if moments.get(key) and number not in taken
    )
    if not any(map(moments.get, known)):
        fresh, unsure = [], []
    words = [f"moments of {len(taken)} of {count_of(total, 'parameter')} loaded, matched by name"]
    if not names:
        words = ["no moments loaded, because the checkpoint has no names of parameters"]
    if fresh:
        words.append(f"start empty because their weights are not loaded: {list_names(fresh)}")
    if unsure:
        words.append(
            "start empty because the checkpoint has no moments that are certainly theirs: "
            f"{list_names(unsure)}"
        )
    if kept:
        words.append(
            f"options of param {'group' if len(kept) == 1 else 'groups'} "
            f"{series(list(map(str, kept)))} stay as in this run, because the checkpoint has other "
            "groups"
        )
    if unused:
        words.append(f"moments of {count_of(len(unused), 'saved parameter')} unused")
    return CarriedMoments(
        state={"state": found, "param_groups": groups},
        count=len(taken),
        fresh=(*fresh, *unsure),
        unused=unused,
        reason="; ".join(words),
    )


def _divided(pairs: Iterable[tuple[Number, Number]]) -> frozenset[int]:
    """Return the param groups of the checkpoint whose parameters are in several of this run."""
    owners: dict[int, set[int]] = {}
    for (mine, _), (theirs, _) in pairs:
        owners.setdefault(theirs, set()).add(mine)
    return frozenset(theirs for theirs, groups in owners.items() if len(groups) > 1)


def _shape_of(moments: Any) -> tuple[int, ...] | None:
    """Return the shape of the parameter that has these moments, None when they do not tell."""
    for name, value in moments.items() if isinstance(moments, Mapping) else ():
        if name in SHAPED and isinstance(value, torch.Tensor):
            return tuple(value.shape)
    return None
