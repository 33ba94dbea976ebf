"""Target of a command: a folder, or one file in it."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath

from msgspec import Struct

from ckptfix.checkpoint.completion_markers import missing_marker
from ckptfix.checkpoint.dcp import belongs, holds_dcp, is_of_checkpoint
from ckptfix.checkpoint.deepspeed_files import deepspeed_below, deepspeed_folders, is_deepspeed_file
from ckptfix.checkpoint.downloads import half_downloads, may_be_download
from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder
from ckptfix.checkpoint.folder_names import describe_folder_name, parse_folder_name, split_number
from ckptfix.checkpoint.latest import OF_ARCHIVES, cut_upload, family_holds, holds_files, is_bare
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.checkpoint.model_configs import (
    MODULES,
    PIPELINE,
    broken_lists,
    lost_model,
    lost_models,
    may_hold_weights,
    pipeline_components,
)
from ckptfix.checkpoint.neighbours import Siblings
from ckptfix.errors import FormatError, UsageError
from ckptfix.storage.files import (
    AnyPath,
    Openable,
    StorePath,
    exists,
    is_of_listing,
    is_symlink,
    names_in,
    store_of,
    walk,
)
from ckptfix.storage.paths import JOURNAL, command, existing, shell_path
from ckptfix.storage.staged import is_temporary
from ckptfix.wording import count_of, list_names


class Target(Struct, frozen=True):
    """A folder, and the name of one requested file in it, or None for all files."""

    root: AnyPath
    only: str | None

    @property
    def path(self) -> AnyPath:
        """The path of the folder, or of the one file."""
        return self.root / self.only if self.only is not None else self.root


def find_target(path: Openable) -> Target:
    """Return the target at ``path``. A symbolic link to a file is that link, not the file behind
    it.

    A file of a DCP folder means the folder: a single file of it cannot be checked. Raises
    UsageError unless the path is a folder or a regular file.
    """
    given = path if isinstance(path, StorePath) else Path(path)
    if is_symlink(given) and not exists(given):
        return Target(given.parent, given.name)  # a broken link is a file that is damaged
    if existing(path).is_dir():
        return Target(given, None)
    return Target(given.parent, None if belongs(given.name) else given.name)


def ensure_checkpoint(folder: CheckpointFolder, verb: str = "check", after: str = "") -> None:
    """Raise UsageError when the folder holds no checkpoint: "no problems" would be wrong.

    ``verb``: the command to name for the checkpoints below it; ``after``: what follows their path.
    """
    for one in folder.components if folder.only is not None else ():
        if one.problem is not None and one.problem.is_foreign:
            is_in_checkpoint = any(
                name is not None for name in map(parse_file_name, folder.unscanned)
            )
            next_step = f"; next: {command(verb, folder.root)}{after}" if is_in_checkpoint else ""
            raise UsageError(f"{folder.root / one.path} is {one.problem.message}{next_step}")
    if holds_checkpoint(folder):
        return
    if listed := _listed(folder.root):
        raise UsageError(
            f"{folder.root} has no checkpoint files, although its manifest lists "
            f"{count_of(listed, 'file')}; to see which: {command('verify', folder.root)}"
        )
    if (why := cut_upload(folder.root)) is not None:
        raise UsageError(
            f"{folder.root} has no checkpoint files: {why}; next: wait until the upload has ended, "
            "or save again"
        )
    if not folder.subfolders:
        advice = _without_ending(folder)
        raise UsageError(f"{folder.root} has no checkpoint files: {folder.instead}{advice}")
    names = (
        f"{count_of(len(folder.subfolders), 'folder')} ({list_names(map(str, folder.subfolders))})"
    )
    next_step = f"to check them: {command('check', folder.root, '', '--recursive')}"
    if verb != "check":
        checkpoints = [*_intact_names(folder.root)]
        if folder.root in checkpoints:
            # A pipeline or a download that lacks a part: the command for it is the one that was
            # typed.
            raise UsageError(
                f"{folder.root} has no checkpoint files; to see what it lacks: "
                f"{command('check', folder.root)}"
            )
        next_step = commands_for(checkpoints, verb, after) or next_step
    raise UsageError(
        f"{folder.root} has no checkpoint files, but {names}; name the one that is a checkpoint; "
        f"{next_step}"
    )


_ENDING = re.compile(r"(.+)(~|\.[0-9]{1,2}|\.(?:bak|backup|old|orig))", re.DOTALL)
"""Endings that editors, ``cp --backup``, ``logrotate`` and people add to names."""


def _without_ending(folder: CheckpointFolder) -> str:
    """Return the command that renames all files of a folder in which each has one ending more, ""
    for other folders.
    """
    matches = [_ENDING.fullmatch(path.name) for path in folder.strays]
    endings = {match[2] if match else "" for match in matches}
    names = (parse_file_name(match[1]) for match in matches if match)
    if len(endings) != 1 or not any(name is not None and name.is_state_file for name in names):
        return ""
    (ending,) = endings
    if store_of(folder.root) is not None:
        return f"; remove the ending {ending!r} from their names"
    shorter = "?" if ending == "~" else ".*"
    where = shell_path(folder.root)
    command_line = f'for file in {where}/*{ending}; do mv -n "$file" "${{file%{shorter}}}"; done'
    return f"; to remove the ending {ending!r} from their names: {command_line}"


def commands_for(checkpoints: Iterable[AnyPath], verb: str, after: str = "") -> str:
    """Return the next step in words: the command for each of several checkpoints, of many the
    first; "" for none.
    """
    checkpoints = iter(checkpoints)
    commands = [f"{command(verb, path)}{after}" for path in islice(checkpoints, 3)]
    more = sum(1 for _ in checkpoints)
    rest = f"; and the same for {count_of(more, 'more checkpoint')}" if more else ""
    return f"next: {'; '.join(commands)}{rest}" if commands else ""


def _intact_names(root: AnyPath) -> Iterator[AnyPath]:
    """Yield the checkpoints below a folder, without staging folders and those without weights."""
    with suppress(UsageError):
        yield from (
            path
            for path in find_checkpoints(root)
            if not (is_temporary(path.name) or is_bare(path))
        )


def holds_checkpoint(folder: CheckpointFolder) -> bool:
    """Return whether a folder holds a file of a checkpoint, or a folder in which a library keeps
    its states.
    """
    return (
        bool(folder.components)
        or any(kind != PLAIN_FOLDER for kind in folder.subfolders.values())
        or any(holds_dcp(folder.root / path) for path in (PurePosixPath(), *folder.subfolders))
        or any(deepspeed_folders(folder))
    )


def nested_checkpoint(folder: CheckpointFolder) -> AnyPath | None:
    """Return the checkpoint in a sub-folder that is all a folder holds, None for any other folder.

    An archive that is unpacked in a folder of its name leaves it so, and ``cp -r`` of a checkpoint
    onto itself.
    """
    below = [
        path
        for path in folder.subfolders
        if not path.name.startswith(".") and path.name != OF_ARCHIVES
    ]
    is_alone = len(below) == 1 and all(path.name.startswith(".") for path in folder.strays)
    if not is_alone or folder.only is not None or holds_checkpoint(folder):
        return None
    inner = folder.root / below[0]
    return inner if holds_files(inner) else None


def save_inside(folder: AnyPath) -> str:
    """Return the name of a folder with a sharded save in a folder without one, "" where there is
    none.

    ``cp -r optimizer_0 NEW/optimizer_0`` leaves ``optimizer_0/optimizer_0``, if the new one exists.
    """
    names = _names(folder)
    if any(map(_is_sharded, names)):
        return ""
    return next((name for name in names if any(map(_is_sharded, _names(folder / name)))), "")


def _names(folder: AnyPath) -> list[str]:
    try:
        return sorted(names_in(folder))
    except OSError:
        return []


def _is_sharded(name: str) -> bool:
    return belongs(name) or is_deepspeed_file(name)


def _listed(root: AnyPath) -> int:
    """Return the number of files in the manifest of a folder, 0 without a valid one."""
    try:
        manifest = read_manifest(root)
    except (FormatError, OSError):
        return 0
    return len({*manifest.files, *manifest.digests}) if manifest is not None else 0


def find_checkpoints(path: Openable) -> Iterator[AnyPath]:
    """Yield every folder at or below ``path`` that holds a component or is a DCP folder, parents
    first.

    And those that are named as checkpoints and hold no weights (``is_bare``), or lack the mark of a
    complete save: a save that was killed leaves them. And downloads that did not end, pipelines of
    diffusers that lack one of their models, and ``path`` itself where ``lost_model`` finds one.

    Each is yielded while the others are still being listed: there may be 100,000 of them.
    Accelerate's DCP and DeepSpeed folders belong to the checkpoint around them, and so does a
    folder that DeepSpeed's ``latest`` names. Staging folders of guarded saves are yielded, and not
    searched. Raises UsageError when ``path`` is not a folder, or, at the end, when it holds no
    checkpoint.
    """
    top = path if isinstance(path, StorePath) else Path(path)
    if not existing(top).is_dir():
        raise UsageError(f"{path} is not a folder; to check one file: {command('check', top)}")
    around: list[AnyPath] = []  # the checkpoints that the present folder lies in
    refused: list[AnyPath] = []
    is_empty = True
    holds = lru_cache(maxsize=8)(family_holds)
    siblings = Siblings()

    def refuse(error: OSError) -> None:
        folder = Path(os.fsdecode(error.filename))
        if describe_folder_name(folder.name) is None or folder.parent not in around:
            refused.append(folder)  # check reports why it cannot be read

    for here, folders, files in walk(top, refuse):
        while around and around[-1] not in here.parents:
            around.pop()
        staging = sorted(here / name for name in folders if is_temporary(name))
        temporary = {one.name for one in staging}
        folders[:] = sorted(
            (name for name in folders if name != JOURNAL and name not in temporary), key=_by_number
        )
        sharded = {
            name
            for name in folders
            if (parse_folder_name(name) is not None and holds_dcp(here / name))
            or (describe_folder_name(name) is not None and save_inside(here / name))
        }
        below = deepspeed_below(here, [PurePosixPath(name) for name in folders])
        sharded.update(str(where) for _, where in below if where.parts)
        folders[:] = [name for name in folders if name not in sharded]
        found = [*refused, *staging]
        refused.clear()
        if sharded or any(map(is_of_checkpoint, files)):
            around.append(here)
            found.append(here)
        elif (
            is_bare(here, holds)
            or (not {PIPELINE, MODULES}.isdisjoint(files) and _lacks_part_of_list(here, folders))
            or (may_be_download(here, folders) and any(half_downloads(here)))
            or (
                split_number(here.name) is not None
                and missing_marker(siblings.of(here)) is not None
            )
        ):
            found.append(here)
        is_empty &= not found
        yield from found
    yield from refused
    # A config alone below a folder may be stored next to code. The folder that was asked for is
    # meant to be a model.
    if is_empty and not refused and _lacks_all_weights(top):
        yield top
    elif is_empty and not refused:
        raise UsageError(f"no checkpoint found in or below {path}")


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return the key that sorts names as people count: ``checkpoint-4`` before ``checkpoint-12``."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)
    ]


def _lacks_part_of_list(folder: AnyPath, subfolders: Iterable[str]) -> bool:
    """Return whether a list of models is broken, or not each of them has its weights.

    Without any weights the folder may be configs alone.
    """
    below = [PurePosixPath(name) for name in subfolders if describe_folder_name(name) is None]
    lacks_part = any(broken_lists(folder)) or any(lost_models(folder, below, (PIPELINE,)))
    return lacks_part and may_hold_weights(folder)


def _lacks_all_weights(folder: AnyPath) -> bool:
    """Return whether a folder has the config of a model or the list of a pipeline, and no
    weights.
    """
    return not is_of_listing(folder) and (
        bool(pipeline_components(folder)) or lost_model(folder) is not None
    )
