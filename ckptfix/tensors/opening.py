"""A path turned into the tensors it holds: a folder of any kind, one file, an index, or sub-folders
with models.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath

from msgspec.structs import replace

from ckptfix.checkpoint.deepspeed_files import (
    deepspeed_folders,
    deepspeed_paths,
    is_deepspeed_file,
)
from ckptfix.checkpoint.entries import Entry, all_state_dicts, model_entries
from ckptfix.checkpoint.filenames import TRAINER_STATE, FileName, ModelName, parse_file_name
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder, Component, scan_folder
from ckptfix.checkpoint.folder_names import is_one_of_several, parse_folder_name
from ckptfix.checkpoint.manifest import usable_manifest
from ckptfix.checkpoint.model_configs import ADAPTER, CONFIG, MODULES, PIPELINE
from ckptfix.checkpoint.model_files import group_files
from ckptfix.checkpoint.rank_names import parse_rank_file_name
from ckptfix.checkpoint.roles import NOT_STATES, Role
from ckptfix.errors import FormatError, OperationError, UsageError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.storage.files import AnyPath, Openable, names_in
from ckptfix.storage.paths import command, existing, listed_files, shell_path
from ckptfix.tensors.dcp_tensors import dcp_folders, dcp_paths, dcp_weights
from ckptfix.tensors.deepspeed import deepspeed_weights
from ckptfix.tensors.rank_files import rank_files, rank_weights
from ckptfix.tensors.single_files import file_weights
from ckptfix.tensors.stored import Format, StoredCheckpoint, Weights

_DEEPEST = 2

_CONFIGS = frozenset({CONFIG, ADAPTER})


def model_folders(
    folder: CheckpointFolder, *, has_weights: bool, depth: int = 0
) -> Iterator[PurePosixPath]:
    """Yield the sub-folders whose weights belong to the checkpoint in a scanned folder.

    The folder must be known for a checkpoint, as a folder of checkpoints is none. ``has_weights``:
    its own weights are in it; below are then only models that a library finds by their names and a
    config. ``depth``: its own depth below the checkpoint. Links and checkpoints of their own are
    left out.
    """
    if depth >= _DEEPEST or not (depth or is_checkpoint(folder)):
        return
    taken = {where for _, where in deepspeed_folders(folder)}
    for path, kind in folder.subfolders.items():
        full = folder.root / path
        if (
            kind != PLAIN_FOLDER
            or path in taken
            or is_one_of_several(path.name)
            or full.is_symlink()
        ):
            continue
        try:
            names = names_in(full)
        except OSError:
            continue
        if _is_own_checkpoint(names) or (has_weights and not _is_of_library(names)):
            continue
        yield path


def is_checkpoint(folder: CheckpointFolder) -> bool:
    """Return whether a folder holds a state, weights of a library or a list of models."""
    names = (component.name for component in folder.components)
    return (
        any(name.role not in NOT_STATES or name.is_of_library for name in names)
        or any(path.name in (PIPELINE, MODULES) for path in folder.strays)
        or any(_is_model_folder(path.name) for path in folder.subfolders)
    )


def _is_own_checkpoint(names: list[str]) -> bool:
    parsed = map(parse_file_name, names)
    return TRAINER_STATE in names or any(
        name is not None and name.role not in NOT_STATES for name in parsed
    )


def _is_of_library(names: list[str]) -> bool:
    return not _CONFIGS.isdisjoint(names) and any(map(_is_model, names))


def _is_model(name: str) -> bool:
    file = parse_file_name(name)
    return (file is not None and file.is_of_library) or _is_model_folder(name)


def _is_model_folder(name: str) -> bool:
    folder = parse_folder_name(name)
    return folder is not None and folder.role is Role.MODEL


@paused_gc()
def open_checkpoint(
    path: Openable, *, original: bool = False, lone_shard: bool = False
) -> StoredCheckpoint:
    """Return the contents of a path, by headers and opcodes; no tensor is read.

    Of a folder the weights that ``load_state`` and ``from_pretrained`` look for, of each model in
    one format; without any, every state dict of a module; and those in sub-folders as hooks and
    pipelines have them. ``original``: of DeepSpeed the weights in the dtype of training, not in
    fp32. ``lone_shard``: a shard that is given by its name is read alone, without the other files
    of its model. Raises UsageError when nothing is there, OperationError when weights cannot all be
    read, with the next command, OSError.
    """
    given = existing(path)
    if not given.is_dir():
        return _one_file(given, lone_shard=lone_shard)
    try:
        return _folder(given, original=original)
    except FormatError as error:
        raise OperationError(f"{given}: {error}; next: {command('check', given)}") from error


def other_files(checkpoint: StoredCheckpoint) -> tuple[PurePosixPath, ...]:
    """Return all that holds no weights of a checkpoint, relative to its root, at any depth, as
    ``listed_files`` does.

    Walks the folder, which opening does not. A lone file has none. Raises OSError when it cannot be
    listed.
    """
    if checkpoint.only is not None:
        return ()
    used = {str(file) for one in checkpoint.weights for file in one.files}
    return tuple(PurePosixPath(name) for name in listed_files(checkpoint.root) if name not in used)


def _one_file(path: AnyPath, *, lone_shard: bool) -> StoredCheckpoint:
    is_index = path.name.endswith(".json")
    folder = scan_folder(path.parent, None if is_index else path.name)
    if not lone_shard and any(
        component.name.is_of_parts for component in folder.components if not is_index
    ):
        raise OperationError(
            f"{path}: the file has only one rank's parts of the tensors; name the folder with the "
            "files of all ranks"
        )
    if lone_shard and not is_index:
        folder = replace(folder, components=tuple(map(_by_itself, folder.components)))
    found = all_state_dicts(folder) or all_state_dicts(folder, of_modules=False)
    entries = [one for one in found if not is_index or one.label == path.name]
    if not entries:
        why = _unsupported(folder) or f"next: {command('check', path)}"
        raise UsageError(f"{path} has no model weights; {why}")
    return StoredCheckpoint(
        root=folder.root, only=path.name, weights=_all_readable(folder, entries, path)
    )


def _folder(root: AnyPath, *, original: bool) -> StoredCheckpoint:
    folder, found = _opened(root, original=original, depth=0)
    if not found.weights:
        if not (folder.components or folder.subfolders):
            raise UsageError(f"{root} has no model weights: {folder.instead}")
        below = ("--recursive",) if folder.subfolders and not folder.components else ()
        why = _unsupported(folder) or f"next: {command('check', root, '', *below)}"
        # Such as {"state_dict": ..., "epoch": 3} of a script: it may be a state of any kind.
        if files := all_state_dicts(folder, of_modules=False):
            why = f"next: name the file with the weights: {shell_path(root / files[0].files[0])}"
        raise UsageError(f"{root} has no model weights; {why}")
    return found


def _opened(
    root: AnyPath, *, original: bool, depth: int
) -> tuple[CheckpointFolder, StoredCheckpoint]:
    """Return the contents of a folder and of those below that belong to the same checkpoint; they
    can be empty.
    """
    folder = scan_folder(root, wanted=lambda name: not _is_of_many_ranks(str(name)))
    manifest = usable_manifest(root)
    found: dict[int, Weights] = {}
    for entry in model_entries(folder, manifest):
        found[entry.index] = _readable(folder, entry, root)
    for index, where in dcp_folders(folder):
        if index not in found:
            found[index] = dcp_weights(root, where, index)
    for (role, index), files in rank_files(root, names_in(root)).items():
        if role is Role.MODEL and index not in found:
            found[index] = rank_weights(root, index, files)
    for index, where in deepspeed_folders(folder):
        if index not in found:
            found[index] = deepspeed_weights(root, where, index, original=original)
    weights = tuple(found[index] for index in sorted(found))
    if not weights:
        weights = _all_readable(folder, _in_one_format(all_state_dicts(folder)), root)
    used = {str(file) for one in weights for file in one.files}
    rivals = [path for path in _other_weights(folder, weights) if str(path) not in used]
    for where in model_folders(folder, has_weights=bool(weights), depth=depth):
        _, below = _opened(root / where, original=original, depth=depth + 1)
        weights += tuple(one.below(where) for one in below.weights)
        rivals += (where / path for path in below.rivals)
    return folder, StoredCheckpoint(
        root=root, weights=weights, rivals=tuple(rivals), is_save_state=folder.is_save_state
    )


def _is_of_many_ranks(name: str) -> bool:
    """Return whether a file is one of those that each rank has: a thousand ranks have many, read
    one by one.
    """
    return is_deepspeed_file(name) or parse_rank_file_name(name) is not None


def _unsupported(folder: CheckpointFolder) -> str:
    """Return in words which file is of a kind that is not read, "" when none is."""
    found = (one for one in folder.components if one.problem is not None and one.is_unsupported)
    return next(
        (f"not read: {one.path}: {one.problem.message}" for one in found if one.problem), ""
    )


def _by_itself(component: Component) -> Component:
    """Return a shard as a file of its own."""
    return replace(component, name=replace(component.name, shard=None))


def _all_readable(
    folder: CheckpointFolder, entries: Sequence[Entry], given: AnyPath
) -> tuple[Weights, ...]:
    """Return the weights of entries of which several can be in one file."""
    paths: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for entry in entries:
        paths.setdefault(entry.files, []).append(entry.path)
    return tuple(
        _readable(folder, entry, given, [path for path in paths[entry.files] if path != entry.path])
        for entry in entries
    )


def _readable(
    folder: CheckpointFolder, entry: Entry, given: AnyPath, others: Collection[tuple[str, ...]] = ()
) -> Weights:
    if entry.problem:
        raise OperationError(
            f"{folder.root / entry.label}: {entry.problem}; next: {command('check', given)}, or, "
            f"to recover what is intact: {command('salvage', given)} NEW_FOLDER"
        )
    return file_weights(folder.root, entry, others)


def _in_one_format(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries without those of a library's model that is there as safetensors, too, as
    loaders take that.
    """
    safe = {
        name.model
        for entry in entries
        if (name := _library_name(entry.members)) is not None and name.suffix == ".safetensors"
    }
    return [
        entry
        for entry in entries
        if (name := _library_name(entry.members)) is None
        or name.suffix == ".safetensors"
        or name.model not in safe
    ]


def _library_name(members: Sequence[Component]) -> FileName | None:
    return members[0].name if members and members[0].name.is_of_library else None


def _other_weights(folder: CheckpointFolder, weights: Sequence[Weights]) -> Iterator[PurePosixPath]:
    """Yield the files of the same models in a second format, and those left of an earlier save with
    other shards.
    """
    first = [parse_file_name(str(one.files[0])) for one in weights if one.files]
    opened = {(name.model, name.index) for name in first if name is not None}
    opened |= {
        (ModelName("model"), one.index)
        for one in weights
        if one.format in (Format.DCP, Format.DEEPSPEED)
    }
    for group in group_files(folder):
        name = _library_name(group.members)
        if name is None or (name.model, name.index) not in opened:
            continue
        paths = [member.path for member in group.members]
        yield from paths
        if paths and group.index_path is not None and group.index is not None:
            yield group.index_path
    for _, where in dcp_folders(folder):
        yield from dcp_paths(folder.root, where)
    for _, where in deepspeed_folders(folder):
        yield from deepspeed_paths(folder.root, where)
