"""Target of a command: a folder, or one file in it."""

import os
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.dcp import belongs, holds_dcp
from ckptfix.checkpoint.deepspeed_files import deepspeed_below, deepspeed_folders
from ckptfix.checkpoint.filenames import describe_folder_name, parse_file_name, parse_folder_name
from ckptfix.checkpoint.folder import PLAIN_FOLDER, CheckpointFolder
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.dataclass import dataclass
from ckptfix.errors import FormatError, UsageError
from ckptfix.storage.paths import JOURNAL, command, existing
from ckptfix.storage.staged import is_temporary
from ckptfix.wording import count_of, list_names


@dataclass(frozen=True, slots=True)
class Target:
    """A folder, and the name of one requested file in it, or None for all files."""

    root: Path
    only: str | None

    @property
    def path(self) -> Path:
        """The path of the folder, or of the one file."""
        return self.root / self.only if self.only is not None else self.root


def find_target(path: str | os.PathLike[str]) -> Target:
    """Return the target at ``path``. A symbolic link to a file is that link, not the file behind it.

    A file of a DCP folder means the folder: a single file of it cannot be checked. Raises UsageError unless
    the path is a folder or a regular file.
    """
    given = Path(path)
    if os.path.islink(path) and not os.path.exists(path):
        return Target(given.parent, given.name)  # a broken link is a file that is damaged
    if existing(path).is_dir():
        return Target(given, None)
    return Target(given.parent, None if belongs(given.name) else given.name)


def ensure_checkpoint(folder: CheckpointFolder) -> None:
    """Raise UsageError when the folder holds no checkpoint: "no problems" would be wrong."""
    for one in folder.components if folder.only is not None else ():
        if one.problem is not None and one.problem.is_foreign:
            raise UsageError(f"{folder.root / one.path} is {one.problem.message}")
    if folder.components or any(kind != PLAIN_FOLDER for kind in folder.subfolders.values()):
        return
    if any(holds_dcp(folder.root / path) for path in (Path(), *folder.subfolders)):
        return
    if any(deepspeed_folders(folder)):
        return
    if listed := _listed(folder.root):
        raise UsageError(
            f"{folder.root} holds no file of a checkpoint, though its manifest lists {count_of(listed, 'file')}; to "
            f"see which: {command('verify', folder.root)}"
        )
    if not folder.subfolders:
        others = f": only {list_names(map(str, folder.strays))}" if folder.strays else ": the folder is empty"
        raise UsageError(f"{folder.root} holds no file of a checkpoint{others}")
    raise UsageError(
        f"{folder.root} holds no file of a checkpoint, but {count_of(len(folder.subfolders), 'folder')}; "
        f"to look into them: {command('check', folder.root, '', '--recursive')}"
    )


def _listed(root: Path) -> int:
    """Return the number of files in the manifest of a folder, 0 without a valid one."""
    try:
        manifest = read_manifest(root)
    except (FormatError, OSError):
        return 0
    return len({*manifest.files, *manifest.sha256}) if manifest is not None else 0


def find_checkpoints(path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Return every folder at or below ``path`` that holds a component or is a DCP folder, parents first.

    Accelerate's DCP and DeepSpeed folders belong to the checkpoint around them, and so does a folder that
    DeepSpeed's ``latest`` names. Staging folders of guarded saves are returned, and not searched. Raises
    UsageError when ``path`` is not a folder, or holds no checkpoint.
    """
    if not existing(path).is_dir():
        raise UsageError(f"{path} is not a folder; to check one file: {command('check', Path(path))}")
    found: list[Path] = []

    def refused(error: OSError) -> None:
        folder = Path(os.fsdecode(error.filename))
        if describe_folder_name(folder.name) is None or folder.parent not in found:
            found.append(folder)  # check reports why it cannot be read

    for root, folders, files in os.walk(path, onerror=refused):
        staging = [name for name in folders if is_temporary(name)]
        found += sorted(Path(root, name) for name in staging)
        folders[:] = sorted(name for name in folders if name != JOURNAL and name not in staging)
        sharded = [
            name for name in folders if parse_folder_name(name) is not None and holds_dcp(Path(root, name))
        ]
        below = deepspeed_below(Path(root), [PurePosixPath(name) for name in folders])
        sharded += (str(where) for _, where in below if where.parts)
        folders[:] = [name for name in folders if name not in sharded]
        if sharded or any(parse_file_name(name) is not None or belongs(name) for name in files):
            found.append(Path(root))
    if not found:
        raise UsageError(f"no checkpoint found in or below {path}")
    return tuple(found)
