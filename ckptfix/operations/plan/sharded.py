"""Which names in DCP folders change, and by which map.

All folders change together or none does: a model, its optimizer and its copies would not fit each other otherwise.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath

from ckptfix.checkpoint.folder import NameScope
from ckptfix.checkpoint.keys import (
    DDP_CHAIN,
    KeyMap,
    common_wrappers,
    without_private_wrappers,
)
from ckptfix.checkpoint.sharded import ShardedState
from ckptfix.operations.findings import MismatchedNames, NestedPrefix, WrapperPrefix
from ckptfix.operations.plan.draft import Draft
from ckptfix.operations.plan.sharded_objections import PlaceMaps, objections
from ckptfix.operations.policy import Keys
from ckptfix.operations.steps import RewriteNames, Safety


def plan_sharded_names(draft: Draft, dropped: frozenset[PurePosixPath]) -> None:
    """Plan the renames in all DCP folders that stay."""
    kept = [state for state in draft.sharded if state.path not in dropped]
    maps = {state.path: own for state in kept if (own := _key_maps(draft, state))}
    if not maps:
        return
    renamed = [state for state in kept if state.path in maps]
    objection = next(objections(draft, kept, maps), None)
    for state in renamed:
        code = _code_of(draft, state)
        if objection is not None:
            draft.stay(code, (state.metadata_path,), objection)
            continue
        changes = list(_changes(state, maps[state.path]))
        action = RewriteNames(
            path=state.metadata_path,
            maps=maps[state.path],
            add_format=False,
            renames=len(changes),
            example=changes[0],
        )
        asked = draft.policy.keys is not Keys.AUTO or code in draft.policy.allow
        safety = Safety.LOSSY if asked else Safety.SAFE
        draft.add(action, code, safety, tuple(state.files), renamed[0].metadata_path)


def _key_maps(draft: Draft, state: ShardedState) -> PlaceMaps:
    found = {
        finding.scope: finding
        for finding in draft.findings_of(state.metadata_path)
        if isinstance(finding, NestedPrefix | MismatchedNames)
    }
    maps: PlaceMaps = {}
    for scope in state.scopes:
        key_map = _asked_for(draft, state, scope)
        if key_map is None and (finding := found.get(str(scope))) is not None:
            key_map = KeyMap(remove=finding.chain, insert=finding.target)
        if key_map is not None and any(key_map(name) != name for name in scope.names):
            maps[scope.path, scope.kind] = key_map
    return maps


def _asked_for(draft: Draft, state: ShardedState, scope: NameScope) -> KeyMap | None:
    """Return the map that the user's own words give, by ``--keys`` or ``--allow wrapper-prefix``, if any."""
    policy = draft.policy
    if policy.keys is Keys.AUTO and WrapperPrefix.code not in policy.allow:
        return None
    is_damage = (state.metadata_path, str(scope)) in draft.nested
    if not policy.wants(NestedPrefix.code if is_damage else WrapperPrefix.code):
        return None
    inner = common_wrappers(map(without_private_wrappers, scope.names))
    return KeyMap(remove=inner, insert=DDP_CHAIN if policy.keys is Keys.DDP else (), inner=True)


def _changes(state: ShardedState, maps: PlaceMaps) -> Iterator[tuple[str, str]]:
    for scope in state.scopes:
        key_map = maps.get((scope.path, scope.kind))
        for name in scope.names if key_map is not None else ():
            if key_map is not None and (new := key_map(name)) != name:
                yield name, new


def _code_of(draft: Draft, state: ShardedState) -> str:
    kinds = {type(finding) for finding in draft.findings_of(state.metadata_path)}
    order = (NestedPrefix, MismatchedNames, WrapperPrefix)
    return next((kind.code for kind in order if kind in kinds), WrapperPrefix.code)
