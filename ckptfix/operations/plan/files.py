"""Steps about whole files: bytes behind the end, and indexes that follow the headers."""

from pathlib import PurePosixPath

from ckptfix.checkpoint.folder import Component
from ckptfix.checkpoint.groups import ModelFiles
from ckptfix.checkpoint.keys import KeyMap
from ckptfix.operations.diagnose.names import scope_key
from ckptfix.operations.findings import IndexMismatch, NestedPrefix, TrailingBytes
from ckptfix.operations.plan.draft import Draft
from ckptfix.operations.plan.names import Maps
from ckptfix.operations.policy import Keys
from ckptfix.operations.steps import Safety, Trim, WriteIndex


def plan_trims(draft: Draft, dropped: frozenset[PurePosixPath]) -> None:
    """Plan to cut off what follows the content of files that stay."""
    for finding in draft.findings:
        if not isinstance(finding, TrailingBytes) or finding.path in dropped:
            continue
        if finding.code not in draft.policy.allow:
            continue
        if finding.path in draft.unsafe:
            draft.stay(finding.code, (finding.path,), "a file with an unsafe pickle is never edited")
            continue
        action = Trim(path=finding.path, size=finding.end, extra=finding.extra)
        draft.add(action, finding.code, Safety.LOSSY, (finding.path,))


def plan_indexes(draft: Draft, maps: Maps) -> None:
    """Plan the indexes that follow renamed shards, and those that contradict the headers."""
    broken = {finding.path: finding for finding in draft.findings if isinstance(finding, IndexMismatch)}
    renamed = {key[0] for key in maps}
    for group in draft.groups:
        if group.index_path is None or group.stale_of is not None:
            continue
        finding = broken.get(group.index_path)
        if finding is not None and not finding.is_fixable:
            draft.stay(finding.code, (group.index_path,), finding.advice)
            continue
        new_map = _weight_map(group, maps)
        is_renamed = any(member.path in renamed for member in group.members)
        if finding is None and not (is_renamed and group.index is not None):
            continue
        action = WriteIndex(
            path=group.index_path,
            weight_map=new_map,
            total_size=sum(end - begin for shard in group.members for begin, end in _ranges(shard)),
            exists=group.index is not None,
        )
        code = finding.code if finding is not None else NestedPrefix.code
        safety = Safety.LOSSY if draft.policy.keys is not Keys.AUTO else Safety.SAFE
        reads = (group.index_path, *(shard.path for shard in group.members))
        draft.add(action, code, safety, reads, group.members[0].path if is_renamed else None)


def _weight_map(group: ModelFiles, maps: Maps) -> dict[str, str]:
    result: dict[str, str] = {}
    for shard in group.members:
        rename = (
            maps.get(scope_key(shard, shard.whole), KeyMap(remove=())) if shard.whole else KeyMap(remove=())
        )
        result.update((rename(tensor.fqn), str(shard.path)) for tensor in shard.tensors)
    return result


def _ranges(component: Component) -> list[tuple[int, int]]:
    return [tensor.data_offsets for tensor in component.tensors if tensor.data_offsets is not None]
