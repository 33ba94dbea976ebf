"""Steps about whole files: bytes behind the end, and indexes that follow the headers."""

from collections.abc import Mapping
from pathlib import PurePosixPath

from ckptfix.checkpoint.folder import Component
from ckptfix.checkpoint.keys import KeyMap
from ckptfix.operations.diagnose.names import ScopeKey
from ckptfix.operations.diagnose.shards import shard_groups, weight_map
from ckptfix.operations.findings import IndexMismatch, NestedPrefix, TrailingBytes
from ckptfix.operations.plan.draft import Draft
from ckptfix.operations.policy import Keys
from ckptfix.operations.steps import Safety, Trim, WriteIndex


def plan_trims(draft: Draft, dropped: frozenset[PurePosixPath]) -> None:
    """Plan to cut off what follows the content of files that stay."""
    if "trailing-bytes" not in draft.policy.allow:
        return
    for finding in draft.findings:
        if isinstance(finding, TrailingBytes) and finding.path not in dropped:
            action = Trim(path=finding.path, size=finding.end, extra=finding.extra)
            draft.add(action, (finding.code,), Safety.LOSSY, (finding.path,))


def plan_indexes(draft: Draft, maps: Mapping[ScopeKey, KeyMap]) -> None:
    """Plan the indexes that follow renamed shards, and those that contradict the headers."""
    broken = {finding.path: finding for finding in draft.findings if isinstance(finding, IndexMismatch)}
    for index_path, shards in shard_groups(draft.folder).items():
        finding = broken.get(index_path)
        if finding is not None and not finding.is_fixable:
            draft.stay(finding.code, index_path, finding.advice)
        renamed = [key_map for key, key_map in maps.items() if key[0] in {shard.path for shard in shards}]
        follows = renamed and index_path in draft.components
        if not follows and (finding is None or not finding.is_fixable):
            continue
        rename = renamed[0] if renamed else KeyMap(remove=())
        total = sum(end - begin for shard in shards for begin, end in _ranges(shard))
        action = WriteIndex(
            path=index_path,
            weight_map={rename(fqn): name for fqn, name in weight_map(shards).items()},
            total_size=total,
            exists=index_path in draft.components,
        )
        code = finding.code if finding is not None else NestedPrefix.code
        asked = draft.policy.keys is not Keys.AUTO
        reads = tuple(path for path in (index_path, *(shard.path for shard in shards)))
        draft.add(action, (code,), Safety.LOSSY if asked else Safety.SAFE, reads)


def _ranges(component: Component) -> list[tuple[int, int]]:
    return [tensor.data_offsets for tensor in component.tensors if tensor.data_offsets is not None]
