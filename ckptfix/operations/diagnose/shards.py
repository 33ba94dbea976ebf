"""Sharded models: is every shard there, and does the index agree with the headers?"""

from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath

from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.keys import KeyMap, common_wrappers
from ckptfix.formats.weights_index import WeightsIndex
from ckptfix.operations.findings import Finding, IndexMismatch, MissingShard


def diagnose_shards(folder: CheckpointFolder) -> list[Finding]:
    """Find missing shards and indexes that disagree with the headers. A lone file is not looked at."""
    if folder.only is not None:
        return []
    findings: list[Finding] = []
    for index_path, shards in shard_groups(folder).items():
        findings += _diagnose_group(folder, index_path, shards)
    return findings


def shard_groups(folder: CheckpointFolder) -> dict[PurePosixPath, tuple[Component, ...]]:
    """Return the shards of every sharded model by the path that its index has, or should have.

    An index whose files are not named like shards has the files that it names as its shards.
    """
    groups: dict[PurePosixPath, list[Component]] = {}
    by_path = {component.path: component for component in folder.components}
    for component in folder.components:
        name = component.name
        if name.shard is not None:
            groups.setdefault(PurePosixPath(f"{name.stem}{name.suffix}.index.json"), []).append(component)
        elif isinstance(component.content, WeightsIndex):
            group = groups.setdefault(component.path, [])
            for file_name in sorted(set(component.content.weight_map.values())):
                named = by_path.get(PurePosixPath(file_name))
                if named is not None and named.name.shard is None:
                    group.append(named)
    return {path: tuple(members) for path, members in groups.items()}


def weight_map(shards: tuple[Component, ...]) -> dict[str, str]:
    """Return the weight map that the headers of these shards give."""
    return {tensor.fqn: str(shard.path) for shard in shards for tensor in shard.tensors}


def _diagnose_group(
    folder: CheckpointFolder, index_path: PurePosixPath, shards: tuple[Component, ...]
) -> list[Finding]:
    index = next((component for component in folder.components if component.path == index_path), None)
    if index is not None and not isinstance(index.content, WeightsIndex):
        return []  # unreadable: reported as a file
    listed: Mapping[str, str] = {}
    if index is not None and isinstance(index.content, WeightsIndex):
        listed = index.content.weight_map
    missing = _missing(folder, index_path if index else None, shards, listed)
    if missing or any(shard.problem for shard in shards):
        return missing  # what the lost shard held is not known, so the index cannot be judged
    actual = weight_map(shards)
    count = Counter(tensor.fqn for shard in shards for tensor in shard.tensors)
    doubled = tuple(sorted(fqn for fqn, times in count.items() if times > 1))
    lost = tuple(sorted(listed.keys() - actual.keys()))
    misplaced = sum(1 for fqn, name in listed.items() if fqn in actual and actual[fqn] != name)
    unlisted = len(actual.keys() - listed.keys())
    if index is not None and not (doubled or lost or misplaced or unlisted):
        return []
    if index is None and (not actual or (len(shards) == 1 and shards[0].name.shard == (1, 1))):
        return []  # nothing to list, or one shard of one, which loaders take by name
    renamed = _only_renamed(lost, actual, listed)
    return [
        IndexMismatch(
            path=index_path,
            misplaced=misplaced,
            unlisted=unlisted,
            lost=() if renamed else lost,
            doubled=doubled,
            absent=index is None,
        )
    ]


def _missing(
    folder: CheckpointFolder,
    index_path: PurePosixPath | None,
    shards: tuple[Component, ...],
    listed: Mapping[str, str],
) -> list[Finding]:
    present = {str(component.path) for component in folder.components}
    tensors = Counter(listed.values())
    findings: list[Finding] = [
        MissingShard(path=PurePosixPath(name), named_by=str(index_path), tensors=tensors[name])
        for name in sorted(tensors.keys() - present)
    ]
    numbered = [shard.name.shard for shard in shards if shard.name.shard is not None]
    if numbered and len({total for _, total in numbered}) == 1:
        stem, suffix = shards[0].name.stem, shards[0].name.suffix
        total = numbered[0][1]
        # total comes from a file name, so it can claim 99,999 shards; names of that many are still cheap.
        for number in sorted(set(range(1, total + 1)) - {number for number, _ in numbered}):
            name = f"{stem}-{number:05}-of-{total:05}{suffix}"
            if name not in tensors and name not in present:
                findings.append(
                    MissingShard(
                        path=PurePosixPath(name), named_by=f"the name of {shards[0].path}", tensors=0
                    )
                )
    return findings


def _only_renamed(lost: tuple[str, ...], actual: Mapping[str, str], listed: Mapping[str, str]) -> bool:
    """Whether the index has the same tensors under names with another wrapper chain, as after a hand-made rename."""
    if not lost:
        return False
    strip_actual, strip_listed = (
        KeyMap(remove=common_wrappers(actual)),
        KeyMap(remove=common_wrappers(listed)),
    )
    return {strip_actual(fqn) for fqn in actual} == {strip_listed(fqn) for fqn in listed}
