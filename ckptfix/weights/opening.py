"""Turn a path into the tensors that lie there: a folder of any kind, one file, or an index."""

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.entries import Entry, all_state_dicts, model_entries
from ckptfix.checkpoint.filenames import FileName, ModelName, parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, Component
from ckptfix.checkpoint.groups import group_files
from ckptfix.checkpoint.manifest import usable_manifest
from ckptfix.checkpoint.scan import scan_folder
from ckptfix.errors import FormatError, OperationError, UsageError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.storage.listing import listed_files
from ckptfix.storage.paths import command, existing
from ckptfix.weights.below import model_folders
from ckptfix.weights.deepspeed import deepspeed_weights
from ckptfix.weights.deepspeed_files import deepspeed_folders, deepspeed_paths, is_deepspeed_file
from ckptfix.weights.sharded import dcp_folders, dcp_paths, dcp_weights
from ckptfix.weights.single import file_weights
from ckptfix.weights.stored import Format, StoredCheckpoint, Weights


@paused_gc()
def open_checkpoint(
    path: str | os.PathLike[str], *, original: bool = False, lone_shard: bool = False
) -> StoredCheckpoint:
    """Return what lies at a path, by headers and opcodes; no tensor is read.

    Of a folder the weights that ``load_state`` and ``from_pretrained`` look for, of each model in one format; without
    any, every state dict of a module; and those in sub-folders as hooks and pipelines have them. ``original``: of
    DeepSpeed the weights in the dtype of training, not in fp32.
    ``lone_shard``: a shard that is given by its name stands for itself, without the other files of its model.
    Raises UsageError when nothing is there, OperationError when weights cannot be read as a whole (what is wrong, and
    what to type next), OSError.
    """
    given = existing(path)
    if not given.is_dir():
        return _one_file(given, lone_shard=lone_shard)
    try:
        return _folder(given, original=original)
    except FormatError as error:
        raise OperationError(f"{given}: {error}; next: {command('check', given)}") from error


def other_files(checkpoint: StoredCheckpoint) -> tuple[PurePosixPath, ...]:
    """Return all that holds no weights of a checkpoint, relative to its root, at any depth, as ``listed_files`` does.

    Walks the folder, which opening does not. None are beside a lone file. Raises OSError when it cannot be listed.
    """
    if checkpoint.only is not None:
        return ()
    used = {str(file) for one in checkpoint.weights for file in one.files}
    return tuple(PurePosixPath(name) for name in listed_files(checkpoint.root) if name not in used)


def _one_file(path: Path, *, lone_shard: bool) -> StoredCheckpoint:
    is_index = path.name.endswith(".json")
    folder = scan_folder(path.parent, None if is_index else path.name)
    if lone_shard and not is_index:
        folder = replace(folder, components=tuple(map(_by_itself, folder.components)))
    found = all_state_dicts(folder) or all_state_dicts(folder, of_modules=False)
    entries = [one for one in found if not is_index or one.label == path.name]
    if not entries:
        why = _unsupported(folder) or f"next: {command('check', path)}"
        raise UsageError(f"{path} holds no weights of a model; {why}")
    return StoredCheckpoint(root=folder.root, only=path.name, weights=_all_readable(folder, entries, path))


def _folder(root: Path, *, original: bool) -> StoredCheckpoint:
    folder, found = _opened(root, original=original, depth=0)
    if not found.weights:
        below = ("--recursive",) if folder.subfolders and not folder.components else ()
        why = _unsupported(folder) or f"next: {command('check', root, '', *below)}"
        raise UsageError(f"{root} holds no weights of a model; {why}")
    return found


def _opened(root: Path, *, original: bool, depth: int) -> tuple[CheckpointFolder, StoredCheckpoint]:
    """Return what is in a folder, and in those below that belong to the same checkpoint; it can be nothing."""
    folder = scan_folder(
        root, wanted=lambda name: not is_deepspeed_file(str(name))
    )  # a thousand ranks have many
    manifest = usable_manifest(root)
    found: dict[int, Weights] = {}
    for entry in model_entries(folder, manifest):
        found[entry.index] = _readable(folder, entry, root)
    for index, where in dcp_folders(folder):
        if index not in found:
            found[index] = dcp_weights(root, where, index)
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


def _unsupported(folder: CheckpointFolder) -> str:
    """Return in words which file is of a kind that is not read, "" when none is."""
    found = (one for one in folder.components if one.problem is not None and one.is_unsupported)
    return next((f"not read: {one.path}: {one.problem.message}" for one in found if one.problem), "")


def _by_itself(component: Component) -> Component:
    """Return a shard as a file of its own."""
    return replace(component, name=replace(component.name, shard=None))


def _all_readable(folder: CheckpointFolder, entries: Sequence[Entry], given: Path) -> tuple[Weights, ...]:
    """Return the weights of entries of which several can be in one file."""
    paths: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for entry in entries:
        paths.setdefault(entry.files, []).append(entry.path)
    return tuple(
        _readable(folder, entry, given, [path for path in paths[entry.files] if path != entry.path])
        for entry in entries
    )


def _readable(
    folder: CheckpointFolder, entry: Entry, given: Path, beside: Collection[tuple[str, ...]] = ()
) -> Weights:
    if entry.problem:
        raise OperationError(
            f"{folder.root / entry.label}: {entry.problem}; next: {command('check', given)}, or, to recover what is "
            f"intact: {command('salvage', given)} NEW_FOLDER"
        )
    return file_weights(folder.root, entry, beside)


def _in_one_format(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries without those of a library's model that is there as safetensors, too, as loaders take that."""
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
    """Yield the files of the same models in a second format, and what is left of an earlier save with other shards."""
    first = [parse_file_name(str(one.files[0])) for one in weights if one.files]
    opened = {(name.model, name.index) for name in first if name is not None}
    opened |= {
        (ModelName("model"), one.index) for one in weights if one.format in (Format.DCP, Format.DEEPSPEED)
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
