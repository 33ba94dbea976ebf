"""The other checkpoints of a run as witnesses: the files that one of them lacks or has too many, and
those of other entries.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import PurePosixPath

from ckptfix.checkpoint.dcp import is_empty, is_of_checkpoint
from ckptfix.checkpoint.filenames import (
    LORA,
    TRAINER_STATE,
    WEIGHT_KINDS,
    parse_file_name,
    under_name_of_trainer,
    weights_names,
)
from ckptfix.checkpoint.folder import scan_folder
from ckptfix.checkpoint.folder_names import parse_deepspeed_folder_name, parse_folder_name
from ckptfix.checkpoint.manifest import taken_by_repairs
from ckptfix.checkpoint.neighbours import (
    CONFIGS,
    NAMED_INSIDE,
    NEXT_TO,
    Names,
    Neighbour,
    Neighbours,
    Part,
    model_files,
    names_of,
    neighbours_have,
    next_to_it,
    parts_of,
    renamed_states,
)
from ckptfix.checkpoint.roles import Role
from ckptfix.diagnosis.case import Case
from ckptfix.diagnosis.equal_entries import diagnose_models, diagnose_states, renumbered
from ckptfix.diagnosis.exchanged import diagnose_exchanged
from ckptfix.diagnosis.findings.base import Finding, Severity
from ckptfix.diagnosis.findings.config_faults import MissingModel
from ckptfix.diagnosis.findings.duplicates import (
    DoubledModel,
    DoubledStates,
    IdenticalModels,
    NearlyEqualModels,
)
from ckptfix.diagnosis.findings.incomplete import (
    FewerRanks,
    IncompleteCheckpoint,
    LaterModel,
    LostModelFiles,
    LostPosition,
)
from ckptfix.diagnosis.findings.misplaced import ChangedEntry, MisplacedEntry, RenamedState
from ckptfix.diagnosis.target import Target
from ckptfix.diagnosis.unfinished_copies import unmarked
from ckptfix.diagnosis.unresumable import diagnose_unread_shards
from ckptfix.errors import CkptfixError
from ckptfix.storage.files import AnyPath, is_dir, lexists, names_in
from ckptfix.storage.journal import State, is_elsewhere, transactions


def missing_here(target: Target, case: Case) -> tuple[Finding, ...]:
    """Return the findings that the checkpoints next to one show: files that it lacks, and files of
    other entries.
    """
    findings = case.findings
    is_without_model = any(isinstance(one, MissingModel) and not one.model for one in findings)
    if target.only is not None:
        return ()
    marks = tuple(unmarked(case.neighbours))
    if is_without_model:
        return marks
    told = {name for finding in findings for name in _told_of(finding)}
    # Nothing shows whether a damaged model equals another one.
    may_be_doubled = any(
        isinstance(one, DoubledModel | IdenticalModels | NearlyEqualModels) for one in findings
    ) or any(one.role is Role.MODEL and one.problem for one in case.folder.components)
    missing = _lost_parts(case, told, may_be_doubled=may_be_doubled)
    damaged = frozenset(
        finding.path
        for finding in findings
        if finding.severity is Severity.ERROR or isinstance(finding, RenamedState)
    )
    # Their partners were reported with them.
    damaged |= {
        PurePosixPath(finding.exchanged_with)
        for finding in findings
        if isinstance(finding, RenamedState) and finding.exchanged_with
    }
    return (
        *marks,
        *missing,
        *_lost_since_repair(target.root, told),
        *diagnose_exchanged(case, damaged),
        *diagnose_unread_shards(case),
        *_surplus_objects(case),
    )


def _told_of(finding: Finding) -> tuple[str, ...]:
    """Return the files of a finding."""
    missing = finding.missing if isinstance(finding, IncompleteCheckpoint) else ()
    return (str(finding.path), *missing)


def _lost_since_repair(root: AnyPath, told: Collection[str]) -> Iterator[IncompleteCheckpoint]:
    """Yield a finding for each file that a repair left here, as its journal says, and that is gone.

    ``told``: files of other findings.
    """
    left: dict[PurePosixPath, int] = {}
    for info in transactions(root):
        if info.state is State.DONE and not is_elsewhere(root, info):
            left |= dict.fromkeys(info.paths, info.number)
            for path in info.gone:
                left.pop(path, None)
    for path, number in left.items():
        if is_of_checkpoint(path.name) and str(path) not in told and not lexists(root / path):
            yield IncompleteCheckpoint(
                path=path, missing=(str(path),), known_by=f"repair {number} left it in the folder"
            )


def _surplus_objects(case: Case) -> Iterator[MisplacedEntry]:
    """Yield the custom objects that no checkpoint next to this one has: ``load_state`` refuses a
    file too many.

    A script that registers one more has it in all later checkpoints, so that at an end of the run
    it is a note. So it is where they have none: the script may have registered objects in this save
    alone.
    """
    components = case.folder.components
    own = {one.name.index: one.path for one in components if one.role is Role.CUSTOM}
    if not own or case.is_recorded:
        return
    before, after = case.neighbours.saves()
    near = [*before, *after]
    known = {index for sibling in near for role, index in sibling.parts if role is Role.CUSTOM}
    surplus = sorted(own.keys() - known)
    if surplus:
        # Somebody may have renamed theirs.
        every = parts_of(one.path for one in components)
        parts = [part for sibling in near for part in sibling.parts_as_saved(every)]
        known = {index for role, index in parts if role is Role.CUSTOM}
        surplus = sorted(own.keys() - known)
    if near and surplus and known <= own.keys():
        yield (MisplacedEntry if before and after and known else ChangedEntry)(
            path=own[surplus[0]],
            holds="a custom object" if len(own) == 1 else f"one of {len(own)} custom objects",
            expected=f"{len(known) or 'none'}, as in {next_to_it(len(near))}",
            effect="load_state counts these files and fails",
            remedy="move the file out of the folder if the save did not write it",
        )


def _lost_parts(case: Case, known: Collection[str], *, may_be_doubled: bool) -> Iterator[Finding]:
    """Yield the parts that a checkpoint lacks and the checkpoints next to it have.

    ``known``: files that were reported already. ``may_be_doubled``: its script may have prepared an
    object twice; where it did not, the duplicates in earlier checkpoints are not missing here.

    A folder whose save recorded its files is not compared. Between others, one of the nearest on
    either side must have the part: a script that gains or loses an object changes all that follow.
    The newest and the oldest are compared with the two next to them, and both must have it. States
    of a rank count as missing when both neighbours have them: a run may go on with fewer processes.
    If only one neighbour exists, as for the newest checkpoint, they are a note. A folder with
    random states of other ranks than 0 alone lacks all that any checkpoint near it has. Models in
    sub-folders: ``_lost_from_folders``.
    """
    if case.is_recorded:
        return
    folder, neighbours = case.folder.root, case.neighbours
    before, after = neighbours.saves()
    near = (*before, *after)
    if not near:
        return
    # Its duplicates are gone on purpose: they would count as missing as long as its neighbours have
    # theirs.
    taken = taken_by_repairs(folder)
    at_top = [PurePosixPath(name) for name in sorted(taken or ()) if "/" not in name]
    dropped = None if taken is None else parts_of(at_top, NEXT_TO)
    names = [
        path
        for path in _names(folder)
        if parse_folder_name(path.name) is None or not is_empty(folder / path)
    ]
    own = parts_of(names, NEXT_TO)
    # A run that changed to DeepSpeed has its model and optimizer in one folder.
    for path in names:
        if (tag := parse_deepspeed_folder_name(path.name)) is not None:
            own |= {(role, tag.index): path.name for role in (Role.MODEL, Role.OPTIMIZER)}
    # The Trainer resumes from an adapter alone, whatever a script saved into those next to it.
    # save_state writes the weights, too.
    adapters = [path.name for path in names if path.name in weights_names("peft")]
    if adapters and PurePosixPath(TRAINER_STATE) in names:
        own[Role.MODEL, 0] = adapters[0]
    # Each rank writes its own random states, while the main process still writes the rest: a killed
    # save leaves them alone. So does a node with a disk of its own, where no checkpoint of the run
    # has files of rank 0.
    is_of_others = bool(own) and all(role is Role.RNG_STATE and rank for role, rank in own)

    parts = {save.name: save.parts for save in near}

    def is_expected(part: Part) -> bool:
        role, index = part
        if role is Role.RNG_STATE and not all(
            part in parts[save.name] for save in (*before[:1], *after[:1])
        ):
            return False
        if dropped is None:
            return index == 0
        if part in dropped:
            return False
        if is_of_others:
            return True
        if before and after:
            return all(any(part in parts[save.name] for save in side) for side in (before, after))
        return all(part in parts[save.name] for save in near)

    # A neighbour may have shards where another finding names one file.
    reported = {part for part in parts_of(map(PurePosixPath, known)) if part[0] is Role.MODEL}

    def lacking() -> list[Part]:
        having = {part for save in near for part in parts[save.name]}
        return [
            part for part in sorted(having - own.keys() - reported, key=_order) if is_expected(part)
        ]

    if not is_of_others:
        yield from _lost_from_folders(folder, names, before, after, known)
        if not any(role is Role.MODEL for role, _ in own):
            yield from _lost_lora(names, near)
    missing = lacking()
    renamed: dict[str, str] = {}
    if missing:
        # A file that somebody renamed in a checkpoint next to this one is not missing here.
        parts |= {save.name: save.parts_as_saved(own) for save in near}
        missing = lacking()
    if missing:
        with suppress(CkptfixError, OSError):
            own_files = scan_folder(folder, wanted=lambda file: file.role in NAMED_INSIDE)
            renamed = {former: name for name, former in renamed_states(own_files).items()}
    # A script that prepares an object twice after this save did so in it.
    later = {part for save in after for part in save.parts}
    if not may_be_doubled and any(
        number and role in _DOUBLED and (role, number) not in later for role, number in missing
    ):
        parts |= {save.name: without_duplicates(save, neighbours) for save in before}
        missing = lacking()
    examples = {part: name for save in near for part, name in parts[save.name].items()}
    is_first_or_last = (
        not (before and after)
        and any(role is Role.RNG_STATE for role, _ in own)
        and not is_of_others
    )
    unsure = [part for part in missing if is_first_or_last and part[0] is Role.RNG_STATE]
    begun = [part for part in missing if part[0] is Role.DATALOADER]
    sure = [part for part in missing if part not in (*unsure, *begun)]
    hidden = {
        part: under
        for part in sure
        if (
            under := renamed.get(examples[part], "") or under_name_of_trainer(examples[part], names)
        )
    }
    alone = tuple((IncompleteCheckpoint, [part]) for part in hidden)
    for kind, lost in (
        *alone,
        (IncompleteCheckpoint, [part for part in sure if part not in hidden]),
        (FewerRanks, unsure),
        (LostPosition, begun),
    ):
        files = tuple(examples[part] for part in lost if examples[part] not in known)
        is_of_trainer = PurePosixPath(TRAINER_STATE) in names or any(map(_is_of_trainer, files))
        is_alone = is_of_trainer and PurePosixPath(TRAINER_STATE) not in names
        is_lost = TRAINER_STATE not in known and all(
            TRAINER_STATE in save.names.every for save in near
        )
        if is_alone and is_lost and kind is IncompleteCheckpoint and lost[0] not in hidden:
            # A resume fails without it, whatever else is missing.
            files = (TRAINER_STATE, *files)
        if files:
            having = sum(all(part in parts[save.name] for part in lost) for save in near)
            misnamed = renamed.get(files[0])
            proof = f"; {misnamed} was saved under this name" if misnamed else ""
            yield kind(
                path=PurePosixPath(files[0]),
                missing=files,
                known_by=(
                    f"{neighbours_have(having, len(near))} {'it' if len(files) == 1 else 'them'}"
                    f"{proof}"
                ),
                of_trainer=is_of_trainer,
                misnamed=hidden.get(lost[0], ""),
                may_be_dropped=is_first_or_last
                and lost[0] not in hidden
                and not any(_is_shown(part, own, examples) for part in lost),
            )


def _is_of_trainer(file: str) -> bool:
    """Return whether the Trainer alone gives a file this name."""
    name = parse_file_name(PurePosixPath(file).name)
    return name is not None and name.is_of_trainer


_DOUBLED = (Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER)
"""Roles of what a script passes to ``prepare`` together, and may pass twice."""


def without_duplicates(save: Neighbour, neighbours: Neighbours) -> dict[Part, str]:
    """Return the parts of a checkpoint as its script saves them once it prepares each object once:
    later entries move up.

    A checkpoint that cannot be read keeps its parts.
    """
    with suppress(CkptfixError, OSError), save.opened() as root:
        folder = save.scan(*_DOUBLED, Role.RNG_STATE, root=root)
        near = neighbours.siblings.of(save.run.home.parent / save.name)
        case = Case(folder, neighbours=near)
        case.ask((diagnose_models, diagnose_states))
        doubled = case.paths(DoubledModel, DoubledStates)
        left = {
            (role, number)
            for role in _DOUBLED
            for entries in folder.entries(role)
            for number in renumbered(entries, doubled).values()
        }
        gone = {
            (entry.role, entry.name.index)
            for role in _DOUBLED
            for entries in folder.entries(role)
            for entry in entries
        } - left
        return {part: name for part, name in save.parts.items() if part not in gone}
    return save.parts


def _lost_from_folders(
    root: AnyPath,
    names: Iterable[PurePosixPath],
    before: Sequence[Neighbour],
    after: Sequence[Neighbour],
    known: Collection[str],
) -> Iterator[Finding]:
    """Yield the files of models in sub-folders that a checkpoint lacks, and that all those next to
    it have.

    Hooks of diffusers' scripts save ``unet/`` and ``unet_ema/`` so. A folder that exists without
    its weights or its config was cut. One that is missing in the newest checkpoint may be of a
    model that the script no longer saves, in the oldest of one that it saves since. Pipelines that
    a script saves now and then show nothing.
    """
    own = names_of(path.name for path in names)
    near = [*before, *after]
    is_of_trainer = PurePosixPath(TRAINER_STATE) in names
    if any(save.names.is_pipeline and not own.is_pipeline for save in near):
        return
    is_newest, is_oldest = not after, not before
    for below in sorted(frozenset.intersection(*(save.names.folders for save in near))):
        if any(name.startswith(f"{below}/") for name in known):
            continue
        is_there = is_dir(root / below)
        files = frozenset(path.name for path in _names(root / below)) if is_there else frozenset()
        weights = bool(model_files(files))
        # Most folders end here: those next to them are not listed.
        is_complete_or_other = files and weights is not CONFIGS.isdisjoint(files)
        if is_complete_or_other and not (_is_too_deep(root / below, files)):
            continue
        models = [save.model_in(below) for save in near]
        if not all(models):
            continue
        lost = frozenset.intersection(*models) & CONFIGS - files
        if not weights:
            lost |= models[0] - CONFIGS
        if not lost:
            continue
        is_needed = is_there or _is_needed(root, below, own)
        kind = LaterModel if is_oldest and not (is_needed or is_newest) else LostModelFiles
        yield kind(
            path=PurePosixPath(below, min(lost)),
            missing=tuple(f"{below}/{name}" for name in sorted(lost)),
            known_by=(
                f"{neighbours_have(len(near), len(near))} {'it' if len(lost) == 1 else 'them'}"
            ),
            of_trainer=is_of_trainer,
            may_be_dropped=is_newest and not is_needed,
        )


def _is_too_deep(folder: AnyPath, names: Collection[str]) -> bool:
    """Return whether a folder has a model in a folder of another name inside, and none of its own.

    One of the same name has a finding of its own.
    """
    return not model_files(names) and any(
        model_files(path.name for path in _names(folder / name))
        for name in names
        if name != folder.name and "." not in name
    )


_OF_LORA = tuple(f"{LORA}{kind}" for kind in WEIGHT_KINDS)


def _lost_lora(
    names: Iterable[PurePosixPath], near: Sequence[Neighbour]
) -> Iterator[IncompleteCheckpoint]:
    """Yield the LoRA weights of diffusers that all checkpoints next to one have, and that are its
    only weights: a load hook opens this name.
    """
    own = {path.name for path in names}
    of_all = frozenset.intersection(*(save.names.every for save in near))
    lost = [name for name in _OF_LORA if name in of_all]
    if not lost or any(name.startswith(f"{LORA}.") for name in own):
        return
    strange = own.difference(*(save.names.every for save in near))
    renamed = [name for name in strange if name.endswith(PurePosixPath(lost[0]).suffix)]
    yield IncompleteCheckpoint(
        path=PurePosixPath(lost[0]),
        missing=(lost[0],),
        known_by=f"{neighbours_have(len(near), len(near))} it",
        misnamed=renamed[0] if len(renamed) == 1 else "",
    )


def _is_needed(root: AnyPath, below: str, own: Names) -> bool:
    """Return whether other files of a checkpoint show that the model of a missing sub-folder was
    saved.

    Its average does, or an optimizer without a model.
    """
    models = {
        name for name in own.folders if model_files(path.name for path in _names(root / name))
    }
    if any(name != without_average(name) == below for name in models):
        return True
    count = sum(name == without_average(name) for name in models)
    roles = Counter(role for role, _ in own.parts)
    is_average = below != without_average(below)
    return not is_average and roles[Role.OPTIMIZER] == count + roles[Role.MODEL] + 1


def without_average(name: str) -> str:
    """Return the name of the folder of the model of which a folder has the average, as diffusers'
    scripts call them.
    """
    return "_".join(word for word in name.split("_") if word != "ema")


def _is_shown(lost: Part, own: Collection[Part], near: Collection[Part]) -> bool:
    """Return whether the other files of a complete save show that it had a part, which checkpoints
    next to it have.

    A later entry of the role shows it, and so does an optimizer without its model, or a model or a
    scheduler without its optimizer. ``save_state`` writes custom objects last, so that a killed
    save lacks them.
    """
    role, index = lost
    have, expected = (Counter(part[0] for part in parts) for parts in (own, near))
    if role is Role.CUSTOM or any(part[0] is role and part[1] > index for part in own):
        return True
    return any(
        have[more] > have[role] and expected[more] <= expected[role]
        for more in _SHOWN_BY.get(role, ())
    )


_SHOWN_BY = {Role.MODEL: (Role.OPTIMIZER,), Role.OPTIMIZER: (Role.MODEL, Role.SCHEDULER)}


def _names(folder: AnyPath) -> list[PurePosixPath]:
    try:
        return [PurePosixPath(name) for name in sorted(names_in(folder))]
    except OSError:
        return []


def _order(part: Part) -> tuple[int, int]:
    return NEXT_TO.index(part[0]), part[1]
