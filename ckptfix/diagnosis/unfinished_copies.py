"""Saves, copies, downloads and uploads that were cut short, by the temporary names and marks that
they leave.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import PurePosixPath

from ckptfix.checkpoint.completion_markers import missing_marker
from ckptfix.checkpoint.dcp import METADATA_UNFINISHED, DcpFolder, is_of_checkpoint
from ckptfix.checkpoint.downloads import HalfDownload
from ckptfix.checkpoint.filenames import (
    TRAINER_STATE,
    copied_name,
    downloaded_name,
    names_weights,
    parse_file_name,
)
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.latest import UNFINISHED, cut_upload
from ckptfix.checkpoint.model_configs import (
    ADAPTER,
    CONFIG,
    GENERATION,
    PIPELINE,
    lists_models,
    may_hold_weights,
)
from ckptfix.checkpoint.neighbours import Neighbours
from ckptfix.checkpoint.roles import NOT_STATES
from ckptfix.diagnosis.findings.interrupted import HalfDownloaded, InterruptedSave, SpareDownload
from ckptfix.diagnosis.findings.stale import PerhapsUnmarked, UnmarkedSave
from ckptfix.storage.files import AnyPath, lies_in, names_in
from ckptfix.storage.markers import UPLOAD
from ckptfix.storage.paths import JOURNAL

_SAVING = re.compile(r"\.tmp[A-Za-z0-9]{6}")
"""Temporary names of ``save_file`` of safetensors."""

_JSON = (CONFIG, ADAPTER, GENERATION, PIPELINE, TRAINER_STATE)
"""Small files of which an unfinished download is named where the file itself is missing."""


def is_unfinished(name: str) -> bool:
    """Return whether a name is a temporary one of a checkpoint's file. DCP's own ``.metadata.tmp``
    is not.
    """
    if name == METADATA_UNFINISHED:
        return False
    return bool(_SAVING.fullmatch(name)) or is_of_checkpoint(copied_name(name))


def interrupted(folder: CheckpointFolder, states: Iterable[DcpFolder]) -> Iterator[InterruptedSave]:
    """Yield the signs of a save, a copy, a download or an upload that was cut short."""
    yield from _unfinished(folder, states)
    if (folder.root / JOURNAL / UNFINISHED).exists():
        yield InterruptedSave(path=PurePosixPath(JOURNAL, UNFINISHED), mixed=True)
    elif (problem := cut_upload(folder.root)) is not None:
        yield InterruptedSave(path=PurePosixPath(UPLOAD), upload=problem)


def unmarked(neighbours: Neighbours) -> Iterator[UnmarkedSave]:
    """Yield that a checkpoint lacks the file that its library writes last."""
    if (missing := missing_marker(neighbours)) is not None:
        kind = UnmarkedSave if missing.is_certain else PerhapsUnmarked
        yield kind(path=PurePosixPath(missing.name), known_by=missing.known_by)


def _unfinished(folder: CheckpointFolder, states: Iterable[DcpFolder]) -> Iterator[InterruptedSave]:
    """Yield a finding for each file of the checkpoint that still has a temporary name.

    A download next to its file is left over: the file came by another one. aria2 alone writes to
    the file itself.
    """
    loose = dict.fromkeys([*folder.strays, *(path for state in states for path in state.files)])
    there = {*loose, *(one.path for one in folder.components), *folder.subfolders}
    for path in (*loose, *(path for path in folder.subfolders if path.suffix == ".download")):
        copied, downloaded = copied_name(path.name), downloaded_name(path.name)
        wanted = copied or downloaded
        is_missing = bool(wanted) and path.with_name(wanted) not in there
        is_download = is_of_checkpoint(downloaded) and (is_missing or path.suffix == ".aria2")
        is_json = is_missing and wanted in _JSON and path.suffix != ".tmp"
        if is_unfinished(path.name) or is_download or is_json:
            yield InterruptedSave(path=path, leftover=True, wanted=wanted if is_missing else "")


_READ_WITH_WEIGHTS = (".json", ".txt", ".model", ".py", ".jinja")
"""Suffixes of configs, tokenizers and code, which a load of complete weights needs."""


def half_downloaded(
    root: AnyPath, halves: Iterable[HalfDownload], reported: Collection[AnyPath]
) -> Iterator[InterruptedSave]:
    """Yield the findings about downloads from the hub that did not end.

    ``reported``: folders below with a report of their own.
    """
    beside = _Beside(root)
    for half in halves:
        names = tuple(
            name for name in half.names if not any(lies_in(root / name, path) for path in reported)
        )
        if half.names and not names:
            continue
        kind = SpareDownload if beside.is_spare(half) else HalfDownloaded
        path = half.path if half.have is not None else PurePosixPath(names[0])
        yield kind(path=path, names=names, have=half.have, again=half.again)


class _Beside:
    """The weights next to half downloads. Each folder is listed once: for each of 800 halves anew,
    it took seconds.
    """

    def __init__(self, root: AnyPath) -> None:
        self._root = root
        self._lists_models = cache(lambda: lists_models(root))
        self._may_hold_weights = cache(lambda: may_hold_weights(root))
        self._holds_model = cache(_holds_model)

    def is_spare(self, half: HalfDownload) -> bool:
        """Return whether nothing needs a half download, as the weights next to it are complete, by
        names alone.
        """
        if half.have is None or any(map(_is_needed, half.names)):
            return False
        if not half.names:
            return self._may_hold_weights()
        is_list = self._lists_models()
        folders = {(self._root / name).parent if is_list else self._root for name in half.names}
        return all(map(self._holds_model, folders))


def _holds_model(folder: AnyPath) -> bool:
    """Return whether names in a folder are of a model. One that does not exist lacks nothing, a
    closed one may.
    """
    try:
        return any(map(names_weights, names_in(folder)))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def _is_needed(name: str) -> bool:
    """Return whether a load needs a file next to complete weights: a config, a state of the run, or
    a shard.
    """
    parsed = parse_file_name(PurePosixPath(name).name)
    is_part = parsed is not None and (parsed.role not in NOT_STATES or parsed.shard is not None)
    return is_part or name.endswith(_READ_WITH_WEIGHTS)
