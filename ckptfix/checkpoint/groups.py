"""Groups of files that together hold one state dict: a file alone, or the shards of a model with their index.

What holds for a model as a whole is judged for such a group: the wrapper that its names carry, two names that would
become one, a missing file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain as concatenated
from pathlib import PurePosixPath
from typing import Any

from ckptfix.checkpoint.folder import CheckpointFolder, Component, NameScope
from ckptfix.checkpoint.keys import shared_chain
from ckptfix.formats.safetensors_file import WeightsIndex

ShardSet = tuple[str, int, str, str]
"""Stem, number of shards, variant and suffix: what all shards of one save have in common."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFiles:
    """The files of one state dict, in the order of their shards; none when only its index is left.

    ``index_path``: where their index is, or should be; None for a file that needs none. ``index``: the index,
    readable or not, None when it is not there. ``missing``: file names that the index or the shards' numbers promise.
    ``rivals``: how many sets of shards could claim the same index. ``stale_of``: the index that names other shards.
    """

    members: tuple[Component, ...]
    index_path: PurePosixPath | None = None
    index: Component | None = None
    missing: tuple[str, ...] = ()
    rivals: int = 1
    stale_of: PurePosixPath | None = None
    _joint: dict[tuple[tuple[str, ...], str], tuple[str, ...]] = field(default_factory=dict, repr=False)

    @property
    def listed(self) -> Mapping[str, str]:
        """The weight map of the index, empty without a readable one."""
        content = self.index.content if self.index is not None else None
        return content.weight_map if isinstance(content, WeightsIndex) else {}

    @property
    def index_words(self) -> dict[str, Any]:
        """The content of a readable index without its weight map."""
        content = self.index.content if self.index is not None else None
        document = content.document if isinstance(content, WeightsIndex) else {}
        return {key: value for key, value in document.items() if key != "weight_map"}

    @property
    def is_whole(self) -> bool:
        """Return whether every file is there and could be read."""
        return not self.missing and all(member.problem is None for member in self.members)

    def names(self, scope: NameScope) -> tuple[str, ...]:
        """Return the names that stand in this place of all files together; they must be distinct."""
        if len(self.members) == 1:
            return scope.names
        key = scope.path, scope.kind
        if key not in self._joint:
            self._joint[key] = tuple(concatenated.from_iterable(same.names for same in self._same(scope)))
        return self._joint[key]

    def chain(self, scope: NameScope) -> tuple[str, ...]:
        """Return the wrapper chain that all names in this place carry.

        A user's own submodule called ``module`` may fill a shard by itself, so one shard alone proves nothing.
        """
        return shared_chain(same.chain for same in self._same(scope) if same.names)

    def _same(self, scope: NameScope) -> Iterator[NameScope]:
        for member in self.members:
            for other in member.scopes:
                if (other.path, other.kind) == (scope.path, scope.kind):
                    yield other


def group_files(folder: CheckpointFolder) -> tuple[ModelFiles, ...]:
    """Return every file of a folder that can hold names, each in one group."""
    sets: dict[ShardSet, list[Component]] = {}
    for component in folder.components:
        if (shard_set := _shard_set(component)) is not None:
            sets.setdefault(shard_set, []).append(component)
    groups: list[ModelFiles] = []
    used: set[PurePosixPath] = set()
    for component in folder.components:
        if isinstance(component.content, WeightsIndex):
            found = _indexed(folder, component, component.content, sets)
            groups += found
            used |= {member.path for group in found for member in group.members} | {component.path}
    groups += _unindexed(folder, sets, used)
    used |= {member.path for group in groups for member in group.members}
    groups += [
        ModelFiles(members=(component,)) for component in folder.components if component.path not in used
    ]
    return tuple(groups)


def _indexed(
    folder: CheckpointFolder,
    index: Component,
    content: WeightsIndex,
    sets: Mapping[ShardSet, list[Component]],
) -> list[ModelFiles]:
    """Return the group that an index names, and the shards next to it that are left from another save."""
    promised = set(content.weight_map.values())
    named = [component for component in folder.components if str(component.path) in promised]
    of_named = {_shard_set(component) for component in named}
    if not named:
        of_named = {shard_set for shard_set, shards in sets.items() if _index_path(shards) == index.path}
    others = [
        component
        for shard_set, shards in sets.items()
        for component in shards
        if str(component.path) not in promised
        and (shard_set in of_named or _index_path(shards) == index.path)
    ]
    held = {tensor.fqn for component in named for tensor in component.tensors}
    is_complete = bool(named) and content.weight_map.keys() <= held
    stale = [
        component
        for component in others
        if _shard_set(component) not in of_named
        or (is_complete and _holds_anything(component) and {one.fqn for one in component.tensors} <= held)
    ]
    members = _ordered([*named, *(component for component in others if component not in stale)])
    missing = sorted(promised - {str(component.path) for component in named}) + _unnumbered(members, promised)
    group = ModelFiles(members=members, index_path=index.path, index=index, missing=tuple(missing))
    return [group, *(ModelFiles(members=(component,), stale_of=index.path) for component in stale)]


def _unindexed(
    folder: CheckpointFolder, sets: Mapping[ShardSet, list[Component]], used: set[PurePosixPath]
) -> Iterator[ModelFiles]:
    """Return the sets of shards that no readable index lists."""
    by_path = {component.path: component for component in folder.components}
    left = {shard_set: shards for shard_set, shards in sets.items() if shards[0].path not in used}
    for shards in left.values():
        path = _index_path(shards)
        yield ModelFiles(
            members=_ordered(shards),
            index_path=path,
            index=by_path.get(path),
            missing=tuple(_unnumbered(shards, ())),
            rivals=sum(1 for other in left.values() if _index_path(other) == path),
        )


def _holds_anything(component: Component) -> bool:
    """Return whether a shard can be left of another save: an empty one of this save is in no index, either."""
    return bool(component.tensors) or component.problem is not None


def _shard_set(component: Component) -> ShardSet | None:
    name = component.name
    return (name.stem, name.shard[1], name.variant, name.suffix) if name.shard is not None else None


def _index_path(shards: Sequence[Component]) -> PurePosixPath:
    """Return where the index of shards of one set is, or should be."""
    return PurePosixPath(shards[0].name.index_name)


def _ordered(shards: list[Component]) -> tuple[Component, ...]:
    return tuple(sorted(shards, key=lambda shard: (shard.name.shard or (0, 0), str(shard.path))))


def _unnumbered(
    shards: "list[Component] | tuple[Component, ...]", promised: "set[str] | tuple[()]"
) -> list[str]:
    """Return the names of shards that the numbers in the others' names promise, and that are not there."""
    if len({_shard_set(shard) for shard in shards}) != 1 or shards[0].name.shard is None:
        return []
    name, total = shards[0].name, shards[0].name.shard[1]
    present = {shard.name.shard[0] for shard in shards if shard.name.shard is not None}
    # The total comes from a file name, so it can claim 99,999 shards; names of that many are still cheap.
    names = (
        str(replace(name, shard=(number, total))) for number in range(1, total + 1) if number not in present
    )
    return [name for name in names if name not in promised]
