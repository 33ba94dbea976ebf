"""Whether what a save leaves is all there: by the numbers of its ranks, by what belongs together, by its siblings."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from ckptfix.checkpoint.filenames import Role, parse_file_name, parse_folder_name
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.manifest import MANIFEST, Manifest, usable_manifest
from ckptfix.operations.findings import Finding, IncompleteCheckpoint

_NUMBERED = re.compile(r"(.*?)(\d+)", re.DOTALL)
_COMPARED = (Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER, Role.GRAD_SCALER, Role.RNG_STATE, Role.CUSTOM)
"""Roles that every checkpoint of a run has; samplers and dataloaders may rightly be left out of one."""

_FOREIGN = ("config.json", "adapter_config.json", "model_index.json", "trainer_state.json")
"""What lies next to weights that a library exported on purpose, and that nobody takes for a ``save_state``."""

Part = tuple[Role, int]
"""A role and the position of an entry, or the rank of a state of generators."""


def incomplete(
    folder: CheckpointFolder, manifest: Manifest | None, *, has_deepspeed: bool
) -> Iterator[Finding]:
    """Yield what is missing by the other files of a folder alone. What may be on another node is said to be.

    A scheduler that a manifest lists without its optimizer was sealed so: ``migrate`` leaves DeepSpeed's behind.
    """
    parts = _parts(_paths(folder))
    states = (
        one.name for one in folder.components if one.role is Role.RNG_STATE and not one.name.is_of_trainer
    )
    ranks = {name.rank for name in states if name.rank is not None}
    roles = {role for role, _ in parts}
    rest = roles & {Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER}
    if ranks and (rest or 0 in ranks):
        missing = [rank for rank in range(max(ranks)) if rank not in ranks]
        if missing:
            names = tuple(f"random_states_{rank}.pkl" for rank in missing)
            there = f"random_states_{max(ranks)}.pkl"
            yield IncompleteCheckpoint(
                path=PurePosixPath(names[0]), missing=names, known_by=f"{there} is there", by_rank=True
            )
    if Role.SCHEDULER in roles and Role.OPTIMIZER not in roles and not has_deepspeed:
        name = next(name for (role, _), name in parts.items() if role is Role.SCHEDULER)
        lost = name.replace("scheduler", "optimizer")
        if manifest is None or name not in manifest.sha256:
            yield IncompleteCheckpoint(path=PurePosixPath(lost), missing=(lost,), known_by=f"{name} is there")


def unresumable(folder: CheckpointFolder, *, has_deepspeed: bool) -> Iterator[str]:
    """Yield in words what a folder without an error still lacks to resume a run, where nothing tells if it should."""
    roles = {role for role, _ in _parts(_paths(folder))}
    if {Role.MODEL, Role.OPTIMIZER} <= roles and Role.RNG_STATE not in roles and not _is_foreign(folder):
        yield (
            "random states: none is saved here, though save_state always writes them; load_state loads the rest, but "
            "restores neither the random generators nor the step"
        )
    if has_deepspeed or Role.OPTIMIZER in roles:
        return
    if Role.MODEL in roles and roles & {Role.RNG_STATE, Role.SCHEDULER}:
        yield "optimizers: none is saved here; load_state fails for a script that prepares one"
    elif Role.MODEL in roles and not _is_foreign(folder):
        yield "resuming a run: weights alone, not a save_state checkpoint; load_state needs the states of the run, too"
    elif Role.RNG_STATE in roles:
        yield "weights: only states of ranks are here, as on a node whose disk is its own"


def _is_foreign(folder: CheckpointFolder) -> bool:
    return any(path.name in _FOREIGN for path in folder.strays)


def listed(folder: CheckpointFolder, manifest: Manifest | None) -> Iterator[Finding]:
    """Yield what was sealed with the checkpoint and is part of one, and is missing. Of a save, its sizes tell more."""
    if manifest is None:
        return
    sealed = [
        name for name in manifest.sha256 if name not in manifest.files and _parts([PurePosixPath(name)])
    ]
    missing = tuple(name for name in sealed if not os.path.lexists(folder.root / name))
    if missing:
        are = "it" if len(missing) == 1 else "them"
        yield IncompleteCheckpoint(
            path=PurePosixPath(missing[0]), missing=missing, known_by=f"{MANIFEST} lists {are}"
        )


def compared(folder: Path, siblings: Sequence[Path], known: Collection[str]) -> Iterator[Finding]:
    """Yield what a checkpoint lacks that most checkpoints of the same run have. ``known``: files that are told already.

    Siblings lie next to it and are called like it, but for one number. A folder whose save recorded its files is not
    compared. States of a rank count as missing when both neighbours have them: a run may go on with fewer processes.
    """
    name = _NUMBERED.fullmatch(folder.name)
    manifest = usable_manifest(folder)
    if name is None or (manifest is not None and manifest.is_of_a_save):
        return
    numbered = sorted(
        (int(match[2]), one)
        for one in siblings
        if one.parent == folder.parent and (match := _NUMBERED.fullmatch(one.name)) and match[1] == name[1]
    )
    others = {
        number: parts for number, one in numbered if one != folder and _is_save(parts := _parts(_names(one)))
    }
    if not others:
        return
    own, number = _parts(_names(folder)), int(name[2])
    around = [
        others[one]
        for one in (
            max((n for n in others if n < number), default=None),
            min((n for n in others if n > number), default=None),
        )
        if one is not None
    ]
    missing = [
        part
        for part in sorted({part for parts in others.values() for part in parts} - own.keys(), key=_order)
        if _of_most(part, others.values())
        and (part[0] is not Role.RNG_STATE or all(part in parts for parts in around))
    ]
    examples = {part: name for parts in others.values() for part, name in parts.items()}
    names = tuple(examples[part] for part in missing if examples[part] not in known)
    if names:
        having = sum(all(part in parts for part in missing) for parts in others.values())
        yield IncompleteCheckpoint(
            path=PurePosixPath(names[0]),
            missing=names,
            known_by=f"{having} of {len(others)} checkpoints next to it have {'it' if len(names) == 1 else 'them'}",
        )


def _is_save(parts: Collection[Part]) -> bool:
    return any(role is Role.RNG_STATE for role, _ in parts)


def _of_most(part: Part, others: Iterable[Collection[Part]]) -> bool:
    having = [part in parts for parts in others]
    return 2 * sum(having) > len(having)


def _parts(names: Iterable[PurePosixPath]) -> dict[Part, str]:
    """Return the parts of a checkpoint, each with the first file or folder that holds some of it."""
    found: dict[Part, str] = {}
    for path in names:
        name = parse_file_name(path.name)
        if name is not None and name.role in _COMPARED:
            part = (name.role, name.rank if name.rank is not None else name.index)
        elif name is not None and name.role is Role.WEIGHTS_INDEX:
            part = (Role.MODEL, 0)
        elif (folder := parse_folder_name(path.name)) is not None:
            part = (folder.role, folder.index)
        else:
            continue
        found.setdefault(part, path.name)
    return found


def _paths(folder: CheckpointFolder) -> list[PurePosixPath]:
    return [*(component.path for component in folder.components), *folder.subfolders]


def _names(folder: Path) -> list[PurePosixPath]:
    try:
        return [PurePosixPath(name) for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def _order(part: Part) -> tuple[int, int]:
    return _COMPARED.index(part[0]), part[1]
