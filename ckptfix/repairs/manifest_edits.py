"""Edits of the records of a checkpoint, its manifest and the commit marker of its upload, after a
repair drops, moves, renames or rewrites the files that they list.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from msgspec.structs import replace

from ckptfix.checkpoint.dcp import DcpFolder, new_paths, scan_dcp_folders
from ckptfix.checkpoint.entries import Entry, all_state_dicts, model_entries
from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.folder import CheckpointFolder, scan_folder
from ckptfix.checkpoint.folder_names import parse_folder_name
from ckptfix.checkpoint.manifest import Manifest, ManifestEntry, key_fingerprint, read_manifest
from ckptfix.errors import FormatError
from ckptfix.formats.dcp_metadata import METADATA_NAME, DcpMetadata, model_names
from ckptfix.repairs.steps import DropEntry, Renumber, RewriteNames, SetAside, Step
from ckptfix.storage.edits import Append, Edit, Move, Patch, Remove, Replace, Truncate, gone_after
from ckptfix.storage.files import AnyPath
from ckptfix.storage.markers import read_commit
from ckptfix.storage.paths import COMMITTED, MANIFEST
from ckptfix.storage.recipes import KEPT, Literal, Recipe


def manifest_edits(
    folder: CheckpointFolder, steps: Sequence[Step], edits: Sequence[Edit]
) -> list[Edit]:
    """Return the edits that make the manifest and the commit marker follow a repair: none of one
    that is not there, or stays the same.

    Digests of tensors survive a rename, as no byte of them changes; of a file that changes, the
    digest is forgotten. A manifest that cannot be understood is left as it is. Raises OSError when
    it cannot be read.
    """
    if not edits:
        return []
    marker = _marker_edits(folder.root, edits)
    try:
        manifest = read_manifest(folder.root)
    except FormatError:
        return marker
    if manifest is None:
        return marker
    if folder.only is not None:  # the manifest lists all shards of a model
        folder = scan_folder(folder.root)
    new = followed(manifest, folder, steps, edits)
    if new == manifest:
        return marker
    content = Recipe.like(folder.root / MANIFEST, (Literal(new.to_bytes()),))
    return [*marker, Replace(path=PurePosixPath(MANIFEST), content=content, previous=KEPT)]


def _marker_edits(root: AnyPath, edits: Sequence[Edit]) -> list[Edit]:
    """Return the edit after which the commit marker lists no file that the edits take away.

    With it a checkpoint that was downloaded, or whose journal was deleted, lacks nothing.
    """
    try:
        commit = read_commit(root)
    except FormatError:
        return []
    gone = set(map(str, gone_after(edits)))
    if commit is None or gone.isdisjoint(commit.objects):
        return []
    left = {name: sent for name, sent in commit.objects.items() if name not in gone}
    data = replace(commit, objects=left).to_bytes()
    content = Recipe.like(root / COMMITTED, (Literal(data),))
    return [Replace(path=PurePosixPath(COMMITTED), content=content, previous=KEPT)]


def followed(
    manifest: Manifest, folder: CheckpointFolder, steps: Sequence[Step], edits: Sequence[Edit]
) -> Manifest:
    """Return the manifest of a folder after the edits of these steps. ``folder``: as it was scanned
    before them.
    """
    actions = [step.action for step in steps]
    dropped = {
        str(action.path): str(action.kept) for action in actions if isinstance(action, DropEntry)
    }
    for aside in (action for action in actions if isinstance(action, SetAside)):
        dropped |= dict.fromkeys(map(str, (aside.path, *aside.files)), str(aside.kept))
    moved = {
        str(action.source): str(action.target) for action in actions if isinstance(action, Renumber)
    }
    renames = {action.path: action for action in actions if isinstance(action, RewriteNames)}
    entries = {
        entry.label: entry for entry in (*all_state_dicts(folder), *model_entries(folder, None))
    }
    renamed = tuple(
        _renamed(entry, entries[entry.file], renames) if entry.file in entries else entry
        for entry in _renamed_in_dcp(manifest.models, folder, renames)
    )
    models, places = _moved(renamed, dropped, moved)
    optimizers, driven = _moved(manifest.optimizers, dropped, moved)
    schedulers, _ = _moved(manifest.schedulers, dropped, moved)
    sizes, sha256, ranges = _files(manifest, edits)
    return replace(
        manifest,
        models=models,
        optimizers=tuple(
            replace(
                entry, models=tuple(sorted({places.get(index, index) for index in entry.models}))
            )
            for entry in optimizers
        ),
        schedulers=tuple(
            replace(
                entry,
                optimizer=(
                    None
                    if entry.optimizer is None
                    else driven.get(entry.optimizer, entry.optimizer)
                ),
            )
            for entry in schedulers
        ),
        dataloaders=_moved(manifest.dataloaders, dropped, moved)[0],
        custom=_moved(manifest.custom, dropped, moved)[0],
        files=sizes,
        sha256=sha256,
        ranges=ranges,
    )


def _renamed_in_dcp(
    entries: Iterable[ManifestEntry],
    folder: CheckpointFolder,
    renames: Mapping[PurePosixPath, RewriteNames],
) -> Iterator[ManifestEntry]:
    """Rename the keys in the entries of DCP folders."""
    renamed: dict[str, tuple[DcpMetadata, dict[str, str]]] = {}
    if any(path.name == METADATA_NAME for path in renames):
        for state in scan_dcp_folders(folder):
            action = renames.get(state.metadata_path)
            if action is not None and state.metadata is not None:
                labels = {
                    str(state.path)
                }  # "." when the checkpoint itself is one, in older manifests its name
                if not state.path.parts:
                    labels.add(folder.root.resolve().name)
                new = _new_names(state, state.metadata, action)
                renamed |= dict.fromkeys(labels, (state.metadata, new))
    for entry in entries:
        metadata_and_names = renamed.get(entry.file) or renamed.get(entry.file.partition("[")[0])
        if metadata_and_names is None:
            yield entry
            continue
        metadata, new = metadata_and_names
        model = model_names(metadata)
        names = model.names if model is not None else {}
        tensors = [
            (names[tensor.fqn], tensor.dtype, tensor.shape)
            for tensor in metadata.tensors
            if tensor.fqn in names and tensor.dtype is not None
        ]
        keys = entry.keys
        if keys == key_fingerprint(tensors):
            keys = key_fingerprint(
                (new.get(fqn, fqn), dtype, shape) for fqn, dtype, shape in tensors
            )
        yield replace(
            entry,
            keys=keys,
            digests={new.get(fqn, fqn): digest for fqn, digest in entry.digests.items()},
            aliases={
                new.get(name, name): new.get(kept, kept) for name, kept in entry.aliases.items()
            },
        )


def _new_names(state: DcpFolder, metadata: DcpMetadata, action: RewriteNames) -> dict[str, str]:
    """Return old key -> new key of the model in a DCP folder, as the manifest has the keys."""
    model = model_names(metadata)
    if model is None:
        return {}
    paths = new_paths(state, metadata, action.maps)
    depth = len(model.prefix)
    return {
        name: ".".join(map(str, paths[fqn][depth:]))
        for fqn, name in model.names.items()
        if fqn in paths
    }


def _renamed(
    entry: ManifestEntry, component: Entry, renames: Mapping[PurePosixPath, RewriteNames]
) -> ManifestEntry:
    """Rename the keys in an entry."""
    names: dict[str, str] = {}
    key_map: Callable[[str], str] | None = None
    for member in component.members:
        action = renames.get(member.path)
        here = action.maps.get((component.path, "state dict")) if action is not None else None
        if here is not None:
            key_map = here
            scopes = (
                scope
                for scope in member.scopes
                if (scope.path, scope.kind) == (component.path, "state dict")
            )
            names |= {fqn: here(fqn) for scope in scopes for fqn in scope.names}
    if key_map is None:
        return entry
    tensors = [tensor for member in component.members for tensor in member.tensors]
    keys = entry.keys
    if keys == key_fingerprint((tensor.fqn, tensor.dtype, tensor.shape) for tensor in tensors):
        keys = key_fingerprint(
            (names.get(tensor.fqn, tensor.fqn), tensor.dtype, tensor.shape) for tensor in tensors
        )
    return replace(
        entry,
        keys=keys,
        digests={names.get(fqn, fqn): digest for fqn, digest in entry.digests.items()},
        aliases={key_map(name): names.get(kept, kept) for name, kept in entry.aliases.items()},
    )


def _moved(
    entries: Iterable[ManifestEntry], dropped: Mapping[str, str], moved: Mapping[str, str]
) -> tuple[tuple[ManifestEntry, ...], dict[int, int]]:
    """Return the remaining entries at their new positions, and old position -> new one, also of a
    duplicate.
    """
    entries = tuple(entries)
    position = {entry.file: entry.index for entry in entries}
    new = {}
    for entry in entries:
        target = moved.get(entry.file)
        parsed = None if target is None else parse_file_name(target) or parse_folder_name(target)
        new[entry.index] = parsed.index if parsed is not None else entry.index
    left = tuple(
        replace(entry, file=moved.get(entry.file, entry.file), index=new[entry.index])
        for entry in entries
        if entry.file not in dropped
    )
    for entry in entries:
        kept = dropped.get(entry.file)
        if kept is not None and kept in position:
            new[entry.index] = new[position[kept]]
    return tuple(sorted(left, key=lambda entry: entry.index)), new


_Ranges = dict[str, tuple[str, ...]]


def _files(
    manifest: Manifest, edits: Iterable[Edit]
) -> tuple[dict[str, int], dict[str, str], _Ranges]:
    """Return the sizes and the digests of the files after the edits; the digest is "" where only a
    read gives it.
    """
    sizes, sha256, ranges = dict(manifest.files), dict(manifest.sha256), dict(manifest.ranges)

    def change(path: PurePosixPath, size: int | None) -> None:
        name = str(path)
        if name in sizes and size is not None:
            sizes[name] = size
        if name in sha256 or name in ranges:
            sha256[name] = ""
            ranges.pop(name, None)

    for edit in edits:
        match edit:
            case Patch():
                change(edit.path, None)
            case Append():
                change(edit.path, edit.old_size + len(edit.data))
            case Truncate():
                change(edit.path, edit.new_size)
            case Replace():
                name = str(edit.path)
                if manifest.is_of_a_save:
                    sizes[name] = edit.content.size
                if manifest.digests:
                    sha256[name] = _digest(edit.content)
                    ranges.pop(name, None)
            case Remove():
                for known in (sizes, sha256, ranges):
                    known.pop(str(edit.path), None)
            case Move():
                for known in (sizes, sha256, ranges):
                    _move(known, str(edit.source), str(edit.target))
    return sizes, sha256, ranges


def _move(known: Any, source: str, target: str) -> None:
    if source in known:
        known[target] = known.pop(source)


def _digest(recipe: Recipe) -> str:
    """Return the sha256 of a file that a recipe contains in full, as an index; "" when bytes come
    from other files.
    """
    if not all(isinstance(piece, Literal) for piece in recipe.pieces):
        return ""
    data = b"".join(piece.data for piece in recipe.pieces if isinstance(piece, Literal))
    return hashlib.sha256(data).hexdigest()
