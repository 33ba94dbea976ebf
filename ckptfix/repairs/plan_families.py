"""Plan that keeps one of the models that several saves left under one name: ``--keep FILE``.

The user says which save is wanted. That makes the files of all other saves superfluous: other
formats, indexes without their shards, and the shards that no index lists.
"""

from collections.abc import Set
from pathlib import PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.filenames import ModelName, parse_file_name
from ckptfix.checkpoint.model_files import ModelFiles
from ckptfix.diagnosis.findings.base import Finding
from ckptfix.diagnosis.findings.sharded import LeftoverIndex, StaleShard, UndecidedIndex
from ckptfix.diagnosis.findings.stored_twice import SecondFamily, StaleFamily
from ckptfix.repairs.steps import Draft, Safety, SetAside
from ckptfix.wording import list_names


class _Rival(NamedTuple):
    """Files of one save of a model: ``code`` of the finding about them, ``files`` the index
    first.
    """

    code: str
    model: tuple[ModelName | None, int]
    files: tuple[PurePosixPath, ...]


def _families(finding: Finding) -> tuple[PurePosixPath, ...]:
    """Return the files and indexes of one model that a finding is about; empty for any other
    finding.
    """
    if isinstance(finding, StaleFamily | SecondFamily):
        return finding.path, finding.preferred
    if isinstance(finding, LeftoverIndex):
        return finding.path, finding.file
    if isinstance(finding, StaleShard):
        return finding.path, finding.index
    if isinstance(finding, UndecidedIndex):
        model = _model_of(finding.path)
        # load_checkpoint_in_model takes the only index of a folder, of any model.
        return finding.path, *(path for path in finding.loads.values() if _model_of(path) == model)
    return ()


def _model_of(path: PurePosixPath) -> tuple[ModelName | None, int]:
    name = parse_file_name(path.name)
    return (name.model, name.index) if name is not None else (None, 0)


def plan_families(draft: Draft) -> frozenset[PurePosixPath]:
    """Plan to set aside all families of a model but the one that the user keeps, and return their
    files.
    """
    groups = {group.path: group for group in draft.groups}
    rivals: dict[PurePosixPath, _Rival] = {}
    for finding in draft.findings:
        paths = _families(finding)
        for path in paths:
            if isinstance(finding, StaleShard) and path == finding.path:
                # ``Copy of model-00001-of-00002.safetensors`` is of the model of the index, too.
                model, files = _model_of(finding.index), finding.about
            else:
                model, files = _model_of(path), _files_of_family(groups[path])
            rivals[path] = _Rival(finding.code, model, files)
        if finding.code in draft.policy.allow and paths and not draft.policy.families:
            draft.stay(finding.code, paths[:1], "choose what to keep with --keep FILE")
    aside: set[PurePosixPath] = set()
    for name in sorted(draft.policy.families):
        kept = PurePosixPath(name)
        others = {
            path: rival
            for path, rival in rivals.items()
            if rival.model == _model_of(kept) and path != kept
        }
        gone = {file for rival in others.values() for file in rival.files}
        if kept not in rivals or not others:
            why: str | None = (
                "no finding says that its model is also stored in another file or index"
            )
        elif any(str(path) in draft.policy.families for path in others):
            why = f"--keep also names {list_names(sorted(map(str, others)))}"
        else:
            why = _family_objection(draft, groups[kept], gone)
        if why is not None:
            code = rivals[kept].code if kept in rivals else StaleFamily.code
            draft.stay(code, (kept,), why)
            continue
        for path, rival in others.items():
            size = sum(draft.components[file].size for file in rival.files)
            action = SetAside(path=path, files=rival.files, kept=kept, size=size)
            reads = (*rival.files, *_files_of_family(groups[kept]))
            draft.add(action, rival.code, Safety.LOSSY, reads)
        aside |= gone | others.keys()
    return frozenset(aside)


def _files_of_family(group: ModelFiles) -> tuple[PurePosixPath, ...]:
    """Return the files of a family, first its index. A file of another name may be of a script."""
    index = (group.index.path,) if group.index is not None else ()
    return *index, *(member.path for member in group.members if member.path not in group.renamed)


def _family_objection(draft: Draft, kept: ModelFiles, gone: Set[PurePosixPath]) -> str | None:
    """Return why the families next to ``kept`` stay, None where they may go. ``gone``: their
    files.
    """
    is_damaged = any(
        isinstance(finding, SecondFamily) and finding.is_damaged
        for finding in draft.findings_of(kept.path)
    )
    if kept.is_left_over or kept.missing or is_damaged:
        return "it is damaged or incomplete (see the other findings)"
    if shared := sorted(str(path) for path in gone if draft.memberships[path] > 1):
        return f"two indexes list {shared[0]}"
    for link, places in draft.links.items():
        if link not in gone and (needed := sorted(places & gone)):
            return f"the symbolic link {link} would break, because it points to {needed[0]}"
    return None
