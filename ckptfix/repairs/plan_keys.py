"""Which names change, and by which map; and why files keep their names although they are wrong.

What is decided, is decided for all files of a model together: renamed in part, it would load wrong.
"""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import Component, NameScope
from ckptfix.checkpoint.groups import ModelFiles
from ckptfix.checkpoint.keys import DDP_CHAIN, KeyMap, collisions, common_wrappers, without_private_wrappers
from ckptfix.checkpoint.pairing import strip_wrappers
from ckptfix.diagnosis.dcp_folders import is_flat
from ckptfix.diagnosis.findings.damaged import IndexMismatch, NoFormatMetadata
from ckptfix.diagnosis.findings.duplicates import NestedPrefix, WrapperPrefix
from ckptfix.diagnosis.policy import Keys
from ckptfix.diagnosis.wrapped_keys import NAMED_ROLES, ScopeKey, scope_key
from ckptfix.formats.safetensors_file import METADATA_KEY, SafetensorsFile
from ckptfix.repairs.steps import Draft, RewriteNames, Safety

Maps = Mapping[ScopeKey, KeyMap]


def plan_names(draft: Draft, dropped: frozenset[PurePosixPath]) -> Maps:
    """Plan the renames and return the maps of those that will happen."""
    adds_format = {
        finding.path
        for finding in draft.findings
        if isinstance(finding, NoFormatMetadata) and finding.code in draft.policy.allow
    }
    bundles = _bundles(draft)
    counted = {bundles.get(path) for path in draft.counted}
    happening: dict[ScopeKey, KeyMap] = {}
    for group in draft.groups:
        if not group.members or group.members[0].path in dropped:
            continue
        maps = _key_maps(draft, group)
        own: dict[PurePosixPath, dict[ScopeKey, KeyMap]] = {}
        for key, key_map in maps.items():
            own.setdefault(key[0], {})[key] = key_map
        renamed = [member for member in group.members if member.path in own]
        objection = _objection(draft, group, maps) if renamed else None
        if renamed and bundles.get(group.members[0].path) in counted:
            # Other names would make another verdict of them, and so another plan.
            objection = "a duplicate of the same names stays, as the number of models asked for counts it"
        if objection is not None:
            draft.stay(_code_of(draft, renamed[0]), [member.path for member in renamed], objection)
            maps, own = {}, {}
        first = group.members[0].path
        bundle = bundles.get(first, first)
        for member in group.members:
            adds = member.path in adds_format
            if member.path in own:
                _rewrite(draft, member, own[member.path], adds, bundle)
            elif adds:
                _rewrite(draft, member, {}, adds, None)
        happening.update(maps)
    return happening


def _bundles(draft: Draft) -> dict[PurePosixPath, PurePosixPath]:
    """Return for each numbered model the first one with the same names and shapes, when there are several.

    Renamed in part, two intentional models of one architecture would look like doubles, or related.
    """
    bundles: dict[PurePosixPath, PurePosixPath] = {}
    firsts: dict[Hashable, PurePosixPath] = {}
    for entries in draft.folder.entries(Role.MODEL):
        for entry in entries:
            strip = strip_wrappers(entry)
            names = frozenset((strip(tensor.fqn), tensor.shape) for tensor in entry.tensors)
            bundles[entry.path] = firsts.setdefault(names, entry.path)
    return bundles


def _key_maps(draft: Draft, group: ModelFiles) -> dict[ScopeKey, KeyMap]:
    if group.stale_of is not None:
        return {}
    result: dict[ScopeKey, KeyMap] = {}
    asked: dict[tuple[tuple[str, ...], str], KeyMap | None] = {}  # by place: one answer for all shards
    for member in group.members:
        nested = {
            finding.scope: finding
            for finding in draft.findings_of(member.path)
            if isinstance(finding, NestedPrefix)
        }
        for scope in member.scopes:
            place = scope.path, scope.kind
            if place not in asked:
                asked[place] = _asked_for(draft, group, member, scope)
            key_map = asked[place]
            if key_map is None and (finding := nested.get(str(scope))) is not None:
                key_map = KeyMap(remove=finding.chain, insert=finding.target)
            if key_map is not None and any(key_map(fqn) != fqn for fqn in scope.names):
                result[scope_key(member, scope)] = key_map
    return result


def _asked_for(draft: Draft, group: ModelFiles, member: Component, scope: NameScope) -> KeyMap | None:
    """Return the map that the user's own words give, by ``--keys`` or ``--allow wrapper-prefix``, if any."""
    policy = draft.policy
    if policy.keys is Keys.AUTO and WrapperPrefix.code not in policy.allow:
        return None
    chain = group.chain(scope)
    code = NestedPrefix.code if (member.path, str(scope)) in draft.nested else WrapperPrefix.code
    if member.role not in NAMED_ROLES or not policy.wants(code):
        return None
    insert = DDP_CHAIN if policy.keys is Keys.DDP else ()
    if scope.is_model or scope.kind != "state dict":
        # Private wrappers go first: what they hid may be a wrapper that every name carries.
        inner = common_wrappers(map(without_private_wrappers, group.names(scope)))
        return KeyMap(remove=inner, insert=insert, inner=True)
    return KeyMap(remove=chain, insert=insert) if chain else None


def _objection(draft: Draft, group: ModelFiles, maps: Maps) -> str | None:
    """Return why the names of a model must stay, or None when they can change."""
    first = group.members[0]
    if draft.folder.only is not None and first.name.shard is not None:
        return "it is one shard of a model: repair the folder"
    if _is_one_of_several(draft, first) and draft.policy.keys is Keys.AUTO:
        return "whether its names are right shows in the other models of the checkpoint: repair the folder"
    if first.path in draft.doubles:
        return f"it is a duplicate of {draft.doubles[first.path]}; repair that first"
    if shared := [member.path for member in group.members if draft.memberships[member.path] > 1]:
        return f"two indexes name {shared[0]}"
    if unsafe := [member.path for member in group.members if member.path in draft.unsafe]:
        return f"a file with an unsafe pickle is never edited: {unsafe[0]}"
    if flat := [member.path for member in group.members if is_flat(member)]:
        return (
            f"{flat[0]} has names of FSDP's flattened parameters, of which only the run knows what they hold"
        )
    if not group.is_whole:
        return "a shard is missing or unreadable, its keys could show otherwise"
    for finding in draft.all_findings:
        if isinstance(finding, IndexMismatch) and finding.path == group.index_path and not finding.is_fixable:
            return f"{finding.path} and the shards disagree"
    asked: set[tuple[tuple[str, ...], str]] = set()
    for member in group.members:
        for scope in member.scopes:
            key_map = maps.get(scope_key(member, scope))
            if key_map is not None and (scope.path, scope.kind) not in asked:
                asked.add((scope.path, scope.kind))
                if collision := _collision(group.names(scope), key_map):
                    return collision
    return None


def _is_one_of_several(draft: Draft, component: Component) -> bool:
    """Whether a model of a checkpoint is looked at alone."""
    return draft.folder.only is not None and bool(draft.folder.ranks) and component.role is Role.MODEL


def _collision(names: Sequence[str], key_map: KeyMap) -> str | None:
    for first, second, new in collisions(names, key_map):
        return f"{first!r} and {second!r} would both become {new!r}"
    renamed = [key_map(fqn) for fqn in names]
    if METADATA_KEY in renamed:
        return f"a name would become {METADATA_KEY!r}"
    if key_map.inner and common_wrappers(renamed) != key_map.insert:
        return "without its inner wrappers every name would begin with a wrapper again: what is real is not clear"
    return None


def _rewrite(
    draft: Draft, component: Component, maps: Maps, adds_format: bool, bundle: PurePosixPath | None
) -> None:
    changes = [
        (fqn, new)
        for scope in component.scopes
        if (key_map := maps.get(scope_key(component, scope))) is not None
        for fqn in scope.names
        if (new := key_map(fqn)) != fqn
    ]
    is_safetensors = isinstance(component.content, SafetensorsFile)
    action = RewriteNames(
        path=component.path,
        maps={(path, kind): key_map for (_, path, kind), key_map in maps.items()},
        add_format=is_safetensors,  # free where the header is rewritten anyway
        renames=len(changes),
        example=changes[0] if changes else None,
    )
    code = _code_of(draft, component) if changes else NoFormatMetadata.code
    asked = draft.policy.keys is not Keys.AUTO or code in draft.policy.allow or adds_format
    draft.add(action, code, Safety.LOSSY if asked else Safety.SAFE, (component.path,), bundle)


def _code_of(draft: Draft, component: Component) -> str:
    kinds = {type(finding) for finding in draft.findings_of(component.path)}
    return NestedPrefix.code if NestedPrefix in kinds else WrapperPrefix.code
