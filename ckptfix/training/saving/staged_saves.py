"""The staging folder of a save, the files that the save replaces, and the old checkpoints that it
removes.

A save replaces the files of our last save in the folder, and those of any older ``save_state``:
left behind, ``model_1.safetensors`` of a run that doubled its model makes two saves of one folder.
All else is the user's, whatever its name.

A folder of ``checkpoints/`` is a checkpoint to Accelerate whatever its name, so the staging folder
never lies there. The last complete checkpoint is never removed, nor one that no save wrote.
"""

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path, PurePosixPath

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.checkpoint.dcp import belongs
from ckptfix.checkpoint.deepspeed_files import BESIDE, is_deepspeed_file
from ckptfix.checkpoint.filenames import (
    LOADED_MODELS,
    TRAINER_STATE,
    index_name,
    model_file,
    parse_file_name,
    random_states_name,
    run_state_name,
)
from ckptfix.checkpoint.folder_names import (
    TRAINER,
    checkpoint_number,
    parse_deepspeed_folder_name,
    parse_folder_name,
)
from ckptfix.checkpoint.latest import UNFINISHED, candidates, unfinished_files
from ckptfix.checkpoint.manifest import read_manifest
from ckptfix.checkpoint.roles import OF_ONE_RANK, Role
from ckptfix.diagnosis.resumable import instead_of
from ckptfix.errors import FormatError, OperationError
from ckptfix.storage.atomic import create_file, exchange, sync_folder, sync_tree
from ckptfix.storage.files import AnyPath, is_symlink, names_in, on_disk, relative, walk
from ckptfix.storage.markers import DESTINATION, UPLOAD
from ckptfix.storage.mounts import object_mount_of
from ckptfix.storage.opened import open_files
from ckptfix.storage.paths import JOURNAL, MANIFEST, shell_path
from ckptfix.storage.staged import (
    SAVING,
    is_needed,
    is_temporary,
    keep_while,
    outside_checkpoints,
    owner_of,
    release,
    staging_folder,
    sweep,
    temporary_name,
)
from ckptfix.storage.stores import Store, is_url
from ckptfix.storage.uploads import (
    MountedFolder,
    not_uploaded,
    place_at,
    remove_checkpoint,
    staged_files,
    upload_folder,
)

_log = logging.getLogger("ckptfix")
_named: set[Path] = set()

_STEMS = tuple(stem for stem, _ in LOADED_MODELS)
_INDEXES = tuple(index_name(stem, suffix) for stem, suffix in LOADED_MODELS[:2])
_TRAINERS = (Role.MODEL, Role.WEIGHTS_INDEX, Role.GRAD_SCALER)
_FIRST, _FALLBACK = str(model_file(".safetensors")), str(model_file(".bin"))


def replaced_files(target: AnyPath, *, trainer: bool = False) -> set[str]:
    """Return the files, relative, that the next save into a folder replaces or removes.

    ``trainer``: that save is one of transformers' Trainer, and nothing may stay that it would load
    instead.
    """
    existing = files_in(target)
    known = _recorded(target)
    components = set(_components(target, existing))
    if trainer:
        return (
            known | components | {name for name in existing if "/" not in name and _is_loaded(name)}
        )
    if known or _is_save_state(components):
        known |= components - _of_the_user(components, known)
    return known


def _is_loaded(name: str) -> bool:
    """Return whether the Trainer loads a file of this name, or one of its shards."""
    parsed = parse_file_name(name)
    return name == TRAINER_STATE or (
        parsed is not None
        and (parsed.is_of_trainer or parsed.is_of_library or parsed.role in _TRAINERS)
    )


def files_in(folder: AnyPath) -> set[str]:
    """Return all files, links and empty folders, relative, but for the journal."""
    found: set[str] = set()
    if not folder.is_dir():
        return found
    for root, folders, files in walk(folder):
        if root == folder and JOURNAL in folders:
            folders.remove(JOURNAL)
        inside = relative(root, folder)
        links = [name for name in folders if is_symlink(root / name)]
        found.update(str(inside / name) for name in (*files, *links))
        if not files and not folders and inside.parts:
            found.add(str(inside))
    return found


def rank_of_states(name: str) -> int | None:
    """Return the rank whose random states or run state a file holds, None for any other file."""
    parsed = parse_file_name(name)
    is_of_a_rank = parsed is not None and parsed.role in OF_ONE_RANK and not parsed.is_of_trainer
    return parsed.rank if parsed is not None and is_of_a_rank else None


def role_of(name: str) -> Role | None:
    """Return the role of a file that ``save_state`` or ``save_model`` writes by this name, None for
    any other.
    """
    parsed = parse_file_name(name)
    if parsed is None or parsed.is_of_trainer or rank_of_states(name) is not None:
        return None if rank_of_states(name) is None else Role.RNG_STATE
    if parsed.role is Role.MODEL:
        return Role.MODEL if parsed.stem in _STEMS and not parsed.variant else None
    if parsed.role is Role.WEIGHTS_INDEX:
        return Role.WEIGHTS_INDEX if name in _INDEXES else None
    return None if parsed.role is Role.UNKNOWN or parsed.role in OF_ONE_RANK else parsed.role


def _components(target: AnyPath, existing: set[str]) -> Iterator[str]:
    """Yield what Accelerate's own names are: files, the files of DCP and DeepSpeed folders, and
    such empty folders.
    """
    has_deepspeed = False
    for name in existing:
        path = PurePosixPath(name)
        if len(path.parts) == 1:
            is_folder = (target / name).is_dir()
            if is_folder and parse_folder_name(name) is not None:
                yield name  # one of DCP that is empty
            elif not is_folder and role_of(name) is not None:
                yield name
            continue
        above, below = path.parts[0], path.parts[1]
        is_deepspeed = parse_deepspeed_folder_name(above) is not None and is_deepspeed_file(below)
        has_deepspeed |= is_deepspeed
        is_dcp = parse_folder_name(above) is not None and (belongs(below) or below == JOURNAL)
        if is_dcp or (is_deepspeed and len(path.parts) == 2):
            yield name
    if has_deepspeed:
        yield from existing.intersection(map(str, BESIDE))


def _of_the_user(components: set[str], recorded: set[str]) -> set[str]:
    """Return the components that cannot be of the last save: best weights that a script keeps next
    to it must stay.

    ``load_state`` takes model.safetensors first, so pytorch_model.bin next to it is not of that
    save. After a save of ours, whose manifest lists its files, an unlisted one is of a later run of
    stock accelerate only if it is numbered. Nothing stays that ``load_state`` would take in place
    of a file of the new save.
    """
    if not recorded:
        return {_FALLBACK} & components if _FIRST in components else set()
    return {
        name
        for name in components - recorded - {_FIRST}
        if (parsed := parse_file_name(name)) is not None
        and not parsed.index
        and parsed.role not in OF_ONE_RANK
    }


def _is_save_state(components: set[str]) -> bool:
    """Return whether components are of a ``save_state``: random states, a model with its optimizer,
    or numbered models.

    Weights alone may be the user's, as those of ``save_pretrained``.
    """
    roles = {role_of(name) for name in components}
    above = {PurePosixPath(name).parts[0] for name in components if "/" in name}
    roles |= {folder.role for name in above if (folder := parse_folder_name(name)) is not None}
    numbers = {parsed.index for name in components if (parsed := parse_file_name(name)) is not None
               and parsed.role is Role.MODEL and parsed.shard is None}  # fmt: skip
    return (
        Role.RNG_STATE in roles
        or {Role.MODEL, Role.OPTIMIZER} <= roles
        or {0, 1} <= numbers
        or any(parse_deepspeed_folder_name(name) is not None for name in above)
    )


def _recorded(target: AnyPath) -> set[str]:
    """Return the files that our last save there wrote, by its manifest or by what an interrupted
    one left.
    """
    names: set[str] = set()
    with suppress(FormatError, OSError):
        manifest = read_manifest(target)
        if manifest is not None:  # and what other processes may have added
            ranks = range(manifest.world_size)
            names = {*manifest.files, *map(random_states_name, ranks), *map(run_state_name, ranks)}
    # Where there is no such list, no save was interrupted here.
    with suppress(FormatError, OSError):
        names |= unfinished_files(target)
    return names


class How(Enum):
    """NEW: one rename. SWAP: two folders change places. INSIDE: file by file, the manifest gone
    first and back last.

    UPLOAD: to a store, or to a mount of one, where no rename commits: the commit marker is written
    last.
    """

    NEW = "new"
    SWAP = "swap"
    INSIDE = "inside"
    UPLOAD = "upload"


class StagedSave(Struct, frozen=True):
    """A save on its way: ``folder`` is written, ``target`` is what it becomes.

    ``processes``: of the run, where each adds its random states itself; those of ranks below it
    stay. 1: nobody does. ``trainer``: a save of transformers' Trainer. The folder is its own: files
    that callbacks added are linked into the new one, so that it replaces the old one in one step.
    ``url``: of the target, if it is in a store; ``target`` is then a path of that name in the
    folder for staging, where nothing is ever written.
    """

    target: Path
    folder: Path
    how: How
    processes: int = 1
    trainer: bool = False
    url: str = ""

    @property
    def place(self) -> Store:
        """The place that a save is uploaded to."""
        return place_at(self.url or self.target)

    def replaced(self) -> set[str]:
        """Return the files, relative, of the target that this save replaces or removes."""
        return replaced_files(self.target, trainer=self.trainer)

    def stale(self) -> set[str]:
        """Return the files of the target that are not to stay next to those of an uploaded save,
        its journal's too.
        """
        found = replaced_in_store(self.place) if self.url else self.replaced()
        journal = self.place.list(JOURNAL)
        return {name for name in found if not self.keeps(name)} | set(journal)

    def keeps(self, name: str) -> bool:
        """Return whether another process of this run may have written a file: its random states."""
        rank = rank_of_states(name) if self.processes > 1 else None
        return rank is not None and rank < self.processes


def plan_staging(
    target: Path | str, *, processes: int = 1, hidden: str = "", trainer: bool = False
) -> StagedSave:
    """Return where a save of a path or a URL is staged. Looks only. ``hidden``: in this folder next
    to the target.
    """
    if is_url(target) or object_mount_of(target) is not None:
        url = str(target).rstrip("/") if is_url(target) else ""
        staged = staging_folder() / temporary_name(Path(target), SAVING)
        goal = staging_folder() / Path(url).name if url else Path(os.path.realpath(target))
        return StagedSave(goal, staged, How.UPLOAD, processes, trainer, url)
    given, target = Path(os.path.abspath(target)), Path(os.path.realpath(target))
    beside = outside_checkpoints(given) / hidden / temporary_name(given, SAVING)
    if not _can_rename(beside.parent, target):
        return StagedSave(target, target / JOURNAL / beside.name, How.INSIDE, processes, trainer)
    staging = StagedSave(target, beside, How.NEW, processes, trainer)
    return replace(staging, how=_how(staging))


def begin(staging: StagedSave) -> bool:
    """Make an empty staging folder; what dead saves left next to it is removed. False: another
    process has made it.

    Its name is of this save alone, so a folder of that name is on the same disk and not left over.
    """
    parent = staging.folder.parent
    for place in (
        {parent} if staging.how is How.UPLOAD else {parent, outside_checkpoints(staging.target)}
    ):
        sweep(place)
    if staging.how is How.UPLOAD:
        _name_leftovers()
    parent.mkdir(parents=True, exist_ok=True)
    try:
        staging.folder.mkdir()
    except FileExistsError:
        return False
    return True


def abandon(staging: StagedSave) -> None:
    """Remove what was staged, unless a part of it has taken the place of old files: then the rest
    is needed.
    """
    release(staging.folder)
    if is_needed(staging.folder):
        return
    shutil.rmtree(staging.folder, ignore_errors=True)
    if staging.how is How.UPLOAD:
        return
    if staging.folder.parent == staging.target / JOURNAL:
        with suppress(OSError):  # somebody else's things are in there
            staging.folder.parent.rmdir()


def lift(staging: StagedSave) -> None:
    """Move what a library wrote below the target's name up into the staging folder itself."""
    below = staging.folder / staging.target.name
    for name in os.listdir(below):
        os.rename(below / name, staging.folder / name)
    below.rmdir()


def commit(staging: StagedSave, describe: bytes | Callable[[], bytes]) -> None:
    """Make what was staged the checkpoint. Durable when it returns; interrupted, the old or the new
    one is there.

    ``describe``: the manifest, or a function that returns it once the files are durable: digests
    may come meanwhile. INSIDE alone has a time between: the manifest is missing then, and
    ``latest_checkpoint`` passes the folder over.
    """
    if staging.how is How.UPLOAD:
        _commit_upload(staging, describe() if callable(describe) else describe)
        return
    folder, target = staging.folder, staging.target
    _widen_modes(folder)
    sync_tree(folder)
    manifest = describe() if callable(describe) else describe
    while True:
        # Looked at again: files may have come while we were writing, and this may be another disk
        # than the main one's.
        how = How.INSIDE if folder.parent == target / JOURNAL else _how(staging)
        if how is How.INSIDE:
            _move_in(staging, manifest)
            break
        if _put_in_place(staging, how, manifest):
            break
    shutil.rmtree(folder, ignore_errors=True)  # after a swap: the old checkpoint
    release(folder)


def add(staging: StagedSave) -> None:
    """Put the files of one process next to those of the others, each in one step; nothing is
    removed.
    """
    if staging.how is How.UPLOAD:
        for name in staged_files(staging.folder):
            staging.place.upload(name, staging.folder / name)
        uploaded(staging)
        return
    _widen_modes(staging.folder)
    sync_tree(staging.folder)
    for name in sorted(files_in(staging.folder)):
        _replace(staging.folder / name, staging.target / name)
    sync_folder(staging.target)
    shutil.rmtree(staging.folder, ignore_errors=True)
    release(staging.folder)


def complete(staging: StagedSave, manifest: bytes) -> None:
    """Complete what is staged for an upload, durably: from now on no sweep removes it until it was
    uploaded.

    It is the only copy of this save until then, also where the run ends meanwhile.
    """
    (staging.folder / JOURNAL).mkdir()
    create_file(staging.folder / MANIFEST, manifest)
    create_file(staging.folder / DESTINATION, os.fsencode(staging.place.url))
    sync_tree(staging.folder)
    keep_while(staging.folder, staging.folder / DESTINATION)


def uploaded(staging: StagedSave) -> None:
    """Remove a staged save that is in its place."""
    shutil.rmtree(staging.folder, ignore_errors=True)
    release(staging.folder)


def not_yet_uploaded() -> Iterator[tuple[Path, str]]:
    """Yield the complete saves on this disk that ended processes have not uploaded, each with its
    place in a store.
    """
    for folder in sorted(staging_folder().glob(f"{SAVING}*")):
        owner = owner_of(folder)
        with suppress(OSError):
            if owner is not None and not owner.is_running:
                yield folder, os.fsdecode((folder / DESTINATION).read_bytes())


def _name_leftovers() -> None:
    """Warn once of each save that an ended process has not uploaded: it takes space, and may be the
    newest one.
    """
    for folder, where in not_yet_uploaded():
        if folder not in _named:
            _named.add(folder)
            upload = f"ckptfix upload {shell_path(folder)} {shell_path(where)}"
            _log.warning(
                "%s: the process that saved this checkpoint ended before it was uploaded to "
                "%s; next: %s, or: rm -r %s",
                folder, where, upload, shell_path(folder),
            )  # fmt: skip


def _commit_upload(staging: StagedSave, manifest: bytes) -> None:
    complete(staging, manifest)
    try:
        upload_folder(staging.place, staging.folder, stale=staging.stale())
    except (OperationError, OSError) as error:
        raise OperationError(not_uploaded(staging.place, staging.folder, error)) from error
    uploaded(staging)


def replaced_in_store(place: Store) -> set[str]:
    """Return the objects that the next save below a prefix replaces or removes, as
    ``replaced_files`` for a folder.
    """
    names = place.list()
    if not any(name for name in names if not name.startswith(f"{JOURNAL}/")):
        return set()
    with open_files(place.url) as place_there:
        return replaced_files(place_there)


def _how(staging: StagedSave) -> How:
    target = staging.target
    names = os.listdir(target) if target.is_dir() else []
    if not names:
        return How.NEW
    known = staging.replaced()
    if not known and JOURNAL in names:
        return How.INSIDE  # a journal alone is not ours to replace
    strange = files_in(target) - known
    return How.SWAP if staging.trainer or all(map(staging.keeps, strange)) else How.INSIDE


def _put_in_place(staging: StagedSave, how: How, manifest: bytes) -> bool:
    """Do it by one rename or exchange; False when it has to be done in another way."""
    folder, target = staging.folder, staging.target
    known = staging.replaced()
    (folder / JOURNAL).mkdir()
    create_file(folder / MANIFEST, manifest)
    sync_folder(folder / JOURNAL)
    sync_folder(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    if how is How.NEW:
        try:
            os.rename(folder, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Another process has put its files there meanwhile.
            shutil.rmtree(folder / JOURNAL)
            return False
    else:
        copied = _copy_random_states(staging)
        linked: list[str] = []
        can_swap = not staging.trainer or _link_others(staging, known, linked)
        sync_folder(folder)
        if can_swap and exchange(folder, target):
            _carry_over(staging, known, copied)
        else:
            for name in linked:
                _remove_with_parents(folder, name)  # the file that is linked stays in the target
            shutil.rmtree(folder / JOURNAL)
            _move_in(staging, manifest)
    sync_folder(target.parent)
    if folder.parent != target.parent:
        sync_folder(folder.parent)
    return True


def _copy_random_states(staging: StagedSave) -> dict[str, int]:
    """Copy the random states of other ranks that the save lacks: name -> inode. They are small, a
    kill is between.
    """
    copied: dict[str, int] = {}
    for name in filter(staging.keeps, files_in(staging.target)):
        with suppress(FileExistsError), (staging.target / name).open("rb") as file:
            create_file(staging.folder / name, file.read())
            copied[name] = os.fstat(file.fileno()).st_ino
    return copied


def _link_others(staging: StagedSave, known: set[str], linked: list[str]) -> bool:
    """Link the files of others into the staging folder, and add their names to a list; False where
    that fails.
    """
    try:
        for name in sorted(files_in(staging.target) - known):
            source, place = staging.target / name, staging.folder / name
            if os.path.lexists(place):
                continue  # the save has written one of this name
            linked.append(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir() and not source.is_symlink():
                place.mkdir()
            else:
                os.link(source, place, follow_symlinks=False)
            sync_folder(place.parent)
    except OSError:  # a file system without links
        return False
    return True


def _carry_over(staging: StagedSave, known: set[str], copied: dict[str, int]) -> None:
    """After an exchange, take from the old folder what came there since our last look."""
    for name in files_in(staging.folder):
        is_new = (
            name not in known
            if not staging.keeps(name)
            else name not in copied or copied[name] != os.lstat(staging.folder / name).st_ino
        )
        if is_new and (name in copied or not os.path.lexists(staging.target / name)):
            _replace(staging.folder / name, staging.target / name)


def _move_in(staging: StagedSave, manifest: bytes) -> None:
    folder, target = staging.folder, staging.target
    known, new = staging.replaced(), files_in(folder)
    journal = target / JOURNAL
    journal.mkdir(parents=True, exist_ok=True)
    keep_while(folder, journal / UNFINISHED)
    # What is ours is known without a manifest from here on.
    (journal / f"{UNFINISHED}.new").write_text(json.dumps(sorted(known | new)))
    os.replace(journal / f"{UNFINISHED}.new", journal / UNFINISHED)
    sync_folder(journal)
    try:
        (target / MANIFEST).unlink(missing_ok=True)
        sync_folder(journal)
        for name in (known & files_in(target)) - new:
            if not staging.keeps(name):
                _remove_with_parents(target, name)
        for name in sorted(new):
            _replace(folder / name, target / name)
        sync_folder(target)
        for name in os.listdir(journal):
            if name != UNFINISHED and not is_temporary(name):
                _remove(journal / name)  # repairs of the files that are gone
        create_file(target / MANIFEST, manifest)
        sync_folder(journal)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{target} now contains files of two saves: {error}; the files that are not yet "
            f"in place are in {folder}; next: save again; to resume in the meantime: "
            f"{instead_of(target)}",
        ) from error
    (journal / UNFINISHED).unlink()
    for parent in {folder.parent, journal}:
        sweep(parent)  # the rest of interrupted saves was needed until now


def _can_rename(parent: Path, target: Path) -> bool:
    """Return whether a folder in ``parent`` can become ``target`` by a rename."""
    existing = next(folder for folder in (target, *target.parents) if folder.is_dir())
    base = next(folder for folder in (parent, *parent.parents) if folder.is_dir())
    try:
        is_here = Path(os.getcwd()).is_relative_to(target)
    except FileNotFoundError:  # somebody has removed the working directory
        is_here = False
    return (
        os.access(base, os.W_OK | os.X_OK)
        and os.stat(base).st_dev == os.stat(existing).st_dev
        and not os.path.ismount(target)
        and not is_here
    )


def _replace(source: Path, place: Path) -> None:
    """Move a file, or an empty folder, to a place, whatever is there."""
    for parent in reversed(place.parents):
        if os.path.lexists(parent) and not parent.is_dir():
            parent.unlink()  # a file of an earlier save where this one has a folder
    while True:
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir() and not place.is_symlink():
            for root, _, _ in os.walk(place, topdown=False):
                with suppress(OSError):  # somebody's files are in there: then replacing fails
                    os.rmdir(root)
        try:
            os.replace(source, place)
            return
        except FileNotFoundError:
            # The main process renamed its folder over the empty one that was made here: a name
            # looked up before leads into a removed folder.
            if not os.path.lexists(source):
                raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _remove_with_parents(folder: Path, name: str) -> None:
    """Remove a file and the folders above it that are empty then."""
    with suppress(FileNotFoundError):
        _remove(folder / name)
    with suppress(OSError):  # the folder of others' files, or the target itself
        for parent in (folder / name).parents:
            os.rmdir(parent)


def _widen_modes(folder: Path) -> None:
    """Give files of accelerate the mode that the umask asks for: safetensors 0.8 makes them 0600
    whatever it says.
    """
    probe = folder / ".mode"
    probe.touch(exist_ok=False)
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in (folder / name for name in files_in(folder)):
        is_narrow = path.is_file() and path.stat().st_mode & 0o777 == 0o600 != mode
        if is_narrow and parse_file_name(path.name) is not None:
            path.chmod(mode)


def rotate(checkpoints: Path, limit: int) -> list[Path]:
    """Remove the oldest complete checkpoints beyond ``limit``, and broken ones older than those
    that stay.
    """
    sweep(outside_checkpoints(checkpoints / "any"))
    return [path for path in map(on_disk, _outdated(checkpoints, limit)) if _discard(path)]


def rotate_in_store(checkpoints: str, limit: int) -> None:
    """Remove the same from a folder of a store."""
    with open_files(checkpoints) as folder:
        old = [path.name for path in _outdated(folder, limit)]
    for name in old:
        remove_checkpoint(place_at(f"{checkpoints}/{name}"))


def _outdated(checkpoints: AnyPath, limit: int) -> list[AnyPath]:
    found = candidates(checkpoints)
    whole = [candidate for candidate in found if candidate.problem is None]
    if len(whole) <= max(1, limit):
        return []
    oldest_kept = whole[max(1, limit) - 1].number
    old = (one.path for one in found if one.number < oldest_kept)
    return [path for path in old if not path.is_symlink() and _was_saved(path)]


def rotate_steps(saved: Path, limit: int, *, best: Path | None) -> list[Path]:
    """Remove the Trainer's oldest complete checkpoints, by step, until ``limit`` are left up to the
    one just saved.

    That one and the best model stay, so two may be left of one. Incomplete folders stay, and are
    not counted: nothing proves that a save of ours left them. So do those of a later step: they are
    of another run in the same folder.
    """
    found = candidates(saved.parent, TRAINER)
    step = checkpoint_number(saved.name, TRAINER)
    ours = [
        on_disk(one.path)
        for one in found
        if one.problem is None and step is not None and one.number <= step
    ]
    kept = {saved}
    if best is not None:
        kept |= {path for path in ours if os.path.realpath(path) == os.path.realpath(best)}
    others = [path for path in ours if path not in kept]
    old = others[max(0, limit - len(kept)) :]
    return [path for path in old if not path.is_symlink() and _discard(path)]


def _discard(path: Path) -> bool:
    """Remove a checkpoint. It gets a temporary name first: no half-deleted folder is ever taken for
    a checkpoint.
    """
    if object_mount_of(path) is not None:
        remove_checkpoint(MountedFolder(str(path)))
        shutil.rmtree(path, ignore_errors=True)
        return True
    trash = name = outside_checkpoints(path) / temporary_name(path, SAVING)
    try:
        os.rename(path, trash)
    except OSError:  # another disk, or a parent that we may not write to
        (path / MANIFEST).unlink(missing_ok=True)
        for states in (*path.glob("random_states_*.pkl"), path / TRAINER_STATE):
            states.unlink(missing_ok=True)  # from here on nothing takes it for complete
        trash = path
    shutil.rmtree(trash)
    release(name)
    return True


def _was_saved(path: AnyPath) -> bool:
    """Return whether ``save_state`` wrote anything of a folder: one that only has its name is not
    ours to remove.
    """
    roles = {role_of(name) for name in names_in(path)}
    try:
        manifest = read_manifest(path)
    except (FormatError, OSError):
        return True
    return (
        # ``ckptfix seal`` writes one into folders of anybody's.
        (manifest is not None and manifest.is_of_a_save)
        or (path / UPLOAD).exists()
        or Role.RNG_STATE in roles
        or (Role.MODEL in roles and Role.OPTIMIZER in roles)
    )
