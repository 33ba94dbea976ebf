"""Completeness of a save: files that are missing, ranks that are missing, and leftovers of an
interrupted copy.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.dcp import DcpFolder, is_empty, rank_of
from ckptfix.checkpoint.deepspeed_files import LATEST, tag_problem
from ckptfix.checkpoint.filenames import (
    STEMS_OF_LIBRARIES,
    parse_file_name,
    random_states_name,
    under_name_of_trainer,
)
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.folder_names import (
    family_of,
    parse_deepspeed_folder_name,
    parse_folder_name,
)
from ckptfix.checkpoint.hidden_files import HiddenFile, Loader, hidden_configs, hidden_files
from ckptfix.checkpoint.latest import (
    gone_since_upload,
    holds_weights,
    is_bare,
    judge,
    numbered,
    replaced_since_upload,
)
from ckptfix.checkpoint.manifest import (
    REPORT,
    Manifest,
    has_stale_sizes,
    manifest_or_command,
    not_as_saved,
    read_losses,
    unexplained,
)
from ckptfix.checkpoint.model_configs import (
    CONFIG,
    LostModel,
    lost_model,
    lost_models,
    may_hold_weights,
)
from ckptfix.checkpoint.neighbours import Neighbours, parts_of
from ckptfix.checkpoint.rank_names import parse_deepspeed_name
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.file_damage import DeepSpeedState
from ckptfix.diagnosis.findings.base import Finding, Unreadable
from ckptfix.diagnosis.findings.config_faults import MissingModel
from ckptfix.diagnosis.findings.damaged import FOLDER, NotATensorFile
from ckptfix.diagnosis.findings.incomplete import (
    ConfiglessModel,
    IncompleteCheckpoint,
    LostConfig,
    LostModelFiles,
    LostTag,
    MissingFile,
    UnreadFolder,
    UnreadTag,
)
from ckptfix.diagnosis.findings.interrupted import InterruptedSave, LeftoverSave, Salvaged
from ckptfix.diagnosis.target import holds_checkpoint, save_inside
from ckptfix.diagnosis.trainer_completeness import incomplete_of_trainer
from ckptfix.diagnosis.unfinished_copies import interrupted
from ckptfix.diagnosis.unresumable import (
    keys_lost_by_migration,
    only_empty_tensors,
    only_for_fsdp,
    paths_of_states,
    unchecked_shards,
    unresumable,
)
from ckptfix.errors import FormatError
from ckptfix.storage.files import AnyPath, absolute, is_listed, lexists, names_in, walk
from ckptfix.storage.paths import COMMITTED, MANIFEST, command, unreadable
from ckptfix.tensors.opening import is_checkpoint
from ckptfix.wording import list_names


def incomplete(
    folder: CheckpointFolder,
    states: Iterable[DcpFolder],
    deepspeed: Iterable[DeepSpeedState],
    manifest: Manifest | None,
    hidden: Sequence[HiddenFile],
    *,
    has_deepspeed: bool,
) -> Iterator[Finding]:
    """Yield the missing parts that the other files of a folder imply.

    ``hidden``: files with another name than their loader looks for, which get findings of their
    own. The sentences say if another node may have them.

    A manifest may list a scheduler without its optimizer: ``migrate`` leaves DeepSpeed's optimizer
    out.
    """
    parts = parts_of(paths_of_states(folder))
    names = (component.name for component in folder.components if component.name.is_of_save_state)
    ranks = {name.rank for name in names if name.rank is not None}
    under_other_names = {file.wanted for file in hidden if file.is_certain}
    roles = {role for role, _ in parts}
    rest = roles & {Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER}
    if ranks and (rest or 0 in ranks):
        shown_by = _writers(states) | _partitions(deepspeed)
        shown_by |= {rank: random_states_name(rank) for rank in ranks}
        expected = (
            random_states_name(rank) for rank in range(max(shown_by) + 1) if rank not in ranks
        )
        lost_states = tuple(name for name in expected if name not in under_other_names)
        if lost_states:
            there = shown_by[max(shown_by)]
            yield IncompleteCheckpoint(
                path=PurePosixPath(lost_states[0]),
                missing=lost_states,
                known_by=f"{there} shows that at least {max(shown_by) + 1} processes saved",
                by_rank=True,
            )
    # A script that prepares the scheduler alone may save its optimizer itself: the checkpoints next
    # to it decide.
    is_of_script = bool(under_name_of_trainer("optimizer.bin", paths_of_states(folder)))
    if Role.SCHEDULER in roles and not (Role.OPTIMIZER in roles or is_of_script or has_deepspeed):
        name = next(name for (role, _), name in parts.items() if role is Role.SCHEDULER)
        lost = name.replace("scheduler", "optimizer")
        is_listed_alone = manifest is not None and name in manifest.digests
        if not is_listed_alone and lost not in under_other_names:
            of_trainer = any(
                one.path.name == name and one.name.is_of_trainer for one in folder.components
            )
            yield IncompleteCheckpoint(
                path=PurePosixPath(lost),
                missing=(lost,),
                known_by=f"{name} shows that the run had an optimizer",
                of_trainer=of_trainer,
                misnamed=next((file.candidate for file in hidden if file.wanted == lost), ""),
            )
    if (
        not ranks
    ):  # random states of Accelerate: save_state wrote the folder, whatever else a script put there
        yield from incomplete_of_trainer(folder, hidden, has_deepspeed=has_deepspeed)


def _writers(states: Iterable[DcpFolder]) -> dict[int, str]:
    """Return the ranks that wrote a part of a DCP save which is there, each with a file of it."""
    return {
        rank: str(path)
        for state in states
        for path in state.named
        if path in state.files and (rank := rank_of(path)) is not None
    }


def _partitions(states: Iterable[DeepSpeedState]) -> dict[int, str]:
    """Return the ranks of which DeepSpeed's partition of the optimizer is there, each with its
    file. With tensor parallelism there are more processes.

    Files of ranks beyond the number that the files hold belong to another save.
    """
    return {
        name.rank: str(path)
        for state in states
        for path in state.scanned
        if (name := parse_deepspeed_name(path.name)) is not None
        and name.rank is not None
        and (state.ranks is None or name.rank < state.ranks)
    }


OF_UPLOAD = f"digests in {COMMITTED}"
"""Beginning of the sentence about objects that changed since their upload."""

SAVE_TIME = 30 * 60
"""Seconds in which a save writes its first weights: ``ddp_timeout`` of the Trainer, and
accelerate's default.

Before that, FSDP and ZeRO-3 gather the weights. torch.distributed ends a run whose ranks wait
longer for each other.
"""


class BareCheckpoint(NamedTuple):
    """The verdict on a bare checkpoint: its findings, or in words why there are none yet."""

    findings: tuple[Finding, ...] = ()
    unfinished: tuple[str, ...] = ()

    def beyond(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """Return its findings that the diagnosis lacks, none where it names the upload that was
        cut.
        """
        known = tuple(findings)
        is_cut = any(isinstance(finding, InterruptedSave) and finding.upload for finding in known)
        return () if is_cut else tuple(finding for finding in self.findings if finding not in known)


def judge_bare(
    folder: CheckpointFolder, problem_of: Callable[[AnyPath], str | None]
) -> BareCheckpoint | None:
    """Return the verdict on a folder without files of a checkpoint that should have some, None for
    every other folder.

    Of a numbered one it goes by the age and the checkpoints next to it; those next to a folder that
    a URL names are not known. Any other needs the config of a model, or the list of a pipeline
    without weights. ``problem_of``: returns why no run resumes from a checkpoint next to it. Raises
    OSError.
    """
    root = folder.root
    if folder.only is not None or holds_checkpoint(folder):
        return None
    if not is_bare(root):
        # Few folders have such a config. Weights are looked for in the whole tree below a folder.
        lost = tuple(_lost_models(folder))
        return BareCheckpoint(lost) if lost and not may_hold_weights(root) else None
    below = tuple(sorted(str(path) for path in folder.subfolders if may_hold_weights(root / path)))
    origin = absolute(root)
    named = family_of(origin.name)
    assert named is not None
    pattern, number = named
    family: tuple[tuple[int, AnyPath], ...] = ()
    if is_listed(origin.parent):
        family = numbered(origin.parent, (pattern,)).get(pattern, ())
    complete = (
        one
        for one in family
        if one[1] != origin and judge(one[1], one[0], problem_of).problem is None
    )
    newest, at = next(((path.name, other) for other, path in complete), ("", -1))
    if at > number:
        return BareCheckpoint(
            (LeftoverSave(path=PurePosixPath(), bare=True, newest=newest, below=below),)
        )
    changed = _last_change(root)
    # A clock that is ahead, as of an NFS server, makes a file of the future: it is new, too.
    if abs(time.time() - changed) < SAVE_TIME:
        until = time.strftime("%H:%M", time.localtime(changed + SAVE_TIME))
        words = (
            f"{origin.name} changed in the last 30 minutes and is not complete: a save may be "
            "running"
        )
        return BareCheckpoint(unfinished=(f"{words}; next: check it again after {until}",))
    return BareCheckpoint(
        (InterruptedSave(path=PurePosixPath(), bare=True, newest=newest, below=below),)
    )


def _last_change(root: AnyPath) -> float:
    """Return when something in or below a folder changed last, in seconds since the epoch.

    In a store only objects have a time.
    """
    times = [0.0]
    for where, _, names in walk(root):
        for path in (where, *(where / name for name in names)):
            with suppress(OSError):
                times.append(path.lstat().st_mtime)
    return max(times)


def listed(folder: CheckpointFolder, manifest: Manifest | None) -> Iterator[Finding]:
    """Yield the missing checkpoint files that the manifest lists. For a save, its recorded sizes
    show more.
    """
    if manifest is None:
        return
    sealed = [
        name
        for name in manifest.digests
        if name not in manifest.files and parts_of([PurePosixPath(name)])
    ]
    missing = tuple(name for name in sealed if not lexists(folder.root / name))
    if missing:
        are = "it" if len(missing) == 1 else "them"
        yield IncompleteCheckpoint(
            path=PurePosixPath(missing[0]), missing=missing, known_by=f"{MANIFEST} lists {are}"
        )


def diagnose_save(case: Case) -> Iterator[Finding | str | Unreadable]:
    """Compare a folder with the files that its save wrote."""
    folder = case.folder
    try:
        manifest = manifest_or_command(folder.root)
        missing = list(_missing(folder, manifest, case.damaged))
        yield from missing
        yield from _unchecked(folder, manifest)
        yield from _replaced(folder, manifest)
        is_saved = manifest is not None and manifest.is_of_a_save
        losses = read_losses(folder.root) if not case.is_file and not is_saved else None
    except FormatError as error:
        yield f"the files of the save: {error}"
        return
    except OSError as error:
        where = Path(error.filename) if error.filename else folder.root / MANIFEST
        yield Unreadable(f"{MANIFEST}: {unreadable(where, error)}")
        return
    if losses is not None:
        yield Salvaged(path=PurePosixPath(REPORT), **losses._asdict())
    if case.is_file:
        return
    findings: list[Finding] = [*interrupted(folder, case.sharded)]
    if not is_saved:  # a save's manifest says what the sub-folders held
        findings += _lost_models(folder)
        findings += _lost_configs(folder, case.neighbours)
    modelless = list(_modelless(folder, case.sharded))
    # An empty folder of the only model is told by what it lacks.
    unread = [] if is_saved or modelless else list(_unread_folders(folder))
    findings += modelless or unread
    findings += _without_tag(folder)
    gone = list(listed(folder, manifest))
    findings += gone
    if not is_saved:
        yield from unchecked_shards(folder)
    if not (is_saved or gone):  # a manifest says what belongs here
        has_deepspeed = bool(case.deepspeed) or any(
            parse_deepspeed_folder_name(finding.path.name) for finding in unread
        )
        hidden = tuple(hidden_files(folder))
        findings += incomplete(
            folder, case.sharded, case.deepspeed, manifest, hidden, has_deepspeed=has_deepspeed
        )
        findings += _misnamed(folder, hidden)
        findings += only_for_fsdp(folder)
        reported = {str(finding.path) for finding in findings}
        yield from (
            f"{file.content}: {file.known_by}"
            for file in hidden
            if not (file.is_certain or file.wanted in reported)
        )
        if not (missing or losses or findings):
            has_optimizer = has_deepspeed or any(
                file.content == Role.OPTIMIZER.value for file in hidden
            )
            yield from unresumable(folder, has_optimizer=has_optimizer)
    yield from only_empty_tensors(folder)
    yield from keys_lost_by_migration(folder)
    yield from findings


def _misnamed(folder: CheckpointFolder, hidden: Iterable[HiddenFile]) -> Iterator[Finding]:
    """Yield a finding for each folder by the name of a file, and for each file that its loader
    surely wants.
    """
    for path in folder.subfolders:
        name = parse_file_name(path.name)
        if name is not None and name.is_state_file:
            yield NotATensorFile(path=path, content=FOLDER)
    for file in (file for file in hidden if file.is_certain):
        yield IncompleteCheckpoint(
            path=PurePosixPath(file.wanted),
            missing=(file.wanted,),
            known_by=file.known_by,
            of_trainer=file.loader is Loader.TRAINER,
            misnamed=file.candidate,
        )


def _without_tag(folder: CheckpointFolder) -> Iterator[LostTag]:
    """Yield DeepSpeed's ``latest`` if a load does not find the checkpoint by it; accelerate never
    reads it.
    """
    problem = tag_problem(folder)
    if problem is not None:
        tag, why = problem
        kind = UnreadTag if folder.is_save_state else LostTag
        names = names_in(folder.root / tag)
        if folder.is_save_state and not any(name.endswith("optim_states.pt") for name in names):
            return  # zero_to_fp32 has nothing to join, as in a universal checkpoint
        path = PurePosixPath(LATEST)
        yield kind(
            path=path, missing=(LATEST,), known_by=f"{tag}/ exists", problem=why, tag=str(tag)
        )


def _missing(
    folder: CheckpointFolder, manifest: Manifest | None, explained: Collection[PurePosixPath]
) -> Iterator[Finding]:
    lacking = (
        gone_since_upload(folder.root)
        if manifest is None
        else unexplained(folder.root, not_as_saved(folder.root, manifest), by_manifest=True)
    )
    for name, saved, have in lacking:
        if folder.only in (None, name) and PurePosixPath(name) not in explained:
            yield MissingFile(path=PurePosixPath(name), saved=saved, have=have)


def _unchecked(folder: CheckpointFolder, manifest: Manifest | None) -> Iterator[str]:
    if manifest is None:
        return
    if manifest.is_of_a_save and has_stale_sizes(folder.root, manifest):
        yield "whether all files of the save exist: a repair has changed some of them"
    if manifest.digests or any(entry.digests for entry in manifest.models):
        yield f"digests in {MANIFEST}; next: {command('verify', folder.root, folder.only or '')}"


def _replaced(folder: CheckpointFolder, manifest: Manifest | None) -> Iterator[str]:
    replaced = replaced_since_upload(folder.root, manifest)
    names = [name for name in replaced if folder.only in (None, name)]
    if names:
        changed = "its size or ETag" if len(names) == 1 else "their size or ETag"
        yield (
            f"{OF_UPLOAD} of {list_names(names)}: {changed} changed since the upload; "
            f"next: {command('verify', folder.root, folder.only or '')}"
        )


def _modelless(folder: CheckpointFolder, states: Iterable[DcpFolder]) -> Iterator[Finding]:
    """Yield a finding when the folder has Accelerate's optimizer states, and no file that may be
    weights.

    A DCP folder without a name of Accelerate's, such as the checkpoint itself, may hold a model.
    """
    if any(state.name is None for state in states):
        return
    roles = {
        path: name.role for path in folder.subfolders if (name := parse_folder_name(path.name))
    }
    roles |= {one.path: one.role for one in folder.components if not one.name.is_of_trainer}
    optimizer = next((path for path, role in roles.items() if role is Role.OPTIMIZER), None)
    names = [path.name for path in (*paths_of_states(folder), *folder.strays)]
    if optimizer is not None and not holds_weights(folder.root, names):
        yield MissingModel(path=optimizer)


def _unread_folders(folder: CheckpointFolder) -> Iterator[UnreadFolder]:
    """Yield the folders by the name of a sharded save that are empty, or hold the save one level too
    deep.

    A repair leaves the folder of a duplicate empty. Its number is never 0: the checkpoints next to
    it show whether any other is lost.
    """
    for path in folder.subfolders:
        name = parse_folder_name(path.name) or parse_deepspeed_folder_name(path.name)
        if name is None:
            continue
        inner = save_inside(folder.root / path)
        if inner or (name.index == 0 and is_empty(folder.root / path)):
            deeper = f"its files are one level too deep, in {path / inner}"
            yield UnreadFolder(
                path=path,
                missing=(str(path),),
                known_by=deeper if inner else "it is empty",
                inner=str(path / inner) if inner else "",
            )


def _lost_models(folder: CheckpointFolder) -> Iterator[MissingModel]:
    """Yield a finding for each model whose config is in a checkpoint, or alone in its folder,
    without its weights.
    """
    if is_checkpoint(folder):
        names = [path.name for path in (*(one.path for one in folder.components), *folder.strays)]
        yield from map(_missing_model, lost_models(folder.root, folder.plain_subfolders, names))
    elif not holds_checkpoint(folder) and not is_bare(folder.root):
        lost = lost_model(folder.root)
        if lost is not None:
            yield _missing_model(lost)


def _lost_configs(folder: CheckpointFolder, neighbours: Neighbours) -> Iterator[LostModelFiles]:
    """Yield a finding for each model of diffusers in a sub-folder of ``save_state`` that lacks its
    config.

    Hooks of diffusers' scripts save ``unet/`` so. Its file names are those of
    ``ModelMixin.save_pretrained``, which always writes both (diffusers 0.42). A hook that calls
    ``save_file`` under such a name writes no config, in any checkpoint. A config under another name
    has a finding of its own.
    """
    for path in folder.plain_subfolders if folder.is_save_state else ():
        names: tuple[str, ...] = ()
        with suppress(OSError):
            names = tuple(sorted(names_in(folder.root / path)))
        weights = next((name for name in names if _is_of_diffusers(name)), None)
        if weights and CONFIG not in names and not any(hidden_configs(folder.root / path, names)):
            lost = path / CONFIG
            near = [files for save in neighbours.nearest() if (files := save.model_in(str(path)))]
            kind: type[LostModelFiles] = LostConfig
            if near:
                kind = LostModelFiles if any(CONFIG in files for files in near) else ConfiglessModel
            known_by = f"save_pretrained writes it next to {path / weights}"
            yield kind(path=lost, missing=(str(lost),), known_by=known_by)


def _is_of_diffusers(name: str) -> bool:
    parsed = parse_file_name(name)
    return (
        parsed is not None
        and parsed.is_of_library
        and not parsed.index
        and parsed.model is not None
        and parsed.model.stem in STEMS_OF_LIBRARIES["diffusers"][".bin"]
    )


def _missing_model(lost: LostModel) -> MissingModel:
    facts = lost._asdict()
    return MissingModel(path=facts.pop("config"), **facts)
