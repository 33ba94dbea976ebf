"""Whether a new checkpoint may go where it is asked to, and what would go away there."""

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.filenames import describe_folder_name, parse_file_name
from ckptfix.errors import ChangedError, UsageError
from ckptfix.operations.migrate.naming import SUFFIXES
from ckptfix.operations.migrate.options import Options
from ckptfix.operations.migrate.planning import MigrationPlan
from ckptfix.storage.paths import JOURNAL
from ckptfix.wording import list_names

_BESIDE_WEIGHTS = re.compile(
    r"(.+_)?config\.json|.*token.*\.(json|model)|vocab\.(json|txt)|merges\.txt|spiece\.model|"
    r"(model_)?index\.json|chat_template.*|README\.md|LICENSE.*|\.gitattributes|"
    r"trainer_state\.json|(scheduler|optimizer|rng_state.*)\.(pt|pth)|latest|zero_to_fp32\.py|"
    r"\.metadata|.+\.distcp"
)
"""Files of other kinds that libraries put beside weights: transformers, peft, DeepSpeed, torch."""


def check_paths(path: Path, output: Path, options: Options) -> None:
    """Raise UsageError when nothing can be written at ``output``, by what is there now."""
    source, target = Path(os.path.realpath(path)), Path(os.path.realpath(output))
    if not output.absolute().parent.is_dir():
        raise UsageError(f"{output.absolute().parent} is no folder")
    if source == target:
        raise UsageError(f"{output} is what is to be migrated; name another place")
    if target.is_relative_to(source):
        raise UsageError(f"{output} lies inside {path}, which is to be migrated")
    if not os.path.lexists(output) or _is_empty_folder(output):
        return
    is_folder = output.is_dir() and not output.is_symlink()
    if not options.overwrite:
        raise UsageError(f"{output} exists; {_other_place(path, output, options, is_folder=is_folder)}")
    if source.is_relative_to(target):
        raise UsageError(f"{path} lies inside {output}, which would be replaced")
    if is_folder and (Path.cwd().is_relative_to(target) or os.path.ismount(target)):
        raise UsageError(f"{output} is a folder in use, which cannot be replaced")


def _other_place(path: Path, output: Path, options: Options, *, is_folder: bool) -> str:
    """Return what to do when something is in the way. ``--overwrite`` is named only where nothing else would go."""
    if is_folder and not path.is_dir():
        return f"it is a folder; name a new place in it: {output / (path.stem + _suffix(options))}"
    if is_folder and list(_foreign(_files_below(output), ())):
        return "it holds more than a checkpoint; name a place where nothing is"
    return "name a place where nothing is, or replace it with --overwrite"


def _suffix(options: Options) -> str:
    return next(iter(SUFFIXES[options.to]), "")


def removed_at(plan: MigrationPlan) -> tuple[str, ...]:
    """Return every file that goes away when the new checkpoint takes its place, "." for a lone one.

    Raises UsageError when among them is one that is no part of a checkpoint and would not be there again, or when a
    file would take the place of a folder.
    """
    output = plan.output
    if not os.path.lexists(output):
        return ()
    if output.is_symlink() or not output.is_dir():
        return (".",)
    if plan.is_file:
        raise UsageError(f"{output} is a folder, and a file would take its place; name another place")
    new = {str(file.path) for model in plan.models for file in model.files} | set(map(str, plan.carried))
    new |= {str(file.path) for file in plan.rewritten}
    there = tuple(_files_below(output))
    if lost := tuple(_foreign(there, new)):
        raise UsageError(
            f"{output} holds what is no part of a checkpoint and would be lost: {list_names(lost)}; --overwrite does "
            "not replace it; name another place, or remove it yourself"
        )
    return there


def ensure_as_planned(plan: MigrationPlan) -> None:
    """Raise ChangedError when something came to what is to be replaced, or went, since it was planned."""
    now: tuple[str, ...] | None = None
    with suppress(UsageError):
        now = removed_at(plan)
    if now != plan.removed:
        raise ChangedError(f"{plan.output} changed meanwhile; nothing was written there")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not os.listdir(path)


def _files_below(folder: Path) -> Iterator[str]:
    """Yield all that is no folder, and the empty folders, relative. Raises OSError for what cannot be listed."""

    def fail(error: OSError) -> None:
        raise error

    for where, folders, names in os.walk(folder, onerror=fail):
        below = os.path.relpath(where, folder)
        linked = [name for name in folders if os.path.islink(os.path.join(where, name))]
        for name in sorted((*names, *linked)):
            yield os.path.normpath(os.path.join(below, name))
        if not folders and not names and below != ".":
            yield below


def _foreign(names: Iterable[str], new: Collection[str]) -> Iterator[str]:
    """Yield those that no checkpoint has, and that a new one does not bring again."""
    for name in names:
        path = PurePosixPath(name)
        known = parse_file_name(path.name) is not None or _BESIDE_WEIGHTS.fullmatch(path.name) is not None
        ours = any(part == JOURNAL or describe_folder_name(part) for part in path.parts[:-1])
        if not (known or ours or name in new):
            yield name
