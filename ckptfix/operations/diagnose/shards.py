"""Sharded models: is every shard there, and does the index agree with the headers?"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from ckptfix.checkpoint.folder import Component, is_unreadable
from ckptfix.checkpoint.groups import ModelFiles
from ckptfix.checkpoint.keys import KeyMap, common_wrappers
from ckptfix.operations.findings import Finding, IndexMismatch, MissingShard, StaleShard


def diagnose_shards(groups: Iterable[ModelFiles]) -> list[Finding]:
    """Find missing and left-over shards, and indexes that disagree with the headers."""
    findings: list[Finding] = []
    for group in groups:
        if group.stale_of is not None:
            findings += [StaleShard(path=shard.path, index=group.stale_of) for shard in group.members]
        elif group.index_path is not None and group.missing:
            findings.append(_missing(group, group.index_path))
        elif group.index_path is not None and group.is_whole:
            findings += _diagnose_index(group, group.index_path)
    return findings


def weight_map(shards: Iterable[Component]) -> dict[str, str]:
    """Return the weight map that the headers of these shards give."""
    return {tensor.fqn: str(shard.path) for shard in shards for tensor in shard.tensors}


def _missing(group: ModelFiles, index_path: PurePosixPath) -> MissingShard:
    by_index = set(group.listed.values()).intersection(group.missing)
    return MissingShard(
        path=PurePosixPath(group.missing[0]),
        others=group.missing[1:],
        named_by=str(index_path) if by_index else f"the name of {group.members[0].path}",
        tensors=sum(1 for name in group.listed.values() if name in by_index),
    )


def _diagnose_index(group: ModelFiles, path: PurePosixPath) -> list[Finding]:
    if group.index is not None and is_unreadable(group.index):
        return []  # what it says is not known, and it is not rewritten for that
    actual, listed = weight_map(group.members), group.listed
    if group.index is None and (not actual or group.members[0].name.shard == (1, 1)):
        return []  # nothing to list, or one shard of one, which loaders take by name
    count = Counter(tensor.fqn for shard in group.members for tensor in shard.tensors)
    doubled = tuple(sorted(fqn for fqn, times in count.items() if times > 1))
    lost = tuple(sorted(listed.keys() - actual.keys()))
    misplaced = sum(1 for fqn, name in listed.items() if fqn in actual and actual[fqn] != name)
    unlisted = len(actual.keys() - listed.keys())
    problem = (
        group.index.problem.message if group.index is not None and group.index.problem is not None else None
    )
    if group.index is not None and not (problem or doubled or lost or misplaced or unlisted):
        return []
    return [
        IndexMismatch(
            path=path,
            misplaced=misplaced,
            unlisted=unlisted,
            lost=() if _only_renamed(lost, actual, listed) else lost,
            doubled=doubled,
            absent=group.index is None,
            problem=problem,
            rivals=group.rivals,
        )
    ]


def _only_renamed(lost: tuple[str, ...], actual: Mapping[str, str], listed: Mapping[str, str]) -> bool:
    """Whether the index has the same tensors under names with another wrapper chain, as after a hand-made rename."""
    if not lost:
        return False
    strip_actual, strip_listed = (
        KeyMap(remove=common_wrappers(actual)),
        KeyMap(remove=common_wrappers(listed)),
    )
    return {strip_actual(fqn) for fqn in actual} == {strip_listed(fqn) for fqn in listed}
