"""Plan of a repair: the steps that follow from findings and a policy.

Planning is pure: the same diagnosis and policy give the same plan, and no file changes. The keys of
all files of a model change by one map: a model that is renamed in part would load wrong.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from ckptfix.checkpoint.folder import Component, NameScope
from ckptfix.checkpoint.keys import (
    DDP_CHAIN,
    KeyMap,
    collisions,
    common_wrappers,
    without_private_wrappers,
)
from ckptfix.checkpoint.model_files import ModelFiles
from ckptfix.checkpoint.pairing import strip_wrappers
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.dcp_folders import is_flat
from ckptfix.diagnosis.equal_entries import GAPLESS_ROLES, Numbered, renumbered
from ckptfix.diagnosis.findings.base import Action
from ckptfix.diagnosis.findings.catalogue import CODES
from ckptfix.diagnosis.findings.damaged import (
    NoFormatMetadata,
    TrailingBytes,
)
from ckptfix.diagnosis.findings.duplicates import (
    DoubledModel,
    DoubledStates,
    EntryGap,
    IdenticalModels,
    IdenticalStates,
    NestedPrefix,
    SurplusStates,
    WrapperPrefix,
)
from ckptfix.diagnosis.findings.load_faults import DeadAdapter, SeveralAdapters, UnusedKeys
from ckptfix.diagnosis.findings.sharded import (
    IndexMismatch,
    IndexOfOtherShards,
    UndecidedIndex,
)
from ckptfix.diagnosis.policy import Keys, Policy
from ckptfix.diagnosis.wrapped_keys import NAMED_ROLES, ScopeKey, scope_key
from ckptfix.formats.safetensors_file import METADATA_KEY, SafetensorsFile
from ckptfix.repairs.plan_dcp import plan_dcp_names
from ckptfix.repairs.plan_families import plan_families
from ckptfix.repairs.steps import (
    Draft,
    DropEntry,
    Renumber,
    RewriteNames,
    Safety,
    Trim,
    WriteIndex,
)
from ckptfix.wording import count_of, list_names

Maps = Mapping[ScopeKey, KeyMap]


def make_plan(case: Case, policy: Policy) -> Draft:
    """Plan the repair of a diagnosed folder.

    Drops come first, so that a dropped file's recipe names the kept file as it was; moves come
    last, so that every other step names files as the user knows them.
    """
    draft = Draft(case, policy)
    dropped = plan_drops(draft)
    aside = plan_families(draft)
    plan_trims(draft, dropped | aside)
    maps = plan_names(draft, dropped | aside)
    if draft.sharded:
        plan_dcp_names(draft, dropped)
    plan_indexes(draft, maps, aside)
    plan_moves(draft, dropped)
    if policy.adapter and not any(isinstance(finding, DeadAdapter) for finding in draft.findings):
        path = PurePosixPath("adapter_model.safetensors")
        draft.stay(DeadAdapter.code, (path,), f"no key has the adapter name {policy.adapter!r}")
    _hint_at_options(draft)
    return draft


def _hint_at_options(draft: Draft) -> None:
    """Note the codes named with ``--only`` that need another option, too."""
    done = {code for step in draft.steps for code in step.fixes} | {
        stay.code for stay in draft.unplanned
    }
    for code in sorted(draft.policy.only - done):
        paths = [finding.path for finding in draft.findings if finding.code == code]
        if paths and CODES[code].action is Action.ASK:
            draft.stay(code, paths, f"it also needs {CODES[code].option}")


def drop_objection(draft: Draft, path: PurePosixPath) -> str | None:
    """Return why an entry must not be dropped, or why the later entries must not move; None when
    both may.
    """
    state = draft.states.get(path)
    if not draft.unsafe.isdisjoint(draft.files_of(path)):
        return "a file with an unsafe pickle is never edited"
    if state is not None and state.is_linked:
        return "it is a symbolic link to a folder: repair that folder"
    if state is not None:
        others = sorted(
            str(file) for file in state.files.keys() - {*state.named, state.metadata_path}
        )
        if others:
            return f"it also holds {list_names(others)}, which its .metadata does not list"
    behind = [member for member in _family(draft, path) if member != path]
    return (
        _own_journal(draft, (path, *behind))
        or _linked(draft, behind)
        or _needed(draft, (path, *behind), path)
    )


def move_objection(draft: Draft, entries: Sequence[Numbered]) -> str | None:
    """Return why none of these entries may move, None when they may."""
    paths = [entry.path for entry in entries]
    return _own_journal(draft, paths) or _linked(draft, paths) or _needed(draft, paths, None)


def _family(draft: Draft, path: PurePosixPath) -> tuple[PurePosixPath, ...]:
    """Return an entry and the later ones, which move when it is dropped."""
    for role in {entry.role for entry in draft.folder.components} | {
        state.name.role for state in draft.states.values() if state.name is not None
    }:
        for entries in draft.case.entries(role):
            own = next((entry.name.index for entry in entries if entry.path == path), None)
            if own is not None:
                return tuple(entry.path for entry in entries if entry.name.index >= own)
    return (path,)


def _own_journal(draft: Draft, paths: Iterable[PurePosixPath]) -> str | None:
    """Return why a folder with a journal of its own must stay: its undo looks for the folder where
    it was.
    """
    for path in paths:
        state = draft.states.get(path)
        if state is not None and state.journals:
            return (
                f"{path} was repaired separately and has its own journal: undo that repair, or "
                f"delete {path}/.ckptfix"
            )
    return None


def _linked(draft: Draft, paths: Iterable[PurePosixPath]) -> str | None:
    for path in paths:
        state = draft.states.get(path)
        if state is not None and state.is_linked:
            return f"{path} would have to move, but it is a symbolic link to a folder"
    return None


def _needed(
    draft: Draft, paths: Sequence[PurePosixPath], dropped: PurePosixPath | None
) -> str | None:
    """Return a sentence about a symbolic link that leads to one of these entries and would be
    broken without it.
    """
    gone = {file for path in paths for file in draft.files_of(path)} | set(paths)
    for link, places in draft.links.items():
        if dropped is not None and (link == dropped or dropped in link.parents):
            continue  # dropped, too
        if needed := sorted(places & gone):
            return f"the symbolic link {link} would break, because it points to {needed[0]}"
    return None


def plan_drops(draft: Draft) -> frozenset[PurePosixPath]:
    """Plan the drops, and return the files of the dropped entries."""
    dropped: set[PurePosixPath] = set()
    listed = {name: group.index_path for group in draft.groups for name in group.listed.values()}
    for finding in draft.findings:
        if not isinstance(finding, DoubledModel):
            continue
        if finding.path in draft.counted:
            draft.stay(finding.code, (finding.path,), draft.counted[finding.path])
        elif finding.sampled:
            continue
        elif objection := drop_objection(draft, finding.path):
            draft.stay(finding.code, (finding.path,), objection)
        elif str(finding.path) in listed:
            draft.stay(finding.code, (finding.path,), f"{listed[str(finding.path)]} lists it")
        else:
            _drop(draft, finding.path, finding.original, finding.code, Safety.SAFE)
            dropped.add(finding.path)
    dropped |= _plan_states(draft, dropped)
    for role in sorted(draft.policy.drops, key=lambda role: role.value):
        families = draft.case.entries(role)
        if not families and role in draft.policy.keep:
            draft.stay(_code(role), (PurePosixPath(role.value),), "the folder has no such entries")
        for entries in families:
            for finding in _surplus(draft, role, entries, dropped):
                _drop(draft, finding.path, finding.original, finding.code, Safety.LOSSY)
                dropped.add(finding.path)
    return frozenset(dropped)


def _plan_states(draft: Draft, dropped: set[PurePosixPath]) -> set[PurePosixPath]:
    """Plan the drops of states that go with duplicate models, all or none, and note what the user
    must decide.
    """
    identical: list[IdenticalStates] = [
        finding
        for finding in draft.findings
        if isinstance(finding, DoubledStates | SurplusStates)
        and finding.role not in draft.policy.drops
    ]
    undecided: dict[Role, SurplusStates] = {}
    certain: list[DoubledStates] = []
    for finding in identical:
        if isinstance(finding, SurplusStates):
            undecided.setdefault(finding.role, finding)
        elif isinstance(finding, DoubledStates) and not finding.sampled:
            certain.append(finding)
    for role, first in undecided.items():
        paths = [finding.path for finding in identical if finding.role is role]
        option = f"--keep {role.value}=N, where N is the number in the script"
        draft.stay(first.code, paths, f"{first.order}; use {option}")
    objection = next(
        filter(None, (drop_objection(draft, finding.path) for finding in certain)), None
    )
    if draft.counted or not dropped.issuperset(draft.doubles):
        objection = "a duplicate model from the same save is kept"
    if certain and objection is not None:
        draft.stay(certain[0].code, [finding.path for finding in certain], objection)
        return set()
    for finding in certain:
        _drop(draft, finding.path, finding.original, finding.code, Safety.SAFE)
    return {finding.path for finding in certain}


def _surplus(
    draft: Draft, role: Role, entries: Sequence[Numbered], dropped: set[PurePosixPath]
) -> list[IdenticalModels | IdenticalStates]:
    """Return the equal entries to drop, so that as many remain as the user asked for."""
    position = {entry.path: entry.name.index for entry in entries}
    proven = sorted(
        (
            finding
            for finding in draft.case.findings
            if isinstance(finding, IdenticalModels | IdenticalStates)
            and _is_wanted(draft, role)
            and finding.path in position
            and not finding.sampled
        ),
        key=lambda finding: position[finding.path],
    )
    against = {finding.path: drop_objection(draft, finding.path) for finding in proven}
    copies = [finding for finding in proven if against[finding.path] is None]
    want = draft.policy.keep.get(role)
    if want is None:
        for finding in proven:
            if (objection := against[finding.path]) is not None:
                draft.stay(finding.code, (finding.path,), objection)
        return copies  # --allow: every proven copy
    left = len(position.keys() - dropped)
    surplus = left - want
    if surplus == 0 or not position.keys().isdisjoint(draft.counted) or not _is_wanted(draft, role):
        return []
    if surplus < 0:
        reason = f"{want} {role.value} requested, but the folder has {left}"
    elif surplus > len(copies):
        reason = (
            f"{want} {role.value} requested, but the folder has {left} with "
            f"{count_of(len(copies), 'removable duplicate')}"
        )
    elif surplus == len(copies) or _is_one_run(copies, position, dropped):
        return copies[len(copies) - surplus :]
    else:
        reason = f"it is unclear which {surplus} of {len(copies)} copies to delete"
    draft.stay(_code(role), (entries[-1].path,), reason)
    return []


def _is_one_run(
    copies: list[IdenticalModels | IdenticalStates],
    position: Mapping[PurePosixPath, int],
    dropped: set[PurePosixPath],
) -> bool:
    """Return whether an entry and its copies have consecutive numbers, so that no other model
    changes its position.
    """
    if len({finding.original for finding in copies}) != 1:
        return False
    places = sorted(
        position[path] for path in {copies[0].original, *(finding.path for finding in copies)}
    )
    between = {index for path, index in position.items() if path not in dropped}
    return [index for index in sorted(between) if places[0] <= index <= places[-1]] == places


def _is_wanted(draft: Draft, role: Role) -> bool:
    """Return whether the policy lets equal entries of a role be dropped."""
    kinds = (
        (IdenticalModels,)
        if role is Role.MODEL
        else (IdenticalStates, DoubledStates, SurplusStates)
    )
    return any(draft.policy.wants(kind.code) for kind in kinds)


def _code(role: Role) -> str:
    return IdenticalModels.code if role is Role.MODEL else IdenticalStates.code


def plan_moves(draft: Draft, dropped: frozenset[PurePosixPath]) -> None:
    """Plan the moves that close the gaps in numbers, old ones and those that drops leave."""
    close_gaps = "entry-gap" in draft.policy.allow and draft.policy.wants("entry-gap")
    gaps = {finding.path for finding in draft.findings if isinstance(finding, EntryGap)}
    for role in GAPLESS_ROLES + tuple(draft.policy.drops - set(GAPLESS_ROLES)):
        for entries in draft.case.entries(role):
            has_gap = close_gaps and any(entry.path in gaps for entry in entries)
            if not has_gap and not any(entry.path in dropped for entry in entries):
                continue
            if has_gap and (
                objection := _two_formats(draft, role, dropped) or move_objection(draft, entries)
            ):
                paths = [entry.path for entry in entries if entry.path in gaps]
                draft.stay("entry-gap", paths, objection)
                continue
            positions = renumbered(entries, dropped)
            for number, entry in enumerate(entry for entry in entries if entry.path in positions):
                position = number if has_gap else positions[entry.path]
                if position != entry.name.index:
                    target = PurePosixPath(str(entry.name.at(position)))
                    code = "entry-gap" if has_gap else "shifted-entries"
                    safety = Safety.LOSSY if has_gap else Safety.SAFE
                    draft.add(
                        Renumber(source=entry.path, target=target),
                        code,
                        safety,
                        draft.files_of(entry.path),
                    )


def _two_formats(draft: Draft, role: Role, dropped: frozenset[PurePosixPath]) -> str | None:
    """Return why no gap is closed in models whose formats have different numbers, None for other
    entries.
    """
    numbers: dict[Hashable, set[int]] = {}
    for entry in (entry for entries in draft.folder.entries(role) for entry in entries):
        if role is Role.MODEL and entry.path not in dropped:
            numbers.setdefault(entry.name.family, set()).add(entry.name.index)
    if all(first == second for first in numbers.values() for second in numbers.values()):
        return None
    return (
        "the models are in two formats with different numbers, so it is unclear which of them "
        "belong together"
    )


def _drop(
    draft: Draft, path: PurePosixPath, kept: PurePosixPath, code: str, safety: Safety
) -> None:
    state = draft.states.get(path)
    size = draft.components[path].size if state is None else state.size
    action = DropEntry(path=path, kept=kept, size=size, is_folder=state is not None)
    draft.add(action, code, safety, (*draft.files_of(path), *draft.files_of(kept)))


def plan_names(draft: Draft, dropped: frozenset[PurePosixPath]) -> Maps:
    """Plan the renames and return the key maps of the planned ones."""
    adds_format = {
        finding.path
        for finding in draft.findings
        if type(finding) is NoFormatMetadata and finding.code in draft.policy.allow
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
        if renamed and objection is None:
            objection = draft.undecided(member.path for member in renamed)
        if renamed and bundles.get(group.members[0].path) in counted:
            # Other keys would change the verdict about the duplicates, and so the plan.
            objection = (
                "a duplicate with the same keys is kept, because the requested number of models "
                "includes it"
            )
        if objection is not None:
            draft.stay(
                _code_of(draft, group, renamed[0]), [member.path for member in renamed], objection
            )
            maps, own = {}, {}
        first = group.members[0].path
        bundle = bundles.get(first, first)
        for member in group.members:
            adds = member.path in adds_format
            if member.path in own:
                _rewrite(draft, group, member, own[member.path], adds, bundle)
            elif adds:
                _rewrite(draft, group, member, {}, adds, None)
        happening.update(maps)
    return happening


def _bundles(draft: Draft) -> dict[PurePosixPath, PurePosixPath]:
    """Return for each numbered model the first one with the same keys and shapes, when there are
    several.

    Renamed in part, two intentional models of one architecture would look like duplicates, or
    related.
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
    if group.is_left_over:
        return {}
    result: dict[ScopeKey, KeyMap] = {}
    for_loader = _map_for_loader(draft, group)
    # One answer for all shards of a model.
    asked: dict[tuple[tuple[str, ...], str], KeyMap | None] = {}
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
            if key_map is None and not scope.path:
                key_map = for_loader
            if key_map is not None and any(key_map(fqn) != fqn for fqn in scope.names):
                result[scope_key(member, scope)] = key_map
    return result


def _unused_keys(draft: Draft, group: ModelFiles) -> UnusedKeys | None:
    """Return the finding about keys that a loader does not look for, in all files of a model
    together.
    """
    path = group.index_path or group.members[0].path
    return next(
        (finding for finding in draft.findings_of(path) if isinstance(finding, UnusedKeys)), None
    )


def _map_for_loader(draft: Draft, group: ModelFiles) -> KeyMap | None:
    """Return the map to the keys that the loader looks for, None where only the user knows it."""
    finding, policy = _unused_keys(draft, group), draft.policy
    if finding is None:
        return None
    is_of_adapter = isinstance(finding, DeadAdapter)
    if is_of_adapter and policy.adapter and policy.adapter not in finding.names:
        names = f"; the file has {list_names(finding.names)}" if finding.names else ""
        draft.stay(
            finding.code,
            (finding.path,),
            f"no key has the adapter name {policy.adapter!r}{names}",
        )
        return None
    if not (
        finding.is_fixable or (is_of_adapter and policy.adapter) or finding.code in policy.allow
    ):
        return None
    if isinstance(finding, SeveralAdapters) and not policy.adapter:
        names = list_names(finding.names)
        draft.stay(
            finding.code,
            (finding.path,),
            f"the file has the adapters {names}; choose one with --adapter NAME",
        )
        return None
    return finding.key_map(policy.adapter or next(iter(finding.names), ""))


def _asked_for(
    draft: Draft, group: ModelFiles, member: Component, scope: NameScope
) -> KeyMap | None:
    """Return the key map that ``--keys`` or ``--allow wrapper-prefix`` asks for, if any."""
    policy = draft.policy
    if policy.keys is Keys.AUTO and WrapperPrefix.code not in policy.allow:
        return None
    chain = group.chain(scope)
    code = NestedPrefix.code if (member.path, str(scope)) in draft.nested else WrapperPrefix.code
    if member.role not in NAMED_ROLES or not policy.wants(code):
        return None
    insert = DDP_CHAIN if policy.keys is Keys.DDP else ()
    if scope.is_model or scope.kind != "state dict":
        # Private wrappers are removed first: a wrapper that every key carries may be hidden behind
        # them.
        inner = common_wrappers(map(without_private_wrappers, group.names(scope)))
        return KeyMap(remove=inner, insert=insert, inner=True)
    return KeyMap(remove=chain, insert=insert) if chain else None


def _objection(draft: Draft, group: ModelFiles, maps: Maps) -> str | None:
    """Return why the keys of a model must stay, or None when they can change."""
    first = group.members[0]
    if draft.folder.only is not None and first.name.shard is not None:
        return "it is one shard of a model: repair the folder"
    if _is_one_of_several(draft, first) and draft.policy.keys is Keys.AUTO:
        return "the checkpoint's other models are needed to judge its keys: repair the folder"
    if first.path in draft.doubles:
        return f"it is a duplicate of {draft.doubles[first.path]}; remove the duplicate first"
    if shared := [member.path for member in group.members if draft.memberships[member.path] > 1]:
        return f"two indexes list {shared[0]}"
    if unsafe := [member.path for member in group.members if member.path in draft.unsafe]:
        return f"a file with an unsafe pickle is never edited: {unsafe[0]}"
    if flat := [member.path for member in group.members if is_flat(member)]:
        return (
            f"{flat[0]} has keys of FSDP's flattened parameters, which only the run itself can "
            "resolve"
        )
    if not group.is_whole:
        return "a shard is missing or unreadable, and its keys might contradict the rename"
    for finding in draft.case.findings:
        if isinstance(finding, UndecidedIndex) or finding.path != group.index_path:
            continue  # without an index no loader finds the shards, whatever their keys are
        if isinstance(finding, IndexMismatch) and not finding.is_fixable:
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
    """Return whether the target is one model of a checkpoint that has several."""
    return (
        draft.folder.only is not None and bool(draft.folder.ranks) and component.role is Role.MODEL
    )


def _collision(names: Sequence[str], key_map: KeyMap) -> str | None:
    for first, second, new in collisions(names, key_map):
        return f"{first!r} and {second!r} would both become {new!r}"
    renamed = [key_map(fqn) for fqn in names]
    if METADATA_KEY in renamed:
        return f"a key would become {METADATA_KEY!r}"
    if key_map.inner and common_wrappers(renamed) != key_map.insert:
        return (
            "without the inner wrappers, every key would still start with a wrapper, so it is "
            "unclear which wrappers are real"
        )
    return None


def _rewrite(
    draft: Draft,
    group: ModelFiles,
    component: Component,
    maps: Maps,
    adds_format: bool,
    bundle: PurePosixPath | None,
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
        add_format=is_safetensors,  # costs nothing where the header is rewritten anyway
        renames=len(changes),
        example=changes[0] if changes else None,
    )
    code = _code_of(draft, group, component) if changes else NoFormatMetadata.code
    policy = draft.policy
    asked = (
        policy.keys is not Keys.AUTO or code in policy.allow or adds_format or bool(policy.adapter)
    )
    draft.add(action, code, Safety.LOSSY if asked else Safety.SAFE, (component.path,), bundle)


def _code_of(draft: Draft, group: ModelFiles, component: Component) -> str:
    if (unused := _unused_keys(draft, group)) is not None:
        return unused.code
    codes = {finding.code for finding in draft.findings_of(component.path)}
    return NestedPrefix.code if NestedPrefix.code in codes else WrapperPrefix.code


def plan_trims(draft: Draft, dropped: frozenset[PurePosixPath]) -> None:
    """Plan to cut off the bytes that follow the content of files that stay."""
    for finding in draft.findings:
        if not isinstance(finding, TrailingBytes) or finding.path in dropped:
            continue
        if finding.code not in draft.policy.allow:
            continue
        if finding.path in draft.unsafe:
            draft.stay(
                finding.code, (finding.path,), "a file with an unsafe pickle is never edited"
            )
            continue
        action = Trim(path=finding.path, size=finding.end, extra=finding.extra)
        draft.add(action, finding.code, Safety.LOSSY, (finding.path,))


def plan_indexes(draft: Draft, maps: Maps, aside: Collection[PurePosixPath]) -> None:
    """Plan the indexes that follow renamed shards, and those that contradict the headers.

    ``aside``: the families that no loader shall find.
    """
    broken = {
        finding.path: finding for finding in draft.findings if isinstance(finding, IndexMismatch)
    }
    renamed = {key[0] for key in maps}
    for group in draft.groups:
        if group.index_path is None or group.is_left_over or group.index_path in aside:
            continue
        finding = broken.get(group.index_path)
        is_kept = (
            isinstance(finding, UndecidedIndex) and str(group.index_path) in draft.policy.families
        )
        is_chosen = isinstance(finding, IndexOfOtherShards) and finding.code in draft.policy.allow
        if finding is not None and not (finding.is_fixable or is_kept or is_chosen):
            draft.stay(finding.code, (group.index_path,), finding.advice)
            continue
        new_map = _weight_map(group, maps)
        is_renamed = any(member.path in renamed for member in group.members)
        if finding is None and not (is_renamed and group.index is not None):
            continue
        # Of a shard whose tensors another shard holds, too, no loader reads a byte.
        listed = set(new_map.values())
        action = WriteIndex(
            path=group.index_path,
            weight_map=new_map,
            total_size=sum(
                end - begin
                for shard in group.members
                if str(shard.path) in listed
                for begin, end in _ranges(shard)
            ),
            exists=group.index is not None,
        )
        unused = _unused_keys(draft, group)
        code = finding.code if finding is not None else (unused or NestedPrefix).code
        is_allowed = unused is not None and (
            draft.policy.adapter or unused.code in draft.policy.allow
        )
        asked = draft.policy.keys is not Keys.AUTO or bool(is_allowed) or is_kept
        safety = Safety.LOSSY if asked else Safety.SAFE
        reads = (group.index_path, *(shard.path for shard in group.members))
        draft.add(action, code, safety, reads, group.members[0].path if is_renamed else None)


def _weight_map(group: ModelFiles, maps: Maps) -> dict[str, str]:
    result: dict[str, str] = {}
    for shard in group.members:
        rename = (
            maps.get(scope_key(shard, shard.whole), KeyMap(remove=()))
            if shard.whole
            else KeyMap(remove=())
        )
        result.update((rename(tensor.fqn), str(shard.path)) for tensor in shard.tensors)
    return result


def _ranges(component: Component) -> list[tuple[int, int]]:
    return [tensor.data_offsets for tensor in component.tensors if tensor.data_offsets is not None]
