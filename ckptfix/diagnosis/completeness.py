"""Completeness of a save: files that are missing, ranks that are missing, and leftovers of an
interrupted copy.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptfix.checkpoint.dcp import DcpFolder, is_empty, rank_of
from ckptfix.checkpoint.deepspeed_files import LATEST, tag_problem
from ckptfix.checkpoint.filenames import (
    STEMS_OF_LIBRARIES,
    TRAINER,
    TRAINER_STATE,
    Role,
    checkpoint_number,
    family_of,
    model_file,
    parse_deepspeed_folder_name,
    parse_file_name,
    parse_folder_name,
    random_states_name,
    weights_names,
)
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.hidden_files import (
    HiddenFile,
    Loader,
    has_weights_of,
    hidden_configs,
    hidden_files,
)
from ckptfix.checkpoint.latest import (
    gone_since_upload,
    holds_weights,
    is_bare,
    judge,
    numbered,
)
from ckptfix.checkpoint.manifest import (
    REPORT,
    Manifest,
    has_stale_sizes,
    not_as_saved,
    read_losses,
    read_manifest,
    read_migrated,
    unexplained,
)
from ckptfix.checkpoint.model_configs import (
    ADAPTER,
    CONFIG,
    GENERATION,
    NO_OBJECT,
    PIPELINE,
    LostModel,
    broken_config,
    broken_lists,
    components_of_other_classes,
    is_empty_config,
    library_of,
    lost_model,
    lost_models,
    may_hold_weights,
    read_config,
)
from ckptfix.checkpoint.neighbours import Neighbours, parts_of
from ckptfix.checkpoint.trainer_folders import (
    MissingState,
    adapter_without_config,
    lost_weights,
    missing_among,
    random_states,
)
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.findings.base import Finding, Unreadable
from ckptfix.diagnosis.findings.config_faults import LostAdapter
from ckptfix.diagnosis.findings.damaged import FOLDER, NotATensorFile
from ckptfix.diagnosis.findings.incomplete import (
    ConfiglessModel,
    IncompleteCheckpoint,
    InterruptedSave,
    LeftoverSave,
    LostConfig,
    LostModelFiles,
    LostTag,
    MissingFile,
    RandomStatesLeftOut,
    Salvaged,
    UnreadFolder,
    UnreadTag,
)
from ckptfix.diagnosis.findings.weight_faults import MissingModel
from ckptfix.diagnosis.saved_optimizers import saved_optimizers
from ckptfix.diagnosis.siblings import under_name_of_trainer
from ckptfix.diagnosis.target import holds_checkpoint, save_inside
from ckptfix.diagnosis.unfinished_copies import interrupted
from ckptfix.diagnosis.unread_shards import unchecked_shards
from ckptfix.errors import FormatError
from ckptfix.formats.torch_file import TorchFile
from ckptfix.formats.torch_zip import TorchZip
from ckptfix.storage.files import AnyPath, absolute, is_listed, lexists, names_in, walk
from ckptfix.storage.paths import MANIFEST, command, leads_nowhere, unreadable
from ckptfix.tensors.opening import is_checkpoint

_RESUMED = (Role.OPTIMIZER, Role.SCHEDULER, Role.RNG_STATE)
"""Roles that the Trainer starts anew in silence when their file is missing (``_load_rng_state`` and
the like).
"""

_FOREIGN = (CONFIG, ADAPTER, PIPELINE, TRAINER_STATE)
"""Files next to weights that a library exported on purpose, so that the folder is not a
``save_state`` one.
"""


def incomplete(
    folder: CheckpointFolder,
    states: Iterable[DcpFolder],
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
    parts = parts_of(_paths(folder))
    names = (component.name for component in folder.components if component.name.is_of_save_state)
    ranks = {name.rank for name in names if name.rank is not None}
    roles = {role for role, _ in parts}
    rest = roles & {Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER}
    if ranks and (rest or 0 in ranks):
        shown_by = _writers(states) | {rank: random_states_name(rank) for rank in ranks}
        missing = [rank for rank in range(max(shown_by) + 1) if rank not in ranks]
        if missing:
            lost_states = tuple(random_states_name(rank) for rank in missing)
            there = shown_by[max(shown_by)]
            yield IncompleteCheckpoint(
                path=PurePosixPath(lost_states[0]),
                missing=lost_states,
                known_by=f"{there} is there",
                by_rank=True,
            )
    # A script that prepares the scheduler alone may save its optimizer itself: the checkpoints next
    # to it decide.
    is_of_script = bool(under_name_of_trainer("optimizer.bin", _paths(folder)))
    if Role.SCHEDULER in roles and not (Role.OPTIMIZER in roles or is_of_script or has_deepspeed):
        name = next(name for (role, _), name in parts.items() if role is Role.SCHEDULER)
        lost = name.replace("scheduler", "optimizer")
        if manifest is None or name not in manifest.digests:
            of_trainer = any(
                one.path.name == name and one.name.is_of_trainer for one in folder.components
            )
            yield IncompleteCheckpoint(
                path=PurePosixPath(lost),
                missing=(lost,),
                known_by=f"{name} is there",
                of_trainer=of_trainer,
            )
    if (
        not ranks
    ):  # random states of Accelerate: save_state wrote the folder, whatever else a script put there
        yield from _incomplete_of_trainer(folder, hidden, has_deepspeed=has_deepspeed)


def _writers(states: Iterable[DcpFolder]) -> dict[int, str]:
    """Return the ranks that wrote a part of a DCP save which is there, each with a file of it."""
    return {
        rank: str(path)
        for state in states
        for path in state.named
        if path in state.files and (rank := rank_of(path)) is not None
    }


_ADAPTER_WEIGHTS, *_ = weights_names("peft")
_DEFAULTS = "from_pretrained takes default settings for generation without an error"

_READ_BY = {
    CONFIG: ("from_pretrained fails", "the Trainer and from_pretrained fail"),
    ADAPTER: ("PeftModel.from_pretrained fails", "PeftModel.from_pretrained fails"),
    GENERATION: (_DEFAULTS, _DEFAULTS),
}
"""The loads that fail without a config, and with one that is not JSON (transformers 5.23, peft
0.21).
"""


def _lacks_type(config: AnyPath) -> bool:
    """Return whether an object in a config does not say of which type an adapter is. PEFT raises
    KeyError, also for a name in small letters: all 45 of PEFT 0.21 are in capitals.
    """
    values = read_config(config.parent, config.name)
    kind = values.get("peft_type")
    return is_empty_config(config) or (
        bool(values) and (not isinstance(kind, str) or kind != kind.upper())
    )


def _incomplete_of_trainer(
    folder: CheckpointFolder, hidden: Sequence[HiddenFile], *, has_deepspeed: bool
) -> Iterator[Finding]:
    """Yield the states that transformers' Trainer writes together with those that exist
    (``Trainer._save_checkpoint``).

    Weights and ``training_args.bin`` alone are an export, or a checkpoint of ``save_only_model``:
    nothing is missing. Nor is it from the states of ranks alone that a node other than the first
    has on a disk of its own.
    """
    # Also the names of sub-folders.
    names = [path.name for path in (*_paths(folder), *folder.strays)]
    is_of_library = any(
        one.name.is_of_library or one.name.is_of_trainer for one in folder.components
    )
    of_diffusers = STEMS_OF_LIBRARIES["diffusers"][".bin"]
    models = (one.name.model for one in folder.components)
    stems = {model.stem for model in models if model is not None}
    is_of_diffusers = not stems.isdisjoint(of_diffusers)
    is_of_peft = not stems.isdisjoint(STEMS_OF_LIBRARIES["peft"][".bin"])
    for name, (without, with_wrong) in _READ_BY.items() if is_of_library else ():
        nowhere = leads_nowhere(folder.root / name) if name in names else ""
        broken = nowhere or (broken_config(folder.root / name) if name in names else "")
        effect = without if nowhere else with_wrong
        # diffusers always writes the class. PyTorchModelHubMixin writes {} for a model without
        # arguments.
        if (
            not broken
            and name == CONFIG in names
            and is_of_diffusers
            and is_empty_config(folder.root / name)
        ):
            broken, effect = (
                "an empty object",
                "from_pretrained makes a model of the default sizes",
            )
        if name == GENERATION and broken == NO_OBJECT:
            effect = "from_pretrained fails"
        # Other libraries write a config of that name, too, next to weights of another name.
        if (
            not broken
            and name == ADAPTER in names
            and is_of_peft
            and _lacks_type(folder.root / name)
        ):
            broken = "without a 'peft_type' of PEFT"
        if broken:
            yield IncompleteCheckpoint(
                path=PurePosixPath(name),
                missing=(name,),
                known_by="it cannot be read",
                of_trainer=True,
                problem=f"{broken}, so {effect}",
                is_wrong=True,
            )
    wrong_lists = list(broken_lists(folder.root))
    if PIPELINE in names:
        wrong_lists += [(PIPELINE, why) for why in components_of_other_classes(folder.root)]
    for name, why in wrong_lists:
        path = PurePosixPath(name)
        yield IncompleteCheckpoint(
            path=path, missing=(name,), known_by=why, problem=why, is_wrong=True
        )
    is_hidden = any(file.wanted in (CONFIG, ADAPTER) for file in hidden)
    own = {one.name.role: one.path.name for one in folder.components if one.name.is_of_trainer}
    parts = parts_of(_paths(folder))
    weights = _weights_lost_by_trainer(folder, own, names)
    if weights is not None:
        yield weights
    elif (own or not parts) and (adapter := adapter_without_config(names)) and not is_hidden:
        yield IncompleteCheckpoint(
            path=PurePosixPath(ADAPTER),
            missing=(ADAPTER,),
            known_by=f"{adapter} is there",
            of_trainer=bool(own),
        )
    # The weights of an adapter that was merged are often deleted without its config.
    if (
        {CONFIG, ADAPTER} <= set(names)
        and has_weights_of(CONFIG, names)
        and not has_weights_of(ADAPTER, names)
        and library_of(read_config(folder.root, ADAPTER)) == "peft"
        and not is_hidden
        and not any(_ADAPTER_WEIGHTS in name for name in names)
    ):
        yield LostAdapter(
            path=PurePosixPath(_ADAPTER_WEIGHTS),
            missing=(_ADAPTER_WEIGHTS,),
            known_by=f"{ADAPTER} is there",
        )
    # ``save_pretrained`` writes both configs.
    if (
        GENERATION in names
        and CONFIG not in names
        and has_weights_of(CONFIG, names)
        and not is_hidden
    ):
        yield IncompleteCheckpoint(
            path=PurePosixPath(CONFIG), missing=(CONFIG,), known_by=f"{GENERATION} is there"
        )
    states = {role: name for (role, _), name in parts.items() if role in _RESUMED}
    if not states or not own.keys() & {Role.RNG_STATE, Role.TRAINING_ARGUMENTS}:
        return
    there = own.get(Role.RNG_STATE) or next(iter(states.values()))
    ranks = {one.name.rank for one in folder.components if one.name.role is Role.RNG_STATE}
    numbered = {rank for rank in ranks if rank is not None}
    if (
        ranks
        and not ranks & {None, 0}
        and states.keys() == {Role.RNG_STATE}
        and (Role.MODEL, 0) not in parts
    ):
        return
    gap = tuple(
        random_states(rank) for rank in range(max(numbered, default=0)) if rank not in ranks
    )
    if gap:
        yield _lost_by_trainer(gap, there, by_rank=True)
    if renamed := _renamed_random_states(folder):
        yield IncompleteCheckpoint(
            path=PurePosixPath(random_states(None)),
            missing=(random_states(None),),
            known_by=f"{renamed} was saved under this name, by a run of one process",
            of_trainer=True,
            misnamed=renamed,
        )
    lost = () if Role.RNG_STATE in states else (random_states(None),)
    found = missing_among(names, lost, has_deepspeed=has_deepspeed)
    # A scheduler without its optimizer is no sign of the Trainer alone, and has been reported.
    known = {Role.OPTIMIZER} if Role.SCHEDULER in states else set()
    if not ranks and read_migrated(folder.root).lacks_random_states:
        known.add(Role.RNG_STATE)
        name = random_states(None)
        yield RandomStatesLeftOut(
            path=PurePosixPath(name),
            missing=(name,),
            known_by="ckptfix migrate left it out, as it is of another number of processes",
            of_trainer=True,
        )
    missing = [one.name for one in sorted(found, key=_as_said) if one.role not in known]
    if all(path.name != TRAINER_STATE for path in folder.strays):
        missing.insert(0, TRAINER_STATE)
    if missing:
        yield _lost_by_trainer(tuple(missing), there)


def _renamed_random_states(folder: CheckpointFolder) -> str:
    """Return the only random states of the Trainer where they are those of a single process with a
    rank, else "".

    ``torch.save`` writes the name of the file into it. With one process the Trainer reads
    ``rng_state.pth`` alone, and without it goes on with new random states
    (``Trainer._load_rng_state``, transformers 5.23).
    """
    states = [
        one for one in folder.components if one.role is Role.RNG_STATE and one.name.is_of_trainer
    ]
    if len(states) != 1 or states[0].name.rank is None:
        return ""
    content = states[0].content
    container = content.container if isinstance(content, TorchFile) else None
    is_of_one = isinstance(container, TorchZip) and f"{container.root}.pth" == random_states(None)
    return str(states[0].path) if is_of_one else ""


def _weights_lost_by_trainer(
    folder: CheckpointFolder, own: Mapping[Role, str], names: Collection[str]
) -> IncompleteCheckpoint | None:
    """Return the finding about a checkpoint or an export of the Trainer without weights, None for
    any other folder.

    ``own``: the states that the Trainer alone writes. It saves its arguments together with the
    weights, even in an export; a script may keep arguments of its own under that name, and an
    optimizer away from its model.
    """
    ranks = {one.name.rank for one in folder.components if one.name.role is Role.RNG_STATE}
    if own.keys() == {Role.RNG_STATE} and not ranks & {None, 0}:
        return None  # the states of ranks on the disk of another node
    is_saved_by_trainer = len(own) > 1 or (own and not {*_FOREIGN}.isdisjoint(names))
    if not is_saved_by_trainer or holds_weights(folder.root, names):
        return None
    shown = next(role for role in (*_RESUMED, Role.TRAINING_ARGUMENTS) if role in own)
    lost = lost_weights(names)
    return IncompleteCheckpoint(
        path=PurePosixPath(lost),
        missing=(lost,),
        known_by=f"{own[shown]} is there, and no file with weights",
        of_trainer=True,
    )


def broken_trainer_state(case: Case) -> Iterator[Finding | str]:
    """Yield a ``trainer_state.json`` from which the Trainer cannot resume, though all weights may
    be intact.

    Next to random states of Accelerate it is a file of a script, whatever it holds. Its values are
    only judged where the name of the folder or another file is the Trainer's.
    """
    folder, trainer = case.folder, case.trainer
    yield from trainer.unchecked
    name = absolute(folder.root).name
    is_of_trainer = checkpoint_number(name, TRAINER) is not None or any(
        one.name.is_of_trainer for one in folder.components
    )
    if not folder.is_save_state and (trainer.is_broken or (trainer.is_wrong and is_of_trainer)):
        yield IncompleteCheckpoint(
            path=PurePosixPath(TRAINER_STATE),
            missing=(TRAINER_STATE,),
            known_by="it cannot be read" if trainer.is_broken else "its values are wrong",
            of_trainer=True,
            problem=trainer.problem,
            is_wrong=trainer.is_wrong,
        )


def _as_said(state: MissingState) -> int:
    return (Role.RNG_STATE, Role.OPTIMIZER, Role.SCHEDULER).index(state.role)


def _lost_by_trainer(
    missing: tuple[str, ...], there: str, *, by_rank: bool = False
) -> IncompleteCheckpoint:
    return IncompleteCheckpoint(
        path=PurePosixPath(missing[0]),
        missing=missing,
        known_by=f"{there} is there",
        by_rank=by_rank,
        of_trainer=True,
    )


def unresumable(folder: CheckpointFolder, *, has_deepspeed: bool) -> Iterator[str]:
    """Yield in words what a folder without an error lacks to resume a run, if it may not be meant
    to.
    """
    roles = {role for role, _ in parts_of(_paths(folder))}
    has_other_name = False
    for role, wanted in ((Role.OPTIMIZER, "optimizer.bin"), (Role.SCHEDULER, "scheduler.bin")):
        under = under_name_of_trainer(wanted, _paths(folder))
        if Role.MODEL in roles and role not in roles and under:
            has_other_name = True
            yield (
                f"{role.value}: load_state does not look for {under!r}, and fails for a script "
                "that prepares one"
            )
    if has_deepspeed or Role.OPTIMIZER in roles or has_other_name:
        return
    if Role.MODEL in roles and roles & {Role.RNG_STATE, Role.SCHEDULER}:
        yield "optimizers: none is saved here; load_state fails for a script that prepares one"
    elif Role.MODEL in roles and not _is_foreign(folder):
        yield (
            "resuming a run: weights alone, not a save_state checkpoint; load_state needs the "
            "states of the run, too"
        )
    elif Role.RNG_STATE in roles:
        yield STATES_ALONE


def _only_for_fsdp(folder: CheckpointFolder) -> Iterator[IncompleteCheckpoint]:
    """Yield a finding for each model that ``load_state`` finds with FSDP alone, next to optimizers
    of a run without it.

    With FSDP, accelerate saves every optimizer by the keys of its parameters (1.0 to 1.15,
    ``save_fsdp_optimizer``).
    """
    names = [one.name for one in folder.components if one.name.load_order is not None]
    others = {name.index for name in names if name.stem != _FSDP_STEM}
    alone = [name for name in names if name.stem == _FSDP_STEM and name.index not in others]
    if not (alone and folder.is_save_state):
        return
    optimizers = [one for one in saved_optimizers(folder, ()) if any(one.groups)]
    if not optimizers or any(one.is_named for one in optimizers):
        return
    for name in alone:
        wanted = str(model_file(".safetensors", name.index))
        read = f"{name} is there, which load_state reads with FSDP alone"
        words = f"{read}, and {optimizers[0].path} is of a run without it"
        yield IncompleteCheckpoint(path=PurePosixPath(wanted), missing=(wanted,), known_by=words)


_FSDP_STEM = "pytorch_model_fsdp"


def _only_empty_tensors(folder: CheckpointFolder) -> Iterator[str]:
    """Yield in words that a model with one tensor without elements may have had more of them.

    accelerate takes them for tensors that share their memory, which begins at address 0, and saves
    the first of them in safetensors alone (1.0 to 1.15, ``clean_state_dict_for_safetensors``).
    ``load_state`` misses the others.
    """
    for component in folder.components if folder.is_save_state else ():
        if component.name.suffix == ".safetensors" and component.name.load_order is not None:
            empty = [tensor.fqn for tensor in component.tensors if 0 in tensor.shape]
            if len(empty) == 1:
                yield (
                    f"tensors without elements: {component.path} has {empty[0]!r}; of several, "
                    "save_state keeps only the first one in safetensors, and load_state fails "
                    "(safe_serialization=False keeps all)"
                )


def _keys_lost_by_migration(folder: CheckpointFolder) -> Iterator[str]:
    """Yield in words that a migrated model may lack the second key of tied weights.

    A ``.bin`` of one key opens as any other, and stock ``load_state`` fails with a missing key.
    """
    if folder.only is None and read_migrated(folder.root).may_lack_keys:
        yield (
            "tied weights: migrate wrote this model from safetensors files, which leave out the "
            "second key; load_state fails if the model ties weights"
        )


def lost_step(folder: CheckpointFolder) -> str | None:
    """Return in words that a ``save_state`` folder has no random states, which it always writes,
    None for others.
    """
    roles = {role for role, _ in parts_of(_paths(folder))}
    if not {Role.MODEL, Role.OPTIMIZER} <= roles or Role.RNG_STATE in roles or _is_foreign(folder):
        return None
    return (
        "random states: none saved; load_state loads the rest, without the random generators and "
        "the step"
    )


STATES_ALONE = "weights: only states of ranks are here, as on a node whose disk is its own"
"""Said of a folder without the files of rank 0, unless a checkpoint next to it has them."""


def _is_foreign(folder: CheckpointFolder) -> bool:
    return any(path.name in _FOREIGN for path in folder.strays)


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


def _paths(folder: CheckpointFolder) -> list[PurePosixPath]:
    return [*(component.path for component in folder.components), *folder.subfolders]


def diagnose_save(case: Case) -> Iterator[Finding | str | Unreadable]:
    """Compare a folder with the files that its save wrote."""
    folder = case.folder
    try:
        manifest = read_manifest(folder.root)
        missing = list(_missing(folder, manifest, case.damaged))
        yield from missing
        yield from _unchecked(folder, manifest)
        is_saved = manifest is not None and manifest.is_of_a_save
        losses = read_losses(folder.root) if not case.is_file and not is_saved else None
    except FormatError as error:
        yield f"what the save wrote: {error}"
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
        hidden = tuple(hidden_files(folder, case.neighbours))
        findings += incomplete(folder, case.sharded, manifest, hidden, has_deepspeed=has_deepspeed)
        findings += _misnamed(folder, hidden)
        findings += _only_for_fsdp(folder)
        yield from (f"{file.content}: {file.known_by}" for file in hidden if not file.is_certain)
        if not (missing or losses or findings):
            yield from unresumable(folder, has_deepspeed=has_deepspeed)
    yield from _only_empty_tensors(folder)
    yield from _keys_lost_by_migration(folder)
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
            misnamed=file.name,
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
            path=path, missing=(LATEST,), known_by=f"{tag}/ is there", problem=why, tag=str(tag)
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
        yield "whether all files of the save are there: a repair changed some since"
    if manifest.digests or any(entry.digests for entry in manifest.models):
        yield f"digests in {MANIFEST}; next: {command('verify', folder.root, folder.only or '')}"


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
    names = [path.name for path in (*_paths(folder), *folder.strays)]
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
            yield kind(path=lost, missing=(str(lost),), known_by=f"{path / weights} is there")


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
