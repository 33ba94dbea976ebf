"""Damage of indexes and in the shards that they list: missing, left-over and repeated tensors, by
what loaders do.

Each loader reads all tensors of all files in the weight map, in the order of their names. The keys
of the map count for transformers alone (``modeling_utils.py``): version 4.44 leaves a key that the
map lacks random with a ``device_map``, and 4.44 and 5.23 look in the map for weights that stay on
the disk, of safetensors files.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import PurePosixPath

from ckptfix.checkpoint.filenames import TRAINER_STATE, parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, Component, is_unreadable, scan_file
from ckptfix.checkpoint.keys import KeyMap, common_wrappers, is_computed
from ckptfix.checkpoint.loading_order import kind_of
from ckptfix.checkpoint.model_configs import CONFIG
from ckptfix.checkpoint.model_files import ModelFiles, Replacement, complete_sets
from ckptfix.checkpoint.pairing import unequal
from ckptfix.checkpoint.rank_parts import begins_inside
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.base import Explained, Finding, as_kind
from ckptfix.diagnosis.findings.interrupted import InterruptedSave
from ckptfix.diagnosis.findings.sharded import (
    BlockingIndex,
    ForeignIndex,
    IncompleteShards,
    IndexMismatch,
    IndexOfOtherShards,
    LeftoverIndex,
    MissingShard,
    OddIndex,
    PartlyReadIndex,
    RenamedShard,
    RivalShard,
    StaleShard,
)
from ckptfix.formats.tensor import TensorInfo
from ckptfix.storage.files import AnyPath, names_in
from ckptfix.wording import series


def diagnose_shards(case: Case) -> Iterator[Finding | Explained]:
    """Find missing and left-over shards, and indexes that disagree with the headers.

    With ``data`` all bytes of tensors that are in two shards are compared, not samples of them.
    Raises OSError.
    """
    if case.is_file:
        return
    folder, groups, data = case.folder, case.groups, case.data
    root = folder.root
    below = _files_below(folder) if any(group.missing for group in groups) else {}
    by_path = {group.path: group for group in groups}
    left_over: dict[PurePosixPath, list[Component]] = {}
    for group in groups:
        if group.stale_of is not None:
            left_over.setdefault(group.stale_of, []).extend(group.members)
    for group in groups:
        if group.stale_of is not None:
            continue
        if stale := left_over.get(group.path):
            loaded = by_path[group.replaced.path] if group.replaced is not None else group
            yield from _stale(root, stale, loaded, data=data)
        if group.replaced is not None and group.index is None:
            first, *others = (str(shard.path) for shard in group.members)
            yield IncompleteShards(
                path=PurePosixPath(first), index=group.replaced.path, others=tuple(others)
            )
        elif group.index_path is not None and group.replaced is not None:
            yield _left_over(group, group.index_path, group.replaced)
        elif group.index_path is not None and group.missing:
            for finding in _missing(folder, group, group.index_path, below):
                yield finding
                # A complete shard with an ending of a download gets the name that the download
                # left out.
                yield from (Explained(InterruptedSave, shard.path) for shard in finding.renamed)
        elif group.index_path is not None and group.is_whole:
            twin = _twin(group, groups) if group.index is None else None
            yield from _diagnose_index(root, group, group.index_path, twin, data=data)
    yield from _foreign_indexes(folder, groups)


def _foreign_indexes(
    folder: CheckpointFolder, groups: Iterable[ModelFiles]
) -> Iterator[ForeignIndex]:
    """Yield the files that ``load_checkpoint_in_model`` takes for a second index next to shards.

    It looks for any ``*.index.json`` where no file has the first model (accelerate 1.15,
    ``utils/modeling.py``).
    """
    foreign = [path for path in folder.strays if path.name.endswith(".index.json")]
    if not foreign or any(
        str(component.path) in _BEFORE_INDEXES for component in folder.components
    ):
        return
    if any(
        group.index_path is not None and group.members and not group.is_left_over
        for group in groups
    ):
        yield from (ForeignIndex(path=path) for path in foreign)


_BEFORE_INDEXES = ("model.safetensors", "pytorch_model.bin")


def _stale(
    root: AnyPath, shards: Sequence[Component], group: ModelFiles, *, data: bool
) -> Iterator[StaleShard]:
    """Yield the findings about the shards of another save than ``group``: about those with other
    values, and about the rest.

    torch 2.13's ``HuggingFaceStorageReader`` reads all safetensors files of a folder, and of two
    tensors with one key takes the one that is in the last file as the file system lists them.
    """
    listed = {
        tensor.fqn: (str(member.path), tensor)
        for member in group.members
        for tensor in member.tensors
    }
    unequal = {
        shard.path: _unequal(
            root,
            {
                tensor.fqn: dict((listed[tensor.fqn], (str(shard.path), tensor)))
                for tensor in shard.tensors
                if tensor.fqn in listed and shard.name.suffix == ".safetensors"
            },
            data=data,
        )
        for shard in shards
    }
    equal = [path for path, differing in unequal.items() if not differing]
    rivals = [path for path, differing in unequal.items() if differing]
    if equal:
        yield StaleShard(
            path=equal[0],
            index=group.path,
            others=tuple(map(str, equal[1:])),
            is_whole=group.is_whole,
        )
    if rivals:
        differing = [key for path in rivals for key in unequal[path]]
        yield RivalShard(
            path=rivals[0],
            index=group.path,
            others=tuple(map(str, rivals[1:])),
            is_whole=group.is_whole,
            tensors=len(set(differing)),
            difference=differing[0],
        )


def _twin(group: ModelFiles, groups: Iterable[ModelFiles]) -> PurePosixPath | None:
    """Return the index that lacks its shards and lists the keys of shards whose own index no loader
    looks for.
    """
    name = parse_file_name(group.path.name)
    if name is None or kind_of(name) is not None:
        return None
    keys = {tensor.fqn for member in group.members for tensor in member.tensors}
    return next(
        (
            lacking.index_path
            for lacking in groups
            if lacking.missing and keys == lacking.listed.keys()
        ),
        None,
    )


def _left_over(group: ModelFiles, path: PurePosixPath, replaced: Replacement) -> LeftoverIndex:
    problem = group.index.problem if group.index is not None else None
    leftover = LeftoverIndex(
        path=path,
        file=replaced.path,
        missing=group.missing,
        # A file under another name with the keys of a shard may be of a script, such as a trained
        # head.
        shards=tuple(member.path for member in group.members if member.path not in group.renamed),
        problem=problem.message if problem is not None else "",
        refused_by=series(replaced.refused_by) if replaced.refused_by else "",
    )
    if not replaced.blocked:
        return leftover
    return as_kind(
        BlockingIndex,
        leftover,
        loaders=replaced.blocked,
        holds=len(group.listed) if replaced.is_complete else 0,
        is_resumed=replaced.is_resumed,
    )


def _missing(
    folder: CheckpointFolder,
    group: ModelFiles,
    index_path: PurePosixPath,
    below: Mapping[PurePosixPath, frozenset[str]],
) -> Iterator[MissingShard]:
    existing = {*folder.strays, *(component.path for component in folder.components)}
    for name in group.missing:
        if PurePosixPath(name) in existing:
            yield MissingShard(
                path=PurePosixPath(name), named_by=str(index_path), tensors=0, is_other_file=True
            )
    gone = tuple(name for name in group.missing if PurePosixPath(name) not in existing)
    if not gone:
        return
    keys: dict[str, set[str]] = {name: set() for name in gone}
    for fqn, name in group.listed.items():
        if name in keys:
            keys[name].add(fqn)
    files = {name: path for path, name in group.renamed.items()}
    for name, candidates in _moved(folder, index_path, keys.keys() - files.keys(), below).items():
        holders = [path for path in candidates if _holds(folder.root / path, name, keys[name])]
        if len(holders) == 1:
            files[name] = holders[0]
    complete = complete_sets(folder, group) if len(files) < len(gone) else []
    yield MissingShard(
        path=PurePosixPath(gone[0]),
        others=gone[1:],
        named_by=str(index_path) if any(keys.values()) else f"the name of {group.members[0].path}",
        tensors=sum(map(len, keys.values())),
        renamed=tuple(
            RenamedShard(files[name], name, len(keys[name])) for name in gone if name in files
        ),
        complete=tuple(f"{of.shards[0].path} to {of.shards[-1].path}" for of in complete),
        is_none_left=set(group.missing) >= set(group.listed.values()),
    )


def _files_below(folder: CheckpointFolder) -> Mapping[PurePosixPath, frozenset[str]]:
    """Return sub-folder -> the names in it; listed once, as an index may lack 4,000 shards."""
    names: dict[PurePosixPath, frozenset[str]] = {}
    for where in folder.plain_subfolders:
        with suppress(OSError):
            names[where] = frozenset(names_in(folder.root / where))
    return names


def _moved(
    folder: CheckpointFolder,
    index: PurePosixPath,
    gone: Set[str],
    below: Mapping[PurePosixPath, frozenset[str]],
) -> Mapping[str, Sequence[PurePosixPath]]:
    """Return missing shard -> files that may be it: with an ending such as ``.bak``, of another
    case, or in a sub-folder.

    A sub-folder with an index or a config is a model or a checkpoint of its own: that of the
    Trainer's last model has checkpoints with shards of the same names and keys.
    """
    moved: dict[str, list[PurePosixPath]] = {}
    by_folded = {name.casefold(): name for name in gone}
    lengths = {len(name) for name in gone}
    for path in folder.strays:
        for length in lengths:
            if (name := by_folded.get(path.name[:length].casefold())) is not None:
                moved.setdefault(name, []).append(path)
    for where, names in below.items():
        if not {index.name, CONFIG, TRAINER_STATE} & names:
            for name in gone & names:
                moved.setdefault(name, []).append(where / name)
    return moved


def _holds(path: AnyPath, name: str, keys: Collection[str]) -> bool:
    """Return whether a file is intact as one of this name, and has exactly these keys."""
    meant = parse_file_name(name)
    if meant is None or not keys:
        return False
    file = scan_file(path.parent, PurePosixPath(path.name), meant)
    return file.problem is None and {tensor.fqn for tensor in file.tensors} == set(keys)


def _diagnose_index(
    root: AnyPath, group: ModelFiles, path: PurePosixPath, twin: PurePosixPath | None, *, data: bool
) -> Sequence[Finding]:
    if group.index is not None and is_unreadable(group.index):
        return ()  # an index that may not be read is not rewritten
    holders: dict[str, dict[str, TensorInfo]] = {}
    for shard in group.members:
        for tensor in shard.tensors:
            holders.setdefault(tensor.fqn, {})[str(shard.path)] = tensor
    listed = group.listed
    is_of_script = any(
        one.name.shard == (1, 1) and not one.name.is_of_library for one in group.members
    )
    is_part = any(begins_inside(one) is not None for one in group.members)
    if group.index is None and (not holders or is_of_script or is_part):
        # No shard to list, one file that a script reads by its name, or a part of a tensor, which
        # has its own finding.
        return ()
    repeated = {fqn: tensors for fqn, tensors in holders.items() if len(tensors) > 1}
    doubled = _unequal(root, repeated, data=data)
    lost = group.lost
    original, overwritten = (
        _overwritten(group, repeated.keys() - set(doubled))
        if lost or group.index is None
        else ("", ())
    )
    misplaced = sum(
        1 for fqn, name in listed.items() if fqn in holders and name not in holders[fqn]
    )
    unlisted = holders.keys() - listed.keys()
    # Loaders take the names of the shards from the map, and all tensors of each shard.
    loaded = set(listed.values())
    unloaded = any(map(loaded.isdisjoint, holders.values()))
    is_of_transformers = _is_of_transformers(path)
    # transformers 4.44 passes over a tensor that the map lacks, with a device_map or
    # low_cpu_mem_usage.
    skipped = is_of_transformers and not all(map(is_computed, unlisted))
    # Version 5.23, too, looks in the map for weights that stay on the disk, unless it copies them
    # out of .bin files.
    sought = misplaced if is_of_transformers and ".safetensors" in path.name else 0
    problem = (
        group.index.problem.message
        if group.index is not None and group.index.problem is not None
        else None
    )
    is_read = group.index is not None and problem is None
    without_metadata = is_read and not isinstance(group.index_words.get("metadata"), dict)
    unread = _unread_by_transformers(path, loaded)
    index = group.read_index
    repeated_keys, spelled, leads_back = (
        (index.repeated, index.spelled, index.leads_back) if index is not None else ((), (), ())
    )
    refused = spelled if _is_of_diffusers(path) else ()
    fails = bool(
        group.index is None
        or problem
        or doubled
        or lost
        or sought
        or unloaded
        or without_metadata
        or unread
        or refused
    )
    if fails or skipped:
        kind = IndexMismatch if fails else PartlyReadIndex
        mismatch = kind(
            path=path,
            misplaced=misplaced,
            unlisted=len(unlisted),
            lost=() if _only_renamed(lost, holders, listed) else lost,
            doubled=doubled,
            copies=tuple(holders[doubled[0]]) if doubled else (),
            absent=group.index is None,
            problem=problem,
            rivals=group.rivals,
            without_metadata=without_metadata,
            unread=unread,
            refused=refused,
            twin=twin,
            overwritten_with=original,
            overwritten=overwritten,
            is_read_in_part=bool(skipped and not unloaded),
        )
        if group.gone:
            shards = len(group.members)
            mismatch = as_kind(IndexOfOtherShards, mismatch, gone=group.gone, shards=shards)
        return (mismatch,)
    tied = tuple(sorted(group.tied))
    computed = tuple(sorted(listed.keys() - holders.keys() - group.tied))
    if computed or tied or unlisted or repeated_keys or misplaced or repeated or leads_back:
        odd = OddIndex(
            path=path,
            computed=computed,
            tied=tied,
            unlisted=len(unlisted),
            repeated=repeated_keys,
            misplaced=misplaced,
            leads_back=leads_back,
            copied=tuple(sorted(repeated)),
        )
        return (odd,)
    return ()


def _overwritten(group: ModelFiles, equal: Set[str]) -> tuple[str, tuple[str, ...]]:
    """Return a shard, and the shards that were overwritten with it: they have none of the tensors
    that the index lists in them, but exactly those of the first. "" and () without such shards.

    ``equal``: the keys that several shards hold with equal values.
    """
    listed: dict[str, set[str]] = {}
    for fqn, name in group.listed.items():
        listed.setdefault(name, set()).add(fqn)
    by_keys: dict[frozenset[str], list[str]] = {}
    for shard in group.members:
        keys = frozenset(tensor.fqn for tensor in shard.tensors)
        if keys and keys <= equal:
            by_keys.setdefault(keys, []).append(str(shard.path))
    for keys, shards in by_keys.items():
        # Without an index nothing shows which of the shards is right: the first one is as good.
        original = next((name for name in shards if keys & listed.get(name, set())), shards[0])
        copies = [name for name in shards if name != original]
        if copies and all(keys.isdisjoint(listed.get(name, ())) for name in copies):
            return original, tuple(copies)
    return "", ()


_PAGES = 24


def _unequal(
    root: AnyPath, repeated: Mapping[str, Mapping[str, TensorInfo]], *, data: bool
) -> tuple[str, ...]:
    """Return the tensors that are in several shards with other values, by samples of their bytes
    unless ``data``.
    """
    differing: set[str] = set()
    pairs: dict[tuple[str, str], list[tuple[str, TensorInfo, TensorInfo]]] = {}
    for fqn, tensors in repeated.items():
        (first, tensor), *others = tensors.items()
        for name, twin in others:
            if tensor[1:3] != twin[1:3] or None in (tensor.data_offsets, twin.data_offsets):
                differing.add(fqn)
            pairs.setdefault((first, name), []).append((fqn, tensor, twin))
    for (first, second), shared in pairs.items():
        left = [pair for pair in shared if pair[0] not in differing]
        pages = max(2, _PAGES // len(shared))
        differing.update(unequal(root / first, root / second, left, full=data, pages=pages))
    return tuple(sorted(differing))


def _is_of_transformers(index: PurePosixPath) -> bool:
    """Return whether ``from_pretrained`` of transformers looks for an index of this name."""
    name = parse_file_name(index.name)
    return name is not None and name.model is not None and name.model.stem == "model"


def _is_of_diffusers(index: PurePosixPath) -> bool:
    name = parse_file_name(index.name)
    return (
        name is not None and name.model is not None and name.model.stem == "diffusion_pytorch_model"
    )


def _unread_by_transformers(index: PurePosixPath, shards: Collection[str]) -> str:
    """Return the first file in another format that transformers reads as safetensors, "" for none.

    transformers 5.23 reads all files as the first of them (``modeling_utils.py``), and the Trainer
    as the index says (``load_sharded_checkpoint``). diffusers and accelerate look at each ending.
    """
    if not _is_of_transformers(index) or not shards:
        return ""
    is_safetensors = ".safetensors" in index.name or min(shards).endswith(".safetensors")
    other_format = (shard for shard in sorted(shards) if not shard.endswith(".safetensors"))
    return next(other_format, "") if is_safetensors else ""


def _only_renamed(lost: tuple[str, ...], actual: Collection[str], listed: Collection[str]) -> bool:
    """Return whether the index has the same tensors under keys with other wrappers, as after a
    manual rename.
    """
    if not lost:
        return False
    strip_actual, strip_listed = (
        KeyMap(remove=common_wrappers(actual)),
        KeyMap(remove=common_wrappers(listed)),
    )
    return {strip_actual(fqn) for fqn in actual} == {strip_listed(fqn) for fqn in listed}
