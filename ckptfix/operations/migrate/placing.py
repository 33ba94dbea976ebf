"""Whether a new checkpoint may go where it is asked to, and what would go away there."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.filenames import ModelName
from ckptfix.errors import ChangedError, UsageError
from ckptfix.operations.migrate.naming import SUFFIXES
from ckptfix.operations.migrate.options import Options
from ckptfix.operations.migrate.parts import MODEL, PARTIAL, family_of
from ckptfix.operations.migrate.passing import base_models, passed_by
from ckptfix.operations.migrate.planning import MigrationPlan, PlannedModel
from ckptfix.operations.migrate.sources import files_read
from ckptfix.operations.migrate.standing import NOTHING, Coming, Standing, standing_in, tensor_files
from ckptfix.storage.listing import listed_files
from ckptfix.wording import list_names


def check_paths(path: Path, output: Path, options: Options) -> None:
    """Raise UsageError when nothing can be written at ``output``, by what is there now; OSError."""
    source, target = Path(os.path.realpath(path)), Path(os.path.realpath(output))
    if output.name == "..":
        raise UsageError(f"{output}: name the folder itself")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"{output.absolute().parent} is not a folder")
    if source == target or (_is_in(source, target) and _is_in(target, source)):
        raise UsageError(f"{output} is what is to be migrated; name another place")
    if _is_in(target, source):
        raise UsageError(f"{output} lies inside {path}, which is to be migrated")
    if not os.path.lexists(output) or _is_empty_folder(output):
        return
    if _is_special(output):
        raise UsageError(f"{output} is neither a file nor a folder, and never replaced; name another place")
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
    if is_folder:
        there = list(_until_not_ours(standing_in(output, NOTHING)))
        if not there[-1].is_ours:
            return "it holds more than a checkpoint; name a place where nothing is"
        if not any(one.is_weights for one in there):
            return "it holds no weights of a model; name a place where nothing is"
    elif not output.is_dir() and (path.is_dir() or not _may_go(output, options)):
        return "name a place where nothing is"
    return "name a place where nothing is, or replace it with --overwrite"


def _until_not_ours(there: Iterator[Standing]) -> Iterator[Standing]:
    for one in there:
        yield one
        if not one.is_ours:
            return


def _may_go(output: Path, options: Options) -> bool:
    """Whether a lone file may be replaced: by its name with one of the new format, by its content a tensor file."""
    return output.suffix in SUFFIXES[options.to] and output.name in tensor_files(output.parent, [output.name])


def _suffix(options: Options) -> str:
    return next(iter(SUFFIXES[options.to]), "")


def ensure_apart(plan: MigrationPlan) -> None:
    """Raise UsageError when the new checkpoint would take the place of what belongs to the source, wherever that lies.

    What a link leads to belongs to it, too, and every link on the way: a file at the output or below it, a folder that
    the output would lie in. So does the model that an adapter needs.
    """
    output, root = plan.output.absolute(), plan.source.root
    place = Path(os.path.realpath(output.parent)) / output.name
    is_there = os.path.lexists(place)
    names: dict[str, list[str]] = {}
    for name in {**dict.fromkeys(files_read(plan)), **_listed(plan)}:
        folder, _, last = name.rpartition("/")
        names.setdefault(folder, []).append(last)
    if is_there:
        _ensure_not_at(plan.path, place, output)
        _ensure_no_base(root, place, output)
    for folder, files in names.items():
        real = Path(os.path.realpath(root / folder))
        if plan.source.only is None and _is_in(place, real):
            raise UsageError(
                f"{output} lies inside {root / folder}, which is to be migrated; name another place"
            )
        if not is_there:
            continue
        _ensure_not_at(root / folder, place, output)
        for file in files:
            if real / file == place and not place.is_symlink():
                raise UsageError(f"{output} is a part of what is to be migrated; name another place")
            if (root / folder / file).is_symlink():
                _ensure_not_at(root / folder / file, place, output)


def _ensure_not_at(path: Path, place: Path, output: Path) -> None:
    """Raise UsageError when a path of the source leads to ``place``, into it, or through it to somewhere else."""
    if passed := _passed_at(path, place):
        what = path if passed[-1] == Path(os.path.abspath(path)) else f"{passed[-1]}, which {path} leads to,"
        raise UsageError(f"{output} would be replaced, and {what} is to be migrated; name another place")


def _passed_at(path: Path, place: Path) -> list[Path]:
    """Return what is looked up at a place and below it on the way to a path; the place may have another name there."""
    status = os.lstat(place)
    is_folder = stat.S_ISDIR(status.st_mode)
    found = []
    for step in passed_by(path):
        is_in = step.is_relative_to(place)
        if not is_in and is_folder:
            with suppress(OSError):
                is_in = os.path.samestat(os.lstat(step), status)
        if is_in:
            found.append(step)
    return found


def _ensure_no_base(root: Path, place: Path, output: Path) -> None:
    for base in base_models(root):
        if _passed_at(base, place):
            raise UsageError(
                f"{output} would be replaced, and the adapter_config.json in {root} names it as the model that the "
                "adapter needs; name another place"
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
    """Return every file that goes away when the new checkpoint takes its place, sorted, "." for a lone one or a link.

    Raises UsageError when among them is one that is no part of one checkpoint and would not be there again with the
    same bytes, when there are no weights among them, or when a file would take the place of a folder or a folder that
    of a file; OSError for what cannot be listed.
    """
    output = plan.output
    if not os.path.lexists(output):
        return ()
    if not output.is_dir():
        if not plan.is_file:
            raise UsageError(
                f"{output} is not a folder, and a folder would take its place; name another place"
            )
        if not _may_go(output, plan.options):
            raise UsageError(
                f"{output} is not a {plan.options.to.value} file that holds tensors; --overwrite does not replace it; "
                "name another place, or remove it yourself"
            )
        return (".",)
    if plan.is_file:
        raise UsageError(f"{output} is a folder, and a file would take its place; name another place")
    there = sorted(standing_in(output, _coming(plan)))
    if lost := [one.name for one in there if not one.is_ours]:
        raise UsageError(
            f"{output} holds what is not part of one checkpoint and would be lost: {list_names(lost)}; --overwrite "
            "does not replace it; name another place, or remove it yourself"
        )
    if there and not any(one.is_weights for one in there):
        raise UsageError(
            f"{output} holds no weights of a model: {list_names([one.name for one in there])}; --overwrite does not "
            "replace it; name another place, or remove it yourself"
        )
    return (".",) if output.is_symlink() else tuple(one.name for one in there)


def _coming(plan: MigrationPlan) -> Coming:
    folders = {parent for path in plan.carried for parent in path.parents}
    folders |= {one for path in plan.empty for one in (path, *path.parents)}
    return Coming(
        copied={path: plan.source.root / path for path in plan.carried},
        folders=frozenset(folders - {PurePosixPath(".")}),
        families=frozenset(family for model in plan.models for family in _families(model)),
    )


def _families(model: PlannedModel) -> set[ModelName]:
    """Return what a new model is: as its files are called, but never a whole model in the name of an adapter."""
    before = family_of(model.before.files[0].name)
    new = {family_of(file.path.name) or MODEL for file in model.files}
    if before is not None and before.stem in PARTIAL:
        return {before if one == MODEL else one for one in new}
    return new


def ensure_as_planned(plan: MigrationPlan) -> None:
    """Raise ChangedError when something came to what is to be replaced, or went, since it was planned."""
    now: tuple[str, ...] | None = None
    with suppress(UsageError):
        now = removed_at(plan)
    if now != plan.removed or (now and _is_special(plan.output)):
        raise ChangedError(f"{plan.output} changed meanwhile; nothing was written there")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not os.listdir(path)
