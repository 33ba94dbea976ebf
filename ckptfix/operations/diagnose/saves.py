"""The folder as a whole: files that the save wrote and that are gone, and what a copy that was cut short leaves."""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.filenames import NOT_STATES, Role, parse_file_name, parse_folder_name
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.latest import UNFINISHED, mixed
from ckptfix.checkpoint.manifest import MANIFEST, Manifest, is_repaired, not_as_saved, read_manifest
from ckptfix.checkpoint.salvaged import REPORT, read_losses
from ckptfix.checkpoint.sharded import ShardedState, belongs
from ckptfix.checkpoint.unfinished import is_unfinished
from ckptfix.errors import FormatError
from ckptfix.operations.diagnose.completeness import incomplete, listed, unresumable
from ckptfix.operations.findings import Finding, InterruptedSave, MissingFile, MissingModel, Salvaged
from ckptfix.storage.paths import JOURNAL, command
from ckptfix.storage.permission import unreadable
from ckptfix.weights.below import configured_models

_OTHER_WEIGHTS = (".gguf", ".h5", ".msgpack", ".npy", ".npz", ".onnx", ".pickle", ".pkl", ".pt2", ".tar")


class SaveDiagnosis(NamedTuple):
    """What is wrong with a folder as a save, and in words what was not checked of it, and what could not be."""

    findings: list[Finding]
    unchecked: list[str]
    unfinished: list[str]


def diagnose_save(
    folder: CheckpointFolder,
    states: Sequence[ShardedState],
    explained: Collection[PurePosixPath],
    *,
    has_deepspeed: bool,
) -> SaveDiagnosis:
    """Compare a folder with what its save wrote.

    ``explained``: damaged files that another finding is about. ``has_deepspeed``: DeepSpeed has the optimizer.
    """
    findings: list[Finding] = []
    try:
        manifest = read_manifest(folder.root)
        findings += _missing(folder, manifest, explained)
        unchecked = list(_unchecked(folder, manifest))
        is_saved = manifest is not None and manifest.is_of_a_save
        losses = read_losses(folder.root) if folder.only is None and not is_saved else None
    except FormatError as error:
        return SaveDiagnosis(findings, [f"what the save wrote: {error}"], [])
    except OSError as error:
        where = Path(error.filename or folder.root / MANIFEST)
        return SaveDiagnosis(findings, [], [f"{MANIFEST}: {unreadable(where, error)}"])
    if losses is not None:
        findings.append(Salvaged(path=PurePosixPath(REPORT), **losses._asdict()))
    if folder.only is None:
        findings += (InterruptedSave(path=path, leftover=True) for path in unfinished(folder, states))
        if mixed(folder.root):
            findings.append(InterruptedSave(path=PurePosixPath(JOURNAL, UNFINISHED), mixed=True))
        if not is_saved:  # else the manifest lists what the sub-folders held
            findings += _without_weights(folder)
        findings += _modelless(folder)
        gone = list(listed(folder, manifest))
        findings += gone
        if not (is_saved or gone):  # else the manifest lists what belongs here
            findings += incomplete(folder, manifest, has_deepspeed=has_deepspeed)
            if not findings:
                unchecked += unresumable(folder, has_deepspeed=has_deepspeed)
    return SaveDiagnosis(findings, unchecked, [])


def unfinished(folder: CheckpointFolder, states: Iterable[ShardedState]) -> Iterator[PurePosixPath]:
    """Yield the files that were to become one of the checkpoint, and are still under a name of their own."""
    paths = dict.fromkeys([*folder.strays, *(path for state in states for path in state.files)])
    return (path for path in paths if is_unfinished(path.name))


def _missing(
    folder: CheckpointFolder, manifest: Manifest | None, explained: Collection[PurePosixPath]
) -> Iterator[Finding]:
    if manifest is None or is_repaired(folder.root):
        return
    for name, saved, have in not_as_saved(folder.root, manifest):
        if folder.only in (None, name) and PurePosixPath(name) not in explained:
            yield MissingFile(path=PurePosixPath(name), saved=saved, have=have)


def _unchecked(folder: CheckpointFolder, manifest: Manifest | None) -> Iterator[str]:
    if manifest is None:
        return
    if manifest.is_of_a_save and is_repaired(folder.root):
        yield "whether all files of the save are there: a repair changed some since"
    if manifest.sha256 or any(entry.digests for entry in manifest.models):
        yield f"digests in {MANIFEST}; next: {command('verify', folder.root, folder.only or '')}"


def _modelless(folder: CheckpointFolder) -> Iterator[Finding]:
    """Yield a finding when Accelerate's states of an optimizer are there, and nothing that may be weights."""
    roles = {path: name.role for path in folder.subfolders if (name := parse_folder_name(path.name))}
    roles |= {one.path: one.role for one in folder.components if not one.name.is_of_trainer}
    optimizer = next((path for path, role in roles.items() if role is Role.OPTIMIZER), None)
    if optimizer is None or any(component.role in NOT_STATES for component in folder.components):
        return
    if any(path.suffix in _OTHER_WEIGHTS for path in folder.strays):
        return
    below = (folder.root / path for path in folder.subfolders if roles.get(path) is not Role.OPTIMIZER)
    if not any(map(_holds_weights, below)):
        yield MissingModel(path=optimizer)


def _without_weights(folder: CheckpointFolder) -> Iterator[Finding]:
    """Yield a finding for each sub-folder with the config of a model, and nothing that may be its weights."""
    for config, model in configured_models(folder):
        if not _holds_weights(folder.root / config.parent):
            yield MissingModel(path=config, model=model)


def _holds_weights(below: Path) -> bool:
    """Whether a folder or one below it holds a file that may be weights, or nobody can tell."""
    refused: list[OSError] = []
    for _, folders, names in os.walk(below, onerror=refused.append):
        folders[:] = [name for name in folders if name != JOURNAL]
        if any(parse_file_name(name) or belongs(name) or name.endswith(_OTHER_WEIGHTS) for name in names):
            return True
    return bool(refused)
