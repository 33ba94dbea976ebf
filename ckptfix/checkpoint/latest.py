"""The numbered checkpoints of a project folder, and why a save is incomplete by its names and
headers.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath

from msgspec import Struct, convert
from msgspec.structs import replace

from ckptfix.checkpoint.dcp import is_empty
from ckptfix.checkpoint.deepspeed_files import deepspeed_folders
from ckptfix.checkpoint.filenames import (
    TRAINER_STATE,
    FileName,
    parse_file_name,
    random_states_name,
)
from ckptfix.checkpoint.folder import CheckpointFolder, Component, ProblemKind, scan_folder
from ckptfix.checkpoint.folder_names import (
    ACCELERATE,
    FAMILIES,
    TRAINER,
    checkpoint_number,
    describe_folder_name,
    family_of,
    parse_folder_name,
)
from ckptfix.checkpoint.manifest import (
    Manifest,
    NotAsSaved,
    manifest_or_command,
    not_as_saved,
    read_losses,
    unexplained,
)
from ckptfix.checkpoint.model_configs import OTHER_WEIGHTS, lost_models, may_hold_weights
from ckptfix.checkpoint.model_files import group_files
from ckptfix.checkpoint.placeholders import files_with_placeholders
from ckptfix.checkpoint.rank_names import parse_dcp_name
from ckptfix.checkpoint.roles import NOT_STATES, Role, is_of_macos
from ckptfix.checkpoint.state_contents import (
    is_weights_file,
    state_problem,
    weights_without_tensors,
)
from ckptfix.checkpoint.trainer_folders import trainer_problem
from ckptfix.errors import FormatError
from ckptfix.formats.dcp_metadata import METADATA_NAME
from ckptfix.formats.safetensors_file import SafetensorsFile, WeightsIndex
from ckptfix.formats.torch_file import TorchFile
from ckptfix.storage.atomic import read_file
from ckptfix.storage.files import (
    AnyPath,
    absolute,
    etag_of,
    folder_entries,
    is_dir,
    lexists,
    names_in,
    sparing,
    store_of,
    walk,
)
from ckptfix.storage.journal import is_partly_changed
from ckptfix.storage.markers import Uploaded, read_commit, upload_problem
from ckptfix.storage.opened import opened_part
from ckptfix.storage.paths import JOURNAL, MANIFEST, described, is_inside
from ckptfix.wording import count_of

_STATES = random_states_name(0)
_NO_STATES = f"no {_STATES}, which save_state writes near the end"
_WEIGHTS_ALONE = (
    f"only weights; a resume also needs {_STATES} (save_state) or {TRAINER_STATE} (Trainer)"
)
_PLAIN_DCP = (
    "a torch.distributed.checkpoint folder, which dcp.load reads but load_state and the Trainer do "
    "not"
)
_LAST_WRITTEN = (_STATES, TRAINER_STATE)
"""Files that a save writes near its end and no repair changes, so their time is the time of the
save.
"""


class Candidate(Struct, frozen=True, kw_only=True):
    """A checkpoint with its number, and why it is incomplete (None: complete by its headers).

    ``time``: when the save ended, in seconds since the epoch; None where the file that shows it is
    missing.
    """

    path: AnyPath
    number: int
    problem: str | None
    time: float | None = None


def candidates(folder: AnyPath, pattern: str = ACCELERATE) -> tuple[Candidate, ...]:
    """Return the numbered checkpoints of one family in a folder, newest first. Raises OSError."""
    return tuple(
        judge(path, number) for number, path in numbered(folder, (pattern,)).get(pattern, ())
    )


def problems_in(candidates: Iterable[Candidate]) -> str:
    """Return the problems of checkpoints in words, each once with the names of those that have
    it.
    """
    names: dict[str | None, list[str]] = {}
    for candidate in candidates:
        names.setdefault(candidate.problem, []).append(candidate.path.name)
    said = [f"{_first_of(of_problem, ', ')}: {problem}" for problem, of_problem in names.items()]
    return _first_of(said, "; ")


def _first_of(words: Sequence[str], separator: str) -> str:
    more = [f"and {len(words) - _SAID} more"] if len(words) > _SAID else []
    return separator.join([*words[:_SAID], *more])


_SAID = 5
"""Names, and problems, of a run that are said: it may have a thousand checkpoints."""


def judge(
    path: AnyPath, number: int, problem_of: Callable[[AnyPath], str | None] | None = None
) -> Candidate:
    """Return a numbered checkpoint with its problem. In a store that is only listed, its folder is
    made for that.

    ``problem_of``: returns the problem of a folder; by default ``incomplete``.
    """
    # What is left out to save requests may be the damage for which it must not be loaded.
    with opened_part(path) as place, sparing(place, is_thrifty=False):
        problem, time = (problem_of or incomplete)(place), time_of(place)
    return Candidate(path=path, number=number, problem=problem, time=time)


def numbered(
    folder: AnyPath, patterns: Collection[str] = FAMILIES
) -> dict[str, tuple[tuple[int, AnyPath], ...]]:
    """Return the folders of each family in a folder with their numbers, newest first. Raises
    OSError.
    """
    with folder_entries(folder) as listing:
        # A link is followed as resuming scripts do; is_dir is False for one that leads to itself.
        names = [
            entry.name
            for entry in listing
            if entry.is_dir(follow_symlinks=False)
            or (entry.is_symlink() and is_dir(folder / entry.name))
        ]
    families: dict[str, list[tuple[int, AnyPath]]] = {}
    for name in names:
        for pattern in patterns:
            if (number := checkpoint_number(name, pattern)) is not None:
                families.setdefault(pattern, []).append((number, folder / name))
    return {
        pattern: tuple(sorted(families[pattern], reverse=True))
        for pattern in patterns
        if pattern in families
    }


def time_of(checkpoint: AnyPath) -> float | None:
    """Return when the save of a checkpoint ended, None where the file that shows it is missing."""
    for name in _LAST_WRITTEN:
        with suppress(OSError):
            return (checkpoint / name).stat().st_mtime
    # A repair rewrites .metadata, and files with keys in them: the oldest file keeps its time.
    with suppress(OSError, ValueError):
        names = [name for name in names_in(checkpoint) if parse_dcp_name(name) is not None]
        return min((checkpoint / name).stat().st_mtime for name in names)
    return None


def taken_instead(run: AnyPath) -> str:
    """Return what stock ``load_state()`` does with an entry that is not a checkpoint, "" where it
    takes the newest one.

    With automatic naming it sorts every entry of ``checkpoints`` by the first number in its name,
    and takes the last (accelerate 1.15, ``accelerator.py``). Automatic naming counts by one, so a
    script chose numbers with gaps itself. Raises OSError.
    """
    if absolute(run).name != "checkpoints":
        return ""
    names = sorted(names_in(run))
    own = {path.name: number for number, path in numbered(run, (ACCELERATE,)).get(ACCELERATE, ())}
    numbers = sorted(own.values())
    is_counted = (len(numbers) > 1 or numbers == [0]) and numbers[-1] - numbers[0] == len(
        numbers
    ) - 1
    if not is_counted:
        return ""
    entries = {name: re.search("[0-9]+", name) for name in names if name not in own}
    for name, number in entries.items():
        if number is None:
            return (
                f"{run / name}: load_state() without a folder fails with an IndexError, because "
                "this name has no number"
            )
    first = {name: int(number[0][:18]) for name, number in entries.items() if number is not None}
    last = max(first, key=lambda name: first[name], default="")
    if not last or first[last] < numbers[-1]:
        return ""
    may, fail = ("may pick", "fail") if first[last] == numbers[-1] else ("picks", "fails")
    fails = "" if (run / last).is_dir() else f" and {fail}, because it is not a folder"
    return (
        f"{run / last}: load_state() without a folder {may} it instead of "
        f"checkpoint_{numbers[-1]}{fails}"
    )


def is_bare(folder: AnyPath, holds: Callable[[AnyPath, str], bool] | None = None) -> bool:
    """Return whether a folder without a file of a checkpoint is one all the same, by its name.

    A Trainer that is killed in a save leaves such a folder, and its ``get_last_checkpoint`` takes
    it. Two of three signs are wanted, as ``epoch_3`` may be a folder of pictures: the name is one
    that accelerate or the Trainer gives, the folder is empty or holds configs alone, and a folder
    of the same family has files of a checkpoint. A folder with weights in sub-folders alone is
    none, but where others of the family have such files: hooks of diffusers save ``unet`` before
    anything else is written. ``holds``: ``family_holds``, for those who ask about many folders.
    """
    holds = holds or family_holds
    folder = absolute(folder)
    family = family_of(folder.name)
    if family is None:
        return False
    if holds_files(folder):
        return False
    if may_hold_weights(folder):
        is_run = any(family_of(name) is not None for name in names_in(folder))
        return not is_run and holds(folder.parent, family[0])
    is_of_library = family[0] in (ACCELERATE, TRAINER)
    holds_configs_alone = all(
        name.endswith(_CONFIGS)
        for root, _, names in walk(folder, lambda error: None)
        if root.name != JOURNAL
        for name in names
    )
    if is_of_library and holds_configs_alone:
        return True
    return (is_of_library or holds_configs_alone) and holds(folder.parent, family[0])


_CONFIGS = (".jinja", ".json", ".md", ".model", ".py", ".txt", ".yaml", ".yml")
"""Endings of what a save writes before the weights: configs, tokenizers, model cards, code."""


def family_holds(folder: AnyPath, pattern: str) -> bool:
    """Return whether a numbered folder of a family holds a file of a checkpoint, or a folder of its
    states.
    """
    return any(holds_files(path) for _, path in numbered(folder, (pattern,)).get(pattern, ()))


def holds_files(folder: AnyPath) -> bool:
    """Return whether files of a checkpoint are right in a folder, or in a folder of its states, or
    cannot be listed.
    """
    try:
        names = names_in(folder)
    except OSError:
        return True
    return any(
        parse_file_name(name) is not None
        or parse_dcp_name(name) is not None
        or (describe_folder_name(name) is not None and may_hold_weights(folder / name))
        for name in names
    )


def checkpoints_folder(path: AnyPath) -> AnyPath:
    """Return the folder with the numbered checkpoints: ``path`` itself, or ``checkpoints`` in a
    project folder.
    """
    below = path / "checkpoints"
    return below if path.name != "checkpoints" and below.is_dir() else path


def partly_repaired(checkpoint: AnyPath) -> AnyPath | None:
    """Return the checkpoint, or its DCP folder, in which a repair or an undo was interrupted, None
    for none.

    Raises JournalError, OSError.
    """
    inside = [checkpoint / name for name in names_in(checkpoint)] if checkpoint.is_dir() else []
    folders = (
        checkpoint,
        *(one for one in inside if one.name != JOURNAL and (one / JOURNAL).is_dir()),
    )
    return next((one for one in folders if is_partly_changed(one)), None)


def cut_upload(checkpoint: AnyPath) -> str | None:
    """Return why the upload of a checkpoint is not complete, None for one that is, or was not
    uploaded by ckptfix.
    """
    try:
        return upload_problem(checkpoint)
    except (FormatError, OSError) as error:
        return described(error)


def gone_since_upload(root: AnyPath) -> list[NotAsSaved]:
    """Return the files of a committed upload that are missing, none where a repair can have deleted
    them.

    Another size does not count: what has no manifest may be saved again by anybody. Raises OSError.
    """
    gone = [
        NotAsSaved(name, sent.size, None)
        for name, sent in _uploaded(root).items()
        if not name.startswith(f"{JOURNAL}/") and not lexists(root / name)
    ]
    return unexplained(root, gone, by_manifest=False)


def digests_of_upload(root: AnyPath) -> dict[str, str]:
    """Return the sha256 of every file of a complete upload that no repair has changed since, none
    where a later save or seal wrote the manifest. Raises OSError.
    """
    uploaded = {} if cut_upload(root) is not None else _uploaded(root)
    files = (
        NotAsSaved(name, sent.size, sent.size if lexists(root / name) else None)
        for name, sent in uploaded.items()
    )
    same = {
        file.name: uploaded[file.name].sha256
        for file in unexplained(root, files, by_manifest=False)
    }
    is_repaired = MANIFEST in uploaded and MANIFEST not in same
    if same and lexists(root / MANIFEST) and not is_repaired:
        digest = hashlib.sha256(read_file(root / MANIFEST)).hexdigest()
        if digest != same.get(MANIFEST):
            return {}
    return {name: digest for name, digest in same.items() if not name.startswith(f"{JOURNAL}/")}


def replaced_since_upload(root: AnyPath, manifest: Manifest | None) -> list[str]:
    """Return the objects of a complete upload with another size or ETag, which neither a repair nor
    a later seal explains. Raises OSError.
    """
    if store_of(root) is None or cut_upload(root) is not None:
        return []
    uploaded = _uploaded(root)
    replaced = {
        name: NotAsSaved(name, sent.size, path.stat().st_size)
        for name, sent in uploaded.items()
        for path in (root / name,)
        if lexists(path) and (path.stat().st_size, etag_of(path)) != (sent.size, sent.etag)
    }
    is_newer = MANIFEST in replaced or MANIFEST not in uploaded
    sealed = manifest.digests if manifest is not None and is_newer else {}
    files = [file for name, file in replaced.items() if name not in sealed and name != MANIFEST]
    return [file.name for file in unexplained(root, files, by_manifest=False)]


def _uploaded(root: AnyPath) -> Mapping[str, Uploaded]:
    """Return the objects in the commit marker of an upload. Raises OSError."""
    try:
        commit = read_commit(root)
    except FormatError:  # ``cut_upload`` names it
        commit = None
    return commit.objects if commit is not None else {}


def incomplete(
    checkpoint: AnyPath,
    *,
    reads_files: bool = True,
    scan: Callable[[], CheckpointFolder] | None = None,
) -> str | None:
    """Return why a checkpoint is incomplete, None for a complete one.

    ``reads_files``: off for a caller that has a finding for each damaged file. ``scan``: returns
    the folder with all headers, for a caller that needs them, too.

    With the manifest of a save, every file of that save must exist with its size, but for what a
    repair changed. Without one, as stock accelerate leaves it, sealed or not, there must be weights
    of a model and the main process's state of the generators, which it writes after all but the
    custom objects; no file may be empty, and those of weights and states must be intact by their
    headers and hold what their names say. A folder that ``salvage`` wrote with losses is
    incomplete. One of ``dcp.save`` alone needs ``.metadata``, which is written last, and a name that
    neither accelerate nor the Trainer gives. A folder of the Trainer needs weights, too, and
    ``trainer_state.json``, which it writes last, with the step of the folder's name.
    """
    try:
        manifest = manifest_or_command(checkpoint)
        names = sorted(names_in(checkpoint))
        if (checkpoint / JOURNAL / UNFINISHED).exists():
            return "its save was interrupted while its files were moved into place"
        if (problem := upload_problem(checkpoint)) is not None:
            return problem
        if partly_repaired(checkpoint) is not None:
            return HALF_REPAIRED
        if manifest is not None and manifest.is_of_a_save:
            lacking = not_as_saved(checkpoint, manifest)
            missing = unexplained(checkpoint, lacking, by_manifest=True)
            return "; ".join(map(str, missing[:3])) or None
        if manifest is None and (gone := gone_since_upload(checkpoint)):
            return "; ".join(map(str, gone[:3]))
        losses = read_losses(checkpoint)
    except (FormatError, OSError) as error:
        return described(error)
    if losses is not None:
        return f"it was salvaged: {losses}"
    if inner := _lies_in(checkpoint, names):
        return f"all its files are in {inner}/, where no run looks for them; move them up one level"
    if _STATES not in names and TRAINER_STATE not in names and any(map(parse_dcp_name, names)):
        # A script of its own saved it with dcp.save, under a name of its own.
        family = family_of(absolute(checkpoint).name)
        if family is not None and family[0] in (ACCELERATE, TRAINER):
            return _PLAIN_DCP
        return None if METADATA_NAME in names else f"no {METADATA_NAME}, which is written last"
    if not holds_weights(checkpoint, names):
        return NO_WEIGHTS
    if _STATES not in names:
        if TRAINER_STATE not in names and _has_weights_alone(checkpoint, names):
            return _WEIGHTS_ALONE
        # load_state takes it, so it must be Accelerate's.
        if checkpoint_number(checkpoint.name) is not None:
            return _NO_STATES
        try:
            problem = trainer_problem(checkpoint, complete=reads_files)
        except FileNotFoundError:
            if checkpoint_number(checkpoint.name, TRAINER) is None:
                return _NO_STATES
            return (
                f"neither {_STATES}, which save_state writes near the end, nor the Trainer's "
                f"{TRAINER_STATE}"
            )
        if problem is not None:
            return problem
    try:
        return _damage(checkpoint, names, scan) if reads_files else None
    except OSError as error:
        return described(error)


def _has_weights_alone(checkpoint: AnyPath, names: Iterable[str]) -> bool:
    """Return whether nothing in a folder is of a training: ``save_pretrained`` writes a model or an
    adapter so.
    """
    parsed = map(parse_file_name, names)
    return all(name is None or name.role in NOT_STATES for name in parsed) and not any(
        (checkpoint / name).is_dir() for name in names if name != JOURNAL
    )


def _lies_in(checkpoint: AnyPath, names: Collection[str]) -> str:
    """Return the sub-folder that is all a folder holds, and that is a checkpoint, "" for any other
    folder.

    An archive that is unpacked in a folder of its name leaves it so, and ``cp -r`` of a checkpoint
    onto itself.
    """
    visible = [name for name in names if not name.startswith(".") and name != OF_ARCHIVES]
    if len(visible) != 1 or not (checkpoint / visible[0]).is_dir():
        return ""
    inner: list[str] = []
    with suppress(OSError):
        inner = names_in(checkpoint / visible[0])
    return visible[0] if _STATES in inner or TRAINER_STATE in inner else ""


OF_ARCHIVES = "__MACOSX"
"""Folder with attributes of files that macOS puts into archives."""


def _damage(
    checkpoint: AnyPath, names: Collection[str], scan: Callable[[], CheckpointFolder] | None
) -> str | None:
    """Return the problem of the first file that is empty, damaged, or under a wrong name. Raises
    OSError.
    """
    for name in names:
        if parse_file_name(name) is not None and (checkpoint / name).stat().st_size == 0:
            return f"{name} is empty"
        parsed = parse_folder_name(name)
        if parsed is None or not (checkpoint / name).is_dir():
            continue
        if (checkpoint / name / METADATA_NAME).exists():
            continue
        # A repair leaves the folder of a duplicate empty.
        if parsed.index == 0 or not is_empty(checkpoint / name):
            return f"{name} has no {METADATA_NAME}, which is written last"
    folder = scan() if scan is not None else scan_folder(checkpoint, wanted=_is_loaded_whole)
    folder = replace(
        folder, components=tuple(one for one in folder.components if _is_loaded_whole(one.name))
    )
    for lost in lost_models(checkpoint, folder.plain_subfolders, names):
        return lost.problem
    passed_over: Collection[PurePosixPath] | None = None
    for component in folder.components:
        if (why := _unsound(folder, component)) is None:
            continue
        if component.role is Role.WEIGHTS_INDEX:
            # Once for all indexes: a folder with 400 variants of a model took 66 s.
            passed_over = _passed_over(folder) if passed_over is None else passed_over
            if component.path in passed_over:
                continue
        return why
    return _unloadable_weights(folder)


def _unloadable_weights(folder: CheckpointFolder) -> str | None:
    """Return why the weights of a folder cannot be loaded, None where they may.

    ``load_state`` passes a file to ``Module.load_state_dict``, so that no class of a script can
    read another content. Of a model with both files it reads ``model.safetensors`` alone
    (accelerate 1.15, ``checkpointing.py``).
    """
    weights = [one for one in folder.components if is_weights_file(one.name)]
    of_safetensors = {one.name.index for one in weights if one.name.suffix == ".safetensors"}
    for component in weights if folder.is_save_state else ():
        content = component.content
        is_read = component.name.shard is None and component.name.index not in of_safetensors
        if is_read and isinstance(content, TorchFile):
            wrong = state_problem(component.name, content)
            if wrong is not None:
                return f"{component.path} holds {wrong.holds}, not {wrong.expected.value}"
    # DeepSpeed resumes from its own folder: with ZeRO-3 the Trainer leaves an adapter without a
    # tensor next to it.
    if any(deepspeed_folders(folder)):
        return None
    empty = next(weights_without_tensors(folder), None)
    if empty is not None:
        return f"{empty.path} holds no tensors, but its model has some"
    return next(
        (
            f"{component.path} holds {problem.holds}"
            for component, _, problem in files_with_placeholders(folder)
            if is_weights_file(component.name)
        ),
        None,
    )


def _is_loaded_whole(name: FileName) -> bool:
    """Return whether a resume needs a file. Of accelerate's random states one rank's do: a run may
    have a thousand.
    """
    if name.is_of_save_state:
        return name.rank == 0
    return _holds_weights(name) or name.role in _LOADED


_LOADED = (
    Role.OPTIMIZER, Role.SCHEDULER, Role.GRAD_SCALER, Role.SAMPLER, Role.DATALOADER, Role.RNG_STATE,
    Role.CUSTOM,
)  # fmt: skip
"""Roles of the states that ``load_state`` and the Trainer load."""


def _holds_weights(name: FileName) -> bool:
    return name.role in (Role.MODEL, Role.WEIGHTS_INDEX) or name.is_of_library


def _unsound(folder: CheckpointFolder, component: Component) -> str | None:
    """Return why a loader refuses or misreads a file, None when its header is right or of a kind
    that is not read.
    """
    problem, content = component.problem, component.content
    if (
        problem is not None
        and problem.kind is not ProblemKind.UNSUPPORTED
        and not problem.is_elsewhere
    ):
        return f"{component.path}: {problem.message}"
    if isinstance(content, SafetensorsFile) and content.trailing:
        return f"{component.path}: {count_of(content.trailing, 'byte')} after its end"
    if isinstance(content, WeightsIndex):
        shards = dict.fromkeys(content.weight_map.values())
        missing = [name for name in shards if not (folder.root / name).exists()]
        return f"{missing[0]} is missing, but {component.path} lists it" if missing else None
    if isinstance(content, TorchFile):
        wrong = state_problem(component.name, content)
        if wrong is not None and wrong.content is not None:
            return f"{component.path} holds {wrong.holds}, not {wrong.expected.value}"
    return None


def _passed_over(folder: CheckpointFolder) -> Collection[PurePosixPath]:
    """Return the indexes before which every loader, or the Trainer, takes the file or index of
    another save.
    """
    return {
        group.path
        for group in group_files(folder)
        if group.replaced is not None and (group.replaced.is_resumed or not group.replaced.blocked)
    }


NO_WEIGHTS = "no model weights"


def holds_weights(checkpoint: AnyPath, names: Iterable[str]) -> bool:
    """Return whether any of the names in a checkpoint may be of a model's weights.

    That is any file or folder that is not known for something else: hooks of scripts, and
    subclasses of the Trainer, write weights under names of their own.
    """
    return any(_may_be_weights(checkpoint, name) for name in names)


def _may_be_weights(checkpoint: AnyPath, name: str) -> bool:
    parsed = parse_file_name(name)
    if parsed is not None:
        return parsed.role in NOT_STATES
    if name.endswith(OTHER_WEIGHTS) and not is_of_macos(name):
        return True
    if name == JOURNAL or not (checkpoint / name).is_dir():
        return False
    folder = parse_folder_name(name)
    is_optimizer = folder is not None and folder.role is Role.OPTIMIZER
    # Logs of TensorBoard in runs/ are no weights.
    return not is_optimizer and may_hold_weights(checkpoint / name)


HALF_REPAIRED = "a repair was interrupted or is still running, so only some files are changed"

UNFINISHED = "unfinished"
"""Name of the file in ``.ckptfix`` that exists while files of a new save replace the old ones one
by one.
"""


def unfinished_files(checkpoint: AnyPath) -> set[str]:
    """Return the files, relative, that an interrupted save was replacing or adding.

    Raises FormatError for a list that cannot be understood, OSError where no save was interrupted.
    """
    path = checkpoint / JOURNAL / UNFINISHED
    try:
        names = convert(json.loads(read_file(path)), set[str])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be understood: {error}") from None
    if odd := [name for name in names if not is_inside(name)]:
        raise FormatError(
            f"{path} cannot be understood: {min(odd)!r} is not a path in the checkpoint"
        )
    return names
