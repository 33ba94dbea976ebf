"""Files that make up one model: a single file, or shards with their index."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain as concatenated
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.checkpoint.architectures import Architecture, architecture_of
from ckptfix.checkpoint.filenames import PARTS_LABEL, parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, Component, NameScope, is_unreadable
from ckptfix.checkpoint.keys import is_computed, shared_chain
from ckptfix.checkpoint.loading_order import (
    BIN_INDEX,
    RESUME,
    ModelNames,
    first_loader,
    is_part,
    kind_of,
    loads,
    model_names,
)
from ckptfix.checkpoint.model_configs import CONFIG, read_config
from ckptfix.checkpoint.rank_parts import PartedTensor, joined_parts
from ckptfix.checkpoint.roles import Role
from ckptfix.formats.safetensors_file import SafetensorsFile, WeightsIndex
from ckptfix.wording import Brief

ShardSet = tuple[str, int, str, str]
"""Stem, number of shards, variant and suffix, equal for all shards of one save."""


class Replacement(NamedTuple):
    """The complete file or index that loaders take in place of shards of which some are gone.

    ``is_complete``: it has every key of their index. ``blocked``: the loaders that take the index
    of the shards all the same, and fail. ``refused_by``: those that refuse a folder with two
    indexes, and would take this one alone. ``is_resumed``: the Trainer takes it.
    """

    path: PurePosixPath
    is_complete: bool
    blocked: tuple[str, ...]
    refused_by: tuple[str, ...]
    is_resumed: bool


class ModelFiles(Brief, Struct, frozen=True, kw_only=True, eq=False):
    """Files of one state dict, in the order of their shards; empty when only the index is left.

    ``index_path``: the path of their index, even if missing; None for a file that needs no index.
    ``index``: the index, readable or not, None when it is missing. ``missing``: absent files that
    the index or the shards' numbers promise. ``rivals``: the number of shard sets that could claim
    the same index. ``stale_of``: the index that names other shards. ``replaced``: the file or index
    of another save, where shards of this one are gone. ``renamed``: the member -> the missing file
    whose listed keys it holds. ``tied``: listed keys that no file holds, as each is tied to one
    that a file holds. ``gone``: the listed files, if none of them exists and the members, a
    complete set of shards, hold all that the index lists.
    """

    members: tuple[Component, ...]
    index_path: PurePosixPath | None = None
    index: Component | None = None
    missing: tuple[str, ...] = ()
    rivals: int = 1
    stale_of: PurePosixPath | None = None
    replaced: Replacement | None = None
    renamed: Mapping[PurePosixPath, str] = field(default_factory=dict)
    tied: frozenset[str] = frozenset()
    gone: tuple[str, ...] = ()
    _joint: dict[tuple[tuple[str, ...], str], tuple[str, ...]] = field(default_factory=dict)
    _chains: dict[tuple[tuple[str, ...], str], tuple[str, ...]] = field(default_factory=dict)
    _scopes: dict[tuple[tuple[str, ...], str], list[NameScope]] = field(default_factory=dict)
    _parted: list[tuple[PartedTensor, ...]] = field(default_factory=list)

    @property
    def path(self) -> PurePosixPath:
        """The file or the index that a loader looks for."""
        return self.index_path or self.members[0].path

    @property
    def label(self) -> str:
        """The name of all files together: the lone file, or the index, or a pattern for the files
        with parts.
        """
        if len(self.members) == 1:
            return str(self.members[0].path)
        return PARTS_LABEL if self.is_in_parts else str(self.index_path)

    @property
    def is_in_parts(self) -> bool:
        """Return whether each file has parts of tensors, as torch's ``HuggingFaceStorageWriter``
        saves them.
        """
        return bool(self.members) and self.members[0].name.is_of_parts

    @property
    def parted_tensors(self) -> tuple[PartedTensor, ...]:
        """The tensors whose parts are in the files; joined once, as a thousand ranks have a part of
        each.
        """
        if not self._parted:
            self._parted.append(joined_parts(self.members))
        return self._parted[0]

    @property
    def read_index(self) -> WeightsIndex | None:
        """The content of a readable index."""
        content = self.index.content if self.index is not None else None
        return content if isinstance(content, WeightsIndex) else None

    @property
    def listed(self) -> Mapping[str, str]:
        """The weight map of the index, empty without a readable one."""
        return self.read_index.weight_map if self.read_index is not None else {}

    @property
    def index_words(self) -> dict[str, Any]:
        """The content of a readable index without its weight map."""
        document = self.read_index.document if self.read_index is not None else {}
        return {key: value for key, value in document.items() if key != "weight_map"}

    @property
    def total_size(self) -> int | None:
        """The bytes of all tensors that the index counts, None for an index that does not."""
        metadata = self.index_words.get("metadata")
        size = metadata.get("total_size") if isinstance(metadata, dict) else None
        return size if type(size) is int else None

    @property
    def stored_size(self) -> int:
        """The bytes of all tensors in the files."""
        return stored_size(self.members)

    @property
    def lost(self) -> tuple[str, ...]:
        """The listed keys that no file holds and that a model may need, in order.

        No loader looks for a listed key in its shard: it loads all keys of all listed shards, and
        leaves the rest random. No load needs a tied key, or a buffer that its model computes. Keys
        beyond the bytes that the index counts pass for such, whatever the class: conversions list
        ties of either direction, and masks that are computed by now. But not where two shards share
        tensors: a copy of a shard may have the size of the shard that it replaced.
        """
        fqns = [tensor.fqn for member in self.members for tensor in member.tensors]
        held = set(fqns)
        has_copies = len(held) < len(fqns)
        if held <= self.listed.keys() and self.stored_size == self.total_size and not has_copies:
            return ()
        return tuple(key for key in self.unheld if key not in self.tied)

    @property
    def unheld(self) -> tuple[str, ...]:
        """The listed keys that no file holds, without buffers that models compute, in order."""
        held = {tensor.fqn for member in self.members for tensor in member.tensors}
        return tuple(sorted(key for key in self.listed.keys() - held if not is_computed(key)))

    @property
    def is_left_over(self) -> bool:
        """Return whether the model of the folder is in other files: these are of another save."""
        return self.stale_of is not None or self.replaced is not None

    @property
    def is_whole(self) -> bool:
        """Return whether every file exists and could be read."""
        return not self.missing and all(member.problem is None for member in self.members)

    def names(self, scope: NameScope) -> tuple[str, ...]:
        """Return the keys in this place of all files together; they must be distinct."""
        if len(self.members) == 1:
            return scope.names
        key = scope.path, scope.kind
        if key not in self._joint:
            names = concatenated.from_iterable(same.names for same in self._same(key))
            self._joint[key] = tuple(dict.fromkeys(names) if self.is_in_parts else names)
        return self._joint[key]

    def chain(self, scope: NameScope) -> tuple[str, ...]:
        """Return the wrapper chain of all keys in this place.

        A user's own submodule called ``module`` may fill a shard by itself, so one shard alone
        proves nothing.
        """
        key = scope.path, scope.kind
        if key not in self._chains:  # asked for by each of 1,000 shards, for all of them
            self._chains[key] = shared_chain(same.chain for same in self._same(key) if same.names)
        return self._chains[key]

    def _same(self, key: tuple[tuple[str, ...], str]) -> Sequence[NameScope]:
        if not self._scopes:
            # Sorted once: each of 5,000 state dicts in one file looked at all of them.
            for member in self.members:
                for scope in member.scopes:
                    self._scopes.setdefault((scope.path, scope.kind), []).append(scope)
        return self._scopes.get(key, ())


def stored_size(files: Iterable[Component]) -> int:
    """Return the bytes of all tensors in these files; tied tensors of a ``.bin`` file share
    theirs.
    """
    return sum(
        end - begin
        for file in files
        for begin, end in {one.data_offsets for one in file.tensors if one.data_offsets is not None}
    )


def group_files(folder: CheckpointFolder) -> tuple[ModelFiles, ...]:
    """Return every file of a folder that can hold names, each in one group."""
    sets: dict[ShardSet, list[Component]] = {}
    for component in folder.components:
        if (shard_set := _shard_set(component)) is not None:
            sets.setdefault(shard_set, []).append(component)
    groups: list[ModelFiles] = []
    in_parts = tuple(component for component in folder.components if component.name.is_of_parts)
    groups += [ModelFiles(members=in_parts)] if in_parts else []
    used = {component.path for component in in_parts}
    renamed = _renamed(folder)
    for component in folder.components:
        if isinstance(component.content, WeightsIndex):
            listed = set(component.content.weight_map.values())
            if listed and listed <= {str(member.path) for member in in_parts}:
                # A repair by ckptfix 0.5.0 wrote it; no loader reads it.
                used.add(component.path)
                continue
            found = _indexed(folder, component, component.content, sets, renamed)
            groups += found
            used |= {member.path for group in found for member in group.members} | {component.path}
    groups += _unindexed(folder, sets, used)
    used |= {member.path for group in groups for member in group.members}
    groups += [
        ModelFiles(members=(component,))
        for component in folder.components
        if component.path not in used
    ]
    replaced = _replaced(folder, _without_copies(groups))
    return tuple(concatenated.from_iterable(_of_another_cut(folder, group) for group in replaced))


def _without_copies(groups: Sequence[ModelFiles]) -> Sequence[ModelFiles]:
    """Return the groups, copies of shards as left over from the model that has their keys: ``Copy
    of model-00001...``.

    No loader looks for shards of such names, nor for their index.
    """
    copies = [
        group
        for group in groups
        if group.index is None and group.missing and not _is_loaded(group.members[0])
    ]
    if not copies:
        return groups
    models = {
        group.path: {tensor.fqn for member in group.members for tensor in member.tensors}
        for group in groups
        if group.index is not None and group.is_whole and group.members
    }
    left: list[ModelFiles] = []
    for group in groups:
        keys = {tensor.fqn for member in group.members for tensor in member.tensors}
        index = next((path for path, held in models.items() if keys and keys <= held), None)
        if group in copies and index is not None:
            left += (ModelFiles(members=(member,), stale_of=index) for member in group.members)
        else:
            left.append(group)
    return left


def _is_loaded(shard: Component) -> bool:
    """Return whether a loader looks for an index of shards with the name of this one."""
    return any(
        (name := parse_file_name(index)) is not None and kind_of(name) is not None
        for index in shard.name.index_names
    )


def _renamed(folder: CheckpointFolder) -> Mapping[PurePosixPath, Mapping[PurePosixPath, str]]:
    """Return index -> file -> the missing shard of which this file alone holds exactly the listed
    keys.

    Where the index counts the bytes of all tensors, those of the files must add up to no more.
    """
    indexes = {
        component.path: content
        for component in folder.components
        if isinstance(content := component.content, WeightsIndex)
    }
    there = {str(path) for path in (*folder.strays, *folder.subfolders)}
    there |= {str(component.path) for component in folder.components}
    if all(there.issuperset(index.weight_map.values()) for index in indexes.values()):
        return {}
    promised = {name for index in indexes.values() for name in index.weight_map.values()}
    holders: dict[frozenset[str], list[Component]] = {}
    for file in folder.components:
        may_be_shard = file.role is Role.UNKNOWN or _shard_set(file) is not None
        if (
            may_be_shard
            and file.problem is None
            and file.tensors
            and str(file.path) not in promised
        ):
            holders.setdefault(frozenset(tensor.fqn for tensor in file.tensors), []).append(file)
    renamed: dict[PurePosixPath, dict[PurePosixPath, str]] = {}
    for path, index in indexes.items():
        keys: dict[str, set[str]] = {}
        for fqn, name in index.weight_map.items():
            keys.setdefault(name, set()).add(fqn)
        files: dict[str, Component] = {}
        for name in keys.keys() - there:
            alike = holders.get(frozenset(keys[name]), [])
            if len(alike) == 1 and alike[0].name.suffix == PurePosixPath(name).suffix:
                files[name] = alike[0]
        listed = [component for component in folder.components if str(component.path) in keys]
        # A shard of another save that is cut elsewhere may begin and end like one of this save.
        taken = {file.path for file in files.values()}
        of_others = {
            _shard_set(file)
            for file in folder.components
            if file.path not in taken and str(file.path) not in promised
        } - {None}
        files = {name: file for name, file in files.items() if _shard_set(file) not in of_others}
        group = ModelFiles(
            members=(*listed, *files.values()),
            index_path=path,
            index=component_at(folder, str(path)),
        )
        # A count of fewer bytes than the listed files have is of something else.
        total = group.total_size
        if not total or group.stored_size <= total or stored_size(listed) > total:
            renamed[path] = {file.path: name for name, file in files.items()}
    # The shards of two models have the same keys: whose file it is, is not clear.
    count = Counter(file for files in renamed.values() for file in files)
    return {
        path: {file: name for file, name in files.items() if count[file] == 1}
        for path, files in renamed.items()
    }


def _replaced(folder: CheckpointFolder, groups: Sequence[ModelFiles]) -> Sequence[ModelFiles]:
    """Return the groups, those that lack shards with what loaders take in their place.

    A damaged index without a shard lacks all of them.
    """
    lacking = {
        group: (
            ModelFiles(members=(), index_path=group.path, index=group.members[0])
            if group.index_path is None
            else group
        )
        for group in groups
        if group.missing or _is_damaged_index(group)
    }
    if not lacking:
        return groups
    names = model_names(
        map(str, (*folder.strays, *(component.path for component in folder.components)))
    )
    by_name = {str(group.path): group for group in groups if group.members}
    replaced = {
        group: replace(shards, replaced=replacement)
        for group, shards in lacking.items()
        if (replacement := _replacement(folder, shards, by_name, names)) is not None
    }
    return [replaced.get(group, group) for group in groups]


def _of_another_cut(folder: CheckpointFolder, group: ModelFiles) -> Iterator[ModelFiles]:
    """Yield a group; instead of an index of which no listed file exists, the one complete set of
    shards that holds all that it lists, and the shards that are left over.
    """
    if not group.missing or group.is_left_over or group.renamed:
        yield group
        return
    listed = set(group.listed.values())
    lengths = {len(name) for name in listed}
    existing = (*folder.strays, *folder.subfolders, *(file.path for file in folder.components))
    # The download of a listed shard may go on: ``model-00001-of-00003.safetensors.incomplete``.
    is_foreign = not any(path.name[:length] in listed for path in existing for length in lengths)
    complete = complete_sets(folder, group) if is_foreign else []
    # Of two sets, none is shown to be the right one: the index may be of a third save.
    if len(complete) != 1 or not complete[0].is_proven:
        yield group
        return
    shards = complete[0].shards
    yield replace(group, members=shards, missing=(), tied=frozenset(), gone=tuple(sorted(listed)))
    paths = {shard.path for shard in shards}
    yield from (
        ModelFiles(members=(shard,), stale_of=group.index_path)
        for shard in group.members
        if shard.path not in paths
    )


class CompleteSet(NamedTuple):
    """Shards that hold every key of an index which lists none of them. ``is_proven``: they have the
    bytes that the index counts.
    """

    shards: tuple[Component, ...]
    is_proven: bool


def complete_sets(folder: CheckpointFolder, group: ModelFiles) -> list[CompleteSet]:
    """Return the sets of intact shards that an index does not list, and that hold each of its keys
    once.
    """
    promised = set(group.listed.values())
    sets: dict[ShardSet, list[Component]] = {}
    for component in folder.components if group.index is not None else ():
        shard_set = _shard_set(component) if str(component.path) not in promised else None
        if shard_set is not None and str(group.index_path) in component.name.index_names:
            sets.setdefault(shard_set, []).append(component)
    listed = {key for key in group.listed if not is_computed(key)}
    complete = []
    for shards in map(_ordered, sets.values()):
        keys = [tensor.fqn for shard in shards for tensor in shard.tensors]
        held = {key for key in keys if not is_computed(key)}
        is_whole = all(shard.problem is None for shard in shards) and [
            shard.name.shard for shard in shards
        ] == [(number, len(shards)) for number in range(1, len(shards) + 1)]
        if is_whole and held and held == listed and len(set(keys)) == len(keys):
            is_proven = group.total_size in (None, stored_size(shards))
            complete.append(CompleteSet(shards, is_proven))
    return complete


def _is_damaged_index(group: ModelFiles) -> bool:
    """Return whether a group is a damaged index without a shard."""
    alone = group.members[0] if group.index_path is None and group.members else None
    return alone is not None and alone.role is Role.WEIGHTS_INDEX and alone.problem is not None


_MOST_TIES = 16


def _replacement(
    folder: CheckpointFolder,
    group: ModelFiles,
    by_name: Mapping[str, ModelFiles],
    names: ModelNames,
) -> Replacement | None:
    """Return the complete file or index of a model that loaders take in place of these shards, None
    without one.

    Nor is there one where it may be a piece of the model.
    """
    name = parse_file_name(group.path.name)
    if name is None or name.model is None or kind_of(name) is None:
        return None
    loader = first_loader(name.model, name.index)
    if loader is None or (group.index is not None and is_unreadable(group.index)):
        return None
    now = loads(names, name.model, name.index)
    without = loads(names, name.model, name.index, removed=str(group.path))
    file = by_name.get(without.taken.get(loader) or without.by_option.get(loader, ""))
    if (
        file is None
        or not file.is_whole
        or (file.index_path is not None and file.read_index is None)
    ):
        return None
    held = {tensor.fqn for member in file.members for tensor in member.tensors}
    if not held or any(member.whole is None for member in file.members):
        return None
    of_shards = {tensor.fqn for member in group.members for tensor in member.tensors}
    keys = group.listed.keys() if group.index is not None else of_shards
    lost = {key for key in keys - held if not is_computed(key)}
    # An index of .bin shards lists each of the tied weights, and a safetensors file holds the first
    # of them.
    may_be_tied = (
        group.index is not None and kind_of(name) == BIN_INDEX and _may_be_ties(lost, held, group)
    )
    is_piece = held < keys or group.index is None
    if is_piece and is_part(lost, keys) and not may_be_tied:
        return None
    blocked = [
        taker
        for taker, first in now.taken.items()
        if first == str(group.path) and (taker in without.taken or taker in without.by_option)
    ]
    if folder.is_save_state and not folder.has_file(CONFIG):
        # from_pretrained fails there without the index, too: save_state writes no config.
        blocked = [taker for taker in blocked if taker != "transformers"]
    refused_by = tuple(taker for taker in now.refused_by if taker in without.taken)
    is_resumed = now.taken.get(RESUME) == str(file.path)
    return Replacement(file.path, not lost, tuple(blocked), refused_by, is_resumed)


def _may_be_ties(lost: Collection[str], held: Collection[str], group: ModelFiles) -> bool:
    """Return whether a file may lack keys of an index because they are tied to the keys that it
    holds.

    A save writes tied weights into one shard (huggingface_hub,
    ``split_torch_state_dict_into_shards``; transformers 4.44, ``shard_checkpoint``). A file without
    all weights of a shard, or with fewer keys than it lacks, is a piece.
    """
    shards_of_held = {shard for key, shard in group.listed.items() if key in held}
    in_shards_of_held = shards_of_held.issuperset(group.listed[key] for key in lost)
    return len(lost) <= _MOST_TIES and 2 * len(lost) <= len(group.listed) and in_shards_of_held


def _indexed(
    folder: CheckpointFolder,
    index: Component,
    content: WeightsIndex,
    sets: Mapping[ShardSet, list[Component]],
    renamed_of: Mapping[PurePosixPath, Mapping[PurePosixPath, str]],
) -> list[ModelFiles]:
    """Return the group that an index lists, and the shards next to it from another save."""
    renamed = renamed_of.get(index.path, {})
    of_others = {path for files in renamed_of.values() for path in files}
    promised = set(content.weight_map.values())
    named = [
        component
        for component in folder.components
        if str(component.path) in promised and component.role is not Role.WEIGHTS_INDEX
    ]
    of_named = {_shard_set(component) for component in named}
    if not named:
        of_named = {shard_set for shard_set, shards in sets.items() if _can_list(index, shards)}
    others = [
        component
        for shard_set, shards in sets.items()
        for component in shards
        if str(component.path) not in promised
        and component.path not in of_others
        and (shard_set in of_named or _can_list(index, shards))
    ]
    held = {tensor.fqn for component in named for tensor in component.tensors}
    is_complete = bool(named) and content.weight_map.keys() <= held
    stale = [
        component
        for component in others
        if _shard_set(component) not in of_named
        or (
            is_complete
            and _holds_anything(component)
            and {one.fqn for one in component.tensors} <= held
        )
    ]
    members = _ordered([*named, *(component for component in others if component not in stale)])
    absent = tuple(sorted(promised - {str(component.path) for component in named}))
    unlisted = _unnumbered(members, promised) if named else []
    members += _ordered([component for component in folder.components if component.path in renamed])
    group = ModelFiles(
        members=members, index_path=index.path, index=index, missing=absent, renamed=renamed
    )
    if unheld := group.unheld:
        group = replace(group, tied=_tied(folder, group, unheld))
    # Shards that were merged keep numbers of more: loaders go by the index, and ask for no other
    # file. It lists only a part of the model if the tensors of the model have more bytes.
    if absent or group.lost or group.stored_size < (group.total_size or 0):
        group = replace(group, missing=(*absent, *unlisted))
    return [group, *(ModelFiles(members=(component,), stale_of=index.path) for component in stale)]


def _tied(folder: CheckpointFolder, group: ModelFiles, absent: Sequence[str]) -> frozenset[str]:
    """Return those of the absent keys that are tied to keys that the shards hold.

    The Hub's conversion of ``.bin`` shards drops all ties but one from each shard, and keeps the
    index. Its newer versions record in the shard what they dropped, as ``save_model`` does. Files
    of the older ones load where the config ties the keys.
    """
    held = {tensor.fqn for member in group.members for tensor in member.tensors}
    recorded = {
        dropped
        for member in group.members
        if isinstance(member.content, SafetensorsFile)
        for dropped, kept in member.content.metadata.items()
        if kept in held
    }
    tied = recorded.intersection(absent)
    if tied.issuperset(absent):
        return frozenset(tied)
    config = read_config(folder.root, CONFIG)
    architecture = architecture_of(config)
    if isinstance(architecture, Architecture):
        tied |= architecture.tied_keys(config, absent, held)
    return frozenset(tied)


def _unindexed(
    folder: CheckpointFolder, sets: Mapping[ShardSet, list[Component]], used: set[PurePosixPath]
) -> Iterator[ModelFiles]:
    """Return the sets of shards that no readable index lists."""
    by_path = {component.path: component for component in folder.components}
    left = {
        shard_set: shards
        for shard_set, shards in sets.items()
        if used.isdisjoint(shard.path for shard in shards)
    }
    for shards in left.values():
        paths = [PurePosixPath(name) for name in shards[0].name.index_names]
        path = next((path for path in paths if path in by_path), paths[0])
        yield ModelFiles(
            members=_ordered(shards),
            index_path=path,
            index=by_path.get(path),
            missing=tuple(_unnumbered(shards, ())),
            rivals=sum(1 for other in left.values() if str(path) in other[0].name.index_names),
        )


def _holds_anything(component: Component) -> bool:
    """Return whether a shard can be from another save: an empty shard of this save is in no index,
    either.
    """
    return bool(component.tensors) or component.problem is not None


def _shard_set(component: Component) -> ShardSet | None:
    name = component.name
    if name.shard is None or name.is_of_parts:
        return None
    return name.stem, name.shard[1], name.variant, name.suffix


def _can_list(index: Component, shards: Sequence[Component]) -> bool:
    """Return whether an index has a name under which loaders look for that of these shards."""
    return str(index.path) in shards[0].name.index_names


def _ordered(shards: list[Component]) -> tuple[Component, ...]:
    return tuple(sorted(shards, key=lambda shard: (shard.name.shard or (0, 0), str(shard.path))))


def _unnumbered(
    shards: "list[Component] | tuple[Component, ...]", promised: "set[str] | tuple[()]"
) -> list[str]:
    """Return the names of missing shards, by the numbers in the names of the existing ones."""
    if len({_shard_set(shard) for shard in shards}) != 1 or shards[0].name.shard is None:
        return []
    name, total = shards[0].name, shards[0].name.shard[1]
    present = {shard.name.shard[0] for shard in shards if shard.name.shard is not None}
    # The total comes from a file name, so it can claim 99,999 shards; names of that many are still
    # cheap.
    names = (
        str(replace(name, shard=(number, total)))
        for number in range(1, total + 1)
        if number not in present
    )
    return [name for name in names if name not in promised]


def component_at(folder: CheckpointFolder, name: str) -> Component | None:
    """Return the component of this file name, None when there is none."""
    wanted = PurePosixPath(name)
    return next((component for component in folder.components if component.path == wanted), None)
