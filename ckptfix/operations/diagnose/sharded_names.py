"""Names in DCP folders: wrappers, and optimizers whose names are not those of their model.

A model and the optimizer of the same number are judged together: loaded together, they must have the same names. In an
optimizer names stand twice, in its state and in the lists of its parameter groups.
"""

from collections.abc import Hashable, Iterable, Iterator
from pathlib import PurePosixPath
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
)
from ckptfix.checkpoint.sharded import ShardedState
from ckptfix.operations.findings import (
    Finding,
    FlatParameters,
    MismatchedNames,
    NestedPrefix,
    WrapperPrefix,
)

STATE_DICT = "state dict"
"""The kind of a place where names are the keys of tensors."""


class _Place(NamedTuple):
    """A place of names in one of the folders."""

    state: ShardedState
    scope: NameScope


def diagnose_sharded_names(
    states: Iterable[ShardedState], doubled: frozenset[PurePosixPath]
) -> list[Finding]:
    """Find nested, single and mismatched wrappers in every folder that is no double."""
    units: dict[object, list[_Place]] = {}
    findings: list[Finding] = []
    for state in states:
        if state.path in doubled:
            continue
        flat = tuple(name for scope in state.scopes for name in scope.names if is_flat_name(name))
        if flat:
            findings.append(FlatParameters(path=state.metadata_path, tensors=tuple(dict.fromkeys(flat))))
        units.setdefault(unit_of(state), []).extend(
            _Place(state, scope) for scope in state.scopes if scope.names
        )
    judged = [(_reference(unit), unit) for unit in units.values() if unit]
    # One answer for all: renamed differently, equal models would look like doubles afterwards.
    nested = [(reference, unit) for reference, unit in judged if is_nested(reference.scope.chain)]
    to_bare = bool(nested) and all(_has_bare(reference, unit) for reference, unit in nested)
    for reference, unit in judged:
        findings += _judge(reference, unit, to_bare)
    return findings


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


def _judge(first: _Place, unit: list[_Place], to_bare: bool) -> Iterator[Finding]:
    models = [first, *(place for place in unit if place is not first and place.scope.kind == STATE_DICT)]
    names = {id(model): _unwrapped(model) for model in models}
    exact = [(model, frozenset(model.scope.names)) for model in models]
    for place in unit:
        reference = _own_model(place, exact, first)
        chain, known = reference.scope.chain, names[id(reference)]
        target = chain
        if is_nested(chain):
            is_alike = reference is first or names[id(first)] >= known
            target = () if to_bare and is_alike else collapse(chain)
        path, scope = place.state.metadata_path, place.scope
        belongs = _unwrapped(place) <= known  # the optimizer is that model's
        is_follower = place is reference or scope.kind != STATE_DICT  # else a model of its own, an average
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
        elif is_nested(scope.chain):
            yield NestedPrefix(
                path=path,
                scope=str(scope),
                chain=scope.chain,
                target=target if belongs and (is_follower or to_bare) else collapse(scope.chain),
                names=len(scope.names),
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
