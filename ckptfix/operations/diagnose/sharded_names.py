"""Names in DCP folders: wrappers, and optimizers whose names are not those of their model.

A model and the optimizer of the same number are judged together: loaded together, they must have the same names. In an
optimizer names stand twice, in its state and in the lists of its parameter groups.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ckptfix.checkpoint.folder import Component, NameScope
from ckptfix.checkpoint.keys import (
    DDP_CHAIN,
    PRIVATE_WRAPPERS,
    KeyMap,
    collapse,
    inner_wrappers,
    is_flat_name,
    is_nested,
    prepared,
)
from ckptfix.checkpoint.sharded import ShardedState
from ckptfix.operations.diagnose.names import STATE_DICT, nested_evidence
from ckptfix.operations.findings import (
    Finding,
    FlatParameters,
    MismatchedNames,
    NestedPrefix,
    WrapperPrefix,
)

NO_WRAPPER_HERE = "the optimizer has these names without a wrapper"
"""What a repair to names without any wrapper rests on."""


class _Place(NamedTuple):
    """A place of names in one of the folders; every one is another."""

    state: ShardedState
    scope: NameScope


def diagnose_sharded_names(states: Iterable[ShardedState], processes: int | None) -> list[Finding]:
    """Find nested, single and mismatched wrappers. ``processes``: those of the run, as far as is known."""
    units: dict[object, list[_Place]] = {}
    findings: list[Finding] = []
    for state in states:
        flat = tuple(name for scope in state.scopes for name in scope.names if is_flat_name(name))
        if flat:
            findings.append(FlatParameters(path=state.metadata_path, tensors=tuple(dict.fromkeys(flat))))
        units.setdefault(unit_of(state), []).extend(
            _Place(state, scope) for scope in state.scopes if scope.names
        )
    judged = [(_reference(unit), unit) for unit in units.values() if unit]
    evident = _evident([place for unit in units.values() for place in unit], processes)
    # One answer for all: renamed differently, equal models would look like copies afterwards.
    nested = [(reference, unit) for reference, unit in judged if is_nested(reference.scope.chain)]
    to_bare = bool(nested) and all(_has_bare(reference, unit) for reference, unit in nested)
    for reference, unit in judged:
        findings += _judge(reference, unit, to_bare, evident)
    return findings


def _evident(places: Iterable[_Place], processes: int | None) -> Mapping[_Place, str]:
    """Return the places whose nested wrappers are damage, each with what says so.

    One process alone wraps nothing: the wrappers are modules of the script's own. So they are, of an average of the
    prepared model, next to a model with the same names in fewer wrappers. In one folder the average follows its model.
    """
    evidence = nested_evidence(processes)
    fewest: dict[frozenset[str], int] = {}  # wrappers in other folders
    every = list(places)
    for place in every:
        if place.scope.kind == STATE_DICT and place.scope.is_model:
            names, wrappers = _unwrapped(place), len(prepared(place.scope.chain))
            fewest[names] = min(wrappers, fewest.get(names, wrappers))
    found = {}
    for number, place in enumerate(every if evidence else ()):
        wrappers = len(prepared(place.scope.chain))
        before = (
            other for other in every[:number] if other.state is place.state and other.scope.kind == STATE_DICT
        )
        if (
            is_nested(place.scope.chain)
            and not (place.scope.is_model and fewest[_unwrapped(place)] < wrappers)
            and not any(
                len(prepared(other.scope.chain)) < wrappers and _unwrapped(other) == _unwrapped(place)
                for other in before
            )
        ):
            found[place] = evidence
    return found


def unit_of(state: ShardedState) -> Hashable:
    """Return what a model and its optimizer have in common: they are loaded together."""
    return state.path if state.name is None else state.name.index


def is_flat(state: ShardedState | Component) -> bool:
    """Whether names of FSDP's flattened parameters are in a folder or a file."""
    return any(is_flat_name(name) for scope in state.scopes for name in scope.names)


def _reference(unit: list[_Place]) -> _Place:
    """Return the place that the others are measured by: the model's, else the first of an optimizer."""
    return next((place for place in unit if place.scope.is_model), unit[0])


def _has_bare(reference: _Place, unit: list[_Place]) -> bool:
    known = _unwrapped(reference)
    return any(
        place.scope.kind != STATE_DICT and not place.scope.chain and known.issuperset(place.scope.names)
        for place in unit
    )


def unwrapped_names(scope: NameScope) -> Iterator[str]:
    """Yield the names of a place without the wrappers that all of them begin with."""
    return map(KeyMap(remove=scope.chain), scope.names)


def _unwrapped(place: _Place) -> frozenset[str]:
    return frozenset(unwrapped_names(place.scope))


def _own_model(place: _Place, models: list[tuple[_Place, frozenset[str]]], reference: _Place) -> _Place:
    """Return the model that an optimizer is of: one with the very names that it has, else the reference."""
    if place.scope.kind == STATE_DICT:
        return reference
    return next((one for one, names in models if names.issuperset(place.scope.names)), reference)


def _judge(
    first: _Place, unit: list[_Place], to_bare: bool, evident: Mapping[_Place, str]
) -> Iterator[Finding]:
    models = [first, *(place for place in unit if place is not first and place.scope.kind == STATE_DICT)]
    names = {id(model): _unwrapped(model) for model in models}
    exact = [(model, frozenset(model.scope.names)) for model in models]
    for place in unit:
        reference = _own_model(place, exact, first)
        chain, known = reference.scope.chain, names[id(reference)]
        target = chain
        if reference in evident or (is_nested(chain) and to_bare):
            is_alike = reference is first or names[id(first)] >= known
            target = () if to_bare and is_alike else collapse(chain)
        path, scope = place.state.metadata_path, place.scope
        belongs = _unwrapped(place) <= known  # the optimizer is that model's
        is_follower = place is reference or scope.kind != STATE_DICT  # else a model of its own, an average
        judge = reference if belongs and is_follower else place
        if (
            belongs
            and is_follower
            and _public(scope.chain) != _public(chain)
            and not _is_own_doing(place, reference)
        ):
            yield MismatchedNames(
                path=path,
                scope=str(scope),
                chain=scope.chain,
                target=target,
                reference=str(reference.state.metadata_path)
                if reference.state is not place.state
                else str(reference.scope),
                expected=chain,
                names=len(scope.names),
            )
        elif is_nested(scope.chain) and (to_bare or judge in evident):
            yield NestedPrefix(
                path=path,
                scope=str(scope),
                chain=scope.chain,
                target=target if belongs and (is_follower or to_bare) else collapse(scope.chain),
                names=len(scope.names),
                evidence=NO_WRAPPER_HERE if to_bare else evident[judge],
                assumed=not to_bare,
            )
        elif scope.kind == STATE_DICT and (scope.chain or inner_wrappers(scope.names)):
            yield WrapperPrefix(path=path, scope=str(scope), chain=scope.chain, names=len(scope.names))


def _is_own_doing(place: _Place, reference: _Place) -> bool:
    """Whether a script of somebody's own may have saved names that differ so, and reads them again.

    ``get_optimizer_state_dict`` takes the ``module.`` of DistributedDataParallel off, ``state_dict()`` does not.
    Accelerate saves the model and the optimizer by functions that agree.
    """
    return reference.state.name is None and not place.scope.chain and reference.scope.chain == DDP_CHAIN


def _public(chain: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out what torch takes off the names of an optimizer by itself, where a model's may keep it."""
    return tuple(segment for segment in chain if segment not in PRIVATE_WRAPPERS)
