"""Which entries go and which move: drops of doubles, and the numbers that change by them."""

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
    for finding in draft.findings:
        if isinstance(finding, DoubledModel) and finding.path in draft.unsafe:
            draft.stay(finding.code, finding.path, "a file with an unsafe pickle is never edited")
        elif isinstance(finding, DoubledModel) and not finding.sampled:
            _drop(draft, finding.path, finding.original, finding.code, Safety.SAFE)
            dropped.add(finding.path)
    for role in sorted(draft.policy.drops, key=lambda role: role.value):
        families = draft.folder.entries(role)
        if not families and role in draft.policy.keep:
            draft.stay("identical-states", PurePosixPath(role.value), "the folder has no such entries")
        for entries in families:
            for finding in _surplus(draft, role, entries, dropped):
                _drop(draft, finding.path, finding.original, finding.code, Safety.LOSSY)
                dropped.add(finding.path)
    return frozenset(dropped)


def _surplus(
    draft: Draft, role: Role, entries: tuple[Component, ...], dropped: set[PurePosixPath]
) -> list[IdenticalModels | IdenticalStates]:
    """Return which equal entries go so that as many as the user said remain."""
    paths = {entry.path for entry in entries}
    copies: list[IdenticalModels | IdenticalStates] = [
        finding
        for finding in draft.findings
        if isinstance(finding, IdenticalModels | IdenticalStates)
        and finding.path in paths - draft.unsafe
        and not finding.sampled
    ]
    left = len(paths - dropped)
    want = draft.policy.keep.get(role)
    if want is None:
        return copies  # --allow: every proven copy
    surplus = left - want
    code = "identical-models" if role is Role.MODEL else "identical-states"
    if surplus <= 0:
        if surplus < 0:
            draft.stay(code, entries[0].path, f"{want} {role.value} asked for, the folder has {left}")
        return []
    if surplus > len(copies):
        reason = f"{want} {role.value} asked for, {left} are here and {left - len(copies)} of them differ"
        draft.stay(code, entries[-1].path, reason)
        return []
    if surplus < len(copies) and len({finding.original for finding in copies}) > 1:
        reason = f"{len(copies)} copies of different entries, {surplus} would have to go: which is not clear"
        draft.stay(code, entries[-1].path, reason)
        return []
    return copies[len(copies) - surplus :]


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
                    draft.add(Renumber(source=entry.path, target=target), (code,), safety, (entry.path,))


def _drop(draft: Draft, path: PurePosixPath, kept: PurePosixPath, code: str, safety: Safety) -> None:
    action = DropEntry(path=path, kept=kept, size=draft.components[path].size)
    draft.add(action, (code,), safety, (path, kept))
