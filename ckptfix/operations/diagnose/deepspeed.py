"""DeepSpeed folders: files that are damaged, ranks that are missing, and partitions that do not make up the weights.

Their names are never changed: DeepSpeed has each of them in several places of every rank's file.
"""

from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.folder import CheckpointFolder, is_unreadable
from ckptfix.checkpoint.pairing import Progress
from ckptfix.checkpoint.scan import scan_folder
from ckptfix.errors import OperationError
from ckptfix.formats.torch_file import TorchFile
from ckptfix.operations.diagnose.files import diagnose_files
from ckptfix.operations.findings import Finding, MalformedFile, MissingRank
from ckptfix.weights.deepspeed import deepspeed_weights
from ckptfix.weights.deepspeed_files import (
    MissingRankError,
    OtherKindError,
    deepspeed_folders,
    deepspeed_paths,
    is_deepspeed_file,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedState:
    """A DeepSpeed checkpoint in a folder, and what is wrong with it.

    ``files`` and ``size`` in bytes: 0 where it is the folder itself, whose components they are anyway. ``tensors``: how
    many its weights are. ``unread``: in words, what is not looked into; ``unfinished``: what may not be read.
    ``has_checksums``: a file has, and ``--data`` compares them.
    """

    path: PurePosixPath
    findings: tuple[Finding, ...]
    files: int = 0
    size: int = 0
    tensors: int = 0
    unread: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    has_checksums: bool = False


def without_deepspeed(folder: CheckpointFolder) -> CheckpointFolder:
    """Return a folder without the files of DeepSpeed: the names in them say nothing alone."""
    own = tuple(one for one in folder.components if not is_deepspeed_file(one.path.name))
    return replace(folder, components=own)


def diagnose_deepspeed(
    folder: CheckpointFolder, *, data: bool, progress: Progress | None
) -> tuple[DeepSpeedState, ...]:
    """Look into each DeepSpeed checkpoint of a scanned folder. ``data``: compare the CRC of every record.

    Raises OSError when a file that could be scanned can no longer be read.
    """
    if folder.only is not None:
        return ()
    return tuple(_state(folder, where, index, data, progress) for index, where in deepspeed_folders(folder))


def _state(
    folder: CheckpointFolder, where: PurePosixPath, index: int, data: bool, progress: Progress | None
) -> DeepSpeedState:
    if not where.parts:  # its files are looked at with all others of the folder
        is_broken = any(one.problem is not None for one in folder.components)
        return _whole(folder.root, where, index, is_broken, DeepSpeedState(path=where, findings=()))
    findings: list[Finding] = []
    unread: list[str] = []
    unfinished: list[str] = []
    is_broken = has_checksums = False
    files = size = 0
    for path in deepspeed_paths(folder.root, where):  # one by one: a thousand ranks have many names
        scanned = scan_folder(folder.root / where, path.name)
        of_root = tuple(replace(one, path=path) for one in scanned.components)
        scanned = replace(scanned, root=folder.root, components=of_root)
        findings += diagnose_files(scanned, data=data, progress=progress, explained=frozenset())
        for one in of_root:
            files, size = files + 1, size + one.size
            has_checksums |= isinstance(one.content, TorchFile)
            is_broken |= one.problem is not None
            if one.problem is not None and one.problem.is_only_unchecked:
                unread.append(f"{path}: {one.problem.message}")
            elif one.problem is not None and is_unreadable(one):
                unfinished.append(f"{path}: {one.problem.message}")
    state = DeepSpeedState(
        path=where,
        findings=tuple(findings),
        files=files,
        size=size,
        unread=tuple(unread),
        unfinished=tuple(unfinished),
        has_checksums=has_checksums,
    )
    return _whole(folder.root, where, index, is_broken, state)


def _whole(
    root: Path, where: PurePosixPath, index: int, is_broken: bool, state: DeepSpeedState
) -> DeepSpeedState:
    """Return the state with what there is to say of all files together. ``is_broken``: one of them is, and is told."""
    try:
        return replace(state, tensors=len(deepspeed_weights(root, where, index).named()))
    except OtherKindError as error:
        words = f"{where}/ (a DeepSpeed folder), as a whole: {_told(error, root, where)[1]}"
        return replace(state, unread=(*state.unread, words))
    except MissingRankError as error:
        why = _told(error, root, where)[1]
        finding: Finding = MissingRank(
            path=where / error.path.name, rank=error.rank, files=error.files, items=0, holds=(), detail=why
        )
    except OperationError as error:
        if is_broken:
            return state
        path, why = _told(error, root, where)
        finding = MalformedFile(path=path, detail=why)
    except OSError:
        if is_broken:
            return state
        raise
    return replace(state, findings=(*state.findings, finding))


def _told(error: OperationError, root: Path, where: PurePosixPath) -> tuple[PurePosixPath, str]:
    """Return what an error is about, relative to the root, and its sentence without that and without advice."""
    text = str(error).partition("; next: ")[0]
    files = list(deepspeed_paths(root, where))
    for file in files:
        if text.startswith(f"{root / file}: "):
            return file, text.removeprefix(f"{root / file}: ")
    about = where if where.parts else files[0]
    return about, text.removeprefix(f"{root / where}: ")
