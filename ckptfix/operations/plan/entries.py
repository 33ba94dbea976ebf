"""Which entries go and which move: drops of doubles, and the numbers that change by them."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import Role
from ckptfix.operations.diagnose.entries import GAPLESS_ROLES, Numbered, renumbered
from ckptfix.operations.findings import (
    DoubledModel,
    DoubledStates,
    EntryGap,
    IdenticalModels,
    IdenticalStates,
    SurplusStates,
)
from ckptfix.operations.plan.draft import Draft
from ckptfix.operations.plan.entry_objections import drop_objection, move_objection
from ckptfix.operations.steps import DropEntry, Renumber, Safety


def plan_drops(draft: Draft) -> frozenset[PurePosixPath]:
    """Plan which entries go, and return their files."""
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
            draft.stay(finding.code, (finding.path,), f"{listed[str(finding.path)]} names it")
        else:
            _drop(draft, finding.path, finding.original, finding.code, Safety.SAFE)
            dropped.add(finding.path)
    dropped |= _plan_states(draft, dropped)
    for role in sorted(draft.policy.drops, key=lambda role: role.value):
        families = draft.entries(role)
        if not families and role in draft.policy.keep:
            draft.stay(_code(role), (PurePosixPath(role.value),), "the folder has no such entries")
        for entries in families:
            for finding in _surplus(draft, role, entries, dropped):
                _drop(draft, finding.path, finding.original, finding.code, Safety.LOSSY)
                dropped.add(finding.path)
    return frozenset(dropped)


def _plan_states(draft: Draft, dropped: set[PurePosixPath]) -> set[PurePosixPath]:
    """Plan which states go with the doubled models, all of them or none, and say what stays for the user to decide."""
    found: list[IdenticalStates] = [
        finding
        for finding in draft.findings
        if isinstance(finding, DoubledStates | SurplusStates) and finding.role not in draft.policy.drops
    ]
    undecided: dict[Role, SurplusStates] = {}
    certain: list[DoubledStates] = []
    for finding in found:
        if isinstance(finding, SurplusStates):
            undecided.setdefault(finding.role, finding)
        elif isinstance(finding, DoubledStates) and not finding.sampled:
            certain.append(finding)
    for role, first in undecided.items():
        paths = [one.path for one in found if one.role is role]
        option = f"--keep {role.value}=N"
        draft.stay(first.code, paths, f"{first.order}; say with {option} how many the script has")
    objection = next(filter(None, (drop_objection(draft, finding.path) for finding in certain)), None)
    if draft.counted or not dropped.issuperset(draft.doubles):
        objection = "a model that was saved with it twice stays"
    if certain and objection is not None:
        draft.stay(certain[0].code, [finding.path for finding in certain], objection)
        return set()
    for finding in certain:
        _drop(draft, finding.path, finding.original, finding.code, Safety.SAFE)
    return {finding.path for finding in certain}


def _surplus(
    draft: Draft, role: Role, entries: Sequence[Numbered], dropped: set[PurePosixPath]
) -> list[IdenticalModels | IdenticalStates]:
    """Return which equal entries go so that as many as the user said remain."""
    position = {entry.path: entry.name.index for entry in entries}
    proven = sorted(
        (
            finding
            for finding in draft.all_findings
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
        reason = f"{want} {role.value} asked for, the folder has {left}"
    elif surplus > len(copies):
        reason = f"{want} {role.value} asked for, {left} are here, of which {len(copies)} equal another"
    elif surplus == len(copies) or _is_one_run(copies, position, dropped):
        return copies[len(copies) - surplus :]
    else:
        reason = f"{surplus} of {len(copies)} copies would have to go: which is not clear"
    draft.stay(_code(role), (entries[-1].path,), reason)
    return []


def _is_one_run(
    copies: list[IdenticalModels | IdenticalStates],
    position: Mapping[PurePosixPath, int],
    dropped: set[PurePosixPath],
) -> bool:
    """Whether one entry and its copies follow one another: any may go, and none takes another model's place."""
    if len({finding.original for finding in copies}) != 1:
        return False
    places = sorted(position[path] for path in {copies[0].original, *(finding.path for finding in copies)})
    between = {index for path, index in position.items() if path not in dropped}
    return [index for index in sorted(between) if places[0] <= index <= places[-1]] == places


def _is_wanted(draft: Draft, role: Role) -> bool:
    """Whether equal entries of a role may go, whatever is known of them besides."""
    kinds = (IdenticalModels,) if role is Role.MODEL else (IdenticalStates, DoubledStates, SurplusStates)
    return any(draft.policy.wants(kind.code) for kind in kinds)


def _code(role: Role) -> str:
    return IdenticalModels.code if role is Role.MODEL else IdenticalStates.code


def plan_moves(draft: Draft, dropped: frozenset[PurePosixPath]) -> None:
    """Plan the moves that close the gaps which drops leave, or which were there."""
    close_gaps = "entry-gap" in draft.policy.allow and draft.policy.wants("entry-gap")
    gaps = {finding.path for finding in draft.findings if isinstance(finding, EntryGap)}
    for role in GAPLESS_ROLES + tuple(draft.policy.drops - set(GAPLESS_ROLES)):
        for entries in draft.entries(role):
            has_gap = close_gaps and any(entry.path in gaps for entry in entries)
            if not has_gap and not any(entry.path in dropped for entry in entries):
                continue
            if has_gap and (objection := move_objection(draft, entries)):
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
                        Renumber(source=entry.path, target=target), code, safety, draft.files_of(entry.path)
                    )


def _drop(draft: Draft, path: PurePosixPath, kept: PurePosixPath, code: str, safety: Safety) -> None:
    state = draft.states.get(path)
    size = draft.components[path].size if state is None else state.size
    action = DropEntry(path=path, kept=kept, size=size, is_folder=state is not None)
    draft.add(action, code, safety, (*draft.files_of(path), *draft.files_of(kept)))
