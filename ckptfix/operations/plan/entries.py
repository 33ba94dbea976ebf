"""Which entries go and which move: drops of doubles, and the numbers that change by them."""

from collections.abc import Mapping
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import Component
from ckptfix.operations.diagnose.entries import GAPLESS_ROLES, renumbered
from ckptfix.operations.findings import DoubledModel, EntryGap, IdenticalModels, IdenticalStates
from ckptfix.operations.plan.draft import Draft
from ckptfix.operations.steps import DropEntry, Renumber, Safety


def plan_drops(draft: Draft) -> frozenset[PurePosixPath]:
    """Plan which entries go, and return their files."""
    dropped: set[PurePosixPath] = set()
    listed = {name: group.index_path for group in draft.groups for name in group.listed.values()}
    for finding in draft.findings:
        if not isinstance(finding, DoubledModel) or finding.sampled:
            continue
        if finding.path in draft.unsafe:
            draft.stay(finding.code, (finding.path,), "a file with an unsafe pickle is never edited")
        elif str(finding.path) in listed:
            draft.stay(finding.code, (finding.path,), f"{listed[str(finding.path)]} names it")
        else:
            _drop(draft, finding.path, finding.original, finding.code, Safety.SAFE)
            dropped.add(finding.path)
    for role in sorted(draft.policy.drops, key=lambda role: role.value):
        families = draft.folder.entries(role)
        if not families and role in draft.policy.keep:
            draft.stay(_code(role), (PurePosixPath(role.value),), "the folder has no such entries")
        for entries in families:
            for finding in _surplus(draft, role, entries, dropped):
                _drop(draft, finding.path, finding.original, finding.code, Safety.LOSSY)
                dropped.add(finding.path)
    return frozenset(dropped)


def _surplus(
    draft: Draft, role: Role, entries: tuple[Component, ...], dropped: set[PurePosixPath]
) -> list[IdenticalModels | IdenticalStates]:
    """Return which equal entries go so that as many as the user said remain."""
    position = {entry.path: entry.name.index for entry in entries}
    copies = sorted(
        (
            finding
            for finding in draft.findings
            if isinstance(finding, IdenticalModels | IdenticalStates)
            and finding.path in position.keys() - draft.unsafe
            and not finding.sampled
        ),
        key=lambda finding: position[finding.path],
    )
    want = draft.policy.keep.get(role)
    if want is None:
        return copies  # --allow: every proven copy
    left = len(position.keys() - dropped)
    surplus = left - want
    if surplus == 0 or not draft.policy.wants(_code(role)):
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


def _code(role: Role) -> str:
    return IdenticalModels.code if role is Role.MODEL else IdenticalStates.code


def plan_moves(draft: Draft, dropped: frozenset[PurePosixPath]) -> None:
    """Plan the moves that close the gaps which drops leave, or which were there."""
    close_gaps = "entry-gap" in draft.policy.allow and draft.policy.wants("entry-gap")
    gaps = {finding.path for finding in draft.findings if isinstance(finding, EntryGap)}
    for role in GAPLESS_ROLES + tuple(draft.policy.drops - set(GAPLESS_ROLES)):
        for entries in draft.folder.entries(role):
            has_gap = close_gaps and any(entry.path in gaps for entry in entries)
            if not has_gap and not any(entry.path in dropped for entry in entries):
                continue
            positions = renumbered(entries, dropped)
            for number, entry in enumerate(entry for entry in entries if entry.path in positions):
                position = number if has_gap else positions[entry.path]
                if position != entry.name.index:
                    target = PurePosixPath(str(entry.name.at(position)))
                    code = "entry-gap" if has_gap else "shifted-entries"
                    safety = Safety.LOSSY if has_gap else Safety.SAFE
                    draft.add(Renumber(source=entry.path, target=target), code, safety, (entry.path,))


def _drop(draft: Draft, path: PurePosixPath, kept: PurePosixPath, code: str, safety: Safety) -> None:
    action = DropEntry(path=path, kept=kept, size=draft.components[path].size)
    draft.add(action, code, safety, (path, kept))
