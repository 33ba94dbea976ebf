"""Diagnosis of a scanned folder. Reads tensor bytes only where two entries agree in keys, dtypes
and shapes.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from msgspec import Struct

from ckptfix.checkpoint.dcp import DcpFolder, numbered_folders
from ckptfix.checkpoint.folder import CheckpointFolder
from ckptfix.checkpoint.load_inputs import (
    adapters_without_config,
    loads_of,
    lora_of_diffusers,
)
from ckptfix.checkpoint.manifest import Manifest
from ckptfix.checkpoint.model_files import ModelFiles
from ckptfix.checkpoint.roles import Role
from ckptfix.checkpoint.trainer_folders import TrainerProgress, trainer_progress
from ckptfix.diagnosis.case import DAMAGED_CONTENT, DAMAGED_HEADERS, Case, Rule, Verdicts
from ckptfix.diagnosis.completeness import diagnose_save
from ckptfix.diagnosis.dataloaders import unjudged_loaders, unjudged_scalers
from ckptfix.diagnosis.dcp_folders import diagnose_dcp_folders, diagnose_items
from ckptfix.diagnosis.empty_optimizers import (
    diagnose_empty_bundles,
    diagnose_empty_optimizers,
    diagnose_uncounted_steps,
)
from ckptfix.diagnosis.equal_entries import (
    Numbered,
    diagnose_gaps,
    diagnose_models,
    diagnose_states,
)
from ckptfix.diagnosis.families import diagnose_families
from ckptfix.diagnosis.file_damage import DeepSpeedState, diagnose_files
from ckptfix.diagnosis.findings.base import Finding, Told
from ckptfix.diagnosis.findings.damaged import CrcMismatch, TrailingBytes
from ckptfix.diagnosis.findings.duplicates import (
    DoubledModel,
    EntryGap,
    IdenticalModels,
    IdenticalStates,
)
from ckptfix.diagnosis.findings.sharded import IndexMismatch, LeftoverIndex, UndecidedIndex
from ckptfix.diagnosis.findings.stored_twice import SecondFamily, StaleFamily
from ckptfix.diagnosis.indexes import diagnose_shards
from ckptfix.diagnosis.left_out import (
    unchecked_bundles,
    unchecked_dcp,
    unchecked_files,
    unchecked_folders,
    unchecked_of_save,
    unchecked_pipeline,
    unknown_files,
    unread_bytes,
    unreadable_files,
)
from ckptfix.diagnosis.loads import JUDGED, diagnose_loads
from ckptfix.diagnosis.optimizer_states import diagnose_optimizers
from ckptfix.diagnosis.optimizer_values import diagnose_optimizer_values, trained_steps
from ckptfix.diagnosis.rank_damage import (
    diagnose_parts,
    diagnose_rank_files,
    diagnose_world_ranks,
    unchecked_parts,
)
from ckptfix.diagnosis.saved_optimizers import SavedOptimizer
from ckptfix.diagnosis.schedules import (
    diagnose_empty_schedulers,
    diagnose_other_schedules,
    diagnose_progress,
    diagnose_schedules,
)
from ckptfix.diagnosis.trainer_completeness import broken_trainer_state
from ckptfix.diagnosis.wrapped_keys import diagnose_names
from ckptfix.diagnosis.wrong_states import (
    diagnose_dead_scalers,
    diagnose_keys,
    diagnose_lora,
    diagnose_lost_steps,
    diagnose_meta_tensors,
    diagnose_placeholders,
    diagnose_renamed,
    diagnose_wrong_folders,
    diagnose_wrong_states,
    unchecked_weights,
    unread_states,
    unread_weights,
)
from ckptfix.storage.comparing import Digests
from ckptfix.storage.files import AnyPath, StorePath
from ckptfix.storage.paths import JOURNAL
from ckptfix.storage.reading import FileIdentity, unchanged


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The findings about a folder, most severe first, and in words the omitted checks.

    ``scanned``: the identity of every file when it was scanned; none of them changed until the end
    of the diagnosis.

    ``unfinished``: files that may not be read, each with its path, the reason, and the command that
    helps.

    ``manifest``: that of the save, None without one. ``trainer``: what ``trainer_state.json``
    records. ``digests``: of the bytes that were read to prove a duplicate, by kept file, for the
    journal. ``links``: the symbolic links of a folder with a file that a repair may drop or move,
    and their targets (``links_below``).
    """

    folder: CheckpointFolder
    scanned: Mapping[PurePosixPath, FileIdentity]
    sharded: tuple[DcpFolder, ...]
    deepspeed: tuple[DeepSpeedState, ...]
    groups: tuple[ModelFiles, ...]
    optimizers: tuple[SavedOptimizer, ...]
    manifest: Manifest | None
    trainer: TrainerProgress
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...]
    unfinished: tuple[str, ...]
    verdicts: Verdicts
    digests: Mapping[PurePosixPath, Digests]
    links: Mapping[PurePosixPath, frozenset[PurePosixPath]]

    def entries(self, role: Role) -> tuple[Sequence[Numbered], ...]:
        """Return the lists of numbered entries of a role: one of each family of files, and one of
        DCP folders.
        """
        folders = numbered_folders(self.sharded, role) if self.sharded else ()
        return (*self.folder.entries(role), *([folders] if folders else []))


def damaged_files(case: Case) -> list[Finding]:
    """Find the damage of each single file, but for what another finding explains."""
    rebuilt = (
        one.path
        for one in case.findings
        if isinstance(one, LeftoverIndex) or (isinstance(one, IndexMismatch) and one.is_fixable)
    )
    return diagnose_files(
        case.folder,
        data=case.data,
        progress=case.progress,
        explained=frozenset(rebuilt),
        left=case.left,
        executor=case.executor,
    )


def of_deepspeed(case: Case) -> Iterator[Finding]:
    """Yield the damage of each checkpoint of DeepSpeed."""
    for state in case.deepspeed:
        yield from state.findings


def judged_optimizers(case: Case) -> Iterator[Finding | str]:
    """Compare the optimizers in files of their own with the weights."""
    yield from diagnose_optimizers(
        case.folder,
        case.sharded,
        case.unreliable,
        case.optimizers,
        has_deepspeed=bool(case.deepspeed),
    )


def judged_bundles(case: Case) -> Iterator[Finding]:
    """Compare the optimizers in files of scripts with the weights next to them."""
    for bundle in case.bundles:
        yield from bundle.findings


def judged_loads(case: Case) -> Iterator[Told]:
    """Judge what each library that loads the folder does with its configs and keys."""

    def count_steps() -> int:
        step = trainer_progress(case.folder.root).step if case.is_file else case.trainer.step
        return trained_steps(case.folder.root, step, case.optimizers)

    has_optimizer = bool(case.every_optimizer)
    loads = [
        *loads_of(
            case.folder,
            case.groups,
            libraries=JUDGED,
            data=case.data,
            has_optimizer=has_optimizer,
            count_steps=count_steps,
        )
    ]
    loads += adapters_without_config(case.folder, case.groups, loads)
    loads += lora_of_diffusers(case.folder, case.groups, has_optimizer=has_optimizer)
    # Those with FSDP, whose weights the Trainer loads in another way, have other names.
    trained = sum(
        len(group)
        for saved in case.optimizers
        for group in saved.groups
        if saved.path.suffix == ".pt"
    )
    yield from diagnose_loads(loads, trained, case.folder.components)


OF_FILES: tuple[Rule, ...] = (
    unreadable_files,
    # An index that will be rebuilt explains why it cannot be parsed.
    diagnose_shards,
    diagnose_parts,
    damaged_files,
)
"""Rules about the bytes of single files, and of the files of one model."""

OF_CONTENTS: tuple[Rule, ...] = (
    # A file that lost bytes is related to another one, never equal.
    diagnose_models,
    diagnose_states,
    diagnose_gaps,
    # The keys of a duplicate are not judged: it goes.
    diagnose_names,
    of_deepspeed,
    diagnose_rank_files,
    diagnose_world_ranks,
    diagnose_lost_steps,
    diagnose_placeholders,
    diagnose_wrong_states,
    diagnose_dead_scalers,
    diagnose_renamed,
    diagnose_meta_tensors,
    diagnose_keys,
    diagnose_lora,
)
"""Rules about what a file holds, by its name and by the files next to it."""

OF_DCP: tuple[Rule, ...] = (diagnose_dcp_folders, diagnose_items, diagnose_wrong_folders)
"""Rules about DCP folders."""

OF_STATES: tuple[Rule, ...] = (
    judged_optimizers,
    judged_bundles,
    diagnose_empty_bundles,
    diagnose_optimizer_values,
    diagnose_schedules,
    diagnose_progress,
    diagnose_empty_optimizers,
    diagnose_uncounted_steps,
    diagnose_empty_schedulers,
    diagnose_other_schedules,
    # After the optimizers: they are compared with intact weights, and both families of a model are.
    diagnose_families,
    broken_trainer_state,
    judged_loads,
    # Last: what is damaged is not missing.
    diagnose_save,
)
"""Rules that compare intact files with each other, and with what a load and a save know of them."""

LEFT_OUT: tuple[Rule, ...] = (
    unchecked_parts,
    unchecked_folders,
    unchecked_dcp,
    unchecked_files,
    unread_bytes,
    unchecked_of_save,
    unknown_files,
    unchecked_bundles,
    unjudged_loaders,
    unjudged_scalers,
    unread_weights,
    unread_states,
    unchecked_weights,
    unchecked_pipeline,
)
"""Rules that tell in words what nothing in a folder shows, or what only a slower check reads."""


def diagnose(case: Case) -> Diagnosis:
    """Find every kind of damage in a scanned folder.

    Raises FileChangedError when a file changed since it was scanned, OSError when it can no longer
    be read.
    """
    scanned = dict(case.scanned())
    with unchanged(case.folder.root, scanned):
        for state in case.deepspeed:
            scanned |= state.scanned
        case.ask(OF_FILES)
        # Bytes behind the end harm no tensor.
        of_bytes = (kind for kind in DAMAGED_CONTENT if kind is not TrailingBytes)
        case.corrupt = case.paths(*of_bytes, CrcMismatch)
        case.ask(OF_CONTENTS)
        if case.sharded:
            case.ask(OF_DCP)
        case.damaged, case.unreliable = case.paths(*DAMAGED_CONTENT), case.paths(*DAMAGED_HEADERS)
        case.ask(OF_STATES)
        case.close()
    told, case.not_checked = case.not_checked, []
    case.ask(LEFT_OUT)
    return Diagnosis(
        folder=case.folder,
        scanned=scanned,
        sharded=case.sharded,
        deepspeed=case.deepspeed,
        groups=case.groups,
        optimizers=case.every_optimizer,
        manifest=case.evidence.manifest,
        trainer=case.trainer,
        findings=tuple(case.findings),
        not_checked=(*case.not_checked, *told),
        unfinished=tuple(case.unreadable),
        verdicts=case.verdicts,
        digests=case.digests,
        links=links_below(case.folder.root) if case.paths(*_OF_ENTRIES) else {},
    )


_OF_ENTRIES = (
    DoubledModel, IdenticalModels, IdenticalStates, EntryGap, StaleFamily, SecondFamily,
    LeftoverIndex, UndecidedIndex,
)  # fmt: skip
"""Findings whose repair drops or moves a file."""


_MAX_HOPS = 40
"""Limit of the links that Linux follows for one path (path_resolution(7)); more count as a loop."""


def links_below(root: AnyPath) -> Mapping[PurePosixPath, frozenset[PurePosixPath]]:
    """Return every symbolic link below a folder, with the places in the folder that it leads to or
    through.

    The journal is left out, as are folders behind links and those that cannot be listed.
    """
    if isinstance(root, StorePath):
        return {}
    real = os.path.realpath(root)
    found: dict[PurePosixPath, frozenset[PurePosixPath]] = {}
    for current, folders, files in os.walk(root):
        if JOURNAL in folders:
            folders.remove(JOURNAL)
        for name in (*folders, *files):
            full = os.path.join(current, name)
            if os.path.islink(full):
                path = PurePosixPath(os.path.relpath(full, root))
                found[path] = frozenset(_inside(real, _places(full)))
    return found


def _inside(real: str, places: Iterator[str]) -> Iterator[PurePosixPath]:
    for place in places:
        if place.startswith(real.rstrip("/") + "/"):
            yield PurePosixPath(os.path.relpath(place, real))


def _places(link: str) -> Iterator[str]:
    """Yield the place of each further link on the way, and the end of it."""
    here = link
    for _ in range(_MAX_HOPS):
        try:
            target = os.path.join(os.path.dirname(here), os.readlink(here)).rstrip("/")
        except OSError:
            return  # not a link: the end of the way, or a missing file
        folder, name = os.path.split(target)
        is_step = name in ("", ".", "..")
        here = os.path.realpath(target) if is_step else os.path.join(os.path.realpath(folder), name)
        yield here
