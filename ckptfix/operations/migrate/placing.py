"""Whether a new checkpoint may go where it is asked to, and what would go away there."""

import os
import stat
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.filenames import parse_file_name
from ckptfix.errors import ChangedError, UsageError
from ckptfix.operations.migrate.naming import SUFFIXES
from ckptfix.operations.migrate.options import Options
from ckptfix.operations.migrate.planning import MigrationPlan
from ckptfix.operations.migrate.sources import files_read
from ckptfix.operations.migrate.standing import NOTHING, Coming, standing_in
from ckptfix.storage.listing import listed_files
from ckptfix.wording import list_names


def check_paths(path: Path, output: Path, options: Options) -> None:
    """Raise UsageError when nothing can be written at ``output``, by what is there now; OSError."""
    source, target = Path(os.path.realpath(path)), Path(os.path.realpath(output))
    if not output.absolute().parent.is_dir():
        raise UsageError(f"{output.absolute().parent} is no folder")
    if source == target or (_is_in(source, target) and _is_in(target, source)):
        raise UsageError(f"{output} is what is to be migrated; name another place")
    if _is_in(target, source):
        raise UsageError(f"{output} lies inside {path}, which is to be migrated")
    if not os.path.lexists(output) or _is_empty_folder(output):
        return
    if _is_special(output):
        raise UsageError(f"{output} is no file and no folder, and never replaced; name another place")
    is_folder = output.is_dir() and not output.is_symlink()
    if not options.overwrite:
        raise UsageError(f"{output} exists; {_other_place(path, output, options, is_folder=is_folder)}")
    if _is_in(source, target):
        raise UsageError(f"{path} lies inside {output}, which would be replaced")
    if is_folder and (Path.cwd().is_relative_to(target) or os.path.ismount(target)):
        raise UsageError(f"{output} is a folder in use, which cannot be replaced")


def _is_special(path: Path) -> bool:
    """Whether a pipe, a socket or a device is at a path, or behind a link there."""
    kinds = [os.lstat(path).st_mode]
    with suppress(OSError):  # a link to nothing
        kinds.append(os.stat(path).st_mode)
    return not all(stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind) for kind in kinds)


def _other_place(path: Path, output: Path, options: Options, *, is_folder: bool) -> str:
    """Return what to do when something is in the way. ``--overwrite`` is named only where nothing else would go."""
    if is_folder and not path.is_dir():
        return f"it is a folder; name a new place in it: {output / (path.stem + _suffix(options))}"
    if is_folder and any(not one.is_ours for one in standing_in(output, NOTHING)):
        return "it holds more than a checkpoint; name a place where nothing is"
    return "name a place where nothing is, or replace it with --overwrite"


def _suffix(options: Options) -> str:
    return next(iter(SUFFIXES[options.to]), "")


def ensure_apart(plan: MigrationPlan) -> None:
    """Raise UsageError when the new checkpoint would take the place of what belongs to the source, wherever that lies.

    What a link leads to belongs to it, too: a file at the output or below it, a folder that the output would lie in.
    """
    output, root = plan.output.absolute(), plan.source.root
    place = Path(os.path.realpath(output.parent)) / output.name
    names: dict[str, list[str]] = {}
    for name in {**dict.fromkeys(files_read(plan)), **_listed(plan)}:
        folder, _, last = name.rpartition("/")
        names.setdefault(folder, []).append(last)
    for folder, files in names.items():
        real = Path(os.path.realpath(root / folder))
        if plan.source.only is None and _is_in(place, real):
            raise UsageError(
                f"{output} lies inside {root / folder}, which is to be migrated; name another place"
            )
        is_in = os.path.lexists(place) and _is_in(real, place)
        for file in files if os.path.lexists(place) else ():
            path = root / folder / file
            found = Path(os.path.realpath(path)) if path.is_symlink() else real / file
            if found == place or (_is_in(found, place) if path.is_symlink() else is_in):
                if found == place and not path.is_symlink():
                    raise UsageError(f"{output} is a part of what is to be migrated; name another place")
                what = f"{found}, which {path} leads to," if found != Path(os.path.abspath(path)) else path
                raise UsageError(
                    f"{output} would be replaced, and {what} is to be migrated; name another place"
                )


def _listed(plan: MigrationPlan) -> dict[str, str | None]:
    """Return the other files of the source, too: it stays as it is."""
    return listed_files(plan.source.root) if plan.source.only is None else {}


def _is_in(path: Path, folder: Path) -> bool:
    """Whether a path is another, or lies below it, also by another name of the same folder, as mounts can give it."""
    if path.is_relative_to(folder):
        return True
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    for parent in (path, *path.parents) if stat.S_ISDIR(status.st_mode) else ():
        with suppress(OSError):
            if os.path.samestat(os.stat(parent), status):
                return True
    return False


def removed_at(plan: MigrationPlan) -> tuple[str, ...]:
    """Return every file that goes away when the new checkpoint takes its place, sorted, "." for a lone one.

    Raises UsageError when among them is one that is no part of one checkpoint and would not be there again with the
    same bytes, or when a file would take the place of a folder; OSError for what cannot be listed.
    """
    output = plan.output
    if not os.path.lexists(output):
        return ()
    if output.is_symlink() or not output.is_dir():
        return (".",)
    if plan.is_file:
        raise UsageError(f"{output} is a folder, and a file would take its place; name another place")
    there = sorted(standing_in(output, _coming(plan)))
    if lost := [one.name for one in there if not one.is_ours]:
        raise UsageError(
            f"{output} holds what is no part of one checkpoint and would be lost: {list_names(lost)}; --overwrite does "
            "not replace it; name another place, or remove it yourself"
        )
    return tuple(one.name for one in there)


def _coming(plan: MigrationPlan) -> Coming:
    names = [parse_file_name(file.path.name) for model in plan.models for file in model.files]
    folders = {parent for path in plan.carried for parent in path.parents}
    folders |= {one for path in plan.empty for one in (path, *path.parents)}
    return Coming(
        copied={path: plan.source.root / path for path in plan.carried},
        folders=frozenset(folders - {PurePosixPath(".")}),
        stems=frozenset(name.stem for name in names if name is not None),
    )


def ensure_as_planned(plan: MigrationPlan) -> None:
    """Raise ChangedError when something came to what is to be replaced, or went, since it was planned."""
    now: tuple[str, ...] | None = None
    with suppress(UsageError):
        now = removed_at(plan)
    if now != plan.removed or (now and _is_special(plan.output)):
        raise ChangedError(f"{plan.output} changed meanwhile; nothing was written there")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not os.listdir(path)
