"""Turn a path into the tensors that lie there: a folder of any kind, one file, or an index."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.entries import Entry, all_state_dicts, model_entries
from ckptfix.checkpoint.filenames import Role
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.groups import group_files
from ckptfix.checkpoint.manifest import Manifest, read_manifest
from ckptfix.checkpoint.scan import scan_folder
from ckptfix.errors import FormatError, OperationError, UsageError
from ckptfix.formats.pickle_stream import paused_gc
from ckptfix.storage.paths import JOURNAL
from ckptfix.weights.deepspeed import deepspeed_folders, deepspeed_weights
from ckptfix.weights.sharded import dcp_folders, dcp_weights
from ckptfix.weights.single import file_weights
from ckptfix.weights.stored import StoredCheckpoint, Weights


@paused_gc()
def open_checkpoint(path: str | os.PathLike[str]) -> StoredCheckpoint:
    """Return what lies at a path, by headers and opcodes; no tensor is read.

    Of a folder the weights that ``load_state`` and ``from_pretrained`` look for, of each model in one format; without
    any, every state dict of a module. Raises UsageError when nothing is there, OperationError when weights cannot be
    read as a whole (what is wrong, and what to type next), OSError.
    """
    given = Path(path)
    if not given.exists():
        raise UsageError(f"{given} does not exist")
    if not given.is_dir():
        return _one_file(given)
    try:
        return _folder(given)
    except FormatError as error:
        raise OperationError(f"{given}: {error}; next: ckptfix check {shlex.quote(str(given))}") from error


def _one_file(path: Path) -> StoredCheckpoint:
    is_index = path.name.endswith(".json")
    folder = scan_folder(path.parent, None if is_index else path.name)
    found = all_state_dicts(folder) or all_state_dicts(folder, of_modules=False)
    entries = [one for one in found if not is_index or one.label == path.name]
    if not entries:
        raise UsageError(f"{path} holds no weights of a model; next: ckptfix check {shlex.quote(str(path))}")
    weights = tuple(_readable(folder, entry, path) for entry in entries)
    return StoredCheckpoint(root=folder.root, only=path.name, weights=weights)


def _folder(root: Path) -> StoredCheckpoint:
    folder = scan_folder(root)
    manifest = _manifest(root)
    found: dict[int, Weights] = {}
    for entry in model_entries(folder, manifest):
        found[entry.index] = _readable(folder, entry, root)
    for index, where in (*dcp_folders(folder), *deepspeed_folders(folder)):
        read = dcp_weights if (root / where / ".metadata").exists() else deepspeed_weights
        found.setdefault(index, read(root, where, index))
    weights = tuple(found[index] for index in sorted(found))
    if not weights:
        weights = tuple(_readable(folder, entry, root) for entry in all_state_dicts(folder))
    if not weights:
        raise UsageError(f"{root} holds no weights of a model; next: ckptfix check {shlex.quote(str(root))}")
    used = {str(file) for one in weights for file in one.files}
    return StoredCheckpoint(
        root=root,
        weights=weights,
        others=tuple(path for path in _files(root) if str(path) not in used),
        rivals=tuple(path for path in _other_weights(folder) if str(path) not in used),
        is_save_state=folder.is_save_state,
    )


def _readable(folder: CheckpointFolder, entry: Entry, given: Path) -> Weights:
    if entry.problem:
        where = shlex.quote(str(given))
        raise OperationError(
            f"{folder.root / entry.label}: {entry.problem}; next: ckptfix check {where}, or, to get out what is whole: "
            f"ckptfix salvage {where} NEW_FOLDER"
        )
    return file_weights(folder.root, entry)


def _other_weights(folder: CheckpointFolder) -> Iterator[PurePosixPath]:
    """Yield the files of models in a second format, and what is left of an earlier save with other shards."""
    for group in group_files(folder):
        paths = [member.path for member in group.members if member.role is Role.MODEL]
        yield from paths
        if paths and group.index_path is not None and group.index is not None:
            yield group.index_path


def _manifest(root: Path) -> Manifest | None:
    try:
        return read_manifest(root)
    except (FormatError, OSError):
        return None  # only names of tied weights are taken from it


def _files(root: Path) -> Iterator[PurePosixPath]:
    """Yield every file below a folder, in order; what ckptfix keeps for itself is left out."""
    for where, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name != JOURNAL)
        for name in sorted(names):
            yield PurePosixPath(os.path.relpath(os.path.join(where, name), root))
