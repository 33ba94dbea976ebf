"""Which names change, and by which map; and why a file keeps its names although they are wrong."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from ckptfix.checkpoint.folder import Component, NameScope
from ckptfix.checkpoint.keys import DDP_CHAIN, KeyMap, collisions, common_wrappers, without_private_wrappers
from ckptfix.formats.safetensors_file import METADATA_KEY, SafetensorsFile
from ckptfix.operations.diagnose.names import ScopeKey, chains, scope_key
from ckptfix.operations.findings import MissingShard, NestedPrefix, NoFormatMetadata, WrapperPrefix
from ckptfix.operations.plan.draft import Draft, Family, family_of
from ckptfix.operations.policy import Keys
from ckptfix.operations.steps import RewriteNames, Safety


def plan_names(draft: Draft, dropped: frozenset[PurePosixPath]) -> Mapping[ScopeKey, KeyMap]:
    """Plan the renames and return the maps of those that will happen."""
    joint = _JointNames(draft)
    incomplete = _incomplete_families(draft)
    key_maps = _key_maps(draft, joint)
    formatless = {
        finding.path
        for finding in draft.findings
        if isinstance(finding, NoFormatMetadata) and "no-format-metadata" in draft.policy.allow
    }
    happening: dict[ScopeKey, KeyMap] = {}
    for component in draft.folder.components:
        if component.path in dropped:
            continue
        keys = [scope_key(component, scope) for scope in component.scopes]
        own = {key: key_maps[key] for key in keys if key in key_maps}
        adds_format = component.path in formatless
        if not own and not adds_format:
            continue
        code = _code_of(draft, component, own)
        if own and (objection := _objection(draft, component, own, joint, incomplete)):
            draft.stay(code, component.path, objection)
            continue
        _rewrite(draft, component, own, adds_format, code)
        happening.update(own)
    return happening


def _key_maps(draft: Draft, joint: "_JointNames") -> dict[ScopeKey, KeyMap]:
    chain_of = chains(draft.folder)
    result: dict[ScopeKey, KeyMap] = {}
    nested = {
        (finding.path, finding.scope): finding
        for finding in draft.findings
        if isinstance(finding, NestedPrefix)
    }
    keys = draft.policy.keys
    strip_single = "wrapper-prefix" in draft.policy.allow and draft.policy.wants("wrapper-prefix")
    for component in draft.folder.components:
        for scope in component.scopes:
            key = scope_key(component, scope)
            chain = chain_of[key]
            is_state_dict = scope.kind == "state dict"
            finding = nested.get((component.path, str(scope)))
            if is_state_dict and (keys is not Keys.AUTO or strip_single):
                # Private wrappers go first: what they hid may be a wrapper that every name carries.
                insert = DDP_CHAIN if keys is Keys.DDP else ()
                key_map = KeyMap(remove=joint.inner_chain(component, scope), insert=insert, inner=True)
            elif chain and (keys is not Keys.AUTO or strip_single):
                key_map = KeyMap(remove=chain, insert=DDP_CHAIN if keys is Keys.DDP else ())
            elif finding is not None:
                key_map = KeyMap(remove=chain, insert=finding.target)
            else:
                continue
            if any(key_map(fqn) != fqn for fqn in scope.names):
                result[key] = key_map
    return result


def _rewrite(
    draft: Draft, component: Component, key_maps: Mapping[ScopeKey, KeyMap], adds_format: bool, code: str
) -> None:
    changes = [
        (fqn, new)
        for scope in component.scopes
        if (key_map := key_maps.get(scope_key(component, scope))) is not None
        for fqn in scope.names
        if (new := key_map(fqn)) != fqn
    ]
    is_safetensors = isinstance(component.content, SafetensorsFile)
    action = RewriteNames(
        path=component.path,
        maps={(path, kind): key_map for (_, path, kind), key_map in key_maps.items()},
        add_format=is_safetensors,  # free where the header is rewritten anyway
        renames=len(changes),
        example=changes[0] if changes else None,
    )
    asked = draft.policy.keys is not Keys.AUTO or code in draft.policy.allow or adds_format
    draft.add(action, (code,), Safety.LOSSY if asked else Safety.SAFE, (component.path,))


def _code_of(draft: Draft, component: Component, key_maps: Mapping[ScopeKey, KeyMap]) -> str:
    if not key_maps:
        return NoFormatMetadata.code
    kinds = {type(finding) for finding in draft.findings_of(component.path)}
    return NestedPrefix.code if NestedPrefix in kinds else WrapperPrefix.code


def _objection(
    draft: Draft,
    component: Component,
    key_maps: Mapping[ScopeKey, KeyMap],
    joint: "_JointNames",
    incomplete: frozenset[Family | None],
) -> str | None:
    """Return why the names of a file must stay, or None when they can change."""
    for scope in component.scopes:
        key_map = key_maps.get(scope_key(component, scope))
        if key_map is not None and (objection := joint.objection(component, scope, key_map)):
            return objection
    if component.path in draft.unsafe:
        return "a file with an unsafe pickle is never edited"
    if family_of(component) in incomplete:
        return "a shard is missing or unreadable, its names could tell otherwise"
    return None


class _JointNames:
    """The names that must stay distinct: of all shards of a model together, else of one dict alone.

    What is asked about them is computed once a model: with hundreds of shards, once a shard would be quadratic.
    """

    def __init__(self, draft: Draft) -> None:
        self.names: dict[object, list[str]] = {}
        for component in draft.folder.components:
            for scope in component.scopes:
                self.names.setdefault(self._group(component, scope), []).extend(scope.names)
        self.inner_chains: dict[object, tuple[str, ...]] = {}
        self.objections: dict[object, str | None] = {}

    @staticmethod
    def _group(component: Component, scope: NameScope) -> object:
        return family_of(component) or component.path, scope.path, scope.kind

    def inner_chain(self, component: Component, scope: NameScope) -> tuple[str, ...]:
        """Return the wrappers that every name begins with once private ones are gone."""
        group = self._group(component, scope)
        if group not in self.inner_chains:
            self.inner_chains[group] = common_wrappers(map(without_private_wrappers, self.names[group]))
        return self.inner_chains[group]

    def objection(self, component: Component, scope: NameScope, key_map: KeyMap) -> str | None:
        """Return why these names cannot be mapped, or None when they can."""
        group = self._group(component, scope)
        if (group, key_map) not in self.objections:
            self.objections[group, key_map] = _collision(self.names[group], key_map)
        return self.objections[group, key_map]


def _collision(names: Sequence[str], key_map: KeyMap) -> str | None:
    for first, second, new in collisions(names, key_map):
        return f"{first!r} and {second!r} would both become {new!r}"
    renamed = [key_map(fqn) for fqn in names]
    if METADATA_KEY in renamed:
        return f"a name would become {METADATA_KEY!r}"
    if key_map.inner and common_wrappers(renamed) != key_map.insert:
        return "without its inner wrappers every name would begin with a wrapper again: what is real is not clear"
    return None


def _incomplete_families(draft: Draft) -> frozenset[Family | None]:
    """Return the sharded models of which a shard is missing or unreadable."""
    lost = [finding.path for finding in draft.all_findings if isinstance(finding, MissingShard)]
    families: dict[Family | None, bool] = {}
    for component in draft.folder.components:
        family = family_of(component)
        families[family] = families.get(family, False) or component.problem is not None
    return frozenset(
        family
        for family, is_broken in families.items()
        if family is not None
        and (
            is_broken
            or any(str(path).startswith(f"{family[0]}-") and path.suffix == family[1] for path in lost)
        )
    )
